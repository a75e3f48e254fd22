"""Builder settings of target `trt`, and the operators that become plugins. The builder is a recorder, because the real
one needs a GPU; test_tensorrt_api.py checks that the names it is called by exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx.helper
import pytest

from effexport.artifact import Artifact
from effexport.base.errors import StageError, UserError
from effexport.export.onnx_graph import load_graph
from effexport.plugins.building.library import LibraryError
from effexport.plugins.building.ptx import PtxTarget, ptx_target
from effexport.plugins.ops import DOMAIN
from effexport.tensorrt.bindings import BuildLog
from effexport.tensorrt.engine_from_onnx import config_from_spec, network_from_model, save_timing_cache
from effexport.tensorrt.preparation import PreparedModel, prepared_model
from effexport.tensorrt.spec import EngineSpec, Profile, Range

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
PROFILES = (Profile({"batch": Range(1, 2, 4), "seq": Range(1, 64, 64)}),)
SHAPES = ({"x": ((1, 1), (2, 64), (4, 64))},)


def trt(**fields: Any) -> EngineSpec:
    return EngineSpec(**{"target": "trt", "profiles": PROFILES, **fields})


class Flags(SimpleNamespace):
    """An enumeration whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class RecordedConfig(SimpleNamespace):
    """refuses: whether a timing cache is of another GPU."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__(flags={"TF32"}, pools={}, profiles=[], caches=[], cache=None, refuses=refuses)

    def set_flag(self, flag: str) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: str) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.pools[pool] = size

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, known: bytes) -> Any:
        return SimpleNamespace(contents=known)

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if self.refuses and cache.contents:
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.cache.contents + b" and more")

    def set_compute_capability(self, capability: str, index: int) -> bool:
        raise AssertionError("TensorRT builds for the GPU that is there")


def configured(spec: EngineSpec, *, refuses: bool = False) -> RecordedConfig:
    config = RecordedConfig(refuses)
    profiles: list[Any] = []

    def make_profile() -> Any:
        profiles.append(SimpleNamespace(shapes={}))
        made = profiles[-1]
        made.set_shape = lambda name, *shapes: made.shapes.update({name: shapes})
        return made

    builder: Any = SimpleNamespace(create_builder_config=lambda: config, create_optimization_profile=make_profile)
    names = ("BuilderFlag", "MemoryPoolType", "ProfilingVerbosity", "HardwareCompatibilityLevel")
    api: Any = SimpleNamespace(**{name: Flags() for name in names})
    assert config_from_spec(api, builder, spec, SHAPES) is config
    return config


def test_tf32_is_cleared_though_tensorrt_sets_it() -> None:
    assert configured(trt()).flags == set()
    assert configured(trt(tf32=True)).flags == {"TF32"}


def test_every_option_reaches_the_builder() -> None:
    config = configured(
        trt(
            optimization_level=4,
            workspace_bytes=123,
            version_compatible=True,
            weight_streaming=True,
            refittable=True,
            hardware_compatibility="ampere+",
        )
    )
    assert config.flags == {"VERSION_COMPATIBLE", "WEIGHT_STREAMING", "REFIT"}
    assert config.pools == {"WORKSPACE": 123}
    assert config.builder_optimization_level == 4
    assert config.hardware_compatibility_level == "AMPERE_PLUS"
    assert config.profiling_verbosity == "DETAILED"
    assert config.profiles[0].shapes == SHAPES[0]


def test_a_workspace_and_a_level_that_nobody_named_are_left_to_tensorrt() -> None:
    config = configured(trt())
    assert config.pools == {}
    assert not hasattr(config, "builder_optimization_level")
    assert config.hardware_compatibility_level == "NONE"


def test_the_timing_cache_goes_from_build_to_build(tmp_path: Path) -> None:
    spec = trt(timing_cache=tmp_path / "new" / "timing.cache")
    first = configured(spec)
    assert first.cache.contents == b""
    save_timing_cache(spec, first)
    assert spec.timing_cache is not None
    assert spec.timing_cache.read_bytes() == b" and more"
    assert configured(spec).cache.contents == b" and more"


def test_a_timing_cache_of_another_gpu_gives_way_to_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    path.write_bytes(b"of another GPU")
    assert configured(trt(timing_cache=path), refuses=True).cache.contents == b""


def test_a_timing_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = trt(timing_cache=tmp_path / "file" / "timing.cache")
    config = RecordedConfig()
    config.cache = SimpleNamespace(contents=b"")
    with pytest.raises(UserError, match=r"the engine is built, but the timing cache .* cannot be written"):
        save_timing_cache(spec, config)  # type: ignore[arg-type]


@pytest.mark.parametrize(("target", "flags"), [("trt", 0b101), ("trt-rtx", 0b1)])
def test_the_network_is_strongly_typed_and_plugins_of_trt_are_compiled_ahead_of_time(target: Any, flags: int) -> None:
    seen: list[int] = []
    network_flags = SimpleNamespace(STRONGLY_TYPED=0)
    if target == "trt":
        network_flags.PREFER_AOT_PYTHON_PLUGINS = 2
    builder: Any = SimpleNamespace(create_network=lambda flags: seen.append(flags))
    parser = SimpleNamespace(parse=lambda model, path: True)
    api: Any = SimpleNamespace(
        NetworkDefinitionCreationFlag=network_flags, OnnxParser=lambda network, logger: parser, ILogger=Logger
    )
    network_from_model(
        api, builder, BuildLog(api), EngineSpec(target=target, profiles=PROFILES), b"", Path("model.onnx")
    )
    assert seen == [flags]


class Logger:
    INTERNAL_ERROR, ERROR, WARNING = range(3)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose plugins were registered, without TensorRT."""
    seen: list[str] = []

    def register(ops: list[str], architecture: int) -> PtxTarget:
        seen.extend(ops)
        return ptx_target(architecture, (9, 0))

    monkeypatch.setattr("effexport.tensorrt.preparation.register_plugins", register)
    return seen


