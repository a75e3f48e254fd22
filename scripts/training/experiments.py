"""All experiments: what is trained, on what, for how long, and as which other layers its weights are judged too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from effexport.base.spec import BuildSpec, build_spec_from_options
from scripts.training.corpus import corpus
from scripts.training.tasks import Duplication, ListOps, Task, Text
from scripts.training.trainer import Schedule

# Four layers of width 128: what two cores train in minutes. Rows of 8 are judged together.
SMALL = {"dim": 128, "heads": 4, "layers": 4, "lm_head": True, "batch": 8}
TEXT_TOKENS, TEXT_ROWS = 512, 200
# Few rows and many steps: with 8 rows and a quarter of the steps, masked models learned only how often each byte comes.
CAUSAL_SCHEDULE, MASKED_SCHEDULE = Schedule(5000, 2), Schedule(3000, 2)
# After 3,000 steps, these still answer with how often each byte comes.
LONGER = Schedule(8000, 2)


@dataclass(frozen=True)
class Experiment:
    """options: of the spec. others: by a name, the options of layers that are given the same weights after training.
    rows: held-out rows that all runtimes are judged on. task: made from the folder of the Debian packages."""

    name: str
    options: Mapping[str, Any]
    task: Callable[[Path], Task]
    schedule: Schedule
    rows: int
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def spec(self, other: str = "", precision: str = "fp32") -> BuildSpec:
        changes = self.others[other] if other else {}
        return build_spec_from_options({**self.options, **changes, "precision": precision}, None)


@cache
def text(folder: Path, masked: bool) -> Text:
    return Text(corpus(folder), TEXT_TOKENS, masked)


def causal(variant: str, schedule: Schedule = CAUSAL_SCHEDULE, **changes: Any) -> Experiment:
    options = SMALL | {"variant": variant, "causal": True, "seq_len": TEXT_TOKENS} | changes
    return Experiment(f"causal-{variant}", options, lambda folder: text(folder, False), schedule, TEXT_ROWS)


def masked(
    name: str,
    options: Mapping[str, Any],
    others: Mapping[str, Mapping[str, Any]] | None = None,
    schedule: Schedule = MASKED_SCHEDULE,
) -> Experiment:
    options = SMALL | {"seq_len": TEXT_TOKENS} | options
    return Experiment(f"masked-{name}", options, lambda folder: text(folder, True), schedule, TEXT_ROWS, others or {})


def tiny(name: str, options: Mapping[str, Any], schedule: Schedule = LONGER) -> Experiment:
    """A model whose weights take 0.3 MB: those that tests/trained keeps."""
    sizes = {"dim": 64, "layers": 2}
    if options.get("causal"):
        return replace(causal(options["variant"], schedule, **sizes), name=f"tiny-{name}")
    return replace(masked(name, options | sizes, schedule=schedule), name=f"tiny-{name}")


def nystrom(**changes: Any) -> dict[str, dict[str, Any]]:
    """Nyström attention in the place of softmax attention, with its weights."""
    return {f"nystrom-{count}": {"variant": "nystrom", "num_landmarks": count, **changes} for count in (64, 32)}


def rounds(*counts: int) -> dict[str, dict[str, Any]]:
    return {f"LSH-{count}": {"num_hashes": count} for count in counts}


def duplication(length: int, chunk_length: int) -> Iterator[Experiment]:
    """One layer, trained with full attention and with 4, 2 and 1 rounds, and judged with all of them and with 8."""
    task = Duplication(length)
    layer = {"variant": "lsh", "causal": True, "circular": False, "num_chunks_after": 0}
    hashed = {"num_chunks_before": 1, "chunk_length": chunk_length, "num_buckets": 2 * length // chunk_length}
    # one chunk holds all tokens: each attends to all before it, whatever their buckets
    full = {"num_chunks_before": 0, "chunk_length": length, "num_buckets": 2, "num_hashes": 1}
    kinds = {"full": full} | {name: hashed | options for name, options in rounds(8, 4, 2, 1).items()}
    for trained in ("full", "LSH-4", "LSH-2", "LSH-1"):
        options = SMALL | {"layers": 1, "seq_len": length, "vocab_size": task.vocabulary} | layer | kinds[trained]
        name = f"duplication-{length}-{trained.lower()}"
        yield Experiment(name, options, lambda folder: task, Schedule(1500, 16), 400, kinds)


def listops(name: str, options: Mapping[str, Any]) -> Experiment:
    task = ListOps(2048, shortest=16)
    options = SMALL | {"dim": 64, "heads": 2, "layers": 2, "vocab_size": task.vocabulary, "seq_len": 2048} | options
    return Experiment(f"listops-{name}", options, lambda folder: task, Schedule(600, 2), 300)


EXPERIMENTS = {
    one.name: one
    for one in (
        *map(causal, ("linear", "aft-simple", "softmax")),
        # a token sees the 64 before it in each layer, and with four layers 256
        causal("window", window=64),
        # a step takes 0.5 s of a core with AVX2, so these take nine minutes
        causal("gated-delta", Schedule(1000, 2)),
        masked("nystrom", {"variant": "nystrom"}),
        masked("nystrom-32", {"variant": "nystrom", "num_landmarks": 32}),
        # what Nyströmformer approximates: with its convolution
        masked("softmax-conv", {"variant": "softmax", "conv_kernel_size": 65}, nystrom()),
        # positions by rotation: without, these two do not learn to look at neighbours
        masked("softmax", {"variant": "softmax", "rotary": True}, nystrom(conv_kernel_size=0)),
        masked("linear", {"variant": "linear", "rotary": True}, schedule=LONGER),
        masked("lsh", {"variant": "lsh"}, rounds(8, 4, 1)),
        masked("aft-conv", {"variant": "aft-conv"}),
        *(masked(variant, {"variant": variant}, schedule=LONGER) for variant in ("aft-local", "aft-full")),
        tiny("linear", {"variant": "linear", "causal": True}),
        *(tiny(variant, {"variant": variant}) for variant in ("nystrom", "lsh", "aft-conv")),
        *duplication(64, 8),
        *duplication(128, 16),
        *(listops(variant, {"variant": variant}) for variant in ("linear", "nystrom", "lsh", "aft-local", "softmax")),
    )
}
