"""The reference is checked too: PyTorch must give the same bits again, and be close to itself in float64."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_specs as spec_module
import torch
from faulty_torch import FUNCTIONS, KINDS, WrongFunction, WrongOperator
from small_specs import spec_of

from effexport.artifact import Artifact
from effexport.base.errors import StageError
from effexport.base.spec import BuildSpec
from effexport.export.module_source import module_from_seed
from effexport.models.user.model import model_of_ours
from effexport.pipeline.build import artifact_from_spec
from effexport.proof.check import CaseLabel, Kind, not_run, passed
from effexport.proof.float64 import PeakMemory, RoundingOperators
from effexport.proof.module_runs import MOST_RUNS, RepeatedRuns, same_bits
from effexport.proof.reference import FLOAT64_CASES, Answers, reference_from_model

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
SEED = 7
# the variant that calls the operator in its first layer
VARIANT_OF_KIND = {"exp": "lsh", "matmul": "lsh", "softmax": "softmax"}
FAULTS_IN_ONE_RUN = 6


def answers_of(spec: BuildSpec) -> Answers:
    return reference_from_model(model_of_ours(module_from_seed(spec)), spec, SEED)


def assert_same_cases(found: Answers, expected: Answers) -> None:
    for case, healthy in zip(found.cases, expected.cases, strict=True):
        for part in ("inputs", "outputs", "buckets", "margins"):
            ours, theirs = getattr(case, part), getattr(healthy, part)
            assert same_bits({part: ours}, {part: theirs}), f"{case.name}: {part}"
        noise = [(c.seed_noise, c.precision_noise, c.own_error) for c in (case, healthy)]
        assert noise[0] == noise[1], case.name


def checks_of(answers: Answers, kind: str) -> list[Any]:
    return [check for check in answers.checks if check.kind == kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("faulty", "names"), [(WrongOperator, KINDS), (WrongFunction, FUNCTIONS)], ids=["ATen", "Python"]
)
def test_a_pytorch_that_is_wrong_once_gives_the_same_golden_cases(
    kind: str, faulty: Callable[..., Any], names: Mapping[str, tuple[str, ...]]
) -> None:
    spec = spec_of(VARIANT_OF_KIND[kind], "attention", dim=64, seq_len=256)
    with faulty(names[kind], None) as counting:
        healthy = answers_of(spec)
    count = counting.fault.seen
    # the warm-up, the first and second pass, the runs for the noise and those in float64
    assert count > 4
    disputes = set()
    for at in sorted({0, 1, *np.linspace(2, count - 1, FAULTS_IN_ONE_RUN, dtype=int)}):
        with faulty(names[kind], at) as wrong:
            found = answers_of(spec)
        assert wrong.fault.seen > at
        assert_same_cases(found, healthy)
        assert all(check.status == "passed" for check in found.checks), at
        (check,) = checks_of(found, Kind.REFERENCE_REPEATABLE)
        disputes.add(check.value)
        assert bool(check.value) == ("PyTorch disagreed with itself in 1 of" in check.detail)
    # a fault in the warm-up is never seen; one in a pass is
    assert disputes == {0, 1}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind != "exp")) for kind in KINDS])
def test_a_build_with_a_pytorch_that_is_wrong_at_first_stores_the_right_golden_file(
    built: Callable[..., Artifact], kind: str, tmp_path: Path
) -> None:
    healthy = built(VARIANT_OF_KIND[kind], "attention", seq_len=256)
    with WrongOperator(KINDS[kind], 0) as wrong:
        artifact, report = artifact_from_spec(healthy.spec, tmp_path / "out")
    assert wrong.fault.seen > 0
    assert report.verdict == "passed"
    for ours, theirs in ((artifact.reference_path, healthy.reference_path), (artifact.model_path, healthy.model_path)):
        assert ours.read_bytes() == theirs.read_bytes()


def draw_numbers(monkeypatch: pytest.MonkeyPatch, scale: float = 1e-6) -> None:
    """Softmax attention that is not repeatable, except in a graph."""
    from effexport.models.variants.softmax import layer as softmax

    right = softmax.softmax_attention

    def random(*args: Any) -> torch.Tensor:
        result = right(*args)
        return result if torch.compiler.is_exporting() else result + scale * torch.rand(result.shape)

    monkeypatch.setattr(softmax, "softmax_attention", random)


def test_a_module_that_never_repeats_itself_stops_the_build_and_the_error_names_pytorch(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    draw_numbers(monkeypatch)
    options = ("--variant", "softmax", "--scope", "attention", "--dim", "32", "--heads", "2", "--seq-len", "64")
    message = cli("build", *options, "-o", tmp_path / "out").error(1)
    assert message.startswith("reference: PyTorch gave 5 different answers in 5 runs on the same inputs (export: ")
    assert "expected the same bits in every run, or one answer in at least 2 runs more than any other" in message
    assert "The exported model was not judged. If the module draws random numbers" in message
    assert "parity" not in message
    assert list(tmp_path.iterdir()) == []


def test_verify_with_a_module_that_never_repeats_itself_names_pytorch(
    cli: Callable[..., Any], built: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = built("softmax", "attention").path
    draw_numbers(monkeypatch)
    assert "PyTorch gave 5 different answers" in cli("verify", folder, "--reference", "torch").error(1)
    assert cli("verify", folder, "--reference", "golden").code == 0


def spoil_calls(monkeypatch: pytest.MonkeyPatch, scale_of_call: Callable[[int], float]) -> None:
    """Softmax attention whose calls outside a graph, counted from 0, are scaled; a module calls it once per run."""
    from effexport.models.variants.softmax import layer as softmax

    right, calls = softmax.softmax_attention, itertools.count()

    def wrong(*args: Any) -> torch.Tensor:
        result = right(*args)
        is_float32 = type(result) is torch.Tensor and result.dtype == torch.float32
        return result if torch.compiler.is_exporting() or not is_float32 else result * scale_of_call(next(calls))

    monkeypatch.setattr(softmax, "softmax_attention", wrong)


@pytest.mark.parametrize("first_wrong", [0, 1])
def test_a_module_that_is_wrong_in_every_second_call_stops_the_build_and_the_error_names_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first_wrong: int
) -> None:
    spoil_calls(monkeypatch, lambda call: 1.001 if call % 2 == first_wrong else 1)
    with pytest.raises(StageError) as error:
        artifact_from_spec(spec_of("softmax", "attention"), tmp_path / "out")
    assert str(error.value).startswith("reference: PyTorch gave 2 different answers in 5 runs on the same inputs")
    assert "The exported model was not judged" in str(error.value)
    assert "parity" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_pytorch_that_is_wrong_twice_with_different_bits_gives_the_right_golden_file(
    built: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    healthy = built("softmax", "attention")
    spoil_calls(monkeypatch, lambda call: {0: 1.001, 1: 1.002}.get(call, 1))
    artifact, report = artifact_from_spec(healthy.spec, tmp_path / "out")
    assert artifact.reference_path.read_bytes() == healthy.reference_path.read_bytes()
    (check,) = [check for check in report.checks if check.kind == Kind.REFERENCE_REPEATABLE]
    assert (check.value, check.limit) == (1, None)
    assert "(export: 1 × 64: 2 of 5 runs, " in check.detail


def test_a_pytorch_that_is_always_wrong_in_the_same_way_fails_against_float64(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = torch.softmax

    def wrong(x: torch.Tensor, dim: int) -> torch.Tensor:
        result = right(x, dim)
        return result if x.dtype == torch.float64 or torch.compiler.is_exporting() else result * 1.001

    monkeypatch.setattr(torch, "softmax", wrong)
    with pytest.raises(StageError, match=r"PyTorch in float32 is itself 0\.00\d from float64") as error:
        artifact_from_spec(spec_of("softmax", "attention"), tmp_path / "out")
    assert error.value.stage == "reference"
    assert "max |float32 − float64| / RMS" in str(error.value)
    assert "the exported model was not judged" in str(error.value)
    assert "disagreed with itself" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_reference_also_says_what_was_disputed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # one right run among wrong ones
    spoil_calls(monkeypatch, lambda call: 1 if call == 1 else 1.001)
    with pytest.raises(StageError, match=r"is itself 0\.00\d from float64") as error:
        artifact_from_spec(spec_of("softmax", "attention"), tmp_path / "out")
    assert "PyTorch disagreed with itself in 1 of" in str(error.value)
    assert "1 of 4 runs" in str(error.value)


@pytest.mark.parametrize("disputed", [False, True])
def test_what_may_differ_from_float64_is_excused_unless_pytorch_disputed_it(
    monkeypatch: pytest.MonkeyPatch, disputed: bool
) -> None:
    spec = spec_of("softmax", "attention")
    monkeypatch.setattr(type(spec.model), "why_float64_differs", "it decides by comparisons")
    spoil_calls(monkeypatch, lambda call: 1 if disputed and call == 1 else 1.001)
    export, padded = checks_of(answers_of(spec), Kind.REFERENCE)
    assert (export.status, padded.status) == ("failed" if disputed else "not run", "not run")
    assert "it decides by comparisons" in padded.reason


def test_every_variant_runs_in_float64_throughout(variant: str, scope: str) -> None:
    has_causal_form = variant != "nystrom"
    for fields in ({}, {"causal": True})[: 1 + has_causal_form]:
        found = checks_of(answers_of(spec_of(variant, scope, seq_len=130, **fields)), Kind.REFERENCE)
        assert [check.case.name for check in found] == list(FLOAT64_CASES)
        for check in found:
            assert check.status == "passed"
            assert 0 < check.value < 5e-6
            assert check.detail == f"PyTorch in float32 is itself {check.value:.1g} from float64"


def test_an_operator_that_stays_in_float32_is_named() -> None:
    with RoundingOperators() as rounding:
        wide = torch.ones(3, dtype=torch.float64)
        wide.sum()
        (torch.ones(3, dtype=torch.int64) > 0).float()
        assert rounding.remark == ""
        wide.float().exp()
    assert rounding.names == {"aten._to_copy.default", "aten.exp.default"}
    assert "not counting the rounding of aten._to_copy.default, aten.exp.default" in rounding.remark


def test_float64_is_left_out_where_memory_is_short_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effexport.proof.float64.free_memory_bytes", lambda: 10_000)
    found = checks_of(answers_of(spec_of("softmax", "attention")), Kind.REFERENCE)
    assert [check.status for check in found] == ["not run", "not run"]
    assert "a run in float64 needs about" in found[0].reason
    assert "half of the memory that is free here is 5 kB" in found[0].reason.replace("5.00", "5")


def test_the_peak_counts_what_lives_at_the_same_time() -> None:
    with PeakMemory() as peak:
        for _ in range(5):
            a = torch.ones(1000)
            b = a + 1
            a.view(10, 100)
            del a, b
    assert peak.size_bytes == 8000


def test_the_checks_of_the_reference_alone_prove_nothing_about_a_model() -> None:
    answers = answers_of(spec_of("softmax", "attention"))
    assert all(check.status == "passed" for check in answers.checks)
    assert not passed([*answers.checks, not_run(Kind.PARITY, "no kernels")])


def test_the_report_holds_the_checks_of_the_reference(built: Callable[..., Artifact]) -> None:
    summary = built("lsh", "attention").manifest.parity.summary
    assert summary["reference repeatable"].passed == 1
    assert summary["reference repeatable"].worst == 0
    assert summary["reference"].passed == 2
    assert 0 < summary["reference"].worst < summary["reference"].limit


@pytest.mark.soak
def test_thirty_fresh_builds_of_long_lsh_attention_pass_with_the_same_golden_file(tmp_path: Path) -> None:
    """Each in a process of its own: on some CPUs, one first forward pass in nine is wrong. `-s` shows the log."""
    command = [sys.executable, "-m", "effexport", "build", "--variant", "lsh", "--scope", "attention", "--force"]
    command += ["--dim", "512", "--heads", "8", "--seq-len", "8192", "-o", str(tmp_path / "out")]
    verdicts, golden = [], set()
    for run in range(1, 31):
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        verdicts.append("passed" if done.returncode == 0 else f"exit status {done.returncode}: {done.stderr[-2000:]}")
        disputed = "; PyTorch disagreed with itself" * ("PyTorch disagreed" in done.stderr)
        print(f"{run:2} of 30: {time.monotonic() - start:5.1f} s, {verdicts[-1]}{disputed}", flush=True)
        if done.returncode == 0:
            golden.add((tmp_path / "out" / "reference.safetensors").read_bytes())
    assert verdicts == ["passed"] * 30
    assert len(golden) == 1


ANSWERS = """
import sys, torch
from small_specs import spec_of
from effexport.export.module_source import model_from_source
from effexport.models.sources import source_from_seed
from effexport.proof.reference import reference_from_model

