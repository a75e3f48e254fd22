"""reformer-pytorch against ours: the package itself, with the rotations that ours has drawn, is the reference."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_cases import slow_after
from torch import Tensor, nn

import effexport
from effexport.models.adapters.adapter import Adapted, NotExportableError, frozen
from effexport.models.adapters.replace import with_our_layers
from effexport.models.validation import SpecError
from effexport.models.variants.lsh.layer import LSHAttention, LSHHash

pytestmark = pytest.mark.requires("foreign", "torch")

DIM, VOCABULARY = 32, 50
SEQ_LEN = 100  # what models are adapted for; the lengths are shorter and longer
# Float32 rounding of the same formula in another order, after one layer or two; 3e-6 was measured. What a mistake in
# an option changes is above 1e-3.
FLOAT32 = 1e-5
LENGTHS = (1, 16, 63, 100, 1000)


def trained_like(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights at which every term counts: logits of several units, and biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            elif name.endswith("toqk.weight"):
                parameter.copy_(4 * torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[1]))
    return model.eval()


def attention(**options: Any) -> nn.Module:
    from reformer_pytorch import Autopadder, LSHSelfAttention

    return trained_like(Autopadder(LSHSelfAttention(DIM, **{"heads": 2, "bucket_size": 16, "n_hashes": 3} | options)))


def language_model(**options: Any) -> nn.Module:
    from reformer_pytorch import Autopadder, ReformerLM

    sizes = {"depth": 2, "max_seq_len": 1024, "heads": 2, "dim_head": 16, "bucket_size": 16, "n_hashes": 2}
    return trained_like(Autopadder(ReformerLM(VOCABULARY, DIM, **sizes | options)))


def inputs_of(model: nn.Module, seq_len: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Two samples and their mask: the end of the second is padding, and a token in the middle of the first."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(2, seq_len, dtype=torch.bool)
    mask[1, seq_len * 2 // 3 + 1 :] = False
    mask[0, 5:6] = False
    if hasattr(getattr(model, "net", model), "token_emb"):
        return torch.randint(VOCABULARY, (2, seq_len), generator=generator), mask
    return torch.randn(2, seq_len, DIM, generator=generator), mask


@contextmanager
def given_buckets(module: nn.Module, buckets: Mapping[str, Tensor]) -> Iterator[dict[str, float]]:
    """Our hashes return the original's buckets. Yields the share in which their own would differ, by path."""
    shares: dict[str, float] = {}
    handles = []
    for path, child in module.named_modules():
        if isinstance(child, LSHHash):

            def replace(child: nn.Module, inputs: object, own: Tensor, path: str = path) -> Tensor:
                assert own.shape == buckets[path].shape
                assert own.dtype == buckets[path].dtype == torch.int32
                shares[path] = float((own != buckets[path]).float().mean())
                return buckets[path]

            handles.append(child.register_forward_hook(replace))
    try:
        yield shares
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def error(model: nn.Module, adapted: Adapted, seq_len: int, *, masked: bool = True) -> float:
    """The largest difference of kept tokens from the original, as a share of the original's RMS."""
    x, mask = inputs_of(model, seq_len)
    options = {"input_mask": mask} if masked else {}
    with frozen(model, adapted) as buckets:
        expected = model(x, **options)
    with given_buckets(adapted.module, buckets) as shares:
        given = adapted.module(x, **options)
    assert set(shares) == set(buckets)
    # near-ties of two directions may turn out otherwise: one token in a thousand at most
    assert all(share <= 1e-3 for share in shares.values())
    kept = mask if masked else torch.ones_like(mask)
    assert given.shape == expected.shape
    assert given.isfinite().all()
    return float((given - expected)[kept].abs().max() / expected[kept].square().mean().sqrt())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_hashes": 1},
        {"dim_head": 12, "one_value_head": True, "random_rotations_per_head": True},
        {"heads": 4, "attn_chunks": 3, "random_rotations_per_head": True},
        {"attend_across_buckets": False},
        {"allow_duplicate_attention": False},
        {"allow_duplicate_attention": False, "attend_across_buckets": False, "n_hashes": 1},
        {"full_attn_thres": 0},
        {"full_attn_thres": 100},
        {"use_full_attn": True, "one_value_head": True},
    ],
    ids=str,
)
def test_every_option_of_the_attention_agrees_at_every_length(options: dict[str, Any], causal: bool) -> None:
    model = attention(causal=causal, **options)
    adapted = with_our_layers(model, SEQ_LEN)
    assert list(adapted.replaced) == ["", "net"]
    for seq_len in LENGTHS:
        assert error(model, adapted, seq_len) <= FLOAT32


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"absolute_position_emb": True, "full_attn_thres": 40},
        {"fixed_position_emb": True, "use_scale_norm": True, "ff_glu": True, "return_embeddings": True},
        {"axial_position_emb": True, "ff_chunks": 3, "reverse_thres": 64},
        {"use_rezero": True, "emb_dim": 16, "causal": True, "weight_tie_embedding": True},
        {"weight_tie": True, "depth": 3},
        {"use_full_attn": True, "causal": True},
    ],
    ids=str,
)
def test_language_models_agree_at_every_length(options: dict[str, Any]) -> None:
    model = language_model(**options)
    adapted = with_our_layers(model, SEQ_LEN)
    for seq_len in LENGTHS:
        assert error(model, adapted, seq_len) <= FLOAT32


