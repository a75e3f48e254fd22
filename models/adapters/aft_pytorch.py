"""aft-pytorch: attention-free transformers with an inner width of their own and a full position bias, without masks."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from torch import Tensor, nn

from effexport.models import attention_from_spec
from effexport.models.adapters.adapter import Adapter, NotExportableError, linear_weights
from effexport.models.attention_spec import AttentionSpec
from effexport.models.layers import AttentionLayer
from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.aft_local import AFTLocalSpec
from effexport.models.variants.aft_simple import AFTSimpleSpec

NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "project": "out"}


class AFT(nn.Module):
    """A layer of aft-pytorch, on ours. The original computes e^k as it is, and overflows for keys above 88."""

    def __init__(self, attention: AttentionLayer) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] → the same shape."""
        out: Tensor = self.attention(x)
        return out


def full(layer: Any, seq_len: int) -> AFT:
    return with_weights(AFTFullSpec(**widths(layer), seq_len=len(layer.wbias), position_bias="full"), layer)


def simple(layer: Any, seq_len: int) -> AFT:
    return with_weights(AFTSimpleSpec(**widths(layer), seq_len=seq_len), layer)


def local(layer: Any, seq_len: int) -> AFT:
    """The original zeroes its biases outside the window in every call; ours never uses them."""
    positions = len(layer.wbias)
    window = math.ceil(min(max(layer.s, 0), positions))
    spec = AFTLocalSpec(**widths(layer), seq_len=positions, position_bias="full", window=window)
    return with_weights(spec, layer)


def conv(layer: Any, seq_len: int) -> NoReturn:
    raise NotExportableError("aft-pytorch has no forward for AFTConv, it only raises NotImplementedError")


def widths(layer: Any) -> dict[str, Any]:
    return {"dim": layer.dim, "heads": 1, "head_dim": layer.hidden_dim}


def with_weights(spec: AttentionSpec, layer: Any) -> AFT:
    weights = linear_weights(layer, NAMES)
    if not isinstance(spec, AFTSimpleSpec):
        weights["position_bias"] = layer.wbias.detach().clone()
    attention = attention_from_spec(spec)
    # assigned, so that they keep their element type and device
    attention.load_state_dict(weights, assign=True)
    return AFT(attention)


ADAPTER = Adapter(
    package="aft-pytorch",
    tested=("0.2.2",),
    projections=tuple(NAMES),
    replacements={
        "aft_pytorch.aft_pytorch.AFTFull": full,
        "aft_pytorch.aft_pytorch.AFTSimple": simple,
        "aft_pytorch.aft_pytorch.AFTLocal": local,
        "aft_pytorch.aft_pytorch.AFTConv": conv,
    },
)
