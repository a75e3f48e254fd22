"""Function bodies are proven by themselves: healthy ones pass, and every fault in one is caught, kernels or not."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from body_faults import FORMS, HALF, BodyFault, body_faults, damaged_use, healthy_use, reason_for_no_op, remembered

from effexport.artifact import Artifact
from effexport.export.onnx_graph import load_graph
from effexport.plugins.ops import OPS
from effexport.proof.check import Check, function_body_of
from effexport.proof.checks import function_bodies
from effexport.proof.checks.function_bodies import check_function_bodies, check_function_body, operator_inputs

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
# Variant and fields of small artifacts that have every body, in every form.
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "linear": ("linear", {}),
    "linear causal": ("linear", {"causal": True}),
    "nystrom": ("nystrom", {}),
    "lsh": ("lsh", {}),
    "lsh causal": ("lsh", {"causal": True}),
    "aft-simple": ("aft-simple", {}),
    "aft-local": ("aft-local", {}),
    "aft-conv causal": ("aft-conv", {"causal": True}),
    "window": ("window", {}),
    "softmax bf16": ("softmax", {"precision": "bf16", "bf16": "linear"}),
    "softmax int8": ("softmax", {"precision": "int8"}),
    "softmax fp16": ("softmax", {"precision": "fp16"}),
    "linear fp16": ("linear", {"precision": "fp16"}),
    "nystrom fp16": ("nystrom", {"precision": "fp16"}),
    "lsh fp16": ("lsh", {"precision": "fp16"}),
    "aft-simple fp16": ("aft-simple", {"precision": "fp16"}),
    "aft-local fp16": ("aft-local", {"precision": "fp16"}),
    "window fp16": ("window", {"precision": "fp16"}),
}

# Operators of gated-delta, whose artifacts other tests prove, and whose bodies those of the operators damage.
UNCALLED = {"CausalConv", "LinearRecurrence"}


def artifact_of(built: Built, place: str) -> Artifact:
    variant, fields = PLACES[place]
    return built(variant, "attention", **fields)


def checks_of(model: onnx.ModelProto, artifact: Artifact, folder: Path) -> dict[str, Check]:
    path = folder / "model.onnx"
    onnx.save(model, str(path))
    return {check.kind: check for check in check_function_bodies(path, artifact.spec)}


def test_inputs_reach_past_a_body_s_blocks_of_blocks() -> None:
    """A body works in blocks, and adds up over the blocks: one input must have more blocks than a block has tokens."""
    from effexport.plugins.lsh_sort.op import BLOCK as SORT_BLOCK
    from effexport.plugins.sequence_conv.op import BLOCK as CONV_BLOCK

    sorts = dict(operator_inputs("LSHSort", {"num_buckets": 4}, "float32"))
    assert sorts["many blocks"]["buckets"].shape[-1] > SORT_BLOCK**2
    convs = dict(operator_inputs("SequenceConv", {}, "float32"))
    assert convs["many blocks"]["x"].shape[2] > CONV_BLOCK**2


@pytest.mark.parametrize("place", PLACES)
def test_healthy_bodies_pass_with_one_check_per_operator(built: Built, place: str) -> None:
    artifact = artifact_of(built, place)
    checks = check_function_bodies(artifact.model_path, artifact.spec)
    assert [check.kind for check in checks] == [function_body_of(op) for op in sorted(artifact.manifest.custom_ops)]
    for check in checks:
        assert (check.status, check.detail) == ("passed", check.detail)
        assert check.value is not None
        assert check.limit is not None
        # healthy bodies are far from their limit, so that other processors pass too
        assert check.value <= 0.6 * check.limit
        assert check.reason


def test_every_operator_has_inputs_and_is_in_some_place(built: Built) -> None:
    called = {op for place in PLACES for op in artifact_of(built, place).manifest.custom_ops}
    assert called | UNCALLED == set(OPS)


def checks_of_faults(
    monkeypatch: pytest.MonkeyPatch, form: str, precision: str, faults: Iterator[BodyFault]
) -> Iterator[tuple[BodyFault, Check]]:
    healthy = healthy_use(form, precision)
    defined = remembered(function_bodies.definition(healthy, {}))
    monkeypatch.setattr(function_bodies, "definition", lambda *_: defined)
    return ((fault, check_function_body(fault.op, [damaged_use(healthy, fault)])) for fault in faults)


def one_per_kind(form: str) -> Iterator[BodyFault]:
    """The first fault that changes something, for each type of node and edit."""
    seen = set()
    for fault in body_faults(healthy_use(form)):
        kind = (fault.node_type, fault.edit)
        if kind not in seen and not reason_for_no_op(fault, form, "fp32"):
            seen.add(kind)
            yield fault


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow) if ", " in form else form for form in FORMS]
)
def test_a_fault_in_every_type_of_node_of_a_body_is_caught(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    for fault, check in checks_of_faults(monkeypatch, form, "fp32", one_per_kind(form)):
        assert check.status == "failed", f"{fault} escapes: {check.value}"


# beside those of every type of node, above
@pytest.mark.soak
@pytest.mark.parametrize(
    ("form", "precision"), [*((form, "fp32") for form in FORMS), *((form, "fp16") for form in HALF)]
)
def test_every_edit_of_every_node_is_caught_or_declared_to_change_nothing(
    monkeypatch: pytest.MonkeyPatch, form: str, precision: str
) -> None:
    for fault, check in checks_of_faults(monkeypatch, form, precision, body_faults(healthy_use(form, precision))):
        reason = reason_for_no_op(fault, form, precision)
        expected = "passed" if reason else "failed"
        assert check.status == expected, f"{fault}: {check.status}, {check.value}; {reason or 'declared to matter'}"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_body_is_healthy(form: str) -> None:
    use = healthy_use(form)
    assert check_function_body(use.node.op_type, [use]).status == "passed"


def test_every_body_is_in_the_table() -> None:
    assert {op for op, _ in FORMS.values()} == set(OPS)


def test_only_the_damaged_operator_is_named(built: Built, tmp_path: Path) -> None:
    artifact = artifact_of(built, "nystrom")
    model = load_graph(artifact.model_path)
    (function,) = (function for function in model.functions if function.name == "IterativePinv")
    node = next(node for node in function.node if node.op_type == "Sub")
    node.input[0], node.input[1] = node.input[1], node.input[0]
    checks = checks_of(model, artifact, tmp_path)
    assert [kind for kind, check in checks.items() if check.status == "failed"] == [function_body_of("IterativePinv")]
    assert "worst at" in checks[function_body_of("IterativePinv")].detail


def test_a_body_that_onnx_runtime_refuses_is_a_failure_with_its_words(built: Built, tmp_path: Path) -> None:
    artifact = artifact_of(built, "softmax")
    model = load_graph(artifact.model_path)
    model.functions[0].node[-1].op_type = "NoSuchOperator"
    (check,) = checks_of(model, artifact, tmp_path).values()
    assert check.status == "failed"
    assert "NoSuchOperator" in check.detail


def test_a_file_that_lost_a_body_fails(built: Built, tmp_path: Path) -> None:
    artifact = artifact_of(built, "softmax")
    model = load_graph(artifact.model_path)
    del model.functions[:]
    (check,) = checks_of(model, artifact, tmp_path).values()
    assert check.status == "failed"
    assert "no body" in check.detail


def test_a_model_with_nothing_but_standard_operators_has_nothing_to_check(built: Built) -> None:
    artifact = built("aft-full", "attention")
    assert check_function_bodies(artifact.model_path, artifact.spec) == []


def test_bodies_in_bfloat16_are_not_run_and_integer_ones_are(built: Built) -> None:
    artifact = built("lsh", "attention", precision="bf16")
    checks = {check.kind: check for check in check_function_bodies(artifact.model_path, artifact.spec)}
    assert checks[function_body_of("LSHSort")].status == "passed"
    attention = checks[function_body_of("LSHAttention")]
    assert attention.status == "not run"
    assert "bfloat16" in attention.reason


def without_torch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the import of PyTorch raise an error."""
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> ModuleType:
        if name == "torch":
            raise error
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)