def prepared_for(path: Path, spec: EngineSpec, gpu: int = 90) -> PreparedModel:
    return prepared_model(load_graph(path), spec, (gpu,))


def custom_nodes(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node if node.domain == DOMAIN}


@pytest.mark.parametrize(("owner", "op"), [("nystrom", "IterativePinv"), ("lsh", "LSHSort")])
def test_operators_that_fit_into_a_block_stay_nodes_and_become_plugins(
    built: Built, registered: list[str], owner: str, op: str
) -> None:
    prepared = prepared_for(built(owner, "encoder", fused=False).model_path, trt())
    assert prepared.implementation == {op: "plugin"}
    assert registered == [op]
    assert custom_nodes(prepared.model) == {op}
    assert prepared.remarks == ()
    (first, *_) = [node for node in prepared.model.graph.node if node.domain == DOMAIN]
    assert onnx.helper.get_node_attr_value(first, "plugin_namespace") == b"effexport"


@pytest.mark.parametrize(("owner", "op"), [("nystrom", "IterativePinv"), ("lsh", "LSHSort")])
def test_tensorrt_rtx_gets_bodies_because_it_has_no_plugins(
    built: Built, registered: list[str], owner: str, op: str
) -> None:
    spec = EngineSpec(target="trt-rtx", profiles=PROFILES)
    prepared = prepared_for(built(owner, "encoder").model_path, spec)
    assert prepared.implementation[op] == "body"
    assert set(prepared.implementation.values()) == {"body"}
    assert registered == []
    assert custom_nodes(prepared.model) == set()


def test_without_plugins_every_operator_is_its_body_and_no_reason_is_needed(
    built: Built, registered: list[str]
) -> None:
    prepared = prepared_for(built("nystrom", "encoder", fused=False).model_path, trt(plugins="never"))
    assert prepared.implementation == {"IterativePinv": "body"}
    assert (prepared.remarks, prepared.ptx, registered) == ((), None, [])
    assert custom_nodes(prepared.model) == set()


@pytest.mark.slow
def test_a_body_in_place_of_a_required_plugin_stops_the_build(built: Built, registered: list[str]) -> None:
    artifact = built("nystrom", "attention", num_landmarks=65, seq_len=128, fused=False)
    with pytest.raises(StageError, match="--plugins require is given, but effexport::IterativePinv runs as its"):
        prepared_for(artifact.model_path, trt(plugins="require"))


def test_more_landmarks_than_a_block_can_hold_run_as_the_body_and_that_is_said(
    built: Built, registered: list[str]
) -> None:
    artifact = built("nystrom", "attention", num_landmarks=65, seq_len=128, fused=False)
    prepared = prepared_for(artifact.model_path, trt())
    assert prepared.implementation == {"IterativePinv": "body"}
    assert custom_nodes(prepared.model) == set()
    (remark,) = prepared.remarks
    assert "effexport::IterativePinv runs as its function body" in remark
    assert "The dimension m of its inputs is 65" in remark


def test_without_a_cuda_compiler_the_body_runs_and_that_is_said(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(ops: list[str], architecture: int) -> None:
        raise LibraryError("no nvcc was found;\n  install the CUDA toolkit")

    monkeypatch.setattr("effexport.tensorrt.preparation.register_plugins", no_compiler)
    prepared = prepared_for(built("lsh", "encoder", fused=False).model_path, trt())
    assert prepared.implementation == {"LSHSort": "body"}
    assert prepared.remarks == (
        "effexport::LSHSort runs as its function body, which is slower: no nvcc was found; install the CUDA toolkit",
    )


def test_a_model_that_lost_its_function_bodies_is_one_error(built: Built, registered: list[str]) -> None:
    model = load_graph(built("lsh", "encoder").model_path)
    del model.functions[:]
    with pytest.raises(UserError, match=r"\(LSHAttention\) is of the domain effexport and has neither a function body"):
        prepared_model(model, trt(), (90,))


@pytest.mark.parametrize(
    ("gpu", "compatibility", "architecture"),
    [(75, "none", 75), (80, "none", 80), (120, "none", 80), (89, "ampere+", 80), (86, "same-compute-capability", 80)],
)
def test_the_ptx_of_plugins_is_for_all_gpus_that_the_engine_is_for(
    built: Built, registered: list[str], gpu: int, compatibility: str, architecture: int
) -> None:
    path = built("lsh", "encoder", fused=False).model_path
    prepared = prepared_for(path, trt(hardware_compatibility=compatibility), gpu)
    assert prepared.ptx == PtxTarget(architecture, "9.0", "13.0")


def test_a_model_without_custom_operators_needs_no_plugins(built: Built, registered: list[str]) -> None:
    prepared = prepared_for(built("aft-full", "encoder").model_path, trt())
    assert (prepared.implementation, prepared.remarks, registered, prepared.ptx) == ({}, (), [], None)
