"""Reformer checkpoints against transformers with the same weights and the same rotations."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from effexport.models.checkpoints.reformer import IGNORED, Reformer, weight_names
from effexport.models.checkpoints.reformer_spec import ReformerSpec
from effexport.models.checkpoints.weights import fill_module
from effexport.models.validation import SpecError
from effexport.models.variants.local import LocalSpec
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.lsh.layer import LSHHash

pytestmark = pytest.mark.requires("torch")

# Sums in another order: a few roundings of 6e-8 in every layer, amplified where logits are large. Of 900 random models
# 899 were within 5e-6; the other had two logits so close to zero that 3e-7 were 1.3e-5 of them.
AGAINST_TRANSFORMERS = 1e-5

TINY: dict[str, Any] = {
    "model_type": "reformer",
    "architectures": ["ReformerModel"],
    "vocab_size": 50,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "attention_head_size": 8,
    "feed_forward_size": 24,
    "attn_layers": ["local", "lsh"],
    "lsh_attn_chunk_length": 8,
    "local_attn_chunk_length": 8,
    "num_buckets": 4,
    "num_hashes": 2,
    "axial_pos_shape": [16, 16],
    "axial_pos_embds_dim": [6, 10],
    "max_position_embeddings": 256,
    "hash_seed": None,
}
DECODER = {"architectures": ["ReformerModelWithLMHead"], "is_decoder": True}
LEARNED = {"axial_pos_embds": False}


def oracle_from_config(config: Mapping[str, Any], seed: int) -> Any:
    """transformers' model with weights at which every term of the formula reaches the output."""
    import transformers

    fields = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    # a copy: transformers stores the automatic bucket count in the configuration
    oracle_config = transformers.ReformerConfig(**copy.deepcopy(fields))
    oracle_config.use_cache = False
    oracle = getattr(transformers, config["architectures"][0])(oracle_config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            value = torch.randn(weight.shape, generator=generator)
            if "layer_norm" in name:
                value = 0.2 * value + (1 if name.endswith("weight") else 0)
            elif name.endswith("bias"):
                value = 0.2 * value
            elif "embeddings" not in name:
                # sharp attention: logits of order three
                value = value * weight.shape[1] ** -0.5 * (1.7 if "query" in name or "key" in name else 1.0)
            weight.copy_(value)
    return oracle


def module_from_oracle(oracle: Any, spec: ReformerSpec) -> Any:
    module = Reformer(spec).eval()
    fill_module(module, oracle.state_dict(), weight_names(spec), IGNORED, Path("oracle"))
    return module


@contextmanager
def same_rotations(module: Any) -> Iterator[list[int]]:
    """transformers draws the rotations of our LSH layers, one after the other; the list counts them."""
    hashes = [block.attention.hash for block in module.blocks if hasattr(block.attention, "hash")]
    drawn: list[int] = []

    def ours(shape: tuple[int, ...], **kwargs: object) -> Any:
        rotations = hashes[len(drawn) % len(hashes)].rotations
        assert tuple(shape) == tuple(rotations.shape)
        drawn.append(1)
        return rotations

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", ours)
        yield drawn


def token_batch(spec: ReformerSpec, batch: int, seq_len: int, seed: int, padded: bool) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, spec.vocab_size, (batch, seq_len), generator=generator)
    mask = torch.ones(batch, seq_len, dtype=torch.int64)
    if padded:
        for row, kept in enumerate(torch.randint(1, seq_len + 1, (batch,), generator=generator).tolist()):
            mask[row, kept:] = 0
            ids[row, kept:] = spec.pad_token_id
    return ids, mask


