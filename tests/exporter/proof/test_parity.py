"""The checker itself: healthy models pass, and every deliberate fault is caught by the check that should catch it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from slow_cases import soak

from effexport.artifact import Artifact
from effexport.proof.candidate import GIVEN_SUFFIX, ModelCandidate, given_values, open_in_ort, with_given_values
from effexport.proof.cases import Case, load_reference
from effexport.proof.check import ALL_CASES, Check, function_body_of, passed, summary
from effexport.proof.tolerances import BUCKET_FLIPS, SLICE_ELEMENTS, near_tie_limit, relative_error
from effexport.proof.verify import run_checks
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import limits_from_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
Arrays = Mapping[str, np.ndarray]
Fault = Callable[[Arrays, dict[str, np.ndarray]], dict[str, np.ndarray]]
OUTPUT = "last_hidden_state"


def candidate_of(artifact: Artifact, path: Path | None = None) -> ModelCandidate:
    hashes = artifact.manifest.hash_values
    return ModelCandidate(path or artifact.model_path, hashes, limits_from_spec(artifact.spec), open_in_ort(None))


@dataclasses.dataclass
class Faulty:
    """A healthy candidate whose answers go through `fault`."""

    real: ModelCandidate
    fault: Fault

    def accepts(self, inputs: Arrays) -> bool:
        return self.real.accepts(inputs)

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        return self.fault(inputs, self.real.run(inputs))

    @property
    def given(self) -> Collection[str]:
        return self.real.given

    def run_with_given(self, inputs: Arrays, given: Arrays) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        outputs, own = self.real.run_with_given(inputs, given)
        return self.fault(inputs, outputs), own


def failures(artifact: Artifact, fault: Fault) -> set[str]:
    cases = load_reference(artifact.reference_path)
    checks = list(run_checks(Faulty(candidate_of(artifact), fault), cases, artifact.spec))
    return {check.name for check in checks if check.status == "failed"}


def test_a_healthy_artifact_passes_every_check(built: Built, variant: str, scope: str) -> None:
    artifact = built(variant, scope)
    cases = load_reference(artifact.reference_path)
    checks = list(run_checks(candidate_of(artifact), cases, artifact.spec))
    assert [check for check in checks if check.status != "passed"] == []
    assert all(check.reason for check in checks if check.limit is not None)
    shapes = {case.keep.shape for case in cases}
    assert len(shapes) >= 4
    assert {batch for batch, _ in shapes} >= {1, 3}
    assert any(seq_len != artifact.spec.attention.seq_len for _, seq_len in shapes)
    assert any(not case.keep.all() for case in cases)
    kinds = {check.name for check in checks}
    assert {"signature", "finite", "repeatable", "batch invariance", "padding length"} <= kinds


def with_element(place: tuple[int, ...], value: float) -> Fault:
    def fault(inputs: Arrays, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs[OUTPUT][place] = value
        return outputs

    return fault


def every(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    return lambda inputs, outputs: {OUTPUT: change(outputs[OUTPUT])}


def one_token_off(answer: np.ndarray) -> np.ndarray:
    answer[0, 0] += 1e-2
    return answer


def batch_mate_leak(answer: np.ndarray) -> np.ndarray:
    """Right for a single sample, wrong with company."""
    return answer + (1e-2 * answer.mean(axis=(0, 1), keepdims=True) if len(answer) > 1 else 0)


def padding_leak(inputs: Arrays, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A mask that is forgotten somewhere: every padded position moves the whole sample."""
    padding = (inputs["attention_mask"] == 0).sum(axis=1)
    return {OUTPUT: outputs[OUTPUT] + np.float32(1e-3) * padding[:, None, None].astype(np.float32)}


# a wrong answer, and the checks that fail beside the arithmetic, which cannot be compared without a signature
WRONG: dict[str, tuple[Fault, set[str]]] = {
    "NaN in one element": (with_element((-1, 0, 3), np.nan), {"finite"}),
    "Inf in one element": (with_element((0, 0, 0), -np.inf), {"finite"}),
    "all NaN": (every(lambda answer: np.full_like(answer, np.nan)), {"finite"}),
    "one token off": (every(one_token_off), set()),
    "doubled width": (every(lambda answer: answer.astype(np.float64)), {"signature"}),
    "halved width": (every(lambda answer: answer.astype(np.float16)), {"signature"}),
    "transposed": (every(lambda answer: answer.transpose(0, 2, 1)), {"signature"}),
    "renamed": (lambda inputs, outputs: {"logits": outputs[OUTPUT]}, {"signature"}),
    "one output too many": (lambda inputs, outputs: outputs | {"extra": outputs[OUTPUT]}, {"signature"}),
    "samples swapped": (every(lambda answer: answer[::-1].copy()), {"batch invariance"}),
    "tokens reversed": (every(lambda answer: answer[:, ::-1].copy()), set()),
    "batch mate leak": (every(batch_mate_leak), {"batch invariance"}),
    "padding leak": (padding_leak, {"batch invariance", "padding length"}),
    "constant answer": (every(np.zeros_like), set()),
}


