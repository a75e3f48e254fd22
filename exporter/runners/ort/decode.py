"""A causal model in ONNX Runtime that reads prompts and decodes tokens, with its state carried along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.dtypes import TensorInfo
from effexport.errors import UserError
from effexport.runners.feeds import FeedLimits, array_of, check_array, checked_feeds
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.ort.settings import OrtSettings
from effexport.runners.runner import Closeable, tensors_text
from effexport.spec import MASK_NAME, NEXT_PREFIX

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from effexport.dtypes import Array

POSITION = "position"


class DecodeRunner(Closeable):
    """Reads prompts and decodes token by token, and carries the state from call to call.

        with effexport.load_decoder("artifacts/linear") as decoder:
            logits = decoder.prefill({"input_ids": prompt})["logits"]   # int64 [batch, seq]
            for token in tokens:                                        # int64 [batch, 1]
                logits = decoder.step({"input_ids": token})["logits"]

    Not thread-safe, because it has a state. `state` is a dictionary of float32 arrays, empty before the first token,
    when all of it is zero. `position`, int64 [batch], or [] before the first token, is the position of the next token.
    To fork a beam, copy both; to continue from a copy, set both. Raises UserError for a state or a position that does
    not fit; the decoder then stays as it was.
    """

    def __init__(
        self,
        step: str | Path,
        prefill: str | Path | None = None,
        limits: FeedLimits | None = None,
        settings: OrtSettings | None = None,
    ) -> None:
        self._step = OrtRunner(Path(step), settings)
        self._prefill_path = prefill
        self._prefill: OrtRunner | None = None
        self._limits = limits or FeedLimits()
        self.settings = self._step.settings
        learned = self._limits.max_seq_len if any(t.name == POSITION for t in self._step.inputs) else None
        self._longest = learned or int(np.iinfo(np.int64).max)
        outputs = {tensor.name for tensor in self._step.outputs}
        self.states = tuple(t for t in self._step.inputs if NEXT_PREFIX + t.name in outputs)
        self.inputs = self._without_state(self._step.inputs)
        self.outputs = self._without_state(self._step.outputs)
        self.reset()

    def __repr__(self) -> str:
        signature = f"{tensors_text(self.inputs)} → {tensors_text(self.outputs)}"
        return f"<DecodeRunner: {signature}; next positions: {self.position.tolist()}>"

    def reset(self) -> None:
        """Clear the state: the next token is the first."""
        self._state: dict[str, Array] = {}
        self._position: Array = np.zeros((), dtype=np.int64)

    @property
    def state(self) -> dict[str, Array]:
        return self._state

    @state.setter
    def state(self, state: dict[str, Array]) -> None:
        self._state = self._checked_state(state)

    @property
    def position(self) -> Array:
        return self._position

    @position.setter
    def position(self, position: ArrayLike) -> None:
        self._position = self._checked_position(position)

    def _checked_state(self, state: object) -> dict[str, Array]:
        if not isinstance(state, dict):
            raise UserError(f"the state is given as {type(state).__name__}; expected a dictionary of arrays")
        names = [tensor.name for tensor in self.states]
        if state and set(state) != set(names):
            given = ", ".join(map(repr, state))
            raise UserError(f"the state has {given}; expected {', '.join(names)}, or an empty dictionary")
        sizes: dict[str, tuple[int, str]] = {}
        arrays: dict[str, Array] = {}
        for tensor in self.states if state else ():
            arrays[tensor.name] = array_of(state[tensor.name], tensor, "state")
            check_array(arrays[tensor.name], tensor, sizes, "state")
        return arrays

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

    def step(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Decode one token for each sample: `input_ids` int64 [batch, 1] or `hidden_states` [batch, 1, dim].

        Returns the model's output for these tokens. Raises UserError for feeds that do not fit; the state then stays
        as it was.
        """
        complete = checked_feeds(feeds, self.inputs, replace(self._limits, max_seq_len=None))
        return self._advance(self._step, complete, np.ones(self._batch(complete), dtype=np.int64))

    def prefill(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Read a whole prompt at once: the feeds of `run`, `input_ids` int64 [batch, seq] or `hidden_states`
        [batch, seq, dim], and an optional `attention_mask` [batch, seq].

        Returns the model's output for all of these tokens. The state is then the same as after a step with each kept
        token, so a sample goes on after its last kept token. A prompt may also follow earlier tokens.
        Raises UserError for feeds that do not fit, and for an artifact that was built without a prefill; the state then
        stays as it was.
        """
        runner = self._opened_prefill()
        # positions are checked below: a prompt may follow other tokens, and padding needs no position
        limits = replace(self._limits, max_seq_len=None)
        complete = checked_feeds(feeds, self._without_state(runner.inputs), limits)
        # the first column after the last kept token of each sample
        columns = np.arange(1, complete[MASK_NAME].shape[1] + 1)
        return self._advance(runner, complete, (complete[MASK_NAME] * columns).max(axis=1))

    def _advance(self, runner: OrtRunner, feeds: dict[str, Array], tokens: Array) -> dict[str, Array]:
        """Run a graph, and keep the next state. tokens: by how many positions each sample advances, int64 [batch]."""
        batch = self._batch(feeds)
        # the dictionary and the arrays may have been written to since they were set
        self.state, self.position = self._state, self._position
        for name, held in {**self.state, POSITION: self.position}.items():
            if held.ndim and len(held) != batch:
                what = "the position" if name == POSITION else "the state"
                raise UserError(
                    f"the batch size is {batch}, but {what} is of {len(held)}; call reset() to begin new sequences"
                )
        following = self.position + tokens
        if any(tensor.name == POSITION for tensor in runner.inputs):
            if following.max() > self._longest:
                raise UserError(
                    f"token {following.max()} is beyond the {self._longest} learned positions of this model; "
                    "call reset() to begin new sequences, or build with a larger --seq-len"
                )
            feeds = {**feeds, POSITION: np.broadcast_to(self.position, batch)}
        state = self.state or {t.name: np.zeros((batch, *map(int, t.dims[1:])), dtype=np.float32) for t in self.states}
        results = runner.run({**feeds, **state})
        self._state = {t.name: results.pop(NEXT_PREFIX + t.name) for t in self.states}
        self._position = following
        return results

    def _batch(self, feeds: Mapping[str, Array]) -> int:
        return len(feeds[self.inputs[0].name])

    def _without_state(self, tensors: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
        """The inputs or outputs of a graph that are the caller's."""
        own = {POSITION, *(t.name for t in self.states), *(NEXT_PREFIX + t.name for t in self.states)}
        return tuple(tensor for tensor in tensors if tensor.name not in own)

    def _opened_prefill(self) -> OrtRunner:
        """The second graph, opened when it is first needed, because it has weights of its own."""
        if self._prefill_path is None:
            raise UserError(
                "this artifact has no prefill, because an older effexport built it; build it again, or call step with "
                "each token of the prompt"
            )
        if self._prefill is None:
            self._step.check_open()
            self._prefill = OrtRunner(Path(self._prefill_path), self.settings)
        return self._prefill

    def close(self) -> None:
        self._step.close()
        if self._prefill is not None:
            self._prefill.close()
