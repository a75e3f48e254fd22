"""The artifact of a user's own module: checked with the module, given other weights, and with few golden values."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_specs import spec_of
from torch import Tensor, nn

import effexport
from effexport.artifact import open_artifact
from effexport.base.errors import UserError
from effexport.base.runtimes import RUNTIMES
from effexport.base.spec import BuildSpec
from effexport.models.user.spec import ModuleSpec
from effexport.models.user.spec_from_module import Calling, model_and_spec
from effexport.models.validation import SpecError
from effexport.proof.cases import SMALL_BYTES, Case, golden_cases, load_reference
from effexport.proof.named_module import module_again
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.http.models import ServedModel
from effexport.serving.triton.config import batching_of, warm_ups
from effexport.serving.triton.spec import PackageSpec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Cli = Callable[..., Any]

CODE = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, width=16, act=nn.GELU, mixed=0.0):
        super().__init__()
        self.up, self.act, self.down, self.mixed = nn.Linear(width, 24), act(), nn.Linear(24, width), mixed

    def forward(self, x):
        y = self.down(self.act(self.up(x)))
        return y + self.mixed * x.mean(0, keepdim=True) if self.mixed else y

class Renamed(Small):
    def forward(self, states):
        return super().forward(states)

class Loud(Small):
    # the samples share a scale, which one of them decides if it is far louder than all others
    def forward(self, x):
        return super().forward(x) * torch.where(x.abs().max() > 100, 0.5, 1.0)

class Quiet(Small):
    def forward(self, x):
        return super().forward(x) * torch.where(x.square().mean((1, 2)).min() < 1e-3, 2.0, 1.0)

class Two(Small):
    def forward(self, x):
        return super().forward(x), x.sum(-1)

def small(seed=0, kind=Small, **options):
    torch.manual_seed(seed)
    model = kind(**options)
    return model, {"x": torch.randn(2, 20, options.get("width", 16))}

def make(): return small()
def later(): return small(1)
def relu(): return small(1, act=nn.ReLU)
def same_but_relu(): return small(act=nn.ReLU)
def deeper():
    model, examples = small(1)
    model.more = nn.Linear(16, 16)
    model.down = nn.Sequential(model.down, model.more)
    return model, examples
def wide(): return small(1, width=8)
def renamed(): return small(kind=Renamed)[0]
def two(): return small(kind=Two)
def mixing(): return small(mixed=0.01)
def loud(): return small(kind=Loud)
def quiet(): return small(kind=Quiet)
def empty(): return None
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("code") / "small_models.py"
    file.write_text(CODE)
    return file


def made(code: Path, name: str) -> nn.Module:
    values: dict[str, Any] = {}
    exec(compile(code.read_text(), str(code), "exec"), values)
    found = values[name]()
    model: nn.Module = found[0] if isinstance(found, tuple) else found
    return model


@pytest.fixture(scope="module")
def artifact(code: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Declared to have independent samples."""
    folder = tmp_path_factory.mktemp("artifacts") / "small"
    return effexport.build(module=f"{code}:make", output=folder, independent_samples=True, golden="small").path


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


