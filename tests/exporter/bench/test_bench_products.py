"""The floor: as many multiplications and additions as the formula has, and as many bytes."""

from __future__ import annotations

import math

import pytest

from effexport.bench.costs import FEWEST_ROWS, pieces
from effexport.bench.grid import BenchCase, Grid, models_from_text
from effexport.models.shapes import Product

BATCH, HEADS, D, N = 2, 3, 16, 192
GROUPS, DIM, TOKENS = BATCH * HEADS, HEADS * D, BATCH * N


def case_of(variant: str, scope: str = "core") -> BenchCase:
    models = models_from_text(variant)
    return next(Grid(models=models, seq_lens=(N,), batches=(BATCH,), heads=HEADS, head_dim=D, scope=scope).cases())


# multiply-adds of each formula, by hand
M, TAPS, BLOCK = 8, 5, 64
NYSTROM = 3 * N * M * D + M * M * D + 6 * 4 * M**3 + M * M * D + N * M * D
ROUNDS, CHUNK = 2, 16
# automatic_num_buckets: a power of two near 2 · 192 / 16
BUCKETS = 16
LSH = N * D * ROUNDS * BUCKETS // 2 + ROUNDS * (N // CHUNK) * 2 * CHUNK * 2 * CHUNK * D


@pytest.mark.parametrize(
    ("model", "multiply_adds"),
    [
        ("softmax", GROUPS * 2 * N * N * D),
        ("linear", GROUPS * 2 * N * D * D),
        (f"nystrom:num_landmarks={M}:conv_kernel_size=none", GROUPS * NYSTROM),
        (f"nystrom:num_landmarks={M}:conv_kernel_size={TAPS}", GROUPS * (NYSTROM + N * (BLOCK + TAPS - 1) * D)),
        (f"lsh:chunk_length={CHUNK}:num_hashes={ROUNDS}", GROUPS * LSH),
        ("aft-full", BATCH * N * N * 2 * DIM),
        ("aft-simple", 0),
        ("aft-local:window=9", BATCH * N * (1 + 2 * 8) * 2 * DIM),
        ("aft-local:window=0", 0),
        ("aft-conv:kernel_size=5", GROUPS * N * 5 * (D + 1)),
    ],
)
def test_products_have_the_flops_of_the_formula(model: str, multiply_adds: int) -> None:
    assert case_of(model).flops == 2 * multiply_adds


def test_layers_and_encoders_add_their_projections() -> None:
    core = case_of("softmax").flops
    layer = core + 2 * 4 * TOKENS * DIM * DIM
    assert case_of("softmax", "attention").flops == layer
    assert case_of("softmax", "encoder").flops == 2 * (layer + 2 * 2 * TOKENS * DIM * 4 * DIM)
    # queries and keys are one
    core, layer = (case_of("lsh:chunk_length=16", scope).flops for scope in ("core", "attention"))
    assert layer - core == 2 * 3 * TOKENS * DIM * DIM


@pytest.mark.parametrize("product", [Product(8, 64, 16, 64), Product(3, 1000, 64, 1000), Product(1, 7, 5, 3)])
@pytest.mark.parametrize("largest_bytes", [1, 10_000, 100_000, 2**30])
def test_pieces_of_a_product_have_its_flops_and_fit(product: Product, largest_bytes: int) -> None:
    parts = pieces(product, largest_bytes)
    assert sum(part.flops for part in parts) == product.flops
    # the right factor is needed whole, and a processor wants some rows at once
    smallest = Product(1, min(product.m, FEWEST_ROWS), product.k, product.n).nbytes
    assert all(part.nbytes <= max(largest_bytes, smallest) for part in parts)


@pytest.mark.requires("torch")
def test_the_floor_runs_on_any_shape() -> None:
    from effexport.bench.costs import run_pass, run_products, traffic_bytes

    for variant in ("softmax", "aft-simple", "lsh:chunk_length=16"):
        case = case_of(variant, "attention")
        run_products(case.products)()
    case = case_of("softmax")
    assert traffic_bytes(case) == 4 * 4 * math.prod((BATCH, HEADS, N, D))
    run_pass(traffic_bytes(case))()
