"""Inputs that show what a function body computes: for each operator, values at which its parts are told apart.

Sizes differ from each other, so that exchanged axes do not fit. Samples see all tokens, some, one, and none. Lengths
leave a last block that is not full, and fill all blocks. Magnitudes reach each constant: an eps counts, a maximum has
to be subtracted, a hidden logit competes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.dtypes import numpy_dtype
from effexport.errors import UserError
from effexport.plugins.known_ops import known_ops
from effexport.plugins.ops import Op
from effexport.proof.tolerances import UNIT_ROUNDOFF

if TYPE_CHECKING:
    from effexport.dtypes import Array

Inputs = dict[str, "Array"]
Attributes = Mapping[str, Any]
SEED = 20_101
HEADS = 3
# Tokens for which a definition whose memory is quadratic in them takes no more than 300 MB.
LONGEST_QUADRATIC = 4200


def operator_inputs(op: str, attributes: Attributes, dtype: str) -> Iterator[tuple[str, Inputs]]:
    """Name and inputs of each case, in the order of the operator's inputs. dtype: of the operator's type T.

    attributes: of the node. An operator of a user has them in its op.py, as `proof_inputs`.
    Raises UserError for one that has none, or without PyTorch.
    """
    rng = np.random.default_rng(SEED)
    make = _INPUTS.get(op) or proof_inputs_of(known_ops()[op])
    for name, inputs in make(rng, attributes):
        # float64 stands for T; what is float32 whatever T is stays so
        yield name, {key: x.astype(numpy_dtype(dtype)) if x.dtype == np.float64 else x for key, x in inputs.items()}


def proof_inputs_of(op: Op) -> Callable[[np.random.Generator, Attributes], Iterator[tuple[str, Inputs]]]:
    """What makes the inputs for an operator of a user."""
    try:
        module = op.load()
    except ImportError as error:
        raise UserError(f"{op.package}.op does not load: {error}; expected it to, with PyTorch installed") from error
    if not hasattr(module, "proof_inputs"):
        raise UserError(f"{op.package}.op has no proof_inputs(rng, attributes); expected inputs to check the body with")
    made: Callable[[np.random.Generator, Attributes], Iterator[tuple[str, Inputs]]] = module.proof_inputs
    return made


def rounded_anew(inputs: Mapping[str, Array], precision: str, seed: int) -> Inputs:
    """The inputs with each number off by at most one rounding. Equal numbers stay equal: what depends on their
    equality would change by more than rounding explains."""
    rng = np.random.default_rng(SEED + seed)

    def moved(x: Array) -> Array:
        values, places = np.unique(x.astype(np.float64), return_inverse=True)
        values *= 1 + UNIT_ROUNDOFF[precision] * rng.uniform(-1, 1, values.shape)
        return values[places].reshape(x.shape).astype(x.dtype)

    return {name: x if x.dtype.kind in "bi" else moved(x) for name, x in inputs.items()}


def keeps(seq_len: int) -> Array:
    """Masks of four samples, boolean [4, seq]: all tokens, two thirds with a gap, the first token only, none."""
    keep = np.zeros((4, seq_len), dtype=bool)
    keep[0] = True
    keep[1, : -(-seq_len * 2 // 3)] = True
    keep[1, 1 : seq_len // 2 : 5] = False
    keep[2, 0] = True
    return keep


def aft_simple_attention(rng: np.random.Generator, attributes: Attributes) -> Iterator[tuple[str, Inputs]]:
    keep = keeps(37)
    q, k, v = (rng.standard_normal((4, HEADS, 37, 5)) for _ in range(3))
    yield "masks", {"q": q, "k": k, "v": v, "keep": keep}
    # beyond ±88, where exp overflows or vanishes; and hidden tokens that hold anything
    far = np.where(keep[:, None, :, None], k + rng.choice([-300.0, 0.0, 300.0], (4, HEADS, 1, 5)), np.nan)
    far[:, 0, :, 1] = np.where(keep, -np.inf, np.nan)
    yield "keys far apart", {"q": q, "k": far, "v": np.where(np.isnan(far), np.inf, v), "keep": keep}
    yield "no tokens", {"q": q[:, :, :0], "k": k[:, :, :0], "v": v[:, :, :0], "keep": keep[:, :0]}


def aft_window_attention(rng: np.random.Generator, attributes: Attributes) -> Iterator[tuple[str, Inputs]]:
    """Biases of each position or of all, that reach less than a block of the body and more; keys of each channel or of
    all. A causal body has blocks of 64 tokens, the other one of 32, or as far as the biases reach."""
    causal = int(bool(attributes.get("causal")))
    far = 64 * 3 + 5 if causal else 32 * 4 + 5
    cases = {
        "taps": (far, 11 + causal, 1, 5),
        "positions": (far, 5, far + 3, 1),
        "a long reach": (far, 71, far, 5),
        "whole blocks": (128, 65, 1, 1),
        "few tokens": (5, 9, 5, 5),
        "one tap": (70, 1, 1, 5),
    }
    for name, (seq_len, taps, positions, key_channels) in cases.items():
        q, v = (rng.standard_normal((4, HEADS, seq_len, 5)) for _ in range(2))
        k = 2 * rng.standard_normal((4, HEADS, seq_len, key_channels))
        bias = 2 * rng.standard_normal((HEADS if positions == 1 else 1, positions, taps)).astype(np.float32)
        yield name, {"q": q, "k": k, "v": v, "keep": keeps(seq_len), "bias": bias}
    # beyond ±88, where exp overflows or vanishes; hidden tokens that hold anything; biases up to 40
    keep = keeps(100)
    q, k, v = (rng.standard_normal((4, HEADS, 100, 5)) for _ in range(3))
    k = np.where(keep[:, None, :, None], k + rng.choice([-120.0, 0.0, 120.0], (4, HEADS, 1, 5)), np.nan)
    k[:, 0, :, 1] = np.where(keep, -np.inf, np.nan)
    bias = np.float32(12) * rng.standard_normal((1, 100, 9)).astype(np.float32)
    yield "keys far apart", {"q": q, "k": k, "v": np.where(np.isnan(k), np.inf, v), "keep": keep, "bias": bias}
    k = rng.standard_normal((4, HEADS, 100, 5))
    # of these, exp overflows unless the largest is subtracted
    yield (
        "large biases",
        {"q": q, "k": k, "v": v, "keep": np.ones_like(keep), "bias": np.float32(95) + bias / np.float32(12)},
    )
    if causal:
        # a later key, much larger than all before it
        k = np.cumsum(rng.uniform(0, 5, (4, HEADS, 100, 5)), axis=2)
        yield "keys that rise", {"q": q, "k": k, "v": v, "keep": keep, "bias": bias / np.float32(12)}
    empty = {name: x[:, :, :0] for name, x in (("q", q), ("k", k), ("v", v))}
    yield "no tokens", empty | {"keep": keep[:, :0], "bias": bias[:, :1]}
    yield "no samples", {"q": q[:0], "k": k[:0], "v": v[:0], "keep": keep[:0], "bias": bias}
    yield "no heads", {"q": q[:, :0], "k": k[:, :0], "v": v[:, :0], "keep": keep, "bias": bias}


def iterative_pinv(rng: np.random.Generator, attributes: Attributes) -> Iterator[tuple[str, Inputs]]:
    """A step multiplies the eigenvalues of A Z by 13/4 where they are small, and repairs what earlier steps did.

    So start values are 1 to 3.25^iterations too small: the iteration is at its end, half way, and at its beginning.
    Where an eigenvalue is a little below 3 it stays there for many steps, and shows what each of them does.
    """
    iterations = int(attributes.get("iterations", 6))
    logits = rng.standard_normal((4, 12, 12)) + 4 * np.eye(12)
    a = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    scale = a.sum(axis=1).max(axis=-1)[:, None, None]
    late = 3.25 ** np.array([0, iterations / 2, max(0, iterations - 1.5), iterations])[:, None, None]
    yield "matrices", {"A": a, "scale": scale * late}
    single = rng.uniform(0.5, 1.0, (6, 1, 1))
    eigenvalues = 3 - np.geomspace(0.02, 2.9, 6)[:, None, None]
    yield "one by one", {"A": single, "scale": single * single / eigenvalues}
    yield "no matrices", {"A": a[:0], "scale": scale[:0]}


def elu_linear_attention(rng: np.random.Generator, attributes: Attributes) -> Iterator[tuple[str, Inputs]]:
    chunk = int(attributes.get("chunk_length", 128)) if attributes.get("causal") else 32
    for name, seq_len in (("blocks", 4 * chunk), ("part of a block", 2 * chunk + max(1, chunk // 3)), ("one token", 1)):
        q, k = (rng.standard_normal((4, HEADS, seq_len, 6)) for _ in range(2))
        v = rng.standard_normal((4, HEADS, seq_len, 5))
        if attributes.get("relu") and float(attributes["eps"]) == 0:
            q, k = features(q), features(k)
        # a sample without keys, and a query without features, divide 0 by eps
        yield name, {"q": q, "k": k, "v": v, "keep": keeps(seq_len) | (float(attributes["eps"]) == 0)}
    seq_len = 2 * chunk + 1
    q, k = (rng.standard_normal((3, HEADS, seq_len, 6)) for _ in range(2))
    v = rng.standard_normal((3, HEADS, seq_len, 5))
    # exp of ±100 overflows or vanishes; denominators are much larger than eps, near it, and below
    q[0, :, ::3] += 100
    k[0, :, ::4] += 100
    eps = max(float(attributes["eps"]), 1e-12)
    q[1:] += np.log(eps) / 2 - np.array([1.0, 4.0])[:, None, None, None]
    k[1:] += np.log(eps) / 2 - np.log(6 * seq_len)
    if attributes.get("relu"):
        q, k = features(q), features(k)
    yield "small denominators", {"q": q, "k": k, "v": v, "keep": np.ones((3, seq_len), bool)}
    yield "no tokens", {"q": q[:, :, :0], "k": k[:, :, :0], "v": v[:, :, :0], "keep": np.ones((3, 0), bool)}
    seq_len = chunk * (chunk + 1) + 1
    if attributes.get("causal") and seq_len <= LONGEST_QUADRATIC:
        # more blocks than a block has tokens
        long = {name: rng.standard_normal((1, 1, seq_len, 2)) for name in "qkv"}
        yield "many blocks", long | {"keep": np.ones((1, seq_len), bool)}


def features(x: np.ndarray) -> np.ndarray:
    """elu(x) + 1: positive numbers of all magnitudes."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def lsh_hash(rng: np.random.Generator, attributes: Attributes) -> Iterator[tuple[str, Inputs]]:
    """Integers, whose products float32 adds up exactly and float16 does not: each bucket has one right answer.

    Ties occur: some directions are equal or opposite, and some tokens are zero.
    """
    chunk, rounds, head_dim = int(attributes["chunk_length"]), 2, 7
    width = sum(attributes["bucket_factors"]) // 2
    rotations = rng.integers(-8191, 8192, (HEADS, head_dim, rounds, width)).astype(np.float32)
    rotations[:, :, 1, -1] = rotations[:, :, 1, 0]
    rotations[:, :, 1, width // 2] = -rotations[:, :, 1, 0]
    for name, seq_len in (("whole chunks", 2 * chunk), ("one token more", chunk + 1), ("one token", 1)):
        qk = rng.integers(-30, 31, (4, HEADS, seq_len, head_dim)).astype(np.float64)
        qk[0, :, :: max(3, seq_len // 4)] = 0
        yield name, {"qk": qk, "rotations": rotations, "keep": keeps(seq_len)}


def lsh_sort(rng: np.random.Generator, attributes: Attributes) -> Iterator[tuple[str, Inputs]]:
    """More tokens than two of the body's blocks of 128, whole blocks, and one token."""
    buckets = int(attributes["num_buckets"])
    for seq_len in (300, 384, 1):
        rows = rng.integers(0, buckets, (5, seq_len))
        rows[1] = np.sort(rows[1])[::-1]
        rows[2] = buckets - 1
        rows[3] = np.where(rng.random(seq_len) < 0.5, 0, buckets - 1)
        yield f"{seq_len} tokens", {"buckets": rows.astype(np.int32)}
    # more blocks than a block has tokens
    yield "many blocks", {"buckets": rng.integers(0, buckets, (1, 128 * 129 + 1)).astype(np.int32)}


def lsh_attention(rng: np.random.Generator, attributes: Attributes) -> Iterator[tuple[str, Inputs]]:
    """Rounds of several chunks and of one; sorted by buckets, and all in one bucket, which is the tokens' own order."""
    chunk, rounds = int(attributes["chunk_length"]), 3
    window = int(attributes["chunks_before"]) + 1 + int(attributes["chunks_after"])
    cases = {"chunks": (window + 2, 4, 3), "one bucket": (window + 1, 1, 3), "one chunk": (1, 2, 3)}
    # more chunks than there are samples and heads
    cases["one head"] = (window + 5, 3, 3)
    # logits up to ±200, of which exp overflows unless the largest is subtracted
    cases["long vectors"] = (window, 4, 40)
    for name, (chunks, buckets, length) in cases.items():
        padded = chunks * chunk
        seq_len = max(1, padded - chunk // 3)
        # one head of long chunks: the definition works chunk by chunk, at a cost that is quadratic in their length
        keep, heads = keeps(seq_len), HEADS if chunk <= 64 else 1
        if name == "one head":
            keep, heads = keep[1:2], 1
        rows = (len(keep), heads)
        # some vectors are far shorter than most, at the scale of the eps under their root
        qk = length * rng.standard_normal((*rows, seq_len, 6))
        qk *= rng.choice([1e-3, 1.0, 2.0], (*rows, seq_len, 1), p=[0.3, 0.4, 0.3])
        v = rng.standard_normal((*rows, seq_len, 5))
        bucket = np.where(keep[:, None], rng.integers(0, buckets, (len(keep), heads * rounds, seq_len)), buckets)
        bucket = np.pad(bucket, [(0, 0), (0, 0), (0, padded - seq_len)], constant_values=buckets)
        order = np.argsort(bucket.reshape(-1, padded), axis=1, kind="stable").astype(np.int32)
        rank = np.argsort(order, axis=1).astype(np.int32)
        yield name, {"qk": qk, "v": v, "order": order, "rank": rank, "keep": keep}


def masked_attention(rng: np.random.Generator, attributes: Attributes) -> Iterator[tuple[str, Inputs]]:
    queries, keys = 13, 37
    spread = 1 / max(abs(float(attributes["scale"])), 1e-6)
    q = spread * rng.standard_normal((4, HEADS, queries, 6))
    k = rng.standard_normal((4, HEADS, keys, 6))
    v = rng.standard_normal((4, HEADS, keys, 5))
    yield "masks", {"q": q, "k": k, "v": v, "keep": keeps(keys)}
    # logits of −6e4, all the same, so that no rounding tells them apart: what is hidden must be lower still
    low = np.full_like(q, 100 * spread)
    yield "low logits", {"q": low, "k": np.full_like(k, -100.0), "v": v, "keep": keeps(keys)}
    yield "no queries", {"q": q[:, :, :0], "k": k, "v": v, "keep": keeps(keys)}


def segment_means(rng: np.random.Generator, attributes: Attributes) -> Iterator[tuple[str, Inputs]]:
    """Whole segments, and one token or more beyond them; fewer tokens than segments; and none."""
    count = int(attributes["num_segments"])
    lengths = {
        "whole segments": 2 * count,
        "one token more": 2 * count + 1,
        "more": 3 * count - 1,
        "few": count // 2 + 1,
    }
    for name, seq_len in lengths.items():
        yield name, {"x": rng.standard_normal((4, HEADS, seq_len, 5)), "keep": keeps(seq_len)}
    yield "no tokens", {"x": np.zeros((4, HEADS, 0, 5)), "keep": np.zeros((4, 0), bool)}


def sequence_conv(rng: np.random.Generator, attributes: Attributes) -> Iterator[tuple[str, Inputs]]:
    """Filters shorter and longer than a block of the body, which has 64 tokens or the filter's reach."""
    for taps, seq_len in ((33, 150), (5, 129), (101, 230), (3, 128), (1, 3)):
        keep = keeps(seq_len)
        x, residual = (rng.standard_normal((4, HEADS, seq_len, 5)) for _ in range(2))
        x = np.where(keep[:, None, :, None], x, np.nan)
        weight = rng.standard_normal((HEADS, 1, taps, 1)) / np.sqrt(taps)
        yield f"{taps} taps", {"x": x, "weight": weight, "keep": keep, "residual": residual}
    yield "no tokens", {"x": x[:, :, :0], "weight": weight, "keep": keep[:, :0], "residual": residual[:, :, :0]}
    # more blocks than a block has tokens
    seq_len = 64 * 65 + 1
    x, residual = (rng.standard_normal((1, 1, seq_len, 2)) for _ in range(2))
    weight = rng.standard_normal((1, 1, 5, 1))
    yield "many blocks", {"x": x, "weight": weight, "keep": np.ones((1, seq_len), bool), "residual": residual}


_INPUTS: dict[str, Callable[[np.random.Generator, Attributes], Iterator[tuple[str, Inputs]]]] = {
    "AFTSimpleAttention": aft_simple_attention,
    "AFTWindowAttention": aft_window_attention,
    "EluLinearAttention": elu_linear_attention,
    "IterativePinv": iterative_pinv,
    "LSHAttention": lsh_attention,
    "LSHHash": lsh_hash,
    "LSHSort": lsh_sort,
    "MaskedAttention": masked_attention,
    "SegmentMeans": segment_means,
    "SequenceConv": sequence_conv,
}
