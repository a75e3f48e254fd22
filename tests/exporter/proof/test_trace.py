"""The trace: healthy models agree value by value, and a fault inside a graph is found at the node that has it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from slow_cases import slow_after
from small_specs import BUILT_VARIANTS, spec_of

from effexport.artifact import Artifact, open_artifact
from effexport.base.errors import Unavailable
from effexport.export.module_source import module_from_seed
from effexport.proof import trace as tracing
from effexport.proof.cases import Case, load_reference
from effexport.proof.check import CaseLabel, Trace, TracedValue
from effexport.proof.tolerances import value_error
from effexport.proof.trace import (
    TracedModule,
    ValueLimits,
    batches,
    module_of_node,
    trace_from_model,
    trace_if_possible,
)
from effexport.report.wording import trace_text
from effexport.runners.options import RunOptions

# one worker, so that every module is traced once
pytestmark = [pytest.mark.requires("torch", "onnx", "ort"), pytest.mark.xdist_group("trace")]
Built = Callable[..., Artifact]
# Of the values of a graph, those that PyTorch computes too; the rest are steps inside one of its operations.
LEAST_SHARE = 0.65
FAULTY_ENCODERS = ("softmax", "nystrom", "lsh", "aft-conv")


@pytest.fixture(scope="session")
def traced(built: Built) -> Callable[..., TracedModule]:
    """(artifact) → its module, exported again once."""
    known: dict[Path, TracedModule] = {}

    def of(artifact: Artifact) -> TracedModule:
        if artifact.path not in known:
            known[artifact.path] = TracedModule(module_from_seed(artifact.spec), artifact.spec)
        return known[artifact.path]

    return of


def case_named(artifact: Artifact, name: str = "padded batch") -> Case:
    return next(case for case in load_reference(artifact.reference_path) if case.name == name)


def check_healthy(artifact: Artifact, module: TracedModule) -> None:
    for case in load_reference(artifact.reference_path):
        trace = trace_from_model(artifact.model_path, artifact.model_path, module, case)
        assert trace.first_divergence is None, trace_text(trace)
        assert "all agree" in trace_text(trace)
        assert len(trace.values) == trace.pairable >= LEAST_SHARE * (trace.pairable + trace.not_paired)
        # the outputs are among them
        assert {tensor.name for tensor in artifact.spec.outputs} <= {value.name for value in trace.values}


OTHERS = [name for name in BUILT_VARIANTS if name not in ("nystrom", "lsh", "aft-local")]


@pytest.mark.parametrize(
    "name",
    [
        *("nystrom", "lsh"),
        *slow_after(0, ["aft-local"]),
        *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS),
    ],
)
def test_every_value_of_a_healthy_encoder_agrees_in_every_case(
    built: Built, traced: Callable[..., TracedModule], name: str
) -> None:
    artifact = built(name, "encoder")
    check_healthy(artifact, traced(artifact))


def test_every_value_of_a_healthy_attention_layer_agrees(built: Built, traced: Callable[..., TracedModule]) -> None:
    artifact = built("lsh", "attention")
    check_healthy(artifact, traced(artifact))


@pytest.mark.soak
def test_every_value_of_every_attention_layer_agrees(
    built: Built, traced: Callable[..., TracedModule], variant: str
) -> None:
    # a fused layer alone is few nodes, most of them about its mask; encoders are traced fused
    artifact = built(variant, "attention", fused=False)
    check_healthy(artifact, traced(artifact))


@pytest.mark.parametrize("name", ["softmax", pytest.param("lsh", marks=pytest.mark.soak)])
def test_in_float16_values_agree_as_far_as_pytorch_rounds_them(
    built: Built, traced: Callable[..., TracedModule], name: str
) -> None:
    artifact = built(name, "encoder", precision="fp16")
    check_healthy(artifact, traced(artifact))


@pytest.mark.soak
def test_in_float16_every_variant_agrees(built: Built, traced: Callable[..., TracedModule], variant: str) -> None:
    artifact = built(variant, "encoder", precision="fp16")
    check_healthy(artifact, traced(artifact))


def node_of(model: onnx.ModelProto, op_type: str, module: str, nth: int = 0) -> onnx.NodeProto:
    return [n for n in model.graph.node if n.op_type == op_type and module_of_node(n) == module][nth]


def scale_weight(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """One initializer a node reads, 1 % off in half of its elements."""
    tensor = next(t for t in model.graph.initializer if t.name in node.input and np.prod(t.dims) > 1)
    array = numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[::2] *= array.dtype.type(1.01)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def drop(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """The node passes on its first input."""
    node.op_type = "Identity"
    del node.input[1:], node.attribute[:]


def swap_inputs(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    first, second = node.input
    node.input[:] = [second, first]


def other_epsilon(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.name == "epsilon":
            attribute.f = 0.1


def other_axis(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("axis", -2))


def hide_nothing(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Make Where take the logits for hidden keys too."""
    _, logits, _ = node.input
    node.input[2] = logits


