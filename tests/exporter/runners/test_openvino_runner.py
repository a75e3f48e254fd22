"""OpenVINO runs artifacts as PyTorch answered, in float32 unless asked otherwise, or says precisely why it does not."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from small_specs import BUILT_VARIANTS, spec_of

from effexport.artifact import Artifact
from effexport.base.dtypes import TensorInfo
from effexport.base.errors import (
    EffexportError,
    MissingExtraError,
    RuntimeFailedError,
    RuntimeUnsupportedError,
    UserError,
)
from effexport.base.runtimes import RUNTIMES
from effexport.proof.cases import load_reference
from effexport.proof.check import Check
from effexport.proof.verify import verify_in_runtime
from effexport.runners import runner as feeds_module
from effexport.runners.artifact_runner import (
    check_precision_of_model,
    model_opener,
    options_from_flags,
    runner_from_artifact,
)
from effexport.runners.openvino import runner as openvino_runner
from effexport.runners.openvino.runner import (
    OpenVinoRunner,
    check_precision,
    core_of,
    import_openvino,
    reason_of,
    rounds_to_bfloat16,
)
from effexport.runners.options import RunOptions

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "openvino")
Built = Callable[..., Artifact]
# Variants whose function bodies OpenVINO has misread, and all others.
WITH_TRAPS = ("nystrom", "lsh")
OTHERS = tuple(name for name in BUILT_VARIANTS if name not in WITH_TRAPS)
BUILT_IN_FP16 = ("softmax", "linear", "aft-simple", "aft-local", "window")
ONE_THREAD = RunOptions(runtime="openvino", threads=1)
BF16 = replace(ONE_THREAD, precision_hint="bf16")


def verified(artifact: Artifact, options: RunOptions = ONE_THREAD) -> list[Check]:
    """The checks of an artifact in OpenVINO, against its stored answers."""
    cases, hashes = load_reference(artifact.reference_path), artifact.manifest.hash_values
    open_model = model_opener(options)
    hint = options.precision_hint
    return verify_in_runtime(artifact.model_path, cases, artifact.spec, hashes, open_model, hint).checks


def supports_bf16() -> bool:
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def hidden(seq_len: int = 10) -> dict[str, np.ndarray]:
    return {"hidden_states": np.random.default_rng(seq_len).standard_normal((2, seq_len, 32), dtype=np.float32)}


@pytest.fixture(scope="module")
def attention(built: Built) -> Iterator[OpenVinoRunner]:
    with OpenVinoRunner(built("softmax", "attention").model_path, ONE_THREAD) as runner:
        yield runner


# in float16, those that other tests build
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *itertools.product(WITH_TRAPS, ("fp32", "fp16")),
        *(pytest.param(name, "fp32", marks=pytest.mark.slow) for name in OTHERS),
        *(
            pytest.param(name, "fp16", marks=pytest.mark.slow if name in BUILT_IN_FP16 else pytest.mark.soak)
            for name in OTHERS
        ),
    ],
)
def test_openvino_computes_what_pytorch_computes(built: Built, name: str, precision: str) -> None:
    checks = verified(built(name, "attention", precision=precision))
    assert [f"{check.name} {check.case}: {check.detail}" for check in checks if check.status != "passed"] == []


def test_inputs_and_outputs_have_the_names_and_dims_of_the_file(attention: OpenVinoRunner) -> None:
    dims = ("batch", "seq")
    mask = TensorInfo("attention_mask", "int64", dims)
    assert attention.inputs == (TensorInfo("hidden_states", "float32", (*dims, 32)), mask)
    assert attention.outputs == (TensorInfo("last_hidden_state", "float32", (*dims, 32)),)
    assert attention.implementation == {"MaskedAttention": "body"}


def test_threads_do_not_disturb_each_other(attention: OpenVinoRunner) -> None:
    lengths = [5, 10, 17, 33] * 4
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda n: attention.run(hidden(n))["last_hidden_state"], lengths))
    for n, answer in zip(lengths, together, strict=True):
        assert np.array_equal(answer, attention.run(hidden(n))["last_hidden_state"])


def test_an_answer_is_not_overwritten_by_the_next_run(attention: OpenVinoRunner) -> None:
    first = attention.run(hidden())["last_hidden_state"]
    before = first.copy()
    attention.run({"hidden_states": 2 * hidden()["hidden_states"]})
    assert np.array_equal(first, before)


def test_inputs_may_have_any_layout(attention: OpenVinoRunner) -> None:
    feeds = hidden()
    strided = np.repeat(feeds["hidden_states"], 2, axis=1)[:, ::2]
    assert np.array_equal(
        attention.run({"hidden_states": strided})["last_hidden_state"], attention.run(feeds)["last_hidden_state"]
    )


def test_inputs_may_be_read_only(attention: OpenVinoRunner) -> None:
    feeds = hidden()
    frozen = feeds["hidden_states"].copy()
    frozen.flags.writeable = False
    assert np.array_equal(
        attention.run({"hidden_states": frozen})["last_hidden_state"], attention.run(feeds)["last_hidden_state"]
    )


def test_bound_inputs_can_be_updated(attention: OpenVinoRunner) -> None:
    feeds, other = hidden(), {"hidden_states": -hidden()["hidden_states"]}
    bound = attention.bind(feeds)
    for given in (feeds, other):
        bound.update(given)
        bound.run()
        assert np.array_equal(bound.outputs()["last_hidden_state"], attention.run(given)["last_hidden_state"])
    with pytest.raises(UserError, match="bind the runner again for another shape"):
        bound.update(hidden(11))


def test_inputs_that_do_not_fit_are_refused_as_by_every_runner(attention: OpenVinoRunner) -> None:
    with pytest.raises(UserError, match="unknown input 'hidden'"):
        attention.run({"hidden": hidden()["hidden_states"]})
    with pytest.raises(UserError, match="expected rank 3"):
        attention.run({"hidden_states": np.zeros((2, 32), np.float32)})


def test_an_empty_answer_is_an_error(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO has returned one in bfloat16."""
    empty = {"last_hidden_state": np.zeros((0, 0, 32), np.float32)}
    monkeypatch.setattr(OpenVinoRunner, "_run", lambda *_: empty)
    with (
        runner_from_artifact(built("softmax", "attention"), ONE_THREAD) as runner,
        pytest.raises(RuntimeFailedError, match=r"'last_hidden_state' is \[0, 0, 32\]; expected \[2, 10, 32\]"),
    ):
        runner.run(hidden())


