"""Engines of the fake TensorRT that compute what ONNX Runtime computes on the ONNX files that they were built from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fake_tensorrt import FakeCuda, FakeModel, FakeTensorRT

from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.tensorrt.sidecar import EngineInfo, read_sidecar


def fake_tensorrt(folder: Path) -> FakeTensorRT:
    """A TensorRT, on a GPU of its own, that loads the engines of an artifact folder."""
    engines = {path: read_sidecar(path) for path in sorted(folder.glob("engine/*.engine"))}
    models = {path.read_bytes(): fake_model(folder / info.model, info) for path, info in engines.items()}
    first = next(iter(engines.values()))
    api = FakeTensorRT(next(iter(models.values())), FakeCuda(), first.tensorrt_version)
    api.models = models
    return api


def fake_model(model: Path, info: EngineInfo) -> FakeModel:
    """A stand-in for an engine of this ONNX file."""
    runner = OrtRunner(model, RunOptions(implementation="body", threads=1))

    def output_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        sizes = {
            dim: size for tensor in info.inputs for dim, size in zip(tensor.dims, shapes[tensor.name], strict=True)
        }
        return {tensor.name: tuple(sizes.get(dim, dim) for dim in tensor.dims) for tensor in info.outputs}  # type: ignore[misc]

    return FakeModel(info.inputs, info.outputs, info.profiles, runner.run, output_shapes)
