"""One cell of a sweep: a model, its export options, and the engine to build from it, if any; and its outcome."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from effexport.environment import PACKAGES
from effexport.runtimes import RUNTIMES
from effexport.spec import BuildSpec
from effexport.tensorrt.spec import EngineSpec, Profile, parse_profile

# To be increased when the contents of a cell's folder change; cells of earlier formats are then rebuilt.
CELL_FORMAT = 1
ONNX_ONLY = "onnx"
# What writes the files of a cell and judges them, besides effexport; a cell of an engine also depends on its TensorRT.
_DECIDING = ("torch", "onnx", "onnxscript", "onnxruntime")
# 12 hexadecimal digits: among 10,000 cells, two alike are less likely than 1 in 5 million.
_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model to build, and the GPU for its engine.

    label: the variant with its options, for tables. gpu: an architecture such as "sm_89", or "". Target trt builds on
    this GPU; target trt-rtx builds for it, on any machine.
    versions: of the packages that decide the result, without local parts such as +cpu; None: was not installed.
    """

    label: str
    spec: BuildSpec
    engine: EngineSpec | None = None
    gpu: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return self.engine.target if self.engine else ONNX_ONLY

    @property
    def needs_gpu(self) -> bool:
        return self.engine is not None and self.engine.row.built_where_it_runs

    @property
    def title(self) -> str:
        """The cell in words."""
        gpu = f", {self.gpu}" if self.gpu else ""
        return f"{self.label}, {self.spec.model.seq_len} tokens, {self.spec.precision}, {self.target}{gpu}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides the result, which the label does not."""
        values = {name: value for name, value in self.to_dict().items() if name != "label"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @cached_property
    def id(self) -> str:
        """The name of its folder: `lsh-512-fp32-trt-rtx-sm_89-0123456789ab`."""
        spec = self.spec
        words = [spec.attention.variant, str(spec.model.seq_len), spec.precision, self.target]
        words += [self.gpu] if self.gpu else []
        return "-".join([*words, self.digest[:_DIGITS]])

    def to_dict(self) -> dict[str, Any]:
        """The cell as JSON values, for `from_dict`."""
        engine = None
        if self.engine is not None:
            profiles = [str(profile) for profile in self.engine.profiles]
            engine = {"target": self.engine.target, "profiles": profiles, **self.engine.options()}
        return {
            "cell_format": CELL_FORMAT,
            "label": self.label,
            "spec": self.spec.to_dict(),
            "engine": engine,
            "gpu": self.gpu,
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cell:
        """The inverse of `to_dict`. Raises SpecError, KeyError or TypeError for anything else."""
        engine = values["engine"]
        return cls(
            label=values["label"],
            spec=BuildSpec.from_dict(values["spec"]),
            engine=None if engine is None else engine_from_dict(engine),
            gpu=values["gpu"],
            versions=values["versions"],
        )


def engine_from_dict(values: Mapping[str, Any]) -> EngineSpec:
    options = dict(values)
    options["profiles"] = tuple(Profile(parse_profile(text)) for text in options["profiles"])
    options["compute_capabilities"] = tuple(options["compute_capabilities"])
    cache = options["timing_cache"]
    return EngineSpec(**options | {"timing_cache": Path(cache) if cache else None})


@cache
def deciding_versions(target: str) -> Mapping[str, str | None]:
    """Versions of the packages that decide the result of a cell, found without importing them."""
    from effexport.version import __version__

    modules = (*_DECIDING, *([RUNTIMES[target].package.module] if target in RUNTIMES else []))
    found = {package.module: public(package.version) for package in PACKAGES if package.module in modules}
    return {"effexport": __version__, **found}


def public(version: str | None) -> str | None:
    """2.13.0 of 2.13.0+cpu, because builds of one release for different machines count as the same."""
    return version.partition("+")[0] if version else None


ARTIFACT, LOG, OUTCOME, REQUEST = "artifact", "log.txt", "outcome.json", "request.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of an attempt. status: "finished" with an artifact, or "failed" with a reason.

    stage: the stage of the build that failed; "" if unknown. log: the end of the attempt's output. seconds: duration of
    the whole attempt. peak_bytes: peak memory of its process; None if it was killed. where: host and process.
    versions: of the packages that decide the result. files: size in bytes of every file of the artifact.
    """

    status: Literal["finished", "failed"]
    reason: str = ""
    stage: str = ""
    log: str = ""
    seconds: float = 0.0
    peak_bytes: int | None = None
    where: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
