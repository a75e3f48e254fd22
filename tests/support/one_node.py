"""Models of one custom node, and how tests run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from kernel_sessions import ort_value

from effexport.plugins.ops import DOMAIN, OPS, OPSET_VERSION, PLUGIN_NAMESPACE
from effexport.plugins.signature import Parameter


def one_node_model(
    op: str, feeds: Mapping[str, np.ndarray], *, body: bool, opset: int = 20, **attributes: Any
) -> bytes:
    """A model of one custom node with these inputs, all of whose dimensions are dynamic. A single output is "out"."""
    from onnx import helper

    declared = OPS[op].load().SIGNATURE.outputs
    outputs = [output.name for output in declared] if len(declared) > 1 else ["out"]
    node = helper.make_node(op, list(feeds), outputs, domain=DOMAIN, **{PLUGIN_NAMESPACE: DOMAIN}, **attributes)
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(name, types[name], [f"{name}{i}" for i in range(array.ndim)])
            for name, array in feeds.items()
        ],
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(output_dtype(output, feeds)), None)
            for name, output in zip(outputs, declared, strict=True)
        ],
    )
    model = helper.make_model(
        graph,
        functions=[OPS[op].load().onnx_function_body([node], opset)] if body else [],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=10,
    )
    return bytes(model.SerializeToString())


def output_dtype(output: Parameter, feeds: Mapping[str, np.ndarray]) -> np.dtype:
    """The type of an output: that of the first input, or one of its own."""
    return next(iter(feeds.values())).dtype if output.dtype == "T" else np.dtype(output.dtype)


def run_poisoned(
    session: Any, feeds: Mapping[str, np.ndarray], shape: Sequence[int], dtype: np.dtype | None = None
) -> np.ndarray:
    """Run into an output that holds NaN, or −7, so that nothing unwritten goes unseen.

    dtype: of the output, if it is not that of the first input.
    """
    dtype = dtype or next(iter(feeds.values())).dtype
    out = np.full(shape, -7 if dtype.kind == "i" else np.nan, dtype)
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, ort_value(array))
    binding.bind_ortvalue_output("out", ort_value(out))
    session.run_with_iobinding(binding)
    return out
