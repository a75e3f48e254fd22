"""Every implementation of every operator keeps its contract: one table, implementations × operators × cases."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from cuda_kernels import depends_on_architecture
from emulated_plugins import array_of
from implementations import MAKERS, implementation, within_limit
from kernel_sessions import run_values, session
from one_node import one_node_model
from onnx import helper
from slow_cases import named
from torch import Tensor

from effexport.export.onnx_from_module import register_schemas
from effexport.plugins.contract import Case, Contract, load_contract
from effexport.plugins.ops import DOMAIN, OPS, OPSET_VERSION, PLUGIN_NAMESPACE
from effexport.plugins.signature import Parameter

CONTRACTS = {name: contract for name, op in OPS.items() if (contract := load_contract(op)).cases}
KERNELS = ("kernel", "cuda")

pytestmark = pytest.mark.requires("native", "onnx", "ort")
SIGNATURES = {name: OPS[name].load().SIGNATURE for name in CONTRACTS}
MASKED = [name for name, signature in SIGNATURES.items() if "keep" in [x.name for x in signature.inputs]]
ONE_TYPE = ("float32", "int32")
# Operators whose blocks take seconds to emulate.
SLOW_BLOCKS = ("AFTWindowAttention", "BandedAttention", "IterativePinv", "LSHAttention")
operators = pytest.mark.parametrize("op", CONTRACTS)
kernels = pytest.mark.parametrize("how", KERNELS)


def table(
    *hows: str,
    ops: Iterable[str] = CONTRACTS,
    dtypes: tuple[str, ...] = (),
    every: bool = True,
    fast: int = 6,
    more: tuple[str, ...] = (),
) -> pytest.MarkDecorator:
    """Parameters op, how and cases: what a contract asks of these implementations, in every case or in some. The first
    are in the fast part, but for slow blocks and the older GPU, whose kernels it would have to compile as well; the
    others are slow in the types that `more` names, and run by scripts/soak.sh in all. Those that are the same on it are
    left out."""
    rows = []
    for op, how in itertools.product(ops, hows):
        if ("cuda" in how and not OPS[op].cuda) or (how == "cuda sm_75" and not depends_on_architecture(OPS[op])):
            continue
        contract = CONTRACTS[op]
        cases = contract.cases + every * (contract.small + ("cuda" not in how) * contract.larger)
        types = set(dtypes or OPS[op].element_types) - set(not_promised(contract, how))
        promised = [case for case in cases if case.dtype in types]
        older, further = how == "cuda sm_75", promised[fast:]
        slowly = [case for case in further if case.dtype in more and not older]
        parts = (
            ("", promised[:fast], [pytest.mark.slow] * (older or ("cuda" in how and op in SLOW_BLOCKS))),
            (", more", slowly, [pytest.mark.slow]),
            (", all", [case for case in further if case not in slowly], [pytest.mark.soak]),
        )
        rows += [pytest.param(op, how, own, id=f"{op}-{how}{name}", marks=marks) for name, own, marks in parts if own]
    return pytest.mark.parametrize(("op", "how", "cases"), rows)


def not_promised(contract: Contract, how: str) -> tuple[str, ...]:
    """Element types that an implementation need not take; ONNX Runtime has no products in bfloat16."""
    halves = () if contract.torch_halves else ("float16", "bfloat16")
    return {"body": ("bfloat16",), "torch": halves}.get(how, ())


def inputs_of(contract: Contract, case: Case, how: str = "kernel") -> dict[str, Tensor]:
    """NaN where tokens are hidden, if the implementation promises not to see it."""
    inputs = contract.inputs(case, "cpu")
    if how == "body" and not contract.body_hides:
        return without_nan(inputs)
    return inputs


def without_nan(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.nan_to_num(0) if x.is_floating_point() else x for name, x in inputs.items()}


def last_case(op: str) -> Case:
    """One of float32, or int32."""
    return next(case for case in reversed(CONTRACTS[op].cases) if case.dtype in ONE_TYPE)


def assert_equal(actual: list[np.ndarray], expected: list[np.ndarray], message: str = "") -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other, message)


def assert_formula(op: str, how: str, case: Case, **options: int) -> None:
    contract = CONTRACTS[op]
    inputs = inputs_of(contract, case, how)
    with named(case.name):
        answers = implementation(op, how).answers(case, inputs, **options)
        for actual, expected in zip(answers, contract.exact(case, inputs).values(), strict=True):
            assert within_limit(contract, case, actual, expected, how)


@table(*MAKERS, fast=15, more=ONE_TYPE)
def test_it_computes_the_formula(op: str, how: str, cases: list[Case]) -> None:
    for case in cases:
        assert_formula(op, how, case)


@pytest.mark.parametrize(
    ("op", "how"), [(op, how) for op in CONTRACTS if CONTRACTS[op].averaged for how in ("torch", "kernel")]
)
def test_every_number_and_the_middle_between_two_are_rounded_to_nearest_even(op: str, how: str) -> None:
    for dtype, channels in itertools.product(("float16", "bfloat16"), (64, 7)):
        with named(f"{dtype}, {channels} channels"):
            assert_rounded_to_nearest_even(op, how, channels, dtype)


def assert_rounded_to_nearest_even(op: str, how: str, channels: int, dtype: str) -> None:
    element = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    positive = np.arange(np.array(ml_dtypes.finfo(element).max / 2).astype(element).view(np.uint16), dtype=np.uint16)
    numbers = np.concatenate([positive, positive | 0x8000]).view(element)
    following = (numbers.view(np.uint16) + 1).view(element)
    pairs = np.stack([np.tile(numbers, 2), np.concatenate([numbers, following])])
    heads = -(-pairs.shape[1] // channels)
    pairs = np.resize(pairs.T, (heads * channels, 2)).T.reshape(2, heads, channels).swapaxes(0, 1)
    name, make = CONTRACTS[op].averaged
    case = replace(make(heads, channels), dtype=dtype)
    inputs = CONTRACTS[op].inputs(case, "cpu")
    bits = torch.from_numpy(np.ascontiguousarray(pairs).view(np.int16)).view(case.torch_dtype)
    out = implementation(op, how).run(case, inputs | {name: bits.view(inputs[name].shape)})
    expected = pairs.astype(np.float32).mean(axis=1).astype(element)[None, :, None]
    np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))


@operators
def test_the_body_works_in_every_opset(op: str) -> None:
    for opset in (18, 20, 23, 24):
        with named(f"opset {opset}"):
            assert_formula(op, "body", last_case(op), opset=opset)


@operators
def test_nodes_share_a_body_if_they_have_the_attributes_that_it_holds(op: str) -> None:
    attributes, body = CONTRACTS[op].attributes(last_case(op)), OPS[op].load().onnx_function_body
    inputs, outputs = ([parameter.name for parameter in x] for x in (SIGNATURES[op].inputs, SIGNATURES[op].outputs))

    def nodes(**changed: Any) -> list[onnx.NodeProto]:
        return [helper.make_node(op, inputs, outputs, domain=DOMAIN, **x) for x in (attributes, attributes | changed)]

    body(nodes(), 20)
    for name, value in attributes.items():
        both = nodes(**{name: tuple(2 * x for x in value) if isinstance(value, tuple) else value + 1})
        if name in CONTRACTS[op].per_node:
            body(both, 20)
        else:
            with pytest.raises(ValueError, match=f"different {name} .*cannot share one body"):
                body(both, 20)


@table(
    *("torch", "body", *KERNELS),
    ops=[name for name, contract in CONTRACTS.items() if contract.hidden],
    dtypes=ONE_TYPE,
    fast=15,
)
def test_what_hidden_tokens_hold_changes_no_bit(op: str, how: str, cases: list[Case]) -> None:
    contract, run = CONTRACTS[op], implementation(op, how).answers
    for case in cases:
        inputs = without_nan(contract.inputs(case, "cpu"))
        # a sample that sees nothing may average over all
        hidden = ~inputs["keep"] & inputs["keep"].any(dim=1, keepdim=True)
        expected = run(case, inputs)
        # of all inputs at once: whichever is read shows
        for value in dict.fromkeys(itertools.chain(*contract.hidden.values())):
            if np.isfinite(value) or how != "body" or contract.body_hides:
                other = dict(inputs)
                for name in [name for name, values in contract.hidden.items() if value in values]:
                    tokens = hidden[..., None] if inputs[name].dim() == 3 else hidden[:, None, :, None]
                    other[name] = inputs[name].masked_fill(tokens, value)
                assert_equal(run(case, other), expected, f"{value}, {case.name}")


@table(*KERNELS, every=False, fast=3)
def test_neither_threads_nor_schedule_nor_grid_change_a_bit(op: str, how: str, cases: list[Case]) -> None:
    made = implementation(op, how)
    for case in cases:
        inputs = inputs_of(CONTRACTS[op], case)
        expected = made.answers(case, inputs)
        for way in made.ways:
            assert_equal(made.answers(case, inputs, **way), expected, f"{way}, {case.name}")


@table(*KERNELS, dtypes=ONE_TYPE)
def test_batch_mates_change_no_bit(op: str, how: str, cases: list[Case]) -> None:
    contract, run = CONTRACTS[op], implementation(op, how).answers
    for case in cases:
        inputs, batch = inputs_of(contract, case), case.sizes[0]
        together, alone = run(case, inputs), replace(case, sizes=(1, *case.sizes[1:]))
        for i in range(batch):
            own = partial(rows_of, i, batch)
            mine = {name: x if name in contract.shared else own(x) for name, x in inputs.items()}
            assert_equal(run(alone, mine), [own(x) for x in together], case.name)


def rows_of(sample: int, batch: int, x: Any) -> Any:
    """The rows of an array that belong to one sample; all of one that has fewer, which stand for every sample."""
    rows = len(x) // batch
    return x if rows == 0 else x[sample * rows : (sample + 1) * rows]


@table(*KERNELS, every=False, fast=3)
def test_arrays_may_begin_at_any_element(op: str, how: str, cases: list[Case]) -> None:
    run = implementation(op, how).answers
    for case in cases:
        inputs = inputs_of(CONTRACTS[op], case)
        moved = {name: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for name, x in inputs.items()}
        assert_equal(run(case, moved), run(case, inputs), case.name)


@pytest.mark.parametrize("op", MASKED)
@kernels
def test_every_byte_of_a_mask_that_is_not_0_is_true(op: str, how: str) -> None:
    case, run = last_case(op), implementation(op, how).answers
    inputs = inputs_of(CONTRACTS[op], case)
    two = {name: (x.view(torch.uint8) * 2).view(torch.bool) for name, x in inputs.items() if x.dtype == torch.bool}
    assert_equal(run(case, inputs | two), run(case, inputs))


# ONNX Runtime's products do not spread one matrix over none, and take no sums over nothing: `body_refuses`
@operators
def test_empty_inputs_give_what_the_formula_gives(op: str) -> None:
    contract = CONTRACTS[op]
    refused = {"body": contract.body_refuses, "cuda": contract.unlaunched}
    hows = ("torch", "kernel", "body", *["cuda"] * OPS[op].cuda)
    for how, case in itertools.product(hows, contract.empty):
        if case in refused.get(how, ()):
            continue
        inputs = contract.inputs(case, "cpu")
        with named(f"{how}, {case.name}"):
            answers = implementation(op, how).answers(case, inputs)
            assert [x.shape for x in answers] == [output.shape for output in contract.outputs(case).values()]
            if any(x.size for x in answers):
                exact = (array_of(x) for x in contract.exact(case, inputs).values())
                assert_equal(answers, [x.astype(y.dtype) for x, y in zip(exact, answers, strict=True)])


def wrong_inputs(op: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each input with an axis more or less, and with each axis longer that is fixed or has a name that occurs again."""
    inputs = CONTRACTS[op].inputs(last_case(op), "cpu")
    dims = {parameter.name: parameter.dims.split() for parameter in SIGNATURES[op].inputs}
    names = [name for own in dims.values() for name in own]
    for name, own in dims.items():
        yield f"{name}-more", inputs | {name: inputs[name][None]}
        yield f"{name}-less", inputs | {name: inputs[name][0]}
        for axis, dim in enumerate(own):
            if dim.isdecimal() or names.count(dim) > 1:
                yield f"{name}-{axis}", inputs | {name: torch.cat([inputs[name]] * 2, axis)}


