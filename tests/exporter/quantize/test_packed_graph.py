"""Nodes after a linear layer that PackedLinear takes over from the graph, those that it leaves, and rounded results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper
from slow_cases import slow

import effexport
from effexport.options import BuildOptions
from effexport.pipeline.request import BuildRequest
from effexport.plugins.activations import ACTIVATIONS
from effexport.proof.check import Kind

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


class Between(nn.Module):  # type: ignore[name-defined, misc]
    """x and two linear layers, in some way."""

    def __init__(self, way: Callable[[Any, Any, Any], Any], bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(32, 32, bias=bias) for _ in range(2))
        self.way = way

    def forward(self, x: Any) -> Any:
        return self.way(x, self.a, self.b)


WAYS: dict[str, tuple[Callable[[Any, Any, Any], Any], list[str], list[str]]] = {
    "gelu": (lambda x, a, b: x + b(F.gelu(a(x))), ["gelu", "none, residual"], []),
    "gelu_tanh": (lambda x, a, b: b(F.gelu(a(x), approximate="tanh")) + x, ["gelu_tanh", "none, residual"], []),
    "relu": (lambda x, a, b: b(torch.relu(a(x))), ["relu", "none"], []),
    "silu": (lambda x, a, b: b(F.silu(a(x))), ["silu", "none"], []),
    "activation and residual": (lambda x, a, b: b(x) + F.silu(a(x)), ["none, residual", "silu"], []),
    "read twice": (lambda x, a, b: F.gelu(y := a(x)) * y + b(x), ["none", "none, residual"], ["Gelu", "Mul"]),
    "not SiLU": (lambda x, a, b: b(torch.sigmoid(a(x)) * x), ["none", "none"], ["Sigmoid", "Mul"]),
    "another shape": (lambda x, a, b: b(a(x)) + x[:1], ["none", "none"], ["Add"]),
    "of all tokens": (lambda x, a, b: b(a(x)) + x.mean(1, keepdim=True), ["none", "none"], ["Add"]),
}


def built(module: Any, x: Any, folder: Path) -> tuple[effexport.Artifact, list[str], list[str]]:
    """The artifact, what each PackedLinear computes, and the types of the other nodes."""
    result = effexport.export(module.eval(), x, folder / "built", precision="bf16")
    assert result.report.verdict == "passed"
    graph = onnx.load(str(result.artifact.model_path)).graph
    packed = [node for node in graph.node if node.op_type == "PackedLinear"]
    words = [
        ACTIVATIONS[helper.get_node_attr_value(node, "activation")]
        + ", residual" * ("no_residual" not in node.input[3])
        for node in packed
    ]
    return result.artifact, words, [node.op_type for node in graph.node if node not in packed]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [True, slow(False)], ids=["bias", "no bias"])
def test_what_follows_a_layer_is_part_of_it(way: str, bias: bool, tmp_path: Path) -> None:
    function, expected, left = WAYS[way]
    artifact, words, others = built(Between(function, bias), torch.randn(2, 5, 32), tmp_path)
    assert (sorted(words), set(left) <= set(others)) == (sorted(expected), True), others
    assert artifact.manifest.custom_ops == {"PackedLinear": 2}
    assert not {"MatMul", "Gemm"} & set(others)


@pytest.mark.parametrize("shape", [(4, 32), (2, 3, 5, 32)], ids=str)
def test_other_ranks_are_reshaped(shape: tuple[int, ...], tmp_path: Path) -> None:
    way = WAYS["gelu"][0]
    _, words, others = built(Between(way, True), torch.randn(shape), tmp_path)
    assert words == ["gelu", "none"]  # a residual has three axes
    assert "Reshape" in others


@pytest.mark.parametrize("shape", [(1, 32), (1,), ()], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_bias_may_be_broadcast(shape: tuple[int, ...], precision: str, tmp_path: Path) -> None:
    """Of two axes, the exporter writes a Gemm, whose bias may have more axes or fewer numbers than an operator's."""
    module = Between(WAYS["relu"][0], True)
    module.a.bias = nn.Parameter(torch.randn(shape))
    result = effexport.export(module.eval(), torch.randn(4, 32), tmp_path / "built", precision=precision)
    assert result.report.verdict == "passed"


class Attends(nn.Module):  # type: ignore[name-defined, misc]
    """Attention over projections, of which the query's is changed in some way."""

    def __init__(self, change: Callable[[Any], Any], causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.change, self.causal = change, causal

    def forward(self, x: Any) -> Any:
        q, k, v = (part(x).unflatten(-1, (2, 16)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(self.change(q), k, v, is_causal=self.causal).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize(
    ("change", "causal", "rounded"),
    [(lambda q: q, False, 3), slow((lambda q: 2 * q, False, 0)), slow((lambda q: q, True, 0))],
    ids=["as it is", "scaled", "causal"],
)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_results_that_attention_multiplies_are_rounded(
    change: Callable[[Any], Any], causal: bool, rounded: int, precision: str, tmp_path: Path
) -> None:
    module = Attends(change, causal).eval()
    result = effexport.export(module, torch.randn(2, 5, 32), tmp_path / "built", precision=precision)
    record = result.artifact.manifest.quantization
    nodes = onnx.load(str(result.artifact.model_path)).graph.node
    found = [a.i for node in nodes for a in node.attribute if a.name == "round_output"]
    assert record is not None
    assert (sum(found), sum(layer.rounds_output for layer in record.layers)) == (rounded, rounded)
    assert set(record.unrounded) <= {name for node in nodes for name in node.output}
    outcomes = {check.status for check in result.report.checks if check.kind == Kind.GIVEN_ROUNDINGS}
    assert outcomes == {"passed"}


def test_a_layer_is_only_too_wide_for_int8() -> None:
    from effexport.plugins.quantized_linear import MOST_INPUTS
    from effexport.quantize.modules import layers_to_quantize

    wide = nn.ModuleDict({"a": nn.Linear(MOST_INPUTS + 1, 16, device="meta")})
    assert layers_to_quantize(wide, (), "bf16")[0] == ["a"]
    chosen, (kept,) = layers_to_quantize(wide, (), "int8")
    assert (chosen, kept.layer) == ([], "a")
    assert "products of int8 may overflow" in kept.reason


def test_linear_layers_are_the_default_without_engines() -> None:
    def resolved(**options: Any) -> str | None:
        return BuildRequest.of(BuildOptions(variant="linear", **options)).resolve()[0].bf16

    assert resolved(precision="bf16") == "linear"
    assert resolved(precision="bf16", bf16="graph") == "graph"
    assert resolved(precision="bf16", targets=("trt-rtx",)) == "graph"
    assert resolved(precision="fp32") is None
