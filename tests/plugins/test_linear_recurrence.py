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
from implementations import dtype_of, implementation, within_limit
from kernel_sessions import run_poisoned, session
from one_node import one_node_model
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import CARRIER_OPSET, CONTRIB_DOMAIN, OPS

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


def carried_model(case: Case, inputs: dict[str, Tensor], fills: dict[str, float], domain: str) -> onnx.ModelProto:
    """One node of ours whose body is LinearAttention: ONNX's of opset 27, or ONNX Runtime's."""
    feeds = {name: array_of(x) for name, x in inputs.items()}
    opset = CARRIER_OPSET if domain == "" else 20
    attributes = CONTRACT.attributes(case)
    model = onnx.ModelProto.FromString(one_node_model(OP, feeds, body=False, opset=opset, **attributes))
    sizes = dict(zip(("heads", "kv_heads", "key_dim", "value_dim"), case.sizes[2:6], strict=True))
    element = model.graph.input[0].type.tensor_type.elem_type
    body = OPS[OP].load().carrier_body
    model.functions.append(body(model.graph.node[0], sizes, fills, domain=domain, opset=opset, element_type=element))
    model.opset_import.append(helper.make_opsetid(CONTRIB_DOMAIN, 1))
    return model


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("per_channel", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_onnx_and_onnx_runtime_have_an_operator_that_computes_the_same(rule: str, per_channel: int, dtype: str) -> None:
    case = replace(case_of(rule, per_channel, seq=37), dtype=dtype)
    inputs = inputs_of(rule, case)
    fills = {"decay": 0.0} if "gated" not in rule else {}
    fills |= {"beta": 1.0} if "delta" not in rule else {}
    for known, domain in itertools.product((fills, {}), ("", CONTRIB_DOMAIN)):
        model = carried_model(case, inputs, known, domain)
        call = next(node for node in model.functions[0].node if node.op_type == OPS[OP].carrier)
        expected = rule if known else "gated_delta" if "delta" in rule else "gated"
        assert helper.get_node_attr_value(call, "update_rule") == expected.encode()
        if domain == "" and dtype == "bfloat16":  # which ONNX's evaluator does not compute
            continue
        feeds = {name: array_of(x) for name, x in inputs.items()}
        if domain == "":
            answers = ReferenceEvaluator(model).run(None, feeds)
        else:
            made = [(output.shape, dtype_of(output)) for output in CONTRACT.outputs(case).values()]
            answers = run_poisoned(session(model, library=False), feeds, made)
        for found, wanted in zip(answers, CONTRACT.exact(case, inputs).values(), strict=True):
            assert within_limit(CONTRACT, case, found, wanted)


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
