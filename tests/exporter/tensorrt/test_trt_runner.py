"""The TensorRT runner on a TensorRT and a CUDA made of Python: tests/support/fake_tensorrt.py says what that proves."""

from __future__ import annotations

import gc
import hashlib
import importlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt import FakeContext, FakeCuda, FakeEngine, FakeModel, FakeRuntime, FakeTensorRT, written_engine
from tensorrt_stub import declared

from effexport.base.dtypes import TensorInfo, numpy_dtype
from effexport.base.errors import EffexportError, GraphWarning, MissingExtraError, RuntimeFailedError, UserError
from effexport.runners.cuda import EAGER_BYTES, Buffers, CudaPython, CudaTorch
from effexport.runners.options import RunOptions
from effexport.runners.runner import FeedLimits, Runner
from effexport.tensorrt.runner import TrtRunner
from effexport.tensorrt.sidecar import sidecar_path, write_sidecar

WIDTH = 3
GRAPHS = RunOptions(runtime="trt", cuda_graph=True)
Make = Callable[..., "Machine"]


def example_model(dtype: str = "float32", max_seq: int = 64) -> FakeModel:
    """`doubled` is 2x where the mask is set; `total` and `positive` have other types and other shapes."""

    def function(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x, mask = feeds["hidden_states"], feeds["attention_mask"]
        return {
            "doubled": (x.astype(np.float32) * 2 * mask[..., None]).astype(x.dtype),
            "total": mask.sum(axis=1, dtype=np.int32),
            "positive": (x > 0).any(axis=2),
        }

    def output_shapes(shapes: Any) -> dict[str, tuple[int, ...]]:
        batch, seq, width = shapes["hidden_states"]
        return {"doubled": (batch, seq, width), "total": (batch,), "positive": (batch, seq)}

    def profile(batch: tuple[int, int, int], seq: tuple[int, int, int]) -> dict[str, Any]:
        both = list(zip(batch, seq, strict=True))
        return {"hidden_states": tuple((b, s, WIDTH) for b, s in both), "attention_mask": tuple(both)}

    return FakeModel(
        inputs=(
            TensorInfo("hidden_states", dtype, ("batch", "seq", WIDTH)),
            TensorInfo("attention_mask", "int64", ("batch", "seq")),
        ),
        outputs=(
            TensorInfo("doubled", dtype, ("batch", "seq", WIDTH)),
            TensorInfo("total", "int32", ("batch",)),
            TensorInfo("positive", "bool", ("batch", "seq")),
        ),
        profiles=(profile((1, 1, 1), (1, 8, max_seq)), profile((2, 4, 8), (1, 8, 16))),
        function=function,
        output_shapes=output_shapes,
    )


@pytest.fixture(scope="module", autouse=True)
def collection_of_what_is_new() -> None:
    """gc.collect() looks at the objects of this module's tests: those of everything imported before take a second."""
    gc.collect()
    gc.freeze()


class Machine:
    """An engine file with its sidecar, and what it runs on."""

    def __init__(self, path: Path, model: FakeModel, **changes: Any) -> None:
        self.path, self.model = path, model
        fields = {"inputs": model.inputs, "outputs": model.outputs, "profiles": model.profiles}
        self.info = written_engine(path, **{**fields, "implementation": {"LSHSort": "plugin"}, **changes})
        self.cuda = FakeCuda()
        self.api = FakeTensorRT(model, self.cuda, self.info.tensorrt_version)

    def open(self, settings: RunOptions | None = None, **options: Any) -> TrtRunner:
        return TrtRunner(self.path, settings, cuda=self.cuda, api=self.api, **options)  # type: ignore[arg-type]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(dtype: str = "float32", max_seq: int = 64, **changes: Any) -> Machine:
        return Machine(tmp_path / "trt.engine", example_model(dtype, max_seq), **changes)

    return made


@pytest.fixture
def rtx(make: Make) -> Callable[[], Machine]:
    return lambda: make(target="trt-rtx", tensorrt_version="1.7.1.116", compute_capabilities=())


def feeds_for(batch: int, seq: int, seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng([batch, seq, seed])
    return {
        "hidden_states": rng.standard_normal((batch, seq, WIDTH)).astype(numpy_dtype(dtype)),
        "attention_mask": rng.integers(0, 2, (batch, seq)),
    }


def assert_right(machine: Machine, feeds: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    expected = machine.model.function(feeds)
    assert list(outputs) == [tensor.name for tensor in machine.model.outputs]
    for name, value in expected.items():
        assert outputs[name].dtype == value.dtype
        assert np.array_equal(outputs[name], value), name


SHAPES = [(1, 1), (1, 64), (2, 16), (8, 16), (1, 63), (3, 7), (1, 1)]


@pytest.mark.parametrize("settings", [RunOptions(runtime="trt"), GRAPHS], ids=["plain", "graphs"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int64"])
def test_every_shape_and_dtype_gives_the_answer_of_the_function(make: Make, dtype: str, settings: RunOptions) -> None:
    machine = make(dtype)
    with machine.open(settings) as runner:
        for seed in range(4):
            for shape in SHAPES:
                feeds = feeds_for(*shape, seed, dtype)
                assert_right(machine, feeds, runner.run(feeds))
    machine.cuda.assert_nothing_left()


def test_a_runner_is_a_runner_and_tells_what_the_sidecar_says(make: Make) -> None:
    machine = make()
    with machine.open() as opened:
        runner: Runner = opened
        assert runner.inputs == machine.model.inputs
        assert runner.outputs == machine.model.outputs
        assert runner.implementation == {"LSHSort": "plugin"}


def test_inputs_may_have_any_layout_and_a_missing_mask_is_all_ones(make: Make) -> None:
    machine = make()
    with machine.open() as runner:
        wide = feeds_for(2, 16)["hidden_states"]
        feeds = {"hidden_states": wide[:, ::2]}
        feeds["hidden_states"].flags.writeable = False
        complete = {**feeds, "attention_mask": np.ones((2, 8), np.int64)}
        assert_right(machine, complete, runner.run(feeds))


def test_outputs_are_the_callers_own(make: Make) -> None:
    machine = make()
    with machine.open() as runner:
        feeds = feeds_for(1, 5)
        first = runner.run(feeds)
        kept = {name: value.copy() for name, value in first.items()}
        second = runner.run(feeds_for(1, 5, seed=1))
        for name in first:
            assert not np.shares_memory(first[name], second[name])
            assert not any(np.shares_memory(first[name], pinned) for pinned in machine.cuda.pinned.values())
            assert np.array_equal(first[name], kept[name])
            first[name][...] = 0
        assert_right(machine, feeds, runner.run(feeds))


@pytest.mark.parametrize("settings", [RunOptions(runtime="trt"), GRAPHS], ids=["plain", "graphs"])
def test_runs_of_changing_shapes_allocate_nothing_after_loading(make: Make, settings: RunOptions) -> None:
    machine = make()
    rng = np.random.default_rng(0)
    with machine.open(settings) as runner:
        before = (dict(machine.cuda.device), set(machine.cuda.pinned))
        for seed in range(200):
            feeds = feeds_for(1, int(rng.integers(1, 65)), seed)
            assert_right(machine, feeds, runner.run(feeds))
        assert (machine.cuda.device.keys(), set(machine.cuda.pinned)) == (before[0].keys(), before[1])
        assert len(machine.cuda.graphs) <= GRAPHS.max_graphs
        assert machine.api.alive["context"] <= 1 + GRAPHS.max_graphs


def test_memory_for_profiles_beyond_reason_comes_as_runs_need_it(make: Make) -> None:
    machine = make(max_seq=EAGER_BYTES)
    with machine.open(GRAPHS) as runner:
        assert machine.cuda.counts["allocate"] == 1, "the scratch memory"
        seq_lens = [1, 3, 2, 1000, 1001, 1999, 4000, 1, 1, 1, 4000, 4000, 4000]
        for seed, seq in enumerate(seq_lens):
            feeds = feeds_for(1, seq, seed)
            assert_right(machine, feeds, runner.run(feeds))
        # doubling: 1001 and 1999 are within twice 1000
        assert {len(memory) for memory in machine.cuda.device.values()} >= {4000 * WIDTH * 4}
        allocations = machine.cuda.counts["allocate"]
        runner.run(feeds_for(1, 3999))
        assert machine.cuda.counts["allocate"] == allocations
        assert len(machine.cuda.device) == 1 + len(machine.model.tensors)
    machine.cuda.assert_nothing_left()


def test_growth_ends_at_the_largest_shape_of_the_profiles() -> None:
    cuda = FakeCuda()
    with cuda.selected():
        buffers = Buffers(cuda)
        buffers.add((TensorInfo("x", "float32", ("n",)),), {"x": (150,)})
        sizes = []
        for count in (100, 101, 150):
            buffers.reserve({"x": (count,)})
            sizes.append([len(memory) for memory in cuda.device.values()])
        assert sizes == [[400], [600], [600]]


def test_want_of_memory_says_how_much_there_is_and_spoils_nothing(make: Make) -> None:
    machine = make(max_seq=EAGER_BYTES)
    with machine.open() as runner:
        machine.cuda.fail_at["allocate_pinned"] = 0
        with pytest.raises(EffexportError, match=r"needs 60 bytes .*1,000 bytes free of 2,000.*run smaller batches"):
            runner.run(feeds_for(1, 5))
        del machine.cuda.fail_at["allocate_pinned"]
        feeds = feeds_for(1, 5)
        assert_right(machine, feeds, runner.run(feeds))
    machine.cuda.assert_nothing_left()


def test_an_output_of_unknown_size_gets_its_memory_at_the_first_run(make: Make) -> None:
    machine = make()
    unknown = replace(machine.model.outputs[1], dims=("?",))
    machine.model.outputs = (machine.model.outputs[0], unknown, machine.model.outputs[2])
    write_sidecar(machine.path, replace(machine.info, outputs=machine.model.outputs))
    with machine.open() as runner:
        for batch in (2, 8):
            feeds = feeds_for(batch, 5)
            assert_right(machine, feeds, runner.run(feeds))


@pytest.mark.parametrize("settings", [RunOptions(runtime="trt"), GRAPHS], ids=["plain", "graphs"])
@pytest.mark.parametrize("target", ["trt", "trt-rtx"])
def test_an_output_without_elements_is_an_error_of_the_user_and_the_next_run_works(
    make: Make, rtx: Callable[[], Machine], settings: RunOptions, target: str
) -> None:
    machine = make() if target == "trt" else rtx()
    usual, function = machine.model.output_shapes, machine.model.function
    machine.model.output_shapes = lambda shapes: {
        **usual(shapes),
        "positive": (shapes["hidden_states"][0], shapes["hidden_states"][1] - 3),
    }
    machine.model.function = lambda feeds: {**function(feeds), "positive": function(feeds)["positive"][:, 3:]}
    message = (
        "'positive' is [2, 0], which is empty, for inputs hidden_states [2, 3, 3], attention_mask [2, 3]; engines need "
        "at least one element in every input and output: give larger inputs, or use --runtime ort-cuda, or ort on the "
        "CPU"
    )
    with machine.open(settings) as runner:
        bound = runner.bind(feeds_for(2, 5))
        for call in (runner.run, runner.bind, runner.run):
            with pytest.raises(UserError) as failure:
                call(feeds_for(2, 3))
            assert str(failure.value) == message
            for _ in range(2):
                assert_right(machine, feeds_for(2, 4), runner.run(feeds_for(2, 4)))
        bound.run()
        assert_right(machine, feeds_for(2, 5), bound.outputs())
        with pytest.raises(UserError, match=r"is float32 \[2, 0, 3\], but float32 \[2, 5, 3\] is bound"):
            bound.update({"hidden_states": np.zeros((2, 0, WIDTH), np.float32)})
        with pytest.raises(UserError, match=r"float32 \[0, 5, 3\], which is empty; expected at least one element"):
            runner.run({"hidden_states": np.zeros((0, 5, WIDTH), np.float32)})
    del bound
    gc.collect()
    machine.cuda.assert_nothing_left()


def test_a_profile_is_switched_only_when_the_shape_asks_for_it(make: Make) -> None:
    machine = make()
    with machine.open() as runner:
        for shape in [(1, 4), (1, 5), (1, 64), (2, 5), (8, 16), (1, 2)]:
            runner.run(feeds_for(*shape))
        assert machine.api.profile_switches == 3


def test_eight_threads_get_right_answers(make: Make) -> None:
    machine = make()
    failures: list[BaseException] = []

    def work(index: int) -> None:
        for seed in range(50):
            shape = [(1, 1 + (index + seed) % 5), (2, 3)][seed % 2]
            feeds = feeds_for(*shape, seed + 100 * index)
            assert_right(machine, feeds, runner.run(feeds))

    def slow(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(1e-4)  # lets other threads run, as waiting for the GPU does
        return function(feeds)

    function, machine.model.function = machine.model.function, slow
    with machine.open(GRAPHS) as runner, ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, index) for index in range(8)]:
            if error := future.exception():
                failures.append(error)
    assert not failures
    machine.cuda.assert_nothing_left()


def test_a_graph_is_captured_at_the_second_run_of_a_shape_and_then_replayed(make: Make) -> None:
    machine = make()
    with machine.open(GRAPHS) as runner:
        counts = machine.cuda.counts
        history = []
        for seed in range(5):
            for shape in [(1, 4), (2, 4)]:
                feeds = feeds_for(*shape, seed)
                assert_right(machine, feeds, runner.run(feeds))
            history.append((counts.get("capture", 0), counts.get("launch", 0)))
        assert history == [(0, 0), (2, 0), (2, 2), (2, 4), (2, 6)]


def test_graphs_share_one_scratch_memory_and_each_has_its_own_context(make: Make) -> None:
    machine = make()
    with machine.open(GRAPHS) as runner:
        for _ in range(2):
            for seq in (3, 4, 5):
                runner.run(feeds_for(1, seq))
        assert machine.api.strategies == ["USER_MANAGED of the fake"] * 4
        assert len(machine.cuda.device) == 1 + len(machine.model.tensors)


def test_the_graph_unused_for_longest_gives_way(make: Make) -> None:
    machine = make()
    with machine.open(RunOptions(runtime="trt", cuda_graph=True, max_graphs=2)) as runner:
        for seq in (3, 3, 4, 4, 3, 5, 5):  # 4 gives way
            runner.run(feeds_for(1, seq))
        assert len(machine.cuda.graphs) == 2
        assert machine.cuda.counts["destroy"] == 1
        assert machine.api.alive["context"] == 3
        launches = machine.cuda.counts["launch"]
        runner.run(feeds_for(1, 3))
        assert machine.cuda.counts["launch"] == launches + 1
        feeds = feeds_for(1, 4)
        assert_right(machine, feeds, runner.run(feeds))
        assert machine.cuda.counts["launch"] == launches + 1


@pytest.mark.parametrize("broken", ["capture_fails", "capture", "context"])
def test_without_a_graph_runs_go_on_and_one_warning_says_so(make: Make, broken: str) -> None:
    machine = make()
    with machine.open(GRAPHS) as runner:
        first, second = feeds_for(1, 4), feeds_for(1, 5)
        assert_right(machine, first, runner.run(first))
        if broken == "capture_fails":
            machine.api.capture_fails = True
        elif broken == "capture":
            machine.cuda.fail_at["capture"] = 0
        else:
            machine.api.context_fails = True
        with pytest.warns(GraphWarning, match="a CUDA graph could not be captured, so runs continue without one: "):
            assert_right(machine, first, runner.run(first))
        for feeds in [first, second, second, second]:  # another warning would be an error
            assert_right(machine, feeds, runner.run(feeds))
        assert machine.cuda.counts.get("launch", 0) == 0
        assert machine.api.alive["context"] == 1
    machine.cuda.assert_nothing_left()


def test_tensorrt_rtx_captures_graphs_itself(rtx: Callable[[], Machine]) -> None:
    machine = rtx()
    with machine.open(GRAPHS) as runner:
        for seed in range(4):
            feeds = feeds_for(1, 4, seed)
            assert_right(machine, feeds, runner.run(feeds))
        assert "capture" not in machine.cuda.counts
        (config,) = machine.api.strategies
        assert config.cuda_graph_strategy == "WHOLE_GRAPH_CAPTURE of the fake"


def test_a_run_that_fails_is_an_expected_error_and_the_next_one_works(make: Make) -> None:
    machine = make()
    with machine.open() as runner:
        machine.api.enqueue_fails = True
        with pytest.raises(
            RuntimeFailedError,
            match=r"TensorRT failed on hidden_states \[1, 4, 3\], attention_mask \[1, 4\]: .*start.*the lamp is off",
        ) as failure:
            runner.run(feeds_for(1, 4))
        assert failure.value.exit_code == 1
        machine.api.enqueue_fails = False
        machine.cuda.fail_at["synchronize"] = 0
        with pytest.raises(RuntimeFailedError, match=r"cudaErrorOfTheTest: synchronize fails$"):
            runner.run(feeds_for(1, 4))
        del machine.cuda.fail_at["synchronize"]
        feeds = feeds_for(1, 4)
        assert_right(machine, feeds, runner.run(feeds))
    machine.cuda.assert_nothing_left()


def test_weights_are_streamed_within_the_budget(make: Make) -> None:
    machine = make()
    machine.api.streamable_weights = 1000
    with machine.open(RunOptions(runtime="trt", weight_streaming_budget_bytes=300)) as runner:
        assert runner._execution._engine.weight_streaming_budget_v2 == 300


@pytest.mark.parametrize("settings", [RunOptions(runtime="trt"), GRAPHS], ids=["plain", "graphs"])
def test_bound_inputs_stay_on_the_device(make: Make, settings: RunOptions) -> None:
    machine = make()
    with machine.open(settings) as runner:
        feeds, others = feeds_for(2, 5), feeds_for(1, 7)
        bound, other = runner.bind(feeds), runner.bind(others)
        for seed in range(4):
            copies = dict(machine.cuda.counts)
            bound.run()
            for name in ("copy_to_device", "copy_to_host", "allocate"):
                assert machine.cuda.counts[name] == copies[name] if name in copies else name not in machine.cuda.counts
            assert_right(machine, feeds, bound.outputs())
            other.run()
            assert_right(machine, others, other.outputs())
            feeds = {**feeds, **feeds_for(2, 5, seed)}
            bound.update(feeds)
            interleaved = feeds_for(1, 7, seed)
            assert_right(machine, interleaved, runner.run(interleaved))
        captures = machine.cuda.counts.get("capture", 0)
        assert captures == (3 if settings.cuda_graph else 0), "two bound, one shape of run"
    with pytest.raises(EffexportError, match="this runner is closed"):
        bound.run()
    machine.cuda.assert_nothing_left()


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"x": np.zeros(1)}, "input 'x' is not bound; expected one of: hidden_states, attention_mask"),
        ({"attention_mask": np.ones((2, 6), np.int64)}, r"is int64 \[2, 6\], but int64 \[2, 5\] is bound; bind the"),
    ],
)
def test_an_update_of_another_shape_is_refused(make: Make, feeds: dict[str, np.ndarray], message: str) -> None:
    with make().open() as runner, pytest.raises(UserError, match=message):
        runner.bind(feeds_for(2, 5)).update(feeds)


