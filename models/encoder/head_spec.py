"""What a model returns in place of hidden states or logits: a vector for each sample, or the likeliest tokens at some
places. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from effexport.models.contract import ModelContract
from effexport.models.shapes import Dims
from effexport.models.validation import did_you_mean, require

Pooling = Literal["mean", "cls", "max"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
EMBEDDING = "embedding"
# The input that says which tokens to predict, [batch, masks], and what is predicted of each: [batch, masks, top_k].
POSITIONS, MASKS = "positions", "masks"
SCORES, TOKENS = "scores", "tokens"
# One number for each word or label: no hidden states, of which a mean would be an embedding.
LOGITS = "logits"
# The most elements that TensorRT's TopK returns.
LARGEST_TOP_K = 3840
LANGUAGE_MODELS = ("masked-lm", "lm-head")


@dataclass(frozen=True)
class Head:
    """The outputs of an exported model, made from those of the model itself.

    pool: which vector stands for a sample: the mean or the largest of every channel over its kept tokens, or its first
    token. truncate_dim: how many channels remain. normalize: whether the vector, truncated, gets the length 1.
    top_k: of a language model, how many of the likeliest tokens it returns for each of the `positions` that are asked
    for, with their probabilities; only those are multiplied by the vocabulary.
    """

    pool: Pooling | None
    normalize: bool
    truncate_dim: int | None
    top_k: int | None

    @property
    def is_wanted(self) -> bool:
        return self.pool is not None or self.top_k is not None

    def check(self, model: ModelContract) -> None:
        """Raise SpecError for options that contradict each other, or that this model cannot have."""
        require(
            self.pool is None or self.pool in POOLINGS,
            f"pool is {self.pool!r}{did_you_mean(str(self.pool), POOLINGS)} Expected: {', '.join(POOLINGS)}",
        )
        for name, given in (("normalize", self.normalize), ("truncate_dim", self.truncate_dim is not None)):
            require(
                self.pool is not None or not given,
                f"{name} was given without pool; expected pool mean, cls or max, which makes the vector: add --pool",
            )
        name = "pool" if self.pool is not None else "top_k"
        require(
            not self.is_wanted or model.scope != "attention",
            f"{name} was given with scope attention, which is one layer and not a model: use scope encoder",
        )
        require(
            self.pool is None or self.top_k is None,
            "pool and top_k were both given; expected one: a vector for each sample, or tokens at some places",
        )
        if self.pool is not None:
            width = hidden_width(model)
            cut = self.truncate_dim
            require(
                cut is None or 1 <= cut <= width,
                f"truncate_dim is {cut}; expected 1 to {width}, the width of the hidden states",
            )
        if self.top_k is not None:
            count = vocabulary(model)
            reason = "the size of the vocabulary" if count <= LARGEST_TOP_K else "the most that TensorRT sorts"
            most = min(count, LARGEST_TOP_K)
            require(1 <= self.top_k <= most, f"top_k is {self.top_k}; expected 1 to {most}, {reason}")

    def inputs(self) -> dict[str, Dims]:
        """Axes of the inputs, int64, that the head adds after those of the model."""
        return {} if self.top_k is None else {POSITIONS: ("batch", MASKS)}

    def outputs(self, model: ModelContract) -> dict[str, Dims]:
        """Axes of the outputs by name."""
        if self.top_k is not None:
            return dict.fromkeys((SCORES, TOKENS), ("batch", MASKS, self.top_k))
        return {EMBEDDING: ("batch", self.truncate_dim or hidden_width(model))}


def hidden_width(model: ModelContract) -> int:
    """The channels of a model's hidden states. Raises SpecError for a model that returns something else, or whose mask
    does not mark tokens."""
    given = ", ".join(f"{name} [{', '.join(map(str, dims))}]" for name, dims in model.outputs.items())
    (name, dims), *others = model.outputs.items()
    is_hidden = len(dims) == 3 and dims[0] == "batch" and dims[1] in ("seq", model.fixed_seq_len)
    width = dims[-1] if is_hidden else None
    remedy = {"checkpoint": "with --checkpoint, use --task base", "encoder": "leave --lm-head out"}.get(model.scope, "")
    require(
        isinstance(width, int)
        and not others
        and name != LOGITS
        and model.element_types.get(name, "float").startswith(("float", "bfloat")),
        f"pool was given, but the model returns {given}; expected hidden states alone, floats [batch, seq, channels]"
        f"; {remedy}",
    )
    axes = model.inputs.get(model.mask, dims[:2])
    require(
        tuple(axes) == tuple(dims[:2]),
        f"pool was given, but the mask {model.mask} has the axes {list(axes)}; expected {list(dims[:2])}: give the "
        "model a mask with one value for each token",
    )
    assert isinstance(width, int)
    return width


def vocabulary(model: ModelContract) -> int:
    """The number of tokens that a language model predicts. Raises SpecError for another model."""
    dims = model.outputs.get(LOGITS, ())
    given = ", ".join(f"{name} [{', '.join(map(str, dims))}]" for name, dims in model.outputs.items())
    require(
        len(dims) == 3 and model.task in ("", *LANGUAGE_MODELS),
        f"top_k was given, but the model returns {given}; expected logits of a vocabulary for each token: with "
        "--checkpoint, use --task masked-lm; for an encoder, --lm-head",
    )
    return int(dims[-1])
