"""A training loop with a fixed schedule, which goes on where it was stopped."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from effexport.base.machine import Processor
from effexport.models.encoder.module import Encoder
from effexport.tasks.data import IGNORED
from scripts.training.tasks import Batch

SAVE_EVERY_S = 60


@dataclass(frozen=True)
class Schedule:
    """steps, rows of a batch; learning rate at its highest, after `warmup` steps, and then down to a tenth as a cosine.

    minutes: when training ends at the latest; the learning rate then ends early, which the result says.
    """

    steps: int
    rows: int
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    minutes: float = 25.0

    def rate(self, step: int) -> float:
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass(frozen=True)
class Trained:
    """losses: (step, mean of the last steps), in nats. steps: how many were made. minutes: of training."""

    losses: list[tuple[int, float]]
    steps: int
    minutes: float


def train(
    model: nn.Module,
    batch_of_step: Callable[[int], Batch],
    schedule: Schedule,
    state_file: Path,
    title: str,
) -> Trained:
    """Train `model` in place, in bfloat16 where the processor has it.

    batch_of_step: the same batch for the same step, so that a run that was stopped goes on as if it had not been.
    state_file: weights, moments and losses so far; removed by the caller.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay)
    losses: list[tuple[int, float]] = []
    first, spent_s = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, spent_s, losses = state["step"], state["spent_s"], [(int(step), loss) for step, loss in state["losses"]]
    start = saved = time.monotonic()
    recent: list[float] = []
    done = first

    def save() -> None:
        unfinished = state_file.with_suffix(".unfinished")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
        torch.save(state | {"spent_s": spent_s + time.monotonic() - start, "losses": losses}, unfinished)
        unfinished.rename(state_file)

    model.train()
    compiled = torch.compile(model)
    in_half = torch.autocast("cpu", torch.bfloat16, enabled=Processor.here().has_bfloat16_products)
    for step in range(first, schedule.steps):
        if spent_s + time.monotonic() - start > 60 * schedule.minutes:
            break
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        with in_half:
            loss = loss_of(compiled, *(torch.from_numpy(array) for array in batch_of_step(step)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimizer.step()
        recent.append(loss.item())
        done = step + 1
        if done % 50 == 0 or done == schedule.steps:
            losses.append((done, sum(recent) / len(recent)))
            recent = []
            print(f"{title} {done}/{schedule.steps}  loss {losses[-1][1]:.3f}", file=sys.stderr, flush=True)
        if time.monotonic() - saved > SAVE_EVERY_S:
            save()
            saved = time.monotonic()
    save()
    model.eval()
    return Trained(losses, done, (spent_s + time.monotonic() - start) / 60)


def start_small(model: Encoder) -> None:
    """Embeddings as small numbers, and positions as sinusoids (Vaswani et al. 2017), which are learned from there."""
    positions = model.position_embedding.weight
    count, dim = positions.shape
    rates = torch.exp(-math.log(10_000) * torch.arange(0, dim, 2) / dim)
    angles = torch.arange(count)[:, None] * rates
    with torch.no_grad():
        model.token_embedding.weight.normal_(0, 0.02)
        positions[:, 0::2], positions[:, 1::2] = 0.05 * torch.sin(angles), 0.05 * torch.cos(angles)


def save_half(model: nn.Module, file: Path) -> None:
    """Round the weights to float16 and save them as such: what is judged is what the file holds.

    Rotations are not in the file. They come from the spec, so that the same weights can have other hash rounds.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    save_file({name: parameter.half().contiguous() for name, parameter in model.named_parameters()}, file)


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Of the places with a label. Token 0 is padding, which attention does not see."""
    logits = model(ids, (ids != 0).to(torch.int64))
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
