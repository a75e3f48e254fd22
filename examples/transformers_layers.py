"""Export a user's own model with a layer of transformers' Nyströmformer inside (pip install transformers==4.57.*)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn


class Tagger(nn.Module):
    """Labels every frame of a signal of 256 frames. The landmarks of the layer are tied to this length."""

    def __init__(self, channels: int = 12, dim: int = 64, frames: int = 256, labels: int = 5) -> None:
        super().__init__()
        from transformers import NystromformerConfig
        from transformers.models.nystromformer.modeling_nystromformer import NystromformerLayer

        sizes = {"hidden_size": dim, "num_attention_heads": 4, "intermediate_size": 2 * dim}
        config = NystromformerConfig(**sizes, num_landmarks=32, segment_means_seq_len=frames, conv_kernel_size=33)
        self.embed = nn.Linear(channels, dim)
        self.layers = nn.ModuleList(NystromformerLayer(config) for _ in range(2))
        self.head = nn.Linear(dim, labels)

    def forward(self, signal: Tensor) -> Tensor:
        """[batch, frames, channels] → [batch, frames, labels]."""
        x = self.embed(signal)
        for layer in self.layers:
            x = layer(x)[0]
        logits: Tensor = self.head(x)
        return logits


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and example inputs by the names of the arguments of its `forward`."""
    torch.manual_seed(0)
    return Tagger().eval(), {"signal": torch.randn(2, 256, 12)}


def main() -> None:
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed, so there is nothing to export.")
        return
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/transformers_layers")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
