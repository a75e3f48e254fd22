"""Signatures of operators: their ONNX schema and the checks of the torch operator follow. Loads no framework."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE, Op

if TYPE_CHECKING:
    import onnx
    from torch import Tensor

ONNX_TYPE_NAMES = {"float32": "float", "float64": "double"}
_LITERAL = re.compile(r"^([ \t]*\w+) = (-?[\d.][-+.\de]*|\[[-\d, ]*\])[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Parameter:
    """One input or output of an operator.

    dims: its dimensions, such as "batch heads seq 1": names, which stand for one size throughout the signature, and
    numbers. dtype: T for the element type that all such parameters share, otherwise a fixed one. note: for readers.
    """

    name: str
    dims: str
    dtype: str = "T"
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} [{self.dims}]"

    def expected_shape(self, sizes: dict[str, int]) -> str:
        return f"[{', '.join(str(sizes.get(dim, dim)) for dim in self.dims.split())}]"


@dataclass(frozen=True)
class Attribute:
    """One attribute of an operator: an integer, a float, or integers (tuple). A node must carry it unless it has a
    default. at_least: of each number."""

    name: str
    type: type[int] | type[float] | type[tuple[int, ...]]
    default: int | None = None
    at_least: float = -math.inf


@dataclass(frozen=True)
class Signature:
    """Inputs, outputs and attributes of an operator. Its element types are those of its row: `op`, else in OPS."""

    onnx_name: str
    doc: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    attributes: tuple[Attribute, ...] = ()
    op: Op | None = None

    @property
    def row(self) -> Op:
        from effexport.plugins.ops import OPS  # which is made of the modules that have signatures

        return self.op or OPS[self.onnx_name]

    def check(self, *tensors: Tensor, **attributes: float | tuple[int, ...]) -> None:
        """Raise ValueError where shapes, dtypes or attributes of a call differ from the signature."""
        for problem in self._problems(tensors, attributes):
            raise ValueError(f"{self.row.torch_name}: {problem}")

    def _problems(self, tensors: Sequence[Tensor], attributes: dict[str, float | tuple[int, ...]]) -> Iterator[str]:
        sizes: dict[str, int] = {}
        for parameter, tensor in zip(self.inputs, tensors, strict=True):
            expected = parameter.expected_shape(sizes)
            dims = parameter.dims.split()
            fits = tensor.dim() == len(dims) and all(
                size == (int(dim) if dim.isdecimal() else sizes.setdefault(dim, size))
                for dim, size in zip(dims, tensor.shape, strict=True)
            )
            if not fits:
                yield f"{parameter.name} has shape {tuple(tensor.shape)}; expected {expected}"
            yield from self._dtype_problems(parameter, tensor, tensors[0])
        for attribute in self.attributes:
            given = attributes.get(attribute.name)
            if given is None:
                continue
            for value in given if isinstance(given, tuple) else (given,):
                if not math.isfinite(value):
                    yield f"{attribute.name} is {value}; expected a finite number"
                if value < attribute.at_least:
                    yield f"{attribute.name} is {value}; expected at least {attribute.at_least}"

    def _dtype_problems(self, parameter: Parameter, tensor: Tensor, first: Tensor) -> Iterator[str]:
        import torch

        fixed = parameter.dtype if parameter.dtype != "T" else None
        if fixed is None and self.row.element_types == ("int32",):
            fixed = "int32"
        if fixed is not None:
            # float64 wherever the operator is computed in it, to judge the results of float32
            wider = fixed == "float32" and tensor.dtype == first.dtype == torch.float64
            if tensor.dtype != getattr(torch, fixed) and not wider:
                yield f"{parameter.name} is {tensor.dtype}; expected torch.{fixed}"
        elif not tensor.is_floating_point():
            yield f"{parameter.name} is {tensor.dtype}; expected a floating-point dtype"
        elif tensor.dtype != first.dtype:
            yield f"{parameter.name} is {tensor.dtype} but {self.inputs[0].name} is {first.dtype}; expected one dtype"

    def trt_node(self) -> dict[str, Any]:
        """Of `trt_plugin.Node`, the arguments that follow from the signature."""
        return {
            "name": self.onnx_name,
            "inputs": self._trt_tensors(self.inputs),
            "attributes": {x.name: x.type for x in self.attributes},
            "at_least": {x.name: int(x.at_least) for x in self.attributes if x.type is not float and x.at_least > 0},
        }

    def trt_plugin(self) -> dict[str, Any]:
        """The same of a plugin that is the whole operator."""
        return {**self.trt_node(), "op": self.onnx_name, "outputs": self._trt_tensors(self.outputs)}

    def _trt_tensors(self, parameters: Sequence[Parameter]) -> tuple[str, ...]:
        """T is one of several floating-point types there."""
        of_t = "int32" if self.row.element_types == ("int32",) else "T"
        return tuple(str(replace(x, dtype=of_t) if x.dtype == "T" else x) for x in parameters)

    def onnx_schema(self) -> onnx.defs.OpSchema:
        """The schema of the ONNX operator, with type and shape inference."""
        import onnx

        schema_type = onnx.defs.OpSchema
        onnx_types: dict[type, Any] = {
            int: schema_type.AttrType.INT,
            float: schema_type.AttrType.FLOAT,
            tuple: schema_type.AttrType.INTS,
        }

        def formal(parameter: Parameter) -> onnx.defs.OpSchema.FormalParameter:
            dtype = "T" if parameter.dtype == "T" else _onnx_type(parameter.dtype)
            return schema_type.FormalParameter(parameter.name, dtype, parameter.expected_shape({}) + parameter.note)

        schema = schema_type(
            self.onnx_name,
            DOMAIN,
            OPSET_VERSION,
            doc=self.doc,
            inputs=[formal(parameter) for parameter in self.inputs],
            outputs=[formal(parameter) for parameter in self.outputs],
            type_constraints=[("T", [_onnx_type(name) for name in self.row.element_types], "")],
            attributes=[
                *(
                    schema_type.Attribute(attribute.name, onnx_types[attribute.type], required=True)
                    if attribute.default is None
                    else schema_type.Attribute(
                        attribute.name, onnx.helper.make_attribute(attribute.name, attribute.default), ""
                    )
                    for attribute in self.attributes
                ),
                schema_type.Attribute(PLUGIN_NAMESPACE, schema_type.AttrType.STRING, required=False),
            ],
        )

        def infer(context: onnx.shape_inference.InferenceContext) -> None:
            for index, parameter in enumerate(self.outputs):
                if inferred := self._infer(parameter, context):
                    context.set_output_type(index, inferred)

        schema.set_type_and_shape_inference_function(infer)
        return schema

    def _infer(self, output: Parameter, context: onnx.shape_inference.InferenceContext) -> onnx.TypeProto | None:
        """The type of the input whose dimensions are most like the output's, with the others taken from elsewhere."""
        import numpy as np
        import onnx

        dims = output.dims.split()
        if output.dtype != "T":  # like no input
            element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(output.dtype))
            return onnx.helper.make_tensor_type_proto(element, [None] * len(dims))
        given = [(parameter.dims.split(), context.get_input_type(i)) for i, parameter in enumerate(self.inputs)]
        same = [sum(a == b for a, b in zip(dims, names, strict=False)) for names, _ in given]
        names, type_proto = given[same.index(max(same))]
        if not type_proto:
            return None  # an input of unknown type
        result = onnx.TypeProto()
        result.CopyFrom(type_proto)
        inferred = result.tensor_type.shape.dim
        if len(inferred) != len(dims):
            return result
        for i, dim in enumerate(dims):
            if dim == names[i]:
                continue
            inferred[i].Clear()
            for other, known in given:
                if dim in other and known and len(known.tensor_type.shape.dim) == len(other):
                    inferred[i].CopyFrom(known.tensor_type.shape.dim[other.index(dim)])
                    break
            else:
                if attribute := context.get_attribute(dim):
                    inferred[i].dim_value = attribute.i
        return result

    def onnx_translation(self) -> Callable[..., Any]:
        """The translation of a torch operator's call for torch.onnx.export: one node with the same arguments."""
        import torch

        arguments = getattr(torch.ops.effexport, self.row.torch_name).default._schema.arguments

        def translate(*given: Any, **named: Any) -> Any:
            from onnxscript import values

            call = {argument.name: argument.default_value for argument in arguments}
            call |= dict(zip(call, given, strict=False)) | named
            attributes = {attribute.name: attribute.type(call.pop(attribute.name)) for attribute in self.attributes}
            return getattr(values.Opset(DOMAIN, OPSET_VERSION), self.onnx_name)(*call.values(), **attributes)

        return translate

    def function_body(self, opset: int, nodes: str) -> onnx.FunctionProto:
        """The operator as a function of standard operators. nodes: one per line, see `with_constants`."""
        import onnx.parser

        inputs, outputs = (", ".join(item.name for item in items) for items in (self.inputs, self.outputs))
        attributes = f"<{', '.join(attribute.name for attribute in self.attributes)}>" if self.attributes else ""
        return onnx.parser.parse_function(f"""
        <domain: "{DOMAIN}", opset_import: ["" : {opset}]>
        {self.onnx_name} {attributes} ({inputs}) => ({outputs}) {{{with_constants(nodes)}}}
        """)

    def values(self, nodes: Sequence[onnx.NodeProto], name: str) -> set[Any]:
        """All values that nodes have of an attribute. One that a node does not carry has its default."""
        import onnx

        (attribute,) = (one for one in self.attributes if one.name == name)
        return {
            attribute.type(onnx.helper.get_node_attr_value(node, name))
            if any(given.name == name for given in node.attribute)
            else attribute.default
            for node in nodes
        }

    def common_attributes(self, nodes: Sequence[onnx.NodeProto], *names: str) -> dict[str, Any]:
        """The values of the named attributes, by default of all, which the nodes have in common.

        A function body is found by the name of its operator alone, so all nodes of a model share one body. Raises
        ValueError when they differ.
        """
        common = {}
        for attribute in self.attributes:
            if names and attribute.name not in names:
                continue
            values = self.values(nodes, attribute.name)
            if len(values) != 1:
                raise ValueError(
                    f"{self.onnx_name} nodes with different {attribute.name} {sorted(values)} cannot share one body"
                )
            common[attribute.name] = values.pop()
        return common


def _onnx_type(name: str) -> str:
    return f"tensor({ONNX_TYPE_NAMES.get(name, name)})"


def with_constants(nodes: str) -> str:
    """Nodes in the syntax of onnx.parser, with every line such as `eps = 1e-06`, `zero = 0` or `axes = [1, 3]` written
    out as a Constant: a float32 scalar, an int64 scalar, or an int64 vector. Unused constants are left out."""

    def constant(match: re.Match[str]) -> str:
        name, literal = match.groups()
        if len(re.findall(rf"\b{name.strip()}\b", nodes)) == 1:
            return ""
        if literal.startswith("["):
            values = literal[1:-1]
            tensor_type = f"int64[{len(values.split(','))}]"
        else:
            values = literal
            tensor_type = "int64" if re.fullmatch(r"-?\d+", literal) else "float"
        return f"{name} = Constant <value = {tensor_type} {{{values}}}> ()"

    return _LITERAL.sub(constant, nodes)
