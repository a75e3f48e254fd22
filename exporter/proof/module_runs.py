"""Runs of a PyTorch module, repeated until they agree, with its hashes recorded, prescribed or drawn anew."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.dtypes import UNIT_ROUNDOFF, Array
from effexport.base.errors import StageError
from effexport.base.spec import BuildSpec
from effexport.models.encoder.spec import TOKENS
from effexport.plugins.ops import BUCKETS
from effexport.proof.cases import Case
from effexport.proof.check import ALL_CASES, CaseLabel, Check, Kind
from effexport.proof.tolerances import rms_change

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.export.onnx_graph import GraphSignature

    # Names the inputs and outputs of a module.
    Named = BuildSpec | GraphSignature

# The arrays of an answer by name, in parts: outputs, buckets, margins.
Answer = Mapping[str, Mapping[str, "Array"]]
# Two equal runs are enough if no other run differs. A reference that is wrong in every second run must not win by
# chance, so after a dispute the answer needs two runs more than any other.
LEAD = 2
# Enough to settle a dispute with two wrong runs, of which each gives other bits.
MOST_RUNS = 5
METRIC = "cases whose runs differ"


@dataclass
class RepeatedRuns:
    """Runs of a reference, at least two on the same inputs, of which the most frequent answer counts.

    The first large parallel call of a process was seen to be wrong by 1e-3 in half of its results, so a single run
    cannot be trusted to judge others.

    reference: its name in messages.
    disputed: cases in which two runs had different bits.
    """

    reference: str
    cases: set[CaseLabel] = field(default_factory=set)
    disputed: dict[CaseLabel, str] = field(default_factory=dict)

    def answer(self, case: CaseLabel, compute: Callable[[], Answer]) -> Answer:
        """The answer of `compute` that, bit by bit, LEAD more runs gave than any other answer.

        Raises StageError, which names the reference, if there is none after MOST_RUNS runs.
        """
        self.cases.add(case)
        answers: list[Answer] = []
        counts: list[int] = []
        for run in range(1, MOST_RUNS + 1):
            answer = compute()
            known = next((i for i, other in enumerate(answers) if same_bits(answer, other)), None)
            if known is None:
                answers.append(answer)
                counts.append(1)
                continue
            counts[known] += 1
            others = answers[:known] + answers[known + 1 :]
            if counts[known] - max(counts[:known] + counts[known + 1 :], default=0) >= LEAD:
                if others:
                    self.disputed[case] = f"{run - counts[known]} of {run} runs, {difference(answer, others[0])}"
                return answer
        raise StageError(
            "reference",
            f"{self.reference} gave {len(answers)} different answers in {MOST_RUNS} runs on the same inputs ({case}): "
            f"{difference(answers[-1], answers[-2])}; expected the same bits in every run, or one answer in at least "
            f"{LEAD} runs more than any other. The exported model was not judged. If the module draws random numbers, "
            f"or keeps a state between calls, remove that. Otherwise {self.reference} computes wrongly on this "
            "machine: try OMP_NUM_THREADS=1 or another release of PyTorch",
        )

    @property
    def check(self) -> Check:
        """The number of cases that further runs had to settle.

        It has no limit, because a case that was not settled is an error.
        """
        reason = (
            f"two equal runs are enough; if two differ, an answer is used if it leads every other by {LEAD} of at most "
            f"{MOST_RUNS} runs; otherwise the build stops"
        )
        details = "; ".join(f"{case}: {text}" for case, text in self.disputed.items())
        detail = ""
        if self.disputed:
            detail = (
                f"{self.reference} disagreed with itself in {len(self.disputed)} of {len(self.cases)} cases, and the "
                f"answer that it gave most often was used ({details})"
            )
        count = len(self.disputed)
        return Check(Kind.REFERENCE_REPEATABLE, ALL_CASES, METRIC, "passed", count, reason=reason, detail=detail)


def same_bits(a: Answer, b: Answer) -> bool:
    """True for two answers with the same arrays, bit by bit: NaN equals NaN, and 0 is not −0."""
    ours, theirs = flat(a), flat(b)
    return ours.keys() == theirs.keys() and all(
        array.dtype == theirs[name].dtype and np.array_equal(bits(array), bits(theirs[name]))
        for name, array in ours.items()
    )


def bits(array: Array) -> Array:
    """An array as unsigned integers of the same size."""
    return array.view(f"u{array.itemsize}")


def flat(answer: Answer) -> dict[str, Array]:
    """The arrays of an answer by part and name: `outputs last_hidden_state`."""
    return {f"{part} {name}": array for part, arrays in answer.items() for name, array in arrays.items()}


def difference(a: Answer, b: Answer) -> str:
    """`12 of 64 elements of outputs last_hidden_state, by up to 0.001`: the array of which most differs."""
    ours, theirs = flat(a), flat(b)
    if {name: x.shape for name, x in ours.items()} != {name: x.shape for name, x in theirs.items()}:
        return "other arrays or shapes"
    shares = {name: float(np.mean(bits(x) != bits(theirs[name]))) for name, x in ours.items()}
    name = max(shares, key=shares.__getitem__)
    with np.errstate(invalid="ignore"):  # inf − inf
        furthest = np.max(np.abs(ours[name].astype(np.float64) - theirs[name]), initial=0.0)
    count = round(shares[name] * ours[name].size)
    return f"{count} of {ours[name].size} elements of {name}, by up to {furthest:.2g}"


# Weights × elements of the largest input, at least the products of layers that see each token once: 50 ms of a core.
SMALL_WORK = 1 << 30
# The seeds of the rotations that measure the noise: far from any seed that a user is likely to choose.
NOISE_SEED_OFFSET = 1_000_003


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let PyTorch compute with this number of threads during the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_module(module: nn.Module, spec: Named, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a module by name: float32, or float64 from a module in float64.

    A small call runs in one thread, so that its bits do not depend on the number of threads.
    """
    import torch

    from effexport.models.layers import at_least_float32

    work = sum(weight.numel() for weight in module.parameters()) * max(array.size for array in inputs.values())
    threads = 1 if work < SMALL_WORK else torch.get_num_threads()
    with torch.inference_mode(), torch_threads(threads):
        outputs = module(*arguments(module, spec, inputs))
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return {t.name: np.asarray(at_least_float32(value).numpy()) for t, value in zip(spec.outputs, values, strict=True)}


