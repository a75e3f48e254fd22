"""Signatures of artifacts, and signed verdicts (docs/security.md).

model.sig has the format of OpenSSF Model Signing 1.0: a Sigstore bundle whose DSSE envelope holds an in-toto statement
of the digests of all other files. verdict.intoto.json is a second one, of in-toto's test-result predicate: which
model was compared with what, where, and with which outcome. Who signs has an elliptic-curve key in PEM, or an identity
that Sigstore certifies (keyless.py).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

from effexport.artifact import MANIFEST, REPORT_JSON, Artifact, files_of_folder
from effexport.base.disk import ANOTHER_FOLDER, write_error
from effexport.base.errors import MissingExtraError, UserError
from effexport.base.files import file_digest, partial_folder
from effexport.base.option_fields import path_of
from effexport.base.records import read_record, record_from_values, values_of_file, values_of_text
from effexport.base.runtimes import ENGINE_SUFFIX
from effexport.keyless import PAYLOAD_TYPE, REMEDY, IdentityOptions, KeylessSigner, KeylessVerifier
from effexport.models.validation import FileTooLargeError, bounded_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.hashes import HashAlgorithm

SIGNATURE, VERDICT = "model.sig", "verdict.intoto.json"
PASSWORD_VARIABLE = "EFFEXPORT_KEY_PASSWORD"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
SIGNED_TYPE = "https://model_signing/signature/v1.0"
VERDICT_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
RESULTS = {"passed": "PASSED", "failed": "FAILED"}
# Of the files that a verdict is about: graphs, weights beside them, engines.
MODEL_SUFFIXES = (".onnx", ".data", ENGINE_SUFFIX)
# Curve → hash, as Sigstore's bundles have them.
HASHES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
LARGEST_KEY = 64 << 10
MAKE_KEY = "openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
PUBLIC_OF_KEY = "openssl ec -in key.pem -pubout -out public.pem"


class _Hint(msgspec.Struct):
    hint: str


class _Material(msgspec.Struct, rename="camel"):
    public_key: _Hint | None = None


class _Mark(msgspec.Struct):
    sig: str


class _Envelope(msgspec.Struct, rename="camel"):
    payload: str
    payload_type: str
    signatures: Annotated[tuple[_Mark, ...], msgspec.Meta(min_length=1, max_length=1)]


class _Bundle(msgspec.Struct, rename="camel"):
    media_type: str
    verification_material: _Material
    dsse_envelope: _Envelope


class _Resource(msgspec.Struct):
    name: str
    algorithm: str
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Digests(msgspec.Struct):
    resources: tuple[_Resource, ...]


class _Subject(msgspec.Struct):
    name: str
    digest: dict[str, str]


class _Report(msgspec.Struct):
    """The fields of a report that a verdict takes."""

    title: str
    verdict: str
    created: str
    reference: str
    implementation: dict[str, str]


class _Statement(msgspec.Struct, rename="camel"):
    type: str = msgspec.field(name="_type")
    subject: tuple[_Subject, ...]
    predicate_type: str
    predicate: Any


@dataclass(frozen=True)
class Signed:
    """A signed artifact: its folder, by whom, and the names of the signed files.

    signed_by: the SHA-256 of the public key in PEM; or an identity, and its provider.
    """

    folder: Path
    signed_by: str
    provider: str | None
    files: tuple[str, ...]


class Signer(Protocol):
    """The side that signs: `KeySigner`, or the `KeylessSigner` of keyless.py."""

    signed_by: str
    provider: str | None

    def bundle(self, payload: bytes) -> str:
        """A Sigstore bundle with an in-toto statement."""


class Verifier(Protocol):
    """The side that checks: `KeyVerifier`, or the `KeylessVerifier` of keyless.py."""

    signed_by: str
    provider: str | None

    def payload(self, file: Path, values: dict[str, Any]) -> bytes:
        """The statement in a bundle, once its signature is checked. Raises UserError for that of somebody else."""


def signer_of(key: Path | None, sigstore: bool, token: str | None, trust_config: Path | None) -> Signer:
    """The signer with a key, or with an identity of Sigstore. Raises UserError for both or neither, and as they do."""
    if sigstore == (key is not None):
        raise UserError("expected --key FILE, or --sigstore to sign with an identity")
    if key is None:
        return KeylessSigner(token, trust_config)
    if trust_config is not None:
        raise UserError("--trust-config only works with --sigstore")
    return KeySigner(key)


def sign_artifact(artifact: Artifact, signer: Signer) -> Signed:
    """Sign all files of an artifact, and its verdict, in place of earlier signatures.

    artifact: as `open_artifact` returns it, with files that match the manifest.
    Raises UserError for files that the manifest does not list, and if a file cannot be written.
    """
    folder = artifact.path
    digests = {name: entry.sha256 for name, entry in artifact.manifest.files.items()}
    digests[MANIFEST] = file_digest(folder / MANIFEST)
    if others := sorted(_files(folder).keys() - digests.keys() - {SIGNATURE, VERDICT}):
        raise UserError(f"{folder} has {others[0]!r}, which {MANIFEST} does not list; expected no other files: move it")
    verdict = signer.bundle(_payload(_verdict(artifact)))
    digests[VERDICT] = hashlib.sha256(verdict.encode()).hexdigest()
    signature = signer.bundle(_payload(_statement(folder.resolve().name, digests)))
    try:
        with partial_folder(folder / SIGNATURE) as partial:  # both are whole before either is in its place
            for name, text in ((VERDICT, verdict), (SIGNATURE, signature)):
                (partial / name).write_bytes(text.encode())
            for name in (VERDICT, SIGNATURE):
                (partial / name).replace(folder / name)
    except OSError as error:
        raise write_error(folder, error, ANOTHER_FOLDER) from error
    return Signed(folder, signer.signed_by, signer.provider, tuple(digests))


def check_identity(folder: Path, options: IdentityOptions) -> Signed | None:
    """Check that an artifact is what an identity signed: every file, none more, and the verdict.

    Nothing in the folder is loaded or executed. None if the options ask for no identity.
    Raises UserError for an artifact that is not signed, by somebody else, or was changed after that.
    """
    verifier: Verifier
    if options.keyless():
        verifier = KeylessVerifier(options)
    elif options.identity is None:
        return None
    else:
        verifier = KeyVerifier(path_of("identity", options.identity))
    if not folder.is_dir():
        raise UserError(f"no artifact at {folder}; expected a folder that effexport sign has signed")
    if not (folder / SIGNATURE).is_file():
        raise UserError(f"{folder} is not signed: it has no {SIGNATURE}; {REMEDY}, or leave out the identity")
    signed = _opened(folder / SIGNATURE, verifier, SIGNED_TYPE)
    resources = record_from_values(signed.predicate, _Digests, str(folder / SIGNATURE), REMEDY).resources
    expected = {resource.name: resource.digest for resource in resources}
    if len(expected) != len(resources) or any(resource.algorithm != "sha256" for resource in resources):
        raise UserError(f"{folder / SIGNATURE} cannot be read: expected one SHA-256 of each file; {REMEDY}")
    files = _files(folder)
    del files[SIGNATURE]
    for name in sorted(files.keys() | expected.keys()):
        if name not in files:
            raise UserError(f"{folder} was changed after it was signed: {name!r} is missing; {REMEDY}")
        if name not in expected:
            raise UserError(f"{folder} was changed after it was signed: {name!r} was added; {REMEDY}")
        if file_digest(files[name]) != expected[name]:
            raise UserError(f"{folder} was changed after it was signed: {name!r} is another file; {REMEDY}")
    if VERDICT in files:
        verdict = _opened(folder / VERDICT, verifier, VERDICT_TYPE)
        if any(expected.get(one.name) != one.digest.get("sha256") for one in verdict.subject):
            raise UserError(f"{folder / VERDICT} is a verdict on another model; {REMEDY}")
    return Signed(folder, verifier.signed_by, verifier.provider, tuple(expected))


def _statement(name: str, digests: Mapping[str, str]) -> dict[str, Any]:
    """The statement of OpenSSF Model Signing: digests by name, and one over them in the order of the names."""
    ordered = dict(sorted(digests.items()))
    root = hashlib.sha256(b"".join(map(bytes.fromhex, ordered.values()))).hexdigest()
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": SIGNED_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [SIGNATURE],
            },
            "resources": [{"name": name, "algorithm": "sha256", "digest": digest} for name, digest in ordered.items()],
        },
    }


def _verdict(artifact: Artifact) -> dict[str, Any]:
    """The statement of an artifact's report: its graphs and weights, and how they were compared."""
    manifest = artifact.manifest
    report = read_record(artifact.path / REPORT_JSON, _Report, REMEDY)
    entries = {name: {"name": name, "digest": {"sha256": entry.sha256}} for name, entry in manifest.files.items()}
    summary = manifest.parity.summary
    return {
        "_type": STATEMENT_TYPE,
        "subject": [entries[name] for name in entries if Path(name).suffix in MODEL_SUFFIXES],
        "predicateType": VERDICT_TYPE,
        "predicate": {
            "result": RESULTS.get(report.verdict, "WARNED"),
            "configuration": [entries[REPORT_JSON]],
            "passedTests": [name for name, checks in summary.items() if checks.passed and not checks.failed],
            "failedTests": [name for name, checks in summary.items() if checks.failed],
            # what other readers of this predicate leave out
            "title": report.title,
            "created": manifest.built.created if manifest.built else report.created,
            "reference": report.reference,
            "weights": {"sha256": manifest.weights_sha256, "from": manifest.weights_from},
            "implementation": report.implementation,
            "environment": manifest.environment_of_build,
            "summary": msgspec.to_builtins(summary),
        },
    }


