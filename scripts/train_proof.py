#!/usr/bin/env python
"""Train small models on real text and on tasks, export them, and compare every runtime with PyTorch.

    python scripts/train_proof.py --list
    python scripts/train_proof.py causal-linear masked-nystrom
    python scripts/train_proof.py all --minutes 25

Each experiment has fixed seeds and a time limit, goes on where it was stopped, and writes DIR/NAME.json; what is done
is not done again. Weights, texts and artifacts stay in DIR. Run it in .venv on an idle machine, after quickstart.sh;
with OMP_NUM_THREADS=1, as many experiments as there are cores can run side by side. scripts/trained_docs.py makes the
tables and plots of docs/trained.md from the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from effexport.base.environment import versions  # noqa: E402
from effexport.models.encoder.module import Encoder  # noqa: E402
from effexport.tasks.data import LABELS  # noqa: E402
from scripts.training.experiments import EXPERIMENTS, Experiment  # noqa: E402
from scripts.training.judge import judged  # noqa: E402
from scripts.training.tasks import Batch, Task  # noqa: E402
from scripts.training.trainer import Trained, save_half, start_small, train  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="experiments, or all")
    parser.add_argument("--list", action="store_true", help="print the names of all experiments")
    parser.add_argument("--minutes", type=float, default=25.0, help="of training, for each experiment")
    parser.add_argument("--steps", type=int, help="in place of those of the experiment")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "trained", metavar="DIR")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(EXPERIMENTS))
        return
    names = list(EXPERIMENTS) if arguments.names == ["all"] else arguments.names
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or not names:
        parser.error(f"unknown experiments: {', '.join(unknown) or 'none given'}; expected: {', '.join(EXPERIMENTS)}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in names:
        experiment = EXPERIMENTS[name]
        schedule = replace(experiment.schedule, minutes=arguments.minutes)
        if arguments.steps is not None:
            schedule = replace(schedule, steps=arguments.steps)
        run(replace(experiment, schedule=schedule), arguments.output)


def run(experiment: Experiment, folder: Path) -> None:
    """Train, export and judge one model, and write the result."""
    result = folder / f"{experiment.name}.json"
    if result.exists():
        return
    task = experiment.task(folder / "packages")
    weights, data = folder / f"{experiment.name}.safetensors", folder / f"{experiment.name}.npz"
    history = folder / f"{experiment.name}.history.json"
    if not weights.exists():
        model, trained = trained_model(experiment, task, weights.with_suffix(".state"))
        history.write_text(json.dumps(asdict(trained)))
        save_half(model, weights)
        weights.with_suffix(".state").unlink()
    np.savez(data, **held_out_arrays(task, experiment.rows))

    def judge(other: str) -> Any:
        def on_stage(stage: str) -> None:
            print(": ".join(filter(None, (experiment.name, other, stage))), file=sys.stderr)

        artifacts = folder / "artifacts" / experiment.name / (other or "trained")
        return judged(experiment.spec(other), weights, data, artifacts, on_stage, everywhere=not other)

    found = {
        "name": experiment.name,
        "spec": experiment.spec().to_dict(),
        "schedule": asdict(experiment.schedule),
        "environment": versions(),
        "training": json.loads(history.read_text()),
        "judged": judge(""),
        "others": {other: judge(other) for other in experiment.others},
    }
    result.write_text(json.dumps(found, indent=1) + "\n")


def trained_model(experiment: Experiment, task: Task, state: Path) -> tuple[Encoder, Trained]:
    torch.manual_seed(0)
    model = Encoder(experiment.spec().model)
    start_small(model)

    def batch_of_step(step: int) -> Batch:
        return task.batch(experiment.schedule.rows, np.random.default_rng([0, step]))

    return model, train(model, batch_of_step, experiment.schedule, state, experiment.name)


def held_out_arrays(task: Task, rows: int) -> dict[str, Any]:
    """Inputs and labels, for `effexport evaluate`."""
    ids, labels = task.held_out(rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64), LABELS: labels}


if __name__ == "__main__":
    main()
