"""AFT-simple alone: one shared context, decode steps and a prefix scan. See also test_aft_shared.py."""

from __future__ import annotations

import pytest
import torch

from effexport.models.variants.sums import ExpSums, prefix_sums

DIM = 8


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_all_rows_of_the_non_causal_form_share_one_context(aft_simple):
    layer = aft_simple.build(causal=False)
    x, keep = torch.randn(1, 30, DIM), torch.ones(1, 30, dtype=torch.bool)
    with torch.no_grad():
        context = layer.attend(x, keep) / torch.sigmoid(layer.query(x))
    # a product and a quotient of float32 numbers
    torch.testing.assert_close(context, context[:, :1].expand_as(context), atol=1e-6, rtol=1e-5)


def test_steps_over_tokens_equal_the_causal_form(aft_simple, aft_key_gap):
    layer = aft_simple.build(causal=True)
    x = aft_key_gap(layer, torch.randn(2, 70, DIM), 40, 120.0)
    state, rows = layer.initial_state(2), []
    with torch.no_grad():
        for t in range(70):
            row, state = layer.step(x[:, t : t + 1], state)
            rows.append(row)
        whole = layer(x)
    assert {name: (tuple(s.shape), s.dtype) for name, s in state.items()} == dict.fromkeys(
        "mnd", ((2, DIM), torch.float32)
    )
    # float32 rounding: one sum is sequential, the other a tree
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, atol=2e-6, rtol=1e-5)


def test_the_prefix_scan_is_exact_across_all_its_levels():
    # 2500 rows fill every level of the scan; keys ~ N(0, 30²) change the stabiliser often
    k, v = 30 * torch.randn(1, 2500, 3), torch.randn(1, 2500, 3)
    sums = prefix_sums(ExpSums(k, v, torch.ones_like(k)))
    k64, v64 = k.double(), v.double()
    expected = [(torch.softmax(k64[:, :t], dim=1) * v64[:, :t]).sum(dim=1) for t in range(1, 2501)]
    # float32 rounding of 2500 terms, of which few count
    torch.testing.assert_close((sums.n / sums.d).double(), torch.stack(expected, dim=1), atol=2e-6, rtol=1e-5)
