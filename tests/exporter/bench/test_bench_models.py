"""Models exported for a benchmark compute the results of PyTorch, with our operators and without."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from kept import code_of, digest_of, kept
from slow_cases import slow_after, some_variants
from small_builds import what_decides_a_build

from effexport.base.errors import StageError
from effexport.bench import candidates, costs
from effexport.bench import run as bench_run
from effexport.bench.candidates import (
    agreement,
    candidate_from_case,
    inputs_of_case,
    module_from_case,
    naive_onnx_from_case,
    onnx_from_case,
    reference_of_case,
    signature_of_case,
)
from effexport.bench.grid import BenchCase, Grid, Model
from effexport.export.onnx_graph import all_nodes
from effexport.plugins.ops import DOMAIN

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
# Chunks, landmarks and windows shorter than the sequence, or most of the algorithm would be idle.
SMALL_OPTIONS: dict[str, dict[str, Any]] = {
    "nystrom": {"num_landmarks": 16, "conv_kernel_size": 5},
    "lsh": {"chunk_length": 16},
    "aft-full": {"position_dim": 8},
    "aft-local": {"position_dim": 8, "window": 9},
}


def small_case(
    variant: str, runtime: str = "ort", seq_len: int = 100, scope: str = "core", batch: int = 2
) -> BenchCase:
    grid = Grid(
        models=(Model(variant, SMALL_OPTIONS.get(variant, {})),),
        seq_lens=(seq_len,),
        batches=(batch,),
        runtimes=(runtime,),
        scope=scope,
        heads=2,
        head_dim=16,
    )
    return next(grid.cases())


def exported(case: BenchCase, export: Callable[[BenchCase, Path], object] = onnx_from_case) -> Path:
    """The file that a benchmark exports. Do not change it: other tests read it."""
    decided_by = (*what_decides_a_build(), *code_of("exporter/bench"))
    name = f"bench/{digest_of([export.__name__, repr(case)])}"
    return kept(name, decided_by, lambda folder: export(case, folder / "model.onnx")) / "model.onnx"


def agrees(case: BenchCase, model: Path | None) -> None:
    feeds = inputs_of_case(case)
    candidate = candidate_from_case(case, model, threads=1)
    try:
        candidate.bind(feeds)
        candidate.run()
        parity = agreement(candidate, case, reference_of_case(case, feeds))
    finally:
        candidate.close()
    assert parity.passed, parity


@pytest.mark.parametrize(
    "name", some_variants(fast=("softmax", "nystrom", "lsh", "aft-full"), slowly=("linear", "window"))
)
def test_a_core_export_agrees_with_pytorch(name: str) -> None:
    case = small_case(name)
    agrees(case, exported(case))


@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "linear"),
        *slow_after(0, ["nystrom", "lsh"]),
        # without kernels of ours, these are what the other exports of AFT are
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("aft-full", "aft-simple", "aft-local", "aft-conv")),
    ],
)
def test_a_naive_export_has_no_operator_of_ours_and_agrees_with_pytorch(name: str) -> None:
    case = small_case(name, "naive")
    path = exported(case, naive_onnx_from_case)
    model = onnx.load(str(path))
    assert {node.domain for node in all_nodes(model)} <= {"", "ai.onnx"}
    assert DOMAIN not in {entry.domain for entry in model.opset_import}
    agrees(case, path)
    # batch and length are free
    shorter = small_case(name, "naive", seq_len=100, batch=1)
    agrees(shorter, path)


@pytest.mark.soak
def test_a_naive_encoder_agrees_with_pytorch() -> None:
    case = small_case("nystrom", "naive", scope="encoder")
    agrees(case, exported(case, naive_onnx_from_case))


def test_signatures_are_those_of_the_modules(variant: str) -> None:
    import torch

    case = small_case(variant)
    hidden = torch.zeros(case.batch, case.seq_len, case.heads * case.head_dim)
    core = module_from_case(case)
    projected = core.layer.project(hidden)  # type: ignore[operator, union-attr]
    heads, channels = case.spec.attention.projected
    assert [tuple(x.shape) for x in projected] == [(2, heads, 100, width) for width in channels.values()]
    assert [x.shape for x in inputs_of_case(case).values()] == [tuple(x.shape) for x in projected]


def test_attention_and_encoder_have_the_inputs_of_effexport_build() -> None:
    for scope, name in (("attention", "hidden_states"), ("encoder", "input_ids")):
        case = small_case("softmax", scope=scope)
        assert [tensor.name for tensor in signature_of_case(case).inputs] == [name, "attention_mask"]
        assert inputs_of_case(case)["attention_mask"].all()


@pytest.mark.parametrize("runtime", slow_after(1, ["torch", "compile"]))
def test_pytorch_agrees_with_itself(runtime: str) -> None:
    agrees(small_case("linear", runtime), None)


def test_compile_cuda_is_torch_compile_on_the_gpu_and_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    devices, compiled = list[str](), list[object]()
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: devices.append(device) or module)
    monkeypatch.setattr(torch, "compile", lambda module, dynamic: compiled.append(module))
    candidate_from_case(small_case("linear", "compile-cuda"), None, threads=1)
    assert devices[-1] == "cuda"
    assert len(compiled) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for installed, reason in ((None, "torch.compile needs Triton on a GPU: pip install triton"), (object(), None)):
        monkeypatch.setattr(costs.importlib.util, "find_spec", lambda name, spec=installed: spec)
        assert costs.reason_not_here.__wrapped__("compile-cuda") == reason
        assert costs.reason_not_here.__wrapped__("torch-cuda") is None


def test_half_precision_is_judged_by_its_own_limit() -> None:
    case = BenchCase(**{**vars(small_case("linear", "torch")), "precision": "fp16"})
    agrees(case, None)
    assert inputs_of_case(case)["q"].dtype == np.float16


@pytest.mark.parametrize(("part", "name"), [("encoder", "linear"), ("attention", "lsh")])
def test_on_a_cpu_bfloat16_is_that_of_linear_layers_as_in_a_build(part: str, name: str) -> None:
    case = replace(small_case(name, scope=part), precision="bf16")
    path = exported(case)
    assert "PackedLinear" in {node.op_type for node in all_nodes(onnx.load(path))}
    assert signature_of_case(case).outputs[0].dtype == "float32"
    agrees(case, path)
    others = [replace(case, runtime="ort-cuda"), replace(case, runtime="torch"), replace(case, scope="core")]
    assert {signature_of_case(other).outputs[0].dtype for other in others} == {"bfloat16"}
    assert bench_run.file_name(case) != bench_run.file_name(others[0])


def test_an_export_that_fails_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "reference_of_operator", dict)
    with pytest.raises(StageError, match="plain export: "):
        naive_onnx_from_case(small_case("lsh", "naive"), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_a_recurrence_has_no_plain_export(tmp_path: Path) -> None:
    reason = (
        r"plain export: effexport::linear_recurrence computes token by token, which torch\.onnx cannot trace at a free"
    )
    with pytest.raises(StageError, match=reason):
        naive_onnx_from_case(small_case("delta", "naive"), tmp_path / "model.onnx")


class FakeCandidate:
    """A candidate that returns the outputs it was given."""

    def __init__(self, outputs: dict[str, Any]) -> None:
        self._outputs = outputs

    def outputs(self) -> dict[str, Any]:
        return self._outputs

    def with_buckets(self, feeds: Any, buckets: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("change", "metric"),
    [
        (lambda x: x * np.float32(1.001), "max |error| / RMS"),
        (lambda x: np.where(np.arange(x.size).reshape(x.shape) == 5, np.nan, x).astype(np.float32), "NaN or Inf"),
        (lambda x: x[:, :, :-1], "names, dtypes, shapes"),
        (lambda x: x.astype(np.float64), "names, dtypes, shapes"),
    ],
)
@pytest.mark.parametrize("model", ["linear", "lsh"])
def test_a_planted_fault_is_found(model: str, change: Any, metric: str) -> None:
    case = small_case(model, "torch")
    feeds = inputs_of_case(case)
    reference = reference_of_case(case, feeds)
    candidate = candidate_from_case(case, None, threads=1)
    candidate.bind(feeds)
    candidate.run()
    good = candidate.outputs()
    assert agreement(FakeCandidate(good), case, reference).passed  # type: ignore[arg-type]
    bad = FakeCandidate({name: change(array) for name, array in good.items()})
    parity = agreement(bad, case, reference)  # type: ignore[arg-type]
    if model == "lsh" and metric.startswith("max"):
        # where buckets are out of sight, a hash is judged by what other rotations would change, and by no more
        assert parity.passed
        return
    assert not parity.passed
    assert parity.metric.startswith(metric)


def enlarge_operand(index: int, path: Path) -> None:
    """The fused operator reads queries and keys (0) or values (1) that are 0.1 % too large."""
    model = onnx.load(str(path))
    (node,) = (node for node in model.graph.node if node.op_type == "LSHAttention")
    factor = onnx.numpy_helper.from_array(np.asarray(1.001, dtype=np.float32), "factor")
    model.graph.initializer.append(factor)
    at = list(model.graph.node).index(node)
    model.graph.node.insert(at, onnx.helper.make_node("Mul", [node.input[index], "factor"], ["too_large"]))
    model.graph.node[at + 1].input[index] = "too_large"
    onnx.save(model, str(path))


@pytest.mark.parametrize("operand", [None, 0, 1])
@pytest.mark.parametrize("runtime", slow_after(1, ["ort", "ort-body"]))
def test_a_small_fault_in_a_hashed_model_gets_no_timing(
    operand: int | None, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(case: BenchCase, path: Path) -> None:
        shutil.copyfile(exported(replace(case, runtime="ort")), path)
        if operand is not None:
            enlarge_operand(operand, path)

    monkeypatch.setattr(candidates, "onnx_from_case", export)
    models = (Model("lsh", SMALL_OPTIONS["lsh"]),)
    grid = Grid(models=models, seq_lens=(100,), runtimes=(runtime,), heads=2, head_dim=16)
    (row,) = bench_run.bench(grid, bench_run.Settings(rounds=3, max_seconds=1, threads=1, memory=False)).rows
    assert row.parity is not None
    if operand is None:
        assert row.timing is not None
        assert row.parity.passed
        assert row.parity.detail.startswith("arithmetic with identical buckets")
    else:
        assert (row.status, row.timing) == ("failed", None)
        assert "arithmetic with identical buckets" in row.reason
