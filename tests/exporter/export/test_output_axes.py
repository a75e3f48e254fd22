"""Models whose outputs have other sizes than a free axis: the file computes what PyTorch computes at every size, the
manifest says which size that is, and a runner refuses any other."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from slow_cases import soak
from torch import Tensor, nn
from written_module import Written, check_answers

import effexport
from effexport.artifact import REFERENCE, Artifact, open_artifact
from effexport.base.dtypes import TensorInfo
from effexport.base.errors import RuntimeFailedError, UserError
from effexport.base.runtimes import RUNTIMES
from effexport.models.user.spec import ModuleSpec
from effexport.models.validation import SpecError
from effexport.proof.cases import stored_cases
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import limits_of_runner
from effexport.serving.engine.queue import why_not_joined
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.http.models import ServedModel
from effexport.serving.triton.config import batching_of
from effexport.serving.triton.spec import PackageSpec
from effexport.tensorrt.spec import default_profile, resolved, within

pytestmark = pytest.mark.requires("torch", "onnx", "ort")

DIM = 8
# Rounding in sums of this length; a token in the wrong place is off by 1.
LIMITS = {"fp32": 1e-5, "fp16": 1e-2}


class Several(nn.Module):
    """An output of every kind: a convolutional front end, merged patches, a class token, and so on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Sequential(nn.Conv1d(DIM, DIM, 3, 2, 1), nn.GELU(), nn.Conv1d(DIM, DIM, 3, 2, 1))
        self.merge = nn.Linear(4 * DIM, DIM)
        self.token = nn.Parameter(torch.randn(1, 1, DIM))
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.points = nn.Linear(DIM, 9)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        batch, seq, _ = x.shape
        whole = torch.cat([self.token.expand(batch, -1, -1), x], 1)
        return {
            "front": self.front(x.mT).mT,
            "merged": self.merge(F.pad(x, (0, 0, 0, -seq % 4)).reshape(batch, -1, 4 * DIM)),
            "with_token": self.attention(whole, whole, whole, need_weights=False)[0],
            "cropped": x[:, 1:-1].cumsum(1),
            "both": torch.cat([x, -x]),
            "pooled": F.max_pool1d(x.mT, 4).mT,
            "padded": F.pad(x, (0, 0, 0, -seq % 8)).cumsum(1),
            "flat": self.points(x).reshape(-1, 3, 3),
        }


AXES = {
    "front": ("batch", "(seq-1)//4+1", DIM),
    "merged": ("batch", "ceil(seq/4)", DIM),
    "with_token": ("batch", "seq+1", DIM),
    "cropped": ("batch", "seq-2", DIM),
    "both": ("2*batch", "seq", DIM),
    "pooled": ("batch", "seq//4", DIM),
    "padded": ("batch", "8*ceil(seq/8)", DIM),
    # of a constant size, as large as the batches that are tried
    "flat": ("batch*seq", 3, 3),
}


@dataclass(frozen=True)
class Built:
    model: nn.Module
    artifact: Artifact


def built(model: nn.Module, examples: object, folder: Path, precision: str = "fp32", **options: Any) -> Built:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = effexport.export(model.eval(), examples, folder, precision=precision, **options)
    assert result.report.verdict == "passed"
    return Built(model, open_artifact(folder))


# sizes do not depend on the precision
@pytest.fixture(scope="module", params=["fp32", soak("fp16")])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("axes") / request.param
    return built(Several(), torch.randn(2, 40, DIM), folder, request.param)


