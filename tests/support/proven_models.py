"""A small module of attention with a mask, as other exporters make files of it; and what they get wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from effexport.base.quiet import quiet

VOCABULARY, DIM, BATCH, LENGTH = 50, 8, 2, 12


class Masked(nn.Module):
    """Attention over the tokens that a mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.mixed = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        query, key, value = self.mixed(self.embedding(input_ids)).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / DIM**0.5
        scores = scores.masked_fill(attention_mask[:, None, :] == 0, -1e9)
        hidden = torch.tanh(torch.softmax(scores, dim=-1) @ value)
        return {"logits": self.out(hidden)}


def masked() -> Masked:
    torch.manual_seed(0)
    return Masked().eval()


def example() -> dict[str, Tensor]:
    ids = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY
    return {"input_ids": ids, "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64)}


def with_example() -> tuple[Masked, dict[str, Tensor]]:
    return masked(), example()


def exported(path: Path, *, free: bool = True, legacy: bool = False) -> Path:
    """The file of torch.onnx."""
    axes = {0: "batch", 1: "tokens"} if legacy else dict.fromkeys(range(2), torch.export.Dim.DYNAMIC)
    dynamic = dict.fromkeys(example(), axes) if free else None
    names = {"input_names": list(example()), "output_names": ["logits"]}
    values, axes = tuple(example().values()), "dynamic_axes" if legacy else "dynamic_shapes"
    more = {} if legacy else {"external_data": False, "verbose": False}
    with quiet(streams=True):
        torch.onnx.export(masked(), values, str(path), dynamo=not legacy, **{axes: dynamic}, **names, **more)
    return path


Edit = Callable[[onnx.ModelProto], None]


def renamed(model: onnx.ModelProto, names: dict[str, str]) -> None:
    """Other names of values."""
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        for part in (node.input, node.output):
            part[:] = [names.get(name, name) for name in part]


def other_names(model: onnx.ModelProto) -> None:
    renamed(model, {"input_ids": "tokens.1", "attention_mask": "keep", "logits": "42"})


def swapped(model: onnx.ModelProto) -> None:
    inputs = list(model.graph.input)[::-1]
    del model.graph.input[:]
    model.graph.input.extend(inputs)


def int32_inputs(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        inner = f"{value.name} as int64"
        for node in model.graph.node:
            node.input[:] = [inner if name == value.name else name for name in node.input]
        value.type.tensor_type.elem_type = onnx.TensorProto.INT32
        cast = onnx.helper.make_node("Cast", [value.name], [inner], to=onnx.TensorProto.INT64)
        model.graph.node.insert(0, cast)


def free_in_name(model: onnx.ModelProto) -> None:
    """Free axes of a graph that holds sizes of the traced example."""
    for value in (*model.graph.input, *model.graph.output):
        for dim, name in zip(value.type.tensor_type.shape.dim, ("batch", "tokens"), strict=False):
            dim.dim_param = name
    before_output(model, "Reshape", np.array([BATCH, LENGTH, 5]))


def before_output(model: onnx.ModelProto, op_type: str, *weights: np.ndarray, **attributes: object) -> None:
    """One more node at the end."""
    (output,) = model.graph.output
    for node in model.graph.node:
        node.output[:] = ["before" if name == output.name else name for name in node.output]
    names = [f"weight {i}" for i in range(len(weights))]
    model.graph.initializer.extend(map(numpy_helper.from_array, weights, names))
    model.graph.node.append(onnx.helper.make_node(op_type, ["before", *names], [output.name], **attributes))


def other_weights(model: onnx.ModelProto) -> None:
    weight = next(one for one in model.graph.initializer if sorted(one.dims) == [DIM, 3 * DIM])
    array = numpy_helper.to_array(weight).copy()
    array.flat[3] += 0.01
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))


def transposed(model: onnx.ModelProto) -> None:
    before_output(model, "Transpose", perm=[0, 2, 1])
    sizes = model.graph.output[0].type.tensor_type.shape.dim
    first, second = (onnx.TensorShapeProto.Dimension() for _ in range(2))
    first.CopyFrom(sizes[1])
    second.CopyFrom(sizes[2])
    sizes[1].CopyFrom(second)
    sizes[2].CopyFrom(first)


def unscaled(model: onnx.ModelProto) -> None:
    """Scores that are not divided by the root of the width."""
    for node in model.graph.node:
        if node.op_type in ("Div", "Mul"):
            node.op_type = "Add"
            zero = onnx.helper.make_node("Sub", [node.input[1], node.input[1]], ["zero"])
            node.input[1] = "zero"
            model.graph.node.insert(list(model.graph.node).index(node), zero)
            return
    raise AssertionError("no scale")


def without_mask(model: onnx.ModelProto) -> None:
    """Scores of hidden tokens stay."""
    (where,) = (node for node in model.graph.node if node.op_type == "Where")
    where.input[1] = where.input[2]


def noisy(model: onnx.ModelProto) -> None:
    """Noise of float32's size: only repetition shows it."""
    before_output(model, "Add", np.zeros(1, np.float32))
    added = model.graph.node.pop()
    added.input[1] = "noise"
    model.graph.node.append(onnx.helper.make_node("RandomNormalLike", ["before"], ["noise"], scale=1e-7))
    model.graph.node.append(added)


def integers(model: onnx.ModelProto) -> None:
    before_output(model, "Cast", to=onnx.TensorProto.INT64)
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64


def infinite(model: onnx.ModelProto) -> None:
    before_output(model, "Div", np.array(0, np.float32))


def edited(source: Path, path: Path, edit: Edit) -> Path:
    model = onnx.load(str(source))
    edit(model)
    onnx.save(model, str(path))
    return path
