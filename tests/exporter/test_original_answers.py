"""`build --weights FILE --reference ANSWERS`: weights mapped wrongly are found by the answers of the original."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from slow_cases import slow_after
from small_specs import spec_of

import effexport
from effexport.base.errors import StageError
from effexport.models import attention_from_spec
from effexport.models.attention_spec import AttentionSpec
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.lsh import LSHSpec
from effexport.proof.cases import load_reference
from effexport.proof.other_answers import load_answers

pytestmark = [pytest.mark.requires("torch", "onnx", "ort"), pytest.mark.usefixtures("kept_traces")]
LINEAR = LinearSpec(dim=32, heads=2, seq_len=64)
LSH = LSHSpec(dim=32, heads=2, seq_len=64, chunk_length=8)
FLAGS = ("--variant", "linear", "--scope", "attention", "--dim", "32", "--heads", "2", "--seq-len", "64")


def original(spec: AttentionSpec, folder: Path) -> tuple[dict[str, torch.Tensor], Path]:
    """The weights of a model, and a file with its answers to two cases, one of them padded."""
    torch.manual_seed(3)
    layer = attention_from_spec(spec).eval()
    states, mask = torch.randn(2, 40, 32), torch.ones(2, 40, dtype=torch.int64)
    mask[1, 25:] = 0
    with torch.no_grad():
        tensors = {
            "padded/hidden_states": states,
            "padded/attention_mask": mask,
            "padded/last_hidden_state": layer(states, mask),
            "hidden_states": states[:1],
            "last_hidden_state": layer(states[:1]),
        }
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "answers.safetensors")
    return layer.state_dict(), folder / "answers.safetensors"


def test_weights_alone_are_proven_against_our_layer_and_the_first_line_says_so(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    weights, answers = original(LINEAR, tmp_path)
    weights["query.weight"], weights["key.weight"] = weights["key.weight"], weights["query.weight"]
    save_file(weights, tmp_path / "exchanged.safetensors")
    command = ("build", *FLAGS, "--weights", tmp_path / "exchanged.safetensors", "-o", tmp_path / "out")
    alone = cli(*command)
    assert alone.code == 0, alone.err
    assert (
        "NOT compared with the model that these weights were trained in (--reference FILE" in alone.out.splitlines()[0]
    )
    wrong = cli(*command, "--reference", answers, "--force")
    assert wrong.code == 1
    assert re.search(r"arithmetic in 2 of \d+ cases, most in original", wrong.err)
    assert f"and both differ from the answers in {answers}: check which tensor" in " ".join(wrong.err.split())


@pytest.mark.parametrize("spec", slow_after(1, [LINEAR, LSH]))
def test_the_answers_of_the_original_become_cases_of_the_artifact(spec: AttentionSpec, tmp_path: Path) -> None:
    weights, answers = original(spec, tmp_path)
    save_file(weights, tmp_path / "weights.safetensors")
    result = effexport.build(
        variant=spec.variant,
        scope="attention",
        dim=32,
        heads=2,
        seq_len=64,
        weights=tmp_path / "weights.safetensors",
        reference=answers,
        output=tmp_path / "out",
        **({"chunk_length": 8} if spec.variant == "lsh" else {}),
    )
    assert result.report.verdict == "passed"
    names = [case.name for case in load_reference(result.artifact.reference_path)]
    assert names[-2:] == ["original padded", "original"] or names[-2:] == ["original", "original padded"]
    if spec.variant == "linear":
        assert effexport.verify(tmp_path / "out", reference=str(answers)).verdict == "passed"


@pytest.mark.slow
def test_options_that_differ_from_the_original_are_found(tmp_path: Path) -> None:
    weights, answers = original(LINEAR, tmp_path)
    save_file(weights, tmp_path / "weights.safetensors")
    with pytest.raises(StageError, match="both differ from the answers"):
        effexport.build(
            variant="linear",
            scope="attention",
            dim=32,
            heads=4,
            seq_len=64,
            weights=tmp_path / "weights.safetensors",
            reference=answers,
            output=tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last_hidden_state": None}, "has no last_hidden_state; expected the inputs that the original was given"),
        ({"hidden_states": torch.zeros(1, 40, 16)}, "expected hidden_states float32 [batch, seq, 32]"),
        ({"last_hidden_state": torch.zeros(1, 40, 16)}, "is float32 [1, 40, 16]; expected floats [1, 40, 32]"),
        ({"query.weight": torch.zeros(1)}, "unknown input 'query.weight'"),
        (
            {"last_hidden_state": torch.zeros(1, 40, 32).index_fill(1, torch.tensor([3]), float("nan"))},
            "32 of 1280 values of last_hidden_state in original: 1 × 40 are NaN, infinite or beyond float32; expected",
        ),
        ({"last_hidden_state": torch.zeros(1, 40, 32).to(torch.float8_e5m2)}, "last_hidden_state is F8_E5M2; expected"),
        (None, "no reference file at"),
    ],
)
def test_a_file_without_the_right_answers_is_one_error(
    cli: Callable[..., Any], tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    if change is not None:
        tensors = {"hidden_states": torch.zeros(1, 40, 32), "last_hidden_state": torch.zeros(1, 40, 32)} | change
        save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "answers.safetensors")
    command = ("build", *FLAGS, "--reference", tmp_path / "answers.safetensors", "-o", tmp_path / "out")
    assert message in cli(*command).error()
    assert not (tmp_path / "out").exists()


def test_answers_in_bfloat16_and_nan_in_padding_are_read(tmp_path: Path) -> None:
    answers = torch.randn(2, 40, 32).bfloat16()
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, 30:], answers[1, 30:] = 0, float("nan")
    tensors = {"hidden_states": torch.randn(2, 40, 32).bfloat16(), "attention_mask": mask, "last_hidden_state": answers}
    save_file(tensors, tmp_path / "answers.safetensors")
    spec = spec_of("linear", "attention")
    (case,) = load_answers(tmp_path / "answers.safetensors", spec)
    np.testing.assert_array_equal(case.outputs["last_hidden_state"], answers.float().numpy())
    np.testing.assert_array_equal(case.inputs["hidden_states"], tensors["hidden_states"].float().numpy())


def test_weights_that_do_not_fit_name_what_is_there(cli: Callable[..., Any], tmp_path: Path) -> None:
    save_file({"nothing": torch.zeros(1)}, tmp_path / "weights.safetensors")
    error = cli("build", *FLAGS, "--weights", tmp_path / "weights.safetensors", "-o", tmp_path / "out").error()
    assert "Expected the state_dict of the linear attention that the options describe" in error
    assert "config" not in error


class Steps(torch.nn.Module):
    """Without a mask; one of its outputs is of integers."""

    def forward(self, signal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * signal, signal.argmax(-1)


@pytest.mark.parametrize("dynamic", [None, {"signal": {0: "batch", 1: "seq"}}])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_answers_of_a_model_without_a_mask_are_read(
    cli: Callable[..., Any], tmp_path: Path, dynamic: Any, precision: str
) -> None:
    signal = torch.linspace(0, 1, 40).reshape(2, 5, 4)
    effexport.export(Steps(), signal, tmp_path / "out", dynamic=dynamic, precision=precision)
    output0, output1 = Steps()(signal)
    tensors = {"signal": signal, "output0": output0, "output1": output1}
    for name, change, code in (("right", 0, 0), ("wrong", 1, 1)):
        file = tmp_path / f"{name}.safetensors"
        save_file(tensors | {"output0": output0 + change}, file)
        result = cli("verify", tmp_path / "out", "--reference", file)
        assert result.code == code, result.err
    save_file(tensors | {"output1": output1.float()}, file)
    assert (
        "output1 is float32 [2, 5]; expected integers [2, 5]"
        in cli("verify", tmp_path / "out", "--reference", file).error()
    )