# checks of models with a hash, and of others
@pytest.mark.parametrize("name", ["softmax", soak("nystrom"), "lsh"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_caught(built: Built, name: str, wrong: str) -> None:
    fault, expected = WRONG[wrong]
    failed = failures(built(name, "attention"), fault)
    if expected != {"signature"}:
        expected = expected | {"arithmetic with identical buckets" if name == "lsh" else "arithmetic"}
    assert expected <= failed


def test_an_answer_that_changes_from_run_to_run_is_caught(built: Built) -> None:
    rng = np.random.default_rng(0)

    def last_bit_noise(inputs: Arrays, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        bits = outputs[OUTPUT].view(np.uint32)
        return {OUTPUT: (bits ^ rng.integers(0, 2, bits.shape, dtype=np.uint32)).view(np.float32)}

    assert failures(built("softmax", "attention"), last_bit_noise) == {"repeatable"}


def test_the_worst_element_is_named(built: Built) -> None:
    artifact = built("softmax", "attention")
    cases = load_reference(artifact.reference_path)[:1]

    def fault(inputs: Arrays, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs[OUTPUT][0, 17, 5] = 99
        return outputs

    checks = run_checks(Faulty(candidate_of(artifact), fault), cases, artifact.spec)
    failed, overall = (check for check in checks if check.status == "failed")
    assert (failed.name, overall.name) == ("arithmetic", "overall error")
    assert failed.detail.startswith("worst at last_hidden_state[0, 17, 5]: 99, reference ")


def damaged_copy(artifact: Artifact, path: Path, change: Callable[[str, np.ndarray], np.ndarray | None]) -> list[str]:
    """Write the model with changed initializers to `path`; the names of those that were changed."""
    model, changed = onnx.load(str(artifact.model_path)), []
    for tensor in model.graph.initializer:
        array = change(tensor.name, numpy_helper.to_array(tensor))
        if array is not None:
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
            changed.append(tensor.name)
    onnx.save(model, str(path))
    return changed


# Hashing looks at directions only, so by the mathematics the length of the rotations changes nothing. They are the one
# initializer of this size: heads × head_dim × rounds × half the buckets.
ROTATIONS = 2 * 16 * 2 * 4


def is_weight(array: np.ndarray, variant: str) -> bool:
    return array.ndim >= 2 and array.dtype == np.float32 and (variant != "lsh" or array.size != ROTATIONS)


def one_percent_off(array: np.ndarray) -> np.ndarray:
    """Every second column: a factor of all weights of an average, such as e^w of AFT, changes nothing."""
    changed = array.copy()
    changed[..., ::2] *= array.dtype.type(1.01)
    return changed


def test_each_weight_that_is_one_percent_off_is_caught(built: Built, tmp_path: Path, variant: str) -> None:
    artifact = built(variant, "attention")
    cases = [c for c in load_reference(artifact.reference_path) if c.name in ("export", "padded batch")]
    initializers = onnx.load(str(artifact.model_path)).graph.initializer
    names = [t.name for t in initializers if is_weight(numpy_helper.to_array(t), variant)]
    assert len(names) >= 3
    for target in names:
        changed = damaged_copy(
            artifact, tmp_path / "model.onnx", lambda name, a, t=target: one_percent_off(a) if name == t else None
        )
        assert changed == [target]
        checks = run_checks(candidate_of(artifact, tmp_path / "model.onnx"), cases, artifact.spec)
        failed = (check.name for check in checks if check.status == "failed")
        assert any(name in ("arithmetic", "arithmetic with identical buckets") for name in failed), f"{target} × 1.01"


def test_rotations_of_the_wrong_sign_are_caught(built: Built, tmp_path: Path) -> None:
    artifact = built("lsh", "attention")

    def negate(name: str, array: np.ndarray) -> np.ndarray | None:
        return -array if array.size == ROTATIONS else None

    assert len(damaged_copy(artifact, tmp_path / "model.onnx", negate)) == 1
    cases = load_reference(artifact.reference_path)
    checks = list(run_checks(candidate_of(artifact, tmp_path / "model.onnx"), cases, artifact.spec))
    failed = {check.name for check in checks if check.status == "failed"}
    assert {"bucket agreement", "bucket near-ties"} <= failed
    # the arithmetic is innocent: with the reference's buckets it is right
    assert "arithmetic with identical buckets" not in failed


def lsh_case(artifact: Artifact) -> Case:
    return next(case for case in load_reference(artifact.reference_path) if case.name == "export")


def with_flips(artifact: Artifact, flips: int, margin: float) -> dict[str, Check]:
    """Bucket checks of a case whose reference disagrees in `flips` buckets of the given margin."""
    case = lsh_case(artifact)
    (name,) = case.buckets
    buckets, margins = case.buckets[name].copy(), case.margins[name].copy()
    real = candidate_of(artifact)
    buckets.flat[:flips] = (buckets.flat[:flips] + 1) % 8
    margins.flat[:flips] = margin
    changed = dataclasses.replace(case, buckets={name: buckets}, margins={name: margins})

    class Unmoved(Faulty):
        """Computes with the real buckets, so that only the bucket checks can object."""

        def run_with_given(self, inputs: Arrays, given: Arrays) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
            return real.run_with_given(inputs, case.buckets)

    checks = run_checks(Unmoved(real, lambda inputs, outputs: outputs), [changed], artifact.spec)
    return {check.name: check for check in checks if check.name.startswith("bucket")}


# flips, their margin in near-tie limits, and the status of the agreement and of the near-ties
@pytest.mark.parametrize(
    ("flips", "margin", "agreement", "near_ties"),
    [
        pytest.param(1, 0.5, "passed", "passed", id="a near-tie may flip"),
        pytest.param(1, 2.0, "passed", "failed", id="a wide margin may not"),
        pytest.param(1, math.nan, "passed", "failed", id="nor one that is NaN"),
        pytest.param(2, 0.5, "failed", "passed", id="nor too many near-ties"),
        pytest.param(5, 0.0, "passed", "passed", id="equal projections are for the runtime to choose from"),
    ],
)
def test_buckets_may_differ_in_few_near_ties(
    built: Built, flips: int, margin: float, agreement: str, near_ties: str
) -> None:
    artifact = built("lsh", "attention")
    assert BUCKET_FLIPS["fp32"].value * 256 < 1
    checks = with_flips(artifact, flips, near_tie_limit(artifact.spec).value * margin)
    found = (checks["bucket agreement"].status, checks["bucket near-ties"].status)
    assert found == (agreement, near_ties)
    assert checks["bucket agreement"].value == (flips if margin else 0)


def test_given_buckets_are_really_used(built: Built) -> None:
    artifact = built("lsh", "encoder")
    case, run = lsh_case(artifact), candidate_of(artifact).run_with_given
    (name,) = case.buckets
    same, own = run(case.inputs, case.buckets)
    assert np.array_equal(own[name], case.buckets[name])
    free = candidate_of(artifact).run(case.inputs)
    # not the same session, so the same up to the order of its sums
    assert relative_error(same[OUTPUT][0], free[OUTPUT][0])[0] <= 2e-4
    shuffled = {name: np.random.default_rng(0).permuted(case.buckets[name], axis=1)}
    other, own = run(case.inputs, shuffled)
    assert np.array_equal(own[name], case.buckets[name]), (
        "what the model would have chosen does not follow what is given"
    )
    assert relative_error(other[OUTPUT][0], same[OUTPUT][0])[0] > 1e-2


def test_buckets_become_inputs_and_outputs(built: Built) -> None:
    artifact = built("lsh", "encoder")
    values = list(given_values(artifact.model_path, artifact.manifest.hash_values).values())
    assert values == ["blocks.0.attention.buckets"]
    runner = OrtRunner(with_given_values(artifact.model_path, values))
    assert [t.name for t in runner.inputs] == ["input_ids", "attention_mask", values[0] + GIVEN_SUFFIX]
    assert [t.name for t in runner.outputs] == [OUTPUT, values[0]]


def test_buckets_are_found_by_the_sort_when_values_were_renamed(built: Built, tmp_path: Path) -> None:
    artifact = built("lsh", "encoder")
    model = onnx.load(str(artifact.model_path))
    for node in model.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = "v17" if name == "blocks.0.attention.buckets" else name
    onnx.save(model, str(tmp_path / "renamed.onnx"))
    assert list(given_values(tmp_path / "renamed.onnx", artifact.manifest.hash_values).values()) == ["v17"]


def test_buckets_out_of_sight_are_said_to_be_so(built: Built) -> None:
    artifact = built("lsh", "attention")
    case = lsh_case(artifact)
    blind = ModelCandidate(artifact.model_path, [], limits_from_spec(artifact.spec), open_in_ort(None))
    assert not blind.given
    names = {check.name: check.status for check in run_checks(blind, [case], artifact.spec)}
    assert names["arithmetic (buckets not visible)"] == "passed"
    assert "bucket agreement" not in names


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED"])
@pytest.mark.parametrize("name", ["lsh", "nystrom"])
def test_a_graph_that_onnxruntime_optimised_passes(built: Built, tmp_path: Path, name: str, level: str) -> None:
    import onnxruntime as ort

    artifact = built(name, "encoder")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.log_severity_level = 3
    ort.InferenceSession(str(artifact.model_path), options, providers=["CPUExecutionProvider"])
    path = tmp_path / "optimised.onnx"
    hashes = artifact.manifest.hash_values
    assert tuple(given_values(path, hashes).values()) == hashes
    checks = list(run_checks(candidate_of(artifact, path), load_reference(artifact.reference_path), artifact.spec))
    assert [check for check in checks if check.status != "passed"] == []


# all tokens are `value`, but for one that is `own` and off by `error`
@pytest.mark.parametrize(
    ("value", "own", "error", "relative"),
    [
        pytest.param(2.0, 2.0, 0.5, 0.25, id="against the scale of the sample"),
        # 1 of 100, the scale of its own token; against the sample's RMS of ten it would be ten times larger
        pytest.param(1.0, 100.0, 1.0, 0.01, id="of a loud token against itself"),
        pytest.param(1.0, 1e-6, 1e-6, 1e-6, id="of a quiet token not against its own scale"),
    ],
)
def test_relative_error_has_the_scale_of_the_sample_or_of_a_louder_token(
    value: float, own: float, error: float, relative: float
) -> None:
    expected = np.full((100, 4), value, np.float32)
    expected[7] = own
    actual = expected.copy()
    actual[7, 1] -= error
    found, place = relative_error(actual, expected)
    assert found == pytest.approx(relative, rel=0.02)
    assert place == (7, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_relative_error_lets_nothing_hide_a_value_that_is_no_number(bad: float) -> None:
    expected = np.ones((3, 3), np.float32)
    for place in range(9):
        actual = expected.copy()
        actual[0, 0] += 5
        actual.flat[place] = bad
        assert not relative_error(actual, expected)[0] <= 1e30


@pytest.mark.parametrize("bad", [7.0, math.nan])
def test_relative_error_of_many_tokens_is_that_of_the_formula(bad: float) -> None:
    """They are compared part by part; the last part is smaller than the others."""
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((3 * SLICE_ELEMENTS // 8 + 5, 8), np.float32)
    actual = expected + 1e-3 * rng.standard_normal(expected.shape, np.float32)
    actual[SLICE_ELEMENTS // 8 + 1, 6] += bad
    exact = expected.astype(np.float64)
    own = np.sqrt(np.mean(exact**2, axis=1, keepdims=True))
    error = np.abs(actual - exact) / np.maximum(own, np.sqrt(np.mean(exact**2)))
    assert relative_error(actual, expected) == (
        pytest.approx(np.max(error), rel=1e-12, nan_ok=True),
        (SLICE_ELEMENTS // 8 + 1, 6),
    )


def test_relative_error_of_all_zeros() -> None:
    zeros = np.zeros((2, 2), np.float32)
    assert relative_error(zeros, zeros)[0] == 0
    assert relative_error(zeros + np.float32(1e-3), zeros)[0] > 1


def result(status: str, value: float | None = None, limit: float | None = None, name: str = "x") -> Check:
    return Check(name, ALL_CASES, "metric", status, value, limit)  # type: ignore[arg-type]


def test_nothing_checked_is_nothing_proven() -> None:
    assert not passed([])
    assert not passed([result("not run")])
    assert passed([result("passed"), result("not run")])
    assert not passed([result("passed"), result("failed")])
    # a body that is right by itself says nothing about a model that did not run
    assert not passed([result("passed", name=function_body_of("LSHSort")), result("not run")])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_the_summary_shows_the_value_closest_to_its_limit(order: tuple[int, ...]) -> None:
    checks = [result("passed", 5.0, 100.0), result("passed", 0.9, 1.0), result("failed", math.nan, 10.0)]
    entry = summary([checks[i] for i in order])["x"]
    assert math.isnan(entry["worst"])
    assert (entry["passed"], entry["failed"], entry["not run"]) == (2, 1, 0)
    entry = summary([checks[i] for i in order if i < 2])["x"]
    assert (entry["worst"], entry["limit"]) == (0.9, 1.0)
