"""Specs of engines: profiles, options, and the sentences that refuse the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt import written_engine

from effexport.base.dtypes import TensorInfo
from effexport.base.errors import UserError
from effexport.base.spec import BuildSpec, build_spec_from_options
from effexport.models.validation import SpecError
from effexport.options import BuildOptions
from effexport.pipeline.request import engines_of
from effexport.tensorrt.sidecar import check_runs_here
from effexport.tensorrt.spec import (
    EngineSpec,
    Profile,
    Profiles,
    Range,
    default_profile,
    parse_profile,
    profile_remarks,
    profiles_from_texts,
)

Specs = Callable[..., BuildSpec]
ANY = (Profile({"batch": Range(1, 1, 1), "seq": Range(1, 8, 8)}),)


def nystrom_of_fixed_length() -> BuildSpec:
    return build_spec_from_options({"variant": "nystrom", "seq_len": 1024, "segment_means_seq_len": 1024}, None)


def test_a_profile_names_its_dimensions_and_one_number_stands_for_all_three() -> None:
    assert parse_profile("batch=1:4:16, seq=512") == {"batch": Range(1, 4, 16), "seq": Range(512, 512, 512)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1:4:16", "expected dimension=min:opt:max"),
        ("seq=1:4", "expected min:opt:max, such as 1:4:16, or one number"),
        ("seq=1:-4:16", "expected min:opt:max"),
        ("seq=16:4:1", "out of order"),
        ("seq=0:4:16", "expected at least 1"),
        ("sec=1:4:16", "did you mean 'seq'"),
        ("seq=1,seq=2", "names seq twice"),
        ("", "expected dimension=min:opt:max"),
    ],
)
def test_a_profile_that_cannot_be_read_is_answered_with_what_can(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_profile(text)


def test_the_default_profile_covers_every_length_of_the_model_and_a_small_batch(small_spec: Specs) -> None:
    assert str(default_profile(small_spec("lsh", batch=2))) == "batch=1:2:4,seq=1:64:64"
    # no limit on the length: half as much again
    assert str(default_profile(small_spec("linear", "attention", batch=8))) == "batch=1:8:8,seq=1:64:96"
    assert str(default_profile(nystrom_of_fixed_length())) == "batch=1:1:4"


def test_a_dimension_that_is_named_again_begins_another_profile(small_spec: Specs) -> None:
    spec = small_spec("lsh")
    texts = ["batch=1:2:3", "seq=16:32:64", "seq=8", "batch=7"]
    assert [str(profile) for profile in profiles_from_texts(texts, spec)] == [
        "batch=1:2:3,seq=16:32:64",
        "batch=7:7:7,seq=8:8:8",
    ]
    assert profiles_from_texts([], spec) == (default_profile(spec),)


def test_a_profile_beyond_the_positions_of_the_model_is_refused(small_spec: Specs) -> None:
    with pytest.raises(SpecError, match=r"positions for 64 tokens; expected a maximum of at most 64"):
        profiles_from_texts(["seq=1:64:65"], small_spec("lsh"))


def test_a_profile_that_breaks_the_segments_of_landmarks_is_refused() -> None:
    with pytest.raises(SpecError, match=r"1024 tokens and no others, because its 64 landmarks are means of exactly 16"):
        profiles_from_texts(["seq=1000"], nystrom_of_fixed_length())


def test_a_profile_of_a_dimension_that_the_model_lacks_is_refused(small_spec: Specs) -> None:
    with pytest.raises(SpecError, match=r"sets choices, but the dynamic dimensions of this model are: batch, seq"):
        profiles_from_texts(["choices=4"], small_spec("softmax"))


def test_a_length_that_is_no_multiple_of_the_chunk_works_and_is_remarked_on(small_spec: Specs) -> None:
    spec = small_spec("lsh")
    (remark,) = profile_remarks(profiles_from_texts(["seq=1:50:64"], spec), spec)
    assert "tuned for 50 tokens, which lsh pads to 64, a multiple of its chunk of 16" in remark
    assert not profile_remarks(profiles_from_texts(["seq=1:48:64"], spec), spec)
    assert not profile_remarks(profiles_from_texts(["seq=1:50:64"], spec), small_spec("linear"))


def test_shapes_follow_the_names_of_the_dimensions() -> None:
    profile = Profile({"batch": Range(1, 2, 3), "seq": Range(4, 5, 6)})
    inputs = [TensorInfo("x", "float32", ("batch", "seq", 256)), TensorInfo("m", "int64", ("batch", 7))]
    assert profile.shapes(inputs) == {
        "x": ((1, 4, 256), (2, 5, 256), (3, 6, 256)),
        "m": ((1, 7), (2, 7), (3, 7)),
    }
    with pytest.raises(SpecError, match=r"'rows' of b int32 .* has no range"):
        profile.shapes([TensorInfo("b", "int32", ("rows",))])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target": "tensorrt"}, "unknown target 'tensorrt'; did you mean 'trt'"),
        ({"profiles": ()}, "at least one profile"),
        ({"optimization_level": 6}, "expected 0 to 5"),
        ({"workspace_bytes": 0}, "expected at least 1"),
        ({"hardware_compatibility": "all"}, "none, ampere\\+, same-compute-capability"),
        ({"compute_capabilities": (90,)}, "does not build for SM 90; expected some of: 75, 80"),
        ({"timing_cache": Path("x")}, "--timing-cache does not apply to target trt-rtx"),
        ({"version_compatible": True}, "version_compatible does not apply to target trt-rtx"),
        ({"hardware_compatibility": "ampere+"}, "hardware_compatibility does not apply to target trt-rtx"),
        ({"refittable": True}, "--refittable does not apply to target trt-rtx"),
        (
            {"plugins": "never"},
            "--plugins does not apply to target trt-rtx, because TensorRT-RTX has no plugins; leave",
        ),
        ({"plugins": "sometimes"}, "plugins is 'sometimes'; expected one of auto, require, never"),
        ({"target": "trt", "compute_capabilities": (89,)}, "built for the GPU of this machine"),
    ],
)
def test_an_engine_that_cannot_be_built_is_refused_before_tensorrt_is_asked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        EngineSpec(**{"target": "trt-rtx", "profiles": ANY, **fields})


def test_tf32_is_off_by_default_so_that_fp32_parity_holds() -> None:
    assert EngineSpec(target="trt", profiles=ANY).options()["tf32"] is False


def engines(spec: BuildSpec, **given: Any) -> tuple[EngineSpec, ...]:
    return engines_of(BuildOptions(**given), spec)


def test_each_target_is_built_once_and_none_is_none(small_spec: Specs) -> None:
    spec = small_spec("softmax")
    assert engines(spec, targets=("none",)) == ()
    targets = engines(spec, targets=("trt-rtx", "none", "trt", "trt-rtx"))
    assert [engine.target for engine in targets] == ["trt-rtx", "trt"]


def test_an_option_of_one_of_several_targets_is_for_that_one(small_spec: Specs) -> None:
    given = {"plugins": "require", "refittable": True, "compute_capabilities": [86], "tf32": True}
    trt, rtx = engines(small_spec("softmax"), targets=("trt", "trt-rtx"), **given)
    assert (trt.plugins, trt.refittable, trt.compute_capabilities, trt.tf32) == ("require", True, (), True)
    assert (rtx.plugins, rtx.refittable, rtx.compute_capabilities, rtx.tf32) == ("auto", False, (86,), True)


@pytest.mark.parametrize("given", [{"profiles": ("seq=8",)}, {"workspace": "1G"}, {"plugins": "never"}])
def test_options_of_an_engine_without_a_target_are_an_error(small_spec: Specs, given: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"^(--)?\w+: only for engines, and none was requested; add --target trt-rtx"):
        engines(small_spec("softmax"), **given)


TABLE = 'variant = "softmax"\n[engine]\noptimization_level = 4\nplugins = "never"\ncompute_capabilities = [86, 89]'


def test_a_spec_file_has_a_table_of_engines_whose_options_the_command_line_overrides(
    small_spec: Specs, tmp_path: Path
) -> None:
    (tmp_path / "spec.toml").write_text(TABLE)
    given = BuildOptions(tmp_path / "spec.toml", targets=["trt", "trt-rtx"], plugins="require")
    trt, rtx = engines_of(given, small_spec("softmax"))
    assert (trt.optimization_level, trt.plugins, trt.compute_capabilities) == (4, "require", ())
    assert (rtx.optimization_level, rtx.plugins, rtx.compute_capabilities) == (4, "auto", (86, 89))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"optimisation_level": 3}, r"\[engine\] has optimisation_level; did you mean 'optimization_level'"),
        ({"timing_cache": "x"}, r"\[engine\] has timing_cache. Keys: profiles, refittable"),
        ({"hardware_compatibility": "all"}, "unknown hardware_compatibility 'all'"),
        ({"compute_capabilities": "hopper"}, "compute_capabilities is 'hopper'; expected a list of numbers"),
        ({"optimization_level": "high"}, "optimization_level is 'high'; expected an integer"),
        ({"optimization_level": 9}, "level is 9; expected 0 to 5"),
        ({"workspace": "much"}, "workspace is 'much'; expected bytes"),
        ({"tf32": 1}, "tf32 is 1; expected true or false"),
    ],
)
def test_a_table_of_engines_that_cannot_work(small_spec: Specs, table: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, UserError), match=message):
        engines_of(BuildOptions({"engine": table}, targets=["trt-rtx"]), small_spec("softmax"))
    with pytest.raises(SpecError, match="spec has engine = 3; expected a table"):
        engines_of(BuildOptions({"engine": 3}), small_spec("softmax"))


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"x": ((1,), (2,), (4,))}, "zip"),
        ({"x": ((4, 8), (2, 8), (1, 8))}, "4:2:1 is out of order"),
        ({}, "'x'"),
    ],
)
def test_a_sidecar_whose_profiles_are_not_of_its_inputs_is_one_error(
    tmp_path: Path, shapes: dict[str, Any], problem: str
) -> None:
    info = written_engine(
        tmp_path / "x.engine",
        inputs=(TensorInfo("x", "float32", ("batch", 8)),),
        outputs=(TensorInfo("y", "float32", ("batch", 8)),),
        profiles=(shapes,),
    )
    with pytest.raises(UserError, match=rf"the profiles of an engine do not fit its inputs: .*{problem}.*; build the"):
        Profiles(info)


def test_an_engine_that_names_no_gpu_runs_on_none_unless_it_compiles_there(tmp_path: Path) -> None:
    tensors = {"inputs": (), "outputs": (), "profiles": (), "compute_capabilities": ()}
    info = written_engine(tmp_path / "x.engine", **tensors)
    with pytest.raises(UserError, match="was built for a GPU that it does not name, and this GPU is SM 90"):
        check_runs_here(tmp_path / "x.engine", info, info.tensorrt_version, 90)
    rtx = written_engine(tmp_path / "x.engine", target="trt-rtx", **tensors)
    check_runs_here(tmp_path / "x.engine", rtx, rtx.tensorrt_version, 90)
