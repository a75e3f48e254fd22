"""An encoder-decoder that reads a source once and decodes token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from effexport.base.dtypes import numpy_dtype
from effexport.base.errors import UserError
from effexport.models.contract import PAST
from effexport.models.size_formula import shape_of
from effexport.runners.feeds import FeedLimits, checked_feeds, checked_state, limits_from_spec
from effexport.runners.runner import Closeable, tensors_text

if TYPE_CHECKING:
    from effexport.base.dtypes import Array
    from effexport.base.spec import BuildSpec
    from effexport.runners.runner import Runner


class EncoderDecoderRunner(Closeable):
    """Encodes sources and decodes token by token, and carries keys and values from call to call.

        with effexport.load_encoder_decoder("artifacts/led") as model:
            model.encode({"input_ids": source})                                # int64 [batch, seq]
            logits = model.step({"decoder_input_ids": token})["logits"]        # int64 [batch, 1]

    Not thread-safe, because it has a state. `state` is a dictionary of arrays, {} before `encode`: the mask of the
    source, its keys and values, and those of the tokens so far, which grow by one with each step and are named in
    `cached`. The first axis of each is the batch, so a beam search chooses its rows:
    `model.state = {name: array[rows] for name, array in model.state.items()}`. Raises UserError for a state that does
    not fit; the runner then stays as it was.
    """

    def __init__(self, spec: BuildSpec, encoder: Runner, step: Runner) -> None:
        """encoder, step: the graph that reads the source, and the one that decodes a token; closed with this."""
        decoder = spec.model.decoder
        assert decoder is not None, "a model with a decoder"
        self.source, _ = spec.source_tensors
        (self.token, *states), (output, *grown) = spec.step_tensors
        self.outputs = (output,)
        self._mask, self._states = spec.model.mask, tuple(states)
        self.cached, self._memory = tuple(decoder.cache), tuple(decoder.memory)
        self._limits = limits_from_spec(spec)
        self._longest = min(spec.model.highest.values())
        self._grown = [tensor.name for tensor in grown]
        self._state: dict[str, Array] = {}
        self._encoder, self._step = encoder, step

    def __repr__(self) -> str:
        given = tensors_text((*self.source, self.token))
        return f"<EncoderDecoderRunner: {given} → {tensors_text(self.outputs)}; {self.length} tokens so far>"

    @property
    def state(self) -> dict[str, Array]:
        return self._state

    @state.setter
    def state(self, state: dict[str, Array]) -> None:
        self._state = checked_state(state, self._states, PAST)

    @property
    def length(self) -> int:
        """The number of tokens that were decoded since `encode`."""
        return int(self._state[self.cached[0]].shape[2]) if self._state else 0

    def encode(self, source: Mapping[str, Array]) -> None:
        """Read a source; the next token is the first. Raises UserError for feeds that do not fit; the state then stays
        as it was."""
        complete = checked_feeds(source, self.source, self._limits)
        memory = self._encoder.run_complete(complete)
        sizes = {"batch": len(complete[self._mask]), PAST: 0}
        caches = [tensor for tensor in self._states if tensor.name in self.cached]
        empty = {t.name: np.zeros(shape_of(t.dims, sizes), numpy_dtype(t.dtype)) for t in caches}
        self._state = {self._mask: complete[self._mask], **{name: memory[name] for name in self._memory}, **empty}

    def step(self, token: Mapping[str, Array]) -> dict[str, Array]:
        """Decode one token for each sample, `decoder_input_ids` int64 [batch, 1] → logits [batch, 1, vocabulary].

        Raises UserError for feeds that do not fit, and beyond the last position; the state then stays as it was.
        """
        feeds = checked_feeds(token, (self.token,), FeedLimits(indices=self._limits.indices, mask=""))
        state = checked_state(self._state, self._states, PAST)  # arrays may have been written to since it was set
        if not state:
            raise UserError("there is no source to decode from; call encode first")
        batch, rows = len(feeds[self.token.name]), len(state[self._mask])
        if batch != rows:
            raise UserError(f"the batch size is {batch}, but the state is of {rows}; give one token for each row of it")
        if self.length == self._longest:
            raise UserError(
                f"token {self.length + 1} is beyond the {self._longest} positions of this decoder; call encode to "
                "begin a new target"
            )
        results = self._step.run_complete({**feeds, **state})
        grown = {name: results.pop(following) for name, following in zip(self.cached, self._grown, strict=True)}
        self._state = {**state, **grown}
        return results

    def close(self) -> None:
        self._encoder.close()
        self._step.close()
