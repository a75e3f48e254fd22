"""Runs README.md and docs/tour.md as their reader would: every command and every file they show, from top to bottom, in
one folder, then every other command on what was built.

`python tests/support/readme_run.py FOLDER` makes a fresh clone in FOLDER, runs the pages there twice, and prints a
transcript.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from artifact_commands import Command, commands_on, infer_request, inputs_of, next_commands
from random_tokenizers import saved_tokenizer
from serving_load import free_ports
from transformers_models import saved

from effexport.artifact import open_artifact

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/tour.md")
# The reader's own checkpoint: here a small Nyströmformer with a tokenizer, saved by transformers.
CHECKPOINT = "my-checkpoint"
CONFIG = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"intermediate_size": 128, "max_position_embeddings": 514, "segment_means_seq_len": 512, "num_landmarks": 64}
# Lines that are not run, and why. Everything else is.
NOT_RUN = {
    "docker compose -f triton-models/compose.yaml up --build": "needs Docker, and an image of several GB",
    "effexport verify artifacts/nystrom-rtx --runtime trt-rtx": "needs a GPU",
}
# Where a run lets the commands on each artifact write.
FILES = "commands"
# Lines that are not run on a machine without a program, and the program.
NEEDS = {"npm install": "npm"}
# The first line of a shown file is a comment with its name.
NAME = re.compile(r"^(?:#|//|<!--) ([\w./-]+\.\w+)(?: -->)?$")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND_SECONDS = 1200
LINE_COLUMNS = 160
END = "exit status of this command:"


@dataclass(frozen=True)
class Step:
    """One thing the reader does. file: the file to save `text` in; None for a command of the shell."""

    text: str
    file: str | None = None


@dataclass(frozen=True)
class Done:
    """A step that was taken. skipped: why it was not run; empty if it was."""

    step: Step
    status: int
    seconds: float
    output: str
    skipped: str = ""

    @property
    def line(self) -> str:
        if self.step.file:
            return f"  saved {self.step.file}"
        result = f"not run: {self.skipped}" if self.skipped else f"exit {self.status}, {self.seconds:.1f} s"
        return f"$ {self.step.text}\n  {result}"


def steps_of_pages() -> list[Step]:
    return [step for page in PAGES for step in steps_of((ROOT / page).read_text(encoding="utf-8"))]


def steps_of(page: str) -> Iterator[Step]:
    """The commands and files of a page in their order. Raises ValueError for a block that is neither."""
    for language, text in BLOCK.findall(page):
        first, _, rest = text.partition("\n")
        named = NAME.match(first)
        if language == "sh":
            for command in re.split(r"(?<!\\)\n", text.strip()):
                yield Step(command.split("  #")[0].rstrip())
        elif named:
            yield Step(rest, file=named[1])
        elif language == "python":
            yield Step(rest if named else text, file="example.py")
            yield Step("python example.py")
        else:
            raise ValueError(f"a block of {language} has no name in its first line: {first}")


class Shell:
    """One bash that stays open from command to command, so that variables, jobs and the environment stay, too."""

    def __init__(self, folder: Path) -> None:
        self._bash = subprocess.Popen(
            ["bash", "--norc", "-o", "pipefail"],
            cwd=folder,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that everything can be ended with it
        )

    def run(self, command: str) -> tuple[int, str]:
        """Exit status and output of a command. Ends everything if it takes longer than COMMAND_SECONDS."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"eval {shlex.quote(command)} </dev/null\nprintf '\\n%s %s\\n' '{END}' $?\n")
        self._bash.stdin.flush()
        lines: list[str] = []
        timer = threading.Timer(COMMAND_SECONDS, self.end)
        timer.start()
        try:
            for line in self._bash.stdout:
                if line.startswith(END):
                    return int(line.split()[-1]), "".join(lines)
                lines.append(line)
        finally:
            timer.cancel()
        return self._bash.wait(), "".join(lines)

    def end(self) -> None:
        """End bash and everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)

    def close(self) -> None:
        self.end()
        self._bash.communicate()


def clean_environment() -> dict[str, str]:
    """The variables of this process but for those of its virtual environment and of its Python."""
    left_out = ("PYTHON", "VIRTUAL_ENV", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    folders = [path for path in kept["PATH"].split(os.pathsep) if not (Path(path).parent / "pyvenv.cfg").exists()]
    return kept | {"PATH": os.pathsep.join(folders)}


def fresh_clone(folder: Path) -> Path:
    """A copy of what a clone of this tree would have."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def on_port(text: str, port: int) -> str:
    """The command with another port for the server, because 8000 may be taken."""
    text = text.replace("localhost:8000", f"127.0.0.1:{port}")
    return re.sub(r"(effexport serve \S+)", rf"\1 --port {port}", text)


