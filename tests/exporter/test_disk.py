"""A full disk is one line with the space that is left and a remedy; exit status 1, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effexport.artifact import ARTIFACT_FOLDER, Artifact
from effexport.base.disk import disk_problem, write_error
from effexport.base.errors import DiskError, StageError, UserError
from effexport.models.validation import SpecError
from effexport.report import inspection

Built = Callable[..., Artifact]
Cli = Callable[..., Any]


def wrapped(cause: Exception) -> Exception:
    """An error of a stage that a library's error has caused."""
    try:
        raise StageError("export", "the exporter has failed") from cause
    except StageError as error:
        return error


def write_half(output: Path, error: Exception) -> None:
    with ARTIFACT_FOLDER.new(output, force=False) as folder:
        (folder / "half").write_text("half")
        raise error


LIMIT, FAILED = "a file may not become so large, see ulimit -f", "the disk has failed, Input/output error"
# What is wrong with a disk besides, by the number of the system's error.
PROBLEMS = {
    errno.EDQUOT: "the quota of the disk is used up",
    errno.EFBIG: LIMIT,
    errno.EIO: FAILED,
    errno.ESTALE: "the disk has failed, Stale file handle",
}
FULL = {
    "the system's": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    # as numpy, and with it onnx_ir, raise them: without an error number
    "numpy's, of an array": OSError("problem writing element 3072 to file"),
    "numpy's, of contiguous memory": OSError("3072 requested and 1024 written"),
    # a Rust library's
    "a library's": RuntimeError("I/O error: No space left on device (os error 28)"),
    "wrapped": wrapped(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_full_disk_is_recognised_whoever_reports_it(tmp_path: Path, error: Exception) -> None:
    output = tmp_path / "new" / "artifact"
    with pytest.raises(DiskError) as raised:
        write_half(output, error)
    assert str(raised.value).startswith(f"cannot write {output}: the disk is full (")
    assert str(raised.value).endswith("; free some space, or choose another folder with -o")
    assert raised.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", PROBLEMS)
def test_a_disk_that_has_failed_ends_as_a_full_one_does(tmp_path: Path, number: int) -> None:
    system = OSError(number, os.strerror(number))
    library = RuntimeError(f"I/O error: {os.strerror(number)} (os error {number})")
    for error in (system, library, wrapped(system)):
        with pytest.raises(DiskError) as raised:
            write_half(tmp_path / "artifact", error)
        message = f"cannot write {tmp_path / 'artifact'}: {PROBLEMS[number]}; choose another folder with -o"
        assert (str(raised.value), raised.value.exit_code) == (message, 1)
        assert list(tmp_path.iterdir()) == []


def test_a_library_that_does_not_say_why_has_met_the_limit_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_problem(FULL["numpy's, of an array"]) == "the disk is full"
    monkeypatch.setattr("resource.getrlimit", lambda limit: (4096, 4096))
    assert disk_problem(FULL["numpy's, of an array"]) == LIMIT


def test_an_input_that_cannot_be_read_is_not_taken_for_an_output(tmp_path: Path) -> None:
    read = SpecError("w.safetensors is not a readable weights file: Input/output error")
    read.__cause__ = OSError(errno.EIO, os.strerror(errno.EIO))
    for error in (read, UserError(str(read))):
        assert disk_problem(error) == ""
        with pytest.raises(type(error)):
            write_half(tmp_path / "artifact", error)


@pytest.mark.parametrize(
    ("number", "message", "code"),
    [
        (errno.ENOSPC, "cannot write x: the disk is full; free some space, or set TMPDIR", 1),
        (errno.EIO, f"cannot write x: {FAILED}; free some space, or set TMPDIR", 1),
        (errno.EFBIG, f"cannot write x: {LIMIT}; free some space, or set TMPDIR", 1),
        (errno.ENAMETOOLONG, "the name 'x'… is too long; choose a shorter one", 2),
    ],
)
def test_an_error_of_the_system_that_nobody_has_handled_is_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, number: int, message: str, code: int
) -> None:
    def fails(path: Path) -> None:
        raise OSError(number, os.strerror(number), "x")

    monkeypatch.setattr(inspection, "describe", fails)
    assert cli("inspect", "y").error(code).startswith(message)


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    denied = PermissionError(errno.EACCES, "Permission denied")
    assert disk_problem(denied) == ""
    assert disk_problem(StageError("export", "an operator is missing")) == ""
    assert disk_problem(OSError(errno.EROFS, os.strerror(errno.EROFS))) == ""
    error = write_error(tmp_path / "x", denied, "choose another file with -o")
    assert isinstance(error, UserError)
    assert str(error) == f"cannot write {tmp_path / 'x'}: Permission denied; choose another file with -o"
    with pytest.raises(PermissionError), ARTIFACT_FOLDER.new(tmp_path / "artifact", force=False):
        raise denied


def test_a_full_temporary_folder_is_named_instead_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(temporary))
    monkeypatch.setattr("effexport.base.disk.free_bytes", lambda folder: 4096 if folder == temporary else 10**9)
    message = str(write_error(tmp_path / "out", FULL["the system's"], "choose another file with -o"))
    assert f"(4.10 kB free in {temporary}); free some space, or set TMPDIR" in message
    # on one disk, whose space other programs take at the same time
    monkeypatch.setattr("effexport.base.disk.free_bytes", lambda folder: 10**9 - 4096 * (folder == temporary))
    message = str(write_error(tmp_path / "out", FULL["the system's"], "choose another file with -o"))
    assert message.endswith("; free some space, or choose another file with -o")


