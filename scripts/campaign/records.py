"""Mutated JSON files that are not parts of an artifact: results of evaluations and benchmarks, records of packages."""

from __future__ import annotations

import base64
import importlib.resources
import json
import os
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


def signature(dice: random.Random, folder: Path, healthy: Path) -> str:
    """A signed artifact that somebody has changed: what is accepted has the files that were signed, and no others."""
    original, attacked = folder / "original", folder / "attacked"
    if not original.exists():
        shutil.copytree(healthy / "decoder", original)
        for key in ("ours", "other"):
            write_key(folder / f"{key}.pem", folder / f"{key}.pub")
        assert run_command(["sign", str(original), "--key", str(folder / "ours.pem")]).code == 0
    shutil.rmtree(attacked, ignore_errors=True)
    shutil.copytree(original, attacked)
    kind = dice.choice(("stripped", "bundle", "payload", "twice", "key", "hint", "file", "beside", "link", "time"))
    file = dice.choice(sorted(path for path in attacked.iterdir()))
    bundle = attacked / dice.choice(("model.sig", "verdict.intoto.json"))
    if kind == "stripped":
        bundle.unlink()
    elif kind == "bundle":
        write_mutated(bundle, bundle, dice)
    elif kind == "payload":
        values = json.loads(bundle.read_text(encoding="utf-8"))
        statement, _ = mutated_json(json.loads(base64.b64decode(values["dsseEnvelope"]["payload"])), dice)
        text = text_of(statement).encode("utf-8", "surrogatepass")
        values["dsseEnvelope"]["payload"] = base64.b64encode(text).decode()
        bundle.write_text(json.dumps(values), encoding="utf-8")
    elif kind == "twice":  # readers differ in which of two equal keys they take
        target = dice.choice((bundle, attacked / "manifest.json"))
        text = target.read_text(encoding="utf-8").strip()
        target.write_text(f"{text[:-1]}, {text[1:]}", encoding="utf-8")
    elif kind in ("key", "hint"):
        assert run_command(["sign", str(attacked), "--key", str(folder / "other.pem")]).code == 0
        for one in (attacked / "model.sig", attacked / "verdict.intoto.json") if kind == "hint" else ():
            values = json.loads(one.read_text(encoding="utf-8"))
            known = json.loads((original / one.name).read_text(encoding="utf-8"))
            one.write_text(json.dumps(values | {"verificationMaterial": known["verificationMaterial"]}))
    elif kind == "file":
        file.write_bytes(file.read_bytes() + b"\n")
    elif kind == "beside":
        shutil.copyfile(file, attacked / dice.choice(("config.json", "MODEL.ONNX", ".hidden", "model.onnx ")))
    elif kind == "link":
        file.unlink()
        file.symlink_to(original / file.name)
    else:
        os.utime(file, (0, 0))
    words = ["verify", str(attacked), "--reference", "golden", "--identity", str(folder / "ours.pub")]
    outcome = checked(words, f"signature: {kind} {file.name} {bundle.name}")
    if outcome == "accepted":
        same = {path.name: path.read_bytes() for path in attacked.iterdir() if path.name != "model.sig"}
        expected = {path.name: path.read_bytes() for path in original.iterdir() if path.name != "model.sig"}
        assert same == expected, f"signature: {kind} was accepted"
    return outcome


def write_key(private: Path, public: Path) -> None:
    """A pair of keys on P-256, in PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    of_key, unlocked = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, of_key, unlocked))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))


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


KINDS: dict[str, Callable[[random.Random, Path, Path], str]] = {
    "evaluation": evaluation,
    "package": package,
    "signature": signature,
}
