"""Models of other people's layers for tests: weights, and how far an adapted copy is from the original."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def trained_like(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights of the size that training gives them: sharp attention, and biases and norms that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 / parameter[0].numel() ** 0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return module.eval()


def random_states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def padding(batch: int, seq_len: int) -> Tensor:
    """Boolean [batch, seq], True for padding: none in the first sample, more in each that follows."""
    lengths = [max(1, seq_len - seq_len * row // (batch + 1)) for row in range(batch)]
    return torch.arange(seq_len) >= torch.tensor(lengths)[:, None]


def exported(
    module: nn.Module, inputs: Mapping[str, Tensor], axes: Mapping[str, Mapping[int, str]], path: Path
) -> tuple[Callable[..., list[Tensor]], dict[str, int]]:
    """Trace a module as the exporter does, with fused operators and their bodies, and open the file in ONNX Runtime.

    axes: the free axes of each input. Returns what runs the file, and the number of its nodes of each operator of ours.
    """
    from collections import Counter

    import onnx
    import onnxruntime

    from effexport.base.quiet import few_lookups, quiet
    from effexport.export.custom_nodes import attach_function_bodies
    from effexport.export.onnx_from_module import mark_custom_nodes, register_schemas
    from effexport.models.layers import fused_operators
    from effexport.plugins.ops import DOMAIN, OPS

    register_schemas()
    table: dict[Any, Any] = {
        getattr(torch.ops.effexport, op.torch_name).default: op.load().SIGNATURE.onnx_translation()
        for op in OPS.values()
    }
    with quiet(streams=True), few_lookups(), fused_operators(module, True):
        program = torch.onnx.export(
            module.eval(),
            (),
            kwargs=dict(inputs),
            dynamo=True,
            opset_version=20,
            dynamic_shapes={name: dict(axes.get(name, {})) for name in inputs},
            input_names=list(inputs),
            custom_translation_table=table,
            verbose=False,
        )
    assert program is not None
    mark_custom_nodes(program.model)
    attach_function_bodies(program.model, 20)
    program.save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(**values: Tensor) -> list[Tensor]:
        outputs: Sequence[np.ndarray] = session.run(None, {name: value.numpy() for name, value in values.items()})
        return [torch.from_numpy(output) for output in outputs]

    nodes = onnx.load(path, load_external_data=False).graph.node
    return run, dict(Counter(node.op_type for node in nodes if node.domain == DOMAIN))
