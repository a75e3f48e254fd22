"""ONNX Runtime on CUDA: its options, its lock, the memory of bound outputs, what leaves the GPU, and slow kernels.

There is no GPU here: a stand-in for onnxruntime records what it is given. scripts/gpu/bound.py checks what only a GPU
can show.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from fake_onnxruntime import PLAIN, WITH_CUDA, FakeOrt, install, parsed

from effexport.base.errors import EffexportError, KernelWarning, RuntimeFailedError, RuntimeUnsupportedError, UserError
from effexport.plugins.ops import OPS
from effexport.runners import runner as feeds_module
from effexport.runners.artifact_runner import options_from_flags
from effexport.runners.options import RunOptions
from effexport.runners.ort import kernels
from effexport.runners.ort import runner as ort_runner
from effexport.runners.ort import session as ort_session
from effexport.runners.ort.runner import OrtRunner, array_from_value, update_value
from effexport.runners.ort.session import session_from_model

pytestmark = pytest.mark.requires("onnx", "ort")
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


# what ONNX Runtime makes of a model when CUDA has no kernel for CumSum; shape arithmetic belongs on the CPU
WITH_COPIES = parsed(
    """g (float[b, 4] x) => (float[b, 4] y) {
    [sizes] n = Shape (x)
    [arithmetic] m = Neg (n)
    [to] on_cpu = MemcpyToHost (x)
    [sum] summed = CumSum (on_cpu, m)
    [back] on_gpu = MemcpyFromHost (summed)
    [end] y = Neg (on_gpu)
    }"""
)
ON_CPU = {CPU: {"arithmetic": "Neg", "sum": "CumSum"}}


@pytest.fixture
def ort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeOrt:
    return install(monkeypatch, FakeOrt(CUDA), tmp_path)


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def on_cuda(**fields: Any) -> RunOptions:
    return RunOptions(runtime="ort-cuda", **fields)


# ---- what leaves the GPU


@pytest.mark.usefixtures("no_warnings")
def test_a_model_of_which_nothing_is_on_the_cpu_is_opened_once(ort: FakeOrt) -> None:
    session_from_model(PLAIN, on_cuda())
    assert len(ort.opened) == 1


@pytest.mark.usefixtures("no_warnings")
def test_arithmetic_on_shapes_may_run_on_the_cpu(ort: FakeOrt) -> None:
    ort.assigned = {CPU: {"arithmetic": "Neg"}}
    ort.final = parsed("g (float[b, 4] x) => (int64[2] y) { [sizes] n = Shape (x)\n [arithmetic] y = Neg (n) }")
    session_from_model(PLAIN, on_cuda())
    assert len(ort.opened) == 2


def test_nodes_and_copies_that_leave_the_gpu_are_named(ort: FakeOrt) -> None:
    ort.assigned, ort.final = ON_CPU, WITH_COPIES
    message = (
        r"leaves the GPU in every run, .*: CumSum 'sum' runs on the CPU; 'x' is copied to the CPU for CumSum 'sum'; "
        r"'summed' is copied to the GPU from CumSum 'sum'$"
    )
    with pytest.warns(KernelWarning, match=message):
        session_from_model(PLAIN, on_cuda())


def test_a_cuda_graph_of_such_a_model_is_refused_with_their_names(ort: FakeOrt) -> None:
    ort.assigned, ort.final, ort.refuses_graphs = ON_CPU, WITH_COPIES, True
    with pytest.raises(
        UserError, match=r"cuda_graph needs a model that stays on the GPU, but CumSum 'sum' runs on the"
    ):
        session_from_model(PLAIN, on_cuda(cuda_graph=True))
    assert [session.options_of[CUDA]["enable_cuda_graph"] for session in ort.opened] == ["1", "0"]


def test_a_refusal_for_another_reason_stays_what_it_is(ort: FakeOrt) -> None:
    ort.refuses_graphs = True
    with pytest.raises(RuntimeUnsupportedError, match="cannot use the graph capture feature"):
        session_from_model(PLAIN, on_cuda(cuda_graph=True))


def test_a_model_that_cannot_be_looked_at_runs_with_a_warning(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> None:
    ort.assigned = ON_CPU
    monkeypatch.setattr(onnx, "load", lambda *args, **kwargs: 1 / 0)
    with pytest.warns(KernelWarning, match="whether this model leaves the GPU is not known: .* division by zero"):
        session_from_model(PLAIN, on_cuda())


def test_long_lists_are_cut() -> None:
    assert ort_session.listed([f"n{i}" for i in range(7)]) == "n0; n1; n2; n3; n4; and 2 more"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_without_its_weights_a_model_opens_and_keeps_its_constants(dtype: str, tmp_path: Path) -> None:
    """In the real onnxruntime, which would compute weights in advance if they were constants."""
    from onnxruntime import InferenceSession, SessionOptions

    model = parsed(
        "g (float[b, 64] x) => (float[b, 64] y) { v = Cast <to = 1> (w)\n h = MatMul (x, v)\n y = Add (h, one) }"
    )
    weight = np.eye(64).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(64, dtype=np.float32), "one"))
    light = ort_session.without_weights(model.SerializeToString())
    assert [value.name for value in light.graph.input] == ["x"]
    assert [tensor.name for tensor in light.graph.initializer] == ["one"]
    options = SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "final.onnx")
    session = InferenceSession(light.SerializeToString(), options)
    assert [value.name for value in session.get_outputs()] == ["y"]
    assert ort_session.WEIGHT in [node.op_type for node in onnx.load(str(tmp_path / "final.onnx")).graph.node]


# ---- one of several GPUs


def test_the_device_reaches_the_provider(ort: FakeOrt) -> None:
    ort_session.check_settings(on_cuda(device=1))
    session_from_model(PLAIN, on_cuda(device=0))
    assert [session.options_of[CUDA]["device_id"] for session in ort.opened] == ["1", "0"]


def test_a_gpu_that_is_not_there_is_one_clear_error(ort: FakeOrt) -> None:
    with pytest.raises(UserError, match=r"device is 2, and CUDA has no GPU of this number here; nvidia-smi -L"):
        session_from_model(PLAIN, on_cuda(device=2))


@pytest.mark.parametrize(
    ("runtime", "device", "message"),
    [
        ("ort-cuda", -1, "--device is -1; expected 0 for the first GPU"),
        ("ort", 1, "--device 1 does not apply to --runtime ort, which runs on the CPU; leave it out"),
        ("trt", 1, "--device 1 does not apply to --runtime trt, .*; set CUDA_VISIBLE_DEVICES=1 instead"),
    ],
)
def test_a_device_that_a_runtime_cannot_be_told_is_refused(runtime: str, device: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        options_from_flags(runtime, device=device)
    assert options_from_flags("ort-cuda", device=1).device == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": 1}, "device needs the runtime 'ort-cuda' or 'ort-trt'; the runtime is 'ort'"),
        ({"runtime": "ort-cuda", "device": -1}, "device is -1; expected 0 for the first GPU"),
        ({"runtime": "ort-cuda", "device": 2**15}, "device is 32768; .*, at most 32767"),
    ],
)
def test_settings_with_a_device_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RunOptions(**fields)


# ---- bound models


class FakeValue:
    """A value of onnxruntime, with the call that made it."""

    def __init__(self, made: str, shape: tuple[int, ...], element_type: int, device: str, device_id: int) -> None:
        self.made, self._shape, self._type, self.device = made, shape, element_type, (device, device_id)

    def shape(self) -> tuple[int, ...]:
        return self._shape

    def element_type(self) -> int:
        return self._type

    def numpy(self) -> np.ndarray:
        return np.zeros(self._shape, np.float32)

    def update_inplace(self, array: np.ndarray) -> None:
        assert array.shape == self._shape


class FakeBinding:
    """An IOBinding. outputs: what is bound now; a name stands for memory of the session's arena."""

    def __init__(self) -> None:
        self.inputs: list[FakeValue] = []
        self.outputs: list[FakeValue] = []

    def bind_ortvalue_input(self, name: str, value: FakeValue) -> None:
        self.inputs.append(value)

    def bind_output(self, name: str, device: str, device_id: int) -> None:
        self.outputs.append(FakeValue("by the session", (2, 4), onnx.TensorProto.FLOAT, device, device_id))

    def bind_ortvalue_output(self, name: str, value: FakeValue) -> None:
        self.outputs.append(value)

    def clear_binding_outputs(self) -> None:
        self.outputs = []

    def get_outputs(self) -> list[FakeValue]:
        return self.outputs