@pytest.fixture(scope="module")
def bare(code: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without golden values, and with nothing declared."""
    folder = tmp_path_factory.mktemp("artifacts") / "bare"
    return effexport.build(module=f"{code}:make", output=folder, golden="none").path


def state_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_pytorch_runs_the_named_module_on_stored_and_on_new_inputs(
    cli: Cli, artifact: Path, code: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(code.parent)
    report = tmp_path / "report.json"
    for name in (f"{code}:make", f"./{code.name}:make", "small_models:make"):
        result = cli("verify", artifact, "--module", name, "--json", *(["-o", report, "--force"]))
        assert result.code == 0, result.err
        assert "PyTorch on the stored inputs" in result.err
        assert "PyTorch on new inputs" in result.err
        assert "equal to PyTorch, " in result.err
        assert result.json["summary"]["weights"]["passed"] == 1
        stored = len(load_reference(artifact / "reference.safetensors"))
        assert result.json["summary"]["arithmetic"]["passed"] == 3 * stored
        assert json.loads(report.read_text())["options"] == []


def test_other_weights_and_other_code_fail_and_are_told_apart(cli: Cli, artifact: Path, code: Path) -> None:
    later = cli("verify", artifact, "--module", f"{code}:later")
    assert later.code == 1
    assert "small_models.py:later holds other weights than the artifact was built with" in later.err + later.out
    digest = open_artifact(artifact).manifest.weights_sha256
    assert f"not {digest[:12]}…" in later.out
    assert "failed: arithmetic in" in later.out
    assert "it is computed from the weights" in later.out
    other = cli("verify", artifact, "--module", f"{code}:same_but_relu", "--reference", "torch", "--json")
    assert other.code == 1
    assert other.json["summary"]["weights"]["passed"] == 1
    assert other.json["summary"]["arithmetic"]["passed"] == 0
    assert not other.json["passed"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("wide", "its example of 'x' is float [2, 20, 8]; the artifact takes float ['batch', 'seq', 16]"),
        ("renamed", "its forward takes states; the artifact has 'x'"),
        ("two", "its outputs differ: 'output' is not there; the artifact has float ['batch', 'seq', 16]"),
        ("empty", "returned a NoneType; expected an nn.Module"),
        ("absent", "has no attribute 'absent'"),
    ],
)
def test_another_model_is_refused_in_one_sentence(
    cli: Cli, artifact: Path, code: Path, name: str, problem: str
) -> None:
    before = state_of(artifact)
    for command in ("verify", "refit"):
        assert problem in cli(command, artifact, "--module", f"{code}:{name}").error()
    assert state_of(artifact) == before


def test_only_the_artifact_of_a_module_takes_one(cli: Cli, built: Callable[..., Any], code: Path) -> None:
    variant = built("softmax", "attention").path
    for command in ("verify", "refit"):
        message = cli(command, variant, "--module", f"{code}:make").error()
        assert "did not come from a module of your own, but from softmax attention" in message


def test_in_python_a_module_needs_no_examples_and_stays_as_it_is(artifact: Path, code: Path, tmp_path: Path) -> None:
    model = made(code, "make").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert effexport.verify(artifact, module=model).verdict == "passed"
    report = effexport.verify(artifact, module=model, examples=torch.randn(3, 9, 16), reference="torch")
    assert report.verdict == "passed"
    assert any(check.case.name == "example" and check.case.shape == (3, 9) for check in report.checks)
    save_file(made(code, "later").state_dict(), tmp_path / "later.safetensors")
    assert effexport.verify(artifact, module=model, weights=tmp_path / "later.safetensors").verdict == "failed"
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(UserError, match="not its class"):
        effexport.verify(artifact, module=nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="examples were given without a module"):
        effexport.refit(artifact, examples=torch.zeros(1))


def check_answers(artifact: Path, model: nn.Module) -> None:
    """The file against PyTorch, at sizes that no case has."""
    for shape in ((1, 3, 16), (4, 29, 16)):
        x = torch.randn(shape)
        with effexport.load(artifact) as runner, torch.no_grad():
            (answer,) = runner.run({"x": x.numpy()}).values()
        torch.testing.assert_close(torch.from_numpy(answer), model.eval()(x), atol=1e-5, rtol=1e-5)


def test_a_refit_puts_new_weights_into_the_artifact(
    cli: Cli, artifact: Path, copy: Path, code: Path, tmp_path: Path
) -> None:
    old = open_artifact(artifact)
    result = cli("refit", artifact, "--module", f"{code}:later", "-o", tmp_path / "new", "--json")
    assert result.code == 0, result.err
    new = open_artifact(tmp_path / "new")
    assert new.spec == old.spec
    assert new.manifest.weights_sha256 != old.manifest.weights_sha256
    (note,) = new.manifest.notes
    assert note.startswith("refitted from small (weights sha256 ")
    assert new.manifest.files.keys() == old.manifest.files.keys()
    assert new.manifest.files["traced.zip"] == old.manifest.files["traced.zip"]
    check_answers(new.path, made(code, "later"))
    assert effexport.verify(new.path, module=made(code, "later")).verdict == "passed"
    # the same from a file of weights, in place
    save_file(made(code, "later").state_dict(), tmp_path / "later.safetensors")
    assert cli("refit", copy, "--module", f"{code}:make", "--weights", tmp_path / "later.safetensors").code == 0
    assert open_artifact(copy).manifest.weights_sha256 == new.manifest.weights_sha256
    assert (copy / "model.onnx").read_bytes() == (new.path / "model.onnx").read_bytes()
    # and from an object, back again
    assert effexport.refit(copy, module=made(code, "make")).report.verdict == "passed"
    assert (copy / "model.onnx").read_bytes() == old.model_path.read_bytes()


def test_a_refit_of_another_architecture_changes_nothing(cli: Cli, copy: Path, code: Path, tmp_path: Path) -> None:
    before = state_of(copy)
    for name, problem in (
        ("relu", "its graph has the step gelu = Relu (add_4); the artifact has gelu"),
        ("deeper", "it has "),
    ):
        message = cli("refit", copy, "--module", f"{code}:{name}").error()
        assert f"small_models.py:{name} is of another architecture than {copy}: {problem[:16]}" in message
        assert "export it with effexport build --module" in message
    assert "has already; expected other ones" in cli("refit", copy, "--module", f"{code}:make").error()
    save_file({"up.weight": torch.zeros(24, 16)}, tmp_path / "part.safetensors")
    part = cli("refit", copy, "--module", f"{code}:make", "--weights", tmp_path / "part.safetensors").error()
    assert "down.weight" in part
    broken = made(code, "later")
    with torch.no_grad():
        broken.get_parameter("up.weight")[0] = float("nan")
    with pytest.raises(UserError, match="weights that are not finite"):
        effexport.refit(copy, module=broken)
    assert "name the module that has the new weights with --module" in cli("refit", copy, "--weights", code).error()
    assert state_of(copy) == before
    assert sorted(path.name for path in copy.parent.iterdir()) == ["copy", "part.safetensors"]


class Scaled(nn.Module):
    """Has an argument that is not a tensor, and inputs of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(9, 16), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids: Tensor, keep: Tensor, scale: float = 1.0, name: str = "") -> Tensor:
        x = self.table(ids) * scale
        return self.attention(x, x, x, key_padding_mask=~keep, need_weights=False)[0] + len(name)


