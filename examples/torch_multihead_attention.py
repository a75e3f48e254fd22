"""Export a model with nn.MultiheadAttention and nn.TransformerEncoder of PyTorch itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """An encoder of tokens, and a learned query that attends to what it returns."""

    def __init__(self, vocabulary: int = 1000, dim: int = 64, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.query = nn.Parameter(torch.randn(1, 1, dim))
        self.pool = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.head = nn.Linear(dim, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[batch, seq] twice; attention_mask: 1 = keep → [batch, classes]."""
        hidden = attention_mask == 0
        x = self.encoder(self.embed(input_ids), src_key_padding_mask=hidden)
        query = self.query.expand(len(x), 1, x.shape[2])
        pooled, _ = self.pool(query, x, x, key_padding_mask=hidden)
        logits: Tensor = self.head(pooled[:, 0])
        return logits


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and example inputs by the names of the arguments of its `forward`."""
    torch.manual_seed(0)
    mask = torch.ones(2, 200, dtype=torch.int64)
    mask[1, 150:] = 0
    return Classifier().eval(), {"input_ids": torch.randint(1000, (2, 200)), "attention_mask": mask}


def main() -> None:
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/torch_multihead_attention")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
