"""Commands on a finished artifact: every one of them, a request to a server, and those that a build suggests next."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from effexport.artifact import Artifact, open_artifact
from effexport.base.dtypes import DTYPES, numpy_dtype
from effexport.base.files import save_npz
from effexport.models.checkpoints.spec import CheckpointSpec
from effexport.models.user.spec import ModuleSpec
from effexport.proof.inputs import random_inputs

LENGTH = 6


@dataclass(frozen=True)
class Command:
    """A command line after `effexport`. refusal: words of the sentence with which it ends, and exit status 2; empty if
    it succeeds."""

    words: tuple[str, ...]
    refusal: str = ""


def commands_on(path: Path, folder: Path, checkpoint: Path | None = None) -> Iterator[Command]:
    """Every command, in an order in which they can run. folder: for what they read and write.

    checkpoint: the folder that the artifact was built from, of an artifact of one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    artifact, name = open_artifact(path), str(path)
    runtime = runtime_of(artifact)
    yield Command(("verify", name, "--runtime", runtime))
    for other in {runtime, *["openvino"] * (importlib.util.find_spec("openvino") is not None)}:
        yield Command(("verify", name, "--reference", "golden", "--runtime", other))
    yield Command(("verify", name, "--reference", f"{name}@{runtime}", "--runtime", runtime))
    inlined = str(folder / "inlined.onnx")
    yield Command(("inline", name, "-o", inlined))
    yield Command(("verify", name, "--reference", "golden", "--model", inlined, "--runtime", runtime))
    yield from refit_commands(artifact, folder, checkpoint)
    save_npz(inputs_of(artifact), folder / "in.npz")
    files = ("--input", str(folder / "in.npz"), "-o", str(folder / "out.npz"))
    yield Command(("run", name, *files, "--runtime", runtime))
    packaging = ("package", name, "--format", "triton", "--backend", "python", "-o", str(folder / "triton"))
    yield Command(packaging, "do not support bfloat16; build with" if artifact.spec.precision == "bf16" else "")
    yield Command(("inspect", name))
    yield Command(("report", name))


def runtime_of(artifact: Artifact) -> str:
    """The runtime of an artifact on a CPU: not ONNX Runtime for bfloat16, which it cannot compute there."""
    return "openvino" if artifact.spec.precision == "bf16" else "ort"


def refit_commands(artifact: Artifact, folder: Path, checkpoint: Path | None) -> Iterator[Command]:
    """Other weights, or the reason why the artifact cannot have any; and what then follows."""
    new, record = folder / "refitted", artifact.manifest.quantization
    if isinstance(artifact.spec.model, ModuleSpec):
        given, refusal = ("--weights", "new.safetensors"), "code that an artifact does not hold; name the module"
    elif record is not None and record.scales == "static":
        given, refusal = ("--weights", "new.safetensors"), "is quantised by what samples said about its weights"
    elif isinstance(artifact.spec.model, CheckpointSpec):
        assert checkpoint is not None
        given, refusal = ("--checkpoint", str(other_checkpoint(checkpoint, folder))), ""
    else:
        given, refusal = ("--weights", str(other_weights(artifact, folder))), ""
    yield Command(("refit", str(artifact.path), *given, "-o", str(new)), refusal)
    if not refusal:
        yield Command(("verify", str(new), "--reference", "golden", "--runtime", runtime_of(artifact)))


def other_weights(artifact: Artifact, folder: Path) -> Path:
    """A file with weights of another seed for the artifact of a variant."""
    from safetensors.torch import save_file

    from effexport.export.module_source import module_from_seed

    path = folder / "new.safetensors"
    save_file(module_from_seed(replace(artifact.spec, seed=artifact.spec.seed + 1)).state_dict(), path)
    return path


def other_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint with slightly other weights."""
    from safetensors.numpy import load_file, save_file

    path = folder / "checkpoint"
    shutil.copytree(checkpoint, path)
    weights = {name: array * array.dtype.type(1.01) for name, array in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def inputs_of(artifact: Artifact) -> dict[str, Any]:
    """Inputs that the signature of an artifact allows: a batch of two where it is free, and a few tokens."""
    spec = artifact.spec
    length = spec.model.fixed_seq_len or min(LENGTH, spec.model.max_seq_len or LENGTH)
    return random_inputs(spec, np.random.default_rng(0), 2, length, None)


def next_commands(printed: str) -> list[list[str]]:
    """The commands after "Next:" in what `build` and `refit` have printed, as words; without those for a
    machine with a GPU."""
    found = re.findall(r"Next: (.*), or open .*/report\.html$", printed, re.MULTILINE)
    commands = [text for line in found for text in re.split(r" or (?=effexport )", line)]
    return [shlex.split(text)[1:] for text in commands if text.startswith("effexport ")]


def infer_request(url: str, model: str, feeds: Mapping[str, Any]) -> urllib.request.Request:
    """A request of the V2 protocol with binary tensors, which every element type can be."""
    data = [array.tobytes() for array in feeds.values()]
    head = {
        "inputs": [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": DTYPES[array.dtype.name].protocol,
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in feeds.items()
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
    return urllib.request.Request(f"{url}/v2/models/{model}/infer", b"".join([text, *data]), headers)


def infer(url: str, artifact: Artifact) -> dict[str, Any]:
    """The answer of a server that has an artifact under the name of its folder."""
    request = infer_request(url, artifact.path.name, inputs_of(artifact))
    with urllib.request.urlopen(request, timeout=60) as answer:
        body, length = answer.read(), int(answer.headers["Inference-Header-Content-Length"])
    outputs, place = {}, length
    names = {dtype.protocol: dtype.name for dtype in DTYPES.values()}
    for output in json.loads(body[:length])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        array = np.frombuffer(body[place : place + size], numpy_dtype(names[output["datatype"]]))
        outputs[output["name"]] = array.reshape(output["shape"])
        place += size
    return outputs
