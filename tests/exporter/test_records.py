"""JSON files of ours: whatever is in them, the answer is a record or one error, soon and in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from effexport.base.errors import UserError
from effexport.base.records import MOST_BYTES, MOST_LEVELS, MOST_VALUES, Count, Figure, Seconds, figure, read_record


class Sample(msgspec.Struct):
    """One field of every kind."""

    count: Count = 0
    seconds: Seconds = 0.0
    figure: Figure = 0.0
    texts: dict[str, str] = {}
    rest: Any = None


def read(folder: Path, text: str | bytes) -> Sample:
    file = folder / "sample.json"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_record(file, Sample, "copy it again")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = {"count": 2**63 - 1, "seconds": 1e9, "figure": "nan", "texts": {"é": "a\n\tb"}, "rest": [{}, None]}
    found = read(tmp_path, json.dumps(written))
    assert msgspec.to_builtins(found) == written
    assert figure(found.figure) != figure(found.figure)  # NaN


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "truncated"),
        ("[]", "does not hold a JSON object"),
        ('{"count": -1}', ">= 0"),
        ('{"count": 9223372036854775808}', "does not fit into 64 bits"),
        (f'{{"rest": {"1" * 4000}}}', "does not fit into 64 bits"),
        (f'{{"rest": {"1" * 5000}}}', "out of range"),
        ('{"count": true}', "Expected `int`"),
        ('{"seconds": -0.5}', ">= 0"),
        ('{"seconds": 1e300}', "<= "),
        ('{"seconds": NaN}', "malformed"),
        ('{"rest": 1e999}', "out of range"),
        ('{"figure": "much"}', "Invalid enum value"),
        ('{"texts": []}', "Expected `object`"),
        (r'{"rest": "\ud800"}', "damaged"),
        (rb'{"rest": "' + b"\xff" + rb'"}', "damaged"),
        (r'{"rest": "\u001b[2J"}', "control character"),
        (r'{"\u0000": 1}', "control character"),
        (r'{"rest": [["\u009b2J"]]}', "control character"),
        (r'{"rest": "\u202etxt.exe"}', "control character"),
        (r'{"a\nRUN id": 1}', "line break"),
        (f'{{"rest": {"[" * MOST_LEVELS}{"]" * MOST_LEVELS}}}', "levels deep"),
        (f'{{"rest": {"[" * 100_000}{"]" * 100_000}}}', "too deeply"),
    ],
)  # fmt: skip
def test_whatever_else_a_file_holds_is_one_error_with_its_remedy(tmp_path: Path, text: str | bytes, what: str) -> None:
    with pytest.raises(UserError, match=r"sample\.json is damaged: .*; copy it again$") as error:
        read(tmp_path, text)
    assert what in str(error.value)


@pytest.mark.parametrize("value", ["[]", "{}", "1", '""'])
def test_many_values_are_refused_before_they_take_memory(tmp_path: Path, value: str) -> None:
    text = f'{{"rest": [{",".join([value] * (MOST_VALUES + 1))}]}}'
    assert len(text) < MOST_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="values; expected at most"):
            read(tmp_path, text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # the text, as it was written and as it is read
    assert peak < 4 * len(text)


def test_a_large_file_is_not_even_read(tmp_path: Path) -> None:
    with (tmp_path / "sample.json").open("wb") as stream:
        stream.truncate(1 << 40)  # takes no room
    with pytest.raises(UserError, match=r"sample\.json cannot be read: it is larger than 8192 KB; copy it again"):
        read_record(tmp_path / "sample.json", Sample, "copy it again")


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name in ("missing", "loop", ".", "x" * 300):
        with pytest.raises(UserError, match=r"cannot be read: .*; copy it again"):
            read_record(tmp_path / name, Sample, "copy it again")


def test_threads_that_are_the_first_to_read_a_kind_of_record_do_not_crash() -> None:
    """In processes of their own, because msgspec without our lock ends them with SIGSEGV, in about half of the runs."""
    code = """
import sys, threading
sys.setswitchinterval(1e-6)
from effexport.artifact import Manifest
from effexport.base.errors import UserError
from effexport.base.records import record_from_values
entry = {"passed": 1, "failed": 0, "not run": 0, "worst": 1e-6, "limit": 1e-5, "metric": "max |error| / RMS"}
texts = dict.fromkeys(("effexport_version", "variant", "precision", "weights_sha256", "weights_from"), "")
lists = {name: [] for name in ("inputs", "outputs", "hash_values", "notes", "engines")}
objects = {name: {} for name in ("spec", "custom_ops", "environment")}
parity = {"passed": True, "summary": {"arithmetic": entry}}
values = {**texts, **lists, **objects, "opset": 20, "parity": parity, "files": {"a": {"sha256": "x", "bytes": 1}}}
together, read = threading.Barrier(6), []

def reads():
    together.wait()
    read.append(record_from_values(values, Manifest, "a file", ""))

threads = [threading.Thread(target=reads) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(read) == 6
"""
    for _ in range(6):
        subprocess.run([sys.executable, "-P", "-c", code], check=True)
