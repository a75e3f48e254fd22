"""PyTorch's output during a trace stays off the screen, in every way in which a trace can end."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_cases import soak
from torch import Tensor, nn

import effexport
from effexport.base.errors import StageError, UserError
from effexport.base.quiet import debugging, muted, quiet

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


class Sorted(torch.autograd.Function):
    """A function whose values no tracer sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sort(x.detach().numpy()))


def branch(y: Tensor) -> Tensor:
    if y.sum() > 0:
        return y
    return -y


def loop(y: Tensor) -> Tensor:
    while y.norm() > 1:
        y = y / 2
    return y


def strided(y: Tensor) -> Tensor:
    y = y.clone()
    y.as_strided((2, 5), (1, 3)).add_(1)
    return y


def refuse(y: Tensor) -> Tensor:
    raise ValueError("this model never\nworks\n\nat all")


BY_VALUE = "the code asks for the value of a tensor"
NO_TRANSLATION = "torch.onnx has no translation of the operator"
# What a model computes, and what its one message says.
FAILURES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a branch on values": (branch, BY_VALUE),
    "a loop that ends by values": (loop, BY_VALUE),
    "float": (lambda y: y if float(y.mean()) > 0 else -y, BY_VALUE),
    "item": (lambda y: y * len("a" * int(abs(y[0, 0, 0].item()))), BY_VALUE),
    "tolist": (lambda y: y * len(set(y[0, 0].tolist())), BY_VALUE),
    "an operator without translation": (lambda y: torch.special.bessel_j0(y), f"{NO_TRANSLATION} prims.bessel_j0"),
    "linear algebra": (lambda y: y * torch.linalg.svdvals(y).sum(), f"{NO_TRANSLATION} aten._linalg_svd"),
    "eigenvalues": (lambda y: y * torch.linalg.eigvalsh(y @ y.mT).sum(), f"{NO_TRANSLATION} aten._linalg_eigh"),
    "a translation that fails": (lambda y: y + torch.histc(y, 10).sum(), "the translation aten_histc of torch.onnx"),
    "a write to a strided view": (strided, f"{NO_TRANSLATION} prims.as_strided_scatter"),
    "numpy": (lambda y: torch.from_numpy(np.sort(y.detach().numpy())), f"{NO_TRANSLATION} aten.sort (stable)"),
    "a function of autograd": (Sorted.apply, f"{NO_TRANSLATION} aten.sort (stable)"),
    "a number of rows by values": (
        lambda y: y[y[..., 0] > 0],
        "expected axes that are constant, or formulas of free axes",
    ),
    "an error of its own": (refuse, "this model never works at all"),
}


