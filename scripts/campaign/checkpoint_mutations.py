"""Changes of checkpoint folders and spec files. Each returns what was changed, in words."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from campaign.pickles import BOMBS, FORMS, VIEWS
from campaign.strange import STRANGE, any_number_of_digits, damage, mutated_json, text_of

HUGE = (10**9, 10**9 + 1, 10**9 + 8, 2**30, 2**31 - 1, 2**31, 2**40, 10**18, 10**30, 10**5000)
SIZES = (*HUGE, *HUGE, -1, 0, 1, 2, 3, 7, 64, 999, 100_000)
OF_ALL = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("pad_token_id", "num_labels"),
)
OF_BERT = (*OF_ALL, "type_vocab_size", "intermediate_size", "layer_norm_eps")
# Sizes of all families, also those that a config.json leaves at their defaults.
FIELDS = {
    "big_bird": (*OF_BERT, "block_size", "num_random_blocks", "attention_type", "sep_token_id", "use_bias"),
    "longformer": (*OF_BERT, "attention_window", "sep_token_id"),
    "modernbert": (
        *(*OF_ALL, "intermediate_size", "norm_eps", "local_attention", "global_attn_every_n_layers"),
        *("global_rope_theta", "local_rope_theta", "classifier_pooling", "attention_bias", "mlp_bias"),
    ),
    "nystromformer": (*OF_BERT, "segment_means_seq_len", "num_landmarks", "conv_kernel_size"),
    "reformer": (
        *(*OF_ALL, "attention_head_size", "feed_forward_size", "lsh_attn_chunk_length", "local_attn_chunk_length"),
        *("num_hashes", "num_buckets", "lsh_num_chunks_before", "local_num_chunks_after", "hash_seed"),
        *("axial_pos_shape", "axial_pos_embds_dim", "attn_layers", "layer_norm_eps"),
    ),
}
# Many bytes of JSON, made without a parser.
LARGE = 100 << 20
SHARDS = ("model-1.safetensors", "model-2.safetensors")
PLACES = ("../model.safetensors", "/etc/passwd", "", ".", "..", "a/b", "\u0000", "x" * 5000, "\ud800", "loop", "folder")


# Element types that no checkpoint should have.
DTYPES = (torch.int32, torch.bool, torch.complex64, torch.float64, torch.bfloat16, torch.float8_e4m3fn)
# Instructions of pickles, for a pickle that has them where others were.
INSTRUCTIONS = b"(.)]}KMJXUGNQRabcehjqrstu\x85\x86\x87\x88\x89\x8a\x8b\x93\x94\x95"


class Runs:
    """A call that an unpickler would run."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def edited(path: Path, dice: random.Random, ways: Sequence[str], change: Callable[[dict[str, Any], str], str]) -> str:
    """Change a JSON file in one of these ways: those of any such file, or those of `change`, which says what it did."""
    how = dice.choice(ways)
    if how == "damage":
        return damage(path, dice)
    if how == "large":
        return large_json(path, dice)
    values = json.loads(path.read_text())
    if how == "any":
        values, words = mutated_json(values, dice)
    else:
        words = change(values, how)
    path.write_text(text_of(values))
    return f"{path.name}: {words}"


def config(folder: Path, dice: random.Random) -> str:
    """One or more fields of config.json."""

    def change(values: dict[str, Any], how: str) -> str:
        if how == "consistent":
            return consistent_sizes(values, dice)
        names = dice.sample(FIELDS[values["model_type"]], 1 if how == "size" else dice.randint(2, 4))
        for name in names:
            values[name] = wild_size(values.get(name), dice)
        return ", ".join(f"{name} {shown(values[name])}" for name in names)

    ways = ("size", "size", "size", "size", "sizes", "any", "any", "consistent", "damage", "large")
    return edited(folder / "config.json", dice, ways, change)


def wild_size(value: Any, dice: random.Random) -> Any:
    """A wild value of the same shape: an integer, or a list of as many."""
    if isinstance(value, list) and dice.random() < 0.8:
        items = [dice.choice(SIZES) if dice.random() < 0.6 else item for item in value]
        times = dice.choice((1, 1, 1, 50_000))
        # not gigabytes of digits
        return items * (times if 10**5000 not in items else 1)
    return dice.choice(SIZES) if dice.random() < 0.8 else dice.choice(STRANGE)


