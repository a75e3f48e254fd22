"""The kernels in the oldest and in the newest ONNX Runtime that is supported, and those of the wheel for aarch64 in an
emulated process, each in an environment of its own."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import kernels_wheel
import numpy as np
import pytest
from campaign import operators
from campaign.operator_calls import Dice, valid
from portability.environments import AARCH64, OLD_ORT, TOOLS, Environment, PythonVenv, pinned
from portability.worker import Worker, WorkerRunner, open_in_worker
from small_builds import built_artifact
from small_specs import BUILT_VARIANTS, spec_of

from effexport.artifact import open_artifact
from effexport.base.spec import NEXT_PREFIX
from effexport.models.variants import ATTENTION_SPECS
from effexport.plugins.building.library import LIBRARY_NAME, get_library_path
from effexport.plugins.contract import load_contract
from effexport.plugins.ops import OPS
from effexport.proof.cases import load_reference
from effexport.proof.tolerances import arithmetic_limit, relative_error
from effexport.proof.verify import verify_in_runtime

if TYPE_CHECKING:
    import onnx

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOWEST = re.fullmatch(r"onnxruntime>=([\d.]+)", PROJECT["optional-dependencies"]["cpu"][0])[1]
OLDEST, NEWEST = PythonVenv(f"onnxruntime-{LOWEST}"), TOOLS
# Of each operator; the sizes, types and attributes of each are drawn.
CALLS = 12
WITH_STATE = ("linear", "aft-simple")
CAUSAL = [name for name, spec in ATTENTION_SPECS.items() if not (spec.why_not_causal or spec.why_always_causal)]
# A causal form has the operators and kernels of the other, which the calls above draw causal, too.
MODELS = [
    *((variant, False) for variant in BUILT_VARIANTS),
    *(pytest.param(variant, True, marks=[pytest.mark.soak] * (variant not in WITH_STATE)) for variant in CAUSAL),
]


# the newest is the release in which the suite runs the kernels anyway
@pytest.fixture(
    scope="module",
    params=[OLDEST, *(pytest.param(environment, marks=pytest.mark.soak) for environment in (NEWEST, AARCH64))],
    ids=["oldest", "newest", "aarch64"],
)
def environment(request: pytest.FixtureRequest) -> Environment:
    found: Environment = request.param
    if found == AARCH64:
        found.prepare()
    return found


@pytest.fixture(scope="module")
def worker(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(environment, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


@pytest.fixture(scope="module")
def library(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the kernel library."""
    if environment != AARCH64:
        return str(get_library_path())
    folder = tmp_path_factory.mktemp("library")
    kernels_wheel.build_library(kernels_wheel.TARGETS["linux-aarch64"], folder)
    return str(folder / "build" / LIBRARY_NAME)


def test_the_oldest_environment_has_the_first_release_that_is_declared_and_the_newest_that_of_the_suite() -> None:
    assert OLDEST in OLD_ORT
    assert OLDEST.version("onnxruntime") == f"{LOWEST}.0"
    assert NEWEST.version("onnxruntime") == pinned(ROOT / "constraints.txt", "onnxruntime")


@pytest.mark.requires("portability", "native", "torch", "onnx", "ort")
@pytest.mark.parametrize("op", OPS)
def test_kernels_give_what_function_bodies_give(op: str, worker: Worker, library: str) -> None:
    drawn = [valid(Dice(random.Random(f"{seed}"), np.random.default_rng(seed)), op) for seed in range(CALLS)]
    assert {array.dtype.name for call in drawn for array in call.feeds.values()} >= set(OPS[op].element_types)
    for call in drawn:
        operators.compare(call, results_in(worker, library, operators.model(call, "unknown"), call.feeds))


@pytest.mark.soak
@pytest.mark.requires("portability", "native", "torch", "onnx", "ort")
@pytest.mark.parametrize("environment", [AARCH64], indirect=True)
@pytest.mark.parametrize("op", OPS)
def test_kernels_for_aarch64_keep_the_contract(op: str, worker: Worker, library: str) -> None:
    from emulated_plugins import array_of
    from implementations import within_limit
    from one_node import one_node_model

    contract = load_contract(OPS[op])
    for case in (*contract.cases, *contract.small, *contract.larger):
        inputs = contract.inputs(case, "cpu")
        feeds = {name: array_of(x) for name, x in inputs.items()}
        model = one_node_model(op, feeds, body=False, **contract.attributes(case))
        exact = contract.exact(case, inputs).values()
        for found, expected in zip(results_in(worker, library, model, feeds), exact, strict=True):
            assert within_limit(contract, case, found, expected), case.name


