"""Arithmetic on sizes, as people write it with Python, math and numpy: the file counts as Python does at every size."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import effexport
from effexport.base.quiet import quiet
from effexport.export.torch_onnx import size_translation
from effexport.models.user.size_arithmetic import Log2, arithmetic_of_sizes

pytestmark = pytest.mark.requires("torch", "onnx", "ort")

DIM = 8
# Rounding of float32 in sums of this length; a wrong size gives another shape, or is off by 1e-1 and more.
LIMIT = 1e-5


def counts(n: Any) -> dict[str, Any]:
    """Values computed from a size, by the text of the expression."""
    return {
        "int(np.ceil(np.sqrt(n)))": int(np.ceil(np.sqrt(n))),
        "math.ceil(math.sqrt(n))": math.ceil(math.sqrt(n)),
        "int(sqrt(n))": int(sqrt(n)),
        "int(n**0.5)": int(n**0.5),
        "math.isqrt(n)": math.isqrt(n),
        "math.floor(torch.sym_sqrt(n))": math.floor(torch.sym_sqrt(n)),
        "round(math.sqrt(n))": round(math.sqrt(n)),
        "int(math.log2(n))": int(math.log2(n)),
        "math.ceil(np.log2(n))": math.ceil(np.log2(n)),
        "2 ** math.ceil(math.log2(n))": 2 ** math.ceil(math.log2(n)),
        "math.ceil(math.log2(n / 2 + 1))": math.ceil(math.log2(n / 2 + 1)),
        "int(math.log2(n / 2 + 1))": int(math.log2(n / 2 + 1)),
        "int(n / 2)": int(n / 2),
        "math.ceil(n / 7)": math.ceil(n / 7),
        "int(np.floor(n / 7))": int(np.floor(n / 7)),
        "round(n / 4)": round(n / 4),
        "int(n * 0.29)": int(n * 0.29),
        "n // 8": n // 8,
        "-(-n // 8)": -(-n // 8),
        "n % 8": n % 8,
        "-n % 8": -n % 8,
        "divmod(n, 7)[1]": divmod(n, 7)[1],
        "min(n, 64)": min(n, 64),
        "max(n, 64)": max(n, 64),
        "min([n // 2, 64, 3])": min([n // 2, 64, 3]),
        "np.maximum(n // 2, 3)": np.maximum(n // 2, 3),
        "int(max(1, n * 0.1))": int(max(1, n * 0.1)),
    }


class Counts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        # nothing is in these tensors, so that their sizes cost nothing
        return tuple(x.new_zeros(int(count), 0) for count in counts(x.shape[0]).values())


def test_a_logarithm_is_as_long_as_the_size_can_be() -> None:
    formulas: list[str] = []

    class Limited(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            assert n <= 64
            formulas.extend(str(whole.node.expr) for whole in (math.ceil(Log2(n)), math.floor(Log2(n))))
            return x

    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        torch.export.export(Limited(), (torch.zeros(2, 20),), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    assert [formula.count("Min") for formula in formulas] == [6, 6]


def test_counts_are_those_of_python(tmp_path: Path) -> None:
    import onnxruntime as ort

    module = Counts().eval()
    with quiet(streams=True), arithmetic_of_sizes(module):
        program = torch.onnx.export(
            module,
            (torch.zeros(50, 0),),
            dynamo=True,
            opset_version=20,
            dynamic_shapes=({0: "n"},),
            custom_translation_table=size_translation(20),
            verbose=False,
        )
    assert program is not None
    program.save(tmp_path / "counts.onnx")
    session = ort.InferenceSession(tmp_path / "counts.onnx")
    (name,) = [value.name for value in session.get_inputs()]
    near = [k * k for k in (*range(12, 142), 1000, 2047, 2048, 4095, 4096, 30001)] + [2**k for k in range(7, 30)]
    for n in (*range(1, 150), *(number + i for number in near for i in (-1, 0, 1))):
        found = [len(one) for one in session.run(None, {name: np.zeros((n, 0), np.float32)})]
        assert dict(zip(counts(n), found, strict=True)) == counts(n), n


def square(self: Any, x: Tensor) -> Tensor:
    """A pathology slide: the patches, some of them twice, as a square with a class token before it."""
    n = x.shape[1]
    height = width = int(np.ceil(np.sqrt(n)))
    add = height * width - n
    x = torch.cat([x, x[:, :add, :]], dim=1)
    x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
    x = x + self.attention(x, x, x, need_weights=False)[0]
    token, patches = x[:, :1], x[:, 1:]
    image = patches.transpose(1, 2).view(-1, DIM, height, width)
    image = image + self.conv(image)
    return torch.cat([token, image.flatten(2).transpose(1, 2)], dim=1)[:, 1 : n + 1] + token


def halves(self: Any, x: Tensor) -> Tensor:
    middle = int(x.shape[1] / 2)
    return torch.cat([self.linear(x[:, middle:]), x[:, :middle]], dim=1)


def scaled(self: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    y = self.linear(x) * n**-0.5 + x / math.sqrt(n) + 1 / n
    return y * math.log2(n) + math.log(n) / math.log(512) * x  # type: ignore[no-any-return]


def windows(self: Any, x: Tensor) -> Tensor:
    batch, n, _ = x.shape
    places = torch.arange(math.ceil(n / 4)).float().repeat_interleave(4)[:n]
    x = F.pad(x, (0, 0, 0, (4 - n % 4) % 4)).view(batch, -1, 4, DIM)
    means = x.mean(2).sum(1)[:, None, None].expand(batch, math.ceil(n / 4), 4, DIM)
    return (self.linear(x) + means).flatten(1, 2)[:, :n] + places[None, :, None]


FORWARDS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (square, halves, scaled, windows)}


def model_of(forward: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    model = type("Model", (nn.Module,), {"forward": forward, "__module__": __name__})()
    model.linear, model.conv = nn.Linear(DIM, DIM), nn.Conv2d(DIM, DIM, 3, padding=1, groups=DIM)
    model.attention, model.token = nn.MultiheadAttention(DIM, 2, batch_first=True), nn.Parameter(torch.randn(1, 1, DIM))
    return model.eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FORWARDS)
def test_sizes_that_are_computed_stay_free(name: str, tmp_path: Path) -> None:
    import onnxruntime as ort

    model = model_of(FORWARDS[name])
    if name == "square":
        lower = effexport.export(model, {"x": torch.randn(2, 50, DIM)}, tmp_path / "lower", precision="fp16")
        assert lower.report.verdict == "passed"
    result = effexport.export(model, {"x": torch.randn(2, 50, DIM)}, tmp_path / "out")
    assert result.report.verdict == "passed"
    session = ort.InferenceSession(tmp_path / "out" / "model.onnx")
    for n in (1, 2, 3, 4, 5, 9, 10, 99, 100, 101, 1023, 1025):
        x = torch.randn(3, n, DIM, generator=torch.Generator().manual_seed(n))
        (found,) = session.run(None, {"x": x.numpy()})
        with torch.no_grad():
            wanted = model(x).numpy()
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= LIMIT * max(1, np.sqrt(np.square(wanted).mean()))


def test_names_are_replaced_while_the_code_is_traced_only() -> None:
    names = vars(sys.modules[__name__])
    before = dict(names)
    with contextlib.suppress(ZeroDivisionError), arithmetic_of_sizes(Counts()):
        assert isinstance(3, names["int"])
        assert not isinstance(3.0, names["int"])
        assert (names["int"]("12"), names["min"]([3, 2]), names["max"](1, 2)) == (12, 2, 2)
        assert names["min"]([], default=4) == 4
        assert (names["math"].sqrt(9), names["np"].sqrt(9), names["sqrt"](9), names["math"].pi) == (3, 3, 3, math.pi)
        assert names["sqrt"] is not before["sqrt"]
        assert names["np"].minimum.reduce([3, 2]) == 2
        raise ZeroDivisionError
    assert names == before
    assert "int" not in names


def test_types_are_left_alone_in_files_that_need_the_real_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_types.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x: float) -> float:\n"
        "        return float(x) + torch.zeros(2, dtype=int)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import with_types  # type: ignore[import-not-found]

    with arithmetic_of_sizes(with_types.Model()):
        assert "int" not in vars(with_types)
        assert "float" in vars(with_types)
    assert "float" not in vars(with_types)
