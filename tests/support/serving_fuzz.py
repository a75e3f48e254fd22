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
    """True for a value that a server may well accept: null means left out, 0 is a token, a string is an id."""
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


# What stands in the place of a text, or of a list of them.
NOT_TEXTS: tuple[Any, ...] = (
    None, True, -1, 1.5, 2**64, {}, [], [[]], [None], [{}], ["a", 1], [[1], "a"], [[2**70]], [[[["a"]]]], "",
)  # fmt: skip
# What no parameter of generation takes: not even `stop_at_eos`, to which true and false are right.
NOT_NUMBERS: tuple[Any, ...] = (-1, -0.5, 1e-9, 2**64, 10**400, "5", "x" * 100_000, [], [1] * 1000, {}, float("nan"))
NOT_NAMES = (
    "..", ".", "%2e%2e", "..%2f..", "%2fetc%2fpasswd", "%00", "a%0ab", "%ff%fe", "%f0%9d%95%8f", "-x", "~", "{name}",
    "absent", "leads-out", "x" * 200, "x" * 5000,
)  # fmt: skip


def as_json(fields: object) -> bytes:
    return json.dumps(fields).encode()


def wrong_embedding(model: str, dice: random.Random) -> bytes:
    fields: Any = {"model": model, "input": ["a text"]}
    place = dice.choice(("model", "input", "encoding_format", "dimensions", "request", "unknown"))
    # null stands for what is left out
    value = dice.choice(NOT_TEXTS[1:] if place in ("encoding_format", "dimensions") else NOT_TEXTS)
    return post("/v1/embeddings", as_json(value if place == "request" else {**fields, place: value}))


def wrong_text(model: str, dice: random.Random) -> bytes:
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a text"]}
    return infer(model, as_json({"inputs": [{**tensor, dice.choice([*tensor]): dice.choice(NOT_TEXTS)}]}))


def text_as_tensor(model: str, dice: random.Random) -> bytes:
    """Strings for an input that takes numbers, or numbers beside strings."""
    tensor = {"name": "input_ids", "shape": [1, 1], "datatype": dice.choice(("BYTES", "INT64")), "data": ["a text"]}
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a text"]}
    return infer(model, as_json({"inputs": dice.choice(([tensor], [tensor, text], [text, text]))}))


def wrong_binary_text(model: str, dice: random.Random) -> bytes:
    """A string of another size than its four bytes say, or that is not UTF-8, or empty."""
    data = dice.choice((b"", b"\x01", b"\x02\0\0\0a", b"\x01\0\0\0ab", b"\xff\xff\xff\xff", b"\x01\0\0\0\xff"))
    size = dice.choice((len(data), len(data), -1, 2**40, "1"))
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
    head = as_json({"inputs": [tensor]})
    return infer(model, head + data, f"Inference-Header-Content-Length: {len(head)}\r\n")


def wrong_generation(model: str, dice: random.Random) -> bytes:
    """`model` does not generate; "writer" does."""
    name = dice.choice(("writer", "writer", "writer", model))
    fields: dict[str, Any] = {"text_input": "a text", "max_tokens": 1}
    place = dice.choice(("text_input", "parameters", "id", "temperature", "top_k", "seed", "stop_at_eos", "unknown"))
    if place == "text_input":
        fields[place] = dice.choice(NOT_TEXTS)
    elif place == "parameters":
        fields[place] = dice.choice((1, "x", [], {"max_tokens": 5}, {"max_new_tokens": 0}, {"stream": "yes"}))
        fields["max_new_tokens"] = 1  # given twice
    else:
        fields[place] = dice.choice([value for value in NOT_NUMBERS if not is_taken(place, value)])
    return post(f"/v2/models/{name}/{dice.choice(('generate', 'generate_stream'))}", as_json(fields))


def is_taken(place: str, value: Any) -> bool:
    """Large temperatures are as good as infinity, and an id may be any string."""
    return isinstance(value, str) if place == "id" else place == "temperature" and value == 2**64


