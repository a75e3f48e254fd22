"""Models that draw random numbers in `forward`: the file holds numbers drawn once, computes what the untouched model
computes with these, and the report says what was frozen, and how much it matters."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from written_module import DIM, Written, check_answers, vectors

import effexport
from effexport.api import BuildResult
from effexport.base.errors import StageError, UserError
from effexport.models.user.drawn_numbers import SEED

if TYPE_CHECKING:
    from effexport.base.dtypes import Array

pytestmark = pytest.mark.requires("torch", "onnx", "ort")

HEADS = 2
# float32 rounding of sums in another order; other numbers differ by their own size
LIMIT = 2e-5


class ProbAttention(nn.Module):
    """Informer's attention, as published in the Time-Series-Library: it looks at a few keys for each query, drawn in
    every call, to find the queries that are worth their attention."""

    def __init__(self, factor: int = 3) -> None:
        super().__init__()
        self.factor = factor
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        B, L, D = x.shape
        Q, K, V = (f(x).view(B, L, HEADS, -1).transpose(2, 1) for f in (self.query, self.key, self.value))
        u = self.factor * np.ceil(np.log(L)).astype("int").item()
        u = u if u < L else L
        K_expand = K.unsqueeze(-3).expand(B, HEADS, L, L, K.shape[-1])
        index_sample = torch.randint(L, (L, u))
        K_sample = K_expand[:, :, torch.arange(L).unsqueeze(1), index_sample, :]
        Q_K_sample = torch.matmul(Q.unsqueeze(-2), K_sample.transpose(-2, -1)).squeeze()
        M = Q_K_sample.max(-1)[0] - torch.div(Q_K_sample.sum(-1), L)
        M_top = M.topk(u, sorted=False)[1]
        rows = torch.arange(B)[:, None, None], torch.arange(HEADS)[None, :, None], M_top
        scores = torch.matmul(Q[(*rows, slice(None))], K.transpose(-2, -1)) / math.sqrt(Q.shape[-1])
        context = V.mean(dim=-2).unsqueeze(-2).expand(B, HEADS, L, V.shape[-1]).clone()
        context[(*rows, slice(None))] = torch.matmul(torch.softmax(scores, dim=-1), V)
        return x + self.out(context.transpose(2, 1).reshape(B, L, D))


class FeatureMap(nn.Module):
    """MoLFormer's: orthogonal features, which it draws in every call unless it is told not to."""

    weight: Tensor

    def __init__(self, size: int, components: int, deterministic_eval: bool = False) -> None:
        super().__init__()
        self.size, self.components, self.deterministic_eval = size, components, deterministic_eval
        self.redraw()

    def redraw(self, device: torch.device | None = None) -> None:
        def block() -> Tensor:
            numbers = torch.randn(self.size, self.size, device=device)
            return torch.linalg.qr(numbers)[0] * torch.linalg.norm(numbers, dim=1).unsqueeze(0)

        blocks = [block() for _ in range(math.ceil(self.components / self.size))]
        self.register_buffer("weight", torch.cat(blocks, dim=1)[:, : self.components])

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not self.deterministic_eval or self.training:
            self.redraw(q.device)
        return F.relu(q @ self.weight) + 1e-2, F.relu(k @ self.weight) + 1e-2


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        self.features = FeatureMap(DIM, 20)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.features(self.query(x), self.key(x))
        return x + q @ (k.transpose(1, 2) @ self.value(x)) / (q @ k.sum(1).unsqueeze(-1))


def exported(model: nn.Module, example: Tensor, folder: Path, **options: object) -> tuple[BuildResult, str]:
    """A build that has passed, and its note on draws."""
    result = effexport.export(model, example, folder, **options)  # type: ignore[arg-type]
    assert result.report.verdict == "passed"
    (note,) = [note for note in result.report.notes if "draws random numbers" in note]
    return result, note


def seeded(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A model that draws in every call the numbers of the file."""

    def answer(x: Tensor) -> Tensor:
        torch.manual_seed(SEED)
        found: Tensor = model(x)
        return found

    return answer


def answers(result: BuildResult, *inputs: Tensor) -> Iterator[Array]:
    name = result.artifact.spec.inputs[0].name
    with effexport.load(result.path) as runner:
        for x in inputs:
            (answer,) = runner.run({name: x.numpy()}).values()
            yield answer


def line_of(function: Callable[..., object], offset: int) -> str:
    return f"test_random_draws.py, line {function.__code__.co_firstlineno + offset}"


def test_indices_drawn_for_each_position_fix_the_length_and_leave_the_batch_free(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ProbAttention()).eval()
    before = torch.get_rng_state(), random.getstate()
    result, note = exported(model, vectors(3, 24), tmp_path / "out")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert result.artifact.spec.inputs[0].dims == ("batch", 24, DIM)
    line = line_of(ProbAttention.forward, 6)
    assert f"Sequential draws random numbers in every call: torch.randint of [24, 12] ({line})." in note
    assert re.search(r"Over 8 other draws, its answer to the same inputs varies by 0\.\d+ of its RMS\.$", note)
    (sizes,) = [note for note in result.report.notes if note.startswith("The file takes")]
    assert sizes.startswith(
        f"The file takes seq = 24 only, because the code ties it to one size: {line}: the count or "
    )
    assert "draw the numbers once, in __init__, for the largest size" in sizes
    check_answers(result.path, seeded(model), *(vectors(batch, 24) for batch in (1, 2, 5)), atol=LIMIT)


class OwnSeed(nn.Module):
    """Draws the same numbers in every call."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(42))


def test_numbers_with_a_seed_of_their_own_do_not_vary(tmp_path: Path) -> None:
    model = nn.Sequential(OwnSeed()).eval()
    result = effexport.export(model, vectors(2, 24), tmp_path / "out")
    (note,) = [note for note in result.report.notes if "draws" in note]
    assert note.startswith("Sequential draws numbers, and still answers the same in every call, ")
    assert f"torch.randn of [{DIM}, {DIM}] ({line_of(OwnSeed.forward, 1)})" in note
    check_answers(result.path, model, vectors(1, 5), vectors(3, 40), atol=LIMIT)


def test_features_drawn_in_every_call_are_frozen_at_every_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LinearAttention(), LinearAttention()).eval()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    result, note = exported(model, vectors(2, 24), tmp_path / "out")
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in weights.items())
    assert result.artifact.spec.inputs[0].dims == ("batch", "seq", DIM)
    assert f"torch.randn of [{DIM}, {DIM}] ({line_of(FeatureMap.redraw, 2)}, 4 times)" in note
    assert note.endswith("Made or loaded with deterministic_eval=True, it does not redraw in evaluation mode.")
    check_answers(result.path, seeded(model), *itertools.starmap(vectors, ((1, 1), (2, 24), (5, 63))), atol=LIMIT)


