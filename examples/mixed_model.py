"""Export one model with attention of three packages (pip install nystrom-attention aft-pytorch)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

PACKAGES = {"nystrom_attention": "nystrom-attention", "aft_pytorch": "aft-pytorch"}


class Mixed(nn.Module):
    """AFT of near tokens, Nyström attention, and softmax attention of PyTorch, one after the other."""

    def __init__(self, channels: int = 12, dim: int = 64, classes: int = 5, longest: int = 256) -> None:
        super().__init__()
        from aft_pytorch.aft_pytorch import AFTLocal
        from nystrom_attention import NystromAttention

        self.embed = nn.Linear(channels, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.near = AFTLocal(longest, dim, hidden_dim=32, s=16)
        self.far = NystromAttention(dim=dim, dim_head=16, heads=4, num_landmarks=32)
        self.all = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.head = nn.Linear(dim, classes)

    def forward(self, measurements: Tensor) -> Tensor:
        """[batch, seq, channels] → [batch, classes]."""
        x = self.embed(measurements)
        x = x + self.near(self.norms[0](x))
        x = x + self.far(self.norms[1](x))
        y = self.norms[2](x)
        x = x + self.all(y, y, y, need_weights=False)[0]
        logits: Tensor = self.head(x.mean(dim=1))
        return logits


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and example inputs by the names of the arguments of its `forward`."""
    torch.manual_seed(0)
    return Mixed().eval(), {"measurements": torch.randn(2, 200, 12)}


def main() -> None:
    missing = [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"{' and '.join(missing)} not installed, so there is nothing to export.")
        return
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/mixed_model")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