def signed_statement(statement: dict[str, Any], key: Path) -> str:
    """A Sigstore bundle with an in-toto statement, as sign_artifact writes them. Raises UserError as KeySigner does."""
    return KeySigner(key).bundle(_payload(statement))


def _payload(statement: dict[str, Any]) -> bytes:
    return json.dumps(statement, sort_keys=True).encode()


class KeySigner:
    """Signs statements with a key.

    file: a private key, P-256, P-384 or P-521, in PEM; one with a password needs it in EFFEXPORT_KEY_PASSWORD.
    Raises UserError for another key.
    """

    provider: str | None = None

    def __init__(self, file: Path) -> None:
        self._key = _private_key(file)
        self.signed_by = _fingerprint(self._key.public_key())

    def bundle(self, payload: bytes) -> str:
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

        mark = self._key.sign(_encoded(payload), ECDSA(_hash(self._key.public_key())))
        signatures = [{"sig": base64.b64encode(mark).decode(), "keyid": ""}]
        envelope = {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": signatures,
        }
        material = {"publicKey": {"hint": self.signed_by}, "tlogEntries": []}
        bundle = {"mediaType": BUNDLE_TYPE, "verificationMaterial": material, "dsseEnvelope": envelope}
        return json.dumps(bundle) + "\n"


