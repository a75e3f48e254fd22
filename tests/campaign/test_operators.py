"""The campaign's calls of single operators: what is noticed of them; scripts/soak.sh makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from campaign import operators
from campaign.commands import Tally
from campaign.operator_calls import drawn

from effexport.plugins.contract import load_contract
from effexport.plugins.ops import OPS

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "native")
# As many as find each operator valid, refused, and running on undefined inputs.
FEW = 300


def test_the_calls_name_all_operators_and_repeat_by_their_number() -> None:
    calls = [drawn(3, index) for index in range(FEW)]
    assert {call.op for call in calls} == set(OPS)
    contracts = {op: load_contract(OPS[op]) for op in OPS}
    cases = {op: {*contract.small, *contract.cases} for op, contract in contracts.items()}
    assert sum(call.case is not None and call.case not in cases[call.op] for call in calls) > FEW // 10
    assert [operators.describe(call) for call in calls] == [operators.describe(drawn(3, i)) for i in range(FEW)]


def test_a_result_that_differs_from_the_formula_is_noticed() -> None:
    call = next(call for call in (drawn(0, index) for index in range(FEW)) if call.case and call.op == "LSHSort")
    results = operators.results_of(operators.opened_session(operators.model(call, "symbols")), call)
    operators.compare(call, results)
    results[0] = results[0] + np.int32(1)
    with pytest.raises(AssertionError, match=r"LSHSort.* order differs from the formula"):
        operators.compare(call, results)


def test_a_refused_valid_call_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = next(call for call in (drawn(0, index) for index in range(FEW)) if call.op == "LSHSort")
    wrong = replace(call, attributes={"num_buckets": 0}, harm="")
    monkeypatch.setattr(operators, "drawn", lambda seed, index: wrong)
    monkeypatch.setattr(operators.signal, "signal", lambda number, action: None)
    with pytest.raises(AssertionError, match=r"a valid call was refused: .*LSHSort: num_buckets is 0"):
        operators.caller(tmp_path, 0, 0)(0)


def test_a_report_of_a_sanitizer_is_a_problem_of_its_case(tmp_path: Path) -> None:
    frame = "#1 0x55 in effexport::lsh_sort::place(int) plugins/lsh_sort/kernel_cpu.cc:55"
    (tmp_path / "report.12").write_text(f"==12==ERROR: AddressSanitizer: heap-buffer-overflow\n    {frame}\n")
    (tmp_path / "case.12").write_text("345")
    (tmp_path / "report.13").write_text("==13==WARNING: AddressSanitizer failed to allocate 0x1500000000 bytes\n")
    tally = Tally()
    operators.add_reports(tally, tmp_path)
    assert tally.problems == [f"case 345: ==12==ERROR: AddressSanitizer: heap-buffer-overflow {frame}"]


@pytest.mark.soak
def test_calls_end_well_under_the_sanitizers(tmp_path: Path) -> None:
    tally = operators.run(2 * FEW, 2, tmp_path)
    assert tally.problems == []
    assert tally.cases == 2 * FEW
