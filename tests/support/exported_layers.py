"""Other people's layers in the tests of their adapters: weights as after training, comparison and ONNX files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from effexport.base.spec import BuildSpec
from effexport.export.onnx_from_module import onnx_from_module
from effexport.models.user.spec_from_module import spec_from_module
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import limits_from_spec


def trained_like(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter anew: no bias is zero, no norm's weight is one, and logits differ by several units.

    Matrices keep the size of activations twice over, which attention turns into weights far from uniform.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(1.5 * drawn / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.3 * drawn + (1 if "norm" in name and name.endswith("weight") else 0))


def padded_mask(batch: int, seq_len: int) -> Tensor:
    """int64 [batch, seq]: the first sample is whole, the others end earlier and earlier."""
    lengths = torch.tensor([max(1, seq_len - 7 * i) for i in range(batch)])
    return (torch.arange(seq_len) < lengths[:, None]).long()


class OnnxFile:
    """The ONNX file of a module of ours that takes hidden_states or input_ids, and an attention_mask."""

    def __init__(self, module: nn.Module, seq_len: int, folder: Path) -> None:
        self.spec = BuildSpec(model=spec_from_module(module, "mine", seq_len))
        self.path = folder / "model.onnx"
        onnx_from_module(module, self.spec, self.path)

    def answers(self, inputs: list[dict[str, Tensor]], implementation: str) -> list[Tensor]:
        """The first output for each of the inputs. implementation: "auto" or "body"."""
        settings = RunOptions(implementation=implementation)
        with OrtRunner(self.path, settings, limits=limits_from_spec(self.spec)) as runner:
            feeds = ({name: value.numpy() for name, value in each.items()} for each in inputs)
            return [torch.from_numpy(next(iter(runner.run(feed).values()))) for feed in feeds]
