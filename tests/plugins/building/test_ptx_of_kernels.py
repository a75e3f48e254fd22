"""PTX of every kernel, as engines carry it: what is in it for each architecture, and which GPUs can run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cuda_kernels import assert_arithmetic_is_exact, plugin_entries
from emulated_plugins import emulated_op
from kernel_ptx import assembled, bodies_of, entries_of, ptx_by_nvcc, ptx_by_nvrtc

from effexport.plugins.building import ptx, sources
from effexport.plugins.building.ptx import ARCHITECTURES, MAX_ISA, isa_of, ptx_architecture
from effexport.plugins.ops import CUDA_OPS, Op

# in one group with test_tensorrt_plugins.py, which takes what NVRTC makes to TensorRT
pytestmark = [pytest.mark.requires("nvcc", "tensorrt", "onnx", "torch"), pytest.mark.xdist_group("tensorrt")]
every_op = pytest.mark.parametrize("op", CUDA_OPS.values(), ids=lambda op: op.torch_name)
# For SM 80 in every run: attention's tiles with asynchronous copies, and products of split numbers.
NEWER_IN_EVERY_RUN = ("iterative_pinv", "masked_attention")


def marks_of(op: Op, architecture: int) -> list[pytest.MarkDecorator]:
    is_first = architecture == ARCHITECTURES[0] or op.torch_name in NEWER_IN_EVERY_RUN
    return [] if is_first else [pytest.mark.soak]


# Products of these kernels take tensor cores in every half type that has them.
MULTIPLYING = {
    "linear_attention": ("linear_attention_states", "linear_attention_outputs", "linear_attention_causal_outputs"),
    "lsh_attention": ("lsh_attention",),
    "masked_attention": ("masked_attention",),
    "sequence_conv": ("sequence_conv",),
}
# of one multiprocessor
REGISTERS = 65536
PTX_TYPES = {"p": "u64", "i": "u32", "f": "f32"}


def ptx_of(op: Op, architecture: int) -> str:
    """By one of the two compilers, so that each is tried and no kernel is compiled more often than necessary; the soak
    run compares the two."""
    return (ptx_by_nvrtc if architecture == ARCHITECTURES[0] else ptx_by_nvcc)(op, architecture)


def entries_expected(op: Op) -> dict[str, list[str]]:
    """The types of the parameters of every kernel, from its declaration in C++."""
    return {entry: [PTX_TYPES[kind] for kind in emulated_op(op).kinds(entry)] for entry in plugin_entries(op)}


@pytest.mark.parametrize(
    ("op", "architecture"),
    [
        pytest.param(op, architecture, marks=marks_of(op, architecture), id=f"{architecture}-{op.torch_name}")
        for op in CUDA_OPS.values()
        for architecture in ARCHITECTURES
    ],
)
def test_every_entry_takes_pointers_and_words_of_32_bits(op: Op, architecture: int) -> None:
    text = ptx_of(op, architecture)
    assert re.search(rf"^\.target sm_{architecture}$", text, re.MULTILINE)
    assert isa_of(text) <= MAX_ISA
    assert entries_of(text) == entries_expected(op)
    assert_arithmetic_is_exact(text)
    # SM 90 alone has wgmma, and TensorRT does not support cooperative or cluster launches
    assert not re.search(r"\b(wgmma|cluster|grid)\b", text)


@pytest.mark.parametrize(
    "instruction",
    [
        "div.full.f32",
        "div.approx.ftz.f32",
        "mul.ftz.f32",
        "fma.rn.ftz.f32",
        "rsqrt.approx.f32",
        "ex2.approx.f32",
        "cvt.rna.tf32.f32",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    ],
)
def test_an_instruction_that_rounds_more_is_found(instruction: str) -> None:
    exact = "ex2.approx.ftz.f32 %f2, %f1; div.rn.f32 %f3, %f1, %f2; fma.rn.f32 %f4, %f1, %f2, %f3;"
    assert_arithmetic_is_exact(exact)
    with pytest.raises(AssertionError, match=re.escape(instruction)):
        assert_arithmetic_is_exact(f"{exact}\n\t{instruction} %f5, %f1, %f2;")


def test_a_kernel_that_is_compiled_with_fast_math_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    compiler = ptx.find_ptx_compiler()
    with pytest.raises(AssertionError, match=r"div\.approx\.ftz\.f32"):
        assert_arithmetic_is_exact(compiler.compile(sources.FOLDER / CUDA_OPS["AFTSimpleAttention"].cuda_source, 80))


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=marks_of(op, ARCHITECTURES[-1]), id=op.torch_name) for op in CUDA_OPS.values()]
)
def test_what_an_architecture_lacks_is_not_in_its_ptx_and_what_it_has_is_used(op: Op) -> None:
    older, newer = (bodies_of(ptx_of(op, architecture)) for architecture in ARCHITECTURES)
    for body in older.values():
        assert "cp.async" not in body
        assert "m16n8k16" not in body
    multiplying = MULTIPLYING.get(op.torch_name, ())
    for name in multiplying:
        entries = {dtype: f"effexport_{name}_{dtype}" for dtype in ("float32", "float16", "bfloat16")}
        assert "mma.sync" in older[entries["float16"]]
        for dtype in ("float16", "bfloat16"):
            assert "m16n8k16" in newer[entries[dtype]]
        assert "mma.sync" not in older[entries["float32"]] + newer[entries["float32"]]
    if multiplying:
        assert any("cp.async" in body for body in newer.values())


def test_the_pseudo_inverse_splits_every_type_into_products_of_float16() -> None:
    for architecture, shape in zip(ARCHITECTURES, ("m16n8k8", "m16n8k16"), strict=True):
        for body in bodies_of(ptx_of(CUDA_OPS["IterativePinv"], architecture)).values():
            assert set(re.findall(r"mma\.sync\.aligned\.([\w.]+)", body)) == {f"{shape}.row.col.f32.f16.f16.f32"}


# test_cuda_kernels.py assembles what nvcc makes for each GPU, and test_tensorrt_plugins.py each entry
@every_op
@pytest.mark.soak
@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
def test_every_gpu_can_run_the_ptx_that_is_chosen_for_it(op: Op, sm: int, tmp_path: Path) -> None:
    text = ptx_of(op, ptx_architecture([sm]))
    usages, bodies = assembled(text, sm, tmp_path), bodies_of(text)
    assert usages.keys() == {*plugin_entries(op)}
    for entry, usage in usages.items():
        assert usage.spilled_bytes == 0, (entry, usage)
        most_threads = int(re.search(r"\.maxntid (\d+)", bodies[entry])[1])
        assert usage.registers * most_threads <= REGISTERS, (entry, usage)
        # shared memory is all dynamic, so a launch says how much it is
        assert usage.shared_bytes == 0, (entry, usage)


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[pytest.mark.soak] * (name != "LSHHash"), id=op.torch_name)
        for name, op in CUDA_OPS.items()
    ],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_and_nvrtc_make_the_same_entries(op: Op, architecture: int) -> None:
    assert entries_of(ptx_by_nvrtc(op, architecture)) == entries_of(ptx_by_nvcc(op, architecture))
