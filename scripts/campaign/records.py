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
from campaign.strange import contents, mutated_json, text_of

SIGNED = ("model.sig", "verdict.intoto.json")


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

    from effexport.tasks.figures import Estimate, Evaluation, Objective

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
    before = contents(repository)
    artifact, name = dice.choice((("lsh", "m"), ("lm", "m"), ("lm", "other")))
    words = ["package", str(healthy / artifact), "-o", str(repository), "--name", name]
    outcome = checked(words, what)
    if outcome == "accepted":
        check_pages(repository, what)
    if outcome == "refused":
        assert contents(repository) == before, "files changed"
    return outcome


def signature(dice: random.Random, folder: Path, healthy: Path) -> str:
    """A signed artifact that somebody has changed: what is accepted has the files that were signed, and no others."""
    if not folder.exists():
        make_signed(folder, healthy)
    provider = ["--identity-provider", "https://accounts.example.org", "--trust-config", str(folder / "trust.json")]
    identities = {"key": [str(folder / "ours.pub")], "name": ["ada@example.org", *provider]}
    whose = dice.choice(list(identities))
    original, attacked = folder / whose, folder / "attacked"
    shutil.rmtree(attacked, ignore_errors=True)
    shutil.copytree(original, attacked)
    kinds = ("stripped", "bundle", "payload", "twice", "signer", "material", "entry", "file", "beside", "link", "time")
    kind = dice.choice(kinds)
    file = dice.choice(sorted(path for path in attacked.iterdir()))
    bundle = attacked / dice.choice(SIGNED)
    other = folder / dice.choice(("key", "name", "other-key", "other-name", "other-model"))
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
    elif kind in ("signer", "material"):
        # of somebody else, or of another kind; "material" keeps the right key or certificate
        for name in SIGNED:
            values = json.loads((other / name).read_text(encoding="utf-8"))
            known = json.loads((original / name).read_text(encoding="utf-8"))
            material = {"verificationMaterial": known["verificationMaterial"]} if kind == "material" else {}
            (attacked / name).write_text(json.dumps(values | material), encoding="utf-8")
    elif kind == "entry":
        values = json.loads(bundle.read_text(encoding="utf-8"))
        taken = json.loads((other / dice.choice(SIGNED)).read_text(encoding="utf-8"))["verificationMaterial"]
        part = dice.choice(("tlogEntries", "certificate", "publicKey"))
        values["verificationMaterial"] |= {part: taken[part]} if part in taken else {}
        bundle.write_text(json.dumps(values), encoding="utf-8")
    elif kind == "file":
        file.write_bytes(file.read_bytes() + b"\n")
    elif kind == "beside":
        shutil.copyfile(file, attacked / dice.choice(("config.json", "MODEL.ONNX", ".hidden", "model.onnx ")))
    elif kind == "link":
        file.unlink()
        file.symlink_to(original / file.name)
    else:
        os.utime(file, (0, 0))
    words = ["verify", str(attacked), "--reference", "golden", "--identity", *identities[whose]]
    outcome = checked(words, f"signature: {kind} {file.name} {bundle.name} {other.name}")
    if outcome == "accepted":
        same = {path.name: path.read_bytes() for path in attacked.iterdir() if path.name != "model.sig"}
        expected = {path.name: path.read_bytes() for path in original.iterdir() if path.name != "model.sig"}
        assert same == expected, f"signature: {kind} was accepted"
    return outcome


def make_signed(folder: Path, healthy: Path) -> None:
    """Artifacts that keys and identities have signed: ours, `key` and `name`, and those of others."""
    from sigstore_standin import Sigstore

    for name in ("key", "name", "other-key", "other-name"):
        shutil.copytree(healthy / "decoder", folder / name)
    shutil.copytree(healthy / "lsh", folder / "other-model")
    for key in ("ours", "other"):
        write_key(folder / f"{key}.pem", folder / f"{key}.pub")
    with Sigstore() as sigstore:
        trust = folder / "trust.json"
        trust.write_text(json.dumps(sigstore.trust_config()), encoding="utf-8")
        for name, identity in (("name", "ada@example.org"), ("other-name", "eve@example.org")):
            words = ["--sigstore", "--identity-token", sigstore.token(identity), "--trust-config", str(trust)]
            assert run_command(["sign", str(folder / name), *words]).code == 0
    for name, key in (("key", "ours"), ("other-key", "other"), ("other-model", "ours")):
        assert run_command(["sign", str(folder / name), "--key", str(folder / f"{key}.pem")]).code == 0


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
