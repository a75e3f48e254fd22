"""Formulas of the sizes of outputs: what PyTorch's trace gives, against the sizes that PyTorch itself has."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.size_formula import shape_of
from effexport.models.user.model import called_by_position
from effexport.models.user.spec_from_module import output_formulas

pytestmark = pytest.mark.requires("torch")

DIM = 8


def along_tokens(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x.transpose(1, 2)).transpose(1, 2)


def conv(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> Callable[[Tensor], Tensor]:
    return along_tokens(nn.Conv1d(DIM, DIM, kernel, stride, padding, dilation))


def in_turn(*functions: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        for function in functions:
            x = function(x)
        return x

    return call


def windows(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[1] % 4)).reshape(-1, 4, DIM)


# What is done to vectors [batch, seq, DIM], and the axes of the result.
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int | str, ...]]] = {
    "a convolution with stride": (conv(3, 2, 1), ("batch", "(seq-1)//2+1", DIM)),
    "two": (in_turn(conv(3, 2, 1), conv(3, 2, 1)), ("batch", "(seq-1)//4+1", DIM)),
    "without padding": (conv(5, dilation=2), ("batch", "seq-8", DIM)),
    "raw audio": (
        in_turn(conv(10, 5), conv(3, 2), conv(3, 2), conv(3, 2), conv(3, 2), conv(2, 2), conv(2, 2)),
        ("batch", "(seq-400)//320+1", DIM),
    ),
    "a transposed convolution": (along_tokens(nn.ConvTranspose1d(DIM, DIM, 4, 2, 1)), ("batch", "2*seq", DIM)),
    "down and up": (
        in_turn(conv(3, 2, 1), along_tokens(nn.Upsample(scale_factor=2))),
        ("batch", "2*((seq-1)//2)+2", DIM),
    ),
    "a mean of four": (along_tokens(nn.AvgPool1d(4)), ("batch", "seq//4", DIM)),
    "a maximum, rounded up": (along_tokens(nn.MaxPool1d(4, ceil_mode=True)), ("batch", "(seq-1)//4+1", DIM)),
    "patches": (lambda x: x.unfold(1, 4, 4), ("batch", "seq//4", DIM, 4)),
    "merged and padded patches": (
        lambda x: F.pad(x, (0, 0, 0, -x.shape[1] % 4)).reshape(x.shape[0], -1, 4 * DIM),
        ("batch", "ceil(seq/4)", 4 * DIM),
    ),
    "a multiple": (lambda x: F.pad(x, (0, 0, 0, -x.shape[1] % 8)), ("batch", "8*ceil(seq/8)", DIM)),
    "one more token": (lambda x: torch.cat([x[:, :1], x], 1), ("batch", "seq+1", DIM)),
    "cropped": (lambda x: x[:, 1:-1], ("batch", "seq-2", DIM)),
    "every fourth": (lambda x: x[:, ::4], ("batch", "(seq+3)//4", DIM)),
    "both halves": (lambda x: torch.cat([x, -x]), ("2*batch", "seq", DIM)),
    "each twice": (lambda x: x.repeat_interleave(2, 0), ("2*batch", "seq", DIM)),
    "flat": (lambda x: x.reshape(-1, DIM), ("batch*seq", DIM)),
    "windows": (windows, ("batch*ceil(seq/4)", 4, DIM)),
    "math.ceil": (lambda x: x[:, : math.ceil(x.shape[1] / 8)], ("batch", "ceil(seq/8)", DIM)),
    "half as many": (lambda x: x[:, : int(x.shape[1] * 0.5)], ("batch", "seq//2", DIM)),
    "at most 64": (lambda x: x[:, :64], ("batch", "min(64,seq)", DIM)),
    "at most a million": (lambda x: x[:, :1000000], ("batch", "min(1000000,seq)", DIM)),
    "scores": (lambda x: x @ x.mT, ("batch", "seq", "seq")),
    "pairs": (lambda x: x[:, 1:] - x[:, :-1], ("batch", "seq-1", DIM)),
    "constant": (lambda x: F.adaptive_avg_pool1d(x.mT, 3), ("batch", DIM, 3)),
    "a square": (lambda x: F.pad(x, (0, 0, 0, math.isqrt(x.shape[1]))), ("batch", None, DIM)),
    "a number by values": (lambda x: x[x[..., 0] > 0], (None, DIM)),
}


class Computing(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_is_the_size_at_every_length(kind: str) -> None:
    function, expected = KINDS[kind]
    module = called_by_position(Computing(function).eval(), ["x"], {})
    (found,) = output_formulas(module, [torch.zeros(3, 1001, DIM)], [("batch", "seq", DIM)]).values()
    assert found == expected
    if None in found:
        return
    compared = 0
    for batch, seq in [
        (1, 1),
        (2, 2),
        (1, 3),
        (3, 3),
        (1, 7),
        (2, 63),
        (1, 64),
        (5, 65),
        (1, 399),
        (1, 400),
        (2, 1040),
    ]:
        try:
            shape = function(torch.zeros(batch, seq, DIM)).shape
        except RuntimeError:  # fewer tokens than a kernel has
            continue
        if 0 not in shape:
            assert shape_of(found, {"batch": batch, "seq": seq}) == shape
            compared += 1
    assert compared >= 2


def test_axes_of_any_name_and_number() -> None:
    module = called_by_position(nn.Sequential(nn.Conv2d(3, DIM, 4, 4), nn.Flatten(2)).eval(), ["input"], {})
    dims = [("batch", 3, "height", "width")]
    assert output_formulas(module, [torch.zeros(2, 3, 32, 48)], dims)["output"] == (
        "batch",
        DIM,
        "height//4*(width//4)",
    )
    # a name that cannot stand in a formula
    assert output_formulas(module, [torch.zeros(2, 3, 32, 48)], [(2, 3, "the height", 48)])["output"] == (2, DIM, None)


def test_a_module_that_cannot_be_traced_has_no_formulas() -> None:
    module = called_by_position(Computing(lambda x: x if x.sum() > 0 else -x), ["x"], {})
    assert output_formulas(module, [torch.ones(2, 3)], [("batch", 3)]) == {}
