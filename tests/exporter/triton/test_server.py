"""The real tritonserver on packaged artifacts. Its wheel has the Python backend only: what needs another one is loaded
to the point where the server looks for that backend, which is after it has accepted the configuration."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton_server import TritonServer, ask_client

from effexport.artifact import Artifact
from effexport.proof.cases import Case, load_reference
from effexport.proof.tolerances import case_limit, value_error
from effexport.serving.triton.package import PackageResult

pytestmark = [
    pytest.mark.requires("torch", "onnx", "ort", "native", "triton"),
    # one server, started by one worker
    pytest.mark.xdist_group("triton"),
]
Built = Callable[..., Artifact]
Packaging = Callable[..., PackageResult]
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [1, 4], "data": [5, 6, 7, 8]}
MODELS = ("lsh-python", "nystrom", "global", "attention")


@dataclass(frozen=True)
class Running:
    server: TritonServer
    repository: Path
    artifacts: dict[str, Artifact]
    folder: Path


@pytest.fixture(scope="module")
def running(built: Built, package: Packaging, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("triton")
    repository = folder / "models"
    artifacts = {
        "lsh-python": built("lsh"),
        "nystrom": built("nystrom"),
        "global": built("nystrom", pinv_init="global"),
        "attention": built("linear", "attention", precision="fp16"),
    }
    package(artifacts["lsh-python"], repository, name="lsh", threads=1, queue_delay_us=200_000)
    for name in MODELS[1:]:
        instances = 2 if name == "nystrom" else 1
        package(artifacts[name], repository, name=name, backends=("python",), threads=1, instances=instances)
    with TritonServer(repository, folder / "log", MODELS) as server:
        yield Running(server, repository, artifacts, folder)


def golden(artifact: Artifact, *, batch_limit: int = 8) -> list[Case]:
    """Cases whose arithmetic does not depend on a hash that could go either way are compared as they are."""
    return [case for case in load_reference(artifact.reference_path) if len(case.keep) <= batch_limit]


@pytest.mark.parametrize("name", MODELS)
def test_a_python_model_becomes_ready(running: Running, name: str) -> None:
    assert running.server.state(name) == {"1": ("READY", "")}
    assert running.server.get(f"/v2/models/{name}/ready")[0] == 200
    _, metadata = running.server.get(f"/v2/models/{name}")
    expected = running.artifacts[name].spec
    texts = [] if name == "attention" else ["text", "context"]
    assert [tensor["name"] for tensor in metadata["inputs"]] == [*(tensor.name for tensor in expected.inputs), *texts]
    for tensor, info in zip(metadata["outputs"][: len(expected.outputs)], expected.outputs, strict=True):
        assert tensor["shape"] == [dim if isinstance(dim, int) else -1 for dim in info.dims]


def test_kernels_run_in_the_server_and_pytorch_is_not_there(running: Running) -> None:
    ran = "LSHAttention as kernel, LSHHash as kernel, LSHSort as kernel"
    assert f"lsh-python: effexport 0.1.0, {ran}" in running.server.log.read_text()
    version = running.repository / "lsh-python" / "1"
    result = ask_client("load", running.folder, {"version": str(version)})
    assert result["inputs"] == ["input_ids", "attention_mask"]
    assert result["effexport"].startswith(str(version / "effexport.zip"))
    assert result["numpy"].startswith("1.26.")
    assert not result["torch"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_golden_outputs(running: Running, name: str, protocol: str) -> None:
    artifact = running.artifacts[name]
    cases = golden(artifact)
    dtypes = {tensor.name: tensor.dtype for tensor in artifact.spec.inputs}
    requests = [{key: value.astype(dtypes[key]) for key, value in case.inputs.items()} for case in cases]
    answers = running.server.infer(name, requests, running.folder / f"{name}-{protocol}", protocol=protocol)
    for case, answer in zip(cases, answers, strict=True):
        assert not isinstance(answer, str), answer
        limit = case_limit(artifact.spec, case.own_error).value
        for output, expected in case.outputs.items():
            for row in range(len(case.keep)):
                error = value_error(
                    case.kept(output, answer[output].astype(np.float32), row), case.kept(output, expected, row)
                )
                # the limits of the parity check; these small cases hash without near-ties, as their report says
                assert error <= limit, (case.label, output, error)


def test_a_mask_may_be_left_out(running: Running) -> None:
    status, answer = running.server.post("/v2/models/nystrom/infer", {"inputs": [IDS]})
    assert status == 200
    mask = {"name": "attention_mask", "datatype": "INT64", "shape": [1, 4], "data": [1, 1, 1, 1]}
    _, masked = running.server.post("/v2/models/nystrom/infer", {"inputs": [IDS, mask]})
    assert answer["outputs"] == masked["outputs"]


def test_requests_that_arrive_together_are_run_together(running: Running) -> None:
    rng = np.random.default_rng(1)
    requests = [{"input_ids": rng.integers(1, 258, (1, 24))} for _ in range(16)]
    before = running.server.counts("lsh-python")
    together = running.server.infer("lsh-python", requests, running.folder / "together", protocol="http")
    after = running.server.counts("lsh-python")
    assert after[0] - before[0] == 16
    # two batches of eight when all arrive within the delay; a slow machine may need some more, never sixteen
    assert after[1] - before[1] <= 8
    for asked, answer in zip(requests[:3], together, strict=False):
        (alone,) = running.server.infer("lsh-python", [asked], running.folder / "alone", protocol="http")
        # other samples in the batch only change the order of additions in a few products
        np.testing.assert_allclose(answer["last_hidden_state"], alone["last_hidden_state"], atol=1e-4)


def test_requests_for_a_model_whose_samples_depend_on_their_batch_stay_apart(running: Running) -> None:
    rng = np.random.default_rng(2)
    requests = [{"input_ids": rng.integers(1, 258, (1, 24))} for _ in range(8)]
    before = running.server.counts("global")
    answers = running.server.infer("global", requests, running.folder / "apart", protocol="grpc")
    after = running.server.counts("global")
    assert after[1] - before[1] == 8
    assert all(not isinstance(answer, str) for answer in answers)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"\xff\xfe", b"[]", b'{"inputs": 3}', json.dumps({"inputs": [{**IDS, "shape": [1, 5]}]}).encode()),
        {"inputs": []},
        {"inputs": [{**IDS, "name": "tokens"}]},
        {"inputs": [{**IDS, "datatype": "INT32"}]},
        {"inputs": [{**IDS, "shape": [4]}]},
        {"inputs": [{**IDS, "shape": [1, 0], "data": []}]},
        {"inputs": [{**IDS, "shape": [9, 4], "data": [5] * 36}]},
        {"inputs": [{**IDS, "shape": [1, 65], "data": [5] * 65}]},
        {"inputs": [{**IDS, "data": [5, 6, 7, 258]}]},
        {"inputs": [{**IDS, "data": [5, 6, 7, -1]}]},
        {"inputs": [IDS, {**IDS, "name": "attention_mask", "data": [1, 1, 2, 1]}]},
        {"inputs": [IDS, {**IDS, "name": "attention_mask", "shape": [1, 3], "data": [1, 1, 1]}]},
    ],
    ids=lambda body: str(body)[:60],
)
def test_a_bad_request_is_refused_and_the_server_lives_on(running: Running, body: dict[str, Any] | bytes) -> None:
    """Bytes are refused before the model sees them; this release calls some of it its own error, 500."""
    status, answer = running.server.post("/v2/models/nystrom/infer", body)
    assert status in ((400, 500) if isinstance(body, bytes) else range(400, 500)), answer
    assert answer["error"]
    assert running.server.post("/v2/models/nystrom/infer", {"inputs": [IDS]})[0] == 200


def test_grpc_says_that_the_argument_was_wrong(running: Running) -> None:
    requests = [{"input_ids": np.full((1, 4), 999)}, {"input_ids": np.full((1, 4), 9)}]
    bad, good = running.server.infer("nystrom", requests, running.folder / "bad", protocol="grpc")
    assert bad == "StatusCode.INVALID_ARGUMENT: input_ids contains 999; expected 0 to 257; see input_ids[0, 0]"
    assert good["last_hidden_state"].shape == (1, 4, 32)


def test_a_new_version_takes_over_when_it_is_loaded_and_both_answer_where_both_are_to_live(
    running: Running, built: Built, other_weights: Callable[..., Path], package: Packaging
) -> None:
    server, new, options = running.server, other_weights("softmax"), {"backends": ("python",), "threads": 1}
    load, infer = "/v2/repository/models/reload/load", "/v2/models/reload/infer"
    package(built("softmax"), running.repository, name="reload", **options)
    assert server.post(load)[0] == 200
    assert server.state("reload") == {"1": ("READY", "")}
    package(new, running.repository, name="reload", **options)
    # nothing changes before somebody asks for it
    assert server.state("reload")["1"] == ("READY", "")
    assert server.post(load)[0] == 200
    assert server.state("reload")["2"] == ("READY", "")
    # the old version finishes what it has accepted, and goes
    assert server.state("reload")["1"][0] in ("UNLOADING", "UNAVAILABLE")
    status, answer = server.post(infer, {"inputs": [IDS]})
    assert (status, answer["model_version"]) == (200, "2")
    assert server.post("/v2/repository/models/reload/unload")[0] == 200
    assert 400 <= server.post(infer, {"inputs": [IDS]})[0] < 500
    package(new, running.repository, name="reload", live_versions=2, **options)
    assert server.post(load)[0] == 200
    assert server.state("reload") == {"1": ("READY", ""), "2": ("READY", "")}
    for version in ("1", "2"):
        _, answer = server.post(f"/v2/models/reload/versions/{version}/infer", {"inputs": [IDS]})
        assert answer["model_version"] == version


def test_a_damaged_artifact_is_not_served_and_the_server_says_why(running: Running) -> None:
    target = running.repository / "damaged"
    shutil.copytree(running.repository / "global", target)
    config = (target / "config.pbtxt").read_text().replace('"global"', '"damaged"')
    (target / "config.pbtxt").write_text(config)
    model = target / "1" / "artifact" / "model.onnx"
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    status, answer = running.server.post("/v2/repository/models/damaged/load")
    assert status == 400
    assert "model.onnx does not match its checksum" in answer["error"]
    shutil.rmtree(target)


def test_the_server_reads_the_configurations_for_other_backends_and_misses_only_the_backend(
    running: Running, with_engine: Callable[..., Path], package: Packaging
) -> None:
    server = running.server
    package(with_engine(), running.repository, name="plan", backends=("tensorrt",))
    for model, backend in (("lsh-onnxruntime", "onnxruntime"), ("plan", "tensorrt")):
        status, answer = server.post(f"/v2/repository/models/{model}/load")
        missing = (
            f"Invalid argument: unable to find backend library for backend '{backend}', try specifying runtime on the "
            "model configuration."
        )
        assert status == 400
        assert f"load failed for model '{model}': version 1 is at UNAVAILABLE state: {missing}" in answer["error"]
        assert server.state(model)["1"] == ("UNAVAILABLE", missing)


def test_the_parser_of_the_server_does_not_take_everything(running: Running) -> None:
    """Or the test above would prove nothing."""
    source = running.repository / "lsh-onnxruntime"
    for name, pattern, damage in (
        ("word", r"max_batch_size: \d+", "max_batch_sise: 8"),
        ("type", "TYPE_INT64", "TYPE_INT65"),
        ("preferred", r"preferred_batch_size: \[4, 8\]", "preferred_batch_size: [4, 80]"),
    ):
        target = running.repository / name
        shutil.copytree(source, target)
        config = (source / "config.pbtxt").read_text().replace('"lsh-onnxruntime"', f'"{name}"')
        (target / "config.pbtxt").write_text(re.sub(pattern, damage, config, count=1))
        status, answer = running.server.post(f"/v2/repository/models/{name}/load")
        # this release calls what it cannot read its own error
        assert status in (400, 500)
        assert answer["error"] == f"failed to load '{name}', failed to poll from model repository"
        shutil.rmtree(target)
