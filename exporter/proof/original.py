"""The answers of a user's own model as it was given: the reference for the file that is exported from a copy of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from effexport.dtypes import named_sizes, numpy_dtype
from effexport.errors import StageError, is_out_of_memory
from effexport.export.failures import first_paragraph
from effexport.export.onnx_from_module import at_precision
from effexport.models.adapters.adapter import frozen, named
from effexport.models.module_inputs import resized
from effexport.models.one_precision import OnePrecision
from effexport.models.size_formula import shape_of
from effexport.models.user_model import tensors_of
from effexport.proof.answers import FLOAT64_CASES, Answers, with_hash_noise
from effexport.proof.cases import KEPT, Case
from effexport.proof.checks.invariance import Worst, rows_of, worst_of_batches
from effexport.proof.checks.result import METRIC, OTHER_LAYER, Check, Kind, judged, not_run
from effexport.proof.float64 import Float64Module, PeakMemory
from effexport.proof.inputs.random import EXPORT, NOTHING_KEPT, case_inputs
from effexport.proof.kept_tokens import has_tokens, kept_dims, kept_tokens
from effexport.proof.metrics import largest_change, rms_change, value_error
from effexport.proof.module_runs import bucket_name, given_buckets, recorded_hashes, run_module
from effexport.proof.repeated_runs import Answer, RepeatedRuns
from effexport.proof.tolerances import OWN_ERROR_FACTOR, Limit, reference_limit
from effexport.proof.warm_up import warm_up
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from torch import nn

    from effexport.dtypes import Array
    from effexport.models.user_model import UserModel

STAGE = "reference"
# The case of the inputs that the user has given. Without it or the shape of the export, there is no reference.
EXAMPLE = "example"
NEEDED = (EXPORT, EXAMPLE)
# How much smaller and larger the numbers of other samples may be.
COMPANY = (1e-3, 1e3)


def inputs_of_user(user: UserModel, spec: BuildSpec, seed: int) -> dict[str, dict[str, Array]]:
    """The inputs of every case by name: drawn ones, and those that the user has given."""
    return case_inputs(spec, seed) | example_case(user, spec)


def answers_of_user(user: UserModel, spec: BuildSpec, inputs_by_case: Mapping[str, Mapping[str, Array]]) -> Answers:
    """The answers of the original to every case, and how close the copy with our layers comes to them in PyTorch.

    Cases to which the original has no answer are reported as not run. Raises StageError if it has none at the shape of
    the export or to the user's own inputs, or does not give the same answer twice.
    """
    warm_up()
    runs = RepeatedRuns("PyTorch")
    original = Original(user, spec, runs)
    exact = Float64Module(user.original, spec, runs, as_in=original.as_in)
    cases: list[Case] = []
    checks: list[Check] = []
    for name, inputs in inputs_by_case.items():
        with PeakMemory() as peak:
            try:
                case, plain, check = defined_answer(name, inputs, original, user, spec)
            except OriginalFailedError as error:
                if name in NEEDED:
                    raise StageError(STAGE, f"{error}") from error
                checks.append(not_run(Kind.SHAPES, str(error), empty_case(name, inputs, spec).label))
                continue
        if name == NOTHING_KEPT and check.status == "failed":
            reason = f"where a sample keeps no token, effexport's layers answer otherwise than {original.name} itself"
            checks.append(not_run(Kind.SHAPES, reason, case.label))
            continue
        checks += [check] * bool(user.adapted.replaced)
        if name in FLOAT64_CASES:
            checks.append(exact.check(plain, peak.size_bytes))
        # alone, a sample of which nothing is kept may be an error of PyTorch
        if not spec.why_samples_mix and len(case.keep) > 1 and name != NOTHING_KEPT:
            checks.append(original.check_independent(case))
        cases.append(case)
    return Answers(cases, [runs.check, *checks])


def empty_case(name: str, inputs: Mapping[str, Array], spec: BuildSpec) -> Case:
    tokens = kept_tokens(inputs, spec)
    if name == NOTHING_KEPT:  # all of its answer is compared
        tokens = {KEPT: np.ones(shape_of(kept_dims(spec), named_sizes(spec.inputs, inputs)), bool)}
    return Case(name, inputs, {}, tokens=tokens, pooled=spec.pooled_outputs, allows_nan=True)


def defined_answer(
    name: str, inputs: Mapping[str, Array], original: Original, user: UserModel, spec: BuildSpec
) -> tuple[Case, Case, Check]:
    """What `Original.answer` gives for inputs to which the original has an answer without NaN: those of a case or, if
    it has none to them, those with values of the example in their place.

    A case that is needed may have NaN with the values of the example, but not only. Raises OriginalFailedError, for
    the inputs of the case, if there is no such answer.
    """
    first: OriginalFailedError | None = None
    tried = list(with_examples(inputs, user, spec)) if name not in (EXAMPLE, NOTHING_KEPT) else []
    for number, values in enumerate([inputs, *tried]):
        case = empty_case(name, values, spec)
        try:
            answer = original.answer(case)
        except OriginalFailedError as error:
            first = first or error
            continue
        is_last = name in NEEDED and number == len(tried)
        undefined, compared = answer[0].undefined
        if undefined == 0 or (is_last and user.examples and undefined < compared):
            return answer
        first = first or OriginalFailedError(
            f"{original.name} itself answers {case.label} with NaN ({undefined:,} of {compared:,} elements); expected "
            "numbers: give example inputs to which it has an answer, or check its weights"
        )
    assert first is not None
    raise first


def with_examples(inputs: Mapping[str, Array], user: UserModel, spec: BuildSpec) -> Iterator[dict[str, Array]]:
    """Inputs of the same shapes with values of the user's example in the place of drawn ones: first in those that are
    integers or booleans, then in all; those of the mask of tokens stay."""
    if not user.examples:
        return
    sizes = named_sizes(spec.inputs, inputs)
    own = {
        tensor.name: resized(user.examples[tensor.name], tensor.dims, sizes).numpy().astype(numpy_dtype(tensor.dtype))
        for tensor in spec.inputs
        if tensor.name != spec.model.mask
    }
    whole = {name: array for name, array in own.items() if array.dtype.kind != "f"}
    if whole:
        yield {**inputs, **whole}
    yield {**inputs, **own}


def example_case(user: UserModel, spec: BuildSpec) -> dict[str, dict[str, Array]]:
    """The inputs that the user has given, as a case, if the exported file takes their shapes."""
    if not user.examples:
        return {}
    inputs: dict[str, Array] = {}
    for tensor in spec.inputs:
        array = user.examples[tensor.name].numpy()
        fits = all(isinstance(dim, str) or dim == size for dim, size in zip(tensor.dims, array.shape, strict=True))
        length = array.shape[tensor.dims.index("seq")] if "seq" in tensor.dims else 1
        if not fits or (spec.max_seq_len is not None and length > spec.max_seq_len):
            return {}
        inputs[tensor.name] = array.astype(numpy_dtype(tensor.dtype))
    # of a sample that is hidden as a whole, nothing could be compared
    keep = empty_case(EXAMPLE, inputs, spec).keep
    return {EXAMPLE: inputs} if keep.any(axis=-1).all() or not has_tokens(spec) else {}


class OriginalFailedError(Exception):
    """The user's model raised an error on the inputs of a case; the message says which."""


