"""TensorRT-RTX as a plugin provider of ONNX Runtime: registration, options and errors.

No GPU is needed. A stand-in for onnxruntime records what it is given; the real package is loaded by processes of their
own, without a driver and with one that finds no GPU, because its libraries stay in a process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx.parser
import pytest

from effexport import OrtSettings
from effexport.engines.sidecar import ShapeRange
from effexport.environment import Gpu
from effexport.errors import KernelWarning, MissingExtraError, UserError
from effexport.runners.ort import kernels
from effexport.runners.ort import rtx_provider as ort_rtx
from effexport.runners.ort import session as ort_session
from effexport.runners.ort import tensorrt_provider as ort_tensorrt
from effexport.runners.ort.session import check_settings, session_from_model

pytestmark = pytest.mark.requires("onnx")
RTX, CPU = "NvTensorRTRTXExecutionProvider", "CPUExecutionProvider"
PROFILE: dict[str, ShapeRange] = {"x": ((1, 4), (2, 4), (8, 4)), "step": ((), (), ())}
HEAD = '<ir_version: 10, opset_import: ["" : 20, "effexport" : 1]> g (float[b, 4] x) => (float[b, 4] y) '
FUNCTION = '<domain: "effexport", opset_import: ["" : 20]> LSHSort (a) => (b) { b = Neg (a) }'
PLAIN: bytes = onnx.parser.parse_model(HEAD + "{ y = Neg (x) }").SerializeToString()
WITH_SORT: bytes = onnx.parser.parse_model(HEAD + "{ y = effexport.LSHSort (x) }\n" + FUNCTION).SerializeToString()


class FakeOrt:
    """A plain onnxruntime that loads plugin providers, on a machine with two GPUs.

    failure: what it says when it is to load the provider. assigned: which provider runs which operators.
    """

    __version__ = "9.9"

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.assigned: dict[str, list[str]] = {RTX: ["Neg"]}
        self.gpus = [SimpleNamespace(ep_name=RTX, number=number) for number in range(2)]
        self.libraries: list[tuple[str, str]] = []
        self.added: list[tuple[list[Any], dict[str, str]]] = []
        self.kernels: list[str] = []
        self.opened: list[dict[str, Any]] = []

    def register_execution_provider_library(self, name: str, library: str) -> None:
        if self.failure is not None:
            raise self.failure
        if self.libraries:
            raise RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : EP library is already registered under {name}")
        self.libraries.append((name, library))

    def get_ep_devices(self) -> list[Any]:
        return [SimpleNamespace(ep_name=CPU), *(self.gpus if self.libraries else [])]

    def SessionOptions(self) -> Any:
        return SimpleNamespace(
            add_session_config_entry=lambda key, value: None,
            add_provider_for_devices=lambda devices, options: self.added.append((devices, options)),
            register_custom_ops_library=self.kernels.append,
        )

    def InferenceSession(self, source: Any, options: Any, **arguments: Any) -> Any:
        self.opened.append(arguments)
        parts = [
            SimpleNamespace(ep_name=name, get_nodes=lambda ops=ops: [SimpleNamespace(op_type=op) for op in ops])
            for name, ops in self.assigned.items()
        ]
        return SimpleNamespace(
            get_providers=lambda: [RTX, CPU] if self.added else [CPU],
            get_provider_graph_assignment_info=lambda: parts,
        )


@pytest.fixture
def ort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeOrt:
    """The stand-in, with a package as pip installs it, in a process that forbids TF32, with a cache of its own."""
    fake = FakeOrt()
    package = tmp_path / "site" / ort_rtx.PACKAGE.module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def get_library_path():\n    return 'provider.so'\n")
    for name in ("libtensorrt_rtx.so.1.7.1", "libcudart.so.13.4.36"):
        (package / name).touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, ort_rtx.PACKAGE.module, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: None)
    monkeypatch.setattr(ort_session, "import_onnxruntime", lambda: fake)
    monkeypatch.setenv("EFFEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(ort_tensorrt.TF32_VARIABLE, "0")
    return fake


def settings(**fields: Any) -> OrtSettings:
    return OrtSettings(provider="tensorrt-rtx", **fields)


@pytest.mark.filterwarnings("error")
def test_the_provider_is_registered_once_and_runs_on_the_first_gpu(ort: FakeOrt, tmp_path: Path) -> None:
    for _ in range(2):
        session_from_model(PLAIN, settings())
    assert ort.libraries == [(RTX, "provider.so")]
    (devices, options), again = ort.added
    assert devices == ort.gpus[:1]
    assert options.keys() == {"nv_runtime_cache_path"}
    assert Path(options["nv_runtime_cache_path"]).parent == tmp_path / "cache" / "ort-rtx"
    assert again == (devices, options)
    # providers that are named there would replace those of the options
    assert ort.opened[0] == {"providers": [], "enable_fallback": 0}


def test_the_profile_becomes_options_as_the_provider_spells_them(ort: FakeOrt) -> None:
    session_from_model(PLAIN, settings(profile=PROFILE))
    session_from_model(PLAIN, settings())
    with_profile, without = (options for _, options in ort.added)
    assert with_profile["nv_runtime_cache_path"] != without["nv_runtime_cache_path"]
    assert {name: value for name, value in with_profile.items() if "profile" in name} == {
        "nv_profile_min_shapes": "x:1x4",
        "nv_profile_opt_shapes": "x:2x4",
        "nv_profile_max_shapes": "x:8x4",
    }


@pytest.mark.filterwarnings("error")
def test_custom_operators_run_as_bodies_whatever_kernels_there_are(
    ort: FakeOrt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find_library", lambda: pytest.fail("the library was looked up"))
    for implementation in ("auto", "body"):
        session = session_from_model(WITH_SORT, settings(implementation=implementation))
        assert session.implementation == {"LSHSort": "body"}
    assert ort.kernels == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"implementation": "kernel"}, "implementation is 'kernel'; TensorRT-RTX has no plugins, .*: leave it out"),
        ({"cuda_graph": True}, "cuda_graph needs the provider 'cuda'; the provider is 'tensorrt-rtx'"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings(**fields)


def test_the_settings_know_their_runtime_and_that_arrays_are_on_the_host() -> None:
    assert (settings().runtime, settings().device) == ("ort-rtx", "cpu")


def test_tf32_that_nobody_asked_for_is_said_with_its_remedy(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ort_tensorrt.TF32_VARIABLE)
    with pytest.warns(KernelWarning, match=r"TensorRT-RTX's provider lets the GPU .* NVIDIA_TF32_OVERRIDE=0 before"):
        session_from_model(PLAIN, settings())


def test_a_model_that_the_provider_takes_nothing_of_is_an_error(ort: FakeOrt) -> None:
    ort.assigned = {CPU: ["Neg"]}
    with pytest.raises(UserError, match="TensorRT-RTX took no node of the model, which would run on CPUExecution"):
        session_from_model(PLAIN, settings())
    ort.assigned = {RTX: ["Neg"], CPU: ["Shape"]}
    with pytest.warns(KernelWarning, match="TensorRT-RTX did not take Shape, which run on the CPU instead"):
        session_from_model(PLAIN, settings())


def test_a_gpu_that_the_provider_does_not_support_is_named(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    ort.gpus = []
    monkeypatch.setattr(ort_rtx, "gpus_here", lambda: (Gpu("GPU-1", "sm_90"),))
    message = "has no device to run on: this machine has SM 90; expected an NVIDIA GPU of SM 86, SM 89, or SM 120 and"
    for open_session in (lambda: session_from_model(PLAIN, settings()), lambda: check_settings(settings())):
        with pytest.raises(UserError, match=message):
            open_session()


def test_a_provider_that_does_not_load_is_one_error_with_its_reason(ort: FakeOrt) -> None:
    ort.failure = RuntimeError("libcuda.so.1: cannot open shared object file")
    message = r"onnxruntime 9\.9 does not load onnxruntime-ep-nv-tensorrt-rtx .*libcuda\.so\.1: .* a driver for CUDA 13"
    with pytest.raises(UserError, match=message):
        session_from_model(PLAIN, settings())


def test_a_missing_package_names_its_extra(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, ort_rtx.PACKAGE.module, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'effexport\[ort-rtx\]'"):
        session_from_model(PLAIN, settings())


def test_an_onnxruntime_without_plugins_is_told_the_release_that_has_them(
    ort: FakeOrt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeOrt, "register_execution_provider_library")
    with pytest.raises(UserError, match=r"onnxruntime 9\.9 loads no plugin providers; expected 1\.24 or later"):
        session_from_model(PLAIN, settings())


@pytest.mark.parametrize("found", [True, False], ids=["found by name", "not found by name"])
def test_the_cuda_runtime_of_the_package_is_loaded_where_there_is_no_other(
    ort: FakeOrt, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    asked: list[str] = []

    def load(name: str) -> None:
        asked.append(Path(name).name)
        if "/" not in name and not found:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    session_from_model(PLAIN, settings())
    assert asked[:2] == (["libcudart.so.13"] * 2 if found else ["libcudart.so.13", "libcudart.so.13.4.36"])


def test_the_linked_release_is_read_without_importing_the_package(
    ort: FakeOrt, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ort_rtx.linked_release() == "1.7.1"
    assert ort_rtx.PACKAGE.module not in sys.modules
    monkeypatch.setitem(sys.modules, ort_rtx.PACKAGE.module, None)
    assert ort_rtx.linked_release() is None


# The real package

# What the package's libraries want of a driver. CUDA's error 100 is "no device", NVML's error 9 "driver not loaded".
CUDA_FUNCTIONS = """
CtxCreate_v4 CtxDestroy_v2 CtxGetCurrent CtxPopCurrent_v2 CtxPushCurrent_v2 CtxSetCurrent DestroyExternalMemory
DestroyExternalSemaphore ExternalMemoryGetMappedBuffer FuncSetAttribute GetErrorName GetErrorString ImportExternalMemory
ImportExternalSemaphore Init LaunchKernel ModuleGetFunction ModuleLoadData ModuleUnload SignalExternalSemaphoresAsync
StreamGetCtx WaitExternalSemaphoresAsync
"""
NVML_FUNCTIONS = "ErrorString Init_v2 Shutdown SystemGetDriverVersion"
CHECK = """
from effexport.errors import UserError
from effexport.runners.ort.session import check_settings
from effexport.runners.ort.settings import OrtSettings

