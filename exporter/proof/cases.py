"""Cases: inputs, the reference's answers and the buckets of its hashes; and the golden file that stores them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from effexport.base.dtypes import Array, named_sizes
from effexport.base.environment import total_memory_bytes
from effexport.base.errors import UserError
from effexport.base.formatting import memory
from effexport.base.spec import BuildSpec, Golden
from effexport.models.size_formula import shape_of
from effexport.proof.check import CaseLabel, Check
from effexport.quantize.rounding import numbers_of, precision_of

Arrays = Mapping[str, Array]
# The arrays of a case, in the order in which the golden file stores them.
PARTS = ("inputs", "outputs", "buckets", "margins", "tokens", "ranked", "codes", "scales", "exact")
# In the part `tokens`: which of them count, boolean; see `kept_tokens`.
KEPT = "kept"
# Stands for scores of 0, which have no logarithm.
TINY = np.finfo(np.float32).tiny
# What `--golden small` keeps, at most; but always one case.
SMALL_BYTES = 1_000_000
EXPECTED = "expected the reference.safetensors of an artifact"


@dataclass(frozen=True)
class Case:
    """One input and the reference's answer, float32.

    buckets and margins: per hash (by the name of its graph value), int32 and float32 [batch · heads · rounds, padded
    seq]: the bucket of every token and how close it came to another one.
    seed_noise: RMS-relative change of the output with other rotations; None without hashing.
    precision_noise: the same if PyTorch itself runs at the precision of the spec; 0 in float32. Of a quantised model,
    the change of PyTorch's quantised outputs if every weight is off by one rounding before it is quantised.
    own_error: in an adversarial case, how much rounding at the precision of the spec changes PyTorch's own answer, see
    `answers.change_by_rounding`; of a user's model that computes in several types, such as those of autocast, how far
    its answer is from what it computes in float32 alone. No runtime can be expected to do better. 0 in other cases.
    tokens: which of them count, if not those that an `attention_mask` keeps: see KEPT.
    pooled: outputs that have no axis of tokens, even if one of their axes is as long.
    ranked: for an output of the likeliest indices, the reference's score of every index, [batch, …, indices].
    codes and scales: of a quantised model, what every rounding gave, by the name of the value before it is rounded:
    codes int8, or uint8 and uint16 for the bits of float8 and bfloat16, and float32 scales that broadcast to them. They
    need not be there.
    exact: of a quantised model, the outputs of the float model and the buckets of its hashes.
    allows_nan: whether the outputs may have NaN, of a user's own model: nothing is compared there, see `kept`.
    """

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    buckets: Mapping[str, Array] = field(default_factory=dict)
    margins: Mapping[str, Array] = field(default_factory=dict)
    seed_noise: float | None = None
    precision_noise: float = 0.0
    own_error: float = 0.0
    tokens: Mapping[str, Array] = field(default_factory=dict)
    pooled: tuple[str, ...] = ()
    ranked: Mapping[str, Array] = field(default_factory=dict)
    codes: Mapping[str, Array] = field(default_factory=dict)
    scales: Mapping[str, Array] = field(default_factory=dict)
    exact: Mapping[str, Array] = field(default_factory=dict)
    allows_nan: bool = False

    @property
    def given(self) -> Mapping[str, Array]:
        """Decisions of the reference: the buckets of its hashes, and the float32 numbers that its roundings gave."""
        rounded = {
            name: numbers_of(codes, precision_of(codes), self.scales[name]) for name, codes in self.codes.items()
        }
        return {**self.buckets, **rounded}

    @property
    def keep(self) -> Array:
        """Boolean [batch, seq], or [batch, choices, seq] for multiple choice; see `ModelContract.kept_dims`."""
        kept = self.tokens.get(KEPT)
        return np.asarray(self.inputs["attention_mask"] != 0 if kept is None else kept)

    @property
    def label(self) -> CaseLabel:
        return CaseLabel(self.name, self.keep.shape, not self.keep.all())

    def with_parts(self, arrays: Mapping[str, Mapping[str, Array]]) -> Case:
        """The case with other arrays in some of PARTS."""
        changes: dict[str, Any] = dict(arrays)
        return replace(self, **changes)

    def samples(self, array: Array) -> range:
        """The samples of an output: one, if it is a single number without axes."""
        return range(len(array) if array.ndim else 1)

    def kept(self, output: str, array: Array, sample: int) -> Array:
        """The part of one sample of an output that is compared, [tokens, channels]: its kept tokens, or all of a pooled
        output."""
        own, keep = np.asarray(array[sample] if array.ndim else array), self.keep
        if self.allows_nan:
            expected = self.outputs[output]
            own = np.where(np.isnan(expected[sample] if expected.ndim else expected), 0, own)
        if output in self.pooled:
            return self.all_of(output, own, sample)
        if not array.ndim or len(array) != len(keep) or own.shape[: keep.ndim - 1] != keep.shape[1:]:
            return own.reshape(1, -1)
        keep = keep[sample]
        rows: Array = own[keep]
        return rows.reshape(len(rows), math.prod(rows.shape[1:]))

    def pairs(self, outputs: Mapping[str, Array]) -> Iterator[tuple[str, int, Array, Array]]:
        """Both `kept` parts of every sample of an output, that of the reference last."""
        for name, expected in self.outputs.items():
            for sample in self.samples(expected):
                yield name, sample, self.kept(name, outputs[name], sample), self.kept(name, expected, sample)

    def place_of(self, sample: int, row: int, channel: int, kept: Array, own: Array) -> tuple[int, ...]:
        """The place in a sample of an output of an element of its `kept` part, [row, channel] there."""
        if kept.size == own.size:
            place = np.unravel_index(row * kept.shape[1] + channel, own.shape)
        else:
            keep = self.keep[sample]
            place = (*np.argwhere(keep)[row], *np.unravel_index(channel, own.shape[keep.ndim :]))
        return tuple(map(int, place))

    def all_of(self, output: str, own: Array, sample: int) -> Array:
        """One sample of a pooled output, [1, channels]. Indices become the reference's scores of them, which are equal
        if two are tied; NaN if there is no such index. Scores are [scores, 1], so that large ones, whose errors are
        large too, have a scale of their own."""
        if output in self.ranked:
            scores, index = self.ranked[output][sample], own.astype(np.int64)
            known = (index >= 0) & (index < scores.shape[-1])
            own = np.where(known, np.take_along_axis(scores, np.where(known, index, 0), axis=-1), np.nan)
        return own.reshape(-1, 1) if self.ranked else own.reshape(1, -1)

    @property
    def size_bytes(self) -> int:
        """Of all its arrays."""
        return sum(np.asarray(array).nbytes for part in PARTS for array in getattr(self, part).values())

    @property
    def undefined(self) -> tuple[int, int]:
        """Numbers of compared elements of the answer: those that are NaN, and all."""
        strict = replace(self, allows_nan=False)
        parts = [strict.kept(name, array, row) for name, array in self.outputs.items() for row in self.samples(array)]
        return sum(int(np.isnan(part).sum()) for part in parts), sum(part.size for part in parts)

    @property
    def spread(self) -> float:
        """The standard deviation of the logits of ranked indices, or 1 if that is less: a softmax makes the error of a
        logit, which is proportional to this, the relative error of a score. 1 without ranked indices."""
        if not self.ranked:
            return 1.0
        logits = np.log(np.maximum(np.concatenate([x.reshape(-1, x.shape[-1]) for x in self.ranked.values()]), TINY))
        return max(1.0, float(np.sqrt(np.nanmean(np.nanvar(logits, axis=-1)))))


@dataclass
class Answers:
    """The cases of one source with its answers. checks: of the source itself; what it could not answer is a check that
    was not run. kind: of the source, see `ReferenceChoice`."""

    cases: list[Case] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    kind: str = "torch"


def golden_cases(cases: Sequence[Case], golden: Golden) -> list[Case]:
    """The cases that an artifact keeps: of a small golden file, the smallest ones that fit, in their order."""
    if golden != "small":
        return [] if golden == "none" else list(cases)
    kept, total = set[int](), 0
    for number in sorted(range(len(cases)), key=lambda number: cases[number].size_bytes):
        total += cases[number].size_bytes
        if kept and total > SMALL_BYTES:
            break
        kept.add(number)
    return [case for number, case in enumerate(cases) if number in kept]


def save_reference(cases: Sequence[Case], path: Path) -> None:
    """Write the golden file: the arrays as `<case>/<part>/<name>`, the noise of each case as metadata."""
    from safetensors.numpy import save

    tensors = {
        f"{case.name}/{part}/{name}": np.asarray(array, order="C")
        for case in cases
        for part in PARTS
        for name, array in getattr(case, part).items()
    }
    noise = {case.name: [case.seed_noise, case.precision_noise, case.own_error] for case in cases}
    metadata = {"noise": json.dumps(noise)}
    if pooled := cases[0].pooled if cases else ():
        metadata["pooled"] = json.dumps(pooled)
    data = save(tensors, metadata=metadata)
    # which has its metadata in any order
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = metadata
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.writelines((len(text).to_bytes(8, "little"), text, memoryview(data)[end:]))


def keep_golden(cases: Sequence[Case], path: Path, spec: BuildSpec) -> None:
    """Leave those cases in the golden file that the artifact is to keep; the proof has all of them."""
    kept = golden_cases(cases, spec.golden)
    if not kept:
        path.unlink()
    elif len(kept) < len(cases):
        save_reference(kept, path)


class Noise(msgspec.Struct, array_like=True):
    """The noise of a case in a golden file. Those from before there were adversarial cases do not store own_error."""

    seed_noise: float | None
    precision_noise: float
    own_error: float = 0.0


def check_fits(path: Path) -> None:
    """Raise UserError for a file whose tensors cannot be in memory at once: reading them would end the process."""
    size, total = path.stat().st_size, total_memory_bytes()
    if total is not None and size > total:
        raise UserError(f"{path} has {memory(size)}; this machine has {memory(total)} of memory: give a smaller file")


def load_reference(path: Path) -> list[Case]:
    """The cases of a golden file. Raises UserError for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        check_fits(path)
        with safe_open(path, framework="numpy") as file:
            if "noise" not in (file.metadata() or {}):
                raise UserError(f"{path} holds no stored answers; {EXPECTED}; weights go with --weights")
            noise = msgspec.convert(json.loads(file.metadata()["noise"]), dict[str, Noise])
            pooled = msgspec.convert(json.loads(file.metadata().get("pooled", "[]")), tuple[str, ...])
            parts: dict[str, dict[str, dict[str, Array]]] = {name: {part: {} for part in PARTS} for name in noise}
            for key in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                owner, part, name = key.split("/", 2)
                parts[owner][part][name] = file.get_tensor(key)
        cases = []
        for name, arrays in parts.items():
            found: dict[str, Any] = {**arrays, **msgspec.structs.asdict(noise[name])}
            case = Case(name, **found, pooled=pooled)
            cases.append(case)
    except FileNotFoundError:
        raise UserError(f"no reference file at {path}") from None
    except (OSError, SafetensorError, MemoryError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} holds no stored answers, or is damaged; {EXPECTED}") from error
    for case in cases:
        if problem := why_parts_contradict(case):
            raise UserError(f"{path} is damaged: in the case {case.name!r}, {problem}; {EXPECTED}")
    return cases


