"""Limits of TensorRT: violations are found anywhere in a graph, and no graph of ours has any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from slow_cases import some_variants
from small_builds import exported, module_from_path
from small_specs import BUILT_VARIANTS
from transformers_models import saved

from effexport.artifact import Artifact
from effexport.base.dtypes import DTYPE_OF_PRECISION
from effexport.base.errors import UserError
from effexport.base.spec import BuildSpec, build_spec_from_checkpoint
from effexport.export.onnx_from_module import onnx_from_module
from effexport.export.onnx_graph import FORBIDDEN_OPS
from effexport.models.variants import ATTENTION_SPECS
from effexport.plugins.ops import OPS
from effexport.tensorrt.preparation import check_limits, limit_problems

pytestmark = pytest.mark.requires("torch", "onnx")
Specs = Callable[..., BuildSpec]
FUNCTION = '<domain: "effexport", opset_import: ["" : 20]>'


def model_of(
    body: str, *functions: str, opset: int = 20, head: str = "float[b, 4] x", out: str = "float[b, 4] y"
) -> Any:
    """A model with the input x, the output y and these nodes and initialisers."""
    text = f'<ir_version: 10, opset_import: ["" : {opset}, "effexport" : 1, "other" : 1]> g ({head}) => ({out}) {body}'
    return onnx.parser.parse_model("\n".join((text, *functions)))


def only_problem(model: onnx.ModelProto) -> str:
    (problem,) = limit_problems(model)
    return str(problem)


def in_graph(nodes: str) -> onnx.ModelProto:
    return model_of(f"{{ {nodes} }}")


def in_function(nodes: str) -> onnx.ModelProto:
    return model_of("{ y = effexport.F (x) }", f"{FUNCTION} F (x) => (y) {{ {nodes} }}")


def in_branch(nodes: str) -> onnx.ModelProto:
    branches = (
        f"then_branch = t () => (float[b, 4] y) {{ {nodes} }}, else_branch = e () => (float[b, 4] n) {{ n = Neg (x) }}"
    )
    return model_of(f"{{ z = If (q) <{branches}> }}", head="float[b, 4] x, bool q", out="float[b, 4] z")


# nodes that compute y from x, and the problem reported for the first of them
FAULTS: dict[str, tuple[str, str]] = {
    "ellipsis": (
        'y = Einsum <equation = "...i,...i->...i"> (x, x)',
        r"\(Einsum\) has an ellipsis in its equation '...i,...i->...i', which TensorRT's Einsum lacks",
    ),
    "upper case": (
        'y = Einsum <equation = "AB->AB"> (x)',
        r"has other than lower-case letters in its equation 'AB->AB'",
    ),
    "double": (
        "d = Cast <to = 11> (x) y = Cast <to = 1> (d)",
        r"\(Cast\) is double, .*: cast it to float in the model",
    ),
    "uint16": (
        "d = Cast <to = 4> (x) y = Cast <to = 1> (d)",
        r"\(Cast\) is of type uint16, which TensorRT does not support",
    ),
    "constant": (
        "d = Constant <value = double[1] {0.1}> () f = Cast <to = 1> (d) y = Mul (x, f)",
        r"\(Constant\) is double",
    ),
    "constant of a shape": (
        "s = Shape (x) d = ConstantOfShape <value = double[1] {0.1}> (s) f = Cast <to = 1> (d) y = Mul (x, f)",
        r"\(ConstantOfShape\) is double",
    ),
    "strings": ('s = Constant <value_string = "a"> () y = Identity (x)', r"\(Constant\) has a value_string"),
    "Unique": ("y = Unique (x)", r"\(Unique\) sorts, which TensorRT has no layer for"),
    "foreign": (
        "y = other.Thing (x)",
        r"\(Thing\) is of the domain other and has neither a function body nor a plugin",
    ),
    "foreign name": ("y = other.Exp (x)", r"\(Exp\) .* TensorRT ignores domains and runs the standard Exp instead"),
}


@pytest.mark.parametrize("place", [in_graph, in_function, in_branch])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_wherever_it_is(fault: str, place: Callable[[str], Any]) -> None:
    nodes, message = FAULTS[fault]
    with pytest.raises(UserError, match=f"TensorRT cannot run this model: .*{message}"):
        check_limits(place(nodes))
    assert len(limit_problems(place(nodes))) == 1


@pytest.mark.parametrize("op", FORBIDDEN_OPS)
def test_what_no_exported_graph_may_hold_is_refused_here_too(op: str) -> None:
    node = onnx.helper.make_node(op, ["x"], ["y"], name="culprit")
    model = in_graph("y = Neg (x)")
    model.graph.node[0].CopyFrom(node)
    assert FORBIDDEN_OPS[op] in only_problem(model)
    assert only_problem(model).startswith(f"node 'culprit' ({op}) is not allowed, because ")


@pytest.mark.parametrize(("opset", "allowed"), [(8, False), (9, True), (20, True), (25, True), (26, False)])
def test_opsets_that_tensorrt_does_not_read_are_refused(opset: int, allowed: bool) -> None:
    problems = limit_problems(model_of("{ y = Neg (x) }", opset=opset))
    assert [str(p) for p in problems] == [] or not allowed
    if not allowed:
        assert (
            f"the model is of opset {opset}; TensorRT reads 9 to 25, and reads others as if they were one of these"
            in str(problems[0])
        )


def test_the_opset_of_a_function_counts_too() -> None:
    model = model_of(
        "{ y = effexport.F (x) }", '<domain: "effexport", opset_import: ["" : 30]> F (x) => (y) { y = Neg (x) }'
    )
    assert only_problem(model).startswith("the function F is of opset 30")


@pytest.mark.parametrize("dtype", ["double", "uint16", "string", "complex64"])
def test_inputs_outputs_and_weights_of_other_types_are_refused(dtype: str) -> None:
    model = model_of("{ y = Identity (x) }", head=f"{dtype}[b, 4] x", out=f"{dtype}[b, 4] y")
    assert [str(problem).split(" is ")[0] for problem in limit_problems(model)] == ["the input 'x'", "the output 'y'"]


def test_double_weights_are_refused_by_name() -> None:
    model = in_graph("y = Neg (x)")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(2), "w"))
    assert "the weight 'w' is double, which TensorRT silently converts to float" in only_problem(model)


@pytest.mark.parametrize(
    "dtype", ["float", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool", "float8e4m3fn"]
)
def test_types_that_tensorrt_has_are_let_through(dtype: str) -> None:
    assert limit_problems(model_of("{ y = Identity (x) }", head=f"{dtype}[b, 4] x", out=f"{dtype}[b, 4] y")) == []


def test_inputs_that_are_no_tensors_are_refused() -> None:
    model = model_of("{ y = SequenceAt (x, i) }", head="seq(float[4]) x, int64 i", out="float[4] y")
    assert "the input 'x' is a sequence; TensorRT supports tensors only" in only_problem(model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("y = effexport.F (x)", r"\(F\) gives 1 of the 2 inputs of its function; TensorRT has no optional inputs"),
        ("y = effexport.F (x, )", "gives 1 of the 2 inputs"),
        (
            "p = Neg (x) q = Exp (x) y = effexport.F (q, p)",
            "passes 'p' as another input than the one its function calls 'p'",
        ),
    ],
)
def test_calls_that_the_parser_refuses_or_confuses_are_refused(call: str, message: str) -> None:
    model = model_of(f"{{ {call} }}", f"{FUNCTION} F (p, q) => (y) {{ e = Exp (q) y = Sub (p, e) }}")
    with pytest.raises(UserError, match=message):
        check_limits(model)


def test_outputs_of_a_function_that_a_call_leaves_out_are_refused() -> None:
    model = model_of("{ y = effexport.F (x) }", f"{FUNCTION} F (a) => (b, c) {{ b = Exp (a) c = Neg (a) }}")
    assert "takes 1 of the 2 outputs of its function" in only_problem(model)


def test_functions_that_share_a_name_are_refused() -> None:
    bodies = (
        f"{FUNCTION} F (a) => (b) {{ b = Exp (a) }}",
        '<domain: "other", opset_import: ["" : 20]> F (a) => (b) { b = Neg (a) }',
    )
    model = model_of("{ t = effexport.F (x) y = other.F (t) }", *bodies)
    assert "the function other::F has the name of a function of effexport" in only_problem(model)
    named_exp = model_of("{ y = effexport.Exp (x) }", f"{FUNCTION} Exp (a) => (b) {{ b = Neg (a) }}")
    assert "has the name of the standard operator Exp, which TensorRT runs instead" in only_problem(named_exp)


def test_functions_may_use_the_same_names_inside_and_read_attributes() -> None:
    """Measured with TensorRT-RTX 1.7: it renames inner values, and passes attributes on."""
    bodies = [
        f"{FUNCTION} {name} <k> (a) => (c) {{ t = Constant <value_float: float = @k> () c = {op} (a, t) }}"
        for name, op in (("F", "Mul"), ("G", "Add"))
    ]
    model = model_of("{ t = effexport.F <k = 2.0> (x) y = effexport.G <k = 3.0> (t) }", *bodies)
    assert limit_problems(model) == []


def test_an_operator_of_ours_needs_a_body_or_a_plugin() -> None:
    (op, *_) = OPS
    model = model_of(f"{{ y = effexport.{op} (x) }}")
    assert f"node 'maker of y' ({op}) is of the domain effexport and has neither" in only_problem(model)
    assert only_problem(model).endswith("build the model again with effexport")
    assert limit_problems(model, plugins=[op]) == []


def test_many_problems_are_listed_up_to_a_point() -> None:
    model = in_graph(" ".join(f"y{i} = other.Thing{i} (x)" for i in range(8)))
    with pytest.raises(UserError, match=r"Thing0.*; .*Thing4.*; and 3 more$") as failure:
        check_limits(model)
    assert "Thing5" not in str(failure.value)


def test_exported_models_obey_the_limits(built: Callable[..., Artifact], variant: str) -> None:
    check_limits(onnx.load(str(built(variant, "encoder").model_path)))


# at the precision that casts most; the others in the soak run
PRECISIONS = [p if p == "fp16" else pytest.param(p, marks=pytest.mark.soak) for p in DTYPE_OF_PRECISION]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", some_variants(fast=("nystrom", "lsh"), slowly=("window",)))
def test_exported_attention_obeys_the_limits(small_spec: Specs, name: str, precision: str) -> None:
    check_limits(onnx.load(exported(small_spec(name, "attention", precision=precision))))


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_exported_encoders_obey_the_limits(small_spec: Specs, variant: str, precision: str) -> None:
    check_limits(onnx.load(exported(small_spec(variant, "encoder", precision=precision))))


FAITHFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "nystrom with a global scale": (
        "nystrom",
        {"segment_means_seq_len": 64, "mask_landmarks": False, "pinv_init": "global", "num_landmarks": 8},
    ),
    "lsh decoder": (
        "lsh",
        {"circular": True, "mask_constants": "hf", "causal": True, "num_hashes": 3, "num_buckets": (2, 4)},
    ),
}


@pytest.mark.parametrize("name", FAITHFUL)
def test_exports_that_are_faithful_to_checkpoints_obey_the_limits(small_spec: Specs, name: str) -> None:
    variant, fields = FAITHFUL[name]
    check_limits(onnx.load(exported(small_spec(variant, "attention", **fields))))


# those that other tests build, too; the two whose memory is constant also have a decode step
BUILT = ("softmax", "linear")
CAUSAL = [
    name if name in BUILT else pytest.param(name, marks=pytest.mark.slow if name == "aft-simple" else pytest.mark.soak)
    for name in BUILT_VARIANTS
    if not ATTENTION_SPECS[name].why_not_causal
]


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_exports_and_their_decode_steps_obey_the_limits(built: Callable[..., Artifact], name: str) -> None:
    artifact = built(name, "encoder", causal=True)
    for path in sorted(artifact.path.glob("*.onnx")):  # with the decode step and the prefill
        check_limits(onnx.load(path))


SHARED = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 2}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nystromformer": (
        "NystromformerForMaskedLM",
        {
            "num_hidden_layers": 1,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "segment_means_seq_len": 32,
            "num_landmarks": 8,
            "conv_kernel_size": 5,
        },
    ),
    "reformer": (
        "ReformerModel",
        {
            "attention_head_size": 8,
            "feed_forward_size": 48,
            "attn_layers": ["lsh", "local"],
            "lsh_attn_chunk_length": 8,
            "local_attn_chunk_length": 8,
            "num_buckets": 8,
            "num_hashes": 2,
            "axial_pos_shape": [8, 16],
            "axial_pos_embds_dim": [16, 16],
            "max_position_embeddings": 128,
            "is_decoder": False,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.requires("transformers")
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_exported_checkpoints_obey_the_limits(tmp_path: Path, family: str) -> None:
    kind, config = CHECKPOINTS[family]
    saved(tmp_path / "checkpoint", kind, SHARED | config)
    spec, _ = build_spec_from_checkpoint({}, tmp_path / "checkpoint")
    onnx_from_module(module_from_path(spec, tmp_path / "checkpoint"), spec, tmp_path / "model.onnx")
    check_limits(onnx.load(str(tmp_path / "model.onnx")))