def test_constants_axes_and_replaced_layers_are_those_of_the_artifact() -> None:
    model = Scaled().eval()
    ids, keep = torch.randint(0, 9, (2, 12)), torch.arange(12).expand(2, 12) < 10
    examples = {"ids": ids, "keep": keep, "scale": 3.0, "name": "abc"}
    _, spec = model_and_spec(model, "mine", None, Calling(examples=examples))
    assert spec.constants == {"scale": 3.0, "name": "abc"}
    read = BuildSpec.from_dict(json.loads(json.dumps(BuildSpec(model=spec).to_dict()))).model
    assert isinstance(read, ModuleSpec)
    fixed = spec.with_fixed("batch", 2, "why")
    as_it_stands = dataclasses.replace(spec, replaced={})
    for described in (read, fixed, as_it_stands):
        user = module_again(model, "mine", described)
        assert set(user.adapted.replaced) == set(described.replaced)
        with torch.no_grad():
            (answer,) = user.original(ids, keep)
            (ours,) = user.module(ids, keep)
            expected = model(ids, keep, 3.0, "abc")
        torch.testing.assert_close(answer, expected)
        torch.testing.assert_close(ours[keep], expected[keep], atol=1e-5, rtol=1e-5)
    with pytest.raises(SpecError, match=r"its example of 'ids' is float \[2, 12\]; the artifact takes int64"):
        module_again(model, "mine", spec, {**examples, "ids": ids.float()})
    with pytest.raises(SpecError, match="its example inputs are ids; the artifact takes ids, keep"):
        module_again(model, "mine", spec, ids)
    assert "constants" not in model_and_spec(model, "mine", None, Calling(examples=(ids, keep)))[1].to_dict()


