"""Changes of ONNX files that stay readable for protobuf."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

INTEGERS = (-1, 0, 1, 2, 3, 7, 999, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))


def versions(model: onnx.ModelProto, dice: random.Random) -> str:
    """Another opset or IR version, of the model or of a function."""
    value = dice.choice((0, 1, 5, 14, 23, 99, 999, 2**31, 2**62, -1))
    imports = [*model.opset_import, *(entry for function in model.functions for entry in function.opset_import)]
    if dice.random() < 0.3:
        model.ir_version = value
        return f"IR version {value}"
    if dice.random() < 0.2:
        del model.opset_import[:]
        return "no opset"
    entry = dice.choice(imports)
    entry.version = value
    return f"opset {entry.domain!r} {value}"


def calls_itself(model: onnx.ModelProto, dice: random.Random) -> str:
    """A function that calls itself, or two that call each other."""
    import onnx

    if not model.functions:
        return versions(model, dice)
    caller, called = dice.choice(model.functions), dice.choice(model.functions)
    for one, other in ((caller, called), (called, caller)):
        one.node.append(
            onnx.helper.make_node(other.name, list(other.input), [f"{other.name}_again"], domain=other.domain)
        )
    return f"{caller.name} and {called.name} call each other"


def node(model: onnx.ModelProto, dice: random.Random) -> str:
    """One node is removed, repeated, renamed or connected in another way."""
    holder = dice.choice([model.graph, *model.functions])
    one = dice.choice(holder.node)
    how = dice.choice(("remove", "repeat", "type", "domain", "input", "output", "cycle", "no input", "swap"))
    if how == "remove":
        holder.node.remove(one)
    elif how == "repeat":
        holder.node.append(one)
    elif how == "type":
        one.op_type = dice.choice(("Nothing", "", "Loop", "If", "RandomNormal", "Add", "MatMul", "IterativePinv"))
    elif how == "domain":
        one.domain = dice.choice(("", "effexport", "com.microsoft", "nowhere"))
    elif how == "input" and one.input:
        one.input[dice.randrange(len(one.input))] = dice.choice(("", "nowhere", dice.choice(holder.node).output[0]))
    elif how == "output" and one.output:
        one.output[0] = dice.choice(("", "other", dice.choice(holder.node).output[0]))
    elif how == "cycle" and one.input and one.output:
        one.input[0] = one.output[0]
    elif how == "no input":
        del one.input[:]
    else:
        other = dice.choice(holder.node)
        one.op_type, other.op_type = other.op_type, one.op_type
    return f"{how} {one.op_type} {one.name}"


def attribute(model: onnx.ModelProto, dice: random.Random) -> str:
    """One attribute has another value or type, or is missing."""
    found = [
        (one, entry) for holder in (model.graph, *model.functions) for one in holder.node for entry in one.attribute
    ]
    one, entry = dice.choice(found)
    how = dice.choice(("integer", "float", "type", "remove", "name", "list", "text", "reference"))
    if how == "integer":
        entry.i = dice.choice(INTEGERS)
    elif how == "float":
        entry.f = dice.choice((0.0, -1.0, float("nan"), float("inf"), 1e30))
    elif how == "type":
        entry.type = dice.choice((0, 1, 2, 3, 4, 5, 6, 7))
    elif how == "remove":
        one.attribute.remove(entry)
    elif how == "name":
        entry.name += "x"
    elif how == "list":
        entry.ints.extend(dice.choices(INTEGERS, k=3))
    elif how == "text":
        entry.s = b"\xff\x00nonsense"
    else:
        entry.ref_attr_name = "nowhere"
    return f"{how} of {one.op_type}.{entry.name}"


def tensor(model: onnx.ModelProto, dice: random.Random) -> str:
    """One weight has other dimensions, another type, other bytes, or lies elsewhere."""
    one = dice.choice(model.graph.initializer)
    how = dice.choice(("dims", "negative", "huge", "type", "bytes", "short", "external", "name", "remove"))
    if how == "dims" and one.dims:
        one.dims[0] += 1
    elif how == "negative":
        one.dims.append(-1)
    elif how == "huge":
        one.dims.append(dice.choice((2**31, 2**62)))
    elif how == "type":
        one.data_type = dice.choice((0, 2, 6, 7, 8, 10, 11, 16, 17, 99))
    elif how == "bytes" and one.raw_data:
        changed = bytearray(one.raw_data)
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        one.raw_data = bytes(changed)
    elif how == "short":
        one.raw_data = one.raw_data[: len(one.raw_data) // 2]
    elif how == "name":
        one.name += "x"
    elif how == "remove":
        model.graph.initializer.remove(one)
    else:
        import onnx

        one.ClearField("raw_data")
        one.data_location = onnx.TensorProto.EXTERNAL
        fields: dict[str, Any] = {
            "location": dice.choice(("../x", "/etc/passwd", "", "model.onnx", "nowhere", "\x00", "x" * 5000, ".")),
            "offset": dice.choice(("0", "-1", "x", str(2**62), "9" * 5000)),
            "length": dice.choice(("0", "-1", "4", str(2**62))),
        }
        for key, value in fields.items():
            one.external_data.add(key=key, value=value)
        how += f" {fields['location'][:20]!r} {fields['offset'][:20]}"
    return f"{how} {one.name}"


def signature(model: onnx.ModelProto, dice: random.Random) -> str:
    """An input or output has another name, type or shape, is missing, or there is one more."""
    import onnx

    values = dice.choice((model.graph.input, model.graph.output))
    one = dice.choice(values)
    how = dice.choice(("name", "type", "dim", "rank", "remove", "repeat", "sequence"))
    if how == "name":
        one.name += "x"
    elif how == "type":
        one.type.tensor_type.elem_type = dice.choice((0, 1, 7, 8, 10, 16, 99))
    elif how == "dim" and one.type.tensor_type.shape.dim:
        dice.choice(one.type.tensor_type.shape.dim).dim_value = dice.choice(INTEGERS)
    elif how == "rank":
        one.type.tensor_type.shape.dim.add(dim_value=1)
    elif how == "remove":
        values.remove(one)
    elif how == "repeat":
        values.append(one)
    else:
        one.type.CopyFrom(onnx.helper.make_sequence_type_proto(one.type))
    return f"{how} {one.name}"


MUTATIONS: tuple[Callable[[Any, random.Random], str], ...] = (
    versions, calls_itself, node, node, attribute, attribute, tensor, tensor, signature,
)  # fmt: skip


def mutated_model(data: bytes, dice: random.Random) -> tuple[bytes, str]:
    """A serialised model with one change, and what was changed, in words."""
    import onnx

    if dice.random() < 0.1:
        changed = bytearray(data)
        place = dice.randrange(min(len(changed), 4000))
        changed[place] ^= 1 << dice.randrange(8)
        return bytes(changed), f"flipped a bit of byte {place}"
    model = onnx.ModelProto.FromString(data)
    change = dice.choice(MUTATIONS)
    words = change(model, dice)
    return model.SerializeToString(), f"{change.__name__}: {words}"