def why_parts_contradict(case: Case) -> str:
    """A contradiction between the buckets of a case and their margins, or its codes and their scales; "" if none."""
    buckets, margins = ({name: array.shape for name, array in part.items()} for part in (case.buckets, case.margins))
    if buckets != margins:
        return f"there are buckets {buckets} and margins {margins}"
    if case.codes.keys() != case.scales.keys():
        return f"there are codes of {sorted(case.codes)} and scales of {sorted(case.scales)}"
    for name, codes in case.codes.items():
        scales = case.scales[name]
        try:
            fits = np.broadcast_shapes(codes.shape, scales.shape) == codes.shape
        except ValueError:
            fits = False
        if codes.dtype not in (np.int8, np.uint8, np.uint16) or scales.dtype != np.float32 or not fits:
            return f"{name} has {codes.dtype} codes {list(codes.shape)} with {scales.dtype} scales {list(scales.shape)}"
    return ""


def has_tokens(spec: BuildSpec) -> bool:
    """True for a model with an axis of tokens, the last of those of the mask."""
    return spec.model.kept_dims[-1] not in ("batch", 1)


def kept_tokens(inputs: Mapping[str, Array], spec: BuildSpec) -> dict[str, Array]:
    """The part `tokens` of a case; empty if its mask is the usual one."""
    model = spec.model
    if model.has_usual_mask:
        return {}
    if model.mask not in model.inputs:
        return {KEPT: np.ones(shape_of(model.kept_dims, named_sizes(spec.inputs, inputs)), bool)}
    mask, (batch, tokens) = inputs[model.mask], model.mask_axes
    # along other axes than these, all values are alike
    picked = mask[tuple(slice(None) if axis in (batch, tokens) else 0 for axis in range(mask.ndim))]
    own = picked if batch < tokens else picked.T
    return {KEPT: (own != 0) != model.mask_ignores}


