"""Models that cast, mix types and use autocast, exported at every precision, against the untouched model in float32."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto
from slow_cases import slow
from torch import Tensor, nn

import effexport
from effexport.base.errors import StageError
from effexport.export.onnx_from_module import at_precision
from effexport.models import attention_from_spec
from effexport.models.adapters import replace
from effexport.models.adapters.adapter import Adapter
from effexport.models.user.model import CalledByPosition
from effexport.models.variants.aft_local import AFTLocalSpec
from effexport.models.variants.linear import LinearSpec
from effexport.proof.cases import load_reference
from effexport.proof.tolerances import ARITHMETIC, OWN_ERROR_FACTOR

pytestmark = pytest.mark.requires("torch", "onnx", "ort")

DIM = 16


class Embedder(nn.Module):
    """Typical steps of sentence embedders, matchers and decoders in one `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, DIM, padding_idx=0)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 5)
        self.register_buffer("frequencies", 10_000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = F.normalize(self.embed(input_ids), dim=-1)
        angles = torch.arange(x.shape[1]).type_as(self.frequencies)[:, None] * self.frequencies
        x = x + torch.cat((angles.sin(), angles.cos()), dim=-1)
        x = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-8).type_as(x)
        q, k, v = self.qkv(x.to(torch.float32)).chunk(3, dim=-1)
        kept = attention_mask > 0
        logits = (q @ k.transpose(1, 2) / DIM**0.5).masked_fill(~(kept[..., None] * kept[:, None]), -1e9)
        x = F.softmax(logits, dim=-1, dtype=torch.float32) @ v
        share = attention_mask[..., None].float()
        return self.out((x * share).sum(1) / share.sum(1).clamp(min=1e-9))


IDS = torch.arange(1, 25).reshape(2, 12)
EXAMPLES = {"input_ids": IDS, "attention_mask": (torch.arange(12) < torch.tensor([[7], [12]])).long()}


def error(actual: Any, expected: Tensor) -> float:
    difference = np.abs(np.asarray(actual).astype(np.float64) - expected.numpy())
    return float(difference.max() / np.sqrt((expected.numpy() ** 2).mean()))


@pytest.mark.parametrize("precision", ["fp32", slow("fp16"), "bf16"])
def test_a_model_that_mixes_types_is_exported_at_every_precision(precision: str, tmp_path: Path) -> None:
    model = Embedder().eval()
    whole: dict[str, Any] = {"bf16": "graph"} if precision == "bf16" else {}
    result = effexport.export(model, EXAMPLES, tmp_path / "out", precision=precision, **whole)
    feed = {name: value.numpy() for name, value in EXAMPLES.items()}
    if precision == "bf16":
        # ONNX Runtime has no bfloat16 on a CPU, so nothing was proven; see test_bfloat16.py
        from onnx.reference import ReferenceEvaluator

        assert result.report.verdict == "not run"
        (output,) = ReferenceEvaluator(str(result.path / "model.onnx")).run(None, feed)
    else:
        assert result.report.verdict == "passed"
        with effexport.load(result.path) as runner:
            output = runner.run(feed)["output"]
    with torch.no_grad():
        expected = model(**EXAMPLES)
    assert error(output, expected) <= ARITHMETIC[precision, "encoder"].value


class Divided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.sum(-1, keepdim=True) + 1e-8) + x * 1.00001


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_constants_close_to_0_and_1_stay_in_the_graph(precision: str, tmp_path: Path) -> None:
    # onnxscript removes x + 1e-8 and x * 1.00001: 0 / 0
    x = torch.stack((torch.zeros(7, 4), torch.ones(7, 4)))
    result = effexport.export(Divided(), x, tmp_path / "out", precision=precision)
    assert result.report.verdict == "passed"
    with effexport.load(result.path) as runner:
        output = runner.run({"x": x.half().numpy() if precision == "fp16" else x.numpy()})["output"]
    assert error(output, Divided()(x)) <= {"fp32": 1e-6, "fp16": 1e-3}[precision]  # one rounding
    graph = onnx.load(result.path / "model.onnx").graph
    assert [node.op_type for node in graph.node].count("Mul") == 1


class TheirProduct(nn.Module):
    """Stands for a layer of another package."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class UnderAutocast(nn.Module):
    def __init__(self, layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.layer, self.out, self.dtype = layer, nn.Linear(DIM, DIM), dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            x = self.out(F.gelu(self.layer(x)))
            with torch.autocast("cpu", enabled=False):
                return x.float().softmax(dim=-1)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        pytest.param(torch.bfloat16, "fp32", id="bf16 in fp32"),
        pytest.param(torch.float16, "fp16", id="fp16 in fp16"),
        pytest.param(torch.bfloat16, "fp16", id="bf16 in fp16", marks=pytest.mark.soak),
        pytest.param(torch.float16, "fp32", id="fp16 in fp32", marks=pytest.mark.soak),
    ],
)
def test_autocast_is_the_originals_own_error(dtype: torch.dtype, precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = UnderAutocast(attention_from_spec(LinearSpec(dim=DIM, heads=2)), dtype).eval()
    x = torch.randn(2, 24, DIM)
    result = effexport.export(model, x, tmp_path / "out", precision=precision)
    assert result.report.verdict == "passed"
    types = {value.type.tensor_type.elem_type for value in onnx.load(result.path / "model.onnx").graph.value_info}
    assert TensorProto.BFLOAT16 not in types, "ONNX Runtime has no kernels for it on a CPU"
    plain = UnderAutocast(model.layer, dtype).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        exact = plain.out(F.gelu(plain.layer(x))).softmax(dim=-1)
    own = error(exact, expected)
    cases = {case.name: case for case in load_reference(result.artifact.reference_path)}
    # it is relative to the RMS of each token, and of an input that the precision has rounded
    assert own / 2 < cases["example"].own_error < 2 * own
    with effexport.load(result.path) as runner:
        output = runner.run({"x": x.half().numpy() if precision == "fp16" else x.numpy()})["output"]
    limit = ARITHMETIC[precision, "encoder"].value
    assert error(output, exact) <= limit
    assert error(output, expected) <= max(limit, OWN_ERROR_FACTOR * own)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_autocast_does_not_hide_a_layer_that_computes_something_else(
    factor: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def replaced(layer: Any, seq_len: int) -> nn.Module:
        ours = copy.deepcopy(layer)
        ours.linear.weight.data *= factor  # bfloat16 rounds by 2e-3
        return ours

    name = f"{TheirProduct.__module__}.{TheirProduct.__qualname__}"
    monkeypatch.setattr(replace, "replacements", lambda: {name: (Adapter("pytest", ("",), {}), replaced)})
    model, x = UnderAutocast(TheirProduct()).eval(), torch.randn(2, 24, DIM)
    if factor == 1:
        assert effexport.export(model, x, tmp_path / "out").report.verdict == "passed"
        return
    with pytest.raises(StageError, match=r"the first layer that differs is layer .*TheirProduct"):
        effexport.export(model, x, tmp_path / "out")


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.LayerNorm(DIM)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.layer(x, attention_mask))
        return y


@pytest.mark.parametrize(
    "spec", [LinearSpec(dim=DIM, heads=2), AFTLocalSpec(dim=DIM, seq_len=24)], ids=["linear", "aft"]
)
def test_layers_of_ours_are_exported_as_if_the_code_around_them_mixed_nothing(
    spec: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Block(attention_from_spec(spec)).eval()
    examples = {"x": torch.randn(2, 24, DIM), "attention_mask": torch.ones(2, 24, dtype=torch.int64)}
    graphs = []
    for _ in range(2):
        result = effexport.export(model, examples, tmp_path / "out", precision="fp16", force=True)
        graphs.append((result.path / "model.onnx").read_bytes())
        monkeypatch.setattr(CalledByPosition, "to_half", lambda self, dtype: self.to(dtype))
    assert graphs[0] == graphs[1]


def test_a_copy_in_half_precision_leaves_the_module_as_it_was() -> None:
    from effexport.models.user.model import called_by_position

    module = called_by_position(Embedder(), ["input_ids", "attention_mask"], {})
    before = {name: value.dtype for name, value in module.state_dict().items()}
    assert at_precision(module, "fp16").state_dict()["qkv.weight"].dtype == torch.float16
    assert {name: value.dtype for name, value in module.state_dict().items()} == before
    assert module.precision is None


@pytest.mark.requires("foreign")
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.soak), "fp16"])
def test_autocast_around_a_layer_of_another_package(precision: str, tmp_path: Path) -> None:
    from nystrom_attention import NystromAttention

    torch.manual_seed(0)
    model = UnderAutocast(NystromAttention(DIM, dim_head=8, heads=2, num_landmarks=8)).eval()
    result = effexport.export(model, torch.randn(2, 24, DIM), tmp_path / "out", precision=precision)
    assert result.report.verdict == "passed"
    assert result.artifact.spec.custom_ops["SequenceConv"] == 1


class OddOperators(nn.Module):
    """Calls what ONNX defines for bfloat16 only from opset 22 on, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv1d(DIM, DIM, 3, padding=1), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.elu(self.conv(x.transpose(1, 2)).transpose(1, 2)) + F.softplus(x).sin()
        return torch.einsum("bnd,bmd->bnm", y, self.linear(y)), y.cos()


def test_what_onnx_lacks_for_bfloat16_is_computed_in_float32(tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    model, x = OddOperators().eval(), torch.randn(2, 12, DIM)
    result = effexport.export(model, x, tmp_path / "out", precision="bf16", bf16="graph")
    assert [tensor.dtype for tensor in result.artifact.spec.outputs] == ["bfloat16", "bfloat16"]
    rounded = x.bfloat16()
    given = rounded.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    outputs = ReferenceEvaluator(str(result.path / "model.onnx")).run(None, {"x": given})
    with torch.no_grad():
        expected = model(rounded.float())
    for actual, wanted in zip(outputs, expected, strict=True):
        assert actual.dtype.name == "bfloat16"
        assert error(actual, wanted) <= ARITHMETIC["bf16", "encoder"].value
