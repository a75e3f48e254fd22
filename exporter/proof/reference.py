"""PyTorch's answers to the inputs of every case, each given twice, and the size of PyTorch's own noise and error.

The answers are those of the model as it was given: of a user's own model, the original, from a copy of which the file
is exported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from effexport.base.dtypes import Array, named_sizes, numpy_dtype
from effexport.base.errors import StageError, is_out_of_memory
from effexport.base.spec import BuildSpec
from effexport.export.failures import first_paragraph
from effexport.export.onnx_from_module import at_precision
from effexport.models.adapters.adapter import frozen, named
from effexport.models.size_formula import shape_of
from effexport.models.user.inputs import resized
from effexport.models.user.model import UserModel, tensors_of
from effexport.models.user.modes import OnePrecision
from effexport.models.validation import in_one_line
from effexport.proof.cases import KEPT, Answers, Case, has_tokens, kept_tokens
from effexport.proof.check import METRIC, OTHER_LAYER, Check, Kind, Limit, judged, not_run
from effexport.proof.checks.invariance import LargestError, rows_of, worst_of_batches
from effexport.proof.float64 import Float64Module, PeakMemory, warm_up
from effexport.proof.inputs import EXAMPLE, EXPORT, NOTHING_KEPT, adversarial_inputs, case_inputs, case_shapes
from effexport.proof.module_runs import (
    RepeatedRuns,
    bucket_name,
    given_buckets,
    recorded_run,
    repeated_outputs,
    run_module,
    with_hash_noise,
    with_rounded_weights,
)
from effexport.proof.tolerances import OWN_ERROR_FACTOR, largest_change, reference_limit, rms_change, value_error

STAGE = "reference"
# The cases that also run in float64: the shape of the export, and one in which the mask hides tokens.
FLOAT64_CASES = (EXPORT, "padded batch")
# Without these cases, there is no reference.
NEEDED = (EXPORT, EXAMPLE)
# How much smaller and larger the numbers of other samples may be.
COMPANY = (1e-3, 1e3)


def answers_of_model(model: UserModel, spec: BuildSpec, inputs_by_case: Mapping[str, Mapping[str, Array]]) -> Answers:
    """The answers of the original to every case, how far they are from float64, and how close our copy comes to them in
    PyTorch, if it has other layers.

    Cases to which a user's original has no answer are reported as not run. Raises StageError if it has none at the
    shape of the export or to the user's own inputs, or does not give the same answer twice.
    """
    warm_up()
    runs = RepeatedRuns("PyTorch")
    original = Original(model, spec, runs)
    exact = Float64Module(model.original, spec, runs, as_in=original.as_in)
    cases: list[Case] = []
    checks: list[Check] = []
    for name, inputs in inputs_by_case.items():
        try:
            answer = defined_answer(name, inputs, original, model, spec)
        except OriginalFailedError as error:
            if name in NEEDED:
                raise StageError(STAGE, f"{error}") from error
            checks.append(not_run(Kind.SHAPES, str(error), empty_case(name, inputs, spec).label))
            continue
        if name == NOTHING_KEPT and answer.check is not None and answer.check.status == "failed":
            reason = f"where a sample keeps no token, effexport's layers answer otherwise than {original.name} itself"
            checks.append(not_run(Kind.SHAPES, reason, answer.case.label))
            continue
        if answer.check is not None:
            checks.append(answer.check)
        if name in FLOAT64_CASES:
            checks.append(exact.check(answer.plain, answer.peak_bytes))
        # alone, a sample of which nothing is kept may be an error of PyTorch
        if spec.model.independent_samples and len(answer.case.keep) > 1 and name != NOTHING_KEPT:
            checks.append(original.check_independent(answer.case))
        cases.append(answer.case)
    return Answers(cases, [runs.check, *checks])


def reference_from_model(model: UserModel, spec: BuildSpec, seed: int, names: Sequence[str] = ()) -> Answers:
    """The answers to the inputs of every case, or of those with these names: drawn ones, those that are hard, and those
    that the user has given."""
    inputs = case_inputs(spec, seed) | adversarial_inputs(model.module, spec) | example_case(model, spec)
    return answers_of_model(model, spec, {name: own for name, own in inputs.items() if not names or name in names})


def are_independent(model: UserModel, spec: BuildSpec) -> bool:
    """True if no sample of a batch depends on the others in PyTorch, on drawn inputs; false if it has no answer."""
    original = Original(model, spec, RepeatedRuns("PyTorch"))
    cases = [empty_case(name, inputs, spec) for name, inputs in case_inputs(spec, spec.seed).items()]
    several = [case for case in cases if len(case.keep) > 1 and case.name != NOTHING_KEPT]
    try:
        answers = [original.answer(case).case for case in several[-1:]]
    except OriginalFailedError:
        return False
    return bool(answers) and all(original.check_independent(case).status == "passed" for case in answers)


def empty_case(name: str, inputs: Mapping[str, Array], spec: BuildSpec) -> Case:
    tokens = kept_tokens(inputs, spec)
    if name == NOTHING_KEPT:  # all of its answer is compared
        tokens = {KEPT: np.ones(shape_of(spec.model.kept_dims, named_sizes(spec.inputs, inputs)), bool)}
    return Case(name, inputs, {}, tokens=tokens, pooled=spec.pooled_outputs, allows_nan=not spec.model.answers_always)


def defined_answer(
    name: str, inputs: Mapping[str, Array], original: Original, model: UserModel, spec: BuildSpec
) -> OwnAnswer:
    """The answer of the original to inputs for which it has one without NaN: those of a case or, if it has none to
    them, those with values of the example in their place.

    A case that is needed may have NaN with the values of the example, but not only. Raises OriginalFailedError, for
    the inputs of the case, if there is no such answer, and StageError if a module of ours has none.
    """
    first: OriginalFailedError | None = None
    tried = list(with_examples(inputs, model, spec)) if name not in (EXAMPLE, NOTHING_KEPT) else []
    for number, values in enumerate([inputs, *tried]):
        case = empty_case(name, values, spec)
        try:
            answer = original.answer(case)
        except OriginalFailedError as error:
            first = first or error
            continue
        is_last = name in NEEDED and number == len(tried)
        undefined, compared = answer.case.undefined
        if undefined == 0 or (is_last and model.examples and undefined < compared):
            return answer
        first = first or OriginalFailedError(
            f"{original.name} itself answers {case.label} with NaN ({undefined:,} of {compared:,} elements); expected "
            "numbers: give example inputs to which it has an answer, or check its weights"
        )
    assert first is not None
    raise first


def with_examples(inputs: Mapping[str, Array], model: UserModel, spec: BuildSpec) -> Iterator[dict[str, Array]]:
    """Inputs of the same shapes with values of the user's example in the place of drawn ones: first in those that are
    integers or booleans, then in all; those of the mask of tokens stay."""
    if not model.examples:
        return
    sizes = named_sizes(spec.inputs, inputs)
    own = {
        tensor.name: resized(model.examples[tensor.name], tensor.dims, sizes).numpy().astype(numpy_dtype(tensor.dtype))
        for tensor in spec.inputs
        if tensor.name != spec.model.mask
    }
    whole = {name: array for name, array in own.items() if array.dtype.kind != "f"}
    if whole:
        yield {**inputs, **whole}
    yield {**inputs, **own}


def example_case(model: UserModel, spec: BuildSpec) -> dict[str, dict[str, Array]]:
    """The inputs that the user has given, as a case, if the exported file takes their shapes."""
    if not model.examples:
        return {}
    inputs: dict[str, Array] = {}
    for tensor in spec.inputs:
        array = model.examples[tensor.name].numpy()
        fits = all(isinstance(dim, str) or dim == size for dim, size in zip(tensor.dims, array.shape, strict=True))
        length = array.shape[tensor.dims.index("seq")] if "seq" in tensor.dims else 1
        if not fits or (spec.model.max_seq_len is not None and length > spec.model.max_seq_len):
            return {}
        inputs[tensor.name] = array.astype(numpy_dtype(tensor.dtype))
    # of a sample that is hidden as a whole, nothing could be compared
    keep = empty_case(EXAMPLE, inputs, spec).keep
    return {EXAMPLE: inputs} if keep.any(axis=-1).all() or not has_tokens(spec) else {}


class OriginalFailedError(Exception):
    """The user's model raised an error on the inputs of a case; the message says which."""