def test_samples_that_depend_on_others_are_refused_with_the_output_and_its_error(
    cli: Cli, code: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    refused = cli("build", "--module", f"{code}:mixing", "--independent-samples", "-o", target)
    assert refused.code == 1
    error = refused.err.strip().splitlines()[-1]
    assert "reference: samples were declared independent, and are not (" in error
    assert re.search(r"worst in output of sample \d alone: max \|other batch − batch\| / RMS is 0\.\d+, the", error)
    assert "limit 0.0002; leave --independent-samples out" in error
    assert not target.exists()
    assert "only works with --module" in cli("build", "--variant", "lsh", "--independent-samples").error()


@pytest.mark.parametrize("name", ["loud", "quiet"])
def test_samples_that_depend_on_others_of_another_size_are_refused(cli: Cli, code: Path, name: str) -> None:
    refused = cli("build", "--module", f"{code}:{name}", "--independent-samples", "-o", code.parent / "out")
    assert refused.code == 1
    assert re.search(r"worst in output of sample \d beside samples [\d.e+-]+ times as large", refused.err)


def test_inputs_without_a_batch_cannot_be_independent_samples() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return x + positions

    examples = {"x": torch.randn(2, 5, 4), "positions": torch.randn(5, 4)}
    with pytest.raises(UserError, match=r"positions of Shared is \[5, 4\]; expected the batch"):
        effexport.export(Shared(), examples, "unused", independent_samples=True)


def test_a_file_that_mixes_samples_fails_where_they_were_declared_independent(
    cli: Cli, artifact: Path, code: Path, tmp_path: Path
) -> None:
    mixing = effexport.build(module=f"{code}:mixing", output=tmp_path / "mixing", golden="none").artifact
    result = cli("verify", artifact, "--model", mixing.model_path, "--reference", "golden", "--json")
    assert result.code == 1
    found = [check for check in result.json["checks"] if check["name"] == "batch invariance"]
    assert {check["status"] for check in found} == {"failed"}
    assert all(check["detail"].startswith("worst in output of sample ") for check in found)
    healthy = open_artifact(artifact).manifest.parity.summary
    assert healthy["batch invariance"].passed == healthy["independent samples"].passed > 1
    undeclared = open_artifact(mixing.path)
    assert "independent_samples" not in undeclared.manifest.spec["model"]
    assert undeclared.manifest.parity.summary["batch invariance"].passed == 0


def answers_of_server(artifact: Path, requests: list[dict[str, Any]]) -> tuple[list[Any], list[int]]:
    """A served model's answers to requests that arrive together, and the number of rows in each run."""
    opened, rows = open_artifact(artifact), list[int]()

    class Counting:
        def __init__(self, runner: Any) -> None:
            self._runner = runner

        def run(self, feeds: Mapping[str, Any]) -> Any:
            rows.append(len(feeds["x"]))
            return self._runner.run(feeds)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._runner, name)

    async def scenario() -> list[Any]:
        settings = ServingSettings(max_batch=8, batch_delay_ms=200.0, max_run_tokens=1000, concurrent_runs=1)
        model = ServedModel(Counting(effexport.load(artifact)), opened, "small", settings, RUNTIMES["ort"])
        jobs = [model.batcher.submit(feeds) for feeds in requests]
        found = await asyncio.gather(*(job.answer for job in jobs))
        await asyncio.to_thread(model.close)
        return list(found)

    return asyncio.run(scenario()), rows


