"""Golden cases: inputs, what PyTorch made of them, and the buckets of every hash, in one safetensors file."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.errors import UserError
from effexport.export.onnx_from_module import at_precision
from effexport.models.checkpoint_spec import CheckpointSpec
from effexport.models.spec import EncoderSpec, LSHSpec
from effexport.proof.case_label import CaseLabel
from effexport.proof.inputs.adversarial import adversarial_inputs
from effexport.proof.metrics import relative_error, rms
from effexport.proof.tolerances import UNIT_ROUNDOFF
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.runners import Array

# The rotations of the noise floor: far from any seed a user is likely to choose.
NOISE_SEED_OFFSET = 1_000_003
# Answers per question in the cases of a multiple-choice model.
CHOICES = 3


@dataclass(frozen=True)
class Case:
    """One input and the reference's answer, float32.

    buckets and margins: per hash (by the name of its graph value), int32 and float32 [batch · heads · rounds, padded
    seq]: the bucket of every token and how close it came to another one.
    seed_noise: RMS-relative change of the output under other rotations; None without hashing.
    precision_noise: likewise, when PyTorch itself runs at the precision of the spec; 0 in float32.
    own_error: of an adversarial case, how far rounding at the precision of the spec takes PyTorch itself, which no
    runtime can be expected to undercut: see `change_by_rounding`. 0 elsewhere.
    """

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    buckets: Mapping[str, Array] = field(default_factory=dict)
    margins: Mapping[str, Array] = field(default_factory=dict)
    seed_noise: float | None = None
    precision_noise: float = 0.0
    own_error: float = 0.0

    @property
    def keep(self) -> Array:
        """Boolean [batch, seq], or [batch, choices, seq] for multiple choice."""
        return np.asarray(self.inputs["attention_mask"] != 0)

    @property
    def label(self) -> CaseLabel:
        return CaseLabel(self.name, self.keep.shape, not self.keep.all())

    def kept(self, array: Array, sample: int) -> Array:
        """What counts of one sample of an output, [tokens, channels]: its kept tokens, or all of a pooled output."""
        own, keep = np.asarray(array[sample]), self.keep[sample]
        if own.shape[: keep.ndim] != keep.shape:
            return own.reshape(1, -1)
        rows: Array = own[keep]
        return rows.reshape(len(rows), -1)


def case_inputs(spec: BuildSpec, seed: int) -> dict[str, dict[str, Array]]:
    """Inputs of every case by name: the export shape, a padded batch, and lengths other than the export length."""
    rng = np.random.default_rng(seed)
    fixed, seq_len = spec.fixed_seq_len, spec.seq_len
    padded_len = min(seq_len, 300)
    shapes = {
        "export": (spec.batch, seq_len, None),
        "padded batch": (3, padded_len, [padded_len, max(1, padded_len * 2 // 3), max(1, padded_len // 300)]),
        "odd length": (1, max(1, seq_len * 5 // 8 - 1), None),
        "short": (2, min(seq_len, 7), None),
        "single token": (1, 1, None),
    }
    if spec.max_seq_len is None and seq_len <= 4096:
        shapes["longer"] = (1, seq_len + seq_len // 4 + 1, None)
    if fixed is not None:
        shapes = {
            "export": (spec.batch, fixed, None),
            "single": (1, fixed, None),
            "padded batch": (3, fixed, [fixed, max(1, fixed * 2 // 3), 1]),
            "padded single": (1, fixed, [max(1, fixed // 2)]),
        }
    return {name: random_inputs(spec, rng, *shape) for name, shape in shapes.items()}


def random_inputs(
    spec: BuildSpec, rng: np.random.Generator, batch: int, seq_len: int, lengths: list[int] | None
) -> dict[str, Array]:
    """Random tokens or unit-variance hidden states; `lengths` counts the kept tokens of each sample."""
    mask = np.ones((batch, seq_len), dtype=np.int64)
    for row, length in enumerate(lengths or []):
        mask[row, length:] = 0
    if isinstance(spec.model, CheckpointSpec):
        return checkpoint_inputs(spec, rng, mask)
    if isinstance(spec.model, EncoderSpec):
        return {
            "input_ids": rng.integers(0, spec.model.vocab_size, (batch, seq_len), dtype=np.int64),
            "attention_mask": mask,
        }
    hidden = rng.standard_normal((batch, seq_len, spec.attention.dim), dtype=np.float32)
    return {"hidden_states": hidden.astype(numpy_dtype(spec.dtype)), "attention_mask": mask}


def padding_of_other_content(case: Case, spec: BuildSpec) -> dict[str, Array]:
    """The inputs of a case with other, valid content where its mask is 0."""
    rng = np.random.default_rng(NOISE_SEED_OFFSET)
    limits = spec.model.input_limits
    changed: dict[str, Array] = {}
    for name, array in case.inputs.items():
        if name == "attention_mask":
            changed[name] = array
            continue
        if array.dtype.kind in "iu":
            other = rng.integers(0, limits[name], array.shape, dtype=array.dtype)
        else:
            other = (3 * rng.standard_normal(array.shape)).astype(array.dtype)
        kept = case.keep.reshape(case.keep.shape + (1,) * (array.ndim - case.keep.ndim))
        changed[name] = np.where(kept, array, other)
    return changed


def checkpoint_inputs(spec: BuildSpec, rng: np.random.Generator, mask: Array) -> dict[str, Array]:
    """Random indices within their limits, with the padding token where the mask says so. mask: [batch, seq]."""
    model = spec.model
    assert isinstance(model, CheckpointSpec)
    sizes = {"batch": mask.shape[0], "choices": CHOICES, "seq": mask.shape[1]}
    inputs: dict[str, Array] = {}
    for name, dims in model.inputs.items():
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in dims]
        spread = mask if "choices" not in dims else np.broadcast_to(mask[:, None], shape)
        if name == "hidden_states":
            inputs[name] = rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(spec.dtype))
        elif name == "attention_mask":
            inputs[name] = np.ascontiguousarray(spread)
        else:
            padding = model.pad_token_id if name == "input_ids" else 0
            indices = rng.integers(0, model.input_limits[name], shape, dtype=np.int64)
            inputs[name] = np.where(spread != 0, indices, padding)
    return inputs


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of an ONNX element type; bfloat16 comes from ml_dtypes."""
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return dtype


