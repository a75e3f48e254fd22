"""The CUDA kernels: compiled for every GPU they are meant for, and run on the CPU by native/cuda_on_cpu.h.

What an emulated run shows, and what only a GPU can (scripts/gpu_checks.py), is said at the head of that file.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from bucket_patterns import bucket_rows

from effexport.plugins.iterative_pinv import trt as trt_pinv
from effexport.plugins.lsh_sort import trt as trt_sort
from effexport.plugins.lsh_sort.op import reference as sort_reference
from effexport.plugins.toolchain import CUDA_ARCHITECTURES, find_compiler, find_nvcc

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "plugins"
NATIVE = Path(__file__).parent / "native"
KERNELS = ("iterative_pinv", "lsh_sort")
# the most that a block may have on every GPU without opting in, static and dynamic together
SHARED_BYTES = 48 * 1024
REGISTERS = 65536

# inputs, int32 scalars, outputs: the order that TensorRT wants
PINV_PARAMETERS = ["u64", "u64", "u32", "u32", "u32", "u64"]
ENTRIES = {
    **{f"effexport_iterative_pinv_{dtype}": PINV_PARAMETERS for dtype in ("float32", "float16", "bfloat16")},
    **{
        f"effexport_iterative_pinv_scratch_{dtype}": [*PINV_PARAMETERS, "u64"]
        for dtype in ("float32", "float16", "bfloat16")
    },
    "effexport_lsh_sort": ["u64", "u32", "u32", "u32", "u64", "u64"],
}
THREADS = {entry: 512 if "scratch" in entry else 1024 if "sort" in entry else 256 for entry in ENTRIES}


def run(*command: str | Path, **options) -> str:
    """What a command prints. Its failure shows all of it."""
    completed = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert completed.returncode == 0, f"{' '.join(map(str, command))}\n{completed.stdout}{completed.stderr}"
    return completed.stdout + completed.stderr


@dataclass(frozen=True)
class Usage:
    """What ptxas says about one entry on one architecture."""

    registers: int
    static_shared_bytes: int
    spilled_bytes: int


def parse_usage(text: str) -> dict[tuple[str, int], Usage]:
    """(entry, architecture) → Usage, from the output of `nvcc --resource-usage`."""
    usages = {}
    for part in text.split("Compiling entry function ")[1:]:
        entry, architecture = re.match(r"'(\w+)' for 'sm_(\d+)'", part).groups()
        shared = re.search(r"(\d+) bytes smem", part)
        usages[entry, int(architecture)] = Usage(
            int(re.search(r"Used (\d+) registers", part)[1]),
            int(shared[1]) if shared else 0,
            int(re.search(r"(\d+) bytes spill stores", part)[1]),
        )
    return usages


@pytest.fixture(scope="module")
def usages(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Usage]:
    """Compiles both kernels for all architectures, with warnings as errors."""
    folder = tmp_path_factory.mktemp("cuda")
    known = run(find_nvcc(), "--list-gpu-code").split()
    targets = [sm for sm in CUDA_ARCHITECTURES if f"sm_{sm}" in known]
    strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]
    codes = [option for sm in targets for option in ("-gencode", f"arch=compute_{sm},code=sm_{sm}")]
    command = [find_nvcc(), "-std=c++17", "-I", PLUGINS, "--threads", "2", *strict, *codes, "--resource-usage", "-c"]
    return {
        key: usage
        for kernel in KERNELS
        for key, usage in parse_usage(
            run(*command, PLUGINS / kernel / "kernel_cuda.cu", "-o", folder / f"{kernel}.o")
        ).items()
    }


@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
def test_the_kernels_compile_without_warnings_for_every_gpu(usages: dict[tuple[str, int], Usage]) -> None:
    release = re.search(r"release (\d+)\.", run(find_nvcc(), "--version"))
    architectures = {architecture for _, architecture in usages}
    if int(release[1]) == 13:
        assert architectures == set(CUDA_ARCHITECTURES) == {75, 80, 86, 89, 90, 100, 120}
    assert architectures
    assert set(usages) == {(entry, architecture) for entry in ENTRIES for architecture in architectures}


@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
def test_the_kernels_can_be_launched_with_their_threads(usages: dict[tuple[str, int], Usage]) -> None:
    for (entry, architecture), usage in usages.items():
        assert usage.registers * THREADS[entry] <= REGISTERS, (entry, architecture, usage)
        # shared memory is all dynamic, and the launches stay within 48 KiB of it
        assert usage.static_shared_bytes == 0, (entry, architecture, usage)
        # a few words outside the inner loop; more would mean that a tile no longer fits in registers
        assert usage.spilled_bytes <= 32, (entry, architecture, usage)


@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
@pytest.mark.parametrize("kernel", KERNELS)
def test_ptx_has_the_entries_and_parameters_that_tensorrt_is_told(kernel: str, tmp_path: Path) -> None:
    ptx = tmp_path / "kernel.ptx"
    source = PLUGINS / kernel / "kernel_cuda.cu"
    run(find_nvcc(), "-std=c++17", "-ptx", "-arch=compute_80", "-I", PLUGINS, source, "-o", ptx)
    text = ptx.read_text(encoding="utf-8")
    found = {
        entry: re.findall(r"\.param \.(\w+) ", parameters)
        for entry, parameters in re.findall(r"\.visible \.entry (\w+)\(([^)]*)\)", text)
    }
    assert found == {entry: types for entry, types in ENTRIES.items() if kernel in entry}
    # TF32 would round the factors to 10 bits, and cooperative or cluster launches are not to be had in TensorRT
    assert not re.search(r"\b(mma|wmma|wgmma|cluster|grid)\b|tf32", text)


def build(folder: Path, source: str, output: str, *options: str) -> Path:
    """Compiles emulated kernels. The emulation takes the place of the toolkit's headers, which become empty files."""
    for header in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h"):
        (folder / header).touch()
    includes = [f"-I{path}" for path in (PLUGINS, NATIVE, folder)]
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    # results are compared bit by bit with NumPy's, which fuses nothing
    exact = "-ffp-contract=off"
    run(*find_compiler(), "-std=c++17", exact, *options, *warnings, *includes, NATIVE / source, "-o", folder / output)
    return folder / output


