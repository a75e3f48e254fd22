"""The answers of a user's own model as it was given: the reference for the file that is exported from a copy of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from effexport.dtypes import numpy_dtype
from effexport.errors import StageError
from effexport.export.onnx_from_module import at_precision
from effexport.models.adapters.adapter import frozen, named
from effexport.models.module_spec import ModuleSpec
from effexport.models.user_model import recorded_results
from effexport.proof.answers import FLOAT64_CASES, Answers, with_hash_noise
from effexport.proof.cases import Case
from effexport.proof.checks.result import METRIC, Check, Kind, judged, not_run
from effexport.proof.float64 import Float64Module, PeakMemory
from effexport.proof.inputs.random import case_inputs, kept_tokens
from effexport.proof.metrics import largest_change, value_error
from effexport.proof.module_runs import bucket_name, given_buckets, recorded_hashes, run_module
from effexport.proof.repeated_runs import Answer, RepeatedRuns
from effexport.proof.tolerances import Limit, reference_limit
from effexport.proof.warm_up import warm_up
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.models.user_model import UserModel

STAGE = "reference"
# The case of the inputs that the user has given. Without it or the shape of the export, there is no reference.
EXAMPLE = "example"
NEEDED = ("export", EXAMPLE)


def answers_of_user(user: UserModel, spec: BuildSpec, seed: int) -> Answers:
    """The answers of the original to every case, and how close the copy with our layers comes to them in PyTorch.

    Cases that the original does not take are reported as not run. Raises StageError if it fails at the shape of the
    export or on the user's own inputs, or does not give the same answer twice.
    """
    warm_up()
    runs = RepeatedRuns("PyTorch")
    original = Original(user, spec, runs)
    exact = Float64Module(user.original, spec, runs, as_in=lambda copy, case: frozen(copy, user.adapted))
    cases: list[Case] = []
    checks: list[Check] = []
    for name, inputs in (case_inputs(spec, seed) | example_case(user, spec)).items():
        empty = Case(name, inputs, {}, tokens=kept_tokens(inputs, spec), pooled=spec.pooled_outputs)
        with PeakMemory() as peak:
            try:
                case, check = original.answer(empty)
            except OriginalFailedError as error:
                if name in NEEDED:
                    raise StageError(STAGE, f"{error}") from error
                checks.append(not_run(Kind.SHAPES, str(error), empty.label))
                continue
        checks += [check] * bool(user.adapted.replaced)
        if name in FLOAT64_CASES:
            checks.append(exact.check(case, peak.size_bytes))
        cases.append(case)
    return Answers(cases, [runs.check, *checks])


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
    return {EXAMPLE: inputs}


class OriginalFailedError(Exception):
    """The user's model raised an error on the inputs of a case; the message says which."""


class Original:
    """Runs the original and our copy of it on the same inputs."""

    def __init__(self, user: UserModel, spec: BuildSpec, runs: RepeatedRuns) -> None:
        assert isinstance(spec.model, ModuleSpec)
        self._user, self._spec, self._runs, self._name = user, spec, runs, spec.model.module
        self._hashed = spec.attention.is_hashed
        self._rounded = at_precision(user.module, spec.precision) if self._hashed else user.module

    def answer(self, case: Case) -> tuple[Case, Check]:
        """The case with the outputs of the original, its buckets, and their margins and noise in our copy; and how far
        our copy is from it, both in PyTorch."""

        def compute() -> Answer:
            outputs, buckets = self._run_original(case)
            # with the buckets of the original, so that a tie of two does not count as a difference
            with given_buckets(self._user.module, buckets), recorded_hashes(self._user.module) as (own, margins):
                ours = run_module(self._user.module, self._spec, case.inputs)
            return {"outputs": outputs, "buckets": dict(own), "margins": dict(margins), "ours": ours}

        answer = self._runs.answer(case.label, compute)
        full = dataclasses.replace(
            case, outputs=answer["outputs"], buckets=answer["buckets"], margins=answer["margins"]
        )
        limit = reference_limit(self._spec)
        limit = Limit(limit.value, f"float32 rounding of the same formula: {limit.reason}")
        value = largest_change(full, answer["ours"])
        detail = ""
        if not value <= limit.value:
            layer = first_other_layer(self._user, self._spec, full)
            detail = f"the first layer that differs is {layer}" if layer else ""
        if self._hashed:
            full = with_hash_noise(full, self._user.module, self._rounded, self._spec, self._runs)
        return full, judged(Kind.REPLACEMENT, case.label, METRIC, value, limit, detail)

    def _run_original(self, case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
        """The outputs of the original and the buckets of its hashes. Raises OriginalFailedError."""
        user = self._user
        try:
            with frozen(user.original, user.adapted) as drawn, recorded_hashes(user.original) as (buckets, _):
                outputs = run_module(user.original, self._spec, case.inputs)
        except Exception as error:  # whatever the user's code raises
            text = " ".join(str(error).split()) or type(error).__name__
            raise OriginalFailedError(f"{self._name} itself fails on {case.label}: {text}") from error
        return outputs, buckets | {bucket_name(path): value.numpy() for path, value in drawn.items()}


def first_other_layer(user: UserModel, spec: BuildSpec, case: Case) -> str:
    """The replaced layer whose result in our copy is first to differ from that in the original; "" if there is none."""
    with frozen(user.original, user.adapted), recorded_results(user.original) as wanted:
        run_module(user.original, spec, case.inputs)
    with given_buckets(user.module, case.buckets), recorded_results(user.module) as found:
        run_module(user.module, spec, case.inputs)
    limit = reference_limit(spec).value
    for path in [path for path in wanted if path in user.adapted.replaced]:
        pairs = zip(found.get(path, []), wanted[path], strict=False)
        if any(not value_error(actual.numpy(), expected.numpy()) <= limit for actual, expected in pairs):
            return named(user.original, path)
    return ""