def reference_from_module(module: nn.Module, spec: BuildSpec, seed: int) -> list[Case]:
    """What the float32 module answers to every case.

    Inputs of lower precision are rounded first, so that the reference and the candidate see the same numbers.
    """
    cases = []
    hashed = isinstance(spec.attention, LSHSpec)
    rounded = at_precision(module, spec.precision) if hashed else module
    hostile = adversarial_inputs(module, spec)
    for name, inputs in (case_inputs(spec, seed) | hostile).items():
        with recorded_hashes(module) as (buckets, margins):
            outputs = run_module(module, spec, inputs)
        case = Case(name, inputs, outputs, dict(buckets), dict(margins))
        if hashed:
            case = with_hash_noise(case, module, rounded, spec)
        elif name in hostile:
            case = dataclasses.replace(case, own_error=change_by_rounding(case, module, spec))
        cases.append(case)
    return cases


def with_hash_noise(case: Case, module: nn.Module, rounded: nn.Module, spec: BuildSpec) -> Case:
    """Change of the outputs under other rotations, and in `rounded`, the module in lower precision."""
    with other_rotations(module):
        by_seed = rms_change(case, run_module(module, spec, case.inputs))
    by_precision = 0.0 if rounded is module else rms_change(case, run_module(rounded, spec, case.inputs))
    return dataclasses.replace(case, seed_noise=by_seed, precision_noise=by_precision)


def change_by_rounding(case: Case, module: nn.Module, spec: BuildSpec) -> float:
    """How far rounding takes PyTorch itself: the largest relative change of the outputs when every weight is off by one
    rounding at the spec's precision, or when the module runs in that precision, whichever is larger."""
    import torch

    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(NOISE_SEED_OFFSET)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.rand(weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + UNIT_ROUNDOFF[spec.precision] * noise)
    changes = [largest_change(case, run_module(other, spec, case.inputs))]
    if spec.precision != "fp32":
        changes.append(largest_change(case, run_module(at_precision(module, spec.precision), spec, case.inputs)))
    return float(np.max(changes))


