"""Specs from flags and TOML files, and through JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effexport.base.dtypes import TensorInfo
from effexport.base.errors import UserError
from effexport.base.spec import BuildSpec, build_spec_from_options
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.validation import SpecError
from effexport.models.variants.lsh import LSHSpec


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "spec.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_flags_win_over_the_file(toml: Callable[[str], Path]) -> None:
    file = toml('variant = "lsh"\ndim = 64\nheads = 8\nopset = 21')
    spec = build_spec_from_options({"dim": 128, "opset": 22}, file)
    assert (spec.attention.dim, spec.attention.heads, spec.opset) == (128, 8, 22)


def test_a_flag_that_was_not_given_does_not_hide_the_file(toml: Callable[[str], Path]) -> None:
    file = toml('variant = "softmax"\ncausal = true\nseed = 5')
    spec = build_spec_from_options({"causal": None, "seed": None, "variant": None}, file)
    assert spec.attention.causal
    assert spec.seed == 5


def test_a_false_flag_wins_over_true_in_the_file(toml: Callable[[str], Path]) -> None:
    file = toml('variant = "softmax"\ncausal = true')
    assert not build_spec_from_options({"causal": False}, file).attention.causal


def test_tables_group_fields_and_mean_the_same_as_none(toml: Callable[[str], Path]) -> None:
    tables = """
    variant = "lsh"
    [attention]
    num_hashes = 3
    [encoder]
    layers = 5
    block = "reversible"
    [build]
    precision = "fp16"
    """
    spec = build_spec_from_options({}, toml(tables))
    flat = 'variant="lsh"\nnum_hashes=3\nlayers=5\nblock="reversible"\nprecision="fp16"'
    assert spec == build_spec_from_options({}, toml(flat))
    assert isinstance(spec.attention, LSHSpec)
    assert isinstance(spec.model, EncoderSpec)
    assert (spec.attention.num_hashes, spec.model.layers, spec.precision) == (3, 5, "fp16")


def test_field_names_may_be_written_with_hyphens(toml: Callable[[str], Path]) -> None:
    spec = build_spec_from_options({}, toml('variant = "lsh"\nseq-len = 256\n[attention]\nchunk-length = 32'))
    assert isinstance(spec.attention, LSHSpec)
    assert (spec.attention.seq_len, spec.attention.chunk_length) == (256, 32)


def test_a_list_of_bucket_counts_becomes_factors(toml: Callable[[str], Path]) -> None:
    spec = build_spec_from_options({}, toml('variant = "lsh"\nnum_buckets = [4, 8]'))
    assert isinstance(spec.attention, LSHSpec)
    assert spec.attention.num_buckets == (4, 8)
    assert spec.attention.total_buckets == 32


def test_variant_and_scope_may_come_from_the_file(toml: Callable[[str], Path]) -> None:
    spec = build_spec_from_options({}, toml('variant = "linear"\nscope = "attention"'))
    assert (spec.attention.variant, spec.model.scope) == ("linear", "attention")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('variant = "lsh"\nnum_hashs = 4', r"lsh has no field 'num_hashs'; did you mean 'num_hashes'\?"),
        ('variant = "softmax"\nnum_hashes = 4', "num_hashes does not apply to softmax, only to: lsh; leave it out"),
        ('variant = "lsh"\nscope = "attention"\nlayers = 2', "layers belongs to the encoder"),
        ('variant = "lsh"\nseq_len = 64\nseq-len = 64', "sets seq_len twice"),
        ('variant = "lsh"\ndim = 64\n[attention]\ndim = 32', "sets dim twice"),
        ('variant = "lsh"\n[model]\ndim = 32', r"unknown table \[model\].*attention, encoder, build"),
        ('variant = "lhs"', r"unknown variant 'lhs'; did you mean 'lsh'\?"),
        ('variant = ["lsh"]', "unknown variant"),
        ('variant = "lsh"\nscope = "layer"', "scope is 'layer'; expected encoder or attention"),
        ("dim = 64", "no variant given in .*; expected one of: softmax"),
        ('variant = "lsh"\nprecision = ["fp32"]', "precision is"),
        ('variant = "lsh"\nopset = "20"', "opset is '20'; expected an integer"),
        ('variant = "lsh"\nnum_buckets = [4, 3]', "num_buckets is .*nearest that work: 2 or 4"),
        ('variant = "lsh"\nnum_buckets = ["a"]', "expected an integer or a list of integers"),
        ('variant = "linear"\neps = nan', "eps is nan; expected a finite number"),
        ('variant = "softmax"\ncausal = 1', "causal is 1; expected true or false"),
    ],
)
def test_a_file_that_cannot_work_says_why(toml: Callable[[str], Path], text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_spec_from_options({}, toml(text))


@pytest.mark.parametrize("data", [b"variant = ", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_an_error_with_its_path(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"cannot read the spec file .*bad\.toml"):
        build_spec_from_options({}, path)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no spec file at"):
        build_spec_from_options({}, tmp_path / "absent.toml")
    with pytest.raises(UserError, match=r"the spec file .* is a folder; expected a TOML file"):
        build_spec_from_options({}, tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"precision": "fp9"}, "precision is 'fp9'; expected fp32, fp16, bf16, int8, fp8"),
        ({"opset": 17}, "opset is 17; expected 18 to 24"),
        ({"opset": 25}, "opset is 25; expected 18 to 24"),
        ({"batch": 0}, "batch is 0; expected at least 1"),
        ({"seed": -1}, r"seed is -1; expected 0 to 2\^63 - 1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seq_len": 0}, "seq_len is 0; expected a positive integer"),
        ({"layers": 0}, "layers is 0; expected at least 1"),
        ({"dim": 256, "heads": 3}, "256 cannot be split into 3 heads.*use dim 255 or 258, heads 2 or 4"),
        ({"dim": 2, "heads": 4}, "use dim 4, heads 2"),
    ],
)
def test_a_value_that_cannot_work_says_what_can(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_spec_from_options({"variant": "softmax", **flags}, None)


def test_causal_nystrom_is_refused_with_the_variants_that_can() -> None:
    with pytest.raises(SpecError, match=r"nystrom attention has no causal form.*softmax, linear, lsh, aft-full"):
        build_spec_from_options({"variant": "nystrom", "causal": True}, None)


def test_an_unknown_variant_is_reported_before_its_fields() -> None:
    with pytest.raises(SpecError, match=r"unknown variant 'nystroem'; did you mean 'nystrom'\?"):
        build_spec_from_options({"variant": "nystroem", "no_such_field": 1}, None)


def test_a_spec_survives_json(variant: str, scope: str, small_spec: Callable[..., BuildSpec]) -> None:
    spec = small_spec(variant, scope, batch=3, precision="fp16", opset=22, seed=9, external_data=True)
    assert BuildSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_bucket_factors_survive_json(small_spec: Callable[..., BuildSpec]) -> None:
    spec = small_spec("lsh", "encoder", num_buckets=(4, 6))
    assert BuildSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_inputs_and_outputs_have_their_documented_names(small_spec: Callable[..., BuildSpec]) -> None:
    mask = TensorInfo("attention_mask", "int64", ("batch", "seq"))
    encoder = small_spec("softmax", "encoder")
    assert encoder.inputs == (TensorInfo("input_ids", "int64", ("batch", "seq")), mask)
    assert encoder.outputs == (TensorInfo("last_hidden_state", "float32", ("batch", "seq", 32)),)
    attention = small_spec("softmax", "attention", precision="fp16")
    assert attention.inputs == (TensorInfo("hidden_states", "float16", ("batch", "seq", 32)), mask)
    head = small_spec("softmax", "encoder", lm_head=True)
    assert head.outputs == (TensorInfo("logits", "float32", ("batch", "seq", 258)),)


def test_a_model_tied_to_one_length_has_a_fixed_dimension(small_spec: Callable[..., BuildSpec]) -> None:
    spec = small_spec("nystrom", "attention", segment_means_seq_len=64)
    assert spec.inputs[0].dims == ("batch", 64, 32)
    assert spec.outputs[0].dims == ("batch", 64, 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dim = " + "9" * 5_000, r"it is not TOML: Exceeds the limit \(4300 digits\)"),
        ("dim = 0x" + "f" * 50_000, "it is not TOML: it has an integer of more than 64 bits"),
        ("dim = " + "[" * 100_000, "it is not TOML: maximum recursion depth"),
        ("a." * 100_000 + "a = 1", "has a line with more than 100 dots"),
        ("x = [" + "[]," * 100_000 + "]", "it is larger than 256 KB"),
        ("precision = [[1]]", r"precision is \("),
        ("layers = 1000000000", "layers is 1000000000; expected at most 10000"),
        ("pool = [[1]]", "pool is "),
        ('precision = "int8"\nsmooth = nan', "smooth is nan; expected a finite number"),
        ("scope = [1]", r"scope is \[1\]; expected"),
        ('precision = "int8"\nkeep_float = 1', "keep_float is 1; expected a list of layers"),
        ('"\\u0000" = {}', r"unknown table \['\\x00'\]"),
        ('"' + "x" * 5_000 + '" = 1', "lsh has no field 'xxx"),
    ],
    ids=range(13),
)
def test_a_hostile_spec_file_is_refused_in_one_short_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises((SpecError, UserError), match=message) as failure:
        build_spec_from_options({"variant": "lsh"}, path)
    assert len(str(failure.value)) < 2_000
    assert "\n" not in str(failure.value)


# The spec of a user's own module, as a manifest has it.
MODULE: dict[str, Any] = {
    "family": "module",
    "module": "x:make",
    "vocab_size": 2,
    "seq_len": 4,
    "attention_fields": {"variant": "pytorch"},
    "attention_layers": 1,
    "fused_op_counts": {},
    "unfused_op_counts": {"LSHSort": 1},
    "input_dims": {"x": ["batch", "seq", 8]},
    "output_dims": {"y": ["batch", 8]},
    "longest": None,
    "ranges": {"x": [0, 5]},
}


def test_the_spec_of_a_module_is_read() -> None:
    spec = BuildSpec.from_dict({"scope": "checkpoint", "model": MODULE})
    assert spec.attention.variant == "pytorch"
    assert spec.model.inputs == {"x": ("batch", "seq", 8)}
    assert BuildSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "the spec has None as its model; expected a table of fields"),
        ({"model": 10**5000}, "the spec has an integer of thousands of digits as its model"),
        ({"model": {"variant": "lsh"}, "colour": 1}, "a build has no field 'colour'"),
        ({"model": {"variant": "lsh"}, "batch": 10**29}, "batch is 10+; expected at most 2147483647"),
        ({"scope": [1], "model": {"variant": ["lsh"]}}, "unknown variant"),
        ({"scope": "checkpoint", "model": {"family": {}}}, "unknown family {}"),
        ({"scope": "checkpoint", "model": {"family": "reformer", "x": 1}}, "a reformer checkpoint has no field 'x'"),
        ({"scope": "checkpoint", "model": {"family": "module"}}, "a module checkpoint has no vocab_size"),
        ({"scope": "checkpoint", "model": {"family": "reformer", "vocab_size": 10**29, "seq_len": 4}}, "vocab_size is"),
        ({"scope": "checkpoint", "model": MODULE | {"attention_fields": 5}}, "attention_fields is not a table"),
        ({"scope": "checkpoint", "model": MODULE | {"attention_fields": {"variant": 5}}}, "unknown variant 5"),
        ({"scope": "checkpoint", "model": MODULE | {"input_dims": {"x": 5}}}, "input_dims is .* expected axes by name"),
        ({"scope": "checkpoint", "model": MODULE | {"ranges": {"x": [0]}}}, "ranges is .* expected two integers by"),
        ({"scope": "checkpoint", "model": MODULE | {"fused_op_counts": {"x": 10**29}}}, "fused_op_counts is "),
        ({"scope": "checkpoint", "model": MODULE | {"axis_sizes": []}}, "axis_sizes is .* expected sizes by name"),
        ({"scope": "checkpoint", "model": MODULE | {"remarks": 5}}, "remarks is 5; expected a list of sentences"),
        ({"scope": "encoder", "model": {"attention": []}}, "the encoder spec has no table named attention"),
    ],
)
def test_what_an_artifact_calls_its_spec_is_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        BuildSpec.from_dict(values)