def wrong_repository(model: str, dice: random.Random) -> bytes:
    """Names that lead nowhere or out of the folder; parameters that would change something."""
    verb = dice.choice(("load", "unload"))
    if dice.random() < 0.7:
        return post(f"/v2/repository/models/{dice.choice(NOT_NAMES)}/{verb}", dice.choice((b"", b"{}")))
    strange = dice.choice((1, "x", [{}], {"config": "{}"}, {"file:1/model.onnx": "AAAA"}, {"x" * 100_000: 1}))
    body = dice.choice((b"{", b"[]", b"\xff", as_json({"parameters": strange})))
    return post(f"/v2/repository/models/{model}/{verb}", body)


def wrong_openai_place(model: str, dice: random.Random) -> bytes:
    path = dice.choice(("embeddings/", "completions", "chat/completions", "models", f"models/{model}", "models/", ""))
    name = dice.choice(NOT_NAMES)
    return dice.choice((post(f"/v1/{path}", b"{}"), f"GET /v1/models/{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))


def long_names(model: str, dice: random.Random) -> bytes:
    """Half a megabyte where a word is expected."""
    word = "x" * 500_000
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a text"]}
    path, fields = dice.choice(
        (
            (f"/v2/models/{model}/infer", {"inputs": [{**text, "name": word}]}),
            (f"/v2/models/{model}/infer", {"inputs": [text], "outputs": [{"name": word}]}),
            ("/v2/models/writer/generate", {"text_input": "a", word: 1}),
            ("/v2/models/writer/generate", {"text_input": "a", "seed": word}),
            ("/v1/embeddings", {"model": word, "input": "a"}),
        )
    )
    return post(path, as_json(fields))


def damaged_json(model: str, dice: random.Random) -> bytes:
    path, fields = dice.choice(
        (
            ("/v1/embeddings", {"model": model, "input": "a text"}),
            ("/v2/models/writer/generate_stream", {"text_input": "a text", "max_tokens": 1}),
        )
    )
    text = as_json(fields)
    place = dice.randrange(1, len(text))
    return post(path, dice.choice((text[:place], text[:place] + b"\xff" + text[place:], b"[" * 100_000)))


TEXT_KINDS: tuple[Callable[[str, random.Random], bytes], ...] = (
    wrong_embedding, wrong_text, text_as_tensor, wrong_binary_text, wrong_generation, wrong_repository,
    wrong_openai_place, long_names, damaged_json,
)  # fmt: skip


def malformed_texts(model: str, count: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """Requests for all that is not tensors, kinds in turn; the name of the kind with each.

    model: an embedder. The server has a model "writer" too, and may load models.
    """
    dice = random.Random(seed)
    kinds = [TEXT_KINDS[number % len(TEXT_KINDS)] for number in range(count)]
    return [(kind.__name__, kind(model, dice)) for kind in kinds]


# Paths that lead to a health probe if they are read carelessly, or past the check of the token.
PATH_TRICKS = (
    b"/v2", b"//v2", b"/v2/", b"/V2", b"/v2/models/small", b"//v2/models/small", b"/v2//models/small", b"/metrics",
    b"/metrics/", b"//metrics", b"/%6detrics", b"/v2/health", b"/v2/health/", b"/v2/health/live/", b"/v2/health//live",
    b"/v2/health/LIVE", b"/V2/health/live", b"/v2/health/ready/../../models/small", b"/v2/health/%2e%2e/models/small",
    b"/v2/health/live/..%2f..%2fmodels/small", b"/v2/health/live%2f..", b"/v2/health/live;/../../models/small",
    b"/v2/health/live;x", b"/v2/health/live%3b", b"/v2/health/live%00", b"/v2/health/live%20", b"/v2/health/live%3f",
    b"/v2/health/live%23", b"/v2/health\\live", b"/v2/models/small?/v2/health/live",
    b"/v2/models/small#/v2/health/live",
    b"/v2/models/small%3f/v2/health/live", b"http://x/v2/models/small", b"http://x/v2/health/live/../../models/small",
    b"http://x:80/metrics", b"/v2/repository/index", b"/v2/repository/models/..%2f..%2fetc/load", b"/v1/models",
    b"/v1/embeddings", b"/nothing", b"/", b"*", b"/.", b"/..", b"/%", b"/%zz",
)  # fmt: skip


def bad_heads(model: str) -> list[tuple[str, bytes]]:
    """Right requests whose head is wrong, ambiguous or too large, by what is wrong. Each should end its connection."""
    body = as_json(right_fields())

    def changed(more: bytes = b"", host: bytes = b"Host: x\r\n", version: bytes = b"1.1", size: bool = True) -> bytes:
        length = b"Content-Length: %d\r\n" % len(body) if size else b""
        head = b"POST /v2/models/" + model.encode() + b"/infer HTTP/" + version + b"\r\n"
        return head + host + length + more + b"\r\n" + body

    def chunked(coding: bytes) -> bytes:
        return changed(b"Transfer-Encoding: " + coding + b"\r\n", size=False)[: -len(body)] + b"0\r\n\r\n"

    heads = {
        "no host": changed(host=b""),
        "two hosts": changed(host=b"Host: x\r\nhost: x\r\n"),
        "two lengths": changed(b"Content-Length: %d\r\n" % len(body)),
        "other length": changed(b"Content-Length: 5\r\n"),
        "list of lengths": changed(b"Content-Length: 5, 5\r\n", size=False),
        "length +5": changed(b"Content-Length: +5\r\n", size=False),
        "length 0x5": changed(b"Content-Length: 0x5\r\n", size=False),
        "length of 30 digits": changed(b"Content-Length: " + b"9" * 30 + b"\r\n", size=False),
        "length and chunks": changed(b"Transfer-Encoding: chunked\r\n"),
        "two codings": chunked(b"chunked\r\nTransfer-Encoding: chunked"),
        "gzip, chunked": chunked(b"gzip, chunked"),
        "chunked, identity": chunked(b"chunked, identity"),
        "xchunked": chunked(b"xchunked"),
        "folded": chunked(b"\r\n chunked"),
        "space before the colon": changed(b"Transfer-Encoding : chunked\r\n", size=False),
        "two tokens": changed(b"Authorization: a\r\nAuthorization: b\r\n"),
        "two encodings": changed(b"Content-Encoding: gzip\r\nContent-Encoding: identity\r\n"),
        "two sizes of JSON": changed(b"Inference-Header-Content-Length: 5\r\n" * 2),
        "upgrade": changed(b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
        "space in a name": changed(b"X Y: 1\r\n"),
        "no name": changed(b": 1\r\n"),
        "NUL in a value": changed(b"X: a\0b\r\n"),
        "line feed alone": changed(b"X: a\nY: b\r\n"),
        "return alone": changed(b"X: a\rY: b\r\n"),
        "large header": changed(b"X: " + b"y" * 40_000 + b"\r\n"),
        "thousands of headers": changed(b"X: y\r\n" * 8000),
        "long path": b"GET /" + b"y" * 60_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        "bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        "NUL in the path": b"GET /v2\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        "HTTP/0.9": b"GET /v2/health/live\r\n\r\n",
        "HTTP/1.2": changed(version=b"1.2"),
        "HTTP/2.0": changed(version=b"2.0"),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(20),
        "CONNECT": b"CONNECT localhost:22 HTTP/1.1\r\nHost: x\r\n\r\n",
        "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
        "PROXY": b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + changed(),
        "PROXY 2": b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12) + changed(),
        "a byte order mark": b"\xef\xbb\xbf" + changed(),
        "UTF-16": changed()[: -len(body)].decode().encode("utf-16"),
        "zeros": bytes(4000),
        "TLS": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(200),
    }  # fmt: skip
    odd_names = {
        f"byte {byte:#x} in a name": changed(b"X%cY: 1\r\n" % byte) for byte in b"\0\x01\t(),/;@[\\]{}\x7f\x80\xff"
    }
    return [*heads.items(), *odd_names.items()]
