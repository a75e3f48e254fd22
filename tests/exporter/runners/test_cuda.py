"""CUDA as runners use it: the real cuda-python as far as it goes without a GPU, and both implementations on fakes."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from effexport.runners.cuda import Cuda, CudaError, CudaPython, CudaTorch, Memory, PinnedMemory, bytes_at, open_cuda


def in_a_process_without_a_gpu(code: str) -> str:
    """Its output. Hidden from CUDA, a GPU is none, so this is the same on every machine."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.requires("rtx")
@pytest.mark.parametrize("before", ["", "import torch"])
def test_without_a_gpu_the_error_says_what_running_needs(before: str) -> None:
    output = in_a_process_without_a_gpu(
        f"{before}\nfrom effexport.runners.cuda import open_cuda\n"
        "try: open_cuda('rtx')\nexcept Exception as error: print(type(error).__name__, error)"
    )
    assert output.startswith("UserError CUDA finds no GPU that it can use (cudaError")
    assert "an NVIDIA GPU and its driver; building trt-rtx engines does not" in output


@pytest.mark.requires("rtx")
def test_every_name_of_cuda_python_that_we_use_is_there() -> None:
    source = importlib.import_module("effexport.runners.cuda")
    names = dotted_names(ast.parse(inspect.getsource(source)), {"runtime", "_runtime"})
    names |= {("cudaGetDeviceCount",), ("cudaError_t", "cudaSuccess")}
    assert len(names) > 20
    runtime = importlib.import_module("cuda.bindings.runtime")
    for name in names:
        found = runtime
        for part in name:
            found = getattr(found, part)


def dotted_names(tree: ast.AST, roots: set[str]) -> set[tuple[str, ...]]:
    """The names after `runtime.` or `self._runtime.`: (cudaMalloc,), (cudaMemcpyKind, cudaMemcpyHostToDevice)."""
    names = set()
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute) and node.attr not in roots:
            parts.insert(0, node.attr)
            node = node.value
        root = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        if parts and root in roots:
            names.add(tuple(parts))
    return names


@pytest.mark.requires("rtx")
def test_cuda_python_takes_our_arguments() -> None:
    """Without a GPU each call answers with an error of CUDA; arguments of a wrong type would be a TypeError."""
    output = in_a_process_without_a_gpu("""
import numpy as np
from cuda.bindings import runtime
from effexport.runners.cuda import CudaError, Memory, PinnedMemory
from effexport.runners.cuda import CudaPython

cuda = object.__new__(CudaPython)
cuda._runtime, cuda._device, cuda._stream = runtime, 0, runtime.cudaStream_t()
device, graph = Memory(4096, 16), runtime.cudaGraphExec_t()
pinned = PinnedMemory(4096, 16, array=np.zeros(16, np.uint8))
calls = {
    "memory_info": [()], "allocate": [(16,)], "allocate_pinned": [(16,)], "free": [(device,), (pinned,)],
    "copy": [(device, pinned, 16), (pinned, device, 16)], "synchronize": [()], "capture": [(lambda: None,)],
    "launch": [(graph,)], "destroy": [(graph,)], "close": [()], "__init__": [(runtime,)],
}
for name, arguments in ((name, arguments) for name, each in calls.items() for arguments in each):
    try:
        getattr(cuda, name)(*arguments)
    except CudaError as error:
        assert str(error).startswith("CUDA reports cudaError"), error
        print(name)
assert int(cuda._stream) == cuda.stream_handle == 0
for result in (runtime.cudaStreamEndCapture(cuda._stream), runtime.cudaGraphInstantiate(runtime.cudaGraph_t(), 0)):
    assert len(result) == 2
""")
    assert len(output.split()) >= 12, output


def test_pinned_memory_of_cuda_python_is_the_memory_itself() -> None:
    owner = np.arange(10, dtype=np.uint8)
    view = bytes_at(owner.ctypes.data, 10)
    view[3] = 200
    assert owner[3] == 200
    assert view.view(np.dtype(ml_dtypes.bfloat16)).shape == (5,)


