"""Measure one model: export it as it is, compare it at other sizes in plain onnxruntime, and time it."""

from __future__ import annotations

import contextlib
import copy
import io
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from others.files import with_noise
from torch import Tensor, nn
from turns import timed_in_turns

import effexport
from effexport.artifact import Artifact
from effexport.base.errors import EffexportError
from effexport.plugins.building.library import get_library_path
from wild.models import Model, import_torchvision

BATCHES, EXAMPLE_BATCH = (1, 3), 2
# Relative to the RMS of the model's answer: far above rounding, far below any fault in a formula.
LIMIT = 1e-3
ROUNDS = 9
Feed = Mapping[str, Tensor]
Arrays = Sequence[NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """Inputs of one size, and what the untouched module answers. is_settled: whether it answers so twice."""

    batch: int
    length: int
    feed: Feed
    answers: Arrays
    is_settled: bool


def measured(model: Model, folder: Path) -> dict[str, Any]:
    """One result, as JSON has it. result: "any size", "fixed" (some sizes only), "refused", "wrong", or "crashed" for
    an error that is not one of effexport's own."""
    warnings.simplefilter("ignore")
    import_torchvision()
    torch.manual_seed(0)
    module = with_noise(model.make().eval())
    example = model.inputs(EXAMPLE_BATCH, model.lengths[1])
    cases = [
        case_of(model, module, batch, n) for n in dict.fromkeys(model.lengths) for batch in (*BATCHES, EXAMPLE_BATCH)
    ]
    found, artifact = exported(model, module, example, folder / "ours")
    if artifact is not None:
        found |= compared(model, artifact, cases)
    plain, by_torch = exported_by_torch(model, module, example, artifact, cases, folder / "plain.onnx")
    found["torch_onnx"] = by_torch
    if artifact is not None:
        found |= timed(module, artifact, plain, cases)
    return found


def case_of(model: Model, module: nn.Module, batch: int, length: int) -> Case:
    feed = model.inputs(batch, length)
    first, second = (answers_of(model, module, feed) for _ in range(2))
    return Case(batch, length, feed, first, all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)))