def consistent_sizes(values: dict[str, Any], dice: random.Random) -> str:
    """Sizes that agree with each other, up to what a machine may just have."""
    factor = dice.choice((2, 3, 1000, 10**5, 10**6, 10**7))
    if values["model_type"] != "reformer":
        names = ["hidden_size", "intermediate_size"]
        values["hidden_size"] *= factor
        values["intermediate_size"] *= factor
    else:
        names = ["hidden_size", "axial_pos_embds_dim"]
        values["hidden_size"] *= factor
        values["axial_pos_embds_dim"] = [factor * dim for dim in values["axial_pos_embds_dim"]]
    return f"{', '.join(names)} × {factor}"


def large_json(path: Path, dice: random.Random) -> str:
    """A file that is far too large or too deeply nested."""
    before, repeated, count, after = dice.choice(
        (
            ('{"x":[', "[],", LARGE // 3, "0]}"),
            ('{"x":"', "a", LARGE, '"}'),
            ('{"x":', "[", 100_000, ""),
            ('{"x":', "9", 100_000, "}"),
        )
    )
    path.write_text(before + repeated * count + after)
    return f"{path.name} with {count:,} × {repeated}"


def safetensors(folder: Path, dice: random.Random) -> str:
    """The header of model.safetensors, which may tell anything about the bytes behind it."""
    path = folder / "model.safetensors"
    if not path.is_file():
        return index(folder, dice)
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name, other = dice.sample(names, 2)
    entry = header[name]
    ways = (
        "shape",
        "shape",
        "dtype",
        "offsets",
        "overlap",
        "rename",
        "more",
        "remove",
        "length",
        "twice",
        "any",
        "sparse",
    )
    how = dice.choice((*ways, "damage"))
    text = None
    if how == "damage":
        return damage(path, dice)
    if how == "shape":
        entry["shape"] = dice.choice(
            (entry["shape"][::-1], [*entry["shape"], 1], [dice.choice(SIZES)], [2**40, 2**40], [], [-1], [0, 10**9])
        )
    elif how == "dtype":
        entry["dtype"] = dice.choice(
            ("F64", "F16", "BF16", "I32", "U32", "BOOL", "I64", "F8_E4M3", "C64", "F4", "", "X")
        )
    elif how == "offsets":
        entry["data_offsets"] = dice.choice(([0, 2**40], [2**63, 2**63 + 4], [8, 4], [-4, 0], [0], [], "x", None))
    elif how == "overlap":
        entry["data_offsets"] = header[other]["data_offsets"]
    elif how == "rename":
        header[dice.choice(("", "x" * 5000, "\n\x1b[2J", "\u0000", other + ".x", "__metadata__"))] = header.pop(name)
    elif how == "more":
        header["extra"] = {"dtype": "F32", "shape": [0, 10**9], "data_offsets": [0, 0]}
    elif how == "remove":
        del header[name]
    elif how == "twice":
        text = text_of(header).rstrip()[:-1] + f', "{name}": {text_of(entry)}}}'
    elif how == "any":
        header, words = mutated_json(header, dice)
        how += " " + words
    elif how == "sparse":
        # 2 TB that take no room on the disk
        header = {name: {"dtype": "F32", "shape": [2**39], "data_offsets": [0, 2**41]}}
    encoded = (text_of(header) if text is None else text).encode()
    claimed = dice.choice((0, 1, 2**20, 2**31, 2**63, 2**64 - 1)) if how == "length" else len(encoded)
    path.write_bytes(struct.pack("<Q", claimed) + encoded + body)
    if how == "sparse":
        with contextlib.suppress(OSError):
            os.truncate(path, 8 + len(encoded) + 2**41)
    return f"{how} of {name}"


def index(folder: Path, dice: random.Random) -> str:
    """An index of shards, made from the single file if there is none."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        make_shards(folder, dice)

    def change(values: dict[str, Any], how: str) -> str:
        places = values["weight_map"]
        name = dice.choice(list(places))
        if how == "place":
            places[name] = dice.choice(PLACES)
            if places[name] == "loop":
                (folder / "loop").symlink_to("loop")
            elif places[name] == "folder":
                (folder / "folder").mkdir()
            return f"place {places[name][:20]!r}"
        if how == "ghost":
            places["ghost\n" * 100] = "model-1.safetensors"
        elif how == "swap":
            places[name] = dict(zip(SHARDS, SHARDS[::-1], strict=True)).get(places[name], SHARDS[0])
        return how

    if dice.random() < 1 / 9:
        return damage(folder / SHARDS[0], dice)
    ways = ("place", "place", "any", "ghost", "damage", "large", "swap", "none")
    return edited(path, dice, ways, change)


def make_shards(folder: Path, dice: random.Random) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: dict[str, dict[str, torch.Tensor]] = {name: {} for name in SHARDS}
    for name, tensor in weights.items():
        shards[dice.choice(tuple(shards))][name] = tensor.clone()
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickled(folder: Path, dice: random.Random) -> str:
    """pytorch_model.bin in place of model.safetensors: an archive or the old format, with something else in it."""
    from safetensors.torch import load_file

    path, old = folder / "pytorch_model.bin", dice.random() < 0.3
    weights: dict[Any, Any] = dict(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    name = dice.choice(list(weights))
    tensor = weights[name]
    marker = folder / "executed"
    kinds = [tensor.to_sparse, partial(torch.quantize_per_tensor, tensor, 0.1, 0, torch.qint8)]
    kinds += [partial(tensor.to, dtype) for dtype in DTYPES]
    # in the place of one tensor, and beside all of them
    replaced: dict[str, Callable[[], Any]] = {
        "code": lambda: dice.choice((Runs(os.system, f"touch {marker}"), Runs(eval, "1"), Runs(Path.touch, marker))),
        "wrong": lambda: dice.choice((1, "x", None, [tensor], {"a": tensor}, {1}, 1j)),
        "kind": lambda: dice.choice(kinds)(),
        "expand": lambda: torch.zeros(1).expand(2**20, 2**20),
    }
    added: dict[str, Callable[[], Any]] = {
        "bytes": lambda: dice.choice((Runs(bytearray, 2**36), bytearray(100), Runs(torch.Tensor, 2**36))),
        "huge": lambda: torch.zeros(1).expand(2**40),
    }
    others = ("as it is", "large", "name", "list", "bomb", "overlap", "damage")
    pickles = ("bomb of instructions", "impossible tensor", "instruction")
    how = dice.choice((*replaced, *added, *others, *pickles))
    if how in replaced:
        weights[name] = replaced[how]()
    elif how in added:
        weights["extra"] = added[how]()
    elif how == "name":
        weights[dice.choice((1, None, (1, 2), "x" * 5000, "\n\x1b[2J", ""))] = weights.pop(name)
    torch.save(list(weights.values()) if how == "list" else weights, path, _use_new_zipfile_serialization=not old)
    match how:
        case "bomb of instructions" | "impossible tensor":
            known = BOMBS if how.startswith("bomb") else {key: x for kind in VIEWS.values() for key, x in kind.items()}
            name = dice.choice(list(known))
            path.write_bytes(FORMS["old" if old else "archive"](known[name]))
        case "instruction":
            how += f" {with_another_instruction(path, dice)}"
        case "large" if not old:
            recompressed(path, zipfile.ZIP_DEFLATED)
        case "bomb":
            recompressed(path, zipfile.ZIP_DEFLATED, extra=LARGE)
        case "overlap" if zipfile.is_zipfile(path):
            size = struct.pack("<I", len(tensor.untyped_storage()))
            path.write_bytes(path.read_bytes().replace(size, struct.pack("<I", 2**31 - 1)))
        case "damage":
            return damage(path, dice)
    return f"pickle, {'old' if old else 'new'}: {how} of {name}"


def with_another_instruction(path: Path, dice: random.Random) -> str:
    """Change a few bytes of a pickle: its instructions, or their arguments."""
    data = bytearray(path.read_bytes())
    start = data.find(b"\x80\x02")  # of the first pickle, which is the only one in an archive
    end = data.find(b"PK", start) if zipfile.is_zipfile(path) else min(len(data), start + 5000)
    places = [dice.randrange(start, end) for _ in range(dice.choice((1, 1, 2, 10)))]
    for place in places:
        data[place] = dice.choice((*INSTRUCTIONS, dice.randrange(256)))
    path.write_bytes(data)
    return f"at {places}"


def recompressed(path: Path, method: int, extra: int = 0) -> None:
    """Write an archive again, compressed; with an entry of zeros."""
    if not zipfile.is_zipfile(path):
        path.write_bytes(pickle.dumps({"x": b"\0" * 1000}))
        return
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
        if extra:
            archive.writestr(f"{next(iter(entries)).partition('/')[0]}/data/999", b"\0" * extra)


def tokenizer(folder: Path, dice: random.Random) -> str:
    """One of the tokenizer's files."""
    path = dice.choice([path for path in sorted(folder.iterdir()) if "token" in path.name and path.suffix == ".json"])

    def change(values: dict[str, Any], how: str) -> str:
        if how == "code":
            values["auto_map"] = dice.choice(({"AutoTokenizer": ["x.Y", None]}, STRANGE[-1]))
            return "auto_map"
        token = dice.choice(values["added_tokens"])
        token["id"] = dice.choice((*HUGE, -1, None, "x", 0))
        return f"id {shown(token['id'])}"

    # only tokenizer_config.json names code, and only tokenizer.json has ids of tokens
    own = {"tokenizer_config.json": "code", "tokenizer.json": "ids"}.get(path.name, "any")
    return edited(path, dice, ("any", "any", "damage", "large", own, own, own), change)


def shown(value: Any) -> str:
    with any_number_of_digits():
        return repr(value)[:40]


CHECKPOINT_MUTATIONS: tuple[Callable[[Path, random.Random], str], ...] = (
    *(config,) * 9, *(safetensors,) * 5, *(index,) * 3, *(pickled,) * 3, *(tokenizer,) * 3,
)  # fmt: skip


DAMAGED_TOML = (
    *("a." * 60_000 + "a = 1", "x = " + "[" * 100_000, "x = " + "9" * 100_000, "x = [" + "[]," * 30_000_000 + "]"),
    *("\n".join(f"[{'a.' * 90}{number}]" for number in range(1000)), 'variant = "lsh"\nvariant = "lsh"', "\ufeff", ""),
    *('[attention]\nvariant = "lsh"\n[attention]\ndim = 1', "[lsh.x]\ny = 1", "dim = 1979-05-27T07:32:00Z", "\x00"),
)


def spec_toml(path: Path, dice: random.Random) -> str:
    """A spec file with a few wild fields, or one that is damaged."""
    from effexport.base.spec import BUILD_FIELDS, ENCODER_FIELDS
    from effexport.models.attention_spec import field_names
    from effexport.models.variants import ATTENTION_SPECS

    variant = dice.choice(list(ATTENTION_SPECS))
    values: dict[str, Any] = {"variant": variant, "dim": 16, "heads": 2, "seq_len": 16, "layers": 1}
    if dice.random() < 0.2:
        path.write_text(dice.choice(DAMAGED_TOML))
        return "a damaged spec file"
    names = dice.sample(
        [*field_names(ATTENTION_SPECS[variant]), *ENCODER_FIELDS, *BUILD_FIELDS, "scope", "variant"], dice.randint(1, 3)
    )
    for name in names:
        values[name] = dice.choice(SIZES) if dice.random() < 0.6 else dice.choice(STRANGE)
    with any_number_of_digits():
        lines = [f"{name} = {text}" for name, value in values.items() if (text := toml_value(value)) is not None]
    path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    return ", ".join(f"{name} {shown(values[name])}" for name in names)


def toml_value(value: Any) -> str | None:
    """A value as TOML writes it; None for what TOML does not have."""
    match value:
        case bool():
            return str(value).lower()
        case int():
            return hex(value) if value > 10**100 else str(value)
        case float():
            return repr(value)
        case str():
            return json.dumps(value)
        case list():
            if len(str(value)) > 300:  # deeper than the parser goes
                return "[" * 500 + "]" * 500
            items = [toml_value(item) for item in value]
            return f"[{', '.join(item for item in items if item is not None)}]"
        case dict():
            return "{}"
    return None


def wild_flags(dice: random.Random) -> list[str]:
    """Flags of build with wild sizes."""
    names = ("--dim", "--heads", "--layers", "--seq-len", "--batch", "--num-hashes", "--opset", "--seed", "--top-k")
    words = ["--variant", dice.choice(("lsh", "softmax", "nystrom", "aft-full", "linear", "nope"))]
    with any_number_of_digits():
        for name in dice.sample(names, dice.randint(1, 3)):
            words += [name, str(dice.choice((*SIZES, "x", "1e9", "nan", "9" * 4000, "10k", "99999999999k", " ", "-")))]
    return words


def copy_of(folder: Path, place: Path) -> Path:
    """A fresh copy of a checkpoint."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place)
    return place
