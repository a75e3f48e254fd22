"""Specs: every message about a value that cannot work, and the way through JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import pytest

from effexport.models.attention_spec import AttentionSpec, attention_from_dict, attention_spec, field_names
from effexport.models.encoder.spec import EncoderSpec, encoder_from_dict
from effexport.models.validation import SpecError, nearest_divisors, nearest_multiples
from effexport.models.variants import ATTENTION_SPECS
from effexport.models.variants.aft_conv import AFTConvSpec
from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.aft_local import AFTLocalSpec
from effexport.models.variants.aft_simple import AFTSimpleSpec
from effexport.models.variants.contract import variant_contract
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.local import LocalSpec
from effexport.models.variants.lsh import LSHSpec, automatic_num_buckets
from effexport.models.variants.nystrom import NystromSpec
from effexport.models.variants.softmax import SoftmaxSpec

# Values that differ from every default.
CHANGED = {variant: variant_contract(variant).changed for variant in ATTENTION_SPECS}


def test_a_changed_spec_is_one_of_the_variant() -> None:
    assert all(type(spec) is ATTENTION_SPECS[name] for name, spec in CHANGED.items())


@pytest.mark.parametrize("variant", CHANGED)
def test_attention_specs_survive_json(variant: str) -> None:
    for spec in (CHANGED[variant], ATTENTION_SPECS[variant]()):
        values = json.loads(json.dumps(spec.to_dict()))
        assert values["variant"] == variant
        assert list(values) == ["variant", *field_names(type(spec))]
        again = attention_from_dict(values)
        assert again == spec
        assert type(again) is type(spec)
        assert hash(again) == hash(spec)


@pytest.mark.parametrize("variant", CHANGED)
def test_encoder_specs_survive_json(variant: str) -> None:
    changed = EncoderSpec(
        attention=CHANGED[variant],
        layers=3,
        vocab_size=300,
        pad_token_id=299,
        ff_dim=77,
        activation="relu",
        block="reversible",
        reversible_output="concat",
        ff_chunk_length=5,
        layer_norm_eps=1e-12,
        lm_head=True,
    )
    for spec in (changed, EncoderSpec(attention=CHANGED[variant])):
        again = encoder_from_dict(json.loads(json.dumps(spec.to_dict())))
        assert again == spec
        assert type(again.attention) is ATTENTION_SPECS[variant]


@pytest.mark.parametrize("variant", CHANGED)
def test_specs_are_frozen_and_named(variant: str) -> None:
    spec = ATTENTION_SPECS[variant]()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.dim = 3  # type: ignore[misc]
    assert spec.variant == variant
    with pytest.raises(TypeError):
        ATTENTION_SPECS[variant](64)  # type: ignore[misc]


def refused(text: str, spec_class: type[AttentionSpec] | type[EncoderSpec], **fields: object) -> None:
    with pytest.raises(SpecError) as caught:
        spec_class(**fields)
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["dim", "heads", "seq_len"])
@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("variant", CHANGED)
def test_sizes_must_be_positive(variant: str, name: str, value: int) -> None:
    refused(
        f"{name} is {value}; expected a positive integer",
        ATTENTION_SPECS[variant],
        **{name: value},
    )


# (class, fields, what the message must say)
REFUSED: list[tuple[type[AttentionSpec], dict[str, object], str]] = [
    (SoftmaxSpec, {"dim": 100, "heads": 3}, "dim 100 cannot be split into 3 heads"),
    (SoftmaxSpec, {"dim": 100, "heads": 3}, "use dim 99 or 102, heads 2 or 4, or give head_dim"),
    (LinearSpec, {"dim": 2, "heads": 4}, "use dim 4, heads 2, or give head_dim"),
    (SoftmaxSpec, {"head_dim": 0}, "head_dim is 0; expected at least 1"),
    (SoftmaxSpec, {"conv_kernel_size": 4}, "conv_kernel_size is 4; the filter is centred"),
    (SoftmaxSpec, {"conv_kernel_size": 4}, "the nearest that work: 3 or 5"),
    (SoftmaxSpec, {"causal": True, "conv_kernel_size": 3}, "a causal layer cannot have a convolution"),
    (NystromSpec, {"conv_kernel_size": 2}, "the nearest that work: 1 or 3"),
    (NystromSpec, {"conv_kernel_size": -1}, "the nearest that work: 1"),
    (LinearSpec, {"eps": -1.0}, "eps is -1.0; expected a number >= 0"),
    (LinearSpec, {"chunk_length": 0}, "chunk_length is 0; expected at least 1"),
    (LinearSpec, {"feature_map": "gelu"}, "feature_map is 'gelu'; expected one of elu, relu, exp, softmax"),
    (LinearSpec, {"min_denominator": -1.0}, "min_denominator is -1.0; expected a number >= 0"),
    (LinearSpec, {"min_denominator": 0.1, "normalizer": False}, "without a normalizer there is no denominator; leave"),
    (LinearSpec, {"blindspot": 0, "causal": True}, "blindspot is 0; expected at least 1"),
    (LinearSpec, {"blindspot": 8}, "blindspot is 8, but a layer that is not causal sees every key; leave"),
    (
        LinearSpec,
        {"blindspot": 24, "causal": True},
        "chunk_length 64 is not a multiple of blindspot 24; use chunk_length 48 or 72",
    ),
    (
        NystromSpec,
        {"causal": True},
        "nystrom attention has no causal form, because its landmarks average over the whole sequence; use",
    ),
    (NystromSpec, {"causal": True}, "use one of: softmax, linear, lsh, aft-full"),
    (NystromSpec, {"num_landmarks": 0}, "num_landmarks is 0; expected at least 1"),
    (NystromSpec, {"pinv_iterations": 0}, "pinv_iterations is 0; expected at least 1"),
    (NystromSpec, {"mask_landmarks": False}, "give the fixed length it was trained with as segment_means_seq_len"),
    (
        NystromSpec,
        {"segment_means_seq_len": 100, "seq_len": 100},
        "segment_means_seq_len 100 is not a multiple of num_landmarks 64; the nearest that work: 64 or 128",
    ),
    (NystromSpec, {"segment_means_seq_len": 32}, "the nearest that work: 64"),
    (NystromSpec, {"segment_means_seq_len": 0}, "the nearest that work: 64"),
    (
        NystromSpec,
        {"segment_means_seq_len": 512},
        "seq_len is 1024, but landmarks are tied to segment_means_seq_len 512; use seq_len 512",
    ),
    (
        NystromSpec,
        {"convention": "xformers", "mask_landmarks": False},
        "convention xformers has its own rules for padding and for lengths; leave mask_landmarks and",
    ),
    (
        NystromSpec,
        {"convention": "authors", "segment_means_seq_len": 1024},
        "convention authors has its own rules for padding and for lengths",
    ),
    (
        NystromSpec,
        {"convention": "paper"},
        "convention is 'paper'; expected one of own, nystrom-attention, xformers, authors",
    ),
    (LSHSpec, {"chunk_length": 0}, "chunk_length is 0; expected at least 1"),
    (LocalSpec, {"chunk_length": -1}, "chunk_length is -1; expected at least 1"),
    (LSHSpec, {"num_chunks_before": -1}, "num_chunks_before is -1; expected 0 or more"),
    (LocalSpec, {"num_chunks_after": -1}, "num_chunks_after is -1; expected 0 or more"),
    (LSHSpec, {"num_hashes": 0}, "num_hashes is 0; expected at least 1"),
    (LSHSpec, {"hash_seed": -1}, "hash_seed is -1; expected 0 to 2^63 - 1"),
    (LSHSpec, {"num_buckets": 7}, "num_buckets is 7; each count must be even"),
    (LSHSpec, {"num_buckets": 7}, "the nearest that work: 6 or 8"),
    (LSHSpec, {"num_buckets": 0}, "the nearest that work: 2"),
    (LSHSpec, {"num_buckets": -2}, "num_buckets is -2; each count must be even"),
    (LSHSpec, {"num_buckets": (4, 5)}, "num_buckets is [4, 5]; each count must be even"),
    (LSHSpec, {"num_buckets": (4096, 4096)}, "16777216 in all; expected fewer than 16777216"),
    (LSHSpec, {"num_buckets": (4, 5)}, "the nearest that work: 4 or 6"),
    (LSHSpec, {"num_buckets": ()}, "num_buckets is []; expected an integer or a list of integers"),
    (LSHSpec, {"num_buckets": (4, 2.0)}, "expected an integer or a list of integers"),
    (LSHSpec, {"num_buckets": True}, "num_buckets is True; expected an integer or a list of integers"),
    (LSHSpec, {"num_buckets": "8"}, "num_buckets is '8'; expected an integer or a list of integers"),
    (LSHSpec, {"mask_constants": "HF"}, "mask_constants is 'HF'; expected one of safe, hf"),
    (NystromSpec, {"pinv_init": "exact"}, "pinv_init is 'exact'; expected one of per_head, global"),
    (AFTFullSpec, {"position_dim": 0}, "position_dim is 0; expected at least 1"),
    (AFTLocalSpec, {"position_dim": 0}, "position_dim is 0; expected at least 1"),
    (AFTFullSpec, {"position_bias": "dense"}, "position_bias is 'dense'; expected one of factored, full"),
    (AFTLocalSpec, {"window": -1}, "window is -1; expected 0 or more"),
    (AFTConvSpec, {"kernel_size": 4}, "kernel_size is 4; the filter is centred, so it must be odd"),
    (AFTConvSpec, {"kernel_size": 4}, "the nearest that work: 3 or 5"),
    (AFTConvSpec, {"std_eps": 0.0}, "std_eps is 0.0; expected a number > 0"),
    (AFTConvSpec, {"dim": 30, "heads": 4}, "dim 30 cannot be split into 4 heads"),
    # types, as TOML and JSON hand them over
    (SoftmaxSpec, {"heads": True}, "heads is True; expected an integer"),
    (SoftmaxSpec, {"dim": 64.0}, "dim is 64.0; expected an integer"),
    (SoftmaxSpec, {"dim": "64"}, "dim is '64'; expected an integer"),
    (SoftmaxSpec, {"dim": None}, "dim is None; expected an integer"),
    (SoftmaxSpec, {"head_dim": True}, "head_dim is True; expected an integer"),
    (SoftmaxSpec, {"causal": 1}, "causal is 1; expected true or false"),
    (SoftmaxSpec, {"bias": "no"}, "bias is 'no'; expected true or false"),
    (NystromSpec, {"mask_landmarks": None}, "mask_landmarks is None; expected true or false"),
    (LinearSpec, {"eps": math.nan}, "eps is nan; expected a finite number"),
    (LinearSpec, {"eps": math.inf}, "eps is inf; expected a finite number"),
    (LinearSpec, {"eps": True}, "eps is True; expected a finite number"),
    (LinearSpec, {"eps": "1e-6"}, "eps is '1e-6'; expected a finite number"),
    (AFTConvSpec, {"std_eps": math.nan}, "std_eps is nan; expected a finite number"),
]


@pytest.mark.parametrize(("spec_class", "fields", "text"), REFUSED)
def test_attention_specs_say_what_is_wrong(
    spec_class: type[AttentionSpec], fields: dict[str, object], text: str
) -> None:
    refused(text, spec_class, **fields)


def test_zero_stands_for_no_convolution_because_toml_has_no_null() -> None:
    for spec_class in (NystromSpec, SoftmaxSpec):
        assert spec_class(conv_kernel_size=0) == spec_class(conv_kernel_size=None)
    with pytest.raises(SpecError, match="kernel_size is 0; the filter is centred"):
        AFTConvSpec(kernel_size=0)


def test_plain_softmax_of_nystrom_says_nothing_of_landmarks() -> None:
    plain = {"num_landmarks": 64, "segment_means_seq_len": 64, "mask_landmarks": False, "pinv_init": "global"}
    assert NystromSpec(**plain).why_padding_counts.endswith("the convolution carries padding to its neighbours")
    assert NystromSpec(**plain, conv_kernel_size=None).why_not_invariant == ""


def test_conventions_of_other_packages_say_what_padding_does() -> None:
    for name in ("nystrom-attention", "xformers", "authors"):
        spec = NystromSpec(convention=name)
        assert spec.why_not_invariant == f"convention={name}: segments divide the padded length of the batch"
        assert (spec.why_padding_counts == "") == (name != "xformers")
    assert NystromSpec(convention="xformers", conv_kernel_size=None).why_padding_counts == ""


def test_heads_times_head_dim_is_the_inner_width_of_every_variant() -> None:
    for spec_class in ATTENTION_SPECS.values():
        spec = spec_class(dim=32, heads=3, head_dim=16)
        assert spec.inner_dim == 48
        groups, channels = spec.projected
        assert groups * channels["v"] == 48
    for spec_class in (AFTFullSpec, AFTSimpleSpec, AFTLocalSpec):
        assert spec_class(dim=30, heads=4).inner_dim == 30


ENCODERS_REFUSED: list[tuple[dict[str, object], str]] = [
    ({"attention": "softmax"}, "attention is 'softmax'; expected an AttentionSpec"),
    ({"layers": 0}, "layers is 0; expected at least 1"),
    ({"layers": True}, "layers is True; expected an integer"),
    ({"vocab_size": 1}, "vocab_size is 1; expected at least 2"),
    ({"ff_dim": 0}, "ff_dim is 0; expected at least 1"),
    ({"ff_chunk_length": -1}, "ff_chunk_length is -1; expected 0 or more"),
    ({"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0; expected a number > 0"),
    ({"layer_norm_eps": math.nan}, "layer_norm_eps is nan; expected a finite number"),
    ({"pad_token_id": 258}, "pad_token_id is 258; expected 0 to 257"),
    ({"pad_token_id": -1}, "pad_token_id is -1; expected 0 to 257"),
    ({"block": "sandwich"}, "block is 'sandwich'; expected one of pre-norm, post-norm, reversible"),
    ({"activation": "swish"}, "activation is 'swish'; expected one of gelu, gelu_new, relu"),
    ({"reversible_output": "sum"}, "reversible_output is 'sum'; expected one of mean, concat"),
    ({"lm_head": 1}, "lm_head is 1; expected true or false"),
]


@pytest.mark.parametrize(("fields", "text"), ENCODERS_REFUSED)
def test_encoder_specs_say_what_is_wrong(fields: dict[str, object], text: str) -> None:
    refused(text, EncoderSpec, **({"attention": SoftmaxSpec()} | fields))


@pytest.mark.parametrize(
    ("given", "meant"), [("nystroem", "nystrom"), ("Softmax", "softmax"), ("aft_full", "aft-full"), ("lhs", "lsh")]
)
def test_an_unknown_variant_is_answered_with_the_closest(given: str, meant: str) -> None:
    with pytest.raises(SpecError, match=f"unknown variant '{given}'; did you mean '{meant}'") as caught:
        attention_spec(given)
    assert "Expected one of: softmax, linear, " in str(caught.value)


def test_a_variant_that_is_close_to_nothing_gets_the_list_alone() -> None:
    with pytest.raises(SpecError, match=r"unknown variant 'zzz'\. Expected one of: softmax") as caught:
        attention_spec("zzz")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("given", [3, None, ["lsh"], {}])
def test_a_variant_that_is_no_text_is_refused(given: object) -> None:
    with pytest.raises(SpecError, match="unknown variant"):
        attention_from_dict({"variant": given})


def test_an_unknown_field_is_answered_with_the_closest() -> None:
    with pytest.raises(SpecError, match="nystrom attention has no field 'landmarks'; did you mean 'num_landmarks'"):
        attention_spec("nystrom", {"landmarks": 8})
    with pytest.raises(SpecError, match="the encoder has no field 'layer'; did you mean 'layers'"):
        encoder_from_dict({"attention": {"variant": "softmax"}, "layer": 8})
    # fields of one variant are unknown to another
    with pytest.raises(SpecError, match="softmax attention has no field 'num_hashes'") as caught:
        attention_spec("softmax", {"num_hashes": 8})
    assert "Its fields: dim, heads, head_dim, seq_len, causal, bias, rotary, conv_kernel_size" in str(caught.value)


def test_a_table_without_its_key_is_refused() -> None:
    with pytest.raises(SpecError, match="the attention spec has no variant; expected one of: softmax"):
        attention_from_dict({"dim": 8})
    for values in ({}, {"attention": "softmax"}, {"attention": None}):
        with pytest.raises(SpecError, match="the encoder spec has no table named attention"):
            encoder_from_dict(values)


def test_the_variant_local_is_a_layer_and_not_a_choice() -> None:
    with pytest.raises(SpecError, match="unknown variant 'local'"):
        attention_spec("local")


def test_lists_become_tuples_and_integers_pass_as_floats() -> None:
    spec = attention_spec("lsh", {"num_buckets": [4, 8]})
    assert isinstance(spec, LSHSpec)
    assert spec.bucket_factors == (4, 8)
    assert spec.total_buckets == 32
    assert LinearSpec(eps=0).eps == 0


def test_sizes_follow_from_the_fields() -> None:
    assert (SoftmaxSpec(dim=96, heads=3).head_size, SoftmaxSpec(dim=96, heads=3).inner_dim) == (32, 96)
    assert (SoftmaxSpec(dim=100, heads=3, head_dim=8).head_size, LSHSpec(heads=3, head_dim=8).inner_dim) == (8, 24)
    assert EncoderSpec(attention=SoftmaxSpec(dim=96, heads=3)).ff_size == 384
    assert EncoderSpec(attention=SoftmaxSpec(), ff_dim=7).ff_size == 7
    for block, output, width in (
        ("pre-norm", "concat", 256),
        ("reversible", "mean", 256),
        ("reversible", "concat", 512),
    ):
        spec = EncoderSpec(attention=SoftmaxSpec(), block=block, reversible_output=output)
        assert spec.hidden_size == width


def test_only_learned_position_biases_limit_the_length() -> None:
    limited = {name for name, spec_class in ATTENTION_SPECS.items() if spec_class(seq_len=100).max_seq_len == 100}
    assert limited == {"aft-full", "aft-local"}
    assert EncoderSpec(attention=SoftmaxSpec(seq_len=100)).max_seq_len == 100


def test_only_published_nystrom_fixes_the_length() -> None:
    assert NystromSpec().fixed_seq_len is None
    assert NystromSpec(seq_len=512, segment_means_seq_len=512).fixed_seq_len == 512
    # as many landmarks as tokens per segment means is softmax attention in transformers, of any length
    plain = NystromSpec(segment_means_seq_len=64, num_landmarks=64)
    assert plain.is_plain_softmax
    assert plain.fixed_seq_len is None
    assert all(spec_class().fixed_seq_len is None for spec_class in ATTENTION_SPECS.values())


def test_the_automatic_bucket_count_is_resolved_from_the_spec_and_not_from_the_input() -> None:
    assert LSHSpec(seq_len=1024).bucket_factors == (32,)
    assert LSHSpec(seq_len=16384).bucket_factors == automatic_num_buckets(16384, 64)
    assert math.prod(automatic_num_buckets(2**20, 64)) == 2**15


@pytest.mark.parametrize(
    ("value", "divisor", "text"), [(100, 3, "99 or 102"), (2, 4, "4"), (0, 2, "2"), (7, 2, "6 or 8")]
)
def test_nearest_multiples(value: int, divisor: int, text: str) -> None:
    assert nearest_multiples(value, divisor) == text


@pytest.mark.parametrize(("value", "total", "text"), [(3, 100, "2 or 4"), (4, 2, "2"), (7, 256, "4 or 8")])
def test_nearest_divisors(value: int, total: int, text: str) -> None:
    assert nearest_divisors(value, total) == text


def test_specs_load_no_framework() -> None:
    script = "import sys, effexport.models.variants; print(sorted({'torch', 'onnx', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