Status: Any = Enum("Status", ["cudaSuccess", "cudaErrorMemoryAllocation"])


class Names(SimpleNamespace):
    """Constants whose values nobody looks at."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeRuntime:
    """cuda.bindings.runtime, on device 1 of two. answers: of calls, beyond a status. fails: the calls that do."""

    def __init__(self) -> None:
        self.cudaError_t = Status
        self.cudaMemcpyKind = self.cudaStreamCaptureMode = self.cudaDeviceAttr = Names()
        self.cudaStreamNonBlocking = 1
        self.calls: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()
        self.device = 1
        self.answers: dict[str, Any] = {
            "cudaStreamCreateWithFlags": 77,
            "cudaMemGetInfo": (3, 4),
            "cudaMalloc": 512,
            "cudaStreamEndCapture": "graph",
            "cudaGraphInstantiate": "executable",
            "cudaGetErrorName": b"cudaErrorMemoryAllocation",
            "cudaGetErrorString": b"out of memory",
        }

    def cudaGetDevice(self) -> tuple[Status, int]:
        return Status.cudaSuccess, self.device

    def cudaSetDevice(self, device: int) -> tuple[Status]:
        self.device = device
        return (Status.cudaSuccess,)

    def cudaDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Status, int]:
        assert device == self.device
        return Status.cudaSuccess, 12 if attribute.endswith("Major") else 1

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name in self.fails:
                return Status.cudaErrorMemoryAllocation, None
            answer = self.answers.get(name)
            values = answer if isinstance(answer, tuple) else () if answer is None else (answer,)
            return (Status.cudaSuccess, *values)

        return call


def test_cuda_python_works_on_the_device_it_was_made_on_and_gives_the_thread_its_own_back() -> None:
    runtime = FakeRuntime()
    cuda: Cuda = CudaPython(runtime)
    assert (cuda.stream_handle, cuda.compute_capability) == (77, 121)
    runtime.device = 0
    with cuda.selected():
        assert runtime.device == 1
        assert cuda.memory_info() == (3, 4)
    assert runtime.device == 0
    with pytest.raises(ZeroDivisionError), cuda.selected():
        _ = 1 / 0
    assert runtime.device == 0


def test_an_error_of_cuda_has_its_name_and_its_text_and_is_not_left_for_others() -> None:
    runtime = FakeRuntime()
    cuda = CudaPython(runtime)
    assert cuda.allocate(16).address == 512
    runtime.fails = {"cudaMalloc"}
    with pytest.raises(CudaError, match=r"^CUDA reports cudaErrorMemoryAllocation: out of memory$"):
        cuda.allocate(16)
    assert runtime.calls[-1] == ("cudaGetLastError",)


def test_memory_is_copied_and_freed_as_what_it_is() -> None:
    runtime = FakeRuntime()
    cuda = CudaPython(runtime)
    runtime.calls.clear()
    device, pinned = Memory(512, 16), PinnedMemory(1024, 16, array=np.zeros(16, np.uint8))
    cuda.copy(device, pinned, 10)
    cuda.free(device)
    cuda.free(pinned)
    copy = ("cudaMemcpyAsync", 512, 1024, 10, "cudaMemcpyDefault", 77)
    assert runtime.calls == [copy, ("cudaFree", 512), ("cudaFreeHost", 1024)]


def test_a_capture_of_cuda_python_leaves_an_executable_and_nothing_else() -> None:
    runtime = FakeRuntime()
    cuda = CudaPython(runtime)
    runtime.calls.clear()
    assert cuda.capture(lambda: runtime.calls.append(("work",))) == "executable"
    assert runtime.calls == [
        ("cudaStreamBeginCapture", 77, "cudaStreamCaptureModeThreadLocal"),
        ("work",),
        ("cudaStreamEndCapture", 77),
        ("cudaGraphInstantiate", "graph", 0),
        ("cudaGraphDestroy", "graph"),
    ]


@pytest.mark.parametrize("end_fails", [False, True])
def test_a_capture_that_fails_is_ended_all_the_same(end_fails: bool) -> None:
    runtime = FakeRuntime()
    cuda = CudaPython(runtime)
    runtime.fails = {"cudaStreamEndCapture"} if end_fails else set()
    with pytest.raises(ZeroDivisionError):
        cuda.capture(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    called = [name for name, *_ in runtime.calls]
    assert "cudaStreamEndCapture" in called
    assert ("cudaGraphDestroy" in called) == (not end_fails)


class FakeGraph:
    """torch.cuda.CUDAGraph. Without a GPU, a capture runs what it captures."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")

    def replay(self) -> None:
        self.calls.append("replay")

    def reset(self) -> None:
        self.calls.append("reset")


