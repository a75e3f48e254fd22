"""Cases: inputs, the reference's answers and the buckets of its hashes; and the golden file that stores them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import UserError
from effexport.proof.case_label import CaseLabel

if TYPE_CHECKING:
    from effexport.dtypes import Array

# The arrays of a case, in the order in which the golden file stores them.
PARTS = ("inputs", "outputs", "buckets", "margins", "tokens")
# In the part `tokens`: which of them count, boolean [batch, seq].
KEPT = "kept"
EXPECTED = "expected the reference.safetensors of an artifact"


@dataclass(frozen=True)
class Case:
    """One input and the reference's answer, float32.

    buckets and margins: per hash (by the name of its graph value), int32 and float32 [batch · heads · rounds, padded
    seq]: the bucket of every token and how close it came to another one.
    seed_noise: RMS-relative change of the output with other rotations; None without hashing.
    precision_noise: the same if PyTorch itself runs at the precision of the spec; 0 in float32.
    own_error: in an adversarial case, how much rounding at the precision of the spec changes PyTorch's own answer, see
    `answers.change_by_rounding`; no runtime can be expected to do better. 0 in other cases.
    tokens: which of them count, if not those that an `attention_mask` keeps: see KEPT.
    pooled: outputs that have no axis of tokens, even if one of their axes is as long.
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

    @property
    def keep(self) -> Array:
        """Boolean [batch, seq], or [batch, choices, seq] for multiple choice."""
        kept = self.tokens.get(KEPT)
        return np.asarray(self.inputs["attention_mask"] != 0 if kept is None else kept)

    @property
    def label(self) -> CaseLabel:
        return CaseLabel(self.name, self.keep.shape, not self.keep.all())

    def kept(self, output: str, array: Array, sample: int) -> Array:
        """The part of one sample of an output that is compared, [tokens, channels]: its kept tokens, or all of a pooled
        output."""
        own, keep = np.asarray(array[sample]), self.keep
        is_row = own.shape[: keep.ndim - 1] == keep.shape[1:] and output not in self.pooled
        if len(array) != len(keep) or not is_row:
            return own.reshape(1, -1)
        keep = keep[sample]
        rows: Array = own[keep]
        return rows.reshape(len(rows), -1)


def save_reference(cases: Sequence[Case], path: Path) -> None:
    """Write the golden file: the arrays as `<case>/<part>/<name>`, the noise of each case as metadata."""
    from safetensors.numpy import save

    tensors = {
        f"{case.name}/{part}/{name}": np.ascontiguousarray(array)
        for case in cases
        for part in PARTS
        for name, array in getattr(case, part).items()
    }
    noise = {case.name: [case.seed_noise, case.precision_noise, case.own_error] for case in cases}
    metadata = {"noise": json.dumps(noise)}
    if pooled := cases[0].pooled if cases else ():
        metadata["pooled"] = json.dumps(pooled)
    path.write_bytes(save(tensors, metadata=metadata))


def load_reference(path: Path) -> list[Case]:
    """The cases of a golden file. Raises UserError for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            if "noise" not in (file.metadata() or {}):
                raise UserError(f"{path} holds no stored answers; {EXPECTED}; weights go with --weights")
            noise = json.loads(file.metadata()["noise"])
            pooled = tuple(json.loads(file.metadata().get("pooled", "[]")))
            parts: dict[str, dict[str, dict[str, Array]]] = {name: {part: {} for part in PARTS} for name in noise}
            for key in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                owner, part, name = key.split("/", 2)
                parts[owner][part][name] = file.get_tensor(key)
        cases = []
        for name, arrays in parts.items():
            # files from before there were adversarial cases do not store own_error
            seed_noise, precision_noise, own_error = [*noise[name], 0.0][:3]
            case = Case(
                name,
                **arrays,
                seed_noise=seed_noise,
                precision_noise=precision_noise,
                own_error=own_error,
                pooled=pooled,
            )
            cases.append(case)
        return cases
    except FileNotFoundError:
        raise UserError(f"no reference file at {path}") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} holds no stored answers, or is damaged; {EXPECTED}") from error