def worst_error(module: Any, oracle: Any, ids: Any, mask: Any) -> float:
    """The largest error of any output in rows of kept tokens, as a fraction of the RMS of that output."""
    with torch.no_grad(), same_rotations(module):
        theirs = [value for value in oracle(ids, attention_mask=mask).to_tuple() if isinstance(value, torch.Tensor)]
        ours = module(ids, mask)
    ours = ours if isinstance(ours, tuple) else (ours,)
    assert len(ours) == len(theirs) == len(module.spec.outputs)
    worst = 0.0
    for actual, expected, dims in zip(ours, theirs, module.spec.outputs.values(), strict=True):
        sizes = {"batch": ids.shape[0], "seq": ids.shape[1]}
        assert actual.shape == expected.shape == tuple(sizes.get(dim, dim) for dim in dims)
        assert actual.dtype == expected.dtype == torch.float32
        if "seq" in dims:
            actual, expected = actual[mask.bool()], expected[mask.bool()]
        assert torch.isfinite(actual).all()
        worst = max(worst, float((actual - expected).abs().max() / expected.square().mean().sqrt()))
    return worst


def error_of_config(
    config: Mapping[str, Any], shapes: list[tuple[int, int]], seed: int = 0, padded: bool = False, **options: Any
) -> float:
    """The worst error over (batch, seq_len); the first length resolves the automatic bucket count."""
    spec, _ = ReformerSpec.from_config(config, {"seq_len": shapes[0][1]} | options)
    oracle = oracle_from_config(config, seed)
    module = module_from_oracle(oracle, spec)
    errors = [
        worst_error(module, oracle, *token_batch(spec, batch, seq_len, seed, padded)) for batch, seq_len in shapes
    ]
    return max(errors)


def random_config(seed: int) -> tuple[dict[str, Any], list[tuple[int, int]], bool]:
    """A tiny model of any task and pattern, lengths to run, and whether the batches are padded."""
    draw = random.Random(seed)
    task, is_decoder = draw.choice(
        [
            ("ReformerModel", False),
            ("ReformerModel", True),
            ("ReformerModelWithLMHead", True),
            ("ReformerForMaskedLM", False),
            ("ReformerForSequenceClassification", False),
            ("ReformerForQuestionAnswering", False),
        ]
    )
    lsh_chunk, local_chunk = draw.choice([(4, 4), (8, 8), (8, 4), (4, 8), (16, 4), (6, 4), (4, 6)])
    first = draw.choice([4, 8])
    config = TINY | {
        "architectures": [task],
        "is_decoder": is_decoder,
        "hidden_size": 16,
        "num_attention_heads": draw.choice([1, 2, 3]),
        "attention_head_size": draw.choice([4, 8]),
        "hidden_act": draw.choice(["relu", "gelu", "gelu_new"]),
        "attn_layers": draw.choice([["lsh"], ["local"], ["lsh", "lsh"], ["local", "lsh"], ["lsh", "local", "lsh"]]),
        "lsh_attn_chunk_length": lsh_chunk,
        "local_attn_chunk_length": local_chunk,
        "lsh_num_chunks_before": draw.choice([1, 1, 2, 0]),
        "local_num_chunks_before": draw.choice([1, 1, 2, 0]),
        "lsh_num_chunks_after": 0 if is_decoder else draw.choice([0, 1]),
        "local_num_chunks_after": 0 if is_decoder else draw.choice([0, 1, 2]),
        "num_buckets": draw.choice([None, 2, 6, [2, 4], [4, 2, 2]]),
        "num_hashes": draw.choice([1, 2, 3, 4, 8]),
        "axial_pos_embds": draw.random() < 0.5,
        "axial_pos_shape": draw.choice([[16, 16], [8, 32], [4, 8, 8]]),
        "axial_pos_embds_dim": [first, 16 - first],
        "num_labels": 2,
    }
    if len(config["axial_pos_shape"]) == 3:
        config["axial_pos_embds_dim"] = [4, 4, 8]
    # one length beyond a chunk first, then any; lengths within one chunk are likely
    shapes = [(draw.choice([1, 4]), draw.randint(17, 100))]
    shapes += [(draw.choice([1, 2, 4]), draw.choice([draw.randint(1, 17), draw.randint(17, 100)])) for _ in range(3)]
    return config, shapes, draw.random() < 0.5


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("seed", range(30))
def test_random_models_equal_transformers(seed: int) -> None:
    config, shapes, padded = random_config(seed)
    assert error_of_config(config, shapes, seed, padded) <= AGAINST_TRANSFORMERS


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("task", ReformerSpec.TASKS)
def test_every_task_equals_transformers(task: str, padded: bool) -> None:
    config = TINY | {"architectures": [ReformerSpec.TASKS[task]], "is_decoder": task == "lm-head"}
    assert error_of_config(config, [(1, 37), (4, 50), (4, 99)], padded=padded) <= AGAINST_TRANSFORMERS


