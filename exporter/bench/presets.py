"""Published experiments to repeat, and the figures that were published. Loads no framework."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from effexport.bench.grid import Grid, Model


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published experiment to repeat. title: of its page."""

    name: str
    title: str
    grid: Grid
    rounds: int
    max_seconds: float


LENGTHS = (512, 1024, 2048, 4096, 8192)

LINEAR_BLOG = Preset(
    name="linear-blog",
    title="Linear attention, “up to 60 times”",
    # The original timed a GPU (T4); a row that would take longer than --max-seconds gets fewer than its 100 runs.
    grid=Grid(
        models=(Model("softmax"), Model("linear")),
        seq_lens=(128, 256, 512, 1024, 2048, 4096, 6000),
        batches=(32,),
        heads=1,
        head_dim=64,
    ),
    rounds=100,
    max_seconds=60.0,
)

NYSTROM_TABLE1 = Preset(
    name="nystrom-table1",
    title="Nyströmformer, Table 1",
    # The paper does not say how many heads its instance had; here 8 heads of 64, and its convolution is included.
    grid=Grid(
        models=(Model("softmax"), Model("nystrom", label="nystrom-64"), Model("nystrom", {"num_landmarks": 32})),
        seq_lens=LENGTHS,
        scope="attention",
    ),
    rounds=15,
    max_seconds=20.0,
)

REFORMER_ROUNDS = Preset(
    name="reformer-rounds",
    title="Reformer, rounds and length",
    # The paper keeps the tokens of a batch constant; here the batch is 1, so compare tokens per second.
    grid=Grid(
        models=(Model("softmax"), *(Model("lsh", {"num_hashes": rounds}) for rounds in (1, 2, 4, 8))),
        seq_lens=(1024, 2048, 4096, 8192, 16384),
    ),
    rounds=15,
    max_seconds=20.0,
)

AFT_TABLE = Preset(
    name="aft-table",
    title="AFT, Tables 2, 4 and 7",
    # The paper times whole models, most of them in training; here it is one layer with its projections, forward.
    grid=Grid(
        models=tuple(Model(name) for name in ("softmax", "aft-full", "aft-simple", "aft-local", "aft-conv")),
        seq_lens=(197, 1024, 2048, 4096),
        scope="attention",
    ),
    rounds=15,
    max_seconds=20.0,
)

PRESETS: dict[str, Preset] = {
    preset.name: preset for preset in (LINEAR_BLOG, NYSTROM_TABLE1, REFORMER_ROUNDS, AFT_TABLE)
}

# A figure, a pair of memory in MB and time in ms, or words.
FigureCell = str | float | tuple[float, float] | None


@dataclass(frozen=True)
class Published:
    """A published table, or a claim without one, which has neither columns nor rows.

    columns: heads, that of the row's name first. rows: the name, then a cell for each further column. note: caveats for
    comparisons.
    """

    preset: str
    title: str
    source: str
    note: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[FigureCell, ...], ...] = ()


@cache
def publications() -> tuple[Published, ...]:
    """The contents of published.toml."""
    text = files("effexport.bench").joinpath("published.toml").read_text(encoding="utf-8")
    return tuple(
        Published(**{name: tuples(value) for name, value in one.items()}) for one in tomllib.loads(text)["published"]
    )


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def published_of(preset: str) -> tuple[Published, ...]:
    """The publications that a preset repeats; none for "" and for unknown names."""
    return tuple(one for one in publications() if one.preset == preset)
