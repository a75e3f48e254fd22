#!/usr/bin/env python3
"""Time a whole ModernBERT with random weights in ONNX Runtime: our export and torch.onnx's of transformers' model.

Both answers are compared before anything is timed. The two take turns; CPU time counts on a busy machine. With 8192
tokens, transformers' model takes 18 GB and more; --layers 3 has one global layer of each three, as the whole.

    .venv/bin/python scripts/bench_modernbert.py --seq-len 8192 --threads 2 --turns 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import ModernBertConfig, ModernBertModel

from effexport.base.spec import BuildSpec
from effexport.export.onnx_from_module import onnx_from_module
from effexport.models.checkpoints.modernbert_spec import ModernBertSpec
from effexport.models.checkpoints.weights import module_from_checkpoint
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner

# Of float32 beside float32, after all layers, relative to the largest element.
LIMIT = 1e-3
INPUTS = ("input_ids", "attention_mask")


class LastHiddenState(nn.Module):
    """transformers' model with two inputs and one output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=ModernBertConfig().num_hidden_layers)
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="of transformers' model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keeps the models, for another run of the same options")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        files = exports(folder, arguments.attention, arguments.seq_len, arguments.layers)
        report(files, arguments.seq_len, arguments.threads, arguments.turns)


def exports(folder: Path, attention: str, seq_len: int, layers: int) -> list[Path]:
    """Our file, and that of transformers' model for sequences of this length alone."""
    files = [folder / name / "model.onnx" for name in ("ours", attention)]
    if all(file.is_file() for file in files):
        return files
    config = ModernBertConfig(num_hidden_layers=layers, reference_compile=False, architectures=["ModernBertModel"])
    ModernBertModel(config).eval().save_pretrained(folder)
    spec, _ = ModernBertSpec.from_config(config.to_dict(), {"seq_len": seq_len})
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    onnx_from_module(module_from_checkpoint(folder, spec).eval(), BuildSpec(model=spec), files[0])
    example = tuple(torch.ones(1, seq_len, dtype=torch.int64) for _ in INPUTS)
    theirs = LastHiddenState(ModernBertModel.from_pretrained(folder, attn_implementation=attention).eval())
    torch.onnx.export(theirs, example, files[1], input_names=INPUTS, dynamo=True, external_data=True, verbose=False)
    return files


def report(files: list[Path], seq_len: int, threads: int, turns: int) -> None:
    rng = np.random.default_rng(0)
    feeds = {"input_ids": rng.integers(5, 50000, (1, seq_len)), "attention_mask": np.ones((1, seq_len), np.int64)}
    runs: dict[str, Callable[[], np.ndarray]] = {}
    for file in files:
        runner = OrtRunner(file, RunOptions(threads=threads))
        runs[file.parent.name] = lambda runner=runner: next(iter(runner.run(feeds).values()))  # type: ignore[misc]
    expected = runs["ours"]()
    for name, run in runs.items():
        error = float(np.abs(run() - expected).max() / np.abs(expected).max())
        assert error <= LIMIT, (name, error)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            wall, before = time.perf_counter(), os.times()
            run()
            after = os.times()
            cpu = after.user + after.system - before.user - before.system
            seconds[name].append((time.perf_counter() - wall, cpu))
    for name, own in seconds.items():
        wall, cpu = (statistics.median(times) for times in zip(*own, strict=True))
        pairs = list(zip(own, seconds["ours"], strict=True))
        ratio = [statistics.median(x[i] / y[i] for x, y in pairs) for i in (0, 1)]
        print(f"{name:8}{wall:9.2f} s {ratio[0]:6.2f} × ours; CPU {cpu:9.2f} s {ratio[1]:6.2f} × ours", flush=True)


if __name__ == "__main__":
    main()
