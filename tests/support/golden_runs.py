"""Golden results of commands, in a form that other machines repeat: recorded in tests/corpus/golden.json.

EFFEXPORT_RECORD=1 records anew what the tests find; read the difference before committing it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
GOLDEN = CORPUS / "golden.json"
# Of the machine and the moment.
VOLATILE = re.compile(
    r"^built$|environment|seconds|bytes|(^|_)size|sha256|digest|version|created|memory|disturb|floor|^times_|timing|_m?s$|path$"
)
# Long, and said by other parts: `summary` counts the checks of each name.
LEFT_OUT = ("checks", "$defs")
NAME = re.compile(r"[A-Za-z_][\w.:/-]{0,60}")


def compare(name: str, found: Any) -> None:
    """Hold a run against what is recorded under a name, or record it."""
    found = json.loads(json.dumps(found))
    if os.environ.get("EFFEXPORT_RECORD"):
        record(name, found)
    kept = recorded().get(name) or {}
    pairs = {part: (kept.get(part), found.get(part)) for part in {**kept, **found}}
    unlike = {part: pair for part, pair in pairs.items() if pair[0] != pair[1]}
    assert not unlike, f"{name}: not as recorded in {GOLDEN.name} (recorded, found): {unlike}"


@functools.cache
def recorded() -> Mapping[str, Any]:
    golden: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    return golden


def record(name: str, found: Mapping[str, Any]) -> None:
    """Keep a run, each of its parts in a line."""
    runs = {**recorded(), name: found}
    shown = {key: table({part: json.dumps(run[part], sort_keys=True) for part in run}) for key, run in runs.items()}
    GOLDEN.write_text(table(shown) + "\n", encoding="utf-8")
    recorded.cache_clear()


def table(parts: Mapping[str, str]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {parts[key]}" for key in sorted(parts)) + "\n}"


def lasting(value: Any) -> Any:
    """A JSON value with names, counts and verdicts as they are, and `number` and `text` for what may differ by machine
    or be written in other words. Of a list, equal items stay once."""
    if isinstance(value, dict):
        return {
            key: "…" if VOLATILE.search(key) else lasting(item) for key, item in value.items() if key not in LEFT_OUT
        }
    if isinstance(value, list):
        items = [lasting(item) for item in value]
        return [item for i, item in enumerate(items) if item not in items[:i]]
    if isinstance(value, float):
        return "number"
    if value == "disturbed":  # by other programs, while it was measured
        return "measured"
    if isinstance(value, str):
        return value if NAME.fullmatch(value) else "text"
    return value


def files_of(folder: Path) -> dict[str, str]:
    """The files below a folder, with a digest of those that hold a graph."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {str(path.relative_to(folder)): graph_digest(path) if path.suffix == ".onnx" else "" for path in paths}


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def graph_digest(path: Path) -> str:
    """Of a model's nodes, functions and signature, and the names, types and shapes of its weights, without their
    numbers: processors draw and round these differently."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        kept = (tensor.name, tensor.data_type, [*tensor.dims])
        tensor.Clear()
        tensor.name, tensor.data_type = kept[:2]
        tensor.dims.extend(kept[2])
    del model.metadata_props[:]
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()[:16]
