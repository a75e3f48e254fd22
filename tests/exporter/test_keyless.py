"""Keyless signatures: sigstore signs and verifies against a stand-in of its services, and what is refused."""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import shutil
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign.records import write_key
from sigstore_standin import Sigstore

import effexport
from effexport.artifact import Artifact
from effexport.base.errors import EffexportError, UserError
from effexport.keyless import IdentityOptions, KeylessSigner
from effexport.runners.options import RunOptions
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.http.models import ServingTarget
from effexport.signature import SIGNATURE, VERDICT, _payload, _statement, check_identity

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
ADA, ISSUER = Sigstore.visitor, Sigstore.issuer
WORKFLOW = "https://github.com/ada/models/.github/workflows/sign.yml@refs/heads/main"


@pytest.fixture(scope="module")
def sigstore() -> Iterator[Sigstore]:
    with pytest.MonkeyPatch.context() as patch, Sigstore() as running:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield running


@pytest.fixture(scope="module")
def signed(sigstore: Sigstore, built: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: `ours`, which Ada signed; trust.json; key.pem and its public.pem; and signatures of others.

    They are `other`, another model; `eve`, by somebody else; `late`, logged an hour after its certificate;
    and `earlier`, by Ada.
    """
    folder = tmp_path_factory.mktemp("keyless")
    (folder / "trust.json").write_text(json.dumps(sigstore.trust_config()))
    write_key(folder / "key.pem", folder / "public.pem")
    for name in ("earlier", "ours", "other", "eve", "late"):
        shutil.copytree(built("linear" if name == "other" else "softmax", "attention").path, folder / name)
        token = sigstore.token("eve@example.org" if name == "eve" else ADA)
        sigstore.late = 3600 if name == "late" else 0
        effexport.sign(folder / name, sigstore=True, identity_token=token, trust_config=folder / "trust.json")
    sigstore.late = 0
    return folder


@pytest.fixture
def ours(signed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(signed / "ours", tmp_path / "ours")


def by(folder: Path, identity: str | Path = ADA, provider: str | None = ISSUER) -> dict[str, Any]:
    """The arguments that ask for an identity of the stand-in."""
    trust = None if provider is None else folder / "trust.json"
    return {"identity": identity, "identity_provider": provider, "trust_config": trust}


def bundle_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_an_identity_signs_and_is_verified_offline(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, sigstore: Sigstore, signed: Path, ours: Path
) -> None:
    trust = ("--trust-config", signed / "trust.json")
    token = sigstore.token("repo:ada/models:ref:refs/heads/main", job_workflow_ref=WORKFLOW)
    result = cli("sign", ours, "--sigstore", "--identity-token", token, *trust, "--json")
    assert (result.code, result.json["signed_by"], result.json["identity_provider"]) == (0, WORKFLOW, ISSUER)
    assert f"signs 7 files as {WORKFLOW}, which {ISSUER} confirmed" in result.err
    for file in (ours / SIGNATURE, ours / VERDICT):
        material = bundle_of(file)["verificationMaterial"]
        assert material["certificate"]["rawBytes"]
        assert material["tlogEntries"][0]["inclusionProof"]["hashes"]
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("something is sent"))
    words = ("verify", ours, "--reference", "golden", "--identity", WORKFLOW, "--identity-provider", ISSUER, *trust)
    result = cli(*words)
    assert result.code == 0, result.err
    assert f"{ours}: 7 files as {WORKFLOW} signed them" in result.out.splitlines()
    settings = ServingSettings(**by(signed, WORKFLOW))
    assert ServingTarget(ours, None, RunOptions(), settings).checked()[1] == "ours"


@pytest.mark.requires("model-signing")
def test_model_signing_takes_our_signatures_and_we_take_its(sigstore: Sigstore, signed: Path, ours: Path) -> None:
    import model_signing

    names = {"identity": ADA, "oidc_issuer": ISSUER, "trust_config": signed / "trust.json"}
    model_signing.verifying.Config().use_sigstore_verifier(**names).verify(ours, ours / SIGNATURE)
    names["identity"] = "eve@example.org"
    with pytest.raises(Exception, match=r"do not match eve@example\.org"):
        model_signing.verifying.Config().use_sigstore_verifier(**names).verify(ours, ours / SIGNATURE)
    token = sigstore.token("bob@example.org")
    (ours / VERDICT).unlink()  # Ada's
    signing = model_signing.signing.Config().use_sigstore_signer(
        identity_token=token, trust_config=signed / "trust.json"
    )
    hashing = model_signing.hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)
    signing.set_hashing_config(hashing).sign(ours, ours / SIGNATURE)
    found = check_identity(ours, IdentityOptions(**by(signed, "bob@example.org")))
    assert found is not None
    assert found.signed_by == "bob@example.org"


# the library does not close the socket at which it waits for the browser
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tokens_come_from_a_workflow_or_a_browser(
    monkeypatch: pytest.MonkeyPatch, sigstore: Sigstore, signed: Path
) -> None:
    def browse(url: str) -> bool:
        threading.Thread(target=lambda: urllib.request.urlopen(url).close()).start()
        return True

    def signed_by() -> str | None:
        signer = KeylessSigner(None, signed / "trust.json")
        signer.bundle(_payload(_statement("ours", {})))
        return signer.signed_by

    monkeypatch.setattr("webbrowser.open", browse)
    assert signed_by() == ADA
    gc.collect()
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("there is a credential"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "secret")
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", f"{sigstore.url}/ambient?api-version=2.0")
    assert signed_by() == ADA


def test_no_identity_is_published_for_an_artifact_that_cannot_be_signed(
    monkeypatch: pytest.MonkeyPatch, sigstore: Sigstore, signed: Path, ours: Path
) -> None:
    (ours / "notes.txt").write_text("of the system")
    monkeypatch.setattr("sigstore.sign.Signer.__init__", lambda *_: pytest.fail("it is certified"))
    with pytest.raises(UserError, match=r"has 'notes\.txt', which manifest\.json does not list"):
        effexport.sign(ours, sigstore=True, identity_token=sigstore.token(), trust_config=signed / "trust.json")


def test_an_old_library_is_named(monkeypatch: pytest.MonkeyPatch, signed: Path) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.1.0")
    with pytest.raises(UserError, match=r"sigstore 4\.1\.0 is installed; expected 4\.2 or later"):
        KeylessSigner(None, signed / "trust.json")


def take(folder: Path, other: str, *path: str | int) -> None:
    """Put a part of the verdict's bundle, or of that of another folder, into the signature."""
    ours, theirs = bundle_of(folder / SIGNATURE), bundle_of(folder / other)
    part, source = ours, theirs
    for step in path[:-1]:
        part, source = part[step], source[step]  # type: ignore[index]
    part[path[-1]] = source[path[-1]]  # type: ignore[index]
    (folder / SIGNATURE).write_text(json.dumps(ours))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    bundle = bundle_of(folder / SIGNATURE)
    change(bundle["verificationMaterial"])
    (folder / SIGNATURE).write_text(json.dumps(bundle))


def entry(material: dict[str, Any], **fields: Any) -> None:
    material["tlogEntries"][0].update(fields)


def in_certificate(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(material: dict[str, Any]) -> None:
        raw = base64.b64decode(material["certificate"]["rawBytes"])
        assert old in raw
        material["certificate"]["rawBytes"] = base64.b64encode(raw.replace(old, new)).decode()

    return lambda folder: edit(folder, change)


MATERIAL, ENTRY = "verificationMaterial", ("verificationMaterial", "tlogEntries")
ATTACKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "file changed": (lambda it: (it / "model.onnx").write_bytes(b""), "'model.onnx' is another file"),
    "verdict stripped": (lambda it: (it / VERDICT).unlink(), f"'{VERDICT}' is missing"),
    "signature stripped": (lambda it: (it / SIGNATURE).unlink(), "is not signed"),
    "verdict in its place": (lambda it: shutil.copy(it / VERDICT, it / SIGNATURE), "states 'https://in-toto.io/att"),
    "another artifact's": (lambda it: shutil.copy(it / "../other" / SIGNATURE, it / SIGNATURE), "is another file"),
    "another artifact's statement": (lambda it: take(it, f"../other/{SIGNATURE}", "dsseEnvelope"), "invalid signature"),
    "entry of the verdict": (lambda it: take(it, VERDICT, *ENTRY), "log entry payload hash does not match"),
    "certificate of an earlier signature": (
        lambda it: take(it, f"../earlier/{SIGNATURE}", MATERIAL, "certificate"),
        "DSSE: invalid signature",
    ),
    "certificate of somebody else": (lambda it: take(it, f"../eve/{SIGNATURE}", MATERIAL), "do not match ada@example"),
    "whole bundle of somebody else": (
        lambda it: shutil.copy(it / "../eve" / SIGNATURE, it / SIGNATURE),
        "do not match",
    ),
    "name in the certificate": (in_certificate(b"ada@", b"eve@"), "failed to build timestamp certificate chain"),
    "expired": (lambda it: shutil.copy(it / "../late" / SIGNATURE, it / SIGNATURE), "certificate chain"),
    "no entry": (lambda it: edit(it, lambda one: one.update(tlogEntries=[])), "expected exactly one log entry"),
    "two entries": (lambda it: edit(it, lambda one: one["tlogEntries"].append(one["tlogEntries"][0])), "exactly one"),
    "no proof": (lambda it: edit(it, lambda one: one["tlogEntries"][0].pop("inclusionProof")), "inclusionProof"),
    "no time": (lambda it: edit(it, lambda one: one["tlogEntries"][0].pop("inclusionPromise")), "inclusion promise or"),
    "another time": (lambda it: edit(it, lambda one: entry(one, integratedTime="1700000000")), "certificate chain"),
    "a time a second later": (
        lambda it: edit(
            it, lambda one: entry(one, integratedTime=str(int(one["tlogEntries"][0]["integratedTime"]) + 1))
        ),
        "invalid inclusion promise",
    ),
    "time beyond all": (lambda it: edit(it, lambda one: entry(one, integratedTime=str(2**63))), "not confirmed"),
    "no certificate": (lambda it: edit(it, lambda one: one["certificate"].update(rawBytes="AAAA")), "not confirmed"),
    "key in place of it": (
        lambda it: edit(it, lambda one: (one.pop("certificate"), one.update(publicKey={"hint": ""}))),
        "was signed with a key",
    ),
    "signed by a key": (lambda it: effexport.sign(it, key=it / "../key.pem"), "was signed with a key"),
}


def test_what_the_identity_did_not_sign_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, signed: Path
) -> None:
    settings = ServingSettings(**by(signed))
    for change, message in ATTACKS.values():
        attacked = shutil.copytree(signed / "ours", signed / "attacked")
        change(attacked)
        with monkeypatch.context() as patch:
            patch.setattr("effexport.artifact.open_artifact", lambda folder: pytest.fail(f"{folder} is opened"))
            patch.setattr("effexport.serving.http.models.open_artifact", lambda folder: pytest.fail("it is opened"))
            with pytest.raises(UserError, match=message):
                effexport.verify(attacked, **by(signed))
            with pytest.raises(UserError, match=message):
                ServingTarget(attacked, None, RunOptions(), settings).checked()
        shutil.rmtree(attacked)
    assert check_identity(signed / "ours", settings) is not None


