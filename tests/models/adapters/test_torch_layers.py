"""PyTorch's own attention layers in a user's model: ours compute what they compute, eager and exported."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import exported, padding, random_states, trained_like
from comparison import relative_error
from torch import Tensor, nn

import effexport
from effexport.models.adapters.replace import with_our_layers
from effexport.models.variants.softmax import SoftmaxSpec

pytestmark = [
    pytest.mark.requires("torch"),
    # PyTorch warns of encoders without a fast path, and of masks of two types
    pytest.mark.filterwarnings(
        "ignore:enable_nested_tensor", "ignore:Support for mismatched", "ignore:The PyTorch API of nes"
    ),
]

DIM, HEADS, SEQ_LEN = 32, 4, 128
LENGTHS = (1, 63, 100, 1000)
# Sums of up to 1000 float32 terms in another order, through up to two layers: a few 1e-6 of the RMS.
CLOSE = 2e-5
# A weight may be a hundred times the RMS of all, and has the relative error of e to its logit.
CLOSE_WEIGHTS = 1e-4
BATCH, SEQ = {0: "batch", 1: "seq"}, {0: "seq", 1: "batch"}


def multihead(**options: Any) -> nn.MultiheadAttention:
    return trained_like(nn.MultiheadAttention(DIM, HEADS, **options))


def encoder(norm: bool = False, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, **options)
    final = nn.LayerNorm(DIM) if norm else None
    return trained_like(nn.TransformerEncoder(layer, 2, final, enable_nested_tensor=options.get("batch_first", False)))


def causal(seq_len: int) -> Tensor:
    """As `nn.Transformer.generate_square_subsequent_mask`: −inf where a key comes after the query."""
    return torch.full((seq_len, seq_len), -torch.inf).triu(1)


@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize(("batch_first", "bias"), [(True, True), (False, False)])
def test_self_attention_with_and_without_padding(batch_first: bool, bias: bool, seq_len: int) -> None:
    original = multihead(batch_first=batch_first, bias=bias)
    ours = with_our_layers(original, SEQ_LEN).module
    x, hidden = random_states(3, seq_len, DIM), padding(3, seq_len)
    given = x if batch_first else x.transpose(0, 1)
    for mask in (None, hidden, torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf), 2 * hidden.float()):
        # where the weights are asked for, PyTorch takes another path
        for need_weights in (False, True):
            options = {"key_padding_mask": mask, "need_weights": need_weights}
            with torch.inference_mode():
                expected, weights = original(given, given, given, **options)
                actual, our_weights = ours(given, given, given, **options)
            assert relative_error(actual, expected) < CLOSE
            assert (our_weights is None) == (weights is None)
            assert weights is None or relative_error(our_weights, weights) < CLOSE_WEIGHTS


@pytest.mark.parametrize("batch_first", [True, False])
def test_cross_attention_of_other_lengths(batch_first: bool) -> None:
    original = multihead(batch_first=batch_first)
    ours = with_our_layers(original, SEQ_LEN).module
    for queries, keys in ((1, 100), (63, 1), (100, 1000)):
        parts = (random_states(2, queries, DIM), random_states(2, keys, DIM), random_states(2, keys, DIM) + 1)
        parts = parts if batch_first else tuple(x.transpose(0, 1) for x in parts)
        options = {"key_padding_mask": padding(2, keys), "average_attn_weights": False}
        with torch.inference_mode():
            expected, actual = original(*parts, **options), ours(*parts, **options)
        assert actual[1].shape == (2, HEADS, queries, keys)
        assert relative_error(actual[0], expected[0]) < CLOSE
        assert relative_error(actual[1], expected[1]) < CLOSE_WEIGHTS


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_masks_of_single_pairs_are_added(seq_len: int) -> None:
    original = multihead(batch_first=True)
    ours = with_our_layers(original, SEQ_LEN).module
    x, hidden = random_states(2, seq_len, DIM), padding(2, seq_len)
    mask = causal(seq_len)
    slope = random_states(2 * HEADS, seq_len, seq_len)
    for options in (
        {"attn_mask": mask, "need_weights": False},
        {"attn_mask": mask, "need_weights": False, "is_causal": True},
        {"attn_mask": mask < 0, "key_padding_mask": hidden, "is_causal": True},
        {"attn_mask": slope, "key_padding_mask": hidden.float() * -3},
    ):
        with torch.inference_mode():
            expected, actual = original(x, x, x, **options)[0], ours(x, x, x, **options)[0]
        assert relative_error(actual, expected) < CLOSE


def test_a_sequence_without_a_batch_keeps_its_axes() -> None:
    original = multihead()
    ours = with_our_layers(original, SEQ_LEN).module
    x, hidden = random_states(63, DIM), padding(2, 63)[1]
    with torch.inference_mode():
        expected, actual = original(x, x, x, key_padding_mask=hidden), ours(x, x, x, key_padding_mask=hidden)
    assert max(map(relative_error, actual, expected)) < CLOSE


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    original = multihead(batch_first=True)
    ours = with_our_layers(original, SEQ_LEN).module
    x, hidden = random_states(2, 5, DIM), padding(2, 5)
    hidden[1] = True
    for mask in (None, causal(5), causal(5) < 0):
        for given in (hidden, torch.zeros(2, 5).masked_fill(hidden, -torch.inf)):
            options = {"key_padding_mask": given, "attn_mask": mask}
            # with gradients: PyTorch's fast path returns NaN
            expected = original(x, x, x, need_weights=False, **options)[0]
            assert relative_error(ours(x, x, x, need_weights=False, **options)[0], expected) < CLOSE
            assert relative_error(ours(x, x, x, **options)[0], expected) < CLOSE
    assert torch.allclose(expected[1], original.out_proj.bias)


@pytest.mark.parametrize(
    ("batch_first", "norm_first", "bias"), itertools.product((True, False), (True, False), (True, False))
)
def test_an_encoder_with_any_mask(batch_first: bool, norm_first: bool, bias: bool) -> None:
    original = encoder(norm_first, batch_first=batch_first, norm_first=norm_first, bias=bias)
    adapted = with_our_layers(original, SEQ_LEN)
    assert "layers.1.self_attn" in adapted.replaced
    for seq_len in (1, 63, 300):
        x, hidden = random_states(3, seq_len, DIM), padding(3, seq_len)
        given = x if batch_first else x.transpose(0, 1)
        mask = causal(seq_len)
        for options in (
            {},
            {"src_key_padding_mask": hidden},
            {"mask": mask},
            {"mask": mask < 0, "is_causal": True},
            {"mask": mask, "src_key_padding_mask": hidden},
        ):
            with torch.inference_mode():
                expected, actual = original(given, **options), adapted.module(given, **options)
            if not batch_first:
                expected, actual = expected.transpose(0, 1), actual.transpose(0, 1)
            # PyTorch's fast path returns zeros for padding
            where = ~hidden if "src_key_padding_mask" in options else None
            assert relative_error(actual, expected, where) < CLOSE


@pytest.mark.parametrize(("batch_first", "norm_first"), itertools.product((True, False), repeat=2))
def test_a_whole_transformer(batch_first: bool, norm_first: bool) -> None:
    options: dict[str, Any] = {"batch_first": batch_first, "norm_first": norm_first}
    original = trained_like(nn.Transformer(DIM, HEADS, 2, 2, 2 * DIM, **options))
    ours = with_our_layers(original, SEQ_LEN).module
    for src_len, tgt_len in ((1, 63), (100, 1), (63, 100)):
        src, tgt = random_states(2, src_len, DIM), random_states(2, tgt_len, DIM)
        given = (src, tgt) if batch_first else (src.transpose(0, 1), tgt.transpose(0, 1))
        hidden = padding(2, src_len)
        masks = {
            "tgt_mask": causal(tgt_len),
            "src_key_padding_mask": hidden,
            "memory_key_padding_mask": hidden,
            "tgt_key_padding_mask": torch.zeros(2, tgt_len),
        }
        with torch.inference_mode():
            expected, actual = original(*given, **masks), ours(*given, **masks)
        assert relative_error(actual, expected) < CLOSE


def test_a_shared_layer_stays_shared_and_the_original_as_it_is() -> None:
    original = encoder(batch_first=True)
    original.layers[1].self_attn = original.layers[0].self_attn
    before = {name: value.clone() for name, value in original.state_dict().items()}
    adapted = with_our_layers(original, SEQ_LEN)
    assert adapted.module.layers[0].self_attn is adapted.module.layers[1].self_attn
    assert type(original.layers[0].self_attn) is nn.MultiheadAttention
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())


def test_a_layer_under_two_names_of_one_module_is_replaced_under_both() -> None:
    original = nn.Module()
    original.first = original.second = multihead()
    ours = with_our_layers(original, SEQ_LEN).module
    assert ours.first is ours.second
    assert type(ours.first) is not nn.MultiheadAttention


def test_the_spec_says_what_the_layer_is() -> None:
    module = with_our_layers(multihead(bias=False), SEQ_LEN).module
    assert module.attention.spec == SoftmaxSpec(dim=DIM, heads=HEADS, seq_len=SEQ_LEN, bias=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kdim": 8}, "kdim"),
        ({"vdim": 8}, "vdim"),
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "zero"),
    ],
)
def test_options_that_softmax_attention_lacks_keep_the_layer(options: dict[str, Any], reason: str) -> None:
    adapted = with_our_layers(multihead(**options), SEQ_LEN)
    assert type(adapted.module) is nn.MultiheadAttention
    assert reason in adapted.kept[""]


def test_a_kept_layer_works_in_an_adapted_encoder() -> None:
    original = encoder(batch_first=True)
    # with gradients, because PyTorch's fast path forgets the added token
    original.layers[0].self_attn = multihead(batch_first=True, add_zero_attn=True)
    adapted = with_our_layers(original, SEQ_LEN)
    assert list(adapted.kept) == ["layers.0.self_attn"]
    x, hidden = random_states(2, 63, DIM), padding(2, 63)
    for options in ({"src_key_padding_mask": hidden}, {"mask": causal(63), "src_key_padding_mask": hidden}):
        expected, actual = original(x, **options), adapted.module(x, **options)
        assert relative_error(actual, expected, ~hidden) < CLOSE


def test_a_layer_of_the_users_own_class_calls_our_attention() -> None:
    class Mine(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().forward(src, *args, **kwargs)

    original = trained_like(Mine(DIM, HEADS, 2 * DIM, batch_first=True))
    ours = with_our_layers(original, SEQ_LEN)
    assert list(ours.replaced) == ["self_attn"]
    x, hidden = random_states(2, 63, DIM), padding(2, 63)
    for options in ({}, {"src_key_padding_mask": hidden}, {"src_mask": causal(63)}):
        with torch.inference_mode():
            expected, actual = original(x, **options), ours.module(x, **options)
        assert relative_error(actual, expected, ~hidden) < CLOSE


def test_a_hint_without_a_mask_is_an_error() -> None:
    x = random_states(2, 5, DIM)
    with pytest.raises(RuntimeError, match="give a causal attn_mask"):
        with_our_layers(multihead(), SEQ_LEN).module(x, x, x, is_causal=True)


class Classifier(nn.Module):
    """An encoder, and a pooling by attention with heads of another size, both with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder(batch_first=True)
        self.pool = multihead()
        self.probe = nn.Parameter(torch.zeros(1, 1, DIM))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = attention_mask == 0
        states = self.encoder(hidden_states, src_key_padding_mask=hidden).transpose(0, 1)
        pooled, _ = self.pool(self.probe.expand(1, states.shape[1], DIM), states, states, key_padding_mask=hidden)
        return hidden_states + pooled.transpose(0, 1)


