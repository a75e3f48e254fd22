"""Export a model with layers of aft-pytorch (pip install aft-pytorch)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """Two blocks of AFT-full and AFT-local over a sequence of measurements, and a class for all of it."""

    def __init__(self, channels: int = 12, dim: int = 64, classes: int = 5, longest: int = 256) -> None:
        super().__init__()
        from aft_pytorch.aft_pytorch import AFTFull, AFTLocal

        self.embed = nn.Linear(channels, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.layers = nn.ModuleList([AFTFull(longest, dim, hidden_dim=96), AFTLocal(longest, dim, hidden_dim=32, s=16)])
        self.head = nn.Linear(dim, classes)

    def forward(self, measurements: Tensor) -> Tensor:
        """[batch, seq, channels] → [batch, classes]."""
        x = self.embed(measurements)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        logits: Tensor = self.head(x.mean(dim=1))
        return logits


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and example inputs by the names of the arguments of its `forward`."""
    torch.manual_seed(0)
    return Classifier().eval(), {"measurements": torch.randn(2, 200, 12)}


def main() -> None:
    if importlib.util.find_spec("aft_pytorch") is None:
        print("aft-pytorch is not installed, so there is nothing to export.")
        return
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/aft_pytorch")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
