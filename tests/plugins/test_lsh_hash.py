"""`effexport::LSHHash`: the torch operator, its schema, its body of standard nodes and its kernel."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_sessions import session
from one_node import one_node_model, run_body, run_kernel

from effexport.models.variants.lsh.layer import LSHHash
from effexport.models.variants.lsh.spec import LSHSpec
from effexport.plugins.lsh_hash.op import lsh_hash, onnx_function_body
from effexport.plugins.ops import DOMAIN, PLUGIN_NAMESPACE

OP = "LSHHash"
# seq, head_dim, rounds, bucket factors, chunk_length: one of each; blocks of 64 tokens that are full and not; tiles of
# directions that are full and not; padding of several blocks; several factors
SIZES: list[tuple[int, int, int, tuple[int, ...], int]] = [
    (1, 1, 1, (2,), 1),
    (63, 16, 2, (8,), 64),
    (64, 64, 4, (16, 32), 16),
    (65, 33, 3, (4, 6), 7),
    (100, 5, 1, (70,), 64),
    (5, 20, 2, (2, 4, 6), 300),
    (1000, 8, 2, (10,), 64),
]


def integer_feeds(
    n: int, head_dim: int, rounds: int, factors: tuple[int, ...], *, batch: int = 3, heads: int = 2, dtype: Any = "f4"
) -> dict[str, np.ndarray]:
    """Integers whose products are exact in float32, with ties; the last sample keeps no token."""
    random = np.random.default_rng((n, head_dim))
    rotations = random.integers(-8191, 8192, (heads, head_dim, rounds, sum(factors) // 2)).astype(np.float32)
    rotations[..., -1] = rotations[..., 0]
    rotations[..., rotations.shape[3] // 2] = -rotations[..., 0]
    qk = random.integers(-15, 16, (batch, heads, n, head_dim)).astype(dtype)
    qk[:, :, ::5] = 0
    keep = random.random((batch, n)) > 0.3
    keep[-1:] = False
    return {"qk": qk, "rotations": rotations, "keep": keep}


def exact_buckets(feeds: dict[str, np.ndarray], factors: tuple[int, ...], chunk_length: int) -> np.ndarray:
    """The formula in float64, factor by factor: NumPy's argmax takes the first of equal projections."""
    qk, rotations, keep = feeds.values()
    batch, heads, n, _ = qk.shape
    rounds = rotations.shape[2]
    projected = np.einsum("bhnd,hdrw->bhrnw", qk.astype(np.float64), rotations.astype(np.float64))
    padded = -(-n // chunk_length) * chunk_length
    buckets = np.full((batch, heads, rounds, padded), math.prod(factors), np.int32)
    own, stride, first = np.zeros((batch, heads, rounds, n), np.int64), 1, 0
    for factor in factors:
        part = projected[..., first : first + factor // 2]
        own += stride * np.concatenate([part, -part], axis=-1).argmax(axis=-1)
        stride, first = stride * factor, first + factor // 2
    buckets[..., :n] = np.where(keep[:, None, None], own, math.prod(factors))
    return buckets.reshape(-1, padded)


def attributes(factors: tuple[int, ...], chunk_length: int) -> dict[str, Any]:
    return {"bucket_factors": factors, "chunk_length": chunk_length}


def tensors(feeds: dict[str, np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in feeds.values()]


@pytest.mark.parametrize(("n", "head_dim", "rounds", "factors", "chunk_length"), SIZES)
def test_the_operator_computes_the_formula(
    n: int, head_dim: int, rounds: int, factors: tuple[int, ...], chunk_length: int
) -> None:
    feeds = integer_feeds(n, head_dim, rounds, factors)
    expected = exact_buckets(feeds, factors, chunk_length)
    np.testing.assert_array_equal(lsh_hash(*tensors(feeds), factors, chunk_length).numpy(), expected)


@pytest.mark.parametrize(("num_buckets", "n"), [(8, 100), ((4, 6), 37), (2, 1), ((2, 4, 6), 50), (None, 63)])
def test_the_operator_gives_the_buckets_of_the_layer(num_buckets: Any, n: int) -> None:
    spec = LSHSpec(dim=32, heads=2, seq_len=128, chunk_length=16, num_buckets=num_buckets, num_hashes=3)
    layer, source = LSHHash(spec), torch.Generator().manual_seed(n)
    qk, keep = torch.randn(2, 2, n, 16, generator=source), torch.rand(2, n, generator=source) > 0.3
    assert torch.equal(layer(qk, keep, fused=True), layer(qk, keep))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_operator_is_registered_as_pytorch_asks(dtype: torch.dtype) -> None:
    qk, rotations, keep = tensors(integer_feeds(7, 4, 2, (4, 6)))
    # a custom operator's result is new memory, also for the strides of split heads
    split = qk.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(torch.ops.effexport.lsh_hash.default, (split, rotations, keep, [4, 6], 16))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("n", "head_dim", "rounds", "factors", "chunk_length"), SIZES)
def test_kernel_and_body_compute_the_formula_in_float32_whatever_the_type(
    n: int, head_dim: int, rounds: int, factors: tuple[int, ...], chunk_length: int, dtype: Any
) -> None:
    feeds = integer_feeds(n, head_dim, rounds, factors, dtype=dtype)
    expected = exact_buckets(feeds, factors, chunk_length)
    for run in (run_kernel, run_body):
        found = run(OP, feeds, expected.shape, **attributes(factors, chunk_length))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.requires("native", "onnx", "ort")
def test_a_bucket_of_ordinary_numbers_differs_only_where_projections_nearly_tie() -> None:
    factors, random = (16, 16), np.random.default_rng(0)
    qk = random.standard_normal((1, 4, 1000, 64)).astype(np.float32)
    rotations = random.standard_normal((4, 64, 4, 16)).astype(np.float32)
    feeds = {"qk": qk, "rotations": rotations, "keep": np.ones((1, 1000), bool)}
    expected = exact_buckets(feeds, factors, 8)
    found = run_kernel(OP, feeds, expected.shape, **attributes(factors, 8))
    # sums of 64 products of about 1 are off by about 1e-6; of 32000 pairs of best projections, which are about 1 apart,
    # so few are as close as that
    assert (found != expected).sum() <= 1


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("opset", [18, 20, 23, 24])
def test_the_body_works_in_every_opset(opset: int) -> None:
    feeds = integer_feeds(70, 8, 2, (4, 6))
    expected = exact_buckets(feeds, (4, 6), 16)
    found = run_body(OP, feeds, expected.shape, opset=opset, **attributes((4, 6), 16))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_hidden_tokens_change_nothing_whatever_they_hold(value: float) -> None:
    feeds = integer_feeds(200, 24, 2, (8,))
    expected = exact_buckets(feeds, (8,), 16)
    other = {**feeds, "qk": np.where(feeds["keep"][:, None, :, None], feeds["qk"], np.float32(value))}
    for run in (run_kernel, run_body):
        np.testing.assert_array_equal(run(OP, other, expected.shape, **attributes((8,), 16)), expected)
    assert np.array_equal(lsh_hash(*tensors(other), (8,), 16).numpy(), expected)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_leaves_other_tokens_alone_and_stays_in_range(value: float) -> None:
    feeds = integer_feeds(100, 24, 2, (4, 6), batch=1)
    feeds["keep"][...] = True
    expected = exact_buckets(feeds, (4, 6), 16)
    feeds["qk"][0, 1, 50, 3] = value
    found = run_kernel(OP, feeds, expected.shape, **attributes((4, 6), 16))
    assert {*np.argwhere(found != expected)[:, 1]} <= {50}
    assert 0 <= found[:, 50].min() <= found[:, 50].max() < 24


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("n", [1, 100, 1000])
def test_the_kernel_gives_the_same_buckets_for_any_threads_and_batch_mates(n: int) -> None:
    random = np.random.default_rng(n)
    feeds = integer_feeds(n, 32, 2, (16,))
    # near-ties, which another order of summation would decide in another way
    feeds["qk"] = random.standard_normal(feeds["qk"].shape).astype(np.float16).astype(np.float32)
    feeds["rotations"] = (1 + 1e-6 * random.standard_normal(feeds["rotations"].shape)).astype(np.float32)
    shape = (12, -(-n // 16) * 16)
    given = attributes((16,), 16)
    together = run_kernel(OP, feeds, shape, threads=1, **given)
    for threads in (2, 5):
        assert np.array_equal(together, run_kernel(OP, feeds, shape, threads=threads, **given))
    for sample in range(3):
        alone = {**feeds, **{name: feeds[name][sample : sample + 1].copy() for name in ("qk", "keep")}}
        assert np.array_equal(together[4 * sample : 4 * sample + 4], run_kernel(OP, alone, (4, shape[1]), **given))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty_inputs_give_empty_outputs_or_bucket_0(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, n, head_dim = sizes
    feeds = integer_feeds(n, head_dim, 3, (4,), batch=batch, heads=heads)
    feeds["keep"][...] = True
    shape = (batch * heads * 3, -(-n // 8) * 8)
    outputs = [lsh_hash(*tensors(feeds), (4,), 8).numpy()]
    # ONNX Runtime's products do not spread rotations over no samples, and leave sums over no channels undefined
    runs = (run_kernel, run_body) if batch > 0 and head_dim > 0 else (run_kernel,)
    outputs += [run(OP, feeds, shape, **attributes((4,), 8)) for run in runs]
    for output in outputs:
        assert output.shape == shape
        assert not output[:, :n].any()
        assert (output[:, n:] == 4).all()


ERRORS: list[tuple[dict[str, tuple[int, ...]], str]] = [
    ({"qk": (2, 3, 4)}, "qk has shape"),
    ({"rotations": (3, 8, 2)}, "rotations has shape"),
    ({"rotations": (2, 8, 2, 5)}, "rotations has shape"),
    ({"rotations": (3, 7, 2, 5)}, "rotations has shape"),
    ({"rotations": (3, 8, 2, 4)}, "(rotations has shape|bucket_factors is)"),
    ({"keep": (2, 5)}, "keep has shape"),
    ({"keep": (1, 4)}, "keep has shape"),
]


def wrong_feeds(given: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    shapes = {"qk": (2, 3, 4, 8), "rotations": (3, 8, 2, 5), "keep": (2, 4), **given}
    return {name: np.ones(shape, bool if name == "keep" else np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(("given", "message"), ERRORS)
def test_wrong_shapes_are_errors_of_the_operator(given: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*expected"):
        lsh_hash(*tensors(wrong_feeds(given)), (4, 6), 2)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("given", "message"), ERRORS)
def test_wrong_shapes_are_errors_of_the_kernel(given: dict[str, tuple[int, ...]], message: str) -> None:
    feeds = wrong_feeds(given)
    model = one_node_model(OP, feeds, body=False, **attributes((4, 6), 2))
    with pytest.raises(Exception, match=f"LSHHash: {message}.*expected"):
        session(model, library=True).run(None, feeds)


WRONG_ATTRIBUTES: list[tuple[dict[str, Any], str]] = [
    ({"bucket_factors": (3, 7)}, r"bucket_factors is \[3, 7\]; expected even"),
    ({"bucket_factors": (0, 10)}, "bucket_factors is .*; expected"),
    ({"bucket_factors": (2,) * 31}, r"bucket_factors is \[2, .*2\^31|bucket_factors is \[2, .*even"),
    ({"chunk_length": 0}, "chunk_length is 0; expected at least 1"),
]


@pytest.mark.parametrize(("given", "message"), WRONG_ATTRIBUTES)
def test_wrong_attributes_are_errors_of_the_operator(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lsh_hash(*tensors(wrong_feeds({})), **{**attributes((4, 6), 2), **given})


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("given", "message"), WRONG_ATTRIBUTES)
def test_wrong_attributes_are_errors_of_the_kernel(given: dict[str, Any], message: str) -> None:
    feeds = wrong_feeds({})
    model = one_node_model(OP, feeds, body=False, **{**attributes((4, 6), 2), **given})
    with pytest.raises(Exception, match=f"LSHHash: ({message})"):
        session(model, library=True).run(None, feeds)


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("other", [{"bucket_factors": (8,)}, {"chunk_length": 32}])
def test_nodes_with_different_attributes_cannot_share_a_body(other: dict[str, Any]) -> None:
    from onnx import helper

    names = ["qk", "rotations", "keep"]
    nodes = [
        helper.make_node(OP, names, ["buckets"], domain=DOMAIN, **{PLUGIN_NAMESPACE: DOMAIN}, **given)
        for given in (attributes((4,), 16), {**attributes((4,), 16), **other})
    ]
    with pytest.raises(ValueError, match=f"different {next(iter(other))}"):
        onnx_function_body(nodes, 20)


@pytest.mark.requires("onnx")
def test_the_schema_infers_integers_of_two_dimensions() -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    model = onnx.ModelProto.FromString(one_node_model(OP, wrong_feeds({}), body=False, **attributes((4, 6), 2)))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    buckets = inferred.graph.output[0].type.tensor_type
    assert (buckets.elem_type, len(buckets.shape.dim)) == (onnx.TensorProto.INT32, 2)
