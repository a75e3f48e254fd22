"""An artifact of every kind goes through every command, a server, and what the build has named as next."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import readme_run
from artifact_commands import commands_on, infer, next_commands, runtime_of
from checkpoint_artifacts import checkpoint_artifact
from serving_load import running_server
from slow_cases import slow_after

from effexport.artifact import Artifact, open_artifact
from effexport.base.files import load_npz

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "serve")
Cli = Callable[..., Any]
Built = Callable[..., Artifact]

MODELS = textwrap.dedent('''
    """Models of users, each with example inputs."""

    import torch
    from torch import nn


    class Image(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.head = nn.Conv2d(3, 16, 4, stride=4), nn.Linear(16, 16)

        def forward(self, image):
            return self.head(self.patches(image).flatten(2).mean(-1))


    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 3)

        def forward(self, words, attention_mask):
            return self.head(self.table(words) * attention_mask[..., None])


    class Vectors(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x)


    class Positions(Vectors):
        """Takes exactly 40 tokens."""

        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(40, 8))

        def forward(self, x):
            return self.layer(x + self.positions)


    class ChannelsOfPositions(nn.Module):
        """Takes exactly 40 tokens, in the last axis, fewer than it has channels."""

        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(64, 40))

        def forward(self, x):
            return (x + self.positions).mean(-1)


    class MaskedPositions(Positions):
        def forward(self, x, attention_mask):
            return super().forward(x * attention_mask[..., None])


    class SeveralOutputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 3)

        def forward(self, words, tags):
            hidden = self.table(words) * tags[..., None]
            logits = self.head(hidden)
            return {"logits": logits, "best": logits.argmax(-1), "is_long": hidden.norm(dim=-1) > 3,
                    "pooled": hidden.mean(1), "bias": self.head.bias.sum()}


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 48)

        def forward(self, x, keep):
            query, key, value = (part[:, None] for part in self.layer(x).chunk(3, -1))
            return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=keep)[:, 0]


    class UsualMask(Attention):
        def forward(self, x, attention_mask):
            return super().forward(x, attention_mask != 0)


    class PaddingMask(Attention):
        def forward(self, x, key_padding_mask):
            return super().forward(x, ~key_padding_mask[:, None, None])


    class InvertedMask(Attention):
        """Ones are padding, whatever the name says; described by a table."""

        def forward(self, x, attention_mask):
            return super().forward(x, (attention_mask == 0)[:, None, None])


    class Points(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, image, points):
            return self.layer(image).mean((1, 2)), self.layer(points)


    class Scaled(nn.Module):
        def forward(self, scale, x):
            return x * scale


    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 3)

        def forward(self, user):
            return self.table(user)


    def image():
        return Image(), torch.randn(2, 3, 12, 12)

    def tokens():
        ones = torch.ones(2, 20, dtype=torch.int64)
        return Tokens(), {"words": torch.randint(0, 30, (2, 20)), "attention_mask": ones}

    def vectors():
        return Vectors(), torch.randn(2, 20, 8)

    def one_sequence():
        return Vectors(), torch.randn(20, 8), {"x": {0: "seq"}}

    def one_table():
        return Vectors(), torch.randn(20, 8), {"x": {}}

    def batch_second():
        return Vectors(), torch.randn(7, 2, 8), {"x": {1: "batch"}}

    def sequence_first():
        return Vectors(), torch.randn(20, 3, 8), {"x": {0: "seq", 1: "batch"}}

    def positions():
        return Positions(), torch.randn(2, 40, 8)

    def channels_of_positions():
        return ChannelsOfPositions(), torch.randn(2, 64, 40), {"x": {0: "batch", 2: "seq"}}

    def masked_positions():
        return MaskedPositions(), {"x": torch.randn(2, 40, 8), "attention_mask": torch.ones(2, 40, dtype=torch.int64)}

    def several_outputs():
        return SeveralOutputs(), {"words": torch.randint(0, 30, (2, 20)), "tags": torch.ones(2, 20, dtype=torch.int32)}

    def mask_of_four_axes():
        return UsualMask(), {"x": torch.randn(2, 20, 16), "attention_mask": torch.ones(2, 1, 1, 20, dtype=torch.int64)}

    def mask_of_pairs():
        return UsualMask(), {"x": torch.randn(2, 20, 16), "attention_mask": torch.ones(2, 1, 20, 20, dtype=torch.int64)}

    def padding_mask():
        return PaddingMask(), {"x": torch.randn(2, 20, 16), "key_padding_mask": torch.zeros(2, 20, dtype=torch.bool)}

    def inverted_mask():
        return InvertedMask()

    def points():
        examples = {"image": torch.randn(2, 9, 7, 6), "points": torch.randn(2, 5, 6)}
        return Points(), examples, {"image": {0: "batch", 1: "height", 2: "width"}, "points": {0: "batch", 1: "count"}}

    def scaled():
        return Scaled(), {"scale": torch.tensor(2.0), "x": torch.randn(2, 10, 8)}

    def rows():
        return Rows(), torch.randint(0, 11, (5,))
''')
TABLE = """
[inputs.x]
dims = ["batch", "seq", 16]
[inputs.attention_mask]
dims = ["batch", "seq"]
dtype = "int64"
mask = "ignore"
[sizes]
seq = 20
"""
# Factories of MODELS, with options of the build.
MODULES = [
    "image",
    "several_outputs",
    "channels_of_positions",
    "sequence_first",
    "mask_of_pairs",
    "inverted_mask --inputs inputs.toml",
    "points",
    "one_table",
    # one of the above with another option, which a row of VARIANTS has, or between two of them
    "vectors --precision fp16",
    "image --precision int8",
    "image --inline",
    "masked_positions",
    "tokens",
    "vectors",
    "vectors --external-data",
    "image --precision fp16",
    "one_sequence",
    "batch_second",
    "positions",
    "mask_of_four_axes",
    "padding_mask",
    "scaled",
    "rows",
]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with MODELS and TABLE."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users_models.py").write_text(MODELS)
    (tmp_path / "inputs.toml").write_text(TABLE)
    yield
    sys.modules.pop("users_models", None)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("line", slow_after(3, MODULES, soak_after=5))
def test_a_module_of_a_user(cli: Cli, line: str) -> None:
    factory, *options = line.split()
    build = cli("build", "--module", f"users_models:{factory}", *options, "-o", "mine")
    assert build.code == 0, build.err
    check_every_command(cli, Path("mine"), build.err + build.out)


def check_every_command(cli: Cli, path: Path, printed: str = "", checkpoint: Path | None = None) -> None:
    """Run every command on an artifact, ask a server that has it, and then run what was printed as next.

    printed: by its build. What a refit prints counts, too.
    """
    artifact, folder = open_artifact(path), Path("files")
    for command in commands_on(path, folder, checkpoint):
        result = cli(*command.words)
        if command.refusal:
            assert command.refusal in " ".join(result.error().split())
            continue
        assert result.code == 0, (command.words, result.err)
        assert "Traceback" not in result.err
        if command.words[0] == "refit":
            printed += result.err + result.out
    check_server(artifact, folder)
    check_next_commands(cli, printed)


def check_next_commands(cli: Cli, printed: str) -> None:
    following = next_commands(printed)
    assert following or "Next: on a machine with a GPU, effexport verify " in printed
    for words in following:
        result = cli(*words)
        assert result.code == 0, (words, result.err)


def check_server(artifact: Artifact, folder: Path) -> None:
    """A server answers what `run` has written, and ends by SIGTERM with status 0."""
    right = load_npz(
        folder / "out.npz", [tensor.name for tensor in artifact.spec.outputs if tensor.dtype == "bfloat16"]
    )
    with running_server(artifact.path, folder, "--runtime", runtime_of(artifact)) as server:
        answer = infer(f"http://127.0.0.1:{server.port}", artifact)
        assert answer.keys() == right.keys()
        for name, array in answer.items():
            assert (array.dtype, array.shape) == (right[name].dtype, right[name].shape)
            # the same file in the same runtime: at most the order of sums is another, with other threads
            np.testing.assert_allclose(array.astype(float), right[name].astype(float), rtol=1e-2, atol=1e-2)
        assert server.stop() == 0


# Scope, variant and fields of small specs.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("encoder linear", {"causal": True, "lm_head": True}),
    ("encoder lsh", {}),
    ("attention nystrom", {"precision": "fp16"}),
    ("encoder linear", {"pool": "mean"}),
    ("attention aft-conv", {"precision": "bf16"}),
    ("attention lsh", {"inline": True}),
    ("encoder lsh", {"precision": "int8"}),
    # another variant or option on a way that one of the above has gone
    ("attention lsh", {"fused": False}),
    ("encoder softmax", {"causal": True}),
    ("encoder nystrom", {}),
    ("encoder aft-full", {}),
    ("encoder aft-simple", {"causal": True}),
    ("encoder aft-local", {}),
    ("encoder aft-conv", {}),
    ("attention lsh", {"external_data": True}),
    ("encoder linear", {"precision": "int8"}),
]


@pytest.mark.parametrize(("kind", "fields"), slow_after(1, VARIANTS, soak_after=4))
def test_a_variant(
    cli: Cli, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope, name = kind.split()
    check_every_command(cli, built(name, scope, **fields).path)


# Classes of transformers, with options of the build.
CHECKPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("NystromformerForMaskedLM", {}),
    ("NystromformerForMultipleChoice", {}),
    ("NystromformerModel", {"pool": "mean", "normalize": True}),
    ("ReformerModelWithLMHead", {}),
    # another head or precision, or an option less
    ("NystromformerForQuestionAnswering", {"precision": "fp16"}),
    ("NystromformerModel", {}),
    ("NystromformerForMaskedLM", {"top_k": 3}),
    ("NystromformerForSequenceClassification", {}),
    ("NystromformerForTokenClassification", {}),
    ("NystromformerForQuestionAnswering", {}),
    ("ReformerModel", {}),
]


@pytest.mark.requires("transformers")
@pytest.mark.parametrize(("kind", "options"), slow_after(1, CHECKPOINTS, soak_after=3))
def test_a_checkpoint(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    made = checkpoint_artifact(kind, **options)
    monkeypatch.chdir(tmp_path)
    check_every_command(cli, made.artifact, checkpoint=made.checkpoint)


def builds_of_the_readme() -> list[object]:
    """Its commands that build, and that of the script that it begins with."""
    page, script = readme_run.ROOT / "README.md", readme_run.ROOT / "scripts" / "quickstart.sh"
    lines = [step.text for step in readme_run.steps_of(page.read_text(encoding="utf-8"))]
    lines += [f"effexport {words}" for words in re.findall(r'/effexport" (build .*) >&2', script.read_text())]
    builds = [line for line in lines if line.startswith("effexport build")]
    return [pytest.param(line, marks=pytest.mark.requires("rtx") if "trt-rtx" in line else ()) for line in builds]


@pytest.mark.slow
@pytest.mark.requires("transformers", "foreign")
@pytest.mark.parametrize("line", builds_of_the_readme())
def test_what_the_readme_builds(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Parsed from the page, with its files, and what each build names as next. Artifacts of these kinds go through
    every command above and in test_corpus.py; the page as a whole is run by tests/test_readme.py."""
    monkeypatch.chdir(tmp_path)
    readme_run.write_files(tmp_path)
    if "mine.safetensors" in line:
        subprocess.run([sys.executable, "train.py"], check=True, capture_output=True)
    build = cli(*shlex.split(line)[1:])
    assert build.code == 0, build.err
    check_next_commands(cli, build.err + build.out)
    sys.modules.pop("vit", None)
