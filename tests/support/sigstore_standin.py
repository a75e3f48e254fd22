"""A small Sigstore on localhost: a provider of identities, Fulcio with its log of certificates, and Rekor.

The real library talks to it, to sign and to verify. Formats: RFC 6962 for timestamps of certificates and for the Merkle
tree, Fulcio's profile of certificates, Rekor's API v1, and signed notes for the checkpoints of the log.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import secrets
import struct
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlencode, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

START = "2020-01-01T00:00:00Z"
ISSUER_V1, ISSUER_V2, TIMESTAMPS = (
    x509.ObjectIdentifier(number)
    for number in ("1.3.6.1.4.1.57264.1.1", "1.3.6.1.4.1.57264.1.8", "1.3.6.1.4.1.11129.2.4.2")
)
USAGES = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
USAGES += ("digital_signature", "key_cert_sign", "crl_sign", "decipher_only")


def text64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def der(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def id_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(der(key)).digest()


def sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(SHA256()))


def usage(*names: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in names for name in USAGES})


def node(*hashes: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + b"".join(hashes)).digest()


def split(leaves: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return leaves[:half], leaves[half:]


def tree_hash(leaves: list[bytes]) -> bytes:
    """RFC 6962, 2.1, of the hashes of the leaves."""
    return leaves[0] if len(leaves) == 1 else node(*map(tree_hash, split(leaves)))


def path_to(index: int, leaves: list[bytes]) -> list[bytes]:
    """RFC 6962, 2.1.1."""
    if len(leaves) == 1:
        return []
    left, right = split(leaves)
    if index < len(left):
        return [*path_to(index, left), tree_hash(right)]
    return [*path_to(index - len(left), right), tree_hash(left)]


class Sigstore:
    """The services, as long as the context lasts.

    name: of its authority. late: seconds between the certificate and the entry of the log. down: a service that
    answers 503: "signingCert" or "entries". Who opens a browser, or runs in a workflow, is `visitor` of `issuer`.
    """

    visitor, issuer = "ada@example.org", "https://accounts.example.org"

    def __init__(self, name: str = "ours") -> None:
        self.late, self.down = 0, ""
        self.root_key, self.authority_key, self.certificate_log_key, self.log_key = (
            ec.generate_private_key(ec.SECP256R1()) for _ in range(4)
        )
        self.root = self.authority_of(f"{name} root", None)
        self.authority = self.authority_of(name, self.root)
        self.tokens: set[str] = set()
        # entries of others, before and after ours, so that proofs have hashes of both sides
        self.leaves = [hashlib.sha256(bytes([number])).digest() for number in range(5)]

    def __enter__(self) -> Sigstore:
        services = self

        class Handler(Requests):
            sigstore = services

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def token(self, identity: str = visitor, issuer: str = issuer, **claims: Any) -> str:
        """A token of OpenID Connect, which Fulcio takes; its signature is not made."""
        now = int(time.time())
        all_claims = {"aud": "sigstore", "sub": identity, "iss": issuer, "iat": now, "exp": now + 600} | claims
        parts = (json.dumps(part).encode() for part in ({"alg": "ES256", "typ": "JWT"}, all_claims))
        token = ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), "c2ln"])
        self.tokens.add(token)
        return token

    def trust_config(self) -> dict[str, Any]:
        """The ClientTrustConfig of this instance."""

        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            public = {"rawBytes": text64(der(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": valid}
            log_id = {"keyId": text64(id_of(key))}
            return {"baseUrl": self.url, "hashAlgorithm": "SHA2_256", "publicKey": public, "logId": log_id}

        valid = {"start": START}
        chain = [{"rawBytes": text64(one.public_bytes(Encoding.DER))} for one in (self.authority, self.root)]
        subject = {"organization": "stand-in", "commonName": "authority"}
        authority = {"subject": subject, "certChain": {"certificates": chain}, "validFor": valid}
        service = {"url": self.url, "majorApiVersion": 1, "validFor": valid, "operator": "stand-in"}
        return {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [log(self.log_key)],
                "certificateAuthorities": [authority],
                "ctlogs": [log(self.certificate_log_key)],
            },
            "signingConfig": {
                "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
                **{f"{name}Urls": [service] for name in ("ca", "oidc", "rekorTlog")},
                **{f"{name}Config": {"selector": "ANY"} for name in ("rekorTlog", "tsa")},
            },
        }

    def authority_of(self, name: str, issuer: x509.Certificate | None) -> x509.Certificate:
        """The root, or with one as issuer, the authority below it."""
        key = self.authority_key if issuer else self.root_key
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        start = datetime.datetime.fromisoformat(START)
        public, root = key.public_key(), self.root_key.public_key()
        builder = (
            x509.CertificateBuilder(issuer.subject if issuer else subject, subject, public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + datetime.timedelta(days=36500))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0 if issuer else 1), critical=True)
            .add_extension(usage("key_cert_sign", "crl_sign"), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root), critical=False)
        )
        return builder.sign(self.root_key, SHA256())

    def certificate(self, public: Any, identity: str, issuer: str) -> x509.Certificate:
        """The certificate that Fulcio issues, with a timestamp of the log of certificates: RFC 6962, 3.2 and 3.3."""
        now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=1)
        name = x509.RFC822Name(identity) if "@" in identity else x509.UniformResourceIdentifier(identity)
        v2 = b"\x0c" + bytes([len(issuer)]) + issuer.encode()  # UTF8String
        builder = (
            x509.CertificateBuilder(self.authority.subject, x509.Name([]), public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now)
            .not_valid_after(now + datetime.timedelta(minutes=10))
            .add_extension(usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority_key.public_key()), critical=False
            )
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(x509.UnrecognizedExtension(ISSUER_V1, issuer.encode()), critical=False)
            .add_extension(x509.UnrecognizedExtension(ISSUER_V2, v2), critical=False)
        )
        body = builder.sign(self.authority_key, SHA256()).tbs_certificate_bytes
        moment = int(time.time() * 1000)
        entry = id_of(self.authority_key) + len(body).to_bytes(3) + body
        mark = sign(self.certificate_log_key, struct.pack("!BBQH", 0, 0, moment, 1) + entry + b"\0\0")
        # version, log, time, no extensions, SHA-256 with ECDSA, signature
        stamp = b"\0" + id_of(self.certificate_log_key) + struct.pack("!QHBBH", moment, 0, 4, 3, len(mark)) + mark
        stamps = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        octets = b"\x04" + (bytes([len(stamps)]) if len(stamps) < 128 else b"\x81" + bytes([len(stamps)])) + stamps
        return builder.add_extension(x509.UnrecognizedExtension(TIMESTAMPS, octets), critical=False).sign(
            self.authority_key, SHA256()
        )

    def logged(self, proposed: dict[str, Any]) -> dict[str, Any]:
        """Rekor's answer to a proposed entry of the kind dsse, 0.0.1."""
        content = proposed["spec"]["proposedContent"]
        envelope = json.loads(content["envelope"])
        digests = (content["envelope"].encode(), base64.b64decode(envelope["payload"]))
        hashes = [{"algorithm": "sha256", "value": hashlib.sha256(data).hexdigest()} for data in digests]
        signatures = [{"signature": envelope["signatures"][0]["sig"], "verifier": content["verifiers"][0]}]
        spec = {"envelopeHash": hashes[0], "payloadHash": hashes[1], "signatures": signatures}
        body = json.dumps({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec}, separators=(",", ":")).encode()
        index = len(self.leaves)
        self.leaves += hashlib.sha256(b"\0" + body).digest(), secrets.token_bytes(32)
        size, root = len(self.leaves), tree_hash(self.leaves)
        entry = {
            "body": text64(body),
            "integratedTime": int(time.time()) + self.late,
            "logID": id_of(self.log_key).hex(),
            "logIndex": index,
        }
        note = f"stand-in\n{size}\n{text64(root)}\n"
        mark = text64(id_of(self.log_key)[:4] + sign(self.log_key, note.encode()))
        proof = {
            "logIndex": index,
            "rootHash": root.hex(),
            "treeSize": size,
            "hashes": [one.hex() for one in path_to(index, self.leaves)],
            "checkpoint": f"{note}\n— stand-in {mark}\n",
        }
        promise = sign(self.log_key, json.dumps(entry, sort_keys=True, separators=(",", ":")).encode())
        return {
            secrets.token_hex(32): entry
            | {"verification": {"signedEntryTimestamp": text64(promise), "inclusionProof": proof}}
        }


