"""Full disks, kills, signals and simultaneous commands: an output is the old one or the new one, complete, or none.

A case forks a process that has PyTorch and effexport loaded, which takes a tenth of the time of a new one. Kills and
signals come at a random moment of the command, or at its n-th call of the file system, which hits the moments between
two renames that a clock never would.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from campaign.commands import Case, Tally, in_workers

# Of ten cases, in this order: 4 kills, 2 disks, 3 signals, 1 of simultaneous commands.
KILLS, DISKS, SIGNALS = 4, 2, 3
ENDS_WITHIN_S = 100.0
AT_ONCE = 4
# Commands. Paths and sizes stand in braces, see `words_of`.
MODEL = "build --variant softmax --scope attention --seq-len 32 --dim {width} --heads {heads} -o {output}"
BENCH = (
    "bench --variants aft-simple --seq-lens 32 --heads 2 --head-dim 16 --rounds 1 --no-memory "
    "--runtimes torch,ort-body -o {output}"
)
COMMANDS = {
    "new": f"{MODEL} --seed 1 --force",
    "refitted": "refit {output} --weights {weights}",
    "without force": MODEL,
    "bench": BENCH,
    "package": "package {artifact} --format triton -o {output}",
    "sweep": "sweep {sweep} --processes --jobs 1 -o {output}",
}
# Of these, those that replace an artifact, each by one of its own.
REPLACING = ("new", "refitted")
SWEEP = """\
variants = ["softmax", "linear"]
seq_lens = [32]
[build]
scope = "attention"
dim = 64
heads = 1
"""
# Widths of the models, and with them the bytes of an artifact: 0.3 MB, 1.3 MB, 5 MB, 11 MB and 21 MB.
SMALL, WIDTHS = 64, (64, 256, 512, 768, 1088)
EXIT_CODES = {
    signal.SIGINT: (130, "interrupted"),
    signal.SIGTERM: (143, "terminated"),
    signal.SIGHUP: (129, "terminated"),
}
# Calls of the file system that Python announces to audit hooks.
FILE_EVENTS = {
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.truncate"),
    *("shutil.rmtree", "shutil.copyfile", "tempfile.mkdtemp", "tempfile.mkstemp", "fcntl.flock", "os.link"),
    "ctypes.dlsym",  # of the exchange of two folders
}


@dataclass(frozen=True)
class Finished:
    """The end of a forked command. code: its exit status, negative for a signal."""

    words: Sequence[str]
    code: int
    out: str
    err: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("effexport: error: ")]

    def check(self, *codes: int) -> None:
        """Raises AssertionError for another exit status, a traceback, and any other number of error lines than one."""
        command = f"{' '.join(self.words)[-300:]}: exit status {self.code}"
        assert "Traceback" not in self.err, f"{command}, {self.err[-700:]!r}"
        assert self.code in codes, f"{command} instead of {codes}: {self.err[-700:]!r}"
        if self.code != 0:
            assert len(self.errors) == 1, f"{command}, not one line: {self.err[-700:]!r}"
            assert self.err.rstrip("\n").endswith(self.errors[0]), f"{command}, lines after the error: {self.err!r}"


@dataclass
class Forked:
    """A command in a fork of this process. prepare: runs in the fork before the command."""

    words: Sequence[str]
    folder: Path
    prepare: Callable[[], object] = lambda: None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._logs = [self.folder / f"log-{time.monotonic_ns()}-{name}" for name in ("out", "err")]
        for path in self._logs:
            path.touch()
        # a signal to the fork waits until its handlers are there
        signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)
        self._pid = os.fork()
        if self._pid == 0:
            self._run()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, EXIT_CODES)

    def _run(self) -> None:
        """The fork's work. It never returns into the code of the campaign."""
        code = 70
        try:
            for number, path in enumerate(self._logs, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
            os.environ.update(self.environment)
            tempfile.tempdir = None
            os.chdir(self.folder)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
            from effexport.base.termination import die_with_parent

            die_with_parent(os.getppid())
            from effexport.cli.main import main

            self.prepare()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, EXIT_CODES)
            main([str(word) for word in self.words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # a fault of effexport: the campaign finds the traceback
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def send(self, number: int) -> None:
        os.kill(self._pid, number)

    def ended(self) -> Finished:
        deadline = self._started + ENDS_WITHIN_S
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                raise AssertionError(f"{' '.join(self.words)}: still running after {ENDS_WITHIN_S:g} s")
            time.sleep(0.005)
        seconds = time.monotonic() - self._started
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in self._logs)
        for path in self._logs:
            path.unlink()
        return Finished(self.words, os.waitstatus_to_exitcode(status), out, err, seconds)


def signal_at_call(count: int, number: int) -> Callable[[], object]:
    """For the fork: send itself a signal just before its `count`-th call of the file system."""

    def prepare() -> None:
        left = count

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in FILE_EVENTS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), number)

        sys.addaudithook(hook)

    return prepare


