"""scripts/portability.py: its judgement, its workers, its tables, and a part of its matrix."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from portability import environments, known
from portability.cells import NOT_RUN, REFUSED, RIGHT, WRONG, Matrix, Outcome, words_of
from portability.environments import MAIN, TOOLS, MissingError, PythonVenv, pinned
from portability.known import KNOWN, surprise
from portability.models import PRECISIONS, VARIANTS
from portability.page import PAGE, UNEXPECTED
from portability.tools import TABLE, Conversion, Runtime, Tool
from portability.worker import ToolError, Worker
from portability.workers.conversions import CONVERSIONS
from portability.workers.messages import packed, unpacked
from portability.workers.sessions import RUNTIMES

ROOT = Path(__file__).parents[1]
NAMES = [tool.name for tool in TABLE]
# What runs in the suite, in float32: every kind of tool and runtime. scripts/soak.sh runs the rest.
IN_SUITE = (
    "effexport inline",
    "onnx.inliner",
    "onnxslim",
    "onnxsim",
    "onnxscript.optimizer",
    "onnx_ir passes",
    "onnxruntime all",
    "OpenVINO, inlined",
    "onnxruntime-web in Node, file as it is",
    "onnxruntime-web in Chromium, file as it is",
    "ONNX Runtime 1.21",
)
# These have between them every kind of node that a tool has to treat: what stays in float32, hashes, position biases.
SOME_VARIANTS = ("softmax", "lsh", "aft-local")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(tmp_path_factory.mktemp("matrix")) as matrix:
        yield matrix


@pytest.mark.requires("portability", "browser", "torch", "onnx", "ort")
@pytest.mark.parametrize("name", IN_SUITE)
def test_variants_go_through_a_tool_as_the_tables_say(name: str, matrix: Matrix) -> None:
    tool = next(tool for tool in TABLE if tool.name == name)
    found = [matrix.cell(tool, variant, "fp32") for variant in SOME_VARIANTS]
    assert [outcome for outcome in found if surprise(outcome) or outcome.verdict == NOT_RUN] == []


@pytest.mark.slow
@pytest.mark.requires("torch", "onnx", "ort")
def test_a_tool_that_damages_a_file_is_caught(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    def damaged(step: Conversion, source: Path, model: object) -> Path:
        proto = onnx.load(source)
        node = next(node for node in proto.graph.node if node.op_type == "Gelu")
        node.op_type = "Tanh"
        del node.attribute[:]
        target = tmp / "model.onnx"
        onnx.save(proto, target)
        return target

    tmp = matrix._folder
    monkeypatch.setattr(matrix, "converted", damaged)
    tool = Tool(name="breaker", advice="", conversions=(Conversion("breaker", MAIN, "onnx"),))
    outcome = matrix.cell(tool, "linear", "fp32")
    assert outcome.verdict == WRONG
    assert "arithmetic" in outcome.words
    assert outcome.error is not None
    assert 0.01 < outcome.error < math.inf


@pytest.mark.slow
@pytest.mark.requires("torch", "onnx", "ort")
def test_a_file_that_a_tool_makes_unloadable_counts_as_refused(matrix: Matrix) -> None:
    # onnx's converter drops the functions, and nothing inlines them before
    tool = Tool(name="dropper", advice="", conversions=(Conversion("onnx.version_converter 23", MAIN, "onnx"),))
    outcome = matrix.cell(tool, "linear", "fp32")
    assert outcome.verdict == REFUSED
    assert "EluLinearAttention" in outcome.words


@pytest.mark.requires("torch", "onnx", "ort")
@pytest.mark.slow
def test_a_tool_without_its_environment_is_not_run_with_the_reason(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "cache_folder", lambda: tmp_path)
    absent = PythonVenv("onnxruntime-1.26")
    tool = Tool(name="absent", advice="", runtime=Runtime("onnxruntime", absent, "onnxruntime"))
    with Matrix(tmp_path / "files") as fresh:
        outcome = fresh.cell(tool, "linear", "fp32")
    assert outcome.verdict == NOT_RUN
    assert "scripts/portability.py --prepare" in outcome.words


@dataclass(frozen=True)
class Script:
    """An environment whose worker is a line of Python."""

    line: str
    name: str = "script"

    def prepare(self) -> None:
        pass

    def version(self, distribution: str) -> str:
        return "0"

    def command(self, url: str, home: str) -> list[str]:
        return [sys.executable, "-c", self.line]


def test_the_end_of_a_worker_is_an_answer_with_its_last_words(tmp_path: Path) -> None:
    line = "import os, sys; print('out of luck', file=sys.stderr, flush=True); os._exit(3)"
    with Worker(Script(line), tmp_path) as worker:
        for _ in range(2):  # it starts again
            with pytest.raises(ToolError, match="ended with exit status 3: out of luck"):
                worker.call({"verb": "run"}, {})


def test_a_worker_that_is_killed_is_named_by_its_signal(tmp_path: Path) -> None:
    with (
        Worker(Script("import os; os.kill(os.getpid(), 9)"), tmp_path) as worker,
        pytest.raises(ToolError, match="SIGKILL: no message"),
    ):
        worker.call({"verb": "run"}, {})


def test_an_error_of_a_tool_is_passed_on_and_the_worker_lives_on(tmp_path: Path) -> None:
    with Worker(MAIN, tmp_path) as worker:
        for _ in range(2):
            with pytest.raises(ToolError, match="KeyError: 'nothing'"):
                worker.call({"verb": "open", "number": 0, "runtime": "nothing"}, {"model": np.zeros(1, np.uint8)})


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_messages_keep_headers_and_arrays(dtype: str) -> None:
    arrays = {"a": np.arange(6).reshape(2, 3).astype(dtype), "none": np.zeros((0, 4), dtype), "one": np.ones((), dtype)}
    header, found = unpacked(packed({"verb": "run", "text": "ä"}, arrays))
    assert header == {"verb": "run", "text": "ä"}
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_a_failure_is_expected_only_as_listed_and_a_success_only_if_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = known.Known(tools=("tool",), verdict=WRONG, reason="", remedy="", variants=("lsh",), precisions=("fp16",))
    monkeypatch.setattr(known, "KNOWN", (entry,))
    assert surprise(Outcome("tool", "lsh", "fp16", WRONG)) == ""
    assert "take it out" in surprise(Outcome("tool", "lsh", "fp16", RIGHT))
    assert surprise(Outcome("tool", "lsh", "fp16", REFUSED)) == "expected: wrong"
    assert surprise(Outcome("tool", "lsh", "fp32", WRONG)) == "expected: right"
    assert surprise(Outcome("other", "lsh", "fp16", WRONG)) == "expected: right"
    assert surprise(Outcome("other", "lsh", "fp16", RIGHT)) == ""


def test_every_tool_has_one_row_and_a_function_that_does_it() -> None:
    assert len(set(NAMES)) == len(NAMES)
    steps = {step.name for tool in TABLE for step in tool.conversions}
    assert steps == set(CONVERSIONS)
    runtimes = {tool.runtime.name for tool in TABLE if tool.runtime is not None}
    assert runtimes - {"onnxruntime-web"} == set(RUNTIMES)


def test_known_failures_name_tools_variants_and_precisions_that_exist() -> None:
    for entry in KNOWN:
        assert set(entry.tools) <= set(NAMES)
        assert set(entry.variants) <= set(VARIANTS)
        assert set(entry.precisions) <= set(PRECISIONS)
        assert entry.verdict in (REFUSED, WRONG)
        assert entry.reason
        assert entry.remedy


def test_packages_that_both_environments_have_are_of_one_version() -> None:
    for name in ("onnx", "onnx-ir", "onnxruntime", "onnxscript", "numpy", "protobuf", "ml_dtypes"):
        assert TOOLS.version(name) == pinned(ROOT / "constraints.txt", name)


def test_the_page_shows_every_tool_in_its_pinned_version() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [tool.name for tool in TABLE if f"\n| {tool.name} | {tool.version} |" not in page] == []


def test_the_page_is_of_a_complete_run_in_which_all_was_as_expected() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert NOT_RUN not in page
    assert UNEXPECTED not in page


def test_the_page_shows_that_all_variants_survive_the_common_tools() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in (*IN_SUITE, "onnx.version_converter 23, inlined", "ONNX Runtime 1.19", "ONNX Runtime 1.26"):
        version = next(tool.version for tool in TABLE if tool.name == name)
        assert f"\n| {name} | {version} | 8 of 8 |" in page, name


def test_words_of_tools_are_shown_without_folders() -> None:
    words = "RuntimeError: /project/onnx/no_version.h:23: read /tmp/x1/36/model.onnx, 1/2 of an op/function\n more"
    assert words_of(ToolError(words)) == "RuntimeError: no_version.h:23: read model.onnx, 1/2 of an op/function more"


def test_every_requirement_is_pinned() -> None:
    for path in environments.REQUIREMENTS.glob("*.txt"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines), path.name
    assert '"^' not in (environments.REQUIREMENTS / "package.json").read_text(encoding="utf-8")


def test_a_missing_environment_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "cache_folder", lambda: tmp_path)
    with pytest.raises(MissingError, match=r"run: scripts/portability.py --prepare"):
        PythonVenv("tools").command("", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="no node on PATH"):
        environments.NODE.prepare()
    with pytest.raises(MissingError, match="no browser"):
        environments.browser()
