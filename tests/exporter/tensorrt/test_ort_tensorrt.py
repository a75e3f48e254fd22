"""ONNX Runtime's TensorRT provider: its options, where its engines go, and its errors.

There is no TensorRT here: a stand-in for onnxruntime records what it is given. What it does with it, a GPU has to show.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from fake_onnxruntime import PLAIN, WITH_CUDA, WITH_SORT, FakeOrt, install, parsed

from effexport import RunOptions
from effexport.base.errors import KernelWarning, RuntimeUnsupportedError, UserError
from effexport.base.runtimes import ORT_RUNTIMES
from effexport.base.spec import BuildSpec
from effexport.plugins.building.library import Library
from effexport.runners.ort import kernels
from effexport.runners.ort.session import session_from_model
from effexport.tensorrt import ort_providers as ort_tensorrt
from effexport.tensorrt.sidecar import ShapeRange
from effexport.tensorrt.spec import default_profile

pytestmark = pytest.mark.requires("onnx")
TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"
PROFILE: dict[str, ShapeRange] = {
    "input_ids": ((1, 1), (1, 64), (4, 128)),
    "attention_mask": ((1, 1), (1, 64), (4, 128)),
}


@pytest.fixture
def ort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeOrt:
    fake = FakeOrt(TENSORRT, CUDA, folder=tmp_path / "onnxruntime")
    return install(monkeypatch, fake, tmp_path / "cache")


def options_of(ort: FakeOrt) -> dict[str, str]:
    """Those of TensorRT, which comes first, in the last session."""
    (name, options), *_ = ort.opened[-1].providers
    assert name == TENSORRT
    assert isinstance(options, dict)
    return options


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def with_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_library", lambda: WITH_CUDA)


def settings(**fields: Any) -> RunOptions:
    return RunOptions(runtime="ort-trt", **fields)


@pytest.mark.usefixtures("no_warnings")
def test_tensorrt_comes_first_and_cuda_and_the_cpu_take_the_rest(ort: FakeOrt) -> None:
    session = session_from_model(PLAIN, settings(implementation="body", profile=PROFILE))
    assert session.implementation == {}
    (tensorrt, _), (cuda, cuda_options), cpu = ort.opened[0].providers
    assert (tensorrt, cuda, cpu) == (TENSORRT, CUDA, CPU)
    assert cuda_options == {"device_id": "0", "use_tf32": "0", "enable_cuda_graph": "0"}
    assert ort.opened[0].fallback == 0, "onnxruntime would go on without TensorRT, also in the middle of a run"


def test_the_profile_and_the_cache_become_options_as_the_provider_spells_them(ort: FakeOrt, tmp_path: Path) -> None:
    session_from_model(PLAIN, settings(profile=PROFILE))
    options = options_of(ort)
    folder = options.pop("trt_engine_cache_path")
    assert Path(folder).is_dir()
    assert Path(folder).parent == tmp_path / "cache" / "ort-trt"
    assert options == {
        "device_id": "0",
        "trt_fp16_enable": "False",
        "trt_int8_enable": "False",
        "trt_engine_cache_enable": "True",
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": folder,
        "trt_profile_min_shapes": "input_ids:1x1,attention_mask:1x1",
        "trt_profile_opt_shapes": "input_ids:1x64,attention_mask:1x64",
        "trt_profile_max_shapes": "input_ids:4x128,attention_mask:4x128",
    }


def test_without_a_profile_the_provider_makes_its_own(ort: FakeOrt) -> None:
    session_from_model(PLAIN, settings())
    assert not [name for name in options_of(ort) if "profile" in name]


def test_inputs_of_rank_zero_have_no_place_in_a_profile() -> None:
    options = ort_tensorrt.profile_options({"step": ((), (), ()), "x": ((1,), (2,), (3,))}, "trt")
    assert set(options.values()) == {"x:1", "x:2", "x:3"}


@pytest.mark.parametrize("name", ["a:b", "a,b"])
def test_a_name_that_the_provider_cannot_read_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"the input {name!r} has a comma or a colon in its name"):
        ort_tensorrt.profile_options({name: ((1,), (1,), (1,))}, "trt")


def test_bodies_leave_the_whole_graph_to_tensorrt(ort: FakeOrt) -> None:
    session = session_from_model(WITH_SORT, settings(implementation="body"))
    assert session.implementation == {"LSHSort": "body"}
    assert ort.kernels == []
    assert "trt_op_types_to_exclude" not in options_of(ort)


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("implementation", ["auto", "kernel"])
def test_kernels_are_kept_from_tensorrt(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch, implementation: str) -> None:
    with_cuda_kernels(monkeypatch)
    ort.assigned = {TENSORRT: ["Neg"], CUDA: ["LSHSort"]}
    session = session_from_model(WITH_SORT, settings(implementation=implementation))
    assert session.implementation == {"LSHSort": "kernel"}
    assert ort.kernels == ["lib.so"]
    assert options_of(ort)["trt_op_types_to_exclude"] == "LSHSort"


def test_a_kernel_that_ends_up_on_the_cpu_is_said(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda_kernels(monkeypatch)
    ort.assigned = {TENSORRT: ["Neg"], CPU: ["LSHSort"]}
    with pytest.warns(
        KernelWarning, match="LSHSort runs on CPUExecutionProvider: .* no kernel for CUDAExecutionProvider"
    ):
        session_from_model(WITH_SORT, settings())


def test_kernels_without_cuda_are_left_aside(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_only = Library(Path("lib.so"), outdated=False, info=SimpleNamespace(has_cuda=False))  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "find_library", lambda: cpu_only)
    with pytest.warns(KernelWarning, match="has no CUDA kernels for LSHSort"):
        assert session_from_model(WITH_SORT, settings()).implementation == {"LSHSort": "body"}


@pytest.mark.usefixtures("no_warnings")
def test_a_profile_goes_with_bodies_only(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda_kernels(monkeypatch)
    assert session_from_model(WITH_SORT, settings(profile=PROFILE)).implementation == {"LSHSort": "body"}
    with pytest.raises(
        UserError, match="kernels of LSHSort were requested; they cut the graph into parts, and a profile"
    ):
        session_from_model(WITH_SORT, settings(profile=PROFILE, implementation="kernel"))
    session_from_model(PLAIN, settings(profile=PROFILE, implementation="kernel"))  # nothing to run as a kernel


def folder_for(ort: FakeOrt, model: Path | bytes = PLAIN, folder: Path | None = None, **fields: Any) -> str:
    session_from_model(model, settings(**fields), folder)
    return options_of(ort)["trt_engine_cache_path"]


def test_engines_are_shared_by_equal_models_and_conditions_alone(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder_for(ort)
    assert folder_for(ort) == first
    other = {name: (low, best, (8, 128)) for name, (low, best, _) in PROFILE.items()}
    folders = [first, folder_for(ort, parsed("{ y = Exp (x) }").SerializeToString())]
    folders += [folder_for(ort, profile=PROFILE), folder_for(ort, profile=other)]
    folders += [folder_for(ort, WITH_SORT, implementation="body")]
    with_cuda_kernels(monkeypatch)
    folders += [folder_for(ort, WITH_SORT)]
    monkeypatch.setattr(FakeOrt, "__version__", "9.10")
    folders += [folder_for(ort)]
    monkeypatch.delenv(ort_tensorrt.TF32_VARIABLE)
    folders += [folder_for(ort, tf32=True)]
    assert len(set(folders)) == len(folders) == 8


def test_other_weights_beside_an_equal_graph_are_another_model(ort: FakeOrt, tmp_path: Path) -> None:
    """ONNX Runtime would reuse the engine: it names engines by the names in the graph."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[b, 4] x) => (float[b, 4] y) { y = Mul (x, w) }'
    )
    folders = set()
    for weight in (1.0, 2.0):
        model.graph.ClearField("initializer")
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((500, 4), weight, np.float32), "w"))
        path = tmp_path / f"{weight}" / "model.onnx"
        path.parent.mkdir()
        onnx.save(model, str(path), save_as_external_data=True, location="model.data")
        folders |= {folder_for(ort, path), folder_for(ort, path.read_bytes(), path.parent)}
        assert folder_for(ort, path) == folder_for(ort, path.read_bytes(), path.parent)
    assert len(folders) == 2


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    ort: FakeOrt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EFFEXPORT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(
        UserError, match=r"engines of ONNX Runtime with its TensorRT provider cannot be stored: .*Not a directory"
    ):
        session_from_model(PLAIN, settings())


