"""Export a language model of linear-attention-transformer (pip install linear-attention-transformer)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and example inputs by the names of the arguments of its `forward`.

    Causal, with rotary positions and reversible layers, for up to 1024 tokens.
    """
    from linear_attention_transformer import LinearAttentionTransformerLM

    torch.manual_seed(0)
    model = LinearAttentionTransformerLM(
        num_tokens=1000,
        dim=64,
        depth=2,
        max_seq_len=1024,
        heads=4,
        dim_head=16,
        causal=True,
        reversible=True,
        use_rotary_emb=True,
    )
    return model.eval(), {"x": torch.randint(0, 1000, (2, 200))}


def main() -> None:
    if importlib.util.find_spec("linear_attention_transformer") is None:
        print("linear-attention-transformer is not installed, so there is nothing to export.")
        return
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/linear_attention_transformer")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
