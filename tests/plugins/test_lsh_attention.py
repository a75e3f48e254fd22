"""`effexport::LSHAttention`, beyond its contract (test_contract.py): against another way to float64, the layer's
formulas and each other."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import lsh_attention_cases
import numpy as np
import pytest
import torch
from emulated_plugins import array_of
from implementations import implementation
from kernel_sessions import ort_value, session
from lsh_attention_cases import ATTRIBUTES, CASES, FP32, Case, assert_close, float64_attention
from slow_cases import named
from torch import Tensor

from effexport.models.layers import fused_operators
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.lsh.layer import LSHAttention
from effexport.plugins import contract
from effexport.plugins.lsh_attention.contract import CONTRACT, formula
from effexport.plugins.lsh_attention.op import lsh_attention, onnx_function_body
from effexport.plugins.lsh_sort.op import lsh_sort
from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

Arrays = dict[str, np.ndarray]


def tensor_of(array: np.ndarray) -> Tensor:
    """A tensor of the same bits; torch takes no bfloat16 from NumPy."""
    if array.dtype == np.dtype("bfloat16"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torch_attention(case: Case, arrays: Arrays) -> np.ndarray:
    options = [getattr(case, name) for name in ATTRIBUTES]
    return array_of(lsh_attention(*map(tensor_of, arrays.values()), *options))


def attention_model(
    attributes: dict[str, Any], dtype: str = "float32", *, body: bool = False, opset: int = 20, known: bool = True
) -> Any:
    """A model of one custom node. known: whether inputs and output say their dimensions."""
    from onnx import TensorProto, helper

    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = {
        "qk": (element, ["batch", "heads", "seq", "head_dim"]),
        "v": (element, ["batch", "heads", "seq", "value_dim"]),
        "order": (TensorProto.INT32, ["rows", "padded"]),
        "rank": (TensorProto.INT32, ["rows", "padded"]),
        "keep": (TensorProto.BOOL, ["batch", "seq"]),
    }
    node = helper.make_node(
        "LSHAttention", list(inputs), ["out"], domain=DOMAIN, **{PLUGIN_NAMESPACE: DOMAIN}, **attributes
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, kind, shape if known else None) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info("out", element, inputs["v"][1] if known else None)],
    )
    return helper.make_model(
        graph,
        functions=[onnx_function_body([node], opset)] if body else [],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=helper.find_min_ir_version_for([helper.make_opsetid("", opset)], ignore_unknown=True),
    )


def run_poisoned(opened: Any, arrays: Arrays) -> np.ndarray:
    """Run into an output of NaN, so that nothing unwritten goes unseen."""
    out = np.full(arrays["v"].shape, np.nan, arrays["v"].dtype)
    binding = opened.io_binding()
    for name, array in arrays.items():
        binding.bind_ortvalue_input(name, ort_value(array))
    binding.bind_ortvalue_output("out", ort_value(out))
    opened.run_with_iobinding(binding)
    return out


def call_of(case: Case) -> contract.Case:
    sizes = (case.batch, case.heads, case.seq, case.head_dim, case.value_dim, case.rounds)
    return contract.Case((*sizes, *case.attributes.values()), dtype=case.dtype)


def emulated(case: Case, arrays: Arrays) -> np.ndarray:
    """The result of the CUDA kernels, emulated."""
    inputs = {name: tensor_of(array) for name, array in arrays.items()}
    out: np.ndarray = implementation("LSHAttention", "cuda").run(call_of(case), inputs)
    return out


@cache
def arrays_of(name: str) -> Arrays:
    return CASES[name].arrays()


def test_the_contracts_formula_is_that_of_another_way_to_float64() -> None:
    for name, case in CASES.items():
        arrays = arrays_of(name)
        out = CONTRACT.exact(call_of(case), {x: torch.from_numpy(array) for x, array in arrays.items()})["out"].numpy()
        expected, alone = float64_attention(case, arrays)
        with named(name):
            # `rounded` has logarithms of about 10 in float32
            assert_close(out[~alone], expected[~alone], 1e-5 if case.rounded else 1e-12)
            if not case.rounded:
                # scores of about -1e5, of a token that sees only itself, are multiples of 1.5e-11 in float64
                assert_close(out, expected, 1e-10)


def layer_of(case: Case, **fields: Any) -> LSHAttention:
    spec = LSHSpec(
        dim=case.heads * case.head_dim,
        heads=case.heads,
        head_dim=case.head_dim,
        seq_len=case.seq,
        chunk_length=case.chunk_length,
        num_chunks_before=case.chunks_before,
        num_chunks_after=case.chunks_after,
        causal=case.causal,
        circular=case.circular,
        num_hashes=case.rounds,
        num_buckets=6,
        mask_constants="hf" if case.rounded else "safe",
        **fields,
    )
    return LSHAttention(spec).eval()


MIXED = [name for name, case in CASES.items() if case.head_dim == case.value_dim]


@torch.no_grad()
def test_the_operator_equals_the_formulas_of_the_layer() -> None:
    for name in MIXED:
        qk, v, keep = (torch.from_numpy(arrays_of(name)[x]) for x in ("qk", "v", "keep"))
        layer = layer_of(CASES[name])
        plain = layer.mix((qk, v), keep)
        with named(name), fused_operators(layer, True):
            assert_close(layer.mix((qk, v), keep).numpy(), plain.numpy(), 2 * FP32)


@pytest.mark.requires("native", "onnx", "ort")
@torch.no_grad()
def test_the_kernel_equals_the_formulas_of_the_layer() -> None:
    for name in MIXED:
        case, arrays = CASES[name], arrays_of(name)
        qk, v, keep = (torch.from_numpy(arrays[x]) for x in ("qk", "v", "keep"))
        layer = layer_of(case)
        order, rank = lsh_sort(layer.hash(qk, keep), layer.spec.total_buckets + 1)
        hashed = {**arrays, "order": order.numpy(), "rank": rank.numpy()}
        with named(name):
            out = run_poisoned(session(attention_model(case.attributes)), hashed)
            assert_close(out, layer.mix((qk, v), keep).numpy(), 2 * FP32)


@pytest.mark.requires("native", "onnx", "ort")
def test_rounded_weights_of_a_lonely_token_are_those_of_transformers() -> None:
    # position 0 of a causal sequence sees itself only: its value comes out times the sum of the rounded round weights
    for rounds, total in {1: 1.0, 2: 0.9978, 3: 0.9971, 4: 1.0035}.items():
        case = Case(causal=True, rounded=True, rounds=rounds)
        arrays = case.arrays()
        kernel = run_poisoned(session(attention_model(case.attributes)), arrays)
        (body,) = session(attention_model(case.attributes, body=True), library=False).run(None, arrays)
        for out in (kernel, body, torch_attention(case, arrays)):
            # known to four decimals
            np.testing.assert_allclose(out[:, :, 0], total * arrays["v"][:, :, 0], rtol=1e-4)
        safe = replace(case, rounded=False)
        out = run_poisoned(session(attention_model(safe.attributes)), arrays)
        # weights that add up to one within a rounding each
        np.testing.assert_allclose(out[:, :, 0], arrays["v"][:, :, 0], rtol=1e-6)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("poisoned", ["qk", "v"])
def test_nan_reaches_those_that_see_it_and_no_others(poisoned: str) -> None:
    case = Case(chunk_length=16, seq=100, padding=10)
    arrays = case.arrays()
    opened = session(attention_model(case.attributes))
    clean = run_poisoned(opened, arrays)
    arrays[poisoned][0, 1, 40, 3] = np.nan
    out, expected = run_poisoned(opened, arrays), torch_attention(case, arrays)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    assert np.isnan(out[0, 1, 40]).any() or poisoned == "v"
    assert np.isnan(out[0, 1]).any()
    np.testing.assert_array_equal(out[~np.isnan(out)], clean[~np.isnan(out)])


@pytest.mark.requires("native", "onnx", "ort")
def test_a_window_that_is_wider_than_a_round_sees_all_of_it() -> None:
    case = Case()
    chunks = case.arrays()["order"].shape[1] // case.chunk_length
    answers = []
    for around in (chunks - 1, 2**20):
        attributes = replace(case, chunks_before=around, chunks_after=around).attributes
        answers.append(session(attention_model(attributes)).run(None, case.arrays())[0])
    assert np.array_equal(*answers)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("place", "token"), [((0, 0), -1), ((3, 50), 100), ((7, 99), 2**31 - 1), ((7, 0), -(2**31))])
def test_the_kernel_names_a_token_that_does_not_exist(place: tuple[int, int], token: int) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    arrays = Case().arrays()
    arrays["order"][place] = token
    with pytest.raises(InvalidArgument, match=rf"LSHAttention: order holds {token}; expected 0 to 99"):
        session(attention_model(Case().attributes)).run(None, arrays)


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("seq", "chunk_length", "head_dim", "rounds"), [(200, 64, 64, 2), (60, 10, 24, 4), (90, 32, 128, 1)]
)
def test_half_precision_is_off_by_at_most_twice_what_the_formula_is(
    seq: int, chunk_length: int, head_dim: int, rounds: int, dtype: str
) -> None:
    """The formula in standard operators of PyTorch, whose products are in half precision."""
    case = Case(seq, chunk_length, head_dim=head_dim, value_dim=head_dim, rounds=rounds, heads=1, dtype=dtype)
    arrays = case.arrays()
    expected, _ = float64_attention(case, arrays)
    tensors = [torch.from_numpy(arrays[x].astype(np.float32)).to(getattr(torch, dtype)) for x in ("qk", "v")]
    tensors += [torch.from_numpy(arrays[x]) for x in ("order", "keep")]
    theirs = formula(call_of(case), *tensors).double().numpy()
    ours = emulated(case, arrays).astype(np.float64)
    assert np.abs(ours - expected).max() <= 2 * np.abs(theirs - expected).max()


@pytest.mark.requires("native")
def test_tokens_that_do_not_exist_are_taken_for_padding() -> None:
    case = Case(seq=95, chunk_length=10)
    arrays = case.arrays()
    expected = emulated(case, arrays)
    # the five of each row that stand for no token, last in the sort
    strange = np.where(arrays["order"] >= 95, np.array([-1, 2**31 - 1, -(2**31), 96, 100] * 20), arrays["order"])
    out = emulated(case, {**arrays, "order": strange.astype(np.int32)})
    np.testing.assert_array_equal(out, expected)


@pytest.mark.requires("native")
def test_the_attention_passes_nan_on_to_those_that_see_it() -> None:
    case = Case(chunk_length=16, rounds=1)
    arrays = case.arrays()
    clean = emulated(case, arrays)
    arrays["v"][0, 1, 40, 3] = np.nan
    out = emulated(case, arrays)
    wrong = np.isnan(out)
    assert wrong[0, 1, :, 3].any()
    assert not wrong[..., :3].any()
    assert not wrong[1].any()
    np.testing.assert_array_equal(out[~wrong], clean[~wrong])
    arrays = case.arrays()
    arrays["qk"][0, 1, 40, 3] = np.nan
    assert np.isnan(emulated(case, arrays)[0, 1, 40]).all()


def test_the_formula_of_these_tests_counts_every_key_of_a_window() -> None:
    # a chunk of one token per window, by hand: the checker itself
    case = Case(seq=2, chunk_length=1, batch=1, heads=1, rounds=1, head_dim=1, value_dim=1)
    arrays = case.arrays()
    arrays["order"][:] = [[1, 0]]
    arrays["qk"][0, 0, :, 0], arrays["v"][0, 0, :, 0] = [3, 4], [5, 7]
    out, alone = float64_attention(case, arrays)
    # token 1 stands first and sees itself; token 0 sees token 1, and itself only as a last resort
    assert out[0, 0, :, 0].tolist() == [7, 7]
    assert alone[0, 0].tolist() == [False, True]
    assert lsh_attention_cases.window_counts(case).tolist() == [[1, 0], [1, 1]]