DTYPES = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(ml_dtypes.bfloat16): "bfloat16"}
GUARD = 64
ALL_BLOCKS = 2**32 - 1


def guarded(shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """An array of NaN, or −1, and the larger one that it lies in."""
    size = int(np.prod(shape))
    whole = np.frombuffer(bytearray(b"\xff" * ((size + 2 * GUARD) * dtype.itemsize)), dtype)
    return whole[GUARD : GUARD + size].reshape(shape), whole


def assert_guard_is_intact(whole: np.ndarray) -> None:
    edges = np.concatenate([whole[:GUARD], whole[-GUARD:]]).view(np.uint8)
    assert (edges == 0xFF).all(), "the kernel wrote beyond its output"


class Emulated:
    """The kernels as functions of NumPy arrays. Outputs are poisoned before a kernel runs, and guarded."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.library.get_last_launch.argtypes = [pointer]
        self.library.set_schedule.argtypes = [ctypes.c_uint, ctypes.c_uint]
        self.library.iterative_pinv_scratch_bytes.argtypes = [integer, integer]
        self.library.iterative_pinv_scratch_bytes.restype = ctypes.c_size_t
        self.library.lsh_sort.argtypes = [pointer, integer, integer, integer, pointer, pointer]
        for name in DTYPES.values():
            function = getattr(self.library, f"iterative_pinv_{name}")
            function.argtypes = [pointer, pointer, integer, integer, integer, pointer, pointer]

    def pinv(
        self, a: np.ndarray, scale: np.ndarray, iterations: int = 6, *, seed: int = 0, max_blocks: int = ALL_BLOCKS
    ) -> np.ndarray:
        count, m, _ = a.shape
        z, whole = guarded(a.shape, a.dtype)
        scratch_bytes = self.library.iterative_pinv_scratch_bytes(count, m)
        scratch, whole_scratch = guarded((scratch_bytes // 4,), np.dtype(np.float32))
        self.library.set_schedule(seed, max_blocks)
        function = getattr(self.library, f"iterative_pinv_{DTYPES[a.dtype]}")
        inputs = (np.ascontiguousarray(a), np.ascontiguousarray(scale))
        error = function(*(x.ctypes.data for x in inputs), count, m, iterations, scratch.ctypes.data, z.ctypes.data)
        assert error == 0
        assert_guard_is_intact(whole)
        assert_guard_is_intact(whole_scratch)
        return z

    def sort(
        self, buckets: np.ndarray, num_buckets: int, *, seed: int = 0, max_blocks: int = ALL_BLOCKS
    ) -> tuple[np.ndarray, np.ndarray]:
        buckets = np.ascontiguousarray(buckets, np.int32)
        order, whole_order = guarded(buckets.shape, buckets.dtype)
        rank, whole_rank = guarded(buckets.shape, buckets.dtype)
        self.library.set_schedule(seed, max_blocks)
        pointers = (order.ctypes.data, rank.ctypes.data)
        error = self.library.lsh_sort(buckets.ctypes.data, *buckets.shape, num_buckets, *pointers)
        assert error == 0
        assert_guard_is_intact(whole_order)
        assert_guard_is_intact(whole_rank)
        return order, rank


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    folder = tmp_path_factory.mktemp("emulated")
    return Emulated(build(folder, "emulated_kernels.cc", "kernels.so", "-O2", "-fPIC", "-shared"))


@pytest.mark.requires("native")
def test_no_kernel_leaves_its_arrays_or_its_shared_memory(tmp_path: Path) -> None:
    sanitizers = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    run(build(tmp_path, "sanitized_kernels.cc", "kernels", *sanitizers))


LENGTHS = [1, 2, 63, 100, 1000, 4096]
# one less, equal to and one more than a digit; the largest single pass and one more; two digits; what LSH layers use
BUCKETS = [1, 2, 31, 32, 33, 65, 257, 352, 353, 1025, 4096, 65537]
INT32_MAX = 2**31 - 1


def assert_sorted(buckets: np.ndarray, num_buckets: int, order: np.ndarray, rank: np.ndarray) -> None:
    """Exactly the reference's order and rank, of the buckets moved into range."""
    expected = sort_reference(torch.from_numpy(buckets.clip(0, num_buckets - 1)), num_buckets)
    np.testing.assert_array_equal(order, expected[0].numpy())
    np.testing.assert_array_equal(rank, expected[1].numpy())


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [*BUCKETS, INT32_MAX])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_sort_equals_the_reference(emulated: Emulated, length: int, num_buckets: int) -> None:
    buckets = bucket_rows(length, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets))


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [5, 33, 352, 1025, INT32_MAX])
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_sort_does_not_depend_on_the_schedule(emulated: Emulated, seed: int, num_buckets: int) -> None:
    buckets = bucket_rows(1500, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets, seed=100 * seed))


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [4, 353])
def test_a_block_sorts_one_row_after_another(emulated: Emulated, num_buckets: int) -> None:
    buckets = bucket_rows(200, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets, max_blocks=2))


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [1, 7, 352, 353, 4096, INT32_MAX])
def test_buckets_out_of_range_are_taken_for_the_nearest_in_range(emulated: Emulated, num_buckets: int) -> None:
    generator = np.random.default_rng(0)
    buckets = generator.integers(-(2**31), 2**31, (2, 300)).astype(np.int32)
    buckets[:, ::3] = generator.integers(0, num_buckets, (2, 100))
    buckets[:, ::5] = [[-1], [num_buckets if num_buckets < INT32_MAX else -2]]
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets))


