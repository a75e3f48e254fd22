"""Pickles that cost much, or that describe tensors that cannot be, in an archive of torch.save or in its old format."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping

PROTOCOL = b"\x80\x02"
ORDERED_DICT, SIZE = b"ccollections\nOrderedDict\n", b"ctorch\nSize\n"
REBUILD, FLOATS = b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n"
# As large as a pickle may be.
MOST_BYTES = 4 << 20
# How many numbers the storage of a described tensor has.
NUMBERS = 4


def repeated(unit: bytes, before: bytes = b"", size: int = MOST_BYTES) -> bytes:
    """A pickle of the largest size, of one instruction or a few, again and again."""
    count = (size - len(before) - 3) // len(unit)
    return PROTOCOL + before + unit * count + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def reference(count: int = NUMBERS, kind: bytes = FLOATS, end: bytes = b"") -> bytes:
    """The reference to a storage of the file; in the old format, with None at its end."""
    return b"(" + text("storage") + kind + text("0") + text("cpu") + number(count) + end + b"t"


def described(
    shape: bytes, strides: bytes, offset: int = 0, *, count: int = NUMBERS, kind: bytes = FLOATS, flags: bytes = b""
) -> bytes:
    """The pickle of a state_dict with one tensor."""
    view = REBUILD + b"(" + reference(count, kind) + b"Q" + number(offset) + shape + strides
    return PROTOCOL + b"}" + text("weight") + view + b"\x89" + ORDERED_DICT + b")R" + flags + b"tRs."


# What one instruction, or a few, cost if nobody counts them.
BOMBS = {
    "marks": repeated(b"("),
    "nothing": repeated(b"N"),
    "lists": repeated(b"]"),
    "dicts": repeated(b"}"),
    "tuples in tuples": repeated(b"\x85", b")"),
    "empty tuples": repeated(b"(t"),
    "no items": repeated(b"(u", b"}"),
    "no elements": repeated(b"(e", b"]"),
    "memo": repeated(b"q\x00", b"N"),
    "large places in the memo": PROTOCOL
    + b"N"
    + b"".join(b"r" + struct.pack("<I", n << 12) for n in range(700_000))
    + b".",
    "long integers": repeated(b"\x8a\xff" + b"\x7f" * 255),
    "a text of many digits": PROTOCOL + b"L" + b"9" * 4_000_000 + b"L\n.",
    "a text that is not there": PROTOCOL + b"X\xff\xff\xff\xff.",
    "bytes that are not there": PROTOCOL + b"\x8e" + b"\x7f" * 8 + b".",
    "empty texts": repeated(text("")),
    "ordered dicts": repeated(b"h\x00)R", ORDERED_DICT + b"q\x00"),
    "a long list, again and again": repeated(
        b"h\x01h\x02R", ORDERED_DICT + b"q\x01(](" + b"](KKKKe" * 50_000 + b"e\x85q\x02"
    ),
    "a long shape, again and again": repeated(
        b"h\x01h\x02R", REBUILD + b"q\x01(" + reference() + b"QK\x00(" + b"K\x01" * 500_000 + b"tq\x03h\x03\x89Ntq\x02"
    ),
    "storages": repeated(b"h\x00Q", reference() + b"q\x00"),
    "tensors": repeated(
        b"h\x01h\x02R", REBUILD + b"q\x01(" + reference() + b"QK\x00" + numbers(4) + numbers(1) + b"\x89Ntq\x02"
    ),
    "a key that is deep": PROTOCOL + b"})" + b"\x85" * 1_000_000 + b"Ns.",
    "a key that doubles": PROTOCOL + b"}Nq\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"Ns.",
    "keys with one hash": PROTOCOL
    + b"}("
    + b"".join(b"\x8a\x0a" + (n * (2**61 - 1) + 5).to_bytes(10, "little") + b"N" for n in range(1, 200_000))
    + b"u.",
    "a name without an end": PROTOCOL + b"c" + b"a" * 4_000_000,
    "no end": repeated(b"K\x01")[:-1],
}
# Tensors that cannot be, by what is said about them.
VIEWS = {
    "reaches beyond": {
        "too long": described(numbers(5), numbers(1)),
        "too late": described(numbers(4), numbers(1), 1),
        "too sparse": described(numbers(2), numbers(4)),
        "terabytes": described(numbers(2**40), numbers(2**40)),
        "a product that overflows": described(numbers(2**32, 2**32), numbers(2**32, 1)),
    },
    "cut off or damaged": {
        "backwards": described(numbers(4), numbers(-1), 3),
        "before its storage": described(numbers(4), numbers(1), -1),
        "less than nothing": described(numbers(-4), numbers(1)),
        "an endless stride": described(numbers(2), numbers(2**63 - 1)),
        "fewer strides": described(numbers(2, 2), numbers(1)),
        "truth for a size": described(b"\x88\x85", b"\x88\x85"),
        "a text for a size": described(text("4") + b"\x85", numbers(1)),
        "a list of sizes": described(b"]K\x04a", numbers(1)),
        "more dimensions than PyTorch has": described(numbers(*[1] * 65), numbers(*[1] * 65)),
        "fewer numbers than none": described(numbers(4), numbers(1), count=-4),
    },
    "overflow": {"endless without strides": described(numbers(2**40, 2**40), numbers(0, 0))},
    "not as long as": {
        "a longer storage": described(numbers(4), numbers(1), count=5),
        "a shorter storage": described(numbers(2), numbers(1), count=2),
    },
    "more than tensors": {"quantised": described(numbers(4), numbers(1), kind=b"ctorch\nQInt8Storage\n")},
    "in another form": {"negated": described(numbers(4), numbers(1), flags=b"}" + text("neg") + b"\x88s")},
}


def archive_of(pickled: bytes, records: Mapping[str, bytes] | None = None) -> bytes:
    """The archive that torch.save makes of a pickle and the storages that it refers to."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("model/data.pkl", pickled)
        for key, data in ({"0": bytes(4 * NUMBERS)} if records is None else records).items():
            archive.writestr(f"model/data/{key}", data)
    return stream.getvalue()


def old_file_of(pickled: bytes) -> bytes:
    """The same in the format before 2020."""
    facts = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True}]
    before = b"".join(pickle.dumps(fact, 2) for fact in facts)
    data = struct.pack("<q", NUMBERS) + bytes(4 * NUMBERS)
    return before + pickled.replace(b"tQ", b"NtQ") + pickle.dumps(["0"], 2) + data


FORMS = {"archive": archive_of, "old": old_file_of}
