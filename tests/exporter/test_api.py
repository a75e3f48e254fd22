"""`import effexport`: the commands as functions, with the same defaults, typed results and one kind of user error."""

from __future__ import annotations

import importlib
import inspect as python_inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import effexport
from effexport.artifact import Artifact
from effexport.base.spec import BuildSpec, build_spec_from_options

pytestmark = pytest.mark.usefixtures("kept_traces")
Built = Callable[..., Artifact]
SMALL = {"dim": 32, "heads": 2, "seq_len": 32}


def test_importing_and_listing_the_package_loads_no_framework() -> None:
    code = (
        "import sys, effexport; dir(effexport); effexport.build; effexport.UserError; effexport.report\n"
        "effexport.load; names = 'torch onnx onnxruntime onnxscript numpy openvino tensorrt jinja2 click rich'\n"
        "print([m for m in names.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_package_lists_its_public_names_and_knows_no_others() -> None:
    assert dir(effexport) == sorted(effexport.__all__)
    for name in effexport.__all__:
        assert getattr(effexport, name).__doc__ or name == "__version__"
    with pytest.raises(AttributeError, match="module 'effexport' has no attribute 'buidl'"):
        effexport.buidl  # noqa: B018 # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["export", "report"])
def test_a_function_keeps_its_name_when_the_module_of_that_name_is_imported(name: str) -> None:
    module = importlib.import_module(f"effexport.{name}")
    assert python_inspect.ismodule(module)
    assert python_inspect.isfunction(getattr(effexport, name))


@pytest.mark.requires("torch", "onnx", "ort")
def test_a_build_writes_an_artifact_and_returns_it_with_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stages: list[str] = []
    result = effexport.build(
        variant="linear", scope="attention", **SMALL, progress=lambda stage, share: stages.append(stage)
    )
    assert result.path == Path("artifacts/linear")
    assert result.report.verdict == "passed"
    assert "exporting to ONNX" in stages
    assert result.artifact.spec == build_spec_from_options({"variant": "linear", "scope": "attention", **SMALL}, None)
    assert repr(result).startswith("<BuildResult artifacts/linear: <Report of linear attention: passed, ")
    assert repr(result.artifact) == "<Artifact artifacts/linear: linear attention, fp32>"
    with effexport.load(result.path) as runner:
        assert repr(runner).startswith("<OrtRunner: hidden_states float32 [batch, seq, 32], attention_mask int64")
    assert effexport.report(result.path).checks == result.report.checks
    with pytest.raises(effexport.UserError, match="artifacts/linear exists"):
        effexport.build(variant="linear", scope="attention", **SMALL)


@pytest.mark.requires("torch", "onnx", "ort")
def test_a_module_of_ones_own_is_built_and_stays_as_it_is(tmp_path: Path) -> None:
    import torch

    from effexport.models import attention_from_spec
    from effexport.models.variants.linear import LinearSpec

    module = attention_from_spec(LinearSpec(dim=32, heads=2, seq_len=32)).half().train()
    result = effexport.build(module=module, output=tmp_path / "mine")
    assert result.report.verdict == "passed"
    assert result.artifact.manifest.weights_from == "LinearAttention"
    assert module.training
    assert module.out.weight.dtype == torch.float16


@pytest.mark.requires("torch", "onnx", "ort")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "lhs"}, "unknown variant 'lhs'; did you mean 'lsh'"),
        ({"variant": "lsh", "seqlen": 4}, "build has no argument 'seqlen'; did you mean 'seq_len'"),
        ({"variant": "lsh", "seq_len": -5}, "seq_len is -5"),
        ({"variant": "lsh", "checkpoint": "nowhere"}, "config.json decides it|no checkpoint|cannot be combined"),
        ({"spec": "absent.toml"}, "no spec file at absent.toml"),
        ({"module": "nowhere:make"}, "module nowhere:make"),
    ],
)
def test_a_request_that_cannot_work_is_a_user_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(effexport.UserError, match=message) as refused:
        effexport.build(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requires("torch")
def test_a_build_of_nothing_lists_the_three_ways() -> None:
    with pytest.raises(effexport.UserError, match=r"(?s)nothing to export .*  module=… .*  checkpoint=… .* variant=…"):
        effexport.build()


def test_a_spec_object_has_all_fields_already(small_spec: Callable[..., BuildSpec]) -> None:
    with pytest.raises(effexport.UserError, match="seq_len cannot be combined with a BuildSpec, which has all fields"):
        effexport.build(spec=small_spec("linear"), seq_len=64)


@pytest.mark.requires("torch", "onnx", "ort")
def test_inspect_describes_what_the_command_prints(built: Built, cli: Callable[..., object]) -> None:
    artifact = built("softmax", "attention")
    for path, kind in ((artifact.path, "artifact"), (artifact.model_path, "model")):
        found = effexport.inspect(path)
        assert (found.kind, found.path) == (kind, path)
        printed = cli("inspect", path, "--json")
        assert json.loads(printed.out) == json.loads(json.dumps(found.details))  # type: ignore[attr-defined]
        assert repr(found).startswith(f"<Description of the {kind} {path}: path, ")
    with pytest.raises(effexport.UserError, match="nothing is at nowhere; expected an artifact folder"):
        effexport.inspect("nowhere")


def test_the_repr_of_a_spec_is_the_call_that_makes_it(small_spec: Callable[..., BuildSpec]) -> None:
    from effexport.models.encoder.spec import EncoderSpec
    from effexport.models.variants.lsh import LSHSpec

    spec = BuildSpec(model=EncoderSpec(attention=LSHSpec(dim=64, heads=4), layers=3), precision="fp16")
    assert repr(LSHSpec()) == "LSHSpec()"
    assert repr(spec).startswith("BuildSpec(model=EncoderSpec(attention=LSHSpec(dim=64")
    names = {"BuildSpec": BuildSpec, "EncoderSpec": EncoderSpec, "LSHSpec": LSHSpec}
    assert eval(repr(spec), names) == spec


@pytest.mark.parametrize("value", [None, 3, b"x", [], {"a\nb": 1}], ids=repr)
@pytest.mark.parametrize("name", ["inspect", "report", "verify", "load", "load_decoder"])
def test_something_else_than_a_path_is_refused_in_one_line(name: str, value: object) -> None:
    with pytest.raises(effexport.UserError, match=r"(path|artifact) is .*; expected a path, as str or") as refused:
        getattr(effexport, name)(value)
    assert "\n" not in str(refused.value)


@pytest.mark.requires("torch", "onnx", "ort")
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("build", {"variant": []}, r"variant is \[\]; expected the name of a variant"),
        ("build", {"spec": 3}, "spec is 3; expected a path, a BuildSpec or a dictionary of options"),
        ("build", {"variant": "lsh", "output": 3}, "output is 3; expected a path"),
        ("export", {"module": None}, "module is None; expected an nn.Module"),
        ("build", {"module": 3}, "module is 3; expected an nn.Module, not its class, or 'package.module:factory'"),
        ("build", {"module": str}, "module is <class 'str'>; expected an nn.Module"),
        (
            "build",
            {"variant": "lsh", "settings": {"threads": 1}},
            "settings is {'threads': 1}; expected an effexport.Run",
        ),
        ("build", {"variant": "lsh", "engines": "trt"}, "engines is 'trt'; expected a list of EngineSpec"),
        ("build", {"variant": "lsh", "engines": ["trt"]}, "an item of engines is 'trt'; expected an EngineSpec"),
        ("verify", {"artifact": "x", "cases": 3}, "cases is 3; expected a name or a list of names"),
        ("verify", {"artifact": "x", "cases": [3]}, "an item of cases is 3; expected text"),
        ("verify", {"artifact": "x", "model": 3}, "no artifact at x|model is 3; expected a path"),
        ("verify", {"artifact": "x", "runtime": []}, r"runtime is \[\]; expected text"),
        ("load", {"path": "x", "settings": {}}, "settings is {}; expected an effexport.RunOptions"),
        ("load", {"path": "x", "runtime": 3}, "runtime is 3; expected text"),
        ("load_decoder", {"path": "x", "settings": 3}, "settings is 3; expected an effexport.RunOptions"),
        (
            "load",
            {"path": "x", "settings": effexport.RunOptions(runtime="torch")},
            "settings.runtime is 'torch', which",
        ),
        ("RunOptions", {"threads": "a"}, "threads is 'a'; expected an integer"),
        ("RunOptions", {"threads": 1.5}, "threads is 1.5; expected an integer"),
        ("RunOptions", {"threads": 10**9}, "threads is 1000000000; expected at most"),
        ("RunOptions", {"cuda_graph": "yes"}, "cuda_graph is 'yes'; expected true or false"),
    ],
)
def test_an_argument_of_another_type_is_refused_in_one_line(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(effexport.UserError, match=message) as refused:
        getattr(effexport, name)(**arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.requires("ort")
def test_verify_returns_a_report_whose_verdict_is_that_of_the_command(built: Built, cli: Callable[..., Any]) -> None:
    artifact = built("softmax", "attention")
    stages: list[str] = []
    found = effexport.verify(artifact.path, reference="golden", progress=lambda stage, share: stages.append(stage))
    printed = json.loads(cli("verify", artifact.path, "--reference", "golden", "--json").out)
    assert (found.verdict, found.runtime) == ("passed", "ort")
    assert [str(check.kind) for check in found.checks] == [check["name"] for check in printed["checks"]]
    assert repr(found).startswith("<Report of softmax attention: passed, ")
    assert stages


@pytest.mark.requires("ort")
def test_verify_does_not_raise_for_another_model_that_differs(built: Built, tmp_path: Path) -> None:
    artifact = built("softmax", "attention")
    model = onnx.load(str(artifact.model_path))
    weight = model.graph.initializer[0]
    weight.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(weight), weight.name))
    onnx.save(model, tmp_path / "other.onnx")
    found = effexport.verify(artifact.path, model=tmp_path / "other.onnx", reference="golden")
    assert found.verdict == "failed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runtime": "otr"}, "unknown runtime 'otr'; did you mean"),
        ({"reference": "gold"}, "gold"),
        ({"model": "absent.onnx"}, "absent.onnx"),
        ({"cases": "exprot"}, "there is no case 'exprot'; did you mean 'export'"),
        ({"cases": ["exprot"]}, "there is no case 'exprot'; did you mean 'export'"),
    ],
)
@pytest.mark.requires("ort")
def test_verify_refuses_what_cannot_be_compared(built: Built, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(effexport.UserError, match=message) as refused:
        effexport.verify(built("softmax", "attention").path, **arguments)
    assert "\n" not in str(refused.value)
