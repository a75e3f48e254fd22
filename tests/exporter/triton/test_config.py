"""config.pbtxt: what it says of batches, devices and warm-up, and that protobuf itself reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from triton_server import ask_client

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.serving.triton.config import quoted
from effexport.serving.triton.package import PackageResult

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "native", "triton")
Built = Callable[..., Artifact]
Packaging = Callable[..., PackageResult]


def parsed(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = ask_client("parse", repository, {})
    return found


def test_protobuf_reads_the_configurations_of_every_variant(
    built: Built, package: Packaging, tmp_path: Path, variant: str
) -> None:
    spec = built(variant).spec
    package(built(variant), tmp_path, name="m")
    configs = parsed(tmp_path)
    assert set(configs) == {"m-onnxruntime", "m-python"}
    for name, config in configs.items():
        assert config["name"] == name
        texts = ["text", "context"] if name == "m-python" else []
        assert [tensor["name"] for tensor in config["input"]] == [*(tensor.name for tensor in spec.inputs), *texts]
        width = spec.attention.dim
        output, *answers = config["output"]
        assert [tensor["name"] for tensor in answers] == ["answer"] * bool(texts)
        assert output["data_type"] == "TYPE_FP32"
        seq = spec.model.fixed_seq_len or -1
        assert output["dims"] == [str(seq), str(width)]
        assert config["max_batch_size"] == 8
        assert config["dynamic_batching"]["preferred_batch_size"] == [4, 8]


def test_every_option_arrives_where_triton_reads_it(built: Built, package: Packaging, tmp_path: Path) -> None:
    package(
        built("lsh"),
        tmp_path,
        name="m",
        max_batch=16,
        preferred_batch=(4, 8, 16),
        queue_delay_us=700,
        max_queue=99,
        instances=2,
        threads=3,
        live_versions=4,
        kind="gpu",
    )
    configs = parsed(tmp_path)
    for config in configs.values():
        assert config["max_batch_size"] == 16
        assert config["dynamic_batching"] == {
            "preferred_batch_size": [4, 8, 16],
            "max_queue_delay_microseconds": "700",
            "default_queue_policy": {"max_queue_size": 99},
        }
        assert config["instance_group"] == [{"count": 2, "kind": "KIND_GPU"}]
        assert config["version_policy"] == {"latest": {"num_versions": 4}}
        # on a GPU, the sizes that will be preferred are warmed up too
        assert [warm["batch_size"] for warm in config["model_warmup"]] == [1, 4, 8, 16]
    assert configs["m-onnxruntime"]["parameters"] == {"intra_op_thread_count": {"string_value": "3"}}
    assert configs["m-python"]["parameters"] == {"threads": {"string_value": "3"}}


def test_a_python_model_does_without_a_mask_and_other_backends_need_it(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    package(built("softmax", "attention"), tmp_path, name="m")
    optional = {
        name: [tensor["name"] for tensor in config["input"] if tensor.get("optional")]
        for name, config in parsed(tmp_path).items()
    }
    assert optional == {"m-onnxruntime": [], "m-python": ["attention_mask"]}


def test_a_model_that_reads_text_takes_a_text_for_each_row_instead_of_tensors(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    package(built("softmax"), tmp_path, name="rows", backends=("python",))
    package(built("nystrom", pinv_init="global"), tmp_path, name="apart", backends=("python",))
    configs = parsed(tmp_path)
    for name, dims in (("rows", ["1"]), ("apart", ["-1"])):
        config = configs[name]
        assert all(tensor["optional"] for tensor in config["input"])
        texts = {
            tensor["name"]: tensor["dims"]
            for tensor in (*config["input"], *config["output"])
            if tensor["data_type"] == "TYPE_STRING"
        }
        assert texts == {"text": dims, "context": dims, "answer": dims}


def test_a_model_that_generates_is_decoupled_and_batches_by_itself(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    artifact = built("linear", causal=True, lm_head=True)
    package(artifact, tmp_path, name="m", max_batch=5, max_queue=7)
    configs = parsed(tmp_path)
    assert set(configs) == {"m-onnxruntime", "m-python", "m-generate"}
    config = configs["m-generate"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert {"max_batch_size", "dynamic_batching", "model_warmup"}.isdisjoint(config)
    assert {name: value["string_value"] for name, value in config["parameters"].items()} == {
        "threads": "0",
        "sessions": "5",
        "max_queue": "7",
    }
    assert [tensor["name"] for tensor in config["input"] if not tensor.get("optional")] == ["text_input"]
    # the logits of a causal model are for the model that generates
    assert "text" not in [tensor["name"] for tensor in configs["m-python"]["input"]]


def test_the_files_of_warm_up_requests_hold_as_many_bytes_as_the_configuration_says(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    package(built("softmax", "attention", precision="fp16"), tmp_path, name="m", kind="gpu")
    sizes = {"TYPE_INT64": 8, "TYPE_FP16": 2}
    for config in parsed(tmp_path).values():
        for warm in config["model_warmup"]:
            for entry in warm["inputs"].values():
                count = warm["batch_size"]
                for dim in entry["dims"]:
                    count *= int(dim)
                path = tmp_path / config["name"] / "warmup" / entry["input_data_file"]
                assert path.stat().st_size == count * sizes[entry["data_type"]]


def test_a_model_whose_samples_depend_on_their_batch_is_never_batched(
    built: Built, package: Packaging, tmp_path: Path
) -> None:
    artifact = built("nystrom", pinv_init="global")
    result = package(artifact, tmp_path, name="m")
    for name, config in parsed(tmp_path).items():
        assert "dynamic_batching" not in config
        assert "max_batch_size" not in config  # which is 0: the batch is a dimension like any other
        assert config["input"][0]["dims"] == ["-1", "-1"]
        text = (tmp_path / name / "config.pbtxt").read_text()
        assert text.count("pinv_init=global") == 1
        assert "No dynamic batching" in text
    assert r"pinv\_init=global" in (tmp_path / "README.md").read_text()
    assert any("pinv_init=global" in remark for remark in result.remarks)
    for wanted in ({"max_batch": 8}, {"preferred_batch": (4,)}):
        with pytest.raises(UserError, match="would change their answers"):
            package(artifact, tmp_path, name="m", **wanted)


def test_a_huge_batch_is_allowed_and_not_warmed_up(built: Built, package: Packaging, tmp_path: Path) -> None:
    package(built("softmax"), tmp_path, name="m", backends=("python",), max_batch=2**31 - 1, kind="gpu")
    (config,) = parsed(tmp_path).values()
    assert config["max_batch_size"] == 2**31 - 1
    assert [warm["batch_size"] for warm in config["model_warmup"]] == [1]


def test_a_batch_of_one_is_not_dynamic(built: Built, package: Packaging, tmp_path: Path) -> None:
    package(built("softmax"), tmp_path, name="m", backends=("python",), max_batch=1)
    (config,) = parsed(tmp_path).values()
    assert config["max_batch_size"] == 1
    assert "dynamic_batching" not in config


def test_an_engine_becomes_a_plan_within_the_batches_that_it_was_built_for(
    with_engine: Callable[..., Path], package: Packaging, tmp_path: Path
) -> None:
    repository = tmp_path / "repo"
    artifact = with_engine(batches=((1, 4, 6), (2, 16, 32)))
    package(artifact, repository, name="m")
    config = parsed(repository)["m-tensorrt"]
    assert config["platform"] == "tensorrt_plan"
    assert config["max_batch_size"] == 6
    assert config["dynamic_batching"]["preferred_batch_size"] == [3, 6]
    assert config["instance_group"] == [{"count": 1, "kind": "KIND_GPU", "profile": ["0", "1"]}]
    assert [warm["batch_size"] for warm in config["model_warmup"]] == [1, 3, 6]
    assert (repository / "m-tensorrt" / "1" / "model.plan").read_bytes() == b"an engine"
    for page in ("README.md", "Dockerfile"):
        assert "10.13.3.9" in (repository / page).read_text()
    with pytest.raises(UserError, match="at most 6"):
        package(artifact, repository, name="m", backends=("tensorrt",), max_batch=7)
    with pytest.raises(UserError, match="on a GPU only"):
        package(artifact, repository, name="m", backends=("tensorrt",), kind="cpu")


def test_an_engine_for_tensorrt_rtx_is_not_for_triton(
    with_engine: Callable[..., Path], package: Packaging, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="TensorRT-RTX, which Triton does not run"):
        package(with_engine("trt-rtx"), tmp_path / "repo", name="m", backends=("tensorrt",))


def test_any_text_survives_the_text_format(tmp_path: Path) -> None:
    texts = ["plain", 'a "quote"', "back\\slash", "line\nend", "ümlaut", "\x00\x7f", ""]
    for i, text in enumerate(texts):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "config.pbtxt").write_text(f"name: {quoted(text)}\n", encoding="utf-8")
    assert {i: config.get("name", "") for i, config in parsed(tmp_path).items()} == {
        str(i): text for i, text in enumerate(texts)
    }
