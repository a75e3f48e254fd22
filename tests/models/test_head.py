"""Heads: one vector for each sample, against the formulas of sentence-transformers written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from effexport.base.spec import BuildSpec, build_spec_from_options
from effexport.models.encoder.module import embedding
from effexport.models.encoder.spec import POOLINGS, Head, Pooling
from effexport.models.validation import SpecError

# Sums of up to 100 float32 numbers of order one, rounded once each.
ROUNDING = 1e-6


def formula(hidden: np.ndarray, keep: np.ndarray, kind: str) -> np.ndarray:
    """One sample, [seq, channels] → [channels]: mean over kept tokens, largest of each channel, or first token."""
    if kind == "cls":
        return hidden[0]
    kept = hidden[keep]
    return kept.mean(axis=0) if kind == "mean" else kept.max(axis=0)


def states(seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of three samples with padding at the end, at the beginning and in the middle; all negative in one
    channel, so that zeros in the place of padding would be the largest."""
    hidden = torch.randn(3, seq_len, 5, generator=torch.Generator().manual_seed(seq_len))
    hidden[..., 0] = -hidden[..., 0].abs() - 1
    keep = torch.ones(3, seq_len, dtype=torch.bool)
    keep[0, seq_len // 2 + 1 :] = False
    keep[1, : seq_len // 3] = False
    keep[2, seq_len // 3 : seq_len // 2] = False
    return hidden, keep


@pytest.mark.parametrize("kind", POOLINGS)
@pytest.mark.parametrize("seq_len", [1, 2, 63, 100])
def test_a_vector_is_the_formula_over_the_kept_tokens(kind: Pooling, seq_len: int) -> None:
    hidden, keep = states(seq_len)
    given = torch.where(keep.unsqueeze(-1) | (kind == "cls"), hidden, torch.nan)  # what padding holds does not matter
    found = embedding(given, keep, Head(kind, False, None, None)).numpy()
    expected = [formula(h, k, kind) for h, k in zip(hidden.double().numpy(), keep.numpy(), strict=True)]
    assert np.abs(found - np.stack(expected)).max() <= ROUNDING


@pytest.mark.parametrize("kind", POOLINGS)
def test_a_vector_is_cut_before_it_is_scaled_to_length_one(kind: Pooling) -> None:
    hidden, keep = states(30)
    found = embedding(hidden, keep, Head(kind, True, 3, None)).numpy()
    cut = np.stack([formula(h, k, kind)[:3] for h, k in zip(hidden.double().numpy(), keep.numpy(), strict=True)])
    assert np.abs(found - cut / np.linalg.norm(cut, axis=1, keepdims=True)).max() <= ROUNDING


@pytest.mark.parametrize("kind", ["mean", "max"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_sample_without_kept_tokens_becomes_zeros(kind: Pooling, normalize: bool) -> None:
    hidden, keep = states(9)
    keep[1] = False
    found = embedding(hidden, keep, Head(kind, normalize, None, None))
    assert torch.equal(found[1], torch.zeros(5))
    assert torch.isfinite(found).all()
    assert found[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("normalize", [False, True])
def test_sums_and_lengths_do_not_overflow_half_precision(dtype: torch.dtype, normalize: bool) -> None:
    hidden = torch.full((1, 100, 4), 3e4, dtype=dtype)  # their sum is 3e6, their squares 9e8; float16 ends at 65504
    found = embedding(hidden, torch.ones(1, 100, dtype=torch.bool), Head("mean", normalize, None, None))
    assert found.dtype == dtype
    assert torch.equal(found, torch.full((1, 4), 0.5, dtype=dtype) if normalize else hidden[:, 0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pool": "average"}, ["pool is 'average'", "mean, cls, max"]),
        ({"normalize": True}, ["normalize was given without pool", "--pool"]),
        ({"truncate_dim": 8}, ["truncate_dim was given without pool"]),
        ({"pool": "mean", "truncate_dim": 33}, ["truncate_dim is 33", "1 to 32"]),
        ({"pool": "mean", "truncate_dim": 0}, ["truncate_dim is 0", "1 to 32"]),
        ({"pool": "mean", "scope": "attention"}, ["scope attention", "scope encoder"]),
        ({"pool": "mean", "lm_head": True}, ["logits [batch, seq, 258]", "hidden states", "leave --lm-head out"]),
        ({"pool": "mean", "top_k": 3}, ["pool and top_k", "expected one"]),
        ({"top_k": 3}, ["last_hidden_state [batch, seq, 32]", "--task masked-lm", "--lm-head"]),
        ({"top_k": 259, "lm_head": True}, ["top_k is 259", "1 to 258, the size of the vocabulary"]),
        ({"top_k": 3841, "lm_head": True, "vocab_size": 30000}, ["top_k is 3841", "1 to 3840"]),
        ({"top_k": 3, "scope": "attention"}, ["scope attention", "scope encoder"]),
    ],
)
def test_options_that_cannot_work_are_one_error_with_the_remedy(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(SpecError) as error:
        build_spec_from_options({"variant": "softmax", "dim": 32, "heads": 4, "seq_len": 32} | options, None)
    assert all(word in str(error.value) for word in words), error.value


def test_a_spec_with_a_head_survives_json_and_one_from_before_heads_opens() -> None:
    options = {"variant": "linear", "causal": True, "pool": "max", "truncate_dim": 4, "normalize": True}
    spec = build_spec_from_options(options, None)
    assert BuildSpec.from_dict(spec.to_dict()) == spec
    assert [str(tensor) for tensor in spec.outputs] == ["embedding float32 [batch, 4]"]
    assert not spec.has_decode_step  # a token is not a text
    plain = build_spec_from_options({"variant": "linear", "causal": True}, None)
    old = {
        name: value
        for name, value in plain.to_dict().items()
        if name not in ("pool", "truncate_dim", "normalize", "top_k")
    }
    assert BuildSpec.from_dict(old) == plain
    assert plain.has_decode_step
