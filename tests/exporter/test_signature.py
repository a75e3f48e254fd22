"""Signed artifacts: the format, held against openssl, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import effexport
from effexport import signature
from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.keyless import IdentityOptions
from effexport.runners.options import RunOptions
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.http.models import ServingTarget
from effexport.signature import SIGNATURE, VERDICT, Signed, check_identity

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
FILES = {"manifest.json", "model.onnx", "reference.safetensors", "report.html", "report.json", "traced.zip", VERDICT}


def openssl(*words: str | Path, given: bytes = b"") -> bytes:
    return subprocess.run(["openssl", *words], input=given, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with NAME.pem and NAME.pub of several keys, made by openssl."""
    folder = tmp_path_factory.mktemp("keys")
    for name, curve in {"ours": "prime256v1", "other": "prime256v1", "p384": "secp384r1", "p521": "secp521r1"}.items():
        openssl("ecparam", "-name", curve, "-genkey", "-noout", "-out", folder / f"{name}.pem")
    openssl("ecparam", "-name", "secp256k1", "-genkey", "-noout", "-out", folder / "bitcoin.pem")
    openssl("genpkey", "-algorithm", "ed25519", "-out", folder / "ed25519.pem")
    for key in folder.glob("*.pem"):
        openssl("pkey", "-in", key, "-pubout", "-out", key.with_suffix(".pub"))
    openssl("ec", "-in", folder / "ours.pem", "-aes256", "-passout", "pass:secret", "-out", folder / "locked.pem")
    (folder / "text.pem").write_text("no key")
    return folder


@pytest.fixture
def signed(copied: Callable[..., Path], keys: Path) -> Path:
    """A signed copy of an artifact."""
    folder = copied("softmax", "attention")
    effexport.sign(folder, key=keys / "ours.pem")
    return folder


def checked(folder: Path, key: Path) -> Signed:
    found = check_identity(folder, IdentityOptions(identity=key))
    assert found is not None
    return found