def test_a_closed_runner_says_so(built: Built) -> None:
    runner = runner_from_artifact(built("softmax", "attention"), ONE_THREAD)
    runner.close()
    with pytest.raises(EffexportError, match="this runner is closed"):
        runner.run(hidden())


def test_a_runner_that_is_closed_while_it_checks_feeds_ends_that_run(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = OpenVinoRunner(built("softmax", "attention").model_path, ONE_THREAD)
    expected, checked = runner.run(hidden()), feeds_module.checked_feeds

    def closing(*given: Any) -> Any:
        runner.close()
        return checked(*given)

    monkeypatch.setattr(feeds_module, "checked_feeds", closing)
    np.testing.assert_equal(runner.run(hidden()), expected)


def test_signals_are_handled_after_models_were_closed_in_the_order_they_were_opened(built: Built) -> None:
    path = str(built("linear", "attention").model_path)
    code = f"""
import signal
from pathlib import Path
from effexport.runners.openvino.runner import OpenVinoRunner
runners = [OpenVinoRunner(Path({path!r})) for _ in range(3)]
while runners:
    runners.pop(0).close()
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_weights_beside_the_file_are_found_from_its_path_and_from_its_bytes(
    built: Built, tmp_path: Path, attention: OpenVinoRunner
) -> None:
    model = onnx.load(str(built("softmax", "attention").model_path))
    path = tmp_path / "model.onnx"
    (tmp_path / "weights").mkdir()
    onnx.save(model, str(path), save_as_external_data=True, location="weights/model.data", size_threshold=0)
    expected = attention.run(hidden())["last_hidden_state"]
    for source, folder in ((path, None), (path.read_bytes(), tmp_path)):
        with OpenVinoRunner(source, ONE_THREAD, external_folder=folder) as runner:
            assert np.array_equal(runner.run(hidden())["last_hidden_state"], expected)
    # compiled models do not need their files any more
    with OpenVinoRunner(path, ONE_THREAD) as runner:
        shutil.rmtree(tmp_path / "weights")
        assert np.array_equal(runner.run(hidden())["last_hidden_state"], expected)


def one_node(op: str, dtype: int) -> bytes:
    """A model of one operator without attributes, a [n, 2] → b [n, 2]."""
    given, result = (onnx.helper.make_tensor_value_info(name, dtype, ["n", 2]) for name in "ab")
    graph = onnx.helper.make_graph([onnx.helper.make_node(op, ["a"], ["b"])], "one node", [given], [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    serialised: bytes = model.SerializeToString()
    return serialised


def test_bfloat16_comes_in_and_goes_out_as_it_is() -> None:
    values = np.array([[1.5, -2.0], [0.0, 3.0]]).astype(ml_dtypes.bfloat16)
    with OpenVinoRunner(one_node("Neg", onnx.TensorProto.BFLOAT16), ONE_THREAD) as runner:
        answer = runner.run({"a": values})["b"]
    assert answer.dtype == ml_dtypes.bfloat16
    assert np.array_equal(answer, -values)


def test_a_model_that_openvino_refuses_is_one_sentence() -> None:
    with pytest.raises(RuntimeUnsupportedError, match=r"OpenVINO \S+ refuses the model: .*NoSuchOp") as caught:
        OpenVinoRunner(one_node("NoSuchOp", onnx.TensorProto.FLOAT), ONE_THREAD)
    assert "\n" not in str(caught.value)
    assert "Exception from" not in str(caught.value)


def test_the_reason_is_what_is_left_without_places_in_sources() -> None:
    error = RuntimeError(
        "Exception from src/core.cpp:93:\nException from src/frontend.cpp:54:\n"
        "Check 'unsupported.empty()' failed at src/frontend.cpp:211:\nFrontEnd API failed with OpConversionFailure:\n"
        "No conversion rule found for operations: X\n"
    )
    assert reason_of(error) == "No conversion rule found for operations: X"
    assert reason_of(RuntimeError("Exception from src/core.cpp:93:")) == "Exception from src/core.cpp:93:"


def test_without_openvino_the_error_names_the_extra(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'effexport\[openvino\]'"):
        runner_from_artifact(built("softmax", "attention"), RunOptions(runtime="openvino"))


# ---- precision


def test_float32_is_computed_in_float32_on_every_cpu(attention: OpenVinoRunner) -> None:
    """OpenVINO's own default is bfloat16 where the CPU has it."""
    assert attention._compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"


def test_bfloat16_arithmetic_is_judged_by_the_limits_of_bfloat16(built: Built) -> None:
    artifact = built("softmax", "attention")
    if not supports_bf16():
        with pytest.raises(UserError, match="use a CPU with AVX512-BF16 or AMX"):
            verified(artifact, BF16)
        return
    checks = verified(artifact, BF16)
    assert {check.status for check in checks} == {"passed"}
    assert max(check.value or 0 for check in checks) > 1e-4, "nothing was computed in bfloat16"
    assert {check.limit for check in checks if check.name == "arithmetic"} == {8e-2}


def test_a_cpu_without_bfloat16_says_what_it_has() -> None:
    core: Any = SimpleNamespace(get_property=lambda device, name: ["FP32", "INT8", "BIN"])
    with pytest.raises(UserError, match=r"OpenVINO \S+ computes on this CPU in BIN, FP32, INT8; leave it out"):
        check_precision(core, "bf16")
    check_precision(core, "")


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_models_that_need_float32_are_refused_in_bfloat16(fused: bool, inline: bool) -> None:
    for variant in ("nystrom", "lsh"):
        spec = spec_of(variant, fused=fused, inline=inline)
        with pytest.raises(UserError, match=f"--precision-hint bf16 does not apply to {variant}: .*leave it out"):
            check_precision_of_model(spec, BF16)
        check_precision_of_model(spec, ONE_THREAD)
    check_precision_of_model(spec_of("linear", fused=fused, inline=inline), BF16)


def test_quantised_models_are_refused_in_bfloat16() -> None:
    spec = spec_of("linear", precision="int8")
    with pytest.raises(UserError, match=r"--precision-hint bf16 does not apply to int8, .*leave it out"):
        check_precision_of_model(spec, BF16)
    check_precision_of_model(spec, ONE_THREAD)


@pytest.mark.parametrize(
    ("runtime", "options", "message"),
    [
        (
            "ort",
            {"precision_hint": "bf16"},
            "--precision-hint bf16 does not apply to --runtime ort, .*expected --runtime openvino",
        ),
        ("trt", {"precision_hint": "bf16"}, "does not apply to --runtime trt"),
        ("openvino", {"precision_hint": "fp8"}, "unknown --precision-hint 'fp8'; expected: bf16"),
        (
            "openvino",
            {"implementation": "kernel"},
            "--implementation kernel does not apply to --runtime openvino: it runs bod",
        ),
    ],
)
def test_options_that_a_runtime_does_not_have_are_refused(runtime: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        options_from_flags(runtime, **options)  # type: ignore[arg-type]


def test_the_provider_of_onnxruntime_is_asked_for_float32() -> None:
    from effexport.runners.ort.providers import check_provider, providers_from_settings

    settings = RunOptions(runtime="ort-openvino", threads=2)
    assert (settings.row.tensors, settings.runtime) == ("cpu", "ort-openvino")
    ort = SimpleNamespace(__version__="9.9", get_available_providers=lambda: ["OpenVINOExecutionProvider"])
    (name, options), cpu = providers_from_settings(ort, settings)
    assert (name, cpu) == ("OpenVINOExecutionProvider", "CPUExecutionProvider")
    assert options == {"device_type": "CPU", "precision": "FP32", "num_of_threads": "2"}
    remedy = RUNTIMES["ort-openvino"].package.remedy
    assert remedy == "pip install 'effexport[ort-openvino]'"
    ort = SimpleNamespace(__version__="9.9", get_available_providers=lambda: ["CPUExecutionProvider"])
    with pytest.raises(UserError, match=r"has no OpenVINOExecutionProvider, .*effexport\[ort-openvino\]"):
        providers_from_settings(ort, settings)
    silent = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    with pytest.raises(UserError, match="expected the libraries of OpenVINO that come with onnxruntime-openvino"):
        check_provider(silent, settings)


# ---- commands


def test_verify_and_run_work_in_openvino(cli: Callable[..., Any], built: Built, tmp_path: Path) -> None:
    path = built("nystrom", "encoder").path
    result = cli("verify", path, "--runtime", "openvino", "--reference", "golden", "--case", "short", "--json")
    assert result.code == 0, result.err
    assert (result.json["runtime"], result.json["precision_hint"]) == ("openvino", None)
    assert set(result.json["implementation"].values()) == {"body"}
    output = tmp_path / "out.npz"
    result = cli("run", path, "--runtime", "openvino", "--text", __file__, "--output", output)
    assert result.code == 0, result.err
    assert np.isfinite(np.load(output)["last_hidden_state"]).all()


def test_a_precision_hint_that_does_not_apply_is_bad_input(cli: Callable[..., Any], built: Built) -> None:
    path = built("nystrom", "encoder").path
    for arguments in (["verify", path], ["run", path, "--text", __file__]):
        error = cli(*arguments, "--runtime", "openvino", "--precision-hint", "bf16").error()
        assert "does not apply to nystrom: the pseudo-inverse of its landmarks' matrix amplifies rounding" in error


def test_verify_in_bfloat16_says_so(cli: Callable[..., Any], built: Built) -> None:
    path = built("softmax", "attention").path
    options = ("--runtime", "openvino", "--precision-hint", "bf16", "--reference", "golden", "--json")
    result = cli("verify", path, *options)
    if not supports_bf16():
        assert "use a CPU with AVX512-BF16 or AMX" in result.error()
        return
    assert result.code == 0, result.err
    assert result.json["precision_hint"] == "bf16"
    assert "within the limits of bf16" in result.err


def test_linear_layers_in_bfloat16_are_right_or_refused(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO 2026.4 rounds wrongly on some processors."""
    artifact = built("linear", precision="bf16", bf16="linear")
    core = core_of(import_openvino())
    if rounds_to_bfloat16(core):
        assert {check.status for check in verified(artifact)} <= {"passed", "not run"}
    monkeypatch.setattr(openvino_runner, "rounds_to_bfloat16", lambda core: False)
    with pytest.raises(UserError, match="does not round to the nearest bfloat16 on this CPU; use --runtime ort"):
        OpenVinoRunner(artifact.model_path, ONE_THREAD)
    OpenVinoRunner(built("linear").model_path, ONE_THREAD).close()