def test_tf32_that_nobody_asked_for_is_said_with_its_remedy(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ort_tensorrt.TF32_VARIABLE, "1")
    with pytest.warns(KernelWarning, match=r"TF32.* no option against it.*set NVIDIA_TF32_OVERRIDE=0 before starting"):
        session_from_model(PLAIN, settings())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session_from_model(PLAIN, settings(tf32=True))
    (_, (_, cuda_options), _) = ort.opened[-1].providers
    assert cuda_options["use_tf32"] == "1"


def test_a_model_that_tensorrt_takes_nothing_of_is_an_error(ort: FakeOrt) -> None:
    ort.assigned = {CUDA: ["MatMul"], CPU: ["Shape"]}
    with pytest.raises(UserError, match=r"TensorRT took no node of the model, which would run on CPU.*, CUDA"):
        session_from_model(PLAIN, settings())


def test_operators_that_tensorrt_left_to_others_are_named(ort: FakeOrt) -> None:
    ort.assigned = {TENSORRT: ["Neg"], CPU: ["Shape"], CUDA: ["MatMul"]}
    with pytest.warns(KernelWarning, match="TensorRT did not take MatMul, Shape, which run on CUDA or the CPU instead"):
        session_from_model(PLAIN, settings())


@pytest.mark.usefixtures("no_warnings")
def test_sessions_that_cannot_say_who_runs_what_are_believed(ort: FakeOrt) -> None:
    ort.assigned = None
    assert session_from_model(WITH_SORT, settings(implementation="body")).implementation == {"LSHSort": "body"}