def results_in(worker: Worker, library: str, content: bytes, given: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Results of the kernels in a worker, whose NumPy has no bfloat16: the model casts from and to float32."""
    import onnx

    model = onnx.load_from_string(content)
    feeds = {name: array.astype(np.float32) if array.dtype.kind == "V" else array for name, array in given.items()}
    for position, value in enumerate((*model.graph.input, *model.graph.output)):
        if value.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16:
            cast_outside(model.graph, value, is_input=position < len(model.graph.input))
    worker.call(
        {"verb": "open", "number": 0, "runtime": "onnxruntime", "library": library},
        {"model": np.frombuffer(model.SerializeToString(), np.uint8)},
    )
    return list(worker.call({"verb": "run", "number": 0}, feeds).values())


def cast_outside(graph: onnx.GraphProto, value: onnx.ValueInfoProto, *, is_input: bool) -> None:
    """Make an input or output of a graph one of float32, which keeps its name, and is cast to or from bfloat16."""
    from onnx import TensorProto, helper

    name, inside = value.name, f"{value.name} in bfloat16"
    value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [inside if given == name and node.domain else given for given in names]
    if is_input:
        graph.node.insert(0, helper.make_node("Cast", [name], [inside], to=TensorProto.BFLOAT16))
    else:
        graph.node.append(helper.make_node("Cast", [inside], [name], to=TensorProto.FLOAT))


@pytest.mark.requires("portability", "native", "torch", "onnx", "ort")
@pytest.mark.parametrize(("variant", "causal"), MODELS)
def test_every_variant_is_right_with_kernels(variant: str, causal: bool, worker: Worker, library: str) -> None:
    fields = {"causal": True} if causal else {}
    artifact = open_artifact(built_artifact(spec_of(variant, **fields)))
    cases = load_reference(artifact.reference_path)
    open_model = open_in_worker(worker, "onnxruntime", library=library)
    checks = verify_in_runtime(
        artifact.model_path, cases, artifact.spec, artifact.manifest.decisions, open_model
    ).checks
    assert checks
    assert [check for check in checks if check.status == "failed"] == []


@pytest.mark.requires("portability", "native", "torch", "onnx", "ort")
@pytest.mark.parametrize("variant", WITH_STATE)
def test_a_decode_step_continues_a_prompt(variant: str, worker: Worker, library: str) -> None:
    artifact = open_artifact(built_artifact(spec_of(variant, causal=True)))
    case = next(case for case in load_reference(artifact.reference_path) if case.keep.all() and case.keep.shape[1] > 8)
    step, prefill = (
        WorkerRunner(worker, "onnxruntime", path.read_bytes(), library=library)
        for path in (artifact.decode_step_path, artifact.prefill_path)
    )
    ids, (expected,) = case.inputs["input_ids"], case.outputs.values()
    batch, prompt = len(ids), 5
    states = [tensor for tensor in step.inputs if NEXT_PREFIX + tensor.name in {t.name for t in step.outputs}]
    assert states
    state = {tensor.name: np.zeros((batch, *tensor.dims[1:]), np.float32) for tensor in states}
    feeds = {"input_ids": ids[:, :prompt], "attention_mask": np.ones((batch, prompt), np.int64)}
    runner, found = prefill, []
    for position in (0, *range(prompt, ids.shape[1])):
        if position:
            runner, feeds = step, {"input_ids": ids[:, position : position + 1]}
        results = runner.run(feeds | state | {"position": np.full(batch, position, np.int64)})
        state = {tensor.name: results.pop(NEXT_PREFIX + tensor.name) for tensor in states}
        found.append(*results.values())
    assert relative_error(np.concatenate(found, axis=1)[0], expected[0])[0] <= arithmetic_limit(artifact.spec).value
