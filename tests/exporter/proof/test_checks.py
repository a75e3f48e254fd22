"""The checks beyond one answer: padding, prefixes, long sequences, adversarial cases, and what a result carries."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from small_specs import spec_of

from effexport.artifact import Artifact
from effexport.base.errors import StageError
from effexport.base.spec import BuildSpec, build_spec_from_options
from effexport.models.encoder.module import module_from_spec
from effexport.models.user.model import model_of_ours
from effexport.models.variants.aft import AFTSpec
from effexport.proof.candidate import ModelCandidate, open_in_ort
from effexport.proof.cases import KEPT, Case, load_reference
from effexport.proof.check import HISTOGRAM_EDGES, Kind, Limit
from effexport.proof.checks.arithmetic import LONG, Figures, check_arithmetic, check_finite, check_long_sequence
from effexport.proof.checks.invariance import check_padding_content, check_prefix
from effexport.proof.inputs import adversarial_inputs, padding_of_other_content
from effexport.proof.module_runs import run_module
from effexport.proof.reference import reference_from_model
from effexport.proof.tolerances import arithmetic_limit, case_limit, largest_change
from effexport.proof.verify import run_checks
from effexport.runners.runner import limits_from_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
Answer = Callable[[Mapping[str, Any]], dict[str, np.ndarray]]
OUTPUT = "last_hidden_state"


@dataclasses.dataclass
class Fake:
    """A candidate that answers by a function, for sequences of up to `longest` tokens."""

    answer: Answer
    longest: int = 10**9
    given: tuple[str, ...] = ()

    def accepts(self, inputs: Mapping[str, Any]) -> bool:
        return inputs["attention_mask"].shape[1] <= self.longest

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self.answer(inputs)

    def run_with_given(
        self, inputs: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        raise AssertionError("it shows no decisions")


def candidate_of(artifact: Artifact) -> ModelCandidate:
    return ModelCandidate(
        artifact.model_path, artifact.manifest.hash_values, limits_from_spec(artifact.spec), open_in_ort(None)
    )


def case_named(artifact: Artifact, name: str) -> Case:
    return next(case for case in load_reference(artifact.reference_path) if case.name == name)


def names_of(artifact: Artifact) -> dict[str, str]:
    checks = run_checks(candidate_of(artifact), load_reference(artifact.reference_path), artifact.spec)
    return {check.name: check.status for check in checks}


def test_padding_of_other_content_keeps_what_is_kept_and_stays_valid(built: Built) -> None:
    for scope, name in (("encoder", "input_ids"), ("attention", "hidden_states")):
        artifact = built("softmax", scope)
        case = case_named(artifact, "padded batch")
        changed = padding_of_other_content(case, artifact.spec)
        kept = case.keep
        assert np.array_equal(changed[name][kept], case.inputs[name][kept])
        assert (changed[name][~kept] != case.inputs[name][~kept]).any()
        assert np.array_equal(changed["attention_mask"], case.inputs["attention_mask"])
        candidate_of(artifact).run(changed)  # which refuses invalid tokens


def test_a_model_that_reads_padding_is_caught(built: Built) -> None:
    artifact = built("linear", "encoder")
    case = case_named(artifact, "padded batch")
    real = candidate_of(artifact)

    def leaky(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        # as if padding took part in a mean
        leak = 1e-3 * np.asarray(inputs["input_ids"]).mean()
        return {name: value + np.float32(leak) for name, value in real.run(inputs).items()}

    check = check_padding_content(Fake(leaky), case, leaky(case.inputs), artifact.spec)
    assert check.status == "failed"
    assert check_padding_content(real, case, real.run(case.inputs), artifact.spec).status == "passed"


def test_padding_that_a_published_model_averages_over_is_not_asked_about() -> None:
    options = {"variant": "nystrom", "seq_len": 64, "segment_means_seq_len": 64, "num_landmarks": 16}
    spec = build_spec_from_options({**options, "mask_landmarks": False}, None)
    case = Case("padded", {"attention_mask": np.array([[1, 0]])}, {})
    check = check_padding_content(Fake(dict), case, {}, spec)
    assert (check.status, check.reason) == ("not run", "mask_landmarks=False: padding is part of the input")


@pytest.mark.parametrize("name", ["softmax", "linear", pytest.param("aft-conv", marks=pytest.mark.soak)])
def test_causal_models_pass_the_prefix_check_and_others_are_not_asked(built: Built, name: str) -> None:
    assert names_of(built(name, "encoder", causal=True))["causal prefix"] == "passed"
    assert "causal prefix" not in names_of(built(name, "encoder"))


def test_a_leak_of_one_position_is_caught(built: Built) -> None:
    artifact = built("linear", "encoder", causal=True)
    case = case_named(artifact, "export")
    real = candidate_of(artifact)

    def leaky(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        answer = real.run(inputs)[OUTPUT]
        following = np.roll(answer, -1, axis=1)
        following[:, -1] = 0
        return {OUTPUT: answer + np.float32(1e-2) * following}

    check = check_prefix(Fake(leaky), case, leaky(case.inputs), artifact.spec)
    assert check.status == "failed"
    assert check.detail == "prefix of 33 tokens"


def test_the_prefix_check_is_refused_for_lsh(built: Built) -> None:
    artifact = built("lsh", "encoder", causal=True)
    case = case_named(artifact, "export")
    check = check_prefix(Fake(dict), case, {}, artifact.spec)
    assert check.status == "not run"
    assert "later tokens occupy slots in the sort" in check.reason


def fp16_attention(variant: str = "linear") -> BuildSpec:
    return build_spec_from_options(
        {"variant": variant, "scope": "attention", "precision": "fp16", "dim": 32, "heads": 2, "seq_len": 64}, None
    )


def one_case(length: int = 64) -> list[Case]:
    return [Case("export", {"attention_mask": np.ones((1, length), dtype=np.int64)}, {})]


def test_a_sum_that_overflows_in_a_long_sequence_is_caught() -> None:
    def overflowing(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        hidden = inputs["hidden_states"]
        assert hidden.shape == (1, LONG, 32)
        with np.errstate(over="ignore"):
            return {OUTPUT: hidden + np.float16(10) * np.float16(hidden.shape[1])}

    (check,) = check_long_sequence(Fake(overflowing), one_case(), fp16_attention())
    assert (check.status, check.seq_len) == ("failed", LONG)
    (check,) = check_long_sequence(Fake(lambda inputs: {OUTPUT: inputs["hidden_states"]}), one_case(), fp16_attention())
    assert check.status == "passed"


def test_a_long_sequence_is_left_out_where_a_case_is_as_long_and_said_where_the_model_takes_none() -> None:
    assert list(check_long_sequence(Fake(dict), one_case(LONG), fp16_attention())) == []
    encoder = build_spec_from_options({"variant": "linear", "precision": "fp16", "seq_len": 64}, None)
    assert list(check_long_sequence(Fake(dict), one_case(64), encoder)) == []
    (check,) = check_long_sequence(Fake(dict, longest=100), one_case(), fp16_attention())
    assert (check.status, check.reason) == (
        "not run",
        f"a sequence of {LONG} tokens is outside the shapes that the model was built for",
    )


def test_a_long_sequence_is_run_in_half_precision_only(built: Built) -> None:
    assert "long sequence" not in names_of(built("linear", "attention"))
    assert names_of(built("linear", "attention", precision="fp16"))["long sequence"] == "passed"


def test_every_variant_has_its_adversarial_cases(small_spec: Callable[..., BuildSpec], variant: str) -> None:
    spec = small_spec(variant, "attention")
    found = adversarial_inputs(module_from_spec(spec.model, 0), spec)
    hostile = spec.attention.hostile
    assert bool(hostile.key_gaps) == variant.startswith("aft-")
    assert hostile.zero_tokens == (variant == "lsh")
    assert hostile.small_key is not None or variant != "linear"
    expected = {"identical tokens", *(f"key gap {gap}" for gap in hostile.key_gaps)}
    expected |= {"zero tokens"} if hostile.zero_tokens else set()
    expected |= {"small denominators"} if hostile.small_key is not None else set()
    assert found.keys() == expected
    assert (found["identical tokens"]["hidden_states"] == found["identical tokens"]["hidden_states"][:, :1]).all()


def test_key_gaps_and_small_denominators_are_what_they_say() -> None:
    for gap in AFTSpec.hostile.key_gaps:
        keys = keys_of("aft-simple", f"key gap {gap}")
        spread = np.quantile(keys, 0.9) - np.quantile(keys, 0.1)
        assert gap * 0.9 < spread < gap * 1.1 + 12  # keys of plain tokens lie within about 6 of their centre
        # and the larger ones are where exp overflows in float32
        assert np.quantile(keys, 0.9) > gap * 0.9
    assert np.median(keys_of("linear", "small denominators")) == pytest.approx(-16, abs=1)


def test_key_gaps_of_wide_layers_are_within_what_float32_can_answer() -> None:
    # with the states that an exact solution asks for, PyTorch was 2e-5 from float64, and healthy builds failed
    spec = build_spec_from_options({"variant": "aft-simple", "scope": "attention", "dim": 1024, "seq_len": 32}, None)
    module = module_from_spec(spec.model, 0)
    exact = copy.deepcopy(module).double()
    for name, inputs in adversarial_inputs(module, spec).items():
        case = Case(name, inputs, run_module(module, spec, inputs))
        assert largest_change(case, run_module(exact, spec, inputs)) < arithmetic_limit(spec).value / 2, name


def keys_of(variant: str, name: str) -> np.ndarray:
    spec = build_spec_from_options({"variant": variant, "scope": "attention"}, None)
    module: Any = module_from_spec(spec.model, 0)
    hidden = adversarial_inputs(module, spec)[name]["hidden_states"]
    with torch.no_grad():
        return np.asarray(module.key(torch.from_numpy(hidden)).numpy())


def test_the_limit_of_an_adversarial_case_follows_what_rounding_does_to_pytorch_itself(
    small_spec: Callable[..., BuildSpec],
) -> None:
    spec = small_spec("nystrom", "attention")
    plain = arithmetic_limit(spec)
    assert case_limit(spec, 0.0) == plain
    assert case_limit(spec, plain.value / 4) == plain
    raised = case_limit(spec, 1e-3)
    assert raised.value == 4e-3
    assert raised.reason == "4 × what rounding changes in PyTorch itself (0.001)"


def test_only_adversarial_cases_have_an_error_of_their_own(built: Built) -> None:
    cases = load_reference(built("aft-simple", "attention").reference_path)
    with_own = {case.name for case in cases if case.own_error > 0}
    assert with_own == {"identical tokens", *(f"key gap {gap}" for gap in AFTSpec.hostile.key_gaps)}
    # float32 roundings, amplified by at most the largest key: far from the limits of fp16, let alone a wrong formula
    assert max(case.own_error for case in cases) < 1e-4


def arrays(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_measures_are_those_of_their_formulas() -> None:
    expected, noise = arrays(2, 5, 7), 1e-3 * arrays(2, 5, 7)[::-1]
    actual = expected + noise
    figures = Figures()
    for row in range(2):
        figures.add(actual[row], expected[row])
    error = actual.astype(np.float64) - expected
    measures = figures.measures()
    assert measures["max_abs"] == np.abs(error).max()
    assert measures["rms_error"] == pytest.approx(np.sqrt(np.mean(error**2)) / np.sqrt(np.mean(expected**2.0)))
    flat = actual.ravel().astype(np.float64), expected.ravel().astype(np.float64)
    cosine = flat[0] @ flat[1] / (np.linalg.norm(flat[0]) * np.linalg.norm(flat[1]))
    assert measures["cosine"] == pytest.approx(cosine, abs=1e-12)


def test_two_answers_of_zeros_have_the_same_direction() -> None:
    figures = Figures()
    figures.add(np.zeros((5, 7)), np.zeros((5, 7)))
    assert figures.measures() == {"max_abs": 0.0, "rms_error": 0.0, "cosine": 1.0}
    figures.add(arrays(5, 7), np.zeros((5, 7)))
    assert figures.measures()["cosine"] == 0.0


def test_the_histogram_counts_every_kept_element_once() -> None:
    expected = arrays(1, 4, 8)
    actual = expected.copy()
    actual[0, 0, 0] += 1e-4
    case = Case("c", {"attention_mask": np.array([[1, 1, 1, 0]])}, {OUTPUT: expected})
    check = check_arithmetic(case, {OUTPUT: actual}, Limit(1e-5, "of the test"))
    assert len(check.histogram) == len(HISTOGRAM_EDGES) + 1
    assert sum(check.histogram) == 3 * 8
    assert check.histogram[0] == 3 * 8 - 1
    actual[0, 0, 1] = np.nan
    assert check_arithmetic(case, {OUTPUT: actual}, Limit(1e-5, "of the test")).histogram[-1] == 1
    assert check.seq_len == 4


def test_a_failed_check_names_the_worst_element_with_both_values() -> None:
    expected = arrays(2, 4, 8)
    actual = expected.copy()
    actual[1, 2, 5] = 9.0
    case = Case("c", {"attention_mask": np.array([[1, 1, 1, 1], [0, 1, 1, 1]])}, {OUTPUT: expected})
    check = check_arithmetic(case, {OUTPUT: actual}, Limit(1e-5, "of the test"))
    assert check.status == "failed"
    assert check.worst is not None
    assert (check.worst.output, check.worst.index, check.worst.actual) == (OUTPUT, (1, 2, 5), 9.0)
    assert check.worst.expected == float(expected[1, 2, 5])
    assert f"worst at {OUTPUT}[1, 2, 5]: 9, reference" in check.detail


def test_values_that_are_not_finite_make_the_measures_so_without_a_warning() -> None:
    expected = arrays(1, 2, 3)
    for bad in (np.nan, np.inf):
        actual = expected.copy()
        actual[0, 1, 1] = bad
        check = check_arithmetic(
            Case("c", {"attention_mask": np.ones((1, 2), dtype=np.int64)}, {OUTPUT: expected}),
            {OUTPUT: actual},
            Limit(1.0, "of the test"),
        )
        assert check.status == "failed"
        assert not np.isfinite(check.measures["max_abs"])
        assert sum(check.histogram) == 6


@pytest.mark.parametrize("wrong_from", [1, 2, 3])
def test_an_answer_of_another_shape_is_a_failed_check_in_every_run(wrong_from: int) -> None:
    """OpenVINO in bfloat16 has returned an empty array where a batch was expected."""
    spec = spec_of("softmax", "attention")
    mask = np.ones((2, 8), dtype=np.int64)
    mask[1, 5:] = 0
    hidden = np.ones((2, 8, 32), dtype=np.float32)
    case = Case("export", {"hidden_states": hidden, "attention_mask": mask}, {OUTPUT: hidden})
    runs = itertools.count(1)

    def sometimes_empty(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        answer = inputs["hidden_states"]
        return {OUTPUT: answer if next(runs) < wrong_from else answer[:0, :0]}

    checks = list(run_checks(Fake(sometimes_empty), [case], spec))
    (failed,) = [check for check in checks if check.status == "failed"]
    assert failed.kind == Kind.SIGNATURE
    assert "0, 0, 32" in failed.detail


def test_infinities_must_be_the_same_and_nan_of_the_reference_is_not_compared() -> None:
    expected = np.array([[1.0, -np.inf, np.nan, 2.0]], np.float32)
    case = Case("some", {}, {OUTPUT: expected[None]}, tokens={KEPT: np.ones((1, 1), bool)}, allows_nan=True)
    limit = Limit(1e-6, "")

    def outcomes(*values: float) -> tuple[str, str]:
        outputs = {OUTPUT: np.array([[values]], np.float32)}
        return (
            check_finite(case.label, outputs, case=case).status,
            check_arithmetic(case, outputs, limit).status,
        )

    assert outcomes(1, -np.inf, np.nan, 2) == ("passed", "passed")
    assert outcomes(1, -np.inf, 7, 2) == ("passed", "passed")
    assert outcomes(1, np.inf, 0, 2) == ("failed", "failed")
    assert outcomes(1, -1e30, 0, 2) == ("passed", "failed")
    assert outcomes(1, -np.inf, 0, np.nan) == ("failed", "failed")
    assert outcomes(1.1, -np.inf, 0, 2) == ("passed", "failed")
    assert case.undefined == (1, 4)
    case = dataclasses.replace(case, allows_nan=False)
    assert outcomes(1, -np.inf, np.nan, 2) == ("failed", "failed")


def test_logits_of_hidden_keys_do_not_make_other_errors_look_small() -> None:
    expected = np.array([[1.0, np.finfo(np.float32).min, 2.0]], np.float32)
    case = Case("some", {}, {OUTPUT: expected[None]}, tokens={KEPT: np.ones((1, 1), bool)})
    off = expected + np.array([[0.01, 0, 0]], np.float32)
    check = check_arithmetic(case, {OUTPUT: off[None]}, Limit(1e-6, ""))
    # relative to the RMS of 1 and 2
    assert check.value == pytest.approx(0.01 / np.sqrt(2.5), rel=1e-5)
    assert check.measures["rms_error"] == pytest.approx(0.01 / np.sqrt(5), rel=1e-5)


def test_a_module_of_ours_whose_answer_is_not_finite_is_no_reference() -> None:
    spec = spec_of("softmax")
    module = module_from_spec(spec.model, spec.seed)
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    with pytest.raises(StageError, match="NaN or infinite elements in last_hidden_state; expected numbers"):
        reference_from_model(model_of_ours(module), spec, 0, names=("export",))