def test_the_memory_of_forgotten_bindings_is_freed(make: Make) -> None:
    machine = make()
    with machine.open(GRAPHS) as runner:
        before = len(machine.cuda.device)
        for seed in range(20):
            runner.bind(feeds_for(2, 5, seed))
            gc.collect()
        runner.run(feeds_for(1, 1))
        assert len(machine.cuda.device) == before
        assert not machine.cuda.graphs


def test_a_bound_engine_keeps_its_runner_open(make: Make) -> None:
    machine = make()
    feeds = feeds_for(2, 5)
    bound = machine.open().bind(feeds)
    gc.collect()
    bound.run()
    assert_right(machine, feeds, bound.outputs())
    del bound
    gc.collect()
    machine.cuda.assert_nothing_left()


def test_a_binding_that_fails_leaves_nothing(make: Make) -> None:
    machine = make()
    with machine.open() as runner:
        before = set(machine.cuda.device)
        machine.api.enqueue_fails = True
        with pytest.raises(RuntimeFailedError, match="the lamp is off"):
            runner.bind(feeds_for(2, 5))
        assert set(machine.cuda.device) == before


def test_a_closed_runner_says_so_and_closing_again_does_nothing(make: Make) -> None:
    machine = make()
    with machine.open() as runner:
        runner.run(feeds_for(1, 4))
    for call in (runner.run, runner.bind):
        with pytest.raises(EffexportError, match="this runner is closed; load the engine again"):
            call(feeds_for(1, 4))
    runner.close()
    assert machine.cuda.counts["close"] == 1
    assert machine.api.alive == {"engine": 0, "context": 0}
    machine.cuda.assert_nothing_left()


