"""Export a language model with labml's AFTLocal (pip install labml-nn)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn


class LanguageModel(nn.Module):
    """Two causal blocks of AFT-local. Its mask says which pairs of tokens see each other."""

    def __init__(self, vocabulary: int = 300, dim: int = 64, longest: int = 256) -> None:
        super().__init__()
        from labml_nn.transformers.aft import AFTLocal

        self.embed = nn.Embedding(vocabulary, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.layers = nn.ModuleList(AFTLocal(dim, longest, local_window_size=32) for _ in range(2))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[batch, seq] → logits of the next token, [batch, seq, vocabulary]."""
        x = self.embed(input_ids).transpose(0, 1)
        length = x.shape[0]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().unsqueeze(-1)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = norm(x)
            x = x + layer(query=y, key=y, value=y, mask=mask)
        logits: Tensor = self.head(x.transpose(0, 1))
        return logits


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and example inputs by the names of the arguments of its `forward`."""
    torch.manual_seed(0)
    return LanguageModel().eval(), {"input_ids": torch.randint(300, (2, 200))}


def main() -> None:
    if importlib.util.find_spec("labml_nn") is None:
        print("labml-nn is not installed, so there is nothing to export.")
        return
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/labml_nn")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
