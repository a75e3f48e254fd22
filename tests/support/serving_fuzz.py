"""Requests that no V2 server should take: wrong JSON, tensors, sizes and headers. All are reproducible."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from serving_load import post

# what a mutation puts in the place of something right
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**64, 10**30, 1.5, 1e400, "", "x" * 5000, "\u0000", [], {}, [[]], [None], [-1],
    [0], [2**62, 2**62], [1, 2, 3], {"a": 1}, [[[[[[]]]]]],
)  # fmt: skip
SEQ = 8


def right_fields() -> dict[str, Any]:
    data = list(range(SEQ))
    return {"inputs": [{"name": "input_ids", "shape": [1, SEQ], "datatype": "INT64", "data": data}]}


def infer(model: str, body: bytes, headers: str = "") -> bytes:
    return post(f"/v2/models/{model}/infer", body, headers)


def changed_field(model: str, dice: random.Random) -> bytes:
    """One field of a right request holds something strange."""
    while True:
        fields = right_fields()
        value = dice.choice(STRANGE)
        place = dice.choice(
            ("request", "inputs", "name", "shape", "datatype", "data", "size", "element", "outputs", "id")
        )
        tensor = fields["inputs"][0]
        if place == "request":
            fields = value
        elif place == "inputs":
            fields["inputs"] = value
        elif place == "size":
            tensor["shape"][dice.randrange(2)] = value
        elif place == "element":
            tensor["data"][dice.randrange(SEQ)] = value
        elif place == "outputs":
            fields["outputs"] = dice.choice(([{"name": value}], [value], value))
        elif place == "id":
            fields["id"] = value
        else:
            tensor[place] = value
        if not is_harmless(place, value, fields):
            # infinity is no JSON, and is written as the number that it came from
            return infer(model, json.dumps(fields).replace("Infinity", "1e400").encode("utf-8", "surrogatepass"))


def is_harmless(place: str, value: Any, fields: Any) -> bool:
    """What a server may well accept: null stands for what is left out, 0 is a token, a string is an id."""
    if place == "element":
        return type(value) is int and value == 0
    if place == "outputs":
        return fields["outputs"] in (None, [])
    return place == "id" and (value is None or isinstance(value, str))


def cut_json(model: str, dice: random.Random) -> bytes:
    text = json.dumps(right_fields()).encode()
    return infer(model, text[: dice.randrange(len(text))])


def noise(model: str, dice: random.Random) -> bytes:
    return infer(model, dice.randbytes(dice.randrange(1, 2000)))


def deep_json(model: str, dice: random.Random) -> bytes:
    depth = dice.choice((100, 1100, 100_000))
    return infer(model, b'{"inputs":' + b"[" * depth + b"]" * depth + b"}")


def no_number(model: str, dice: random.Random) -> bytes:
    word = dice.choice(("NaN", "Infinity", "-Infinity", "1e", "0x10", "01", "--1", "nul", "'1'", "1e999"))
    return infer(model, json.dumps(right_fields()).replace("[0, 1,", f"[{word}, 1,").encode())


def wrong_token(model: str, dice: random.Random) -> bytes:
    fields = right_fields()
    fields["inputs"][0]["data"][3] = dice.choice((-1, 258, 10**6, 2**63 - 1, -(2**63)))
    return infer(model, json.dumps(fields).encode())


def huge_dims(model: str, dice: random.Random) -> bytes:
    fields = right_fields()
    fields["inputs"][0]["shape"] = [dice.choice((1, 2**16, 2**32, 2**63, 2**64, 10**40)) for _ in range(2)]
    if fields["inputs"][0]["shape"] == [1, 1]:
        fields["inputs"][0]["shape"] = [2**32, 2**32]
    size = dice.choice((0, 8, 2**63))
    if dice.random() < 0.5:
        del fields["inputs"][0]["data"]
        fields["inputs"][0]["parameters"] = {"binary_data_size": size}
    return infer(model, json.dumps(fields).encode())


def wrong_sizes(model: str, dice: random.Random) -> bytes:
    """Binary data whose sizes do not agree."""
    right = 8 * SEQ
    size = dice.choice((-1, 0, 1, right - 1, right + 1, right, 2**40, 2**64, "8", None, 8.0, True))
    present = dice.choice((0, 1, right - 8, right - 1, right + 1, right + 800)) if size == right else right
    tensor = {"name": "input_ids", "shape": [1, SEQ], "datatype": "INT64", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    return infer(model, head + bytes(present), f"Inference-Header-Content-Length: {len(head)}\r\n")


def wrong_header_length(model: str, dice: random.Random) -> bytes:
    text = json.dumps(right_fields()).encode()
    value = dice.choice(
        ("-1", "0", "abc", "1e3", "99999999999999999999", str(len(text) + 1), "5", "", "+10", "1_0", "0x5")
    )
    return infer(model, text, f"Inference-Header-Content-Length: {value}\r\n")


def wrong_encoding(model: str, dice: random.Random) -> bytes:
    text = json.dumps(right_fields()).encode()
    return infer(model, text, f"Content-Encoding: {dice.choice(('gzip', 'deflate', 'br', 'zstd', 'gzip, gzip'))}\r\n")


def bad_utf8(model: str, dice: random.Random) -> bytes:
    text = json.dumps(right_fields()).encode()
    place = dice.randrange(2, 20)
    return infer(model, text[:place] + dice.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00")) + text[place:])


def wrong_place(model: str, dice: random.Random) -> bytes:
    path = dice.choice(
        (
            f"/v2/models/{model}/versions/2/infer",
            "/v2/models/other/infer",
            f"/v2/models/{model}/explain",
            f"/v2/models/{model}/infer/",
            "/v2/models//infer",
            "/",
            "/v2/models/%00/infer",
            "/v2/models/../../etc/passwd",
            f"/v2/models/{model}",
            "/v2/health/live",
        )
    )
    return post(path, json.dumps(right_fields()).encode())


def bad_http(model: str, dice: random.Random) -> bytes:
    text = json.dumps(right_fields()).encode()
    return dice.choice(
        (
            post(f"/v2/models/{model}/infer", text).replace(b"Content-Length: ", b"Content-Length: -"),
            post(f"/v2/models/{model}/infer", text).replace(b"Content-Length: ", b"Content-Length: x"),
            post(f"/v2/models/{model}/infer", text).replace(b"HTTP/1.1", b"HTTP/9.9"),
            post(f"/v2/models/{model}/infer", text, "Transfer-Encoding: chunked\r\n"),
            f"POST /v2/models/{model}/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(200),
            b"POST  HTTP/1.1\r\n\r\n",
            b"NONSENSE / HTTP/1.1\r\n\r\n",
            f"POST /v2/models/{model}/infer HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n".encode(),
        )
    )


KINDS: tuple[Callable[[str, random.Random], bytes], ...] = (
    changed_field, cut_json, noise, deep_json, no_number, wrong_token, huge_dims, wrong_sizes, wrong_header_length,
    wrong_encoding, bad_utf8, wrong_place, bad_http,
)  # fmt: skip


def malformed_requests(model: str, count: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """Kinds in turn, half of them changed fields; the name of a kind with each."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        kind = changed_field if number % 2 else KINDS[number // 2 % len(KINDS)]
        made.append((kind.__name__, kind(model, dice)))
    return made