class Original:
    """Runs the original and our copy of it on the same inputs.

    An original that computes in several types, under autocast for one, is also run in float32 alone, as our copy is:
    this is what the copy must agree with, and how far it is from what the original answers is the original's own error.
    """

    def __init__(self, user: UserModel, spec: BuildSpec, runs: RepeatedRuns) -> None:
        self.name = spec.model.title
        self._user, self._spec, self._runs = user, spec, runs
        self._hashed = spec.attention.is_hashed
        self._mixes_types = mixes_types(user)
        self._rounded = at_precision(user.module, spec.precision) if self._hashed else user.module

    def answer(self, case: Case) -> tuple[Case, Case, Check]:
        """The case with the outputs of the original, its buckets, and their margins and noise in our copy; the same
        with what it computes in float32 alone; and how far our copy is from that, both in PyTorch."""

        def compute() -> Answer:
            outputs, buckets = self._run_original(case)
            plain = outputs
            if self._mixes_types:
                with in_float32(self._user):
                    plain, buckets = self._run_original(case)
            if not (self._user.adapted.replaced or self._hashed):
                # the copy is the original
                return {"outputs": outputs, "plain": plain, "buckets": buckets, "margins": {}, "ours": plain}
            # with the buckets of the original, so that a tie of two does not count as a difference
            with given_buckets(self._user.module, buckets), recorded_hashes(self._user.module) as (own, margins):
                ours = run_module(self._user.module, self._spec, case.inputs)
            return {"outputs": outputs, "plain": plain, "buckets": dict(own), "margins": dict(margins), "ours": ours}

        answer = self._runs.answer(case.label, compute)
        full = dataclasses.replace(
            case, outputs=answer["outputs"], buckets=answer["buckets"], margins=answer["margins"]
        )
        if self._mixes_types:
            full = dataclasses.replace(full, own_error=largest_change(full, answer["plain"]))
        plain = dataclasses.replace(full, outputs=answer["plain"])
        limit = reference_limit(self._spec)
        limit = Limit(limit.value, f"float32 rounding of the same formula: {limit.reason}")
        value = largest_change(plain, answer["ours"])
        detail = ""
        if not value <= limit.value:
            layer = first_other_layer(self._user, self._spec, plain)
            detail = f"{OTHER_LAYER} {layer}" if layer else ""
        if self._hashed:
            full = self._with_noise(full, plain.outputs)
        return full, plain, judged(Kind.REPLACEMENT, case.label, METRIC, value, limit, detail)

    def check_independent(self, case: Case) -> Check:
        """Whether the samples of a case get the same answers in other batches.

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
            return self._run_original(dataclasses.replace(case, inputs=inputs, tokens=tokens))[0]

        metric = "max |other batch − batch| / RMS"
        try:
            outputs = run(range(count))
            worst = worst_of_batches(case, outputs, self._spec, run)
        except OriginalFailedError as error:
            return Check(Kind.INDEPENDENT, case.label, metric, "failed", detail=str(error))
        if not self._hashed and worst.error <= limit.value:
            self._add_other_company(worst, case, outputs)
        return judged(Kind.INDEPENDENT, case.label, metric, worst.error, limit, worst.detail)

    def _add_other_company(self, worst: Worst, case: Case, outputs: Mapping[str, Array]) -> None:
        """The differences to every second sample that far smaller and far larger numbers in the others make: a maximum
        over the batch may be that of one sample whatever the order."""
        for scale in COMPANY:
            inputs = {name: array.copy() for name, array in case.inputs.items()}
            for array in inputs.values():
                if array.dtype.kind == "f":
                    array[1::2] *= scale
            try:
                answers, _ = self._run_original(dataclasses.replace(case, inputs=inputs))
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
                f"{self.name} does not run in PyTorch at {self._spec.precision}, so nothing says which buckets its "
                f"rounding changes: {first_paragraph(str(error))}; build with --precision fp32",
            ) from error
        # float32 alone is another precision than that of an original under autocast
        return dataclasses.replace(noisy, precision_noise=max(noisy.precision_noise, rms_change(case, plain)))

    @contextmanager
    def as_in(self, copy: nn.Module, case: Case) -> Iterator[None]:
        """Have a copy of the original in float64 use our numbers, and compute in no other type."""
        with frozen(copy, self._user.adapted), OnePrecision(torch.float64) if self._mixes_types else nullcontext():
            yield

    def _run_original(self, case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
        """The outputs of the original and the buckets of its hashes. Raises OriginalFailedError."""
        user = self._user
        try:
            with frozen(user.original, user.adapted) as drawn, recorded_hashes(user.original) as (buckets, _):
                outputs = run_module(user.original, self._spec, case.inputs)
        except Exception as error:  # whatever the user's code raises
            text = " ".join(str(error).split()) or type(error).__name__
            raise OriginalFailedError(f"{self.name} itself fails on {case.label}: {text}") from error
        return outputs, buckets | {bucket_name(path): value.numpy() for path, value in drawn.items()}


def mixes_types(user: UserModel) -> bool:
    """Whether the original computes in other types than float32, too."""
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

    handles = [
        user.original.get_submodule(path).register_forward_hook(functools.partial(compare, path), with_kwargs=True)
        for path in user.adapted.replaced
    ]
    try:
        buckets = given_buckets(user.module, case.buckets)
        with frozen(user.original, user.adapted), in_float32(user), buckets:
            run_module(user.original, spec, case.inputs)
    finally:
        for handle in handles:
            handle.remove()
    return named(user.original, others[0]) if others else ""