def test_an_onnxruntime_without_the_provider_says_how_to_get_it(ort: FakeOrt) -> None:
    ort.available = [CPU]
    message = r"onnxruntime 9\.9 has no TensorrtExecutionProvider, only CPU.*'effexport\[gpu\]'"
    with pytest.raises(UserError, match=message):
        session_from_model(PLAIN, settings())


def test_a_provider_that_did_not_start_is_an_error(ort: FakeOrt) -> None:
    ort.starts = False
    message = (
        "TensorrtExecutionProvider did not start, and .* on CUDA.*driver, and the TensorRT, CUDA and cuDNN libraries"
    )
    with pytest.raises(UserError, match=message):
        session_from_model(PLAIN, settings())


def test_a_model_that_the_provider_refuses_is_an_error_and_no_fallback(ort: FakeOrt) -> None:
    ort.refusal = RuntimeError("TensorRT EP failed to create engine")
    with pytest.raises(RuntimeUnsupportedError, match=r"ONNX Runtime 9\.9 refuses the model: TensorRT EP failed"):
        session_from_model(PLAIN, settings())


def linked_with(ort: FakeOrt, major: int) -> None:
    """Give the stand-in a provider library that names TensorRT's as a linker does."""
    library = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_tensorrt.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(f"\0libnvinfer.so.{major}\0libcudart.so.13\0libnvonnxparser.so.{major}\0".encode())


