"""Models of transformers and ours with the same weights: one table of published families, a row each."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers_models import oracle_from_config, same_rotations

from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS
from effexport.models.checkpoints.spec import FAMILIES, PublishedSpec
from effexport.models.checkpoints.weights import fill_module
from effexport.models.contract import GLOBAL_MASK, load
from effexport.models.layers import fused_operators

CHOICES = 3
# Largest error over RMS: float32 sums in another order, which attention and the pseudo-inverse amplify. Measured up to
# 6.4e-6 over 150 random configurations; the smallest planted fault, another form of gelu, makes 7e-4.
LIMIT = 2e-5
# The same in float64, for configurations that amplify more, such as heads of two channels. Seen were up to 1e-13.
EXACT = 1e-10
BERT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
LABELS = {"id2label": {"0": "a", "1": "b", "2": "c"}}

# (model of transformers, our module, its inputs, padding of the sequence included) → the outputs by name
Answers = Callable[[Any, Any, Mapping[str, Tensor]], Mapping[str, Tensor]]


def plain_answers(original: Any, module: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    answers: Mapping[str, Tensor] = original(**inputs)
    return answers


def cropped_answers(original: Any, spec: Any, inputs: Mapping[str, Tensor], extra: int) -> Mapping[str, Tensor]:
    """Those on sequences with so many more tokens of padding."""
    fills, seq_len = {"input_ids": spec.pad_token_id}, inputs["input_ids"].shape[-1]
    padded = {name: nn.functional.pad(x, (0, extra), value=fills.get(name, 0)) for name, x in inputs.items()}
    answers = original(**padded)
    return {name: answers[name][:, :seq_len] if "seq" in dims else answers[name] for name, dims in spec.outputs.items()}


def nystromformer_answers(original: Any, module: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Of the length of the landmarks, which transformers needs."""
    spec = module.spec
    extra = 0 if spec.is_plain_softmax else spec.segment_means_seq_len - inputs["input_ids"].shape[-1]
    return cropped_answers(original, spec, inputs, extra)