class KeyVerifier:
    """Checks bundles for the owner of a key. file: the public key in PEM. Raises UserError for another file."""

    provider: str | None = None

    def __init__(self, file: Path) -> None:
        self._key = _public_key(file)
        self.signed_by = _fingerprint(self._key)

    def payload(self, file: Path, values: dict[str, Any]) -> bytes:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

        bundle = record_from_values(values, _Bundle, str(file), REMEDY)
        envelope, hint = bundle.dsse_envelope, bundle.verification_material.public_key
        if hint is None:
            raise UserError(
                f"{file} was signed without a key; expected the key of the identity; for an identity of Sigstore, give "
                "--identity-provider"
            )
        if hint.hint != self.signed_by:
            raise UserError(
                f"{file} is of another key: the SHA-256 of its public key is {hint.hint[:64]!r}; expected "
                f"{self.signed_by}, that of the identity"
            )
        try:
            payload = base64.b64decode(envelope.payload, validate=True)
            mark = base64.b64decode(envelope.signatures[0].sig, validate=True)
            self._key.verify(mark, _encoded(payload), ECDSA(_hash(self._key)))
        except (ValueError, InvalidSignature) as error:
            problem = f"{file} was changed after it was signed: its signature does not match"
            raise UserError(f"{problem}; {REMEDY}") from error
        return payload


