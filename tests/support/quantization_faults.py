"""Damaged quantised models, each with one fault that a quantiser could make."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from effexport.artifact import Artifact
from effexport.base.spec import BuildSpec
from effexport.export.module_source import module_from_seed
from effexport.export.onnx_from_module import onnx_from_module
from effexport.export.onnx_graph import all_nodes
from effexport.quantize.record import Quantization, QuantizedLayer

Weights = dict[str, np.ndarray]


def changed(artifact: Artifact, change: Callable[[Weights], None]) -> onnx.ModelProto:
    """The model with other initializers."""
    model = onnx.load(str(artifact.model_path))
    weights = {tensor.name: numpy_helper.to_array(tensor).copy() for tensor in model.graph.initializer}
    change(weights)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return model


def scale_per_tensor(weights: Weights) -> None:
    """One weight is quantised with one scale for all of its channels."""
    name = next(name.removesuffix(".int8") for name in weights if name.endswith(".int8"))
    scale = weights[f"{name}.scale"]
    exact = weights[f"{name}.int8"].astype(np.float32) * scale
    widest = np.float32(scale.max())
    weights[f"{name}.int8"] = np.clip(np.rint(exact / widest), -127, 127).astype(np.int8)
    weights[f"{name}.scale"] = np.full_like(scale, widest)


def one_scale(weights: Weights) -> None:
    """The scale of one channel is 1.1 times as large."""
    name = next(name for name in weights if name.endswith(".scale") and weights[name].size > 1)
    weights[name][3] *= np.float32(1.1)


def input_scale(weights: Weights) -> None:
    """The static scale of one layer's input is 1.1 times as large."""
    name = next(name for name in weights if name.endswith("unrounded.scale"))
    weights[name] = np.float32(1.1) * weights[name]


def truncated(weights: Weights) -> None:
    """A weight in bfloat16 is cut off in the place of rounded: towards 0 by up to one step."""
    name = next(name for name in weights if name.endswith(".bf16"))
    bits = weights[name].view(np.uint16)
    weights[name] = (bits - (bits & 1)).view(weights[name].dtype)


def other_tail(artifact: Artifact, edit: str) -> onnx.ModelProto:
    """Something that follows a product is another: the activation of a layer, or its residual or bias is lost."""
    model = onnx.load(str(artifact.model_path))
    linear = [node for node in model.graph.node if node.op_type in ("PackedLinear", "QuantizedLinear")]
    if edit == "activation":
        activation = next(a for node in linear for a in node.attribute if a.name == "activation" and a.i)
        activation.i = 2  # GELU by tanh, within 5e-4 of GELU
        return model
    place = {"bias": -2, "residual": -1}[edit]
    node = next(node for node in linear if f"no_{edit}" not in node.input[place])
    width = next(x.dims[1] for x in model.graph.initializer if x.name == node.input[1])
    nothing = np.zeros((width,) if edit == "bias" else (1, 1, width), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(nothing, "nothing"))
    node.input[place] = "nothing"
    return model


def result_not_rounded(artifact: Artifact) -> onnx.ModelProto:
    """A layer whose results should be rounded leaves them."""
    model = onnx.load(str(artifact.model_path))
    rounding = next(a for node in model.graph.node for a in node.attribute if a.name == "round_output" and a.i)
    rounding.i = 0
    return model


def zero_point_lost(artifact: Artifact) -> onnx.ModelProto:
    """The products do not subtract the code of zero."""
    model = onnx.load(str(artifact.model_path))
    for node in all_nodes(model):
        if node.op_type == "MatMulInteger":
            del node.input[2:]
    return model


def exported(artifact: Artifact, change: Callable[[Quantization], Quantization], folder: Path) -> onnx.ModelProto:
    """The model as another record would have it quantised."""
    spec, record = artifact.spec, artifact.manifest.quantization
    assert record is not None
    path = folder / "damaged.onnx"
    onnx_from_module(module_from_seed(spec), spec, path, None, change(record))
    return onnx.load(str(path))


def with_layer(record: Quantization, path: str) -> Quantization:
    scale = None if record.scales == "dynamic" else 0.05
    return msgspec.structs.replace(record, layers=(*record.layers, QuantizedLayer(layer=path, input_scale=scale)))


def without_layer(record: Quantization) -> Quantization:
    return msgspec.structs.replace(record, layers=record.layers[1:])


def with_table(record: Quantization) -> Quantization:
    return msgspec.structs.replace(record, embeddings=(QuantizedLayer(layer="token_embedding"),))


def of_another_model(record: Quantization) -> Quantization:
    """The scales of a model whose activations are a third wider."""
    layers = tuple(
        msgspec.structs.replace(layer, input_scale=float(np.float32((layer.input_scale or 0.0) * 1.3)))
        for layer in record.layers
    )
    return msgspec.structs.replace(record, layers=layers)


def faults(artifact: Artifact, folder: Path) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Every fault that the model can have, by name."""
    spec, record = artifact.spec, artifact.manifest.quantization
    assert record is not None
    if spec.precision == "int8":
        yield "scale per tensor", changed(artifact, scale_per_tensor)
    if record.scales != "static":
        for edit in ("activation", "bias", "residual"):
            yield f"other {edit}", other_tail(artifact, edit)
    if any(layer.rounds_output for layer in record.layers):
        yield "result not rounded", result_not_rounded(artifact)
    if spec.precision == "bf16":
        yield "weight cut off", changed(artifact, truncated)
        yield "layer left out", exported(artifact, without_layer, folder)
        return
    yield "one scale × 1.1", changed(artifact, one_scale)
    if record.scales == "dynamic":
        yield "zero point lost", zero_point_lost(artifact)
    else:
        yield "input scale × 1.1", changed(artifact, input_scale)
        yield "calibration of another model", exported(artifact, of_another_model, folder)
    if spec.attention.variant == "lsh":
        hashed = "blocks.0.attention.query_key"
        yield "hash quantised", exported(artifact, lambda kept: with_layer(kept, hashed), folder)
    if record.scales == "dynamic":
        yield "embedding quantised", exported(artifact, with_table, folder)


def saved(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(copy.deepcopy(model), str(path))
    return path


def small_spec(spec: BuildSpec) -> str:
    return f"{spec.attention.variant} {spec.precision} {spec.scales}"
