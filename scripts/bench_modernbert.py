#!/usr/bin/env python3
"""Time a whole ModernBERT with random weights in ONNX Runtime: our export and torch.onnx's of transformers' model.

The two take turns, each turn in a process of its own, so that only one of them holds memory. A process runs twice and
times the second run; the answers of every turn are compared. CPU time counts on a busy machine. --layers 3 has one
global layer of each three, as the whole.

    .venv/bin/python scripts/bench_modernbert.py --seq-len 8192 --threads 2 --turns 3
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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
T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """One timed run. peak_gb: the most memory that its process held."""

    answer: np.ndarray
    wall_s: float
    cpu_s: float
    peak_gb: float


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
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        ours, theirs = (folder / name / "model.onnx" for name in ("ours", arguments.attention))
        if not (ours.is_file() and theirs.is_file()):
            in_process(save_checkpoint, folder, arguments.layers)
            in_process(export_ours, folder, ours, arguments.seq_len)
            in_process(export_theirs, folder, theirs, arguments.seq_len, arguments.attention)
        report([ours, theirs], arguments.seq_len, arguments.threads, arguments.turns)


def in_process(function: Callable[..., T], *arguments: object) -> T:
    """The result of a call in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def save_checkpoint(folder: Path, layers: int) -> None:
    torch.manual_seed(0)
    config = ModernBertConfig(num_hidden_layers=layers, reference_compile=False, architectures=["ModernBertModel"])
    ModernBertModel(config).eval().save_pretrained(folder)


def export_ours(folder: Path, file: Path, seq_len: int) -> None:
    spec, _ = ModernBertSpec.from_config(ModernBertConfig.from_pretrained(folder).to_dict(), {"seq_len": seq_len})
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx_from_module(module_from_checkpoint(folder, spec).eval(), BuildSpec(model=spec), file)


@torch.no_grad()
def export_theirs(folder: Path, file: Path, seq_len: int, attention: str) -> None:
    """transformers' model, for sequences of this length alone."""
    file.parent.mkdir(parents=True, exist_ok=True)
    example = tuple(torch.ones(1, seq_len, dtype=torch.int64) for _ in INPUTS)
    model = LastHiddenState(ModernBertModel.from_pretrained(folder, attn_implementation=attention).eval())
    torch.onnx.export(model, example, file, input_names=INPUTS, dynamo=True, external_data=True, verbose=False)


def timed(file: Path, seq_len: int, threads: int) -> Turn:
    """The second run of a model, on the same tokens in every process."""
    rng = np.random.default_rng(0)
    feeds = {"input_ids": rng.integers(5, 50000, (1, seq_len)), "attention_mask": np.ones((1, seq_len), np.int64)}
    with OrtRunner(file, RunOptions(threads=threads)) as runner:
        runner.run(feeds)
        wall, before = time.perf_counter(), os.times()
        answer = next(iter(runner.run(feeds).values()))
        wall, after = time.perf_counter() - wall, os.times()
    cpu = after.user + after.system - before.user - before.system
    return Turn(answer, wall, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


def report(files: list[Path], seq_len: int, threads: int, turns: int) -> None:
    found: dict[str, list[Turn]] = {file.parent.name: [] for file in files}
    for _ in range(turns):
        for file in files:
            found[file.parent.name].append(in_process(timed, file, seq_len, threads))
        expected = found["ours"][-1].answer
        for name, own in found.items():
            error = float(np.abs(own[-1].answer - expected).max() / np.abs(expected).max())
            assert error <= LIMIT, (name, error)
    for name, own in found.items():
        wall, cpu = (statistics.median(getattr(turn, unit) for turn in own) for unit in ("wall_s", "cpu_s"))
        pairs = list(zip(own, found["ours"], strict=True))
        wall_ratio = statistics.median(x.wall_s / y.wall_s for x, y in pairs)
        cpu_ratio = statistics.median(x.cpu_s / y.cpu_s for x, y in pairs)
        peak = max(turn.peak_gb for turn in own)
        print(
            f"{name:8}{wall:9.2f} s {wall_ratio:6.2f} × ours; CPU {cpu:9.2f} s {cpu_ratio:6.2f} × ours; {peak:.1f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
