"""A PyTorch module run operation by operation, with every intermediate tensor under its name in the exported graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.export import ExportedProgram

from effexport.base.dtypes import Array
from effexport.base.errors import StageError
from effexport.base.spec import BuildSpec
from effexport.export.onnx_from_module import (
    BUCKETS_SUFFIX,
    at_precision,
    example_inputs,
    inner_name,
    mark_custom_nodes,
    module_path,
    program_from_module,
)
from effexport.export.onnx_graph import GraphSignature
from effexport.proof.module_runs import tensor_from_array

# Where the exporter puts what belongs to no module, such as the arithmetic on sizes.
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
# PyTorch's program was traced with one memory layout; with another, where these fail, their counterpart copies.
_COPYING = {"view": "reshape", "_unsafe_view": "reshape"}


@dataclass(frozen=True)
class NodeOrigin:
    """The maker of a graph value: the operator, and the path of the module it came from, "" for the root."""

    op_type: str
    module: str


class TracedModule:
    """`module`, float32 and in evaluation mode, at the precision of the spec.

    It is exported as `onnx_from_module` does: the operations of PyTorch's program have the names of the graph values
    that they became. Steps that the exporter put inside one operation have no counterpart.
    origins: per graph value that PyTorch computes, what makes it.
    hashes: graph values that hold buckets.
    may_flip: integers and booleans that come from comparing float numbers, which rounding may decide either way.
    Raises StageError where the exporter fails, or if PyTorch has no kernel for a step.
    """

    def __init__(self, module: nn.Module, spec: BuildSpec) -> None:
        signature = GraphSignature(spec.inputs, spec.outputs, spec.custom_ops)
        exported = program_from_module(at_precision(module, spec.arithmetic), example_inputs(spec), signature, spec)
        program = exported.exported_program
        assert program is not None
        mark_custom_nodes(exported.model)
        made = origins_of_model(exported.model)
        # operation of the program → graph value
        # indices in the order of their scores may differ where these are tied: the scores tell
        compared = made.keys() - set(spec.ranked_outputs)
        self._values = {op: value for op, value in graph_names(program, spec, made).items() if value in compared}
        self._program, self.spec = program, spec
        self.origins = {value: made[value] for value in self._values.values()}
        self.hashes = tuple(value for value in self.origins if value.split(".")[-1] == BUCKETS_SUFFIX)
        self.may_flip = self._may_flip()

    @property
    def is_rounded(self) -> bool:
        """True for a precision below float32, where rounding differs most."""
        return self.spec.arithmetic != "fp32"

    def run(
        self,
        inputs: Mapping[str, Array],
        visit: Callable[[str, Array], None],
        *,
        buckets: Mapping[str, Array] | None = None,
        exact: bool = False,
    ) -> None:
        """Give every value to `visit` as soon as it is there, by its name in the graph, and keep none.

        inputs: as of the graph. Values are in the types of PyTorch, bfloat16 as float32.
        buckets: per value of `hashes`, what the rest of the module goes on with.
        exact: in a wider type: float32 for lower precisions, float64 for float32.
        """
        names, low = self._values, getattr(torch, self.spec.dtype)
        wide = torch.float64 if low == torch.float32 else torch.float32

        class Visitor(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                result = super().run_node(n)
                if exact and isinstance(result, torch.Tensor) and result.dtype == low:
                    result = result.to(wide)  # what was made without a source, such as zeros
                value = names.get(n.name)
                if value is None or not isinstance(result, torch.Tensor | int | float | bool):
                    return result
                visit(value, array_from_result(result))
                return torch.from_numpy(buckets[value]) if buckets and value in buckets else result

            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                name = getattr(target, "__name__", "").split(".")[0]
                if exact:
                    args = tuple(wide if arg is low else arg for arg in args)
                    kwargs = {key: wide if value is low else value for key, value in kwargs.items()}
                try:
                    return super().call_function(getattr(torch, _COPYING.get(name, ""), target), args, kwargs)
                except NotImplementedError as error:  # many functions have no kernel for half precision on a CPU
                    raise StageError("trace", f"PyTorch does not compute it step by step: {error}") from error

        with torch.inference_mode():
            Visitor(self._program.graph_module).run(*self._arguments(inputs, wide if exact else low))

    def _arguments(self, inputs: Mapping[str, Array], dtype: torch.dtype) -> list[Any]:
        """Weights, constants and inputs in the order of the program's arguments, in `dtype` if they are of that of the
        spec."""
        low = getattr(torch, self.spec.dtype)
        given = iter(self.spec.inputs)
        arguments = []
        for argument in self._program.graph_signature.input_specs:
            if argument.target is None:
                tensor = tensor_from_array(inputs[next(given).name])
                # rounded first, so that both see the same numbers
                arguments.append(tensor.to(low).to(dtype) if tensor.is_floating_point() else tensor)
            else:
                weights = self._program.state_dict
                source = weights if argument.target in weights else self._program.constants
                tensor = source[argument.target]
                arguments.append(tensor.to(dtype) if tensor.dtype == low else tensor)
        return arguments

    def _may_flip(self) -> frozenset[str]:

        def is_float(node: torch.fx.Node) -> bool:
            value = node.meta.get("val")
            return isinstance(value, torch.Tensor) and value.is_floating_point()

        found: set[str] = set()
        for node in self._program.graph.nodes:
            # buckets are given to what follows them
            from_flips = any(
                i.name in found and self._values.get(i.name) not in self.hashes for i in node.all_input_nodes
            )
            if not is_float(node) and (from_flips or any(map(is_float, node.all_input_nodes))):
                found.add(node.name)
        return frozenset(self._values[name] for name in found if name in self._values)


def graph_names(program: ExportedProgram, spec: BuildSpec, made: Mapping[str, NodeOrigin]) -> dict[str, str]:
    """Operation of the program → its value in the graph: the same name, but for outputs and buckets."""
    names = {
        node.name: str(inner_name(node.name, spec.outputs))
        for node in program.graph.nodes
        if node.op == "call_function"
    }
    owners = iter([value for value, origin in made.items() if value.split(".")[-1] == BUCKETS_SUFFIX])
    for node in program.graph.nodes:
        if node.target is torch.ops.effexport.lsh_sort.default:
            names[node.args[0].name] = next(owners)
    names |= dict(zip(program.graph_signature.user_outputs, (tensor.name for tensor in spec.outputs), strict=True))
    return names


def origins_of_model(model: ir.Model) -> dict[str, NodeOrigin]:
    """The maker of each value of a graph that the exporter has just made."""
    origins = {}
    for node in model.graph:
        path = module_path(node)
        for value in node.outputs:
            if value.name:
                origins[value.name] = NodeOrigin(node.op_type, "" if path == _NO_MODULE else path)
    return origins


def array_from_result(result: torch.Tensor | float) -> Array:
    if not isinstance(result, torch.Tensor):
        return np.asarray(result)
    array: Array = (result.float() if result.dtype == torch.bfloat16 else result).numpy()
    return array