class Decoder(nn.Module):
    """A decoder with a causal mask that is made for each length, whose values PyTorch's own looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, HEADS, 2 * DIM, batch_first=True), 1)

    def forward(self, tgt: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.decoder(tgt, memory, tgt_mask=mask, memory_key_padding_mask=hidden)


@pytest.mark.requires("onnx", "ort")
def test_an_exported_classifier_has_one_operator_for_each_layer(tmp_path: Path) -> None:
    original = trained_like(Classifier())
    adapted = with_our_layers(original, SEQ_LEN).module
    example = {"hidden_states": random_states(2, 40, DIM), "attention_mask": (~padding(2, 40)).long()}
    run, counts = exported(adapted, example, dict.fromkeys(example, BATCH), tmp_path / "model.onnx")
    # the weights that the pooling returns are not used
    assert counts == {"MaskedAttention": 3}
    for seq_len in LENGTHS:
        x, hidden = random_states(3, seq_len, DIM), padding(3, seq_len)
        with torch.inference_mode():
            expected = original(x, (~hidden).long())
        actual = run(hidden_states=x, attention_mask=(~hidden).long())[0]
        assert relative_error(actual, expected, ~hidden) < CLOSE


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
def test_an_exported_decoder_keeps_its_causal_mask(tmp_path: Path) -> None:
    original = trained_like(Decoder())
    adapted = with_our_layers(original, SEQ_LEN).module
    example = {"tgt": random_states(2, 20, DIM), "memory": random_states(2, 30, DIM), "hidden": padding(2, 30)}
    axes = {"tgt": {0: "batch", 1: "targets"}, "memory": BATCH, "hidden": BATCH}
    run, counts = exported(adapted, example, axes, tmp_path / "model.onnx")
    assert counts == {"MaskedAttention": 1}  # of the memory
    for targets, seq_len in ((1, 63), (100, 1), (63, 1000)):
        inputs = {"tgt": random_states(2, targets, DIM), "memory": random_states(2, seq_len, DIM)}
        inputs["hidden"] = padding(2, seq_len)
        with torch.inference_mode():
            expected = original(**inputs)
        assert relative_error(run(**inputs)[0], expected) < CLOSE


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
def test_a_build_proves_the_adapted_model(tmp_path: Path) -> None:
    original = trained_like(Classifier())
    adapted = with_our_layers(original, SEQ_LEN).module
    result = effexport.build(module=adapted, output=tmp_path / "out")
    assert result.report.verdict == "passed"
    x, hidden = random_states(3, 200, DIM), padding(3, 200)
    with effexport.load(tmp_path / "out") as model:
        outputs = model.run({"hidden_states": x.numpy(), "attention_mask": (~hidden).long().numpy()})
    with torch.inference_mode():
        expected = original(x, (~hidden).long())
    assert relative_error(torch.from_numpy(next(iter(outputs.values()))), expected, ~hidden) < CLOSE
