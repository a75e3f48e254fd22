"""Every implementation of every operator keeps its contract: one table, implementations × operators × cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from emulated_plugins import array_of
from implementations import MAKERS, exact, implementation
from kernel_sessions import session
from one_node import one_node_model
from onnx import helper
from torch import Tensor

from effexport.export.onnx_from_module import register_schemas
from effexport.plugins.contract import Case, Contract, load_contract
from effexport.plugins.ops import DOMAIN, OPS, OPSET_VERSION, PLUGIN_NAMESPACE

CONTRACTS = {name: contract for name, op in OPS.items() if (contract := load_contract(op)).cases}
KERNELS = ("kernel", "cuda", "cuda sm_75")

pytestmark = pytest.mark.requires("native", "onnx", "ort")
operators = pytest.mark.parametrize("op", CONTRACTS)
kernels = pytest.mark.parametrize("how", KERNELS)


def table(
    *hows: str, dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16"), every: bool = True
) -> pytest.MarkDecorator:
    """Parameters op, how and case: what a contract asks of these implementations, in every case or in some."""
    rows = [
        pytest.param(op, how, case, id=f"{op}-{how}-{case.name}")
        for op, contract in CONTRACTS.items()
        for how in hows
        for case in contract.cases + every * (contract.small + ("cuda" not in how) * contract.larger)
        # ONNX Runtime has no products in bfloat16
        if case.dtype in dtypes and (how, case.dtype) != ("body", "bfloat16")
    ]
    return pytest.mark.parametrize(("op", "how", "case"), rows)


def inputs_of(contract: Contract, case: Case, how: str = "kernel") -> dict[str, Tensor]:
    """NaN where tokens are hidden, if the implementation promises not to see it."""
    inputs = contract.inputs(case, "cpu")
    if how == "body" and not contract.body_hides:
        return without_nan(inputs)
    return inputs


def without_nan(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.nan_to_num(0) if x.is_floating_point() else x for name, x in inputs.items()}


def last_case(contract: Contract, dtype: str = "float32") -> Case:
    return replace(contract.cases[-1], dtype=dtype)


@table(*MAKERS)
def test_it_computes_the_formula(op: str, how: str, case: Case) -> None:
    contract = CONTRACTS[op]
    inputs = inputs_of(contract, case, how)
    expected = exact(contract, case, inputs)
    limit = contract.limit(case).value + contract.body_limit * (how == "body" and case.dtype != "float32")
    actual = implementation(op, how).run(case, inputs).astype(np.float64)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max(initial=0) <= limit * np.abs(expected).max(initial=0)


@operators
@pytest.mark.parametrize("opset", [18, 20, 23, 24])
def test_the_body_works_in_every_opset(op: str, opset: int) -> None:
    contract, case = CONTRACTS[op], last_case(CONTRACTS[op])
    inputs = inputs_of(contract, case, "body")
    expected = exact(contract, case, inputs)
    error = np.abs(implementation(op, "body").run(case, inputs, opset=opset) - expected)
    assert error.max() <= contract.limit(case).value * np.abs(expected).max()


@table(*MAKERS, dtypes=("float32",))
def test_what_hidden_tokens_hold_changes_no_bit(op: str, how: str, case: Case) -> None:
    contract = CONTRACTS[op]
    inputs = without_nan(contract.inputs(case, "cpu"))
    # a sample that sees nothing may average over all
    hidden = (~inputs["keep"] & inputs["keep"].any(dim=1, keepdim=True))[:, None, :, None]
    run = implementation(op, how).run
    expected = run(case, inputs)
    for name, values in contract.hidden.items():
        for value in values:
            if np.isfinite(value) or how != "body" or contract.body_hides:
                other = inputs | {name: inputs[name].masked_fill(hidden, value)}
                np.testing.assert_array_equal(run(case, other), expected, f"{name} {value}")


@table(*KERNELS, every=False)
def test_neither_threads_nor_schedule_nor_grid_change_a_bit(op: str, how: str, case: Case) -> None:
    made, inputs = implementation(op, how), inputs_of(CONTRACTS[op], case)
    expected = made.run(case, inputs)
    for way in made.ways:
        np.testing.assert_array_equal(made.run(case, inputs, **way), expected, str(way))


@table(*KERNELS, dtypes=("float32",))
def test_batch_mates_change_no_bit(op: str, how: str, case: Case) -> None:
    contract, run = CONTRACTS[op], implementation(op, how).run
    inputs = inputs_of(contract, case)
    together, alone = run(case, inputs), replace(case, sizes=(1, *case.sizes[1:]))
    for i in range(case.sizes[0]):
        own = {name: x if name in contract.shared else x[i : i + 1] for name, x in inputs.items()}
        np.testing.assert_array_equal(run(alone, own), together[i : i + 1])


@operators
@kernels
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_may_begin_at_any_element(op: str, how: str, dtype: str) -> None:
    contract, run = CONTRACTS[op], implementation(op, how).run
    for case in {replace(case, dtype=dtype) for case in contract.cases}:
        inputs = inputs_of(contract, case)
        moved = {name: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for name, x in inputs.items()}
        np.testing.assert_array_equal(run(case, moved), run(case, inputs), case.name)


@operators
@kernels
def test_every_byte_of_a_mask_that_is_not_0_is_true(op: str, how: str) -> None:
    case, run = last_case(CONTRACTS[op]), implementation(op, how).run
    inputs = inputs_of(CONTRACTS[op], case)
    two = {name: (x.view(torch.uint8) * 2).view(torch.bool) for name, x in inputs.items() if x.dtype == torch.bool}
    np.testing.assert_array_equal(run(case, inputs | two), run(case, inputs))


@pytest.mark.parametrize(
    ("op", "case"), [pytest.param(op, x, id=f"{op}-{x.name}") for op in CONTRACTS for x in CONTRACTS[op].empty]
)
@pytest.mark.parametrize("how", ["torch", "kernel", "body"])
def test_of_empty_inputs_the_output_is_empty_or_zero(op: str, case: Case, how: str) -> None:
    if how == "body" and case.sizes[1] == 0:
        pytest.skip("ONNX Runtime's products do not spread one matrix over no heads")
    made = implementation(op, how)
    output = made.run(case, CONTRACTS[op].inputs(case, "cpu"))
    assert output.shape == made.shape(case)
    assert not output.any()


def wrong_inputs(op: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each input with an axis more or less, and with each axis longer that is fixed or has a name that occurs again."""
    inputs = CONTRACTS[op].inputs(last_case(CONTRACTS[op]), "cpu")
    dims = {parameter.name: parameter.dims.split() for parameter in OPS[op].load().SIGNATURE.inputs}
    names = [name for own in dims.values() for name in own]
    for name, own in dims.items():
        yield f"{name}-more", inputs | {name: inputs[name][None]}
        yield f"{name}-less", inputs | {name: inputs[name][0]}
        for axis, dim in enumerate(own):
            if dim.isdecimal() or names.count(dim) > 1:
                yield f"{name}-{axis}", inputs | {name: torch.cat([inputs[name]] * 2, axis)}