class FakeSession:
    """A session of `PLAIN` that counts how many threads are in it."""

    def __init__(self) -> None:
        self.bindings: list[FakeBinding] = []
        self.graph_ids: list[str] = []
        self.inside = self.most_inside = 0

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="x", type="tensor(float)", shape=["b", 4])]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name="y", type="tensor(float)", shape=["b", 4])]

    def io_binding(self) -> FakeBinding:
        self.bindings.append(FakeBinding())
        return self.bindings[-1]

    def run(self, names: list[str], feeds: dict[str, np.ndarray], options: Any) -> list[np.ndarray]:
        self.run_with_iobinding(None, options)
        return [feeds["x"]]

    def run_with_iobinding(self, bound: Any, options: Any) -> None:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        if options is not None:
            self.graph_ids.append(options.entries["gpu_graph_id"])
        time.sleep(0.002)  # another thread gets in now, if it may
        self.inside -= 1


class FakeOptions:
    """RunOptions."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.add_run_config_entry = self.entries.__setitem__


FAKE_VALUES = SimpleNamespace(
    RunOptions=FakeOptions,
    OrtValue=SimpleNamespace(
        ortvalue_from_numpy=lambda array, device, device_id: FakeValue("from numpy", array.shape, 1, device, device_id),
        ortvalue_from_shape_and_type=lambda *tensor: FakeValue("by itself", *tensor),
    ),
)
FEEDS = {"x": np.zeros((2, 4), np.float32)}


@pytest.fixture
def fake_session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession()
    monkeypatch.setattr(ort_runner, "session_from_model", lambda *args, **more: ort_session.OrtSession(session, {}))
    monkeypatch.setattr(ort_runner, "import_onnxruntime", lambda: FAKE_VALUES)
    return session


def test_bound_values_are_on_the_chosen_device_and_outputs_outside_the_arena_of_the_session(
    fake_session: FakeSession,
) -> None:
    runner = OrtRunner(PLAIN, on_cuda(device=1, cuda_graph=True))
    bound = [runner.bind(FEEDS), runner.bind(FEEDS)]
    for made in fake_session.bindings:
        (given,), (result,) = made.inputs, made.outputs
        assert (given.made, given.device) == ("from numpy", ("cuda", 1))
        assert (result.made, result.device) == ("by itself", ("cuda", 1))
        assert (result.shape(), result.element_type()) == ((2, 4), onnx.TensorProto.FLOAT)
    fake_session.graph_ids.clear()
    for one in (*bound, *bound):
        one.run()
    first, second, *again = fake_session.graph_ids
    assert first != second
    assert again == [first, second]
    assert "-1" not in (first, second)


def test_a_bound_model_has_no_outputs_before_its_first_run(fake_session: FakeSession) -> None:
    bound = OrtRunner(PLAIN).bind(FEEDS)
    with pytest.raises(UserError, match=r"this bound model has no outputs yet; call run\(\) first"):
        bound.outputs()
    bound.run()
    assert bound.outputs()["y"].shape == (2, 4)


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_with_cuda_graphs_one_thread_at_a_time_is_in_a_session(fake_session: FakeSession, cuda_graph: bool) -> None:
    runner = OrtRunner(PLAIN, on_cuda(cuda_graph=cuda_graph))
    bound = [runner.bind(FEEDS) for _ in range(3)]
    work = [*(one.run for one in bound), lambda: runner.run(FEEDS), lambda: runner.bind(FEEDS)]
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(call) for _ in range(10) for call in work]:
            done.result()
    assert (fake_session.most_inside == 1) == cuda_graph


def test_after_an_update_that_fails_midway_a_bound_model_waits_for_all_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "g (float[n] a, float[n] b) => (float[n] y) { y = Sub (a, b) }"
    old, new = np.zeros(2, np.float32), np.ones(2, np.float32)
    copied: list[np.ndarray] = []

    def copying(value: Any, array: np.ndarray) -> None:
        if copied:
            raise RuntimeError("CUDA error 700")
        copied.append(array)
        update_value(value, array)

    with OrtRunner(parsed(text).SerializeToString()) as runner:
        bound = runner.bind({"a": old, "b": old})
        with monkeypatch.context() as patch:
            patch.setattr(ort_runner, "update_value", copying)
            with pytest.raises(RuntimeFailedError, match="cannot copy values into bound inputs: CUDA error 700"):
                bound.update({"a": new, "b": new})
        bound.update({"a": new})
        with pytest.raises(RuntimeFailedError, match=r"an update failed, .*; update all of them"):
            bound.run()
        bound.update({"a": new, "b": old})
        bound.run()
        assert np.array_equal(bound.outputs()["y"], new)


def test_outputs_that_cannot_be_copied_are_a_failure_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: Any, dtype: str) -> None:
        raise RuntimeError("CUDA error 700")

    with OrtRunner(parsed("g (float[n] x) => (float[n] y) { y = Neg (x) }").SerializeToString()) as runner:
        bound = runner.bind({"x": np.zeros(2, np.float32)})
        bound.run()
        monkeypatch.setattr(ort_runner, "array_from_value", refuse)
        with pytest.raises(RuntimeFailedError, match="cannot copy outputs to the host: CUDA error 700"):
            bound.outputs()


def test_a_runner_that_is_closed_while_it_checks_feeds_ends_that_run_and_refuses_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = OrtRunner(parsed("g (float[n] x) => (float[n] y) { y = Neg (x) }").SerializeToString())
    feeds = {"x": np.ones(2, np.float32)}
    checked = feeds_module.checked_feeds

    def closing(*given: Any) -> Any:
        runner.close()
        return checked(*given)

    monkeypatch.setattr(feeds_module, "checked_feeds", closing)
    assert np.array_equal(runner.run(feeds)["y"], -feeds["x"])
    with pytest.raises(EffexportError, match="this runner is closed"):
        runner.run(feeds)


def test_bfloat16_outputs_are_read_on_the_cpu_and_refused_on_a_gpu() -> None:
    """onnxruntime has no numpy type for them."""
    text = "g (bfloat16[n, 2] x) => (bfloat16[n, 2] y) { y = Identity (x) }"
    given = np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16)
    with OrtRunner(parsed(text).SerializeToString()) as runner:
        assert np.array_equal(runner.run({"x": given})["y"], given)
        bound = runner.bind({"x": given})
        bound.run()
        assert np.array_equal(bound.outputs()["y"], given)
        bound.update({"x": given.T.reshape(2, 3).T})
        bound.run()
        assert np.array_equal(bound.outputs()["y"], given.T.reshape(2, 3).T)
    elsewhere = SimpleNamespace(device_name=lambda: "cuda")
    with pytest.raises(UserError, match="does not copy bfloat16 outputs to the CPU; use `run`"):
        array_from_value(elsewhere, "bfloat16")


# ---- kernels that are slower than bodies on a GPU


def nystrom(landmarks: int | str) -> bytes:
    """A model with an operator that has a limit on a GPU, and two that have none."""
    signatures = (
        "IterativePinv (a, scale)",
        "MaskedAttention <scale> (a, k, v, keep)",
        "SequenceConv (a, weight, keep, residual)",
    )
    declared = [f'<domain: "effexport", opset_import: ["" : 20]> {op} => (b) {{ b = Neg (a) }}' for op in signatures]
    body = "\n".join(
        (
            f"g (float[b, h, {landmarks}, 8] x, bool[b, {landmarks}] keep, float[n, {landmarks}, {landmarks}] a,",
            f"   float[n, 1, 1] scale, float[h, 1, 3, 1] w) => (float[b, h, {landmarks}, 8] m,",
            f"   float[n, {landmarks}, {landmarks}] z, float[b, h, {landmarks}, 8] y) {{",
            "m = effexport.SequenceConv (x, w, keep, x)",
            "z = effexport.IterativePinv (a, scale)",
            "y = effexport.MaskedAttention <scale = 0.5> (x, x, x, keep) }",
        )
    )
    model: onnx.ModelProto = parsed("\n".join((body, *declared)))
    return bytes(model.SerializeToString())


NYSTROM = ("IterativePinv", "MaskedAttention", "SequenceConv")


@pytest.fixture
def with_kernels(ort: FakeOrt, monkeypatch: pytest.MonkeyPatch) -> FakeOrt:
    monkeypatch.setattr(kernels, "find_library", lambda: WITH_CUDA)
    return ort


@pytest.mark.parametrize(
    ("landmarks", "implementation", "ran"),
    [
        (64, "auto", NYSTROM),
        (65, "auto", ("MaskedAttention", "SequenceConv")),
        ("m", "auto", ("MaskedAttention", "SequenceConv")),
        (128, "kernel", NYSTROM),
        (64, "body", ()),
        (64, "IterativePinv=body,MaskedAttention=kernel", ("MaskedAttention", "SequenceConv")),
        (128, "MaskedAttention=body,IterativePinv=kernel", ("IterativePinv", "SequenceConv")),
    ],
)
@pytest.mark.usefixtures("no_warnings")
def test_kernels_that_are_slower_on_a_gpu_run_there_only_if_asked_for(
    with_kernels: FakeOrt, landmarks: int | str, implementation: str, ran: tuple[str, ...]
) -> None:
    with_kernels.assigned = {CUDA: ran}
    session = session_from_model(nystrom(landmarks), on_cuda(implementation=implementation))
    assert session.implementation == {op: "kernel" if op in ran else "body" for op in NYSTROM}
    (opened,) = with_kernels.opened
    assert with_kernels.kernels == (["lib.so"] if ran else [])
    if ran:
        left_out = {OPS[op].torch_name for op in NYSTROM if op not in ran}
        assert set(filter(None, opened.options.entries[kernels.LEFT_OUT_KEY].split(","))) == left_out


def test_on_the_cpu_all_kernels_run_unless_one_is_to_be_a_body() -> None:
    assert OPS["IterativePinv"].cuda_up_to == 64
    for implementation, bodies in (("auto", ()), ("IterativePinv=body", ("IterativePinv",))):
        chosen = kernels.kernels_for(NYSTROM, (), RunOptions(implementation=implementation))
        assert chosen.bodies == bodies or chosen.library is None


def test_a_library_that_cannot_leave_out_kernels_is_said(with_kernels: FakeOrt) -> None:
    with_kernels.assigned = {CUDA: NYSTROM}
    with pytest.warns(KernelWarning, match=r"IterativePinv runs as a kernel, but a function body .* rebuild it with"):
        session_from_model(nystrom(65), on_cuda())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bodies", "unknown implementation 'bodies'.* Expected: auto, kernel, body, OPERATOR=kernel"),
        ("LSHSort=bodies", "unknown implementation 'bodies'.* Expected: auto, kernel, body"),
        ("LSHSort=body,LSHSort=kernel", "names an operator twice"),
        ("LSHSort=body,", "implementation 'LSHSort=body,' lacks an operator beside a comma or '='"),
        ("=body", "implementation '=body' lacks an operator beside a comma or '='"),
    ],
)
def test_an_implementation_that_cannot_be_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RunOptions(implementation=text)


def test_an_implementation_of_an_operator_that_does_not_exist_is_refused() -> None:
    settings = RunOptions(implementation="LSHSorts=body")
    with pytest.raises(UserError, match=r"unknown operator in implementation 'LSHSorts'.* Expected: IterativePinv, "):
        kernels.library_for(("LSHSort",), settings)
