"""Sizes as people write them, and amounts as people read them."""

from __future__ import annotations

import pytest

from effexport.base.errors import UserError
from effexport.base.formatting import (
    bytes_from_text,
    memory,
    milliseconds_from_text,
    number,
    rough_duration,
    tokens_from_text,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64K", 64_000),
        ("500mb", 500 * 10**6),
        ("4GB", 4 * 10**9),
        ("2 G", 2 * 10**9),
        ("64 KiB", 2**16),
        ("512Mi", 2**29),
        ("1.5GiB", 3 * 2**29),
    ],
)
def test_a_size_without_an_i_is_decimal_and_with_one_binary(text: str, size: int) -> None:
    assert bytes_from_text(text, "--workspace") == size


@pytest.mark.parametrize("text", ["", "G", "i", "-5", "4T", "1e9", "0", "0.4", "9" * 400, "٤GB"])
def test_an_unreadable_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UserError, match=r"--workspace is .*; expected bytes, such as .* 4GB .* 1.5GiB"):
        bytes_from_text(text, "--workspace")


def test_a_printed_size_is_read_back_as_it_was() -> None:
    for size in (7, 999, 1500, 2_000_000, 12_300_000_000):
        assert bytes_from_text(memory(size).removesuffix("ytes").replace("b", "B"), "--workspace") == size


@pytest.mark.parametrize(
    ("text", "tokens"), [("512", 512), ("32k", 32_768), ("1.5K", 1536), ("1M", 2**20), ("-5", -5), (" 0 ", 0)]
)
def test_a_length_with_k_counts_in_1024(text: str, tokens: int) -> None:
    assert tokens_from_text(text, "--seq-len") == tokens


@pytest.mark.parametrize("text", ["", "k", "0.3k", "1.5", "32kb", "many", "1e3", "9" * 400])
def test_an_unreadable_length_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UserError, match=r"--seq-len has .*; expected a length in tokens, such as 512 or 32k"):
        tokens_from_text(text, "--seq-len")


@pytest.mark.parametrize(("text", "ms"), [("200ms", 200), ("1.5 s", 1500), ("50us", 0.05), ("50µs", 0.05)])
def test_a_time_has_a_unit(text: str, ms: float) -> None:
    assert milliseconds_from_text(text, "--latency-limit") == pytest.approx(ms)


@pytest.mark.parametrize("text", ["", "200", "0ms", "-1s", "fast", "1e3ms", "2h"])
def test_an_unreadable_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UserError, match=r"--latency-limit is .*; expected a time with its unit, such as 200ms"):
        milliseconds_from_text(text, "--latency-limit")


def test_amounts_are_printed_with_the_digits_that_matter() -> None:
    assert [number(value) for value in (3.0, 0.00123, float("inf"), None)] == ["3", "0.0012", "inf", "–"]
    assert [rough_duration(seconds) for seconds in (0.2, 44.6, 200)] == ["0 s", "45 s", "3 min"]