def answers_of(model: Model, module: nn.Module, feed: Feed) -> Arrays:
    # some modules keep a state, such as BigBird the kind of attention that its shortest input asks for
    module = copy.deepcopy(module)
    with torch.no_grad():
        result = module(**{name: value.clone() for name, value in feed.items()})
    return kept([tensor.numpy() for tensor in tensors_of(result)], model, feed)


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a result, in its order, also those of a tuple in it."""
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def kept(arrays: Arrays, model: Model, feed: Feed) -> Arrays:
    """Without what stands for hidden tokens, which no one reads."""
    if not model.mask:
        return arrays
    mask = feed[model.mask].numpy().astype(bool)
    return [array[mask] if array.shape[:2] == mask.shape else array for array in arrays]


def exported(model: Model, module: nn.Module, example: Feed, folder: Path) -> tuple[dict[str, Any], Artifact | None]:
    start = time.perf_counter()
    found: dict[str, Any] = {}
    artifact = None
    try:
        built = effexport.export(copy.deepcopy(module), dict(example), folder, dynamic=model.dynamic, force=True)
    except EffexportError as error:
        found |= {"result": "refused", "message": str(error)}
    except Exception as error:  # a bug, whatever it is
        found |= {"result": "crashed", "message": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    else:
        artifact = built.artifact
        found |= {
            "notes": built.report.notes,
            "operators": artifact.spec.custom_ops,
            "replaced": artifact.spec.model.layers,
        }
    return found | {"build_s": time.perf_counter() - start}, artifact


def compared(model: Model, artifact: Artifact, cases: Sequence[Case]) -> dict[str, Any]:
    """The largest error and RMS error over all sizes, relative to the RMS of the answer, with kernels and bodies."""
    taken = [case for case in cases if takes(artifact, case)]
    sizes = {(case.batch, case.length) for case in taken}
    whole = sizes >= {(batch, length) for batch in BATCHES for length in model.lengths}
    found = {"result": "any size" if whole else "fixed", "sizes": sorted(sizes)}
    if not all(case.is_settled for case in cases):
        # it draws: what is proven is that of the module with the draws that the file holds
        return found | {"draws": True}
    errors = {}
    for name in ("kernel", "body") if artifact.spec.custom_ops else ("body",):
        errors[name] = errors_of(session(artifact.model_path, name), model, taken)
    problem = next((text for text in map(problem_of, errors.values()) if text), "" if taken else "no size was compared")
    return found | {"errors": errors} | ({"result": "wrong", "message": problem} if problem else {})


def takes(artifact: Artifact, case: Case) -> bool:
    spec = artifact.spec
    for tensor in spec.inputs:
        for dim, size in zip(tensor.dims, case.feed[tensor.name].shape, strict=True):
            if isinstance(dim, int) and dim != size:
                return False
            if dim == "seq" and not spec.model.shortest <= size <= (spec.model.max_seq_len or size):
                return False
    return True


def errors_of(one: onnxruntime.InferenceSession, model: Model, cases: Sequence[Case]) -> dict[str, Any]:
    """max and rms: the largest of all cases. problem: an error of onnxruntime, or other shapes."""
    largest, mean = [0.0], [0.0]
    for case in cases:
        try:
            found = kept(run(one, case.feed), model, case.feed)
        except Exception as error:  # whatever onnxruntime raises
            return {"problem": f"batch {case.batch}, length {case.length}: {str(error)[:200]}"}
        if [array.shape for array in found] != [array.shape for array in case.answers]:
            return {"problem": f"batch {case.batch}, length {case.length}: other shapes than the module's"}
        for got, answer in zip(found, case.answers, strict=True):
            away = np.abs(got.astype(np.float64) - answer.astype(np.float64))
            scale = np.sqrt(np.mean(np.square(answer, dtype=np.float64))) or 1.0
            largest.append(away.max(initial=0.0) / scale)
            mean.append(np.sqrt(np.mean(np.square(away))) / scale)
    return {"max": float(np.max(largest)), "rms": float(np.max(mean))}


def problem_of(errors: Mapping[str, Any]) -> str:
    if "problem" in errors:
        return str(errors["problem"])
    return "" if errors["max"] <= LIMIT else f"{errors['max']:.1e} times the RMS away from the module"


def session(path: Path, implementation: str = "body") -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if implementation == "kernel":
        library = get_library_path()
        assert library is not None, "the kernel library is not built; run: effexport plugins build"
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(one: onnxruntime.InferenceSession, feed: Feed) -> Arrays:
    return [
        np.asarray(array) for array in one.run(None, {each.name: feed[each.name].numpy() for each in one.get_inputs()})
    ]


def exported_by_torch(
    model: Model, module: nn.Module, example: Feed, artifact: Artifact | None, cases: Sequence[Case], path: Path
) -> tuple[onnxruntime.InferenceSession | None, dict[str, Any]]:
    """torch.onnx with the same free axes, and what becomes of its file at the sizes."""
    named = {each.name: each.dims for each in artifact.spec.inputs} if artifact else {}
    free = {name: [i for i, dim in enumerate(dims) if isinstance(dim, str)] for name, dims in named.items()}
    free = free or {name: [0, 1] if value.dim() < 4 else [0] for name, value in example.items()}
    shapes = {name: dict.fromkeys(axes, torch.export.Dim.AUTO) for name, axes in free.items()}
    start = time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            torch.onnx.export(module, (), path, kwargs=dict(example), dynamic_shapes=shapes, dynamo=True, verbose=False)
        seconds = time.perf_counter() - start
        one = session(path)
    except Exception as error:  # whatever torch.onnx and onnxruntime raise
        return None, {
            "result": "refused",
            "message": f"{type(error).__name__}: {error}"[:300],
            "seconds": time.perf_counter() - start,
        }
    if not all(case.is_settled for case in cases):
        return one, {"result": "not compared", "seconds": seconds}
    errors = errors_of(one, model, cases)
    problem = problem_of(errors)
    return one, {
        "result": "wrong" if "max" in errors and problem else "fixed" if problem else "any size",
        "seconds": seconds,
        "message": problem,
    }


def timed(
    module: nn.Module, artifact: Artifact, plain: onnxruntime.InferenceSession | None, cases: Sequence[Case]
) -> dict[str, Any]:
    """Medians of the processor time of interleaved runs on one thread, at the largest size that the artifact takes."""
    ours = session(artifact.model_path, "kernel" if artifact.spec.custom_ops else "body")
    candidates: dict[str, Callable[[Feed], object]] = {
        "eager": lambda feed: module(**feed),
        **({"torch_onnx": lambda feed: run(plain, feed)} if plain is not None else {}),
        "ours": lambda feed: run(ours, feed),
    }
    case = max((case for case in cases if takes(artifact, case)), key=lambda case: (case.length, case.batch))
    for name in list(candidates):
        try:
            with torch.no_grad():
                candidates[name](case.feed)
        except Exception:  # a file of torch.onnx that does not run at this size
            del candidates[name]
    calls = {name: partial(candidate, case.feed) for name, candidate in candidates.items()}
    with torch.no_grad():
        seconds = timed_in_turns(calls, ROUNDS, warm_up=0, clock=time.thread_time)
    medians = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    return {"latency_ms": medians, "timed_at": [case.batch, case.length]}
