"""Formulas of sizes: what they are worth, how they are written, and which texts are none."""

from __future__ import annotations

import math

import pytest

from effexport.models.size_formula import LONGEST_FORMULA, axes_of, size_of, with_fixed_axis, written
from effexport.models.validation import SpecError

# A formula, and what it is for a batch and a length.
FORMULAS = {
    "2*batch": lambda batch, seq: 2 * batch,
    "seq+1": lambda batch, seq: seq + 1,
    "seq-2": lambda batch, seq: seq - 2,
    "seq//4": lambda batch, seq: seq // 4,
    "(seq-1)//2+1": lambda batch, seq: (seq - 1) // 2 + 1,
    "8*ceil(seq/8)": lambda batch, seq: 8 * math.ceil(seq / 8),
    "ceil((seq-3)/8)+1": lambda batch, seq: math.ceil((seq - 3) / 8) + 1,
    "min(64,seq)": lambda batch, seq: min(64, seq),
    "batch*(seq//4)+max(seq-7,1)": lambda batch, seq: batch * (seq // 4) + max(seq - 7, 1),
    "-(-seq//3)": lambda batch, seq: math.ceil(seq / 3),
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_has_the_value_that_python_gives_it(formula: str) -> None:
    for batch in (1, 2, 7):
        for seq in (1, 2, 3, 63, 64, 65, 1000):
            assert size_of(formula, {"batch": batch, "seq": seq}) == FORMULAS[formula](batch, seq)


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_is_written_without_spaces_and_read_back(formula: str) -> None:
    assert written(formula) == formula
    assert written(f"( {formula.replace('*', ' * ')} )") == formula


def test_sizes_and_names_of_axes_are_their_own() -> None:
    assert size_of(7, {}) == 7
    # whatever a user has called an axis of an input
    assert size_of("n-1", {"n-1": 5, "n": 3}) == 5
    assert axes_of("batch*(height//16)+min(2,width)") == {"batch", "height", "width"}
    with pytest.raises(KeyError):
        size_of("2*batch", {"seq": 3})


def test_an_axis_of_one_size_is_filled_in() -> None:
    axes = ("batch", "seq", "seq-1")
    assert with_fixed_axis("8*ceil(seq/8)", "seq", 100, axes) == 104
    assert with_fixed_axis("batch*ceil(seq/8)", "seq", 100, axes) == "batch*ceil(100/8)"
    assert with_fixed_axis("2*batch", "seq", 100, axes) == "2*batch"
    assert with_fixed_axis("seq-1", "seq", 100, axes) == "seq-1"
    assert [with_fixed_axis(dim, "seq", 100, axes) for dim in ("seq", "batch", 5)] == [100, "batch", 5]


@pytest.mark.parametrize(
    "text",
    [
        *("", "seq//0", "seq//batch", "seq/2", "ceil(seq)", "ceil(seq//2)", "ceil(seq/batch)", "seq**2", "seq%8"),
        *(
            "max(seq)",
            "min",
            "ceil",
            "1.5*seq",
            "True",
            "'a'",
            "seq.bit_length()",
            "__import__('os')",
            "[seq]",
            "f(seq)",
        ),
        *("seq if 1 else 2", "seq\n", "séq", "lambda: 1", "seq:=1", "2*", f"{2**40}*seq", "min(seq,2,key=seq)"),
        *("(" * 150 + "seq" + ")" * 150, "-" * (LONGEST_FORMULA - 3) + "seq+", "+".join(["seq"] * LONGEST_FORMULA)),
    ],
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is not a formula; expected names of free axes, whole numbers"):
        size_of(text, {"seq": 3})


def test_many_signs_in_a_row_are_no_danger() -> None:
    assert size_of("-" * (LONGEST_FORMULA - 4) + "seq", {"seq": 3}) == 3
