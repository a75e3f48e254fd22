"""Checkpoint families: where each one is defined, and the spec of a checkpoint folder. Loads no torch, no weights."""

from __future__ import annotations

import importlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.models.attention_spec import known_fields
from effexport.models.bounded_file import MOST_BYTES_OF_CONFIG, bounded_bytes
from effexport.models.checkpoints.other_names import MERGE
from effexport.models.contract import load
from effexport.models.validation import SpecError, did_you_mean, near_path, require, shown, shown_name

if TYPE_CHECKING:
    from effexport.models.checkpoints.spec import CheckpointSpec, PublishedSpec

CONFIG = "config.json"
# What PEFT writes beside the weights of an adapter.
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Family:
    """Where a family is defined, within effexport.models.

    spec: its spec, a PublishedSpec, whose module loads no torch. model: its `nn.Module`, whose module also defines
    `weight_names` and `IGNORED`; "" for modules that users bring themselves.
    """

    spec: str
    model: str = ""

    @property
    def module(self) -> Any:
        """The module that defines the model."""
        return importlib.import_module(f"effexport.models.{self.model.rpartition('.')[0]}")


# model_type in config.json → the family; "module" is a module of the user's own and has no config.json
FAMILIES: dict[str, Family] = {
    "nystromformer": Family(
        "checkpoints.nystromformer_spec.NystromformerSpec", "checkpoints.nystromformer.Nystromformer"
    ),
    "reformer": Family("checkpoints.reformer_spec.ReformerSpec", "checkpoints.reformer.Reformer"),
    "module": Family("user.spec.ModuleSpec"),
}
PUBLISHED = tuple(name for name, family in FAMILIES.items() if family.model)


def tasks() -> tuple[str, ...]:
    """The heads that a checkpoint of any family may have."""
    return tuple(dict.fromkeys(task for name in PUBLISHED for task in load(FAMILIES[name].spec).TASKS))


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
    check_checkpoint_folder(folder)
    config = read_json(folder / CONFIG, "a checkpoint folder has config.json and weights")
    given = config.get("model_type")
    model_type = given if isinstance(given, str) else shown(given)
    require(
        model_type in PUBLISHED,
        f"{folder / CONFIG}: model_type is {shown(model_type)}{did_you_mean(model_type, PUBLISHED)} "
        f"Supported: {', '.join(PUBLISHED)}",
    )
    spec_class: type[PublishedSpec] = load(FAMILIES[model_type].spec)
    if seed is not None and "hash_seed" in spec_class.OPTIONS:
        options = {**options, "hash_seed": seed}
    return spec_class.from_config(config, options)


def check_checkpoint_folder(path: Path) -> None:
    """Raise SpecError for a path that is not a folder, with what to do about a file or a name on a hub."""
    expected = "expected a checkpoint folder with config.json and weights"
    require(
        not path.is_file(),
        f"{path} is a file; {expected}. Weights of effexport's own layers go with --variant NAME --weights FILE",
    )
    other = f"; {expected}{how_to_download(path)}"
    require(path.is_dir(), f"there is no folder {path}{near_path(path, os.path.isdir) or other}")
    if not is_checkpoint(path):
        check_no_adapter(path)


def check_no_adapter(folder: Path) -> None:
    """Raise SpecError for a folder with an adapter of PEFT and without a whole model."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    base = read_json(folder / ADAPTER_CONFIG, "PEFT writes it").get("base_model_name_or_path")
    whose = f" of {shown_name(base)}" if isinstance(base, str) and base else ""
    raise SpecError(
        f"{folder} is an adapter of PEFT, which has only changes to the weights{whose}; expected a whole model: "
        f"load that with the adapter, PeftModel.from_pretrained(model, {str(folder)!r}), {MERGE}"
    )


def how_to_download(path: Path) -> str:
    """The end of an error about a path that does not exist: the command, if the path may be a name on a hub."""
    may_be_on_hub = len(path.parts) == 2 and not path.parent.exists()
    command = f"hf download {shlex.quote(str(path))} --local-dir {shlex.quote(path.name)}"
    return f"; to download it from the Hugging Face hub: {command}" if may_be_on_hub else ""


def check_weights_file(path: Path) -> None:
    """Raise SpecError for a path that is not a file of weights. Nothing is read."""
    if path.is_dir() and not is_checkpoint(path):
        check_no_adapter(path)
    checkpoint = f"; export a checkpoint with --checkpoint {path}" if is_checkpoint(path) else ""
    require(not path.is_dir(), f"{path} is a folder; expected a weights file{checkpoint}")
    other = "; expected a safetensors file with weights for the variant"
    require(path.is_file(), f"no weights file at {path}{near_path(path, os.path.isfile) or other}")


def checkpoint_from_dict(values: Mapping[str, Any]) -> CheckpointSpec:
    """The inverse of `CheckpointSpec.to_dict`: the key `family` selects the class."""
    options = dict(values)
    family = options.pop("family", None)
    require(family in list(FAMILIES), f"unknown family {shown(family)}; expected one of: {', '.join(FAMILIES)}")
    spec_class = load(FAMILIES[family].spec)
    spec: CheckpointSpec = spec_class(**known_fields(spec_class, options, f"a {family} checkpoint"))
    return spec


def read_json(path: Path, expectation: str, most_bytes: int = MOST_BYTES_OF_CONFIG) -> dict[str, Any]:
    """The object in a JSON file. expectation: ends the error for a missing file. Raises SpecError, also for a file that
    is larger than most_bytes."""
    try:
        value = json.loads(bounded_bytes(path, most_bytes).decode())
    except FileNotFoundError:
        raise SpecError(f"no {path.name} in {path.parent}; {expectation}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("; use sys.")[0]
        raise SpecError(f"cannot read {path}: {reason}") from error
    if not isinstance(value, dict):
        raise SpecError(f"{path} does not hold a JSON object; {expectation}")
    return value