@pytest.mark.parametrize("sizes", [(1, 4), (2, 5), (3, 3 * 4), (1, 63), (3, 64), (2, 1000)])
def test_the_numbers_are_those_of_pytorch_at_every_size(several: Built, sizes: tuple[int, int]) -> None:
    spec = several.artifact.spec
    dtype = torch.float16 if spec.precision == "fp16" else torch.float32
    x = torch.randn(*sizes, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        expected = several.model(x.float())
    with effexport.load(several.artifact.path) as runner:
        found = runner.run({"x": x.numpy()})
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert found[name].shape == wanted.shape
        error = np.abs(found[name].astype(np.float64) - wanted.numpy())
        assert error.max() <= LIMITS[spec.precision] * (1 + np.abs(wanted.numpy()).max())


def test_the_manifest_and_the_file_declare_the_sizes(several: Built) -> None:
    manifest = json.loads((several.artifact.path / "manifest.json").read_text())
    assert {one["name"]: tuple(one["dims"]) for one in manifest["outputs"]} == AXES
    with effexport.load(several.artifact.path) as runner:
        assert {tensor.name: tensor.dims for tensor in runner.outputs} == AXES
    assert "ceil(seq/4)" in (several.artifact.path / "report.html").read_text()


def test_lengths_at_which_an_output_would_be_empty_are_refused(several: Built) -> None:
    spec = several.artifact.spec
    assert (spec.model.shortest, spec.model.max_seq_len, spec.model.fixed_seq_len) == (4, None, None)
    assert "The file takes 4 tokens and more; of fewer, an output would have no elements." in spec.model.notes
    with effexport.load(several.artifact.path) as runner, pytest.raises(UserError, match="takes at least 4"):
        runner.run({"x": np.zeros((1, 3, DIM), runner.inputs[0].dtype)})


def test_an_answer_of_another_size_is_refused(several: Built) -> None:
    """A file that is right at some lengths, and at others not what the manifest says."""
    spec = several.artifact.spec
    assert isinstance(spec.model, ModuleSpec)
    other = replace(spec.model, output_dims={**spec.model.output_dims, "front": ["batch", "seq//4", DIM]})
    with OrtRunner(several.artifact.model_path, limits=limits_of_runner(replace(spec, model=other))) as runner:
        dtype = runner.inputs[0].dtype
        runner.run({"x": np.ones((2, 8, DIM), dtype)})
        message = r"output 'front' is \[2, 3, 8\]; expected \[2, 2, 8\], as the manifest says: front .*seq//4"
        with pytest.raises(RuntimeFailedError, match=message):
            runner.run({"x": np.ones((2, 9, DIM), dtype)})
    for runtime in (None, "ort"):
        with effexport.load(several.artifact.path, runtime=runtime) as opened:
            assert opened.limits.outputs == spec.outputs  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "dims", [["batch", "seq//0", 8], ["batch", "2*words", 8], ["batch", "words", 8], ["seq**2", 8]]
)
def test_a_manifest_with_a_formula_of_something_else_is_refused(several: Built, dims: list[object]) -> None:
    model = several.artifact.spec.model
    assert isinstance(model, ModuleSpec)
    with pytest.raises(SpecError, match=r"is not a formula|and no input has words"):
        replace(model, output_dims={"front": dims})


def test_a_server_runs_each_request_on_its_own_and_says_why(several: Built) -> None:
    spec = several.artifact.spec
    assert why_not_joined(spec)
    assert batching_of(spec, PackageSpec(name="several")).max_batch == 0
    with effexport.load(several.artifact.path, runtime="ort") as runner:
        served = ServedModel(runner, several.artifact, "several", ServingSettings(), RUNTIMES["ort"])
        try:
            assert {tuple(one["shape"]) for one in served.metadata()["outputs"]} == {(-1, -1, DIM), (-1, 3, 3)}
            served.warm_up()
        finally:
            served.close()


def test_the_memory_of_an_engine_is_that_of_the_formulas() -> None:
    sizes = {"batch": 4, "seq": 30}
    assert resolved(TensorInfo("y", "float32", ("2*batch", "ceil(seq/4)", 8)), sizes) == (8, 8, 8)
    # of another tool
    assert resolved(TensorInfo("y", "float32", ("batch", "unk__17", 8)), sizes) is None
    assert resolved(TensorInfo("y", "float32", ("batch", "?", 8)), sizes) is None


