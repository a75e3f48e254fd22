"""Artifacts in transformers' pipelines and in plain inference code, beside transformers' own models."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_artifacts import checkpoint_artifact
from pipeline_questions import PIPELINES, TEXTS, likeliest_tokens, worst_difference
from slow_cases import slow_after
from torch.utils import _pytree as pytree

import effexport
from effexport.artifact import Artifact, open_artifact
from effexport.base.dtypes import TensorInfo
from effexport.base.errors import MissingExtraError, UserError
from effexport.base.spec import BuildSpec
from effexport.export.exported_model import EXPORT_JSON, output_class
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.variants.linear import LinearSpec

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "transformers"), pytest.mark.usefixtures("kept_traces")]
# Scores are softmaxes of logits that differ by rounding in float32; the limit that docs/text.md states.
LIMIT = 1e-4


# Other families, some with a tokenizer that puts three separators around two texts, as transformers' Longformer
# demands, and tells no types of tokens.
OF_OTHERS: list[tuple[str, str, Callable[[Any], Any]]] = [
    (task, kind.replace("Nystromformer", family), question)
    for task, kind, question in PIPELINES
    for family in {
        "question-answering": ("Longformer", "BigBird"),
        "text-classification": ("Longformer", "ModernBert"),
        "fill-mask": ("ModernBert",),
    }.get(task, ())
]
WITH_ROBERTA = ("Longformer", "BigBird")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of numpy, in transformers
@pytest.mark.parametrize(("task", "kind", "question"), [*slow_after(1, PIPELINES, 4), *slow_after(0, OF_OTHERS, 2)])
def test_a_pipeline_answers_with_an_artifact_as_with_the_checkpoint(
    task: str, kind: str, question: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    folders = checkpoint_artifact(kind, "roberta" if kind.startswith(WITH_ROBERTA) else "bert")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders.artifact, model_max_length=40)
    original = getattr(transformers, kind).from_pretrained(folders.checkpoint).eval()
    expected = question(transformers.pipeline(task, model=original, tokenizer=tokenizer))
    caplog.clear()  # of what the original says: Longformer's padding, BigBird's dense attention to few tokens
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = effexport.hf.model(folders.artifact)
        found = question(transformers.pipeline(task, model=model, tokenizer=tokenizer))
    finally:
        logger.removeHandler(caplog.handler)
    assert worst_difference(found, expected) <= LIMIT
    logged = {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}
    assert {text for text in logged if "Device set to use" not in text} == set()


@pytest.mark.slow
@torch.no_grad()
def test_a_model_takes_global_tokens_as_the_original_does() -> None:
    import transformers

    folders = checkpoint_artifact("LongformerForSequenceClassification", "roberta")
    original = transformers.AutoModelForSequenceClassification.from_pretrained(folders.checkpoint).eval()
    model = effexport.hf.model(folders.artifact)
    ids = torch.arange(3, 63).reshape(2, 30)
    marks = torch.zeros_like(ids)
    marks[0, 7] = marks[1, 0] = marks[1, 20] = 1
    answers = []
    for given in ({}, {"global_attention_mask": marks}):
        answers.append(original(ids, **given).logits)
        assert float((model(ids, **given).logits - answers[-1]).abs().max()) <= LIMIT
    assert float((answers[0] - answers[1]).abs().max()) > 100 * LIMIT


@pytest.fixture(scope="module")
def masked_lm() -> Any:
    return effexport.hf.model(checkpoint_artifact("NystromformerForMaskedLM").artifact)


@pytest.fixture(scope="module")
def tokens() -> Any:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint_artifact("NystromformerForMaskedLM").artifact)
    return tokenizer(TEXTS, padding=True, return_tensors="pt")


def test_a_call_returns_what_the_class_of_the_checkpoint_returns(masked_lm: Any, tokens: Any) -> None:
    import transformers

    folder = checkpoint_artifact("NystromformerForMaskedLM").checkpoint
    original = transformers.NystromformerForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = original(**tokens)
    found = masked_lm(**tokens)
    assert type(found) is type(expected)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=LIMIT)
    assert not found.logits.requires_grad
    (as_tuple,) = masked_lm(**tokens, return_dict=False)
    assert torch.equal(as_tuple, found.logits)


def test_tokens_may_be_arrays_and_segments_may_be_missing(masked_lm: Any, tokens: Any) -> None:
    expected = masked_lm(**tokens).logits
    ids, mask = tokens["input_ids"].numpy().astype(np.int32), tokens["attention_mask"].bool()
    assert torch.equal(masked_lm(ids, mask).logits, expected)
    assert torch.equal(masked_lm(**tokens, labels=None, output_attentions=False).logits, expected)


def test_the_model_says_of_itself_what_pipelines_ask(masked_lm: Any) -> None:
    assert type(masked_lm).__name__ == "NystromformerForMaskedLM"
    assert masked_lm.config.architectures == ["NystromformerForMaskedLM"]
    assert (masked_lm.device, masked_lm.dtype) == (torch.device("cpu"), torch.float32)
    assert not masked_lm.training
    assert not masked_lm.can_generate()  # as transformers' own class
    assert masked_lm.eval().train(False).to("cpu").to(torch.device("cpu"), torch.float32).float() is masked_lm
    # the word embeddings alone have 210 × 32 numbers, and stand a second time at the end of the graph
    assert 2 * 210 * 32 < masked_lm.num_parameters() < 4 * 210 * 32
    assert masked_lm.num_parameters(only_trainable=True) == 0


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (lambda model, tokens: model.train(), r"train\(\) .* export it again"),
        (lambda model, tokens: model.to("cuda"), r"to\('cuda'\) .* device='cpu' .* runtime='ort-cuda'"),
        (lambda model, tokens: model.to(torch.device("cuda:1")), r"to\('cuda:1'\)"),
        (lambda model, tokens: model.cuda(), r"to\('cuda'\)"),
        (lambda model, tokens: model.half(), r"torch.float16.* --precision"),
        (lambda model, tokens: model.save_pretrained("copy"), r"save_pretrained\(\) .* copy the folder"),
        (lambda model, tokens: model(**tokens, labels=tokens["input_ids"]), r"labels .*expected: input_ids int64"),
        (lambda model, tokens: model(**tokens, output_hidden_states=True), r"output_hidden_states was given"),
        (lambda model, tokens: model(tokens["input_ids"].to("meta")), r"input_ids is on meta; .*\.cpu\(\)"),
        (lambda model, tokens: model(tokens["input_ids"] + 1000), r"expected 0 to 209"),
    ],
)
def test_what_an_artifact_cannot_do_is_one_sentence(masked_lm: Any, tokens: Any, refused: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        refused(masked_lm, tokens)


@pytest.mark.slow
def test_a_causal_artifact_continues_texts_with_its_likeliest_tokens() -> None:
    import transformers

    folder = checkpoint_artifact("ReformerModelWithLMHead").artifact
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), effexport.hf.model(folder)
    ids = tokenizer("the lazy dog", return_tensors="pt")["input_ids"]
    expected = likeliest_tokens(folder, ids.numpy(), 5)
    assert model.generate(ids, max_new_tokens=5, do_sample=False).tolist() == expected
    ask = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = ask("the lazy dog", max_new_tokens=5, do_sample=False, return_tensors=True)
    assert answer["generated_token_ids"] == expected[0]


def test_an_encoder_without_a_configuration_gets_a_minimal_one(built: Callable[..., Artifact]) -> None:
    artifact = built("softmax")
    model, ids = effexport.hf.model(artifact.path), torch.randint(2, 258, (2, 9))
    outputs = model(input_ids=ids, token_type_ids=torch.zeros_like(ids))
    assert type(outputs).__name__ == "BaseModelOutput"
    with effexport.load(artifact.path) as runner:
        expected = runner.run({"input_ids": ids.numpy()})["last_hidden_state"]
    assert np.array_equal(outputs.last_hidden_state.numpy(), expected)
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (258, artifact.spec.model.max_seq_len)
    with pytest.raises(UserError, match="token_type_ids was given"):
        model(input_ids=ids, token_type_ids=torch.ones_like(ids))
    with pytest.raises(UserError, match=r"has no tokenizer .* build it with --tokenizer DIR"):
        effexport.hf.SentenceModule(artifact.path)


def test_outputs_that_no_model_of_transformers_has_are_refused(masked_lm: Any) -> None:
    from effexport.hf.drop_in import drop_in_from_runner

    outputs = (TensorInfo("scores", "float32", ("batch", 5)), TensorInfo("tokens", "int64", ("batch", 5)))
    ranked: Any = SimpleNamespace(path="artifacts/top", spec=SimpleNamespace(outputs=outputs))
    with pytest.raises(UserError, match=r"artifacts/top returns scores .*tokens .*run it with effexport.load"):
        drop_in_from_runner(ranked, masked_lm.runner, pytest.fail)


def test_logits_of_a_causal_encoder_are_those_of_a_language_model() -> None:
    attention = LinearSpec(dim=16, heads=2, seq_len=16, causal=True)
    found = output_class(BuildSpec(model=EncoderSpec(attention=attention, lm_head=True)))
    assert found is not None
    assert found.name == "CausalLMOutput"


def test_half_precision_is_the_same_in_arrays_and_tensors() -> None:
    from effexport.hf.drop_in import array_from_tensor, tensor_from_array

    for dtype in (torch.float16, torch.bfloat16):
        tensor = torch.randn(3, 5).to(dtype)
        array = array_from_tensor("hidden_states", tensor, str(dtype).removeprefix("torch."))
        assert array.dtype.name == str(dtype).removeprefix("torch.")
        assert np.array_equal(array.astype(np.float32), tensor.float().numpy())
        assert torch.equal(tensor_from_array(array), tensor)


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else find(name))
    with pytest.raises(MissingExtraError, match=r"transformers is not installed.*effexport\[hf\]"):
        effexport.hf.model("artifacts/x")


def test_export_json_describes_the_outputs_as_pytorch_does(masked_lm: Any, tokens: Any) -> None:
    """transformers 4.57 registers the same classes as 5.23, which reads the file: see test_transformers5.py."""
    artifact = open_artifact(masked_lm.artifact.path)
    described = json.loads((artifact.path / EXPORT_JSON).read_text(encoding="utf-8"))["components"]["model"]
    assert (described["file"], described["metadata"]["architecture"]) == ("model.onnx", "NystromformerForMaskedLM")
    assert described["metadata"]["kwargs"].keys() == tokens.keys()
    _, structure = pytree.tree_flatten(masked_lm(**tokens))
    assert described["metadata"]["out_spec"] == pytree.treespec_dumps(structure)
    assert {EXPORT_JSON, "model.onnx.data"} <= artifact.manifest.files.keys()


def test_an_empty_file_of_weights_does_not_count_as_one(masked_lm: Any, tmp_path: Any) -> None:
    from effexport.cli.packaging import check_outputs

    (tmp_path / "flat.onnx.data").touch()
    check_outputs(masked_lm.artifact, tmp_path / "flat.onnx", force=False)


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "options"), [("sentence_embedding", {"pool": "mean"}), ("token_embeddings", {})])
def test_the_first_module_of_a_sentence_transformer_makes_embeddings(feature: str, options: dict[str, Any]) -> None:
    import transformers

    folders = checkpoint_artifact("NystromformerModel", **options)
    module = effexport.hf.SentenceModule(folders.artifact)
    features = module.preprocess([*TEXTS, "fox " * 60])
    assert features["input_ids"].shape == (3, 40)
    original = transformers.NystromformerModel.from_pretrained(folders.checkpoint).eval()
    with torch.no_grad():
        expected = original(**features).last_hidden_state
    if feature == "sentence_embedding":
        kept = features["attention_mask"][..., None]
        expected = (expected * kept).sum(1) / kept.sum(1)
    # the limit of pooled answers beside those of sentence-transformers
    torch.testing.assert_close(module(features)[feature], expected, rtol=0, atol=1e-5)
    assert module.get_embedding_dimension() == 32
    prompted = module.preprocess(["fox"], prompt="query: ")
    assert torch.equal(prompted["input_ids"], module.preprocess(["query: fox"])["input_ids"])


@pytest.mark.slow
def test_a_pipeline_for_features_gives_one_vector_for_a_text_of_a_pooled_artifact() -> None:
    import transformers

    folder = checkpoint_artifact("NystromformerModel", pool="mean").artifact
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    vector = transformers.pipeline("feature-extraction", model=effexport.hf.model(folder), tokenizer=tokenizer)(
        TEXTS[0]
    )
    module = effexport.hf.SentenceModule(folder)
    expected = module(module.preprocess(TEXTS[:1]))["sentence_embedding"]
    np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-6)  # the same graph, called twice


def test_a_sentence_transformer_refuses_what_makes_no_embeddings(masked_lm: Any) -> None:
    with pytest.raises(UserError, match=r"returns logits .*expected embeddings: build it with --pool mean"):
        effexport.hf.SentenceModule(masked_lm.artifact.path)
