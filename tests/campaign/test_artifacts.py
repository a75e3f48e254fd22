"""Problems that the attacks on artifacts and records report; scripts/soak.sh runs thousands of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from campaign.commands import Ended, in_workers
from campaign.onnx_mutations import mutated_model
from campaign.strange import mutated_json, text_of


@pytest.mark.parametrize(
    ("ended", "problem"),
    [
        ({"code": 1, "error": "KeyError at x.py:3"}, "KeyError at x.py:3"),
        ({"code": 3}, "exit status 3"),
        ({"code": 2, "err": "a\nb\n"}, "not one line"),
        ({"code": 2, "err": "effexport: error: a\neffexport: error: b\n"}, "not one line"),
        ({"code": 2, "err": f"effexport: error: {'x' * 5000}\n"}, "a line of"),
        ({"code": 2, "err": "effexport: error: a\n", "seconds": 3.0}, "refused after 3.0 s"),
        ({"code": 2, "err": "effexport: error: a\n", "grown_bytes": 1 << 30}, "took 1024 MB"),
    ],
)
def test_a_command_that_ends_in_another_way_is_a_problem(ended: dict[str, Any], problem: str) -> None:
    right = {"words": ["inspect"], "code": 0, "out": "", "err": "", "error": "", "seconds": 0.1, "grown_bytes": 0}
    assert Ended(**right).check() == "accepted"
    with pytest.raises(AssertionError, match=problem):
        Ended(**(right | ended)).check()


def crashing(number: int) -> Any:
    """A case of each kind: fine, wrong, a bug in the campaign, a crash."""
    import ctypes

    def case(index: int) -> str:
        if index == 1:
            raise AssertionError("wrong")
        if index == 2:
            raise KeyError("bug")
        if index == 3:
            ctypes.string_at(0)
        return "fine"

    return case


def test_a_crash_costs_one_case_and_is_known_by_its_number() -> None:
    tally = in_workers(8, crashing)
    assert tally.outcomes == {"fine": 5}
    first, second, third = sorted(tally.problems)
    assert first == "case 1: wrong"
    assert second.startswith("case 2: KeyError at test_artifacts.py")
    assert third == "case 3: the process ended with signal SIGSEGV"


def test_a_mutation_changes_one_place_and_can_be_repeated() -> None:
    value = {"a": [1, {"b": "x"}], "c": None}
    before = json.dumps(value)
    seen = set()
    for seed in range(200):
        changed, what = mutated_json(value, random.Random(seed))
        assert json.dumps(value) == before
        again, words = mutated_json(value, random.Random(seed))
        assert (text_of(again), words) == (text_of(changed), what)
        seen.add(text_of(changed))
    assert len(seen) > 100


@pytest.mark.requires("onnx")
def test_a_mutated_model_can_be_repeated(tmp_path: Path) -> None:
    import onnx
    from onnx import helper

    value = helper.make_tensor_value_info
    node = helper.make_node("Flatten", ["x"], ["y"], axis=1)
    weight = helper.make_tensor("w", 1, [2], [1.0, 2.0])
    graph = helper.make_graph([node], "g", [value("x", 1, [2])], [value("y", 1, [2])], [weight])
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()
    changed = {mutated_model(data, random.Random(seed))[0] for seed in range(100)}
    assert changed == {mutated_model(data, random.Random(seed))[0] for seed in range(100)}
    assert len(changed) > 50
    assert any(is_model(one) for one in changed)
    assert onnx.ModelProto.FromString(data).graph.node[0].op_type == "Flatten"


def is_model(data: bytes) -> bool:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return bool(onnx.ModelProto.FromString(data).graph.node)
    except DecodeError:
        return False
