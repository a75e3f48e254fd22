"""nystrom-attention: the original against the layer that stands for it, in PyTorch and in ONNX Runtime."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comparison import relative_error, tokens
from slow_cases import slow_after, soak
from torch import Tensor, nn

import effexport
from effexport.models.adapters.adapter import NotExportableError
from effexport.models.adapters.nystrom_attention import Replacement
from effexport.models.adapters.replace import with_our_layers
from effexport.models.layers import DepthwiseConv, fused_operators
from effexport.models.variants.nystrom.layer import NystromAttention
from effexport.runners.options import RunOptions

pytestmark = pytest.mark.requires("foreign", "torch", "onnx", "ort")

DIM, SEQ_LEN = 48, 300
# Lengths around and between multiples of 16 and 64, those of vision transformers, and one beyond SEQ_LEN.
LENGTHS = (1, 16, 63, 100, 197, 257, 1000)
# fp32 unit roundoff 6e-8 times the largest gain of six steps from the start value, (13/4)^6 = 1178; measured 1.8e-5
TOLERANCE = 1e-4


def foreign(seed: int = 0, **options: object) -> nn.Module:
    """A layer of the package whose terms all matter: logits of several units, and a bias of the size of the context."""
    from nystrom_attention import NystromAttention as Original

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = Original(**({"dim": DIM, "dim_head": 16, "heads": 3, "num_landmarks": 16} | options))
        with torch.no_grad():
            layer.to_qkv.weight.mul_(3)
            layer.to_out[0].bias.normal_()
    return layer.eval()


def replaced(layer: nn.Module, seq_len: int = SEQ_LEN) -> Replacement:
    adapted = with_our_layers(layer, seq_len)
    assert isinstance(adapted.module, Replacement)
    return adapted.module


def masks(seq_len: int) -> dict[str, Tensor | None]:
    """For a batch of three; the first sample has no padding."""
    right, left = torch.ones(3, seq_len, dtype=torch.bool), torch.ones(3, seq_len, dtype=torch.bool)
    right[1, seq_len // 2 + 1 :] = False
    right[2, 1:] = False
    left[1, : seq_len // 2] = False
    holes = torch.rand(3, seq_len, generator=torch.Generator().manual_seed(2)) < 0.5
    empty = right.clone()
    empty[1] = False
    return {"none": None, "right": right, "left": left, "holes": holes, "empty sample": empty}


OPTIONS: dict[str, dict[str, object]] = {
    "default": {},
    "no residual": {"residual": False},
    "short filter": {"residual_conv_kernel": 5},
    "more landmarks than tokens": {"num_landmarks": 256, "heads": 1},
    "one head": {"heads": 1, "dim_head": 64},
    "other iterations": {"pinv_iterations": 3, "dropout": 0.5},
}


@pytest.mark.parametrize(
    ("options", "mask_of"),
    [
        # pseudo-inverses of 256 landmarks take long
        soak((name, mask)) if name.startswith("more landmarks") and mask in ("right", "left", "holes") else (name, mask)
        for name in OPTIONS
        for mask in masks(1)
    ],
)
@torch.no_grad()
def test_the_replacement_equals_the_original_at_every_length(options: str, mask_of: str) -> None:
    layer = foreign(**OPTIONS[options])
    ours = replaced(layer)
    for seq_len in LENGTHS:
        x, mask = tokens(3, seq_len, DIM), masks(seq_len)[mask_of]
        expected = layer(x, mask)
        for fused in (False, True):
            with fused_operators(ours, fused):
                assert relative_error(ours(x, mask=mask), expected) <= TOLERANCE, (seq_len, fused)


@torch.no_grad()
def test_zeros_before_the_sequence_are_attended_without_a_mask_only() -> None:
    layer, x = foreign(), tokens(2, 65, DIM)
    ours, everything = replaced(layer), torch.ones(2, 65, dtype=torch.bool)
    # so much that a graph with the semantics of the other case would be noticed
    assert relative_error(ours(x), ours(x, everything)) > 100 * TOLERANCE
    assert relative_error(ours(x[:, :64]), ours(x[:, :64], everything[:, :64])) <= TOLERANCE


def swap(first: str, second: str) -> Callable[[NystromAttention], None]:
    def change(ours: NystromAttention) -> None:
        a, b = (getattr(ours, name).weight for name in (first, second))
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)

    return change


def scaled_queries(ours: NystromAttention) -> None:
    ours.query.weight.mul_(4)  # √d


def transposed_heads(ours: NystromAttention) -> None:
    for projection in (ours.query, ours.key, ours.value):
        projection.weight.copy_(projection.weight.unflatten(0, (16, 3)).transpose(0, 1).flatten(0, 1))


def shifted_filter(ours: NystromAttention) -> None:
    assert isinstance(ours.conv, DepthwiseConv)
    ours.conv.weight.copy_(ours.conv.weight.roll(1, dims=2))


def no_output_bias(ours: NystromAttention) -> None:
    ours.out.bias.zero_()


def other_spec(**fields: object) -> Callable[[NystromAttention], None]:
    def change(ours: NystromAttention) -> None:
        ours.spec = dataclasses.replace(ours.spec, **fields)

    return change


MISTAKES: dict[str, Callable[[NystromAttention], None]] = {
    "queries and keys swapped": swap("query", "key"),
    "keys and values swapped": swap("key", "value"),
    "logits not divided by √d": scaled_queries,
    "heads inside channels": transposed_heads,
    "filter off by one": shifted_filter,
    "no bias after the attention": no_output_bias,
    "8 steps towards the inverse": other_spec(pinv_iterations=8),
    "a start value per head": other_spec(pinv_init="per_head"),
    "one landmark more": other_spec(num_landmarks=17),
    "our own convention": other_spec(convention="own"),
    "the authors' convention": other_spec(convention="authors"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@torch.no_grad()
def test_a_mistake_in_the_mapping_would_show(mistake: Callable[[NystromAttention], None]) -> None:
    layer = foreign()
    ours = replaced(layer)
    x, mask = tokens(3, 100, DIM), masks(100)["right"]
    # a few large tokens, whose sample has another start value than its neighbours
    x[0, :8] *= 10
    assert relative_error(ours(x, mask), layer(x, mask)) <= TOLERANCE
    mistake(ours.layer)
    assert relative_error(ours(x, mask), layer(x, mask)) > 10 * TOLERANCE


@pytest.mark.parametrize("mask_of", ["none", "right"])
@torch.no_grad()
def test_a_model_of_the_package_gets_our_layers_in_every_block(mask_of: str) -> None:
    from nystrom_attention import Nystromformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = Nystromformer(dim=DIM, dim_head=16, heads=3, depth=3, num_landmarks=16).eval()
    adapted = with_our_layers(original, SEQ_LEN)
    assert list(adapted.replaced) == [f"layers.{block}.0.fn" for block in range(3)]
    assert not adapted.kept
    for seq_len in (1, 100, 197):
        x, mask = tokens(3, seq_len, DIM), masks(seq_len)[mask_of]
        assert relative_error(adapted.module(x, mask=mask), original(x, mask=mask)) <= TOLERANCE


@torch.no_grad()
def test_the_replacement_has_weights_of_its_own() -> None:
    layer, x = foreign(), tokens(2, 100, DIM)
    ours = replaced(layer)
    before = ours(x)
    for parameter in layer.parameters():
        parameter.zero_()
    assert torch.equal(ours(x), before)


def test_the_spec_says_everything() -> None:
    spec = replaced(foreign(num_landmarks=32, pinv_iterations=4, residual_conv_kernel=7), seq_len=77).layer.spec
    assert repr(spec) == (
        "NystromSpec(dim=48, heads=3, head_dim=16, seq_len=77, num_landmarks=32, pinv_iterations=4, "
        "pinv_init='global', conv_kernel_size=7, convention='nystrom-attention')"
    )


@pytest.mark.parametrize("argument", ["return_attn", "return_attn_matrices"])
def test_attention_matrices_are_refused(argument: str) -> None:
    with pytest.raises(NotExportableError, match="fused operators do not form these matrices; leave it out"):
        replaced(foreign())(tokens(1, 20, DIM), **{argument: True})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"residual_conv_kernel": 4}, "its convolution has 4 taps, and the result is one token longer than its input"),
        ({"eps": 0.1}, "its eps 0.1 makes the landmarks of masked segments smaller"),
    ],
)
def test_options_without_a_counterpart_are_named(options: dict[str, object], reason: str) -> None:
    layer = foreign(**options)
    adapted = with_our_layers(nn.Sequential(layer), SEQ_LEN)
    assert adapted.kept == {"0": reason}
    assert not adapted.replaced


class WithMask(nn.Module):
    """Two layers, as models have them: operators that depend on the mask alone are shared in the graph."""

    def __init__(self, num_landmarks: int) -> None:
        super().__init__()
        self.first = foreign(0, num_landmarks=num_landmarks)
        self.second = foreign(1, num_landmarks=num_landmarks)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask != 0
        hidden = hidden_states + self.first(hidden_states, mask)
        result: Tensor = self.second(hidden, mask=mask)
        return result


class WithoutMask(WithMask):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        result: Tensor = self.second(hidden_states + self.first(hidden_states))
        return result


# 256 landmarks are more than the example that torch.onnx traces has tokens, so its segments are one token each
@pytest.mark.parametrize(
    ("model", "num_landmarks", "fused"),
    [
        *slow_after(0, [(WithMask, 16, True), (WithMask, 256, False)]),
        *(pytest.param(WithoutMask, count, True, marks=pytest.mark.soak) for count in (16, 256)),
    ],
)
@torch.no_grad()
def test_the_file_equals_the_original(model: type[WithMask], num_landmarks: int, fused: bool, tmp_path: Path) -> None:
    original = model(num_landmarks).eval()
    result = effexport.build(module=original, output=tmp_path / "out", fused=fused)
    assert result.report.verdict == "passed"
    for implementation in ("auto", "body"):
        with effexport.load(tmp_path / "out", settings=RunOptions(implementation=implementation)) as runner:
            for seq_len in LENGTHS:
                x, mask = tokens(3, seq_len, DIM), masks(seq_len)["right"]
                given = runner.run({"hidden_states": x.numpy(), "attention_mask": mask.long().numpy()})
                expected = original(x, mask)
                assert relative_error(torch.from_numpy(given["output"]), expected) <= TOLERANCE, seq_len


@pytest.mark.slow
@torch.no_grad()
def test_the_vision_transformer_of_the_examples_exports(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    original, example_inputs = runpy.run_path(str(root / "examples" / "nystrom_attention_model.py"))["make"]()
    result = effexport.export(original, example_inputs, tmp_path / "out")
    assert result.report.verdict == "passed"
    with effexport.load(tmp_path / "out") as runner:
        for batch in (1, 5):
            pixels = tokens(batch, 3, 224, 224)
            (given,) = runner.run({"pixels": pixels.numpy()}).values()
            assert relative_error(torch.from_numpy(given), original(pixels)) <= TOLERANCE
