"""Quantised models: the answers of PyTorch's, the file held to them, and the loss against the float model.

A rounding that float32 sends to the next step sends others after it, so the answers of two correct runtimes differ by
a share of the loss. As with buckets, the arithmetic is therefore compared with identical roundings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.base.dtypes import Array
from effexport.base.errors import StageError
from effexport.base.spec import BuildSpec
from effexport.export.onnx_graph import load_graph, module_of_node
from effexport.plugins.building.library import known_ops
from effexport.plugins.ops import DOMAIN
from effexport.proof.cases import Answers, Arrays, Case
from effexport.proof.check import RMS_METRIC, CaseLabel, Check, Kind, Status, judged, not_run
from effexport.proof.checks.arithmetic import Figures, check_numbers
from effexport.proof.module_runs import (
    Answer,
    RepeatedRuns,
    recorded_hashes,
    run_module,
    scores_of_indices,
    with_rounded_weights,
)
from effexport.proof.tolerances import foreign_limit, free_limit, rms_change, rounding_flip_limit, with_exact_answers
from effexport.quantize.record import PRODUCTS, RESULT, Quantization
from effexport.quantize.rounding import codes_of, numbers_of, precision_of, rounded_rows, steps_apart

if TYPE_CHECKING:
    import onnx
    from torch import nn

STAGE = "quantization"
# What the roundings of all cases in a golden file may take. Beyond it, larger cases are compared by their free run.
LARGEST_ROUNDINGS_BYTES = 20 * 2**20
# Draws of the noise: of a short case, one may flip nothing.
NOISE_DRAWS = 2


def run_with_buckets(
    module: nn.Module, spec: BuildSpec, inputs: Mapping[str, Array]
) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
    """The outputs of a module and the buckets of its hashes."""
    with recorded_hashes(module) as (buckets, _):
        outputs = run_module(module, spec, inputs)
    return {name: array for name, array in outputs.items() if name not in spec.ranked_outputs}, buckets


def quantized_answers(answers: Answers, module: nn.Module, spec: BuildSpec, record: Quantization) -> Answers:
    """The answers of the quantised model to the cases of the float model, with its roundings; the float model's become
    the part `exact`. module: float32, as `answers` are of it, without smoothing.

    Raises StageError if it does not give the same answer twice.
    """
    from effexport.quantize.modules import quantized_module, smoothed, with_linear_layers

    runs = RepeatedRuns("PyTorch's quantised model")
    plain = with_linear_layers(module)
    smooth = smoothed(plain, record.smoothing) if record.smoothing else plain
    quantized = quantized_module(smooth, record)
    noisy = [quantized_module(with_rounded_weights(smooth, "fp32", draw), record) for draw in range(NOISE_DRAWS)]
    cases = [quantized_case(case, quantized, noisy, spec, record, runs) for case in answers.cases]
    return Answers(with_fitting_roundings(cases), [*answers.checks, runs.check])


def quantized_case(
    case: Case,
    quantized: nn.Module,
    noisy: Sequence[nn.Module],
    spec: BuildSpec,
    record: Quantization,
    runs: RepeatedRuns,
) -> Case:
    """One case with the outputs, buckets, roundings and noise of the quantised model."""
    from effexport.quantize.modules import recorded_inputs

    def compute() -> Answer:
        with recorded_hashes(quantized) as (buckets, margins), recorded_inputs(quantized) as unrounded:
            outputs = run_module(quantized, spec, case.inputs)
        ranked = scores_of_indices(quantized, spec, case.inputs)
        numbers = {name: x.detach().numpy() for name, x in unrounded.items()}
        return {"outputs": outputs, "buckets": buckets, "margins": margins, "ranked": ranked, "unrounded": numbers}

    answer = runs.answer(case.label, compute)
    numbers = answer["unrounded"]
    scales: dict[str, Array] = {}
    codes: dict[str, Array] = {}
    if missing := [name for name in record.unrounded if name not in numbers]:
        layer_path = missing[0].rpartition(".")[0]
        raise StageError(
            STAGE,
            f"PyTorch's quantised model does not round the input of {layer_path}, and the graph does, so the two "
            f"cannot be compared; leave it float with --keep-float {layer_path}",
        )
    for name in record.unrounded:
        layer = record.layer(name.rpartition(".")[0])
        assert layer is not None
        if name.endswith(RESULT):
            codes[name], scales[name] = codes_of(numbers[name], "bf16", 1.0), np.array(1, dtype=np.float32)
        elif layer.input_scale is None and record.precision == "int8":
            codes[name], scales[name] = rounded_rows(numbers[name])
        else:
            scales[name] = np.array(layer.input_scale or 1, dtype=np.float32)
            codes[name] = codes_of(numbers[name], record.precision, scales[name])
    exact = {**case.outputs, **case.buckets}
    found = dataclasses.replace(
        case,
        outputs=answer["outputs"],
        buckets=answer["buckets"],
        margins=answer["margins"],
        ranked=answer["ranked"],
        codes=codes,
        scales=scales,
        exact=exact,
    )
    changes = [rms_change(found, run_module(other, spec, case.inputs)) for other in noisy]
    return dataclasses.replace(found, precision_noise=float(np.max(changes)))


def with_fitting_roundings(cases: Sequence[Case]) -> list[Case]:
    """The cases, of which the smallest keep their roundings: as many as fit, at least one."""
    by_size = sorted(cases, key=roundings_bytes)
    kept: set[str] = set()
    total = 0
    for case in by_size:
        total += roundings_bytes(case)
        if kept and total > LARGEST_ROUNDINGS_BYTES:
            break
        kept.add(case.name)
    return [case if case.name in kept else dataclasses.replace(case, codes={}, scales={}) for case in cases]


def roundings_bytes(case: Case) -> int:
    return sum(array.nbytes for part in (case.codes, case.scales) for array in part.values())


LISTED = 3


def check_quantized(
    case: Case, outputs: Mapping[str, Array], given: tuple[Arrays, Arrays] | None, spec: BuildSpec
) -> Iterator[Check]:
    """Checks of any quantised model. Buckets, and the free run of a model that hashes, are checked beside them.

    given: outputs with the reference's roundings and buckets, and the model's own; None if it does not show them.
    """
    if given is not None:
        answers, own = given
        yield from check_numbers(case, answers, spec, Kind.GIVEN_ROUNDINGS)
        yield check_roundings(case, own)
    else:
        other = "this model does not show them, or pads or selects other tokens than PyTorch before it rounds"
        reason = other if case.codes else "they would take too much room in the golden file"
        yield not_run(Kind.GIVEN_ROUNDINGS, f"the roundings cannot be prescribed: {reason}", case.label)
    if not spec.attention.is_hashed:
        limit = free_limit(case, spec) if given is not None or not case.codes else foreign_limit(case, spec)
        yield judged(Kind.QUANTIZED_RUN, case.label, RMS_METRIC, rms_change(case, outputs), limit)
    yield check_loss(case, outputs)


def check_roundings(case: Case, own: Mapping[str, Array]) -> Check:
    """Compare the model's own roundings, each after the roundings of the reference before it."""
    metric = "rounded numbers that differ"

    def failed(detail: str) -> Check:
        return Check(Kind.ROUNDING_AGREEMENT, case.label, metric, "failed", detail=detail)

    flips, numbers, furthest, places = 0, 0, 0, []
    for name, codes in case.codes.items():
        if own[name].shape != codes.shape:
            return failed(f"{name} is {list(own[name].shape)}; expected {list(codes.shape)}")
        if not np.isfinite(own[name]).all():
            return failed(f"{name} contains NaN or infinity")
        precision, scale = precision_of(codes), case.scales[name]
        # a static scale is one number, which a file holds as [1]; that of each token has the axes of its numbers
        dynamic = scale.ndim > 1
        ours = rounded_rows(own[name])[0] if dynamic else codes_of(own[name], precision, scale)
        if name.endswith(RESULT) and not np.array_equal(numbers_of(ours, precision, scale), own[name]):
            return failed(f"{name} holds numbers that are not rounded")
        steps = steps_apart(ours, codes, precision)
        flips += (different := int(np.count_nonzero(steps)))
        numbers += codes.size
        furthest = max(furthest, int(steps.max(initial=0)))
        if different:
            places.append((different, f"{name}: {different} of {codes.size}"))
    detail = "; ".join(text for _, text in sorted(places, reverse=True)[:LISTED])
    limit = rounding_flip_limit(numbers)
    check = judged(Kind.ROUNDING_AGREEMENT, case.label, metric, flips, limit, detail)
    if furthest > 1:
        return replace(check, status="failed", detail=f"a number is {furthest} steps away; {detail}")
    return check