@pytest.fixture(params=[errno.ENOSPC, errno.EIO, errno.EFBIG], ids=["full", "failed", "limited"])
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder that takes the beginning of a file only, for one of several reasons."""
    folder = tmp_path / "full"
    folder.mkdir()
    write_bytes, write_text, copyfile = Path.write_bytes, Path.write_text, shutil.copyfile

    def check(path: Path) -> None:
        if folder in Path(path).parents:
            write_bytes(path, b"half")
            raise OSError(request.param, os.strerror(request.param))

    def limited(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            check(path)
            return write(path, *arguments, **options)

        return call

    def copied(source: Path, target: Path, **options: Any) -> Any:
        check(target)
        return copyfile(source, target, **options)

    monkeypatch.setattr(Path, "write_bytes", limited(write_bytes))
    monkeypatch.setattr(Path, "write_text", limited(write_text))
    monkeypatch.setattr(shutil, "copyfile", copied)
    return folder


@pytest.mark.requires("torch")
def test_measurements_are_shown_even_if_they_cannot_be_written(cli: Cli, full: Path) -> None:
    command = "bench --variants aft-simple --seq-lens 8 --heads 1 --runtimes torch --rounds 1 --no-memory"
    shown = cli(*command.split(), "-o", full / "bench")
    assert shown.code == 1
    assert re.search(r"^ +8  aft-simple ", shown.out, re.MULTILINE)
    as_json = cli(*command.split(), "-o", full / "bench", "--json")
    assert as_json.json["exit_code"] == 1


@pytest.mark.requires("ort")
@pytest.mark.parametrize(
    "command",
    [
        "report ARTIFACT -o FULL/report.html",
        "report ARTIFACT -o FULL/report.xml",
        "package ARTIFACT --format triton -o FULL/repository",
        "bench --variants aft-simple --seq-lens 8 --heads 1 --runtimes torch --rounds 1 --no-memory -o FULL/bench",
        "build --variant aft-simple --scope attention --dim 16 --heads 1 --seq-len 8 -o FULL/artifact",
    ],
)
def test_a_command_that_fills_the_disk_says_so_in_one_line_and_leaves_nothing(
    cli: Cli, built: Built, full: Path, command: str
) -> None:
    artifact = built("softmax", "encoder").path
    words = [word.replace("ARTIFACT", str(artifact)).replace("FULL", str(full)) for word in command.split()]
    message = cli(*words).error(code=1)
    assert message.startswith(f"cannot write {full}")
    assert "the disk is full (" in message or LIMIT in message or FAILED in message
    assert "\n" not in message
    assert list(full.iterdir()) == []
