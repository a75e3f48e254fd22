"""Mutated checkpoints, tokenizers and spec files: inspected and built.

A build that starts is stopped when its module exists, and the module is compared with the files; one in twenty goes on
to its end, with the whole parity check.
"""

from __future__ import annotations

import importlib
import json
import random
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

from campaign.checkpoint_mutations import CHECKPOINT_MUTATIONS, copy_of, spec_toml, wild_flags
from campaign.commands import Case, Ended, Tally, in_workers, run_command
from campaign.strange import contents

STOPPED = "stopped by the campaign"
# Of a worker: far more than what is refused may take, and less than the machine has.
ADDRESS_SPACE = 12 << 30
FULL_BUILDS = 20
# What is built to its end: larger models are legitimate, and slow. In bytes, by the least that they need.
SMALL_MODEL, FEW_LAYERS = 2 << 20, 4
MOST_LABELS = 1000


def run(cases: int, seed: int, folder: Path) -> Tally:
    """Mutate checkpoints and spec files, and give each to inspect and build."""
    make_checkpoints(folder / "healthy")
    return in_workers(cases, attacker, folder, seed)


def make_checkpoints(folder: Path) -> None:
    """Small checkpoints of all families, with tokenizers."""
    from checkpoint_artifacts import BIG_BIRD, FIELDS, LONGFORMER, MODERNBERT, NYSTROMFORMER, REFORMER
    from random_tokenizers import saved_tokenizer
    from transformers_models import saved

    landmarks = NYSTROMFORMER | {"num_landmarks": 4, "segment_means_seq_len": 16, "hidden_size": 16}
    models = {
        "NystromformerForMaskedLM": NYSTROMFORMER,
        "NystromformerForSequenceClassification": landmarks | FIELDS["NystromformerForSequenceClassification"],
        "BigBirdForQuestionAnswering": BIG_BIRD,
        "LongformerForMaskedLM": LONGFORMER,
        "ModernBertForMaskedLM": MODERNBERT,
        "ReformerModelWithLMHead": REFORMER,
        "ReformerForSequenceClassification": REFORMER | {"is_decoder": False},
    }
    for kind, config in models.items():
        saved(folder / kind, kind, config)
        saved_tokenizer("bert", folder / kind)


