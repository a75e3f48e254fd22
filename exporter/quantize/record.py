"""The record of a quantised build in manifest.json and report.json: layers, scales, and products that stayed float."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from effexport.base.dtypes import Scales

# The name of a value before it is rounded: the path of the layer that reads it, and this.
UNROUNDED = "unrounded"
# The end of the name of a value that is the rounded result of a layer.
RESULT = "_result"
# Operators of a graph whose products are quantised, or declared to stay float.
PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum")


class QuantizedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer, or the table of an embedding, whose weights are quantised.

    input_scale: of a linear layer with static scales; None where each token gets a scale as the model runs, and for an
    embedding, which has no product.
    rounds_output: the results of a linear layer are rounded to bfloat16: attention multiplies them as they are.
    loss: RMS change of the model's output if nothing but this layer is quantised; None where it was not measured.
    """

    layer: str
    input_scale: float | None = None
    rounds_output: bool = False
    loss: float | None = None


class FloatProduct(msgspec.Struct, frozen=True, kw_only=True):
    """A product that stays float. operator: its ONNX type, or "Linear" for a layer whose weights could be quantised."""

    layer: str
    operator: str
    reason: str


class Smoothing(msgspec.Struct, frozen=True, kw_only=True):
    """A layer norm whose channels were divided by powers of two, and the layers whose weights were multiplied by them.

    exponents: of two, one for each channel.
    """

    norm: str
    layers: tuple[str, ...]
    exponents: tuple[int, ...]


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The samples that the scales and the losses were measured on.

    source: the name of a file, "" for numbers that were drawn.
    sha256: of the file.
    """

    source: str
    sha256: str
    samples: Annotated[int, msgspec.Meta(ge=0)]


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """The change by quantisation in PyTorch, relative to the float model on the same samples.

    bucket_flips: share of tokens in another bucket, over all hashes; None without a hash.
    """

    rms_error: float
    cosine: float
    bucket_flips: float | None = None


class TaskFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the task on the data of --evaluate, for the float model and the quantised file.

    relative_loss: by how much the quantised file is worse, as a share of the float model's figure; negative if better.
    """

    name: str
    float_value: float
    quantized_value: float
    relative_loss: float


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """All decisions of a quantised build, from which PyTorch's model with the same roundings can be made again.

    scales: of int8 and fp8; None for bf16, which has none.
    layers: what is quantised.
    embeddings: tables that are, by path.
    products: every product that stays float, and why.
    custom_ops: the number of nodes in model.onnx of each operator of ours that stands for linear layers.
    unrounded: graph values that are rounded before a product, or were rounded after one, in the order of the graph.
    smooth: α of SmoothQuant, None without it.
    smoothing: what it changed.
    max_loss: the limit that was asked for.
    search_put_back: layers that a search made float again to hold it.
    task: figures on the data of --evaluate.
    task_data: the name of that file.
    """

    precision: Literal["int8", "fp8", "bf16"]
    scales: Scales | None = None
    layers: tuple[QuantizedLayer, ...] = ()
    embeddings: tuple[QuantizedLayer, ...] = ()
    products: tuple[FloatProduct, ...] = ()
    custom_ops: dict[str, int] = {}
    unrounded: tuple[str, ...] = ()
    samples: Samples
    smooth: float | None = None
    smoothing: tuple[Smoothing, ...] = ()
    loss: Loss | None = None
    max_loss: float | None = None
    search_put_back: tuple[str, ...] = ()
    task: tuple[TaskFigure, ...] = ()
    task_data: str = ""

    def layer(self, path: str) -> QuantizedLayer | None:
        """The quantised linear layer at a path; None if it stays float."""
        return next((layer for layer in self.layers if layer.layer == path), None)

    def below(self, parent: str) -> Quantization:
        """The record of a module that holds this one as its child `parent`."""
        layers, embeddings = (
            tuple(msgspec.structs.replace(layer, layer=f"{parent}.{layer.layer}") for layer in part)
            for part in (self.layers, self.embeddings)
        )
        return msgspec.structs.replace(self, layers=layers, embeddings=embeddings)

    def without(self, paths: tuple[str, ...], reason: str) -> Quantization:
        """The record with some linear layers float again."""
        kept = tuple(FloatProduct(layer=path, operator="Linear", reason=reason) for path in paths)
        layers = tuple(layer for layer in self.layers if layer.layer not in paths)
        return msgspec.structs.replace(self, layers=layers, products=(*self.products, *kept))


def unrounded_name(path: str, call: int) -> str:
    """The graph value that is rounded before the product of a layer. call: 0 for the first time that it runs."""
    return f"{path}.{UNROUNDED}" if call == 0 else f"{path}.{UNROUNDED}_{call}"


def rounded_name(path: str, call: int) -> str:
    """The graph value that is the rounded result of a layer. call: 0 for the first time that it runs."""
    return f"{unrounded_name(path, call)}{RESULT}"


def is_unrounded(value: str) -> bool:
    """True for a graph value that the model rounds."""
    last = value.rpartition(".")[2]
    return last == UNROUNDED or last.startswith(f"{UNROUNDED}_")
