"""Models whose code is tied to sizes: the branch of the example is exported, with its limits, or with one size of the
axis, and the report names the line."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from slow_cases import soak
from torch import Tensor, nn
from torch.export import Dim
from written_module import DIM, Written, check_answers, vectors

import effexport
from effexport.artifact import open_artifact
from effexport.base.errors import StageError, UserError
from effexport.base.spec import BuildSpec
from effexport.export.onnx_graph import load_graph
from effexport.export.specialised_length import Assumption, UserTrace, condition, holds, readable
from effexport.export.user_program import BranchSide, ModuleComparison, declared_shapes, has_shape, program_of_sides
from effexport.models.user.spec import ModuleSpec
from effexport.proof.inputs import case_inputs
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.engine.signature import signature_from_spec
from effexport.tensorrt.spec import Profile, Range, within

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


def other_above_256(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 256 else x


def other_at_one_length(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] == 9 else x


def token_by_token(x: Tensor) -> Tensor:
    return torch.stack([x[:, i] * (i + 1) for i in range(x.shape[1])], 1)


def padded_if_needed(x: Tensor) -> Tensor:
    n = x.shape[1]
    if n % 8:
        x = F.pad(x, (0, 0, 0, 8 - n % 8))
    return x.unflatten(1, (x.shape[1] // 8, 8)).mean(2).repeat_interleave(8, 1)[:, :n]


class PadsAndRemembers(nn.Module):
    """As some packages do: blocks by an `if`, a chunked path above a length, and a table kept for the next call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.seen = nn.Linear(DIM, DIM), -1

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        x = self.linear(x)
        if n != self.seen:
            self.seen = n
            x = x + 0
        if n > 30:
            return padded_if_needed(torch.cat([x[:, :16], x[:, 16:]], 1))
        return padded_if_needed(x)


def padded_if_needed_and_doubled_if_short(x: Tensor) -> Tensor:
    return padded_if_needed(x) * (2 if x.shape[1] < 16 else 1)


