"""The device of a stage: an NVIDIA GPU, or the emulation of tests/plugins/native/cuda_on_cpu.h in its place."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from effexport.plugins.contract import Case

# How native/gpu_check.h numbers element types. LSHSort has one type and ignores the number.
DTYPE_NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2, "int32": 3}


class SetupError(Exception):
    """A requirement is missing on this machine; the message says what was found, what is expected and what to do."""


class KernelError(Exception):
    """A kernel could not be launched or did not finish."""


# Programs are not looked up with effexport.plugins.building, which needs packages that a GPU machine may lack.
def find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def find_compiler() -> str:
    """The C++ compiler. Raises SetupError if there is none."""
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return path
    raise SetupError("a C++ compiler is missing; expected c++, g++ or clang++ on PATH. Install one")


def require_torch() -> None:
    """Check that PyTorch is installed, without loading it. Raises SetupError."""
    if find_spec("torch") is None:
        raise SetupError("PyTorch is missing; expected the module torch. Run this with a Python that has it")


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def asked_of_driver(fields: str) -> str:
    return output_of("nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader")


def check_nvcc(nvcc: str, architecture: int) -> None:
    """Raise SetupError if nvcc does not compile for the GPU, or if its CUDA is too new for the driver."""
    known = re.findall(r"^sm_(\d+)$", output_of(nvcc, "--list-gpu-code"), re.MULTILINE)
    if str(architecture) not in known:
        raise SetupError(
            f"{nvcc} compiles for sm_{', sm_'.join(known) or '?'}; expected sm_{architecture}, which this GPU has. "
            f"Put another CUDA's nvcc on PATH"
        )
    release = re.search(r"release (\d+)\.", output_of(nvcc, "--version"))
    driver = re.search(r"CUDA (?:\w+ )?Version *: *(\d+)\.", output_of("nvidia-smi"))
    # the driver runs all minor releases of its own CUDA; without an answer, launches will tell
    if release and driver and int(driver[1]) < int(release[1]):
        raise SetupError(
            f"the driver runs programs of CUDA {driver[1]}, {nvcc} makes those of CUDA {release[1]}; expected the same "
            f"or a newer driver. Put the nvcc of CUDA {driver[1]} on PATH, or update the driver"
        )


@dataclass(frozen=True)
class Device:
    """The device of all tensors of a run. emulated: it is the CPU, and times mean nothing."""

    emulated: bool

    @property
    def name(self) -> str:
        """As PyTorch calls it."""
        return "cpu" if self.emulated else "cuda"

    def stream(self) -> int:
        """PyTorch's current stream, a cudaStream_t."""
        if self.emulated:
            return 0
        import torch

        return torch.cuda.current_stream().cuda_stream

    def synchronize(self) -> None:
        if not self.emulated:
            import torch

            torch.cuda.synchronize()

    def free_memory(self) -> None:
        """Give cached memory back to the device, for arrays of another size."""
        if not self.emulated:
            import torch

            torch.cuda.empty_cache()

    def hardware(self) -> str:
        """The GPU's name, or that it is emulated. Loads no framework."""
        return "emulation" if self.emulated else asked_of_driver("name")

    def architecture(self) -> int:
        """The GPU's compute capability, such as 90; 0 if it is emulated. Loads no framework. Raises SetupError."""
        if self.emulated:
            return 0
        answer = asked_of_driver("compute_cap")
        if not re.fullmatch(r"\d+\.\d", answer):
            raise SetupError(
                f"nvidia-smi says {answer!r}; expected the compute capability, such as 9.0. Install a newer driver"
            )
        return int(answer.replace(".", ""))

    def loaded_architecture(self) -> int:
        """The same, of the GPU that PyTorch uses."""
        if self.emulated:
            return 0
        import torch

        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor

    def check_setup(self, otherwise: str = "") -> None:
        """Check that PyTorch, a GPU and nvcc are present. Raises SetupError. Loads no framework.

        otherwise: what can be done without a GPU, for the end of the message.
        """
        if self.emulated:
            require_torch()
            return
        if not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode != 0:
            raise SetupError(
                "nvidia-smi finds no GPU; expected an NVIDIA GPU with its driver. "
                f"Run this on a machine with a GPU{otherwise}"
            )
        nvcc = find_nvcc()
        if nvcc is None:
            raise SetupError("nvcc is missing; expected CUDA 12 or later. Put nvcc on PATH")
        check_nvcc(nvcc, self.architecture())
        require_torch()

    def description(self) -> dict[str, str]:
        """The machine and the versions that results depend on."""
        import torch

        described = {"Python": platform.python_version(), "torch": torch.__version__}
        if self.emulated:
            return {"device": "emulation on the CPU; times are not measured", **described}
        fields = "driver_version,clocks.max.sm,clocks.max.memory,power.limit"
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "device": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": str(properties.multi_processor_count),
            "L2 bytes": str(properties.L2_cache_size),
            "memory bytes": str(properties.total_memory),
            "CUDA of PyTorch": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            fields: asked_of_driver(fields),
        }
        for package in ("triton", "onnxruntime-gpu", "onnxruntime"):
            try:
                described[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return described


# What cuts no grid down, and what lets blocks take several items of a small case, one after another.
ALL_BLOCKS, FEW_BLOCKS = 2**32 - 1, 2


class Kernels:
    """The library of all operators' kernels. Calls their shims with tensors, on PyTorch's current stream.

    Raises SetupError if it is compiled for another GPU.
    """

    def __init__(self, library: Path, device: Device) -> None:
        self.device = device
        self._library = ctypes.CDLL(str(library))
        self._library.effexport_error_name.restype = ctypes.c_char_p
        compiled, loaded = self._library.effexport_architecture(), device.loaded_architecture()
        if compiled != loaded:
            raise SetupError(
                f"{library} is compiled for sm_{compiled}; expected sm_{loaded}, which PyTorch's GPU has. Set "
                f"CUDA_VISIBLE_DEVICES to GPUs of one kind, and run the build stage again"
            )
        self.set_schedule(0)

    def set_schedule(self, seed: int, most_blocks: int = ALL_BLOCKS) -> None:
        """Choose the order in which the emulation runs threads, which a GPU ignores, and cut down larger grids."""
        self._library.effexport_set_schedule(ctypes.c_uint(seed), ctypes.c_uint(most_blocks))

    def scratch_bytes(self, op: str, case: Case) -> int:
        """The scratch memory that a call needs."""
        function = self._library[f"effexport_check_{op}_scratch"]
        function.restype = ctypes.c_size_t
        return int(function(DTYPE_NUMBERS[case.dtype], _sizes(case)))

    def launch(self, op: str, case: Case, arrays: Sequence[Tensor], scratch: Tensor | None = None) -> None:
        """Enqueue one call. arrays: inputs, then outputs, contiguous. scratch: scratch_bytes of memory.

        Raises KernelError if the launch fails.
        """
        assert all(array.is_contiguous() for array in arrays)
        error = self._library[f"effexport_check_{op}"](
            DTYPE_NUMBERS[case.dtype],
            (ctypes.c_void_p * len(arrays))(*(array.data_ptr() for array in arrays)),
            _sizes(case),
            (ctypes.c_double * len(case.numbers))(*case.numbers),
            ctypes.c_void_p(0 if scratch is None else scratch.data_ptr()),
            ctypes.c_void_p(self.device.stream()),
        )
        if error != 0:
            name = self._library.effexport_error_name(error).decode()
            raise KernelError(f"{op}, {case.name}: the launch failed with {name} ({error})")

    def recorded(self, first: int) -> list[tuple[str, tuple[int, int, int]]]:
        """In the emulation, all launches from number `first` on: kernel, blocks, threads, bytes of shared memory."""
        function = self._library["effexport_launch"]
        function.restype = ctypes.c_char_p
        sizes = (ctypes.c_int64 * 3)()
        found = []
        while name := function(ctypes.c_size_t(first + len(found)), sizes):
            found.append((name.decode(), (sizes[0], sizes[1], sizes[2])))
        return found


def _sizes(case: Case) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(case.sizes))(*case.sizes)