class Image(nn.Module):
    """Patches of an image of any size, and a class token, and a pyramid of which the top hardly changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, DIM, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, DIM))
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(pixels).flatten(2).mT
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.attention(x, x, x, need_weights=False)[0], F.max_pool2d(pixels, 16, ceil_mode=True)


@pytest.mark.slow
def test_a_size_of_two_axes_and_their_smallest_sizes(tmp_path: Path) -> None:
    # two axes of one size in the example
    examples = {"pixels": torch.randn(2, 3, 24, 24)}
    made = built(Image(), examples, tmp_path / "image", dynamic={"pixels": {0: "batch", 2: "height", 3: "width"}})
    spec = made.artifact.spec
    # the proof has other sizes than the example's
    cases = stored_cases(made.artifact.path / REFERENCE, spec)
    shapes = {case.name: case.inputs["pixels"].shape[2:] for case in cases}
    assert (shapes["export"], shapes["other sizes"], shapes["double sizes"]) == ((24, 24), (31, 32), (48, 48))
    assert [tensor.dims for tensor in spec.outputs] == [
        ("batch", "height//4*(width//4)+1", DIM),
        ("batch", 3, "(height-1)//16+1", "(width-1)//16+1"),
    ]
    others = (torch.randn(batch, 3, height, width) for batch, height, width in [(1, 4, 5), (3, 33, 18), (2, 24, 40)])
    check_answers(made.artifact.path, made.model, *others, atol=LIMITS["fp32"])
    with effexport.load(made.artifact.path) as runner:
        with pytest.raises(UserError, match="width is 3 in 'pixels'; this model takes at least 4"):
            runner.run({"pixels": np.zeros((1, 3, 8, 3), np.float32)})
        served = ServedModel(runner, made.artifact, "image", ServingSettings(), RUNTIMES["ort"])
        try:
            served.warm_up()
        finally:
            served.close()
    profile = within(default_profile(spec), spec)
    assert (profile.ranges["height"].min, profile.ranges["height"].max) == (4, 24)


def test_a_free_axis_of_the_users_own_that_is_declared_and_without_a_formula_is_refused(tmp_path: Path) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(x, (0, math.isqrt(x.shape[1])))

    with pytest.raises(UserError, match=r"expected axes that are constant, or formulas of free axes such as 2\*batch"):
        effexport.export(Square(), torch.ones(2, 9), tmp_path / "o", dynamic={"x": {0: "batch", 1: "width"}})


def test_an_axis_that_is_declared_free_and_takes_few_sizes_is_named_with_the_size_that_failed(tmp_path: Path) -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], 2, -1).sum(1)

    with pytest.raises(
        UserError,
        match=r"a batch of 3, width 11: .*; name width as free, in dynamic or inputs, only if any size of it",
    ):
        effexport.export(Halves(), torch.ones(2, 8), tmp_path / "o", dynamic={"x": {0: "batch", 1: "width"}})


@pytest.mark.soak
@pytest.mark.requires("transformers")
def test_efficient_loftr_has_two_images_for_each_sample(tmp_path: Path) -> None:
    from transformers import EfficientLoFTRConfig, EfficientLoFTRModel

    config = EfficientLoFTRConfig(
        stage_num_blocks=[1, 1, 1, 1],
        out_features=[16, 16, 32, 64],
        hidden_size=64,
        num_attention_layers=1,
        fine_fusion_dims=[64, 32, 16],
        intermediate_size=128,
    )
    torch.manual_seed(0)
    made = built(EfficientLoFTRModel(config), {"pixel_values": torch.rand(2, 2, 3, 64, 96)}, tmp_path / "loftr")
    dims = [tensor.dims for tensor in made.artifact.spec.outputs]
    assert dims == [("batch", 2, 64, 8, 12), ("2*batch", 16, 32, 48), ("2*batch", 32, 16, 24)]
    pixels = torch.rand(3, 2, 3, 64, 96)
    with torch.inference_mode(), effexport.load(made.artifact.path) as runner:
        expected = made.model(pixels).feature_maps
        for found, wanted in zip(runner.run({"pixel_values": pixels.numpy()}).values(), expected, strict=True):
            scale = wanted.square().mean().sqrt()
            assert (torch.from_numpy(found) - wanted).abs().max() <= LIMITS["fp32"] * 10 * scale


CUT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a softmax of the last tokens": (lambda x: x[:, -100:].softmax(1), "seq-max(0,seq-100)"),
    "sums of the first tokens": (lambda x: x[:, :100].cumsum(1), "min(100,seq)"),
    "a narrow part": (lambda x: x.narrow(1, 0, min(100, x.shape[1])) + 1, "min(100,seq)"),
    "the largest": (lambda x: x.topk(min(100, x.shape[1]), dim=1).values, "min(100,seq)"),
}


# a narrow part is one of the first tokens
@pytest.mark.parametrize("name", [soak(name) if name == "a narrow part" else name for name in CUT])
def test_a_part_that_is_the_whole_in_the_example_has_its_own_size(name: str, tmp_path: Path) -> None:
    change, size = CUT[name]
    model = Written(change, DIM).eval()
    result = effexport.export(model, torch.randn(2, 12, DIM), tmp_path / "out")
    assert [tensor.dims for tensor in result.artifact.spec.outputs] == [("batch", size, DIM)]
    others = (torch.randn(2, length, DIM) for length in (1, 7, 100, 101, 300))
    check_answers(result.path, model, *others, atol=1e-4)


def test_an_answer_without_elements_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is \[2, 0, 8\] for its example inputs, without elements; .*longer example"):
        effexport.export(Written(lambda x: x[:, 100:], DIM).eval(), torch.randn(2, 12, DIM), tmp_path / "out")