def test_a_runner_that_nobody_closes_is_freed_with_its_last_reference(make: Make) -> None:
    machine = make()
    machine.open(GRAPHS).run(feeds_for(1, 4))
    gc.collect()
    assert machine.api.alive == {"engine": 0, "context": 0}
    machine.cuda.assert_nothing_left()


def test_closing_waits_for_the_run_of_another_thread(make: Make) -> None:
    machine = make()
    runner = machine.open()
    started, go_on = threading.Event(), threading.Event()
    function = machine.model.function

    def slow(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        started.set()
        assert go_on.wait(10)
        return function(feeds)

    machine.model.function = slow
    with ThreadPoolExecutor(2) as pool:
        feeds = feeds_for(1, 4)
        running = pool.submit(runner.run, feeds)
        assert started.wait(10)
        closing = pool.submit(runner.close)
        go_on.set()
        machine.model.function = function
        assert_right(machine, feeds, running.result(10))
        closing.result(10)
    machine.cuda.assert_nothing_left()


def failure_of(work: Callable[[], None]) -> str | None:
    """The message of the error that `work` raises. The error itself would keep all it went through alive."""
    try:
        work()
    except EffexportError as error:
        return str(error)
    return None


@pytest.mark.parametrize("settings", [RunOptions(runtime="trt"), GRAPHS], ids=["plain", "graphs"])
def test_whatever_fails_while_loading_leaves_nothing(make: Make, settings: RunOptions) -> None:
    """Every allocation of a load fails in its turn, until one load works."""
    machine = make()
    for method in ("allocate", "allocate_pinned"):
        for works in range(20):
            machine.cuda, machine.api.alive = FakeCuda(), {"engine": 0, "context": 0}
            machine.api.cuda = machine.cuda
            machine.cuda.fail_at[method] = works
            message = failure_of(lambda: machine.open(settings).close())
            gc.collect()
            assert machine.api.alive == {"engine": 0, "context": 0}
            machine.cuda.assert_nothing_left()
            if message is None:
                break
            assert "cudaErrorOfTheTest" in message
        assert 0 < works < 19, "an allocation did fail, and in the end none did"


def test_an_engine_without_a_context_is_refused(make: Make) -> None:
    machine = make()
    machine.api.context_fails = True
    with pytest.raises(EffexportError, match=r"TensorRT does not run .*trt\.engine: it creates no execution context"):
        machine.open()
    machine.cuda.assert_nothing_left()


@pytest.mark.parametrize(
    ("fake", "real"), [(FakeRuntime, "Runtime"), (FakeEngine, "ICudaEngine"), (FakeContext, "IExecutionContext")]
)
def test_the_fake_answers_no_call_that_our_view_of_tensorrt_lacks(fake: type, real: str) -> None:
    assert public(fake) <= set(declared()[real])
    assert public(CudaPython) == public(CudaTorch) <= public(FakeCuda) | {"stream_handle"}


def public(kind: type) -> set[str]:
    """Methods, properties, and attributes that are only declared."""
    return {name for name in (*vars(kind), *vars(kind).get("__annotations__", {})) if not name.startswith("_")}


# Refusals, in the order in which they are looked for.


def without_sidecar(machine: Machine) -> None:
    sidecar_path(machine.path).unlink()


def of_another_length(machine: Machine) -> None:
    machine.path.write_bytes(b"an engine, longer")


def of_other_bytes(machine: Machine) -> None:
    machine.path.write_bytes(b"an enginE")


def of_another_model(machine: Machine) -> None:
    write_sidecar(machine.path, replace(machine.info, onnx_sha256="b" * 64))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_sidecar, r"has no trt\.json beside it, .*copy both files together"),
        (of_another_length, r"is damaged: it has .*; build the engine again, or copy it again from its source"),
        (of_other_bytes, r"is damaged: it does not match .*; build the engine again, or copy it again from its source"),
        (of_another_model, r"was built from another model\.onnx \(sha256 bbbbbbbbbbbb…; .*aaaa"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    make: Make, spoil: Callable[[Machine], None], message: str
) -> None:
    machine = make()
    machine.open(onnx_sha256="a" * 64).close()
    spoil(machine)
    with pytest.raises(UserError, match=message):
        machine.open(onnx_sha256="a" * 64)