class Requests(BaseHTTPRequestHandler):
    """One request to one of the services."""

    sigstore: ClassVar[Sigstore]

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests free of requests."""

    def answer(self, values: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(values).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        where, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        url = self.sigstore.url
        if where.path == "/.well-known/openid-configuration":
            self.answer({"authorization_endpoint": f"{url}/auth", "token_endpoint": f"{url}/token"})
        elif where.path == "/auth":  # whoever comes is the visitor
            back = urlencode({"code": "one", "state": query["state"][0]})
            self.answer({}, 302, Location=f"{query['redirect_uri'][0]}?{back}")
        elif where.path == "/ambient" and query["audience"] == ["sigstore"]:
            self.answer({"value": self.sigstore.token()})
        else:
            self.answer({}, 404)

    def do_POST(self) -> None:
        sigstore, service = self.sigstore, self.path.rpartition("/")[2]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if service == sigstore.down:
            self.answer({}, 503)
        elif service == "token":
            self.answer({"access_token": sigstore.token()})
        elif service == "entries":
            self.answer(sigstore.logged(json.loads(body)), 201)
        elif service == "signingCert" and token in sigstore.tokens:
            request = x509.load_pem_x509_csr(base64.b64decode(json.loads(body)["certificateSigningRequest"]))
            part = token.split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
            # as Fulcio does of a workflow, whose `sub` is none of its names
            identity = claims.get("job_workflow_ref", claims["sub"])
            leaf = sigstore.certificate(request.public_key(), identity, claims["iss"])
            chain = [one.public_bytes(Encoding.PEM).decode() for one in (leaf, sigstore.authority, sigstore.root)]
            self.answer({"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}})
        else:
            self.answer({"message": "the token is of another provider"}, 401)