def test_models_without_autopadder_agree_at_multiples_of_two_buckets() -> None:
    from reformer_pytorch import LSHSelfAttention, Reformer

    layer = trained_like(LSHSelfAttention(DIM, heads=2, bucket_size=16, n_hashes=3))
    reformer = trained_like(Reformer(DIM, 2, heads=2, bucket_size=16, n_hashes=3))
    for model, lengths in ((layer, (1, 16, 32, 96, 992)), (reformer, (32, 96, 992))):
        adapted = with_our_layers(model, SEQ_LEN)
        for seq_len in lengths:
            assert error(model, adapted, seq_len) <= FLOAT32
            assert error(model, adapted, seq_len, masked=False) <= FLOAT32


def test_the_spec_says_what_the_layer_computes() -> None:
    model = attention(n_hashes=5, causal=True, attend_across_buckets=False, allow_duplicate_attention=False)
    (layer,) = (m for m in with_our_layers(model, SEQ_LEN).module.modules() if isinstance(m, LSHAttention))
    spec = layer.spec
    assert (spec.dim, spec.heads, spec.head_size, spec.chunk_length, spec.num_hashes) == (DIM, 2, 16, 16, 5)
    assert (spec.circular, spec.num_chunks_before, spec.num_chunks_after) == (True, 1, 0)
    assert (spec.causal, spec.pad_bucket, spec.self_logit) == (True, "hashed", -5e4)
    assert (spec.attend_across_buckets, spec.allow_duplicates, spec.rotations_per_head) == (False, False, False)
    assert spec.max_seq_len == 8192


def test_layers_draw_different_rotations_and_a_copy_draws_the_same() -> None:
    def rotations(model: nn.Module) -> list[Tensor]:
        return [m.rotations for m in with_our_layers(model, SEQ_LEN).module.modules() if isinstance(m, LSHHash)]

    model = language_model(depth=3)
    first, second, third = rotations(model)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert all(torch.equal(a, b) for a, b in zip((first, second, third), rotations(copy.deepcopy(model)), strict=True))
    tied = rotations(language_model(depth=2, weight_tie=True))
    assert len(tied) == 2
    assert not torch.equal(*tied)


@torch.no_grad()
def test_the_original_draws_anew_before_and_after_and_is_left_as_it_was() -> None:
    model = language_model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    adapted, (x, _) = with_our_layers(model, SEQ_LEN), inputs_of(model, 100)
    free = [model(x) for _ in range(2)]
    with frozen(model, adapted):
        held = [model(x) for _ in range(2)]
    assert torch.equal(*held)
    assert not torch.equal(*free)
    assert not torch.equal(model(x), model(x))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def test_numbers_stay_frozen_after_the_original_has_failed() -> None:
    from reformer_pytorch import LSHSelfAttention

    layer = trained_like(LSHSelfAttention(DIM, heads=2, bucket_size=16))
    adapted = with_our_layers(layer, SEQ_LEN)
    with frozen(layer, adapted):
        wanted = layer(torch.ones(1, 32, DIM))
        with pytest.raises(AssertionError, match="divisible"):
            layer(torch.ones(1, 33, DIM))
        assert not torch.equal(torch.randn(2, 3, 4, 1), torch.randn(2, 3, 4, 1))
        assert torch.equal(layer(torch.ones(1, 32, DIM)), wanted)


