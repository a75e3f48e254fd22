"""Runs in .venv-transformers5: opens artifacts with transformers 5 and sentence-transformers, and prints the answers as
JSON. The argument is a JSON object: for each class of transformers, the folders of a checkpoint and of its artifact."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import sentence_transformers
import torch
import transformers
from pipeline_questions import TEXTS, TRANSFORMERS_5, likeliest_tokens
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers.exporters import ExportedModel

import effexport
from effexport.base.errors import KernelWarning
from effexport.plugins import get_library_path
from effexport.proof.cases import load_reference

EMBEDDED = [*TEXTS, "The quick brown fox jumps over the lazy dog, and the dog is asleep. " * 4]


class Messages(logging.Handler):
    """Collects what transformers logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def pipeline_answers(folders: Mapping[str, Any]) -> dict[str, Any]:
    """By task, what a pipeline with the drop-in answers."""
    found = {}
    for task, kind, ask in TRANSFORMERS_5:
        artifact = folders[kind]["artifact"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(artifact, model_max_length=40)
        found[task] = ask(transformers.pipeline(task, model=effexport.hf.model(artifact), tokenizer=tokenizer))
    return found


def exported_model(artifact: str, library: Path | None) -> dict[str, Any]:
    """The error of ExportedModel against the golden outputs, and its class of outputs, which the drop-in shares."""
    options = onnxruntime.SessionOptions()
    if library is not None:
        options.register_custom_ops_library(str(library))
    exported = ExportedModel.from_pretrained(artifact, session_options=options)
    worst = 0.0
    for case in load_reference(Path(artifact) / "reference.safetensors"):
        inputs = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
        outputs, drop_in = exported(**inputs), effexport.hf.model(artifact)(**inputs)
        assert (type(outputs), list(outputs)) == (type(drop_in), list(drop_in))
        for name, expected in case.outputs.items():
            for sample in range(len(expected)):
                found, wanted = (case.kept(name, array, sample) for array in (outputs[name].numpy(), expected))
                worst = max(worst, float(np.abs(found - wanted).max()))
    return {"worst": worst, "class": type(outputs).__name__}


def embeddings(folders: Mapping[str, str], *, pooled: bool) -> list[Any]:
    """Vectors of sentence-transformers from an artifact, and from its checkpoint."""
    pooling = Pooling(32, "mean")
    ours = [effexport.hf.SentenceModule(folders["artifact"]), *([] if pooled else [pooling])]
    theirs = [Transformer(folders["checkpoint"], processor_kwargs={"model_max_length": 40}), pooling]
    return [SentenceTransformer(modules=modules).encode(EMBEDDED).tolist() for modules in (ours, theirs)]


def generated(artifact: str) -> dict[str, Any]:
    """A prompt continued by `generate` of transformers, and by the tokens that the artifact finds likeliest."""
    prompt = torch.tensor([[5, 60, 17, 120]])
    options = {"max_new_tokens": 5, "do_sample": False}
    return {
        "found": effexport.hf.model(artifact).generate(prompt, **options).tolist(),
        "expected": likeliest_tokens(artifact, prompt.numpy(), 5),
    }


def main() -> None:
    warnings.simplefilter("ignore", KernelWarning)
    transformers.utils.logging.disable_progress_bar()
    folders, messages, library = json.loads(sys.argv[1]), Messages(), get_library_path()
    pooled = folders.pop("pooled")
    logging.getLogger("transformers").addHandler(messages)
    answer = {
        "versions": [transformers.__version__, sentence_transformers.__version__, torch.__version__],
        "pipelines": pipeline_answers(folders),
        "logged": messages.texts,
        "exported": {kind: exported_model(folder["artifact"], None) for kind, folder in folders.items()},
        "kernels": library and {kind: exported_model(folder["artifact"], library) for kind, folder in folders.items()},
        "generated": generated(folders["ReformerModelWithLMHead"]["artifact"]),
        "embeddings": {
            "pooled": embeddings(pooled, pooled=True),
            "token embeddings": embeddings(folders["NystromformerModel"], pooled=False),
        },
    }
    print(json.dumps(answer, default=lambda number: number.item()))


main()
