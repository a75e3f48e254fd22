"""Files and folders that are written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from effexport.base.errors import UserError
from effexport.base.files import FolderKind, abandoned, csv_text, json_text, load_npz, replacing, save_npz, write_file
from effexport.tasks.texts import text_of_file

BOX = FolderKind("a box", "mark.txt")


def test_a_failure_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    write_file(path, "old")

    def write_half() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_failure_keeps_the_old_folder_and_removes_parents_that_were_made_for_it(tmp_path: Path) -> None:
    for output in (tmp_path / "box", tmp_path / "deep" / "er" / "box"):
        with pytest.raises(OSError, match="full"), BOX.new(output, force=False):
            raise OSError("full")
    assert list(tmp_path.iterdir()) == []
    with BOX.new(tmp_path / "deep" / "box", force=False) as folder:
        (folder / BOX.mark).touch()
    with pytest.raises(UserError, match="exists; choose another folder with -o, or replace it with --force"):
        BOX.check(tmp_path / "deep" / "box", force=False)
    with pytest.raises(UserError, match="is not a box, so --force does not replace it"):
        BOX.check(tmp_path / "deep", force=True)


def test_a_link_stays_and_the_folder_behind_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "box").mkdir(parents=True)
    (tmp_path / "elsewhere" / "box" / BOX.mark).write_text("old")
    link = tmp_path / "link"
    link.symlink_to("elsewhere/box")
    with BOX.new(link, force=True) as folder:
        (folder / BOX.mark).write_text("new")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere" / "box" / BOX.mark).read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["box", "elsewhere", "link", BOX.mark]


def test_a_folder_that_cannot_be_renamed_is_one_line_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / BOX.mark).write_text("old")

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr("effexport.base.files._exchanged", lambda *paths: False)
    with (
        pytest.raises(UserError, match="box: Device or resource busy; choose another folder with -o"),
        BOX.new(tmp_path / "box", force=True) as folder,
    ):
        (folder / BOX.mark).write_text("new")
    assert (tmp_path / "box" / BOX.mark).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["box"]


def test_only_entries_of_ended_processes_are_abandoned(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"a-{ended.pid}", f"a-{ended.pid}-more", f"a-{os.getpid()}", f"a-{os.getppid()}", "a-x", f"b-{ended.pid}"]
    for name in names:
        (tmp_path / name).mkdir()
    assert sorted(path.name for path in abandoned(tmp_path, "a-")) == sorted(names[:3])


@pytest.mark.parametrize("owner", ["99999999999999999999", "\u00b2", "-1", ""])
def test_a_planted_name_is_not_taken_for_a_process(tmp_path: Path, owner: str) -> None:
    planted = tmp_path / f".box.building-{owner}"
    planted.mkdir()
    with BOX.new(tmp_path / "box", force=False) as folder:
        (folder / BOX.mark).write_text("new")
    assert planted.is_dir()


def test_a_planted_link_is_not_moved_into_place(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / BOX.mark).write_text("not yours")
    (tmp_path / f".box.replaced-{ended.pid}").symlink_to("elsewhere")
    with BOX.new(tmp_path / "box", force=False) as folder:
        (folder / BOX.mark).write_text("new")
    assert (tmp_path / "box" / BOX.mark).read_text() == "new"
    assert not (tmp_path / "box").is_symlink()


def test_an_old_folder_that_is_put_back_is_refused_before_the_work(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f".box.replaced-{ended.pid}"
    left.mkdir()
    (left / BOX.mark).write_text("old")
    with pytest.raises(UserError, match="box exists"), BOX.new(tmp_path / "box", force=False):
        pytest.fail("the work began")
    assert (tmp_path / "box" / BOX.mark).read_text() == "old"


def test_threads_that_replace_one_folder_do_not_remove_each_others_work(tmp_path: Path) -> None:
    """They have one process id, by which what an earlier process left is recognised."""
    both = threading.Barrier(2, timeout=20)

    def replace(text: str) -> str:
        with BOX.new(tmp_path / "box", force=True) as folder:
            both.wait()  # the other one has looked for leftovers, too
            (folder / BOX.mark).write_text(text)
        return text

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(replace, ("a", "b"))) == ["a", "b"]
    assert (tmp_path / "box" / BOX.mark).read_text() in ("a", "b")
    assert [path.name for path in tmp_path.iterdir()] == ["box"]


WRITER = """
import sys, time
from pathlib import Path
from effexport.base.files import FolderKind
with FolderKind("a box", "mark.txt").new(Path(sys.argv[1]), force=True) as folder:
    (folder / "mark.txt").write_text("other")
    print("writing", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def other_writer(box: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes the folder until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(box)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_another_process_writes_is_refused_at_the_start(tmp_path: Path, force: bool) -> None:
    with other_writer(tmp_path / "box") as process:
        with (
            pytest.raises(UserError, match="box is being written by another process; wait until it has finished, or"),
            BOX.new(tmp_path / "box", force=force),
        ):
            pytest.fail("the work began")
        process.communicate()
    assert process.returncode == 0
    assert (tmp_path / "box" / BOX.mark).read_text() == "other"
    assert [path.name for path in tmp_path.iterdir()] == ["box"]


def test_a_killed_writer_keeps_nobody_off_and_what_it_left_is_removed(tmp_path: Path) -> None:
    with other_writer(tmp_path / "box") as process:
        process.kill()
        process.wait()
    assert len(list(tmp_path.iterdir())) == 2  # what it wrote, and its lock
    with BOX.new(tmp_path / "box", force=False) as folder:
        (folder / BOX.mark).write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["box"]


def test_a_file_system_without_locks_keeps_nobody_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with BOX.new(tmp_path / "box", force=False) as folder:
        (folder / BOX.mark).write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["box"]


def test_there_is_a_folder_at_every_moment_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = tmp_path / "box"
    box.mkdir()
    (box / BOX.mark).write_text("old")

    def fail(*arguments: object) -> None:
        raise AssertionError("renamed, so that for a moment there is none")

    with BOX.new(box, force=True) as folder:
        (folder / BOX.mark).write_text("new")
        monkeypatch.setattr(Path, "rename", fail)
    assert (box / BOX.mark).read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["box"]


def test_a_lock_whose_owner_has_just_removed_it_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, the owner may end and another process may lock a new file."""
    flock = fcntl.flock

    def removed_meanwhile(handle: int, operation: int) -> None:
        monkeypatch.setattr("fcntl.flock", flock)
        (tmp_path / ".box.lock").unlink()
        flock(handle, operation)

    monkeypatch.setattr("fcntl.flock", removed_meanwhile)
    with BOX.reserved(tmp_path / "box", force=False):
        assert (tmp_path / ".box.lock").is_file()
        with (tmp_path / ".box.lock").open() as stream, pytest.raises(BlockingIOError):
            flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_parent_folder_that_another_process_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that fails removes the folders that it made, if they are empty."""
    mkdir, parent = Path.mkdir, tmp_path / "new"
    removed = []

    def mkdir_in_a_race(path: Path, *arguments: Any, **options: Any) -> None:
        if path.parent == parent and not removed:
            parent.rmdir()
            removed.append(path)
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir_in_a_race)
    BOX.check(parent / "box", force=False)
    assert len(removed) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_of_a_file_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f".x.txt.partial-{ended.pid}-0").write_text("half")
    (tmp_path / f".x.txt.partial-{ended.pid}-1").mkdir()
    (tmp_path / f".x.txt.partial-{os.getppid()}-0").write_text("of a running process")
    write_file(tmp_path / "x.txt", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".x.txt.partial-{os.getppid()}-0", "x.txt"]