def stored_cases(path: Path, spec: BuildSpec) -> list[Case]:
    """The cases of the golden file of an artifact. Raises UserError for any other file, and for answers that a model of
    this spec cannot give."""
    return checked_cases(load_reference(path), spec, str(path))


def checked_cases(cases: Sequence[Case], spec: BuildSpec, what: str) -> list[Case]:
    """The cases, with their part `tokens`; those of other inputs or outputs, which are another model's, as they are.

    what: the name of the file in errors.
    Raises UserError for answers that a model of this spec cannot give to the inputs.
    """
    for case in cases:
        if problem := why_not_of_spec(case, spec):
            raise UserError(f"{what} is damaged: in the case {case.name!r}, {problem}; {EXPECTED}")
    return [with_nan(with_tokens(case, spec), spec) if has_names_of(case, spec) else case for case in cases]


def has_names_of(case: Case, spec: BuildSpec) -> bool:
    inputs, outputs = {tensor.name for tensor in spec.inputs}, {tensor.name for tensor in spec.outputs}
    return case.inputs.keys() == inputs and case.outputs.keys() == outputs


def with_tokens(case: Case, spec: BuildSpec) -> Case:
    """The case with the part `tokens`, which earlier artifacts leave out for every mask named `attention_mask`."""
    return replace(case, tokens={**kept_tokens(case.inputs, spec), **case.tokens})


