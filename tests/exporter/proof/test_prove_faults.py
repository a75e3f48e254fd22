"""The faults of planted_faults.py, planted into files of torch.onnx: prove finds all that change what is computed."""

from __future__ import annotations

import functools
from pathlib import Path

import onnx
import pytest
import torch
from planted_faults import FAULTS, Graph
from slow_cases import soak
from small_specs import spec_of

from effexport.base.errors import EffexportError
from effexport.base.quiet import quiet
from effexport.export.onnx_graph import module_of_node
from effexport.models.encoder.module import module_from_spec
from effexport.plugins.ops import MODULE_KEY
from effexport.proof.candidate import ModelCandidate
from effexport.proof.prove import ProofRequest
from effexport.proof.reference_choice import references_from_choice
from effexport.proof.verify import run_checks
from effexport.runners.artifact_runner import model_opener
from effexport.runners.options import RunOptions
from effexport.runners.runner import limits_from_spec

pytestmark = [pytest.mark.requires("torch", "onnx", "ort"), pytest.mark.slow]
OPTIONS = RunOptions(threads=1, memory_arena=False)
BATCH, LENGTH = 2, 24


def torch_file(module: torch.nn.Module, example: dict[str, torch.Tensor], path: Path) -> Path:
    """The file of torch.onnx, whose nodes say which module they came from where the faults look for it."""
    free = dict.fromkeys(range(2), torch.export.Dim.DYNAMIC)
    shapes = dict.fromkeys(example, free)
    with quiet(streams=True):
        torch.onnx.export(
            module,
            tuple(example.values()),
            str(path),
            dynamo=True,
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
            opset_version=20,
        )
    model = onnx.load(str(path))
    for node in model.graph.node:
        node.metadata_props.add(key=MODULE_KEY, value=module_of_node(node))
    onnx.save(model, str(path))
    return path


@pytest.mark.parametrize(("name", "least"), [("softmax", 35), *map(soak, [("linear", 35), ("aft-full", 33)])])
def test_every_fault_in_a_file_of_torch_is_caught(name: str, least: int, tmp_path: Path) -> None:
    spec = spec_of(name, "encoder", fused=False)
    module = module_from_spec(spec.model, 0)
    ids = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % spec.model.vocab_size
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    path = torch_file(module, example, tmp_path / "model.onnx")
    asked = ProofRequest(path, module, example, None, False, OPTIONS, lambda stage: None)
    candidate, request = asked.subject()
    artifact = candidate.artifact
    references = references_from_choice(request.choice, artifact, request.source, (), asked.on_stage)
    cases = [case for reference in references for case in reference.cases]
    limits = limits_from_spec(artifact.spec)

    @functools.cache
    def failure(file: Path) -> str:
        """The first check that fails; "" if all pass."""
        try:
            opened = ModelCandidate(file, (), limits, model_opener(OPTIONS))
            checks = run_checks(opened, cases, artifact.spec)
            return next((check.kind for check in checks if check.status == "failed"), "")
        except EffexportError as error:
            return f"does not run: {error}"

    assert failure(path) == ""
    caught, missed = {}, []
    for number, fault in enumerate(fault for fault in FAULTS if fault.applies(name, "encoder") and fault.damage):
        graph = Graph(onnx.load(str(path)), spec)
        assert fault.damage is not None
        if not fault.damage(graph):
            continue
        damaged = tmp_path / f"{number}.onnx"
        onnx.save(graph.finished(), str(damaged))
        if found := failure(damaged):
            caught[fault.name] = found
        elif name not in fault.no_ops:
            missed.append(fault.name)
    assert missed == []
    assert len(caught) >= least, caught
