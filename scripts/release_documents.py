#!/usr/bin/env python3
"""Writes what lies beside the wheels and the sdist of a release.

    SOURCE_DATE_EPOCH=… scripts/release_documents.py dist [--key key.pem]

SHA256SUMS, for sha256sum -c; effexport-VERSION.cdx.json, a bill of materials in CycloneDX 1.6; and
effexport-VERSION.intoto.json, an in-toto statement of provenance (SLSA 1.0): commit, date and tools. With a key it is
signed, in the form of model.sig (docs/security.md). The sdist is packed anew, because setuptools writes the time of day
into it. The same files always get the same documents.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import io
import os
import platform
import re
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any

from effexport.base.errors import EffexportError
from effexport.base.files import file_digest, json_text
from effexport.base.version import __version__
from effexport.plugins.building.build import find_headers
from effexport.report.card import bom_document, sha256_hash
from effexport.signature import STATEMENT_TYPE, signed_statement

ROOT = Path(__file__).resolve().parents[1]
PROVENANCE_TYPE = "https://slsa.dev/provenance/v1"
# no address: the commit says which script it was
BUILD_TYPE, BUILDER = "urn:effexport:release:1", "urn:effexport:scripts/release.sh"
TOOLS = ("build", "cmake", "ziglang")


def repack(sdist: Path, epoch: int) -> None:
    """Replace an sdist by one with the same files, in the order of their names, with one date and no owner."""
    with tarfile.open(sdist) as old:
        members = {member.name: (member, old.extractfile(member)) for member in old if member.isfile()}
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
            for name, (member, stream) in sorted(members.items()):
                same = tarfile.TarInfo(name)
                same.size, same.mtime, same.mode = member.size, epoch, 0o755 if member.mode & 0o100 else 0o644
                new.addfile(same, stream)
    sdist.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))


def bill_of_materials(digests: dict[str, str], created: str) -> dict[str, Any]:
    """Files with their digests; the packages that effexport needs, as constraints.txt has them; and what the kernel
    library has in it of others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [normalised(re.split(r"[<>=\[;]", requirement)[0]) for requirement in project["dependencies"]]
    component = {
        "type": "application",
        "bom-ref": "effexport",
        "name": "effexport",
        "version": __version__,
        "licenses": [{"license": {"id": project["license"]}}],
        "components": [
            {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": [sha256_hash(digest)]}
            for name, digest in digests.items()
        ],
    }
    versions = pinned_versions()
    libraries = [package(name, versions[name]) for name in names]
    libraries += [
        # its C++ runtime: libc++, libc++abi, libunwind and compiler-rt
        package("ziglang", versions["ziglang"], "Apache-2.0 WITH LLVM-exception"),
        library("onnxruntime-headers", f"1.{find_headers().api_version}", "MIT"),
    ]
    return bom_document(component, libraries, ",".join(digests.values()), created)


def library(name: str, version: str, expression: str = "") -> dict[str, Any]:
    licenses = {"licenses": [{"expression": expression}]} if expression else {}
    return {"type": "library", "bom-ref": f"library:{name}", "name": name, "version": version, **licenses}


def package(name: str, version: str, expression: str = "") -> dict[str, Any]:
    """A library with its address on the Python package index."""
    return library(name, version, expression) | {"purl": f"pkg:pypi/{name}@{version}"}


def pinned_versions() -> dict[str, str]:
    """Versions by distribution, in constraints.txt and release-requirements.txt."""
    files = (ROOT / "constraints.txt", ROOT / "scripts" / "release-requirements.txt")
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    return {normalised(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def normalised(distribution: str) -> str:
    """A name as the package index writes it."""
    return distribution.lower().replace("_", "-")


def provenance(digests: dict[str, str], commit: str, epoch: int) -> dict[str, Any]:
    """The in-toto statement: which files were made from which commit, and with what."""
    versions = pinned_versions()
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()],
        "predicateType": PROVENANCE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"commit": commit},
                "internalParameters": {"SOURCE_DATE_EPOCH": epoch, "python": platform.python_version()},
                "resolvedDependencies": [
                    {"name": "source", "digest": {"gitCommit": commit}},
                    *({"uri": f"pkg:pypi/{name}@{versions[name]}"} for name in TOOLS),
                    {"name": "headers of ONNX Runtime", "digest": {"sha256": find_headers().sha256}},
                ],
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--key", type=Path, help="a private elliptic-curve key in PEM")
    options = parser.parse_args()
    folder, epoch = options.folder, int(os.environ["SOURCE_DATE_EPOCH"])
    for sdist in folder.glob("*.tar.gz"):
        repack(sdist, epoch)
    digests = {path.name: file_digest(path) for path in sorted((*folder.glob("*.whl"), *folder.glob("*.tar.gz")))}
    created = datetime.datetime.fromtimestamp(epoch, datetime.UTC).isoformat(timespec="seconds")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    statement = provenance(digests, commit, epoch)
    documents = {
        "SHA256SUMS": "".join(f"{digest}  {name}\n" for name, digest in digests.items()),
        f"effexport-{__version__}.cdx.json": json_text(bill_of_materials(digests, created)),
        f"effexport-{__version__}.intoto.json": (
            signed_statement(statement, options.key) if options.key else json_text(statement)
        ),
    }
    for name, text in documents.items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    try:
        main()
    except EffexportError as error:
        raise SystemExit(f"error: {error}") from error