@pytest.mark.parametrize(
    ("op", "inputs"), [pytest.param(op, x, id=f"{op}-{name}") for op in CONTRACTS for name, x in wrong_inputs(op)]
)
def test_wrong_shapes_are_errors_of_the_operator_and_of_the_kernel(op: str, inputs: dict[str, Tensor]) -> None:
    attributes = CONTRACTS[op].attributes(last_case(CONTRACTS[op]))
    name = f"({'|'.join(inputs)})"
    with pytest.raises(ValueError, match=f"{OPS[op].torch_name}: {name} has .*shape .*; expected "):
        implementation(op, "torch").call(*inputs.values(), **attributes)
    feeds = {name: array_of(x) for name, x in inputs.items()}
    with pytest.raises(Exception, match=rf"{op}: ({name}(, | and |)?)+ ha\w+ .*; expected"):
        session(one_node_model(op, feeds, body=False, **attributes)).run(None, feeds)


@operators
def test_wrong_types_are_errors_of_the_operator(op: str) -> None:
    case = last_case(CONTRACTS[op])
    call, attributes = implementation(op, "torch").call, CONTRACTS[op].attributes(case)
    inputs = list(without_nan(CONTRACTS[op].inputs(case, "cpu")).values())
    floats = [i for i, x in enumerate(inputs) if x.is_floating_point()]
    with pytest.raises(ValueError, match="expected a floating-point dtype"):
        call(*(x.int() if x.is_floating_point() else x for x in inputs), **attributes)
    with pytest.raises(ValueError, match=r"is torch.uint8; expected torch.bool"):
        call(*(x if x.is_floating_point() else x.byte() for x in inputs), **attributes)
    for other in floats[1:]:
        with pytest.raises(ValueError, match="expected one dtype"):
            call(*(x.half() if i == other else x for i, x in enumerate(inputs)), **attributes)


