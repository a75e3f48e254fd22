"""Graphs as TensorRT gets them, executed without TensorRT: what its plugins compute, with the launches of their rows.

Kernels run in the emulation of tests/plugins/native, which shows logic and indexing; roundings are the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.helper
import pytest
import safetensors.numpy
from emulated_plugins import Call, array_of, emulated_op, execute, relative_rms
from implementations import implementation
from random_graphs import random_graph
from slow_cases import named, slow, soak
from small_specs import BUILT_VARIANTS, spec_of

from effexport.base.errors import StageError
from effexport.export.onnx_graph import load_graph
from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import CUDA_OPS, DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE
from effexport.tensorrt.preparation import prepared_model
from effexport.tensorrt.spec import EngineSpec, Profile, Range

pytestmark = [pytest.mark.requires("torch", "onnx"), pytest.mark.usefixtures("registered")]
SPEC = EngineSpec(target="trt", profiles=(Profile({"batch": Range(1, 2, 4)}),))
GPUS = (80,)
OPSET = 20
PLUGINS = list(CUDA_OPS)
# Those whose blocks take more than two seconds to emulate: all but sorts, hashes, means and convolutions.
SLOW = [op for op in PLUGINS if op.endswith("Attention") or op in ("IterativePinv", "LinearRecurrence")]
ONE_TYPE = ("float32", "int32")

# The largest error relative to the results' own size, beside the body. float32: sums in another order, and 2^x to
# 2⁻²². The others round intermediate values, such as weights, to 11 or 8 bits, kernel and body in different places.
LIMITS = {"float32": 1e-6, "float16": 2 * 2**-11, "bfloat16": 2 * 2**-8, "int32": 0.0}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered: TensorRT is not there."""
    monkeypatch.setattr("effexport.tensorrt.preparation.register_plugins", lambda ops, architecture: None)


