"""`effexport::LSHAttention`, beyond its contract (test_contract.py): against the layer's formulas, and what it does
with NaN and with tokens that do not exist."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated_plugins import array_of
from implementations import exact, implementation
from kernel_sessions import session
from one_node import one_node_model
from slow_cases import named
from torch import Tensor

from effexport.models.layers import fused_operators
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.lsh.layer import LSHAttention
from effexport.plugins.contract import Case
from effexport.plugins.lsh_attention.contract import CONTRACT, case_of, formula
from effexport.plugins.lsh_sort.op import lsh_sort

OP = "LSHAttention"
# As a share of the largest value. Logits up to ‖q‖, about 12, are float32 sums of up to 100 terms: off by 1e-6 in all,
# and so are, relatively, the weights of keys and rounds that they become. The rest is a few roundings of 6e-8.
FP32 = 2e-5
# one chunk of padding for a layer that looks no further than the next
MIXED = [
    *(
        case
        for case in (*CONTRACT.cases, *CONTRACT.larger)
        if case.dtype == "float32" and case.sizes[3] == case.sizes[4]
    ),
    replace(case_of(2, 2, 100, 16, 16, 3, 10, 1), kind="axes"),
    replace(case_of(1, 1, 210, 64, 64, 2, 70, 1), kind="axes"),
    case_of(1, 2, 100, 8, 8, 2, 10, 1, causal=1),
]


def run(how: str, case: Case, inputs: dict[str, Tensor]) -> np.ndarray:
    out: np.ndarray = implementation(OP, how).run(case, inputs)
    return out


def made(*sizes: int, dtype: str = "float32", **options: int) -> tuple[Case, dict[str, Tensor]]:
    """A case [batch, heads, seq, head_dim, value_dim, rounds, chunk_length, chunks_before], and its inputs."""
    case = replace(case_of(*sizes, **options), dtype=dtype)
    return case, CONTRACT.inputs(case, "cpu")


def assert_close(actual: np.ndarray, expected: np.ndarray, limit: float) -> None:
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() <= limit * np.abs(expected).max()


def layer_of(case: Case) -> LSHAttention:
    _, heads, seq, head_dim, _, rounds, chunk_length, before, after, causal, circular, rounded = case.sizes
    spec = LSHSpec(
        dim=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        seq_len=seq,
        chunk_length=chunk_length,
        num_chunks_before=before,
        num_chunks_after=after,
        causal=bool(causal),
        circular=bool(circular),
        num_hashes=rounds,
        num_buckets=6,
        mask_constants="hf" if rounded else "safe",
    )
    return LSHAttention(spec).eval()


@pytest.mark.requires("native", "onnx", "ort")
@torch.no_grad()
def test_the_operator_and_the_kernel_equal_the_formulas_of_the_layer() -> None:
    """With holes, too."""
    for case in MIXED:
        layer, inputs = layer_of(case), CONTRACT.inputs(case, "cpu")
        qk, v, keep = (inputs[name] for name in ("qk", "v", "keep"))
        keep[-1:, 3:50:7] = False
        plain = layer.mix((qk, v), keep)
        order, rank = lsh_sort(layer.hash(qk, keep), layer.spec.total_buckets + 1)
        with named(case.name):
            assert_close(run("kernel", case, inputs | {"order": order, "rank": rank}), plain.numpy(), 2 * FP32)
            with fused_operators(layer, True):
                assert_close(layer.mix((qk, v), keep).numpy(), plain.numpy(), 2 * FP32)


@pytest.mark.requires("native", "onnx", "ort")
def test_rounded_weights_of_a_lonely_token_are_those_of_transformers() -> None:
    # position 0 of a causal sequence sees itself only: its value comes out times the sum of the rounded round weights
    for rounds, total in {1: 1.0, 2: 0.9978, 3: 0.9971, 4: 1.0035}.items():
        sizes = (2, 2, 100, 8, 8, rounds, 10, 1)
        case, inputs = made(*sizes, causal=1, rounded=1)
        value = array_of(inputs["v"])[:, :, 0]
        for how in ("kernel", "body", "torch"):
            # known to four decimals
            np.testing.assert_allclose(run(how, case, inputs)[:, :, 0], total * value, rtol=1e-4)
        # weights that add up to one within a rounding each
        np.testing.assert_allclose(run("kernel", case_of(*sizes, causal=1), inputs)[:, :, 0], value, rtol=1e-6)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("poisoned", ["qk", "v"])
@pytest.mark.parametrize("how", ["kernel", "cuda"])
def test_nan_reaches_those_that_see_it_and_no_others(how: str, poisoned: str) -> None:
    case, inputs = made(2, 2, 100, 8, 8, 2, 16, 1)
    clean = run(how, case, inputs)
    inputs[poisoned][0, 1, 40, 3] = torch.nan
    out, expected = run(how, case, inputs), run("torch", case, inputs)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    assert np.isnan(out[0, 1, 40]).all() or poisoned == "v"
    assert np.isnan(out[0, 1]).any()
    np.testing.assert_array_equal(out[~np.isnan(out)], clean[~np.isnan(out)])


@pytest.mark.requires("native", "onnx", "ort")
def test_a_window_that_is_wider_than_a_round_sees_all_of_it() -> None:
    case, inputs = made(2, 2, 100, 8, 8, 2, 10, 9, after=9)
    wider = case_of(2, 2, 100, 8, 8, 2, 10, 2**20, after=2**20)
    assert np.array_equal(run("kernel", case, inputs), run("kernel", wider, inputs))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("place", "token"), [((0, 0), -1), ((3, 50), 100), ((7, 99), 2**31 - 1), ((7, 0), -(2**31))])
def test_the_kernel_names_a_token_that_does_not_exist(place: tuple[int, int], token: int) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    case, inputs = made(2, 2, 100, 8, 8, 2, 10, 1)
    inputs["order"][place] = token
    feeds = {name: array_of(x) for name, x in inputs.items()}
    with pytest.raises(InvalidArgument, match=rf"LSHAttention: order holds {token}; expected 0 to 99"):
        session(one_node_model(OP, feeds, body=False, **CONTRACT.attributes(case))).run(None, feeds)


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("seq", "chunk_length", "head_dim", "rounds"), [(200, 64, 64, 2), (60, 10, 24, 4), (90, 32, 128, 1)]
)
def test_half_precision_is_off_by_at_most_twice_what_the_formula_is(
    seq: int, chunk_length: int, head_dim: int, rounds: int, dtype: str
) -> None:
    """The formula in standard operators of PyTorch, whose products are in half precision."""
    case, inputs = made(2, 1, seq, head_dim, head_dim, rounds, chunk_length, 1, dtype=dtype)
    expected, plain = exact(CONTRACT, case, inputs), formula(case, *(inputs[x] for x in ("qk", "v", "order", "keep")))
    ours = np.abs(run("cuda", case, inputs).astype(np.float64) - expected)
    assert ours.max() <= 2 * np.abs(plain.double().numpy() - expected).max()


@pytest.mark.requires("native")
def test_tokens_that_do_not_exist_are_taken_for_padding() -> None:
    case, inputs = made(2, 2, 95, 8, 8, 2, 10, 1)
    expected = run("cuda", case, inputs)
    # the five of each row that stand for no token, last in the sort
    strange = torch.tensor([-1, 2**31 - 1, -(2**31), 96, 100] * 20, dtype=torch.int32)
    inputs["order"] = torch.where(inputs["order"] >= 95, strange, inputs["order"])
    np.testing.assert_array_equal(run("cuda", case, inputs), expected)


def test_the_formula_counts_every_key_of_a_window() -> None:
    """By hand: of a chunk of one token per window, whose token 1 stands first."""
    case = case_of(1, 1, 2, 1, 1, 1, 1, 1)
    order, keep = torch.tensor([[1, 0]], dtype=torch.int32), torch.ones(1, 2, dtype=torch.bool)
    qk, v = (torch.tensor(x, dtype=torch.float64).view(1, 1, 2, 1) for x in ([3.0, 4.0], [5.0, 7.0]))
    # token 1 sees itself; token 0 sees token 1, and itself only as a last resort
    assert formula(case, qk, v, order, keep).flatten().tolist() == [7, 7]
