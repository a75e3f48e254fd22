"""The layers stage: four attention layers, between their projections, with our kernels and with what PyTorch has.

"kernel" is the layer as it is exported, with fused operators, whose torch operators call our kernels here. "eager" and
"compile" are the formulas that PyTorch runs otherwise. "SDPA" is PyTorch's own attention of every token to all others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from effexport.models import AttentionSpec, attention_from_spec
from effexport.models.layers import AttentionCore
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.nystrom import NystromSpec
from effexport.models.variants.softmax import SoftmaxSpec
from effexport.plugins.contract import load_contract
from effexport.plugins.ops import CUDA_OPS
from gpu.building import load_kernels
from gpu.device import Kernels
from gpu.stages import Result, Run
from gpu.stopwatch import copies_of, forbid_tf32, nbytes, number_of_copies, readings
from gpu.timing import KERNEL, outputs_of, result_of

OPERATORS = {op.torch_name: op for op in CUDA_OPS.values()}
DTYPE = torch.float16
# of the results, as a share of the largest value: standard operators round to float16 several times
AGREEMENT = 2e-2
REPLACED = {"baseline": "compile", "times": 1.0, "reason": "who can compile the layer must not lose by exporting it"}
DENSE = {"baseline": "SDPA", "times": 1.0, "reason": "attention to a part of all keys must pay"}
# mma.sync reaches about half of the rate of wgmma
HALF_OF_DENSE = {"baseline": "SDPA", "times": 0.5, "reason": "at least half as fast as dense attention with wgmma"}
GOALS = {
    "softmax": [REPLACED, HALF_OF_DENSE],
    "linear": [REPLACED, DENSE],
    "nystrom": [REPLACED, DENSE],
    "lsh": [REPLACED, DENSE],
}


def specs(*, small: bool) -> dict[str, AttentionSpec]:
    """The layers: 8 heads of 64 channels and 8192 tokens, or less."""
    shape = {"dim": 32, "heads": 2, "seq_len": 60} if small else {"dim": 512, "heads": 8, "seq_len": 8192}
    return {
        "softmax": SoftmaxSpec(**shape),
        "linear": LinearSpec(**shape),
        "nystrom": NystromSpec(**shape, num_landmarks=8 if small else 64, conv_kernel_size=5 if small else 65),
        "lsh": LSHSpec(**shape, num_hashes=4, chunk_length=16 if small else 64),
    }


@torch.no_grad()
def time_layers(run: Run) -> Result:
    kernels = load_kernels(run)
    register(kernels)
    forbid_tf32()
    layers = specs(small=run.device.emulated)
    pieces = [({"op": "layer", "case": name}, partial(time_layer, kernels, name, layers[name])) for name in layers]
    found = run.found_in_time("layers", "timings", pieces)
    return result_of(found, {"timings": found})


def time_layer(kernels: Kernels, name: str, spec: AttentionSpec) -> dict[str, Any]:
    """One layer as JSON, in the form of the timing stage's cases."""
    device = kernels.device
    torch.manual_seed(0)
    plain = AttentionCore(attention_from_spec(spec)).to(device.name, DTYPE).eval()
    fused = copy.deepcopy(plain)
    fused.layer.fused = True
    heads, channels = spec.projected
    inputs = {key: torch.randn(1, heads, spec.seq_len, size).to(device.name, DTYPE) for key, size in channels.items()}
    difference = largest_difference(fused(*inputs.values()), without_kernels(plain, device.name)(*inputs.values()))
    modules = {
        KERNEL: fused,
        "eager": without_kernels(plain, device.name),
        "compile": without_kernels(torch.compile(plain, dynamic=False), device.name),
        "SDPA": dense,
    }
    copies = copies_of(inputs, number_of_copies(device, nbytes(inputs)))
    calls = {key: [call_with(module, values) for values in copies] for key, module in modules.items()}
    found = readings(device, calls)
    if not difference <= AGREEMENT:
        found[KERNEL]["problem"] = (
            f"differs from eager by {difference:.3g} of the largest value; expected {AGREEMENT:g}"
        )
    return {
        "op": "layer",
        "case": f"{name} {spec.seq_len} tokens, {heads} heads × {spec.head_size}, float16",
        "copies": len(copies),
        "difference": difference,
        "readings": found,
        "goals": GOALS[name],
    }


def call_with(module: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Callable[[], object]:
    return lambda: module(*inputs.values())


def dense(*projected: Tensor) -> Tensor:
    """Attention of every token to all others; queries that are shared serve as keys too."""
    return scaled_dot_product_attention(projected[0], projected[-2], projected[-1])


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).abs().amax() / expected.double().abs().amax())


def register(kernels: Kernels) -> None:
    """Have the torch operators call our kernels on the device of this run."""
    for name in OPERATORS:
        torch_operator(name).register_kernel(kernels.device.name)(implementation(kernels, name))


def torch_operator(name: str) -> Any:
    """The object that torch.library.custom_op made."""
    return getattr(OPERATORS[name].load(), name)


def implementation(kernels: Kernels, name: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The torch operator's computation by our kernels."""
    check = load_contract(OPERATORS[name])
    names = [x.name for x in (*check.signature.inputs, *check.signature.attributes)]
    arguments = getattr(torch.ops.effexport, name).default._schema.arguments
    defaults = {x.name: x.default_value for x in arguments if x.has_default_value()}

    def run(*arguments: Any, **options: Any) -> Tensor | tuple[Tensor, ...]:
        given = defaults | dict(zip(names, arguments, strict=False)) | options
        inputs = [given.pop(x.name).contiguous() for x in check.signature.inputs]
        case = check.case_of(inputs, given)
        outputs = [*outputs_of(check, case, kernels.device).values()]
        scratch = torch.empty(kernels.scratch_bytes(name, case), dtype=torch.uint8, device=inputs[0].device)
        kernels.launch(name, case, [*inputs, *outputs], scratch)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return run


def without_kernels(module: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """The module with the torch operators as they are without our kernels."""

    def run(*arguments: Tensor) -> Tensor:
        with plain_operators(device):
            return module(*arguments)

    return run


@contextmanager
def plain_operators(device: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name in OPERATORS:
            stack.enter_context(torch_operator(name).set_kernel_enabled(device, enabled=False))
        yield
