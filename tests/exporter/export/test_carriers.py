"""Operators of ONNX Runtime and of ONNX in the place of LinearRecurrence: --carrier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

import effexport
from effexport.artifact import open_artifact
from effexport.base.errors import EffexportError, RuntimeUnsupportedError, UserError
from effexport.base.spec import OPSETS, BuildSpec
from effexport.export.custom_nodes import CONVERTED_OPSET
from effexport.models.variants.gated_delta import GatedDeltaSpec
from effexport.models.variants.softmax import SoftmaxSpec
from effexport.plugins.linear_recurrence.op import linear_recurrence
from effexport.plugins.ops import CARRIER_OPSET, CONTRIB_DOMAIN
from effexport.runners.ort.session import ANY_OPSET

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


class TwoRules(nn.Module):
    """Gated linear attention with two queries for each key, and then the delta rule without decay."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.query, self.key, self.value, self.decay = (nn.Linear(12, n) for n in (24, 12, 12, 12))
        self.beta = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x).unflatten(-1, (4, 6)), self.key(x).unflatten(-1, (2, 6))
        value = self.value(x).unflatten(-1, (2, 6))
        past = torch.zeros(x.shape[0], 2, 6, 6, dtype=torch.promote_types(x.dtype, torch.float32))
        decay = -nn.functional.softplus(self.decay(x)).unflatten(-1, (2, 6))
        beta = torch.sigmoid(self.beta(x))[..., None]
        read, past = linear_recurrence(query, key, value, past, decay, torch.ones_like(beta), 0.5, False, True)
        short = key / 4
        written, _ = linear_recurrence(read[:, :, :2], short, value, past, torch.zeros_like(beta), beta, 1.0, True)
        return written.flatten(2)


def built(output: Path, carrier: str, **options: Any) -> effexport.BuildResult:
    return effexport.build(
        module=TwoRules().eval(), examples=torch.randn(2, 9, 12), output=output, carrier=carrier, **options
    )


def calls(file: Path) -> list[tuple[str, str]]:
    """Domain and rule of each LinearAttention of a file."""
    nodes = onnx.load(file).graph.node
    return [
        (node.domain, helper.get_node_attr_value(node, "update_rule").decode())
        for node in nodes
        if node.op_type == "LinearAttention"
    ]


def test_onnx_runtime_runs_its_own_operator_without_our_library(tmp_path: Path) -> None:
    result = built(tmp_path / "built", "contrib")
    model = onnx.load(result.path / "model.onnx")
    assert calls(result.path / "model.onnx") == [(CONTRIB_DOMAIN, "gated"), (CONTRIB_DOMAIN, "delta")]
    assert {entry.domain for entry in model.opset_import} == {"", CONTRIB_DOMAIN}
    assert not model.functions
    assert result.report.implementation == {"com.microsoft::LinearAttention": "kernel"}
    assert any("2 nodes became com.microsoft::LinearAttention" in note for note in result.report.notes)
    artifact = open_artifact(result.path)
    assert artifact.spec.carrier == "contrib"
    assert artifact.manifest.custom_ops == {}
    x = torch.randn(3, 20, 12)
    session = onnxruntime.InferenceSession(result.path / "model.onnx", providers=["CPUExecutionProvider"])
    wanted = TwoRules().eval()(x).detach().numpy()
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], wanted, rtol=0, atol=1e-5)
    # traced graphs still have our operator
    refitted = effexport.refit(result.path, module=TwoRules(seed=1).eval(), force=True)
    assert calls(refitted.path / "model.onnx") == calls(result.path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["contrib", "standard"])
def test_a_prefill_has_the_carrier_and_a_decode_step_none(
    tmp_path: Path, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ANY_OPSET, "0")
    spec = BuildSpec(model=GatedDeltaSpec(dim=16, heads=2, seq_len=40), carrier=carrier)  # type: ignore[arg-type]
    result = effexport.build(spec, tmp_path / "built")
    domain, how = (CONTRIB_DOMAIN, "kernel") if carrier == "contrib" else ("", "body")
    for name, count in (("model", 1), ("prefill", 1), ("decode_step", 0)):
        file = result.path / f"{name}.onnx"
        assert calls(file) == [(domain, "gated_delta")] * count
        assert onnx.load(file).opset_import[0].version == (20 if domain else CARRIER_OPSET)
    assert result.report.implementation == {"CausalConv": "kernel", f"{domain or 'ai.onnx'}::LinearAttention": how}
    assert effexport.verify(result.path).verdict == "passed"
    monkeypatch.delenv(ANY_OPSET)
    if not domain:
        with pytest.raises(RuntimeUnsupportedError, match=f"set {ANY_OPSET}=0"):
            effexport.verify(result.path)


