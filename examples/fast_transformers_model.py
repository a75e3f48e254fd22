"""Export an encoder of pytorch-fast-transformers (pip install --no-build-isolation pytorch-fast-transformers)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn


class Tagger(nn.Module):
    """A causal encoder with linear attention over tokens, and a tag for each of them."""

    def __init__(self, words: int = 1000, dim: int = 64, heads: int = 4, tags: int = 7) -> None:
        super().__init__()
        from fast_transformers.builders import TransformerEncoderBuilder

        self.embed = nn.Embedding(words, dim)
        self.encoder = TransformerEncoderBuilder.from_kwargs(
            n_layers=2,
            n_heads=heads,
            query_dimensions=dim // heads,
            value_dimensions=dim // heads,
            feed_forward_dimensions=2 * dim,
            attention_type="causal-linear",
        ).get()
        self.head = nn.Linear(dim, tags)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Both int64 [batch, seq], the mask 1 for tokens and 0 for padding after them → [batch, seq, tags]."""
        from fast_transformers.masking import LengthMask, TriangularCausalMask

        seq_len = input_ids.shape[1]
        lengths = LengthMask(attention_mask.sum(dim=1), max_len=seq_len)
        x = self.encoder(self.embed(input_ids), attn_mask=TriangularCausalMask(seq_len), length_mask=lengths)
        tags: Tensor = self.head(x)
        return tags


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and example inputs by the names of the arguments of its `forward`."""
    torch.manual_seed(0)
    mask = torch.ones(2, 200, dtype=torch.int64)
    mask[1, 150:] = 0
    return Tagger().eval(), {"input_ids": torch.randint(0, 1000, (2, 200)), "attention_mask": mask}


def main() -> None:
    if importlib.util.find_spec("fast_transformers") is None:
        print("pytorch-fast-transformers is not installed, so there is nothing to export.")
        return
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/fast_transformers")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
