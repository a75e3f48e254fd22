"""Models that decode token by token, in any runtime.

A causal model reads prompts and carries its state along; an encoder-decoder reads a source once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from effexport.base.dtypes import TensorInfo, numpy_dtype
from effexport.base.errors import UserError
from effexport.base.spec import MASK_NAME, NEXT_PREFIX
from effexport.models.contract import PAST
from effexport.models.size_formula import shape_of
from effexport.runners.runner import (
    Closeable,
    FeedLimits,
    Runner,
    checked_feeds,
    checked_state,
    limits_from_spec,
    tensors_text,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from effexport.base.dtypes import Array
    from effexport.base.spec import BuildSpec
    from effexport.runners.options import RunOptions


POSITION = "position"


class Graph(StrEnum):
    """The two graphs of a causal model with a state."""

    STEP = "decode step"
    PREFILL = "prefill"


class GraphsWithState(Closeable, Protocol):
    """The two graphs of a model in one runtime, and the state that each run reads and replaces.

    settings: how they run. state: arrays by name, or {} before the first token, when all of it is zero. has_prefill:
    artifacts of older releases have a decode step only.
    """

    state: dict[str, Array]

    @property
    def settings(self) -> RunOptions: ...

    @property
    def has_prefill(self) -> bool: ...

    def inputs(self, graph: Graph) -> tuple[TensorInfo, ...]: ...

    def outputs(self, graph: Graph) -> tuple[TensorInfo, ...]: ...

    def accepts(self, graph: Graph, sizes: Mapping[str, int]) -> bool:
        """True if a graph takes inputs of these sizes, by the names of the dimensions."""

    def batch_of_state(self) -> int | None:
        """The batch size of the state; None before the first token. Raises UserError for a damaged state."""

    def run(self, graph: Graph, feeds: dict[str, Array]) -> dict[str, Array]:
        """Run a graph on complete feeds and the state, and keep the next state. A run that fails changes nothing."""


class DecodeRunner(Closeable):
    """Reads prompts and decodes token by token, and carries the state from call to call.

        with effexport.load_decoder("artifacts/linear") as decoder:
            logits = decoder.prefill({"input_ids": prompt})["logits"]   # int64 [batch, seq]
            for token in tokens:                                        # int64 [batch, 1]
                logits = decoder.step({"input_ids": token})["logits"]

    Not thread-safe, because it has a state. `state` is a dictionary of float32 arrays, empty before the first token,
    when all of it is zero; an engine keeps it on the GPU and copies it to the host only if it is asked for. `position`,
    int64 [batch], or [] before the first token, is the position of the next token. To fork a beam, copy both; to
    continue from a copy, set both. Raises UserError for a state or a position that does not fit; the decoder then stays
    as it was.
    """

    def __init__(self, graphs: GraphsWithState, limits: FeedLimits | None = None) -> None:
        self._graphs = graphs
        self._limits = limits or FeedLimits()
        # positions are checked when a graph runs: a prompt may follow other tokens, and padding needs no position
        self._feed_limits = replace(self._limits, max_seq_len=None)
        inputs, outputs = graphs.inputs(Graph.STEP), graphs.outputs(Graph.STEP)
        learned = self._limits.max_seq_len if any(t.name == POSITION for t in inputs) else None
        self._longest = learned or int(np.iinfo(np.int64).max)
        self.states = states_of(inputs, outputs)
        self.inputs = self._without_state(inputs)
        self.outputs = self._without_state(outputs)
        self.reset()

    def __repr__(self) -> str:
        signature = f"{tensors_text(self.inputs)} → {tensors_text(self.outputs)}"
        return f"<DecodeRunner: {signature}; next positions: {self.position.tolist()}>"

    @property
    def settings(self) -> RunOptions:
        """The options that the graphs run with."""
        return self._graphs.settings

    @property
    def has_prefill(self) -> bool:
        return self._graphs.has_prefill

    def reset(self) -> None:
        """Clear the state: the next token is the first."""
        self._graphs.state = {}
        self._position: Array = np.zeros((), dtype=np.int64)

    @property
    def state(self) -> dict[str, Array]:
        return self._graphs.state

    @state.setter
    def state(self, state: dict[str, Array]) -> None:
        self._graphs.state = checked_state(state, self.states)

    @property
    def position(self) -> Array:
        return self._position

    @position.setter
    def position(self, position: ArrayLike) -> None:
        self._position = self._checked_position(position)

    def _checked_position(self, position: ArrayLike) -> Array:
        expected = "expected one integer, or one for each sample"
        try:
            array = np.asarray(position)
        except ValueError as error:  # lists of different lengths
            raise UserError(f"position is {position!r}; {expected}") from error
        if array.dtype.kind not in "iu" or array.ndim > 1 or array.size == 0:
            raise UserError(f"position is {array.dtype.name} {list(array.shape)}; {expected}, int64 [] or [batch]")
        if array.min() < 0 or array.max() > self._longest:
            wrong = array.min() if array.min() < 0 else array.max()
            raise UserError(f"position is {wrong}; {expected}, from 0 to {self._longest}")
        return array.astype(np.int64, copy=False)

    def accepts(self, graph: Graph, batch: int, seq_len: int) -> bool:
        """True if a graph takes a batch of this size and, for a prefill, prompts of this length; engines have limits,
        see their profiles."""
        return self._graphs.accepts(graph, {"batch": batch, "seq": seq_len})

    def step(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Decode one token for each sample: `input_ids` int64 [batch, 1] or `hidden_states` [batch, 1, dim].

        Returns the model's output for these tokens. Raises UserError for feeds that do not fit; the state then stays
        as it was.
        """
        complete = checked_feeds(feeds, self.inputs, self._feed_limits)
        return self._advance(Graph.STEP, complete, np.ones(self._batch(complete), dtype=np.int64))

    def step_unchecked(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """As `step` after a prefill, for an owner that feeds what fits and leaves the state and the position alone: a
        third of a small step on the CPU is checks. The model has learned positions."""
        following = self._position + 1
        results = self._graphs.run(Graph.STEP, {**feeds, POSITION: self._position})
        self._position = following
        return results

    def prefill(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Read a whole prompt at once: the feeds of `run`, `input_ids` int64 [batch, seq] or `hidden_states`
        [batch, seq, dim], and an optional `attention_mask` [batch, seq].

        Returns the model's output for all of these tokens. The state is then the same as after a step with each kept
        token, so a sample goes on after its last kept token. A prompt may also follow earlier tokens.
        Raises UserError for feeds that do not fit, and for an artifact that was built without a prefill; the state then
        stays as it was.
        """
        if not self.has_prefill:
            raise UserError(
                "this artifact has no prefill, because an older effexport built it; build it again, or call step with "
                "each token of the prompt"
            )
        complete = checked_feeds(feeds, self._without_state(self._graphs.inputs(Graph.PREFILL)), self._feed_limits)
        # the first column after the last kept token of each sample
        columns = np.arange(1, complete[MASK_NAME].shape[1] + 1)
        return self._advance(Graph.PREFILL, complete, (complete[MASK_NAME] * columns).max(axis=1))

    def _advance(self, graph: Graph, feeds: dict[str, Array], tokens: Array) -> dict[str, Array]:
        """Run a graph, which keeps the next state. tokens: by how many positions each sample advances, [batch]."""
        batch = self._batch(feeds)
        self.position = self._position  # the array may have been written to since it was set
        sizes = {
            "the state": self._graphs.batch_of_state(),
            "the position": len(self.position) if self.position.ndim else None,
        }
        for what, size in sizes.items():
            if size not in (None, batch):
                raise UserError(
                    f"the batch size is {batch}, but {what} is of {size}; call reset() to begin new sequences"
                )
        following = self.position + tokens
        if any(tensor.name == POSITION for tensor in self._graphs.inputs(graph)):
            if following.max() > self._longest:
                raise UserError(
                    f"token {following.max()} is beyond the {self._longest} learned positions of this model; "
                    "call reset() to begin new sequences, or build with a larger --seq-len"
                )
            feeds = {**feeds, POSITION: np.broadcast_to(self.position, batch)}
        results = self._graphs.run(graph, feeds)
        self._position = following
        return results

    def _batch(self, feeds: Mapping[str, Array]) -> int:
        return len(feeds[self.inputs[0].name])

    def _without_state(self, tensors: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
        """The inputs or outputs of a graph that are the caller's."""
        own = {POSITION, *(t.name for t in self.states), *(NEXT_PREFIX + t.name for t in self.states)}
        return tuple(tensor for tensor in tensors if tensor.name not in own)

    def close(self) -> None:
        self._graphs.close()


def states_of(inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
    """The inputs of a graph that hold the state: those with an output for the next state."""
    names = {tensor.name for tensor in outputs}
    return tuple(tensor for tensor in inputs if NEXT_PREFIX + tensor.name in names)


def zero_state(states: tuple[TensorInfo, ...], batch: int) -> dict[str, Array]:
    """The state before the first token."""
    return {t.name: np.zeros((batch, *map(int, t.dims[1:])), dtype=np.float32) for t in states}


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