@dataclass(frozen=True)
class OwnAnswer:
    """PyTorch's answer to a case.

    case: with the outputs of the original, its buckets, and their margins and noise in our copy.
    plain: with the outputs of the original in float32 alone.
    check: of our copy against those; None if it has no other layers.
    peak_bytes: of the tensors of a run of one of FLOAT64_CASES.
    """

    case: Case
    plain: Case
    check: Check | None
    peak_bytes: int


class Original:
    """Runs the original and our copy of it on the same inputs. A module of ours is its own copy.

    An original that computes in several types, under autocast for one, is also run in float32 alone, as our copy is:
    this is what the copy must agree with, and how far it is from what the original answers is the original's own error.
    """

    def __init__(self, model: UserModel, spec: BuildSpec, runs: RepeatedRuns) -> None:
        self.name = spec.model.title
        self._user, self._spec, self._runs = model, spec, runs
        self._hashed = spec.attention.is_hashed
        self._mixes_types = mixes_types(model)
        self._rounded = at_precision(model.module, spec.arithmetic) if self._hashed else model.module

    def answer(self, case: Case) -> OwnAnswer:
        """Raises OriginalFailedError for a user's original without an answer, and StageError for a module of ours."""

        def compute() -> dict[str, dict[str, Array]]:
            found = self._run_original(case)
            if self._mixes_types:
                with in_float32(self._user):
                    plain = self._run_original(case)
                found = plain | {"outputs": found["outputs"], "plain": plain["outputs"]}
            if self._user.adapted.replaced:
                # with the buckets of the original, so that a tie of two does not count as a difference
                with given_buckets(self._user.module, found["buckets"]):
                    ours = recorded_run(self._user.module, self._spec, case.inputs)
                found |= {"ours": ours["outputs"], "buckets": ours["buckets"], "margins": ours["margins"]}
            return found

        with PeakMemory() if case.name in FLOAT64_CASES else nullcontext() as peak:
            answer = dict(self._runs.answer(case.label, compute))
        ours, plain_outputs = answer.pop("ours", None), answer.pop("plain", answer["outputs"])
        full = case.with_parts(answer)
        if self._spec.model.answers_always:
            check_finite_reference(full)
        plain = replace(full, outputs=plain_outputs)
        if self._mixes_types:
            full = replace(full, own_error=largest_change(full, plain_outputs))
        check = None if ours is None else self._check_copy(plain, ours)
        if self._hashed:
            full = self._with_noise(full, plain_outputs)
        elif self._spec.model.answers_always and case.name not in case_shapes(self._spec):
            full = replace(full, own_error=change_by_rounding(full, self._user.module, self._spec, self._runs))
        return OwnAnswer(full, plain, check, 0 if peak is None else peak.size_bytes)

    def _check_copy(self, plain: Case, ours: Mapping[str, Array]) -> Check:
        """A check of the outputs of our copy against those of the original."""
        limit = reference_limit(self._spec)
        limit = Limit(limit.value, f"float32 rounding of the same formula: {limit.reason}")
        value = largest_change(plain, ours)
        detail = ""
        if not value <= limit.value:
            layer = first_other_layer(self._user, self._spec, plain)
            detail = f"{OTHER_LAYER} {layer}" if layer else ""
        return judged(Kind.REPLACEMENT, plain.label, METRIC, value, limit, detail)

    def check_independent(self, case: Case) -> Check:
        """A check that the samples of a case get the same answers in other batches.

        A model that hashes is our copy with the buckets of the case, or a near-tie could tell a sample from itself.
        """
        count, limit = len(case.keep), reference_limit(self._spec)
        limit = Limit(max(limit.value, OWN_ERROR_FACTOR * case.own_error), "rounding of float32, in PyTorch itself")

        def run(rows: Sequence[int]) -> Mapping[str, Array]:
            inputs = rows_of(case.inputs, rows, count)
            if self._hashed:
                with given_buckets(self._user.module, rows_of(case.buckets, rows, count)):
                    return run_module(self._user.module, self._spec, inputs)
            tokens = rows_of(case.tokens, rows, count)
            return self._run_original(replace(case, inputs=inputs, tokens=tokens))["outputs"]

        metric = "max |other batch − batch| / RMS"
        try:
            outputs = run(range(count))
            worst = worst_of_batches(case, outputs, self._spec, run)
        except OriginalFailedError as error:
            return Check(Kind.INDEPENDENT, case.label, metric, "failed", detail=str(error))
        if not self._hashed and worst.error <= limit.value:
            self._add_other_company(worst, case, outputs)
        return judged(Kind.INDEPENDENT, case.label, metric, worst.error, limit, worst.detail)

    def _add_other_company(self, worst: LargestError, case: Case, outputs: Mapping[str, Array]) -> None:
        """The differences to every second sample that far smaller and far larger numbers in the others make: a maximum
        over the batch may be that of one sample whatever the order."""
        for scale in COMPANY:
            inputs = {name: array.copy() for name, array in case.inputs.items()}
            for array in inputs.values():
                if array.dtype.kind == "f":
                    array[1::2] *= scale
            try:
                answers = self._run_original(replace(case, inputs=inputs))["outputs"]
            except OriginalFailedError:  # for numbers that it does not take
                continue
            for output, whole in outputs.items():
                for row in range(0, len(case.keep), 2):
                    detail = f"worst in {output} of sample {row} beside samples {scale:g} times as large"
                    worst.add(case.kept(output, answers[output], row), case.kept(output, whole, row), detail)

    def _with_noise(self, case: Case, plain: Mapping[str, Array]) -> Case:
        """plain: the outputs of the original in float32 alone."""
        try:
            noisy = with_hash_noise(case, self._user.module, self._rounded, self._spec, self._runs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise StageError(
                STAGE,
                f"{self.name} does not run in PyTorch at {self._spec.arithmetic}, so nothing says which buckets its "
                f"rounding changes: {first_paragraph(str(error))}; build with --precision fp32",
            ) from error
        # float32 alone is another precision than that of an original under autocast
        return replace(noisy, precision_noise=max(noisy.precision_noise, rms_change(case, plain)))

    @contextmanager
    def as_in(self, copy: nn.Module, case: Case) -> Iterator[None]:
        """Have a copy of the original in float64 use our numbers and the buckets of float32, as a hash in float64 may
        choose others, and compute in no other type."""
        in_float64 = OnePrecision(torch.float64) if self._mixes_types else nullcontext()
        with frozen(copy, self._user.adapted), given_buckets(copy, case.buckets), in_float64:
            yield

    def _run_original(self, case: Case) -> dict[str, dict[str, Array]]:
        """An answer of the original. Raises OriginalFailedError for a user's."""
        user = self._user
        try:
            with frozen(user.original, user.adapted) as drawn:
                found = recorded_run(user.original, self._spec, case.inputs)
        except Exception as error:
            if self._spec.model.answers_always:
                raise
            raise OriginalFailedError(f"{self.name} itself fails on {case.label}: {in_one_line(error)}") from error
        found["buckets"] |= {bucket_name(path): value.numpy() for path, value in drawn.items()}
        return found


def mixes_types(user: UserModel) -> bool:
    """True for an original that computes in other types than float32, too."""
    return getattr(user.module, "precision", None) is not None


def in_float32(user: UserModel) -> AbstractContextManager[object]:
    """Have the original compute in float32 alone for the length of a `with` block, like our copy."""
    return OnePrecision(torch.float32) if mixes_types(user) else nullcontext()


def first_other_layer(user: UserModel, spec: BuildSpec, case: Case) -> str:
    """The first replaced layer of which ours, given the inputs of the original, gives another result; "" if none
    does."""
    limit = reference_limit(spec).value
    others: list[str] = []

    def compare(path: str, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        ours = user.adapted.replaced[path](*given, **named)
        pairs = zip(tensors_of(ours), tensors_of(result), strict=False)
        if any(not value_error(actual.numpy(), expected.numpy()) <= limit for actual, expected in pairs):
            others.append(path)

    buckets = given_buckets(user.module, case.buckets)
    with ExitStack() as stack, frozen(user.original, user.adapted), in_float32(user), buckets:
        for path in user.adapted.replaced:
            hook = functools.partial(compare, path)
            stack.callback(user.original.get_submodule(path).register_forward_hook(hook, with_kwargs=True).remove)
        run_module(user.original, spec, case.inputs)
    return named(user.original, others[0]) if others else ""


def check_finite_reference(case: Case) -> None:
    """Raise StageError for an answer of our own modules that is not made of numbers: it could judge nothing."""
    for name, array in case.outputs.items():
        if bad := int(np.count_nonzero(~np.isfinite(array))):
            raise StageError(
                "reference",
                f"PyTorch's own answer to {case.label} has {bad:,} NaN or infinite elements in {name}; expected "
                "numbers: check the weights",
            )


def change_by_rounding(case: Case, module: nn.Module, spec: BuildSpec, runs: RepeatedRuns) -> float:
    """The change of PyTorch's own answer by rounding: the largest relative change of the outputs if every weight is off
    by one rounding at the spec's precision, or if the module runs in that precision, whichever is larger."""
    other = with_rounded_weights(module, spec.arithmetic)
    changes = [largest_change(case, repeated_outputs(case, other, spec, runs))]
    if spec.arithmetic != "fp32":
        lower = at_precision(module, spec.arithmetic)
        changes.append(largest_change(case, repeated_outputs(case, lower, spec, runs)))
    return float(np.max(changes))