def longformer_answers(original: Any, module: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A row without global tokens has those of its task's rule. transformers pads to the widest window, and fails at
    lengths that windows of other sizes do not divide, so that such sequences are padded here."""
    from effexport.models.checkpoints.longformer import with_global_tokens

    spec = module.spec
    step = int(np.lcm.reduce(spec.windows)) if len(set(spec.windows)) > 1 else 1
    return cropped_answers(original, spec, with_global_tokens(spec, inputs), -inputs["input_ids"].shape[-1] % step)


def led_answers(original: Any, module: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if module.spec.task == "seq2seq-lm":
        return plain_answers(original, module, inputs)
    encoder = original.get_submodule("encoder" if hasattr(original, "encoder") else "led.encoder")
    return {"encoder_last_hidden_state": encoder(**inputs).last_hidden_state}


def reformer_answers(original: Any, module: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    with same_rotations(module):
        return plain_answers(original, module, inputs)


def bert_fields(draw: random.Random, channels: tuple[int, ...] = (2, 4, 8, 10)) -> dict[str, Any]:
    """Random fields that all BERT-like models have."""
    heads = draw.choice([1, 2, 3])
    return {
        "vocab_size": draw.randint(10, 60),
        "hidden_size": heads * draw.choice(channels),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "intermediate_size": draw.randint(5, 40),
        "hidden_act": draw.choice(list(HIDDEN_ACTS)),
        "layer_norm_eps": draw.choice([1e-5, 1e-12, 1e-3]),
        "tie_word_embeddings": draw.choice([True, False]),
        "pad_token_id": draw.choice([0, 1, 5]),
        "chunk_size_feed_forward": draw.choice([0, 1]),
    }


def random_big_bird(draw: random.Random) -> dict[str, Any]:
    return bert_fields(draw, (2, 5, 16)) | {
        "max_position_embeddings": draw.choice([100, 320]),
        "type_vocab_size": draw.randint(2, 3),
        "attention_type": draw.choice(["block_sparse", "block_sparse", "original_full"]),
        "use_bias": draw.choice([True, False]),
        "rescale_embeddings": draw.choice([True, False]),
        "block_size": draw.choice([1, 2, 4, 5, 10, 16]),
        "num_random_blocks": draw.randint(1, 3),
    }


def random_longformer(draw: random.Random) -> dict[str, Any]:
    fields, one = bert_fields(draw), draw.choice([4, 6, 8, 16, 64])
    return fields | {
        "max_position_embeddings": 130 + draw.randint(0, 5),
        "type_vocab_size": draw.randint(1, 3),
        "attention_window": draw.choice(
            [one, [draw.choice([4, 6, 12]) for _ in range(fields["num_hidden_layers"])]],
        ),
        "sep_token_id": draw.choice([2, 3]),
    }


def random_led(draw: random.Random) -> dict[str, Any]:
    """Heads of the decoder have 12, 6 or 4 channels."""
    heads, layers = draw.choice([1, 2, 3, 4]), draw.randint(1, 3)
    return {
        "vocab_size": draw.randint(20, 60),
        "d_model": 12 * heads,
        "encoder_layers": layers,
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": draw.randint(5, 40),
        "activation_function": draw.choice(list(HIDDEN_ACTS)),
        "attention_window": draw.choice([4, 10, 16, [draw.choice([4, 6, 12])] * layers]),
        "decoder_layers": draw.randint(1, 3),
        "decoder_attention_heads": heads * draw.choice([1, 2, 3]),
        "decoder_ffn_dim": draw.randint(5, 40),
        "max_decoder_position_embeddings": draw.choice([40, 200]),
    }


def random_modernbert(draw: random.Random) -> dict[str, Any]:
    flags = ("norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias")
    bert = bert_fields(draw, (2, 4, 10, 16))
    return {
        **{name: value for name, value in bert.items() if name not in ("hidden_act", "layer_norm_eps")},
        "num_hidden_layers": draw.randint(1, 5),
        "hidden_activation": bert["hidden_act"],
        "classifier_activation": draw.choice(list(HIDDEN_ACTS)),
        "norm_eps": bert["layer_norm_eps"],
        "local_attention": draw.choice([0, 1, 2, 7, 30, 128]),
        "global_attn_every_n_layers": draw.choice([1, 2, 3, 9]),
        "global_rope_theta": draw.choice([160000.0, 10000, 500.0]),
        "local_rope_theta": draw.choice([10000.0, 100.0, None]),
        "classifier_pooling": draw.choice(["cls", "mean"]),
        **{name: draw.choice([True, False]) for name in flags},
    }


def random_nystromformer(draw: random.Random) -> dict[str, Any]:
    landmarks = draw.choice([1, 2, 4, 8])
    segment = landmarks * draw.choice([1, 2, 3, 5])
    return bert_fields(draw) | {
        "max_position_embeddings": max(2, segment + draw.randint(0, 5)),  # one token is refused
        "type_vocab_size": draw.randint(1, 3),
        "num_landmarks": landmarks,
        "segment_means_seq_len": segment,
        "conv_kernel_size": draw.choice([None, 1, 3, 9, 33]),
    }


def random_reformer(draw: random.Random) -> dict[str, Any]:
    """Also a base model that is causal."""
    lsh_chunk, local_chunk = draw.choice([(4, 4), (8, 8), (8, 4), (4, 8), (16, 4), (6, 4), (4, 6)])
    first, shape = draw.choice([4, 8]), draw.choice([[16, 16], [8, 32], [4, 8, 8]])
    is_decoder = draw.random() < 0.3
    return {
        "is_decoder": is_decoder,
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
        "num_buckets": draw.choice([2, 6, [2, 4], [4, 2, 2]]),
        "num_hashes": draw.choice([1, 2, 3, 4, 8]),
        "axial_pos_embds": draw.random() < 0.5,
        "axial_pos_shape": shape,
        "axial_pos_embds_dim": [4, 4, 8] if len(shape) == 3 else [first, 16 - first],
    }


@dataclass(frozen=True, kw_only=True)
class Published:
    """A family of published checkpoints.

    tiny: fields of a small config.json. lengths: those at which it is compared. draw: random fields. forms: fields of
    other forms to compare, by name, and task: theirs. base: the name of the model without a head in one with a head; ""
    if there is none. dtype and exact: what to compare in, and the largest error then. padding_too: whether what padding
    becomes is the same, too. first_kept: whether heads need the first token, which may be hidden and see no key.
    trained: a task whose gradients reach all weights. decoder: the weights of the decoder of words; "" if they are not
    those of the words. old: names that old versions saved. of_task: fields that a task needs.
    """

    tiny: Mapping[str, Any]
    lengths: tuple[int, ...]
    draw: Callable[[random.Random], dict[str, Any]]
    forms: Mapping[str, Mapping[str, Any]]
    answers: Answers = plain_answers
    base: str
    dtype: torch.dtype = torch.float64
    exact: float = EXACT
    padding_too: bool = False
    first_kept: bool = False
    task: str = "base"
    trained: str = "token-classification"
    decoder: str = ""
    old: tuple[str, ...] = ()
    of_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


SOFTMAX = {"num_landmarks": 4, "segment_means_seq_len": 4}
SIDES = {"lsh_num_chunks_after": 1, "local_num_chunks_after": 1}
CHUNKS = [(8, 8), (16, 4), (4, 16), (6, 4)]
DECODER = {"architectures": ["ReformerModelWithLMHead"], "is_decoder": True}
# The published sizes and patterns of Reformers, with fewer and narrower layers.
GEOMETRIES: dict[str, dict[str, Any]] = {
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

PUBLISHED: dict[str, Published] = {
    "nystromformer": Published(
        tiny={
            **BERT,
            "vocab_size": 41,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "max_position_embeddings": 20,
            "num_landmarks": 4,
            "segment_means_seq_len": 16,
            "conv_kernel_size": 5,
        },
        lengths=(1, 7, 15, 16),
        draw=random_nystromformer,
        forms={"landmarks": {}, "softmax": SOFTMAX},
        answers=nystromformer_answers,
        padding_too=True,
        base="nystromformer",
        decoder="cls.predictions.decoder.weight",
        old=("embeddings.position_ids", "embeddings.token_type_ids"),
    ),
    # of these sizes, 36 tokens are the most with full attention
    "big_bird": Published(
        tiny={
            **BERT,
            "vocab_size": 41,
            "hidden_size": 24,
            "num_attention_heads": 2,
            "max_position_embeddings": 1024,
            "block_size": 4,
            "num_random_blocks": 2,
            "sep_token_id": 5,
        },
        lengths=(1, 4, 19, 36, 37, 40, 62, 203, 1001),
        draw=random_big_bird,
        forms={"block_sparse": {}, "original_full": {"attention_type": "original_full"}},
        padding_too=True,
        base="bert",
        decoder="cls.predictions.decoder.weight",
    ),
    # below the window and below its half, no multiple of it, and several times it
    "longformer": Published(
        tiny={**BERT, "vocab_size": 99, "max_position_embeddings": 202, "attention_window": 4},
        lengths=(1, 2, 5, 16, 63, 200),
        draw=random_longformer,
        forms={"": {}},
        answers=longformer_answers,
        padding_too=True,
        exact=LIMIT,  # transformers computes the softmax in float32
        base="longformer",
        decoder="lm_head.decoder.weight",
        old=("embeddings.position_ids",),
    ),
    "led": Published(
        tiny={
            "vocab_size": 99,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
            "max_encoder_position_embeddings": 160,
            "max_decoder_position_embeddings": 160,
            "attention_window": 4,
        },
        lengths=(1, 2, 5, 16, 63, 160),
        draw=random_led,
        forms={"tied": {}, "not tied": {"tie_word_embeddings": False}},
        answers=led_answers,
        padding_too=True,
        dtype=torch.float32,  # transformers fails in float64
        exact=LIMIT,
        base="",
        task="seq2seq-lm",
        trained="seq2seq-lm",
    ),
    # one token, less than a window, as much, no multiples of it, and long
    "modernbert": Published(
        tiny={
            **BERT,
            "vocab_size": 41,
            "hidden_size": 24,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "max_position_embeddings": 1100,
            "local_attention": 16,
            "pad_token_id": 3,
        },
        lengths=(1, 5, 8, 17, 100, 259, 1003),
        draw=random_modernbert,
        forms={"": {}, "eager": {"attn_implementation": "eager"}},
        base="model",
        first_kept=True,
        decoder="decoder.weight",
    ),
    # chunk lengths of both kinds: equal, one dividing the other, and neither, where transformers runs plain attention
    # in one layer and chunks in the other
    "reformer": Published(
        tiny={
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
        },
        lengths=(40, *range(1, 26)),
        draw=random_reformer,
        forms={
            f"chunks of {lsh} and {local}{', causal' if kind is DECODER else ''}": kind
            | {"lsh_attn_chunk_length": lsh, "local_attn_chunk_length": local}
            for kind in (DECODER, SIDES)
            for lsh, local in CHUNKS
        },
        answers=reformer_answers,
        base="reformer",
        trained="lm-head",
        old=("encoder.layers.1.attention.self_attention.mask_value_float16",),
        of_task={"lm-head": DECODER},
    ),
}
HEADS = [(family, task) for family in PUBLISHED for task in load(FAMILIES[family].spec).TASKS]


def config_of(family: str, task: str = "", **fields: Any) -> dict[str, Any]:
    """A config.json; fields given as "absent" are left out. task: that without a head unless given."""
    row, tasks = PUBLISHED[family], load(FAMILIES[family].spec).TASKS
    task = task or next(iter(tasks))
    config = {"model_type": family, "architectures": [tasks[task]], **row.tiny, **row.of_task.get(task, {}), **fields}
    return {name: value for name, value in config.items() if value != "absent"}


def random_config(family: str, draw: random.Random) -> dict[str, Any]:
    """A tiny model with a random head."""
    tasks = load(FAMILIES[family].spec).TASKS
    task, fields, labels = draw.choice(list(tasks)), PUBLISHED[family].draw(draw), draw.randint(1, 4)
    if family == "reformer" and task != "base":
        decoder = {"lsh_num_chunks_after": 0, "local_num_chunks_after": 0} if task == "lm-head" else {}
        fields |= decoder | {"is_decoder": task == "lm-head"}
    labels = 2 if task == "question-answering" else labels
    return config_of(family, task, **fields, id2label={str(i): f"L{i}" for i in range(labels)})


def lengths_of(spec: PublishedSpec, draw: random.Random) -> tuple[int, ...]:
    """Random ones, the first of them long, and nearly the most tokens that a small model takes."""
    # transformers needs positions for its padding, too
    step, room = int(getattr(spec, "block_size", 1) or 1), 24 if spec.max_seq_len > 100 else 0
    longest = min(spec.max_seq_len - room, 320) // step * step
    return (draw.randint(longest // 2 + 1, longest), draw.randint(1, min(20, longest)), longest)


def spec_from_config(config: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> PublishedSpec:
    spec: PublishedSpec = load(FAMILIES[config["model_type"]].spec).from_config(config, options or {})[0]
    return spec


def spec_of(family: str, task: str = "", options: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    return spec_from_config(config_of(family, task, **fields), options)


def notes_of(family: str, task: str = "", options: Mapping[str, Any] | None = None, **fields: Any) -> str:
    spec_class = load(FAMILIES[family].spec)
    return "\n".join(spec_class.from_config(config_of(family, task, **fields), options or {})[1])


def module_from_weights(spec: PublishedSpec, weights: Mapping[str, Tensor]) -> Any:
    """Ours with the weights of a checkpoint, each of which must have a place."""
    family = FAMILIES[spec.family]
    module, names = load(family.model)(spec).eval(), family.module.weight_names(spec)
    assert names.keys() == {name for name in module.state_dict() if not name.endswith("rotations")}
    fill_module(module, weights, names, family.ignored(spec.task), Path("checkpoint"))
    return module


def both_models(config: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """That of transformers and ours, with the same weights."""
    original = oracle_from_config(config)
    return original, module_from_weights(spec_from_config(config, options), original.state_dict())


def token_inputs(
    spec: PublishedSpec, batch: int, seq_len: int, seed: int = 0, *, padded: bool = True, first_kept: bool = False
) -> dict[str, Tensor]:
    """Random inputs: of four sequences one is whole, and the others have padding of a random length at the end, at the
    beginning (or behind the first token), and holes. Another tenth of the tokens of each is global, padding too."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"batch": batch, "choices": CHOICES, "seq": seq_len, "target": 1 + seq_len % 40}
    mask = torch.ones([sizes[str(dim)] for dim in spec.inputs["attention_mask"]], dtype=torch.int64)
    for row, keep in enumerate(mask.view(-1, seq_len) if padded else ()):
        length = int(torch.randint(1, seq_len + 1, (), generator=generator))
        if row % 4 == 1:
            keep[length:] = 0
        elif row % 4 == 2:
            keep[: seq_len - length] = 0
        elif row % 4 == 3:
            keep[torch.rand(seq_len, generator=generator) < 0.3] = 0
            keep[length - 1] = 1
        keep[0] |= int(first_kept)
    inputs = {}
    for name, dims in spec.inputs.items():
        shape = [sizes[str(dim)] for dim in dims]
        if name == GLOBAL_MASK:
            inputs[name] = (torch.rand(shape, generator=generator) < 0.1).to(torch.int64)
        elif name != "attention_mask":
            inputs[name] = torch.randint(0, spec.input_limits[name], shape, generator=generator)
        else:
            inputs[name] = mask
    inputs["input_ids"] = torch.where(mask == 1, inputs["input_ids"], spec.pad_token_id)
    return inputs


def error_of(spec: PublishedSpec, inputs: Mapping[str, Tensor], actual: Any, expected: Mapping[str, Tensor]) -> float:
    """The largest error over the RMS of each output, of the tokens that count. actual: the result of our module."""
    outputs = actual if isinstance(actual, tuple) else (actual,)
    counts = (inputs["attention_mask"] == 1) | PUBLISHED[spec.family].padding_too
    sizes = {str(dim): size for name, x in inputs.items() for dim, size in zip(spec.inputs[name], x.shape, strict=True)}
    worst = 0.0
    for (name, dims), output in zip(spec.outputs.items(), outputs, strict=True):
        wanted = expected[name]
        assert output.shape == wanted.shape == tuple(sizes.get(str(dim), dim) for dim in dims)
        assert torch.isfinite(output).all()
        if "seq" in dims:
            output, wanted = output[counts], wanted[counts]
        worst = max(worst, float((output - wanted).abs().max() / wanted.square().mean().sqrt()))
    return worst


@torch.no_grad()
def error_against_original(
    config: Mapping[str, Any],
    lengths: tuple[int, ...],
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    options: Mapping[str, Any] | None = None,
    first_kept: bool = False,
    **of_transformers: Any,
) -> float:
    """The largest error of our layers' plain formulas and of their operators, at some lengths, padded and not.

    The first length decides what follows from one.

    The original is made anew for each length: some change when they see one.
    """
    options = {"seq_len": lengths[0], **(options or {})}
    spec = spec_from_config(config, options)
    make = functools.partial(oracle_from_config, {**config, **of_transformers}, seed)
    module = module_from_weights(spec, make().state_dict()).to(dtype)
    worst = 0.0
    for seq_len in lengths:
        original = make().to(dtype)
        for padded in (False, True):
            batch = 4 if padded else 1
            inputs = token_inputs(spec, batch, seq_len, seed + seq_len, padded=padded, first_kept=first_kept)
            expected = PUBLISHED[spec.family].answers(original, module, inputs)
            for fused in (False, True):
                with fused_operators(module, fused) if fused else nullcontext():
                    worst = max(worst, error_of(spec, inputs, module(*inputs.values()), expected))
    return worst