def attacker(folder: Path, seed: int, number: int) -> Case:
    """The function of a case, in one worker."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))
    mine = folder / f"worker-{number}"
    mine.mkdir(exist_ok=True)
    healthy = sorted((folder / "healthy").iterdir())
    # the ordinary start: what is imported once
    for checkpoint in healthy:
        ended, _ = build(["--checkpoint", copy_of(checkpoint, mine / "checkpoint"), "-o", mine / "out"], stop=True)
        assert STOPPED in ended.err, ended.err
        assert run_command(["inspect", mine / "checkpoint"]).code == 0

    def case(index: int) -> str:
        dice = random.Random(f"{seed}-{index}")
        shutil.rmtree(mine / "out", ignore_errors=True)
        stop = index % FULL_BUILDS != 0
        if dice.random() < 0.2:
            return attack_with_spec(mine, dice, stop=stop)
        return attack_with_checkpoint(dice.choice(healthy), mine, dice, stop=stop)

    return case


def attack_with_spec(mine: Path, dice: random.Random, *, stop: bool) -> str:
    """A spec file or flags."""
    if dice.random() < 0.3:
        flags = wild_flags(dice)
        words = " ".join(flag[:40] for flag in flags)
    else:
        flags = ["--spec", str(mine / "spec.toml")]
        words = spec_toml(mine / "spec.toml", dice)
    ended, _ = build([*flags, "-o", mine / "out"], stop=stop)
    return f"spec {outcome(ended, words)}"


def attack_with_checkpoint(healthy: Path, mine: Path, dice: random.Random, *, stop: bool) -> str:
    checkpoint = copy_of(healthy, mine / "checkpoint")
    mutation = dice.choice(CHECKPOINT_MUTATIONS)
    words = f"{healthy.name}: {mutation.__name__}: {mutation(checkpoint, dice)}"
    before = contents(checkpoint)
    inspected = outcome(run_command(["inspect", checkpoint]), words)
    ended, module = build(["--checkpoint", checkpoint, "-o", mine / "out"], stop=stop)
    found = outcome(ended, words)
    assert contents(checkpoint) == before, f"{words}: the checkpoint's files have changed"
    assert not (checkpoint / "executed").exists(), f"{words}: code has run"
    assert (mine / "out").exists() == (ended.code == 0), f"{words}: {mine / 'out'} is there after status {ended.code}"
    assert inspected == "accepted" or (inspected, found) == ("refused", "refused"), f"{words}: {inspected}, {found}"
    if module is not None:
        compare_with_files(module, checkpoint, words)
    return f"checkpoint {found}"


def build(words: list[Any], *, stop: bool) -> tuple[Ended, Any]:
    """A build, which is stopped when its module exists, and the module: None if it does not come to that."""
    from effexport.base.errors import StageError

    # effexport.build itself is the function
    builds: Any = importlib.import_module("effexport.pipeline.build")
    modules: list[Any] = []
    real_write_graphs = builds.write_graphs

    def write_graphs(build: Any) -> Any:
        modules.append(build.module)
        if stop or build.spec.least_bytes > SMALL_MODEL or build.spec.model.layers > FEW_LAYERS:
            raise StageError("exporting", STOPPED)
        return real_write_graphs(build)

    with mock.patch.object(builds, "write_graphs", write_graphs):
        ended = run_command(["build", *words])
    return ended, modules[0] if modules else None


def outcome(ended: Ended, words: str) -> str:
    """refused, failed, or accepted. Raises AssertionError for any other end."""
    try:
        found = ended.check()
    except AssertionError as error:
        raise AssertionError(f"{words}: {error}") from None
    if STOPPED in ended.err:
        return "accepted"
    return {"failed its checks": "failed"}.get(found, found)


def compare_with_files(module: Any, checkpoint: Path, words: str) -> None:
    """Raise AssertionError unless a module computes what transformers computes from the same folder, if it can."""
    import torch
    import transformers
    from transformers_models import same_rotations

    assert all(bool(torch.isfinite(value).all()) for value in module.state_dict().values()), f"{words}: NaN was read"
    model = transformed(checkpoint)
    spec = module.spec
    if model is None or not isinstance(model, transformers.PreTrainedModel):
        return
    length = min(spec.max_seq_len, 8)
    if getattr(spec, "segment_means_seq_len", None) is not None and not spec.is_plain_softmax:
        length = spec.segment_means_seq_len
    if length > 1000:
        return
    ids = torch.arange(length)[None] % min(spec.vocab_size, 50)
    mask = torch.ones_like(ids)
    if 4 * spec.least_elements(1, length) > SMALL_MODEL:
        return
    with torch.no_grad(), same_rotations(module):
        ours = module(ids, mask, *(torch.zeros_like(ids) for _ in list(spec.inputs)[2:]))
        try:
            theirs = model(input_ids=ids, attention_mask=mask)[0]
        except Exception:  # transformers fails on what it has loaded
            return
    ours = ours[0] if isinstance(ours, tuple) else ours
    if not bool(torch.isfinite(theirs).all()):
        return
    error = float((ours - theirs).abs().max() / (theirs.abs().max() + 1e-9))
    assert error < 1e-3, f"{words}: the answers differ by {error:.2g}"


def transformed(checkpoint: Path) -> Any:
    """The model that transformers reads from a folder; None if it cannot, or makes up weights that are missing."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        config = json.loads((checkpoint / "config.json").read_text())
        if config.get("num_labels", 0) > MOST_LABELS:  # transformers makes up a name for each
            return None
        kind = getattr(transformers, config["architectures"][0])
        model, info = kind.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
    except Exception:
        return None
    return None if info["missing_keys"] or info["mismatched_keys"] else model.eval()