@pytest.mark.slow
def test_half_types_are_float32_around_the_operator(tmp_path: Path) -> None:
    """In float16: ONNX Runtime does not run models of bfloat16 on a CPU."""
    result = built(tmp_path / "built", "contrib", precision="fp16")
    assert result.report.verdict == "passed"
    assert result.report.implementation == {"com.microsoft::LinearAttention": "kernel"}


def test_what_cannot_be_carried_is_refused_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ANY_OPSET, raising=False)
    recurrent = GatedDeltaSpec(dim=16, heads=2, seq_len=40)
    for model, options, message in (
        (SoftmaxSpec(dim=16, heads=2), {"carrier": "contrib"}, "softmax attention has nothing that it computes"),
        (SoftmaxSpec(dim=16, heads=2), {"carrier": "standard", "fused": False}, "with --unfused has nothing"),
        (recurrent, {"carrier": "contrib", "inline": True}, "--inline leaves standard operators only"),
        (recurrent, {"carrier": "onnx"}, "carrier is 'onnx'; expected auto, own, contrib, standard"),
    ):
        with pytest.raises(ValueError, match=message):
            BuildSpec(model=model, **options)  # type: ignore[arg-type]
    carried = BuildSpec(model=recurrent, carrier="contrib")
    with pytest.raises(UserError, match="was given with the target trt"):
        effexport.build(carried, tmp_path / "built", targets=["trt"])
    with pytest.raises(EffexportError, match=f"its opset is newer; set {ANY_OPSET}=0"):
        effexport.build(BuildSpec(model=recurrent, carrier="standard"), tmp_path / "built")
    assert not (tmp_path / "built").exists()


@pytest.mark.slow
def test_a_module_without_the_operator_is_refused_when_it_is_traced(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Linear has nothing that it computes"):
        effexport.build(
            module=nn.Linear(4, 4), examples=torch.randn(2, 4), output=tmp_path / "built", carrier="contrib"
        )


def test_a_spec_keeps_the_carrier_only_if_one_was_chosen() -> None:
    model = GatedDeltaSpec(dim=16, heads=2, seq_len=40)
    assert "carrier" not in BuildSpec(model=model).to_dict()
    conv = {"CausalConv": 1}
    own = conv | {"LinearRecurrence": 1}
    for carrier, ops, opset in (("own", own, 20), ("contrib", conv, 20), ("standard", conv, 27)):
        spec = BuildSpec(model=model, carrier=carrier)  # type: ignore[arg-type]
        assert BuildSpec.from_dict(spec.to_dict()) == spec
        assert spec.to_dict()["carrier"] == carrier
        assert (spec.custom_ops, spec.prefill_ops, spec.opset_of_file) == (ops, ops, opset)


def test_no_operator_changes_between_the_last_opset_that_is_converted_to_and_that_of_the_carrier() -> None:
    """Attributes may be added, if their default is what was done before; types may be added, too."""
    names = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    changed = []
    for name in names:
        try:
            before = onnx.defs.get_schema(name, CONVERTED_OPSET, "")
        except onnx.defs.SchemaError:
            continue  # a new operator
        after = onnx.defs.get_schema(name, CARRIER_OPSET, "")
        if before.since_version == after.since_version:
            continue
        assert not before.deprecated
        assert [x.name for x in before.inputs] == [x.name for x in after.inputs]
        added = after.attributes.keys() ^ before.attributes.keys()
        assert all(after.attributes[attribute].default_value.name for attribute in added)
        changed.append(name)
    # its new attribute is the type that sums of half types are computed in
    assert changed == ["Range"]
    assert CARRIER_OPSET not in OPSETS
    assert onnx.defs.get_schema("LinearAttention").since_version == CARRIER_OPSET