@pytest.fixture
def torch_with_gpu() -> SimpleNamespace:
    """PyTorch, whose GPU is the CPU."""
    torch = importlib.import_module("torch")
    stream = SimpleNamespace(cuda_stream=77, synchronize=lambda: None)
    graphs: list[FakeGraph] = []
    return SimpleNamespace(
        uint8=torch.uint8,
        empty=lambda nbytes, dtype, device="cpu", pin_memory=False: torch.empty(nbytes, dtype=dtype),
        graphs=graphs,
        cuda=SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            get_device_capability=lambda device: (9, 0),
            mem_get_info=lambda device: (3, 4),
            Stream=lambda device: stream,
            stream=lambda stream: nullcontext(),
            CUDAGraph=lambda: graphs.append(FakeGraph()) or graphs[-1],
        ),
    )


@pytest.mark.requires("torch")
def test_a_loaded_torch_with_a_gpu_is_used(torch_with_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with_gpu)  # type: ignore[arg-type]
    cuda = open_cuda("rtx")
    assert isinstance(cuda, CudaTorch)
    assert (cuda.stream_handle, cuda.compute_capability, cuda.memory_info()) == (77, 90, (3, 4))


@pytest.mark.requires("torch")
def test_bytes_go_through_torch_and_back(torch_with_gpu: SimpleNamespace) -> None:
    cuda: Cuda = CudaTorch(torch_with_gpu)
    with cuda.selected():
        device, there, back = cuda.allocate(16), cuda.allocate_pinned(16), cuda.allocate_pinned(16)
        there.array[:] = np.arange(16)
        back.array[:] = 0
        cuda.copy(device, there, 16)
        cuda.copy(back, device, 10)
        cuda.synchronize()
        assert back.array.tolist() == [*range(10)] + [0] * 6
        cuda.free(device)
        assert device.owner.untyped_storage().nbytes() == 0, "freed at once, whoever still holds the tensor"


@pytest.mark.requires("torch")
def test_graphs_of_torch_are_captured_replayed_and_reset(torch_with_gpu: SimpleNamespace) -> None:
    cuda = CudaTorch(torch_with_gpu)
    graph = cuda.capture(lambda: None)
    cuda.launch(graph)
    cuda.destroy(graph)
    assert graph.calls == ["begin", "end", "replay", "reset"]
    with pytest.raises(ZeroDivisionError):
        cuda.capture(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert torch_with_gpu.graphs[-1].calls == ["begin", "end", "reset"]


@pytest.mark.requires("torch")
def test_an_error_of_torch_becomes_one_of_ours_without_its_advice(torch_with_gpu: SimpleNamespace) -> None:
    cuda = CudaTorch(torch_with_gpu)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory.\nConsider this and that")

    torch_with_gpu.empty = fail
    with pytest.raises(CudaError, match=r"^CUDA reports through PyTorch: CUDA out of memory\.$"):
        cuda.allocate(16)
