"""fla-core's functions in plain PyTorch beside ours, in calls of every kind, and a module around one in a file."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import effexport
from effexport.models.adapters.fla_functions import FORMS, folder_of_fla, functions_in, recurrences_as_operators

pytestmark = pytest.mark.requires("torch", "foreign")
BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 8, 4
FOLDERS = {
    "naive_recurrent_gated_delta_rule": "gated_delta_rule",
    "naive_chunk_gated_delta_rule": "gated_delta_rule",
    "naive_recurrent_kda": "kda",
    "naive_chunk_kda": "kda",
    "delta_rule_recurrence": "delta_rule",
    "naive_recurrent_gla": "gla",
    "naive_recurrent_simple_gla": "simple_gla",
    "naive_chunk_simple_gla": "simple_gla",
    "naive_retention": "retention",
}
# Of the RMS of a result: both are float32, and sum over 70 tokens in other orders.
LIMIT = 2e-5


def function_of_fla(name: str) -> types.FunctionType:
    """From its file, because the package itself needs Triton."""
    found = importlib.util.find_spec("fla")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "ops" / FOLDERS[name] / "naive.py"
    spec = importlib.util.spec_from_file_location(f"loaded_{FOLDERS[name]}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: types.FunctionType = getattr(module, name)
    return function


def arguments_for(name: str, seq: int, *, with_state: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seq)
    heads_axis = FORMS[name].heads

    def drawn(*channels: int) -> Tensor:
        shape = (BATCH, seq, HEADS) if heads_axis == 2 else (BATCH, HEADS, seq)
        return torch.randn(*shape, *channels, generator=generator)

    found: dict[str, Any] = {"q": drawn(KEY_DIM), "k": nn.functional.normalize(drawn(KEY_DIM), dim=-1)}
    found["v"] = drawn(VALUE_DIM)
    if name == "naive_retention":
        return found
    if FORMS[name].delta:
        found["beta"] = drawn().sigmoid()
    if name != "delta_rule_recurrence":
        per_channel = name in ("naive_recurrent_kda", "naive_chunk_kda", "naive_recurrent_gla")
        gate = nn.functional.logsigmoid(drawn(KEY_DIM) if per_channel else drawn())
        found[FORMS[name].decay] = gate
    if with_state:
        found["initial_state"] = torch.randn(BATCH, HEADS, KEY_DIM, VALUE_DIM, generator=generator)
        found["output_final_state"] = True
    return found


def results(answer: Any) -> list[Tensor]:
    return [x for x in (answer if isinstance(answer, tuple) else (answer,)) if x is not None]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("with_state", [False, True])
def test_every_function_is_what_the_operator_computes(name: str, with_state: bool) -> None:
    original = function_of_fla(name)
    for seq in (1, 5, 70):
        given = arguments_for(name, seq, with_state=with_state)
        if name == "naive_chunk_kda" and seq % 64:  # which takes whole chunks
            given["chunk_size"] = seq
        expected = results(original(**given))
        with recurrences_as_operators() as calls:
            found = results(original(**given))
        assert calls == {name: 1}
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= LIMIT * theirs.square().mean().sqrt()


def test_a_function_is_found_wherever_it_is_held_and_is_itself_again() -> None:
    held = functools.partial(function_of_fla("naive_recurrent_gla"), output_final_state=True)
    given, code = arguments_for("naive_recurrent_gla", 5, with_state=False), held.func.__code__
    names = set(held.func.__globals__)
    with recurrences_as_operators() as calls:
        assert held.func.__code__ is not code
        assert held(*given.values())[1].shape == (BATCH, HEADS, KEY_DIM, VALUE_DIM)
    assert calls == {"naive_recurrent_gla": 1}
    assert held.func.__code__ is code
    assert set(held.func.__globals__) == names
    folder = folder_of_fla()
    assert folder is not None
    assert held.func in functions_in(folder)


@pytest.mark.parametrize("name", FORMS)
def test_results_have_the_type_that_the_function_gives_them(name: str) -> None:
    original = function_of_fla(name)
    for halves in ("qkv", "qk", "v"):
        given = arguments_for(name, 5, with_state=False)
        given |= {key: given[key].to(torch.bfloat16) for key in halves}
        if name == "naive_chunk_kda":
            given["chunk_size"] = 5
        expected = results(original(**given))[0].dtype
        with recurrences_as_operators():
            assert results(original(**given))[0].dtype == expected, halves


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("delta_rule_recurrence", {"beta": torch.rand(BATCH, HEADS, 5, VALUE_DIM)}),  # a strength for each channel
        ("naive_recurrent_gated_delta_rule", {"initial_state": torch.zeros(1, HEADS, KEY_DIM, VALUE_DIM)}),
        ("naive_recurrent_gated_delta_rule", {"scale": torch.full((1, HEADS, 1, 1), 0.5)}),
        ("naive_recurrent_gated_delta_rule", {"scale": torch.tensor(0.5)}),
        ("naive_recurrent_gated_delta_rule", {"g": torch.full((BATCH, 5, 1), -0.5)}),  # one head for all
        ("naive_recurrent_simple_gla", {"g": torch.full((1, 5, HEADS), -0.5)}),  # one sample for all
    ],
)
def test_a_call_that_the_operator_does_not_express_stays(name: str, change: dict[str, Any]) -> None:
    original, given = function_of_fla(name), arguments_for(name, 5, with_state=False) | change
    expected = original(**given)[0]
    with recurrences_as_operators() as calls:
        assert torch.equal(original(**given)[0], expected)
    assert not calls


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    original, kept = function_of_fla("naive_recurrent_gla"), None
    before = set(original.__globals__)
    try:
        with recurrences_as_operators():
            original(1)
    except TypeError as error:  # whose frames keep what was called
        kept = error
    assert kept is not None
    given = arguments_for("naive_recurrent_gla", 5, with_state=False)
    with recurrences_as_operators() as calls, recurrences_as_operators():
        original(**given)
    assert calls == {"naive_recurrent_gla": 1}
    assert set(original.__globals__) == before


def test_a_module_in_the_place_of_the_package_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    with recurrences_as_operators() as calls:
        assert not calls


class Layer(nn.Module):
    """A prompt or more tokens after a state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.gates = nn.Linear(16, 3 * 16), nn.Linear(16, 2 * HEADS)
        self.function = functools.partial(function_of_fla("naive_recurrent_gated_delta_rule"), output_final_state=True)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).chunk(3, -1))
        beta, decay = self.gates(x).chunk(2, -1)
        k = nn.functional.normalize(k, dim=-1)
        out, present = self.function(q, k, v, beta.sigmoid(), nn.functional.logsigmoid(decay), initial_state=state)
        return out.flatten(2), present


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
def test_a_module_around_a_function_takes_every_length_and_goes_on(tmp_path: Path) -> None:
    layer, state = Layer().eval(), torch.zeros(2, HEADS, 8, 8)
    x = torch.randn(2, 21, 16, generator=torch.Generator().manual_seed(1))
    result = effexport.export(layer, {"x": x[:, :16], "state": state}, tmp_path / "layer")
    assert "1 call of fla-core's naive_recurrent_gated_delta_rule became" in " ".join(result.report.notes)
    with effexport.load(tmp_path / "layer") as runner:
        expected, last = layer(x, state)
        for length in (20, 21):  # a prompt, and a step or none
            first = runner.run({"x": x[:, :length].numpy(), "state": state.numpy()})
            found, present = (torch.from_numpy(first[name]) for name in first)
            if length < x.shape[1]:
                second = runner.run({"x": x[:, length:].numpy(), "state": present.numpy()})
                more, present = (torch.from_numpy(second[name]) for name in second)
                found = torch.cat([found, more], dim=1)
            for ours, theirs in ((found, expected), (present, last)):
                assert (ours - theirs).abs().max() <= 1e-4 * theirs.square().mean().sqrt()
