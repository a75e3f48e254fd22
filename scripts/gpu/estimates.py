"""What docs/gpu_budget.md compares the kernels with: layers with their goals, and estimates of what others take."""

from __future__ import annotations

from dataclasses import dataclass

from effexport.plugins.gpu_check import Case


@dataclass(frozen=True)
class Layer:
    """The core of an attention layer: between its projections, 8 heads × 64, in float16.

    parts: fused operators with the sizes and the type of a case, and how often each runs. others, others_us: launches
    of standard operators, and what they take together. dense, compiled: estimates, in µs, of attention to all tokens
    and of torch.compile.
    """

    name: str
    at_most_us: int
    parts: tuple[tuple[str, Case, int], ...]
    others: int
    others_us: float
    dense: str
    compiled: str


def half(*sizes: int, numbers: tuple[float, ...] = (), kind: str = "random") -> Case:
    return Case(sizes, numbers, kind, "float16")


LAYERS = (
    Layer(
        "Nyström, 64 landmarks, 8192 tokens",
        120,
        (
            ("SegmentMeans", Case((1, 8, 8192, 64, 64)), 2),
            ("MaskedAttention", half(1, 8, 64, 8192, 64, 64, numbers=(0.125,), kind="visible"), 1),
            ("IterativePinv", Case((8, 64, 6), kind="softmax"), 1),
            ("MaskedAttention", half(1, 8, 8192, 64, 64, 64, numbers=(0.125,), kind="visible"), 1),
            ("SequenceConv", half(1, 8, 8192, 64, 65), 1),
        ),
        # the softmax of 64 × 64 matrices, its largest column sums, and Z times the values, 2 µs each; and queries and
        # keys in float32 for their means, 25 MB each
        10,
        8 * 2 + 2 * 8,
        "330–420",
        "250–350",
    ),
    Layer(
        "LSH, 4 rounds, chunks of 64, 32768 tokens",
        800,
        (
            ("LSHHash", half(1, 8, 32768, 64, 4, 64, 2, 32, 32), 1),
            ("LSHSort", Case((32, 32768, 1025), dtype="int32"), 1),
            ("LSHAttention", half(1, 8, 32768, 64, 64, 4, 64, 1, 0, 0, 0, 0), 1),
        ),
        0,
        0,
        "5300–6800",
        "800–1000",
    ),
)
# Estimates by operator, sizes and type, in µs: attention to all tokens, and what PyTorch has.
ESTIMATES = {
    ("masked_attention", (1, 8, 64, 8192, 64, 64), "float16"): ("20–60", "–"),
    ("masked_attention", (1, 8, 8192, 64, 64, 64), "float16"): ("15", "–"),
    ("masked_attention", (1, 8, 8192, 8192, 64, 64), "float16"): ("330–420", "–"),
    ("lsh_attention", (1, 8, 8192, 64, 64, 4, 64, 1, 0, 0, 0, 0), "float16"): ("330–420", "–"),
    ("lsh_attention", (1, 8, 32768, 64, 64, 4, 64, 1, 0, 0, 0, 0), "float16"): ("5300–6800", "–"),
    ("linear_attention", (32, 8, 6000, 64, 64, 0), "float16"): ("–", "1300–1600, `torch.compile`"),
    ("iterative_pinv", (96, 64, 6), "float32"): ("–", "85–110, 24 products in a CUDA graph"),
    ("sequence_conv", (1, 8, 8192, 64, 65), "float16"): ("–", "100, `torch.compile`"),
}
