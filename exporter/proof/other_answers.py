"""Answers of models that are not ours: of a safetensors file, as its owner computed them, and of transformers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.dtypes import Array, named_sizes, numpy_dtype
from effexport.base.environment import require_torch
from effexport.base.errors import UserError
from effexport.base.spec import BuildSpec
from effexport.models.contract import ModelContract
from effexport.models.encoder.spec import EMBEDDING, LOGITS, POSITIONS, SCORES, TOKENS, Head, vocabulary
from effexport.models.size_formula import shape_of
from effexport.proof.cases import Answers, Case, check_fits, checked_cases, kept_tokens, stored_cases
from effexport.proof.check import Kind, not_run
from effexport.proof.module_runs import RepeatedRuns, answered_case, with_hash_noise
from effexport.runners.runner import checked_feeds, limits_from_spec, tensors_text

if TYPE_CHECKING:
    from torch import nn

# What numpy can read of the types of safetensors.
NUMPY_DTYPES = ("F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
# The name of a case whose answers are those of the original.
ORIGINAL = "original"


def load_answers(path: Path, spec: BuildSpec) -> list[Case]:
    """The cases of a golden file, or of a file with one tensor for each input and output of the model, named alike.

    Several cases have names of their own before a slash: `short/hidden_states`. A missing mask keeps all tokens.
    Raises UserError for a file that is none, and for tensors of other names, types or shapes than the model has.
    """
    from safetensors import SafetensorError, safe_open

    # safetensors waits for the writer of a pipe, and no signal ends that
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file; {expected_tensors(spec)}")
    try:
        check_fits(path)
        with safe_open(path, framework="numpy") as file:
            if "noise" in (file.metadata() or {}):
                return stored_cases(path, spec)
            dtypes = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - not a mapping
            tensors = {key: file.get_tensor(key) for key, dtype in dtypes.items() if dtype in NUMPY_DTYPES}
    except FileNotFoundError:
        raise UserError(f"no reference file at {path}") from None
    except (OSError, SafetensorError, MemoryError) as error:
        raise UserError(f"{path} is not a safetensors file, or is damaged; {expected_tensors(spec)}") from error
    tensors |= {key: widened(path, key, dtype) for key, dtype in dtypes.items() if key not in tensors}
    named: dict[str, dict[str, Array]] = {}
    for key, tensor in tensors.items():
        owner, _, name = key.rpartition("/")
        named.setdefault(owner, {})[name] = tensor
    known = {tensor.name for tensor in (*spec.inputs, *spec.outputs)}
    if not any(known & set(arrays) for arrays in named.values()):
        raise UserError(f"{path} holds no answers; {expected_tensors(spec)}; weights go with --weights")
    cases = [case_from_tensors(path, owner, arrays, spec) for owner, arrays in named.items()]
    return checked_cases(cases, spec, str(path))


def widened(path: Path, key: str, dtype: str) -> Array:
    """A tensor of bfloat16 in float32, which is exact. Raises UserError for other types that numpy does not have."""
    from safetensors import safe_open

    if dtype != "BF16":
        raise UserError(f"{path}: {key} is {dtype}; expected float64, float32, float16 or bfloat16: convert it")
    require_torch(f"{path} holds bfloat16: reading it")
    with safe_open(path, framework="pt") as file:
        array: Array = file.get_tensor(key).float().numpy()
    return array


def original_cases(path: Path, spec: BuildSpec) -> list[Case]:
    """The cases of a file for the golden file of an artifact, under names that show whose answers they are."""
    cases = load_answers(path, spec)
    return [c if is_original(c.name) else dataclasses.replace(c, name=f"{ORIGINAL} {c.name}") for c in cases]


def expected_tensors(spec: BuildSpec) -> str:
    return (
        f"expected the inputs that the original was given ({tensors_text(spec.inputs)}) and its answers "
        f"({tensors_text(spec.outputs)}), each under its name"
    )


def case_from_tensors(path: Path, owner: str, tensors: dict[str, Array], spec: BuildSpec) -> Case:
    """One case. owner: its name in the file, or ""."""
    outputs = {tensor.name: tensors.pop(tensor.name, None) for tensor in spec.outputs}
    for tensor in spec.inputs:
        if tensor.dtype == spec.dtype and tensor.name in tensors and tensors[tensor.name].dtype.kind == "f":
            # the original need not compute in the precision of the model
            tensors[tensor.name] = tensors[tensor.name].astype(numpy_dtype(spec.dtype))
    try:
        inputs = checked_feeds(tensors, spec.inputs, limits_from_spec(spec))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    sizes = named_sizes(spec.inputs, inputs)
    answers: dict[str, Array] = {}
    for tensor in spec.outputs:
        array, shape = outputs[tensor.name], shape_of(tensor.dims, sizes)
        if array is None:
            raise UserError(f"{path} has no {tensor.name}; {expected_tensors(spec)}")
        kinds, words = kind_of(tensor.dtype)
        if array.shape != shape or array.dtype.kind not in kinds:
            raise UserError(
                f"{path}: {tensor.name} is {array.dtype} {list(array.shape)}; expected {words} {list(shape)}"
            )
        answers[tensor.name] = np.asarray(array, np.float32)
    name = f"{ORIGINAL} {owner.replace('/', ' ')}" if owner else ORIGINAL
    ranked, tokens = scores_in_answers(path, answers, spec), kept_tokens(inputs, spec)
    case = Case(name, inputs, answers, pooled=spec.pooled_outputs, ranked=ranked, tokens=tokens)
    check_finite_answers(path, case)
    return case


def kind_of(dtype: str) -> tuple[str, str]:
    """numpy's kinds that an answer may have, and their name.

    dtype: of the output of the model.
    """
    if dtype == "bool":
        return "b", "booleans"
    return ("iu", "integers") if dtype.startswith("int") else ("f", "floats")


def scores_in_answers(path: Path, answers: Mapping[str, Array], spec: BuildSpec) -> dict[str, Array]:
    """The part `ranked` of a case: the scores of the tokens in the answers, and NaN for those that are not known.

    Raises UserError for tokens that are not in the vocabulary.
    """
    if not spec.ranked_outputs:
        return {}
    tokens, scores, count = answers[TOKENS].astype(np.int64), answers[SCORES], vocabulary(spec.model)
    if tokens.min() < 0 or tokens.max() >= count:
        raise UserError(f"{path}: {TOKENS} contains {tokens.min()} to {tokens.max()}; expected 0 to {count - 1}")
    ranked = np.full((*tokens.shape[:-1], count), np.nan, np.float32)
    np.put_along_axis(ranked, tokens, scores, axis=-1)
    return {TOKENS: ranked}


def check_finite_answers(path: Path, case: Case) -> None:
    """Raise UserError for NaN or infinity among the answers that are compared: those to padding are not."""
    for name, answer in case.outputs.items():
        bad = sum(
            int(np.count_nonzero(~np.isfinite(case.kept(name, answer, sample)))) for sample in case.samples(answer)
        )
        if bad:
            raise UserError(
                f"{path}: {bad} of {answer.size} values of {name} in {case.label} are NaN, infinite or beyond float32; "
                "expected finite numbers: compute the answers of the original again, in float32 and in evaluation mode"
            )


def with_hashes(cases: list[Case], module: nn.Module, spec: BuildSpec) -> list[Case]:
    """The cases with what files of answers do not have: the buckets and the noise of a module of ours that hashes, and
    its scores of all indices if these are ranked."""
    if not spec.attention.is_hashed and not spec.ranked_outputs:
        return cases
    runs = RepeatedRuns("PyTorch")
    hashed = []
    for case in cases:
        ours = answered_case(case, module, spec, runs)
        if spec.attention.is_hashed:
            ours = with_hash_noise(ours, module, module, spec, runs)
        hashed.append(dataclasses.replace(ours, outputs=case.outputs))
    return hashed


def is_original(name: str) -> bool:
    """True for the name of a case with answers of the original."""
    return name.split(" ", 1)[0] == ORIGINAL


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


def with_answers_of_transformers(cases: Sequence[Case], build: BuildSpec, folder: Path) -> Answers:
    """The cases with the outputs of transformers in float32, and checks: repeated runs, and cases without an answer.

    build: its head is applied to what transformers returns.
    cases: of our own module, whose buckets and noise are kept: with equal rotations transformers chooses the same
    buckets.
    folder: the checkpoint.
    """
    from effexport.proof.float64 import warm_up

    spec = build.model
    model = model_from_checkpoint(spec, folder)
    warm_up()
    runs = RepeatedRuns("transformers")
    found, missing = Answers(kind="transformers"), []
    for case in cases:
        try:
            answer = runs.answer(case.label, functools.partial(answer_to_case, model, spec, build.head, case))
        except NoAnswerError as error:
            missing.append(not_run(Kind.TRANSFORMERS, str(error), case.label))
        else:
            found.cases.append(case.with_parts(answer))
    found.checks += [*([runs.check] if found.cases else []), *missing]
    return found


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
            result = model(**spec.inputs_of_transformers(inputs))
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        raise NoAnswerError(f"transformers does not run this case: {str(error).strip().splitlines()[0]}") from error
    outputs: dict[str, Array] = {}
    for name, dims in spec.outputs.items():
        array = result[name].numpy()
        outputs[name] = np.ascontiguousarray(array[:, :seq_len] if "seq" in dims else array)
    ranked: dict[str, Array] = {}
    if head.pool is not None:
        hidden = next(iter(outputs.values()))
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
