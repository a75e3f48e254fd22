"""Signatures without a key of one's own, by Sigstore (docs/security.md).

An OpenID Connect provider confirms who somebody is. Fulcio certifies a key for that identity, which lives for minutes,
and Rekor, a public log, confirms when it signed. The bundle keeps the certificate and the entry of the log, so that it
is checked offline. The package `sigstore` signs and checks; what it raises becomes one error here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from effexport.base.errors import EffexportError, MissingExtraError, UserError
from effexport.base.option_fields import A_FILE, Options, option, path_of
from effexport.base.records import values_of_file
from effexport.base.runtimes import version_tuple

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from sigstore.models import ClientTrustConfig
    from sigstore.sign import Signer

# The extension of a certificate with the provider that confirmed the identity: Fulcio's docs/oid-info.md.
ISSUER = "1.3.6.1.4.1.57264.1.1"
OLDEST = (4, 2)  # earlier releases do not compare the state of what a browser brings back
PAYLOAD_TYPE = "application/vnd.in-toto+json"
REMEDY = "ask its publisher for it again"
TOKEN_VARIABLE = "SIGSTORE_IDENTITY_TOKEN"  # as the command of the package `sigstore` has it
TRUST_CONFIG = "Of a private Sigstore: its roots and services."


def as_given(text: str, flag: str) -> str:
    """The text itself: a path of it would have one / in place of the two in a URL."""
    return text


@dataclass(frozen=True, kw_only=True)
class IdentityOptions(Options):
    """The signer that an artifact must have: the owner of a key, or with a provider, an identity that it confirmed."""

    identity: str | Path | None = option(
        None, "Who must have signed: a public key, or a name.", metavar="WHO", read=as_given
    )
    identity_provider: str | None = option(None, "Who confirmed that name, to Sigstore.", metavar="URL")
    trust_config: str | Path | None = option(None, TRUST_CONFIG, metavar=A_FILE)

    def keyless(self) -> bool:
        """True if the identity is one of Sigstore. Raises UserError for options that do not belong together."""
        if self.identity is None and (self.identity_provider, self.trust_config) != (None, None):
            raise UserError("--identity-provider and --trust-config say how an identity is checked, but there is none")
        if self.identity_provider is None and self.trust_config is not None:
            raise UserError("--trust-config is of Sigstore; expected --identity-provider, too, or neither for a key")
        if self.identity_provider is not None and not (self.identity_provider and self.identity):
            raise UserError("the identity or its provider is empty; expected such as ada@example.org and a URL")
        return self.identity_provider is not None

    def absolute(self) -> Self:
        """The same for a process in another folder: with absolute paths of files. Raises as `keyless`."""
        names = ("trust_config",) if self.keyless() else ("identity",)
        given = {name: getattr(self, name) for name in names}
        files: dict[str, Any] = {name: Path(file).resolve() for name, file in given.items() if file is not None}
        return replace(self, **files)


class KeylessSigner:
    """Signs statements with one certificate of Sigstore.

    token: of OpenID Connect. Without one, the credential of the surroundings is used, such as that of a workflow on
    GitHub, or a browser is opened. trust_config: of a private instance; otherwise the public one is used.
    Raises MissingExtraError; UserError for a token or file that is not one; EffexportError if a service refuses.
    """

    signed_by: str
    provider: str | None

    def __init__(self, token: str | None, trust_config: Path | None) -> None:
        self._token = token
        self._config = _trust_config(trust_config, offline=False)
        # of the certificate, once there is one: tokens name a workflow otherwise
        self.signed_by, self.provider = "", None

    @cached_property
    def _signer(self) -> Signer:
        """The certificate, which publishes the identity: only once there is something to sign."""
        from sigstore.oidc import IdentityToken, Issuer, detect_credential
        from sigstore.sign import Signer, SigningContext

        with _one_error(UserError, "there is no identity to sign with", "give another one with --identity-token"):
            raw = self._token or detect_credential()
            identity = IdentityToken(raw) if raw else None
        # the library asks for a code on stdout if there is no browser
        with (
            _one_error(EffexportError, "the provider confirmed no identity", "give one with --identity-token"),
            redirect_stdout(sys.stderr),
        ):
            identity = identity or Issuer(self._config.signing_config.get_oidc_url()).identity_token()
        with _one_error(EffexportError, "Sigstore gave no certificate", "nothing was signed"):
            return Signer(identity, SigningContext.from_trust_config(self._config))

    def bundle(self, payload: bytes) -> str:
        """A Sigstore bundle with an in-toto statement. Raises as the class says."""
        from sigstore.dsse import Statement

        signer = self._signer
        with _one_error(EffexportError, "Sigstore made no signature", "nothing was signed"):
            made = signer.sign_dsse(Statement(payload))
            self.signed_by, self.provider = _certified(made.signing_certificate)
            return made.to_json() + "\n"


def _certified(certificate: Certificate) -> tuple[str, str]:
    """The identity in a certificate of Fulcio, and who confirmed it, as the library compares them."""
    from cryptography.x509 import OtherName, SubjectAlternativeName, UnrecognizedExtension

    name = next(iter(certificate.extensions.get_extension_for_class(SubjectAlternativeName).value))
    identity = name.value.decode() if isinstance(name, OtherName) else str(name.value)
    issuer = next(one.value for one in certificate.extensions if one.oid.dotted_string == ISSUER)
    assert isinstance(issuer, UnrecognizedExtension)
    return identity, issuer.value.decode()


class KeylessVerifier:
    """Checks bundles for an identity. Raises MissingExtraError; UserError for a file that is not a configuration."""

    def __init__(self, options: IdentityOptions) -> None:
        trust_config = None if options.trust_config is None else path_of("trust_config", options.trust_config)
        config = _trust_config(trust_config, offline=True)
        from sigstore.verify import Verifier
        from sigstore.verify.policy import Identity

        with _one_error(UserError, "the roots of Sigstore cannot be used", "expected its ClientTrustConfig"):
            self._verifier = Verifier(trusted_root=config.trusted_root)
        self._policy = Identity(identity=str(options.identity), issuer=options.identity_provider)
        self.signed_by, self.provider = str(options.identity), options.identity_provider

    def payload(self, file: Path, values: dict[str, Any]) -> bytes:
        """The statement in a bundle. Raises UserError unless the identity signed it, and the log has that."""
        from sigstore.models import Bundle

        if "certificate" not in values["verificationMaterial"]:
            raise UserError(
                f"{file} was signed with a key; expected the signature of {self.signed_by}; leave out "
                "--identity-provider and give the public key"
            )
        with _one_error(UserError, f"{file} is not confirmed to be signed by {self.signed_by}", REMEDY):
            kind, payload = self._verifier.verify_dsse(Bundle.from_json(json.dumps(values)), self._policy)
            if kind != PAYLOAD_TYPE:
                raise ValueError(f"it signs a {kind[:80]!r}")
            return payload


def _trust_config(file: Path | None, *, offline: bool) -> ClientTrustConfig:
    """The roots and services in a file, or of the public instance: renewed, or `offline`, as they were last known."""
    if importlib.util.find_spec("sigstore") is None:
        raise MissingExtraError("sigstore", "sign")
    version = importlib.metadata.version("sigstore")
    if version_tuple(version) < OLDEST:
        raise UserError(
            f"sigstore {version} is installed; expected {'.'.join(map(str, OLDEST))} or later: "
            "pip install 'effexport[sign]'"
        )
    from sigstore.models import ClientTrustConfig

    if file is None:
        logger = logging.getLogger("sigstore._internal.tuf")  # it warns of being offline
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            with _one_error(
                EffexportError, "the roots of Sigstore cannot be read", "try again, or give --trust-config"
            ):
                return ClientTrustConfig.production(offline=offline)
        finally:
            logger.setLevel(level)
    expected = "expected a ClientTrustConfig of Sigstore"
    values = values_of_file(file, expected)
    with _one_error(UserError, f"{file} cannot be used", expected):
        return ClientTrustConfig.from_json(json.dumps(values))


@contextmanager
def _one_error(kind: type[EffexportError], problem: str, remedy: str) -> Iterator[None]:
    """Make one error of whatever the library raises: a damaged bundle reaches all packages below it."""
    try:
        yield
    except Exception as error:
        causes = (str(one).strip() for one in (error, error.__cause__, error.__context__) if one is not None)
        reason = " ".join(next(filter(None, causes), type(error).__name__).split())[:300]
        raise kind(f"{problem}: {reason}; {remedy}") from error