@pytest.mark.parametrize(
    ("target", "module", "version", "message"),
    [
        (
            "trt",
            "tensorrt",
            None,
            r"TensorRT is not installed; .*effexport\[tensorrt\].*--target trt-rtx builds w",
        ),
        (
            "trt-rtx",
            "tensorrt_rtx",
            None,
            r"TensorRT-RTX is not installed; .*effexport\[rtx\].*needs no GPU to build",
        ),
        ("trt", "tensorrt", "10.0.1", r"TensorRT 10\.0\.1 is installed; expected 10\.13 or later: pip install --up"),
    ],
)
def test_missing_and_old_bindings_are_named(
    make: Make, monkeypatch: pytest.MonkeyPatch, target: str, module: str, version: str | None, message: str
) -> None:
    machine = make(target=target)
    found = None
    if version is not None:
        found = machine.api
        found.__version__ = version
    monkeypatch.setitem(sys.modules, module, found)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        TrtRunner(machine.path, cuda=machine.cuda)


def test_without_cuda_python_the_error_names_the_extra(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        MissingExtraError,
        match=r"cuda-bindings is not installed; .*effexport\[tensorrt\].*needs an NVIDIA GPU",
    ):
        TrtRunner(machine.path, api=machine.api)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "here", "message"),
    [
        ({"tensorrt_version": "11.3.0.1"}, "11.4.0.106", r"built with TensorRT 11\.3\.0\.1, and 11\.4\.0\.106 is inst"),
        ({"compute_capabilities": (80, 86)}, "11.4.0.106", r"built for SM 80, SM 86, and this GPU is SM 90"),
    ],
)
def test_another_release_and_another_gpu_are_refused(make: Make, changes: Any, here: str, message: str) -> None:
    machine = make(**changes)
    machine.api.__version__ = here
    with pytest.raises(UserError, match=message):
        machine.open()
    machine.cuda.assert_nothing_left()


