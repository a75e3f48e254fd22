"""Full disks, kills and simultaneous builds: the artifact that was there, or the new one, is there and complete.

Every case runs in a process that is forked from a worker with all imports done, so that it takes a second or two.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from campaign.commands import Case, in_workers, run_command
from campaign.tally import Tally

BUILD = "build --variant aft-simple --scope attention --seq-len 32 --dim 64 --heads 2"
# Its files reach 20 MB: the weights have 14, the golden values 2, and two artifacts are there while one is replaced.
LARGE = "build --variant softmax --spec LARGE"
LARGE_SPEC = "layers = 1\ndim = 256\nheads = 4\nvocab_size = 12000\nseq_len = 64\n"
OLD_SEED, NEW_SEED = 3, 4
MEGABYTE = 1 << 20
# Flags of unshare(2) and mount(2).
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
# What a process does to files, as Python's audit events name it.
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")


def run(cases: int, seed: int, folder: Path) -> Tally:
    """Interrupt builds and other commands over an artifact that was built before."""
    return in_workers(cases, interrupter, folder, seed)


def interrupter(folder: Path, seed: int, number: int) -> Case:
    """The function of a case, in one worker."""
    from small_builds import built_artifact, what_decides_a_build  # noqa: F401 - imports what a build imports
    from small_specs import spec_of

    import effexport.build
    import effexport.export.onnx_from_module  # noqa: F401

    folder = folder / str(number)
    folder.mkdir()
    old = built_artifact("campaign-old", spec_of("aft-simple", "attention", seed=OLD_SEED))

    measure(folder / "place", old)

    def case(index: int) -> str:
        dice = random.Random(f"{seed}-{index}")
        kind = dice.choices(KINDS, (4, 2, 1, 4, 1))[0]
        place = folder / "place"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            return kind(dice, place, old)
        except AssertionError as error:
            raise AssertionError(f"{kind.__name__}: {error}") from error

    return case


class Undisturbed:
    """What a build over an old one takes if nothing disturbs it: its FILE_EVENTS, counted, and seconds."""

    events = 0
    seconds = 0.0


def measure(place: Path, old: Path) -> None:
    """Find out what an undisturbed build takes here."""
    place.mkdir()
    shutil.copytree(old, place / "a")

    def build() -> int:
        seen = on_file_events(place, lambda count: None)
        code = build_into(place / "a")
        (place / "events").write_text(str(seen[0]), encoding="ascii")
        return code

    start = time.monotonic()
    assert wait_for(forked(build)) == 0
    Undisturbed.seconds = time.monotonic() - start
    Undisturbed.events = int((place / "events").read_text(encoding="ascii"))


def killed_at_a_file(dice: random.Random, place: Path, old: Path) -> str:
    """Killed just before one of the things that a build does to files."""
    shutil.copytree(old, place / "a")
    last = dice.randrange(Undisturbed.events)

    def kill(count: int) -> None:
        if count > last:
            os.kill(os.getpid(), signal.SIGKILL)

    def build() -> int:
        on_file_events(place, kill)
        return build_into(place / "a")

    return checked_after_kill(wait_for(forked(build)), place, old)


def on_file_events(place: Path, act: Callable[[int], None]) -> list[int]:
    """Act before each thing that this process does to files in a folder. Returns their number, which keeps growing."""
    seen = [0]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in FILE_EVENTS and str(arguments[0] if arguments else "").startswith(str(place)):
            seen[0] += 1
            act(seen[0])

    sys.addaudithook(hook)
    return seen


def killed_at_a_time(dice: random.Random, place: Path, old: Path) -> str:
    """Killed at any moment."""
    return stopped_at_a_time(signal.SIGKILL, dice, place, old)


def asked_to_stop(dice: random.Random, place: Path, old: Path) -> str:
    """Ctrl-C or SIGTERM at any moment."""
    return stopped_at_a_time(dice.choice((signal.SIGINT, signal.SIGTERM)), dice, place, old)


def stopped_at_a_time(number: int, dice: random.Random, place: Path, old: Path) -> str:
    shutil.copytree(old, place / "a")
    process = forked(lambda: build_into(place / "a"))
    time.sleep(dice.uniform(0, Undisturbed.seconds))
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
    return checked_after_kill(wait_for(process), place, old)


def checked_after_kill(status: int, place: Path, old: Path) -> str:
    """The outcome, once the artifact is old or new, complete and verifying, and the next build has cleaned up."""
    from effexport.artifact import ARTIFACT_FOLDER, open_artifact

    artifact = open_artifact(place / "a")
    is_old = artifact.spec.seed == OLD_SEED
    assert is_old or artifact.spec.seed == NEW_SEED
    assert not is_old or status != 0, "the build ended well, and the old artifact is there"
    ended = run_command(["verify", str(place / "a"), "--reference", "golden"])
    assert ended.code == 0, f"does not verify: {ended.err[-300:]}"
    with ARTIFACT_FOLDER.new(place / "a", force=True) as building:  # as the next build does
        shutil.copytree(old, building, dirs_exist_ok=True)
    left = sorted(path.name for path in place.iterdir())
    assert left == ["a"], f"left behind: {left}"
    open_artifact(place / "a")
    return ("finished before it" if status == 0 else "stopped") + (", old artifact" if is_old else ", new artifact")


def full_disk(dice: random.Random, place: Path, old: Path) -> str:
    """A command on a disk of its own that has between 0.02 and 20 MB, or whose temporary folder is on such a disk."""
    size = int(dice.choice((dice.uniform(0.02, 1), dice.uniform(1, 20))) * MEGABYTE)
    command = dice.choice(COMMANDS)
    result = place / "result"

    def on_small_disk() -> int:
        mount_disk(place, size)
        disk = place / "disk"
        with contextlib.suppress(OSError):  # a disk that cannot even hold the old one holds a part of nothing
            shutil.copytree(old, disk / "a")
        has_old = is_artifact(disk / "a")
        if not has_old:
            shutil.rmtree(disk / "a", ignore_errors=True)
        before = listing(disk)
        names = {"DISK": disk, "OLD": old, "LARGE": place / "large.toml"}
        words = command.split()
        for name, path in names.items():
            words = [word.replace(name, str(path)) for word in words]
        ended = run_command(words)
        outcome = f"{ended.code} {ended.error}"
        errors = [line for line in ended.err.splitlines() if not line.startswith(("…", "plan: "))]
        if ended.error:
            outcome = ended.error
        elif ended.code == 0:
            outcome = "fitted" if not has_old or is_artifact(disk / "a") else "ended well without an artifact"
        elif ended.code != 1 or len([line for line in errors if "error: " in line]) != 1:
            outcome = f"exit status {ended.code}: {errors}"
        elif listing(disk) != before:
            outcome = f"the disk was {before}, and is {listing(disk)}"
        elif has_old and not is_artifact(disk / "a"):
            outcome = "the old artifact is damaged"
        else:
            outcome = "refused"
        result.write_text(outcome, encoding="utf-8")
        return 0

    place.joinpath("disk").mkdir()
    place.joinpath("large.toml").write_text(LARGE_SPEC, encoding="utf-8")
    status = wait_for(forked(on_small_disk))
    assert status == 0, f"{command} on {size} bytes: ended with {status}"
    outcome = result.read_text(encoding="utf-8")
    assert outcome in ("fitted", "refused"), f"{command} on {size} bytes: {outcome}"
    return f"{outcome} on a small disk"


COMMANDS = (
    f"{BUILD} -o DISK/a --force",
    f"{LARGE} -o DISK/a --force",
    f"{LARGE} -o DISK/b",
    f"{LARGE} --external-data -o DISK/new/b",
    "package OLD --format triton -o DISK/repository",
    "inline OLD -o DISK/i.onnx",
    "report OLD -o DISK/r.html",
    "verify OLD -o DISK/v.html",
)


def mount_disk(place: Path, size: int) -> None:
    """Mount a file system of this size at place/disk, for this process only. It must have one thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")
    if libc.mount(b"tmpfs", os.fsencode(place / "disk"), b"tmpfs", 0, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), "mount")


