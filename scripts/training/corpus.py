"""Real text from Debian packages: what language models are trained on, and what they are judged on."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from effexport.tasks.task import BYTE_OFFSET

# Documentation of Perl and a book; the held-out text is by other authors, about something else.
TRAINING, HELD_OUT = ("perl-doc", "anarchism"), "debian-policy"


@dataclass(frozen=True)
class Corpus:
    """training, held_out: tokens. sha256: of the text of both."""

    training: NDArray[np.int64]
    held_out: NDArray[np.int64]
    sha256: str


def corpus(folder: Path) -> Corpus:
    """The text of the packages, which are downloaded into `folder` once. Needs apt-get and dpkg-deb."""
    training = b"".join(text for package in TRAINING for text in texts_of(unpacked(package, folder)))
    held_out = b"".join(texts_of(unpacked(HELD_OUT, folder)))
    digest = hashlib.sha256(training + held_out).hexdigest()
    return Corpus(tokens_of(training), tokens_of(held_out), digest)


def tokens_of(text: bytes) -> NDArray[np.int64]:
    return np.frombuffer(text, np.uint8).astype(np.int64) + BYTE_OFFSET


def unpacked(package: str, folder: Path) -> Path:
    """The files of a Debian package, in a folder of its own."""
    target = folder / package
    if target.is_dir():
        return target
    print(f"downloading the Debian package {package} and unpacking it into {target}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "--quiet", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob(f"{package}_*.deb")
    unfinished = folder / f"{package}.unfinished"
    subprocess.run(["dpkg-deb", "-x", archive, unfinished], check=True)
    unfinished.rename(target)
    archive.unlink()
    return target


def texts_of(folder: Path) -> Iterator[bytes]:
    """All texts below a folder, in the order of their paths: POD, text and HTML without its tags."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or "changelog" in path.name:
            continue
        if path.suffix == ".pod" or path.name.endswith((".pod.gz", ".txt.gz")):
            data = path.read_bytes()
            yield gzip.decompress(data) if path.suffix == ".gz" else data
        elif path.suffix == ".html" and folder.name == "anarchism":
            yield text_of_html(path.read_text(errors="replace")).encode()


def text_of_html(page: str) -> str:
    parser = TextParser()
    parser.feed(page)
    return "".join(parser.parts)


class TextParser(HTMLParser):
    """Collects what stands between tags."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)