@pytest.mark.parametrize(
    ("op", "attributes", "words"),
    [pytest.param(op, *x, id=f"{op}-{x[1]}") for op in CONTRACTS for x in CONTRACTS[op].wrong_attributes],
)
def test_wrong_attributes_are_errors_of_the_kernel(op: str, attributes: Mapping[str, Any], words: str) -> None:
    feeds = {name: array_of(x) for name, x in CONTRACTS[op].inputs(last_case(CONTRACTS[op]), "cpu").items()}
    with pytest.raises(Exception, match=f"{op}: .*{words}.*expected"):
        session(one_node_model(op, feeds, body=False, **attributes))


@operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_it_is_registered_as_pytorch_asks(op: str, dtype: torch.dtype) -> None:
    case = CONTRACTS[op].small[0]
    given = [x.to(dtype) if x.is_floating_point() else x for x in CONTRACTS[op].inputs(case, "cpu").values()]
    # a custom operator's result is new memory, also for the strides of split heads
    given[0] = given[0].transpose(1, 2).contiguous().transpose(1, 2)
    operator = getattr(torch.ops.effexport, OPS[op].torch_name).default
    torch.library.opcheck(operator, (*given, *CONTRACTS[op].attributes(case).values()))


@operators
def test_the_schema_infers_what_the_signature_says(op: str) -> None:
    register_schemas()
    signature, attributes = OPS[op].load().SIGNATURE, CONTRACTS[op].attributes(last_case(CONTRACTS[op]))
    names = [parameter.name for parameter in signature.inputs]
    node = helper.make_node(op, names, ["out"], domain=DOMAIN, **attributes, **{PLUGIN_NAMESPACE: DOMAIN})
    half = onnx.TensorProto.FLOAT16

    def symbols(dims: str) -> list[str | int]:
        return [int(dim) if dim.isdecimal() else dim for dim in dims.split()]

    inputs = [
        helper.make_tensor_value_info(x.name, onnx.TensorProto.BOOL if x.dtype == "bool" else half, symbols(x.dims))
        for x in signature.inputs
    ]
    graph = helper.make_graph([node], "one", inputs, [helper.make_empty_tensor_value_info("out")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets), strict_mode=True)
    out = model.graph.output[0].type.tensor_type
    expected = [attributes.get(str(dim), dim) for dim in symbols(signature.outputs[0].dims)]
    assert [dim.dim_param or dim.dim_value for dim in out.shape.dim] == expected
    assert out.elem_type == half


@pytest.mark.parametrize(
    ("op", "sizes"), [pytest.param(op, x, id=f"{op}-{x}") for op in CONTRACTS for x in CONTRACTS[op].uncountable]
)
def test_sizes_that_int32_cannot_count_are_refused(op: str, sizes: tuple[int, ...]) -> None:
    case = replace(CONTRACTS[op].small[0], sizes=sizes)
    assert implementation(op, "cuda").launch(case, [0] * 8) == 1