@torch.no_grad()
def test_a_copy_of_the_original_in_float64_uses_the_same_numbers() -> None:
    model = language_model(causal=True)
    adapted, (x, mask) = with_our_layers(model, SEQ_LEN), inputs_of(model, 100)
    double = copy.deepcopy(model).double()
    with frozen(model, adapted) as buckets:
        expected = model(x, input_mask=mask)
    with frozen(double, adapted) as exact_buckets:
        exact = double(x, input_mask=mask)
    assert exact.dtype == torch.float64
    assert buckets.keys() == exact_buckets.keys()
    assert all(float((buckets[path] != exact_buckets[path]).float().mean()) <= 1e-3 for path in buckets)
    # float32 gives 0.998 or so of its value to a token that sees only itself
    assert float((expected - exact)[mask].abs().max() / exact[mask].square().mean().sqrt()) <= 1e-2


@torch.no_grad()
def test_more_tokens_than_there_are_rotations_for_are_refused() -> None:
    model = attention()
    adapted = with_our_layers(model, SEQ_LEN)
    x = torch.randn(1, 8193, DIM)
    with pytest.raises(SpecError, match="more than 8192 tokens"), frozen(model, adapted):
        model(x)
    with pytest.raises(IndexError):
        adapted.module(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_local_attn_heads": 1}, "net .*: n_local_attn_heads is 1, and heads that attend to their neighbours have"),
        ({"num_mem_kv": 4}, "net .*: num_mem_kv is 4, and learned keys beside those of the tokens have no"),
        ({"num_mem_kv": 4, "use_full_attn": True}, "num_mem_kv is 4"),
        ({"rehash_each_round": False}, "rehash_each_round is False, and rounds that share one rotation have no"),
    ],
    ids=str,
)
def test_options_without_a_counterpart_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotExportableError, match=message):
        with_our_layers(attention(**options), SEQ_LEN)


def test_arguments_without_a_counterpart_are_refused() -> None:
    from reformer_pytorch import LSHSelfAttention

    layer = with_our_layers(LSHSelfAttention(DIM, heads=2, bucket_size=16), SEQ_LEN).module
    x = torch.randn(1, 32, DIM)
    for name, value in {"keys": x, "input_attn_mask": torch.ones(1, 32, 32), "context_mask": x[..., 0] > 0}.items():
        with pytest.raises(SpecError, match=f"got {name}, which has no counterpart"):
            layer(x, **{name: value})


EXPORTED = {
    "a causal language model": lambda: language_model(causal=True, depth=1),
    "positions per axis": lambda: language_model(depth=1, axial_position_emb=True),
    "every option of the attention": lambda: attention(
        attend_across_buckets=False, allow_duplicate_attention=False, one_value_head=True, full_attn_thres=40
    ),
    "full attention": lambda: language_model(depth=1, use_full_attn=True, causal=True),
    "one layer twice": lambda: language_model(depth=2, weight_tie=True),
}


@pytest.mark.requires("onnx", "ort", "native")
@pytest.mark.parametrize(
    "name",
    [
        # what changes the graph most; the layers of the others are compared in PyTorch above
        *slow_after(0, ["a causal language model", "every option of the attention"]),
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("positions per axis", "full attention", "one layer twice")
        ),
    ],
)
def test_the_file_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    model = EXPORTED[name]()
    x, mask = inputs_of(model, SEQ_LEN)
    result = effexport.export(model, {"x": x, "input_mask": mask}, tmp_path / "built")
    assert result.report.verdict == "passed"
    adapted = with_our_layers(model, SEQ_LEN)
    for implementation in ("kernel", "body"):
        settings = effexport.RunOptions(implementation=implementation)
        with effexport.load(tmp_path / "built", settings) as runner:
            for seq_len in (1, 63, 100, 1000):
                x, mask = inputs_of(model, seq_len)
                with torch.no_grad(), frozen(model, adapted):
                    expected = model(x, input_mask=mask)[mask].numpy()
                (given,) = runner.run({"x": x.numpy(), "input_mask": mask.numpy()}).values()
                difference = np.abs(given[mask.numpy()] - expected)
                # buckets are its own: a near-tie of two would show here, on another processor
                assert difference.max() / np.sqrt(np.square(expected).mean()) <= 1e-4


@pytest.mark.requires("onnx", "ort", "native")
@pytest.mark.slow
def test_the_file_fails_for_more_tokens_than_there_are_rotations_for(tmp_path: Path) -> None:
    from onnxruntime import InferenceSession
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    model = attention(n_hashes=1, heads=1)
    x, _ = inputs_of(model, SEQ_LEN)
    path = effexport.export(model, {"x": x}, tmp_path / "built").artifact.model_path
    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    assert np.isfinite(session.run(None, {"x": np.ones((1, 8192, DIM), np.float32)})[0]).all()
    with pytest.raises(InvalidArgument, match="out of data bounds"):
        session.run(None, {"x": np.ones((1, 8193, DIM), np.float32)})
