"""Checkpoint folders: every file that can be wrong is one clear error, and what is right arrives in the module."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from originals import config_of
from safetensors.torch import save_file
from torch import Tensor

from effexport.models.checkpoints.spec import FAMILIES, is_checkpoint, spec_from_checkpoint
from effexport.models.checkpoints.weights import fill_module, module_from_checkpoint, read_weights
from effexport.models.contract import load
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch")
CONFIGS = {family: config_of(family, "masked-lm") for family in ("nystromformer", "longformer", "reformer")}


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Random weights under the names that a checkpoint of this folder's configuration has."""
    spec, _ = spec_from_checkpoint(folder, {})
    family = FAMILIES[spec.family].module
    module = load(FAMILIES[spec.family].model)(spec)
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    torch.manual_seed(0)
    return {names[0]: torch.randn(shapes[name]) for name, names in family.weight_names(spec).items()}


@pytest.fixture(params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint folder without weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return tmp_path


def save_safetensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def save_bin(folder: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def save_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    names = list(tensors)
    shards = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / shard)
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("save", [save_safetensors, save_bin, save_shards])
def test_weights_arrive_from_every_kind_of_file(folder: Path, save: Callable[..., None]) -> None:
    tensors = weights_of(folder)
    save(folder, tensors)
    assert is_checkpoint(folder)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_weights(folder).items())
    spec, _ = spec_from_checkpoint(folder, {})
    module = module_from_checkpoint(folder, spec)
    assert not module.training
    names = FAMILIES[spec.family].module.weight_names(spec)
    for name, value in module.state_dict().items():
        if name in names:
            assert torch.equal(value, tensors[names[name][0]]), name


def test_half_precision_weights_become_float32(folder: Path) -> None:
    save_safetensors(folder, {name: tensor.half() for name, tensor in weights_of(folder).items()})
    spec, _ = spec_from_checkpoint(folder, {})
    assert {p.dtype for p in module_from_checkpoint(folder, spec).parameters()} == {torch.float32}


def test_weights_of_8_bits_become_float32(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    weight = torch.tensor([[0.5, -1.0], [2.0, 0.25]])
    fill_module(module, {"w": weight.to(torch.float8_e4m3fn)}, {"weight": ("w",)}, (), tmp_path)
    assert torch.equal(module.weight, weight)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.full((2, 2), 1e300, dtype=torch.float64), "1 tensor with NaN or infinity: w"),
        (torch.full((2, 2), float("nan")).to(torch.float8_e4m3fn), "1 tensor with NaN or infinity: w"),
        (torch.ones(2, 2, dtype=torch.complex64), "1 tensor of complex numbers: w"),
        (torch.ones(2, 2, dtype=torch.int32), "1 tensor of integers: w"),
        (torch.ones(2, 2, dtype=torch.bool), "1 tensor of integers: w"),
    ],
)
def test_numbers_that_float32_cannot_hold_are_refused(weight: Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        fill_module(torch.nn.Linear(2, 2, bias=False), {"w": weight}, {"weight": ("w",)}, (), tmp_path)


def an_attention_weight(tensors: dict[str, Tensor]) -> str:
    """A weight that has one name only; embeddings may be tied."""
    return next(name for name in tensors if "attention" in name)


def damage_missing(tensors: dict[str, Tensor]) -> str:
    name = an_attention_weight(tensors)
    del tensors[name]
    return rf"1 missing tensor: {name}"


def damage_unknown(tensors: dict[str, Tensor]) -> str:
    tensors["encoder.extra.weight"] = torch.zeros(2)
    return r"1 unexpected tensor: encoder\.extra\.weight"


def damage_shape(tensors: dict[str, Tensor]) -> str:
    name = an_attention_weight(tensors)
    tensors[name] = torch.zeros(3, 1)
    return rf"1 tensor of the wrong shape: {name} \[3, 1\], expected \["


def damage_nan(tensors: dict[str, Tensor]) -> str:
    name = an_attention_weight(tensors)
    tensors[name].flatten()[-1] = float("nan")
    return f"1 tensor with NaN or infinity: {name}"


@pytest.mark.parametrize("damage", [damage_missing, damage_unknown, damage_shape, damage_nan])
def test_weights_that_do_not_fit_are_listed(folder: Path, damage: Callable[[dict[str, Tensor]], str]) -> None:
    tensors = weights_of(folder)
    message = damage(tensors)
    save_safetensors(folder, tensors)
    spec, _ = spec_from_checkpoint(folder, {})
    with pytest.raises(SpecError, match=message):
        module_from_checkpoint(folder, spec)


def test_an_error_lists_ten_names_of_each_kind_and_counts_all(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    found = {f"extra{i}": torch.zeros(1) for i in range(12)}
    with pytest.raises(SpecError) as failure:
        fill_module(module, found, {"weight": ("w", "alias"), "bias": ("b",)}, (), tmp_path)
    message = str(failure.value)
    assert "2 missing tensors: w, b" in message
    assert "12 unexpected tensors: extra0, extra1" in message
    assert "extra9, …" in message
    assert "extra10" not in message
    before = module.weight.clone()
    with pytest.raises(SpecError):
        fill_module(module, {"w": torch.zeros(2, 2)}, {"weight": ("w",), "bias": ("b",)}, (), tmp_path)
    assert torch.equal(module.weight, before), "nothing is copied unless everything fits"


def test_names_that_mean_nothing_are_ignored_and_tied_names_are_tried_in_turn(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    found = {"tied": torch.ones(2, 2), "b": torch.ones(2), "position_ids": torch.zeros(1)}
    fill_module(module, found, {"weight": ("w", "tied"), "bias": ("b",)}, (r"position_ids",), tmp_path)
    assert torch.equal(module.weight, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no config.json in "),
        ("{", "cannot read "),
        ("[1]", "does not hold a JSON object"),
        ("{}", "model_type is 'None'.* Supported: big_bird, longformer, led, modernbert, nystromformer, reformer"),
        ('{"model_type": "reformr"}', "model_type is 'reformr'; did you mean 'reformer'"),
        ('{"model_type": "module"}', "model_type is 'module'"),
        ('{"model_type": "bert"}', "Supported: big_bird, longformer, led, modernbert, nystromformer, reformer"),
    ],
)
def test_a_folder_that_is_no_supported_checkpoint(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=message):
        spec_from_checkpoint(tmp_path, {})


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(SpecError, match=r"cannot read .*config.json: it is a named pipe"):
        spec_from_checkpoint(tmp_path, {})


def test_a_folder_without_weights_says_which_files_are_expected(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"has no weights; expected one of: model\.safetensors, "):
        read_weights(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 0.5, 0.98])
def test_a_truncated_file_is_named(folder: Path, name: str, kept: float) -> None:
    (save_safetensors if name.endswith("safetensors") else save_bin)(folder, weights_of(folder))
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(kept * len(data))])
    with pytest.raises(SpecError, match=rf"{name} is not a readable weights file"):
        read_weights(folder)


