"""What `bench --advise` prints: the plan before it starts, and the advice."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from effexport.commands._options import cell, say
from effexport.units import counted, listed, memory, rough_duration

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.bench.advice import Plan
    from effexport.bench.recommendation import Advice
    from effexport.bench.results import BenchResults
    from effexport.bench.run import Settings


def print_plan(console: Console, plan: Plan, settings: Settings) -> None:
    from effexport.bench.recommendation import model_text

    seconds = plan.seconds(settings.rounds, settings.max_seconds)
    say(console, f"plan: {model_text(plan)}; about {rough_duration(seconds)}, and Ctrl-C gives the advice so far")
    order = "; ".join(cases[0].label for cases in plan.models)
    say(console, f"      on {listed(plan.grid.runtimes)}, the cheapest first: {order}")
    if plan.probed_length is not None:
        probed = f"{plan.probed_length:,} tokens"
        say(console, f"      each is first timed with {probed}, and left out if it would clearly miss a limit")


def print_advice(console: Console, advice: Advice, results: BenchResults) -> None:
    """Print what to use and how to get it, then the table of all candidates."""
    from rich.table import Table

    recommended, *caveats = advice.sentences
    say(console, recommended, style="bold")
    if advice.build is not None:
        if advice.build.before:
            say(console, f"  {advice.build.before}")
        say(console, f"  {advice.build.text}")
    table: Any = Table("model", "runtime", box=None, pad_edge=False)
    for title in ("latency", "memory", *([advice.figure] if advice.figure else [])):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("")
    for entry in advice.entries:
        loss = [entry.loss] if advice.figure else []
        cells = (entry.label, entry.runtime, entry.latency, memory(entry.peak_bytes), *loss, entry.standing, entry.why)
        table.add_row(*map(cell, cells))
    console.print(table)
    for sentence in caveats:
        say(console, sentence)
    runs = f"{counted(results.threads, 'thread')}; median of up to {results.rounds} runs ± half the interquartile range"
    footnote = f"{advice.model}, without padding; {runs}; memory: peak beyond what was in use before"
    say(console, footnote, style="dim")


def json_of_advice(advice: Advice) -> dict[str, Any]:
    """The advice as it stands in the object of --json."""
    from effexport.bench.recommendation import on_frontier

    frontier = on_frontier(advice.entries)
    return {
        "limits": {"latency_ms": advice.limits.latency_ms, "memory_bytes": advice.limits.memory_bytes},
        "sentences": list(advice.sentences),
        "build": None if advice.build is None else advice.build.text,
        "before_build": "" if advice.build is None else advice.build.before,
        "candidates": [
            {
                "label": entry.label,
                "runtime": entry.runtime,
                "standing": entry.standing,
                "why": entry.why,
                "median_ms": entry.latency_ms,
                "peak_bytes": entry.peak_bytes,
                "loss": None if entry.quality is None else asdict(entry.quality.loss),
                "judged": None if entry.quality is None else entry.quality.model,
                "on_frontier": entry in frontier,
            }
            for entry in advice.entries
        ],
    }
