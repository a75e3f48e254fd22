"""Export a language model of local-attention (pip install local-attention)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and example inputs by the names of the arguments of its `forward`.

    Causal, with rotary positions: a token sees its window of 32 tokens and the one before.
    """
    from local_attention import LocalTransformer

    torch.manual_seed(0)
    model = LocalTransformer(
        num_tokens=1000, dim=64, depth=2, max_seq_len=1024, heads=4, dim_head=16, local_attn_window_size=32
    )
    return model.eval(), {"x": torch.randint(0, 1000, (2, 200))}


def main() -> None:
    if importlib.util.find_spec("local_attention") is None:
        print("local-attention is not installed, so there is nothing to export.")
        return
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/local_attention")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