def test_dropout_that_is_left_on_is_one_mask_for_the_shape_of_the_example(tmp_path: Path) -> None:
    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, 0.25)

    model = Written(dropped)
    result, note = exported(model, vectors(3, 10), tmp_path / "out")
    assert result.artifact.spec.inputs[0].dims == (3, 10, DIM)
    assert f"torch.dropout of [3, 10, {DIM}] ({line_of(dropped, 1)})" in note
    # kept elements are scaled by 4/3, dropped ones are 0: 1 / sqrt(1 - 0.25) of the answer's RMS, times sqrt(0.25)
    assert abs(float(note.partition("varies by ")[2].split()[0]) - 0.5) < 0.1
    assert note.endswith("functions of it get training=self.training, and eval() reaches its layers.")
    takes = [note.partition(",")[0] for note in result.report.notes if note.startswith("The file takes")]
    assert takes == ["The file takes batch = 3 only", "The file takes seq = 10 only"]
    xs = vectors(3, 10), vectors(3, 10).flip(0)
    masks = [answer / model.linear(x).detach().numpy() for x, answer in zip(xs, answers(result, *xs), strict=True)]
    np.testing.assert_allclose(masks[0], masks[1], atol=1e-3)
    np.testing.assert_allclose(masks[0], np.where(masks[0] < 1, 0, 4 / 3), atol=1e-3)
    assert 0.15 < (masks[0] == 0).mean() < 0.35


def test_draws_of_every_generator_and_decisions_by_them_are_frozen_in_half_precision_too(tmp_path: Path) -> None:
    def change(x: Tensor) -> Tensor:
        if torch.rand(1).item() < 2 and random.random() < 2:
            x = x * np.random.uniform(2, 3)
        start = int(torch.randint(0, 4, (1,)))
        return x + torch.randn(DIM, dtype=x.dtype) + torch.randn(9)[start]

    result, note = exported(Written(change), vectors(2, 12), tmp_path / "out", precision="fp16")
    for draw in (
        "torch.rand of [1]",
        "torch.randint of [1]",
        f"torch.randn of [{DIM}]",
        "torch.randn of [9]",
        "and 2 more",
    ):
        assert draw in note
    assert result.artifact.spec.inputs[0].dims == ("batch", "seq", DIM)
    xs = torch.zeros(1, 1, DIM).half(), torch.zeros(3, 40, DIM).half()
    first, second = answers(result, *xs)
    np.testing.assert_array_equal(second, np.broadcast_to(first, second.shape))


def test_a_head_on_a_model_that_draws(tmp_path: Path) -> None:
    result, _ = exported(Written(lambda x: x + torch.randn_like(x[:1])), vectors(2, 12), tmp_path / "out", pool="mean")
    assert result.artifact.spec.inputs[0].dims == ("batch", 12, DIM)


def test_an_axis_that_was_declared_free_and_decides_about_draws_is_an_error(tmp_path: Path) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn(x.shape[1] // 8, 1, 1).sum()

    message = (
        rf"the code ties seq to one size: {line_of(noisy, 1)}: the count or the range of the numbers that torch\.randn "
        "draws follows seq. To keep it free, draw .* or do not name the axis as free"
    )
    # the same count at 19 and 20 tokens: only the trace tells
    with pytest.raises(StageError, match=message):
        effexport.export(Written(noisy), vectors(2, 20), tmp_path / "out", dynamic={"x": {0: "batch", 1: "seq"}})
    assert not (tmp_path / "out").exists()


def test_as_many_numbers_as_values_say_are_refused(tmp_path: Path) -> None:
    def change(x: Tensor) -> Tensor:
        return x + torch.rand((x > 0).nonzero().shape[0]).sum()

    with pytest.raises(StageError, match=rf"{line_of(change, 1)}: .* torch\.rand draws follows the values of a tensor"):
        effexport.export(Written(change), vectors(2, 12), tmp_path / "out")


def test_numbers_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"inside of torch\.poisson \(test_random_draws\.py, line \d+\)"):
        effexport.export(Written(lambda x: torch.poisson(x.exp())), vectors(2, 12), tmp_path / "out")


def test_a_generator_of_numpy_of_its_own_is_refused(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    with pytest.raises(UserError, match=r"from a generator of its own, such as numpy\.random\.default_rng\(\)"):
        effexport.export(Written(lambda x: x * generator.random()), vectors(2, 12), tmp_path / "out")
