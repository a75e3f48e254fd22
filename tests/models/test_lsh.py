"""LSH attention beyond test_variants.py: its hash, its options, and the published form of its constants."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from comparison import all_kept, relative_error, tokens
from torch import Tensor

from effexport.models.encoder.module import module_from_spec
from effexport.models.validation import SpecError
from effexport.models.variants.lsh import LSHSpec, automatic_num_buckets
from effexport.models.variants.lsh.layer import LSHAttention, LSHHash

# fp32 against float64: logits of order ten, rounded by 6e-8 each, reach the output as relative errors of the
# weights.
AGAINST_FLOAT64 = 1e-5
# Another length cuts the projections into other blocks: last bits only, as long as the hashes agree.
BLOCKING = 1e-5


def lsh(seed: int = 0, **fields: object) -> LSHAttention:
    spec = LSHSpec(**({"dim": 32, "heads": 2, "chunk_length": 8, "num_buckets": 6, "seq_len": 64} | fields))
    module = module_from_spec(spec, seed)
    assert isinstance(module, LSHAttention)
    return module


@contextmanager
def recorded_buckets(layer: LSHAttention) -> Iterator[list[Tensor]]:
    """Collects what the hash returns."""
    seen: list[Tensor] = []
    handle = layer.hash.register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def injected_buckets(layer: LSHAttention, buckets: Tensor) -> Iterator[None]:
    handle = layer.hash.register_forward_hook(lambda module, inputs, output: buckets)
    try:
        yield
    finally:
        handle.remove()


RING = {
    "circular": True,
    "num_buckets": None,
    "buckets_by_length": True,
    "pad_bucket": "hashed",
    "scaled_keys": True,
    "self_logit": -5e4,
}


@torch.no_grad()
def test_in_a_single_round_no_pair_meets_twice_also_around_the_ends_of_the_ring() -> None:
    once, plain = (lsh(**RING, num_hashes=1, allow_duplicates=allowed) for allowed in (False, True))
    for seq_len in (16, 37):
        x = tokens(2, seq_len, 32)
        assert relative_error(once.attend(x, all_kept(x)), plain.attend(x, all_kept(x))) <= BLOCKING


@torch.no_grad()
def test_rotary_positions_rotate_after_hashing_also_in_the_fused_form() -> None:
    layer, x = lsh(rotary=True, rotations_per_head=False), tokens(2, 40, 32)
    plain = lsh()
    plain.load_state_dict(layer.state_dict() | {"hash.rotations": layer.hash.rotations.expand(2, -1, -1, -1)})
    keep = all_kept(x)
    with recorded_buckets(layer) as rotated, recorded_buckets(plain) as unrotated:
        out, without = layer(x), plain(x)
    assert torch.equal(rotated[0], unrotated[0])
    assert relative_error(out, without) > 1e-2
    layer.fused = True
    assert relative_error(layer(x, keep), out) <= AGAINST_FLOAT64


@torch.no_grad()
def test_a_sequence_without_rotations_for_its_length_is_refused() -> None:
    layer = lsh(**RING, chunk_length=64)
    limit = layer.spec.max_seq_len
    assert limit == 8192
    assert lsh(**RING, chunk_length=60, seq_len=5000).spec.max_seq_len == 10080
    assert torch.isfinite(layer(tokens(1, limit, 32))).all()
    with pytest.raises(IndexError, match="out of range"):
        layer(tokens(1, limit + 1, 32))


def test_only_specs_without_those_options_become_the_fused_operators() -> None:
    assert LSHSpec(rotary=True, rotations_per_head=False).operators(fused=True) == LSHSpec().operators(fused=True)
    for name, value in (RING | {"attend_across_buckets": False, "allow_duplicates": False}).items():
        fused = LSHSpec(**{name: value}).operators(fused=True)
        assert fused == (("LSHSort",) if name not in ("circular", "num_buckets") else LSHSpec().operators(fused=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary": True, "head_dim": 5}, "a head has 5; use an even head_dim"),
        ({"self_logit": 1.0}, "self_logit is 1.0; expected -1e8 to 0"),
        ({"buckets_by_length": True, "num_buckets": 8}, "num_buckets is 8, but buckets_by_length derives it"),
        ({"pad_bucket": "first"}, "pad_bucket is 'first'; expected one of last, hashed"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        LSHSpec(**options)


@torch.no_grad()
def test_padding_gets_the_last_bucket_whatever_the_mask() -> None:
    layer, x = lsh(), tokens(2, 20, 32)
    keep = all_kept(x)
    keep[1, [3, 19]] = False
    with recorded_buckets(layer) as seen:
        layer.attend(x, keep)
    # 20 tokens are padded to three chunks of 8
    padded = torch.nn.functional.pad(keep, (0, 4)).repeat_interleave(4, dim=0)
    assert seen[0].dtype == torch.int32
    assert torch.equal(seen[0] == layer.spec.total_buckets, ~padded)
    assert int(seen[0].min()) >= 0
    assert int(seen[0].max()) <= layer.spec.total_buckets


@torch.no_grad()
def test_left_padding_holes_and_a_fully_masked_sample_stay_finite_with_published_constants() -> None:
    layer, x = lsh(mask_constants="hf"), tokens(3, 63, 32)
    keep = all_kept(x)
    keep[0, :20] = False
    keep[1, 5:60:3] = False
    keep[2] = False
    actual = layer.attend(x, keep)
    assert torch.isfinite(actual).all()
    disturbed = layer.attend(torch.where(keep.unsqueeze(-1), x, 50 * tokens(3, 63, 32, seed=4)), keep)
    assert relative_error(disturbed[keep], actual[keep]) <= BLOCKING


def test_automatic_bucket_counts_follow_the_published_rule() -> None:
    # algorithms.md 2.2, measured on transformers with chunks of 64 and 524288 positions
    table = {
        128: (4,),
        512: (16,),
        1024: (32,),
        2048: (64,),
        4096: (128,),
        8192: (16, 16),
        16384: (16, 32),
        65536: (32, 64),
    }
    assert {seq_len: automatic_num_buckets(seq_len, 64, 524288) for seq_len in table} == table


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("chunk_length", [4, 16, 64])
@pytest.mark.parametrize("seq_len", [128, 1000, 4096, 32768])
def test_automatic_bucket_counts_equal_those_of_transformers(
    seq_len: int, chunk_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.reformer.configuration_reformer import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = ReformerConfig(lsh_attn_chunk_length=chunk_length, num_buckets=None, max_position_embeddings=524288)
    oracle = LSHSelfAttention(config, layer_idx=0)
    monkeypatch.setattr("transformers.models.reformer.modeling_reformer.logger.warning", lambda text: None)
    oracle._set_num_buckets(seq_len)
    theirs = oracle.num_buckets
    expected = (theirs,) if isinstance(theirs, int) else tuple(theirs)
    assert automatic_num_buckets(seq_len, chunk_length, 524288) == expected


@pytest.mark.parametrize("seq_len", [1, 63, 64])
def test_a_sequence_shorter_than_a_chunk_gets_two_buckets(seq_len: int) -> None:
    assert automatic_num_buckets(seq_len, 64) == (2,)


# Sum of the weights of position 0 of a causal sequence, whose only target is itself. float32 near 1e5 has
# steps of 2^-7, so log(n) is rounded to a multiple of that: the published values of algorithms.md 2.5.
@pytest.mark.parametrize(("num_hashes", "published"), [(2, 0.9978), (3, 0.9971), (4, 1.0035)])
@torch.no_grad()
def test_round_weights_of_position_0_add_up_to_one_only_in_safe_mode(num_hashes: int, published: float) -> None:
    x = tokens(1, 64, 32)
    for mask_constants, total in (("safe", 1.0), ("hf", published)):
        layer = lsh(causal=True, num_hashes=num_hashes, mask_constants=mask_constants)
        weights = layer.round_weights(torch.full((1, num_hashes, 1), -1e5))
        assert float(weights.sum()) == pytest.approx(total, abs=5e-5)  # printed to four digits
        # on the layer: the output at position 0 is its own value times that sum
        actual = layer.attend(x, all_kept(x))[0, 0]
        torch.testing.assert_close(actual, total * layer.value(x)[0, 0], rtol=1e-4, atol=0)  # four printed digits


@pytest.mark.parametrize("num_hashes", [1, 2, 3, 4, 8])
@torch.no_grad()
def test_round_weights_of_ordinary_rows_add_up_to_one_in_both_modes(num_hashes: int) -> None:
    lse = 5 * tokens(3, num_hashes, 50)
    for mask_constants in ("safe", "hf"):
        weights = lsh(num_hashes=num_hashes, mask_constants=mask_constants).round_weights(lse)
        # a few float32 roundings at logits of order ten
        torch.testing.assert_close(weights.sum(dim=1), torch.ones(3, 50), rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotations_stay_float32_in_half_precision(dtype: torch.dtype) -> None:
    layer = lsh()
    exact = layer.hash.rotations.clone()
    for converted in (layer.to(dtype), layer.half(), layer.bfloat16(), layer.float()):
        assert converted.hash.rotations.dtype == torch.float32
        assert torch.equal(converted.hash.rotations, exact)
    assert layer.to(dtype).query_key.weight.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_the_first_token_does_not_see_the_future_in_half_precision(dtype: torch.dtype) -> None:
    layer, x = lsh(causal=True, num_hashes=4).to(dtype), tokens(2, 64, 32).to(dtype)
    # with clipped mask constants 87 % of row 0 would go to later tokens; the value itself is rounded once
    # more
    torch.testing.assert_close(layer.attend(x, all_kept(x))[:, 0], layer.value(x)[:, 0], rtol=2**-7, atol=0)


def test_the_same_seed_draws_the_same_rotations() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (LSHHash(LSHSpec(hash_seed=seed)).rotations for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state), "the generator of the process was touched"


@torch.no_grad()
def test_rotations_travel_with_the_weights() -> None:
    source, target = lsh(seed=0, hash_seed=1), lsh(seed=9, hash_seed=2)
    x = tokens(2, 100, 32)
    target.load_state_dict(source.state_dict())
    assert "hash.rotations" in source.state_dict()
    assert torch.equal(target(x), source(x))


@torch.no_grad()
def test_circular_chunks_leak_from_end_to_start_and_the_default_does_not() -> None:
    # one bucket sorts nothing, so the first chunk is the start of the sequence
    x = tokens(1, 64, 32)
    changed = x.clone()
    changed[:, 60:] += 1
    for circular in (False, True):
        layer = lsh(circular=circular, num_hashes=1, num_buckets=2)
        buckets = torch.zeros(2, 64, dtype=torch.int32)
        with injected_buckets(layer, buckets):
            start, disturbed = (layer.attend(y, all_kept(y))[:, :8] for y in (x, changed))
        assert torch.equal(start, disturbed) is not circular


@torch.no_grad()
def test_margins_are_small_exactly_where_a_bucket_is_nearly_tied() -> None:
    layer = lsh(num_buckets=(2, 4))
    qk = tokens(2, 2, 50, 16)
    margins = layer.hash.margins(qk)
    buckets = layer.hash(qk, torch.ones(2, 50, dtype=torch.bool))
    assert margins.shape == buckets.shape
    assert margins.dtype == torch.float32
    assert torch.all(margins >= 0)
    # noise far below a margin cannot move a token: projections change by at most 16 · 1e-6 · max |R|
    noisy = layer.hash(qk + 1e-6 * tokens(2, 2, 50, 16, seed=5), torch.ones(2, 50, dtype=torch.bool))
    assert torch.equal(noisy[margins > 1e-3], buckets[margins > 1e-3])
