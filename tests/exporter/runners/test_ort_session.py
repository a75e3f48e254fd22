"""The provider and the implementation that a model gets in ONNX Runtime, and the warning if it is another one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import effexport
from effexport import RunOptions
from effexport.artifact import Artifact
from effexport.base.errors import EffexportError, KernelWarning, RuntimeUnsupportedError, UserError
from effexport.base.runtimes import ORT_RUNTIMES
from effexport.export.onnx_graph import value_types
from effexport.plugins.building.library import Library, find_library, get_library_path
from effexport.proof.cases import load_reference
from effexport.proof.tolerances import arithmetic_limit, relative_error
from effexport.proof.verify import verify_candidate
from effexport.runners.ort import kernels
from effexport.runners.ort import session as ort_session
from effexport.runners.ort.providers import check_provider, providers_from_settings

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
WITH_OPERATORS = ("softmax", "linear", "nystrom", "lsh", "aft-simple")


def library_is(monkeypatch: pytest.MonkeyPatch, library: Library | None) -> None:
    monkeypatch.setattr(kernels, "find_library", lambda: library)


def token_ids(batch: int = 2, seq_len: int = 50) -> np.ndarray:
    return np.random.default_rng(0).integers(2, 258, (batch, seq_len))


@pytest.mark.requires("native")
@pytest.mark.parametrize("name", WITH_OPERATORS)
def test_kernels_and_bodies_give_the_same_answer_and_say_which_they_are(built: Built, name: str) -> None:
    artifact = built(name, "encoder")
    answers = {}
    for implementation, ran in {"auto": "kernel", "kernel": "kernel", "body": "body"}.items():
        with effexport.load(artifact.path, RunOptions(implementation=implementation)) as runner:
            assert runner.implementation == dict.fromkeys(artifact.manifest.custom_ops, ran)
            assert runner.implementation
            answers[implementation] = runner.run({"input_ids": token_ids()})["last_hidden_state"]
    assert np.array_equal(answers["auto"], answers["kernel"])
    for sample, other in zip(answers["kernel"], answers["body"], strict=True):
        assert relative_error(sample, other)[0] <= arithmetic_limit(artifact.spec).value


@pytest.mark.requires("native")
def test_a_library_with_other_contents_is_not_loaded(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = find_library()
    assert library is not None
    changed = tmp_path / library.path.name
    changed.write_bytes(library.path.read_bytes() + b"more")
    library_is(monkeypatch, replace(library, path=changed))
    with pytest.raises(UserError, match=r"is not the library that was built: .* effexport plugins build"):
        effexport.load(built("lsh", "encoder").path)


@pytest.mark.requires("native")
def test_single_operators_run_as_bodies_and_the_others_as_kernels(built: Built) -> None:
    artifact = built("nystrom", "encoder")
    feeds, answers = {"input_ids": token_ids()}, []
    for implementation in ("MaskedAttention=body,IterativePinv=body", "MaskedAttention=kernel", "auto"):
        with effexport.load(artifact.path, RunOptions(implementation=implementation)) as runner:
            bodies = {op for op in runner.implementation if f"{op}=body" in implementation}
            ran = {op: "body" if op in bodies else "kernel" for op in artifact.manifest.custom_ops}
            assert runner.implementation == ran
            answers.append(runner.run(feeds)["last_hidden_state"])
    assert not np.array_equal(answers[0], answers[1])
    assert np.array_equal(answers[1], answers[2]), "the choice for one session does not change another"
    for sample, other in zip(answers[0], answers[1], strict=True):
        assert relative_error(sample, other)[0] <= arithmetic_limit(artifact.spec).value


def test_the_sizes_of_an_exported_pseudo_inverse_are_known(built: Built, scope: str) -> None:
    """A GPU runs its kernel or its body by them."""
    graph = ort_session.without_weights(built("nystrom", scope).model_path)
    assert kernels.slower_on_cuda(graph, value_types) == set()


@pytest.mark.requires("native")
def test_of_a_model_that_onnxruntime_refuses_only_the_error_speaks(
    built: Built, capfd: pytest.CaptureFixture[str]
) -> None:
    model = onnx.load(built("nystrom", "attention").model_path)
    for node in model.graph.node:
        if any(attribute.name == "num_segments" for attribute in node.attribute):
            del node.attribute[:]
    with pytest.raises(RuntimeUnsupportedError, match=r"refuses the model: .*attribute num_segments is missing"):
        ort_session.session_from_model(model.SerializeToString(), RunOptions(implementation="kernel"))
    # what ONNX Runtime itself prints does not go through Python's streams
    assert capfd.readouterr() == ("", "")


def test_only_the_cpu_provider_is_silent() -> None:
    ort = ort_session.import_onnxruntime()
    levels = {
        runtime: ort_session.session_options(ort, RunOptions(runtime=runtime), None).log_severity_level
        for runtime in ORT_RUNTIMES
    }
    assert levels == {"ort": 4, "ort-cuda": 3, "ort-trt": 3, "ort-rtx": 3, "ort-openvino": 3}


@pytest.mark.parametrize("runtime", ORT_RUNTIMES)
def test_on_cpus_a_sum_before_a_layer_norm_stays_a_node_of_its_own(runtime: str, tmp_path: Path) -> None:
    """ONNX Runtime's operator for both takes seven times as long. Other providers have fast ones."""
    ort, path = ort_session.import_onnxruntime(), tmp_path / "optimised.onnx"
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> post_norm (float[n, m, 4] a, float[n, m, 4] b) => (float[n, m, 4] y)
        <float[4] weight = {1, 2, 3, 4}, float[4] bias = {4, 3, 2, 1}>
        { c = Add (a, b) y = LayerNormalization <axis = -1, epsilon = 0.5> (c, weight, bias) }"""
    )
    options = ort_session.session_options(ort, RunOptions(runtime=runtime), None)
    options.optimized_model_filepath = str(path)
    session = ort_session.opened(ort, model.SerializeToString(), options, ["CPUExecutionProvider"])
    apart = [node.op_type for node in onnx.load(path).graph.node] == ["Add", "LayerNormalization"]
    assert apart == (runtime == "ort")
    (y,) = session.run(None, {"a": np.full((1, 1, 4), 5, np.float32), "b": np.float32([[[-1, 1, -1, 1]]])})
    deviation = np.sqrt(1.5)  # of -1, 1, -1, 1, with epsilon; results of up to 7 have errors of half a last bit or two
    np.testing.assert_allclose(
        y[0, 0], [4 - 1 / deviation, 3 + 2 / deviation, 2 - 3 / deviation, 1 + 4 / deviation], atol=1e-6
    )


def test_a_model_without_custom_operators_needs_no_kernels(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    path = built("aft-full", "encoder").path
    library_is(monkeypatch, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with effexport.load(path, RunOptions(implementation="kernel")) as runner:
            assert runner.implementation == {}


def test_without_a_library_bodies_run_and_a_warning_says_so(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    library_is(monkeypatch, None)
    path = built("lsh", "encoder", fused=False).path
    message = "custom operators run as function bodies, .* no kernel library is built for LSHSort; .*plugins build"
    with pytest.warns(KernelWarning, match=message):
        runner = effexport.load(path)
    assert runner.implementation == {"LSHSort": "body"}
    assert np.isfinite(runner.run({"input_ids": token_ids()})["last_hidden_state"]).all()
    with pytest.raises(UserError, match="kernels were requested, but no kernel library is built for LSHSort"):
        effexport.load(path, RunOptions(implementation="kernel"))


def test_bodies_that_were_asked_for_cause_no_warning(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    path = built("lsh", "encoder", fused=False).path
    library_is(monkeypatch, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        effexport.load(path, RunOptions(implementation="body")).close()


def test_a_library_that_does_not_load_is_left_aside_loudly(
    built: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.so").write_text("not a library")
    library_is(monkeypatch, Library(tmp_path / "broken.so", outdated=False, info=None))
    path = built("lsh", "encoder", fused=False).path
    with pytest.warns(KernelWarning, match=r"ONNX Runtime does not load .*broken\.so"), effexport.load(path) as runner:
        assert runner.implementation == {"LSHSort": "body"}
    with pytest.raises(UserError, match=r"kernels were requested, but ONNX Runtime does not load .*broken\.so"):
        effexport.load(path, RunOptions(implementation="kernel"))


@pytest.mark.requires("native")
def test_an_outdated_library_is_used_with_a_warning(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    path = get_library_path()
    assert path is not None
    library_is(monkeypatch, Library(path, outdated=True, info=None))
    with (
        pytest.warns(KernelWarning, match="was built from other sources than these; rebuild it with: .*plugins build"),
        effexport.load(built("lsh", "encoder", fused=False).path) as runner,
    ):
        assert runner.implementation == {"LSHSort": "kernel"}


def test_a_wrong_library_variable_is_one_clear_error(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    path = built("lsh", "encoder", fused=False).path
    monkeypatch.setenv("EFFEXPORT_LIBRARY", "/nowhere/lib.so")
    with pytest.raises(UserError, match=r"EFFEXPORT_LIBRARY is '/nowhere/lib\.so', where there is no file"):
        effexport.load(path)


def test_on_a_gpu_bodies_are_preferred_to_kernels_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(has_cuda=False)
    library_is(monkeypatch, Library(Path("lib.so"), outdated=False, info=info))  # type: ignore[arg-type]
    settings = RunOptions(runtime="ort-cuda")
    with pytest.warns(KernelWarning, match=r"lib\.so has no CUDA kernels for LSHSort; .*plugins build --cuda"):
        assert kernels.library_for(["LSHSort"], settings) is None
    with pytest.raises(UserError, match=r"kernels were requested, but .* has no CUDA kernels"):
        kernels.library_for(["LSHSort"], RunOptions(runtime="ort-cuda", implementation="kernel"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"runtime": "gpu"}, "unknown runtime 'gpu'.* Expected: ort, ort-cuda, ort-trt, trt, trt-rtx, openvino"),
        ({"implementation": "bodies"}, "unknown implementation 'bodies'.* Expected: auto, kernel, body"),
        ({"threads": 0}, "threads is 0; expected at least 1"),
        ({"cuda_graph": True}, "cuda_graph needs the runtime 'ort-cuda' or 'trt' or 'trt-rtx'; the runtime is 'ort'"),
        ({"tf32": True}, "tf32 needs the runtime 'ort-cuda' or 'ort-trt' or 'ort-rtx'"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RunOptions(**fields)


def fake_ort(available: list[str]) -> Any:
    return SimpleNamespace(__version__="9.9", get_available_providers=lambda: available)


def test_a_provider_that_is_not_installed_says_how_to_add_it() -> None:
    ort = fake_ort(["CPUExecutionProvider"])
    with pytest.raises(UserError, match=r"onnxruntime 9\.9 has no CUDAExecutionProvider, .*'effexport\[gpu\]'"):
        providers_from_settings(ort, RunOptions(runtime="ort-cuda"))


def test_a_provider_that_did_not_start_is_an_error() -> None:
    inference = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    with pytest.raises(UserError, match="CUDAExecutionProvider did not start, and the model would run on CPU"):
        check_provider(inference, RunOptions(runtime="ort-cuda"))


def test_cuda_is_asked_for_exact_float32_and_for_graphs_only_on_request() -> None:
    ort = fake_ort(["CUDAExecutionProvider", "CPUExecutionProvider"])
    (cuda, options), cpu = providers_from_settings(ort, RunOptions(runtime="ort-cuda"))
    assert (cuda, cpu) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert options == {"device_id": "0", "use_tf32": "0", "enable_cuda_graph": "0"}
    (_, options), _ = providers_from_settings(ort, RunOptions(runtime="ort-cuda", cuda_graph=True, tf32=True))
    assert options == {"device_id": "0", "use_tf32": "1", "enable_cuda_graph": "1"}


def test_what_onnxruntime_prints_about_missing_libraries_stays_out_of_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ort = fake_ort(["CUDAExecutionProvider", "CPUExecutionProvider"])
    ort.preload_dlls = lambda: print("Failed to load libcublas")
    providers_from_settings(ort, RunOptions(runtime="ort-cuda"))
    assert capsys.readouterr() == ("", "Failed to load libcublas\n")


NOTHING = kernels.Kernels(None, (), ("LSHSort",))


def assigned(**providers: str) -> Any:
    """A session that says where each operator runs."""
    parts = [
        SimpleNamespace(ep_name=provider, get_nodes=lambda op=op: [SimpleNamespace(op_type=op)])
        for op, provider in providers.items()
    ]
    return SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)


def test_what_ran_is_what_the_session_says() -> None:
    inference = assigned(LSHSort="CPUExecutionProvider", MatMul="CPUExecutionProvider")
    ran = kernels.implementation_of(inference, kernels.Kernels(None, (), ("IterativePinv", "LSHSort")), RunOptions())
    assert ran == {"IterativePinv": "body", "LSHSort": "kernel"}
    with pytest.warns(KernelWarning, match="LSHSort runs on CPUExecutionProvider: .* no kernel for CUDA"):
        kernels.implementation_of(inference, NOTHING, RunOptions(runtime="ort-cuda"))


def test_before_sessions_could_say_a_registered_kernel_is_what_runs() -> None:
    library = Library(Path("lib.so"), outdated=False, info=None)
    for given, ran in ((kernels.Kernels(library, ("LSHSort",), ()), "kernel"), (NOTHING, "body")):
        assert kernels.implementation_of(object(), given, RunOptions()) == {"LSHSort": ran}


@pytest.fixture(scope="module")
def lsh(built: Built) -> Any:
    with effexport.load(built("lsh", "encoder", fused=False).path) as runner:
        yield runner


def test_a_bound_model_answers_as_an_unbound_one(lsh: Any) -> None:
    first, second = token_ids(), token_ids()[:, ::-1].copy()
    given = first.copy()
    bound = lsh.bind({"input_ids": given})
    bound.run()
    assert np.array_equal(bound.outputs()["last_hidden_state"], lsh.run({"input_ids": first})["last_hidden_state"])
    kept = bound.outputs()["last_hidden_state"]
    before = kept.copy()
    bound.update({"input_ids": second})
    bound.run()
    assert np.array_equal(bound.outputs()["last_hidden_state"], lsh.run({"input_ids": second})["last_hidden_state"])
    assert np.array_equal(kept, before), "outputs are copies"
    assert np.array_equal(given, first), "the caller's array is left alone"


def test_two_bound_models_of_one_runner_do_not_disturb_each_other(lsh: Any) -> None:
    feeds = [{"input_ids": token_ids(batch, 16 * batch)} for batch in (1, 2, 3, 4)]
    bound = [lsh.bind(f) for f in feeds]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda b: [b.run() for _ in range(5)], bound))
    for one, f in zip(bound, feeds, strict=True):
        assert np.array_equal(one.outputs()["last_hidden_state"], lsh.run(f)["last_hidden_state"])


def test_a_bound_model_refuses_another_shape_type_or_name(lsh: Any) -> None:
    bound = lsh.bind({"input_ids": token_ids()})
    with pytest.raises(UserError, match=r"is int64 \[2, 49\], but int64 \[2, 50\] is bound; bind the runner again"):
        bound.update({"input_ids": token_ids(2, 49)})
    with pytest.raises(UserError, match=r"is int32 \[2, 50\], but int64"):
        bound.update({"input_ids": token_ids().astype(np.int32)})
    with pytest.raises(UserError, match="input 'ids' is not bound; expected one of: input_ids, attention_mask"):
        bound.update({"ids": token_ids()})
    with pytest.raises(UserError, match="input 'input_ids' is missing"):
        lsh.bind({})
    bound.update({"input_ids": token_ids() + 1000})
    with pytest.raises(
        EffexportError, match=r"ONNX Runtime failed on bound inputs: .* must be within the inclusive range"
    ):
        bound.run()


def test_a_closed_runner_cannot_be_bound(built: Built) -> None:
    runner = effexport.load(built("softmax", "encoder").path)
    runner.close()
    with pytest.raises(EffexportError, match="this runner is closed"):
        runner.bind({"input_ids": token_ids()})


@pytest.mark.requires("native")
def test_nan_weights_are_an_expected_error_that_names_the_operator(built: Built, tmp_path: Path) -> None:
    """The kernel refuses NaN where a body lets it pass: both have to fail the check, neither may crash."""
    artifact = built("nystrom", "attention")
    model = onnx.load(str(artifact.model_path))
    weight = next(t for t in model.graph.initializer if len(t.dims) == 2)
    weight.CopyFrom(numpy_helper.from_array(np.full(list(weight.dims), np.nan, np.float32), weight.name))
    onnx.save(model, str(tmp_path / "model.onnx"))
    cases = load_reference(artifact.reference_path)
    with pytest.raises(EffexportError, match=r"IterativePinv: .* NaN or infin") as failure:
        verify_candidate(tmp_path / "model.onnx", cases, artifact.spec, [], RunOptions())
    assert failure.value.exit_code == 1
    bodies = verify_candidate(tmp_path / "model.onnx", cases, artifact.spec, [], RunOptions(implementation="body"))
    assert "failed" in {check.status for check in bodies.checks}


@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
def test_products_that_share_an_int8_weight_get_one_each(external: bool, tmp_path: Path) -> None:
    """Without int8 instructions, ONNX Runtime 1.31 refuses exact products that share one."""
    import onnxruntime
    from onnx import helper

    random = np.random.default_rng(0)
    weight, table = (random.integers(-127, 128, (64, 64)).astype(np.int8) for _ in range(2))
    tensors = [numpy_helper.from_array(*pair) for pair in ((weight, "w"), (table, "t"), (np.array(128, np.uint8), "z"))]
    nodes = [
        helper.make_node("MatMulInteger", ["x", "w", "z"], ["a"]),
        helper.make_node("MatMulInteger", ["x", "t", "z"], ["b"]),
        helper.make_node("MatMulInteger", ["x", "w", "z"], ["c"]),
    ]
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.INT32, [5, 64]) for name in "abc"]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [5, 64])]
    graph = helper.make_graph(nodes, "shared", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    path = tmp_path / "model.onnx"
    onnx.save_model(model, str(path), save_as_external_data=external, location="weights", size_threshold=0)

    own = onnx.ModelProto.FromString(ort_session.with_own_weights(path))
    readers = [name for node in own.graph.node for name in node.input[1:2]]
    assert len(set(readers)) == 3
    assert (tmp_path / "weights").exists() == external

    options = ort_session.session_options(onnxruntime, RunOptions(), None)
    options.add_session_config_entry(ort_session.EXACT_INT8_KEY, "1")
    codes = random.integers(0, 256, (5, 64)).astype(np.uint8)
    products = ort_session.opened(onnxruntime, path, options, ["CPUExecutionProvider"]).run(None, {"x": codes})
    signed = codes.astype(np.int32) - 128
    for product, factor in zip(products, (weight, table, weight), strict=True):
        assert np.array_equal(product, signed @ factor.astype(np.int32))
