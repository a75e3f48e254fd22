"""The operators of fused layers, by variant, with how many nodes of each a layer has: the tests' own list."""

from __future__ import annotations

FUSED: dict[str, dict[str, int]] = {
    "softmax": {"MaskedAttention": 1},
    "linear": {"EluLinearAttention": 1},
    "nystrom": {"IterativePinv": 1, "MaskedAttention": 2, "SegmentMeans": 2, "SequenceConv": 1},
    "lsh": {"LSHHash": 1, "LSHSort": 1, "LSHAttention": 1},
    "window": {"BandedAttention": 1},
    "aft-simple": {"AFTSimpleAttention": 1},
    "aft-local": {"AFTWindowAttention": 1},
    "aft-conv": {"AFTWindowAttention": 1},
    "gated-delta": {"CausalConv": 1, "LinearRecurrence": 1},
}
