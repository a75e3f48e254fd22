"""Fixtures of the AFT tests: the four variants with their biases, the slow reference and the ONNX checks."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kept import code_of, digest_of, kept
from torch import Tensor

from effexport.models.layers import AttentionLayer
from effexport.models.variants.aft.contract import bias_full, gated_sums
from effexport.models.variants.aft.layer import AFTPositionLayer
from effexport.models.variants.aft_conv.contract import bias_conv
from effexport.models.variants.aft_conv.layer import AFTConvAttention
from effexport.models.variants.aft_conv.spec import AFTConvSpec
from effexport.models.variants.aft_full.layer import AFTFullAttention
from effexport.models.variants.aft_full.spec import AFTFullSpec
from effexport.models.variants.aft_local.contract import bias_local
from effexport.models.variants.aft_local.layer import AFTLocalAttention
from effexport.models.variants.aft_local.spec import AFTLocalSpec
from effexport.models.variants.aft_simple.contract import bias_simple
from effexport.models.variants.aft_simple.layer import AFTSimpleAttention
from effexport.models.variants.aft_simple.spec import AFTSimpleSpec

DIM = 8
# Nodes that some runtime lacks, runs serially, computes unsafely or draws at random.
FORBIDDEN_NODES = {"Loop", "Scan", "If", "CumSum", "TopK", "ReduceLogSumExp"}


@dataclass(frozen=True)
class AFTVariant:
    """The parts of an AFT variant that tests need.

    build(causal=..., seq_len=..., ...) → a layer with random biases; bias(layer, seq_len) → its w, float64
    [heads, seq, seq], written from the formula.
    """

    build: Callable[..., AttentionLayer]
    bias: Callable[[AttentionLayer, int], Tensor]


def build_simple(causal: bool, seq_len: int = 256) -> AFTSimpleAttention:
    return AFTSimpleAttention(AFTSimpleSpec(dim=DIM, causal=causal, seq_len=seq_len))


def with_biases(layer: AFTPositionLayer, std: float) -> AFTPositionLayer:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("position_"):
                parameter.normal_(std=std)
    return layer


def build_full(causal: bool, seq_len: int = 256, std: float = 0.5, **fields: Any) -> AFTFullAttention:
    fields = {"position_dim": 4, **fields}
    return with_biases(AFTFullAttention(AFTFullSpec(dim=DIM, causal=causal, seq_len=seq_len, **fields)), std)


def build_local(causal: bool, seq_len: int = 256, std: float = 0.5, **fields: Any) -> AFTLocalAttention:
    fields = {"position_dim": 4, "window": 12, **fields}
    return with_biases(AFTLocalAttention(AFTLocalSpec(dim=DIM, causal=causal, seq_len=seq_len, **fields)), std)


def build_conv(causal: bool, seq_len: int = 256, kernel_size: int = 11, heads: int = 2) -> AFTConvAttention:
    spec = AFTConvSpec(dim=DIM, heads=heads, causal=causal, seq_len=seq_len, kernel_size=kernel_size)
    layer = AFTConvAttention(spec)
    with torch.no_grad():
        layer.gamma.normal_(std=2)
        layer.beta.normal_(std=2)
    return layer


def with_full_bias(build: Callable[..., AttentionLayer]) -> Callable[..., AttentionLayer]:
    """The same with a w that is learned as it is, with entries of order one."""
    return lambda causal, seq_len=256, **fields: build(causal, seq_len, 1.0, position_bias="full", **fields)


AFT_VARIANTS = {
    "aft-simple": AFTVariant(build_simple, bias_simple),
    "aft-full": AFTVariant(build_full, bias_full),
    "aft-full with a full bias": AFTVariant(with_full_bias(build_full), bias_full),
    "aft-local": AFTVariant(build_local, bias_local),
    "aft-local with a full bias": AFTVariant(with_full_bias(build_local), bias_local),
    "aft-conv": AFTVariant(build_conv, bias_conv),
}


@pytest.fixture(params=AFT_VARIANTS)
def aft(request: pytest.FixtureRequest) -> AFTVariant:
    """Each variant in turn."""
    return AFT_VARIANTS[request.param]


@pytest.fixture
def aft_simple() -> AFTVariant:
    return AFT_VARIANTS["aft-simple"]


@pytest.fixture
def aft_full() -> AFTVariant:
    return AFT_VARIANTS["aft-full"]


@pytest.fixture
def aft_local() -> AFTVariant:
    return AFT_VARIANTS["aft-local"]


@pytest.fixture
def aft_conv() -> AFTVariant:
    return AFT_VARIANTS["aft-conv"]


@pytest.fixture
def aft_reference() -> Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]:
    """(layer, x, keep [batch, seq], w [heads, seq, seq]) → float64 [batch, seq, dim], by the formula."""

    def reference(layer: AttentionLayer, x: Tensor, keep: Tensor, w: Tensor) -> Tensor:
        bias = None if layer.out.bias is None else layer.out.bias.double()
        return F.linear(gated_sums(layer, x, keep, w), layer.out.weight.double(), bias)

    return reference


@pytest.fixture
def aft_key_gap() -> Callable[[AttentionLayer, Tensor, int, float], Tensor]:
    """(layer, x, position, gap) → x whose keys are about `gap` larger at `position`, in each channel.

    The last input channel carries the gap: it is added to every key and is 0 elsewhere.
    """

    @torch.no_grad()
    def with_gap(layer: AttentionLayer, x: Tensor, position: int, gap: float) -> Tensor:
        layer.key.weight[:, -1] = 1.0
        x = x.clone()
        x[..., -1] = 0.0
        x[:, position, -1] = gap
        return x

    return with_gap


def tokens_and_mask(batch: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Float32 [batch, seq, dim] and int64 [batch, seq]; the last sample ends in padding."""
    mask = torch.ones(batch, seq_len, dtype=torch.int64)
    mask[-1, seq_len - seq_len // 3 :] = 0
    return torch.randn(batch, seq_len, DIM), mask


def session_from_layer(layer: AttentionLayer, example_len: int) -> Any:
    """An ONNX Runtime session with any batch and seq, exported with an example of `example_len` tokens."""
    import onnxruntime

    # drawn here, so that later draws are the same when the export is that of an earlier run
    example = tokens_and_mask(2, example_len)
    layer.eval()
    what = repr((layer.spec, example_len))
    weights = hashlib.sha256(b"".join(value.numpy().tobytes() for value in layer.state_dict().values())).hexdigest()
    folder = kept(
        f"layers/{digest_of([what])}",
        [what, weights, what_decides_an_export()],
        lambda folder: export(layer, example, folder / "layer.onnx"),
    )
    return onnxruntime.InferenceSession(folder / "layer.onnx", providers=["CPUExecutionProvider"])


@functools.cache
def what_decides_an_export() -> str:
    versions = [importlib.metadata.version(name) for name in ("torch", "onnx", "onnxscript")]
    return digest_of([*versions, Path(__file__), *code_of("models", "plugins")])


@torch.no_grad()
def export(layer: AttentionLayer, example: tuple[Tensor, Tensor], path: Path) -> None:
    import onnx

    axes = {0: "batch", 1: "seq"}
    with warnings.catch_warnings():
        # torch deprecates its own LeafSpec and blames whoever copies one
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        # both inputs share their axes on purpose, and the exporter remarks on it
        warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
        program = torch.onnx.export(
            layer,
            example,
            dynamo=True,
            verbose=False,
            dynamic_shapes={"hidden_states": axes, "attention_mask": axes},
            opset_version=20,
        )
    kinds = {node.op_type for node in program.model_proto.graph.node}
    assert not kinds & FORBIDDEN_NODES
    assert not {kind for kind in kinds if kind.startswith("Random")}
    onnx.save(program.model_proto, path)


def run_session(session: Any, x: Tensor, mask: Tensor) -> np.ndarray:
    (given,) = session.run(None, {"hidden_states": x.numpy(), "attention_mask": mask.numpy()})
    return given


@pytest.fixture
def aft_onnx_answers() -> Callable[[AttentionLayer, int, Sequence[int]], list[tuple[int, int]]]:
    """(layer, example length, lengths) → the (batch, length) that ONNX Runtime answers instead of raising."""

    def answers(layer: AttentionLayer, example_len: int, seq_lens: Sequence[int]) -> list[tuple[int, int]]:
        session = session_from_layer(layer, example_len)
        # what a failing node raises, whatever its kind; anything else is a fault of the test
        from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

        answered = []
        for seq_len in seq_lens:
            for batch in (1, 3):
                try:
                    run_session(session, *tokens_and_mask(batch, seq_len))
                except (Fail, InvalidArgument, RuntimeException):
                    continue
                answered.append((batch, seq_len))
        return answered

    return answers