def wrong_calls(op: str) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
    """These, and what the names of dimensions do not say: inputs and attributes."""
    case = last_case(op)
    attributes, right = CONTRACTS[op].attributes(case), CONTRACTS[op].inputs(case, "cpu")
    for name, inputs in wrong_inputs(op):
        yield name, inputs, attributes
    for changes in CONTRACTS[op].wrong_sizes:
        inputs = {name: x.new_zeros(changes.get(name, x.shape)) for name, x in right.items()}
        yield str(changes), inputs, {name: changes.get(name, value) for name, value in attributes.items()}


@operators
def test_the_operator_and_the_kernel_refuse_a_wrong_shape_in_the_same_words(op: str) -> None:
    for row, inputs, attributes in wrong_calls(op):
        with named(row):
            words = f"{OPS[op].torch_name}: ({'|'.join(inputs)}) has .*; expected "
            with pytest.raises(ValueError, match=words) as refused:
                implementation(op, "torch").call(*inputs.values(), **attributes)
            words = str(refused.value).partition(": ")[2].translate(str.maketrans("()", "[]")).replace(",]", "]")
            feeds = {name: array_of(x) for name, x in inputs.items()}
            opened = session(one_node_model(op, feeds, body=False, **attributes))
            with pytest.raises(Exception, match=re.escape(f"{op}: {words}")):
                run_values(opened, feeds)


