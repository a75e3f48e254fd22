"""Checkpoint families: where each one is defined, and the spec of a checkpoint folder. Loads no torch, no weights."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from effexport.models.validation import SpecError, did_you_mean, require

if TYPE_CHECKING:
    from effexport.models.checkpoint_spec import CheckpointSpec

CONFIG = "config.json"


@dataclass(frozen=True)
class Family:
    """Where a family is defined.

    spec_module: has the spec class and `spec_from_config`, and loads no torch.
    module: has the class of the model, `weight_names` and `IGNORED`; empty for modules that users bring themselves.
    """

    spec_module: str
    spec_class: str
    module: str = ""
    module_class: str = ""

    def load_spec(self) -> ModuleType:
        return importlib.import_module(self.spec_module)

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


# model_type in config.json → the family; "module" is a module of the user's own and has no config.json
FAMILIES: dict[str, Family] = {
    "nystromformer": Family(
        "effexport.models.nystromformer_spec", "NystromformerSpec", "effexport.models.nystromformer", "Nystromformer"
    ),
    "reformer": Family("effexport.models.reformer_spec", "ReformerSpec", "effexport.models.reformer", "Reformer"),
    "module": Family("effexport.models.module_spec", "ModuleSpec"),
}
PUBLISHED = tuple(name for name, family in FAMILIES.items() if family.module)


def is_checkpoint(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def spec_from_checkpoint(
    folder: Path, options: Mapping[str, Any], seed: int | None = None
) -> tuple[CheckpointSpec, tuple[str, ...]]:
    """The spec of a checkpoint folder, and sentences that users of this checkpoint should read.

    options: fields that the build may choose: task, seq_len, num_labels, and what else the family allows.
    seed: for what the family draws at random; families that draw nothing ignore it.
    Raises SpecError for a folder that is not a checkpoint, and for an unsupported configuration, with the reason.
    """
    config = read_json(folder / CONFIG, "a checkpoint folder has config.json and weights")
    model_type = str(config.get("model_type"))
    require(
        model_type in PUBLISHED,
        f"{folder / CONFIG}: model_type is {model_type!r}{did_you_mean(model_type, PUBLISHED)} "
        f"Supported: {', '.join(PUBLISHED)}",
    )
    family = FAMILIES[model_type].load_spec()
    if seed is not None and "hash_seed" in family.OPTIONS:
        options = {**options, "hash_seed": seed}
    spec, notes = family.spec_from_config(config, options)
    return spec, tuple(notes)


def checkpoint_from_dict(values: Mapping[str, Any]) -> CheckpointSpec:
    """The inverse of `CheckpointSpec.to_dict`: the key `family` selects the class."""
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    family = str(options.pop("family", None))
    require(family in FAMILIES, f"unknown family {family!r}; expected one of: {', '.join(FAMILIES)}")
    spec: CheckpointSpec = getattr(FAMILIES[family].load_spec(), FAMILIES[family].spec_class)(**options)
    return spec


def read_json(path: Path, expectation: str) -> dict[str, Any]:
    """The object in a JSON file. expectation: ends the error for a missing file. Raises SpecError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"no {path.name} in {path.parent}; {expectation}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise SpecError(f"{path} does not hold a JSON object; {expectation}")
    return value