def _opened(file: Path, verifier: Verifier, predicate_type: str) -> _Statement:
    """The statement in a bundle, once its signature is checked. Raises UserError for any other file."""
    values = values_of_file(file, REMEDY)
    bundle = record_from_values(values, _Bundle, str(file), REMEDY)
    types = bundle.media_type, bundle.dsse_envelope.payload_type
    if types != (BUNDLE_TYPE, PAYLOAD_TYPE):
        raise UserError(f"{file} is a {bundle.media_type[:80]!r}; expected {BUNDLE_TYPE} with {PAYLOAD_TYPE}; {REMEDY}")
    payload = verifier.payload(file, values)
    statement = record_from_values(values_of_text(payload, file, REMEDY), _Statement, str(file), REMEDY)
    if (statement.type, statement.predicate_type) != (STATEMENT_TYPE, predicate_type):
        raise UserError(f"{file} states {statement.predicate_type[:80]!r}; expected {predicate_type}; {REMEDY}")
    return statement


def _encoded(payload: bytes) -> bytes:
    """The bytes that DSSE 1.0 signs, with the type and length of the payload."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _files(folder: Path) -> dict[str, Path]:
    """All files by name. Raises UserError for a link, which may lead elsewhere when the file is read."""
    for path in folder.rglob("*"):  # does not follow links
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is a link or no regular file; a signed artifact has regular files only")
    return files_of_folder(folder)


def _private_key(file: Path) -> EllipticCurvePrivateKey:
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data, password = _key_bytes(file, "a private key in PEM"), os.environ.get(PASSWORD_VARIABLE, "").encode()
    try:
        try:
            key = load_pem_private_key(data, None)
        except TypeError:  # it has a password
            if not password:
                raise UserError(f"{file} has a password; set {PASSWORD_VARIABLE} to it") from None
            key = load_pem_private_key(data, password)
    except (ValueError, UnsupportedAlgorithm) as error:
        problem = "is a public key" if b"PUBLIC KEY" in data else "cannot be read, or has another password"
        raise UserError(f"{file} {problem}; expected a private key in PEM, made with: {MAKE_KEY}") from error
    return _of_curve(key, file, MAKE_KEY)  # type: ignore[no-any-return]


def _public_key(file: Path) -> EllipticCurvePublicKey:
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _key_bytes(file, "a public key in PEM, or a name with --identity-provider")
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        problem = "is a private key" if b"PRIVATE KEY" in data else "cannot be read"
        raise UserError(f"{file} {problem}; expected a public key in PEM, made with: {PUBLIC_OF_KEY}") from error
    return _of_curve(key, file, f"{MAKE_KEY} && {PUBLIC_OF_KEY}")  # type: ignore[no-any-return]


def _key_bytes(file: Path, expected: str) -> bytes:
    try:
        return bounded_bytes(file, LARGEST_KEY)
    except (OSError, FileTooLargeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{file} cannot be read: {reason}; expected {expected}") from error


def _of_curve(key: Any, file: Path, command: str) -> Any:
    """Raises UserError for a key of another kind, or on another curve."""
    curve = getattr(getattr(key, "curve", None), "name", None)
    if curve not in HASHES:
        kind = f"on the curve {curve}" if curve else "no elliptic-curve key"
        raise UserError(f"{file} is {kind}; expected one on P-256, P-384 or P-521, made with: {command}")
    return key


def _hash(key: EllipticCurvePublicKey) -> HashAlgorithm:
    from cryptography.hazmat.primitives import hashes

    return getattr(hashes, HASHES[key.curve.name])()  # type: ignore[no-any-return]


def _fingerprint(key: EllipticCurvePublicKey) -> str:
    """SHA-256 of a public key in PEM, the hint of Model Signing."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _require_cryptography() -> None:
    """Raises MissingExtraError."""
    if importlib.util.find_spec("cryptography") is None:
        raise MissingExtraError("cryptography", "sign")
