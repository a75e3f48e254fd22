"""Quantisation and its cost, in words and rows."""

from __future__ import annotations

from collections import Counter

from effexport.base.units import counted, number
from effexport.quantize.record import Quantization

SCALES = {
    "dynamic": "a scale for each token, found as the model runs",
    "static": "one scale for the input of each layer, from calibration",
}


def quantization_facts(record: Quantization) -> list[tuple[str, str]]:
    """The quantised parts, the samples that decided on them, and the cost on these samples."""
    floats = sum(product.operator == "Linear" for product in record.products)
    rows = [
        ("Quantised", f"{len(record.layers)} of {len(record.layers) + floats} linear layers to {record.precision}"),
        ("Weights", "one scale for each output channel, symmetric"),
        ("Activations", SCALES[record.scales]),
        ("Embeddings", ", ".join(table.layer for table in record.embeddings) or "float"),
        ("Samples", samples_text(record)),
    ]
    if record.smooth is not None:
        rows.append(
            ("SmoothQuant", f"α = {record.smooth:g}, folded into {counted(len(record.smoothing), 'layer norm')}")
        )
    if record.max_loss is not None:
        limited = "the task's loss" if record.task else "the RMS error"
        rows.append(("--max-loss", f"{record.max_loss:g} of {limited}; {put_back_text(record)}"))
    rows += loss_rows(record)
    return rows


def loss_rows(record: Quantization) -> list[tuple[str, str]]:
    """The cost of quantisation on the samples, and on the data of --evaluate."""
    rows: list[tuple[str, str]] = []
    if record.loss is not None:
        rows += [("RMS error against float", percent(record.loss.rms_error)), ("Cosine", f"{record.loss.cosine:.6f}")]
        if record.loss.bucket_flips is not None:
            rows.append(("Tokens in other buckets", percent(record.loss.bucket_flips)))
    rows += [
        (
            f"{figure.name.capitalize()} on {record.task_data}",
            f"{figure.quantized_value:.5g}, float {figure.float_value:.5g}: {100 * figure.relative_loss:+.3g} %",
        )
        for figure in record.task
    ]
    return rows


def samples_text(record: Quantization) -> str:
    samples = record.samples
    if not samples.source:
        return f"{samples.samples} drawn at random, which says little about real data"
    return f"{samples.samples} of {samples.source}, SHA-256 {samples.sha256[:16]}…"


def put_back_text(record: Quantization) -> str:
    if not record.search_put_back:
        return "no layer had to be put back to float"
    return f"put back to float: {', '.join(record.search_put_back)}"


def quantization_text(record: Quantization) -> str:
    """One line for a terminal."""
    parts = [f"{name}: {value}" for name, value in loss_rows(record)]
    floats = Counter(product.reason for product in record.products if product.operator == "Linear")
    kept = f"; {counted(floats.total(), 'linear layer')} in float" if floats else ""
    return (
        f"{len(record.layers)} linear layers in {record.precision} ({record.scales} scales){kept}; "
        f"samples: {samples_text(record)}. {'; '.join(parts)}"
    )


def cost_text(record: Quantization) -> str:
    """The cost of quantisation, in one sentence."""
    on = record.samples.source or "random input"
    error = "" if record.loss is None else f"an RMS error of {percent(record.loss.rms_error)} on {on}"
    task = next((figure for figure in record.task if figure.name == "loss"), None)
    added = f", and {100 * task.relative_loss:+.2g} % of the loss on {record.task_data}" if task else ""
    return f"Against the float model, quantisation costs {error}{added}."


def layer_rows(record: Quantization) -> list[tuple[str, str, str, str]]:
    """(layer, precision, loss if it alone is quantised, why it stays float): the largest loss first."""
    by_loss = sorted(record.layers, key=lambda layer: -(layer.loss or 0.0))
    rows: list[tuple[str, str, str, str]]
    rows = [(layer.layer, record.precision, percent(layer.loss), "") for layer in by_loss]
    rows += [(table.layer, "int8 table", "", "") for table in record.embeddings]
    rows += [
        (product.layer or "the model itself", f"float ({product.operator})", "", product.reason)
        for product in record.products
    ]
    return rows


def percent(share: float | None) -> str:
    return number(None) if share is None else f"{100 * share:.3g} %"