@pytest.mark.requires("native")
@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 0)])
def test_the_sort_accepts_empty_inputs(emulated: Emulated, shape: tuple[int, int]) -> None:
    assert emulated.library.lsh_sort(None, *shape, 4, None, None) == 0


@pytest.mark.requires("native")
@pytest.mark.parametrize("arguments", [(2**31, 1, 4), (1, 2**31, 4), (1, 1, 0), (1, 1, 2**31), (-1, 1, 4)])
def test_the_sort_refuses_what_its_kernel_cannot_count(emulated: Emulated, arguments: tuple[int, int, int]) -> None:
    assert emulated.library.lsh_sort(None, *arguments, None, None) == 1


@pytest.mark.soak
@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [*BUCKETS, INT32_MAX])
def test_long_rows_are_sorted(emulated: Emulated, num_buckets: int) -> None:
    buckets = bucket_rows(65536, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets, seed=num_buckets))


def exact_pinv(a: np.ndarray, scale: np.ndarray, iterations: int = 6) -> np.ndarray:
    """Z0 = Aᵀ / c, Z ← Z/4 (13 I − P (15 I − P (7 I − P))), P = A Z, in float64."""
    a = a.astype(np.float64)
    identity = np.eye(a.shape[-1])
    z = a.swapaxes(1, 2) / scale.astype(np.float64)
    for _ in range(iterations):
        p = a @ z
        z = z / 4 @ (13 * identity - p @ (15 * identity - p @ (7 * identity - p)))
    return z


