"""`effexport build --checkpoint`, `--weights` and `--module`: from a folder to ONNX Runtime, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoint_artifacts import BIG_BIRD, LED, LONGFORMER, MODERNBERT, checkpoint_artifact
from fused_operators import FUSED
from safetensors.torch import save_file
from slow_cases import slow_after
from torch import nn
from transformers_models import TINY_NYSTROMFORMER, TINY_REFORMER, inputs, same_rotations, saved, worst_error

import effexport
from effexport.artifact import open_artifact
from effexport.base.errors import UserError
from effexport.models.contract import GLOBAL_MASK
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.engine.signature import signature_from_spec

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "transformers"), pytest.mark.usefixtures("kept_traces")]
# The limit that docs/checkpoints.md states.
LIMIT = 1e-4
LONGER = {"max_position_embeddings": 128}
NYSTROM = TINY_NYSTROMFORMER | {"num_hidden_layers": 2}
REFORMER = TINY_REFORMER | {"attn_layers": ["lsh", "local", "lsh"]}
ONE_LAYER = {"num_hidden_layers": 1}
ONE_OF_EACH = {"attn_layers": ["lsh", "local"]}


# What a head answers is compared in text/test_tasks.py for every head; here every kind of attention is.
NYSTROM_CASES = [
    ("NystromformerModel", {}),
    *slow_after(
        0,
        [
            ("NystromformerForTokenClassification", {"num_labels": 5, "conv_kernel_size": None, **ONE_LAYER}),
            ("NystromformerForMaskedLM", {"segment_means_seq_len": 8, **ONE_LAYER}),
            ("NystromformerForQuestionAnswering", {"segment_means_seq_len": 64, "num_landmarks": 4, **ONE_LAYER}),
        ],
        soak_after=1,
    ),
    pytest.param("NystromformerForMaskedLM", {}, marks=pytest.mark.soak),
    pytest.param("NystromformerForSequenceClassification", {"num_labels": 3}, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("kind", "fields"), NYSTROM_CASES)
def test_a_nystromformer_checkpoint_computes_what_transformers_computes(
    cli: Callable[..., Any], tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    config = NYSTROM | fields
    model = saved(tmp_path / "checkpoint", kind, config)
    result = cli("build", "--checkpoint", tmp_path / "checkpoint", "-o", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    plain = config["segment_means_seq_len"] == config["num_landmarks"]
    operators = {"MaskedAttention": 1} if plain else {"IterativePinv": 1, "MaskedAttention": 2}
    convolutions = {} if config.get("conv_kernel_size", 65) is None else {"SequenceConv": 1}
    layers = config["num_hidden_layers"]
    assert result.json["custom_ops"] == {op: layers * count for op, count in (operators | convolutions).items()}
    with effexport.load(tmp_path / "out") as runner:
        for batch, seq_len, padded in ((1, 32, False), (4, 32, True), (4, 19, True)):
            ids, mask = inputs(batch, seq_len, 1, padded=padded)
            extra = 0 if plain else config["segment_means_seq_len"] - seq_len
            with torch.no_grad():
                expected = model(
                    input_ids=nn.functional.pad(ids, (0, extra), value=1),
                    attention_mask=nn.functional.pad(mask, (0, extra)),
                )
            given = runner.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
            for name, output in given.items():
                wanted = expected[name]
                wanted = wanted[:, :seq_len] if wanted.shape[1:2] == (seq_len + extra,) else wanted
                assert worst_error(output, wanted, mask) <= LIMIT, name


@pytest.mark.slow
def test_multiple_choice_scores_every_choice(cli: Callable[..., Any], tmp_path: Path) -> None:
    model = saved(tmp_path / "checkpoint", "NystromformerForMultipleChoice", NYSTROM | ONE_LAYER)
    result = cli("build", "--checkpoint", tmp_path / "checkpoint", "-o", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    ids, mask = (x.reshape(2, 4, 32) for x in inputs(8, 32, 1, padded=True))
    with effexport.load(tmp_path / "out") as runner, torch.no_grad():
        given = runner.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})["logits"]
        expected = model(input_ids=ids, attention_mask=mask).logits
    assert worst_error(given, expected, torch.ones(2, 5)) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "precision"),
    [
        ("ReformerModel", REFORMER | ONE_OF_EACH, "fp16"),
        ("BigBirdForQuestionAnswering", BIG_BIRD | LONGER, "fp16"),
        pytest.param("NystromformerForMaskedLM", NYSTROM | ONE_LAYER, "fp16", marks=pytest.mark.soak),
        pytest.param("ModernBertForMaskedLM", MODERNBERT | LONGER, "fp16", marks=pytest.mark.soak),
        pytest.param("NystromformerForMaskedLM", NYSTROM, "bf16", marks=pytest.mark.soak),
        pytest.param("ReformerModel", REFORMER, "bf16", marks=pytest.mark.soak),
        pytest.param("BigBirdModel", BIG_BIRD | LONGER, "bf16", marks=pytest.mark.soak),
        pytest.param("ModernBertModel", MODERNBERT | LONGER, "bf16", marks=pytest.mark.soak),
    ],
)
def test_half_precision_is_exported_also_where_transformers_fails_or_drifts(
    cli: Callable[..., Any], tmp_path: Path, kind: str, config: dict[str, Any], precision: str
) -> None:
    saved(tmp_path / "checkpoint", kind, config)
    command = ("build", "--checkpoint", tmp_path / "checkpoint", "--precision", precision, "-o", tmp_path / "out")
    result = cli(*command, "--json")
    assert result.code == 0, result.err
    assert result.json["verdict"] == "passed"


REFORMER_CASES = [
    ("ReformerModel", {}),
    *slow_after(
        0,
        [
            ("ReformerModelWithLMHead", {"is_decoder": True, **ONE_OF_EACH}),
            ("ReformerForMaskedLM", {"num_buckets": [4, 4], "num_hashes": 4, "attn_layers": ["lsh"]}),
            ("ReformerForQuestionAnswering", {"axial_pos_embds": False, "local_attn_chunk_length": 4, **ONE_OF_EACH}),
        ],
        soak_after=1,
    ),
    pytest.param(
        "ReformerForSequenceClassification",
        {"num_labels": 3, "attn_layers": ["local", "local"]},
        marks=pytest.mark.soak,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fields"), REFORMER_CASES)
def test_a_reformer_checkpoint_computes_what_transformers_computes_with_its_rotations(
    cli: Callable[..., Any], tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    from small_builds import module_from_path

    model = saved(tmp_path / "checkpoint", kind, REFORMER | fields)
    result = cli("build", "--checkpoint", tmp_path / "checkpoint", "--seed", "5", "-o", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    artifact = open_artifact(tmp_path / "out")
    module = module_from_path(artifact.spec, tmp_path / "checkpoint")
    with effexport.load(tmp_path / "out") as runner:
        for batch, seq_len, padded in ((1, 64, False), (4, 64, True), (4, 41, True)):
            ids, mask = inputs(batch, seq_len, 0, padded=padded)
            with torch.no_grad(), same_rotations(module):
                expected = model(input_ids=ids, attention_mask=mask)
            given = runner.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
            for name, output in given.items():
                assert worst_error(output, expected[name], mask) <= LIMIT, (name, batch, seq_len)


def test_the_seed_of_a_build_draws_rotations_and_a_reformer_may_have_more_hashes_than_in_its_config(
    tmp_path: Path,
) -> None:
    from effexport.base.spec import build_spec_from_checkpoint

    for family, config in (("nystromformer", NYSTROM), ("reformer", REFORMER)):
        kind = {"nystromformer": "NystromformerModel", "reformer": "ReformerModel"}[family]
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "architectures": [kind], **config}))
        spec, _ = build_spec_from_checkpoint({"seed": 7}, tmp_path)
        assert spec.seed == 7
        assert getattr(spec.model, "hash_seed", 7) == 7
    assert build_spec_from_checkpoint({"num_hashes": 4}, tmp_path)[0].model.num_hashes == 4  # other families refuse it


@pytest.mark.slow
def test_verify_needs_the_checkpoint_for_new_inputs(cli: Callable[..., Any], tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", "NystromformerModel", NYSTROM | ONE_LAYER)
    assert cli("build", "--checkpoint", tmp_path / "checkpoint", "-o", tmp_path / "out").code == 0
    alone = cli("verify", tmp_path / "out", "--json")
    assert alone.code == 0
    (missing,) = (c for c in alone.json["checks"] if c["name"] == "PyTorch module")
    assert missing["status"] == "not run"
    assert "came from checkpoint: name it with --weights" in missing["reason"]
    both = cli("verify", tmp_path / "out", "--weights", tmp_path / "checkpoint", "--json")
    assert both.code == 0, both.err
    assert not [c for c in both.json["checks"] if c["name"] == "PyTorch module"]
    saved(tmp_path / "other", "NystromformerModel", NYSTROM | ONE_LAYER, seed=1)
    other = cli("verify", tmp_path / "out", "--weights", tmp_path / "other", "--json")
    assert other.code == 1
    assert "holds other weights than the artifact was built with, which were those of checkpoint" in other.err
    assert "NOT proven equal to PyTorch" in other.err


def test_inspect_describes_a_checkpoint_before_it_is_built(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "nystromformer", "architectures": ["NystromformerForMaskedLM"]})
    )
    result = cli("inspect", tmp_path, "--json")
    assert result.code == 0
    assert result.json["checkpoint"] == "nystromformer masked-lm"
    assert result.json["attention"] == "softmax"
    assert result.json["max_seq_len"] == 510
    assert any("softmax" in note for note in result.json["notes"])
    text = cli("inspect", tmp_path).out
    assert "effexport build --checkpoint" in text
    # with golden answers, it is the artifact of a checkpoint that has lost its manifest
    (tmp_path / "reference.safetensors").touch()
    assert "is not an artifact: it has no manifest.json" in cli("inspect", tmp_path).error()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dim", "64"), "--dim was given with --checkpoint"),
        (("--task", "poetry"), "poetry"),
        (("--seq-len", "100"), "100"),
    ],
)
def test_flags_that_contradict_a_checkpoint(
    cli: Callable[..., Any], tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    saved(tmp_path / "checkpoint", "NystromformerModel", NYSTROM)
    result = cli("build", "--checkpoint", tmp_path / "checkpoint", *flags, "-o", tmp_path / "out")
    assert message in result.error()
    assert not (tmp_path / "out").exists()


def test_our_own_weights_come_from_a_file(cli: Callable[..., Any], tmp_path: Path) -> None:
    from effexport.base.spec import build_spec_from_options
    from effexport.models.encoder.module import module_from_spec

    small = {"dim": 32, "heads": 2, "layers": 1, "seq_len": 64}
    spec = build_spec_from_options({"variant": "lsh", **small}, None)
    module = module_from_spec(spec.model, seed=123)
    save_file(module.state_dict(), tmp_path / "trained.safetensors")
    flags = [text for name, value in small.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = ("build", "--variant", "lsh", *flags, "--weights", tmp_path / "trained.safetensors", "-o")
    result = cli(*command, tmp_path / "out", "--json")
    assert result.code == 0, result.err
    assert result.json["weights_from"] == "trained.safetensors"
    ids = torch.randint(2, 258, (2, 64))
    with effexport.load(tmp_path / "out") as runner, torch.no_grad():
        given = runner.run({"input_ids": ids.numpy()})["last_hidden_state"]
        assert worst_error(given, module(ids), torch.ones_like(ids)) <= LIMIT
    save_file({"nothing": torch.zeros(1)}, tmp_path / "trained.safetensors")
    assert "1 unexpected tensor: nothing" in cli(*command, tmp_path / "again").error()


FACTORY = """
import torch
from torch import nn
from effexport.models import attention_from_spec
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.nystrom import NystromSpec


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        specs = [NystromSpec(dim=32, heads=2, num_landmarks=8), LSHSpec(dim=32, heads=2, chunk_length=16, seq_len=128)]
        self.layers = nn.ModuleList(attention_from_spec(spec) for spec in specs)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids, attention_mask):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden, attention_mask)
            # our own graphs avoid a maximum of a concatenation; a module of the user may have one
            hidden = hidden + torch.cat([hidden, hidden + 1], dim=-1).amax(dim=-1, keepdim=True)
        keep = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * keep).sum(dim=1) / keep.sum(dim=1)), hidden


