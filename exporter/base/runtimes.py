"""The table of runtimes: what can run a model, where, and what it needs. Loads no framework.

Everything that depends on a runtime's name reads this table: --runtime, --runtimes and --target, the errors that list
them, `doctor`, reports, benchmarks, sweeps and the servers.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from functools import partial
from typing import Literal


def version_tuple(version: str) -> tuple[int, int]:
    """Major and minor number."""
    major, minor, *_ = [*version.split("."), "0"]
    return int(major), int(minor)


@dataclass(frozen=True)
class Package:
    """A Python package that effexport uses.

    distributions: the names under which it may be installed. purpose: what it is needed for.
    extra: the optional part of effexport that adds it; "" for the core. optional: most users do without it.
    oldest: the first release that works, as (major, minor).
    """

    distributions: tuple[str, ...]
    module: str
    purpose: str
    extra: str = ""
    optional: bool = False
    oldest: tuple[int, int] = (0, 0)

    @property
    def version(self) -> str | None:
        """Installed version, found without importing the package; None if it is not installed."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    @property
    def remedy(self) -> str:
        """The command that adds it."""
        return f"pip install 'effexport[{self.extra}]'" if self.extra else f"pip install {self.distributions[0]}"


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A row of the table.

    label: its name for people. device: what computes. package: what it needs first of all.
    plugins: packages of which any one adds it to a plain onnxruntime, in place of `package`.
    folder: the folder in exporter/ whose module `runner` opens artifacts with it; "" for those of `bench` alone.
    platform: its name in the V2 inference protocol.
    takes: the fields of RunOptions that it follows, beside those that all of ONNX Runtime follow.
    provider: the execution provider of ONNX Runtime. tensors: the place of its tensors, and of our kernels.
    engine: true if it runs an engine built for it, and not the ONNX file; it is then also a --target of `build`.
    engine_options: the options of EngineSpec that only this target has. built_where_it_runs: true if
    its engines are built on the GPU that they are for, and for no other. engine_plugins: true if they may have plugins.
    shapes_of_values: true if sizes inside its engines may depend on values, as those of NonZero do.
    missing: a remark for those who have not installed it.
    tensorrt: the product of NVIDIA that makes its engines; "" for none. engine_maker: the package that has it.
    bench: true if `bench` offers it. The last three fields are for `bench`, too.
    precision_hints: the values of --precision-hint, which has it compute in another precision than the model's.
    graph: the ONNX file it reads: "ours" with our operators, "naive" with none of them, or "" for PyTorch itself.
    implementation: of our operators in ONNX Runtime, as in RunOptions. compiled: run by torch.compile.
    """

    name: str
    label: str
    device: Literal["cpu", "cuda"]
    package: Package
    plugins: tuple[Package, ...] = ()
    folder: str = ""
    platform: str = ""
    takes: tuple[str, ...] = ()
    provider: str = ""
    tensors: Literal["cpu", "cuda"] = "cpu"
    engine: bool = False
    engine_options: tuple[str, ...] = ()
    built_where_it_runs: bool = False
    engine_plugins: bool = False
    shapes_of_values: bool = True
    missing: str = ""
    tensorrt: str = ""
    engine_maker: str = ""
    bench: bool = True
    precision_hints: tuple[str, ...] = ()
    graph: Literal["ours", "naive", ""] = "ours"
    implementation: str = "auto"
    compiled: bool = False

    @property
    def in_ort(self) -> bool:
        """True for a provider of ONNX Runtime."""
        return bool(self.provider)

    @property
    def decodes(self) -> bool:
        """True if it runs the decode steps of causal models."""
        return self.engine or self.in_ort

    @property
    def grows_caches(self) -> bool:
        """True if it runs the decode steps of encoder-decoders, whose cache grows from nothing: engines have no empty
        inputs, and OpenVINO 2026.4.1 computes another answer from eight tokens in the cache on."""
        return self.provider in (CPU, CUDA)


# The execution providers of ONNX Runtime, by its own names.
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT, TENSORRT_RTX = "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"

TORCH = Package(("torch",), "torch", "build and bench models", "build", optional=True)
_TORCH = partial(Runtime, package=TORCH, graph="")
ORT_FOLDER = "runners/ort"
_ORT_CPU = partial(
    Runtime,
    device="cpu",
    package=Package(
        ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"), "onnxruntime", "run and verify on the CPU", "cpu"
    ),
    platform="onnxruntime_onnx",
    provider=CPU,
)
_ORT_GPU = partial(
    Runtime,
    device="cuda",
    package=Package(("onnxruntime-gpu",), "onnxruntime", "run and verify on a GPU", "gpu", optional=True),
    folder=ORT_FOLDER,
    platform="onnxruntime_onnx",
    tensors="cuda",
)
_CUDA_PLUGINS = tuple(
    Package(
        (f"onnxruntime-ep-cuda{major}",), "onnxruntime_ep_cuda", "run and verify on a GPU", f"ort-cuda{major}", True
    )
    for major in (13, 12)
)
_TENSORRT = partial(
    Runtime,
    device="cuda",
    folder="tensorrt",
    platform="tensorrt_plan",
    takes=("cuda_graph", "max_graphs", "weight_streaming_budget_bytes"),
    engine=True,
)

RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        _TORCH(name="torch", label="PyTorch", device="cpu"),
        _TORCH(name="compile", label="torch.compile", device="cpu", compiled=True),
        _ORT_CPU(name="naive", label="ONNX Runtime on the CPU, exported without our operators", graph="naive"),
        _ORT_CPU(name="ort-body", label="ONNX Runtime on the CPU, function bodies only", implementation="body"),
        _ORT_CPU(name="ort", label="ONNX Runtime on the CPU", folder=ORT_FOLDER),
        _TORCH(name="torch-cuda", label="PyTorch on an NVIDIA GPU", device="cuda"),
        _TORCH(name="compile-cuda", label="torch.compile on an NVIDIA GPU", device="cuda", compiled=True),
        _ORT_GPU(
            name="ort-cuda",
            label="ONNX Runtime on an NVIDIA GPU",
            plugins=_CUDA_PLUGINS,
            takes=("device", "cuda_graph", "tf32"),
            provider=CUDA,
        ),
        _ORT_GPU(
            name="ort-trt",
            label="ONNX Runtime with its TensorRT provider",
            takes=("device", "tf32", "profile"),
            provider=TENSORRT,
            tensorrt="TensorRT",
            engine_maker="onnxruntime-gpu",
            bench=False,
        ),
        _TENSORRT(
            name="trt",
            label="TensorRT",
            package=Package(
                ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
                "tensorrt",
                "build TensorRT engines",
                "tensorrt",
                optional=True,
                oldest=(10, 13),
            ),
            engine_options=("timing_cache", "version_compatible", "hardware_compatibility", "refittable", "plugins"),
            built_where_it_runs=True,
            engine_plugins=True,
            missing="it needs an NVIDIA GPU; --target trt-rtx builds without one",
            tensorrt="TensorRT",
            engine_maker="TensorRT, on the GPU",
        ),
        _TENSORRT(
            name="trt-rtx",
            label="TensorRT-RTX",
            package=Package(
                ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
                "tensorrt_rtx",
                "build TensorRT-RTX engines",
                "rtx",
                optional=True,
                oldest=(1, 7),
            ),
            engine_options=("compute_capabilities",),
            shapes_of_values=False,
            missing="it needs no GPU to build engines, only to run them",
            tensorrt="TensorRT-RTX",
            engine_maker="TensorRT-RTX",
        ),
        Runtime(
            name="openvino",
            label="OpenVINO on the CPU",
            device="cpu",
            package=Package(("openvino",), "openvino", "run and verify in OpenVINO", "openvino", optional=True),
            folder="runners/openvino",
            platform="openvino_onnx",
            takes=("precision_hint",),
            precision_hints=("bf16",),
        ),
        Runtime(
            name="ort-openvino",
            label="ONNX Runtime with its OpenVINO provider",
            device="cpu",
            package=Package(
                ("onnxruntime-openvino",), "onnxruntime", "run and verify in OpenVINO", "ort-openvino", optional=True
            ),
            folder=ORT_FOLDER,
            platform="onnxruntime_onnx",
            provider=OPENVINO,
            bench=False,
        ),
        Runtime(
            name="ort-rtx",
            label="ONNX Runtime with TensorRT-RTX's provider",
            device="cuda",
            package=Package(
                tuple(f"onnxruntime-ep-nv-tensorrt-rtx{suffix}" for suffix in ("", "-cu13", "-cu12")),
                "onnxruntime_ep_nv_tensorrt_rtx",
                "run and verify in TensorRT-RTX",
                "ort-rtx",
                optional=True,
            ),
            folder=ORT_FOLDER,
            platform="onnxruntime_onnx",
            takes=("tf32", "profile"),
            provider=TENSORRT_RTX,
            tensorrt="TensorRT-RTX",
            engine_maker="a plugin of onnxruntime",
            bench=False,
        ),
    )
}
# Those of --runtime, which run an artifact.
ARTIFACT_RUNTIMES = {name: runtime for name, runtime in RUNTIMES.items() if runtime.folder}
# Those of `build --runtime`, before there is an engine.
ORT_RUNTIMES = {name: runtime for name, runtime in ARTIFACT_RUNTIMES.items() if runtime.folder and runtime.in_ort}
RUNTIME_OF_PROVIDER = {row.provider: row for row in ORT_RUNTIMES.values()}
# Those of --target.
ENGINE_RUNTIMES = {name: runtime for name, runtime in RUNTIMES.items() if runtime.engine}
# The runtime of a command or a function that is not told another.
DEFAULT_RUNTIME = next(iter(ORT_RUNTIMES))
# The one that computes in bfloat16 where the CPU has it, whatever the model's precision.
BFLOAT16_RUNTIME = next(runtime for runtime in RUNTIMES.values() if "bf16" in runtime.precision_hints)
# Those of `bench --runtimes`.
BENCH_RUNTIMES = {name: runtime for name, runtime in RUNTIMES.items() if runtime.bench}
# The baseline of `bench` on each device: PyTorch without a compiler.
TORCH_OF_DEVICE: dict[str, str] = {
    runtime.device: name for name, runtime in RUNTIMES.items() if not runtime.graph and not runtime.compiled
}

ENGINE_SUFFIX = ".engine"
REBUILD_ENGINE = "build the engine again, or copy it again from its source"


def engine_name(runtime: str, model: str = "model.onnx") -> str:
    """The place of an engine for a runtime, from an artifact's root. model: the ONNX file that it is built from."""
    graph = model.removesuffix(".onnx")
    return f"engine/{runtime}{'' if graph == 'model' else f'.{graph}'}{ENGINE_SUFFIX}"