@pytest.mark.parametrize(
    ("diagnostics", "message"),
    [
        (1, r"it is of another release of TensorRT-RTX than 1\.7\.1\.116: build it again here"),
        (2, "it was not built for this kind of GPU: build it again"),
        (4 + 16, "upgrade the NVIDIA driver; the GPU has too little memory for it"),
        (32, "it is not an engine of TensorRT-RTX: build the engine again, or copy it again"),
        (64, "check it with nvidia-smi"),
        (0, "the header is of a lamp"),
    ],
)
def test_what_tensorrt_rtx_finds_in_the_header_is_put_into_words(
    rtx: Callable[[], Machine], diagnostics: int, message: str
) -> None:
    machine = rtx()
    machine.api.validity = (2, diagnostics)
    with pytest.raises(UserError, match=rf"TensorRT-RTX does not run .*trt\.engine: .*{message}"):
        machine.open()
    machine.cuda.assert_nothing_left()
    machine.cuda, machine.api.validity = FakeCuda(), (1, 0)
    machine.api.cuda = machine.cuda
    machine.open().close()


def test_an_engine_that_does_not_load_is_refused_in_tensorrts_words(make: Make) -> None:
    machine = make()
    machine.api.refuses_to_load = True
    with pytest.raises(EffexportError, match=r"TensorRT does not load .*: .*the plan is of a lamp"):
        machine.open()
    machine.cuda.assert_nothing_left()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": (TensorInfo("doubled", "float16", ("batch",)),)}, "its sidecar says .*output doubled float16"),
        ({"profiles": example_model().profiles[:1]}, "has 2 profiles; its sidecar says 1"),
    ],
)
def test_an_engine_other_than_its_sidecar_says_is_refused(make: Make, changes: Any, message: str) -> None:
    machine = make(**changes)
    with pytest.raises(EffexportError, match=message):
        machine.open()
    machine.cuda.assert_nothing_left()


