"""The exported file: what it contains, what it must not contain, and that it computes at every size."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from fused_operators import FUSED
from onnx import TensorProto, helper, numpy_helper
from slow_cases import slow, soak
from small_builds import exported
from torch.onnx._internal.exporter._registration import ONNXRegistry

from effexport.artifact import Artifact
from effexport.base.errors import StageError
from effexport.base.quiet import few_lookups
from effexport.base.spec import OPSETS, BuildSpec
from effexport.export import custom_nodes
from effexport.export.onnx_from_module import onnx_from_module
from effexport.export.onnx_graph import (
    FORBIDDEN_OPS,
    GraphSignature,
    all_nodes,
    check_graph,
    check_portable,
    graph_tensors,
)
from effexport.models.encoder.module import module_from_spec
from effexport.models.variants import ATTENTION_SPECS
from effexport.plugins.ops import DOMAIN, PLUGIN_NAMESPACE
from effexport.proof.inputs import random_inputs
from effexport.proof.module_runs import run_module
from effexport.proof.tolerances import arithmetic_limit, relative_error
from effexport.runners.ort.runner import OrtRunner

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Specs = Callable[..., BuildSpec]
Built = Callable[..., Artifact]
CAUSAL = [name for name, spec in ATTENTION_SPECS.items() if not spec.why_not_causal]
# 1: nothing to attend to but itself; 63 and 50 are not multiples of a chunk (16) or of the landmarks (16)
SEQ_LENS = (1, 7, 50, 63, 64)


def signature_of(spec: BuildSpec) -> GraphSignature:
    return GraphSignature(spec.inputs, spec.outputs, spec.custom_ops)


def worst_error(path: Path, spec: BuildSpec, seq_lens: tuple[int, ...] = SEQ_LENS) -> float:
    """Largest relative error of kept tokens over lengths, batch sizes and padding."""
    module, worst = module_from_spec(spec.model, spec.seed), 0.0
    rng = np.random.default_rng(1)
    with OrtRunner(path) as runner:
        for seq_len in seq_lens:
            for batch, lengths in ((1, None), (3, [seq_len, (seq_len + 1) // 2, 1])):
                inputs = random_inputs(spec, rng, batch, seq_len, lengths)
                (given,) = runner.run(inputs).values()
                (expected,) = run_module(module, spec, inputs).values()
                assert given.shape == expected.shape
                assert given.dtype.name == spec.dtype
                assert np.isfinite(given).all()
                for row, keep in enumerate(inputs["attention_mask"] != 0):
                    worst = max(worst, relative_error(given[row][keep], expected[row][keep])[0])
    return worst


def test_the_file_has_the_signature_of_the_spec(built: Built, variant: str, scope: str) -> None:
    artifact = built(variant, scope)
    spec = artifact.spec
    check_graph(artifact.model_path, signature_of(spec))
    model = onnx.load(str(artifact.model_path))
    assert graph_tensors(model.graph.input) == spec.inputs
    assert graph_tensors(model.graph.output) == spec.outputs
    assert next(o.version for o in model.opset_import if o.domain == "") == spec.opset


def test_every_custom_call_is_one_marked_node_with_a_body(built: Built, variant: str, scope: str) -> None:
    expected = list(Counter(FUSED.get(variant, {})).elements())
    model = onnx.load(str(built(variant, scope).model_path))
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    assert sorted(node.op_type for node in nodes) == sorted(expected)
    for node in nodes:
        (mark,) = [helper.get_attribute_value(a) for a in node.attribute if a.name == PLUGIN_NAMESPACE]
        assert mark == b"effexport"
    assert sorted(f.name for f in model.functions if f.domain == DOMAIN) == sorted(set(expected))


@pytest.mark.parametrize("name", ["nystrom", "lsh"])
def test_every_layer_keeps_its_own_operators(small_spec: Specs, name: str) -> None:
    """The exporter merges equal nodes: what two layers compute of the mask alone must not be a custom operator."""
    spec = small_spec(name, "encoder", layers=2)
    model = onnx.load(exported(spec))
    nodes = Counter(node.op_type for node in model.graph.node if node.domain == DOMAIN)
    assert nodes == Counter(spec.attention.operators(fused=True) * 2)


def test_no_forbidden_node_hides_in_graph_subgraphs_or_bodies(built: Built, variant: str, scope: str) -> None:
    model = onnx.load(str(built(variant, scope).model_path))
    found = {node.op_type for node in all_nodes(model)}
    assert not found & FORBIDDEN_OPS.keys()
    assert not {name for name in found if name.startswith("Random")}
    assert {node.domain for node in all_nodes(model)} <= {"", DOMAIN}


def test_the_file_says_nothing_about_the_machine(built: Built, variant: str, scope: str) -> None:
    data = built(variant, scope).model_path.read_bytes()
    for trace in (b"site-packages", b"Traceback", b".py", str(Path.cwd()).encode(), str(Path.home()).encode() + b"/"):
        assert trace not in data, trace


def test_batch_and_length_are_free_in_the_file(built: Built, variant: str, scope: str) -> None:
    artifact = built(variant, scope)
    longer = (100,) if artifact.spec.model.max_seq_len is None else ()
    limit = arithmetic_limit(artifact.spec)  # no bucket flips in float32 at these sizes, so hashing is held to it too
    assert worst_error(artifact.model_path, artifact.spec, (*SEQ_LENS, *longer)) <= limit.value, limit.reason


@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "linear", "lsh"),
        slow("gla"),
        *(soak(name) for name in CAUSAL if name.startswith("aft-") or name in ("retention", "mamba2")),
    ],
)
def test_causal_layers_export_and_compute_the_same(built: Built, name: str) -> None:
    artifact = built(name, "attention", causal=True)
    assert worst_error(artifact.model_path, artifact.spec) <= arithmetic_limit(artifact.spec).value


def test_a_causal_window_of_several_blocks_exports_and_computes_the_same(built: Built) -> None:
    artifact = built("aft-local", "attention", causal=True, window=32)
    assert worst_error(artifact.model_path, artifact.spec) <= arithmetic_limit(artifact.spec).value


def test_two_lsh_layers_have_a_sort_and_rotations_each(small_spec: Specs) -> None:
    spec = small_spec("lsh", "encoder", layers=2)
    model = onnx.load(exported(spec))
    sorts = [node for node in model.graph.node if node.op_type == "LSHSort"]
    assert [node.name for node in sorts] == [f"blocks.{i}.attention/LSHSort" for i in range(2)]
    assert [node.input[0] for node in sorts] == [f"blocks.{i}.attention.buckets" for i in range(2)]
    assert sorted(function.name for function in model.functions) == ["LSHAttention", "LSHHash", "LSHSort"]
    first, second = rotations_in(model, spec), rotations_in(model, spec, layer=1)
    assert not np.array_equal(first, second)


def rotations_in(model: onnx.ModelProto, spec: BuildSpec, layer: int = 0) -> np.ndarray:
    """The initializer that holds the rotations of a layer, found by its values; the exporter transposes it."""
    module = module_from_spec(spec.model, spec.seed)
    hashes = [m.rotations for m in module.modules() if hasattr(m, "rotations")]
    expected = np.sort(hashes[layer].numpy(), axis=None)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and np.array_equal(np.sort(array, axis=None), expected):
            return array
    raise AssertionError("no float32 initializer holds the rotations")


@pytest.mark.parametrize("fields", [{}, {"precision": "fp16"}], ids=["fp32", "fp16"])
def test_rotations_are_a_float32_initializer_at_every_precision(built: Built, fields: dict[str, str]) -> None:
    artifact = built("lsh", "attention", **fields)
    assert rotations_in(onnx.load(str(artifact.model_path)), artifact.spec).dtype == np.float32


def test_half_precision_keeps_ops_in_float32(small_spec: Specs) -> None:
    spec = small_spec("softmax", "encoder", precision="fp16", fused=False)
    model = onnx.shape_inference.infer_shapes(onnx.load(exported(spec)))
    dtypes = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    softmaxes = [node for node in model.graph.node if node.op_type == "Softmax"]
    assert softmaxes
    assert all(dtypes[node.output[0]] == TensorProto.FLOAT for node in softmaxes)


# Every opset is exported by the soak run. In every run, the ends are, and the default everywhere else; bodies alone run
# in more of them, see test_contract.py.
OPSET_CASES = [
    (name, n) if (name, n) in (("lsh", 18), ("nystrom", 24)) else soak((name, n))
    for name in ("lsh", "nystrom")
    for n in OPSETS
]


@pytest.mark.parametrize(("name", "opset"), OPSET_CASES)
def test_custom_operators_work_at_every_opset(small_spec: Specs, name: str, opset: int) -> None:
    spec = small_spec(name, "attention", opset=opset)
    model = onnx.load(exported(spec))
    assert next(o.version for o in model.opset_import if o.domain == "") == opset
    assert worst_error(exported(spec), spec, (50,)) <= arithmetic_limit(spec).value


# most operators, and the sums that AFT keeps in float32; test_bfloat16.py has the other variants
@pytest.mark.parametrize("name", ["nystrom", "lsh", "aft-local"])
def test_bfloat16_passes_the_checker(small_spec: Specs, name: str) -> None:
    spec = small_spec(name, "attention", precision="bf16")
    model = onnx.load(exported(spec))
    weights = [tensor for tensor in model.graph.initializer if len(tensor.dims) == 2 and 32 in tensor.dims]
    assert any(tensor.data_type == TensorProto.BFLOAT16 for tensor in weights)


def test_weights_go_beside_the_file_on_request(built: Built) -> None:
    artifact = built("aft-simple", "attention", external_data=True)
    assert (artifact.path / "model.onnx.data").stat().st_size >= 4 * 32 * 32 * 4
    assert "model.onnx.data" in artifact.manifest.files
    assert artifact.manifest.parity.passed
    assert artifact.model_path.stat().st_size < built("aft-simple", "attention").model_path.stat().st_size
    assert worst_error(artifact.model_path, artifact.spec) <= arithmetic_limit(artifact.spec).value


def test_weights_go_beside_the_file_above_the_threshold(
    small_spec: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec("aft-simple", "attention")
    module = module_from_spec(spec.model, 0)
    weight_bytes = sum(p.numel() * 4 for p in module.parameters())
    # its dotted name does not lead there: `effexport.export` is a function too
    monkeypatch.setattr(custom_nodes, "EXTERNAL_DATA_THRESHOLD_BYTES", weight_bytes * 2)
    onnx_from_module(module, spec, tmp_path / "inside.onnx")
    monkeypatch.setattr(custom_nodes, "EXTERNAL_DATA_THRESHOLD_BYTES", weight_bytes // 2)
    onnx_from_module(module, spec, tmp_path / "outside.onnx")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["inside.onnx", "outside.onnx", "outside.onnx.data"]


def test_exporting_leaves_the_module_as_it_was(small_spec: Specs, tmp_path: Path) -> None:
    spec = small_spec("aft-simple", "attention", precision="fp16")
    module = module_from_spec(spec.model, 0)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    onnx_from_module(module, spec, tmp_path / "model.onnx")
    after = module.state_dict()
    assert all(after[name].dtype == torch.float32 and torch.equal(after[name], before[name]) for name in before)


def test_two_exports_give_the_same_bytes(small_spec: Specs, tmp_path: Path) -> None:
    spec = small_spec("aft-simple", "attention")
    onnx_from_module(module_from_spec(spec.model, spec.seed), spec, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == exported(spec).read_bytes()


def damage_random(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("RandomNormalLike", ["hidden_states"], ["noise"], name="noise"))


def damage_loop(model: onnx.ModelProto) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go_in"], ["go_out"]), helper.make_node("Identity", ["i"], ["step"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_in", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("go_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
        ],
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "trips"))
    model.graph.node.insert(0, helper.make_node("Loop", ["trips", ""], ["all_steps"], name="steps", body=body))


def damage_topk(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([3841]), "top_k"))
    node = helper.make_node("TopK", ["hidden_states", "top_k"], ["top_values", "top_places"], name="top", axis=1)
    model.graph.node.insert(0, node)


def damage_topk_in_body(model: onnx.ModelProto) -> None:
    body = model.functions[0]
    body.node.append(helper.make_node("TopK", ["buckets", "block_1d"], ["top_values", "top_places"], name="hidden top"))


def damage_random_in_branch(model: onnx.ModelProto) -> None:
    value = helper.make_tensor_value_info("chosen", TensorProto.FLOAT, [2])
    node = helper.make_node("RandomUniform", [], ["chosen"], name="hidden noise", shape=[2])
    branch = helper.make_graph([node], "branch", [], [value])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "flag"))
    choice = helper.make_node("If", ["flag"], ["choice"], then_branch=branch, else_branch=branch)
    model.graph.node.insert(0, choice)


def damage_namespace(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        kept = [a for a in node.attribute if a.name != PLUGIN_NAMESPACE]
        del node.attribute[:]
        node.attribute.extend(kept)


def damage_body(model: onnx.ModelProto) -> None:
    del model.functions[:]


def damage_output_name(model: onnx.ModelProto) -> None:
    old = model.graph.output[0].name
    model.graph.output[0].name = "hidden"
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name == old:
                node.output[i] = "hidden"


def damage_mask_dtype(model: onnx.ModelProto) -> None:
    """A mask of int32, cast back inside, so that the graph stays valid."""
    mask = next(value for value in model.graph.input if value.name == "attention_mask")
    mask.type.tensor_type.elem_type = TensorProto.INT32
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "attention_mask":
                node.input[i] = "mask64"
    model.graph.node.insert(0, helper.make_node("Cast", ["attention_mask"], ["mask64"], to=TensorProto.INT64))


def damage_dims(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 2


def damage_constant_in_body(model: onnx.ModelProto) -> None:
    constant = next(node for node in model.functions[0].node if node.op_type == "Constant")
    constant.attribute[0].CopyFrom(onnx.helper.make_attribute("value_ints", [0]))


def damage_division(model: onnx.ModelProto) -> None:
    """Undo `make_portable`."""
    producers = {name: node for node in model.graph.node for name in node.output}
    division = next(n for n in model.graph.node if n.op_type == "Div" and producers[n.input[0]].op_type == "Sub")
    division.input[0] = producers[division.input[0]].input[0]


def damage_checker(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "from nowhere"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_random, "node 'noise' is a RandomNormalLike: two runs would differ"),
        (damage_loop, "node 'steps' is a Loop"),
        (damage_topk, "node 'top' is a TopK: TensorRT stops at 3840"),
        (damage_topk_in_body, "node 'hidden top' is a TopK"),
        (damage_random_in_branch, "node 'hidden noise' is a RandomUniform"),
        (damage_namespace, "does not carry plugin_namespace"),
        (damage_body, r"function bodies are \[\]; expected \['LSHSort'\]"),
        (damage_output_name, "outputs are hidden float32 .*expected last_hidden_state float32"),
        (damage_mask_dtype, "inputs are .*attention_mask int32.*expected .*attention_mask int64"),
        (damage_dims, r"inputs are hidden_states float32 \[2, .*expected hidden_states float32 \[batch"),
        (damage_checker, "onnx rejects the graph"),
    ],
)
def test_planted_damage_is_found(
    built: Built, tmp_path: Path, damage: Callable[[onnx.ModelProto], None], message: str
) -> None:
    artifact = built("lsh", "attention", fused=False)
    model = onnx.load(str(artifact.model_path))
    damage(model)
    path = tmp_path / "model.onnx"
    onnx.save(model, str(path))
    with pytest.raises(StageError, match=message) as failure:
        check_graph(path, signature_of(artifact.spec))
    assert failure.value.stage == "graph check"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_constant_in_body, r"other tools would misread the graph: the Constant .*; see docs/function_bodies.md"),
        (damage_division, r"other tools would misread the graph: the Div that computes .* rounds integers"),
    ],
)
def test_a_construct_that_other_tools_misread_is_found(
    built: Built, tmp_path: Path, damage: Callable[[onnx.ModelProto], None], message: str
) -> None:
    artifact = built("lsh", "attention", fused=False)
    check_portable(artifact.model_path)
    model = onnx.load(str(artifact.model_path))
    damage(model)
    onnx.save(model, str(tmp_path / "model.onnx"))
    with pytest.raises(StageError, match=message):
        check_portable(tmp_path / "model.onnx")


def test_a_declared_operator_that_is_not_there_is_found(built: Built) -> None:
    artifact = built("aft-full", "attention")
    spec = artifact.spec
    with pytest.raises(StageError, match=r"custom operators are \{\}; declared are \{'LSHSort': 1\}"):
        check_graph(artifact.model_path, GraphSignature(spec.inputs, spec.outputs, {"LSHSort": 1}))


def test_translations_of_torch_onnx_are_collected_once_and_those_of_one_export_stay_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collect, collected = ONNXRegistry.from_torchlib, []
    whole = collect(opset_version=18)
    counted = classmethod(lambda cls, opset_version: collected.append(opset_version) or collect(opset_version))
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", counted)
    with few_lookups():
        first, second = (ONNXRegistry().from_torchlib(opset_version=18) for _ in range(2))
        first.register_op(torch.ops.aten.relu.default, lambda x: x)
        first.register_op(torch.sym_sqrt, lambda x: x)
        third, of_another_opset = (ONNXRegistry.from_torchlib(opset_version=opset) for opset in (18, 20))
    for registry in (second, third):
        assert registry.functions.keys() == whole.functions.keys()
        assert len(registry.get_decomps(torch.ops.aten.relu.default)) == 1
    assert of_another_opset.opset_version == 20
    assert collected == [18, 20]
    assert ONNXRegistry.__dict__["from_torchlib"] is counted


def test_threads_export_one_after_the_other_and_leave_pytorch_as_it_was() -> None:
    original, entered = ONNXRegistry.__dict__["from_torchlib"], threading.Event()

    def export() -> None:
        with few_lookups():
            entered.set()

    thread = threading.Thread(target=export)
    with few_lookups():
        thread.start()
        assert not entered.wait(0.2)
    thread.join()
    assert entered.is_set()
    assert ONNXRegistry.__dict__["from_torchlib"] is original


def test_an_exporter_failure_names_its_stage(small_spec: Specs, tmp_path: Path) -> None:
    class Unexportable(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return hidden_states * int(attention_mask.sum().item() > len(str(hidden_states)))

    with pytest.raises(StageError, match=r"export: torch\.onnx could not export the module"):
        onnx_from_module(Unexportable(), small_spec("softmax", "attention"), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
