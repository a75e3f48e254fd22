"""Requests of all kinds to four models, with their right answers, and a load while another is loaded and unloaded."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from serving_load import Outcome, Sample, binary_request, closed_loop, exchange_once, post

# Scores of float32 against transformers' own float32, as the tasks are held to.
SCORE_LIMIT = 1e-4
# Rounding of float32 in sums over 32 channels; the rows of a joined run may be summed in another order.
VECTOR_LIMIT = 1e-5
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "doesn't",
    "jump",
    "over",
    "a",
    "lazy",
    "dog",
    ",",
    "Paris",
    "naïve",
    "42",
    "!",
]
Feeds = dict[str, Any]


@dataclass(frozen=True)
class Oracle:
    """The right answers, from elsewhere than the server: transformers' pipelines, and the runner with one request.

    fill, ask: pipelines. pooled: feeds → the vectors of a byte-level embedder. layer: feeds → an attention layer.
    """

    fill: Callable[..., Any]
    ask: Callable[..., Any]
    pooled: Callable[[Feeds], Any]
    layer: Callable[[Feeds], Any]

    def vector(self, text: str) -> Any:
        return self.pooled({"input_ids": np.array([byte_tokens(text)])})[0]


def byte_tokens(text: str) -> list[int]:
    return [byte + 2 for byte in text.encode()]


def text_input(values: list[Any], name: str = "text", **changes: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(values)], "datatype": "BYTES", "data": values, **changes}


def sized(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def mixed_traffic(oracle: Oracle) -> list[Sample]:
    """120 different requests in random order, a tenth of them invalid: texts as JSON and as binary data, embeddings in
    both forms of their API, tensors of 1 to 64 tokens and of one to three rows."""
    dice = np.random.default_rng(0)
    kinds = [filled, embedded, embedded_ids, hidden]
    made = [kinds[number % 4](oracle, dice) for number in range(100)]
    made += [answered(oracle, dice) for _ in range(8)]
    made += [refused(path, body) for path, body in REFUSED for _ in range(3)]
    return [made[index] for index in dice.permutation(len(made))]


def sentence(dice: np.random.Generator, words: int) -> list[str]:
    return list(dice.choice(WORDS, words))


def filled(oracle: Oracle, dice: np.random.Generator) -> Sample:
    """Masks of one to three texts, which are binary data every other time."""
    texts = []
    for _ in range(dice.integers(1, 4)):
        words = sentence(dice, int(dice.integers(0, 20)))
        words.insert(int(dice.integers(len(words) + 1)), "[MASK]")
        texts.append(" ".join(words))
    right = [oracle.fill(text, top_k=3) for text in texts]
    given, data = text_input(texts), b""
    if dice.random() < 0.5:
        data = sized(*(text.encode() for text in texts))
        given = {**given, "parameters": {"binary_data_size": len(data)}}
        del given["data"]
    head = json.dumps({"inputs": [given], "parameters": {"top": 3}}).encode()
    request = post("/v2/models/fill/infer", head + data, f"Inference-Header-Content-Length: {len(head)}\r\n")
    return Sample(request, b"", 0, checked=partial(is_filled, right))


def embedded(oracle: Oracle, dice: np.random.Generator) -> Sample:
    """Vectors of one to three texts, or of their tokens, as numbers or base64."""
    texts = [" ".join(sentence(dice, int(dice.integers(1, 9))))[:60] for _ in range(dice.integers(1, 4))]
    right = np.stack([oracle.vector(text) for text in texts])
    given = [byte_tokens(text) for text in texts] if dice.random() < 0.5 else texts
    body = {"model": "pooled", "input": given, "encoding_format": str(dice.choice(["float", "base64"]))}
    return Sample(post("/v1/embeddings", json.dumps(body).encode()), b"", 0, checked=partial(is_embedded, right))


def embedded_ids(oracle: Oracle, dice: np.random.Generator) -> Sample:
    """Tokens as a tensor of JSON, with a binary answer."""
    ids = dice.integers(2, 258, (int(dice.integers(1, 4)), int(dice.integers(1, 65))))
    tensor = {"name": "input_ids", "shape": list(ids.shape), "datatype": "INT64", "data": ids.ravel().tolist()}
    fields = {"inputs": [tensor], "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}]}
    right = oracle.pooled({"input_ids": ids}).tobytes()
    return Sample(post("/v2/models/pooled/infer", json.dumps(fields).encode()), right, VECTOR_LIMIT)


def hidden(oracle: Oracle, dice: np.random.Generator) -> Sample:
    """Hidden states to an attention layer, all of it binary."""
    shape = int(dice.integers(1, 4)), int(dice.integers(1, 65)), 32
    feeds = {"hidden_states": dice.standard_normal(shape, dtype=np.float32)}
    return Sample(binary_request("layer", feeds), oracle.layer(feeds).tobytes(), VECTOR_LIMIT)


def answered(oracle: Oracle, dice: np.random.Generator) -> Sample:
    question, context = (" ".join(sentence(dice, words)) for words in (4, 15))
    body = {"inputs": [text_input([question]), text_input([context], "context")]}
    right = oracle.ask(question=question, context=context)
    return Sample(post("/v2/models/ask/infer", json.dumps(body).encode()), b"", 0, checked=partial(is_answered, right))


REFUSED: list[tuple[str, object]] = [
    ("/v2/models/fill/infer", {"inputs": [text_input(["no mask"])]}),
    ("/v1/embeddings", {"model": "pooled", "input": ["", "a"]}),
    ("/v2/models/ask/infer", {"inputs": [text_input(["alone"])]}),
    ("/v2/models/layer/infer", {"inputs": [text_input(["a layer reads no text"])]}),
]


def refused(path: str, body: object) -> Sample:
    return Sample(post(path, json.dumps(body).encode()), b"", 0, 400, lambda body: b"error" in body)


def is_filled(right: list[Any], body: bytes) -> bool:
    answers = [json.loads(text) for text in json.loads(body)["outputs"][0]["data"]]
    return [[one["token"] for one in answer] for answer in answers] == [
        [one["token"] for one in answer] for answer in right
    ] and all(
        abs(one["score"] - other["score"]) <= SCORE_LIMIT
        for answer, expected in zip(answers, right, strict=True)
        for one, other in zip(answer, expected, strict=True)
    )


def is_answered(right: Any, body: bytes) -> bool:
    (answer,) = map(json.loads, json.loads(body)["outputs"][0]["data"])
    return answer["answer"] == right["answer"] and abs(answer["score"] - right["score"]) <= SCORE_LIMIT


def is_embedded(right: Any, body: bytes) -> bool:
    found = np.stack([vector_of(one["embedding"]) for one in json.loads(body)["data"]])
    return found.shape == right.shape and bool(np.abs(found - right).max() <= VECTOR_LIMIT)


def vector_of(embedding: str | list[float]) -> Any:
    if isinstance(embedding, list):
        return np.array(embedding)
    return np.frombuffer(base64.b64decode(embedding), "<f4")


def check_load(port: int, samples: Sequence[Sample], requests: int, guest: Sequence[Sample] = ()) -> str:
    """Send requests from 64 clients, of which none may be lost or wrong, and return a summary.

    guest: requests to a model that is loaded, used, and unloaded while it is used, over and over.
    """
    loads = 0

    async def scenario() -> Outcome:
        nonlocal loads
        load = asyncio.create_task(closed_loop(port, samples, 64, requests))
        while guest and not load.done():
            await load_and_unload(port, guest)
            loads += 1
        return await load

    outcome = asyncio.run(scenario())
    assert outcome.statuses == Counter(samples[number % len(samples)].status for number in range(requests))
    assert (outcome.wrong, outcome.lost) == (0, 0)
    return f"{dict(outcome.statuses)} in {outcome.wall_s:.1f} s, {loads} loads and unloads of another model"


async def load_and_unload(port: int, samples: Sequence[Sample]) -> None:
    path = "/v2/repository/models/guest"
    assert (await exchange_once(port, post(f"{path}/load", b""))).status == 200
    outcome = await closed_loop(port, samples, 4, 24)
    assert (outcome.statuses, outcome.wrong) == ({200: 24}, 0)
    load = asyncio.create_task(closed_loop(port, samples, 4, 24))
    await asyncio.sleep(0.01)
    assert (await exchange_once(port, post(f"{path}/unload", b""))).status == 200
    outcome = await load
    assert set(outcome.statuses) <= {200, 404}
    assert (outcome.wrong, outcome.lost) == (0, 0)