@pytest.mark.parametrize("signal_", [KeyboardInterrupt, SystemExit])
def test_a_signal_while_a_folder_is_being_removed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_: type[BaseException]
) -> None:
    rmtree = shutil.rmtree

    def interrupted(folder: Path, **options: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        raise signal_

    def fail() -> None:
        with BOX.new(tmp_path / "box", force=False):
            monkeypatch.setattr(shutil, "rmtree", interrupted)
            raise OSError("full")

    with pytest.raises(signal_):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_process_has_just_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = FolderKind.check

    def check_then_written(kind: FolderKind, output: Path, *, force: bool) -> None:
        check(kind, output, force=force)
        monkeypatch.setattr(FolderKind, "check", check)
        output.mkdir()

    monkeypatch.setattr(FolderKind, "check", check_then_written)
    with pytest.raises(UserError, match="box exists"), BOX.new(tmp_path / "box", force=False):
        pytest.fail("the work has begun")


def test_text_of_numbers_that_json_and_csv_do_not_have() -> None:
    assert json_text({"x": [float("nan"), float("-inf")]}) == '{\n  "x": [\n    "nan",\n    "-inf"\n  ]\n}\n'
    assert csv_text(["a", "b"], [[1, None], ["x,y", 2.5]]) == 'a,b\n1,\n"x,y",2.5\n'


def archive(path: Path, header: bytes = b"", compression: int = zipfile.ZIP_STORED) -> bytearray:
    """An .npz file of one array, by default a valid one, as bytes that may be damaged."""
    array = io.BytesIO()
    np.save(array, np.arange(64))
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("x.npy", header or array.getvalue())
    return bytearray(path.read_bytes())


def changed(data: bytearray, local: int, central: int, value: int) -> bytearray:
    """An archive in which a byte of both headers of its one member is another; local, central: its place in each."""
    data[data.index(b"PK\x03\x04") + local] = value
    data[data.index(b"PK\x01\x02") + central] = value
    return data


def test_an_npz_file_that_numpy_cannot_read_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    archive(path)
    assert (load_npz(path)["x"] == np.arange(64)).all()
    huge = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<i8', 'fortran_order': False, 'shape': (%d,)}" % 2**50
    damaged_lzma = archive(path, compression=zipfile.ZIP_LZMA)
    start = damaged_lzma.index(b"x.npy") + 20
    damaged_lzma[start : start + 8] = b"\xff" * 8
    for data, words in (
        (archive(path, huge.ljust(10 + 0x75) + b"\n"), "holds an array that does not fit into memory"),
        (changed(archive(path), 8, 10, 99), "is not an .npz file of plain arrays: That compression method"),
        (changed(archive(path), 6, 8, 1), "is not an .npz file of plain arrays: File 'x.npy' is encrypted"),
        (damaged_lzma, "is not an .npz file of plain arrays: "),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError, match=words):
            load_npz(path)


def test_a_text_that_is_larger_than_any_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "x.txt").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(UserError, match=r"x\.txt as a text: it is larger than 1048576 KB; split it"):
        text_of_file(tmp_path / "x.txt")


def test_a_shape_of_booleans_is_damage(tmp_path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (True, 16), }\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    with pytest.raises(UserError, match=r"is not an \.npz file of plain arrays"):
        load_npz(tmp_path / "x.npz")


def test_what_is_saved_as_float32_for_want_of_bfloat16_is_read_as_bfloat16_again(tmp_path: Path) -> None:
    import ml_dtypes

    array = np.array([[1.5, -3.0]], ml_dtypes.bfloat16)
    save_npz({"x": array, "ids": np.ones(2, np.int64)}, tmp_path / "x.npz")
    assert load_npz(tmp_path / "x.npz")["x"].dtype == np.float32
    read = load_npz(tmp_path / "x.npz", ["x", "ids", "absent"])
    assert {name: one.dtype.name for name, one in read.items()} == {"x": "bfloat16", "ids": "int64"}
    np.testing.assert_array_equal(read["x"], array)
