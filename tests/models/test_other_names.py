"""Weights whose names are those of a wrapper or an old conversion: the remedy in the message works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from effexport.models.checkpoints.spec import check_weights_file, spec_from_checkpoint
from effexport.models.checkpoints.weights import fill_module, read_tensors, read_weights
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.final = nn.Linear(4, 2)


NAMES = {name: (name,) for name in Encoder().state_dict()}


def old_norms(name: str) -> str:
    return re.sub(r"norm\.(weight|bias)", lambda match: f"norm.{'gamma' if match[1] == 'weight' else 'beta'}", name)


# How a name is written, and who the message says writes it so.
WRITERS: dict[str, tuple[Callable[[str], str], str]] = {
    "DataParallel": (lambda name: f"module.{name}", "from DataParallel,"),
    "torch.compile": (lambda name: f"_orig_mod.{name}", "from torch.compile,"),
    "compiled, then parallel": (lambda name: f"module._orig_mod.{name}", "from torch.compile and DataParallel,"),
    "parallel, then compiled": (lambda name: f"_orig_mod.module.{name}", "from torch.compile and DataParallel,"),
    "a compiled block": (lambda name: name.replace("blocks.1.", "blocks.1._orig_mod."), "from torch.compile,"),
    "FSDP": (lambda name: name.replace("blocks.", "blocks._fsdp_wrapped_module."), "from FSDP,"),
    "Lightning": (lambda name: f"model.{name}", "from a model around this one,"),
    "nested": (lambda name: f"model.net.encoder.{name}", "from a model around this one,"),
    "TensorFlow": (old_norms, "from an old conversion from TensorFlow,"),
    "TensorFlow in parallel": (
        lambda name: f"module.{old_norms(name)}",
        "from an old conversion from TensorFlow and DataParallel,",
    ),
}


def refused(tensors: Mapping[str, Tensor]) -> str:
    with pytest.raises(SpecError) as failure:
        fill_module(Encoder(), tensors, NAMES, ("position_ids",), Path("weights.safetensors"))
    return str(failure.value)


@pytest.mark.parametrize("extra", [(), ("position_ids",), ("n_averaged", "loss.weight")])
@pytest.mark.parametrize("writer", WRITERS)
def test_tensors_that_are_renamed_as_the_message_says_fit(writer: str, extra: tuple[str, ...]) -> None:
    rename, words = WRITERS[writer]
    trained, module = Encoder().state_dict(), Encoder()
    tensors = {rename(name): tensor for name, tensor in trained.items()} | {name: torch.ones(1) for name in extra}
    message = refused(tensors)
    assert words in message
    remedy = re.search(r"save them as (\{.*\})$", message)
    assert remedy is not None, message
    fill_module(module, eval(remedy[1], {"tensors": tensors}), NAMES, ("position_ids",), Path("renamed"))
    assert all(torch.equal(tensor, trained[name]) for name, tensor in module.state_dict().items())


def test_another_model_is_not_taken_for_a_renamed_one() -> None:
    others = {f"module.{name}": tensor for name, tensor in nn.Sequential(nn.Linear(4, 4)).state_dict().items()}
    message = refused(others)
    assert "10 missing tensors" in message
    assert "save them as" not in message


def test_an_adapter_of_peft_is_told_apart() -> None:
    tensors = {f"base_model.model.{name}": tensor for name, tensor in Encoder().state_dict().items()}
    tensors["base_model.model.blocks.0.query.lora_A.default.weight"] = torch.ones(2, 4)
    message = refused(tensors)
    assert "are those of an adapter of PEFT, such as base_model.model.blocks.0.query.lora_A.default.weight" in message
    assert "model.merge_and_unload().save_pretrained(FOLDER)" in message


@pytest.mark.parametrize("config", [None, "config.json"])
def test_a_folder_with_an_adapter_only_is_told_apart(config: str | None, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/reformer"}))
    (tmp_path / "adapter_model.safetensors").touch()
    if config:
        (tmp_path / config).write_text('{"model_type": "reformer"}')
    words = r"is an adapter of PEFT, .* weights of someone/reformer; .*merge_and_unload\(\)"
    with pytest.raises(SpecError, match=words):
        read_weights(tmp_path)
    if not config:
        for check in (lambda: spec_from_checkpoint(tmp_path, {}), lambda: check_weights_file(tmp_path)):
            with pytest.raises(SpecError, match=words):
                check()


@pytest.mark.parametrize(
    ("saved", "place"),
    [
        (lambda state: {"state_dict": state, "epoch": 3}, "['state_dict']"),
        (
            lambda state: {"epoch": 3, "model": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}},
            "['model']",
        ),
        (lambda state: {"ema": {"decay": 0.9, "shadow": state}}, "['ema']['shadow']"),
    ],
)
@pytest.mark.parametrize("name", ["epoch.pt", "pytorch_model.bin"])
def test_a_state_dict_inside_a_file_is_found(
    saved: Callable[[dict[str, Tensor]], object], place: str, name: str, tmp_path: Path
) -> None:
    state = Encoder().state_dict()
    torch.save(saved(dict(state)), tmp_path / name)
    with pytest.raises(SpecError) as failure:
        read_tensors(tmp_path / name)
    message = str(failure.value)
    remedy = re.search(r"save that alone: torch.save\((torch.load\(FILE\).*), OTHER\)$", message)
    assert remedy is not None, message
    assert remedy[1] == f"torch.load(FILE){place}"
    torch.save(eval(remedy[1], {"torch": torch, "FILE": tmp_path / name}), tmp_path / "alone.pt")
    assert read_tensors(tmp_path / "alone.pt").keys() == state.keys()


def test_weights_with_nan_are_counted() -> None:
    state = Encoder().state_dict()
    state["final.weight"][0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    message = refused(state)
    assert message.startswith("weights.safetensors has 1 tensor with NaN or infinity: final.weight (3 of 8 elements);")
