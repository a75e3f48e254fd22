"""CUDA and TensorRT-RTX as plugin providers of ONNX Runtime: registration, options and errors.

No GPU is needed. A stand-in for onnxruntime records what it is given. Processes of their own load plugins into the real
one, because libraries stay in a process: the real package of TensorRT-RTX, without a driver and with one that finds no
GPU, and a small plugin in place of CUDA's, whose packages our machines do not have.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_onnxruntime import PLAIN, WITH_SORT, FakeOrt, install

from effexport import RunOptions
from effexport.base.environment import versions
from effexport.base.errors import KernelWarning, MissingExtraError, UserError
from effexport.base.runtimes import RUNTIMES
from effexport.bench.costs import reason_without_runtime
from effexport.plugins.building.library import Library
from effexport.plugins.building.toolchain import Gpu
from effexport.runners.ort import kernels, providers
from effexport.runners.ort import session as ort_session
from effexport.runners.ort.providers import CUDA_PLUGIN as CUDA
from effexport.runners.ort.providers import RTX_PLUGIN as RTX
from effexport.runners.ort.providers import PluginProvider
from effexport.runners.ort.session import check_settings, session_from_model
from effexport.tensorrt import ort_providers as ort_tensorrt
from effexport.tensorrt.sidecar import ShapeRange

pytestmark = pytest.mark.requires("onnx")
CPU = "CPUExecutionProvider"
PROVIDERS = pytest.mark.parametrize("provider", [CUDA, RTX], ids=["cuda", "rtx"])
PROFILE: dict[str, ShapeRange] = {"x": ((1, 4), (2, 4), (8, 4)), "step": ((), (), ())}


def install_package(site: Path, provider: PluginProvider, library: str = "provider.so") -> Path:
    """A package as pip installs it. Returns its folder."""
    package = site / provider.module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"from pathlib import Path\ndef get_ep_name():\n    return {provider.name!r}\n"
        f"def get_library_path():\n    return {library!r}\n"
    )
    distribution = provider.packages[-1].distributions[0]
    metadata = site / f"{distribution.replace('-', '_')}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.0\n")
    return package


@pytest.fixture
def ort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeOrt]:
    """The stand-in, with both packages, in a process that forbids TF32, with a cache of its own."""
    fake = install(monkeypatch, FakeOrt(), tmp_path / "cache")
    install_package(tmp_path / "site", CUDA)
    package = install_package(tmp_path / "site", RTX)
    for name in ("libtensorrt_rtx.so.1.7.1", "libcudart.so.13.4.36", "libcudart.so.130"):
        (package / name).touch()
    (tmp_path / "site" / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    (tmp_path / "site" / "nvidia" / "cu13" / "lib" / "libcublas.so.13").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    for provider in (CUDA, RTX):
        monkeypatch.delitem(sys.modules, provider.module, raising=False)
    yield fake
    for provider in (CUDA, RTX):  # or later tests of this process would find these packages
        sys.modules.pop(provider.module, None)


def settings(provider: PluginProvider = RTX, **fields: Any) -> RunOptions:
    return RunOptions(runtime={CUDA: "ort-cuda", RTX: "ort-rtx"}[provider], **fields)


# ---- both providers


@PROVIDERS
@pytest.mark.filterwarnings("error")
def test_a_provider_is_registered_once_and_runs_on_one_gpu(ort: FakeOrt, provider: PluginProvider) -> None:
    for _ in range(2):
        session_from_model(PLAIN, settings(provider))
    assert ort.libraries == [(provider.name, "provider.so")]
    first, again = ort.added
    assert [device.ep_name for device in first[0]] == [provider.name]
    assert again[1] == first[1]
    # providers that are named there would replace those of the options
    assert [(one.providers, one.fallback) for one in ort.opened] == [([], 0)] * 2


@PROVIDERS
def test_without_a_gpu_that_it_supports_a_provider_names_what_there_is(
    ort: FakeOrt, provider: PluginProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    ort.gpus = 0
    for gpus, found in (((), "no GPU"), ((Gpu("GPU-1", "sm_90"),), "SM 90")):
        monkeypatch.setattr(providers, "gpus_here", lambda gpus=gpus: gpus)
        message = (
            f"{provider.name} has no device to run on: this machine has {found}; expected {provider.gpu}, with "
            f"{provider.driver}. {provider.instead}"
        )
        for open_session in (session_from_model, lambda _, given: check_settings(given)):
            with pytest.raises(UserError) as failure:
                open_session(PLAIN, settings(provider))
            assert str(failure.value) == message


@PROVIDERS
def test_a_provider_that_does_not_load_is_one_error_with_its_reason(ort: FakeOrt, provider: PluginProvider) -> None:
    ort.failure = RuntimeError("libcuda.so.1: cannot open shared object file")
    package = provider.packages[-1].distributions[0]
    message = rf"onnxruntime 9\.9 does not load {package} .*libcuda\.so\.1: .* a driver for CUDA 13.* libcuda\.so\.1$"
    with pytest.raises(UserError, match=message):
        session_from_model(PLAIN, settings(provider))


@PROVIDERS
def test_a_library_of_cuda_that_is_nowhere_is_named(ort: FakeOrt, provider: PluginProvider) -> None:
    ort.missing = ["libcufft.so.12"]
    with pytest.raises(
        UserError, match=r"expected .*, and CUDA's libcufft\.so\.12 from NVIDIA's packages for pip, or on"
    ):
        session_from_model(PLAIN, settings(provider))


@PROVIDERS
def test_an_onnxruntime_without_plugins_is_told_the_release_that_has_them(
    ort: FakeOrt, provider: PluginProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeOrt, "register_execution_provider_library")
    monkeypatch.delattr(FakeOrt, "get_ep_devices")
    with pytest.raises(UserError, match=rf"9\.9 loads no plugin providers; expected {provider.onnxruntime} or later"):
        session_from_model(PLAIN, settings(provider))


@pytest.mark.parametrize(
    ("provider", "missing", "loaded"),
    [
        (RTX, ["libcudart.so.13"], ["libcudart.so.13.4.36"]),
        (RTX, ["libcudart.so.13", "libcublas.so.13"], ["libcudart.so.13.4.36", "libcublas.so.13"]),
        (CUDA, ["libcublas.so.13"], ["libcublas.so.13"]),
        (CUDA, [], []),
    ],
)
def test_libraries_of_pip_are_loaded_where_the_system_has_none(
    ort: FakeOrt, monkeypatch: pytest.MonkeyPatch, provider: PluginProvider, missing: list[str], loaded: list[str]
) -> None:
    asked: list[str] = []

    def load(path: str) -> None:
        asked.append(Path(path).name)
        ort.missing.pop(0)

    ort.missing = [*missing]
    monkeypatch.setattr(ctypes, "CDLL", load)
    session_from_model(PLAIN, settings(provider))
    assert asked == loaded


# ---- CUDA


@pytest.mark.filterwarnings("error")
def test_cuda_gets_its_options_and_the_gpu_of_the_settings(ort: FakeOrt) -> None:
    session_from_model(PLAIN, settings(CUDA))
    session_from_model(PLAIN, settings(CUDA, device=1, tf32=True, cuda_graph=True))
    assert [([device.number for device in devices], options) for devices, options in ort.added] == [
        ([0], {"use_tf32": "0", "enable_cuda_graph": "0"}),
        ([1], {"use_tf32": "1", "enable_cuda_graph": "1"}),
    ]
    with pytest.raises(UserError, match="device is 2, and CUDAExecutionProvider has only 0, 1 here"):
        session_from_model(PLAIN, settings(CUDA, device=2))


def test_what_leaves_the_gpu_is_looked_for_with_the_plugin_too(ort: FakeOrt) -> None:
    ort.assigned, ort.final = {CUDA.name: ["Neg"], CPU: ["CumSum"]}, None
    with pytest.warns(KernelWarning, match="whether this model leaves the GPU is not known"):  # nothing was written
        session_from_model(PLAIN, settings(CUDA))
    assert len(ort.added) == 2
    assert ort.added[0][1] == ort.added[1][1]


def test_an_onnxruntime_that_has_cuda_needs_no_plugin(ort: FakeOrt) -> None:
    ort.available = [CUDA.name, CPU]
    given = settings(CUDA)
    assert not providers.is_cuda_plugin(ort)
    assert ort_session.providers_from_settings(ort, given)[0][0] == CUDA.name
    ort_session.session_options(ort, given, None)
    assert (ort.libraries, ort.added) == ([], [])


def test_kernels_run_on_the_plugin(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = Library(tmp_path / "lib.so", outdated=False, info=None)
    monkeypatch.setattr(kernels, "find_library", lambda: library)
    ort.assigned = {CUDA.name: ["LSHSort"]}
    assert session_from_model(WITH_SORT, settings(CUDA)).implementation == {"LSHSort": "kernel"}
    assert ort.kernels == [str(library.path)]


def test_without_any_package_all_ways_to_cuda_are_named(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, CUDA.module, None)
    message = (
        r"onnxruntime 9\.9 has no CUDAExecutionProvider, only CPUExecutionProvider; add it: pip install "
        r"'effexport\[ort-cuda13\]' \(onnxruntime-ep-cuda13\) or pip install 'effexport\[ort-cuda12\]' "
        r"\(onnxruntime-ep-cuda12\), or replace it: pip uninstall onnxruntime, then pip install 'effexport\[gpu\]'$"
    )
    with pytest.raises(UserError, match=message):
        session_from_model(PLAIN, settings(CUDA))


def test_the_version_of_either_package_is_recorded(ort: FakeOrt) -> None:
    assert versions()[CUDA.module] == "0.1.0"
    assert CUDA.title == "onnxruntime-ep-cuda12 0.1.0"


def test_bench_offers_cuda_with_the_plugin(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effexport.runners.ort.import_onnxruntime", lambda: ort)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, CUDA.module, None)
        reason = reason_without_runtime(RUNTIMES["ort-cuda"])
    assert reason is not None
    assert "has no CUDAExecutionProvider" in reason
    assert "pip install 'effexport[gpu]'" in reason
    assert reason_without_runtime(RUNTIMES["ort-cuda"]) is None


# ---- TensorRT-RTX


@pytest.mark.filterwarnings("error")
def test_engines_are_cached_for_each_model(ort: FakeOrt, tmp_path: Path) -> None:
    session_from_model(PLAIN, settings())
    ((_, options),) = ort.added
    assert options.keys() == {"nv_runtime_cache_path"}
    assert Path(options["nv_runtime_cache_path"]).parent == tmp_path / "cache" / "ort-rtx"


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
        (
            {"cuda_graph": True},
            "cuda_graph needs the runtime 'ort-cuda' or 'trt' or 'trt-rtx'; the runtime is 'ort-rtx'",
        ),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings(**fields)


def test_tf32_that_nobody_asked_for_is_said_with_its_remedy(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ort_tensorrt.TF32_VARIABLE)
    with pytest.warns(KernelWarning, match=r"TensorRT-RTX's provider lets the GPU .* NVIDIA_TF32_OVERRIDE=0 before"):
        session_from_model(PLAIN, settings())


def test_a_model_that_the_provider_takes_nothing_of_is_an_error(ort: FakeOrt) -> None:
    ort.assigned = {CPU: ["Neg"]}
    with pytest.raises(UserError, match="TensorRT-RTX took no node of the model, which would run on CPUExecution"):
        session_from_model(PLAIN, settings())
    ort.assigned = {RTX.name: ["Neg"], CPU: ["Shape"]}
    with pytest.warns(KernelWarning, match="TensorRT-RTX did not take Shape, which run on the CPU instead"):
        session_from_model(PLAIN, settings())


def test_a_missing_package_names_its_extra(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, RTX.module, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'effexport\[ort-rtx\]'"):
        session_from_model(PLAIN, settings())


def test_the_linked_release_is_read_without_importing_the_package(
    ort: FakeOrt, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert providers.linked_release() == "1.7.1"
    assert RTX.module not in sys.modules
    monkeypatch.setitem(sys.modules, RTX.module, None)
    assert providers.linked_release() is None


# ---- the real package of TensorRT-RTX

# What the package's libraries want of a driver. CUDA's error 100 is "no device", NVML's error 9 "driver not loaded".
CUDA_FUNCTIONS = """
CtxCreate_v4 CtxDestroy_v2 CtxGetCurrent CtxPopCurrent_v2 CtxPushCurrent_v2 CtxSetCurrent DestroyExternalMemory
DestroyExternalSemaphore ExternalMemoryGetMappedBuffer FuncSetAttribute GetErrorName GetErrorString ImportExternalMemory
ImportExternalSemaphore Init LaunchKernel ModuleGetFunction ModuleLoadData ModuleUnload SignalExternalSemaphoresAsync
StreamGetCtx WaitExternalSemaphoresAsync
"""
NVML_FUNCTIONS = "ErrorString Init_v2 Shutdown SystemGetDriverVersion"
CHECK = """
import sys
from effexport.base.errors import UserError
from effexport.runners.ort.session import check_settings
from effexport.runners.options import RunOptions

