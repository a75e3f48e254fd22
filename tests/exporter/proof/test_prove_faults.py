"""Faults planted into files that other exporters make: prove finds all that change what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
import torch
from file_faults import FILE_FAULTS, FileFault, opened, planted
from file_judge import LIMIT, Judge
from others.files import OTHERS, Other, by_torch
from planted_faults import FAULTS, Graph
from slow_cases import soak
from small_specs import spec_of

from effexport.base.quiet import quiet
from effexport.export.onnx_graph import module_of_node
from effexport.models.encoder.module import module_from_spec
from effexport.plugins.ops import MODULE_KEY

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
BATCH, LENGTH = 2, 24


def torch_file(module: torch.nn.Module, example: dict[str, torch.Tensor], path: Path) -> Path:
    """The file of torch.onnx, whose nodes say which module they came from where the faults look for it."""
    with quiet(streams=True):
        by_torch(module, example, path)
    model = onnx.load(str(path))
    for node in model.graph.node:
        node.metadata_props.add(key=MODULE_KEY, value=module_of_node(node))
    onnx.save(model, str(path))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("softmax", 34), *map(soak, [("linear", 34), ("aft-full", 32)])])
def test_every_fault_in_a_file_of_torch_is_caught(name: str, least: int, tmp_path: Path) -> None:
    spec = spec_of(name, "encoder", fused=False)
    module = module_from_spec(spec.model, 0)
    ids = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % spec.model.vocab_size
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    path = torch_file(module, example, tmp_path / "model.onnx")
    judge = Judge(path, module, example)
    assert judge.failure(path) == ""
    caught, missed = {}, []
    for number, fault in enumerate(fault for fault in FAULTS if fault.applies(name, "encoder") and fault.damage):
        graph = Graph(onnx.load(str(path)), spec)
        assert fault.damage is not None
        if not fault.damage(graph):
            continue
        damaged = tmp_path / f"{number}.onnx"
        onnx.save(graph.finished(), str(damaged))
        if found := judge.failure(damaged):
            caught[fault.name] = found
        elif name not in fault.no_ops:
            missed.append(fault.name)
    # an answer in float16 is held to the limits of float16, which a note says
    assert missed == ["dtype changed"]
    assert len(caught) >= least, caught


def escaping(other: Other, faults: Sequence[FileFault], folder: Path) -> tuple[int, dict[str, float]]:
    """The number of faults that find a place in a file, and those that no check finds, with what they change."""
    with quiet(streams=True):
        path = other.export(other.make(), other.inputs(), folder / "model.onnx")
    judge = Judge(path, other.called(other.make()), dict(other.inputs()))
    assert judge.failure(path) == ""
    count, missed = 0, {}
    for fault in faults:
        if damaged := planted(fault.damage, opened(path), folder / "damaged.onnx"):
            count += 1
            if judge.failure(damaged) == "":
                missed[fault.name] = judge.effect(damaged)
    return count, missed


DAMAGED = [other for other in OTHERS if other.is_faulted and not other.environment]
SAMPLE = ("weight negated", "bias lost", "gates exchanged", "filter backwards", "tokens shifted", "not a number")


@pytest.mark.parametrize("name", ["LSTM tagger", "Convolutions"])
def test_faults_in_a_file_of_torchscript_are_caught(name: str, tmp_path: Path) -> None:
    other = next(other for other in OTHERS if other.name == name)
    count, missed = escaping(other, [fault for fault in FILE_FAULTS if fault.name in SAMPLE], tmp_path)
    assert missed == {}
    assert count >= 4


@pytest.mark.soak
@pytest.mark.parametrize("other", DAMAGED, ids=lambda other: other.key)
def test_every_kind_of_fault_in_a_file_is_caught(other: Other, tmp_path: Path) -> None:
    """Files of torch.onnx; scripts/prove_others.py does the same with those of other packages."""
    count, missed = escaping(other, FILE_FAULTS, tmp_path)
    assert {name: change for name, change in missed.items() if not change <= LIMIT} == {}
    assert count >= 40