def make():
    torch.manual_seed(0)
    return Classifier()


def number():
    return 3
"""


@pytest.mark.slow
def test_checkpoints_and_modules_are_inlined_too(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "checkpoint", "ReformerModel", REFORMER | ONE_OF_EACH)
    (tmp_path / "inlined_models_for_a_test.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    for source in (
        ["--checkpoint", tmp_path / "checkpoint"],
        ["--module", "inlined_models_for_a_test:make", "--seq-len", "128"],
    ):
        result = cli("build", *source, "--inline", "-o", tmp_path / "out", "--force", "--json")
        assert result.code == 0, result.err
        assert (result.json["custom_ops"], result.json["implementation"]) == ({}, {})
        assert result.json["spec"]["inline"] is True
        assert not onnx.load(tmp_path / "out" / "model.onnx").functions


def test_a_module_of_ones_own(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models_for_a_test.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    result = cli("build", "--module", "my_models_for_a_test:make", "--seq-len", "128", "-o", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    assert result.json["custom_ops"] == FUSED["lsh"] | FUSED["nystrom"]
    assert result.json["outputs"] == [
        {"name": "output0", "dtype": "float32", "dims": ["batch", 3]},
        {"name": "output1", "dtype": "float32", "dims": ["batch", "seq", 32]},
    ]
    verified = cli("verify", tmp_path / "out", "--verbose")
    assert verified.code == 0
    reason = "came from my_models_for_a_test:make, code that an artifact does not hold"
    assert reason in verified.out
    for words in (("--weights", tmp_path), ("--reference", "torch"), ("--trace",)):
        assert reason in cli("verify", tmp_path / "out", *words).error()
    for name, message in {
        "my_models_for_a_test:number": "returned a int; expected an nn.Module",
        "my_models_for_a_test:absent": "has no attribute 'absent'",
    }.items():
        assert message in cli("build", "--module", name, "-o", tmp_path / "no").error()


WANTING = """
import functools

