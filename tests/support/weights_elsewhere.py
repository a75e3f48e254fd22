"""An artifact whose external weights have another name."""

from __future__ import annotations

from pathlib import Path

import onnx


def move_weights(folder: Path, location: str) -> None:
    """Rename model.onnx.data; the manifest is left as it is."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    onnx.save(model, str(folder / "model.onnx"))
    (folder / location).parent.mkdir(exist_ok=True)
    (folder / "model.onnx.data").rename(folder / location)