# What stands in the place of something right in a request with texts or for embeddings.
NOT_TEXTS: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    2**64,
    {},
    [],
    [[]],
    [None],
    [{}],
    ["a", 1],
    [[1], "a"],
    [[2**70]],
    "",
)


def malformed_texts(model: str, count: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """Requests with texts of which one field is strange, for both forms; the name of the field with each."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        value = dice.choice(NOT_TEXTS)
        if number % 3 == 0:
            fields: Any = {"model": model, "input": ["a text"]}
            place = dice.choice(("model", "input", "encoding_format", "dimensions", "request", "unknown"))
            if place in ("encoding_format", "dimensions") and value is None:
                value = "x"  # null stands for what is left out
            fields = value if place == "request" else {**fields, place: value}
            made.append((f"embeddings {place}", post("/v1/embeddings", json.dumps(fields).encode())))
            continue
        tensor: dict[str, Any] = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a text"]}
        if number % 3 == 1:
            place = dice.choice(("name", "shape", "datatype", "data"))
            body = json.dumps({"inputs": [{**tensor, place: value}]}).encode()
            made.append((f"text {place}", infer(model, body)))
            continue
        # a string of another size than its four bytes say, or that is not UTF-8
        data = dice.choice((b"", b"\x01", b"\x02\0\0\0a", b"\x01\0\0\0ab", b"\xff\xff\xff\xff", b"\x01\0\0\0\xff"))
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": dice.choice((len(data), len(data), -1, 2**40, "1"))}
        head = json.dumps({"inputs": [tensor]}).encode()
        made.append(("binary text", infer(model, head + data, f"Inference-Header-Content-Length: {len(head)}\r\n")))
    return made
