"""The encoder around every variant: shapes, blocks, reversibility, padding, and weights that matter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from comparison import relative_error
from slow_cases import soak
from torch import Tensor

from effexport.models.attention_spec import attention_spec
from effexport.models.encoder.module import Encoder, FeedForward, ReversibleBlock, module_from_spec
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.validation import SpecError
from effexport.models.variants import ATTENTION_SPECS
from effexport.models.variants.contract import variant_contract

BLOCKS = ["pre-norm", "post-norm", "reversible"]
SMALL = {variant: variant_contract(variant).small for variant in ATTENTION_SPECS}
# Another length cuts the matrix products into other blocks; Nyström's pseudo-inverse multiplies last bits.
BLOCKING = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """These layers are tiny: on a busy machine, threads that wait for each other take twenty times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def encoder_spec(variant: str, attention: dict[str, object] | None = None, **fields: object) -> EncoderSpec:
    options = {"dim": 32, "heads": 4, "seq_len": 128} | dict(SMALL[variant]) | (attention or {})
    return EncoderSpec(attention=attention_spec(variant, options), **fields)


def encoder(variant: str, seed: int = 0, attention: dict[str, object] | None = None, **fields: object) -> Encoder:
    module = module_from_spec(encoder_spec(variant, attention, **fields), seed)
    assert isinstance(module, Encoder)
    return module


def ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 258, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("variant", SMALL)
@torch.no_grad()
def test_every_variant_runs_in_every_block(variant: str, block: str) -> None:
    module, x = encoder(variant, block=block), ids(2, 63)
    assert not module.training
    hidden = module(x)
    assert hidden.shape == (2, 63, 32)
    assert hidden.dtype == torch.float32
    assert torch.isfinite(hidden).all()
    assert torch.equal(module(x, torch.ones_like(x)), hidden)