def test_a_verdict_of_somebody_else_is_refused(sigstore: Sigstore, signed: Path, ours: Path) -> None:
    """Also if the owner signed the file: who states the verdict is who signs the model."""
    eve = KeylessSigner(sigstore.token("eve@example.org"), signed / "trust.json")
    statement = base64.b64decode(bundle_of(ours / VERDICT)["dsseEnvelope"]["payload"])
    (ours / VERDICT).write_text(eve.bundle(statement))
    (ours / SIGNATURE).unlink()
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in ours.iterdir()}
    ada = KeylessSigner(sigstore.token(), signed / "trust.json")
    (ours / SIGNATURE).write_text(ada.bundle(_payload(_statement("ours", digests))))
    with pytest.raises(UserError, match=rf"{VERDICT} is not confirmed to be signed by ada@example\.org"):
        check_identity(ours, IdentityOptions(**by(signed)))


def test_an_identity_that_did_not_sign_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signed: Path, ours: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # where the library keeps the roots of the public instance
    (tmp_path / "other.json").write_text(json.dumps(another_instance().trust_config()))
    (tmp_path / "empty.json").write_text("{}")
    for arguments, message in (
        (by(signed, "eve@example.org"), r"do not match eve@example\.org"),
        (by(signed, "ADA@example.org"), r"do not match ADA@example\.org"),
        (by(signed, provider="https://accounts.example.com"), "OIDCIssuer does not match"),
        (by(signed, provider=""), "the identity or its provider is empty"),
        (by(signed, ""), "the identity or its provider is empty"),
        (by(signed, signed / "public.pem"), "do not match .*public.pem"),
        (by(signed, signed / "public.pem", None), "was signed without a key; expected the key of the identity"),
        (by(signed, ADA, None), r"ada@example\.org cannot be read: No such file"),
        (by(signed) | {"identity": None}, "but there is none"),
        (by(signed) | {"identity_provider": None}, "--trust-config is of Sigstore"),
        (by(signed) | {"trust_config": tmp_path / "other.json"}, "certificate chain"),
        (by(signed) | {"trust_config": tmp_path / "empty.json"}, "expected a ClientTrustConfig of Sigstore"),
        (by(signed) | {"trust_config": None}, "certificate chain"),
    ):
        with pytest.raises(UserError, match=message):
            check_identity(ours, IdentityOptions(**arguments))


