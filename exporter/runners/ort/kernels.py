"""Chooses what runs each custom operator of a model in ONNX Runtime: our kernel, or its function body."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from effexport.errors import KernelWarning, UserError
from effexport.models.validation import did_you_mean
from effexport.plugins.building.library import Library, find_library
from effexport.plugins.errors import LibraryError
from effexport.plugins.known_ops import known_ops
from effexport.plugins.ops import DOMAIN, OPS
from effexport.runners.ort.settings import OTHERS, PROVIDERS, OrtSettings, implementation_per_op

if TYPE_CHECKING:
    import onnx

    from effexport.export.onnx_graph import ValueType

# The kernel library reads it from the options of a session: folders of operators whose kernels it is to leave out.
LEFT_OUT_KEY = "effexport.kernels_left_out"


@dataclass(frozen=True)
class Kernels:
    """The kernels of a session. library: None if all custom operators run as bodies.

    ops: the operators of the model that kernels run. bodies: those that run as bodies.
    """

    library: Library | None
    ops: tuple[str, ...]
    bodies: tuple[str, ...]

    def register(self, options: Any, settings: OrtSettings) -> Kernels:
        """Add the kernels to the options of a session. Returns what the session has: nothing if the library does not
        load, which warns, or raises UserError if kernels were requested. Raises UserError for a library that is not as
        it was built."""
        if self.library is None:
            return self
        ops = known_ops()
        folders = [ops[op].torch_name for op in self.bodies if op in ops]
        options.add_session_config_entry(LEFT_OUT_KEY, ",".join(folders))
        try:
            self.library.check_contents()
        except LibraryError as error:
            raise UserError(str(error)) from error
        try:
            options.register_custom_ops_library(str(self.library.path))
        except Exception as error:  # onnxruntime has no common base class for its errors
            fall_back(self.ops, settings, f"ONNX Runtime does not load {self.library.path}: {error}")
            return replace(self, library=None, ops=(), bodies=(*self.ops, *self.bodies))
        return self


def kernels_for(custom_ops: Sequence[str], slow: Collection[str], settings: OrtSettings) -> Kernels:
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


def has_kernel(library: Library, op: str, settings: OrtSettings) -> bool:
    """Whether a library has a kernel of an operator for the device: it has all of ours, and what it records of others.

    Warns if it was built without the operator, and raises UserError if that kernel was requested.
    """
    if op in OPS or library.info is None:
        return True
    built = next((built for built in library.info.operators if built.onnx_name == op), None)
    if built is None:
        reason = f"{library.path} has no kernel of {op}; install the package of {op}, then build its kernel with"
        fall_back((op,), settings, f"{reason}: {library.rebuild_command}")
        return False
    return settings.device != "cuda" or built.cuda


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


def library_for(ops: Sequence[str], settings: OrtSettings) -> Library | None:
    """The kernel library for operators. Warns if bodies run because there are no kernels.

    Raises UserError if the settings ask for kernels that are not built, or together with a profile, or name an
    operator that does not exist.
    """
    check_operators(settings.implementation)
    ops = [op for op in ops if settings.implementation_of(op) != "body"]
    if settings.provider == "tensorrt-rtx" or not ops:
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
    elif settings.device == "cuda" and library.info is not None and not library.info.has_cuda:
        fall_back(
            ops,
            settings,
            f"{library.path} has no CUDA kernels for {names}; on a machine with nvcc, build them with: "
            "effexport plugins build --cuda",
        )
        return None
    elif settings.device == "cuda" and (problem := cuda_problem(library)):
        fall_back(ops, settings, f"{library.path} has kernels for the CPU only here, because {problem}")
        return None
    elif library.outdated:
        warn(f"{library.path} was built from other sources than these; rebuild it with: {library.rebuild_command}")
    return library


def cuda_problem(library: Library) -> str | None:
    """As Library.cuda_problem, but raises UserError for a library that is not as it was built."""
    try:
        return library.cuda_problem()
    except LibraryError as error:
        raise UserError(str(error)) from error


def kernel_library() -> Library | None:
    """The library of this installation, if it is built. Raises UserError if EFFEXPORT_LIBRARY names a missing file."""
    try:
        return find_library()
    except LibraryError as error:
        raise UserError(str(error)) from error


def requested(ops: Sequence[str], settings: OrtSettings) -> list[str]:
    """The operators that must run as kernels."""
    return [op for op in ops if settings.implementation_of(op) == "kernel"]


def fall_back(ops: Sequence[str], settings: OrtSettings, reason: str) -> None:
    """Use bodies instead of kernels: with a warning, or an error if kernels were requested."""
    if requested(ops, settings):
        raise UserError(f"kernels were requested, but {reason}")
    warn(f"custom operators run as function bodies, which are slower: {reason}")


def warn(message: str) -> None:
    warnings.warn(message, KernelWarning, stacklevel=2)


def implementation_of(inference: Any, kernels: Kernels, settings: OrtSettings) -> dict[str, Literal["kernel", "body"]]:
    """What runs each custom operator: as the session reports, or, before 1.24, by the rule that a kernel wins."""
    custom_ops = sorted((*kernels.ops, *kernels.bodies))
    if not custom_ops:
        return {}
    assigned = assigned_ops(inference)
    if assigned is None:
        return {op: "kernel" if op in kernels.ops else "body" for op in custom_ops}
    wanted = PROVIDERS[settings.device]  # kernels run on CUDA even if TensorRT runs the rest
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
    return {op: "kernel" if op in ran else "body" for op in custom_ops}


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