def with_nan(case: Case, spec: BuildSpec) -> Case:
    """The case, which allows NaN where the original of a user has answered so."""
    return replace(case, allows_nan=not spec.model.answers_always and case.undefined[0] > 0)


def undefined_notes(cases: Sequence[Case], spec: BuildSpec) -> list[str]:
    """A sentence on answers of a user's own module that are not numbers; none if all are."""
    found = [
        f"{undefined:,} of {all_:,} elements in {c.label}"
        for c in cases
        for undefined, all_ in [c.undefined]
        if undefined
    ]
    text = f"{spec.model.title} itself answers with NaN, which was not compared: {'; '.join(found)}."
    return [text] if found else []


def why_not_of_spec(case: Case, spec: BuildSpec) -> str:
    """A contradiction between the arrays of a case, or with the spec; "" if none, and for a case of another model."""
    if not has_names_of(case, spec):
        return ""
    if not set(case.pooled) <= set(spec.pooled_outputs):
        return f"the outputs without an axis of tokens are {list(case.pooled)}; expected {list(spec.pooled_outputs)}"
    arrays = {**case.inputs, **case.outputs}
    for tensor in (*spec.inputs, *spec.outputs):
        if arrays[tensor.name].ndim != len(tensor.dims):
            return f"{tensor.name} has the shape {list(arrays[tensor.name].shape)}; expected {tensor}"
    sizes = named_sizes(spec.inputs, arrays)
    for tensor in (*spec.inputs, *spec.outputs):
        shape, expected = arrays[tensor.name].shape, shape_of(tensor.dims, sizes)
        if shape != expected:
            return f"{tensor.name} has the shape {list(shape)}; expected {list(expected)}, as the other arrays say"
    case = with_tokens(case, spec)
    if problem := why_tokens_do_not_count(case.keep, shape_of(spec.model.kept_dims, sizes), spec):
        return problem
    parts = (case.kept(name, array, row) for name, array in case.outputs.items() for row in case.samples(array))
    if spec.model.answers_always and not all(np.isfinite(part).all() for part in parts):
        return "answers are NaN or infinite, which judge nothing"
    return ""


def why_tokens_do_not_count(keep: Array, expected: tuple[int, ...], spec: BuildSpec) -> str:
    """The reason if a case would not compare every sequence; "" if it does.

    keep: see `Case.keep`.
    expected: its shape.
    """
    if keep.shape != expected or keep.dtype != bool:
        return (
            f"nothing says for every sequence which of its tokens count: {keep.dtype} {list(keep.shape)}; expected "
            f"bool {list(expected)}"
        )
    # without an axis of tokens, everything counts
    counts = keep.any(axis=-1) if has_tokens(spec) else keep
    return "" if counts.all() else "a mask keeps no token of a sequence"