def count_calls(path: Path) -> Callable[[], object]:
    """For the fork: add a byte to a file for each call of the file system."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def prepare() -> None:
        sys.addaudithook(lambda event, arguments: os.write(handle, b".") and None if event in FILE_EVENTS else None)

    return prepare


@dataclass(frozen=True)
class Measured:
    """The cost of an undisturbed command. calls: of the file system."""

    seconds: float
    calls: int


@dataclass(frozen=True)
class Bench:
    """The setup of a worker's cases. artifacts: by width; a refit turns `old` into `refitted`, a build into `new`."""

    folder: Path
    artifacts: dict[int, Path]
    old: Path
    weights: Path
    states: dict[str, str]
    measured: dict[str, Measured]


def state_of(folder: Path) -> str:
    """A digest of an artifact's model and answers, without the parts that differ between two builds of them."""
    if not folder.exists():
        return "none"
    names = ("model.onnx", "reference.safetensors")
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_complete(folder: Path, work: Path) -> None:
    """Every file is that of the manifest, and the model gives the stored answers."""
    Forked(["verify", str(folder)], work).ended().check(0)


def check_only(parent: Path, *names: str) -> None:
    found = sorted(path.name for path in parent.iterdir())
    assert found == sorted(names), f"{found} in the folder; expected {sorted(names)}"