def fewer_iterations(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.name == "iterations":
            attribute.i -= 3


def swap_outputs(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    first, second = node.output
    node.output[:] = [second, first]


ATTENTION = "blocks.0.attention"
Fault = Callable[[onnx.ModelProto, onnx.NodeProto], None]


@pytest.mark.parametrize(
    ("name", "op_type", "module", "nth", "fault"),
    [
        ("softmax", "Softmax", ATTENTION, 0, drop),
        ("softmax", "LayerNormalization", "blocks.0.attention_norm", 0, other_epsilon),
        ("softmax", "LayerNormalization", "final_norm", 0, scale_weight),
        ("softmax", "MatMul", f"{ATTENTION}.key", 0, scale_weight),
        ("softmax", "Gather", "token_embedding", 0, scale_weight),
        ("softmax", "Where", ATTENTION, 0, hide_nothing),
        ("nystrom", "IterativePinv", ATTENTION, 0, fewer_iterations),
        ("nystrom", "Gelu", "blocks.0.feed_forward", 0, drop),
        ("nystrom", "Conv", f"{ATTENTION}.conv", 0, scale_weight),
        ("lsh", "MatMul", f"{ATTENTION}.hash", 0, scale_weight),
        ("lsh", "Sub", ATTENTION, -1, swap_inputs),
        ("lsh", "Log", ATTENTION, 0, drop),
        ("lsh", "LSHSort", ATTENTION, 0, swap_outputs),
        # more of the same kinds of nodes
        pytest.param("softmax", "Softmax", ATTENTION, 0, other_axis, marks=pytest.mark.soak),
        pytest.param(
            "softmax", "LayerNormalization", "blocks.0.feed_forward_norm", 0, scale_weight, marks=pytest.mark.soak
        ),
        pytest.param("nystrom", "Softmax", ATTENTION, 1, drop, marks=pytest.mark.soak),
        pytest.param("lsh", "MatMul", f"{ATTENTION}.value", 0, scale_weight, marks=pytest.mark.soak),
        pytest.param("aft-conv", "Div", ATTENTION, -1, swap_inputs, marks=pytest.mark.soak),
        pytest.param("aft-conv", "Exp", ATTENTION, 0, drop, marks=pytest.mark.soak),
        pytest.param("aft-conv", "MatMul", f"{ATTENTION}.out", 0, scale_weight, marks=pytest.mark.soak),
    ],
)
def test_a_fault_is_found_at_its_node(
    built: Built,
    traced: Callable[..., TracedModule],
    tmp_path: Path,
    name: str,
    op_type: str,
    module: str,
    nth: int,
    fault: Fault,
) -> None:
    artifact = built(name, "encoder", fused=False)
    model = onnx.load(str(artifact.model_path))
    node = node_of(model, op_type, module, nth)
    fault(model, node)
    value = node.output[0]
    onnx.save(model, str(tmp_path / "model.onnx"))
    trace = trace_from_model(tmp_path / "model.onnx", artifact.model_path, traced(artifact), case_named(artifact))
    first = trace.first_divergence
    assert first is not None
    assert first.module == module
    assert value in [suspect.value for suspect in trace.suspects], trace_text(trace)
    if value in traced(artifact).origins:
        assert first.name == value, trace_text(trace)
        assert f"value `{value}` of {module}" in trace_text(trace)
    # what is wrong is found again in the report, and layers before it are not blamed
    layers = {layer["layer"]: layer for layer in trace.layers()}
    assert not layers[module]["error"] <= layers[module]["limit"]
    agreeing = trace.values[: trace.values.index(first)]
    assert not any(value.diverges for value in agreeing)


def test_a_sentence_names_the_weights_and_the_steps_that_may_be_wrong(
    built: Built, traced: Callable[..., TracedModule], tmp_path: Path
) -> None:
    artifact = built("softmax", "encoder", fused=False)
    model = onnx.load(str(artifact.model_path))
    scale_weight(model, node_of(model, "MatMul", "blocks.0.feed_forward.up"))
    onnx.save(model, str(tmp_path / "model.onnx"))
    text = trace_text(
        trace_from_model(tmp_path / "model.onnx", artifact.model_path, traced(artifact), case_named(artifact))
    )
    assert "of blocks.0.feed_forward.up (Add)" in text
    assert "enter these nodes, one of which is wrong: MatMul" in text
    assert "or the weights" in text
    assert "values before it agree" in text


def test_one_value_that_agrees_is_said_in_the_singular() -> None:
    values = tuple(TracedValue(name, "", "Add", error, 1.0) for name, error in (("a", 0.0), ("b", 2.0)))
    text = trace_text(Trace("model.onnx", CaseLabel("short"), values, pairable=2, not_paired=0))
    assert "; the value before it agrees; " in text


def test_a_node_that_makes_nan_diverges(built: Built, traced: Callable[..., TracedModule], tmp_path: Path) -> None:
    artifact = built("softmax", "encoder", fused=False)
    model = onnx.load(str(artifact.model_path))
    node = node_of(model, "Softmax", ATTENTION)
    value = node.output[0]
    del node.attribute[:]
    node.op_type = "Log"
    onnx.save(model, str(tmp_path / "model.onnx"))
    trace = trace_from_model(
        tmp_path / "model.onnx", artifact.model_path, traced(artifact), case_named(artifact, "export")
    )
    assert trace.first_divergence is not None
    assert trace.first_divergence.name == value
    assert not np.isfinite(trace.first_divergence.error)


def test_weights_beside_the_file_are_found(built: Built, traced: Callable[..., TracedModule]) -> None:
    artifact = built("softmax", "encoder", external_data=True, fused=False)
    assert (artifact.path / "model.onnx.data").is_file()
    check_healthy(artifact, traced(artifact))


@pytest.mark.parametrize("name", ["softmax", "nystrom"])
def test_a_file_that_onnxruntime_has_optimised_says_how_many_values_have_survived(
    built: Built, traced: Callable[..., TracedModule], tmp_path: Path, name: str
) -> None:
    artifact = built(name, "encoder", fused=False)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(str(artifact.model_path), options, providers=["CPUExecutionProvider"])
    trace = trace_from_model(tmp_path / "optimised.onnx", artifact.model_path, traced(artifact), case_named(artifact))
    assert trace.first_divergence is None, trace_text(trace)
    assert trace.pairable / 2 < len(trace.values) <= trace.pairable
    assert f"{len(trace.values)} of {trace.pairable} values were compared" in trace_text(trace)


def test_a_file_whose_values_have_other_names_is_said_to_have_none(
    built: Built, traced: Callable[..., TracedModule], tmp_path: Path
) -> None:
    artifact = built("softmax", "encoder", fused=False)
    model = onnx.load(str(artifact.model_path))
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{n}_" if n in traced(artifact).origins else n for n in names]
    model.graph.output[0].name += "_"
    onnx.save(model, str(tmp_path / "model.onnx"))
    trace = trace_from_model(tmp_path / "model.onnx", artifact.model_path, traced(artifact), case_named(artifact))
    assert trace.values == ()
    assert "none of the" in trace_text(trace)


@pytest.mark.slow
def test_small_batches_of_values_give_the_same_trace(
    built: Built, traced: Callable[..., TracedModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = built("lsh", "encoder", fused=False)
    whole = trace_from_model(artifact.model_path, artifact.model_path, traced(artifact), case_named(artifact))
    monkeypatch.setattr(tracing, "BATCH_BYTES", 400_000)
    parts = trace_from_model(artifact.model_path, artifact.model_path, traced(artifact), case_named(artifact))
    assert [(v.name, v.error) for v in whole.values] == [(v.name, v.error) for v in parts.values]


def test_a_batch_holds_one_value_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "BATCH_BYTES", 10)
    assert list(batches("abcd", {"a": 4, "b": 6, "c": 99, "d": 1})) == [["a", "b"], ["c"], ["d"]]
    assert list(batches((), {})) == []


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([[1.0, 1.0]], [[1.0, 1.0]], 0.0),
        ([[1.1, 1.0]], [[1.0, 1.0]], 0.1),
        # a row of its own scale
        ([[1.0, 1.0], [110.0, 100.0]], [[1.0, 1.0], [100.0, 100.0]], 0.1),
        # the constant of a masked logit does not count for the scale
        ([[1.1, -1e9]], [[1.0, -1e9]], 0.1),
        ([[1.0, -1e9]], [[1.0, -5e8]], 1.0),
        ([[1.0, -np.inf]], [[1.0, -np.inf]], 0.0),
        ([[1.0, np.nan]], [[1.0, np.nan]], 0.0),
        ([[1.0, np.nan]], [[1.0, 1.0]], np.nan),
        ([[0.0, 0.0]], [[0.0, 0.0]], 0.0),
        ([[1.0, 1.0]], [[1.0], [1.0]], np.inf),
        (1.0, 1.0, 0.0),
        (np.zeros((0, 3)), np.zeros((0, 3)), 0.0),
    ],
)
def test_the_error_of_a_value(actual: object, expected: object, error: float) -> None:
    given = value_error(np.asarray(actual, np.float32), np.asarray(expected, np.float32))
    np.testing.assert_allclose(given, error, rtol=1e-5)


def test_of_integers_and_booleans_the_share_that_differs_is_the_error() -> None:
    assert value_error(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.25
    assert value_error(np.array([True, False]), np.array([True, False])) == 0.0


def test_a_difference_may_be_off_by_what_float32_has_left_of_its_operands() -> None:
    """62.1 − 62 is known to half a unit of 62, times the factor for two sides that round differently: 3e-5, or 3e-4 of
    0.1. Beyond that it diverges, and its exponential and copies of it are judged by the same number."""
    nodes = {
        "difference": helper.make_node("Sub", ["a", "b"], ["difference"]),
        "weight": helper.make_node("Exp", ["difference"], ["weight"]),
        "copy": helper.make_node("Expand", ["weight", "shape"], ["copy"]),
    }
    b = np.full((1, 4, 8), 62.0, np.float32)
    values = {"a": b + np.float32(0.1), "b": b, "difference": np.full_like(b, 0.1), "weight": np.exp(b - b + 0.1)}
    values["copy"] = values["weight"]

    def judged(error: float, known: dict[str, onnx.NodeProto]) -> dict[str, bool]:
        judge = ValueLimits(spec_of("aft-conv", "attention"), Case("any", {}, {}), (), known)
        for name, value in values.items():
            judge(name, value + np.float32(error) if name in known else value, value, None)
        return {name: judge.results[name][0] <= judge.results[name][1] for name in nodes}

    assert judged(1e-5, nodes) == dict.fromkeys(nodes, True)
    assert judged(1e-4, nodes) == dict.fromkeys(nodes, False)
    # with operands that nobody knows, the limit of the outputs holds
    alone = {"difference": helper.make_node("Sub", ["c", "d"], ["difference"])}
    assert judged(1e-5, alone)["difference"] is False


def test_what_cannot_be_traced_is_a_sentence(
    built: Built, copied: Callable[..., Path], rewrite_manifest: Callable[..., None]
) -> None:
    artifact = built("softmax", "attention", fused=False)
    case = case_named(artifact)
    found = trace_if_possible(artifact.model_path, artifact, None, case, RunOptions(runtime="ort-trt"))
    assert str(found) == "TensorRT keeps no intermediate values; trace the file with --runtime ort"
    folder = copied("softmax", "attention", fused=False)
    rewrite_manifest(folder, weights_from="trained.safetensors")
    other = open_artifact(folder)
    found = trace_if_possible(other.model_path, other, None, case, RunOptions())
    assert isinstance(found, Unavailable)
    assert "the weights came from trained.safetensors" in found.reason


LONG = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from effexport.artifact import open_artifact
from effexport.proof import trace as tracing
from effexport.proof.trace import trace_from_model
from effexport.export.module_source import module_from_seed
from effexport.proof.cases import Case
from effexport.proof.trace import TracedModule

torch.set_num_threads(1)
tracing.BATCH_BYTES = 16 * 2**20
artifact = open_artifact(Path(sys.argv[1]))
module = TracedModule(module_from_seed(artifact.spec), artifact.spec)
hidden = np.random.default_rng(0).standard_normal((2, 8192, 128), dtype=np.float32)
case = Case("long", {"hidden_states": hidden, "attention_mask": np.ones((2, 8192), np.int64)}, {})
sizes = []
module.run(case.inputs, lambda name, array: sizes.append(array.nbytes))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
trace = trace_from_model(artifact.model_path, artifact.model_path, module, case)
assert trace.first_divergence is None
print(sum(sizes), peak() - before, tracing.BATCH_BYTES, max(sizes))
"""


@pytest.mark.soak
def test_memory_is_bounded_at_8192_tokens(built: Built) -> None:
    """Never all values of one side. At once there are three batches, the values of one run in the runtime, their copies
    as arrays, and PyTorch's; and what the module and the runtime need to compute them, which is less than 16 values."""
    artifact = built("nystrom", "attention", dim=128, num_landmarks=64, seq_len=256, fused=False)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LONG, str(artifact.path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    values, grown, batch, largest = map(int, done.stdout.split())
    assert values > 3 * batch + 16 * largest
    assert grown < 3 * batch + 16 * largest, (values, grown, batch, largest)


def trace_of_cli(text: str) -> str:
    return next(line for line in text.splitlines() if "divergence" in line or "no trace" in line)


def test_verify_traces_a_failure_by_itself_and_a_healthy_model_when_asked(
    cli: Callable[..., object], built: Built, tmp_path: Path
) -> None:
    artifact = built("softmax", "attention", fused=False)
    quiet = cli("verify", artifact.path, "--reference", "golden", "--json")
    assert quiet.json["trace"] is None
    asked = cli("verify", artifact.path, "--reference", "golden", "--trace", "--json")
    assert asked.code == 0
    assert asked.json["trace"]["first_divergence"] is None
    assert asked.json["trace"]["case"].startswith("padded batch")
    assert "no divergence: " in asked.err
    model = onnx.load(str(artifact.model_path))
    node = node_of(model, "Softmax", "")
    other_axis(model, node)
    onnx.save(model, str(tmp_path / "bad.onnx"))
    failed = cli("verify", artifact.path, "--model", tmp_path / "bad.onnx", "--reference", "golden", "--json")
    assert failed.code == 1
    assert failed.json["trace"]["first_divergence"]["name"] == node.output[0]
    assert failed.json["trace"]["layers"][0].keys() == {"layer", "op_type", "error", "limit", "value"}
    assert f"first divergence: value `{node.output[0]}` of the model itself (Softmax)" in trace_of_cli(failed.err)


def test_a_trace_without_values_has_no_layers() -> None:
    assert Trace("model.onnx", "case", (), 3, 4).layers() == []
