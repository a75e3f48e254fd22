"""The results as a page in Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from gpu.engines.fresh import GRANULE_BYTES
from gpu.engines.latency import BODIES, PLUGINS, ROUNDS
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
    return "\n".join([*lines, "", *latency_lines(results), *comparison_lines(results), *soak_lines(results)])


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
        on_cpu = [entry["difference"] for entry in data.get("decoder_on_cpu", {}).values()]
        compared = f"; from the decoder on the CPU: {max(on_cpu):.2g}" if on_cpu else ""
        return f"worst: {', '.join(worst)}{compared}"
    if "runs_of_polygraphy" in data:
        return f"{data['runs_of_polygraphy']} runs of {data['shapes']} shapes with the same bits as in Polygraphy"
    if "compared" in data:
        worst_row = max(data["compared"], key=lambda row: row["difference"], default=None)
        return (
            f"outputs differ by {worst_row['difference']:.2g} of {worst_row['difference_limit']:.2g}"
            if worst_row
            else ""
        )
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


def comparison_lines(results: Results) -> list[str]:
    """Engines with plugins beside engines with bodies."""
    rows = [(step, row) for step in results.steps for row in step.data.get("compared", ()) if BODIES in row]
    if not rows:
        return []
    lines = [
        "Plugins beside function bodies, as above. The ratio is bodies / plugins of each round: above 1, plugins are "
        "faster. Layers are those that the engine lists; each takes one launch or several.",
        "",
        "| target | model | tokens | plugins (µs) | bodies (µs) | ratio | plugins, graph (µs) | bodies, graph (µs) "
        "| ratio, graph | layers, tactics with plugins | with bodies | plugins of |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for step, row in rows:
        cells = []
        for suffix in ("", " graph"):
            cells += [spread_text(row.get(name + suffix)) for name in (PLUGINS, BODIES)]
            cells.append(ratio_text(row.get(f"ratio{suffix}")))
        counts = [f"{step.data[name]['layers']}, {step.data[name]['tactics']}" for name in (PLUGINS, BODIES)]
        chosen = step.data[PLUGINS]["implementation"]
        plugins = [op if what == "plugin" else f"{op} as {what}" for op, what in chosen.items() if what != "body"]
        words = [step.target, step.model, str(row["seq"]), *cells, *counts, ", ".join(plugins)]
        lines.append(f"| {' | '.join(words)} |")
    return [*lines, ""]


def ratio_text(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "–"
    return f"{spread['median']:.2f} ({spread['quartile_1']:.2f} to {spread['quartile_3']:.2f})"


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
            f"| {step.target} | {step.model} | {step.name} | {runs_text(data)} | {data['shapes']} "
            f"| {fit['bytes_per_run']:.0f} | {fit['visible_bytes_per_run']:.0f} | {data['left_after_close_bytes']} |"
        )
    return [*lines, ""]


def runs_text(soaked: Mapping[str, int]) -> str:
    wanted = soaked["runs_wanted"]
    return str(wanted) if soaked["runs"] == wanted else f"{soaked['runs']} of {wanted}, when the time was up"
