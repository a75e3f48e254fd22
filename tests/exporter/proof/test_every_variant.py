"""Random healthy models: every one must export and pass its own parity check. Run by scripts/soak.sh.

A check that catches every planted fault is worth something only if it leaves healthy models alone.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_specs import BUILT_VARIANTS

from effexport.base.spec import BuildSpec, build_spec_from_options
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.variants import ATTENTION_SPECS
from effexport.pipeline.build import artifact_from_spec
from effexport.pipeline.quantization import QuantizationData

pytestmark = [pytest.mark.soak, pytest.mark.requires("torch", "onnx", "ort")]

# Per variant: 200 models in float32 and 56 in float16 in all.
CASES_PER_VARIANT = {"fp32": 25, "fp16": 7}


def random_spec(variant: str, seed: int, **fields: Any) -> BuildSpec:
    """A spec drawn from everything a user may combine. fields: what is not left to chance."""
    rng = random.Random(f"{variant}-{seed}")
    heads = rng.choice([1, 2, 3, 4])
    options: dict[str, Any] = {
        "variant": variant,
        "scope": rng.choice(["encoder", "attention"]),
        "heads": heads,
        "dim": heads * rng.choice([8, 16, 24, 40]),
        "seq_len": rng.choice([2, 5, 17, 63, 64, 65, 100, 129, 300, 511]),
        "batch": rng.choice([1, 1, 3]),
        "precision": rng.choice(["fp32", "fp32", "fp16"]),
        "opset": rng.choice([18, 20, 20, 22, 24]),
        "seed": rng.randrange(1000),
        "bias": rng.random() < 0.7,
    }
    if variant != "nystrom" and not ATTENTION_SPECS[variant].why_always_causal:
        options["causal"] = rng.random() < 0.5
    if options["scope"] == "encoder":
        options |= {
            "layers": rng.choice([1, 2, 3]),
            "block": rng.choice(["pre-norm", "post-norm", "reversible"]),
            "reversible_output": rng.choice(["mean", "concat"]),
            "lm_head": rng.random() < 0.3,
            "activation": rng.choice(["gelu", "gelu_new", "relu"]),
            "ff_chunk_length": rng.choice([0, 7]),
        }
    return build_spec_from_options(options | variant_options(variant, rng) | fields, None)


def variant_options(variant: str, rng: random.Random) -> dict[str, Any]:
    if variant == "nystrom":
        return {
            "num_landmarks": rng.choice([1, 4, 7, 32, 64]),
            "pinv_iterations": rng.choice([1, 4, 6]),
            "pinv_init": rng.choice(["per_head", "global"]),
            "conv_kernel_size": rng.choice([None, 1, 33]),
            "convention": rng.choice(["own", "own", "nystrom-attention", "xformers", "authors"]),
        }
    if variant == "lsh":
        return {
            "chunk_length": rng.choice([1, 4, 16, 64]),
            "num_hashes": rng.choice([1, 2, 3, 4]),
            "num_buckets": rng.choice([None, 2, 6, 64, (4, 8), (2, 2, 6)]),
            "num_chunks_before": rng.choice([0, 1, 2]),
            "num_chunks_after": rng.choice([0, 1]),
            "circular": rng.random() < 0.3,
            "mask_constants": rng.choice(["safe", "hf"]),
        }
    return {
        "linear": {"chunk_length": rng.choice([1, 16, 64])},
        "aft-full": {"position_dim": rng.choice([1, 8]), "position_bias": rng.choice(["factored", "full"])},
        "aft-local": {
            "position_dim": rng.choice([1, 8]),
            "window": rng.choice([0, 1, 5, 32, 1000]),
            "position_bias": rng.choice(["factored", "full"]),
        },
        "aft-conv": {"kernel_size": rng.choice([1, 3, 11, 65])},
    }.get(variant, {})


@pytest.mark.parametrize(
    ("precision", "seed"),
    [(precision, seed) for precision, count in CASES_PER_VARIANT.items() for seed in range(count)],
)
@pytest.mark.parametrize("name", ATTENTION_SPECS)
def test_a_random_healthy_model_builds_and_raises_no_false_alarm(
    name: str, precision: str, seed: int, tmp_path: Path
) -> None:
    _, report = artifact_from_spec(random_spec(name, seed, precision=precision), tmp_path / "artifact")
    assert report.verdict == "passed"
    assert [check for check in report.checks if check.status == "failed"] == []


@pytest.mark.parametrize("scheme", ["dynamic", "static", "fp8"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", BUILT_VARIANTS)
def test_a_random_healthy_quantised_model_raises_no_false_alarm(
    name: str, seed: int, scheme: str, tmp_path: Path
) -> None:
    rng = random.Random(f"{name}-{seed}-{scheme}")
    # narrower layers are not worth quantising
    spec = random_spec(name, 100 + seed, precision="fp32", dim=rng.choice([32, 48, 96]), heads=rng.choice([1, 2]))
    precision, quantization = ("fp8", None) if scheme == "fp8" else ("int8", scheme)
    smooth, embeds = rng.choice([None, 0.5]), rng.random() < 0.3 and spec.model.scope == "encoder"
    options = {"smooth": smooth, "quantize_embeddings": embeds}
    spec = replace(spec, precision=precision, quantization=quantization, opset=max(spec.opset, 19), **options)  # type: ignore[arg-type]
    samples = None if scheme == "dynamic" else random_samples(spec, tmp_path / "samples.npz")
    _, report = artifact_from_spec(spec, tmp_path / "artifact", quantization=QuantizationData(samples))
    assert [check for check in report.checks if check.status == "failed"] == []


def random_samples(spec: BuildSpec, path: Path) -> Path:
    """64 inputs of a model."""
    rng, length = np.random.default_rng(5), min(spec.model.seq_len, 65)
    if isinstance(spec.model, EncoderSpec):
        np.savez(path, input_ids=rng.integers(0, spec.model.vocab_size, (64, length)))
    else:
        np.savez(path, hidden_states=rng.standard_normal((64, length, spec.attention.dim)).astype(np.float32))
    return path
