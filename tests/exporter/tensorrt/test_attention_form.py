"""The form of MaskedAttention in an engine: the choice, the rewritten graph, and the builder's result.

TensorRT's own builder needs a GPU. That of TensorRT-RTX stands in for it: its parser and its fusion of Attention are
real, the release number and the flags are TensorRT's.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.reference
import pytest
from attention_models import PRECISIONS, SIZES, our_attention

from effexport.plugins.masked_attention.trt import AS_ATTENTION
from effexport.plugins.ops import FLOAT_TYPES
from effexport.tensorrt.engine_from_onnx import engine_from_onnx
from effexport.tensorrt.preparation import attention_form, ops_that_differ, prepared_model
from effexport.tensorrt.sidecar import EngineInfo, read_sidecar
from effexport.tensorrt.spec import EngineSpec

pytestmark = pytest.mark.requires("torch", "onnx")
TRT = EngineSpec(target="trt", profiles=(SIZES,))
NEW = "11.4.0.106"


@pytest.mark.parametrize(
    ("dtype", "d", "e", "fields", "version", "form", "words"),
    [
        ("float16", 64, 64, {}, NEW, "Attention", "TensorRT 11.4.0.106 builds it as one kernel"),
        ("bfloat16", 16, 16, {}, "10.14.1.48", "Attention", "builds it as one kernel"),
        ("float16", 64, 64, {}, "10.13.3.9", "plugin", "10.13.3.9 does not import Attention; 10.14 and later do"),
        ("float16", 64, 64, {"plugins": "require"}, NEW, "plugin", "--plugins require asks for it"),
        ("float16", 64, 64, {"plugins": "never"}, NEW, "body", "--plugins never asks for it"),
        ("float16", 64, 64, {"target": "trt-rtx"}, "1.7.1.116", "body", "makes the same of the body, .* 1.7.1"),
        ("float32", 64, 64, {}, NEW, "plugin", "are float32 and .* fused attention takes float16 or bfloat16"),
        ("float16", 20, 20, {}, NEW, "plugin", "d of its inputs is 20; .* a fixed multiple of 8 from 16 to 256"),
        ("float16", 264, 264, {}, NEW, "plugin", "d of its inputs is 264; .* from 16 to 256"),
        ("float16", 64, 32, {}, NEW, "plugin", "d of its inputs is 64 and 32; TensorRT's fused attention takes one"),
    ],
)
def test_the_form_and_its_reason(
    dtype: str, d: int, e: int, fields: dict[str, Any], version: str, form: str, words: str
) -> None:
    chosen = attention_form(our_attention(dtype, d, e), replace(TRT, **fields), version)
    assert chosen is not None
    assert chosen.form == form
    assert re.search(words, chosen.reason)


def test_a_model_without_masked_attention_has_no_form_and_one_without_its_body_keeps_the_plugin() -> None:
    model = our_attention("float16", 64)
    del model.functions[:]
    chosen = attention_form(model, TRT, NEW)
    assert chosen is not None
    assert (chosen.form, chosen.reason) == ("plugin", "not Attention: the model has no function body of it to replace")
    del model.graph.node[:]
    assert attention_form(model, TRT, NEW) is None


def exact_attention(feeds: dict[str, np.ndarray], scale: float) -> tuple[np.ndarray, float]:
    """The formula of the operator's README in float64, and the largest logit of a visible key."""
    q, k, v = (feeds[name].astype(np.float64) for name in ("q", "k", "v"))
    visible = feeds["keep"][:, None, None, :]
    logits = scale * q @ k.swapaxes(2, 3)
    shown = np.where(visible, logits, np.finfo(np.float32).min)
    weights = np.exp(shown - shown.max(axis=-1, keepdims=True))
    largest = np.abs(np.where(visible, logits, 0)).max()
    return weights / weights.sum(axis=-1, keepdims=True) @ v, float(largest)


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 2**-24), ("float16", 2**-11)])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 63), (100, 7), (33, 130)])
def test_the_graph_with_attention_computes_what_the_body_and_the_formula_do(
    dtype: str, unit: float, n: int, m: int
) -> None:
    """The first sample sees some keys, the second only its last one, the third none; hidden keys have large logits."""
    random = np.random.default_rng((n, m))
    keep = random.random((4, m)) > 0.3
    keep[0, 0], keep[1], keep[2] = True, np.arange(m) == m - 1, False
    feeds = {name: random.standard_normal((4, 4, rows, 64)) for name, rows in (("q", n), ("k", m), ("v", m))}
    feeds["k"] *= np.where(keep, 1, 256)[:, None, :, None]
    feeds = {**{name: array.astype(dtype) for name, array in feeds.items()}, "keep": keep}
    model = our_attention(dtype, 64)
    attention = prepared_model(model, TRT, (90,), use_attention=True)
    assert [node.op_type for node in attention.model.graph.node].count("Attention") == 1
    onnx.checker.check_model(attention.model, full_check=True)
    expected, logit = exact_attention(feeds, 0.125)
    # ONNX's evaluator rounds scaled queries and logits, by shares of a logit, then powers, sums, weights and results
    limit = unit * np.abs(feeds["v"]).max() * (2 * (2 * logit + 3) + 1)
    for prepared in (attention, prepared_model(model, replace(TRT, target="trt-rtx"), (90,))):
        (found,) = onnx.reference.ReferenceEvaluator(prepared.model).run(None, feeds)
        assert (found.dtype, found.shape) == (feeds["q"].dtype, expected.shape)
        assert np.abs(found - expected).max() <= limit


