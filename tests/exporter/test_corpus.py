"""Artifacts of an earlier commit still open, verify, run, refit and report; and commands do what they did.

tests/corpus has an archive of them, made by scripts/corpus.py, and the golden runs: see support/golden_runs.py.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import golden_runs
import pytest
from artifact_commands import commands_on
from slow_cases import slow_after

from effexport.artifact import open_artifact

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "transformers")
Cli = Callable[..., Any]
ARCHIVE = golden_runs.CORPUS / "db4d7bd.tar.xz"
# The first one also runs in the fast part.
KINDS = (
    "lsh",
    "causal",
    "classifier",
    "module",
    "engine",
    "int8",
    "fp16",
    "inlined",
    "linear",
    "image",
    "attention",
    "softmax",
    "nystrom",
    "aft-full",
    "aft-simple",
    "aft-local",
    "aft-conv",
)
# On the artifacts above, in a folder that holds them; `text.txt` has a few words.
COMMANDS = (
    "list",
    "doctor",
    "plugins path",
    "plugins info",
    "completion bash",
    "inspect lsh/model.onnx",
    "inspect engine/engine/trt-rtx.engine",
    "inspect checkpoint",
    "report lsh --format html",
    "report lsh --format markdown",
    "report lsh --format junit",
    "report lsh --format json",
    "report softmax linear",
    "report --schema",
    "run causal --generate It --max-new-tokens 3 --seed 0",
    "run lsh --text text.txt -o text.npz",
    "run classifier --classify text",
    "evaluate causal --data text.txt",
    "package causal --format triton -o triton",
    "build --variant lsh --dim 16 --heads 2 --layers 1 --seq-len 16 -o built/lsh",
    "build --variant linear --dim 16 --heads 2 --layers 1 --seq-len 16 --causal --lm-head -o built/causal",
    "build --module mine:make -o built/module",
    "build --checkpoint checkpoint -o built/checkpoint",
    "bench --variants softmax,lsh --seq-lens 64 --dim 16 --heads 2 --rounds 1 --max-seconds 0.1 --runtimes torch,ort"
    " -o bench",
    "sweep sweep.toml --dry-run",
    "sweep sweep.toml --processes --jobs 1 -o sweep",
)
SWEEP = """
variants = ["softmax", "linear"]
seq_lens = [16]

[build]
dim = 16
heads = 2
layers = 1
"""
# Those that print a text of their own.
TEXTS = ("completion", "report lsh --format")
# Those that describe the machine: of these, only the keys are compared.
MACHINE = ("doctor", "plugins")
# What every command says of bad input; the message is recorded word by word.
REFUSALS = (
    "build",
    "build --variant nothing",
    "build --variant lsh --module mine:make",
    "build --variant lsh --dim 15",
    "build --variant lsh --seq-len 0",
    "build --variant softmax --precision int8 --smooth 3",
    "build --variant aft-full --causal --lm-head --top-k 3 --pool mean",
    "build --variant lsh -o lsh",
    "build --module mine:nothing",
    "build --module nothing:make",
    "build --module mine",
    "build --checkpoint mine.py",
    "build --checkpoint lsh",
    "build --spec mine.py",
    "build --variant softmax --weights mine.py",
    "build --variant softmax --profile seq=1:2",
    "verify nothing",
    "verify mine.py",
    "verify lsh --runtime nothing",
    "verify lsh --implementation LSHSort=fast",
    "verify lsh --model linear/model.onnx",
    "verify lsh --reference mine.py",
    "run lsh",
    "run lsh --input mine.py",
    "run lsh --text nothing.txt",
    "run lsh --generate It",
    "run softmax --classify text",
    "run lsh --text text.txt -o lsh/model.onnx",
    "evaluate lsh --data mine.py",
    "evaluate softmax --data text.txt",
    "evaluate causal --data text.txt --compare nothing",
    "refit lsh",
    "refit lsh --weights mine.py",
    "refit module --weights linear/model.onnx.data",
    "refit classifier --checkpoint lsh",
    "inline lsh",
    "inline lsh -o lsh/model.onnx",
    "report nothing",
    "report lsh --format pdf",
    "inspect mine.py",
    "package lsh --format zip -o triton",
    "package lsh --version 0 -o triton",
    "serve nothing",
    "serve lsh --port 70000",
    "bench --variants nothing",
    "bench --seq-lens many",
    "sweep mine.py",
    "list --nothing",
    "nothing",
)


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    with tarfile.open(ARCHIVE) as members:
        members.extractall(folder, filter="data")
    return folder


@pytest.fixture
def corpus(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the corpus as working folder."""
    folder = tmp_path / "corpus"
    shutil.copytree(unpacked, folder)
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times.\n" * 4)
    (folder / "sweep.toml").write_text(SWEEP)
    monkeypatch.chdir(folder)
    yield folder
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("kind", slow_after(1, KINDS, 6))
def test_an_artifact(cli: Cli, corpus: Path, kind: str) -> None:
    """Every command on it exits as before, with a document of the same form and the same files."""
    checkpoint = Path("checkpoint") if kind == "classifier" else None
    found = {}
    for command in commands_on(Path(kind), Path("files"), checkpoint):
        result = cli(*command.words, "--json")
        assert result.code == (2 if command.refusal else 0), (command.words, result.err)
        found[" ".join(command.words)] = document(result)
    golden_runs.compare(f"artifact {kind}", found | {"files": golden_runs.files_of(Path("files"))})


def test_no_artifact_of_the_corpus_is_forgotten(unpacked: Path) -> None:
    assert sorted(KINDS) == sorted(path.parent.name for path in unpacked.glob("*/manifest.json"))
    assert all(open_artifact(unpacked / kind).manifest.format_version == 1 for kind in KINDS)


@pytest.mark.parametrize("line", slow_after(4, COMMANDS))
def test_a_command(cli: Cli, corpus: Path, line: str) -> None:
    before = golden_runs.files_of(corpus)
    result = cli(*line.split(), *["--json"] * (not line.startswith(TEXTS)))
    assert result.code == 0, result.err
    files = golden_runs.files_of(corpus)
    written = {name: digest for name, digest in files.items() if before.get(name) != digest}
    found = sorted(result.json) if line.startswith(MACHINE) else document(result)
    golden_runs.compare(line, {"document": found, "files": written})


def test_what_is_refused(cli: Cli, corpus: Path) -> None:
    """Exit status and message of each, and nothing is written."""
    before = golden_runs.files_of(corpus)
    found = {}
    for line in REFUSALS:
        result = cli(*line.split())
        found[line] = [result.code, result.err.replace(str(corpus), "FOLDER").partition("effexport: error: ")[2]]
    assert golden_runs.files_of(corpus) == before
    golden_runs.compare("refusals", found)


def document(result: Any) -> Any:
    return golden_runs.lasting(result.json) if result.out.startswith("{") else golden_runs.text_digest(result.out)
