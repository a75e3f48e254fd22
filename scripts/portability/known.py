"""Failures that are the tools' own: every other cell of the matrix has to be right."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from portability.cells import NOT_RUN, REFUSED, RIGHT, WRONG, Outcome
from portability.models import PRECISIONS, VARIANTS


@dataclass(frozen=True, kw_only=True)
class Known:
    """A failure of tools in the versions that are pinned. reason: what they do; remedy: what to do about it."""

    tools: Collection[str]
    verdict: str
    reason: str
    remedy: str
    variants: Collection[str] = VARIANTS
    precisions: Collection[str] = PRECISIONS


WITHOUT_FUNCTIONS = ("aft-full",)
KNOWN: tuple[Known, ...] = (
    Known(
        tools=("onnx.version_converter 23",),
        verdict=REFUSED,
        variants=tuple(variant for variant in VARIANTS if variant not in WITHOUT_FUNCTIONS),
        reason="it drops model-local functions and keeps their calls",
        remedy="inline the file first, build with `--opset 23`, or use onnxscript.version_converter",
    ),
    Known(
        tools=("onnx.version_converter 18, inlined",),
        verdict=REFUSED,
        reason="it knows no way back to an opset without Gelu (20), or with fewer types of ConstantOfShape",
        remedy="build with `--opset 18`",
    ),
    Known(
        tools=("onnxconverter-common float16", "onnxconverter-common float16 keep_io_types"),
        verdict=WRONG,
        variants=("nystrom", "aft-full"),
        reason="softmaxes, exponentials or sums of the main graph read float16, where they overflow or cancel "
        "on GPUs; on CPUs, which compute float16 in float32, the numbers are right",
        remedy="build with `--precision fp16`, or name these operators in `op_block_list`, as another row does: "
        "Softmax, Exp, Log, ReduceSum, ArgMax, IterativePinv, LSHHash, AFTWindowAttention",
    ),
    Known(
        tools=("onnxconverter-common float16", "onnxconverter-common float16 keep_io_types"),
        verdict=REFUSED,
        variants=("aft-local", "aft-conv"),
        reason="it makes float16 of the position biases of AFTWindowAttention, which are float32 in every precision",
        remedy="build with `--precision fp16`, or name AFTWindowAttention in `op_block_list`, as another row does",
    ),
    Known(
        tools=("quantize_dynamic",),
        verdict=REFUSED,
        precisions=("fp16",),
        reason="it puts DynamicQuantizeLinear, which reads float32 only, after float16 values",
        remedy="quantise the float32 file",
    ),
)


def known_failure(outcome: Outcome) -> Known | None:
    """The entry of the table that belongs to a cell, whatever came out of it."""
    for known in KNOWN:
        if outcome.tool in known.tools and outcome.variant in known.variants and outcome.precision in known.precisions:
            return known
    return None


def surprise(outcome: Outcome) -> str:
    """The deviation of a cell from its expected verdict; "" for none."""
    known = known_failure(outcome)
    expected = RIGHT if known is None else known.verdict
    if outcome.verdict in (expected, NOT_RUN):
        return ""
    if outcome.verdict == RIGHT:
        return f"right, although listed as {expected}: take it out of scripts/portability/known.py"
    return f"expected: {expected}"