@pytest.mark.requires("native")
@pytest.mark.parametrize("place", PLACES)
def test_without_pytorch_bodies_are_compared_with_kernels(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    artifact = artifact_of(built, place)
    # one that is installed and does not load counts as none
    without_torch(monkeypatch, OSError("libtorch_cpu.so: cannot open shared object file"))
    monkeypatch.setattr(function_bodies, "call_in_torch", lambda *_: pytest.fail("PyTorch is not installed"))
    assert {check.status for check in check_function_bodies(artifact.model_path, artifact.spec)} == {"passed"}


def test_with_neither_pytorch_nor_kernels_the_check_is_not_run(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    from effexport.runners.ort import kernels

    monkeypatch.setattr(kernels, "find_library", lambda: None)
    artifact = artifact_of(built, "softmax")
    without_torch(monkeypatch, ModuleNotFoundError("No module named 'torch'"))
    (check,) = check_function_bodies(artifact.model_path, artifact.spec)
    assert check.status == "not run"
    assert "PyTorch or the kernel library" in check.reason


def test_inputs_are_the_same_in_every_run() -> None:
    """Otherwise a fault might be caught today and not tomorrow."""
    first, second = (list(operator_inputs("MaskedAttention", {"scale": 0.5}, "float32")) for _ in range(2))
    for (name, inputs), (other, again) in zip(first, second, strict=True):
        assert name == other
        assert all(inputs[key].tobytes() == again[key].tobytes() for key in inputs)


@pytest.mark.requires("native")
@pytest.mark.parametrize("place", ["softmax", "nystrom", "lsh", "aft-full"])
def test_a_build_proves_kernels_and_bodies(built: Built, place: str) -> None:
    artifact = built(place, "encoder")
    summary = artifact.manifest.parity.summary
    operators = artifact.manifest.custom_ops
    assert {name for name in summary if name.startswith("function body of")} == set(map(function_body_of, operators))
    assert ("function bodies" in summary) == bool(operators)
    assert all(summary[function_body_of(op)].passed == 1 for op in operators)
