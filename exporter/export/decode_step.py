"""Graphs that run token by token: of a causal model with constant memory, one decodes a token, and the other reads a
whole prompt; of an encoder-decoder, one reads the source, and the other decodes a token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from effexport.base.dtypes import TensorInfo
from effexport.base.spec import BuildSpec
from effexport.export.onnx_from_module import at_precision, example_inputs, write_graph
from effexport.export.onnx_graph import GraphSignature, signature_with_state
from effexport.models.checkpoints.seq2seq import SourceEncoder, TargetStep
from effexport.models.encoder.module import DecodeStep, Prefill
from effexport.models.size_formula import shape_of
from effexport.quantize.record import Quantization


def onnx_with_state(
    kind: type[DecodeStep | Prefill],
    module: nn.Module,
    spec: BuildSpec,
    path: Path,
    traced: Path | None = None,
    quantization: Quantization | None = None,
) -> None:
    """Export the decode step of a causal module, or its prefill: token or tokens and mask, position (for an encoder)
    and state → output and next state.

    traced, quantization: as in `onnx_from_module`. Raises StageError if the graph does not have its signature.
    """
    model: DecodeStep | Prefill = kind(at_precision(module, spec.arithmetic))  # type: ignore[arg-type]
    states = tuple(
        TensorInfo(name, "float32", ("batch", *tensor.shape[1:]))
        for name, tensor in zip(model.state_names, model.initial_state(1), strict=True)
    )
    one_token = kind is DecodeStep
    called = {} if one_token else spec.model.prefill_ops(spec.fused)
    signature = replace(signature_with_state(spec, states, one_token=one_token), custom_ops=called)
    tokens, *others = example_inputs(spec)
    batch = len(tokens)
    # the exporter cannot translate the strides of a view
    example = [tokens[:, :1].contiguous()] if one_token else [tokens, *others]
    if spec.model.counts_positions:
        example.append(torch.zeros(batch, dtype=torch.int64))
    if quantization is not None:
        quantization = quantization.below("model")  # the attribute of ModelWithState
    write_graph(model, (*example, *model.initial_state(batch)), signature, spec, path, traced, quantization)


def onnx_of_decoder(module: nn.Module, spec: BuildSpec, encoder: Path, step: Path, traced: Path | None = None) -> None:
    """Export the two graphs of an encoder-decoder. traced, errors: as of `onnx_with_state`."""
    module = at_precision(module, spec.arithmetic)
    reading = GraphSignature(*spec.source_tensors, spec.model.custom_ops(spec.fused))
    decoding = GraphSignature(*spec.step_tensors, {})
    for kind, path, signature in ((SourceEncoder, encoder, reading), (TargetStep, step, decoding)):
        example = tuple(
            torch.zeros(shape_of(tensor.dims, spec.model.trace_sizes), dtype=getattr(torch, tensor.dtype))
            for tensor in signature.inputs
        )
        write_graph(kind(module), example, signature, spec, path, traced)  # type: ignore[arg-type]