@operators
def test_a_refused_input_does_not_spoil_the_session(op: str) -> None:
    attributes, right = CONTRACTS[op].attributes(last_case(op)), without_nan(CONTRACTS[op].inputs(last_case(op), "cpu"))
    feeds = {name: array_of(x) for name, x in right.items()}
    opened = session(one_node_model(op, feeds, body=False, **attributes))
    expected = run_values(opened, feeds)
    for name, wrong in wrong_inputs(op):
        if name[-1].isdecimal():  # the runtime itself refuses another rank
            with pytest.raises(Exception, match=f"{op}: "):
                run_values(opened, {name: array_of(x) for name, x in wrong.items()})
    assert_equal(run_values(opened, feeds), expected)


@operators
def test_inputs_of_other_types_are_refused_when_the_model_is_loaded(op: str) -> None:
    attributes = CONTRACTS[op].attributes(last_case(op))
    feeds = {name: array_of(x) for name, x in CONTRACTS[op].inputs(last_case(op), "cpu").items()}
    for name, array in feeds.items():
        other = np.zeros(array.shape, np.float64 if array.dtype.kind != "f" else np.uint8)
        with pytest.raises(Exception, match=op):
            session(one_node_model(op, feeds | {name: other}, body=False, **attributes))


@operators
def test_the_runtime_infers_the_shapes_that_the_kernel_returns(op: str, capfd: pytest.CaptureFixture[str]) -> None:
    signature, attributes = SIGNATURES[op], CONTRACTS[op].attributes(last_case(op))
    feeds = {name: array_of(x) for name, x in CONTRACTS[op].inputs(last_case(op), "cpu").items()}
    opened = session(one_node_model(op, feeds, body=False, **attributes), level=2)  # warnings about other sizes
    run_values(opened, feeds)
    assert "Warning" not in capfd.readouterr().err
    symbols: dict[str, set[object]] = {name: {value} for name, value in attributes.items()}
    for parameter in signature.inputs:
        for axis, dim in enumerate(parameter.dims.split()):
            symbols.setdefault(dim, set()).add(f"{parameter.name}{axis}")
    # a node may leave out what follows the first output: the runtime would take the shape of an absent one
    dims, shape = signature.outputs[0].dims.split(), opened.get_outputs()[0].shape
    if symbols.keys() >= {*dims}:
        assert all(found in symbols[dim] for found, dim in zip(shape, dims, strict=True)), shape


