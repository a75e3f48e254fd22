#!/usr/bin/env python
"""Train small models on real text and on tasks, export them, and compare every runtime with PyTorch.

    python scripts/train_proof.py --list
    python scripts/train_proof.py causal-linear masked-nystrom
    python scripts/train_proof.py all --minutes 25

Each experiment has fixed seeds and a time limit, goes on where it was stopped, and writes DIR/NAME.json. Weights and
texts stay in DIR. Run it in .venv on an otherwise idle machine: trainings use all cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import effexport  # noqa: E402
from effexport.environment import versions  # noqa: E402
from effexport.models.encoder import Encoder  # noqa: E402
from effexport.spec import build_spec_from_options  # noqa: E402
from scripts.training.corpus import corpus  # noqa: E402
from scripts.training.language import half_weights, held_out_arrays, windows_of_step  # noqa: E402
from scripts.training.trainer import Schedule, train  # noqa: E402

LENGTH, LAYERS, DIM, HEADS, ROWS, STEPS = 512, 4, 128, 4, 8, 3000
HELD_OUT_ROWS = 200
CAUSAL = ("linear", "aft-simple", "softmax")
MASKED = ("nystrom", "lsh", "aft-local", "aft-conv", "aft-full", "linear", "softmax")


@dataclass(frozen=True)
class Experiment:
    """A byte language model. options: of the spec, beside those that all have."""

    name: str
    variant: str
    causal: bool
    options: dict[str, Any]

    @property
    def spec(self) -> Any:
        fields = {"variant": self.variant, "dim": DIM, "heads": HEADS, "layers": LAYERS, "seq_len": LENGTH}
        fields |= {"lm_head": True, **({"causal": True} if self.causal else {})}
        return build_spec_from_options(fields | self.options, None)


EXPERIMENTS = {
    one.name: one
    for one in (
        *(Experiment(f"causal-{variant}", variant, True, {}) for variant in CAUSAL),
        *(Experiment(f"masked-{variant}", variant, False, {}) for variant in MASKED),
        Experiment("masked-nystrom-32", "nystrom", False, {"num_landmarks": 32}),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="experiments, or all")
    parser.add_argument("--list", action="store_true", help="print the names of all experiments")
    parser.add_argument("--minutes", type=float, default=25.0, help="of training, for each experiment")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "trained")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(EXPERIMENTS))
        return
    names = list(EXPERIMENTS) if arguments.names == ["all"] else arguments.names
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or not names:
        parser.error(f"unknown experiments: {', '.join(unknown) or 'none given'}; expected: {', '.join(EXPERIMENTS)}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(arguments.steps, ROWS, minutes=arguments.minutes)
    for name in names:
        run(EXPERIMENTS[name], schedule, arguments.output)


def run(experiment: Experiment, schedule: Schedule, folder: Path) -> None:
    """Train, export and judge one model; what is done already is not done again."""
    text = corpus(folder / "packages")
    spec = experiment.spec
    torch.manual_seed(0)
    model = Encoder(spec.model)
    weights, history = folder / f"{experiment.name}.safetensors", folder / f"{experiment.name}.history.json"
    if not weights.exists():
        state = folder / f"{experiment.name}.state"
        trained = train(
            model,
            lambda step: windows_of_step(text, LENGTH, schedule.rows, step, masked=not experiment.causal),
            schedule,
            state,
            experiment.name,
        )
        history.write_text(json.dumps(dataclasses.asdict(trained)))
        half_weights(model, weights)
        state.unlink()
    data = held_out_arrays(text, LENGTH, HELD_OUT_ROWS, masked=not experiment.causal)
    result = {
        "name": experiment.name,
        "spec": spec.to_dict(),
        "schedule": dataclasses.asdict(schedule),
        "corpus_sha256": text.sha256,
        "environment": versions(),
        "training": json.loads(history.read_text()),
        "figures": figures(experiment, weights, data, folder),
    }
    (folder / f"{experiment.name}.json").write_text(json.dumps(result, indent=2) + "\n")


def figures(experiment: Experiment, weights: Path, data: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The figures of each precision and runtime, each compared with PyTorch on the same rows."""
    found = []
    for precision in ("fp32", "fp16"):
        artifact = folder / "artifacts" / f"{experiment.name}-{precision}"
        if not artifact.exists():
            spec = dataclasses.replace(experiment.spec, precision=precision)
            effexport.build(spec, artifact, weights=weights)
        runs: list[dict[str, Any]] = [{"implementation": "kernel"}, {"implementation": "body"}]
        runs += [{"runtime": "openvino"}] * (precision == "fp32")
        for options in runs:
            title = ", ".join((precision, *options.values()))
            print(f"{experiment.name}: {title}", file=sys.stderr)
            found.append({"run": title, **judged(artifact, data, weights, **options)})
    return found


def judged(artifact: Path, data: dict[str, Any], weights: Path, **options: Any) -> dict[str, Any]:
    """An evaluation as JSON, or why it could not be made."""
    try:
        return effexport.evaluate(artifact, data, compare="torch", weights=weights, **options).to_dict()
    except effexport.UserError as error:
        return {"not_run": str(error)}


if __name__ == "__main__":
    main()
