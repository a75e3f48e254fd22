"""What a run of a user's model tells: the operators that it calls, the rows that it selects, and whether it repeats."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from effexport.models.adapters.adapter import Adapted, frozen, named
from effexport.models.module_inputs import ModuleInput, ModuleInputs
from effexport.models.probe import PROBE_SEQ_LEN, Probe
from effexport.models.user_model import CalledByPosition, recorded_results
from effexport.models.validation import SpecError, require
from effexport.plugins.ops import OPS

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Calls:
    """How often a model calls each of our operators, by ONNX name. turned: how many calls of
    F.scaled_dot_product_attention are among them."""

    operators: dict[str, int]
    turned: int


def operator_calls(module: nn.Module, probe: Probe, tuned: int, fused: bool) -> Calls:
    """How many nodes of each of our operators a model becomes."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from effexport.models.adapters.sdpa import AttentionCalls, attention_calls_as_operators
    from effexport.models.layers import fused_operators
    from effexport.models.lsh import LSHHash

    names = {op.torch_name: op.onnx_name for op in OPS.values()}
    calls: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # as in proof/float64.py

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name = func._schema.name.partition("::")[2]
            if func.namespace == "effexport" and name in names:
                calls[names[name]] += 1
            return func(*args, **(kwargs or {}))

    hashes = Counter[str]()
    handles = [
        child.register_forward_pre_hook(lambda child, arguments, path=path: hashes.update([path]))
        for path, child in module.named_modules()
        if isinstance(child, LSHHash)
    ]
    tensors = probe.inputs.tensors(probe.sizes(1, min(tuned, PROBE_SEQ_LEN) if probe.is_free else tuned))
    as_operators = attention_calls_as_operators() if fused else contextlib.nullcontext(AttentionCalls())
    # operators that are a part of the unfused formulas are called only where gradients are wanted
    with as_operators as attention, fused_operators(module, fused), torch.set_grad_enabled(not fused), Counting():  # type: ignore[no-untyped-call]
        try:
            module(*tensors)
        finally:
            for handle in handles:
                handle.remove()
    for path, count in hashes.items():
        require(
            count == 1,
            f"the LSH layer {path.rpartition('.hash')[0]} of {probe.name} is called {count} times in one run; expected "
            "one call, because the buckets of each are compared by name: give each call a copy of the layer",
        )
    return Calls(dict(calls), attention.turned)


def check_repeatable(original: CalledByPosition, adapted: Adapted, probe: Probe, tuned: int) -> None:
    """Raise SpecError for an original that gives other answers to the same inputs, with the first layer that does."""
    import torch

    results: list[dict[str, list[Tensor]]] = []
    tensors = list(probe.inputs.tensors(probe.sizes(1, tuned)))
    for _ in range(2):
        # what it raises is reported where lengths are tried
        quiet = contextlib.suppress(Exception)
        with quiet, frozen(original, adapted), recorded_results(original) as found, torch.inference_mode():
            results.append(found)
            original(*tensors)
    if len(results) < 2:
        return
    for path, first in results[0].items():
        second = results[1].get(path, [])
        if len(first) != len(second) or not all(map(close, first, second)):
            raise SpecError(
                f"{probe.name} gives another answer in every run, and the first layer that does is "
                f"{named(original, path)}: it draws random numbers or keeps a state; expected answers that depend on "
                "the inputs alone: draw the numbers once, and store them in a buffer"
            )


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two runs gave the same, but for rounding: PyTorch need not add up in the same order twice.

    1e-4 is a thousand roundings of float32; numbers that were drawn anew differ by their own size.
    """
    import torch

    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = b[b.isfinite()].square().mean().sqrt().nan_to_num()  # of no elements, NaN
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(scale), equal_nan=True)


def with_range(one: ModuleInput, inputs: ModuleInputs, original: CalledByPosition) -> ModuleInput:
    """An input of integers with its range: the rows of the embedding that it selects from, or what the example has."""
    if one.high is not None or one.mask or not one.dtype.startswith("int"):
        return one
    rows, padding = rows_selected(one.name, inputs, original)
    example = inputs.examples.get(one.name)
    highest = 1 if example is None or not example.numel() else int(example.max())
    return replace(one, high=max(rows, highest + 1), padding=padding)


def rows_selected(name: str, inputs: ModuleInputs, original: CalledByPosition) -> tuple[int, int | None]:
    """Rows of the smallest embedding that gets an input as it is, and its padding_idx; 0 and None if there is none."""
    import torch
    from torch import nn

    sizes = {axis: 2 if axis == "batch" else max(2, inputs.sizes.get(axis, PROBE_SEQ_LEN)) for axis in inputs.axes}
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for one, tensor in zip(inputs.inputs, inputs.tensors(sizes), strict=True):
        # zeros and ones in a pattern of its own: examples of several inputs may be alike, such as all zeros
        is_indices = one.dtype.startswith("int") and not one.mask
        pattern = torch.randint(0, 2, tensor.shape, generator=generator, dtype=tensor.dtype) if is_indices else tensor
        tensors[one.name] = pattern
    found: list[tuple[int, int | None]] = []

    def record(embedding: nn.Embedding, arguments: tuple[Any, ...]) -> None:
        if arguments and torch.equal(arguments[0], tensors[name]):
            found.append((embedding.num_embeddings, embedding.padding_idx))

    embeddings = [child for child in original.modules() if isinstance(child, nn.Embedding)]
    handles = [child.register_forward_pre_hook(record) for child in embeddings]
    # what the run raises is judged elsewhere
    with contextlib.suppress(Exception), torch.inference_mode():
        original(*tensors.values())
    for handle in handles:
        handle.remove()
    return min(found, default=(0, None), key=lambda pair: pair[0])