@operators
def test_wrong_types_are_errors_of_the_operator(op: str) -> None:
    case = last_case(op)
    call, attributes = implementation(op, "torch").call, CONTRACTS[op].attributes(case)
    inputs = without_nan(CONTRACTS[op].inputs(case, "cpu"))
    for i, (name, x) in enumerate(inputs.items()):
        other = x.half() if x.is_floating_point() else x.long() if x.dtype == torch.int32 else x.byte()
        fixed = SIGNATURES[op].inputs[i].dtype != "T" or case.dtype == "int32"
        if i > 0 or fixed:
            words = f"expected {x.dtype}" if fixed else f"is torch.float16 but .* is {x.dtype}; expected one dtype"
            with pytest.raises(ValueError, match=f"{name} is {other.dtype}; {words}" if fixed else words):
                call(*(inputs | {name: other}).values(), **attributes)
        if not fixed:
            with pytest.raises(ValueError, match="expected a floating-point dtype"):
                call(*(inputs | {name: x.int()}).values(), **attributes)


@pytest.mark.parametrize("op", list(OPS)[:2])
def test_the_table_has_an_operator_whose_package_is_imported_first(op: str) -> None:
    first = f"import effexport.plugins.{OPS[op].torch_name}; from effexport.plugins.ops import OPS; print(*OPS)"
    found = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True, check=True).stdout.split()
    assert found == list(OPS)


