"""Checkpoint families: the frozen spec that they share, made from config.json, and the table of them.

No torch here, so that the command line can describe and refuse a checkpoint before any framework is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from effexport.models.attention_spec import known_fields
from effexport.models.contract import ModelContract, Scope, counted, load
from effexport.models.shapes import Dims
from effexport.models.validation import (
    MOST_BYTES_OF_CONFIG,
    SpecError,
    bounded_bytes,
    check_field_types,
    did_you_mean,
    near_path,
    require,
    shown,
    shown_name,
)

if TYPE_CHECKING:
    from effexport.models.attention_spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec(ModelContract):
    """A model whose architecture is decided elsewhere: a checkpoint of a published family, or a user's own module.

    task: one of TASKS of the family. num_labels: classes of a classification head.
    seq_len: the length the model is exported and tuned for, in tokens; other lengths work up to `max_seq_len`.
    """

    scope: ClassVar[Scope] = "checkpoint"
    # is_causal stays False: sorting and circular look-around let later tokens through
    # task → the class that transformers loads such a checkpoint with
    TASKS: ClassVar[Mapping[str, str]]

    task: str = "base"
    num_labels: int = 2
    vocab_size: int
    pad_token_id: int = 0
    seq_len: int

    def __post_init__(self) -> None:
        check_field_types(self)
        require(self.task in self.TASKS, f"task is {shown(self.task)}; {self.family} has: {', '.join(self.TASKS)}")
        require(self.vocab_size >= 2, f"vocab_size is {self.vocab_size}; expected at least 2")
        require(self.num_labels >= 1, f"num_labels is {self.num_labels}; expected at least 1")
        require(self.seq_len >= 1, f"seq_len is {self.seq_len}; expected at least 1")
        require(
            self.max_seq_len is None or self.seq_len <= self.max_seq_len,
            f"seq_len is {self.seq_len}; this checkpoint has positions for 1 to {self.max_seq_len}",
        )

    @property
    def title(self) -> str:
        return f"{self.family} {self.task}"

    @property
    def inputs(self) -> dict[str, Dims]:
        return {"input_ids": ("batch", "seq"), "attention_mask": ("batch", "seq")}

    @property
    def why_padding_counts(self) -> str:
        return self.why_not_invariant

    @property
    def input_limits(self) -> dict[str, int]:
        return {"input_ids": self.vocab_size}

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON, and the `family`; `checkpoint_from_dict` reads it back."""
        return {"family": self.family, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class PublishedSpec(CheckpointSpec):
    """A published architecture with the head of one task, as transformers configures it.

    fixed_seq_len stays None: where attention has a fixed length, the model pads to it.

    A family defines the class variables, `layer_specs`, `max_seq_len`, `output_width` and `notes_on`, and its fields
    under their names in config.json. OPTIONS: fields that a build may choose; config.json decides the others.
    RENAMED: field → its name in config.json, where that differs. NOT_READ: fields that are not read from config.json
    as they are. POSITIVE: fields that must be at least 1. UNNAMED_TASK: the task of a config.json that names no class
    (None: an error).
    """

    weights_option: ClassVar[str] = "--checkpoint"
    new_weights: ClassVar[str] = (
        "was built from the checkpoint {origin}, whose config.json belongs to its weights; give the folder of another "
        "one with --checkpoint"
    )
    remedy_for_size: ClassVar[str] = (
        "check the sizes in its config.json, use a smaller --seq-len or --batch, or build on a larger machine"
    )

    OPTIONS: ClassVar[tuple[str, ...]]
    RENAMED: ClassVar[Mapping[str, str]]
    NOT_READ: ClassVar[tuple[str, ...]]
    POSITIVE: ClassVar[tuple[str, ...]]
    UNNAMED_TASK: ClassVar[str | None] = None
    # the default seq_len is at most this, in tokens
    DEFAULT_SEQ_LEN_LIMIT: ClassVar[int] = 2**62

    layer_norm_eps: float

    def __post_init__(self) -> None:
        check_field_types(self, self.RENAMED)
        for name in self.POSITIVE:
            value = getattr(self, name)
            require(value >= 1, f"{self.given_name(name)} is {value}; expected at least 1")
        require(self.layer_norm_eps > 0, f"layer_norm_eps is {self.layer_norm_eps}; expected a number > 0")
        self.check()
        require(
            self.max_seq_len is None or self.max_seq_len > 1,
            "config.json has positions for 1 token; expected at least 2, because a file takes several lengths",
        )
        super().__post_init__()
        require(
            0 <= self.pad_token_id < self.vocab_size,
            f"pad_token_id is {self.pad_token_id}; expected a token, 0 to {self.vocab_size - 1}",
        )
        _ = self.layer_specs  # layers check what concerns them alone, such as heads and the convolution

    def given_name(self, field: str) -> str:
        """The name of a field in config.json."""
        return self.RENAMED.get(field, field)

    def check(self) -> None:
        """Raises SpecError for values that cannot work; types and POSITIVE fields have been checked."""

    @property
    def layer_specs(self) -> list[AttentionSpec]:
        """The attention of every layer."""
        raise NotImplementedError

    @property
    def max_seq_len(self) -> int:
        raise NotImplementedError

    @property
    def output_width(self) -> int:
        """Channels of `last_hidden_state`."""
        raise NotImplementedError

    def notes_on(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        """Sentences on what users would not expect of the published computation, and what is done about it."""
        raise NotImplementedError

    @property
    def attention(self) -> AttentionSpec:
        """An LSH layer if there is one."""
        return next((spec for spec in self.layer_specs if spec.is_hashed), self.layer_specs[0])

    @property
    def layers(self) -> int:
        return len(self.layer_specs)

    def custom_ops(self, fused: bool) -> dict[str, int]:
        return counted(self.layer_specs, fused)

    @property
    def outputs(self) -> dict[str, Dims]:
        outputs: dict[str, dict[str, Dims]] = {
            "base": {"last_hidden_state": ("batch", "seq", self.output_width)},
            "lm-head": {"logits": ("batch", "seq", self.vocab_size)},
            "masked-lm": {"logits": ("batch", "seq", self.vocab_size)},
            "sequence-classification": {"logits": ("batch", self.num_labels)},
            "token-classification": {"logits": ("batch", "seq", self.num_labels)},
            "question-answering": {"start_logits": ("batch", "seq"), "end_logits": ("batch", "seq")},
            "multiple-choice": {"logits": ("batch", "choices")},
        }
        return outputs[self.task]

    @property
    def padded_with(self) -> dict[str, int]:
        return {**dict.fromkeys(self.input_limits, 0), "input_ids": self.pad_token_id}

    @property
    def build_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.OPTIONS}

    @property
    def transformers_class(self) -> str:
        return self.TASKS[self.task]

    def least_elements(self, batch: int, seq_len: int) -> int:
        layers = {id(spec): spec for spec in self.layer_specs}.values()
        return max(spec.least_elements(batch, seq_len) for spec in layers)

    @property
    def why_not_invariant(self) -> str:
        return "in published checkpoints, padding and other samples may affect the result; see the notes"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Self, tuple[str, ...]]:
        """The spec of a config.json, and sentences that users of this checkpoint should read.

        options: values for some of OPTIONS. seq_len defaults to all positions, up to DEFAULT_SEQ_LEN_LIMIT.
        Raises SpecError for values that cannot work, with the reason.
        """
        for name in options:
            require(
                name in cls.OPTIONS,
                f"a {cls.family} checkpoint has no option {shown(name)}{did_you_mean(name, cls.OPTIONS)} "
                f"Its options: {', '.join(cls.OPTIONS)}",
            )
        config = cls.read_fields(config)
        fields: dict[str, Any] = {"seq_len": 1, "num_labels": num_labels_from_config(config, cls.num_labels)}
        for field in dataclasses.fields(cls):
            if field.name not in (*fields, "task", *cls.NOT_READ):
                value = config_value(config, cls.RENAMED.get(field.name, field.name), field.default)
                fields[field.name] = tuple(value) if isinstance(value, list) else value
        if "task" not in options:
            fields["task"] = cls.task_from_config(config)
        # any length will do until the positions are known to be sound
        spec = cls(**{**fields, **options, **cls.special_fields(config)})
        if "seq_len" not in options:
            spec = dataclasses.replace(spec, seq_len=min(spec.max_seq_len, cls.DEFAULT_SEQ_LEN_LIMIT))
        spec = spec.resolved()
        return spec, tuple(spec.notes_on(config, options))

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields of a config.json that mean anything to this model."""
        return config

    @classmethod
    def special_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields that config.json decides in a way of the family's own; they outrank options.

        Raises SpecError for a configuration that is not supported.
        """
        raise NotImplementedError

    def resolved(self) -> Self:
        """The spec with everything decided that follows from seq_len."""
        return self

    @classmethod
    def task_from_config(cls, config: Mapping[str, Any]) -> str:
        """The task of the first class that config.json names."""
        given = config.get("architectures")
        if not given and cls.UNNAMED_TASK is not None:
            return cls.UNNAMED_TASK
        named = given[0] if isinstance(given, list) and given else None
        task = next((task for task, name in cls.TASKS.items() if name == named), None)
        require(
            task is not None,
            f"config.json: architectures is {shown(given)}; expected one of: {', '.join(cls.TASKS.values())}; "
            f"correct it, or choose a task: {', '.join(cls.TASKS)}",
        )
        return str(task)


