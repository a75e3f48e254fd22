"""The engines of a decode step and a prefill, beside the reference and the decoder of ONNX Runtime on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu.engines.model import Model, problem_of_checks
from gpu.engines.records import Outcome

if TYPE_CHECKING:
    import numpy as np

    from effexport.runners.decode import DecodeRunner
    from effexport.runners.options import RunOptions

    Arrays = dict[str, np.ndarray[Any, Any]]

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
