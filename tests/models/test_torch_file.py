"""Files of torch.save: what torch.load reads is read alike, whatever costs much or cannot be is refused early."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign.pickles import BOMBS, FORMS, NUMBERS, VIEWS, archive_of, described, numbers
from torch import Tensor

from effexport.models.checkpoints import torch_file
from effexport.models.checkpoints.torch_file import MOST_BYTES_OF_DIRECTORY, read_torch_file
from effexport.models.checkpoints.weights import fill_module, read_tensors
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch")
# 800,000 dicts of 64 bytes, with their places in a list, and the pickle itself.
MOST_BYTES = 80 << 20
DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)
Make = Callable[[bytes], bytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pytorch_model.bin"


def random_tensor(dice: random.Random, earlier: list[Tensor]) -> Tensor:
    """A tensor of any type and layout; perhaps one that shares its storage with an earlier one."""
    shape = [dice.randrange(6) for _ in range(dice.randrange(5))]
    tensor = (8 * torch.rand(shape)).to(dice.choice(DTYPES))
    how = dice.randrange(8)
    if how == 0 and tensor.ndim > 1:
        return tensor.transpose(0, 1)
    if how == 1 and tensor.ndim:
        return tensor[1:]
    if how == 2 and tensor.ndim:
        return tensor[::2]
    if how == 3:
        return tensor[None].expand(7, *shape)
    if how == 4 and earlier:
        return dice.choice(earlier)[..., :1]
    if how == 5 and tensor.is_floating_point():
        return torch.nn.Parameter(tensor)
    return tensor


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_a_state_dict_is_read_as_torch_load_reads_it(path: Path, seed: int, zipped: bool) -> None:
    dice = random.Random(seed)
    saved: dict[str, Tensor] = OrderedDict() if dice.random() < 0.5 else {}
    for number in range(dice.randrange(12)):
        name = f"{dice.choice(('w', 'layer.é', 'x' * 300, ''))}{number}"
        saved[name] = random_tensor(dice, [one for one in saved.values() if one.ndim])
    if isinstance(saved, OrderedDict):
        saved._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    if not zipped:  # torch.load cannot read what torch.save writes of these types into the old format
        saved = {name: one for name, one in saved.items() if "float8" not in str(one.dtype)}
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    found, expected = read_torch_file(path), torch.load(path, weights_only=True)
    assert found is not None
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        ours = found[name]
        assert (ours.dtype, ours.shape, ours.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        # bit by bit, also where there are NaN
        assert bytes_of(ours) == bytes_of(tensor)


def bytes_of(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.clone(memory_format=torch.contiguous_format).untyped_storage().tolist()
    return found


def test_tens_of_thousands_of_tensors_are_read(path: Path) -> None:
    saved = {f"model.layers.{number}.weight": torch.full((2,), float(number)) for number in range(30_000)}
    torch.save(saved, path)
    found = read_tensors(path)
    assert found.keys() == saved.keys()
    assert found["model.layers.29999.weight"].tolist() == [29_999, 29_999]


def test_a_file_of_python_2_is_read(path: Path) -> None:
    """Its names are bytes, and an OrderedDict is made of a list of pairs."""
    pickled = described(numbers(NUMBERS), numbers(1))
    start = pickled.index(b"ctorch._utils")
    pair = b"](U\x06weight" + pickled[start:-2] + b"e"
    path.write_bytes(archive_of(b"\x80\x02ccollections\nOrderedDict\n](" + pair + b"e\x85R."))
    assert read_tensors(path)["weight"].tolist() == [0, 0, 0, 0]


def test_numbers_of_a_machine_with_another_order_of_bytes_are_turned_around(path: Path) -> None:
    data = archive_of(described(numbers(NUMBERS), numbers(1)), {"0": struct.pack(">4f", 1, 2, 3, 4)})
    path.write_bytes(data)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/byteorder", "big")
    assert read_tensors(path)["weight"].tolist() == [1, 2, 3, 4]


def test_a_parameter_that_is_expanded_stays_small(path: Path) -> None:
    path.write_bytes(archive_of(described(numbers(2**40), numbers(0))))
    assert read_tensors(path)["weight"].untyped_storage().nbytes() == 4 * NUMBERS


def refusal(path: Path) -> str:
    with pytest.raises(SpecError, match=r"is not a readable weights file|does not hold named tensors") as failure:
        read_tensors(path)
    return str(failure.value)


# both forms have one interpreter
@pytest.mark.parametrize(
    ("name", "form"), [*((name, "archive") for name in BOMBS), ("nothing", "old"), ("tensors", "old")]
)
def test_a_pickle_that_costs_much_is_refused_early(
    path: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counted(dict[int, Any]):
        steps = 0

        def __getitem__(self, code: int) -> Any:
            Counted.steps += 1
            return super().__getitem__(code)

    monkeypatch.setattr(torch_file, "INSTRUCTIONS", Counted(torch_file.INSTRUCTIONS))
    path.write_bytes(FORMS[form](BOMBS[name]))
    message = refusal(path)
    # about a second on a processor of 2023; the older format has three short pickles before it
    assert Counted.steps <= torch_file.MOST_STEPS + 100
    assert len(message) < 500 + len(str(path))


@pytest.mark.parametrize("name", ["marks", "dicts", "storages"])
def test_a_pickle_that_costs_much_takes_little_memory(path: Path, name: str) -> None:
    path.write_bytes(archive_of(BOMBS[name]))
    tracemalloc.start()
    try:
        refusal(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("message", "pickled"),
    [pytest.param(message, pickled, id=name) for message, known in VIEWS.items() for name, pickled in known.items()],
)
def test_a_tensor_that_cannot_be_is_refused(path: Path, message: str, pickled: bytes, form: Make) -> None:
    path.write_bytes(form(pickled))
    with pytest.raises(SpecError, match=message):
        read_tensors(path)


def test_an_archive_of_more_entries_than_a_model_has_is_refused(path: Path) -> None:
    entry = b"PK\x01\x02" + bytes(24) + struct.pack("<HHH", 3, 0, 0) + bytes(12) + b"x/a"
    count = MOST_BYTES_OF_DIRECTORY // len(entry) + 1
    length = count * len(entry)
    end = b"PK\x05\x06" + struct.pack("<HHHHLLH", 0, 0, 0xFFFF, 0xFFFF, length, 4, 0)
    large = b"PK\x06\x06" + struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, count, count, length, 4)
    locator = b"PK\x06\x07" + struct.pack("<LQL", 0, 4 + length, 1)
    short_end = b"PK\x05\x06" + struct.pack("<HHHHLLH", 0, 0, 1, 1, 51, 4, 0)
    for tail in (end, large + locator + end, large + locator + short_end):
        path.write_bytes(b"PK\x03\x04" + entry * count + tail)
        with pytest.raises(SpecError, match=r"its directory has 6,291,\d+ bytes, more than 6,291,456"):
            read_tensors(path)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_changed_byte_is_an_error_or_another_tensor_and_never_another_exception(path: Path, form: Make) -> None:
    right = form(described(numbers(2, 2), numbers(2, 1)))
    dice = random.Random(0)
    ends: dict[bool, int] = {True: 0, False: 0}
    for _ in range(500):
        data = bytearray(right)
        data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data)
        try:
            found = read_tensors(path)
        except SpecError:
            ends[False] += 1
        else:
            assert sum(tensor.numel() for tensor in found.values()) <= NUMBERS
            ends[True] += 1
    assert min(ends.values()) > 50


def test_packed_numbers_are_refused_by_name(tmp_path: Path) -> None:
    packed = torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    found: dict[str, Any] = {"weight": packed}
    with pytest.raises(SpecError, match="1 tensor of two numbers in a byte: weight"):
        fill_module(torch.nn.Linear(2, 2, bias=False), found, {"weight": ("weight",)}, (), tmp_path)