@operators
def test_the_operator_has_the_defaults_of_the_schema(op: str) -> None:
    arguments = getattr(torch.ops.effexport, OPS[op].torch_name).default._schema.arguments[len(SIGNATURES[op].inputs) :]
    for argument, attribute in zip(arguments, SIGNATURES[op].attributes, strict=True):
        assert argument.name == attribute.name
        if attribute.default is not None:
            assert argument.default_value == attribute.default


@operators
def test_numbers_below_the_least_or_not_finite_are_errors_of_the_operator(op: str) -> None:
    case = last_case(op)
    inputs, attributes = CONTRACTS[op].inputs(case, "cpu"), CONTRACTS[op].attributes(case)
    for attribute in SIGNATURES[op].attributes:
        wrong = attribute.at_least - 1 if np.isfinite(attribute.at_least) else float("nan")
        given = (wrong, *attributes[attribute.name][1:]) if attribute.type is tuple else wrong
        if attribute.type is not int or np.isfinite(wrong):  # which has no NaN
            with pytest.raises(ValueError, match=f"{attribute.name} is .*; expected"):
                implementation(op, "torch").call(*inputs.values(), **attributes | {attribute.name: given})


@operators
def test_wrong_attributes_are_errors_of_the_kernel(op: str) -> None:
    feeds = {name: array_of(x) for name, x in CONTRACTS[op].inputs(last_case(op), "cpu").items()}
    for attributes, words in CONTRACTS[op].wrong_attributes:
        with named(words), pytest.raises(Exception, match=f"{op}: .*{words}.*expected"):
            session(one_node_model(op, feeds, body=False, **attributes)).run(None, feeds)


@operators
def test_it_is_registered_as_pytorch_asks(op: str) -> None:
    case = CONTRACTS[op].cases[0]
    inputs = [*zip(SIGNATURES[op].inputs, without_nan(CONTRACTS[op].inputs(case, "cpu")).values(), strict=True)]
    operator = getattr(torch.ops.effexport, OPS[op].torch_name).default
    every = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    # tracing takes a second and sees the schema, not the type
    for dtype, checks in ((torch.float32, every), (torch.float16, every[:3]), (torch.float64, every[:3])):
        given = [x.to(dtype) if x.is_floating_point() and of.dtype == "T" else x for of, x in inputs]
        # a custom operator's result is new memory, also for the strides of split heads
        axes = (1, 2) if given[0].dim() > 3 else (0, 1)
        given[0] = given[0].transpose(*axes).contiguous().transpose(*axes)
        with named(dtype):
            torch.library.opcheck(operator, (*given, *CONTRACTS[op].attributes(case).values()), test_utils=checks)


@operators
def test_the_schema_infers_what_the_signature_says(op: str) -> None:
    register_schemas()
    signature, attributes = SIGNATURES[op], CONTRACTS[op].attributes(last_case(op))
    inputs, outputs = ([parameter.name for parameter in some] for some in (signature.inputs, signature.outputs))
    node = helper.make_node(op, inputs, outputs, domain=DOMAIN, **attributes, **{PLUGIN_NAMESPACE: DOMAIN})

    def type_of(parameter: Parameter) -> int:
        of_t = "int32" if OPS[op].element_types == ("int32",) else "float16"
        return helper.np_dtype_to_tensor_dtype(np.dtype(of_t if parameter.dtype == "T" else parameter.dtype))

    def symbols(dims: str) -> list[str | int]:
        return [int(dim) if dim.isdecimal() else dim for dim in dims.split()]

    values = [helper.make_tensor_value_info(x.name, type_of(x), symbols(x.dims)) for x in signature.inputs]
    graph = helper.make_graph([node], "one", values, [helper.make_empty_tensor_value_info(name) for name in outputs])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets), strict_mode=True)
    for value, parameter in zip(model.graph.output, signature.outputs, strict=True):
        dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if parameter.dtype == "T":
            assert dims == [attributes.get(str(dim), dim) for dim in symbols(parameter.dims)]
        assert len(dims) == len(symbols(parameter.dims))
        assert value.type.tensor_type.elem_type == type_of(parameter)


@operators
def test_sizes_that_int32_cannot_count_are_refused(op: str) -> None:
    for sizes in CONTRACTS[op].uncountable * OPS[op].cuda:
        case = replace(CONTRACTS[op].small[0], sizes=sizes)
        assert implementation(op, "cuda").launch(case, [0] * 8) == 1, sizes