def words_of(command: str, bench: Bench, work: Path, output: Path, width: int = SMALL) -> list[str]:
    """The words of a command, whose files are made where they are named."""
    import numpy as np

    (work / "sweep.toml").write_text(SWEEP, encoding="utf-8")
    if "{input}" in command:
        shape = (max(1, (1 << 21) // (32 * 4 * width)), 32, width)
        np.savez(work / "input.npz", hidden_states=np.ones(shape, np.float32))
    values = {
        "output": output,
        "width": width,
        "heads": max(1, width // 64),
        "artifact": bench.artifacts[width],
        "old": bench.old,
        "weights": bench.weights,
        "sweep": work / "sweep.toml",
        "input": work / "input.npz",
    }
    return [word.format(**values) for word in command.split()]


def kill_case(bench: Bench, dice: random.Random, work: Path) -> str:
    """SIGKILL over an existing artifact. Afterwards it is the old or the new one, and the next call clears up."""
    output = work / "outputs" / "artifact"
    shutil.copytree(bench.old, output)
    kind = dice.choice(REPLACING)
    ended = disturbed(bench, dice, kind, output, signal.SIGKILL, work).ended()
    if ended.code != -signal.SIGKILL:
        ended.check(0)
    state = state_of(output)
    found = {bench.states["old"]: "the old artifact", bench.states[kind]: "the new artifact"}.get(state)
    assert found, f"killed during {kind}: {sorted(path.name for path in output.parent.iterdir())}, neither old nor new"
    check_complete(output, work)
    clear_up(output)
    check_only(output.parent, "artifact")
    assert state_of(output) == state, "the next build has changed the artifact before it was complete"
    return f"killed: {found}" if ended.code else "ended before the kill"


def clear_up(output: Path) -> None:
    """Run the first step of a build, and fail after it."""
    from effexport.artifact import ARTIFACT_FOLDER

    class StopError(Exception):
        pass

    with contextlib.suppress(StopError), ARTIFACT_FOLDER.new(output, force=True):
        raise StopError


def disturbed(
    bench: Bench, dice: random.Random, kind: str, output: Path, number: int, work: Path, **variables: str
) -> Forked:
    """Start a command and send it a signal at a random moment or a random call; the last calls are the likelier ones,
    because renames are among them."""
    usual, words = bench.measured[kind], words_of(COMMANDS[kind], bench, work, output)
    how = dice.choice(("moment", "call", "late call"))
    if how == "moment":
        moment = dice.uniform(0.0, usual.seconds)
        forked = Forked(words, work, environment=variables)
        time.sleep(moment)
        forked.send(number)
        return forked
    first = 1 if how == "call" else max(1, usual.calls - 60)
    count = dice.randint(first, usual.calls)
    return Forked(words, work, prepare=signal_at_call(count, number), environment=variables)


def signal_case(bench: Bench, dice: random.Random, work: Path) -> str:
    """A signal: one line, its own exit status, and nothing is left, neither here nor among temporary files.

    The old artifact stays, or if the signal came after the exchange, the new one is complete.
    """
    output, temporary = work / "outputs" / "artifact", work / "temporary"
    temporary.mkdir()
    kind = dice.choice((*REPLACING, "bench"))
    number = dice.choice(list(EXIT_CODES))
    output.parent.mkdir()
    if kind in REPLACING:
        shutil.copytree(bench.old, output)
    ended = disturbed(bench, dice, kind, output, number, work, TMPDIR=str(temporary)).ended()
    code, word = EXIT_CODES[number]
    if "effexport" not in ended.err and ended.code in (-number, 70):
        return "ended by the signal before the command began"
    if kind == "bench" and number == signal.SIGINT and ended.code == 130 and not ended.errors:
        # what was measured is kept
        assert output.is_dir(), f"interrupted without an error: {ended.err!r}"
        check_only(output.parent, "artifact")
        return "interrupted, with the results so far"
    ended.check(0, code)
    assert ended.code == 0 or word in ended.errors[0].lower(), ended.errors[0]
    check_only(output.parent, *(["artifact"] if output.exists() else []))
    left = [path.name for path in temporary.iterdir() if "effexport" in path.name]
    assert not left, f"temporary files are left: {left}"
    if kind != "bench":
        state = state_of(output)
        assert state in (bench.states["old"], bench.states[kind]), "the artifact is neither the old nor the new one"
        check_complete(output, work)
    return word if ended.code else "ended before the signal"


class Disk:
    """A file system of a given size, in this process's own namespace of mounts."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True)

    def __enter__(self) -> Path:
        return self.folder

    def __exit__(self, *error: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


def own_mounts() -> None:
    """Give this process namespaces of its own, in which it may mount. It must not have a second thread yet."""
    user, group = os.getuid(), os.getgid()
    new_user_and_mounts = 0x10000000 | 0x00020000
    if ctypes.CDLL(None, use_errno=True).unshare(new_user_and_mounts) != 0:
        raise OSError(ctypes.get_errno(), "unshare: this machine allows no namespaces of users")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text, encoding="ascii")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


@dataclass(frozen=True)
class OnDisk:
    """A command that writes to a small disk. scale: the disk's size is that many times smaller than the case's, because
    the command writes less. old: whether an output is there before, which must survive. place: of the output."""

    command: str
    scale: int = 1
    old: bool = False
    place: str = "output"


ON_DISK = (
    OnDisk(MODEL, place="new/output"),
    OnDisk(f"{MODEL} --external-data"),
    OnDisk(f"{MODEL} --force", old=True),
    OnDisk("refit {old} --weights {weights} -o {output}", scale=4),
    OnDisk(COMMANDS["refitted"], scale=10, old=True),
    OnDisk(COMMANDS["package"]),
    OnDisk("inline {artifact} -o {output}"),
    OnDisk("run {artifact} --input {input} -o {output}", scale=10, place="output.npz"),
    OnDisk("report {artifact} -o {output}", scale=300, place="output.html"),
    OnDisk("verify {artifact} -o {output}", scale=300, place="output.html"),
    OnDisk(BENCH, scale=1000),
    OnDisk(f"{BENCH} --force", scale=400, old=True),
    OnDisk(COMMANDS["sweep"], scale=40),
)


def disk_case(bench: Bench, dice: random.Random, work: Path, size_bytes: int) -> str:
    """A disk that is too small: exit status 1, one line, nothing half-written, and what was there before unchanged."""
    kind = dice.choice(ON_DISK)
    size_bytes = max(4096, size_bytes // kind.scale)
    # of a model that does not fit, or just fits
    width = next((width for width in WIDTHS if 8 * width**2 > size_bytes), WIDTHS[-1])
    disk = work / "disk"
    words = words_of(kind.command, bench, work, disk / kind.place, width)
    with Disk(disk, size_bytes + (1 << 20) * kind.old):
        if kind.old:
            shutil.copytree(bench.folder / "bench" if words[0] == "bench" else bench.old, disk / "output")
        before = bytes_of(disk)
        title = f"{words[0]} on {size_bytes:,} bytes"
        variables = {}
        if dice.random() < 0.25:
            (disk / "temporary").mkdir()
            variables["TMPDIR"] = str(disk / "temporary")
            title += " with TMPDIR"
        ended = Forked(words, work, environment=variables).ended()
        # libraries leave files of their own among temporary files, such as ONNX Runtime's .ses
        ours = (".building-", ".partial-", ".replaced-", ".lock", ".packaging-", "effexport")
        left = [path.name for path in disk.rglob("*") if any(name in path.name for name in ours)]
        assert words[0] == "sweep" or not left, f"{title}: {left} is left"
        if variables:
            shutil.rmtree(disk / "temporary")
        if words[0] == "sweep":
            return check_sweep(ended, disk / "output", title)
        ended.check(0, 1)
        if ended.code == 1:
            assert "disk is full" in ended.errors[0], f"{title}: {ended.errors[0]}"
            assert bytes_of(disk) == before, f"{title}: {sorted(bytes_of(disk))} is there; before {sorted(before)}"
            check_only(disk, *(["output"] if kind.old else []))
        if (disk / "output" / "manifest.json").is_file():
            check_complete(disk / "output", work)
        return "the disk was full" if ended.code else "the disk was large enough"


def check_sweep(ended: Finished, output: Path, title: str) -> str:
    """The folder of a sweep stays, with complete cells only; the command that is given again resumes it."""
    assert "Traceback" not in ended.err, f"{title}: {ended.err[-700:]!r}"
    assert ended.code in (0, 1), f"{title}: exit status {ended.code}"
    assert len(ended.errors) <= 1, f"{title}: {ended.errors}"
    assert ended.code == 0 or "full" in ended.err + ended.out, f"{title}: {ended.err[-700:]!r}"
    for cell in (output / "cells").glob("*"):
        found = sorted(path.name for path in cell.iterdir())
        assert found == ["artifact", "log.txt", "record.json"], f"{title}: {found} in a finished cell"
        check_complete(cell / "artifact", output.parent.parent)
    return "the disk was full" if ended.code else "the disk was large enough"


def at_once_case(bench: Bench, dice: random.Random, work: Path) -> str:
    """Commands that write the same folder at the same time: one wins, the others say so at the start."""
    output = work / "outputs" / "artifact"
    kind = dice.choice(("new", *COMMANDS))
    output.parent.mkdir()
    if kind in REPLACING:
        shutil.copytree(bench.old, output)
    elif kind == "without force":
        output = work / "outputs" / "below" / "artifact"
    words = words_of(COMMANDS[kind], bench, work, output)
    ended = [forked.ended() for forked in [Forked(words, work) for _ in range(AT_ONCE)]]
    for one in ended:
        one.check(*((0,) if kind == "package" else (0, 2)))
    losers = [one for one in ended if one.code]
    assert kind == "package" or len(losers) == AT_ONCE - 1, f"{kind}: {[one.code for one in ended]}"
    for one in losers:
        said = ("another sweep is writing", "is being written", "exists; choose")
        assert any(words in one.errors[0] for words in said), f"{kind}: {one.errors[0]}"
        assert "… " not in one.err, f"{kind}: refused after the work had begun: {one.err!r}"
    check_only(output.parent, "artifact")
    if (output / "manifest.json").is_file():
        check_complete(output, work)
    return "one at a time" if kind == "package" else "one of four has won"


def start(bench: Bench, seed: int, number: int) -> Case:
    """A worker: loads everything before it forks."""
    own_mounts()
    import_commands()
    mine = bench.folder / str(number)
    mine.mkdir(exist_ok=True)  # after a crash, another worker has its number

    def case(index: int) -> str:
        dice = random.Random(f"{seed}-{index}")
        with tempfile.TemporaryDirectory(dir=mine, prefix=f"case-{index}-", ignore_cleanup_errors=True) as text:
            work, turn = Path(text), index % 10
            try:
                if turn < KILLS:
                    return kill_case(bench, dice, work)
                if turn < KILLS + DISKS:
                    # every size from 1 to 20 MB
                    size = (index // 10 * DISKS + turn - KILLS) % 20 + 1
                    return disk_case(bench, dice, work, size * 10**6)
                if turn < KILLS + DISKS + SIGNALS:
                    return signal_case(bench, dice, work)
                return at_once_case(bench, dice, work)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {error}") from error

    return case


def import_commands() -> None:
    """Load what the commands load, so that no fork has to."""
    names = ("pipeline.build", "cli.artifacts", "cli.bench", "bench.run")
    for name in names:
        importlib.import_module(f"effexport.{name}")


def prepared(folder: Path) -> Bench:
    """Make what the cases need, and measure the commands that they disturb."""
    from safetensors.torch import save_file

    from effexport.artifact import open_artifact
    from effexport.export.module_source import module_from_seed

    import_commands()
    artifacts = {width: folder / f"artifact-{width}" for width in WIDTHS}
    for width, path in artifacts.items():
        Forked(MODEL.format(width=width, heads=max(1, width // 64), output=path).split(), folder).ended().check(0)
    old, weights = artifacts[SMALL], folder / "weights.safetensors"
    save_file(module_from_seed(replace(open_artifact(old).spec, seed=7)).state_dict(), weights)
    bench = Bench(folder, artifacts, old, weights, {"old": state_of(old)}, {})
    for kind in REPLACING:
        output = folder / "measured" / kind
        shutil.copytree(old, output)
        measure(bench, kind, output)
        bench.states[kind] = state_of(output)
    measure(bench, "bench", folder / "bench")
    return bench


def measure(bench: Bench, kind: str, output: Path) -> None:
    counted, words = bench.folder / "calls", words_of(COMMANDS[kind], bench, bench.folder, output)
    ended = Forked(words, bench.folder, prepare=count_calls(counted)).ended()
    ended.check(0)
    bench.measured[kind] = Measured(ended.seconds, counted.stat().st_size)


def run(cases: int, seed: int, folder: Path) -> Tally:
    return in_workers(cases, start, prepared(folder), seed)