# lsh and local chunk lengths: equal, one dividing the other, and neither, where transformers runs plain attention in
# one layer and chunks in the other
@pytest.mark.requires("transformers")
@pytest.mark.parametrize("chunks", [(8, 8), (16, 4), (4, 16), (6, 4)])
@pytest.mark.parametrize("kind", [DECODER, {"lsh_num_chunks_after": 1, "local_num_chunks_after": 1}])
def test_one_module_equals_transformers_at_every_length(chunks: tuple[int, int], kind: dict[str, Any]) -> None:
    config = TINY | kind | {"lsh_attn_chunk_length": chunks[0], "local_attn_chunk_length": chunks[1]}
    lengths = [(2, 40), *((2, seq_len) for seq_len in range(1, 26))]
    assert error_of_config(config, lengths) <= AGAINST_TRANSFORMERS
    assert error_of_config(config, lengths, padded=True) <= AGAINST_TRANSFORMERS


# The published sizes and patterns, with fewer and narrower layers.
PUBLISHED: dict[str, dict[str, Any]] = {
    "crime-and-punishment": DECODER
    | {
        "attn_layers": ["local", "lsh", "local"],
        "lsh_attn_chunk_length": 64,
        "local_attn_chunk_length": 64,
        "num_buckets": [64, 128],
        "num_hashes": 1,
        "axial_pos_shape": [512, 1024],
        "axial_pos_embds_dim": [4, 12],
        "max_position_embeddings": 524288,
        "vocab_size": 320,
    },
    "enwik8": DECODER
    | {
        "attn_layers": ["local", "local", "lsh", "local"],
        "lsh_attn_chunk_length": 256,
        "local_attn_chunk_length": 128,
        "num_buckets": 512,
        "num_hashes": 4,
        "axial_pos_shape": [128, 512],
        "axial_pos_embds_dim": [4, 12],
        "max_position_embeddings": 65536,
        "vocab_size": 258,
    },
}


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_geometry_equals_transformers(name: str) -> None:
    assert error_of_config(TINY | PUBLISHED[name], [(1, 1100), (2, 256), (1, 50)]) <= AGAINST_TRANSFORMERS


