"""Each function body of a model by itself, against the definition of its operator.

TensorRT, browsers and plain ONNX Runtime execute the bodies; ONNX Runtime with our kernel library never looks at them.
In a whole model, much of a body has no effect on the answer to a few random inputs. So each body is also called alone,
on inputs that make every part of it count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import EffexportError, StageError, UserError
from effexport.export.onnx_graph import graph_outline
from effexport.plugins.known_ops import known_ops
from effexport.proof.case_label import CaseLabel
from effexport.proof.checks.result import METRIC, Check, Worst, function_body_of, judged, not_run
from effexport.proof.inputs.operators import operator_inputs, rounded_anew
from effexport.proof.metrics import relative_error
from effexport.proof.operator_calls import Definition, OperatorUse, call_in_ort, definition, uses_by_operator
from effexport.proof.tolerances import Limit, function_body_limit
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array

EXACT = Limit(0, "integers are exact")


def check_function_bodies(model: Path, spec: BuildSpec) -> list[Check]:
    """One check per operator of ours that a model file calls: none if a tool has inlined them.

    Bodies run in ONNX Runtime on the CPU, whatever runtime the model is proven in: they are a part of the file.
    """
    return [check_function_body(op, uses) for op, uses in uses_by_operator(graph_outline(model), spec).items()]


def check_function_body(op: str, uses: Sequence[OperatorUse]) -> Check:
    """The worst result of a body over all uses of its operator, or the first failure."""
    kind = function_body_of(op)
    if (row := known_ops().get(op)) is None:
        return not_run(kind, "neither this release of effexport nor an installed package knows the operator")
    if not uses[0].has_body:
        detail = "the file has no body of this operator: only ONNX Runtime with the kernel library can run it"
        return Check(kind, CaseLabel("the file"), "functions", "failed", detail=detail)
    if "bfloat16" in row.element_types and any(use.precision == "bf16" for use in uses):
        return not_run(kind, "bodies are checked in ONNX Runtime on the CPU, which has no arithmetic in bfloat16")
    worst: Check | None = None
    for use in uses:
        for check in compared(use, kind):
            if check.status != "passed":
                return check
            if worst is None or share_of_limit(check) > share_of_limit(worst):
                worst = check
    assert worst is not None
    return worst


def compared(use: OperatorUse, kind: str) -> Iterator[Check]:
    """One check for each of the operator's inputs. A body that does not run has failed."""
    try:
        cases = list(operator_inputs(use.node.op_type, use.attributes, use.dtype))
    except UserError as error:
        yield not_run(kind, str(error))
        return
    label = CaseLabel("its nodes")
    try:
        defined = definition(use, cases[0][1])
        body = call_in_ort(use, "body", cases[0][1])
        for name, inputs in cases:
            first = next(iter(inputs.values()))
            label = CaseLabel(name, (len(first), first.shape[-2 if first.ndim > 2 else -1]))
            yield judged_outputs(kind, label, body(inputs), defined, inputs, use)
    except StageError:
        raise  # PyTorch never gives the same answer twice: no body can be compared with it
    except UserError as error:
        yield not_run(kind, f"this needs ONNX Runtime, and PyTorch or the kernel library to compare with: {error}")
    except EffexportError as error:
        yield Check(kind, label, METRIC, "failed", detail=f"the body does not run: {str(error).splitlines()[0]}")


def judged_outputs(
    kind: str,
    case: CaseLabel,
    outputs: Sequence[Array],
    defined: Definition,
    inputs: Mapping[str, Array],
    use: OperatorUse,
) -> Check:
    """What a body returned, against its definition: types, shapes, and the output that is furthest off."""
    expected = defined.exact(inputs)
    for index, (actual, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if actual.shape != wanted.shape:
            detail = f"output {index} is {list(actual.shape)}; expected {list(wanted.shape)}"
            return Check(kind, case, "shapes", "failed", detail=detail)
    if expected[0].dtype.kind == "i":
        different = sum(int(np.count_nonzero(a != w)) for a, w in zip(outputs, expected, strict=True))
        return judged(kind, case, "elements that differ", different, EXACT)
    (actual,), (wanted,) = outputs, expected
    error, worst = largest_error(actual, wanted)
    limit = function_body_limit(use.precision, 0.0)
    if not error <= limit.value / 2:
        # close to the limit or beyond it: find out how far rounding alone takes the definition, which is slow
        limit = function_body_limit(use.precision, own_error(defined, inputs, wanted, use))
    detail = "" if worst is None else f"worst at {list(worst.index)}: {worst.actual:.6g}, defined {worst.expected:.6g}"
    # the inputs of an operator are not a sequence of the model: no seq_len
    return replace(judged(kind, case, METRIC, error, limit, detail), worst=worst, seq_len=None)


def own_error(defined: Definition, inputs: Mapping[str, Array], wanted: Array, use: OperatorUse) -> float:
    """How far the definition is from itself, `wanted`, in float32 arithmetic or with inputs that are rounded anew."""
    rounding = "fp32" if known_ops()[use.node.op_type].body_in_float32 else use.precision
    # one draw of roundings may happen to change little
    healthy = [*defined.in_float32(inputs)]
    healthy += [x for seed in range(2) for x in defined.exact(rounded_anew(inputs, rounding, seed))]
    return float(np.max([largest_error(other, wanted)[0] for other in healthy]))


def largest_error(actual: Array, expected: Array) -> tuple[float, Worst | None]:
    """The largest relative error over the samples of an output, [samples, …, channels]; NaN counts as the largest."""
    worst, largest = None, 0.0
    for sample in range(len(expected) if expected.size else 0):
        rows = [array[sample].reshape(-1, array.shape[-1]) for array in (actual, expected)]
        error, (row, channel) = relative_error(*rows)
        if worst is None or not error <= largest:
            place = np.unravel_index(row, expected.shape[1:-1])
            index = (sample, *map(int, place), channel)
            worst, largest = Worst("output", index, float(rows[0][row, channel]), float(rows[1][row, channel])), error
        if largest != largest:
            break
    return largest, worst


def share_of_limit(check: Check) -> float:
    return (check.value or 0.0) / (check.limit or 1.0)
