"""The parity check catches what wrong exporters do: each fault of planted_faults.py, wherever it can occur."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from fused_faults import ALL_FAULTS, padding_decays
from planted_faults import CONFIGURATIONS, VARIANTS, Fault, Graph, plant

from effexport.artifact import PREFILL, Artifact, artifact_in_progress
from effexport.base.errors import EffexportError
from effexport.proof.candidate import ModelCandidate, open_in_ort
from effexport.proof.cases import load_reference
from effexport.proof.check import Kind
from effexport.proof.checks.arithmetic import check_float32_ops
from effexport.proof.verify import run_checks, verify_candidate, verify_decoding
from effexport.runners.options import RunOptions
from effexport.runners.runner import limits_from_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
REFUSED = "does not run"
# Variants that the table knows: a fault that applies to one of them names it.
NAMED = {name for fault in ALL_FAULTS if set(fault.variants) != set(VARIANTS) for name in fault.variants}
CONTROL = Fault("nothing", "no damage at all", lambda graph: True, configurations=tuple(CONFIGURATIONS))


FAST: tuple[pytest.MarkDecorator, ...] = ()
SOAK = (pytest.mark.soak,)


def artifact_of(built: Built, name: str, configuration: str) -> Artifact:
    scope, fields = CONFIGURATIONS[configuration]
    return built(name, scope, **fields)


def failures(artifact: Artifact, model: Path) -> set[str]:
    """Names of the checks that fail, as `effexport verify --model` would show them."""
    cases = load_reference(artifact.reference_path)
    settings = RunOptions(threads=1)
    try:
        checks = verify_candidate(model, cases, artifact.spec, artifact.manifest.hash_values, settings).checks
    except EffexportError:
        return {REFUSED}
    assert checks
    return {check.name for check in checks if check.status == "failed"}


def first_failure(artifact: Artifact, model: Path) -> str | None:
    """Name of the first check of `verify_candidate` that fails, or None. The checks after it do not run."""
    cases = load_reference(artifact.reference_path)
    settings = RunOptions(threads=1, memory_arena=False)
    try:
        candidate = ModelCandidate(
            model, artifact.manifest.hash_values, limits_from_spec(artifact.spec), open_in_ort(settings)
        )
        checks = itertools.chain(run_checks(candidate, cases, artifact.spec), check_float32_ops(model, artifact.spec))
        return next((check.name for check in checks if check.status == "failed"), None)
    except EffexportError:
        return REFUSED


def places() -> Iterator[tuple[str, str]]:
    return ((name, configuration) for name in VARIANTS for configuration in CONFIGURATIONS)


def planted(*, no_ops: bool) -> Iterator[Any]:
    """Every fault in every place where it can occur. Its first place in the first variant is in every run, the
    rest in the soak run."""
    seen: set[str] = set()
    for name, configuration in places():
        for fault in ALL_FAULTS:
            if fault.applies(name, configuration) and (name in fault.no_ops) == no_ops:
                first = next(other for other in CONFIGURATIONS if fault.applies(name, other))
                label = f"{name}-{configuration}-{fault.name.replace(' ', '-')}"
                marks = FAST if configuration == first and fault.name not in seen else SOAK
                seen |= {fault.name} if configuration == first else set()
                yield pytest.param(name, configuration, fault, id=label, marks=marks)


FAULTY = list(planted(no_ops=False))


def healthy() -> Iterator[object]:
    """Every place, in the first part of the suite that plants a fault there, and so builds its artifact."""
    for place in places():
        if CONTROL.applies(*place):
            parts = [case.marks for case in FAULTY if case.values[:2] == place]
            yield pytest.param(*place, marks=min(parts, key=(FAST, SOAK).index, default=SOAK))


@pytest.mark.parametrize(("name", "configuration", "fault"), FAULTY)
def test_a_planted_fault_is_caught(built: Built, tmp_path: Path, name: str, configuration: str, fault: Fault) -> None:
    artifact = artifact_of(built, name, configuration)
    model = plant(fault, artifact, tmp_path / "planted")
    assert model is not None, f"{fault.name} found nothing to damage"
    assert first_failure(artifact, model), f"{fault.name} escapes: {fault.description}"


@pytest.mark.slow
def test_padding_that_decays_the_state_is_caught_in_the_prefill(built: Built, tmp_path: Path) -> None:
    artifact = built("gated-delta", "attention")
    folder, cases = tmp_path / "planted", load_reference(artifact.reference_path)
    shutil.copytree(artifact.path, folder)
    graph = Graph(onnx.load(str(artifact.prefill_path)), artifact.spec)
    assert padding_decays(graph)
    onnx.save(graph.finished(), str(folder / PREFILL))
    checks = verify_decoding(artifact_in_progress(folder, artifact.spec), cases, RunOptions(threads=1)).checks
    assert {check.kind for check in checks if check.status == "failed"} == {Kind.PREFILL}


@pytest.mark.parametrize(("name", "configuration"), list(healthy()))
def test_a_model_without_a_fault_passes_on_the_same_way(
    built: Built, tmp_path: Path, name: str, configuration: str
) -> None:
    artifact = artifact_of(built, name, configuration)
    model = plant(CONTROL, artifact, tmp_path / "planted")
    assert model is not None
    assert failures(artifact, model) == set()


@pytest.mark.parametrize(("name", "configuration", "fault"), list(planted(no_ops=True)))
def test_an_edit_that_changes_nothing_by_the_mathematics_raises_no_alarm(
    built: Built, tmp_path: Path, name: str, configuration: str, fault: Fault
) -> None:
    artifact = artifact_of(built, name, configuration)
    model = plant(fault, artifact, tmp_path / "planted")
    assert model is not None
    assert failures(artifact, model) == set(), f"declared to change nothing, since {fault.no_ops[name]}"


# those variants whose artifacts other tests here build in the same part of the suite
@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        *(pytest.param(name, marks=SOAK) for name in VARIANTS if name != "softmax"),
    ],
)
def test_a_fault_finds_nothing_where_it_is_not_declared_or_is_caught_there(
    built: Built, tmp_path: Path, name: str
) -> None:
    """Otherwise the table would leave places out where the fault can occur; a new variant is in none of its lists."""
    for configuration in ("attention", "encoder"):
        artifact = artifact_of(built, name, configuration)
        data = artifact.model_path.read_bytes()
        for fault in ALL_FAULTS:
            if fault.damage is None or name in fault.variants or configuration not in fault.configurations:
                continue
            graph = Graph(onnx.load_from_string(data), artifact.spec)
            if fault.damage(graph):
                assert name not in NAMED, f"{fault.name} applies to {name} {configuration} too"
                model = tmp_path / "model.onnx"
                onnx.save(graph.finished(), str(model))
                assert first_failure(artifact, model), f"{fault.name} escapes in {name} {configuration}"


def test_each_fault_of_the_table_applies_somewhere() -> None:
    names = [fault.name for fault in ALL_FAULTS]
    assert len(set(names)) == len(names)
    for fault in ALL_FAULTS:
        assert any(fault.applies(*place) for place in places()), fault.name
        assert set(fault.no_ops) <= set(fault.variants) <= set(VARIANTS)