def check_loss(case: Case, outputs: Mapping[str, Array]) -> Check:
    """Measure the distance from the float model. It is not judged: random inputs say little about a task."""
    exact = with_exact_answers(case)
    figures = Figures()
    for *_, actual, expected in exact.pairs(outputs):
        figures.add(actual, expected)
    measures = figures.measures()
    detail = f"cosine {measures['cosine']:.6f}"
    if case.buckets:
        tokens = sum(buckets.size for buckets in case.buckets.values())
        flips = sum(int(np.count_nonzero(case.exact[name] != buckets)) for name, buckets in case.buckets.items())
        detail += f"; {100 * flips / tokens:.2g} % of the buckets are others"
    return Check(
        Kind.QUANTIZATION_LOSS,
        case.label,
        RMS_METRIC,
        "passed",
        measures["rms_error"],
        None,
        "reported, and judged only against --max-loss",
        detail,
        measures=measures,
        seq_len=case.label.shape[-1],
    )


def check_products(model: Path, record: Quantization) -> Check:
    """Every product of a file is quantised where the record says so, or declared to stay float."""
    kind, case, metric = Kind.QUANTIZED_PRODUCTS, CaseLabel("the graph"), "products that are neither"
    wrong = undeclared_products(model, record)
    if wrong is None:
        return not_run(kind, "the nodes of this file no longer say which layer they came from", case, metric)
    status: Status = "failed" if wrong else "passed"
    reason = f"{len(record.layers)} layers are quantised, and every other product has a reason to stay float"
    return Check(kind, case, metric, status, len(wrong), 0, reason, "; ".join(wrong[:LISTED]))