def model_of(op: str, case: Case, dynamic: bool = False) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node with its function body, and inputs. dynamic: no dimension is a number but those of the plugin
    that must be."""
    signature = CUDA_OPS[op].load().SIGNATURE
    inputs = {name: array_of(x) for name, x in load_contract(CUDA_OPS[op]).inputs(case, "cpu").items()}
    given = dict(zip([x.name for x in signature.inputs], inputs.values(), strict=True))
    attributes = load_contract(CUDA_OPS[op]).attributes(case)
    names = [x.name for x in signature.outputs]
    node = onnx.helper.make_node(op, list(given), names, domain=DOMAIN, **attributes, **{PLUGIN_NAMESPACE: DOMAIN})
    values, fixed = [], CUDA_OPS[op].load_trt().CHOICES[-1].fixed
    for parameter, (name, array) in zip(signature.inputs, given.items(), strict=True):
        elem_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        sizes = zip(parameter.dims.split(), array.shape, strict=True)
        dims = [dim if dynamic and dim not in fixed and not dim.isdecimal() else size for dim, size in sizes]
        values.append(onnx.helper.make_tensor_value_info(name, elem_type, dims))
    of_t = onnx.helper.np_dtype_to_tensor_dtype(next(iter(given.values())).dtype)
    types = {"T": of_t, "int32": onnx.TensorProto.INT32, "float32": onnx.TensorProto.FLOAT}
    outputs = [
        onnx.helper.make_tensor_value_info(x.name, types[x.dtype], [None] * len(x.dims.split()))
        for x in signature.outputs
    ]
    graph = onnx.helper.make_graph([node], "graph", values, outputs)
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    body = CUDA_OPS[op].load().onnx_function_body([node], OPSET)
    return onnx.helper.make_model(graph, opset_imports=opsets, functions=[body], ir_version=10), given


def run_as_plugins(op: str, case: Case, dynamic: bool = False) -> list[Call] | None:
    """The launches of a case, whose results are compared with those of the body and of the operator's definition.

    None, and nothing is run, where plugins do not support the case.
    """
    model, inputs = model_of(op, case, dynamic)
    prepared = prepared_model(model, SPEC, GPUS)
    if prepared.implementation == {op: "body"}:
        return None
    found = execute(prepared.model, inputs, seed=len(case.name))
    # a NaN in a hidden token is multiplied by zero in some bodies, as their contracts say
    visible = {name: np.where(x == x, x, x.dtype.type(0)) for name, x in inputs.items()}
    expected = execute(prepared_model(model, replace(SPEC, target="trt-rtx"), GPUS).model, visible)
    check = load_contract(CUDA_OPS[op])
    # what a matrix amplifies, it amplifies of both
    limit = check.limit(case).value if case.kind == "nearly equal rows" else LIMITS[case.dtype]
    for output, value in zip(found.outputs.values(), expected.outputs.values(), strict=True):
        assert output.dtype == value.dtype
        assert relative_rms(output, value) <= limit, (op, case)
    reference = check.exact(case, check.inputs(case, "cpu"))
    for output, tensor in zip(found.outputs.values(), reference.values(), strict=True):
        right = tensor.double().numpy()
        largest = np.abs(right).max(initial=0.0) or 1.0
        error = np.abs(output.astype(np.float64) - right).max(initial=0.0) / largest
        assert error <= check.limit(case).value, (op, case)
    return found.calls


@pytest.mark.parametrize("every", [False, soak(True)], ids=["of each form", "every case"])
@pytest.mark.parametrize("op", [slow(op) if op in SLOW else op for op in PLUGINS])
def test_plugins_compute_what_the_body_and_the_definition_do(op: str, every: bool) -> None:
    """Of the cases that launch the same kernels, with inputs of one kind in float32 or int32, the last is computed: if
    plugins launch what launch_cuda does, which is held in all cases, they compute what it does, as test_contract.py
    shows."""
    cases = load_contract(CUDA_OPS[op]).small
    calls = {case: found for case in cases if (found := launched(op, case)) is not None}
    assert {case.dtype for case in calls} in (set(CUDA_OPS[op].load_trt().PLUGINS[0].types), {"int32"})
    forms = {(case.dtype in ONE_TYPE and case.kind, *(call.entry for call in calls[case])): case for case in calls}
    for case in calls if every else forms.values():
        with named(case.name):
            assert run_as_plugins(op, case) == calls[case]


def launched(op: str, case: Case) -> list[Call] | None:
    """The launches of a case, which must be those of launch_cuda; None where plugins do not support it. No block
    runs."""
    model, inputs = model_of(op, case)
    prepared = prepared_model(model, SPEC, GPUS)
    if prepared.implementation == {op: "body"}:
        assert "the TensorRT plugin" in prepared.remarks[0]
        return None
    calls = execute(prepared.model, inputs, dry=True).calls
    assert calls == calls_of_launch_cuda(op, case, calls), case.name
    return calls


@pytest.mark.parametrize("dtype", ["float32", slow("float16"), slow("bfloat16")])
def test_sums_of_states_by_a_plugin_have_the_bits_of_those_in_outputs(dtype: str) -> None:
    """Plugins of linear attention always launch combine, launch_cuda only where slices are many."""
    op, cuda = "EluLinearAttention", implementation("EluLinearAttention", "cuda")
    for *sizes, slices, kind in (
        (2, 2, 300, 8, 72, 1, 1, 2, "falling"),
        (1, 1, 1800, 5, 3, 1, 0, 8, "rising"),
        (2, 1, 330, 66, 72, 1, 0, 6, "random"),  # slices of one tile
        (2, 2, 500, 66, 72, 0, 0, 1, "random"),
        (1, 3, 700, 16, 72, 0, 1, 2, "rising"),
        (1, 1, 520, 64, 8, 0, 0, 2, "no token"),
    ):
        case = Case(tuple(sizes), (1e-6,), kind, dtype)
        model, inputs = model_of(op, case)
        with named(case.name):
            found = execute(prepared_model(model, SPEC, GPUS).model, inputs)
            assert [call.scalars[1] for call in found.calls if call.entry.endswith("_combine")] == [slices]
            in_outputs = cuda.run(case, load_contract(CUDA_OPS[op]).inputs(case, "cpu"), multiprocessors=2**20)
            np.testing.assert_array_equal(in_outputs, *found.outputs.values())
            assert cuda.emulated.call(cuda.emulated.library.count_launches() - 2).entry.endswith(f"_states_{dtype}")


@pytest.mark.slow
@pytest.mark.parametrize("op", PLUGINS)
def test_plugins_launch_what_launch_cuda_does(op: str) -> None:
    for case in load_contract(CUDA_OPS[op]).checked:
        if np.prod(case.sizes[:5], dtype=object) <= 10**8:  # the inputs of others take too long to make
            launched(op, case)


def in_one_type() -> Iterator[Any]:
    """The small cases of each operator in float32 or int32; one of each is quick."""
    for op in PLUGINS:
        small = [case for case in load_contract(CUDA_OPS[op]).small if case.dtype in ONE_TYPE]
        for i, case in enumerate(small):
            mark = [] if i == 0 else [pytest.mark.slow] if i == 1 else [pytest.mark.soak]
            yield pytest.param(op, case, id=f"{op} {case.name}", marks=mark)


@pytest.mark.parametrize(("op", "case"), in_one_type())
def test_plugins_compute_it_where_sizes_are_not_known(op: str, case: Case) -> None:
    run_as_plugins(op, case, dynamic=True)


def calls_of_launch_cuda(op: str, case: Case, calls: list[Call]) -> list[Call]:
    """Launches of launch_cuda for a case. calls: those of the plugins, where they may be others."""
    # whatever the call, it does not occupy the GPU, which has no more shared memory than every one: plugins do not ask
    found = emulated_op(CUDA_OPS[op]).calls_of_launch_cuda(
        case.dtype, case.sizes, case.numbers, multiprocessors=2**20, allowed_shared=48 << 10
    )
    if op == "MaskedAttention" and len(calls) > len(found):
        # one slice, of more keys than one slice has for any number of queries: launch_cuda does without the merge.
        # No keys at all: it does without the other kernel
        (*attend, merge), keys = calls, case.sizes[3]
        if keys == 0:
            return [*attend, *found]
        assert keys > 256
        return [replace(found[0], scalars=(*found[0].scalars[:-1], 1)), merge]
    if op == "EluLinearAttention" and len(calls) > len(found):
        # few slices: launch_cuda does without their sums, and says how its outputs have them: where causal, as the
        # whole sequence, which is one slice, or by looking back; otherwise from how many states
        *before, outputs = found
        *scalars, how, eps = outputs.scalars
        _, slices, _, causal = calls[1].scalars
        needed = slices - 1 if causal else slices  # no position looks back to the last
        states = replace(calls[0], scalars=(*calls[0].scalars[:-1], needed))
        assert before == ([states] if needed else [])
        assert how == ((1 if slices == 1 else 2) if causal else slices)
        return [*calls[:2], replace(outputs, scalars=(*scalars, 0 if causal else 1, eps))]
    if op == "LSHSort" and len(found) > len(calls):
        # few rows of many parts: launch_cuda counts each part in a launch before, and then the same blocks sort
        counted, sort = found
        assert (counted.scalars, counted.launch[:2]) == (sort.scalars, sort.launch[:2])
        assert (counted.entry, sort.entry) == ("effexport_lsh_sort_counts", "effexport_lsh_sort_counted")
        return [replace(sort, entry=calls[0].entry)]
    return found


# Of the last hidden state, relative to its size: roundings in another order in each layer.
MODEL_LIMIT = 2e-6


def whole_models() -> list[str]:
    """The variants with custom operators."""
    specs = {variant: spec_of(variant, "encoder") for variant in BUILT_VARIANTS}
    return [variant for variant, spec in specs.items() if spec.custom_ops]


@pytest.mark.slow
@pytest.mark.parametrize("owner", whole_models())
def test_a_model_of_plugins_computes_what_pytorch_and_the_bodies_do(built: Any, owner: str) -> None:
    artifact = built(owner, "encoder")
    model = load_graph(artifact.model_path)
    prepared = prepared_model(model, SPEC, GPUS)
    assert set(prepared.implementation.values()) == {"plugin"}, prepared.remarks
    standard = prepared_model(model, replace(SPEC, target="trt-rtx"), GPUS).model
    golden = safetensors.numpy.load_file(artifact.path / "reference.safetensors")
    for name in ("padded batch", "odd length"):
        inputs = {x.name: golden[f"{name}/inputs/{x.name}"] for x in model.graph.input}
        found, body = execute(prepared.model, inputs), execute(standard, inputs)
        for output, value in found.outputs.items():
            assert relative_rms(value, body.outputs[output]) <= MODEL_LIMIT
            assert relative_rms(value, golden[f"{name}/outputs/{output}"]) <= MODEL_LIMIT


def test_plugins_that_are_required_and_cannot_run_are_an_error() -> None:
    case = Case((2, 65, 6))
    model, _ = model_of("IterativePinv", case)
    assert prepared_model(model, SPEC, GPUS).implementation == {"IterativePinv": "body"}
    with pytest.raises(StageError, match=r"--plugins require .*IterativePinv .*m of its inputs is 65; .* from 1 to 64"):
        prepared_model(model, replace(SPEC, plugins="require"), GPUS)


def error_of_plugins(seed: int) -> tuple[float, float]:
    """The largest relative RMS difference between plugins and bodies in a random graph, and its limit.

    Roundings of several custom nodes in other places than their bodies' add up, as the root of their number because
    they are independent.
    """
    graph = random_graph(seed)
    model, inputs = graph.model(dynamic=seed % 2 == 1)
    prepared = prepared_model(model, SPEC, GPUS)
    assert set(prepared.implementation.values()) == {"plugin"}, prepared.remarks
    found = execute(prepared.model, inputs, seed=seed).outputs
    bodies = prepared_model(model, replace(SPEC, target="trt-rtx"), GPUS)
    expected = execute(bodies.model, inputs).outputs
    worst = 0.0
    for value in graph.outputs:
        error = relative_rms(found[value.name], expected[value.name])
        if value.dtype == "int32":
            assert error == 0
        worst = max(worst, error)
    limit = max(LIMITS[value.dtype] for value in graph.values)
    nodes = sum(node.domain == DOMAIN for node in graph.nodes)
    return worst, limit * nodes**0.5


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(10, 200))])
def test_random_graphs_of_plugins_compute_what_their_bodies_do(seed: int) -> None:
    error, limit = error_of_plugins(seed)
    assert error <= limit