for variant in ("lsh", "nystrom"):
    spec = spec_of(variant, "attention")
    answers = reference_from_model(model_from_source(source_from_seed(spec.model), spec), spec, 7)
    assert all(check.status == "passed" for check in answers.checks)
print("torch._dynamo" in sys.modules)
"""


def test_the_reference_does_not_load_pytorchs_compiler() -> None:
    """It takes a second, and compiles nothing here."""
    environment = os.environ | {"PYTHONPATH": str(Path(spec_module.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", ANSWERS], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"


LABEL = CaseLabel("c", (1, 4))


def sequence(*values: float) -> tuple[RepeatedRuns, Callable[[], dict[str, dict[str, np.ndarray]]]]:
    """A reference whose runs give these values in turn."""
    left = list(values)
    return RepeatedRuns("PyTorch"), lambda: {"outputs": {"y": np.full(4, left.pop(0), np.float32)}}


@pytest.mark.parametrize(
    ("values", "expected", "disputed"),
    [
        ((1, 1), 1, 0),
        ((2, 1, 1, 1), 1, 1),
        ((1, 2, 1, 1), 1, 1),
        ((3, 2, 1, 2, 2), 2, 1),
        ((3, 2, 3, 1, 3), 3, 1),
        ((3, 2, 1, 1, 1), 1, 1),
        ((np.nan, np.nan), np.nan, 0),
        ((0.0, -0.0, 0.0, 0.0), 0.0, 1),
    ],
)
def test_an_answer_that_leads_every_other_by_two_runs_is_used(
    values: tuple[float, ...], expected: float, disputed: int
) -> None:
    assert len(values) <= MOST_RUNS
    runs, compute = sequence(*values)
    answer = runs.answer(LABEL, compute)
    np.testing.assert_array_equal(answer["outputs"]["y"], np.full(4, expected, np.float32))
    assert runs.check.value == disputed
    assert runs.check.status == "passed"
    assert runs.check.limit is None


@pytest.mark.parametrize(
    ("values", "different"), [((2, 1, 2, 1, 2), 2), ((1, 2, 1, 2, 1), 2), ((1, 2, 2, 1, 1), 2), ((1, 2, 3, 4, 5), 5)]
)
def test_answers_of_which_none_leads_are_an_error(values: tuple[float, ...], different: int) -> None:
    runs, compute = sequence(*values)
    with pytest.raises(StageError, match=f"PyTorch gave {different} different answers in 5 runs on the same inputs"):
        runs.answer(LABEL, compute)


def test_the_weights_of_a_module_are_untouched_by_its_reference() -> None:
    spec = spec_of("lsh", "attention", precision="fp16")
    module = module_from_seed(spec)
    before = copy.deepcopy(module.state_dict())
    reference_from_model(model_of_ours(module), spec, SEED)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