def largest_change(case: Case, outputs: Mapping[str, Array]) -> float:
    """Of any element, relative to the scale of its token."""
    changes = [
        relative_error(case.kept(outputs[name], row), case.kept(expected, row))[0]
        for name, expected in case.outputs.items()
        for row in range(len(expected))
    ]
    return float(np.max(changes))


def rms_change(case: Case, outputs: Mapping[str, Array]) -> float:
    """RMS(outputs − reference) / RMS(reference) over what counts, of the output where it is largest; NaN wins."""
    changes = []
    for name, expected in case.outputs.items():
        actual, wanted = (
            np.concatenate([case.kept(array, sample) for sample in range(len(array))])
            for array in (outputs[name].astype(np.float32), expected)
        )
        # a reference of zeros, which a layer without biases makes of zero tokens, is to be met exactly
        changes.append(rms(actual - wanted) / max(rms(wanted), float(np.finfo(np.float32).tiny)))
    return float(np.max(changes))  # not the built-in max, which may drop NaN


def run_module(module: nn.Module, spec: BuildSpec, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Float32 outputs by name."""
    import torch

    dtype = next(module.parameters()).dtype
    given = []
    for tensor in spec.inputs:
        array = np.asarray(inputs[tensor.name])
        value = torch.from_numpy(array if array.dtype == np.int64 else array.astype(np.float32))
        given.append(value.to(dtype) if value.is_floating_point() else value)
    with torch.inference_mode():
        outputs = module(*given)
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return {t.name: np.asarray(value.float().numpy()) for t, value in zip(spec.outputs, values, strict=True)}


def hash_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Every hash by the name that its buckets have in the graph."""
    from effexport.models.lsh import LSHHash

    return {
        path.removesuffix("hash") + "buckets": child
        for path, child in module.named_modules()
        if isinstance(child, LSHHash)
    }


@contextmanager
def recorded_hashes(module: nn.Module) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """Buckets and margins of every hash during the block, by graph value name."""
    buckets: dict[str, Array] = {}
    margins: dict[str, Array] = {}
    handles = []
    for name, child in hash_modules(module).items():

        def record(child: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor, name: str = name) -> None:
            buckets[name] = output.numpy()
            margins[name] = child.margins(inputs[0]).numpy()  # type: ignore[operator]

        handles.append(child.register_forward_hook(record))
    try:
        yield buckets, margins
    finally:
        for handle in handles:
            handle.remove()


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


def save_reference(cases: list[Case], path: Path) -> None:
    from safetensors.numpy import save

    tensors: dict[str, Array] = {}
    for case in cases:
        for kind in ("inputs", "outputs", "buckets", "margins"):
            for name, array in getattr(case, kind).items():
                tensors[f"{case.name}/{kind}/{name}"] = np.ascontiguousarray(array)
    noise = {case.name: [case.seed_noise, case.precision_noise, case.own_error] for case in cases}
    path.write_bytes(save(tensors, metadata={"noise": json.dumps(noise)}))


def own_error(noise: list[Any]) -> float:
    """Of a stored case; files from before there were adversarial cases have two figures."""
    return float(noise[2]) if len(noise) > 2 else 0.0


def load_reference(path: Path) -> list[Case]:
    """Raises UserError when the file is not a reference."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            noise = json.loads(file.metadata()["noise"])
            parts: dict[str, dict[str, dict[str, Array]]] = {
                name: {"inputs": {}, "outputs": {}, "buckets": {}, "margins": {}} for name in noise
            }
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                case, kind, name = key.split("/", 2)
                parts[case][kind][name] = file.get_tensor(key)
        return [
            Case(
                name,
                **kinds,
                seed_noise=noise[name][0],
                precision_noise=noise[name][1],
                own_error=own_error(noise[name]),
            )
            for name, kinds in parts.items()
        ]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a reference of effexport: {error!r}") from error