def num_labels_from_config(config: Mapping[str, Any], default: int) -> int:
    """Number of classes: transformers saves their names and counts those."""
    names = label_names(config)
    return len(names) if names else int(config_value(config, "num_labels", default))


def label_names(config: Mapping[str, Any]) -> dict[int, str]:
    """The names of classes by their number, as transformers reads them from config.json; {} if there are none.

    The keys are strings in JSON and numbers in a configuration of transformers; both are read.

    Raises SpecError for a field that transformers would not read either.
    """
    names = config.get("id2label") or {}
    expected = "expected an object with a name for the number of each class"
    require(isinstance(names, Mapping), f"config.json: id2label is {shown(names)}; {expected}")
    for number in names:
        require(
            re.fullmatch("[0-9]{1,9}", str(number)) is not None,
            f"config.json: id2label names a class {shown(number)}; {expected}",
        )
    return {int(number): str(name) for number, name in names.items()}


def config_value(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field of config.json. transformers leaves out what equals its default, and writes null for None."""
    value = config.get(name, default)
    kinds: dict[type, tuple[type, ...]] = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}
    expected = kinds.get(type(default))
    require(
        expected is None or (isinstance(value, expected) and (type(default) is bool or not isinstance(value, bool))),
        f"config.json: {name} is {shown(value)}; expected {type(default).__name__}",
    )
    return value


CONFIG = "config.json"
# The options of transformers' `generate`.
GENERATION_CONFIG = "generation_config.json"
# What PEFT writes beside the weights of an adapter.
ADAPTER_CONFIG = "adapter_config.json"
MERGE = "merge the adapter into its model, and save that: model.merge_and_unload().save_pretrained(FOLDER)"


@dataclass(frozen=True)
class Family:
    """The modules that define a family, within effexport.models.

    spec: its spec, a PublishedSpec, whose module loads no torch. model: its `nn.Module`, whose module also defines
    `weight_names` and `IGNORED`, which may differ by task; "" for modules that users bring themselves.
    """

    spec: str
    model: str = ""

    @property
    def module(self) -> Any:
        """The module that defines the model."""
        return importlib.import_module(f"effexport.models.{self.model.rpartition('.')[0]}")

    def ignored(self, task: str) -> tuple[str, ...]:
        """Patterns of names in a checkpoint that mean nothing to the model of a task."""
        patterns = self.module.IGNORED
        return tuple(patterns[task] if isinstance(patterns, Mapping) else patterns)


# model_type in config.json → the family; "module" is a module of the user's own and has no config.json
FAMILIES: dict[str, Family] = {
    "big_bird": Family("checkpoints.big_bird_spec.BigBirdSpec", "checkpoints.big_bird.BigBird"),
    "longformer": Family("checkpoints.longformer_spec.LongformerSpec", "checkpoints.longformer.Longformer"),
    "led": Family("checkpoints.led_spec.LEDSpec", "checkpoints.led.led_from_spec"),
    "modernbert": Family("checkpoints.modernbert_spec.ModernBertSpec", "checkpoints.modernbert.ModernBert"),
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
        if path.is_fifo():  # to open it would wait for a writer
            raise ValueError("it is a named pipe")
        value = json.loads(bounded_bytes(path, most_bytes).decode())
    except FileNotFoundError:
        raise SpecError(f"no {path.name} in {path.parent}; {expectation}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("; use sys.")[0]
        raise SpecError(f"cannot read {path}: {reason}") from error
    if not isinstance(value, dict):
        raise SpecError(f"{path} does not hold a JSON object; {expectation}")
    return value