def simultaneous(dice: random.Random, place: Path, old: Path) -> str:
    """Four builds at once into one folder: those that do not win say so in one line."""
    force = dice.random() < 0.5
    if force:
        shutil.copytree(old, place / "a")
    log = place / "log"
    log.mkdir()

    def build(number: int) -> int:
        code = build_into(place / "a", force=force, log=log / str(number))
        (log / f"{number}.code").write_text(str(code), encoding="ascii")
        return 0

    processes = [forked(lambda number=number: build(number)) for number in range(4)]  # type: ignore[misc]
    for process in processes:
        assert wait_for(process) == 0, "a build crashed"
    codes = [int((log / f"{number}.code").read_text(encoding="ascii")) for number in range(4)]
    texts = [(log / str(number)).read_text(encoding="utf-8") for number in range(4)]
    assert codes.count(0) >= 1, f"nobody won: {texts}"
    for code, text in zip(codes, texts, strict=True):
        if code:
            lines = [line for line in text.splitlines() if "error: " in line]
            assert code == 2, text
            assert len(lines) == 1, text
            assert "is being written by another process" in lines[0] or "exists" in lines[0], text
    shutil.rmtree(log)
    assert is_artifact(place / "a"), "the artifact is damaged"
    left = sorted(path.name for path in place.iterdir())
    assert left == ["a"], f"left behind: {left}"
    return f"{codes.count(0)} of 4 builds at once"


KINDS: Sequence[Callable[[random.Random, Path, Path], str]] = (
    killed_at_a_file, killed_at_a_time, asked_to_stop, full_disk, simultaneous,
)  # fmt: skip


def build_into(output: Path, *, force: bool = True, log: Path | None = None) -> int:
    """Build a small artifact with another seed; the exit status."""
    words = [*BUILD.split(), "--seed", str(NEW_SEED), "-o", str(output), *(["--force"] if force else [])]
    ended = run_command(words)
    if log is not None:
        log.write_text(ended.err + ended.error, encoding="utf-8")
    return ended.code if not ended.error else 99


def is_artifact(folder: Path) -> bool:
    from effexport.artifact import open_artifact
    from effexport.errors import UserError

    try:
        open_artifact(folder)
    except UserError:
        return False
    return True


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((path.relative_to(folder).as_posix(), path.lstat().st_size) for path in folder.rglob("*"))


def forked(work: Callable[[], int]) -> int:
    """A process that does the work and exits with its result."""
    process = os.fork()
    if process:
        return process
    code = 98
    try:
        code = work()
    finally:
        os._exit(code)


def wait_for(process: int) -> int:
    """The exit status of a process, negative for a signal."""
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)