def run_page(folder: Path) -> Iterator[Done]:
    """Take every step of the page in `folder`, which is a clone, and then every command on each artifact that is there;
    stop after the first that fails."""
    port, shell = free_ports(1)[0], Shell(folder)
    printed = ""
    try:
        for step in steps_of_pages():
            done = taken(step, shell, folder, port)
            yield done
            if done.status:
                return
            printed += done.output
        shutil.rmtree(folder / FILES, ignore_errors=True)
        for step in (*following_steps(printed), *steps_on_artifacts(folder)):
            done = taken(step, shell, folder, port)
            yield done
            if done.status:
                return
    finally:
        shell.close()


def taken(step: Step, shell: Shell, folder: Path, port: int) -> Done:
    if step.file:
        save_file(step, folder)
        return Done(step, 0, 0.0, "")
    if reason := why_not_run(step.text):
        return Done(step, 0, 0.0, "", reason)
    started = time.monotonic()
    status, output = shell.run(on_port(step.text, port))
    if status == 0 and step.text.startswith("kill"):  # the server has to end well, too
        status, more = shell.run("wait $!")
        output += more
    return Done(step, status, time.monotonic() - started, output)


def following_steps(printed: str) -> Iterator[Step]:
    for words in next_commands(printed):
        yield Step(shlex.join(["effexport", *words]))


def artifacts_in(folder: Path) -> list[Path]:
    """The artifacts that the page has made, relative to the folder."""
    found = [*folder.glob("artifacts/*/manifest.json"), *folder.glob("swept/cells/*/artifact/manifest.json")]
    return [path.parent.relative_to(folder) for path in sorted(found)]


def steps_on_artifacts(folder: Path) -> Iterator[Step]:
    """Every command on every artifact that the page has made, and one server of all of `artifacts/`, which ends by
    SIGTERM."""
    for path in artifacts_in(folder):
        for command in commands_on(folder / path, folder / FILES / path, folder / CHECKPOINT):
            yield Step(shell_line(command))
    served = [path for path in artifacts_in(folder) if path.parts[0] == "artifacts"]
    yield Step(f"effexport serve {shlex.join(map(str, served))} &")
    for path in served:
        artifact = open_artifact(folder / path)
        request = infer_request("http://localhost:8000", path.name, inputs_of(artifact))
        body = Path(FILES) / path / "request.bin"
        assert isinstance(request.data, bytes)
        (folder / body).write_bytes(request.data)
        headers = "".join(f" -H {shlex.quote(f'{name}: {value}')}" for name, value in request.header_items())
        retries = "--retry 60 --retry-delay 1 --retry-connrefused"
        yield Step(f"curl -sf {retries} {request.full_url} --data-binary @{body}{headers} -o {body}.answer")
    yield Step("kill $!")


def shell_line(command: Command) -> str:
    """A line that ends with status 0 if the command does what it should: succeed, or refuse with its sentence."""
    line = shlex.join(["effexport", *command.words])
    if not command.refusal:
        return line
    # echo joins lines, which may be broken anywhere
    return f'refused=$({line} 2>&1); test $? = 2 && grep -qF {shlex.quote(command.refusal)} <<< "$(echo $refused)"'


def why_not_run(command: str) -> str:
    """The reason a command is not run here; empty for those that are."""
    for part, program in NEEDS.items():
        if part in command and shutil.which(program) is None:
            return f"there is no {program} on this machine"
    return NOT_RUN.get(command, "")


def prepared_folder(folder: Path) -> Path:
    """A clone, with what else the reader brings along."""
    fresh_clone(folder)
    save_checkpoint(folder)
    return folder


def save_checkpoint(folder: Path) -> None:
    saved(folder / CHECKPOINT, "NystromformerForMaskedLM", CONFIG)
    saved_tokenizer("albert", folder / CHECKPOINT)


def write_files(folder: Path) -> None:
    """The page itself, the files that it shows, and what else its reader has, but for the clone."""
    shutil.copy2(ROOT / "README.md", folder)
    save_checkpoint(folder)
    for step in steps_of_pages():
        if step.file:
            save_file(step, folder)


def save_file(step: Step, folder: Path) -> None:
    assert step.file is not None
    (folder / step.file).parent.mkdir(exist_ok=True)
    (folder / step.file).write_text(step.text, encoding="utf-8")


def main() -> None:
    folder = prepared_folder(Path(sys.argv[1]))
    failed = False
    for number in (1, 2):
        print(f"=== {'first' if number == 1 else 'second'} time, in the same folder")
        started = time.monotonic()
        for done in run_page(folder):
            print(done.line, flush=True)
            lines = done.output.strip().splitlines()
            shown = lines if done.status else [line[:LINE_COLUMNS] for line in lines[-3:]]
            print("".join(f"    {line}\n" for line in shown), end="", flush=True)
            failed = failed or done.status != 0
        print(f"=== {time.monotonic() - started:.0f} s\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
