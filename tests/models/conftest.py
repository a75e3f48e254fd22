"""Fixtures of the AFT tests: the slow reference and the ONNX check, the same for all four variants."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.layers import AttentionLayer

# Nodes that some runtime lacks, runs serially, computes unsafely or draws at random.
FORBIDDEN_NODES = {"Loop", "Scan", "If", "CumSum", "TopK", "ReduceLogSumExp"}


@pytest.fixture
def aft_reference() -> Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]:
    """(layer, x, keep [batch, seq], w [heads, seq, seq]) → float64 [batch, seq, dim], by the formula."""

    def linear(layer: nn.Linear, x: Tensor) -> Tensor:
        bias = None if layer.bias is None else layer.bias.double()
        return F.linear(x, layer.weight.double(), bias)

    @torch.no_grad()
    def reference(layer: AttentionLayer, x: Tensor, keep: Tensor, w: Tensor) -> Tensor:
        x, heads = x.double(), w.shape[0]
        k, v = (linear(p, x).unflatten(-1, (heads, -1)) for p in (layer.key, layer.value))
        context = torch.zeros_like(linear(layer.value, x)).unflatten(-1, (heads, -1))
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                end = t + 1 if layer.spec.causal else x.shape[1]
                seen = [s for s in range(end) if keep[b, s]]
                if seen:
                    logits = k[b, seen] + w[:, t, seen].double().T[..., None]
                    context[b, t] = (torch.softmax(logits, dim=0) * v[b, seen]).sum(dim=0)
        return linear(layer.out, torch.sigmoid(linear(layer.query, x)) * context.flatten(-2))

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


@pytest.fixture
def aft_onnx_error() -> Callable[[AttentionLayer, int, Sequence[int]], float]:
    """(layer, example length, lengths) → the largest |ONNX Runtime − torch| / RMS, over batches 1 and 3."""

    def inputs(batch: int, seq_len: int, dim: int) -> tuple[Tensor, Tensor]:
        mask = torch.ones(batch, seq_len, dtype=torch.int64)
        mask[-1, seq_len - seq_len // 3 :] = 0
        return torch.randn(batch, seq_len, dim), mask

    @torch.no_grad()
    def error(layer: AttentionLayer, example_len: int, seq_lens: Sequence[int]) -> float:
        onnx = pytest.importorskip("onnx")
        onnxruntime = pytest.importorskip("onnxruntime")
        layer, dim, axes = layer.eval(), layer.spec.dim, {0: "batch", 1: "seq"}
        with warnings.catch_warnings():
            # torch deprecates its own LeafSpec and blames whoever copies one
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            # both inputs share their axes on purpose, and the exporter remarks on it
            warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
            program = torch.onnx.export(
                layer,
                inputs(2, example_len, dim),
                dynamo=True,
                verbose=False,
                dynamic_shapes={"hidden_states": axes, "attention_mask": axes},
                opset_version=20,
            )
        file = io.BytesIO()
        onnx.save(program.model_proto, file)
        kinds = {node.op_type for node in program.model_proto.graph.node}
        assert not kinds & FORBIDDEN_NODES
        assert not {kind for kind in kinds if kind.startswith("Random")}
        session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
        worst = 0.0
        for seq_len in seq_lens:
            for batch in (1, 3):
                x, mask = inputs(batch, seq_len, dim)
                expected = layer(x, mask).numpy()
                feeds = {"hidden_states": x.numpy(), "attention_mask": mask.numpy()}
                (given,) = session.run(None, feeds)
                assert given.shape == expected.shape
                assert given.dtype == expected.dtype
                assert np.isfinite(given).all()
                rms = float(np.sqrt(np.square(expected).mean()))
                worst = max(worst, float(np.abs(given - expected).max()) / rms)
        return worst

    return error
