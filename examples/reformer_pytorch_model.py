"""Export a ReformerLM of reformer-pytorch, inside its Autopadder (pip install reformer-pytorch)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """A causal language model with rotary positions, and example inputs by the names of the arguments of its `forward`.

    Without the Autopadder it takes only multiples of 2 · bucket_size tokens.
    """
    from reformer_pytorch import Autopadder, ReformerLM

    torch.manual_seed(0)
    model = ReformerLM(num_tokens=300, dim=64, depth=2, max_seq_len=1024, heads=4, bucket_size=32, causal=True)
    return Autopadder(model).eval(), {"x": torch.randint(300, (2, 200))}


def main() -> None:
    if importlib.util.find_spec("reformer_pytorch") is None:
        print("reformer-pytorch is not installed, so there is nothing to export.")
        return
    import effexport

    model, example_inputs = make()
    result = effexport.export(model, example_inputs, "artifacts/reformer_pytorch")
    print(f"{result.artifact}: {result.report.verdict}")


if __name__ == "__main__":
    main()
