"""Reformer checkpoints, beyond test_published.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from originals import DECODER, GEOMETRIES, LIMIT, both_models, config_of, module_from_weights, token_inputs
from transformers_models import oracle_from_config

from effexport.models.checkpoints.reformer import Reformer
from effexport.models.checkpoints.reformer_spec import ReformerSpec
from effexport.models.validation import SpecError
from effexport.models.variants.local import LocalSpec
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.lsh.layer import LSHHash

pytestmark = pytest.mark.requires("torch", "transformers")

TINY = config_of("reformer")
LEARNED = {"axial_pos_embds": False}


@pytest.mark.parametrize("seq_len", [20, 40, 100, 200])
def test_a_missing_bucket_count_is_resolved_as_in_transformers(seq_len: int) -> None:
    config = TINY | LEARNED | {"num_buckets": None, "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 12}
    spec, notes = ReformerSpec.from_config(config, {"seq_len": seq_len})
    oracle = oracle_from_config(config, 0)
    oracle(**token_inputs(spec, 1, seq_len, padded=False))
    theirs = oracle.config.num_buckets
    assert spec.bucket_factors == ((theirs,) if isinstance(theirs, int) else tuple(theirs))
    assert any(f"resolved from seq_len {seq_len} to {list(spec.bucket_factors)}" in note for note in notes)
    # frozen: the length may change, the hash may not
    assert dataclasses.replace(spec, seq_len=9).bucket_factors == spec.bucket_factors


def test_a_hash_seed_in_the_configuration_gives_the_rotations_of_transformers() -> None:
    config = TINY | {"hash_seed": 5, "attn_layers": ["lsh", "local", "lsh"]}
    _, notes = ReformerSpec.from_config(config, {"hash_seed": 1})
    original, module = both_models(config, {"hash_seed": 1})
    inputs = token_inputs(module.spec, 2, 61, padded=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        expected, actual = original(**inputs).last_hidden_state, module(*inputs.values())
    assert float((actual - expected).abs().max()) <= LIMIT
    assert any("hash_seed is 5" in note for note in notes)


def rotations_of(module: Reformer) -> list[torch.Tensor]:
    return [child.rotations for child in module.modules() if isinstance(child, LSHHash)]


def test_every_lsh_layer_draws_its_own_rotations_once() -> None:
    spec, _ = ReformerSpec.from_config(TINY | {"attn_layers": ["lsh", "local", "lsh"]}, {"hash_seed": 3})
    first, second = rotations_of(Reformer(spec))
    assert not torch.equal(first, second)
    for again, known in zip(rotations_of(Reformer(spec).half()), (first, second), strict=True):
        assert again.dtype == torch.float32
        assert torch.equal(again, known)
    other = dataclasses.replace(spec, hash_seed=4)
    assert not torch.equal(rotations_of(Reformer(other))[0], first)


def test_every_position_can_be_used_and_no_more() -> None:
    # padded to 24, beyond the 20 positions: transformers refuses, because it looks up positions for its padding
    spec, _ = ReformerSpec.from_config(TINY | LEARNED | {"max_position_embeddings": 20}, {})
    longer = dataclasses.replace(spec, max_position_embeddings=24)
    module, reference = Reformer(spec).eval(), Reformer(longer).eval()
    weights = reference.state_dict()
    weights["position_embedding.weight"] = weights["position_embedding.weight"][:20]
    module.load_state_dict(weights)
    inputs = token_inputs(spec, 2, 20, padded=False)
    with torch.no_grad():
        assert torch.equal(module(*inputs.values()), reference(*inputs.values()))


@torch.no_grad()
def test_the_safe_constants_differ_only_where_a_token_sees_itself_alone() -> None:
    config = TINY | DECODER | {"attn_layers": ["lsh"]}
    published = Reformer(ReformerSpec.from_config(config, {})[0]).eval()
    safe = Reformer(ReformerSpec.from_config(config, {"mask_constants": "safe"})[0]).eval()
    safe.load_state_dict(published.state_dict())
    inputs = token_inputs(published.spec, 1, 60, padded=False).values()
    error = (safe(*inputs) - published(*inputs)).abs().amax(dim=-1)[0]
    assert 1e-5 < error[0] < 1e-2
    assert error[30:].max() <= LIMIT


@torch.no_grad()
def test_a_sample_that_is_all_padding_is_finite_and_old_checkpoints_name_a_bias_twice() -> None:
    original, module = both_models(TINY | DECODER | {"architectures": ["ReformerModelWithLMHead"]})
    inputs = token_inputs(module.spec, 3, 30)
    inputs["attention_mask"][2] = 0
    expected = module(*inputs.values())
    assert torch.isfinite(expected).all()
    weights = original.state_dict()
    weights["lm_head.decoder.bias"] = weights.pop("lm_head.bias")
    assert torch.equal(module_from_weights(module.spec, weights)(*inputs.values()), expected)


def test_the_spec_describes_the_attention_and_the_graph() -> None:
    spec, _ = ReformerSpec.from_config(TINY | DECODER, {"num_hashes": 4})
    attention = spec.attention
    assert isinstance(attention, LSHSpec)
    assert (attention.circular, attention.causal, attention.mask_constants) == (True, True, "hf")
    assert (attention.num_hashes, attention.bucket_factors, attention.head_size) == (4, (4,), 8)
    assert (spec.layers, spec.custom_ops(fused=False), spec.input_limits) == (2, {"LSHSort": 1}, {"input_ids": 50})
    assert spec.custom_ops(fused=True) == {"LSHHash": 1, "LSHSort": 1, "LSHAttention": 1}
    assert spec.outputs == {"logits": ("batch", "seq", 50)}
    local, _ = ReformerSpec.from_config(TINY | {"attn_layers": ["local"]}, {})
    assert isinstance(local.attention, LocalSpec)
    assert local.custom_ops(fused=True) == {}
    assert local.outputs == {"last_hidden_state": ("batch", "seq", 32)}
    assert [spec.attention_of_layer(layer).variant for layer in (0, 1)] == ["local", "lsh"]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"hidden_act": "swish"}, {}, "hidden_act is 'swish'; expected one of gelu, gelu_new, relu"),
        ({"num_buckets": 5}, {}, "num_buckets is 5; each count must be even.*4 or 6"),
        ({"num_buckets": [4, 3]}, {}, r"num_buckets is \[4, 3\]; each count must be even"),
        ({"num_buckets": "many"}, {}, "num_buckets is 'many'; expected an integer or a list"),
        ({"architectures": ["ReformerModelWithLMHead"]}, {}, "is_decoder is false; the task lm-head needs a causal"),
        (DECODER | {"lsh_num_chunks_after": 1}, {}, "chunks after are .*'lsh': 1.*use the task base"),
        (DECODER | {"local_num_chunks_after": 1}, {}, "chunks after are .*'local': 1"),
        (DECODER, {"task": "masked-lm"}, "is_decoder is true; the task masked-lm needs a model that sees both sides"),
        ({"axial_pos_embds_dim": [6, 6]}, {}, r"\[6, 6\] adds up to 12; expected hidden_size 16"),
        ({"axial_pos_shape": [256]}, {}, "must have one number for each of at least two axes"),
        ({"axial_pos_shape": [0, 16]}, {}, "axial_pos_shape is .*expected a list of positive integers"),
        ({"axial_pos_shape": 16}, {}, "axial_pos_shape is 16; expected a list of positive integers"),
        (
            {"attn_layers": ["lsh", "full"]},
            {},
            r"attn_layers is \['lsh', 'full'\]; expected a list with 'lsh' or 'local'",
        ),
        ({"num_hidden_layers": 3}, {}, "num_hidden_layers is 3, but attn_layers names 2 layers of both kinds"),
        ({"num_hidden_layers": 0}, {}, "num_hidden_layers is 0; expected at least 1"),
        ({"lsh_num_chunks_before": None}, {}, "lsh_num_chunks_before is None; expected int"),
        ({"attn_layers": []}, {}, "attn_layers is .*expected a list"),
        ({"attn_layers": [["lsh"]]}, {}, "attn_layers is .*expected a list"),
        (
            {"architectures": ["ReformerForTokenClassification"]},
            {},
            "architectures is .*expected one of: ReformerModel",
        ),
        ({"architectures": "ReformerModel"}, {}, "architectures is 'ReformerModel'; expected one of"),
        ({"hidden_size": "16"}, {}, "hidden_size is '16'; expected int"),
        ({"is_decoder": 1}, {}, "is_decoder is 1; expected bool"),
        ({"hash_seed": "a"}, {}, "hash_seed is 'a'; expected int"),
        ({"feed_forward_size": 0}, {}, "feed_forward_size is 0; expected at least 1"),
        # by the names that they have in config.json
        ({"lsh_attn_chunk_length": 0}, {}, "^lsh_attn_chunk_length is 0; expected at least 1"),
        ({"num_attention_heads": 0}, {}, "^num_attention_heads is 0; expected at least 1"),
        ({"num_attention_heads": 2**31}, {}, "^num_attention_heads is 2147483648; expected at most 2147483647"),
        ({"num_buckets": []}, {}, r"num_buckets is \[\]; expected an integer or a list"),
        ({"local_num_chunks_before": 3}, {}, "local_num_chunks_before is 3; expected 0 to 2"),
        ({"num_hashes": 0}, {}, "num_hashes is 0; expected at least 1"),
        ({"layer_norm_eps": 0.0}, {}, "layer_norm_eps is 0.0; expected a number > 0"),
        ({"pad_token_id": 50}, {}, "pad_token_id is 50; expected a token, 0 to 49"),
        ({}, {"seq_len": 257}, "seq_len is 257; this checkpoint has positions for 1 to 256"),
        ({}, {"task": "translation"}, "task is 'translation'; reformer has: base, lm-head"),
        ({}, {"hash_seed": -1}, "hash_seed is -1; expected 0 to"),
        ({}, {"mask_constants": "none"}, "mask_constants is 'none'; expected one of hf, safe"),
        ({}, {"num_hash": 2}, "no option 'num_hash'; did you mean 'num_hashes'"),
        ({}, {"task": "question-answering", "num_labels": 3}, "num_labels is 3; the task question-answering has 2"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        ReformerSpec.from_config(TINY | change, options)


@pytest.mark.parametrize(
    ("change", "options", "beginning", "shown"),
    [
        ({}, {"hash_seed": 7}, "transformers draws new LSH rotations in every forward pass", "from seed 7"),
        ({"attn_layers": ["local"]}, {}, "transformers draws new LSH rotations", ""),
        ({"num_hidden_layers": 1}, {}, "num_hidden_layers is 1 and attn_layers names 2", "num_hidden_layers counts"),
        ({"hash_seed": 5}, {"hash_seed": 7}, "hash_seed is 5 in config.json", "share the rotations"),
        ({"num_buckets": None}, {"seq_len": 64}, "num_buckets is null", "64 to [16]"),
        ({}, {}, "num_buckets is null", ""),
        ({}, {"num_hashes": 4}, "num_hashes is 4 instead of 2", "need no training"),
        ({}, {"num_hashes": 2}, "num_hashes is", ""),
        ({}, {}, "The weights of the hash rounds do not add up to one", "bfloat16"),
        ({"num_hashes": 1}, {}, "The weights of the hash rounds", ""),
        ({}, {"mask_constants": "safe"}, "mask_constants 'safe'", "differs from transformers by up to 0.4 %"),
        (DECODER, {}, "LSH is not strictly causal", "chunk boundaries"),
        ({}, {}, "LSH is not strictly causal", ""),
        ({}, {}, "Look-around is circular", "leaks into its start"),
        (DECODER, {}, "Look-around is circular", ""),
        (DECODER, {}, "transformers 5 leaves the bias of the language-model head out", "applied here"),
        ({}, {}, "transformers 5 leaves the bias", ""),
        ({}, {}, "transformers replaces its mask constants by -1e4 and -1e3 in float16", "float32"),
        (GEOMETRIES["enwik8"], {}, "seq_len is 4096, the default limit", "positions for 65536"),
        (GEOMETRIES["enwik8"], {"seq_len": 8192}, "seq_len is", ""),
        ({}, {}, "seq_len is", ""),
    ],
)
def test_notes_name_what_users_have_to_know(
    change: dict[str, Any], options: dict[str, Any], beginning: str, shown: str
) -> None:
    _, notes = ReformerSpec.from_config(TINY | change, options)
    found = [note for note in notes if note.startswith(beginning)]
    assert len(found) == (1 if shown else 0)
    assert all(shown in note for note in found)


def test_the_default_length_is_that_of_the_positions_up_to_a_limit() -> None:
    assert ReformerSpec.from_config(TINY, {})[0].seq_len == 256
    assert ReformerSpec.from_config(TINY | {"max_position_embeddings": 100}, {})[0].max_seq_len == 100
    spec, _ = ReformerSpec.from_config(TINY | GEOMETRIES["crime-and-punishment"], {})
    assert (spec.seq_len, spec.max_seq_len) == (ReformerSpec.DEFAULT_SEQ_LEN_LIMIT, 524288)


def test_labels_are_counted_by_their_names() -> None:
    config = TINY | {"architectures": ["ReformerForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    assert ReformerSpec.from_config(config, {})[0].outputs == {"logits": ("batch", 3)}
    assert ReformerSpec.from_config(config, {"num_labels": 5})[0].outputs == {"logits": ("batch", 5)}
