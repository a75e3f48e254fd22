"""Files in a model repository: those that are written, those never overwritten, and refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_builds import built_artifact
from small_specs import spec_of
from weights_elsewhere import move_weights

from effexport.artifact import Artifact, open_artifact
from effexport.base.errors import DiskError, UserError
from effexport.plugins.building.library import CudaKernels, Library, find_library, sha256_of
from effexport.proof.cases import load_reference
from effexport.proof.tolerances import case_limit, value_error
from effexport.serving.triton.config import zip_of_effexport
from effexport.serving.triton.package import PackageResult
from effexport.serving.triton.spec import LARGEST_VERSION, PackageSpec

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "native")
Built = Callable[..., Artifact]
Packaging = Callable[..., PackageResult]
Snapshot = Callable[[Path], dict[str, Any]]


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_by_default_an_artifact_becomes_a_model_for_every_backend_that_it_has_files_for(
    built: Built, cli: Callable[..., Any], tmp_path: Path
) -> None:
    artifact = built("lsh")
    result = cli("package", artifact.path, "--format", "triton", "-o", tmp_path / "repo", "--json")
    assert result.code == 0, result.err
    models = {model["name"]: model for model in result.json["models"]}
    assert set(models) == {"lsh-encoder-onnxruntime", "lsh-encoder-python"}
    assert {(model["version"], model["status"]) for model in models.values()} == {(1, "added")}
    assert files_of(tmp_path / "repo" / "lsh-encoder-onnxruntime" / "1") == {"model.onnx", "libeffexport_ort.so"}
    python = files_of(tmp_path / "repo" / "lsh-encoder-python" / "1")
    assert python >= {
        "model.py",
        "effexport.zip",
        "libeffexport_ort.so",
        "artifact/manifest.json",
        "artifact/model.onnx",
    }
    assert {"README.md", "compose.yaml", "Dockerfile", ".dockerignore"} <= files_of(tmp_path / "repo")
    assert "no TensorRT engine" in result.err
    assert result.json["serve"][:2] == ["tritonserver", "--model-repository=/models"]


def test_a_model_for_a_gpu_has_the_cuda_kernels_beside_the_library(
    built: Built, package: Packaging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, library = tmp_path / "effexport_cuda.fatbin", find_library()
    assert library is not None
    assert library.info is not None
    kernels.write_bytes(b"CUDA kernels")
    found = CudaKernels(kernels, library.info.source_hash, sha256_of(kernels), nvcc="nvcc", architectures=(90,))
    monkeypatch.setattr(Library, "cuda", found)
    package(built("lsh"), tmp_path / "repo", name="m", backends=("onnxruntime",), kind="gpu")
    files = files_of(tmp_path / "repo" / "m" / "1")
    assert files == {"model.onnx", "libeffexport_ort.so", "effexport_cuda.fatbin"}


def test_an_artifact_that_continues_texts_also_becomes_a_model_that_generates(
    built: Built, cli: Callable[..., Any], tmp_path: Path
) -> None:
    artifact = built("linear", causal=True, lm_head=True).path
    result = cli("package", artifact, "-o", tmp_path / "both", "--name", "m", "--backend", "python", "--json")
    assert [model["name"] for model in result.json["models"]] == ["m", "m-generate"]
    assert "--load-model=m-generate" in result.json["serve"]
    assert "decoupled: true" in (tmp_path / "both" / "m-generate" / "config.pbtxt").read_text()
    readme = (tmp_path / "both" / "README.md").read_text()
    assert "models/m-generate/generate_stream" in readme
    assert "## Send a text" not in readme
    again = cli("package", artifact, "-o", tmp_path / "both", "--name", "m", "--backend", "python", "--json")
    assert [model["status"] for model in again.json["models"]] == ["unchanged", "unchanged"]
    other = cli("package", artifact, "-o", tmp_path / "other", "--backend", "onnxruntime", "--json")
    assert len(other.json["models"]) == 1


def test_an_artifact_that_ranks_tokens_generates_nothing_and_its_readme_names_the_positions(
    package: Packaging, tmp_path: Path
) -> None:
    spec = spec_of("linear", "encoder", causal=True, lm_head=True, top_k=4)
    artifact = open_artifact(built_artifact(spec))
    result = package(artifact, tmp_path / "models", name="m", backends=("python",))
    assert [change.name for change in result.changes] == ["m"]
    assert result.remarks == ()
    readme = (tmp_path / "models" / "README.md").read_text()
    assert "Only `input_ids` and `positions` are needed" in readme
    (request,) = [line for line in readme.splitlines() if line.startswith("curl") and "infer" in line]
    inputs = json.loads(request.split("-d ")[1].strip("'"))["inputs"]
    assert [(tensor["name"], tensor["shape"]) for tensor in inputs] == [("input_ids", [1, 8]), ("positions", [1, 2])]


def test_the_readme_has_no_float16_as_json_which_triton_refuses(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    package(built("softmax", "attention", precision="fp16"), tmp_path, name="m", backends=("python",))
    readme = (tmp_path / "README.md").read_text()
    assert "client.InferInput" in readme
    assert "/infer" not in readme


def test_the_readme_shows_how_to_send_a_text_to_a_model_that_reads_it(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    package(built("softmax"), tmp_path, name="m")
    readme = (tmp_path / "README.md").read_text()
    assert """models/m-python/generate -d '{"text": "Paris is the capital of France."}'""" in readme
    assert "Load the model first" in readme
    package(built("softmax", "attention"), tmp_path / "layer", name="m")
    assert "Send a text" not in (tmp_path / "layer" / "README.md").read_text()


def test_a_version_that_reads_texts_may_follow_one_of_an_effexport_that_did_not(
    built: Built, other_weights: Callable[..., Path], package: Packaging, tmp_path: Path
) -> None:
    package(built("softmax"), tmp_path, name="m", backends=("python",))
    path = tmp_path / "m" / "effexport.json"
    record = json.loads(path.read_text())
    for kind in ("inputs", "outputs"):
        record[kind] = [tensor for tensor in record[kind] if tensor["dtype"] != "string"]
    for version in record["versions"].values():
        del version["example"]
    path.write_text(json.dumps(record))
    (change,) = package(other_weights("softmax"), tmp_path, name="m", backends=("python",)).changes
    assert (change.version, change.status) == (2, "added")
    assert 'name: "text"' in (tmp_path / "m" / "config.pbtxt").read_text()


def test_a_single_backend_gives_the_model_the_name_of_the_artifact(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    package(built("lsh"), tmp_path, backends=("python",))
    assert (tmp_path / "lsh-encoder" / "config.pbtxt").is_file()


def test_a_repository_named_triton_comes_with_a_warning(built: Built, package: Packaging, tmp_path: Path) -> None:
    warnings = [package(built("lsh"), tmp_path / name, backends=("python",)).remarks for name in ("triton", "other")]
    assert [len(found) for found in warnings] == [1, 0]
    assert "another name, such as -o triton-models" in warnings[0][0]


def test_the_same_artifact_again_writes_nothing(
    built: Built, cli: Callable[..., Any], snapshot: Snapshot, tmp_path: Path
) -> None:
    command = ("package", built("lsh").path, "-o", tmp_path / "repo")
    assert cli(*command).code == 0
    before = snapshot(tmp_path)
    result = cli(*command, "--json")
    assert [model["status"] for model in result.json["models"]] == ["unchanged", "unchanged"]
    assert "nothing was written" in result.err
    assert snapshot(tmp_path) == before


def test_other_content_becomes_the_next_version_and_leaves_the_first_alone(
    built: Built, other_weights: Callable[..., Path], package: Packaging, snapshot: Snapshot, tmp_path: Path
) -> None:
    package(built("softmax"), tmp_path, name="m", backends=("onnxruntime",))
    first = snapshot(tmp_path / "m" / "1")
    (change,) = package(other_weights("softmax"), tmp_path, name="m", backends=("onnxruntime",)).changes
    assert (change.version, change.status) == (2, "added")
    assert snapshot(tmp_path / "m" / "1") == first
    assert (tmp_path / "m" / "1" / "model.onnx").read_bytes() != (tmp_path / "m" / "2" / "model.onnx").read_bytes()


def test_the_kernel_library_of_the_newest_version_is_the_one_of_the_configuration(
    built: Built, other_weights: Callable[..., Path], package: Packaging, tmp_path: Path
) -> None:
    package(built("lsh"), tmp_path, name="m", backends=("onnxruntime",), server_path="/srv/models/")
    package(other_weights("lsh"), tmp_path, name="m", backends=("onnxruntime",), server_path="/srv/models/")
    text = (tmp_path / "m" / "config.pbtxt").read_text()
    assert 'op_library_filename: "/srv/models/m/2/libeffexport_ort.so"' in text


def test_an_artifact_that_is_an_older_version_changes_nothing_and_says_what_is_served(
    built: Built, other_weights: Callable[..., Path], package: Packaging, snapshot: Snapshot, tmp_path: Path
) -> None:
    package(built("softmax"), tmp_path, name="m", backends=("python",))
    package(other_weights("softmax"), tmp_path, name="m", backends=("python",))
    before = snapshot(tmp_path)
    again = package(built("softmax"), tmp_path, name="m", backends=("python",))
    assert all(change.status == "unchanged" for change in again.changes)
    assert "--version 3" in " ".join(again.remarks)
    assert snapshot(tmp_path) == before
    (change,) = package(built("softmax"), tmp_path, name="m", backends=("python",), version=3).changes
    assert (change.version, change.status) == (3, "added")


def test_a_version_that_is_taken_is_refused_unless_it_holds_the_same(
    built: Built, other_weights: Callable[..., Path], cli: Callable[..., Any], snapshot: Snapshot, tmp_path: Path
) -> None:
    options = ("-o", tmp_path / "repo", "--name", "m", "--backend", "onnxruntime", "--version", "7")
    assert cli("package", built("softmax").path, *options).code == 0
    assert cli("package", built("softmax").path, *options, "--json").json["models"][0]["status"] == "unchanged"
    before = snapshot(tmp_path / "repo")
    message = cli("package", other_weights("softmax"), *options).error()
    assert "version 7 of m exists" in message
    assert "next free number, 8" in message
    assert snapshot(tmp_path / "repo") == before


def test_a_lower_number_than_the_newest_leaves_the_configuration_alone(
    built: Built, other_weights: Callable[..., Path], package: Packaging, tmp_path: Path
) -> None:
    package(built("lsh"), tmp_path, name="m", backends=("onnxruntime",), version=5)
    before = (tmp_path / "m" / "config.pbtxt").read_bytes()
    package(other_weights("lsh"), tmp_path, name="m", backends=("onnxruntime",), version=3)
    assert (tmp_path / "m" / "config.pbtxt").read_bytes() == before
    assert json.loads((tmp_path / "m" / "effexport.json").read_text())["versions"].keys() == {"3", "5"}


def test_other_options_change_the_configuration_without_a_new_version(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    package(built("softmax"), tmp_path, name="m", backends=("python",))
    (change,) = package(built("softmax"), tmp_path, name="m", backends=("python",), instances=3).changes
    assert (change.version, change.status) == (1, "configured")
    assert "count: 3" in (tmp_path / "m" / "config.pbtxt").read_text()


def test_a_configuration_that_was_changed_by_hand_is_not_lost(
    built: Built, package: Packaging, snapshot: Snapshot, tmp_path: Path
) -> None:
    package(built("softmax"), tmp_path, name="m", backends=("python",))
    config = tmp_path / "m" / "config.pbtxt"
    config.write_text(config.read_text() + "# mine\n")
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="was changed after effexport wrote it"):
        package(built("softmax"), tmp_path, name="m", backends=("python",), instances=3)
    assert snapshot(tmp_path) == before
    package(built("softmax"), tmp_path, name="m", backends=("python",), replace_config=True)
    assert "# mine" not in config.read_text()


def test_several_artifacts_share_a_repository_and_its_pages_name_them_all(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    package(built("softmax"), tmp_path, name="one", backends=("python",))
    result = package(built("lsh"), tmp_path, name="two", backends=("onnxruntime",))
    readme = (tmp_path / "README.md").read_text()
    assert "| `one` | python |" in readme
    assert "| `two` | onnxruntime |" in readme
    assert {"--load-model=one", "--load-model=two"} <= set(result.serve)
    assert all(word in (tmp_path / "compose.yaml").read_text() for word in result.serve)
    assert " ".join(result.serve) in readme


def test_the_pages_of_somebody_else_are_left_as_they_are(built: Built, package: Packaging, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# My models\n")
    result = package(built("softmax"), tmp_path, backends=("python",))
    assert (tmp_path / "README.md").read_text() == "# My models\n"
    assert any("was not changed" in remark for remark in result.remarks)


def test_the_image_keeps_its_tag_until_another_one_is_given(built: Built, package: Packaging, tmp_path: Path) -> None:
    def tag() -> str:
        text = (tmp_path / "Dockerfile").read_text()
        return next(line for line in text.splitlines() if line.startswith("ARG TRITON_TAG="))

    package(built("softmax"), tmp_path, name="m", backends=("python",), image_tag="25.08-py3")
    package(built("softmax"), tmp_path, name="n", backends=("python",))
    assert tag() == "ARG TRITON_TAG=25.08-py3"
    package(built("softmax"), tmp_path, name="n", backends=("python",), image_tag="26.01-py3")
    assert tag() == "ARG TRITON_TAG=26.01-py3"


@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_at_any_step_leaves_everything_as_it_was(
    built: Built,
    other_weights: Callable[..., Path],
    package: Packaging,
    snapshot: Snapshot,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    existing: bool,
) -> None:
    # neither the kernels nor effexport have to be copied again at each of the many steps
    monkeypatch.setattr("effexport.serving.triton.config.zip_of_effexport", lambda: b"zip")
    options = {"name": "m", "implementation": "body"}
    repository = tmp_path / "place" / "repo"
    if existing:
        package(built("softmax"), repository, **options)
    changed = other_weights("softmax")
    before = snapshot(tmp_path)
    step = 0
    while True:
        step += 1
        calls = 0

        def failing(real: Callable[..., Any], at: int) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at:
                    raise OSError(28, "No space left on device")
                return real(*arguments)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "fsync"):
                patch.setattr(os, name, failing(getattr(os, name), step))
            try:
                package(changed, repository, max_batch=4, **options)
            except DiskError as error:
                assert "nothing was changed" in str(error)  # noqa: PT017 - the last turn of the loop raises nothing
            else:
                break
        assert snapshot(tmp_path) == before, f"after a failure at step {step}"
    assert step > 8
    assert (repository / "m-python" / ("2" if existing else "1") / "model.py").is_file()


def test_an_interrupted_packaging_is_cleared_away_by_the_next(built: Built, package: Packaging, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = tmp_path / f".repo.packaging-{int(done.stdout)}"
    left.mkdir()
    package(built("softmax"), tmp_path / "repo", backends=("python",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repo"]


def test_two_at_a_time_give_two_versions(
    built: Built, other_weights: Callable[..., Path], package: Packaging, tmp_path: Path
) -> None:
    program = "from effexport.cli.main import main; main()"
    folders = (built("softmax").path, other_weights("softmax"))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, "package", str(folder), "-o", str(tmp_path / "repo"), "--name", "m"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    for name in ("m-python", "m-onnxruntime"):
        assert {"1", "2"} <= {path.name for path in (tmp_path / "repo" / name).iterdir()}
    assert "| 1, 2 |" in (tmp_path / "repo" / "README.md").read_text()


@pytest.mark.parametrize("name", ["", ".hidden", "two words", "a/b", "..", "-m", "ä", "x" * 129, 'q"', "a\n"])
def test_a_name_that_triton_or_a_url_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="the model's name is"):
        PackageSpec(name=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "tritn"), "did you mean 'triton'"),
        (("--backend", "tensorflow"), "unknown --backend 'tensorflow'"),
        (("--backend", "python", "--backend", "python"), "given twice"),
        (("--backend", "tensorrt"), "--target trt"),
        (("--name", "two words"), "--name"),
        (("--version", "0"), "version is 0"),
        (("--version", str(2**63)), "Triton takes at most 9223372036854775807"),
        (("--max-batch", "0"), "max_batch is 0"),
        (("--max-batch", str(2**31)), "at most 2147483647"),
        (("--preferred-batch", "4,x"), "expected integers with commas"),
        (("--preferred-batch", "8,4"), "ascending order"),
        (("--preferred-batch", "4,16"), "--max-batch"),
        (("--queue-delay-us", "-1"), "queue_delay_us is -1"),
        (("--kind", "tpu"), "unknown --kind 'tpu'"),
        (("--instances", "0"), "instances is 0"),
        (("--threads", "0"), "threads is 0"),
        (("--implementation", "best"), "unknown --implementation"),
        (("--server-path", "models"), "absolute path"),
        (("--server-path", "/models: x"), "absolute path of letters"),
        (("--image-tag", "a b"), "image tag"),
        (("--image-tag", "24.11-py3", "--backend", "python"), "from 24.12 on"),
        (("--image-tag", "25.02-py3", "--backend", "onnxruntime"), "from 25.03 on"),
    ],
)
def test_wrong_input_is_one_clear_error_and_writes_nothing(
    built: Built, cli: Callable[..., Any], tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = cli("package", built("softmax").path, "-o", tmp_path / "new" / "repo", *options)
    assert message in result.error()
    assert list(tmp_path.iterdir()) == []


def test_a_version_of_nineteen_digits_is_read_again(built: Built, cli: Callable[..., Any], tmp_path: Path) -> None:
    options = ("-o", tmp_path, "--backend", "python", "--name", "m")
    assert cli("package", built("softmax", "attention").path, *options, "--version", str(LARGEST_VERSION)).code == 0
    assert cli("package", built("softmax", "attention").path, *options).code == 0


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (["name"], "n", "it describes the model 'n'"),
        (["name"], "[red]", "Expected `str` matching regex"),
        (["server_path"], "/m:ro\n    privileged: true", "Expected `str` matching regex"),
        (["tensorrt_version"], "10.14\nRUN id", "Expected `str` matching regex"),
        (["packages", "onnx"], "$(id)1.0", "Expected `str` matching regex"),
        (["packages", "another"], "0.1", "Invalid enum value 'another'"),
        (["inputs", 0, "name"], "`\nx", "a tensor has the name '`\\nx'"),
        (["inputs", 0, "dtype"], "x", "a tensor has the type 'x'"),
        (["inputs", 0, "dims", 0], -1, "a tensor has a negative size"),
        (["inputs"], [], "Expected `array` of length >= 1 - at `$.inputs`"),
        (["outputs"], [], "Expected `array` of length >= 1 - at `$.outputs`"),
    ],
)
def test_a_damaged_record_is_refused_and_nothing_is_written(
    built: Built,
    cli: Callable[..., Any],
    snapshot: Snapshot,
    tmp_path: Path,
    place: list[Any],
    value: Any,
    problem: str,
) -> None:
    options = ("-o", tmp_path, "--backend", "python", "--name")
    assert cli("package", built("softmax").path, *options, "m").code == 0
    path = tmp_path / "m" / "effexport.json"
    record = damaged = json.loads(path.read_text())
    for key in place[:-1]:
        damaged = damaged[key]
    damaged[place[-1]] = value
    path.write_text(json.dumps(record))
    before = snapshot(tmp_path)
    assert f"is damaged: {problem}" in cli("package", built("lsh").path, *options, "n").error()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("version", ["1.0 $(id)", "1.0;id", "1.0\nRUN id", "1.0\n", "", "x" * 200])
def test_a_version_that_is_none_does_not_get_into_a_dockerfile(
    copied: Callable[..., Path],
    rewrite_manifest: Callable[..., None],
    cli: Callable[..., Any],
    tmp_path: Path,
    version: str,
) -> None:
    artifact = copied("softmax")
    environment = open_artifact(artifact).manifest.environment
    rewrite_manifest(artifact, environment={**environment, "onnx": version})
    result = cli("package", artifact, "-o", tmp_path / "repository", "--backend", "python")
    if version:
        assert "is damaged" in result.error()
        assert not (tmp_path / "repository").exists()
    else:  # as for a package that was not installed
        assert " onnx==" not in (tmp_path / "repository" / "Dockerfile").read_text()


def test_texts_of_a_record_are_data_in_the_commands_and_tables_of_the_readme(
    built: Built, cli: Callable[..., Any], tmp_path: Path
) -> None:
    options = ("-o", tmp_path, "--backend", "python", "--name")
    assert cli("package", built("softmax").path, *options, "m").code == 0
    path = tmp_path / "m" / "effexport.json"
    record = json.loads(path.read_text())
    record["title"] = "a | b <script>\n# c"
    record["versions"]["1"]["example"]["text"] = "don't; $(id) `id`"
    record["inputs"][0]["name"] = "inputs"
    record["outputs"][0]["name"] = 'a"b'
    path.write_text(json.dumps(record))
    assert cli("package", built("softmax", "attention").path, *options, "n").code == 0
    readme = (tmp_path / "README.md").read_text()
    (request,) = [line for line in readme.splitlines() if line.startswith("curl") and "don" in line]
    assert json.loads(shlex.split(request)[-1]) == {"text": "don't; $(id) `id`"}
    (row,) = [line for line in readme.splitlines() if line.startswith("| `m`")]
    assert "| a \\| b &lt;script&gt; # c |" in row
    program = readme.split("```python\n")[1].split("```")[0]
    compile(program, "README.md", "exec")
    assert "np.ones([1, 8], np.int64)" in program
    assert """as_numpy("a\\"b")""" in program


def test_a_repository_that_cannot_be_one_is_refused(
    built: Built, copied: Callable[..., Path], cli: Callable[..., Any], snapshot: Snapshot, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    artifact = copied()
    (tmp_path / "foreign" / "softmax-attention").mkdir(parents=True)
    before = snapshot(tmp_path)
    options = ("--backend", "python")
    assert "is a file" in cli("package", artifact, "-o", tmp_path / "file", *options).error()
    assert "inside the artifact" in cli("package", artifact, "-o", artifact / "repo", *options).error()
    assert "did not write it" in cli("package", artifact, "-o", tmp_path / "foreign", *options).error()
    (artifact / "model.onnx").write_bytes(b"damaged")
    assert "is damaged" in cli("package", artifact, "-o", tmp_path / "repo", *options).error()
    (artifact / "model.onnx").write_bytes((built("softmax", "attention").path / "model.onnx").read_bytes())
    after = {name: entry and entry[0] for name, entry in snapshot(tmp_path).items()}
    assert after == {name: entry and entry[0] for name, entry in before.items()}


def test_versions_of_one_model_must_be_alike(built: Built, package: Packaging, tmp_path: Path) -> None:
    package(built("softmax"), tmp_path, name="m", backends=("python",))
    with pytest.raises(UserError, match="has the inputs input_ids"):
        package(built("softmax", "attention"), tmp_path, name="m", backends=("python",))
    with pytest.raises(UserError, match="is a model for the backend python"):
        package(built("softmax"), tmp_path, name="m", backends=("onnxruntime",))
    with pytest.raises(UserError, match="--server-path"):
        package(built("softmax"), tmp_path, name="n", backends=("onnxruntime",), server_path="/elsewhere")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["m"]


def test_without_kernels_there_is_no_library_and_bodies_run(built: Built, package: Packaging, tmp_path: Path) -> None:
    package(built("lsh"), tmp_path, name="m", implementation="body")
    assert list(tmp_path.rglob("*.so")) == []
    assert "model_operations" not in (tmp_path / "m-onnxruntime" / "config.pbtxt").read_text()


def test_a_packaged_model_and_its_library_are_all_that_onnx_runtime_needs(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    """Open the model as Triton's backend does, with the library of the configuration."""
    import onnxruntime

    artifact = built("lsh")
    package(artifact, tmp_path, name="m", backends=("onnxruntime",), server_path=str(tmp_path))
    found = re.search(r'op_library_filename: "(.*)"', (tmp_path / "m" / "config.pbtxt").read_text())
    assert found is not None
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(found[1])
    session = onnxruntime.InferenceSession(tmp_path / "m" / "1" / "model.onnx", options)
    case = load_reference(artifact.reference_path)[0]
    names = [output.name for output in session.get_outputs()]
    limit = case_limit(artifact.spec, case.own_error).value
    for name, value in zip(names, session.run(names, dict(case.inputs)), strict=True):
        # the limit of the parity check, for the same model and input
        assert value_error(value, case.outputs[name]) <= limit


def test_weights_in_a_file_of_their_own_come_along(built: Built, package: Packaging, tmp_path: Path) -> None:
    package(built("softmax", external_data=True), tmp_path, name="m")
    for folder in (tmp_path / "m-onnxruntime" / "1", tmp_path / "m-python" / "1" / "artifact"):
        assert {"model.onnx", "model.onnx.data"} <= {path.name for path in folder.iterdir()}


def test_weights_in_a_folder_stay_in_it_and_take_the_place_of_no_other_file(
    copied: Callable[..., Path], rewrite_manifest: Callable[..., None], package: Packaging, tmp_path: Path
) -> None:
    folder = copied("lsh", "encoder", external_data=True)
    move_weights(folder, "below/model.onnx")
    rewrite_manifest(folder)
    package(open_artifact(folder), tmp_path / "models", name="m", backends=("onnxruntime",))
    version = tmp_path / "models" / "m" / "1"
    for name in ("model.onnx", "below/model.onnx"):
        assert (version / name).read_bytes() == (folder / name).read_bytes()
    (folder / "below" / "model.onnx").rename(folder / "model.onnx.data")
    move_weights(folder, "libeffexport_ort.so")
    rewrite_manifest(folder)
    with pytest.raises(UserError, match=r"keeps its weights in libeffexport_ort\.so, which is another file in Triton"):
        package(open_artifact(folder), tmp_path / "others", name="m", backends=("onnxruntime",))


def test_a_version_that_a_killed_process_left_without_its_configuration_gets_one(
    built: Built, other_weights: Callable[..., Path], package: Packaging, tmp_path: Path
) -> None:
    options = {"name": "m", "backends": ("onnxruntime",), "server_path": "/models"}
    for artifact in (built("softmax"), other_weights("softmax")):
        package(artifact, tmp_path / "whole", **options)
    package(built("softmax"), tmp_path / "broken", **options)
    shutil.copytree(tmp_path / "whole" / "m" / "2", tmp_path / "broken" / "m" / "2")
    (change,) = package(tmp_path / "damaged" / "softmax-encoder", tmp_path / "broken", **options).changes
    assert (change.version, change.status) == (2, "configured")
    for name in ("config.pbtxt", "effexport.json"):
        assert (tmp_path / "broken" / "m" / name).read_bytes() == (tmp_path / "whole" / "m" / name).read_bytes()


def test_effexport_travels_whole_and_always_as_the_same_bytes() -> None:
    data = zip_of_effexport()
    assert data == zip_of_effexport.__wrapped__()
    import io

    names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    modules = ("__init__", "models/variants/lsh/__init__", "plugins/building/library")
    assert {f"effexport/{name}.py" for name in modules} <= set(names)
    assert "effexport/serving/triton/instance.py" in names
    assert all(name.endswith(".py") for name in names)
