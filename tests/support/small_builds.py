"""Models that several tests, and several runs of the tests, export or build only once: see kept.py."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kept import code_of, digest_of, kept
from torch import Tensor, nn

from effexport.base.environment import versions
from effexport.base.spec import BuildSpec
from effexport.export.module_source import model_from_source, module_from_seed
from effexport.export.onnx_from_module import onnx_from_module
from effexport.export.onnx_graph import GraphSignature
from effexport.export.sizes_of_code import NO_CHANGES, SpecChanges
from effexport.models.sources import source_from_path
from effexport.plugins.building.library import find_library

# Folders whose code no build runs; tests/test_imports.py holds them above pipeline/build.py.
ABOVE_BUILD = {"bench", "cli", "serving"}
Trace = Callable[[nn.Module, tuple[Tensor, ...], GraphSignature, BuildSpec], tuple[bytes, GraphSignature, SpecChanges]]


def exported(spec: BuildSpec) -> Path:
    """The ONNX file of a module with weights from the spec's seed. Do not change it: other tests read it."""
    folder = kept(
        f"models/{digest_of([repr(spec)])}",
        what_decides_a_build(),
        tracing_once()(lambda folder: onnx_from_module(module_from_seed(spec), spec, folder / "model.onnx")),
    )
    return folder / "model.onnx"


def built_artifact(spec: BuildSpec) -> Path:
    """The folder of a healthy artifact. Copy it before changing it."""
    from effexport.pipeline.build import artifact_from_spec

    folder = kept(
        f"artifacts/{digest_of([repr(spec)])}",
        what_decides_a_build(),
        tracing_once()(lambda folder: artifact_from_spec(spec, folder / "built")),
    )
    return folder / "built"


def calibrated_artifact(spec: BuildSpec) -> Path:
    """The same of an encoder, with scales of 64 random samples in a file tokens.npz."""
    import effexport

    @tracing_once()
    def make(folder: Path) -> None:
        np.savez(folder / "tokens.npz", input_ids=np.random.default_rng(0).integers(0, 258, (64, 64)))
        effexport.build(spec, folder / "built", calibration=folder / "tokens.npz")

    return kept(f"calibrated/{digest_of([repr(spec)])}", [Path(__file__), *what_decides_a_build()], make) / "built"


@contextlib.contextmanager
def tracing_once() -> Iterator[None]:
    """Trace a model of ours once in all exports of all tests and runs: most of a build is its trace."""
    # effexport.export itself is the function
    exporter = importlib.import_module("effexport.export.onnx_from_module")
    trace = exporter.traced_graph
    with pytest.MonkeyPatch.context() as patch:
        # once, too, around a build that does so already
        if not isinstance(trace, functools.partial):
            patch.setattr(exporter, "traced_graph", functools.partial(kept_trace, trace))
        yield


def kept_trace(
    trace: Trace, module: nn.Module, example: tuple[Tensor, ...], signature: GraphSignature, spec: BuildSpec
) -> tuple[bytes, GraphSignature, SpecChanges]:
    """The result of `trace`, the function `traced_graph`, in a build: for a model of ours, whose spec decides it, that
    of an earlier test or run, whatever becomes of the graph afterwards."""
    if spec.model.is_traced_as_found or not spec.model.has_whole_state:
        return trace(module, example, signature, spec)
    traced = replace(spec, inline=False, external_data=False, carrier="auto", golden="full")
    folder = kept(
        f"traces/{digest_of([repr((traced, signature)), f'{type(module)} {module}'])}",
        what_decides_a_build(),
        lambda folder: (folder / "graph").write_bytes(trace(module, example, signature, spec)[0]),
    )
    return (folder / "graph").read_bytes(), signature, NO_CHANGES


@functools.cache
def what_decides_a_build() -> tuple[str]:
    """A digest of the code that a build runs, and of the packages and the kernel library that it runs with."""
    library = find_library()
    code = code_of("exporter", "models", "plugins", without=ABOVE_BUILD)
    return (digest_of([*code, repr(versions()), "no library" if library is None else library.path]),)


def module_from_path(spec: BuildSpec, path: Path) -> nn.Module:
    """The module of a spec with the weights of a folder or a file."""
    return model_from_source(source_from_path(spec.model, path), spec).module
