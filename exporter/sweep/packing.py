"""Transfer of an artifact from a node to the folder of the sweep, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from effexport.errors import EffexportError

PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Piece:
    """The next bytes of a file. Files are sent one after the other, each from its start."""

    name: str
    data: bytes


def pieces_of_folder(folder: Path, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Every file, in pieces of at most `piece_bytes`. An empty file is one empty piece."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        with path.open("rb") as stream:
            data = stream.read(piece_bytes)
            yield Piece(name, data)
            while data := stream.read(piece_bytes):
                yield Piece(name, data)


@dataclass
class Unpacking:
    """A receiver that writes pieces into `folder`. expected: size in bytes by name; other files are refused.

    A node is trusted to compute, but not to choose where its files go.
    """

    folder: Path
    expected: Mapping[str, int]
    _sizes: dict[str, int] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        """Raises EffexportError for a file that was not announced, lies outside, or is longer than announced."""
        path = PurePosixPath(piece.name)
        size = self._sizes.get(piece.name, 0) + len(piece.data)
        if path.is_absolute() or ".." in path.parts or piece.name not in self.expected:
            raise EffexportError(f"a node sent the file {piece.name!r}, which is not part of the artifact it announced")
        if size > self.expected[piece.name]:
            raise EffexportError(f"a node sent {size} bytes of {piece.name}; it announced {self.expected[piece.name]}")
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as stream:
            stream.write(piece.data)
        self._sizes[piece.name] = size

    def finish(self) -> None:
        """Raises EffexportError if something is missing."""
        missing = [name for name, size in self.expected.items() if self._sizes.get(name) != size]
        if missing:
            raise EffexportError(f"a node sent an incomplete artifact; missing or incomplete: {', '.join(missing)}")
