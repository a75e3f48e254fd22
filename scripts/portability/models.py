"""The models that go through the tools: small encoders of every variant, and PyTorch's answers at five lengths."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from kept import kept
from small_builds import what_decides_a_build

from effexport.base.spec import BuildSpec, build_spec_from_options
from effexport.export.module_source import module_from_seed
from effexport.export.onnx_from_module import at_precision, onnx_from_module
from effexport.models.variants import ATTENTION_SPECS
from effexport.proof.cases import Case, load_reference, save_reference
from effexport.proof.float64 import warm_up
from effexport.proof.inputs import REFERENCE_SEED_OFFSET, random_inputs
from effexport.proof.module_runs import RepeatedRuns, answered_case, hash_modules, with_hash_noise

if TYPE_CHECKING:
    from torch import nn

VARIANTS = tuple(ATTENTION_SPECS)
PRECISIONS = ("fp32", "fp16")
SEQ_LEN = 512
# One token; fewer tokens than a chunk or a segment; one chunk; several with a rest; and all positions of the model.
LENGTHS = (1, 7, 64, 300, SEQ_LEN)


@dataclass(frozen=True)
class Model:
    """An exported file, and what it is compared with. hashes: graph values that hold buckets, by layer."""

    variant: str
    precision: str
    spec: BuildSpec
    path: Path
    cases: tuple[Case, ...]
    hashes: tuple[str, ...]


def spec_of(variant: str, precision: str) -> BuildSpec:
    options = {"variant": variant, "precision": precision, "dim": 64, "heads": 4, "layers": 2, "seq_len": SEQ_LEN}
    return build_spec_from_options(options, None)


def exported_model(variant: str, precision: str) -> Model:
    """One model. It is exported once, until code changes that decides it."""
    spec = spec_of(variant, precision)
    decided_by = (repr(spec), Path(__file__), *what_decides_a_build())
    folder = kept(f"portability/{variant}-{precision}", decided_by, lambda folder: export(spec, folder))
    hashes = json.loads((folder / "hashes.json").read_text(encoding="utf-8"))
    cases = tuple(load_reference(folder / "reference.safetensors"))
    return Model(variant, precision, spec, folder / "model.onnx", cases, tuple(hashes))


def export(spec: BuildSpec, folder: Path) -> None:
    module = module_from_seed(spec)
    onnx_from_module(module, spec, folder / "model.onnx")
    (folder / "hashes.json").write_text(json.dumps(list(hash_modules(module))), encoding="utf-8")
    save_reference(cases_of(module, spec), folder / "reference.safetensors")


def cases_of(module: nn.Module, spec: BuildSpec) -> list[Case]:
    """PyTorch's answers, each given twice, to sequences of all lengths, padded and not."""
    warm_up()
    runs, rounded = RepeatedRuns("PyTorch"), at_precision(module, spec.precision)
    rng = np.random.default_rng(spec.seed + REFERENCE_SEED_OFFSET)
    inputs = {}
    for length in LENGTHS:
        inputs[f"{length} tokens"] = random_inputs(spec, rng, 1, length, None)
        # two samples, of which the second ends earlier; a single token is padded to two
        padded = max(2, length)
        inputs[f"{length} tokens padded"] = random_inputs(spec, rng, 2, padded, [padded, max(1, length * 2 // 3)])
    cases = [answered_case(Case(name, own, {}), module, spec, runs) for name, own in inputs.items()]
    if not spec.attention.is_hashed:
        return cases
    return [with_hash_noise(case, module, rounded, spec, runs) for case in cases]
