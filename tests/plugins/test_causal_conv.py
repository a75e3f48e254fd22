"""CausalConv beside the standard's operator, in parts, and with hidden tokens: all that its contract cannot say."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from emulated_plugins import array_of
from implementations import implementation
from kernel_sessions import session
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from effexport.plugins.causal_conv.op import exportable_reference, reference
from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import OPS

OP = "CausalConv"
CONTRACT = load_contract(OPS[OP])

# PyTorch and ONNX Runtime have other instructions for what is left of an array than for whole vectors.
SAME_BITS = {"kernel": 0.0, "cuda": 0.0, "torch": 1e-6, "body": 1e-6}

pytestmark = pytest.mark.requires("native", "onnx", "ort")


def standard_model(feeds: dict[str, np.ndarray], silu: int, domain: str) -> onnx.ModelProto:
    """One node of CausalConvWithState: ONNX's of opset 27, or ONNX Runtime's, which takes the same."""
    activation = "silu" if silu else "none"
    node = helper.make_node("CausalConvWithState", list(feeds), ["y", "present"], domain=domain, activation=activation)
    given = [helper.make_tensor_value_info(name, 1, x.shape) for name, x in feeds.items()]
    made = [helper.make_tensor_value_info(name, 1, None) for name in ("y", "present")]
    opsets = [helper.make_opsetid("", 27 if domain == "" else 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "one", given, made), opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("how", ["kernel", "body"])
@pytest.mark.parametrize("silu", [0, 1])
def test_it_computes_what_onnx_and_onnx_runtime_define(silu: int, how: str) -> None:
    for seq, channels, taps in ((37, 10, 4), (2, 5, 4), (1, 300, 3), (140, 3, 2)):
        case = Case((2, seq, channels, taps, silu), kind="visible")
        inputs = CONTRACT.inputs(case, "cpu")
        answers = implementation(OP, how).answers(case, inputs)
        feeds = {"x": inputs["x"].mT, "weight": inputs["weight"][:, None], "bias": inputs["bias"]}
        channels_first = {name: x.contiguous().numpy() for name, x in (feeds | {"past": inputs["past"].mT}).items()}
        standard = ReferenceEvaluator(standard_model(channels_first, silu, "")).run(None, channels_first)
        contrib = session(standard_model(channels_first, silu, "com.microsoft"), library=False)
        for wanted in (standard, contrib.run(None, channels_first)):
            limit = CONTRACT.limit(case).value * np.abs(wanted[0]).max()
            np.testing.assert_allclose(answers[0].swapaxes(1, 2), wanted[0], rtol=0, atol=limit)
            np.testing.assert_array_equal(answers[1].swapaxes(1, 2), wanted[1])


@pytest.mark.parametrize("how", ["torch", "kernel", "cuda", "body"])
@pytest.mark.parametrize("ends", [[1, 2, 3, 70], [31, 32, 33, 64, 70], [0, 69, 70]])
def test_tokens_may_come_in_parts(how: str, ends: list[int]) -> None:
    """Also where some are hidden, at the ends of parts too."""
    run, case = implementation(OP, how).answers, Case((2, 70, 9, 4, 1))
    inputs = CONTRACT.inputs(case, "cpu")
    inputs["keep"][0, [1, 30, 31, 64]] = False
    y, present = run(case, inputs)
    past, parts = inputs["past"], []
    for start, end in itertools.pairwise([0, *ends]):
        part = {name: inputs[name][:, start:end].contiguous() for name in ("x", "keep")}
        out, state = run(replace(case, sizes=(2, end - start, 9, 4, 1)), inputs | part | {"past": past})
        past = torch.from_numpy(state)
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), y, rtol=0, atol=SAME_BITS[how])
    np.testing.assert_array_equal(past, present)


@pytest.mark.parametrize("how", ["torch", "kernel", "cuda", "body"])
def test_hidden_tokens_are_as_if_they_were_not_there(how: str) -> None:
    """Before the others, after them, and between them, in other places of each sample."""
    run, case = implementation(OP, how).answers, Case((4, 40, 9, 5, 1), kind="visible")
    inputs = CONTRACT.inputs(case, "cpu")
    y, present = run(case, inputs)
    keep = torch.zeros(4, 100, dtype=torch.bool)
    for sample, places in enumerate((range(60, 100), range(40), [*range(3), *range(63, 100)], range(1, 80, 2))):
        keep[sample, list(places)] = True
    x = torch.full((4, 100, 9), torch.nan)
    x[keep] = inputs["x"].flatten(0, 1)
    found, state = run(replace(case, sizes=(4, 100, 9, 5, 1)), inputs | {"x": x, "keep": keep})
    np.testing.assert_allclose(found[keep.numpy()].reshape(y.shape), y, rtol=0, atol=SAME_BITS[how])
    assert not found[~keep.numpy()].any()
    np.testing.assert_array_equal(state, present)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("how", ["kernel", "cuda"])
@pytest.mark.parametrize("taps", [2, 4, 6])
def test_nan_and_infinity_reach_the_tokens_of_one_filter(taps: int, how: str, dtype: str) -> None:
    case = Case((1, 80, 70, taps, 0), kind="visible", dtype=dtype)
    for value in (torch.nan, torch.inf):
        inputs = CONTRACT.inputs(case, "cpu")
        inputs["x"][0, 30, 66] = value
        inputs["past"][0, -1, 5] = value
        y, _ = implementation(OP, how).answers(case, inputs)
        wanted = np.zeros((1, 80, 70), bool)
        wanted[0, 30 : 30 + taps, 66] = wanted[0, : taps - 1, 5] = True
        np.testing.assert_array_equal(~np.isfinite(y.astype(np.float32)), wanted)


class Formula(nn.Module):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, past: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return exportable_reference(x, weight, bias, past, keep, True)


@pytest.mark.parametrize("kind", ["random", "padded", "no token", "few", "visible"])
@pytest.mark.parametrize("seq", [1, 63, 600])
def test_the_formula_of_layers_has_the_results_and_the_gradients_of_the_definition(kind: str, seq: int) -> None:
    case = Case((3, seq, 8, 4, 1), kind=kind)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in CONTRACT.inputs(case, "cpu").items()}
    found = []
    for formula in (reference, exportable_reference):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs.values()]
        outputs = formula(*leaves, True)
        sum(x.square().sum() for x in outputs).backward()
        gradients = [x.grad for x in leaves if x.grad is not None]
        found.append([*outputs, *gradients])
        assert len(gradients) == 4
    for own, wanted in zip(*found, strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)


def test_the_formula_of_layers_is_exported_for_any_length() -> None:
    dynamic = {"x": {0: "batch", 1: "seq"}, "past": {0: "batch"}, "keep": {0: "batch", 1: "seq"}}
    shapes = {name: dict.fromkeys(own, torch.export.Dim.DYNAMIC) for name, own in dynamic.items()}
    small, other = (CONTRACT.inputs(Case((2, seq, 8, 4, 1)), "cpu") for seq in (20, 700))
    program = torch.export.export(Formula(), (), small, dynamic_shapes=shapes | {"weight": None, "bias": None})
    for own, wanted in zip(program.module()(**other), reference(*other.values(), True), strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-6)


def test_half_types_are_computed_in_float32() -> None:
    """A sum that float16 could not hold on the way, and one rounding at the end."""
    inputs = {
        "x": torch.full((1, 3, 1), 300.0),
        "weight": torch.tensor([[-299.0, 299.0, 1.0]]),
        "bias": torch.zeros(1),
        "past": torch.full((1, 2, 1), 300.0),
    }
    halves = {name: x.half() for name, x in inputs.items()} | {"keep": torch.ones(1, 3, dtype=torch.bool)}
    for how in ("torch", "kernel", "cuda", "body"):
        y, _ = implementation(OP, how).answers(Case((1, 3, 1, 3, 0), dtype="float16"), halves)
        np.testing.assert_array_equal(y, np.full((1, 3, 1), 300, np.float16))
    y, _ = exportable_reference(*halves.values())
    assert array_of(y).tolist() == [[[300.0]] * 3]
