"""Models as people write them, without a thought of export: the file computes what the untouched model computes, in
plain ONNX Runtime and at other sizes than those of the example."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from slow_cases import soak
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import effexport
from effexport.api import BuildResult
from effexport.base.errors import StageError, UserError
from effexport.tensorrt.preparation import limit_problems

pytestmark = pytest.mark.requires("torch", "onnx", "ort")

# Rounding of float32 in sums of this length, as in the limits of parity; a wrong mask or axis is off by 1e-2 and more.
LIMIT = 2e-4
DIM = 16


@dataclass
class Wild:
    """A model's `forward`, its parts, its inputs for a batch and a length, and the mask that is to be found."""

    forward: Callable[..., Any]
    inputs: Callable[[int, int], dict[str, Tensor]]
    parts: dict[str, Any] = field(default_factory=dict)
    mask: str = ""
    ignores: bool = False


def model_of(wild: Wild) -> nn.Module:
    torch.manual_seed(0)
    model = type("Model", (nn.Module,), {"forward": wild.forward})()
    for name, part in wild.parts.items():
        made = part()
        model.register_buffer(name, made) if type(made) is Tensor else setattr(model, name, made)
    return model.eval()  # type: ignore[no-any-return]


def linear(width: int = DIM) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(DIM, width)


def attention() -> nn.Module:
    return nn.MultiheadAttention(DIM, 2, batch_first=True)


def embedding() -> nn.Module:
    return nn.Embedding(40, DIM)


def vectors(batch: int, seq_len: int) -> Tensor:
    return torch.randn(batch, seq_len, DIM, generator=torch.Generator().manual_seed(seq_len))


def tokens(batch: int, seq_len: int, high: int = 40) -> Tensor:
    return torch.randint(0, high, (batch, seq_len), generator=torch.Generator().manual_seed(seq_len))


def kept(batch: int, seq_len: int) -> Tensor:
    """Boolean: the first sample is whole, the others end earlier."""
    return torch.arange(seq_len) < seq_len - 3 * torch.arange(batch)[:, None]


def lower(batch: int, seq_len: int, diagonal: int = 0) -> Tensor:
    return torch.ones(seq_len, seq_len).tril(diagonal).bool().expand(batch, seq_len, seq_len)


def only_x(batch: int, seq_len: int) -> dict[str, Tensor]:
    return {"x": vectors(batch, seq_len)}


def masked_by(name: str, of: Callable[[Tensor], Tensor] = lambda keep: keep) -> Callable[[int, int], dict[str, Tensor]]:
    return lambda batch, seq_len: {**only_x(batch, seq_len), name: of(kept(batch, seq_len))}


def softmax_by_hand(self: Any, x: Tensor, keep: Tensor) -> Tensor:
    q = self.q(x)
    return (q @ q.transpose(1, 2)).masked_fill(~keep, -math.inf).softmax(-1) @ q


def written(self: Any, x: Tensor) -> Tensor:
    x[:, 0] = 0
    x += 1
    return self.q(x)  # type: ignore[no-any-return]