class ChoosesForGood(nn.Module):
    """As BigBird of transformers: a short input changes what later ones become, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.is_sparse = nn.Linear(DIM, DIM), True

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 16:
            self.is_sparse = False
        return self.linear(x * 2 if self.is_sparse else x)


def doubled_in_a_part_of_a_side(x: Tensor) -> Tensor:
    """Beyond the first side, whose nearest sizes agree, is a side of its own that differs."""
    if x.shape[1] > 30:
        return x * 2 if x.shape[1] > 900 else x + 0
    return x


def other_for_many_tokens_of_all_samples(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] * x.shape[1] > 500 else x


def local_if_long(x: Tensor) -> Tensor:
    """A window that hides nothing just above the length from which it is used."""
    if x.shape[1] > 64:
        return x + F.pad(x[:, :-70], (0, 0, 70, 0)) if x.shape[1] > 70 else x + 0
    return x


def window_if_long(x: Tensor) -> Tensor:
    """A window that hides nothing in the shortest inputs that do without it."""
    places = torch.arange(x.shape[1])
    near = (places[:, None] - places).abs() < (40 if x.shape[1] > 80 else 1000)
    return near.to(x.dtype) @ x


def other_at_5000(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] == 5000 else x


def cut_off_if_long(x: Tensor) -> Tensor:
    return x.clamp(-10, 10) if x.shape[1] > 30 else x


def sample_by_sample(x: Tensor) -> Tensor:
    return torch.stack([sample * 2 for sample in x])


def other_above_three_samples(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 3 else x


def by_blocks_of_8(x: Tensor) -> Tensor:
    assert x.shape[1] % 8 == 0
    return x.unflatten(1, (-1, 8)).mean(2)


def first_300(x: Tensor) -> Tensor:
    return x.split(300, dim=1)[0]


def sums_of_largest_in_thirds(x: Tensor) -> Tensor:
    return torch.stack([part.amax(1) for part in torch.chunk(x, 3, dim=-2)]).sum(0)


class ByLevels(nn.Module):
    """Sums of 2, 4, … tokens, as often as a length padded to a power of two allows, which must be 4 at least."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        padded = 2 ** math.ceil(math.log2(n))
        level = total = F.pad(x, (0, 0, 0, padded - n))
        for i in range(int(math.log2(padded // 4))):
            level = level.unflatten(1, (level.shape[1] // 2, 2)).sum(2)
            total = total + level.repeat_interleave(2 ** (i + 1), 1)
        return total[:, :n]


def other_at_9_and_none_below_4(x: Tensor) -> Tensor:
    n = x.shape[1]
    assert n > 3
    return x * 2 if n == 9 else x


def doubled_if_single(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] == 1 else x


def squared_if_several(x: Tensor) -> Tensor:
    n = x.shape[1]
    if n > 1:
        x = x * x
    return x * 3 if n > 40 else x


def causal_if_several(x: Tensor) -> Tensor:
    """Both sides compute the same for one token; our operator takes the place of the other one only."""
    x = x[:, None]
    return F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[2] > 1)[:, 0]


def cached_and_causal_if_several(x: Tensor) -> Tensor:
    """As a layer with a cache writes it for a prompt and for the next token."""
    x = x[:, None]
    keys = torch.cat([-x[:, :, :1], x], 2)
    return F.scaled_dot_product_attention(x, keys, keys, None, 0.0, x.shape[2] > 1)[:, 0]


def causal_if_short(x: Tensor) -> Tensor:
    x = x[:, None]
    return F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[2] < 100)[:, 0]


class TableOfLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in self.tables:
            self.tables[n] = torch.arange(n).sin()[:, None]
        return x + self.tables[n]


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"test_sizes_of_code.py, line {function.__code__.co_firstlineno + offset}"


def built(change: Callable[[Tensor], Tensor], example: Tensor, folder: Path, **options: Any) -> tuple[ModuleSpec, str]:
    """The spec and the note on sizes, "" if there is none, of a build whose file computes what the model does."""
    model = Written(change).eval()
    result = effexport.export(model, example, folder, **options)
    assert result.report.verdict == "passed"
    check_answers(folder, model, example)
    spec = open_artifact(folder).spec.model
    assert isinstance(spec, ModuleSpec)
    notes = [note for note in result.report.notes if note.startswith("The file takes")]
    assert notes == list(spec.size_notes.values())
    return spec, " ".join(notes)


def test_a_branch_of_the_length_limits_the_file_on_the_side_of_the_example(tmp_path: Path) -> None:
    short, note = built(other_above_256, vectors(2, 100), tmp_path / "short")
    assert (short.shortest, short.longest) == (1, 256)
    assert note.startswith(
        f"The file takes 1 to 256 tokens, because of a branch of the code: {line_of(other_above_256, 1)}"
    )
    long, note = built(other_above_256, vectors(2, 300), tmp_path / "long")
    assert (long.shortest, long.longest) == (257, None)
    assert note.startswith("The file takes 257 tokens and more, ")
    model = Written(other_above_256).eval()
    with effexport.load(tmp_path / "short") as lower, effexport.load(tmp_path / "long") as upper:
        for runner, other, message in ((lower, 257, "takes at most 256"), (upper, 256, "takes at least 257: pad the ")):
            with pytest.raises(UserError, match=message):
                runner.run({"x": vectors(1, other).numpy()})
    check_answers(tmp_path / "short", model, vectors(3, 1), vectors(3, 256))
    check_answers(tmp_path / "long", model, vectors(3, 257), vectors(3, 900))


@pytest.mark.parametrize(
    ("change", "tokens", "limits"),
    [
        soak((doubled_if_single, 1, (1, 1))),
        (squared_if_several, 20, (2, 40)),
        soak((squared_if_several, 50, (41, None))),
        (causal_if_several, 1, (1, None)),
        (cached_and_causal_if_several, 1, (1, 1)),
        soak((cached_and_causal_if_several, 8, (2, None))),
        (causal_if_short, 120, (100, None)),
    ],
)
def test_a_side_of_one_token_and_options_that_are_conditions_are_branches_as_others(
    change: Callable[[Tensor], Tensor], tokens: int, limits: tuple[int, int | None], tmp_path: Path
) -> None:
    spec, note = built(change, vectors(2, tokens), tmp_path / "out")
    assert (spec.shortest, spec.longest) == limits
    assert bool(note) == (limits != (1, None))
    if change is cached_and_causal_if_several:
        assert f"{line_of(change, 4)}: seq > 1" in note
    with effexport.load(tmp_path / "out") as runner, torch.inference_mode():
        for length in (1, 2, 39, 40, 41, 99, 100, 200):
            x = vectors(3, length)
            if limits[0] <= length <= (limits[1] or length):
                expected = Written(change)(x).numpy()
                np.testing.assert_allclose(runner.run({"x": x.numpy()})["output"], expected, atol=1e-5)
            else:
                with pytest.raises(UserError, match="takes " if tokens > 1 else "expected x float32"):
                    runner.run({"x": x.numpy()})


@pytest.mark.parametrize(
    ("change", "sizes", "scale"),
    [
        (other_for_many_tokens_of_all_samples, [(1, 501), (30, 20)], 1.0),
        (local_if_long, [(1, 65), (1, 71), (1, 200)], 1.0),
        (window_if_long, [(1, 60), (1, 80), (1, 81), (1, 200)], 1.0),
        (other_at_5000, [(1, 4999), (1, 5000)], 1.0),
        (cut_off_if_long, [(1, 31)], 60.0),
    ],
)
def test_a_file_is_right_at_a_size_or_refuses_it(
    change: Callable[[Tensor], Tensor], sizes: list[tuple[int, int]], scale: float, tmp_path: Path
) -> None:
    effexport.export(Written(change), vectors(2, 20), tmp_path / "out")
    with effexport.load(tmp_path / "out") as runner, torch.inference_mode():
        for size in [(2, 20), *sizes]:
            x = scale * vectors(*size)
            try:
                (found,) = runner.run({"x": x.numpy()}).values()
            except UserError as error:
                refused = str(error)
            else:
                refused = ""
            if refused:
                assert size != (2, 20)
                assert "positions" not in refused
                continue
            expected = Written(change)(x).numpy()
            np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("change", "line"),
    [(token_by_token, line_of(token_by_token, 1)), (TableOfLength(), line_of(TableOfLength.forward, 2))],
)
def test_a_length_that_the_code_is_tied_to_is_fixed_and_the_line_named(
    change: Callable[[Tensor], Tensor], line: str, tmp_path: Path
) -> None:
    spec, note = built(change, vectors(2, 12), tmp_path / "out")
    assert (spec.input_dims, spec.output_dims) == ({"x": ["batch", 12, DIM]}, {"output": ["batch", 12, DIM]})
    assert note.startswith(f"The file takes seq = 12 only, because the code ties it to one size: {line}: ")
    for way in ("build an artifact for each", "with dynamic", "no loop over tokens"):
        assert way in note


@pytest.mark.parametrize(
    ("change", "length", "sizes", "line"),
    [
        (other_at_one_length, 12, (10, None), 1),
        soak((other_at_one_length, 6, (1, 8), 1)),
        (doubled_in_a_part_of_a_side, 20, (1, 900), 3),
        (padded_if_needed_and_doubled_if_short, 24, (16, None), 1),
        (first_300, 20, (1, 2400), 1),
        soak((sums_of_largest_in_thirds, 20, (5, None), 1)),
    ],
)
def test_the_sizes_around_the_example_whose_branches_compute_the_same_are_taken(
    change: Callable[[Tensor], Tensor], length: int, sizes: tuple[int, int | None], line: int, tmp_path: Path
) -> None:
    spec, note = built(change, vectors(2, length), tmp_path / "out")
    assert (spec.shortest, spec.longest) == sizes
    assert line_of(change, line) in note
    others = {sizes[0], length + 1, sizes[1] or 100}
    check_answers(tmp_path / "out", Written(change), *(vectors(3, other) for other in others))


def test_logarithms_that_decide_how_often_code_runs_are_numbers_in_the_graph(tmp_path: Path) -> None:
    model = ByLevels()
    spec = effexport.export(model, vectors(2, 20), tmp_path / "out").artifact.spec.model
    assert isinstance(spec, ModuleSpec)
    assert (spec.shortest, spec.longest) == (17, 32)
    assert line_of(ByLevels.forward, 2) in spec.size_notes["seq"]
    assert not {"Min", "Pow", "Div"} & {node.op_type for node in load_graph(tmp_path / "out" / "model.onnx").graph.node}
    check_answers(tmp_path / "out", model, *(vectors(3, length) for length in (17, 21, 31, 32)))


def test_a_program_must_declare_the_shapes_that_it_returns() -> None:
    program = torch.export.export(
        Written(lambda x: x[:, : 2 * (x.shape[1] // 2)]), (vectors(2, 6),), dynamic_shapes=({1: Dim.AUTO},)
    )
    assert declared_shapes(program, [vectors(2, 9)]) == [[2, 8, DIM]]
    assert has_shape(vectors(2, 8), [2, None, DIM])
    assert not has_shape(vectors(2, 8), [2, 9, DIM])
    assert not has_shape(vectors(2, 8), [2, 8])


def test_sizes_at_which_the_model_fails_are_no_other_side() -> None:
    def agrees(module: Callable[[Tensor], Tensor], size: int) -> bool:
        program = torch.export.export(Written(lambda x: x * 2), (vectors(2, 6),), dynamic_shapes=({1: Dim.AUTO},))
        return ModuleComparison(Written(module), lambda size: [[vectors(2, size)]])(program, size)

    assert agrees(lambda x: x * 2, 3)
    assert not agrees(other_at_9_and_none_below_4, 3)


@pytest.mark.parametrize("length", [soak(20), soak(24), 40])
def test_branches_that_compute_the_same_leave_the_length_free(length: int, tmp_path: Path) -> None:
    model = PadsAndRemembers().eval()
    assert effexport.export(model, vectors(2, length), tmp_path / "out").artifact.spec.model.size_notes == {}
    others = (1, 2, 7, 8, 23, 24, 31, 96, 257, 1000)
    check_answers(tmp_path / "out", model, *(vectors(3, other) for other in others))


def test_what_a_short_input_changes_for_good_does_not_change_the_file(tmp_path: Path) -> None:
    model = ChoosesForGood().eval()
    found = effexport.export(model, vectors(2, 20), tmp_path / "out").artifact.spec.model
    assert (found.shortest, found.max_seq_len, model.is_sparse) == (16, None, True)
    check_answers(tmp_path / "out", model, vectors(3, 24))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: F.adaptive_avg_pool1d(x.mT, 4).mT, "with a free size, outputs are"),
        (lambda x: x * (x.shape[1] & 3), "with a free size, torch.onnx could not export the module"),
    ],
    ids=["a graph that is wrong", "no graph"],
)
def test_what_torch_onnx_cannot_say_of_every_size_is_exported_for_one(
    tmp_path: Path, forward: Callable[[Tensor], Tensor], reason: str
) -> None:
    model, x = Written(forward).eval(), vectors(2, 16)
    result = effexport.export(model, x, tmp_path / "out")
    assert result.artifact.spec.model.fixed_seq_len == 16
    assert any(reason in note for note in result.report.notes)
    with pytest.raises(StageError, match=r"graph check|export"):
        effexport.export(model, x, tmp_path / "other", dynamic={"x": {0: "batch", 1: "seq"}})


@pytest.mark.parametrize(("change", "batch"), [(sample_by_sample, 3), (other_above_three_samples, 5)])
def test_a_batch_that_the_code_is_tied_to_is_that_of_the_example(
    change: Callable[[Tensor], Tensor], batch: int, tmp_path: Path
) -> None:
    spec, note = built(change, vectors(batch, 12), tmp_path / "out")
    assert spec.input_dims == {"x": [batch, "seq", DIM]}
    assert spec.longest is None
    assert f"The file takes batch = {batch} only" in note
    assert line_of(change, 1) in note


@pytest.mark.parametrize(
    ("change", "batch"), [(sample_by_sample, 3), (other_above_three_samples, 3), (other_above_three_samples, 5)]
)
def test_a_batch_that_was_declared_free_is_not_fixed(
    change: Callable[[Tensor], Tensor], batch: int, tmp_path: Path
) -> None:
    dynamic = {"x": {0: "batch", 1: "seq"}}
    with pytest.raises(StageError, match="ties batch to one size: "):
        effexport.export(Written(change), vectors(batch, 12), tmp_path / "out", dynamic=dynamic)


def test_a_length_that_the_model_itself_does_not_take_is_not_free(tmp_path: Path) -> None:
    result = effexport.export(Written(by_blocks_of_8), vectors(2, 16), tmp_path / "out")
    assert result.artifact.spec.model.fixed_seq_len == 16


def test_the_line_is_named_below_a_head(tmp_path: Path) -> None:
    result = effexport.export(Written(other_above_256), vectors(2, 100), tmp_path / "out", pool="max")
    assert any(line_of(other_above_256, 1) in note for note in result.report.notes)
    assert result.artifact.spec.model.max_seq_len == 256


def test_a_program_that_has_disabled_logging_is_told_too(tmp_path: Path) -> None:
    logging.disable(logging.CRITICAL)
    try:
        _, note = built(other_at_one_length, vectors(2, 12), tmp_path / "out")
        assert logging.root.manager.disable == logging.CRITICAL
    finally:
        logging.disable(logging.NOTSET)
    assert line_of(other_at_one_length, 1) in note


def test_one_size_on_purpose_has_no_note(tmp_path: Path) -> None:
    spec, note = built(token_by_token, vectors(2, 12), tmp_path / "out", dynamic={"x": {0: "batch"}})
    assert spec.input_dims == {"x": ["batch", 12, DIM]}
    assert note == ""


def test_an_axis_that_was_declared_free_is_not_fixed_and_nothing_is_proven_before(tmp_path: Path) -> None:
    stages: list[str] = []
    with pytest.raises(StageError, match=r"ties seq to one size: .*line \d+.*for a file of one size") as caught:
        effexport.export(
            Written(token_by_token),
            vectors(2, 12),
            tmp_path / "out",
            dynamic={"x": {0: "batch", 1: "seq"}},
            progress=lambda stage, _: stages.append(stage),
        )
    assert line_of(token_by_token, 1) in str(caught.value)
    assert stages[-1] == "exporting to ONNX"
    assert not (tmp_path / "out").exists()


def test_other_sides_are_not_looked_for_where_the_first_is_wrong_on_its_own() -> None:
    first: Any = BranchSide("program", frozenset(range(10, 5000)), 5000, "")  # type: ignore[arg-type]

    def other(size: int) -> BranchSide:
        raise AssertionError(size)

    assert program_of_sides(first, 100, (1, 5000), other, lambda program, size: size == 100) is None


def test_no_side_is_looked_for_beyond_those_that_end_the_range() -> None:
    ranges = {"short": range(2, 65), "middle": range(65, 129), "long": range(129, 4097)}
    asked: list[int] = []

    def side(size: int) -> Any:
        asked.append(size)
        name = next(name for name, sizes in ranges.items() if size in sizes)
        return BranchSide(name, frozenset(range(size - 10, size + 11)).intersection(ranges[name]), 9000, name)  # type: ignore[arg-type]

    def agrees(program: Any, size: int) -> bool:
        return size in ranges[program]

    first: Any = BranchSide("middle", frozenset(ranges["middle"]), 9000, "middle")  # type: ignore[arg-type]
    whole = program_of_sides(first, 100, (1, 9000), side, agrees)
    assert whole is not None
    assert (whole.program, whole.lowest, whole.highest) == ("middle", 65, 128)
    assert asked == [129, 64]


def test_a_limit_takes_no_second_trace(tmp_path: Path) -> None:
    stages: list[str] = []
    effexport.export(
        Written(other_above_256), vectors(2, 100), tmp_path / "out", progress=lambda stage, _: stages.append(stage)
    )
    assert stages.count("exporting to ONNX") == 1


def test_nothing_is_compared_once_a_program_holds_for_every_size() -> None:
    many: Any = BranchSide("many", frozenset(range(10, 4097)), 9000, "many")  # type: ignore[arg-type]
    few: Any = BranchSide("few", frozenset(range(2, 10)), 9, "few")  # type: ignore[arg-type]
    asked: list[tuple[Any, int]] = []

    def agrees(program: Any, size: int) -> bool:
        asked.append((program, size))
        return True

    whole = program_of_sides(many, 100, (1, 9000), lambda size: few, agrees)
    assert whole is not None
    assert (whole.program, whole.lowest, whole.highest) == ("many", 1, 9000)
    assert {program for program, _ in asked} == {"many"}
    assert len(asked) == len(set(asked))


def test_assumptions_hold_where_pytorch_says_so() -> None:
    guards: list[Any] = []

    class Guarded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            least = torch.sym_min(n, 50)
            tests = (n % 8 == 4, n // 7 > 12, least * 3 < 151, math.ceil(n / 3) <= 34, 2 * n**2 != 7 * n + 1)
            guards.extend(test.node.expr for test in tests)  # type: ignore[attr-defined]
            guards.append((math.floor(torch.sym_sqrt(n)) == 10).node.expr)  # type: ignore[attr-defined]
            return x

    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        torch.export.export(Guarded(), (vectors(2, 100),), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    assert len(guards) == 6
    for guard in guards:
        (symbol,) = guard.free_symbols
        assert condition(guard, (symbol,)).__name__ == "<lambda>"  # it is compiled
        for size in (2, 3, 8, 12, 33, 91, 99, 100, 101, 102, 103, 121, 1000, 4096):
            assert holds(guard, size) == bool(guard.subs(symbol, size)), (guard, size)


def test_that_two_inputs_have_one_batch_is_not_a_reason() -> None:
    found = (Assumption("Eq(s1, s0)", "a.py, line 1", True), Assumption("Eq(s0, 2)", "a.py, line 2", True))
    trace = UserTrace(None, None, found, {"s0": "batch of x", "s1": "batch of mask"})
    assert trace.reasons(found) == "a.py, line 2: batch becomes a constant"


def spec_of(**fields: Any) -> ModuleSpec:
    return ModuleSpec(
        vocab_size=2,
        seq_len=300,
        module="mine",
        attention_fields={"variant": "pytorch", "seq_len": 300},
        attention_layers=0,
        fused_op_counts={},
        unfused_op_counts={},
        input_dims={"x": ("batch", "seq", 4), "mask": ("batch", "seq")},
        output_dims={"output": ("batch", "seq", 4)},
        tensor_types={"x": "float", "mask": "int64", "output": "float"},
        mask="mask",
        **{"longest": None, **fields},
    )


def test_a_spec_of_any_size_is_written_as_before() -> None:
    assert not {"shortest", "size_notes"} & spec_of().to_dict().keys()
    limited = BuildSpec(model=spec_of(shortest=257, size_notes={"seq": "Why."}))
    assert BuildSpec.from_dict(limited.to_dict()).model.shortest == 257


def test_a_server_refuses_fewer_tokens_than_the_file_takes() -> None:
    signature = signature_from_spec(BuildSpec(model=spec_of(shortest=257)), ServingSettings())
    feeds = {"x": np.zeros((1, 256, 4), np.float32), "mask": np.ones((1, 256), np.int64)}
    with pytest.raises(UserError, match="the sequence has 256 tokens; this model takes at least 257"):
        signature.complete(feeds)


def test_the_proof_has_no_length_that_the_file_does_not_take() -> None:
    cases = case_inputs(BuildSpec(model=spec_of(shortest=257, longest=320)), 0)
    lengths = {name: inputs["x"].shape[1] for name, inputs in cases.items()}
    assert min(lengths.values()) == 257
    assert max(lengths.values()) == lengths["longest"] == 320
    assert "single token" not in lengths
    far = case_inputs(BuildSpec(model=spec_of(longest=100_000)), 0)
    assert far["longest"]["x"].shape[1] == 1024
    assert "longest" not in case_inputs(BuildSpec(model=spec_of(longest=300)), 0)


def test_a_mask_of_a_fixed_batch_is_an_input_like_any_other() -> None:
    fixed = spec_of().with_fixed("batch", 5, "Why.")
    assert (fixed.mask, fixed.inputs["mask"], fixed.ranges["mask"]) == ("", (5, "seq"), [0, 2])
    assert fixed.length_notes == ("Why.",)


def test_a_profile_has_no_length_that_the_file_does_not_take() -> None:
    spec = BuildSpec(model=spec_of(shortest=257))
    profile = Profile({"batch": Range(1, 1, 4), "seq": Range(1, 300, 450)})
    assert str(within(profile, spec)) == "batch=1:1:4,seq=257:300:450"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("Ne(Mod(s0, 16), 0)", "seq % 16 != 0"),
        ("Eq(s0, 7)", "seq becomes a constant"),
        ("Eq(s0, s1)", "seq of x == seq of y"),
        ("s0*s2 >= 8", "seq * batch >= 8"),
        ("((s0//16)) > 0", "seq // 16 > 0"),
        ("IntTrueDiv(s0, 8) > CeilToInt(OpaqueUnaryFn_sqrt(ToFloat(s0)))", "seq / 8 > ceil(sqrt(seq))"),
        ("PowByNatural(2, Min(1, s0)) > 1", "2 ** min(1, seq) > 1"),
        (" + ".join(f"Min(1, s0//{2**i})" for i in range(64)), "a condition on seq"),
        ("no Python <", "a condition on a size"),
    ],
)
def test_an_assumption_is_shown_as_its_user_would_write_it(expression: str, text: str) -> None:
    assert readable(expression, {"s0": "seq of x", "s1": "seq of y", "s2": "batch of x"}) == text


@pytest.mark.parametrize("place", [slice(100), slice(-100, None)], ids=["first", "last"])
def test_a_part_that_is_the_whole_in_the_example_stays_a_part(place: slice, tmp_path: Path) -> None:
    """torch.export gives it the shape of the whole, and onnxscript left such a slice out."""

    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, place].mT @ x[:, place]

    result = effexport.export(Part().eval(), torch.randn(2, 12, DIM), tmp_path / "out")
    check_answers(result.path, Part(), *(vectors(2, length) for length in (7, 100, 101, 300)), atol=1e-4)


class Parts(nn.Module):
    """Parts of a sequence, and turned sequences."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "thirds": torch.cat(torch.tensor_split(x, 3, dim=1)[::-1], 1),
            "quarters": torch.cat([part * i for i, part in enumerate(x.tensor_split(sections=4, dim=-2))], 1),
            "middle": torch.tensor_split(x, (2, 5), dim=1)[1],
            "slice": x[:, 2:5] * 2,
            "half_a_turn": torch.roll(x, x.shape[1] // 2, 1),
            "two_axes": torch.roll(input=x, shifts=(-(x.shape[1] // 3), 1), dims=(-2, 2)),
            "in_a_row": x.roll(x.shape[1]),
        }


def test_parts_that_a_length_may_leave_empty_are_right_at_every_length(tmp_path: Path) -> None:
    result = effexport.export(Parts().eval(), vectors(2, 12), tmp_path / "out")
    spec = result.artifact.spec.model
    assert isinstance(spec, ModuleSpec)
    assert (result.report.verdict, spec.shortest, spec.longest, spec.size_notes) == ("passed", 1, None, {})
    check_answers(tmp_path / "out", Parts(), *(vectors(3, length) for length in (1, 2, 3, 4, 5, 7, 64)))