@torch.no_grad()
def test_the_concatenated_reversible_output_is_twice_as_wide() -> None:
    module = encoder("softmax", block="reversible", reversible_output="concat", lm_head=True)
    assert module.spec.hidden_size == 64
    assert module.final_norm.normalized_shape == (64,)
    assert module(ids(2, 5)).shape == (2, 5, 258)


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_the_head_turns_hidden_states_into_logits(block: str) -> None:
    module, x = encoder("softmax", block=block, lm_head=True, vocab_size=300), ids(2, 63)
    logits = module(x)
    assert logits.shape == (2, 63, 300)
    head, module.lm_head = module.lm_head, None
    assert head is not None
    assert torch.equal(head(module(x)), logits)


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_blocks_put_the_residual_where_they_say(block: str) -> None:
    module, x = encoder("softmax", block=block, layers=2), ids(2, 20)
    first = second = hidden = module.token_embedding.weight[x] + module.position_embedding.weight[:20]
    for b in module.blocks:
        if block == "pre-norm":
            hidden = hidden + b.attention(b.attention_norm(hidden))
            hidden = hidden + b.feed_forward(b.feed_forward_norm(hidden))
        elif block == "post-norm":
            hidden = b.attention_norm(hidden + b.attention(hidden))
            hidden = b.feed_forward_norm(hidden + b.feed_forward(hidden))
        else:
            first = first + b.attention(b.attention_norm(second))
            second = second + b.feed_forward(b.feed_forward_norm(first))
    if block == "reversible":
        hidden = (first + second) / 2
    expected = hidden if block == "post-norm" else module.final_norm(hidden)
    # the same operations in the same order
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("variant", SMALL)
@torch.no_grad()
def test_a_reversible_block_recovers_its_inputs(variant: str) -> None:
    block = encoder(variant, block="reversible").blocks[0]
    assert isinstance(block, ReversibleBlock)
    x1, x2 = (torch.randn(2, 63, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    mask = (torch.arange(63) < torch.tensor([[63], [40]])).long()
    recovered = block.inverse(*block(x1, x2, mask), mask)
    # one rounding of each sum comes back: 6e-8 of values up to ten. It reaches x1 through the attention,
    # where it may grow as any input error does: Nyström's pseudo-inverse multiplies it most
    for actual, expected, tolerance in zip(recovered, (x1, x2), (1e-4, 1e-6), strict=True):
        assert relative_error(actual, expected) <= tolerance


@pytest.mark.parametrize("ff_chunk_length", [1, 8, 50, 63, 64, 1000])
@torch.no_grad()
def test_slicing_the_feed_forward_layer_changes_nothing(ff_chunk_length: int) -> None:
    whole, sliced = encoder("softmax"), encoder("softmax", ff_chunk_length=ff_chunk_length)
    # other shapes, other blocks of the matrix product
    assert relative_error(sliced(ids(2, 63)), whole(ids(2, 63))) <= BLOCKING


def test_a_sliced_feed_forward_layer_never_sees_more_than_its_slice() -> None:
    layer = FeedForward(encoder_spec("softmax", ff_chunk_length=8))
    seen = []
    layer.up.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    layer(torch.zeros(2, 20, 32))
    assert seen == [8, 8, 4]


@pytest.mark.parametrize(("activation", "at_minus_one"), [("gelu", -0.158655), ("gelu_new", -0.158808), ("relu", 0.0)])
def test_activations_are_the_named_ones(activation: str, at_minus_one: float) -> None:
    layer = FeedForward(encoder_spec("softmax", activation=activation, ff_dim=32))
    with torch.no_grad():
        for linear in (layer.up, layer.down):
            linear.weight.copy_(torch.eye(32))
            linear.bias.zero_()
        # six printed digits of −Φ(−1) and of its tanh approximation
        assert float(layer(torch.full((1, 1, 32), -1.0))[0, 0, 0]) == pytest.approx(at_minus_one, abs=1e-6)


@pytest.mark.parametrize("variant", SMALL)
def test_a_sequence_beyond_the_learned_positions_is_refused(variant: str) -> None:
    module = encoder(variant)
    with pytest.raises(SpecError, match="the sequence has 129 tokens; expected at most 128"):
        module(ids(1, 129))
    assert module(ids(1, 128)).shape == (1, 128, 32)


@pytest.mark.parametrize("variant", SMALL)
def test_the_same_seed_gives_the_same_module_and_another_seed_another(variant: str) -> None:
    generator_state = torch.random.get_rng_state()
    first, again, other = (encoder(variant, seed=seed).state_dict() for seed in (0, 0, 1))
    assert first.keys() == again.keys() == other.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        # rotations have a seed of their own, part of the spec
        assert torch.equal(tensor, other[name]) is name.endswith("rotations"), name
    assert torch.equal(module_rng(variant, generator_state), module_rng(variant, generator_state))


def module_rng(variant: str, state: Tensor) -> Tensor:
    """A weight of a module built after the process's generator was moved."""
    with torch.random.fork_rng(devices=[]):
        torch.random.set_rng_state(state)
        torch.rand(7)
        return encoder(variant).token_embedding.weight


# Tensors that a formula provably ignores: a key bias shifts every logit of a softmax by the same amount.
WITHOUT_EFFECT = {
    variant: {"blocks.0.attention.key.bias"}
    for variant in ("softmax", "window", "nystrom", "aft-full", "aft-simple", "aft-local", "aft-conv")
}


@pytest.mark.parametrize(("variant", "block"), list(itertools.product(SMALL, ["pre-norm", "post-norm"])))
@torch.no_grad()
def test_every_parameter_reaches_the_output(variant: str, block: str) -> None:
    module, x = encoder(variant, layers=1, block=block, lm_head=True), ids(2, 63)
    expected = module(x)
    ignored = WITHOUT_EFFECT.get(variant, set())
    assert ignored <= {name for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        saved = parameter.clone()
        parameter.zero_()
        change = float((module(x) - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        parameter.copy_(saved)
        if name in ignored:
            # rounding of other logits
            assert change <= 1e-4, f"{name}: {change:.1e}"
        else:
            # a graph that lost the tensor must fail the loosest parity check of fp32, 2e-4 (algorithms.md
            # 7.3)
            assert change > 1e-3, f"{name}: {change:.1e}"


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("variant", SMALL)
@torch.no_grad()
def test_padding_does_not_change_kept_rows(variant: str, block: str) -> None:
    module = encoder(variant, block=block, lm_head=True)
    for seq_len in (1, 40, 63, 100):
        x = ids(2, seq_len)
        expected = module(x)
        for extra in (1, 28):
            padded = torch.cat([x, ids(2, extra, seed=2)], dim=1)
            mask = torch.ones_like(padded)
            mask[:, seq_len:] = 0
            # two layers of it
            assert relative_error(module(padded, mask)[:, :seq_len], expected) <= 2 * BLOCKING


@pytest.mark.parametrize("variant", SMALL)
@torch.no_grad()
def test_a_fully_masked_sample_is_finite_and_leaves_its_neighbour_alone(variant: str) -> None:
    module, x = encoder(variant), ids(2, 63)
    mask = torch.ones_like(x)
    mask[1] = 0
    both = module(x, mask)
    assert torch.isfinite(both).all()
    assert relative_error(both[:1], module(x[:1])) <= 2 * BLOCKING


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", SMALL)
@torch.no_grad()
def test_every_variant_runs_in_half_precision(variant: str, dtype: torch.dtype) -> None:
    module = encoder(variant).to(dtype)
    hidden = module(ids(2, 63))
    assert hidden.dtype == dtype
    assert torch.isfinite(hidden).all()
    # a final norm sets the scale, so a lost attention shows as another value, not as another size
    assert float(hidden.float().std()) > 0.5


def test_layer_norm_is_exact_when_eps_underflows_in_half_precision() -> None:
    norm = encoder("softmax", layer_norm_eps=1e-12).half().final_norm
    constant = torch.full((1, 1, 32), 3.0, dtype=torch.float16)
    # variance 0: without eps this is 0 / 0
    assert torch.equal(norm(constant)[0, 0], norm.bias)


def test_lsh_layers_have_rotations_of_their_own() -> None:
    module = encoder("lsh", layers=3)
    rotations = [block.attention.hash.rotations for block in module.blocks]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(rotations, 2))
    assert [block.attention.spec.hash_seed for block in module.blocks] == [0, 1, 2]


@pytest.mark.parametrize("variant", ["softmax", "linear", "aft-full", "aft-simple", "aft-local", "aft-conv"])
@torch.no_grad()
def test_causal_encoders_do_not_see_later_tokens(variant: str) -> None:
    module, x = (
        encoder(
            variant,
            attention={"causal": True, "conv_kernel_size": None} if variant == "softmax" else {"causal": True},
        ),
        ids(1, 63),
    )
    changed = x.clone()
    changed[:, 30:] = ids(1, 33, seed=5)
    assert relative_error(module(changed)[:, :30], module(x)[:, :30]) <= BLOCKING


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("variant", ["linear", "aft-simple"])
@torch.no_grad()
def test_token_by_token_equals_the_whole_sequence(variant: str, block: str) -> None:
    module, x = encoder(variant, attention={"causal": True}, block=block, lm_head=True), ids(2, 70)
    states = [layer.attention.initial_state(2) for layer in module.blocks]
    outputs = []
    for t in range(70):
        output, states = module.step(x[:, t : t + 1], torch.full((2,), t), states)
        outputs.append(output)
    # sums in another order, twice
    assert relative_error(torch.cat(outputs, dim=1), module(x)) <= 2 * BLOCKING


@pytest.mark.parametrize("seq_len", [1, 63, 100, soak(1000)])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("variant", ["linear", "aft-simple"])
@torch.no_grad()
def test_prefill_equals_the_whole_sequence_and_leaves_the_state_of_single_steps(
    variant: str, block: str, seq_len: int
) -> None:
    module, x = encoder(variant, attention={"causal": True, "seq_len": 1024}, block=block, layers=3), ids(3, seq_len)
    lengths = torch.tensor([seq_len, (seq_len + 1) // 2, 1])
    mask = (torch.arange(seq_len) < lengths[:, None]).long()
    fresh = [layer.attention.initial_state(3) for layer in module.blocks]
    output, states = module.prefill(x, mask, torch.zeros(3, dtype=torch.long), fresh)
    kept, whole = mask.bool(), module(x, mask)
    assert relative_error(output[kept], whole[kept]) <= 2 * BLOCKING
    stepped = fresh
    for t in range(seq_len):
        _, stepped = module.step(x[:, t : t + 1], torch.full((3,), t), stepped)
        for row in (lengths == t + 1).nonzero().flatten():
            for layer, (own, expected) in enumerate(zip(states, stepped, strict=True)):
                for name in own:
                    # sums in another order, through up to three layers
                    error = relative_error(own[name][row], expected[name][row])
                    assert error <= 3 * BLOCKING, (layer, name, row, error)


@pytest.mark.parametrize("variant", ["linear", "aft-simple"])
@torch.no_grad()
def test_a_prompt_in_two_parts_equals_the_prompt_in_one(variant: str) -> None:
    module, x = encoder(variant, attention={"causal": True}), ids(2, 70)
    states = [layer.attention.initial_state(2) for layer in module.blocks]
    outputs = []
    for start, end in ((0, 33), (33, 70)):
        mask = torch.ones(2, end - start, dtype=torch.long)
        output, states = module.prefill(x[:, start:end], mask, torch.full((2,), start), states)
        outputs.append(output)
    assert relative_error(torch.cat(outputs, dim=1), module(x)) <= 2 * BLOCKING
