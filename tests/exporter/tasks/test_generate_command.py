"""`effexport run --generate`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import effexport
from effexport.artifact import Artifact

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(built: Callable[..., Artifact]) -> str:
    return str(built("linear", causal=True, lm_head=True).path)


def test_the_text_goes_to_stdout_and_json_has_the_same_with_its_tokens(
    cli: Cli, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--max-new-tokens", "24", "--temperature", "0.9", "--top-k", "100", "--seed", "3")
    sampling = effexport.Sampling(max_new_tokens=24, temperature=0.9, top_k=100, seed=3)
    with effexport.load_generator(folder) as generator:
        expected = generator("Größe", sampling)
    plain = cli("run", folder, "--generate", "Größe", *options)
    assert (plain.code, plain.out) == (0, expected.text + "\n")
    assert "24 tokens after 7 tokens of the prompt" in plain.err
    assert "ended by length, seed 3" in plain.err

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("Größe".encode())))
    found = cli("run", folder, "--generate", "-", *options, "--json").json
    assert found.pop("seconds") > 0
    assert found == {
        "prompt": "Größe",
        "text": expected.text,
        "tokens": list(expected.tokens),
        "prompt_tokens": 7,
        "finish_reason": "length",
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--generate", "x", "--max-new-tokens", "64"), "this model has positions for 64: expected max_new_tokens up"),
        (("--generate", "x", "--temperature", "-1"), "temperature is -1; expected 0, which is greedy, or at least"),
        (("--generate", "x", "--text", "-"), "--text and --generate given; expected one of"),
        (("--generate", "x", "--runtime", "openvino"), "--runtime openvino does not decode token by token"),
        (("--text", "-", "--top-k", "5"), "--top-k only works with --generate"),
    ],
)
def test_mistakes_are_one_sentence(cli: Cli, folder: str, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("run", folder, *arguments).error()


def test_standard_input_that_is_not_utf_8_is_refused(cli: Cli, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"ab\xff")))
    assert cli("run", folder, "--generate", "-").error() == (
        "standard input is not UTF-8: byte 2; expected a text in UTF-8"
    )