for _ in range(2):
    try:
        check_settings(OrtSettings(provider="tensorrt-rtx"))
    except UserError as error:
        print(error)
"""


def refusals(library_path: str) -> list[str]:
    """Both lines that a process says when it asks twice for the provider, with these folders of libraries."""
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    return lines


def without_a_gpu() -> bool:
    return not Path("/dev/nvidiactl").exists()


@pytest.mark.requires("ort", "ort-rtx")
@pytest.mark.skipif(not without_a_gpu(), reason="there is a GPU, or at least its driver")
def test_without_a_driver_the_real_provider_is_one_clear_error() -> None:
    for line in refusals(""):
        assert "does not load onnxruntime-ep-nv-tensorrt-rtx 0." in line
        assert "libcuda.so.1: cannot open shared object file" in line
        assert line.endswith("and a driver for CUDA 13, which installs libcuda.so.1")


@pytest.mark.requires("ort", "ort-rtx")
@pytest.mark.skipif(not without_a_gpu(), reason="there is a GPU, or at least its driver")
def test_the_real_provider_registers_and_without_a_gpu_is_one_clear_error(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("c++")
    assert compiler is not None, "a compiler is needed, as for the kernel library"
    for name, prefix, functions, status in (
        ("libcuda.so.1", "cu", CUDA_FUNCTIONS, 100),
        ("libnvidia-ml.so.1", "nvml", NVML_FUNCTIONS, 9),
    ):
        source = tmp_path / "driver.c"
        source.write_text("".join(f"int {prefix}{word}(void) {{ return {status}; }}\n" for word in functions.split()))
        options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(tmp_path / name)]
        subprocess.run([compiler, *options, "-x", "c", str(source)], check=True)
    for line in refusals(str(tmp_path)):
        assert line.startswith(f"{RTX} has no device to run on: this machine has no GPU; expected an NVIDIA GPU of SM")