def undeclared_products(path: Path, record: Quantization) -> list[str] | None:
    """Products of a written file that are neither quantised where the record says so, nor declared to stay float; None
    if no product says any more which module it came from."""
    model = load_graph(path)
    products = [
        node for node in model.graph.node if node.domain == DOMAIN or node.op_type in (*PRODUCTS, "MatMulInteger")
    ]
    if products and not any(map(module_of_node, products)):
        return None
    makers = {name: node for node in model.graph.node for name in node.output}
    halves = values_in_bfloat16(model)
    # by layer: where functions are inlined, the products of a body stand for its operator
    declared = {product.layer for product in record.products}
    quantized = {layer.layer for layer in record.layers}
    wrong = []
    for node in products:
        owner = module_of_node(node)
        kind = "quantised" if is_quantized(node, makers, halves) else "float"
        if kind == "quantised" and owner not in quantized:
            wrong.append(f"{node.op_type} of {owner or 'the model'} is quantised and should be float")
        elif kind == "float" and owner in quantized:
            wrong.append(f"{node.op_type} of {owner} is float and should be quantised")
        elif kind == "float" and owner not in declared:
            wrong.append(f"{node.op_type} of {owner or 'the model'} is float, and nothing declares it so")
    tables = {table.layer for table in record.embeddings}
    wrong += [
        f"the table of {owner} is quantised and should be float"
        for owner in map(module_of_node, integer_tables(model))
        if owner not in tables
    ]
    return wrong


def is_quantized(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], halves: Collection[str]) -> bool:
    if node.op_type == "MatMulInteger" or (node.domain == DOMAIN and known_ops()[node.op_type].linear):
        return True
    factors = [makers[name] for name in node.input[:2] if name in makers]
    # of an inlined PackedLinear, both are cast back from bfloat16
    is_rounded = [
        factor.op_type == "DequantizeLinear" or (factor.op_type == "Cast" and factor.input[0] in halves)
        for factor in factors
    ]
    return node.op_type == "MatMul" and len(factors) == 2 and all(is_rounded)


def values_in_bfloat16(model: onnx.ModelProto) -> set[str]:
    """Initializers, and what a Cast makes."""
    import onnx

    kind = onnx.TensorProto.BFLOAT16
    casts = (node for node in model.graph.node if node.op_type == "Cast" and node.attribute[0].i == kind)
    stored = {tensor.name for tensor in model.graph.initializer if tensor.data_type == kind}
    return stored | {node.output[0] for node in casts}


def integer_tables(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Nodes that look up rows of int8."""
    import onnx

    int8 = {tensor.name for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.INT8}
    dequantized = {
        node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in int8
    }
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] in int8 | dequantized:
            yield node
