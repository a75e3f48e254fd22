"""Engines of checkpoints with global tokens, whose number TensorRT-RTX has to know before it builds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoint_artifacts import BIG_BIRD, LED, LONGFORMER, checkpoint_artifact
from transformers_models import saved

import effexport
from effexport.artifact import open_artifact
from effexport.base.errors import UserError
from effexport.models.contract import GLOBAL_MASK
from effexport.serving.engine.errors import RequestError
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.engine.signature import signature_from_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "transformers", "rtx")

MOST = 8
LONGER = {"max_position_embeddings": 130}
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "LongformerForQuestionAnswering": (LONGFORMER | LONGER, ("--global-tokens", str(MOST))),
    "LEDModel": (
        LED | {"max_encoder_position_embeddings": 130},
        ("--task", "encoder", "--global-tokens", str(MOST)),
    ),
    # of up to 36 tokens, all are global
    "BigBirdModel": (BIG_BIRD | LONGER, ()),
}
PRECISIONS = {"LongformerForQuestionAnswering": "fp32", "LEDModel": "fp16", "BigBirdModel": "bf16"}
CASES = [
    pytest.param(kind, precision, marks=pytest.mark.slow if precision == PRECISIONS[kind] else pytest.mark.soak)
    for kind in KINDS
    for precision in ("fp32", "fp16", "bf16")
]


@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_an_engine_is_built_without_a_gpu(cli: Callable[..., Any], tmp_path: Path, kind: str, precision: str) -> None:
    config, options = KINDS[kind]
    saved(tmp_path / "checkpoint", kind, config)
    command = ("build", "--checkpoint", tmp_path / "checkpoint", "--precision", precision, *options)
    result = cli(*command, "--target", "trt-rtx", "-o", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    # ONNX Runtime's CPU provider has no bfloat16, and the report says so
    assert result.json["verdict"] == ("not run" if precision == "bf16" else "passed")
    artifact = open_artifact(tmp_path / "out")
    assert [engine.target for engine in artifact.manifest.engines] == ["trt-rtx"]
    assert (tmp_path / "out/engine/trt-rtx.engine").stat().st_size > 0
    model = onnx.load(artifact.model_path, load_external_data=False)
    nodes = [node for part in (model.graph, *model.functions) for node in part.node]
    assert "BandedAttention" in {node.op_type for node in nodes}
    assert "NonZero" not in {node.op_type for node in nodes}
    inspected = cli("inspect", tmp_path / "out")
    assert (f"global_tokens={MOST}" in "".join(inspected.out.split())) == ("--global-tokens" in options)


@pytest.mark.parametrize("kind", ["LongformerForQuestionAnswering", "LEDModel"])
def test_without_a_limit_an_engine_is_refused_with_the_option_that_helps(
    cli: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    config, options = KINDS[kind]
    saved(tmp_path / "checkpoint", kind, config)
    of_task = options[: options.index("--global-tokens")]
    command = ("build", "--checkpoint", tmp_path / "checkpoint", *of_task, "-o", tmp_path / "out")
    refused = cli(*command, "--target", "trt-rtx")
    assert refused.code == 2
    assert "any number of tokens may be global; say how many a sequence may have at most: --global" in refused.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_longer_question_is_refused_by_the_command_the_api_the_server_and_transformers(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    folder = checkpoint_artifact("LongformerForQuestionAnswering", "roberta", global_tokens=MOST).artifact
    ids = np.full((1, 30), 7, np.int64)
    ids[0, [MOST + 1, MOST + 2, 29]] = 2
    words = f"a sequence has {MOST + 1} global tokens, because the tokens before the first separator are"
    np.savez(tmp_path / "in.npz", input_ids=ids)
    result = cli("run", folder, "--input", tmp_path / "in.npz", "-o", tmp_path / "out.npz")
    assert result.code == 2
    assert words in result.err
    with effexport.load(folder) as runner, pytest.raises(UserError, match=words):
        runner.run({"input_ids": ids})
    signature = signature_from_spec(open_artifact(folder).spec, ServingSettings())
    with pytest.raises(RequestError, match=words):
        signature.complete({"input_ids": ids})
    model = effexport.hf.model(folder)
    with pytest.raises(UserError, match=words):
        model(torch.from_numpy(ids))
    marks = torch.zeros(1, 30, dtype=torch.int64)
    marks[0, :MOST] = 1  # in the place of the question
    assert torch.isfinite(model(torch.from_numpy(ids), global_attention_mask=marks).start_logits).all()


@pytest.mark.slow
def test_an_encoder_decoder_refuses_more_global_tokens_of_its_source() -> None:
    folder = checkpoint_artifact("LEDForConditionalGeneration", "roberta", global_tokens=2).artifact
    source = {"input_ids": np.full((1, 20), 7, np.int64), GLOBAL_MASK: (np.arange(20)[None] < 3).astype(np.int64)}
    with effexport.load_encoder_decoder(folder) as model:
        with pytest.raises(UserError, match="a sequence has 3 global tokens in global_attention_mask; this model"):
            model.encode(source)
        source[GLOBAL_MASK][0, 2] = 0
        model.encode(source)
        assert np.isfinite(model.step({"decoder_input_ids": [[2]]})["logits"]).all()