@pytest.mark.requires("transformers")
def test_masks_with_holes_equal_transformers() -> None:
    for kind in (DECODER, {"lsh_num_chunks_after": 1}):
        config = TINY | kind
        spec, _ = ReformerSpec.from_config(config, {})
        oracle = oracle_from_config(config, 0)
        module = module_from_oracle(oracle, spec)
        for seq_len in (5, 8, 30, 64):
            ids, _ = token_batch(spec, 3, seq_len, 0, padded=False)
            mask = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seq_len)) < 0.6).long()
            mask[2] = 0
            assert worst_error(module, oracle, ids, mask) <= AGAINST_TRANSFORMERS
            assert torch.isfinite(module(ids, mask)).all()


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("seq_len", [20, 40, 100, 200])
def test_a_missing_bucket_count_is_resolved_as_in_transformers(seq_len: int) -> None:
    config = TINY | LEARNED | {"num_buckets": None, "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 12}
    spec, notes = ReformerSpec.from_config(config, {"seq_len": seq_len})
    oracle = oracle_from_config(config, 0)
    ids, mask = token_batch(spec, 1, seq_len, 0, padded=False)
    oracle(ids, attention_mask=mask)
    theirs = oracle.config.num_buckets
    assert spec.bucket_factors == ((theirs,) if isinstance(theirs, int) else tuple(theirs))
    assert any(f"resolved from seq_len {seq_len} to {list(spec.bucket_factors)}" in note for note in notes)
    # frozen: the length may change, the hash may not
    assert dataclasses.replace(spec, seq_len=9).bucket_factors == spec.bucket_factors


@pytest.mark.requires("transformers")
def test_a_hash_seed_in_the_configuration_gives_the_rotations_of_transformers() -> None:
    config = TINY | {"hash_seed": 5, "attn_layers": ["lsh", "local", "lsh"]}
    spec, notes = ReformerSpec.from_config(config, {"hash_seed": 1})
    oracle = oracle_from_config(config, 0)
    module = module_from_oracle(oracle, spec)
    ids, mask = token_batch(spec, 2, 61, 0, padded=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        expected = oracle(ids, attention_mask=mask).last_hidden_state
        actual = module(ids, mask)
    assert float((actual - expected).abs().max()) <= AGAINST_TRANSFORMERS
    assert any("hash_seed is 5" in note for note in notes)


NO_LSH = dict.fromkeys(("lsh_attn_chunk_length", "lsh_num_chunks_before", "lsh_num_chunks_after", "num_buckets"))


@pytest.mark.requires("transformers")
@pytest.mark.parametrize(
    "change",
    [
        {"attn_layers": ["local", "local"], **NO_LSH},
        {"attn_layers": ["lsh"], "local_attn_chunk_length": None, "local_num_chunks_before": None},
        # the number of layers wins over the list; chunks of kinds that are only in the list still count for padding
        {"attn_layers": ["local", "lsh", "local"], "num_hidden_layers": 1, "lsh_attn_chunk_length": 16},
        {"attn_layers": ["local", "lsh", "local"], "num_hidden_layers": 2},
        {"attn_layers": ["lsh"], "num_hidden_layers": 3},
    ],
)
def test_configurations_that_look_inconsistent_equal_transformers(change: dict[str, Any]) -> None:
    assert error_of_config(TINY | change, [(2, 40), (1, 61), (3, 7)]) <= AGAINST_TRANSFORMERS


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
    ids, mask = token_batch(spec, 2, 20, 0, padded=False)
    with torch.no_grad():
        assert torch.equal(module(ids, mask), reference(ids, mask))
    with pytest.raises(SpecError, match="21 tokens; expected at most 20"):
        module(torch.zeros(1, 21, dtype=torch.int64), torch.ones(1, 21, dtype=torch.int64))


@torch.no_grad()
def test_the_safe_constants_differ_only_where_a_token_sees_itself_alone() -> None:
    config = TINY | DECODER | {"attn_layers": ["lsh"]}
    published = Reformer(ReformerSpec.from_config(config, {})[0]).eval()
    safe = Reformer(ReformerSpec.from_config(config, {"mask_constants": "safe"})[0]).eval()
    safe.load_state_dict(published.state_dict())
    ids, mask = token_batch(published.spec, 1, 60, 0, padded=False)
    error = (safe(ids, mask) - published(ids, mask)).abs().amax(dim=-1)[0]
    assert 1e-5 < error[0] < 1e-2
    assert error[30:].max() <= AGAINST_TRANSFORMERS


def test_the_names_cover_every_weight_and_only_weights() -> None:
    for task, architecture in ReformerSpec.TASKS.items():
        for positions in ({}, LEARNED):
            config = TINY | positions | {"architectures": [architecture], "is_decoder": task == "lm-head"}
            spec, _ = ReformerSpec.from_config(config, {})
            assert spec.task == task
            names = [name for name, _ in Reformer(spec).named_parameters()]
            assert sorted(weight_names(spec)) == sorted(names)


@pytest.mark.requires("transformers")
def test_checkpoints_load_with_and_without_prefix_and_with_the_heads_of_other_tasks() -> None:
    config = TINY | DECODER
    weights = oracle_from_config(config, 0).state_dict()
    spec, _ = ReformerSpec.from_config(config, {})
    base, _ = ReformerSpec.from_config(config, {"task": "base"})
    old = dict(weights) | {"reformer.encoder.layers.1.attention.self_attention.mask_value_float16": torch.zeros(())}
    old["lm_head.decoder.bias"] = old.pop("lm_head.bias")
    bare = {name.removeprefix("reformer."): value for name, value in weights.items() if "lm_head" not in name}
    ids, mask = token_batch(spec, 1, 30, 0, padded=False)
    outputs = []
    for target, found in ((spec, weights), (spec, old), (base, weights), (base, bare)):
        module = Reformer(target).eval()
        fill_module(module, found, weight_names(target), IGNORED, Path("checkpoint"))
        with torch.no_grad():
            outputs.append(module(ids, mask))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_torch_export_takes_any_batch_and_length() -> None:
    spec, _ = ReformerSpec.from_config(TINY | DECODER, {})
    module = Reformer(spec).eval()
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(module, token_batch(spec, 2, 32, 0, True), dynamic_shapes=(free, free))
    for batch, seq_len in ((1, 9), (3, 63), (2, 256)):
        ids, mask = token_batch(spec, batch, seq_len, 1, padded=True)
        with torch.no_grad():
            assert torch.equal(program.module()(ids, mask), module(ids, mask))


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
@torch.no_grad()
def test_the_onnx_graph_computes_the_module_at_every_length(tmp_path: Path) -> None:
    import onnxruntime

    from effexport.base.spec import BuildSpec
    from effexport.export.onnx_from_module import onnx_from_module

    spec, _ = ReformerSpec.from_config(TINY | DECODER | {"local_attn_chunk_length": 4}, {})
    module = Reformer(spec).eval()
    onnx_from_module(module, BuildSpec(model=spec), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for batch, seq_len in ((1, 1), (3, 4), (2, 7), (1, 8), (2, 9), (3, 63), (1, 256)):
        ids, mask = token_batch(spec, batch, seq_len, 1, padded=True)
        (actual,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        expected, kept = module(ids, mask), mask.bool()
        assert actual.shape == expected.shape
        error = (torch.from_numpy(actual)[kept] - expected[kept]).abs().max() / expected.square().mean().sqrt()
        assert float(error) <= AGAINST_TRANSFORMERS


@pytest.mark.requires("transformers")
def test_defaults_are_those_of_the_configuration_class() -> None:
    import transformers

    theirs = {name: value for name, value in transformers.ReformerConfig().to_dict().items() if name != "architectures"}
    spec, _ = ReformerSpec.from_config({"model_type": "reformer"}, {})
    assert spec == ReformerSpec.from_config(theirs, {})[0]
    assert spec.task == "base"
    assert spec.seq_len == spec.max_seq_len == 4096


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
        (PUBLISHED["enwik8"], {}, "seq_len is 4096, the default limit", "positions for 65536"),
        (PUBLISHED["enwik8"], {"seq_len": 8192}, "seq_len is", ""),
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
    spec, _ = ReformerSpec.from_config(TINY | PUBLISHED["crime-and-punishment"], {})
    assert (spec.seq_len, spec.max_seq_len) == (ReformerSpec.DEFAULT_SEQ_LEN_LIMIT, 524288)


def test_labels_are_counted_by_their_names() -> None:
    config = TINY | {"architectures": ["ReformerForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    assert ReformerSpec.from_config(config, {})[0].outputs == {"logits": ("batch", 3)}
    assert ReformerSpec.from_config(config, {"num_labels": 5})[0].outputs == {"logits": ("batch", 5)}