def loads(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Only these libraries load; returns those that were asked for."""
    asked: list[str] = []

    def load(name: str) -> None:
        asked.append(name)
        if name not in names:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    return asked


MISSING = {
    None: r"pip has not installed a TensorRT: pip install 'tensorrt>=10\.13,<11', or put its libraries on LD",
    "11.4.0.106": r"TensorRT 11\.4\.0\.106 is installed, which it cannot use: pip install 'tensorrt>=10\.13,<11'",
    "10.16.1.11": r"TensorRT 10\.16\.1\.11 is installed: pip install 'tensorrt>=10\.13,<11'",
}


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    package = SimpleNamespace(version=version, module="tensorrt", oldest=(10, 13))
    monkeypatch.setattr(ort_tensorrt, "PACKAGE", package)


@pytest.mark.parametrize("version", MISSING)
def test_missing_or_unfit_tensorrt_libraries_are_named(
    ort: FakeOrt, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    linked_with(ort, 10)
    loads(monkeypatch)
    installed(monkeypatch, version)
    message = (
        r"onnxruntime 9\.9 is linked with TensorRT 10, whose libraries do not load \(libnvinfer\.so\.10: cannot .*; "
    )
    with pytest.raises(UserError, match=message + MISSING[version]):
        session_from_model(PLAIN, settings())


def test_a_later_onnxruntime_is_told_its_own_tensorrt(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    linked_with(ort, 12)
    loads(monkeypatch)
    installed(monkeypatch, None)
    with pytest.raises(UserError, match=r"linked with TensorRT 12, .*pip install 'tensorrt>=12,<13'"):
        session_from_model(PLAIN, settings())


@pytest.mark.parametrize(("version", "imported"), [("10.16.1.11", ["tensorrt"]), ("11.4.0.106", []), (None, [])])
def test_the_tensorrt_of_pip_is_imported_where_it_fits(
    ort: FakeOrt, monkeypatch: pytest.MonkeyPatch, version: str | None, imported: list[str]
) -> None:
    """Its libraries lie in its own folder, and only its import loads them."""
    linked_with(ort, 10)
    asked = loads(monkeypatch, "libnvinfer.so.10", "libnvonnxparser.so.10")
    modules: list[str] = []
    installed(monkeypatch, version)
    monkeypatch.setattr(ort_tensorrt, "importlib", SimpleNamespace(import_module=modules.append))
    session_from_model(PLAIN, settings())
    assert modules == imported
    assert asked == ["libnvinfer.so.10", "libnvonnxparser.so.10"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"runtime": "ort-trt", "cuda_graph": True},
            "cuda_graph needs the runtime 'ort-cuda' or 'trt' or 'trt-rtx'; the runtime is 'ort-trt'",
        ),
        (
            {"runtime": "ort-cuda", "profile": PROFILE},
            "profile needs the runtime 'ort-trt' or 'ort-rtx'; the runtime is 'ort-cuda'",
        ),
        ({"profile": PROFILE}, "profile needs the runtime 'ort-trt' or 'ort-rtx'; the runtime is 'ort'"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RunOptions(**fields)


def test_the_options_know_where_tensors_are() -> None:
    assert {name: RunOptions(runtime=name).row.tensors for name in ORT_RUNTIMES} == {
        "ort": "cpu",
        "ort-cuda": "cuda",
        "ort-trt": "cuda",
        "ort-rtx": "cpu",
        "ort-openvino": "cpu",
    }


@pytest.mark.requires("torch")
def test_profiles_of_engines_fit_in(small_spec: Callable[..., BuildSpec]) -> None:
    """The shapes of an engine's profile are what the provider takes: one for each input, under its name."""
    spec = small_spec("aft-simple", "encoder")
    options = ort_tensorrt.profile_options(default_profile(spec).shapes(spec.inputs), "trt")
    for text in options.values():
        assert [part.split(":")[0] for part in text.split(",")] == [tensor.name for tensor in spec.inputs]
