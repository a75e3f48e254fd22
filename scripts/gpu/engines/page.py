"""The results as a page in Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from gpu.engines.latency import ROUNDS
from gpu.engines.leaks import GRANULE_BYTES
from gpu.engines.records import Results, Step


def markdown_from_results(results: Results) -> str:
    lines = ["# TensorRT on a GPU", "", "Written by `python3 scripts/gpu --engines`.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in results.machine.items()]
    counts = {status: sum(step.status == status for step in results.steps) for status in ("passed", "failed")}
    left_out = [step for step in results.steps if step.status == "left out"]
    lines += ["", f"{counts['passed']} steps passed, {counts['failed']} failed, {len(left_out)} were left out.", ""]
    lines += ["| target | model | step | result | time (s) | |", "|---|---|---|---|---|---|"]
    for step in results.steps:
        text = cell(step.text or remark_of(step))
        lines.append(f"| {step.target} | {step.model} | {step.name} | {step.status} | {step.seconds:.1f} | {text} |")
    return "\n".join([*lines, "", *latency_lines(results), *soak_lines(results)])


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def remark_of(step: Step) -> str:
    """The table's text for a step that passed."""
    data = step.data
    if "build_seconds" in data:
        ops = ", ".join(f"{op} as {what}" for op, what in data["implementation"].items()) or "no custom operator"
        return (
            f"engine {data['bytes'] / 1e6:.1f} MB of a model of {data['onnx_bytes'] / 1e6:.1f} MB in "
            f"{data['build_seconds']:.1f} s; {ops}; {data['layers']} layers ({data['layers_from']}), "
            f"{len(data['tactics'])} tactics; {' '.join(data['remarks'])}"
        )
    if "summary" in data:
        worst = [
            f"{name} {entry['worst']:.2g} of {entry['limit']:.2g}"
            for name, entry in data["summary"].items()
            if entry["worst"] is not None
        ]
        return f"worst: {', '.join(worst)}"
    return ""


def latency_lines(results: Results) -> list[str]:
    rows = [(step, row) for step in results.steps for row in step.data.get("rows", ())]
    if not rows:
        return []
    lines = [
        f"Latency of one sequence, each call waited for: medians of {ROUNDS} interleaved rounds, quartiles "
        "in brackets. PyTorch is eager at the same precision. The lower bound is the time of the linear layers at "
        "the rate of a large product and the bandwidth of a large copy, both measured here.",
        "",
        "| target | model | tokens | engine (µs) | CUDA graph (µs) | PyTorch (µs) | PyTorch / engine | PyTorch / graph "
        "| lower bound (µs) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for step, row in rows:
        eager = row["pytorch"]["median_us"]
        ratios = [f"{eager / row[name]['median_us']:.2f}" if name in row else "–" for name in ("engine", "graph")]
        times = [spread_text(row.get(name)) for name in ("engine", "graph", "pytorch")]
        floor = f"{row['bound_us']:.1f} ({row['bound_by']})"
        lines.append(f"| {' | '.join([step.target, step.model, str(row['seq']), *times, *ratios, floor])} |")
    return [*lines, ""]


def spread_text(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "–"
    return f"{spread['median_us']:.1f} ({spread['quartile_1_us']:.1f} to {spread['quartile_3_us']:.1f})"


def soak_lines(results: Results) -> list[str]:
    soaks = [step for step in results.steps if "fit" in step.data]
    if not soaks:
        return []
    lines = [
        "GPU memory over runs of changing shapes; a line is fitted to all but the first third. The limit is the slope "
        f"that one step of {GRANULE_BYTES >> 20} MiB, in which the driver maps memory, can cause, or three standard "
        "errors if that is more.",
        "",
        "| target | model | step | runs | shapes | bytes per run | limit | left after closing (bytes) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for step in soaks:
        data, fit = step.data, step.data["fit"]
        lines.append(
            f"| {step.target} | {step.model} | {step.name} | {data['runs']} | {data['shapes']} "
            f"| {fit['bytes_per_run']:.0f} | {fit['visible_bytes_per_run']:.0f} | {data['left_after_close_bytes']} |"
        )
    return [*lines, ""]
