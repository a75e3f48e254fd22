"""Rows of buckets on which sorts go wrong."""

from __future__ import annotations

import numpy as np


def bucket_rows(length: int, num_buckets: int) -> np.ndarray:
    """Random, all equal to the first and to the last bucket, descending, alternating, and nearly sorted."""
    generator = np.random.default_rng(length * 10007 + num_buckets)
    position = np.arange(length)
    return np.stack(
        [
            generator.integers(0, num_buckets, length),
            np.zeros(length, dtype=np.int64),
            np.full(length, num_buckets - 1),
            (length - 1 - position) * num_buckets // length,
            np.where(position % 2 == 0, num_buckets - 1, 0),
            np.sort(generator.integers(0, num_buckets, length))[np.roll(position, 1)],
        ]
    ).astype(np.int32)