def another_instance() -> Sigstore:
    other = Sigstore()
    other.url = "http://127.0.0.1:1"
    return other


def test_without_a_certificate_or_an_entry_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, sigstore: Sigstore, signed: Path, ours: Path
) -> None:
    before = {file.name: file.read_bytes() for file in ours.iterdir()}
    trust = signed / "trust.json"
    unknown = another_instance().token("mallory@example.org")
    tokens = (sigstore.token(), sigstore.token(exp=1), sigstore.token(aud="other"), "word", unknown)
    for token, down, message in (
        (tokens[0], "signingCert", "Sigstore gave no certificate: .*; nothing was signed"),
        (tokens[0], "entries", "Sigstore made no signature: .*; nothing was signed"),
        (tokens[1], "", "there is no identity to sign with"),
        (tokens[2], "", "there is no identity to sign with"),
        (tokens[3], "", "there is no identity to sign with"),
        (tokens[4], "", "Sigstore gave no certificate"),
    ):
        monkeypatch.setattr(sigstore, "down", down)
        with pytest.raises(EffexportError, match=message) as found:
            effexport.sign(ours, sigstore=True, identity_token=token, trust_config=trust)
        assert token not in str(found.value)
    for arguments in ({}, {"key": signed / "key.pem", "sigstore": True}, {"sigstore": False}):
        with pytest.raises(UserError, match="expected key=…, or sigstore=True"):
            effexport.sign(ours, **arguments)
    with pytest.raises(UserError, match="trust_config only works with sigstore"):
        effexport.sign(ours, key=signed / "key.pem", trust_config=trust)
    assert {file.name: file.read_bytes() for file in ours.iterdir()} == before


def test_without_sigstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, signed: Path, ours: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call in (
        lambda: effexport.verify(ours, **by(signed)),
        lambda: effexport.sign(ours, sigstore=True, identity_token="it"),
    ):
        with pytest.raises(UserError, match=r"sigstore is not installed; .*pip install 'effexport\[sign\]'"):
            call()


def test_files_of_an_identity_become_absolute_and_its_name_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    key = IdentityOptions(identity="public.pem").absolute()
    assert key.identity == tmp_path / "public.pem"
    name = IdentityOptions(identity=ADA, identity_provider=ISSUER, trust_config="trust.json").absolute()
    assert (name.identity, name.trust_config) == (ADA, tmp_path / "trust.json")
    assert IdentityOptions().absolute() == IdentityOptions()
