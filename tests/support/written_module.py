"""A model that a test writes as a function, inputs for it, and its file beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import effexport

DIM = 16


class Written(nn.Module):
    """A linear layer, and what a function makes of its result."""

    def __init__(self, change: Callable[[Tensor], Tensor], dim: int = DIM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.change = nn.Linear(dim, dim), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x))


def vectors(batch: int, seq_len: int) -> Tensor:
    """Random [batch, seq_len, DIM], the same for the same sizes."""
    return torch.randn(batch, seq_len, DIM, generator=torch.Generator().manual_seed(seq_len))


def check_answers(folder: Path, model: Callable[[Tensor], Any], *inputs: Tensor, atol: float = 1e-5) -> None:
    """The file in a folder answers as the model does. atol: 1e-5 is float32 rounding of sums in another order."""
    with effexport.load(folder) as runner, torch.no_grad():
        (name,) = (tensor.name for tensor in runner.inputs)
        for x in inputs:
            found, answer = runner.run({name: x.numpy()}), model(x)
            several = answer.values() if isinstance(answer, Mapping) else answer
            wanted = [answer] if isinstance(answer, Tensor) else several
            for (output, actual), expected in zip(found.items(), wanted, strict=True):
                np.testing.assert_allclose(actual, expected.numpy(), atol=atol, err_msg=f"{output}, {list(x.shape)}")


def check_written(model: nn.Module, folder: Path, *, is_masked: bool, precision: str = "fp32") -> effexport.BuildResult:
    """Build from masks that hide nothing; the file answers as PyTorch does at other sizes, and with masks that hide
    some keys or all."""
    example = {"x": torch.randn(2, 12, DIM)} | ({"mask": torch.ones(2, 12, dtype=torch.int64)} if is_masked else {})
    result = effexport.export(model.eval(), example, folder / "out", precision=precision)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), effexport.load(result.path) as runner:
        for batch, tokens in ((1, 1), (3, 9), (2, 300)):
            inputs = {"x": torch.randn(batch, tokens, DIM, generator=generator)}
            if is_masked:
                inputs["mask"] = (torch.rand(batch, tokens, generator=generator) < 0.6).long()
                inputs["mask"][-1] = 0
            expected = model(**inputs).numpy()
            if precision == "fp16":
                inputs["x"] = inputs["x"].half()
            (actual,) = runner.run({name: value.numpy() for name, value in inputs.items()}).values()
            assert (np.isnan(actual) == np.isnan(expected)).all()
            scale = np.sqrt(np.nanmean(np.square(expected))) if np.isfinite(expected).any() else 0
            # rounding of float32 in another order; of float16, in weights, features, sums and results
            limit = (1e-5 if precision == "fp32" else 2e-2) * scale
            assert np.nanmax(np.abs(actual.astype(np.float64) - expected), initial=0) <= limit
    return result
