"""The answers of transformers' own model of a checkpoint, for `verify --reference transformers`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.errors import UserError
from effexport.models.contract import ModelContract
from effexport.models.encoder.spec import EMBEDDING, LOGITS, POSITIONS, SCORES, TOKENS, Head
from effexport.proof.checks.result import Check, Kind, not_run
from effexport.proof.repeated_runs import RepeatedRuns
from effexport.proof.warm_up import warm_up
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from torch import nn

    from effexport.dtypes import Array
    from effexport.proof.cases import Case

# What this product is compared with; release 5 fails on these models, or leaves a bias out.
VERSION = "4.57.1"


def import_transformers() -> Any:
    """Raises UserError where it is missing, or of a release that computes something else."""
    remedy = f"it is not part of effexport; install it with: pip install transformers=={VERSION}"
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"--reference transformers needs transformers; {remedy}") from error
    if transformers.__version__.split(".")[0] != VERSION.split(".")[0]:
        raise UserError(
            f"--reference transformers needs release {VERSION}, or another 4; this is {transformers.__version__}; "
            + remedy
        )
    return transformers


def with_answers_of_transformers(
    cases: Sequence[Case], build: BuildSpec, folder: Path
) -> tuple[list[Case], list[Check]]:
    """The cases with the outputs of transformers in float32; whether it repeated itself, and what it could not answer.

    build: its head is applied to what transformers returns. cases: of our own module, whose buckets and noise are kept:
    with equal rotations transformers chooses the same buckets. folder: the checkpoint.
    """
    spec = build.model
    model = model_from_checkpoint(spec, folder)
    warm_up()
    runs = RepeatedRuns("transformers")
    answered, missing = [], []
    for case in cases:
        try:
            answer = runs.answer(case.label, functools.partial(answer_to_case, model, spec, build.head, case))
        except NoAnswerError as error:
            missing.append(not_run(Kind.TRANSFORMERS, str(error), case.label))
        else:
            answered.append(case.with_parts(answer))
    return answered, [*([runs.check] if answered else []), *missing]


def model_from_checkpoint(spec: ModelContract, folder: Path) -> nn.Module:
    """transformers' class for the task, float32, with the rotations of the spec."""
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    config.use_cache = False
    for name, value in spec.transformers_config.items():
        setattr(config, name, value)
    kind = getattr(transformers, spec.transformers_class)
    model: nn.Module = kind.from_pretrained(folder, config=config, local_files_only=True).float().eval()
    # it draws the rotations of a layer anew in every pass, after seeding with this
    children: list[Any] = [child for child in model.modules() if hasattr(child, "hash_seed")]
    for seed, child in zip(spec.hash_seeds, children, strict=True):
        child.hash_seed = seed
    return model


class NoAnswerError(Exception):
    """transformers does not answer a case; the message says why."""


def answer_to_case(model: nn.Module, spec: ModelContract, head: Head, case: Case) -> dict[str, dict[str, Array]]:
    """Float32 outputs by name, and the scores of all indices if these are ranked, as two parts of an answer.

    Raises NoAnswerError if transformers has none.
    """
    import torch

    from effexport.models.encoder.module import embedding, probabilities, top_tokens

    seq_len = case.keep.shape[-1]
    extra = (spec.transformers_len or seq_len) - seq_len
    fills = {"input_ids": spec.pad_token_id}
    inputs = {
        name: torch.nn.functional.pad(torch.from_numpy(np.asarray(array)), (0, extra), value=fills.get(name, 0))
        for name, array in case.inputs.items()
        if name in spec.inputs
    }
    try:
        # it seeds the generator of the whole process
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            result = model(**inputs)
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        raise NoAnswerError(f"transformers does not run this case: {str(error).strip().splitlines()[0]}") from error
    outputs: dict[str, Array] = {}
    for name, dims in spec.outputs.items():
        array = result[name].numpy()
        outputs[name] = np.ascontiguousarray(array[:, :seq_len] if "seq" in dims else array)
    ranked: dict[str, Array] = {}
    if head.pool is not None:
        (hidden,) = outputs.values()
        outputs = {EMBEDDING: embedding(torch.from_numpy(hidden), torch.from_numpy(case.keep), head).numpy()}
    if head.top_k is not None:
        logits = torch.from_numpy(np.take_along_axis(outputs[LOGITS], case.inputs[POSITIONS][..., None], axis=1))
        scores, tokens = top_tokens(logits, head.top_k)
        outputs, ranked = {SCORES: scores.numpy(), TOKENS: tokens.numpy()}, {TOKENS: probabilities(logits).numpy()}
    for name, array in outputs.items():
        for sample in range(len(array)):
            if not np.isfinite(array[sample] if head.is_wanted else case.kept(name, array, sample)).all():
                raise NoAnswerError("transformers' own answer to this case is not finite")
    return {"outputs": outputs, "ranked": ranked}
