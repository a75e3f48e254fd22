"""Means of segments, beyond the contract of their operator (test_contract.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from implementations import implementation
from kernel_sessions import session
from one_node import one_node_model

from effexport.plugins.contract import Case
from effexport.plugins.segment_means import OP as ROW
from effexport.plugins.segment_means.op import segment_means

OP = ROW.onnx_name


def test_segments_are_as_long_as_the_kept_part_of_the_sample_wants() -> None:
    x = torch.arange(1.0, 9.0).reshape(1, 1, 8, 1)
    keep = torch.tensor([[True, False, True, True, True, False, False, False]])
    # 5 tokens up to the last kept one, so segments of 2: {1}, {3, 4}, {5}, and none
    assert segment_means(x, keep, 4).flatten().tolist() == [1.0, 3.5, 5.0, 0.0]


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("how", ["kernel", "cuda"])
def test_nan_reaches_its_channel_of_its_segment_and_no_further(how: str) -> None:
    inputs = {"x": torch.ones(2, 2, 100, 70), "keep": torch.ones(2, 100, dtype=torch.bool)}
    inputs["x"][0, 1, 60, 66] = torch.nan
    means = implementation(OP, how).run(Case((2, 2, 100, 70, 4)), inputs)
    assert np.argwhere(np.isnan(means)).tolist() == [[0, 1, 2, 66]]


@pytest.mark.requires("native")
def test_the_length_of_a_sample_is_found_behind_any_padding() -> None:
    """Segments of the same length and with the same tokens have the same means, in the same bits."""
    x = torch.randn(3, 2, 6000, 4, generator=torch.Generator().manual_seed(0))
    # a step of the search covers 2048 tokens, and a thread of it 16
    for length in (1, 15, 16, 17, 1904, 1905, 3952, 3953, 5999, 6000):
        keep = torch.arange(6000).expand(3, -1) == length - 1
        means = implementation(OP, "cuda").run(Case((3, 2, 6000, 4, 3)), {"x": x, "keep": keep})
        expected = np.zeros_like(means)
        expected[:, :, (length - 1) // -(-length // 3)] = x[:, :, length - 1]
        np.testing.assert_array_equal(means, expected, str(length))


@pytest.mark.requires("native", "onnx", "ort")
def test_more_means_than_any_machine_holds_are_refused() -> None:
    feeds = {"x": np.ones((1, 1024, 1, 1025), np.float32), "keep": np.ones((1, 1), bool)}
    opened = session(one_node_model(OP, feeds, body=False, num_segments=2**20), library=True)
    with pytest.raises(Exception, match=r"an output of \[1, 1024, 1048576, 1025\] elements was requested"):
        opened.run(None, feeds)