def statement(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(base64.b64decode(json.loads(file.read_text())["dsseEnvelope"]["payload"]))
    return found


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the JSON of a bundle."""
    bundle = json.loads(file.read_text())
    change(bundle)
    file.write_text(json.dumps(bundle))


def edit_payload(file: Path, old: str, new: str) -> None:
    """Change the statement, and keep its signature."""
    envelope = json.loads(file.read_text())["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    assert old.encode() in payload
    changed = base64.b64encode(payload.replace(old.encode(), new.encode())).decode()
    edit(file, lambda bundle: bundle["dsseEnvelope"].update(payload=changed))


@pytest.mark.parametrize(("name", "digest"), [("ours", "sha256"), ("p384", "sha384"), ("p521", "sha512")])
def test_openssl_confirms_both_signatures(copied: Callable[..., Path], keys: Path, name: str, digest: str) -> None:
    folder = copied("softmax", "attention")
    found = effexport.sign(folder, key=keys / f"{name}.pem")
    assert found.signed_by == hashlib.sha256((keys / f"{name}.pub").read_bytes()).hexdigest()
    for file in (folder / SIGNATURE, folder / VERDICT):
        envelope = json.loads(file.read_text())["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"])
        kind = envelope["payloadType"]
        (folder.parent / "sig").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
        # DSSE 1.0: "DSSEv1" SP LEN(type) SP type SP LEN(body) SP body
        signed = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
        openssl(
            *("dgst", f"-{digest}", "-verify", keys / f"{name}.pub", "-signature", folder.parent / "sig"), given=signed
        )
    assert set(checked(folder, keys / f"{name}.pub").files) == FILES


def test_the_statements_are_those_of_model_signing_and_of_test_results(signed: Path) -> None:
    model, verdict = statement(signed / SIGNATURE), statement(signed / VERDICT)
    resources = model["predicate"]["resources"]
    assert [one["name"] for one in resources] == sorted(FILES)
    digests = {name: hashlib.sha256((signed / name).read_bytes()).hexdigest() for name in FILES}
    assert {one["name"]: one["digest"] for one in resources} == digests
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[name]) for name in sorted(FILES))).hexdigest()
    assert model["subject"] == [{"name": signed.name, "digest": {"sha256": root}}]
    assert model["predicate"]["serialization"] == {
        "method": "files",
        "hash_type": "sha256",
        "allow_symlinks": False,
        "ignore_paths": [SIGNATURE],
    }
    assert verdict["subject"] == [{"name": "model.onnx", "digest": {"sha256": digests["model.onnx"]}}]
    found, report = verdict["predicate"], effexport.report(signed)
    assert (found["result"], found["failedTests"]) == ("PASSED", [])
    assert sorted(found["passedTests"]) == list(found["summary"])
    assert {name: found["environment"][name] for name in ("torch", "processor")} == {
        name: report.environment[name] for name in ("torch", "processor")
    }
    assert (found["created"], found["weights"]["from"]) == (report.created, "seed")


def test_a_signed_artifact_is_verified_run_and_signed_again(cli: Callable[..., Any], signed: Path, keys: Path) -> None:
    result = cli("verify", signed, "--reference", "golden", "--identity", keys / "ours.pub")
    assert result.code == 0, result.err
    assert f"{signed}: 7 files as the owner of {keys / 'ours.pub'} signed them" in result.out.splitlines()
    again = cli("sign", signed, "--key", keys / "other.pem", "--json")
    assert (again.code, set(again.json["files"])) == (0, FILES)
    assert checked(signed, keys / "other.pub").signed_by == again.json["signed_by"]
    result = cli("verify", signed, "--identity", keys / "ours.pub")
    assert (result.code, result.out) == (2, "")
    assert "model.sig is of another key" in result.err
    with effexport.load(signed) as runner:
        assert runner.inputs


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def link_model(folder: Path) -> None:
    (folder / "model.onnx").rename(folder.parent / "model.onnx")
    (folder / "model.onnx").symlink_to(folder.parent / "model.onnx")


def twice(folder: Path) -> None:
    edit(folder / SIGNATURE, lambda bundle: bundle["dsseEnvelope"]["signatures"].append({"sig": "", "keyid": ""}))


def double_keys(file: Path) -> None:
    """Every key twice, so that two readers may take other values."""
    text = file.read_text().strip()
    file.write_text(f"{text[:-1]}, {text[1:]}")


ATTACKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "signature stripped": (lambda folder: (folder / SIGNATURE).unlink(), "is not signed: it has no model.sig"),
    "model": (lambda folder: append(folder / "model.onnx"), "'model.onnx' is another file"),
    "manifest": (lambda folder: append(folder / "manifest.json"), "'manifest.json' is another file"),
    "manifest with double keys": (lambda it: double_keys(it / "manifest.json"), "'manifest.json' is another file"),
    "name that looks alike": (lambda it: (it / "model.onnx ").write_bytes(b""), "'model.onnx ' was added"),
    "verdict": (lambda folder: edit_payload(folder / VERDICT, "PASSED", "FAILED"), f"'{VERDICT}' is another file"),
    "verdict stripped": (lambda folder: (folder / VERDICT).unlink(), f"'{VERDICT}' is missing"),
    "file added": (lambda folder: (folder / "config.json").write_text("{}"), "'config.json' was added"),
    "file added in a folder": (
        lambda folder: shutil.copytree(folder, folder / "more"),
        "'more/manifest.json' was added",
    ),
    "link added": (lambda it: (it / "link").symlink_to(it / "model.onnx"), "link is a link or no regular file"),
    "model is a link": (link_model, "model.onnx is a link or no regular file"),
    "pipe added": (lambda folder: os.mkfifo(folder / "pipe"), "pipe is a link or no regular file"),
    "file removed": (lambda folder: (folder / "traced.zip").unlink(), "'traced.zip' is missing"),
    "file forgotten by the statement": (
        lambda folder: edit_payload(folder / SIGNATURE, "traced.zip", "TRACED.zip"),
        "its signature does not match",
    ),
    "verdict in its place": (
        lambda folder: shutil.copy(folder / VERDICT, folder / SIGNATURE),
        "states 'https://in-toto.io/attestation/test-result/v0.1'",
    ),
    "two signatures": (twice, "signatures"),
    "another type": (
        lambda folder: edit(folder / SIGNATURE, lambda it: it["dsseEnvelope"].update(payloadType="text/plain")),
        "expected application/vnd.dev.sigstore.bundle",
    ),
    "hint of another key": (
        lambda folder: edit(folder / SIGNATURE, lambda it: it["verificationMaterial"].update(publicKey={"hint": "0"})),
        "is of another key",
    ),
    "no base64": (
        lambda folder: edit(folder / SIGNATURE, lambda it: it["dsseEnvelope"].update(payload="?")),
        "its signature does not match",
    ),
    "no JSON": (lambda folder: (folder / SIGNATURE).write_text("{"), "model.sig is damaged"),
    "large": (lambda folder: (folder / SIGNATURE).write_bytes(b" " * (9 << 20)), "model.sig cannot be read"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_its_owner_did_not_sign_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, signed: Path, keys: Path, attack: str
) -> None:
    change, message = ATTACKS[attack]
    change(signed)
    monkeypatch.setattr("effexport.artifact.open_artifact", lambda folder: pytest.fail(f"{folder} is opened"))
    monkeypatch.setattr("effexport.serving.http.models.open_artifact", lambda folder: pytest.fail("it is opened"))
    with pytest.raises(UserError, match=message):
        effexport.verify(signed, identity=keys / "ours.pub")
    settings = ServingSettings(identity=keys / "ours.pub")
    with pytest.raises(UserError, match=message):
        ServingTarget(signed, None, RunOptions(), settings).checked()


def test_a_verdict_on_another_model_is_refused(
    copied: Callable[..., Path], built: Callable[..., Artifact], keys: Path
) -> None:
    """Also if its owner signed both: an old verdict beside a new model."""
    folder = copied("softmax", "attention")
    other = shutil.copytree(built("linear", "attention").path, folder.parent / "other")
    effexport.sign(other, key=keys / "ours.pem")
    shutil.copy(other / VERDICT, folder / VERDICT)
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    statement = signature._statement(folder.name, digests)
    (folder / SIGNATURE).write_text(signature.signed_statement(statement, keys / "ours.pem"))
    with pytest.raises(UserError, match=f"{VERDICT} is a verdict on another model"):
        checked(folder, keys / "ours.pub")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("other.pub", "is of another key"),
        ("ours.pem", "is a private key; expected a public key"),
        ("bitcoin.pub", "is on the curve secp256k1; expected one on P-256, P-384 or P-521"),
        ("ed25519.pub", "is no elliptic-curve key"),
        ("text.pem", "cannot be read; expected a public key"),
        ("missing.pub", "cannot be read: No such file"),
    ],
)
def test_an_identity_that_is_none_is_refused(signed: Path, keys: Path, key: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        checked(signed, keys / key)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("ours.pub", "is a public key; expected a private key"),
        ("ed25519.pem", "is no elliptic-curve key"),
        ("locked.pem", "has a password; set EFFEXPORT_KEY_PASSWORD"),
        ("missing.pem", "cannot be read: No such file"),
    ],
)
def test_a_key_that_cannot_sign_is_refused_and_nothing_is_written(
    signed: Path, keys: Path, key: str, message: str
) -> None:
    before = (signed / SIGNATURE).read_bytes()
    with pytest.raises(UserError, match=message):
        effexport.sign(signed, key=keys / key)
    assert (signed / SIGNATURE).read_bytes() == before


def test_a_key_with_a_password_signs(monkeypatch: pytest.MonkeyPatch, signed: Path, keys: Path) -> None:
    monkeypatch.setenv("EFFEXPORT_KEY_PASSWORD", "secret")
    effexport.sign(signed, key=keys / "locked.pem")
    checked(signed, keys / "ours.pub")
    monkeypatch.setenv("EFFEXPORT_KEY_PASSWORD", "wrong")
    with pytest.raises(UserError, match="has another password"):
        effexport.sign(signed, key=keys / "locked.pem")


def test_files_that_the_manifest_does_not_list_are_not_signed_unseen(copied: Callable[..., Path], keys: Path) -> None:
    folder = copied("softmax", "attention")
    (folder / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"has 'notes\.txt', which manifest\.json does not list"):
        effexport.sign(folder, key=keys / "ours.pem")
    assert not (folder / SIGNATURE).exists()


def test_without_cryptography_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, signed: Path, keys: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'effexport\[sign\]'"):
        checked(signed, keys / "ours.pub")