for _ in range(2):
    try:
        check_settings(RunOptions(runtime=sys.argv[1]))
    except UserError as error:
        print(error)
"""


def refusals(library_path: str, runtime: str = "ort-rtx", **variables: str) -> list[str]:
    """Both lines that a process says when it asks twice for a provider, with these folders of libraries."""
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path, **variables}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, runtime],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
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
        assert line.startswith(
            f"{RTX.name} has no device to run on: this machine has no GPU; expected an NVIDIA GPU of SM"
        )


# ---- a plugin in place of CUDA's, in the real onnxruntime

# The beginning of OrtEpFactory, whose layout never changes; it finds no GPU.
PLUGIN = """
#include <stddef.h>
#include <stdint.h>
extern int cuda_runtime(void);
static const char* name(const void* self) { return "CUDAExecutionProvider"; }
static const char* version(const void* self) { return "0.1.0"; }
static uint32_t vendor_id(const void* self) { return 0x10de; }
static void* devices(void* self, const void* all, size_t count, void** found, size_t most, size_t* number) {
  *number = 0;
  return NULL;
}
static void* no_data(void* self, void** made) { *made = NULL; return NULL; }
static void* no_allocator(void* self, const void* memory, const void* options, void** made) {
  *made = NULL;
  return NULL;
}
static _Bool no(const void* self) { return 0; }
static void release(void* self, void* made) {}
static struct {
  uint32_t release;
  const void* functions[24];
} factory = {24, {name, name, devices, NULL, release, vendor_id, version, NULL, no_allocator, release, no_data, no}};
void* CreateEpFactories(const char* registered, const void* api, const void* log, void** made, size_t most, size_t* n) {
  made[0] = &factory;
  *n = cuda_runtime();
  return NULL;
}
void* ReleaseEpFactory(void* made) { return NULL; }
"""


@pytest.mark.requires("ort")
@pytest.mark.skipif(not without_a_gpu(), reason="there is a GPU, or at least its driver")
def test_a_plugin_of_cuda_registers_in_the_real_onnxruntime_and_without_a_gpu_is_one_clear_error(
    tmp_path: Path,
) -> None:
    site, linked = tmp_path / "site", "libcudastandin.so.13"
    install_package(site, CUDA, str(tmp_path / "libplugin.so"))
    nvidia = site / "nvidia" / "cu13" / "lib"
    nvidia.mkdir(parents=True)
    for source, options in (
        ("int cuda_runtime(void) { return 1; }", ["-o", nvidia / linked, f"-Wl,-soname,{linked}"]),
        (PLUGIN, ["-o", tmp_path / "libplugin.so", nvidia / linked]),
    ):
        (tmp_path / "source.c").write_text(source)
        subprocess.run(["cc", "-shared", "-fPIC", "-w", tmp_path / "source.c", *options], check=True)
    for line in refusals("", "ort-cuda", PYTHONPATH=str(site)):
        assert line == (
            "CUDAExecutionProvider has no device to run on: this machine has no GPU; expected an NVIDIA GPU, with a "
            "driver for CUDA 13, or for CUDA 12 with onnxruntime-ep-cuda12. Use --runtime ort on the CPU"
        )
    (nvidia / linked).unlink()
    for line in refusals("", "ort-cuda", PYTHONPATH=str(site)):
        assert "does not load onnxruntime-ep-cuda12 0.1.0: " in line
        assert line.endswith(f"and CUDA's {linked} from NVIDIA's packages for pip, or on LD_LIBRARY_PATH")