import torch

def needs_two(dim, heads, layers=1): ...
def needs_keyword(*, dim): ...
class Model(torch.nn.Module):
    def __init__(self, dim): ...
constant = 3
bound = functools.partial(needs_two, 32)
def fails():
    raise ValueError("two\\nlines")
"""


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("needs_two", "needs arguments: dim, heads; expected a function without arguments: give them default values"),
        ("needs_keyword", "needs arguments: dim;"),
        ("Model", "needs arguments: dim;"),
        ("bound", "needs arguments: heads;"),
        ("constant", "is a int; expected a function without arguments"),
        ("fails", "failed with ValueError: two lines (wanting_models_for_a_test.py, line 13); --debug shows all of it"),
    ],
)
def test_a_factory_that_cannot_be_called_as_it_is_is_one_line(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, message: str
) -> None:
    (tmp_path / "wanting_models_for_a_test.py").write_text(WANTING)
    monkeypatch.syspath_prepend(tmp_path)
    error = cli("build", "--module", f"wanting_models_for_a_test:{factory}", "-o", tmp_path / "no").error()
    assert message in error
    assert "\n" not in error


def test_a_module_with_a_syntax_error_is_one_line(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_models_for_a_test.py").write_text("def make(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    error = cli("build", "--module", "broken_models_for_a_test:make", "-o", tmp_path / "no").error()
    assert "importing broken_models_for_a_test failed with SyntaxError: " in error
    assert "(broken_models_for_a_test.py, line 1)" in error
    assert "\n" not in error


# The most global tokens of a sequence, where TensorRT-RTX has to know.
MOST = 8
WITH_GLOBALS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "LongformerForQuestionAnswering": (LONGFORMER | LONGER, ("--global-tokens", str(MOST))),
    "LEDModel": (
        LED | {"max_encoder_position_embeddings": 128},
        ("--task", "encoder", "--global-tokens", str(MOST)),
    ),
    # of up to 36 tokens, all are global
    "BigBirdModel": (BIG_BIRD | LONGER, ()),
}
PRECISIONS = {"LongformerForQuestionAnswering": "fp32", "LEDModel": "fp16", "BigBirdModel": "bf16"}
ENGINES = [
    pytest.param(kind, precision, marks=pytest.mark.slow if precision == PRECISIONS[kind] else pytest.mark.soak)
    for kind in WITH_GLOBALS
    for precision in ("fp32", "fp16", "bf16")
]


@pytest.mark.requires("rtx")
@pytest.mark.parametrize(("kind", "precision"), ENGINES)
def test_an_engine_is_built_without_a_gpu(cli: Callable[..., Any], tmp_path: Path, kind: str, precision: str) -> None:
    config, options = WITH_GLOBALS[kind]
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


@pytest.mark.requires("rtx")
@pytest.mark.parametrize("kind", ["LongformerForQuestionAnswering", "LEDModel"])
def test_without_a_limit_an_engine_is_refused_with_the_option_that_helps(
    cli: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    config, options = WITH_GLOBALS[kind]
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
    with pytest.raises(UserError, match=words):
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