class Payload:
    """A call that an unpickler would execute."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_is_never_executed(folder: Path) -> None:
    trace = folder / "executed"
    torch.save({"weight": Payload(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(SpecError, match=r"pytorch_model\.bin is not a readable weights file"):
        read_weights(folder)
    assert not trace.exists()


class Calls:
    """A call that an unpickler would make, and `weights_only=True` allows."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Calls(bytearray, 2**40), "bytearray"),
        (Calls(torch.Tensor, 2**40), "torch Tensor"),
        (torch.zeros(2, 2).to_sparse(), "_rebuild_sparse_tensor"),
    ],
)
def test_a_pickle_of_more_than_tensors_is_refused_before_it_is_read(
    folder: Path, value: Any, named: str, zipped: bool
) -> None:
    torch.save({"w": value}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(SpecError, match=f"it has more than tensors in it, .*{named}"):
        read_weights(folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_dict_is_read_from_the_present_format_and_from_the_old_one(folder: Path, zipped: bool) -> None:
    module = torch.nn.Linear(3, 2).to(torch.bfloat16)
    saved = {**module.state_dict(), "parameter": module.weight, "double": module.weight.detach().double()}
    torch.save(saved, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    found = read_weights(folder)
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in saved.items())


def test_a_compressed_archive_is_refused_because_it_may_be_a_bomb(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    torch.save({"w": torch.zeros(2**18)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(SpecError, match="it is a compressed archive"):
        read_weights(folder)


def test_records_that_are_cut_off_or_exchanged_are_refused(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    weight = torch.arange(32.0)
    torch.save({"a": weight, "part of a": weight[3:7], "b": torch.ones(7), "none": torch.ones(0)}, path)
    assert torch.equal(read_weights(folder)["part of a"], weight[3:7])
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    first, second = (next(name for name in entries if name.endswith(f"/data/{n}")) for n in (0, 1))
    for changes in ({first: entries[first][:8]}, {first: entries[second], second: entries[first]}):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, data in (entries | changes).items():
                archive.writestr(name, data)
        with pytest.raises(SpecError, match="its records are not as long as its tensors"):
            read_weights(folder)


def test_a_file_that_was_called_data_when_it_was_written_is_read(folder: Path) -> None:
    """Every name in its archive then begins with data/, not only those of the records."""
    torch.save({"w": torch.ones(2)}, folder / "data.bin")
    (folder / "data.bin").rename(folder / "pytorch_model.bin")
    assert read_weights(folder)["w"].tolist() == [1, 1]


@pytest.mark.parametrize("length", [2**64 - 1, 9 << 20])
def test_a_header_of_more_tensors_than_a_model_has_is_refused(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(SpecError, match=r"its header claims .* bytes, more than 4,194,304"):
        read_weights(folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_more_tensors_than_a_model_has_is_refused(folder: Path, zipped: bool) -> None:
    tensor = torch.zeros(0)
    names = {f"{'x' * 1000}{number}": tensor for number in range(5_000)}
    torch.save(names, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(SpecError, match="it lists tensors for more than 4,194,304 bytes"):
        read_weights(folder)


@pytest.mark.parametrize("field", ["vocab_size", "num_hidden_layers"])
def test_a_config_that_disagrees_with_the_weights_is_refused_before_the_module_is_made(
    folder: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_safetensors(folder, weights_of(folder))
    config = json.loads((folder / "config.json").read_text())
    config |= {"attn_layers": ["lsh"] * 2 if field == "vocab_size" else ["lsh"], field: 5_000}
    (folder / "config.json").write_text(json.dumps(config))
    spec, _ = spec_from_checkpoint(folder, {})
    monkeypatch.setattr("effexport.models.checkpoints.weights.load", None)
    expected = r"word_embeddings\.weight \[.*expected \[5000, " if field == "vocab_size" else r"\d+ missing tensors: "
    with pytest.raises(SpecError, match=expected):
        module_from_checkpoint(folder, spec)


def test_a_weight_in_two_shards_is_that_of_the_shard_that_the_index_names(folder: Path) -> None:
    save_file({"w": torch.zeros(2), "v": torch.zeros(2)}, folder / "a.safetensors")
    save_file({"w": torch.ones(2)}, folder / "b.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "v": "a.safetensors", "x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match="1 weights are in none, x"):
        read_weights(folder)
    del index["weight_map"]["x"]
    index["weight_map"]["w"] = "b.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weights(folder)["w"].tolist() == [1, 1]


def test_names_of_tensors_cannot_break_the_line_of_an_error(tmp_path: Path) -> None:
    found = {"a\nb": torch.zeros(1), "x" * 5000: torch.zeros(1)}
    with pytest.raises(SpecError) as failure:
        fill_module(torch.nn.Linear(2, 2), found, {"weight": ("w",)}, (), tmp_path)
    assert "\n" not in str(failure.value)
    assert len(str(failure.value)) < 600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "reformer", "x": "' + "x" * (5 << 20) + '"}', "it is larger than 4096 KB"),
        ('{"model_type": ' + "[" * 100_000, "cannot read "),
        ('{"model_type": ' + "9" * 5_000 + "}", r"Exceeds the limit \(4300 digits\)"),
        ('{"model_type": ' + "[" * 500 + "]" * 500 + "}", "model_type is 'a deeply nested value'"),
        ('{"model_type": "reformer", "hidden_size": NaN}', "hidden_size is nan; expected int"),
        ('{"model_type": "reformer", "hidden_size": 1e999}', "hidden_size is inf; expected int"),
        (
            '{"model_type": "reformer", "layer_norm_eps": 1' + "0" * 400 + "}",
            "layer_norm_eps is 10+…; expected a finite",
        ),
        ('{"model_type": "reformer", "attn_layers": [' + "[]," * 100_000 + "0]}", "attn_layers is .*expected a list"),
        ('{"model_type": "nystromformer", "hidden_act": "' + "x" * 10**6 + '"}', "hidden_act is 'x+…"),
        ('{"model_type": "nystromformer", "id2label": ' + "[" * 500 + "]" * 500 + "}", "id2label is "),
        ('{"model_type": "nystromformer", "id2label": {"x": "A"}}', "id2label names a class 'x'; expected an object"),
        ('{"model_type": "nystromformer", "id2label": {"' + "9" * 5000 + '": "A"}}', "id2label names a class '9+…"),
    ],
    ids=range(12),
)
def test_a_hostile_config_is_refused_in_one_short_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=message) as failure:
        spec_from_checkpoint(tmp_path, {"task": "base"})
    assert len(str(failure.value)) < 600


@pytest.mark.parametrize("value", [[torch.zeros(1)], {"epoch": 1, "model": {"w": torch.zeros(1)}}])
def test_a_file_of_something_else_is_refused(folder: Path, value: Any) -> None:
    torch.save(value, folder / "pytorch_model.bin")
    with pytest.raises(SpecError, match="does not hold named tensors"):
        read_weights(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot read .*index.json"),
        ("{}", "has no weight_map"),
        ('{"weight_map": [1]}', "has no weight_map"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "names gone.safetensors, which is missing"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "outside the folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "outside the folder"),
        ('{"weight_map": {"a": ".."}}', "outside the folder"),
        ('{"weight_map": {"a": "\\u0000"}}', "outside the folder"),
        ('{"weight_map": {"a": "\\ud800"}}', "outside the folder"),
        (json.dumps({"weight_map": {"a": "x" * 5000}}), "names a file of 5000 characters"),
        ('{"weight_map": {"a": "loop"}}', "names loop, which is missing"),
        (json.dumps({"weight_map": {"a": "x"}, "x": "x" * (33 << 20)}), "it is larger than 32768 KB"),
    ],
)
def test_a_wrong_index_is_refused(folder: Path, index: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "loop").symlink_to("loop")
    with pytest.raises(SpecError, match=message):
        read_weights(folder)


def test_an_index_that_lists_more_than_its_shards_contain(folder: Path) -> None:
    save_shards(folder, weights_of(folder))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-1.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(SpecError, match="does not match its shards: 1 weights are in none, ghost"):
        read_weights(folder)