def scores_of_indices(module: nn.Module, spec: Named, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The part `ranked` of a case: for a model that returns the likeliest tokens, the probability of every token."""
    import torch

    from effexport.models.encoder.module import TopTokensModel, probabilities

    if not isinstance(module, TopTokensModel):
        return {}
    with torch.inference_mode():
        return {TOKENS: probabilities(module.logits(*arguments(module, spec, inputs))).numpy()}


def arguments(module: nn.Module, spec: Named, inputs: Mapping[str, Array]) -> list[torch.Tensor]:
    """The inputs in the order and the precision of a module."""
    import torch

    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    values = [tensor_from_array(inputs[tensor.name]) for tensor in spec.inputs]
    return [value.to(dtype) if value.is_floating_point() else value for value in values]


def tensor_from_array(array: Array) -> torch.Tensor:
    """A tensor of integers or booleans as they are, of any other numbers in float32."""
    import torch

    array = np.asarray(array)
    return torch.from_numpy(array if array.dtype.kind in "iub" else array.astype(np.float32))


def hash_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Every hash of a module, by the name of its buckets in the graph."""
    from effexport.models.variants.lsh.layer import LSHHash

    return {bucket_name(path): child for path, child in module.named_modules() if isinstance(child, LSHHash)}


def bucket_name(path: str) -> str:
    """The name of the buckets of a hash in the graph. path: of the hash in its model."""
    return path.removesuffix("hash") + BUCKETS


@contextmanager
def recorded_hashes(module: nn.Module) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """Buckets and margins of every hash during the block, by graph value name."""
    buckets: dict[str, Array] = {}
    margins: dict[str, Array] = {}

    def record(name: str, child: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        buckets[name] = output.numpy()
        margins[name] = child.margins(inputs[0]).numpy()  # type: ignore[operator]

    with hooked_hashes(module, record):
        yield buckets, margins


@contextmanager
def hooked_hashes(module: nn.Module, hook: Callable[..., torch.Tensor | None]) -> Iterator[None]:
    """Call a forward hook, which also takes the name of the buckets first, after every hash during the block."""
    with ExitStack() as stack:
        for name, child in hash_modules(module).items():
            stack.callback(child.register_forward_hook(partial(hook, name)).remove)
        yield


def recorded_run(module: nn.Module, spec: Named, inputs: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """The answer of a module to the inputs of a case, in the parts of a case."""
    with recorded_hashes(module) as (buckets, margins):
        outputs = run_module(module, spec, inputs)
    ranked = scores_of_indices(module, spec, inputs)
    return {"outputs": outputs, "buckets": dict(buckets), "margins": dict(margins), "ranked": ranked}


@contextmanager
def given_buckets(module: nn.Module, buckets: Mapping[str, Array]) -> Iterator[None]:
    """Replace the buckets of every hash that is in `buckets` during the block; they are as `recorded_hashes` yields
    them."""
    import torch

    def replace(name: str, child: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.array(buckets[name])) if name in buckets else output

    with hooked_hashes(module, replace):
        yield


@contextmanager
def other_rotations(module: nn.Module) -> Iterator[None]:
    """Replace the rotations of every hash during the block."""
    import torch

    saved = {child: child.rotations for child in hash_modules(module).values()}
    try:
        for i, (child, rotations) in enumerate(saved.items()):
            generator = torch.Generator().manual_seed(NOISE_SEED_OFFSET + i)
            child.rotations = torch.randn(rotations.shape, generator=generator)  # type: ignore[arg-type]
        yield
    finally:
        for child, rotations in saved.items():
            child.rotations = rotations


def with_rounded_weights(module: nn.Module, precision: str, draw: int = 0) -> nn.Module:
    """A copy in which every weight is off by up to one rounding of a precision. draw: which of several."""
    import torch

    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(NOISE_SEED_OFFSET + draw)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.rand(weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + UNIT_ROUNDOFF[precision] * noise)
    return other


def answered_case(case: Case, module: nn.Module, spec: BuildSpec, runs: RepeatedRuns) -> Case:
    """The case with the outputs of a module of ours and the buckets and margins of its hashes."""
    return case.with_parts(runs.answer(case.label, lambda: recorded_run(module, spec, case.inputs)))


def repeated_outputs(case: Case, module: nn.Module, spec: BuildSpec, runs: RepeatedRuns) -> Mapping[str, Array]:
    """The outputs that a module gives twice to the inputs of a case."""
    return runs.answer(case.label, lambda: {"outputs": run_module(module, spec, case.inputs)})["outputs"]


def with_hash_noise(case: Case, module: nn.Module, rounded: nn.Module, spec: BuildSpec, runs: RepeatedRuns) -> Case:
    """The case with its noise: how much the outputs change with other rotations, and in `rounded`, the module in lower
    precision."""
    with other_rotations(module):
        by_seed = rms_change(case, repeated_outputs(case, module, spec, runs))
    by_precision = 0.0 if rounded is module else rms_change(case, repeated_outputs(case, rounded, spec, runs))
    return replace(case, seed_noise=by_seed, precision_noise=by_precision)
