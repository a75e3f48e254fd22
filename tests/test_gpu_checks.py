"""scripts/gpu_checks.py, as far as it goes without a GPU: cases, the checks themselves, floors, output, errors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_checks.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_checks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


gpu_checks = load_script()


class ReferenceRunner:
    """Right results, computed on the CPU; `spoil` may change outputs afterwards."""

    name = "reference"

    def __init__(self, spoil=None) -> None:
        self.spoil = spoil or (lambda *outputs: None)

    def pinv(self, a, scale, z) -> None:
        for i in range(len(a)):
            z[i : i + 1] = gpu_checks.torch_pinv(a[i : i + 1].double(), scale[i : i + 1].double()).to(z.dtype)
        self.spoil(z)

    def sort(self, buckets, num_buckets, order, rank) -> None:
        for output, result in zip((order, rank), gpu_checks.torch_sort(buckets), strict=True):
            output.copy_(result)
        self.spoil(order, rank)

    def attend(self, inputs, attributes, out) -> None:
        if out.numel():
            qk, v, *others = inputs
            out.copy_(gpu_checks.torch_attention((qk.double(), v.double(), *others), attributes))
        self.spoil(out)


class SilentRunner:
    """Writes nothing."""

    name = "silent"

    def pinv(self, *_) -> None: ...

    def sort(self, *_) -> None: ...

    def attend(self, *_) -> None: ...


def test_the_cases_cover_the_sizes_at_which_kernels_change_course() -> None:
    pinv, sort = list(gpu_checks.pinv_cases()), list(gpu_checks.sort_cases())
    assert {case.m for case in pinv} >= {1, 2, 31, 63, 64, 100, 128}
    assert {case.dtype for case in pinv} == {"float32", "float16", "bfloat16"}
    assert any(case.count == 0 for case in pinv)
    assert {case.n for case in sort} >= {0, 1, 2, 63, 100, 1000, 4096, 65536}
    assert {case.num_buckets for case in sort} >= {1, 2, 257, 352, 353, 4096}
    assert any(case.rows == 0 for case in sort)
    attention = list(gpu_checks.attention_cases())
    assert {case.dtype for case in attention} == {"float32", "float16", "bfloat16"}
    assert {case.chunk_length for case in attention} >= {1, 10, 64, 100}
    assert any(case.batch == 0 for case in attention)
    names = [case.name for case in (*pinv, *sort, *attention)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("num_buckets", [1, 2, 33, 4096])
@pytest.mark.parametrize("n", [0, 1, 100])
def test_every_pattern_of_buckets_is_in_range(n: int, num_buckets: int) -> None:
    case = gpu_checks.SortCase(len(gpu_checks.SORT_PATTERNS), n, num_buckets)
    buckets = gpu_checks.sort_inputs(case, "cpu")
    assert buckets.shape == (case.rows, n)
    assert buckets.dtype == torch.int32
    assert torch.all((buckets >= 0) & (buckets < num_buckets))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_inputs_of_the_iteration_are_finite_in_their_type(dtype: str) -> None:
    for case in gpu_checks.pinv_cases():
        if case.dtype == dtype:
            a, scale = gpu_checks.pinv_inputs(case, "cpu")
            assert a.shape == (case.count, case.m, case.m)
            assert scale.shape == (case.count, 1, 1)
            assert a.dtype == scale.dtype == getattr(torch, dtype)
            assert torch.isfinite(a).all()
            assert torch.all(scale > 0)


def test_right_results_pass_all_checks() -> None:
    checks = gpu_checks.run_checks(ReferenceRunner(), "cpu")
    assert [check for check in checks if not check.passed] == []
    assert len(checks) > 150


@pytest.mark.slow
def test_a_kernel_that_writes_nothing_fails_every_check_that_has_elements() -> None:
    passed = [check.name for check in gpu_checks.run_checks(SilentRunner(), "cpu") if check.passed]
    assert passed == [name for name in passed if "×0" in name or " 0×" in name]


@pytest.mark.parametrize("kind", gpu_checks.PINV_KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_wrong_element_of_the_iteration_fails(dtype: str, kind: str) -> None:
    case = gpu_checks.PinvCase(63, dtype, kind)

    def spoil_by(value: float):
        def spoil(z) -> None:
            z[-1, -1, -1] = value

        return ReferenceRunner(spoil)

    for value in (float("nan"), float("inf"), 1e4):
        assert not gpu_checks.check_pinv(spoil_by(value), case, "cpu").passed


def test_a_matrix_that_depends_on_its_neighbours_fails() -> None:
    def spoil(z) -> None:
        if len(z) > 1:
            z[0] *= 1 + 2**-20

    assert gpu_checks.check_pinv_independence(ReferenceRunner(), 31, "cpu").passed
    assert not gpu_checks.check_pinv_independence(ReferenceRunner(spoil), 31, "cpu").passed


@pytest.mark.parametrize("kind", gpu_checks.ATTENTION_KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_wrong_element_of_the_attention_fails(dtype: str, kind: str) -> None:
    case = gpu_checks.AttentionCase(63, 10, 24, dtype, kind)

    def spoil_by(value: float):
        def spoil(out) -> None:
            out[-1, -1, -1, -1] = value

        return ReferenceRunner(spoil)

    assert gpu_checks.check_attention(ReferenceRunner(), case, "cpu").passed
    for value in (float("nan"), float("inf"), 1e4):
        assert not gpu_checks.check_attention(spoil_by(value), case, "cpu").passed


def test_the_plain_formulas_of_the_attention_are_those_of_the_operator() -> None:
    from effexport.plugins.lsh_attention.op import reference

    for case in gpu_checks.attention_cases():
        if case.dtype == "float32" and case.batch and case.seq <= 100:
            qk, v, order, rank, keep = gpu_checks.attention_inputs(case, "cpu")
            if not case.attributes["rounded"]:  # which is about float32
                qk, v = qk.double(), v.double()
            plain = gpu_checks.torch_attention((qk, v, order, rank, keep), case.attributes)
            expected = reference(qk, v, order, keep, **case.attributes)
            # the same sums in another order
            torch.testing.assert_close(plain, expected, rtol=0, atol=case.tolerance * float(expected.abs().max()))


def test_two_swapped_equals_fail_the_sort() -> None:
    def swap(order, rank) -> None:
        order[1, :2] = order[1, :2].flip(0)
        rank.scatter_(1, order.long(), torch.arange(order.shape[1], dtype=torch.int32).expand_as(order))

    case = gpu_checks.SortCase(2, 63, 4)
    assert gpu_checks.check_sort(ReferenceRunner(), case, "cpu").passed
    assert gpu_checks.check_sort(ReferenceRunner(swap), case, "cpu").error == 4


class RecordingLauncher:
    """Notes what would be launched."""

    name = "nothing"

    def __init__(self) -> None:
        self.loaded: list[Path] = []
        self.launches: list[tuple] = []

    def load(self, cubin: Path) -> None:
        self.loaded.append(cubin)

    def launch(self, name, grid, block, shared_bytes, arguments) -> None:
        self.launches.append((name, grid, block, shared_bytes, [type(x).__name__ for x in arguments]))


def test_kernels_are_launched_with_inputs_then_integers_then_outputs() -> None:
    launcher = RecordingLauncher()
    runner = gpu_checks.LaunchRunner(launcher, [Path("a.cubin"), Path("b.cubin")])
    for m in (64, 100):
        a, scale = gpu_checks.pinv_inputs(gpu_checks.PinvCase(m, "float16", "softmax"), "cpu")
        runner.pinv(a, scale, torch.empty_like(a))
    buckets = torch.zeros(7, 100, dtype=torch.int32)
    runner.sort(buckets, 257, torch.empty_like(buckets), torch.empty_like(buckets))
    runner.sort(buckets[:0], 257, buckets[:0], buckets[:0])
    case = gpu_checks.AttentionCase(100, 64, 24, "bfloat16", "causal")
    inputs = gpu_checks.attention_inputs(case, "cpu")
    runner.attend(inputs, case.attributes, torch.empty_like(inputs[1]))
    runner.attend(tuple(x[:0] for x in inputs), case.attributes, inputs[1][:0])
    pointer, integer = "c_void_p", "c_int"
    assert launcher.loaded == [Path("a.cubin"), Path("b.cubin")]
    pinv_arguments = [pointer, pointer, integer, integer, integer, pointer]
    assert launcher.launches == [
        ("effexport_iterative_pinv_float16", 5, 256, 49152, pinv_arguments),
        ("effexport_iterative_pinv_scratch_float16", 5, 512, 0, [*pinv_arguments, pointer]),
        ("effexport_lsh_sort", 7, 1024, 4 * 32 * 258, [pointer, integer, integer, integer, pointer, pointer]),
        ("effexport_lsh_attention_kept", 2, 256, 4, [pointer, integer, integer, pointer]),
        ("effexport_lsh_attention_bfloat16", 16, 256, 34560, [pointer] * 4 + [integer] * 13 + [pointer] * 2),
        ("effexport_lsh_attention_combine_bfloat16", 50, 256, 0, [pointer] * 2 + [integer] * 5 + [pointer]),
    ]


@pytest.mark.requires("native")
@pytest.mark.requires("onnx")
@pytest.mark.requires("ort")
def test_onnx_runtime_runs_the_kernels_on_bound_tensors() -> None:
    from effexport.plugins.building.library import get_library_path

    runner = gpu_checks.OrtRunner(get_library_path(), "cpu")
    for dtype in ("float32", "float16", "bfloat16"):
        assert gpu_checks.check_pinv(runner, gpu_checks.PinvCase(31, dtype, "softmax"), "cpu").passed
    assert gpu_checks.check_pinv(runner, gpu_checks.PinvCase(8, "float32", "softmax", count=0), "cpu").passed
    for case in [(5, 100, 33), (5, 0, 33), (0, 100, 33)]:
        assert gpu_checks.check_sort(runner, gpu_checks.SortCase(*case), "cpu").passed
    for dtype in ("float32", "float16", "bfloat16"):
        case = gpu_checks.AttentionCase(63, 10, 24, dtype, "in a ring, rounded")
        assert gpu_checks.check_attention(runner, case, "cpu").passed
    empty = gpu_checks.AttentionCase(63, 10, 24, "float32", "causal", batch=0)
    assert gpu_checks.check_attention(runner, empty, "cpu").passed


def test_floors_are_set_by_arithmetic_or_memory() -> None:
    # 132 multiprocessors × 128 lanes × 2 × 1.98 GHz
    peak = gpu_checks.float32_peak(132, 1980, (9, 0))
    assert peak == pytest.approx(66.9e12, rel=1e-3)
    assert gpu_checks.float32_peak(108, 1410, (8, 0)) == pytest.approx(19.5e12, rel=1e-3)
    assert gpu_checks.floor_us(2e6, 1, peak=1e12, bandwidth=1e12) == (2.0, "arithmetic")
    assert gpu_checks.floor_us(0, 3e6, peak=1e12, bandwidth=1e12) == (3.0, "memory")


def some_results(error: float):
    return gpu_checks.Results(
        machine={"GPU": "a GPU", "driver": "580.1"},
        checks=[gpu_checks.Check("ORT", "one", 0, 0), gpu_checks.Check("ORT", "two", error, 1e-5)],
        timings=[gpu_checks.Timing("LSHSort", kernel_us=20.0, torch_us=100.0, floor_us=5.0, limited_by="memory")],
        limits={"float32_tflops": 66.9, "copy_gb_per_s": 4000.0},
    )


def test_markdown_names_the_machine_the_failures_and_the_ratios() -> None:
    text = gpu_checks.markdown_from_results(some_results(float("nan")))
    assert "| GPU | a GPU |" in text
    assert "1 of 2 comparisons with the references passed." in text
    assert "* failed: two, ORT: nan, at most 1e-05" in text
    assert "| LSHSort | 20.0 | 100.0 | 5.0 | 5.0 (memory) | 25 % |" in text
    assert "66.9 TFLOP/s" in text
    assert "failed" not in gpu_checks.markdown_from_results(some_results(1e-6))


def test_json_holds_everything_and_is_strict() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    value = json.loads(gpu_checks.json_from_results(some_results(float("nan"))), parse_constant=refuse)
    assert [check["passed"] for check in value["checks"]] == [True, False]
    assert value["timings"][0]["kernel_us"] == 20.0
    assert value["machine"]["driver"] == "580.1"


@pytest.mark.parametrize(("error", "status"), [(1e-6, 0), (1.0, 1), (float("nan"), 1)])
def test_the_exit_status_says_whether_all_is_right(
    error: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "run", lambda timing: some_results(error))
    files = [tmp_path / "results.json", tmp_path / "results.md"]
    assert gpu_checks.main(["--output-json", str(files[0]), "--output-markdown", str(files[1])]) == status
    assert all(file.read_text(encoding="utf-8") for file in files)


def test_missing_tools_are_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_checks, "find_nvcc", lambda: None)
    monkeypatch.setattr(gpu_checks, "ort_library", lambda: None)
    with pytest.raises(gpu_checks.SetupError, match=r"neither nvcc nor onnxruntime-gpu .* expected one of the two"):
        gpu_checks.choose_runners(tmp_path)


def test_help_needs_no_framework() -> None:
    # -S: without site-packages, hence without torch
    command = [sys.executable, "-S", str(SCRIPT), "--help"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--output-json" in completed.stdout
    assert "2 there is no GPU or a tool is missing" in completed.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_clear_error() -> None:
    completed = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert completed.stdout == ""
    (line,) = completed.stderr.splitlines()
    assert line.startswith("error: PyTorch ")
    assert "expected one with" in line
