"""Other people's attention-free transformers: weights as after training, and the answers of exported files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import effexport
from effexport.models.adapters.replace import with_our_layers

DIM = 32
# Float32 rounding of sums of up to 1000 terms in another order; 6e-6 was measured.
FLOAT32 = 2e-5


def trained_like(layer: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights at which every term counts: keys of standard deviation 2, position biases of 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.is_floating_point():
                owner, _, leaf = name.rpartition(".")
                scale = 0.2 if leaf == "bias" else parameter.shape[1] ** -0.5 if leaf == "weight" else 1.0
                gain = 2.0 if owner.endswith(("key", "to_k")) else 1.0
                parameter.copy_(gain * scale * torch.randn(parameter.shape, generator=generator))
    return layer.eval()


def error(given: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the root mean square of what is expected."""
    assert given.shape == expected.shape
    assert given.dtype == expected.dtype
    assert expected.isfinite().all()
    return float((given - expected).abs().max() / expected.square().mean().sqrt())


def largest_file_error(model: nn.Module, seq_lens: tuple[int, ...], folder: Path) -> float:
    """Export a model with our layers, proven as any other, and compare the file with the original in kept positions.

    It runs with kernels and with bodies. model: takes hidden_states [batch, seq, DIM] and attention_mask [batch, seq].
    """
    result = effexport.build(module=with_our_layers(model, 100).module, output=folder)
    assert result.report.verdict == "passed"
    runners = [effexport.load(folder, effexport.RunOptions(implementation=name)) for name in ("kernel", "body")]
    worst = 0.0
    for seq_len in seq_lens:
        hidden, mask = torch.randn(1, seq_len, DIM), torch.ones(1, seq_len, dtype=torch.int64)
        mask[:, seq_len - seq_len // 3 :] = 0
        with torch.no_grad():
            expected = model(hidden, mask)
        for runner in runners:
            (given,) = runner.run({"hidden_states": hidden.numpy(), "attention_mask": mask.numpy()}).values()
            worst = max(worst, error(torch.from_numpy(given)[mask != 0], expected[mask != 0]))
    for runner in runners:
        runner.close()
    return worst
