"""Runs each of our operators once in the installed ONNX Runtime, for `effexport doctor --load`.

A kernel that crashes takes its process along, so they run in another one:

    python -P -m effexport.runners.ort.trial LIBRARY OPERATOR…
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from effexport.plugins.building.library import Library
from effexport.plugins.building.programs import last_line, run_program
from effexport.plugins.ops import DOMAIN, OPS, OPSET_VERSION
from effexport.runners.ort.settings import import_onnxruntime

if TYPE_CHECKING:
    import onnx

    from effexport.plugins.calls import KernelCall

TIMEOUT_S = 120
# First words of the lines that the other process prints, before an operator runs and when something fails.
RUNS, FAILS = "runs", "fails"
# All numbers are at most 2: a rounding of the result to bfloat16 is at most 2^-8, and two more come before it.
TOLERANCE = 2**-6


def problem_of_library(library: Library) -> str | None:
    """What running models with a library would meet, in one line; None if each operator gives the right answer."""
    problems: list[str] = []
    waiting = list(OPS)
    while waiting:
        command = (sys.executable, "-P", "-m", __name__, str(library.path), *waiting)
        run = run_program(*command, timeout_s=TIMEOUT_S)
        lines = [line.partition(" ")[::2] for line in run.output.splitlines()]
        problems += [text for word, text in lines if word == FAILS]
        if run.problem is None:
            break
        begun = [text for word, text in lines if word == RUNS]
        if not begun:  # the library does not even load, or the interpreter does not start
            problems.append(f"its trial ended with {last_line(run.errors, run.problem)}")
            break
        problems.append(f"{begun[-1]} ends the process ({run.problem})")
        waiting = waiting[waiting.index(begun[-1]) + 1 :]
    return f"in onnxruntime {import_onnxruntime().__version__}, {'; '.join(problems)}" if problems else None


def model_of_call(op: str, call: KernelCall) -> onnx.ModelProto:
    """A model that makes the call once for each element type, with outputs in float32 or int32. Where a library has
    no such kernel, as one of earlier sources may, a function with the right answer runs, as a model's own would."""
    from onnx import TensorProto, helper, numpy_helper

    def value(name: str, array: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    nodes, outputs = [], []
    for element in OPS[op].element_types:
        cast = {
            name: f"{name}_{element}" if array.dtype.kind == "f" and name not in call.float32 else name
            for name, array in call.inputs.items()
        }
        to = getattr(TensorProto, element.replace("float32", "float").upper())
        nodes += [helper.make_node("Cast", [a], [b], to=to) for a, b in cast.items() if a != b]
        made = [f"{name}_{element}" for name in call.outputs]
        nodes.append(helper.make_node(op, list(cast.values()), made, domain=DOMAIN, **call.attributes))
        for name, (of, array) in zip(made, call.outputs.items(), strict=True):
            to = TensorProto.FLOAT if array.dtype.kind == "f" else TensorProto.INT32
            nodes.append(helper.make_node("Cast", [name], [f"{of} of {element}"], to=to))
            outputs.append(value(f"{of} of {element}", array))
    answer = []
    for name, array in call.outputs.items():
        constant = f"{name}_answer"
        like = next(iter(call.inputs)) if array.dtype.kind == "f" else constant
        answer.append(helper.make_node("Constant", [], [constant], value=numpy_helper.from_array(array)))
        answer.append(helper.make_node("CastLike", [constant, like], [name]))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    function = helper.make_function(
        *(DOMAIN, op, list(call.inputs), list(call.outputs), answer, opsets[:1]), attributes=list(call.attributes)
    )
    graph = helper.make_graph(nodes, op, [value(name, array) for name, array in call.inputs.items()], outputs)
    return helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10)


def check(op: str, call: KernelCall, options: Any) -> None:
    """Raise ValueError unless a session with these options gives the right answer, or what onnxruntime raises."""
    import numpy as np

    content = model_of_call(op, call).SerializeToString()
    session = import_onnxruntime().InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for name, found in zip(names, session.run(names, dict(call.inputs)), strict=True):
        right = call.outputs[name.partition(" ")[0]]
        if found.shape != right.shape or not np.allclose(found, right, rtol=0, atol=TOLERANCE):
            raise ValueError(f"{name} is wrong")


def main(library: str, ops: list[str]) -> None:
    options = import_onnxruntime().SessionOptions()
    options.log_severity_level = 4
    with reported("it does not load"):
        options.register_custom_ops_library(library)
        for op in ops:
            print(RUNS, op, flush=True)
            with reported(f"{op} fails"):
                check(op, OPS[op].load_calls().TRIAL, options)


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Print what goes wrong in the block, in one line."""
    try:
        yield
    except Exception as error:  # onnxruntime has no common base class for its errors
        print(FAILS, f"{what}: {' '.join(str(error).split())}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
