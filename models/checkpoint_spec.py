"""What checkpoint families have in common: a frozen description that a Hugging Face config.json turns into.

No torch here, so that the command line can describe and refuse a checkpoint before any framework is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from effexport.models.model_spec import Dims, Scope, counted
from effexport.models.validation import check_field_types, require

if TYPE_CHECKING:
    from effexport.models.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """A published architecture with the head of one task.

    task: one of TASKS of the family. num_labels: classes of a classification head.
    seq_len: the length the model is exported and tuned for, in tokens; shorter and longer ones work up to
    `max_seq_len`.
    """

    scope: ClassVar[Scope] = "checkpoint"
    # the proof does not hold checkpoints to causality: sorting and circular look-around let later tokens through
    is_causal: ClassVar[bool] = False
    has_decode_step: ClassVar[bool] = False
    # where attention has a fixed length, the model pads to it
    fixed_seq_len: ClassVar[int | None] = None
    family: ClassVar[str] = ""  # model_type in config.json
    # task → the class that transformers loads such a checkpoint with
    TASKS: ClassVar[Mapping[str, str]] = {}

    task: str = "base"
    num_labels: int = 2
    vocab_size: int
    pad_token_id: int = 0
    seq_len: int

    def __post_init__(self) -> None:
        check_field_types(self)
        require(self.task in self.TASKS, f"task is {self.task!r}; {self.family} has: {', '.join(self.TASKS)}")
        require(self.vocab_size >= 2, f"vocab_size is {self.vocab_size}; expected at least 2")
        require(self.num_labels >= 1, f"num_labels is {self.num_labels}; expected at least 1")
        require(
            1 <= self.seq_len <= self.max_seq_len,
            f"seq_len is {self.seq_len}; this checkpoint has positions for 1 to {self.max_seq_len}",
        )

    @property
    def title(self) -> str:
        return f"{self.family} {self.task}"

    @property
    def attention(self) -> AttentionSpec:
        """The layer that decides how results are compared: an LSH layer if there is one."""
        raise NotImplementedError

    @property
    def layers(self) -> int:
        raise NotImplementedError

    def custom_ops(self, fused: bool) -> dict[str, int]:
        return counted([self.attention] * self.layers, fused)

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that callers may pass."""
        raise NotImplementedError

    @property
    def inputs(self) -> dict[str, Dims]:
        """Dims of the int64 inputs, in the order of the module's arguments."""
        return {"input_ids": ("batch", "seq"), "attention_mask": ("batch", "seq")}

    @property
    def outputs(self) -> dict[str, Dims]:
        """Dims of the outputs, in the order in which the module returns them."""
        raise NotImplementedError

    @property
    def why_not_invariant(self) -> str:
        return "published checkpoints make padding, and batch mates, part of a sample's input; see the notes"

    @property
    def why_padding_counts(self) -> str:
        return self.why_not_invariant

    @property
    def input_limits(self) -> dict[str, int]:
        return {"input_ids": self.vocab_size}

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON, and the `family`; `checkpoint_from_dict` reads it back."""
        return {"family": self.family, **asdict(self)}


def config_value(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field of config.json. transformers leaves out what equals its default, and writes null for None."""
    value = config.get(name, default)
    kinds: dict[type, tuple[type, ...]] = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}
    expected = kinds.get(type(default))
    require(
        expected is None or (isinstance(value, expected) and (type(default) is bool or not isinstance(value, bool))),
        f"config.json: {name} is {value!r}; expected {type(default).__name__}",
    )
    return value
