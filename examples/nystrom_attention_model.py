"""Export a vision transformer with layers of nystrom-attention (pip install nystrom-attention)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and beside a residual connection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        from nystrom_attention import NystromAttention

        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention = NystromAttention(dim, dim_head=dim // heads, heads=heads, num_landmarks=64)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        result: Tensor = x + self.feed_forward(self.norms[1](x))
        return result


class VisionTransformer(nn.Module):
    """A class for an image of 224 × 224 pixels. 196 patches and the class token are 197 tokens, which the 64 landmarks
    do not divide: each layer pads to 256 and attends to the padding."""

    def __init__(self, dim: int = 128, heads: int = 4, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, kernel_size=16, stride=16)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(197, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, pixels: Tensor) -> Tensor:
        """[batch, 3, 224, 224] → [batch, classes]."""
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        logits: Tensor = self.head(self.blocks(x)[:, 0])
        return logits


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and example inputs by the names of the arguments of its `forward`."""
    torch.manual_seed(0)
    return VisionTransformer().eval(), {"pixels": torch.randn(2, 3, 224, 224)}


def main() -> None:
    if importlib.util.find_spec("nystrom_attention") is None:
        print("nystrom-attention is not installed, so there is nothing to export.")
        return
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/nystrom_attention")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
