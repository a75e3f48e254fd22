"""Mutated JSON files that are not parts of an artifact: results of evaluations and benchmarks, records of packages."""

from __future__ import annotations

import importlib.resources
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaign.commands import run_command
from campaign.strange import mutated_json, text_of


def attack(dice: random.Random, folder: Path, healthy: Path) -> str:
    """Mutate one file and have it read; the outcome, or AssertionError for one that must not be."""
    kind = dice.choice(list(KINDS))
    return KINDS[kind](dice, folder / kind, healthy)


def evaluation(dice: random.Random, folder: Path, healthy: Path) -> str:
    """The result of `effexport evaluate`, given to `bench --advise`, which reads it before it times anything."""
    original = folder / "original.json"
    if not original.exists():
        folder.mkdir(parents=True)
        (folder / "text.txt").write_text("some text " * 50, encoding="utf-8")
        original.write_text(json.dumps(evaluation_values(healthy)), encoding="utf-8")
    what = write_mutated(original, folder / "mutated.json", dice)
    # this spec does not exist, so that what is accepted ends there
    words = ["bench", "--advise", "--seq-len", "8", "--quality", str(folder / "mutated.json"), "--spec", "nowhere.toml"]
    return checked(words, what)


def evaluation_values(healthy: Path) -> dict[str, Any]:
    from dataclasses import asdict

    from effexport.evaluation.figures import Estimate, Evaluation, Objective

    spec = json.loads((healthy / "lm" / "manifest.json").read_text(encoding="utf-8"))["spec"]
    estimates = (Estimate("loss", 2.0, 1.9, 2.1), Estimate("accuracy", 0.5))
    return asdict(
        Evaluation(
            model="m",
            label="aft-simple",
            spec=spec,
            runtime="ort",
            precision="fp32",
            tokens=16,
            objective=Objective.LANGUAGE_MODEL,
            data="text.txt",
            data_sha256="0" * 64,
            rows=3,
            answers=30,
            estimates=estimates,
            seconds=1.0,
        )
    )


def package(dice: random.Random, folder: Path, healthy: Path) -> str:
    """The record of a packaged model, when another version or another model is added to its repository."""
    if not folder.exists():
        ended = run_command(["package", str(healthy / "lsh"), "-o", str(folder / "original"), "--name", "m"])
        assert ended.code == 0, ended.err
    repository = folder / "mutated"
    shutil.rmtree(repository, ignore_errors=True)
    shutil.copytree(folder / "original", repository)
    record = dice.choice(sorted(repository.rglob("effexport.json")))
    what = write_mutated(record, record, dice)
    before = sorted((path, path.stat().st_mtime_ns) for path in repository.rglob("*"))
    artifact, name = dice.choice((("lsh", "m"), ("lm", "m"), ("lm", "other")))
    words = ["package", str(healthy / artifact), "-o", str(repository), "--name", name]
    outcome = checked(words, what)
    if outcome == "accepted":
        check_pages(repository, what)
    if outcome == "refused":
        assert sorted((path, path.stat().st_mtime_ns) for path in repository.rglob("*")) == before, "files changed"
    return outcome


# Lines with values in the pages that programs read; the other lines are those of the templates.
LINES_WITH_VALUES = {
    "Dockerfile": r"# [^\n]*|ARG TRITON_TAG=[\w.-]+|RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install "
    r"--no-cache-dir( (msgspec|onnx|onnxruntime(-gpu)?|tokenizers)==[\w.+!-]+)+",
    "compose.yaml": r"# [^\n]*| +- (tritonserver|--[\w-]+=[\w./+@-]+)| +- \.:/[\w./+@-]*:ro",
}


def check_pages(repository: Path, what: str) -> None:
    """AssertionError if a page that a program reads has anything but what `effexport package` means to write."""
    templates = importlib.resources.files("effexport.serving.triton")
    for name, with_values in LINES_WITH_VALUES.items():
        fixed = set((templates / f"{name}.j2").read_text(encoding="utf-8").split("\n"))
        for line in (repository / name).read_text(encoding="utf-8").split("\n"):
            assert line in fixed or re.fullmatch(with_values, line), f"{what}: {name} has the line {line!r}"


def write_mutated(original: Path, target: Path, dice: random.Random) -> str:
    values, what = mutated_json(json.loads(original.read_text(encoding="utf-8")), dice)
    target.write_text(text_of(values), encoding="utf-8")
    return what


def checked(words: list[str], what: str) -> str:
    try:
        return run_command(words).check()
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


KINDS: dict[str, Callable[[random.Random, Path, Path], str]] = {"evaluation": evaluation, "package": package}
