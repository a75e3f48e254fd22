"""Models, their engines, and the comparison of an engine with its reference.

Engines of a decode step and a prefill are also compared with the decoder of ONNX Runtime on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.engines.records import Outcome, exact

if TYPE_CHECKING:
    import numpy as np

    from effexport.base.spec import BuildSpec
    from effexport.runners.decode import DecodeRunner
    from effexport.runners.options import RunOptions

    Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Model:
    """A model to be built for a target, and the folder for it."""

    target: str
    spec: BuildSpec
    folder: Path

    @property
    def name(self) -> str:
        causal = " causal" if self.spec.attention.causal else ""
        return f"{self.spec.attention.variant}{causal} {self.spec.precision}"

    @property
    def artifact(self) -> Path:
        return self.folder / "artifact"

    @property
    def engine(self) -> Path:
        from effexport.base.runtimes import engine_name

        return self.artifact / engine_name(self.target)

    @property
    def body_engine(self) -> Path:
        """The engine of the same model with function bodies in place of plugins."""
        return self.folder / "bodies" / self.engine.name

    @property
    def long_engine(self) -> Path:
        return self.folder / "long" / self.engine.name

    @property
    def extra(self) -> str:
        """The optional part of effexport that runs engines of the target."""
        from effexport.base.runtimes import RUNTIMES

        return RUNTIMES[self.target].package.extra


def why_left_out(target: str) -> str:
    """The error that prevents building engines for a target here; empty if there is none."""
    from effexport.base.errors import EffexportError
    from effexport.tensorrt.bindings import BuildLog, import_api
    from effexport.tensorrt.engine_from_onnx import make_builder
    from effexport.tensorrt.spec import EngineSpec, Profile

    try:
        api = import_api(target)  # type: ignore[arg-type]
        make_builder(api, BuildLog(api), EngineSpec(target=target, profiles=(Profile({}),)))  # type: ignore[arg-type]
    except EffexportError as error:
        return exact(error)
    return ""


def build_artifact(model: Model) -> Outcome:
    """Build as `effexport build --target` does: compare the engine with the reference before anything is written."""
    from effexport.options import BuildOptions
    from effexport.pipeline.build import artifact_from_spec

    _, report = artifact_from_spec(model.spec, model.artifact, BuildOptions(engines=[engine_spec(model)]))
    return Outcome({**engine_data(model.engine), "stages_s": report.seconds})


def build_separately(model: Model) -> Outcome:
    """Build the engine without its parity check: an engine that fails it is still a result."""
    from effexport.artifact import DECODE_STEP, MODEL, PREFILL
    from effexport.base.runtimes import engine_name
    from effexport.pipeline.build import artifact_from_spec
    from effexport.tensorrt.engine_from_onnx import engine_from_onnx

    artifact_from_spec(model.spec, model.artifact)
    for name in (MODEL, DECODE_STEP, PREFILL) if model.spec.has_decode_step else (MODEL,):
        source, output = model.artifact / name, model.artifact / engine_name(model.target, name)
        engine_from_onnx(source, engine_spec(model), output, precision=model.spec.precision)
    return Outcome(engine_data(model.engine))


def engine_spec(model: Model) -> Any:
    from effexport.tensorrt.spec import EngineSpec, default_profile

    return EngineSpec(target=model.target, profiles=(default_profile(model.spec),))  # type: ignore[arg-type]


def engine_data(engine: Path) -> dict[str, Any]:
    """The important facts about an engine, from its sidecar."""
    from effexport.tensorrt.sidecar import count_dtypes, count_types, read_sidecar, summary_of_engine

    info = read_sidecar(engine)
    with_tactic = [layer for layer in info.layers if layer.get("tactic")]
    return {
        **summary_of_engine(info),
        "onnx_bytes": info.onnx_bytes,
        "device_memory_bytes": info.device_memory_bytes,
        "layers_from": info.layers_from,
        "layer_types": count_types(info.layers),
        "element_types": count_dtypes(info.layers),
        "tensors_compared": info.tensors_compared,
        "layers_with_tactic": len(with_tactic),
        "tactics": sorted({layer["tactic"] for layer in with_tactic}),
    }


def check_parity(model: Model, engine: Path | None = None) -> Outcome:
    """Check an engine of the model, by default that of the artifact, against the reference."""
    from effexport.artifact import MODEL, REFERENCE
    from effexport.proof.cases import load_reference
    from effexport.proof.check import summary
    from effexport.proof.verify import verify_engine

    cases = load_reference(model.artifact / REFERENCE)
    manifest = json.loads((model.artifact / "manifest.json").read_text(encoding="utf-8"))
    verification = verify_engine(
        engine or model.engine, model.artifact / MODEL, cases, model.spec, manifest["hash_values"]
    )
    data = {"summary": summary(verification.checks), "implementation": verification.implementation}
    return Outcome(data, problem_of_checks(verification.checks))


def problem_of_checks(checks: Sequence[Any]) -> str:
    """The reason why the checks do not count as passed; empty if some passed and none failed."""
    failed = [check for check in checks if check.status == "failed"]
    if failed:
        lines = [f"{c.name} ({c.case}): {c.metric} {c.value}, at most {c.limit} {c.detail}" for c in failed]
        return f"{len(failed)} of {len(checks)} checks failed: {'; '.join(lines)}"
    if not any(check.status == "passed" for check in checks):
        return f"no check ran: {'; '.join(check.reason for check in checks)}"
    return ""


BATCH, PROMPT, STEPS = 2, 63, 32


def open_decoder(model: Model, settings: RunOptions) -> DecodeRunner:
    from effexport.runners.runner import limits_from_spec
    from effexport.tensorrt.runner import decoder_in_trt

    return decoder_in_trt(model.artifact, model.target, limits_from_spec(model.spec), settings)


def check_decoding(model: Model) -> Outcome:
    """Decode with and without CUDA graphs, and compare with the reference and with the decoder on the CPU."""
    from effexport.artifact import DECODE_STEP, PREFILL, REFERENCE
    from effexport.proof.cases import load_reference
    from effexport.proof.check import summary
    from effexport.proof.checks.invariance import check_decoder
    from effexport.runners.options import RunOptions
    from effexport.runners.ort.runner import decoder_in_ort

    cases = load_reference(model.artifact / REFERENCE)
    with decoder_in_ort(model.artifact / DECODE_STEP, model.artifact / PREFILL) as on_cpu:
        expected = decoded(on_cpu, model)
    data, checks, problems = {}, [], []
    for name, settings in (
        ("plain", RunOptions(runtime="trt")),
        ("graphs", RunOptions(runtime="trt", cuda_graph=True)),
    ):
        with open_decoder(model, settings) as decoder:
            found = [replace(check, target=model.target) for check in check_decoder(decoder, cases, model.spec)]
        checks += found
        with open_decoder(model, settings) as decoder:
            worst, limit = largest_difference(decoded(decoder, model), expected, model)
        data[name] = {"difference": worst, "difference_limit": limit}
        if not worst <= limit:  # also for NaN
            problems.append(f"{name}: differs from the decoder on the CPU by {worst}, at most {limit}")
        problems += [f"{name}: {text}"] if (text := problem_of_checks(found)) else []
    return Outcome({"summary": summary(checks), "decoder_on_cpu": data}, "; ".join(problems))


def decoded(decoder: DecodeRunner, model: Model) -> Arrays:
    """All outputs for prompts and the tokens after them, and the state at the end; the last prompt is half as long."""
    import numpy as np

    from effexport.base.spec import MASK_NAME
    from effexport.runners.runner import limits_from_spec

    rng = np.random.default_rng(0)
    name, output = model.spec.inputs[0].name, model.spec.outputs[0].name
    limit = limits_from_spec(model.spec).indices[name]
    tokens = rng.integers(0, limit, (BATCH, PROMPT + STEPS), dtype=np.int64)
    mask = np.ones((BATCH, PROMPT), dtype=np.int64)
    mask[-1, PROMPT // 2 :] = 0
    prompt = decoder.prefill({name: tokens[:, :PROMPT], MASK_NAME: mask})[output]
    steps = [decoder.step({name: tokens[:, t : t + 1]})[output] for t in range(PROMPT, PROMPT + STEPS)]
    answers = {f"prompt {i}": row[mask[i] != 0] for i, row in enumerate(prompt)}
    answers |= {f"steps {i}": row for i, row in enumerate(np.concatenate(steps, axis=1))}
    return answers | {f"state {key}": value.reshape(-1, value.shape[-1]) for key, value in decoder.state.items()}


def largest_difference(actual: Arrays, expected: Arrays, model: Model) -> tuple[float, float]:
    """The largest relative difference, and its limit, which is twice the usual one because both sides round."""
    import numpy as np

    from effexport.proof.tolerances import arithmetic_limit, relative_error

    errors = [relative_error(actual[name], expected[name])[0] for name in expected]
    # not the built-in max, which may drop NaN
    return float(np.max(errors)), 2 * arithmetic_limit(model.spec).value