def test_only_version_compatible_engines_may_bring_host_code(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(logger: Any) -> Any:
        runtimes.append(create(logger))
        return runtimes[-1]

    allowed = []
    for compatible in (False, True):
        machine = make(version_compatible=compatible)
        runtimes: list[Any] = []
        create = machine.api.Runtime
        monkeypatch.setattr(machine.api, "Runtime", recorded)
        machine.open().close()
        allowed += [runtime.engine_host_code_allowed for runtime in runtimes]
    assert allowed == [False, True]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (9, 3),
            "the inputs have batch 9, seq 3; this engine was built for batch 1 to 1, seq 1 to 64; or batch 2 to 8, "
            "seq 1 to 16: build it again with a profile that covers them, such as --profile batch=1:9:9,seq=1:3:3",
        ),
        ((2, 17), "the inputs have batch 2, seq 17; this engine was built for"),
        ((1, 65), "the inputs have batch 1, seq 65; this engine was built for"),
    ],
)
def test_a_shape_outside_the_profiles_says_what_they_cover(make: Make, shape: tuple[int, int], message: str) -> None:
    with make().open() as runner:
        with pytest.raises(UserError) as refusal:
            runner.run(feeds_for(*shape))
        assert str(refusal.value).startswith(message)
        assert runner.run(feeds_for(1, 64)), "a refused input does not spoil the runner"


