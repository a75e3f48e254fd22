"""Messages of TensorRT, understood: they are those of TensorRT-RTX 1.7.1, as it gave them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from effexport.base.errors import StageError
from effexport.base.termination import Terminated, ending_in_order
from effexport.tensorrt.bindings import BuildLog, explain, interrupting, make_monitor, plain
from effexport.tensorrt.engine_from_onnx import built
from effexport.tensorrt.sidecar import check_dtypes, check_precision, count_dtypes, described_dtype, layers_of_engine

WORKSPACE = (
    "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([tactic.cpp:1676: enumerate_tactics] Tactic Selection: no "
    "tactics to implement the operation within workspace limit. Consider increase the allowed workspace size if "
    "applicable.; [tactic.cpp:264: run] Error during tactic selection. In compileGraph at "
    "/_src/optimizer/myelin/codeGenerator.cpp:2012)"
)
TURING = (
    "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([pass.cpp:337: check_turing_op_compatibility] Cannot "
    "compile operation 'node_matmul_1' for Turing (SM75): FP32 GEMM is not supported. In compileGraph at "
    "/_src/optimizer/myelin/codeGenerator.cpp:2012)"
)
SHAPES = (
    "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (IMatrixMultiplyLayer node_of_y: node_of_y: "
    "attempt to multiply two matrices with mismatching dimensions In processCheck at "
    "/_src/optimizer/shapeof/graphShapeAnalyzer.cpp:1066 In analyzeShapes at "
    "/_src/optimizer/shapeof/graphShapeAnalyzer.cpp:2825)"
)
NO_GPU = (
    "IBuilder::buildSerializedNetwork: Error Code 1: Cuda Runtime (In generateForCurrent at "
    "/_src/runtime/core/cudaDeviceProfile.cpp:221 (cudaError 35: CUDA driver version is insufficient for CUDA runtime "
    "version))"
)
UNKNOWN = "IBuilder::buildSerializedNetwork: Error Code 2: Internal Error (Something new In pass at /_src/a.cpp:1)"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (WORKSPACE, ["fits into the workspace", "workspace in [engine]", "--profile"]),
        (TURING, ["node node_matmul_1", "SM 75", "FP32 GEMM is not supported", "compute_capabilities"]),
        (SHAPES, ["IMatrixMultiplyLayer at node node_of_y", "mismatching dimensions"]),
        (NO_GPU, ["needs an NVIDIA GPU", "--target trt-rtx"]),
        (UNKNOWN, ["Something new"]),
    ],
)
def test_a_failure_is_told_as_node_reason_and_remedy_and_without_cpp(line: str, words: list[str]) -> None:
    text = explain(["an earlier line that says nothing", line] if line is not UNKNOWN else [line])
    for word in words:
        assert word in text
    for cpp in ("::", "/_src/", ".cpp", "Error Code"):
        assert cpp not in text.replace("effexport::", "")


def test_a_failure_without_a_word_says_so() -> None:
    assert explain([]) == "it gave no reason"


def test_a_line_loses_where_it_came_from_and_keeps_what_it_says() -> None:
    assert plain("f: creator && (In function check at /_src/x.cpp:3)  twice  ") == "f: creator && twice"


class FakeLogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity: int, message: str) -> None:
        raise NotImplementedError


class FakeMonitor:
    pass


def test_the_log_keeps_errors_and_warnings_and_drops_what_is_said_for_every_graph() -> None:
    api: Any = SimpleNamespace(ILogger=FakeLogger)
    log = BuildLog(api)
    log.logger.log(FakeLogger.INFO, "chatter")
    log.logger.log(FakeLogger.WARNING, "ModelImporter.cpp:1071: Make sure input input_ids has Int64 binding.")
    log.logger.log(FakeLogger.WARNING, "something odd")
    log.logger.log(FakeLogger.ERROR, "one ")
    log.logger.log(FakeLogger.INTERNAL_ERROR, "two")
    assert (log.errors, log.warnings) == (["one", "two"], ["something odd"])


def test_a_message_goes_to_the_logs_of_its_thread_and_from_a_thread_without_one_to_all() -> None:
    api: Any = SimpleNamespace(ILogger=FakeLogger)
    mine = BuildLog(api)
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as pool_of_tensorrt:
        other = pool.submit(BuildLog, api).result()
        assert other.logger is mine.logger
        mine.logger.log(FakeLogger.ERROR, "mine")
        pool.submit(mine.logger.log, FakeLogger.ERROR, "other").result()
        assert (mine.errors, other.errors) == (["mine"], ["other"])
        pool_of_tensorrt.submit(mine.logger.log, FakeLogger.WARNING, "both").result()
        assert mine.warnings == other.warnings == ["both"]
        # a runner that another thread opened
        other.restart()
        mine.logger.log(FakeLogger.ERROR, "in the turn of this thread")
        assert other.errors == ["in the turn of this thread"]


def test_there_is_one_logger_even_if_two_threads_begin_at_once() -> None:
    class SlowLogger(FakeLogger):
        def __init__(self) -> None:
            time.sleep(0.05)

    api: Any = SimpleNamespace(ILogger=SlowLogger)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: BuildLog(api), range(2))
    assert first.logger is second.logger


def test_a_log_of_a_thread_that_has_ended_takes_no_messages_from_others() -> None:
    api: Any = SimpleNamespace(ILogger=FakeLogger)
    opened: list[BuildLog] = []
    ended = threading.Thread(target=lambda: opened.append(BuildLog(api)))
    ended.start()
    ended.join()
    mine = BuildLog(api)
    # its number is that of the thread that has ended, on most systems
    of_tensorrt = threading.Thread(target=mine.logger.log, args=(FakeLogger.ERROR, "x"))
    of_tensorrt.start()
    of_tensorrt.join()
    assert mine.errors == opened[0].errors == ["x"]


def test_python_collects_no_garbage_while_tensorrt_makes_an_object() -> None:
    api: Any = SimpleNamespace(ILogger=FakeLogger)
    log = BuildLog(api)
    assert log.made(lambda logger: (logger, gc.isenabled())) == (log.logger, False)
    assert gc.isenabled()


def test_ctrl_c_in_a_callback_of_the_bindings_cancels_the_build() -> None:
    class Builder:
        def build_serialized_network(self, network: object, config: Any) -> bytes | None:
            # the bindings print what a callback raises, and go on
            with contextlib.suppress(KeyboardInterrupt):
                handler = signal.getsignal(signal.SIGINT)
                assert callable(handler)
                handler(signal.SIGINT, None)
            return b"engine" if config.progress_monitor.step_complete("build", 0) else None

    api: Any = SimpleNamespace(ILogger=FakeLogger, IProgressMonitor=FakeMonitor)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monitor = make_monitor(api, lambda *_: None)
        config: Any = SimpleNamespace(progress_monitor=monitor)
        with pytest.raises(KeyboardInterrupt), interrupting(monitor):
            built(Builder(), None, config, BuildLog(api))  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_cancels_the_build_and_ends_the_command() -> None:
    api: Any = SimpleNamespace(IProgressMonitor=FakeMonitor)
    monitor = make_monitor(api, lambda *_: None)
    goes_on: list[bool] = []

    def build() -> None:
        with ending_in_order(), interrupting(monitor):
            os.kill(os.getpid(), signal.SIGTERM)
            goes_on.append(monitor.step_complete("build", 0))

    with pytest.raises(Terminated):
        build()
    assert goes_on == [False]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_progress_is_reported_for_the_outer_phases_and_an_interrupt_cancels_the_build() -> None:
    api: Any = SimpleNamespace(IProgressMonitor=FakeMonitor)
    seen: list[tuple[str, float]] = []

    def on_progress(phase: str, share: float) -> None:
        seen.append((phase, share))
        if share > 0.5:
            raise KeyboardInterrupt

    monitor = make_monitor(api, on_progress)
    monitor.phase_start("build", None, 4)
    monitor.phase_start("inner", "build", 2)
    monitor.phase_start("innermost", "inner", 2)
    assert monitor.step_complete("innermost", 0)
    assert monitor.step_complete("inner", 0)
    assert seen == [("build", 0.0), ("inner", 0.0), ("inner", 0.5)]
    monitor.phase_finish("inner")
    assert not monitor.interrupted
    assert not monitor.step_complete("build", 3)
    assert monitor.interrupted


LAYERS = [
    {"name": "matmul", "type": "MATRIX_MULTIPLY", "outputs": [{"name": "y", "dtype": "float16"}]},
    {"name": "kept", "type": "ELEMENTWISE", "outputs": [{"name": "z", "dtype": "float32"}]},
    {"name": "shape", "type": "SHAPE", "outputs": [{"name": "n", "dtype": "int64"}]},
]


def test_types_that_the_model_asks_for_pass_and_are_counted() -> None:
    assert check_dtypes(LAYERS, {"y": "float16", "z": "float32", "n": "int32", "other": "float32"}) == 2
    assert count_dtypes(LAYERS) == {"float16": 1, "float32": 1, "int64": 1}


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"y": "float32"}, "y of layer matmul is float16; the model says float32"),
        ({"z": "float16"}, "z of layer kept is float32; the model says float16"),
    ],
)
def test_a_float32_tensor_that_became_fp16_fails_and_so_does_the_reverse(expected: dict[str, str], words: str) -> None:
    with pytest.raises(StageError, match=words):
        check_dtypes(LAYERS, expected)


def test_an_fp16_engine_without_any_fp16_product_fails() -> None:
    check_precision(LAYERS, "fp16")
    with pytest.raises(StageError, match="bf16 was asked for, and no matrix product of the engine is bfloat16"):
        check_precision(LAYERS, "bf16")
    float32 = [{"name": "m", "type": "MATRIX_MULTIPLY", "outputs": [{"name": "y", "dtype": "float32"}]}]
    check_precision(float32, "fp32")
    lowered = [{"name": "e", "type": "ELEMENTWISE", "outputs": [{"name": "x", "dtype": "float16"}]}]
    with pytest.raises(StageError, match="fp32 was asked for, and 1 tensors are float16"):
        check_precision([*float32, *lowered], "fp32")


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        ({"Format/Datatype": "Row major linear FP32"}, "float32"),
        ({"Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}, "float16"),
        ({"Format/Datatype": "Half"}, "float16"),
        ({"Format": "Row major linear", "Datatype": "BFloat16"}, "bfloat16"),
        ({"Format/Datatype": "Row major INT64 format"}, "int64"),
        ({"Format/Datatype": "N/A due to dynamic shapes"}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_the_words_of_the_engine_inspector_are_understood(tensor: dict[str, str], dtype: str) -> None:
    assert described_dtype(tensor) == dtype


def test_an_inspected_engine_has_layers_with_tactics_and_the_nodes_they_stand_for() -> None:
    text = """{"Layers": [{"Name": "a + b", "LayerType": "gemm", "Inputs": [],
      "Outputs": [{"Name": "y", "Dimensions": [1, 2], "Format/Datatype": "Half"}],
      "TacticName": "sm90_gemm", "Metadata": "[ONNX Layer: a]"}, "only a name"], "Bindings": ["x", "y"]}"""
    assert layers_of_engine(text) == [
        {
            "name": "a + b",
            "type": "gemm",
            "outputs": [{"name": "y", "dtype": "float16"}],
            "tactic": "sm90_gemm",
            "nodes": "[ONNX Layer: a]",
        },
        {"name": "only a name", "type": "unknown", "outputs": []},
    ]
    with pytest.raises(StageError, match="cannot be read"):
        layers_of_engine("{}")