def test_an_opset_is_declared_only_where_operators_have_gained_nothing_but_types() -> None:
    names = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    differing = set()
    for name in names:
        if not onnx.defs.has(name, 20):
            continue
        old, new = (onnx.defs.get_schema(name, opset) for opset in (20, 23))
        model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]> g () => () {}')
        model.graph.node.append(onnx.helper.make_node(name, [], []))
        if ops_that_differ(model, 23):
            differing.add(name)
            continue
        allowed = [{c.type_param_str: set(c.allowed_type_strs) for c in x.type_constraints} for x in (old, new)]
        assert all(types <= allowed[1][parameter] for parameter, types in allowed[0].items()), name
    assert differing == {"DequantizeLinear", "GroupNormalization", "QLinearMatMul", "QuantizeLinear"}
    chosen = attention_form(our_attention("float16", 64, opset=18), TRT, NEW)
    assert chosen is not None
    assert (chosen.form, chosen.reason) == (
        "plugin",
        "not Attention: it needs opset 23, where Cast, CastLike of this model differ",
    )


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[onnx.ModelProto, str], EngineInfo]:
    """(model, dtype) → the info of an engine of target trt, tmp_path / "trt.engine", by TensorRT-RTX as a stand-in."""
    import tensorrt_rtx

    class StandIn(types.SimpleNamespace):
        """`real` with other attributes in front."""

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    def make_builder(logger: Any) -> Any:
        real = tensorrt_rtx.Builder(logger)
        # TensorRT-RTX knows no flag for plugins
        return StandIn(real=real, create_network=lambda flags: real.create_network(flags & 1))

    flags = types.SimpleNamespace(STRONGLY_TYPED=0, PREFER_AOT_PYTHON_PLUGINS=2)
    api = StandIn(real=tensorrt_rtx, __version__=NEW, Builder=make_builder, NetworkDefinitionCreationFlag=flags)
    monkeypatch.setattr("effexport.tensorrt.engine_from_onnx.import_api", lambda target: api)
    monkeypatch.setattr("effexport.tensorrt.engine_from_onnx.inspected", lambda api, info, *others: info)
    monkeypatch.setattr("effexport.tensorrt.engine_from_onnx.current_compute_capability", lambda extra: 90)

    def build(model: onnx.ModelProto, dtype: str) -> EngineInfo:
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        return engine_from_onnx(path, TRT, tmp_path / "trt.engine", precision=PRECISIONS[dtype])

    return build


@pytest.mark.requires("rtx")
def test_attention_that_is_one_kernel_is_used_and_sidecar_and_inspect_say_so(
    engine: Callable[..., EngineInfo], cli: Callable[..., Any], tmp_path: Path
) -> None:
    info = engine(our_attention("float16", 64), "float16")
    assert info.implementation == {"MaskedAttention": "Attention"}
    assert (info.remarks, info.ptx) == ((), None)
    assert len([kernel for kernel in info.kernels if "mha" in kernel["name"]]) == 1
    path = tmp_path / "trt.engine"
    assert read_sidecar(path) == info
    shown = " ".join(cli("inspect", path).out.split())
    assert "effexport::MaskedAttention is the standard operator Attention" in shown
    assert "MaskedAttention Attention: TensorRT 11.4.0.106 builds it as one kernel" in shown
    values = json.loads(path.with_suffix(".json").read_text())
    assert values.pop("attention_form")["form"] == "Attention"
    path.with_suffix(".json").write_text(json.dumps(values))  # as an earlier effexport wrote it
    assert read_sidecar(path) == replace(info, attention_form=None)


@pytest.mark.requires("rtx")
def test_attention_that_the_builder_refuses_gives_way_to_the_other_forms_with_its_words(
    engine: Callable[..., EngineInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without our limits, TensorRT-RTX itself says that it has no kernel for float32; plugins need a real TensorRT."""
    anything = replace(AS_ATTENTION, types=FLOAT_TYPES)
    monkeypatch.setattr("effexport.tensorrt.preparation.AS_ATTENTION", anything)
    info = engine(our_attention("float32", 64), "float32")
    assert info.implementation == {"MaskedAttention": "body"}
    assert info.attention_form is not None
    assert info.attention_form.form == "body"
    assert "11.4.0.106 does not build Attention here: TensorRT build: it has no kernel" in info.attention_form.reason
    assert "runs as its function body" in info.remarks[0]