class Computing(nn.Module):
    """A layer and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Tensor], *, verbose: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.function = function
        self.verbose = verbose

    def forward(self, x: Tensor) -> Tensor:
        if self.verbose:
            warnings.warn("the model warns", stacklevel=1)
            logging.getLogger("transformers.models").warning("transformers warns")
            logging.getLogger("torch.export").warning("torch warns")
        return self.function(self.linear(x))


def example() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))}


# Each has a twin above that fails in the same place.
TWINS = {"a loop that ends by values", "float", "tolist", "eigenvalues", "a function of autograd"}


@pytest.mark.parametrize("kind", [soak(kind) if kind in TWINS else kind for kind in FAILURES])
def test_a_model_that_cannot_be_traced_is_one_short_message(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    function, words = FAILURES[kind]
    with pytest.raises((StageError, UserError)) as failure:
        effexport.export(Computing(function).eval(), example(), tmp_path / "out")
    message = str(failure.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 700  # two sentences and a path
    assert " at 0x" not in message
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(x.detach().numpy()))


def test_functions_of_numpy_are_read_as_those_of_pytorch(tmp_path: Path) -> None:
    # torch.export reads them only from the bytecode: strict=True
    model = Computing(lambda y: Tanh.apply(y) + torch.from_numpy(np.cos(y.detach().numpy())))
    assert effexport.export(model.eval(), example(), tmp_path / "out").report.verdict == "passed"


def test_the_message_has_the_line_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=rf"\(test_quiet.py, line {branch.__code__.co_firstlineno + 1}\)"):
        effexport.export(Computing(branch).eval(), example(), tmp_path / "out")


def test_an_operator_that_has_no_translation_has_the_line_and_the_layer_that_calls_it(tmp_path: Path) -> None:
    class Bessel(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return torch.special.bessel_j0(y)

    line = Bessel.forward.__code__.co_firstlineno + 1
    with pytest.raises(StageError, match=rf": in function \(.*\.Bessel\) \(test_quiet.py, line {line}\): "):
        effexport.export(Computing(Bessel()).eval(), example(), tmp_path / "out")


def test_warnings_and_loggers_are_quiet_and_then_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "transformers", "transformers.models")]
    stream = logging.StreamHandler(sys.stderr)
    level = loggers[-1].level
    loggers[-1].addHandler(stream)
    loggers[-1].setLevel(logging.WARNING)  # another test may have made transformers quieter
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    filters = warnings.filters[:]
    try:
        result = effexport.export(Computing(lambda y: y, verbose=True).eval(), example(), tmp_path / "out")
        assert result.report.verdict == "passed"
        assert capfd.readouterr() == ("", "")
        assert [(logger.handlers, logger.propagate, logger.level) for logger in loggers] == before
        assert warnings.filters == filters
        loggers[-1].warning("heard again")
        assert capfd.readouterr().err == "heard again\n"
    finally:
        loggers[-1].removeHandler(stream)
        loggers[-1].setLevel(level)


def test_a_handler_that_a_package_adds_meanwhile_stays() -> None:
    logger, handler = logging.getLogger("torch.added"), logging.NullHandler()
    with quiet():
        logger.addHandler(handler)
    assert logger.handlers == [handler]
    logger.removeHandler(handler)


def test_only_the_thread_that_traces_is_muted(capfd: pytest.CaptureFixture[str]) -> None:
    def say() -> None:
        print("heard")
        print("heard", file=sys.stderr)

    with muted():
        say()
        other = threading.Thread(target=say)
        other.start()
        other.join()
    assert capfd.readouterr() == ("heard\n", "heard\n")


def test_traces_that_end_in_another_order_mute_nobody_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    entered, left = threading.Event(), threading.Event()

    def trace() -> None:
        with muted():
            entered.set()
            left.wait()

    stdout, stderr = sys.stdout, sys.stderr
    other = threading.Thread(target=trace)
    with muted():
        other.start()
        entered.wait()
    left.set()
    other.join()
    print("heard")
    sys.stdout, sys.stderr = stdout, stderr
    assert capsys.readouterr().out == "heard\n"


def test_debug_shows_everything(capfd: pytest.CaptureFixture[str]) -> None:
    with debugging(True), quiet(streams=True):
        print("heard")
    with debugging(False), quiet(streams=True):
        print("not heard")
    assert capfd.readouterr().out == "heard\n"


MODEL = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        print("the user's own text")
        return self.linear(x) * (2 if {condition} else 1)
def make():
    return Model().eval(), {{"x": torch.randn(2, 12, 8)}}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A condition → the name of the function that makes a model with it."""
    monkeypatch.chdir(tmp_path)

    def write(condition: str) -> str:
        name = f"quiet_{abs(hash(condition))}"
        (tmp_path / f"{name}.py").write_text(MODEL.format(condition=condition))
        return f"{name}:make"

    return write


def test_the_graph_is_shown_with_debug_only(module: Callable[[str], str], cli: Callable[..., Any]) -> None:
    plain = cli("build", "--module", module("x.sum() > 0"), "-o", "out")
    assert BY_VALUE in plain.error(1)
    assert "def forward(" not in plain.err
    shown = cli("build", "--module", module("x.sum() > 0"), "-o", "out", "--debug")
    assert "def forward(" in shown.err
    assert "Traceback" in shown.err


def test_what_a_model_prints_is_beside_the_object_of_json(
    module: Callable[[str], str], cli: Callable[..., Any]
) -> None:
    result = cli("build", "--module", module("True"), "-o", "out", "--json")
    assert result.json["verdict"] == "passed"
    assert "the user's own text" in result.err