def softmax_matrices(count: int, m: int, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """What Nyströmformer hands over: rows that add up to one, and the largest column sum of each matrix."""
    logits = 2 * np.random.default_rng(m).standard_normal((count, m, m))
    a = np.exp(logits - logits.max(axis=-1, keepdims=True))
    a /= a.sum(axis=-1, keepdims=True)
    return a.astype(dtype), a.sum(axis=1).max(axis=-1).reshape(count, 1, 1).astype(dtype)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference as a fraction of the largest value."""
    actual = actual.astype(np.float64)
    assert np.isfinite(actual).all()
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


SIZES = [1, 2, 3, 31, 63, 64, 65, 100, 128]


@pytest.mark.requires("native")
@pytest.mark.parametrize("m", SIZES)
def test_the_iteration_computes_the_formula(emulated: Emulated, m: int) -> None:
    a, scale = softmax_matrices(3, m)
    for iterations in (1, 6):
        # float32 products of at most 128 terms; later steps shrink the roundings of earlier ones
        assert relative_error(emulated.pinv(a, scale, iterations), exact_pinv(a, scale, iterations)) <= 1e-5


@pytest.mark.requires("native")
@pytest.mark.parametrize(("dtype", "rounding"), [(np.float16, 2**-11), (ml_dtypes.bfloat16, 2**-8)])
@pytest.mark.parametrize("m", [1, 2, 31, 63, 64, 100])
def test_half_precision_is_rounded_only_at_the_end(emulated: Emulated, m: int, dtype: type, rounding: float) -> None:
    a, scale = softmax_matrices(2, m, dtype)
    z = emulated.pinv(a, scale)
    assert z.dtype == a.dtype
    assert relative_error(z, exact_pinv(a, scale)) <= rounding + 1e-5


@pytest.mark.requires("native")
@pytest.mark.parametrize("m", [5, 64, 65])
def test_the_start_divides_before_it_multiplies(emulated: Emulated, m: int) -> None:
    # the steps of a diagonal matrix are those of its entries, and adding zeros does not round: all bits are known
    sigma = np.float32(0.7) + np.arange(m, dtype=np.float32) / np.float32(3 * m)
    scale = np.full((1, 1, 1), 3, np.float32)
    z0 = (np.float32(1) / scale[0, 0, 0]) * sigma
    p = sigma * z0
    u = np.float32(13) - p * (np.float32(15) - p * (np.float32(7) - p))
    z = emulated.pinv(np.diag(sigma)[None], scale, iterations=1)[0]
    np.testing.assert_array_equal(z, np.diag(np.float32(0.25) * z0 * u))


@pytest.mark.requires("native")
@pytest.mark.parametrize("case", ["equal rows", "nearly equal rows", "one large column", "zero", "identity"])
@pytest.mark.parametrize("m", [31, 64, 100])
def test_near_singular_matrices_stay_finite(emulated: Emulated, m: int, case: str) -> None:
    a = {
        "equal rows": np.full((m, m), 1 / m),
        "nearly equal rows": 1 / m + 1e-6 * softmax_matrices(1, m)[0][0],
        "one large column": np.eye(m)[np.zeros(m, int)],
        "zero": np.zeros((m, m)),
        "identity": np.eye(m),
    }[case].astype(np.float32)[None]
    scale = a.sum(axis=1).max(axis=-1).clip(np.finfo(np.float32).tiny).reshape(1, 1, 1)
    z, expected = emulated.pinv(a, scale), exact_pinv(a, scale)
    assert np.isfinite(z).all()
    # fp32 unit roundoff 6e-8 times the largest gain of six steps from the start value, (13/4)^6 = 1178
    assert np.abs(z - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.requires("native")
@pytest.mark.parametrize("m", [2, 31, 64, 100])
def test_a_matrix_has_the_same_bits_alone_and_among_others(emulated: Emulated, m: int) -> None:
    a, scale = softmax_matrices(5, m)
    together = emulated.pinv(a, scale)
    # other schedules, and blocks that take several matrices in turn
    for seed, max_blocks in [(1, ALL_BLOCKS), (2, 2), (3, 1)]:
        np.testing.assert_array_equal(emulated.pinv(a, scale, seed=seed, max_blocks=max_blocks), together)
    for i in range(5):
        np.testing.assert_array_equal(emulated.pinv(a[i : i + 1], scale[i : i + 1]), together[i : i + 1])


@pytest.mark.requires("native")
@pytest.mark.parametrize("m", [2, 31, 64, 100])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_matrix(emulated: Emulated, m: int, poison: float) -> None:
    a, scale = softmax_matrices(4, m)
    # one block after the other, so that remains of the poisoned matrix would be found
    clean = emulated.pinv(a, scale, max_blocks=1)
    a[1, m // 2, m - 1] = poison
    scale[2] = 0
    z = emulated.pinv(a, scale, max_blocks=1)
    np.testing.assert_array_equal(z[[0, 3]], clean[[0, 3]])
    assert not np.isfinite(z[1]).any()
    assert not np.isfinite(z[2]).all()


@pytest.mark.requires("native")
def test_unaligned_matrices_are_read_element_by_element(emulated: Emulated) -> None:
    for dtype in DTYPES:
        a, scale = softmax_matrices(2, 8, dtype)
        moved = np.empty(a.size + 1, dtype)[1:].reshape(a.shape)
        moved[:] = a
        assert moved.ctypes.data % (4 * dtype.itemsize) != 0
        np.testing.assert_array_equal(emulated.pinv(moved, scale), emulated.pinv(a, scale))


@pytest.mark.requires("native")
@pytest.mark.parametrize(("count", "m"), [(0, 8), (3, 0), (0, 0)])
def test_the_iteration_accepts_empty_inputs(emulated: Emulated, count: int, m: int) -> None:
    assert emulated.library.iterative_pinv_float32(None, None, count, m, 6, None, None) == 0
    assert emulated.library.iterative_pinv_scratch_bytes(count, m) == 0


@pytest.mark.requires("native")
@pytest.mark.parametrize("arguments", [(2**31, 4, 6), (1, 46341, 6), (1, 4, 0), (1, 4, 2**31), (-1, 4, 6)])
def test_the_iteration_refuses_what_its_kernel_cannot_count(
    emulated: Emulated, arguments: tuple[int, int, int]
) -> None:
    assert emulated.library.iterative_pinv_float32(None, None, *arguments, None, None) == 1


@pytest.mark.requires("native")
def test_scratch_memory_does_not_grow_with_the_batch(emulated: Emulated) -> None:
    scratch_bytes = emulated.library.iterative_pinv_scratch_bytes
    assert scratch_bytes(1000, 64) == 0
    assert scratch_bytes(1, 65) == 4 * 68 * 68 * 4  # four buffers, padded to a multiple of 4
    assert scratch_bytes(256, 128) == scratch_bytes(100_000, 128) == 256 * scratch_bytes(1, 128)
    assert scratch_bytes(1, 46340) == 4 * 46340**2 * 4


@pytest.mark.requires("native")
def test_gpu_checks_launches_the_kernels_as_their_sources_do(emulated: Emulated) -> None:
    spec = importlib.util.spec_from_file_location("gpu_checks_launches", ROOT / "scripts" / "gpu_checks.py")
    gpu_checks = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = gpu_checks  # dataclasses look their module up
    spec.loader.exec_module(gpu_checks)
    launch = np.zeros(3, np.int64)
    for m in [*range(1, 70), 100, 128]:
        how = gpu_checks.pinv_launch(3, m, "float32")
        assert how.entry in ENTRIES
        emulated.pinv(*softmax_matrices(3, m), iterations=1, max_blocks=1)
        emulated.library.get_last_launch(launch.ctypes.data)
        assert launch.tolist() == [how.grid, how.block, how.shared_bytes]
        assert emulated.library.iterative_pinv_scratch_bytes(3, m) == how.scratch_bytes
    for num_buckets in [*BUCKETS, 256, 32768, 32769, 1 << 24, (1 << 24) + 1, INT32_MAX]:
        emulated.sort(np.zeros((2, 1)), num_buckets, max_blocks=1)
        emulated.library.get_last_launch(launch.ctypes.data)
        assert launch.tolist() == [2, 1024, gpu_checks.sort_shared_bytes(num_buckets)]


@pytest.mark.requires("native")
def test_the_tensorrt_plugins_launch_the_kernels_as_their_sources_do(emulated: Emulated) -> None:
    launch = np.zeros(3, np.int64)
    for m in range(1, trt_pinv.MAX_M + 1):
        emulated.pinv(*softmax_matrices(3, m), iterations=1, max_blocks=1)
        emulated.library.get_last_launch(launch.ctypes.data)
        assert launch.tolist() == [3, trt_pinv.block_threads(m), trt_pinv.shared_bytes(m)]
    # the next larger matrix is the first that needs scratch memory, which plugins cannot have
    assert emulated.library.iterative_pinv_scratch_bytes(1, trt_pinv.MAX_M) == 0
    assert emulated.library.iterative_pinv_scratch_bytes(1, trt_pinv.MAX_M + 1) > 0
    for num_buckets in [*BUCKETS, 256, 32768, 32769, 1 << 24, (1 << 24) + 1, INT32_MAX]:
        emulated.sort(np.zeros((2, 1)), num_buckets, max_blocks=1)
        emulated.library.get_last_launch(launch.ctypes.data)
        assert launch.tolist() == [2, trt_sort.BLOCK_THREADS, trt_sort.shared_bytes(num_buckets)]