def written_and_returned(self: Any, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    x.masked_fill_(~keep[..., None], 0.0)
    return self.q(x), x


def written_tokens(self: Any, ids: Tensor) -> Tensor:
    ids[ids == 3] = 1
    return self.e(ids)  # type: ignore[no-any-return]


def counted(self: Any, x: Tensor) -> Tensor:
    self.calls.add_(1)
    return self.q(x)  # type: ignore[no-any-return]


def mean_of_lengths(self: Any, ids: Tensor, lengths: Tensor) -> Tensor:
    # of a length of 0, NaN
    keep = (torch.arange(ids.size(1)) < lengths[:, None]).float()[..., None]
    return self.q((self.e(ids) * keep).sum(1) / keep.sum(1))  # type: ignore[no-any-return]


def recurrent_with_states(self: Any, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, (h, c) = self.r(x, (h[None], c[None]))
    return y, h[0], c[0]


def grouped(self: Any, x: Tensor, attn_mask: Tensor) -> Tensor:
    q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
    k = q[:, :2]
    y = F.scaled_dot_product_attention(q, k, k, attn_mask=attn_mask, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


WILD: dict[str, Wild] = {
    # an input returned, written to, or returned twice
    "returns its mask": Wild(
        lambda self, x, mask: (self.a(x, x, x, key_padding_mask=~mask, need_weights=False)[0], mask),
        masked_by("mask"),
        {"a": attention},
        mask="mask",
    ),
    "returns views": Wild(
        lambda self, x: {"a": x, "b": x.view(x.shape), "c": x.contiguous(), "d": self.i(x), "e": self.q(x), "f": x[:]},
        only_x,
        {"q": linear(), "i": nn.Identity},
    ),
    "returns one tensor twice": Wild(
        lambda self, x: (lambda y: (y, y, y.detach()))(self.q(x)), only_x, {"q": linear()}
    ),
    "returns a weight and a buffer": Wild(
        lambda self, x: (self.q(x), self.q.weight, self.b),
        only_x,
        {"q": linear(), "b": lambda: torch.arange(7.0)},
    ),
    "writes to its input": Wild(written, only_x, {"q": linear()}),
    "writes to its input and returns it": Wild(written_and_returned, masked_by("keep"), {"q": linear()}),
    "writes to its tokens": Wild(written_tokens, lambda b, n: {"ids": tokens(b, n)}, {"e": embedding}),
    "counts its calls": Wild(counted, only_x, {"q": linear(), "calls": lambda: torch.zeros(())}),
    # constant sizes that are those of a probe
    "points in space": Wild(lambda self, x: self.q(x).unflatten(-1, (4, 3)), only_x, {"q": linear(12)}),
    "constant sizes everywhere": Wild(
        lambda self, x: (self.q(x.mean(1)).view(-1, 3, 2, 2, 1), torch.ones(5, 3, 37), x[:, :1].expand(-1, 37, -1)),
        only_x,
        {"q": linear(12)},
    ),
    # integers
    "lengths": Wild(
        mean_of_lengths,
        lambda b, n: {"ids": tokens(b, n), "lengths": kept(b, n).sum(1)},
        {"e": embedding, "q": linear(5)},
    ),
    "tables without nn.Embedding": Wild(
        lambda self, ids, places: F.embedding(ids, self.t) + self.p[places],
        lambda b, n: {"ids": tokens(b, n, n), "places": torch.arange(n).expand(b, n)},
        {"t": lambda: nn.Parameter(torch.randn(40, DIM)), "p": lambda: nn.Parameter(torch.randn(50, DIM))},
    ),
    "tokens counted from one": Wild(
        lambda self, ids: self.e(ids - 1), lambda b, n: {"ids": tokens(b, n) + 1}, {"e": embedding}
    ),
    # masks by any name
    "keeps": Wild(
        lambda self, x, valid: self.a(x, x, x, key_padding_mask=~valid, need_weights=False)[0],
        masked_by("valid"),
        {"a": attention},
        mask="valid",
    ),
    "ignores": Wild(
        lambda self, x, hidden: self.a(x, x, x, key_padding_mask=hidden, need_weights=False)[0],
        masked_by("hidden", lambda keep: ~keep),
        {"a": attention},
        mask="hidden",
        ignores=True,
    ),
    "ignores under the name of a mask that keeps": Wild(
        lambda self, x, mask: self.a(x, x, x, key_padding_mask=mask, need_weights=False)[0],
        masked_by("mask", lambda keep: ~keep),
        {"a": attention},
        mask="mask",
        ignores=True,
    ),
    "keeps, as integers": Wild(
        lambda self, x, present: softmax_by_hand(self, x, (present != 0)[:, None]),
        masked_by("present", lambda keep: keep.long()),
        {"q": linear()},
        mask="present",
    ),
    "keeps in a pooled answer": Wild(
        lambda self, x, there: self.q(x).masked_fill(~there[..., None], -math.inf).softmax(1).transpose(1, 2) @ x,
        masked_by("there"),
        {"q": linear(1)},
        mask="there",
    ),
    "no mask, but segments": Wild(
        lambda self, x, segment: softmax_by_hand(self, x + segment[..., None], torch.ones((), dtype=torch.bool)),
        masked_by("segment", lambda keep: keep.long()),
        {"q": linear()},
    ),
    "one mask for each query, by hand": Wild(
        softmax_by_hand, lambda b, n: {**only_x(b, n), "keep": lower(b, n)}, {"q": linear()}
    ),
    "queries without keys give zeros": Wild(
        lambda self, x, attn_mask: F.scaled_dot_product_attention(
            x[:, None], self.q(x)[:, None], x[:, None], attn_mask
        ),
        lambda b, n: {**only_x(b, n), "attn_mask": lower(b, n, -1)[:, None]},
        {"q": linear()},
    ),
    "queries without keys in three axes": Wild(
        lambda self, x, m: F.scaled_dot_product_attention(x, self.q(x), x, attn_mask=m),
        lambda b, n: {**only_x(b, n), "m": lower(b, n, -1)},
        {"q": linear()},
    ),
    "queries without keys, NaN replaced by hand": Wild(
        lambda self, x, m: torch.nan_to_num((x @ x.transpose(1, 2)).masked_fill(~m, -math.inf).softmax(-1)) @ self.q(x),
        lambda b, n: {**only_x(b, n), "m": lower(b, n, -1)},
        {"q": linear()},
    ),
    "grouped queries": Wild(grouped, lambda b, n: {**only_x(b, n), "attn_mask": lower(b, n)[:, None]}, {"q": linear()}),
    "causal in three axes": Wild(
        lambda self, x: F.scaled_dot_product_attention(x, self.q(x), x, is_causal=True, scale=0.3),
        only_x,
        {"q": linear()},
    ),
    "floats that are added": Wild(
        lambda self, x, attention_mask: F.scaled_dot_product_attention(
            x[:, None], self.q(x)[:, None], x[:, None], attn_mask=attention_mask
        )[:, 0],
        masked_by(
            "attention_mask",
            lambda keep: torch.where(keep, 0.0, torch.finfo(torch.float32).min)[:, None, None],
        ),
        {"q": linear()},
    ),
    "floats that are added, for each token": Wild(
        lambda self, x, mask: ((x @ x.transpose(1, 2)) + mask[:, None]).softmax(-1) @ self.q(x),
        masked_by("mask", lambda keep: torch.where(keep, 0.0, -math.inf)),
        {"q": linear()},
    ),
    # answers that are not numbers, or only for some inputs
    "infinite logits": Wild(
        lambda self, x, keep: self.q(x).masked_fill(~keep[..., None], -math.inf), masked_by("keep"), {"q": linear()}
    ),
    "logarithms": Wild(lambda self, x: self.q(x.log()), lambda b, n: {"x": vectors(b, n).abs() + 0.1}, {"q": linear()}),
    # recurrent layers at a free length
    "LSTM": Wild(
        lambda self, x: (lambda y: (y[0], y[1][0][-1], y[1][1][0]))(self.r(x)),
        only_x,
        {"r": lambda: nn.LSTM(DIM, 8, 2, batch_first=True, bidirectional=True)},
    ),
    "LSTM with states": Wild(
        recurrent_with_states,
        lambda b, n: {**only_x(b, n), "h": vectors(b, 1)[:, 0, :8], "c": vectors(b, 2)[:, 1, :8]},
        {"r": lambda: nn.LSTM(DIM, 8, batch_first=True, bias=False)},
    ),
    "GRU": Wild(
        lambda self, x: self.r(x.transpose(0, 1))[0][-1],
        only_x,
        {"r": lambda: nn.GRU(DIM, 8, 2, bidirectional=True)},
    ),
    "RNN": Wild(
        lambda self, x: self.r(x)[0], only_x, {"r": lambda: nn.RNN(DIM, 8, batch_first=True, nonlinearity="relu")}
    ),
    # arguments without names
    "any arguments": Wild(
        lambda self, *parts, scale=2.0: self.q(parts[0]) * scale + parts[1],
        lambda b, n: {"parts_0": vectors(b, n), "parts_1": vectors(b, n) + 1},
        {"q": linear()},
    ),
}


def outputs_of(answer: Any) -> list[Tensor]:
    if isinstance(answer, Tensor):
        return [answer]
    return [tensor for part in (answer.values() if isinstance(answer, dict) else answer) for tensor in outputs_of(part)]


def largest_error(actual: Any, expected: Tensor) -> float:
    """max |error| / RMS over the finite elements; all others must be equal, but where NaN is expected."""
    wanted = expected.detach().numpy().astype(np.float64)
    assert actual.shape == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(actual[np.isinf(wanted)], wanted[np.isinf(wanted)])
    error = np.abs(actual.astype(np.float64) - np.where(finite, wanted, 0))[finite]
    return float(error.max(initial=0) / max(np.sqrt(np.square(wanted[finite]).mean()), 1e-30))


def check_file(folder: Path, model: nn.Module, inputs: dict[str, Tensor], positional: bool = False) -> None:
    """The file in plain ONNX Runtime, with the bodies of our operators, against the untouched model."""
    import onnxruntime as ort

    session = ort.InferenceSession(str(folder / "model.onnx"))
    found = session.run(None, {key: value.numpy() for key, value in inputs.items()})
    copies = {key: value.clone() for key, value in inputs.items()}
    with torch.no_grad():
        wanted = outputs_of(model(*copies.values()) if positional else model(**copies))
    assert len(found) == len(wanted)
    for actual, expected in zip(found, wanted, strict=True):
        assert largest_error(actual, expected) <= LIMIT


Exported = Callable[[str], tuple[nn.Module, BuildResult]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """(a key of WILD) → the model and its artifact, exported once. Do not change it."""

    @functools.cache
    def of(name: str) -> tuple[nn.Module, BuildResult]:
        model, example = model_of(WILD[name]), WILD[name].inputs(2, 12)
        before = {key: value.clone() for key, value in example.items()}
        given = tuple(example.values()) if name == "any arguments" else example
        result = effexport.export(model, given, tmp_path_factory.mktemp("wild") / "out")
        assert all(torch.equal(value, before[key]) for key, value in example.items())
        return model, result

    return of


# Each has a twin above, or a test below, that goes the same way through the exporter.
TWINS = {
    *("returns one tensor twice", "writes to its input", "writes to its tokens", "points in space"),
    *("tokens counted from one", "keeps", "ignores", "queries without keys in three axes"),
    *("floats that are added, for each token", "GRU", "RNN"),
}


@pytest.mark.parametrize("name", [soak(name) if name in TWINS else name for name in WILD])
def test_a_model_as_people_write_it_is_exported_at_any_length(exported: Exported, name: str) -> None:
    wild, (model, result) = WILD[name], exported(name)
    assert result.report.verdict == "passed"
    assert (result.artifact.spec.model.mask, result.artifact.spec.model.mask_ignores) == (wild.mask, wild.ignores)
    other = wild.inputs(3, 19)
    check_file(result.path, model, other, name == "any arguments")
    # the runner refuses nothing that the file takes
    with effexport.load(result.path) as runner:
        runner.run({key: value.numpy() for key, value in other.items()})


def test_values_beyond_the_example_are_limited_by_tables_only(exported: Exported) -> None:
    ids = np.full((1, 5), 39)
    with effexport.load(exported("tables without nn.Embedding")[1].path) as runner:
        runner.run({"ids": ids, "places": ids + 10})
        with pytest.raises(UserError, match=r"ids contains 40; expected 0 to 39"):
            runner.run({"ids": ids + 1, "places": ids})
        with pytest.raises(UserError, match=r"places contains 50; expected 0 to 49"):
            runner.run({"ids": ids, "places": ids + 11})

    (note,) = [note for note in exported("lengths")[1].report.notes if "lengths" in note]
    assert note.startswith("lengths: values from 0 to 12 were tried, as no table of the model limits them")


def test_an_attention_mask_of_floats_has_no_default(exported: Exported) -> None:
    with (
        effexport.load(exported("floats that are added")[1].path) as runner,
        pytest.raises(UserError, match="input 'attention_mask' is missing"),
    ):
        runner.run({"x": vectors(1, 5).numpy()})


def test_averaged_weights_are_those_of_the_model_inside(tmp_path: Path) -> None:
    averaged = AveragedModel(nn.TransformerEncoderLayer(DIM, 2, 32, batch_first=True)).eval()
    effexport.export(averaged, vectors(2, 12), tmp_path / "out")
    check_file(tmp_path / "out", averaged.module, {"src": vectors(3, 19)})


def test_an_example_without_an_answer_is_refused(tmp_path: Path) -> None:
    wild = Wild(lambda self, x: self.q((x - x.abs().max() - 1).log()), only_x, {"q": linear()})
    with pytest.raises(
        StageError, match=r"itself answers .* with NaN .* give example inputs to which it has an answer"
    ):
        effexport.export(model_of(wild), only_x(2, 12), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nan_of_the_original_is_noted_and_not_compared(tmp_path: Path) -> None:
    wild = Wild(
        lambda self, x: torch.cat([self.q(x), (x[..., :1] - x[..., :1]) / (x[..., :1] - x[..., :1])], dim=-1),
        only_x,
        {"q": linear()},
    )
    result = effexport.export(model_of(wild), only_x(2, 12), tmp_path / "out")
    assert any("itself answers with NaN, which was not compared" in note for note in result.report.notes)


# which PyTorch says of its own kernel
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_an_lstm_with_projections_is_refused(tmp_path: Path) -> None:
    parts = {"r": lambda: nn.LSTM(DIM, 8, batch_first=True, proj_size=4)}
    wild = Wild(lambda self, x: self.r(x)[0], only_x, parts)
    with pytest.raises(StageError, match="LSTM with proj_size, or of a packed sequence, has no counterpart in ONNX"):
        effexport.export(model_of(wild), only_x(2, 6), tmp_path / "out")


def test_recurrent_layers_in_float16_run_in_float32(tmp_path: Path) -> None:
    wild = WILD["GRU"]
    model = model_of(wild)
    effexport.export(model, wild.inputs(2, 12), tmp_path / "out", precision="fp16")
    x = wild.inputs(3, 19)["x"]
    with effexport.load(tmp_path / "out") as runner:
        (found,) = runner.run({"x": x.half().numpy()}).values()
    # float16 has 11 bits: inputs and weights are rounded once
    assert largest_error(found, model(x)) <= 2**-8


def test_sums_over_named_axes_reach_tensorrt(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        weights = torch.einsum("...nd,...md->...nm", q, q)
        # an ellipsis of two axes and of one, and capitals
        scale = torch.einsum("...nd,...d->...n", q, q.mean((0, 2))) + torch.einsum("BHND,ND->BHN", q, q.mean((0, 1)))
        share = (weights - torch.logsumexp(weights, -1, keepdim=True)).exp()
        return torch.einsum("...nm,...md->...nd", share * scale[..., None], q).transpose(1, 2).flatten(2)

    # a batch of one: the means are of all samples
    wild = Wild(forward, only_x, {"q": linear()})
    model = model_of(wild)
    effexport.export(model, only_x(1, 12), tmp_path / "out", dynamic={"x": {1: "seq"}})
    check_file(tmp_path / "out", model, only_x(1, 19))
    assert limit_problems(onnx.load(tmp_path / "out" / "model.onnx")) == []


def test_a_sample_without_tokens_is_compared_where_the_original_has_an_answer(tmp_path: Path) -> None:
    def mean(self: Any, ids: Tensor, lengths: Tensor, smallest: int) -> Tensor:
        keep = (torch.arange(ids.size(1)) < lengths[:, None]).float()[..., None]
        return self.q((self.e(ids) * keep).sum(1) / keep.sum(1).clamp(min=smallest))  # type: ignore[no-any-return]

    def outcome(smallest: int) -> tuple[set[str], list[str]]:
        inputs, parts = WILD["lengths"].inputs, WILD["lengths"].parts
        wild = Wild(lambda self, ids, lengths: mean(self, ids, lengths, smallest), inputs, parts)
        report = effexport.export(model_of(wild), inputs(2, 12), tmp_path / str(smallest)).report
        own = [check for check in report.checks if check.case.name == "nothing kept"]
        return {check.status for check in own}, [check.reason for check in own if check.kind == "shapes"]

    statuses, reasons = outcome(1)
    assert "passed" in statuses
    assert not reasons
    # 0 / 0
    statuses, (reason,) = outcome(0)
    assert statuses == {"not run"}
    assert "itself answers nothing kept: 2 × 12 with NaN" in reason