def test_a_server_joins_requests_where_samples_are_independent(artifact: Path, bare: Path, code: Path) -> None:
    """Of one length: of padding, nothing was declared."""
    rng = np.random.default_rng(0)
    lengths = (7, 7, 7, 9, 7)
    requests = [{"x": rng.standard_normal((1, length, 16), dtype=np.float32)} for length in lengths]
    with torch.no_grad():
        expected = [made(code, "make").eval()(torch.from_numpy(feeds["x"])) for feeds in requests]
    for folder, most in ((artifact, 4), (bare, 1)):
        answers, rows = answers_of_server(folder, requests)
        assert (max(rows), sum(rows)) == (most, len(requests))
        for answer, right in zip(answers, expected, strict=True):
            torch.testing.assert_close(torch.tensor(answer["output"]), right, atol=1e-5, rtol=1e-5)
        batching = batching_of(open_artifact(folder).spec, PackageSpec(name="small"))
        assert (batching.max_batch > 1) == (most > 1)


def test_a_small_golden_file_has_the_smallest_cases_that_fit_and_never_none() -> None:
    def case(name: str, elements: int) -> Case:
        return Case(name, {"x": np.zeros(elements, np.float32)}, {"y": np.zeros(elements, np.float32)})

    cases = [case("large", SMALL_BYTES), case("a", SMALL_BYTES // 16), case("b", 1), case("c", SMALL_BYTES // 16)]
    assert [one.name for one in golden_cases(cases, "small")] == ["a", "b"]
    assert [one.name for one in golden_cases(cases[:1], "small")] == ["large"]
    assert golden_cases(cases, "full") == cases
    assert golden_cases(cases, "none") == []


def test_an_artifact_without_golden_values_says_what_it_cannot_check_and_what_to_pass(
    cli: Cli, bare: Path, artifact: Path, code: Path, tmp_path: Path
) -> None:
    opened = open_artifact(bare)
    assert "reference.safetensors" not in opened.manifest.files
    assert opened.spec.golden == "none"
    # the proof was that of any build
    arithmetic = opened.manifest.parity.summary["arithmetic"].passed
    assert arithmetic == open_artifact(artifact).manifest.parity.summary["arithmetic"].passed
    message = cli("verify", bare).error()
    assert f"{bare} keeps no golden values (--golden none), and PyTorch cannot be run: the module came from" in message
    assert message.rstrip().endswith("name it with verify --module")
    for arguments in (("--reference", "golden"), ("--reference", f"{artifact}@ort")):
        assert "keeps no golden values (--golden none)" in cli("verify", bare, *arguments).error()
    assert "--golden small" in cli("inline", bare, "-o", tmp_path / "inlined.onnx").error()
    verified = cli("verify", bare, "--module", f"{code}:make", "--case", "export", "--json")
    assert verified.code == 0, verified.err
    assert "there is no case 'exprot'" in cli("verify", bare, "--module", f"{code}:make", "--case", "exprot").error()


def test_every_other_command_works_without_golden_values(cli: Cli, bare: Path, code: Path, tmp_path: Path) -> None:
    assert cli("inspect", bare).code == cli("report", bare).code == 0
    assert "--golden none" in cli("report", bare, "--format", "markdown").out + (bare / "report.html").read_text()
    (warm_up,) = warm_ups(open_artifact(bare), (0,), None)
    assert warm_up["x"].shape == (1, 20, 16)
    package = cli("package", bare, "--format", "triton", "-o", tmp_path / "package")
    assert package.code == 0, package.err
    refitted = cli("refit", bare, "--module", f"{code}:later", "-o", tmp_path / "new")
    assert refitted.code == 0, refitted.err
    assert not (tmp_path / "new" / "reference.safetensors").exists()
    check_answers(tmp_path / "new", made(code, "later"))


@pytest.mark.slow
def test_variants_without_golden_values_are_compared_with_pytorch(cli: Cli, tmp_path: Path) -> None:
    """Also a decode step, which the golden values of other artifacts judge."""
    effexport.build(spec_of("linear", "attention", causal=True, golden="none"), tmp_path / "out")
    result = cli("verify", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    assert result.json["summary"]["decode step"]["passed"] > 0
    assert "golden file" not in result.err
    assert BuildSpec.from_dict(spec_of("linear").to_dict()).golden == "full"
    with pytest.raises(UserError, match=r"unknown golden 'all'; did you mean 'small'\? Expected: full, small, none"):
        effexport.build(variant="linear", golden="all")
