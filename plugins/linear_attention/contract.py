"""The contract of EluLinearAttention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.contract import (
    PEAKS,
    AtMost,
    Case,
    Contract,
    FasterThan,
    Limit,
    Timed,
    Work,
    in_all_types,
    moved,
    parts,
    peak,
    product,
)
from effexport.plugins.linear_attention import SIGNATURE

EPS = (1e-6,)
# Of an H100 or H200. The CUDA kernels choose by those of the GPU they run on, which changes no bit.
MULTIPROCESSORS = 132


def both_forms(*shapes: tuple[int, ...], kind: str = "random", relu: int = 0) -> tuple[Case, ...]:
    """Not causal and causal, in all types."""
    return in_all_types(*(Case((*shape, causal, relu), EPS, kind) for shape in shapes for causal in (0, 1)))


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """The last sample ends in padding and has a hole. What is hidden is large, but finite: it has no influence.

    Kind "no token": all of the last sample is hidden, where the outputs are 0 / (0 + eps) = 0. Kinds "rising" and
    "falling": features of keys grow or shrink along the sequence, by a factor of e¹², so that in float16 sums change
    their exponent from tile to tile. PEAKS: a feature of a query and a key is far above all others, so that whoever
    misses it chooses an exponent with which it is infinite.
    """
    batch, heads, seq, head_dim, value_dim, *_ = case.sizes
    source = case.generator(device)
    q, k, v = (case.normal(source, batch, heads, seq, dim) for dim in (head_dim, head_dim, value_dim))
    if case.kind in ("rising", "falling"):
        slope = torch.linspace(-12, 0, seq, device=device)
        k = (k + (slope if case.kind == "rising" else slope.flip(0))[:, None]).to(case.torch_dtype)
    highest = peak(case.kind, seq)
    channel = {"first": 0, "middle": head_dim // 2}.get(case.kind, head_dim - 1)
    q[:, :, highest, channel] = k[:, :, highest, channel] = 1000
    keep = torch.ones(batch, seq, dtype=torch.bool, device=device)
    if seq > 4:
        keep[-1:, seq - seq // 3 :] = False
        keep[-1:, 1] = False
    keep[:, highest] = True
    if case.kind == "no token":
        keep[-1:] = False
    elif case.kind == "mean":
        q, k = torch.zeros_like(q), torch.zeros_like(k)
    hidden = ~keep[:, None, :, None]
    return {"q": q, "k": k.masked_fill_(hidden, 8.0), "v": v.masked_fill_(hidden, -1e4), "keep": keep}


def reference(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """φ(q_i)ᵀ S / (φ(q_i)·z + eps) with S = Σ m_j φ(k_j) v_jᵀ and z = Σ m_j φ(k_j), in float64.

    Where causal, the sums over j ≤ i are taken by way of all weights φ(q_i)·φ(k_j): O(seq²).
    """
    (eps,), (causal, relu) = case.numbers, case.sizes[-2:]
    q, k, v, keep = inputs.values()
    q, k, v = features(q.double(), relu), features(k.double(), relu) * keep[:, None, :, None], v.double()
    if causal:
        weights = (q @ k.mT).tril()
        return {"out": weights @ v / (weights.sum(dim=-1, keepdim=True) + eps)}
    return {"out": q @ (k.mT @ v) / (q @ k.sum(dim=2)[..., None] + eps)}


def intermediate(case: Case) -> int:
    _, heads, seq, _, _, causal, _ = case.sizes
    return heads * seq**2 if causal else 0


def features(x: Tensor, relu: int) -> Tensor:
    """φ(x) = relu(x) or elu(x) + 1."""
    return x.clamp(min=0) if relu else x.clamp(min=0) + x.clamp(max=0).exp()


def limit(case: Case) -> Limit:
    """As for all operators, over the largest result: an output that is lost altogether must not pass because some value
    is large. Over the largest value, of which outputs are means, kernels keep to 2e-6 on CPUs and 5e-6 on GPUs."""
    reason = (
        "sums of up to 576 terms in a row, with a rounding of 6e-8 each and of either sign: 6e-8 · √576 = 1.4e-6; "
        "values of either sign cancel over up to 128 features, √128 times; half types round features of queries and of "
        "keys, S and z (or the weights of a block), and the result, once each"
    )
    roundings = 1 if case.dtype == "float32" else 4
    return Limit(1.7e-5 + roundings * case.rounding, reason)


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """The formula in standard operators, in float32 as layers compute it; where causal, block by block."""
    (eps,), (causal, relu) = case.numbers, case.sizes[-2:]
    q, k, v, keep = inputs.values()

    def formula() -> Tensor:
        queries, keys = features(q.float(), relu), features(k.float(), relu) * keep[:, None, :, None]
        # one more column makes the denominator a column of the same products
        values = F.pad(v.float(), (0, 1), value=1.0)
        sums = causal_sums(queries, keys, values) if causal else queries @ (keys.mT @ values)
        return (sums[..., :-1] / (sums[..., -1:] + eps)).to(v.dtype)

    return {"formula": formula}


def causal_sums(q: Tensor, k: Tensor, v: Tensor, block: int = 64) -> Tensor:
    """q_iᵀ Σ_j≤i k_j v_jᵀ: a triangle of weights inside each block, and the sums of all blocks before it."""
    seq = q.shape[2]
    q, k, v = (F.pad(x, (0, 0, 0, -seq % block)).unflatten(2, (-1, block)) for x in (q, k, v))
    states = k.mT @ v
    before = states.cumsum(dim=2) - states
    return ((q @ k.mT).tril() @ v + q @ before).flatten(2, 3)[:, :, :seq]


def work(case: Case) -> Work:
    """Tiles of 64 × 64; a state has 9 rows of 4 numbers for each of 128 threads. Features are made in place."""
    batch, heads, seq, head_dim, value_dim, causal, _ = case.sizes
    size, groups = case.torch_dtype.itemsize, batch * heads
    keys, values, tiles = parts(head_dim, 64), parts(value_dim, 64), parts(seq, 64)
    slices = parts(seq, (64 if head_dim > 64 else 256) if causal else 512)
    combined = slices > (8 if causal else 2 if keys == 1 else 1)
    tile = moved(64 * 64 * size)
    # reads, and reads again to write where halves share an exponent
    features = tile * (3 if case.dtype == "float16" else 2)
    one_more = Work(tensor=64.0 * 64 * 8) if size == 2 else Work()
    update = product(size, 64, 64, 64, left="columns") + one_more
    queries = tile + tile * 2 + product(size, 64, 64, 64) + one_more
    states = (tile * 2 + features + update) * (groups * tiles * keys * values)
    state_bytes = 18432.0 * groups * keys * values
    if not causal:
        outputs = (queries * keys + tile * 2) * (groups * tiles * values)
        staged = tile * (groups * values * (slices if keys == 1 else tiles * keys))
        again = (state_bytes * slices, state_bytes)[: 1 + combined]
        return states + outputs + staged + Work(scratch=state_bytes * (slices + combined), again=again)
    # one launch, if its blocks occupy the GPU
    whole = slices == 1 or (keys == 1 and 2 * groups * values >= 3 * MULTIPROCESSORS)
    # the state, keys, values and weights of every tile
    weights = product(size, 64, 64, 64, right="columns") + product(size, 64, 64, 64, left="registers") + one_more
    later = update * ((tiles - (1 if whole else slices)) / tiles)
    block = queries + tile * 2 + features + tile
    outputs = (block * keys + weights + later + tile * 2) * (groups * tiles * values)
    if whole:
        return outputs
    # states are written, read and replaced by those before each slice, and read; or all but the last written and read
    needed = slices if combined else slices - 1
    written, states = state_bytes * needed, states * (needed / slices)
    inputs = (groups * seq * (head_dim + value_dim) * size + batch * seq) * needed / slices
    return states + outputs + Work(scratch=written, again=(*(written, written) * combined, written + inputs))


def timed(dtype: str, causal: int, *goals: AtMost | FasterThan) -> Timed:
    large, small = (
        Case((*shape, causal, 0), EPS, dtype=dtype) for shape in ((32, 8, 6000, 64, 64), (1, 2, 100, 16, 16))
    )
    return Timed(large, small, goals)


CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch heads seq head_dim value_dim causal relu",
    numbers="eps",
    inputs=inputs,
    exact=reference,
    limit=limit,
    baselines=baselines,
    work=work,
    raced=both_forms((3, 1, 66, 66, 8), (3, 1, 66, 8, 8)),
    small=(
        *both_forms((1, 1, 1, 1, 1), (2, 1, 63, 16, 24), (1, 1, 66, 65, 40)),
        *both_forms((1, 1, 70, 8, 4), kind="no token"),
        *both_forms((1, 1, 66, 65, 40), relu=1),
        *both_forms((1, 1, 300, 8, 4), kind="rising"),
        *both_forms((2, 1, 300, 8, 4), kind="falling"),
        *(case for kind in PEAKS for case in both_forms((1, 1, 150, 64, 8), kind=kind)),
    ),
    # the CPU kernel's slices have 1024 positions, its blocks 64; tiles are 4 rows by 3 or 4 registers. On many cores,
    # several heads of one sample are cut into slices too, and many heads on none.
    cases=(
        *both_forms((1, 1, 2, 4, 4), (2, 2, 65, 64, 64), (3, 2, 100, 5, 7), (2, 2, 130, 65, 40), (1, 1, 70, 100, 136)),
        *both_forms((2, 2, 65, 64, 64), (3, 2, 150, 17, 3), relu=1),
        *both_forms((2, 1, 1100, 8, 4), (1, 2, 700, 8, 4)),
        *both_forms((2, 2, 63, 16, 24), kind="no token"),
    ),
    larger=(
        *both_forms((1, 1, 2500, 16, 24), (9, 1, 1100, 16, 24), (2, 8, 1000, 64, 64), (1, 1, 3000, 64, 64)),
        *both_forms((2, 1, 1030, 1, 1), (2, 1, 1030, 32, 32), (2, 1, 1030, 128, 128)),
        *both_forms((1, 1, 2500, 40, 24), relu=1),
    ),
    empty=tuple(
        Case((*sizes, causal, 0), EPS)
        for sizes in ((0, 2, 5, 8, 4), (2, 0, 5, 8, 4), (2, 2, 0, 8, 4), (2, 2, 5, 8, 0))
        for causal in (0, 1)
    ),
    body_refuses=(Case((2, 0, 5, 8, 4, 1, 0), EPS), Case((2, 2, 5, 8, 0, 1, 0), EPS)),
    hidden={"k": (1e30, -1e30), "v": (1e30, -1e30)},
    cuda_roundings=3,
    wrong_attributes=(
        ({}, "attribute eps is missing"),
        ({"eps": 1}, "attribute eps has another type"),
        ({"eps": -1.0}, "eps is -1"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"eps": 1e-6, "causal": 2}, "causal is 2"),
        ({"eps": 1e-6, "causal": 1.0}, "attribute causal has another type"),
        ({"eps": 1e-6, "chunk_length": 0}, "chunk_length is 0"),
    ),
    uncountable=tuple(
        (*sizes, 0, 0)
        for sizes in (
            *((2**31, 1, 1, 1, 1), (2**16, 2**16, 1, 1, 1), (1, 1, 2**31, 1, 1)),
            *((1, 1, 1, 2**17, 2**17), (-1, 1, 1, 1, 1)),
        )
    ),
    # a slice has 512 positions, or 256 where causal, or 64 where causal with more than 64 channels; tiles are 64 × 64
    checked=(
        *both_forms(
            (2, 2, 64, 64, 64), (2, 2, 600, 5, 3), (2, 2, 1100, 8, 4), (1, 2, 70, 128, 128), (2, 8, 6000, 64, 64)
        ),
        *both_forms((2, 2, 600, 16, 24), kind="no token"),
        *both_forms((2, 2, 600, 128, 24), (2, 8, 6000, 64, 64), relu=1),
        *(case for kind in ("rising", "falling", *PEAKS) for case in both_forms((2, 2, 2000, 64, 64), kind=kind)),
    ),
    timed=(
        timed("float16", 0, AtMost(1.5, "products hide behind the loads")),
        timed("float32", 0, AtMost(1.3, "loads hide behind the products")),
        timed("float16", 1, AtMost(1.3, "products hide behind the loads")),
    ),
    # q, k, v and out: 4200 · 8 · 1000 · 64 elements each
    huge=(Case((4200, 8, 1000, 64, 64, 0, 0), EPS, dtype="float16"),),
    intermediate=intermediate,
    averaged=("v", lambda heads, channels: Case((1, heads, 2, 1, channels, 0, 0), (0.0,), "mean")),
)
