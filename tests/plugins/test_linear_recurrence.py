"""LinearRecurrence beside the standard's operator, in parts, and with padding: all that its contract cannot say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from emulated_plugins import array_of
from implementations import implementation
from kernel_sessions import session
from one_node import one_node_model
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import OPS

OP = "LinearRecurrence"
CONTRACT = load_contract(OPS[OP])
SCALE = 0.25
RULES = ("linear", "gated", "delta", "gated_delta")
HOWS = ("torch", "kernel", "body")

pytestmark = pytest.mark.requires("native", "onnx", "ort")


def case_of(rule: str, per_channel: int, seq: int = 70, kind: str = "random") -> Case:
    """Two heads read each of two states."""
    return Case((2, seq, 4, 2, 6, 5, int("delta" in rule), per_channel), (SCALE,), kind)


def inputs_of(rule: str, case: Case) -> dict[str, Tensor]:
    inputs = CONTRACT.inputs(case, "cpu")
    if "gated" not in rule:
        inputs["decay"].zero_()
    if "delta" not in rule:
        inputs["beta"].fill_(1)
    return inputs


def standard_model(rule: str, inputs: dict[str, np.ndarray], domain: str) -> onnx.ModelProto:
    """One node of LinearAttention: ONNX's of opset 27, or ONNX Runtime's, which takes the same."""
    names = ["query", "key", "value", "past", "decay" * ("gated" in rule), "beta" * ("delta" in rule)]
    node = helper.make_node(
        "LinearAttention",
        names,
        ["out", "present"],
        domain=domain,
        q_num_heads=4,
        kv_num_heads=2,
        update_rule=rule,
        scale=SCALE,
    )
    given = [helper.make_tensor_value_info(name, 1, inputs[name].shape) for name in names if name]
    made = [helper.make_tensor_value_info(name, 1, None) for name in ("out", "present")]
    opsets = [helper.make_opsetid("", 27 if domain == "" else 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "one", given, made), opset_imports=opsets, ir_version=10)


def packed(rule: str, inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Heads side by side in the last of three dimensions, without what the rule does not read."""
    read = ["query", "key", "value", "past", *["decay"] * ("gated" in rule), *["beta"] * ("delta" in rule)]
    return {name: array_of(x if name == "past" else x.flatten(2)) for name, x in inputs.items() if name in read}


@pytest.mark.parametrize("how", ["kernel", "body"])
@pytest.mark.parametrize("per_channel", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_it_computes_what_onnx_and_onnx_runtime_define(rule: str, per_channel: int, how: str) -> None:
    case = case_of(rule, per_channel, seq=37)
    inputs = inputs_of(rule, case)
    out, present = implementation(OP, how).answers(case, inputs)
    feeds = packed(rule, inputs)
    standard = ReferenceEvaluator(standard_model(rule, feeds, "")).run(None, feeds)
    contrib = session(standard_model(rule, feeds, "com.microsoft"), library=False).run(None, feeds)
    for wanted in (standard, contrib):
        np.testing.assert_allclose(out.reshape(wanted[0].shape), wanted[0], rtol=0, atol=2e-6 * np.abs(wanted[0]).max())
        np.testing.assert_allclose(present, wanted[1], rtol=0, atol=2e-6 * np.abs(wanted[1]).max())


def in_parts(how: str, case: Case, inputs: dict[str, Tensor], ends: list[int]) -> Iterator[list[np.ndarray]]:
    """The answers to calls that end at these tokens, each with the state that the one before left."""
    past = inputs["past"]
    for start, end in itertools.pairwise([0, *ends]):
        part = {name: x if name == "past" else x[:, start:end].contiguous() for name, x in inputs.items()}
        sizes = (case.sizes[0], end - start, *case.sizes[2:])
        answers = implementation(OP, how).answers(replace(case, sizes=sizes), part | {"past": past})
        past = torch.from_numpy(answers[1])
        yield answers


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("ends", [[1, 2, 3, 70], [31, 32, 33, 64, 70], [0, 70], [*range(1, 9), 70]])
@pytest.mark.parametrize("per_channel", [0, 1])
def test_tokens_may_come_in_parts(how: str, ends: list[int], per_channel: int) -> None:
    case = case_of("gated_delta", per_channel)
    inputs = inputs_of("gated_delta", case)
    out, present = implementation(OP, how).answers(case, inputs)
    parts = list(in_parts(how, case, inputs, ends))
    joined = np.concatenate([part[0] for part in parts], axis=1)
    limit = 0 if how != "body" else 2e-6
    np.testing.assert_allclose(joined, out, rtol=0, atol=limit * np.abs(out).max())
    np.testing.assert_allclose(parts[-1][1], present, rtol=0, atol=limit * np.abs(present).max())


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("rule", RULES)
def test_tokens_without_decay_and_beta_change_nothing_on_either_side(rule: str, side: str, how: str) -> None:
    case = case_of(rule, 0)
    inputs = inputs_of(rule, case)
    out, present = implementation(OP, how).answers(case, inputs)

    def with_padding(name: str, x: Tensor) -> Tensor:
        padding = torch.full_like(x[:, :9], 0 if name in ("decay", "beta") else 3)
        return torch.cat([padding, x] if side == "before" else [x, padding], dim=1)

    padded = {name: x if name == "past" else with_padding(name, x) for name, x in inputs.items()}
    answers = implementation(OP, how).answers(replace(case, sizes=(2, 79, *case.sizes[2:])), padded)
    tokens = slice(9, None) if side == "before" else slice(0, 70)
    limit = 0 if how != "body" else 2e-6
    np.testing.assert_allclose(answers[0][:, tokens], out, rtol=0, atol=limit * np.abs(out).max())
    np.testing.assert_allclose(answers[1], present, rtol=0, atol=limit * np.abs(present).max())


@pytest.mark.parametrize("longest", [4, 8, 64])
def test_the_body_takes_as_many_tokens_as_it_says_and_refuses_more_chunks(longest: int) -> None:
    attributes: dict[str, Any] = {"scale": SCALE, "delta": 1, "per_channel": 0, "chunk_length": 4, "longest": longest}
    for seq, fits in ((longest, True), (longest + 1, False)):
        case = case_of("delta", 0, seq)
        inputs = inputs_of("delta", case)
        feeds = {name: array_of(x) for name, x in inputs.items()}
        opened = session(one_node_model(OP, feeds, body=True, **attributes), library=False, level=4)
        if fits:
            wanted = CONTRACT.exact(case, inputs)
            for found, right in zip(opened.run(None, feeds), wanted.values(), strict=True):
                np.testing.assert_allclose(found, right, rtol=0, atol=2e-6 * float(right.abs().max()))
        else:
            with pytest.raises(Exception, match=r"(?s)Concat|Reshape"):
                opened.run(None, feeds)


def test_rounding_does_not_add_up_over_many_tokens() -> None:
    """20,000 tokens that mirror the state or keep nearly all of it, against float64."""
    case = Case((1, 20000, 1, 1, 8, 8, 1, 0), (SCALE,))
    inputs = CONTRACT.inputs(case, "cpu")
    inputs["decay"] /= 1000
    inputs["beta"].mul_(2)
    wanted = CONTRACT.exact(case, inputs)
    for found, right in zip(implementation(OP, "kernel").answers(case, inputs), wanted.values(), strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-5 * float(right.abs().max()))
