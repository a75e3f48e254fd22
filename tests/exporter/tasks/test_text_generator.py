"""Generated text, against PyTorch's forward over the whole sequence at every step; and many sessions at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from effexport.artifact import Artifact
from effexport.base.errors import RuntimeFailedError, UserError
from effexport.base.formatting import listed
from effexport.base.spec import BuildSpec
from effexport.export.module_source import module_from_seed
from effexport.models.variants import WITH_STATE
from effexport.proof.tolerances import arithmetic_limit
from effexport.runners.artifact_runner import decoder_from_artifact
from effexport.tasks.sampling import Sampling
from effexport.tasks.text_generator import Session, Stepper, TextGenerator, generator_from_artifact

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
PROMPTS = ("Hello", "x", "A longer prompt: größer", "\N{ROCKET}\n", "0123456789" * 3)


def test_greedy_tokens_are_those_of_pytorchs_whole_forward_at_every_step(
    artifact: Artifact, generator: TextGenerator
) -> None:
    import torch

    module = module_from_seed(artifact.spec)
    ties = 0
    for prompt in PROMPTS:
        result = generator(prompt, Sampling(max_new_tokens=20, temperature=0))
        ids = list(generator.tokenizer.encode(prompt).ids)
        assert (len(result.tokens), result.prompt_tokens, result.finish_reason) == (20, len(ids), "length")
        for token in result.tokens:
            with torch.no_grad():
                logits = module(torch.tensor([ids]))[0, -1]
            # float32 of ONNX Runtime and of PyTorch round differently, so either of two tokens may win a near tie
            rounding = 2 * arithmetic_limit(artifact.spec).value * float(logits.std())
            assert float(logits.max() - logits[token]) <= rounding
            ties += token != int(logits.argmax())
            ids.append(token)
    assert ties <= 1, "near ties are rare"


def test_a_stream_is_the_text_of_the_tokens_and_a_seed_gives_it_again(generator: TextGenerator) -> None:
    sampling = Sampling(max_new_tokens=40, seed=5, temperature=1.2, top_k=50)
    pieces = list(generator.stream("Once", sampling))
    result = generator("Once", sampling)
    assert len(pieces) > 5
    assert "".join(pieces) == result.text == generator.tokenizer.decode(result.tokens)
    assert generator("Once", Sampling(max_new_tokens=40, seed=6)).tokens != result.tokens
    unseeded = generator("Once", Sampling(max_new_tokens=40))
    again = generator("Once", Sampling(max_new_tokens=40, seed=unseeded.seed))
    assert (again.tokens, again.text) == (unseeded.tokens, unseeded.text)


def settings(number: int) -> tuple[str, Sampling]:
    """Session number …: prompts of many lengths, greedy and sampled, of many lengths."""
    prompt = ("abc" * 11)[: 1 + number % 29] + str(number)
    return prompt, Sampling(max_new_tokens=1 + number % 27, temperature=(number % 3) * 0.7, seed=number)


def drained(stepper: Stepper, arriving: list[list[Session]]) -> dict[Session, list[int]]:
    """The tokens of sessions, of which a group joins before each step."""
    tokens: dict[Session, list[int]] = {session: [] for group in arriving for session in group}
    for group in itertools.chain(arriving, itertools.repeat([])):
        for session in group:
            stepper.add(session)
        if not stepper.sessions and not any(not session.ended for session in tokens):
            return tokens
        for session in stepper.step():
            while session.pieces:
                tokens[session].append(session.pieces.popleft().token)
    raise AssertionError


def test_64_sessions_that_join_and_leave_at_any_step_get_the_tokens_that_each_gets_alone(
    generator: TextGenerator,
) -> None:
    numbers = range(64)
    alone = {number: list(generator(*settings(number)).tokens) for number in numbers}
    sessions = {number: generator.session(*settings(number)) for number in numbers}
    groups = [[sessions[number] for number in numbers if number % 17 == step] for step in range(17)]
    together = drained(generator.stepper, groups)
    # exactly: ONNX Runtime's products give a row the same bits in every batch here
    assert {number: together[session] for number, session in sessions.items()} == alone


def test_a_session_with_nan_fails_alone_and_a_cancelled_one_leaves(generator: TextGenerator) -> None:
    sampling = Sampling(max_new_tokens=15, seed=1)
    right = [list(generator(prompt, sampling).tokens) for prompt in ("one", "three")]
    one, poisoned, three, cancelled = (generator.session(text, sampling) for text in ("one", "two", "three", "four"))
    stepper, got = generator.stepper, {}
    for session in (one, poisoned, three, cancelled):
        stepper.add(session)
        got[session] = []
    while stepper.sessions:
        for session in stepper.step():
            got[session] += [session.pieces.popleft().token for _ in range(len(session.pieces))]
        if len(got[one]) == 5:
            cancelled.cancel()
            state = {name: rows.copy() for name, rows in stepper.decoder.state.items()}
            for name, rows in state.items():
                # the sums of both variants; a running maximum ignores NaN
                rows[1] = np.nan if name.endswith(("_s", "_n")) else rows[1]
            stepper.decoder.state = state
    assert [got[one], got[three]] == right
    assert (len(got[poisoned]), len(got[cancelled])) == (5, 5)
    assert isinstance(poisoned.error, RuntimeFailedError)
    assert str(poisoned.error) == "the logits of new token 6 contain NaN or infinity"
    stepper.step()
    assert stepper.decoder.state == {}, "the state of sessions that have ended is dropped"


def test_the_memory_of_a_session_does_not_grow_with_its_tokens(generator: TextGenerator) -> None:
    def size(session: Session) -> int:
        state = sum(rows.nbytes for rows in generator.stepper.decoder.state.values())
        decoder = session._decoder
        return state + len(decoder._context) + len(decoder._waiting) + len(session.pieces)

    session = generator.session("abc", Sampling(max_new_tokens=60, temperature=0))
    generator.stepper.add(session)
    sizes = []
    while not session.ended:
        generator.stepper.step()
        session.pieces.clear()
        sizes.append(size(session))
    # tokens that are not UTF-8 wait for the rest of a character, at most 16
    assert len(sizes) == 60
    assert max(sizes) - min(sizes) <= 32


def test_streams_at_the_same_time_and_streams_that_are_closed_do_not_disturb_each_other(
    generator: TextGenerator,
) -> None:
    sampling = Sampling(max_new_tokens=30, seed=2)
    alone = [generator(prompt, sampling).text for prompt in ("first", "second")]
    closed = generator.stream("third", sampling)
    next(closed)
    pairs = itertools.zip_longest(generator.stream("first", sampling), generator.stream("second", sampling))
    texts = ["", ""]
    for step, pair in enumerate(pairs):
        texts = [text + (piece or "") for text, piece in zip(texts, pair, strict=True)]
        if step == 3:
            closed.close()  # type: ignore[attr-defined]
    assert texts == alone
    assert generator.stepper.sessions == 0


class EndsAfter:
    """A tokenizer whose end-of-text token is one that the model is known to choose."""

    def __init__(self, tokenizer: object, eos_token_id: int) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, eos_token_id

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


def test_the_end_of_text_token_ends_a_text_and_is_not_part_of_it(generator: TextGenerator) -> None:
    greedy = Sampling(max_new_tokens=20, temperature=0)
    whole = generator("Hello", greedy)
    last = next(place for place, token in enumerate(whole.tokens) if place and token not in whole.tokens[:place])
    generator.tokenizer = EndsAfter(generator.tokenizer, whole.tokens[last])  # type: ignore[assignment]
    ended = generator("Hello", greedy)
    assert (ended.tokens, ended.finish_reason) == (whole.tokens[:last], "eos")
    assert ended.text == generator.tokenizer.decode(whole.tokens[:last])
    on = generator("Hello", Sampling(max_new_tokens=20, temperature=0, stop_at_eos=False))
    assert (on.tokens, on.finish_reason) == (whole.tokens, "length")


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ("", 1, "the prompt is empty; expected text to continue"),
        (
            "x" * 60,
            5,
            "the prompt has 60 tokens, and max_new_tokens is 5; this model has positions for 64: expected "
            "max_new_tokens up to 4, or build with a larger --seq-len",
        ),
        (
            "x" * 64,
            1,
            "the prompt has 64 tokens, and max_new_tokens is 1; this model has positions for 64: shorten the prompt, "
            "or build with a larger --seq-len",
        ),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused_before_any_work(
    generator: TextGenerator, prompt: str, new: int, message: str
) -> None:
    with pytest.raises(UserError) as error:
        generator.stream(prompt, Sampling(max_new_tokens=new))
    assert str(error.value) == message
    assert len(generator("x" * 60, Sampling(max_new_tokens=4)).tokens) == 4


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "has no decode step"),
        ({"causal": True, "scope": "attention"}, "reads hidden states instead of tokens"),
        ({"causal": True}, "answers with last_hidden_state instead of logits"),
    ],
)
def test_other_artifacts_are_refused_with_how_to_build_one_that_generates(
    small_spec: Callable[..., BuildSpec], fields: dict[str, object], why: str
) -> None:
    artifact: Any = SimpleNamespace(path="artifacts/other", spec=small_spec("linear", **fields))
    with pytest.raises(UserError) as error:
        generator_from_artifact(artifact, decoder_from_artifact)
    assert str(error.value) == (
        f"artifacts/other cannot generate text: it {why}; causal encoders of {listed(WITH_STATE)} with a "
        "language-model head can: effexport build --variant linear --causal --lm-head"
    )


def test_a_failing_runtime_ends_its_sessions_and_later_ones_run(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    with generator_from_artifact(artifact, decoder_from_artifact) as generator:
        right = generator("abc", Sampling(max_new_tokens=8, seed=1)).text
        decoder = generator.stepper.decoder
        stream = generator.stream("abc", Sampling(max_new_tokens=40, seed=1))
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "step_unchecked", lambda feeds: 1 / 0)
            with pytest.raises(RuntimeFailedError, match="the decode step failed: division by zero"):
                list(stream)
        assert generator("abc", Sampling(max_new_tokens=8, seed=1)).text == right
