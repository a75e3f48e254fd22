"""Packaging in this process, folders compared byte for byte, and artifacts with an engine that nobody can run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt import written_engine

from effexport.artifact import Artifact, open_artifact
from effexport.base.runtimes import engine_name
from effexport.serving.triton.package import PackageResult, package_artifact
from effexport.serving.triton.spec import PackageSpec
from effexport.tensorrt.sidecar import summary_of_engine


def package(
    artifact: Artifact | Path, repository: Path, *, replace_config: bool = False, **fields: Any
) -> PackageResult:
    """As `effexport package` does; the name is the artifact's folder unless it is given."""
    opened = open_artifact(artifact) if isinstance(artifact, Path) else artifact
    spec = PackageSpec(**{"name": opened.path.name, **fields})
    return package_artifact(opened, repository, spec, replace_config=replace_config)


@pytest.fixture(name="package", scope="session")
def package_fixture() -> Callable[..., PackageResult]:
    return package


@pytest.fixture(scope="session")
def snapshot() -> Callable[[Path], dict[str, Any]]:
    """Everything in a folder, hidden files too: content, and when it was written."""

    def take(folder: Path) -> dict[str, Any]:
        return {
            path.relative_to(folder).as_posix(): (
                (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) if path.is_file() else None
            )
            for path in sorted(folder.rglob("*"))
        }

    return take


@pytest.fixture
def with_engine(copied: Callable[..., Path], rewrite_manifest: Callable[..., None]) -> Callable[..., Path]:
    """(target, profiles) → an artifact with an engine file: its bytes are not an engine, but its sidecar is real."""

    def make(target: str = "trt", batches: tuple[tuple[int, int, int], ...] = ((1, 4, 6),)) -> Path:
        folder = copied("softmax", "encoder")
        artifact = open_artifact(folder)
        shapes = [tuple((size, length) for size, length in zip(batch, (1, 64, 64), strict=True)) for batch in batches]
        info = written_engine(
            folder / engine_name(target),
            target=target,
            tensorrt_version="10.13.3.9",
            inputs=artifact.spec.inputs,
            outputs=artifact.spec.outputs,
            profiles=tuple({"input_ids": shape, "attention_mask": shape} for shape in shapes),
        )
        rewrite_manifest(folder, engines=[summary_of_engine(info)])
        return folder

    return make


@pytest.fixture
def other_weights(copied: Callable[..., Path], rewrite_manifest: Callable[..., None]) -> Callable[..., Path]:
    """(variant, scope) → an artifact whose model differs from the healthy one in a comment of the graph."""

    def make(variant: str, scope: str = "encoder") -> Path:
        import onnx

        folder = copied(variant, scope)
        model = onnx.load(folder / "model.onnx")
        model.doc_string = "another version"
        onnx.save(model, folder / "model.onnx")
        rewrite_manifest(folder, weights_sha256=hashlib.sha256(b"other").hexdigest())
        return folder

    return make


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
