"""Modules of the user's own: what their code does with the length of a sequence, and what is said if it cannot work."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import effexport
from effexport.base.errors import StageError
from effexport.base.spec import BuildSpec
from effexport.export.failures import first_paragraph, lies_in
from effexport.export.onnx_from_module import onnx_from_module
from effexport.export.sizes_of_code import OtherSizesError, Sizes
from effexport.models import attention_from_spec
from effexport.models.user.spec_from_module import spec_from_module
from effexport.models.variants.linear import LinearSpec
from effexport.pipeline.build import Build, Stopwatch, why_sizes_fail
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import limits_from_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = attention_from_spec(LinearSpec(dim=32, heads=2, seq_len=64))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layer(hidden_states, attention_mask)


class Cropped(OneLayer):
    """Pads to whole blocks, and crops by a slice, whose length torch.onnx calls Min(…, seq)."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        n = hidden_states.shape[1]
        pad = (n + 7) // 8 * 8 - n
        return super().forward(F.pad(hidden_states, (0, 0, 0, pad)), F.pad(attention_mask, (0, pad)))[:, :n]


class TokenByToken(OneLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        rows = [hidden_states[:, i] for i in range(hidden_states.shape[1])]
        return super().forward(torch.stack(rows, dim=1), attention_mask)


class OtherBesideMultiples(OneLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        if hidden_states.shape[1] % 8:
            hidden_states = hidden_states * 2
        return super().forward(hidden_states, attention_mask)


class PadsToABucket(OneLayer):
    """Pads to the next of some lengths: the trace contains one of them only, and the longest serves the others."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        n = hidden_states.shape[1]
        pad = next(size for size in (128, 256, 512) if size >= n) - n
        return super().forward(F.pad(hidden_states, (0, 0, 0, pad)), F.pad(attention_mask, (0, pad)))[:, :n]


class OtherAboveALength(OneLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(hidden_states * 2 if hidden_states.shape[1] > 900 else hidden_states, attention_mask)


class OtherAboveABatch(OneLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(hidden_states * 2 if hidden_states.shape[0] > 9 else hidden_states, attention_mask)


class AtMost(OneLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        assert hidden_states.shape[1] <= 300
        return super().forward(hidden_states, attention_mask)


def line_of(module_class: type[nn.Module], text: str) -> int:
    lines, first = inspect.getsourcelines(module_class)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_a_length_that_the_code_makes_a_constant_is_named_with_its_line(tmp_path: Path) -> None:
    module = TokenByToken().eval()
    spec = BuildSpec(model=spec_from_module(module, "mine"))
    with pytest.raises(StageError) as caught:
        onnx_from_module(module, spec, tmp_path / "model.onnx")
    line = line_of(TokenByToken, "range(")
    assert f"seq to one size: test_user_modules.py, line {line}: seq becomes" in str(caught.value)
    assert "signature.py" not in str(caught.value)
    assert "Write it so that it holds for every size" in str(caught.value)


@pytest.mark.parametrize(
    ("made", "sizes", "text"),
    [
        (PadsToABucket, ("seq", 1, 512), "size >= n"),
        (OtherAboveALength, ("seq", 1, 900), "> 900"),
        (OtherAboveABatch, ("batch", 1, 9), "> 9"),
        (AtMost, ("seq", 1, 300), "<= 300"),
    ],
)
def test_a_branch_at_a_size_that_the_proof_does_not_run_is_found(
    made: type[OneLayer], sizes: tuple[str, int, int], text: str, tmp_path: Path
) -> None:
    module = made().eval()
    spec = BuildSpec(model=spec_from_module(module, "mine"))
    (found,) = tied_sizes(module, spec, tmp_path / "model.onnx")
    assert (found.axis, found.lowest, found.highest) == sizes
    assert f"test_user_modules.py, line {line_of(made, text)}: " in found.reason


def tied_sizes(module: nn.Module, spec: BuildSpec, path: Path) -> Sequence[Sizes]:
    """The limits of the file that was written, or the one size that another file would have."""
    try:
        return onnx_from_module(module, spec, path).changes.sizes
    except OtherSizesError as error:
        return error.sizes


def test_a_length_that_the_code_asserts_is_a_limit_once_it_is_given(tmp_path: Path) -> None:
    module = AtMost().eval()
    spec = BuildSpec(model=spec_from_module(module, "mine", 300))
    assert spec.model.max_seq_len == 300
    onnx_from_module(module, spec, tmp_path / "model.onnx")


def test_an_assumption_that_torch_export_lets_pass_is_found(tmp_path: Path) -> None:
    module = OtherBesideMultiples().eval()
    spec = BuildSpec(model=spec_from_module(module, "mine"))
    with pytest.raises(OtherSizesError) as caught:
        onnx_from_module(module, spec, tmp_path / "model.onnx")
    line = line_of(OtherBesideMultiples, "% 8")
    assert f"test_user_modules.py, line {line}: seq % 8 == 0" in str(caught.value)
    assert f"line {line}: seq % 8 == 0." in why_sizes_fail(build_of(module, spec))
    healthy = Cropped().eval()
    assert why_sizes_fail(build_of(healthy, BuildSpec(model=spec_from_module(healthy, "mine")))) == ""


def build_of(module: nn.Module, spec: BuildSpec) -> Build:
    return Build(spec, module, (), Path(), Path(), RunOptions(), Stopwatch(lambda stage: None), None)


def test_a_message_of_several_lines_becomes_one() -> None:
    assert first_paragraph("The following failed:\n  - one\n  - two\n\nadvice") == "The following failed: - one - two"


def test_a_padded_sequence_may_be_cropped_by_a_slice(tmp_path: Path) -> None:
    module = Cropped().eval()
    spec = BuildSpec(model=spec_from_module(module, "mine"))
    onnx_from_module(module, spec, tmp_path / "model.onnx")
    with OrtRunner(tmp_path / "model.onnx", limits=limits_from_spec(spec)) as runner:
        assert runner.outputs[0].dims == ("batch", "seq", 32)
        # shorter and longer than the example that was traced
        for seq_len in (1, 33, 64, 300):
            states = torch.randn(2, seq_len, 32)
            with torch.no_grad():
                expected = module(states, torch.ones(2, seq_len)).numpy()
            # float32 rounding of sums in another order
            np.testing.assert_allclose(runner.run({"hidden_states": states.numpy()})["output"], expected, atol=1e-5)


def test_a_file_of_a_package_is_known_wherever_the_tracer_cuts_its_path(tmp_path: Path) -> None:
    file = tmp_path / "package" / "below" / "signature.py"
    file.parent.mkdir(parents=True)
    file.touch()
    # as far as the path is that of PyTorch's folder, too, perhaps in the middle of a name
    for start in range(len(str(tmp_path / "package"))):
        assert lies_in(str(file)[start:], tmp_path / "package")
    assert not lies_in("/elsewhere/package/below/signature.py", tmp_path / "package")
    assert not lies_in("package/below/other.py", tmp_path / "package")


class FromOne(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + ((1.0 - mask) * -9.5 + (2 - mask) + torch.rsub(mask, 0.5))[..., None]


def test_integers_are_subtracted_from_a_number_that_is_none(tmp_path: Path) -> None:
    states, mask = torch.randn(2, 5, 4), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    result = effexport.export(FromOne().eval(), {"x": states, "mask": mask}, tmp_path / "out")
    with OrtRunner(result.artifact.model_path) as runner:
        found = runner.run({"x": states.numpy(), "mask": mask.numpy()})["output"]
    np.testing.assert_allclose(found, FromOne()(states, mask).numpy(), rtol=1e-6, atol=1e-6)
