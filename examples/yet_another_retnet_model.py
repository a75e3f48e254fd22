"""Export a model with layers of yet-another-retnet (pip install yet-another-retnet)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn


class Language(nn.Module):
    """Words → logits of the next word, by two layers of retention. The package's own `RetNet` returns a loss."""

    def __init__(self, words: int = 1000, dim: int = 64) -> None:
        super().__init__()
        from yet_another_retnet.retnet import RetNetDecoder, RetNetDecoderLayer

        self.embed = nn.Embedding(words, dim)
        self.decoder = RetNetDecoder(RetNetDecoderLayer(dim, 4, 2 * dim), 2)
        self.head = nn.Linear(dim, words)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[batch, seq] → [batch, seq, words]."""
        logits: Tensor = self.head(self.decoder(self.embed(input_ids)))
        return logits


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and example inputs by the names of the arguments of its `forward`."""
    torch.manual_seed(0)
    return Language().eval(), {"input_ids": torch.randint(0, 1000, (2, 200))}


def main() -> None:
    if importlib.util.find_spec("yet_another_retnet") is None:
        print("yet-another-retnet is not installed, so there is nothing to export.")
        return
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/yet_another_retnet")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
