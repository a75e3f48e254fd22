"""Chooses what runs each custom operator of a model in ONNX Runtime: our kernel, or its function body."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from effexport.base.errors import KernelWarning, UserError
from effexport.base.runtimes import CPU, CUDA, TENSORRT_RTX
from effexport.models.validation import did_you_mean
from effexport.plugins.building.library import Library, find_library, known_ops
from effexport.plugins.building.toolchain import last_line, run_program
from effexport.plugins.errors import LibraryError
from effexport.plugins.ops import CONTRIB_DOMAIN, DOMAIN, OPS, OPSET_VERSION
from effexport.runners.options import OTHERS, RunOptions, implementation_per_op
from effexport.runners.ort import import_onnxruntime

if TYPE_CHECKING:
    import onnx

    from effexport.export.onnx_graph import ValueType
    from effexport.plugins.calls import KernelCall


# The domain of ONNX's own operators, which graphs write as "".
STANDARD = "ai.onnx"
# The kernel library reads it from the options of a session: folders of operators whose kernels it is to leave out.
LEFT_OUT_KEY = "effexport.kernels_left_out"


@dataclass(frozen=True)
class Kernels:
    """The kernels of a session. library: None if all custom operators run as bodies.

    ops: the operators of the model that kernels run. bodies: those that run as bodies. carriers: domain and name of
    operators of ONNX Runtime or ONNX that may stand for ours.
    """

    library: Library | None
    ops: tuple[str, ...]
    bodies: tuple[str, ...]
    carriers: tuple[tuple[str, str], ...] = ()

    def register(self, options: Any, settings: RunOptions) -> Kernels:
        """Add the kernels to the options of a session. Returns what the session has: nothing if the library does not
        load, which warns, or raises UserError if kernels were requested. Raises UserError for a library that is not as
        it was built."""
        if self.library is None:
            return self
        ops = known_ops()
        folders = [ops[op].torch_name for op in self.bodies if op in ops]
        options.add_session_config_entry(LEFT_OUT_KEY, ",".join(folders))
        try:
            self.library.load()
        except LibraryError as error:
            raise UserError(str(error)) from error
        try:
            options.register_custom_ops_library(str(self.library.path))
        except Exception as error:  # onnxruntime has no common base class for its errors
            fall_back(self.ops, settings, f"ONNX Runtime does not load {self.library.path}: {error}")
            return replace(self, library=None, ops=(), bodies=(*self.ops, *self.bodies))
        return self


def kernels_for(custom_ops: Sequence[str], slow: Collection[str], settings: RunOptions) -> Kernels:
    """The kernels for the operators of a model. slow: those whose kernels run only if they are asked for.

    Warns and raises as `library_for` does.
    """
    wanted = {op: settings.implementation_of(op) for op in custom_ops}
    bodies = tuple(op for op, how in wanted.items() if how == "body" or (how == "auto" and op in slow))
    ops = tuple(op for op in custom_ops if op not in bodies)
    library = library_for(ops, settings)
    if library is None:
        return Kernels(None, (), tuple(custom_ops))
    ops = tuple(op for op in ops if has_kernel(library, op, settings))
    return Kernels(library, ops, tuple(op for op in custom_ops if op not in ops))


def check_operators(implementation: str, option: str = "implementation") -> None:
    """Raise UserError if an operator that an implementation is chosen for does not exist."""
    known = known_ops()
    for op in implementation_per_op(implementation, option):
        if op != OTHERS and op not in known:
            raise UserError(
                f"unknown operator in {option} {op!r}{did_you_mean(op, known)} Expected: {', '.join(known)}"
            )


def has_kernel(library: Library, op: str, settings: RunOptions) -> bool:
    """True if a library has a kernel of an operator for the device: it has all of ours, and records others.

    Warns if it was built without the operator, and raises UserError if that kernel was requested.
    """
    if op in OPS or library.info is None:
        return True
    built = next((built for built in library.info.operators if built.onnx_name == op), None)
    if built is None:
        reason = f"{library.path} has no kernel of {op}; install the package of {op}, then build its kernel with"
        fall_back((op,), settings, f"{reason}: {library.rebuild_command}")
        return False
    return settings.row.tensors != "cuda" or built.cuda


def slower_on_cuda(model: onnx.ModelProto, types_of: Callable[[onnx.ModelProto], Mapping[str, ValueType]]) -> set[str]:
    """Operators of a model whose CUDA kernels should be slower than their bodies at its sizes; see Op.cuda_up_to.

    types_of: `value_types`.
    """
    ops = known_ops()
    nodes = [node for node in model.graph.node if node.domain == DOMAIN and node.op_type in ops]
    limits = {op: limit for op in {node.op_type for node in nodes} if (limit := ops[op].cuda_up_to) is not None}
    types = types_of(model) if limits else {}

    def is_within(node: onnx.NodeProto, limit: int) -> bool:
        _, dims = types.get(node.input[0], ("", ()))
        last = dims[-1] if dims else None
        return isinstance(last, int) and last <= limit

    return {node.op_type for node in nodes if node.op_type in limits and not is_within(node, limits[node.op_type])}


def library_for(ops: Sequence[str], settings: RunOptions) -> Library | None:
    """The kernel library for operators. Warns if bodies run because there are no kernels.

    Raises UserError if the settings ask for kernels that are not built, or together with a profile, or name an
    operator that does not exist.
    """
    check_operators(settings.implementation)
    ops = [op for op in ops if settings.implementation_of(op) != "body"]
    if settings.row.provider == TENSORRT_RTX or not ops:
        return None
    names = ", ".join(ops)
    if settings.profile:
        # otherwise the provider reports "User needs to provide all the dynamic shape inputs with associated profiles"
        if requested(ops, settings):
            raise UserError(
                f"kernels of {names} were requested; they cut the graph into parts, and a profile has no shapes for "
                "the inputs of parts: leave out the profile, or let the bodies run"
            )
        return None
    library = kernel_library()
    if library is None:
        fall_back(ops, settings, f"no kernel library is built for {names}; build it with: effexport plugins build")
    elif settings.row.tensors == "cuda" and (problem := cuda_problem(library, names)):
        fall_back(ops, settings, f"{library.path} has {problem}")
        return None
    elif library.outdated:
        warn(f"{library.path} was built from other sources than these; rebuild it with: {library.rebuild_command}")
    return library


def cuda_problem(library: Library, names: str) -> str | None:
    """The reason why a library has no CUDA kernels here, after "has", and a remedy; None if it has them. names: of
    operators. Raises UserError for files that are not as they were built."""
    try:
        if library.info is not None and library.cuda is None:
            return (
                f"no CUDA kernels for {names}; on a machine with nvcc, build them with: effexport plugins build --cuda"
            )
        problem = library.cuda_problem()
    except LibraryError as error:
        raise UserError(str(error)) from error
    return problem and f"kernels for the CPU only here, because {problem}"


def kernel_library() -> Library | None:
    """The library of this installation, if it is built. Raises UserError if EFFEXPORT_LIBRARY names a missing file."""
    try:
        return find_library()
    except LibraryError as error:
        raise UserError(str(error)) from error


def requested(ops: Sequence[str], settings: RunOptions) -> list[str]:
    """The operators that must run as kernels."""
    return [op for op in ops if settings.implementation_of(op) == "kernel"]


def fall_back(ops: Sequence[str], settings: RunOptions, reason: str) -> None:
    """Use bodies instead of kernels: with a warning, or an error if kernels were requested."""
    if requested(ops, settings):
        raise UserError(f"kernels were requested, but {reason}")
    warn(f"custom operators run as function bodies, which are slower: {reason}")


def warn(message: str) -> None:
    warnings.warn(message, KernelWarning, stacklevel=2)


def implementation_of(inference: Any, kernels: Kernels, settings: RunOptions) -> dict[str, Literal["kernel", "body"]]:
    """The implementation of each custom operator: as the session reports it, or, before 1.24, because a kernel wins."""
    custom_ops = sorted((*kernels.ops, *kernels.bodies))
    if not custom_ops and not kernels.carriers:
        return {}
    assigned = assigned_ops(inference)
    if assigned is None:
        return {op: "kernel" if op in kernels.ops else "body" for op in custom_ops}
    wanted = CUDA if settings.row.tensors == "cuda" else CPU  # kernels run on CUDA even if TensorRT runs the rest
    for op in custom_ops:
        elsewhere = [provider for provider, ops in assigned.items() if op in ops and provider != wanted]
        if elsewhere:
            warn(f"{op} runs on {', '.join(elsewhere)}: the library has no kernel for {wanted}")
    ran = set().union(*assigned.values())
    missing = [op for op in requested(custom_ops, settings) if op not in ran]
    if missing:
        raise UserError(
            f"kernels were requested, but the library has none for {', '.join(missing)} with the types of this model; "
            "use the default, which runs their function bodies"
        )
    if kernels.library and (surplus := [op for op in kernels.bodies if op in ran]):
        warn(
            f"{', '.join(surplus)} runs as a kernel, but a function body was to run: {kernels.library.path} cannot "
            "leave out single kernels; rebuild it with: effexport plugins build"
        )
    names = {op: op for op in custom_ops} | {f"{domain or STANDARD}::{op}": op for domain, op in kernels.carriers}
    return {name: "kernel" if op in ran else "body" for name, op in names.items()}


def is_carrier(domain: str, op: str) -> bool:
    """True for an operator of ONNX Runtime or ONNX that may stand for one of ours."""
    return domain in ("", STANDARD, CONTRIB_DOMAIN) and any(op == one.carrier for one in OPS.values())


def assigned_ops(inference: Any) -> dict[str, set[str]] | None:
    """Per provider, the operators that it runs; None before 1.24, whose sessions do not report it."""
    if not hasattr(inference, "get_provider_graph_assignment_info"):
        return None
    assigned: dict[str, set[str]] = {}
    for part in inference.get_provider_graph_assignment_info():
        assigned.setdefault(part.ep_name, set()).update(node.op_type for node in part.get_nodes())
    return assigned


def assigned_nodes(inference: Any, provider: str) -> set[str]:
    """Names of the nodes that a provider runs, from ONNX Runtime 1.24 on."""
    parts = inference.get_provider_graph_assignment_info()
    return {node.name for part in parts if part.ep_name == provider for node in part.get_nodes()}


TIMEOUT_S = 120
# First words of the lines that the other process prints, before an operator runs and when something fails.
RUNS, FAILS = "runs", "fails"
# All numbers are at most 2: a rounding of the result to bfloat16 is at most 2^-8, and two more come before it.
TOLERANCE = 2**-6


def problem_of_library(library: Library) -> str | None:
    """The problems of a library with models, in one line; None if each operator gives the right answer."""
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
    signature = importlib.import_module(f"effexport.plugins.{OPS[op].torch_name}").SIGNATURE
    own_types = {x.name: x.dtype for x in signature.inputs if x.dtype != "T"}
    for element in OPS[op].element_types:
        cast = {}
        for name, array in call.inputs.items():
            cast[name] = name if array.dtype.kind != "f" else f"{name}_{element}"
            to = getattr(TensorProto, own_types.get(name, element).replace("float32", "float").upper())
            nodes += [helper.make_node("Cast", [name], [cast[name]], to=to)] * (cast[name] != name)
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