def test_wrong_inputs_are_refused_as_by_the_other_runners(make: Make) -> None:
    with make().open(limits=FeedLimits(max_seq_len=10)) as runner:
        with pytest.raises(UserError, match=r"is float64 .*\.astype\('float32'\)"):
            runner.run({"hidden_states": np.zeros((1, 2, WIDTH))})
        with pytest.raises(UserError, match="has 11 tokens; this model has positions for 10"):
            runner.run(feeds_for(1, 11))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_graphs": 0}, "max_graphs is 0; expected at least 1"),
        ({"weight_streaming_budget_bytes": -1}, "budget is -1 bytes; expected at least 0"),
    ],
)
def test_settings_without_meaning_are_refused(values: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RunOptions(runtime="trt", **values)


def test_a_budget_for_an_engine_that_streams_nothing_is_refused(make: Make) -> None:
    machine = make()
    with pytest.raises(UserError, match=r"was built without weight streaming.*leave it out"):
        machine.open(RunOptions(runtime="trt", weight_streaming_budget_bytes=1))
    machine.cuda.assert_nothing_left()


@pytest.mark.requires("rtx")
def test_the_real_tensorrt_rtx_tells_that_a_file_is_no_engine(make: Make) -> None:
    machine = make(target="trt-rtx", tensorrt_version="1.7.1.116", compute_capabilities=())
    api: Any = importlib.import_module("tensorrt_rtx")
    content = bytes(1000)
    machine.path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    info = replace(machine.info, engine_sha256=digest, engine_bytes=1000, tensorrt_version=api.__version__)
    write_sidecar(machine.path, info)
    with pytest.raises(UserError, match=r"TensorRT-RTX does not run .*: it is not an engine of TensorRT-RTX"):
        TrtRunner(machine.path, cuda=machine.cuda, api=api)
    machine.cuda.assert_nothing_left()
