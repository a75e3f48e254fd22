"""The commands of docs/ run as they stand, page by page, each in a folder with what its reader is said to have."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from readme_run import Shell, on_port
from safetensors.torch import save_file
from serving_load import free_ports
from text_checkpoints import checkpoint
from torch import nn

import effexport
from effexport.base.spec import build_spec_from_options
from effexport.export.module_source import module_from_seed

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "tour.md" and "```sh" in path.read_text())
# Parts of commands that are not run, and why.
NOT_RUN = {
    "pip install": "the environment of the tests has the extras",
    "docker ": "needs Docker",
    "ort-cuda": "needs a GPU",
    "--runtime trt-rtx": "needs a GPU",
    "plugins build --cuda": "needs nvcc; tests/plugins/test_cuda_kernels.py compiles them",
    "--sigstore": "needs a browser; tests/exporter/test_keyless.py has a stand-in",
    "--identity-provider": "as --sigstore",
    " ray ": "needs two machines; tests/exporter/bench/test_sweep_cluster.py has three nodes in one",
    "--address": "as `ray start`",
    "--ray": "tests/exporter/serving/test_ray_serving.py",
    "scripts/": "minutes to hours; the scripts have tests of their own",
    "build/trained": "needs hours of training before",
    "bench --": "minutes to hours of measurements; tests/exporter/bench runs the same options in small sizes",
    "sweep.toml": "the tour runs a sweep; tests/exporter/bench/test_sweep.py has this file",
    "ORT=/usr": "tests/test_examples.py compiles the program",
    "examples/cpp/run.cc": "as ORT=/usr",
    "./run ": "as ORT=/usr",
    "--only ": "needs the sweep",
    "refit artifacts/mine": "needs other weights than the command before; tests/exporter/test_module_again.py",
}
# Names that stand for the reader's own.
STANDS_FOR = {"DIR": "my-checkpoint", "NAME": "my-checkpoint", "artifacts/NAME": "artifacts/my-checkpoint"}
CAUSAL = {"lsh": False, "nystrom": False, "softmax": True, "linear": True}
SMALL = {"dim": 32, "heads": 2, "layers": 1, "seq_len": 64, "lm_head": True}
WIDE = {"variant": "lsh", "dim": 512}
# The page → a file that it names → what that is.
FILES = {
    "platforms": {"optimised.onnx": "artifacts/nystrom/model.onnx"},
    "prove": dict.fromkeys(("small.onnx", "large.onnx", "lsh.onnx"), "artifacts/lsh/model.onnx"),
    "report": {"optimised.onnx": "artifacts/lsh/model.onnx", "old": "artifacts/lsh"},
}
MODULE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(2, 10, 8)
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the artifacts and the files that the pages name."""
    top = tmp_path_factory.mktemp("prepared")
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy2(ROOT / name, top)
    shutil.copytree(ROOT / "examples/my_operator", top, dirs_exist_ok=True)
    for name, causal in CAUSAL.items():
        effexport.build(variant=name, output=top / "artifacts" / name, causal=causal, **SMALL)
    shutil.copytree(top / "artifacts/linear", top / "artifacts/writer")
    save_weights(top / "epoch2.safetensors", SMALL | {"variant": "lsh"}, seed=7)
    save_weights(top / "model.safetensors", SMALL | {"variant": "linear", "causal": True})
    for name, fields in {"trained": WIDE, "mine": SMALL | {"variant": "nystrom"}}.items():
        save_weights(top / f"{name}.safetensors", fields)
    for name, fields in {"model": WIDE, "mine": SMALL | {"variant": "nystrom"}}.items():
        (top / f"{name}.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items()))
    ids = np.random.default_rng(0).integers(2, 258, (8, 33))
    np.savez(top / "listops.npz", input_ids=ids[:, :-1], labels=ids[:, 1:])
    kinds = {"mlm": "MaskedLM", "qa": "QuestionAnswering", "classifier": "SequenceClassification"}
    for name, kind in kinds.items():
        checkpoint(top / "checkpoints" / name, f"NystromformerFor{kind}", "albert")
        effexport.build(checkpoint=top / "checkpoints" / name, output=top / "artifacts" / name)
    effexport.build(
        checkpoint=top / "checkpoints/mlm", task="base", pool="mean", normalize=True, output=top / "artifacts/embedder"
    )
    shutil.copytree(top / "checkpoints/mlm", top / "my-checkpoint")
    shutil.copytree(top / "artifacts/mlm", top / "artifacts/my-checkpoint")
    checkpoint(top / "epoch2", "NystromformerForMaskedLM", "albert", seed=1)
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line[:40] for line in lines if line)[:2000]
    for name in ("held-out.txt", "chapter.txt", "book.txt"):
        (top / name).write_text(text)
    (top / "lines.txt").write_text(text)
    rows = [{"text": line, "label": f"LABEL_{i % 2}"} for i, line in enumerate(text.splitlines())]
    (top / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (top / "my_package").mkdir()
    for name in ("my_model.py", "nets.py", "my_package/models.py"):
        (top / name).write_text(MODULE)
    exported(top, "my_model.py", "artifacts/mine")
    return top


def save_weights(path: Path, fields: dict[str, Any], seed: int = 0) -> None:
    """Weights of a model that the fields describe, without the rotations of hashes, which a spec draws."""
    spec = replace(build_spec_from_options(fields, None), seed=seed)
    weights = module_from_seed(spec).state_dict()
    save_file({name: value for name, value in weights.items() if not name.endswith("rotations")}, path)


def exported(top: Path, file: str, folder: str) -> None:
    names: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {}
    exec((top / file).read_text(), names)
    module, example = names["make"]()
    effexport.export(module, example, top / folder)
    save_file(module.state_dict(), top / "own.safetensors")
    onnx.save(onnx.load(top / folder / "model.onnx"), top / "model.onnx")


def commands_of(page: Path) -> list[str]:
    """The commands of the page's blocks for a shell, without comments; a loop is one."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in re.split(r"(?<!\\)\n(?!  |done)", block)]
    return [command for line in lines if (command := re.split(r"(?:^|  )#", line)[0].rstrip())]


def why_not(command: str) -> str:
    return next((reason for part, reason in NOT_RUN.items() if part in f" {command} "), "")


def adapted(command: str) -> str:
    """The command with the reader's own names, leave to replace what the folder has, and one server at a time."""
    words = [STANDS_FOR.get(word, word) for word in command.split(" ")]
    if re.match(r"effexport (build|inline|report .* -o|run .* -o)", command) and "--force" not in words:
        words.insert(2, "--force")
    text = " ".join(words)
    if command.startswith("effexport serve"):
        return f"kill $! 2> /dev/null; wait; {text} &"
    return text.replace("curl ", "curl -sf --retry 60 --retry-delay 1 --retry-connrefused ", 1)


def test_parts_that_are_not_run_are_on_some_page() -> None:
    lines = [f" {line} " for page in PAGES for line in commands_of(page)]
    assert [part for part in NOT_RUN if not any(part in line for line in lines)] == []


@pytest.mark.soak
@pytest.mark.requires("torch", "onnx", "ort", "native", "serve", "transformers", "openvino", "model-signing")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, prepared: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(prepared, tmp_path / "folder")
    for name, source in FILES.get(page.stem, {}).items():
        copy = shutil.copytree if (folder / source).is_dir() else shutil.copy2
        copy(folder / source, folder / name)
    shell, (port,) = Shell(folder), free_ports(1)
    try:
        shell.run(f'PATH="{Path(sys.executable).parent}:$PATH"; GITHUB_STEP_SUMMARY=summary.md')
        for command in commands_of(page):
            if why_not(command):
                continue
            status, output = shell.run(on_port(adapted(command), port))
            assert status == 0, f"$ {command}\n{output}"
    finally:
        shell.close()
