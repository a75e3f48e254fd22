"""An artifact's outputs as transformers knows them: their class, and the file export.json, with which
`ExportedModel.from_pretrained` of transformers 5 opens an artifact folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effexport.base.dtypes import TensorInfo
from effexport.base.spec import BuildSpec
from effexport.base.version import __version__

EXPORT_JSON = "export.json"
SCHEMA_VERSION = 1
# As `torch.utils._pytree.treespec_dumps` numbers the format of its text.
TREESPEC_PROTOCOL = 1


@dataclass(frozen=True)
class OutputClass:
    """A class of `transformers.modeling_outputs`. fields: its field for each output of the graph, in their order."""

    name: str
    fields: tuple[str, ...]


# output names of the graph → the class, for outputs that belong to one class only
BY_OUTPUTS: dict[tuple[str, ...], OutputClass] = {
    ("last_hidden_state",): OutputClass("BaseModelOutput", ("last_hidden_state",)),
    ("last_hidden_state", "pooler_output"): OutputClass(
        "BaseModelOutputWithPooling", ("last_hidden_state", "pooler_output")
    ),
    ("embedding",): OutputClass("BaseModelOutputWithPooling", ("pooler_output",)),
    ("start_logits", "end_logits"): OutputClass("QuestionAnsweringModelOutput", ("start_logits", "end_logits")),
}
# task of a checkpoint → the class around its `logits`
BY_TASK: dict[str, str] = {
    "masked-lm": "MaskedLMOutput",
    "lm-head": "CausalLMOutput",
    "seq2seq-lm": "Seq2SeqLMOutput",
    "sequence-classification": "SequenceClassifierOutput",
    "token-classification": "TokenClassifierOutput",
    "multiple-choice": "MultipleChoiceModelOutput",
}


def output_class(spec: BuildSpec) -> OutputClass | None:
    """The class of what a model returns; None if transformers has none with these outputs."""
    names = tuple(tensor.name for tensor in spec.outputs)
    if names == ("logits",):
        unnamed = "CausalLMOutput" if spec.model.is_causal else "MaskedLMOutput"
        return OutputClass(BY_TASK.get(spec.model.task, unnamed), names)
    return BY_OUTPUTS.get(names)


def write_export_json(spec: BuildSpec, model: Path) -> None:
    """Write export.json beside an ONNX file, if its outputs have a class in transformers."""
    if (outputs := output_class(spec)) is None:
        return
    (model.parent / EXPORT_JSON).write_text(export_json(spec, model.name, outputs), encoding="utf-8")
    # transformers does not open a model without this file, even if all weights are in the model
    model.with_name(f"{model.name}.data").touch()


def export_json(spec: BuildSpec, model: str, outputs: OutputClass) -> str:
    """The contents of export.json. model: the name of the ONNX file."""
    metadata = {
        "architecture": transformers_class(spec),
        "packages": {"effexport": __version__},
        "export_dtype": spec.dtype,
        "export_device": "cpu",
        "kwargs": {tensor.name: described(tensor, spec) for tensor in spec.inputs},
        "out_spec": treespec(outputs),
    }
    values = {
        "schema_version": SCHEMA_VERSION,
        "export_format": "onnx",
        "components": {"model": {"file": model, "metadata": metadata}},
    }
    return json.dumps(values, indent=2) + "\n"


def transformers_class(spec: BuildSpec) -> str | None:
    """The class that transformers loads the checkpoint with; None if the model is not a checkpoint."""
    return spec.model.transformers_class or None


def described(tensor: TensorInfo, spec: BuildSpec) -> dict[str, Any]:
    sizes = {"batch": spec.batch, "seq": spec.model.seq_len}
    shape = [sizes.get(dim, 1) if isinstance(dim, str) else dim for dim in tensor.dims]
    return {"rank": len(shape), "shape": shape, "dtype": tensor.dtype}


def treespec(outputs: OutputClass) -> str:
    """A container of `transformers.modeling_outputs` with a tensor in each field, as PyTorch writes its structure."""
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    container = {
        "type": f"transformers.modeling_outputs.{outputs.name}",
        "context": json.dumps(list(outputs.fields)),
        "children_spec": [leaf for _ in outputs.fields],
    }
    return json.dumps([TREESPEC_PROTOCOL, container])
