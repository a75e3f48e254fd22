"""Equations of torch.einsum as products of matrices, against torch.einsum itself."""

from __future__ import annotations

import pytest
import torch

from effexport.models.user.modes import CodeAsExported, product_of

pytestmark = pytest.mark.requires("torch")

SIZES = {"b": 2, "h": 3, "i": 5, "j": 7, "d": 4, "e": 6, "o": 1}
PRODUCTS = [
    "b h i d, b h j d -> b h i j",
    "bhij,bhjd->bihd",
    "bihd,bjhd->bijh",
    "bihd,bhd->bih",
    "bhd,bihd->hib",
    "bi,bid->bd",
    "bid,bde,bi->bie",
    "bi,bid->bid",
    "bid,bi->dbi",
    "bihd,bhde,bih->bihe",
    "bid,bid->bi",
    "bid,bod->bio",
]
OTHERS = ["bid,de->bie", "id,je->ijde", "bii,bij->bj", "bid,bjd->b", "bhid,bhid->b", "bid,bjd", "bid->bdi"]


def operands(equation: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    return [torch.randn([SIZES[axis] for axis in term], generator=generator, dtype=torch.float64) for term in terms]


@pytest.mark.parametrize("equation", PRODUCTS)
def test_an_equation_of_pairs_is_written_as_products(equation: str) -> None:
    given = operands(equation)
    result, expected = product_of(equation, given), torch.einsum(equation, *given)
    assert result is not None
    assert result.is_contiguous()
    torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)  # rounding of float64


def test_an_ellipsis_stands_for_the_same_axes_everywhere() -> None:
    x, y, z = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 4, 6), torch.randn(2, 3, 5)
    result = product_of("...id,...de,...i->...ie", (x, y, z))
    assert result is not None
    torch.testing.assert_close(result, torch.einsum("...id,...de,...i->...ie", x, y, z))
    assert product_of("...id,...de->...ie", (x, y[0])) is None


@pytest.mark.parametrize("equation", OTHERS)
def test_others_stay(equation: str) -> None:
    assert product_of(equation, operands(equation)) is None


def test_an_axis_that_einsum_repeats_stays() -> None:
    x, y = torch.randn(2, 5, 1), torch.randn(2, 7, 4)
    assert product_of("bid,bjd->bij", (x, y)) is None
    with CodeAsExported():
        torch.testing.assert_close(torch.einsum("bid,bjd->bij", [x, y]), x * y.sum(-1)[:, None])


def test_booleans_stay() -> None:
    x = torch.ones(2, 3, 1, dtype=torch.bool)
    with CodeAsExported():
        assert torch.equal(torch.einsum("bid,bjd->bij", x, x), torch.ones(2, 3, 3, dtype=torch.bool))
