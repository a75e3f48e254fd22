"""Tasks against transformers' pipelines on the same checkpoints: the same answers, and scores to 1e-4.

In the fast tests, transformers' own model runs between our halves of a task, so that only texts are on trial; the slow
ones build artifacts.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_tokenizers import SENTENCES, TEXTS, TOKENIZERS, saved_tokenizer
from slow_cases import slow_after
from text_checkpoints import answer_on, assert_same_answers, checkpoint, our_task, pipeline
from transformers_models import same_rotations

import effexport
from effexport.artifact import open_artifact
from effexport.base.errors import UserError
from effexport.tasks.task import TextOptions
from effexport.tasks.tasks import FillMask, labels_from_config

pytestmark = [pytest.mark.requires("torch", "transformers"), pytest.mark.usefixtures("kept_traces")]
# float32 softmaxes of the same logits differ by 1e-7; the limit is the one that users are promised
LIMIT = 1e-4
FAST = ("bert-with-words", "bert-wide-mask", "roberta-with-words", "bpe-wide-mask", "albert", "reformer")
OTHERS = [name for name in TOKENIZERS if name not in FAST]
# Word pieces, byte pairs and unigrams, with both families of models.
EXPORTED = ("bert", "roberta", "reformer")


def texts_for(tokenizer: Any) -> list[str]:
    return [text.format(mask=tokenizer.mask_token) for text in TEXTS]


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One model for all tokenizers, whose vocabularies are all smaller."""
    return checkpoint(tmp_path_factory.mktemp("model"), "NystromformerForMaskedLM", "bert")


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_masks_are_filled_as_transformers_fills_them(masked_lm: Any, tmp_path: Path, name: str) -> None:
    masked_lm.config.save_pretrained(tmp_path)
    tokenizer = saved_tokenizer(name, tmp_path)
    fill, task = pipeline("fill-mask", tmp_path, masked_lm), our_task(tmp_path)
    wide = our_task(tmp_path, TextOptions(top=9))
    for text in (*texts_for(tokenizer), f"{tokenizer.mask_token} and{tokenizer.mask_token}."):
        expected = fill(text)
        first = expected[0] if isinstance(expected[0], list) else expected
        assert first[0]["score"] > 0.05  # not a flat distribution
        assert_same_answers(answer_on(masked_lm, task, text), expected, LIMIT)
        assert_same_answers(answer_on(masked_lm, wide, text), fill(text, top_k=9), LIMIT)


@pytest.mark.parametrize(
    "config",
    [
        {"num_labels": 3},
        {"num_labels": 1},
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        {"num_labels": 2, "problem_type": "regression"},
        {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}},
    ],
    ids=["softmax", "one-label", "multi-label", "regression", "names"],
)
def test_texts_are_classified_as_transformers_classifies_them(tmp_path: Path, config: dict[str, Any]) -> None:
    model = checkpoint(tmp_path, "NystromformerForSequenceClassification", "bert-with-words", **config)
    classify, task = pipeline("text-classification", tmp_path, model), our_task(tmp_path)
    for text in SENTENCES[:3]:
        assert_same_answers(answer_on(model, task, text), classify(text, top_k=None), LIMIT)
    expected = classify({"text": SENTENCES[0], "text_pair": SENTENCES[1]}, top_k=None)
    assert_same_answers(answer_on(model, task, SENTENCES[0], SENTENCES[1]), expected, LIMIT)
    assert_same_answers(
        answer_on(model, our_task(tmp_path, TextOptions(top=1)), SENTENCES[0]), classify(SENTENCES[0]), LIMIT
    )


@pytest.mark.parametrize("tokenizer", ["bert-with-words", "roberta", "albert"])
def test_tokens_are_classified_as_transformers_classifies_them(tmp_path: Path, tokenizer: str) -> None:
    names = {0: "O", 1: "PER", 2: "LOC", 3: "ORG"}
    labels = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    model = checkpoint(tmp_path, "NystromformerForTokenClassification", tokenizer, **labels)
    classify, task = pipeline("token-classification", tmp_path, model), our_task(tmp_path)
    for text in SENTENCES:
        expected = classify(text)
        assert {one["entity"] for one in expected} - {"O"}
        assert_same_answers(answer_on(model, task, text), expected, LIMIT)


# pipelines of 4.57.1 read tensors as arrays in a way that NumPy 2 does not like
OF_PIPELINE = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
CONTEXT = "  ".join(SENTENCES) + " " + " ".join(reversed(SENTENCES))


@OF_PIPELINE
@pytest.mark.parametrize("tokenizer", slow_after(1, ["bert-with-words", "roberta", "bert-cased", "albert"]))
def test_questions_are_answered_as_transformers_answers_them(tmp_path: Path, tokenizer: str) -> None:
    """Contexts of one window and of many; answers of several tokens, which are extended to whole words."""
    fields = {"max_position_embeddings": 512, "segment_means_seq_len": 512, "num_landmarks": 512}
    model = checkpoint(tmp_path, "NystromformerForQuestionAnswering", tokenizer, **fields)
    answer = pipeline("question-answering", tmp_path, model)
    question = "Where is the dog?"
    for context, window, stride in ((SENTENCES[1], 384, 128), (CONTEXT, 384, 128), (CONTEXT, 40, 9), (CONTEXT, 48, 24)):
        for top in (1, 4):
            options = TextOptions(top=top, max_window=window, stride=stride, max_answer_tokens=6)
            expected = answer(
                question=question,
                context=context,
                top_k=top,
                max_seq_len=window,
                doc_stride=stride,
                max_answer_len=6,
            )
            given = answer_on(model, our_task(tmp_path, options), question, context)
            # the sum of probabilities of several windows is above 1, and so is its error
            assert_same_answers(given, expected, LIMIT)
            for one in given if isinstance(given, list) else [given]:
                assert context[one["start"] : one["end"]] == one["answer"]
    default = answer_on(model, our_task(tmp_path), question, CONTEXT)
    assert_same_answers(default, answer(question=question, context=CONTEXT), LIMIT)


def test_a_text_without_windows_has_the_mean_of_its_tokens_as_embedding(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "NystromformerModel", "bert")
    features, task = pipeline("feature-extraction", tmp_path, model), our_task(tmp_path)
    for text in SENTENCES:
        expected = np.array(features(text)[0])
        given = answer_on(model, task, text)
        assert given["tokens"] == len(expected)
        # float32 sums of up to 40 tokens of the size of 1
        np.testing.assert_allclose(given["embedding"], expected.mean(axis=0), atol=1e-5)


def test_the_windows_of_a_long_text_share_tokens_and_every_token_counts_once(tmp_path: Path) -> None:
    """The text is longer than the model's 96 positions; a reference in float64 puts the windows together."""
    model = checkpoint(tmp_path, "NystromformerModel", "bert")
    text = " ".join([CONTEXT] * 2)
    task = our_task(tmp_path)
    prepared = task.prepare(text)
    assert max(len(window) for window in prepared.windows) == 96
    inner = [place for places in prepared.places for place in places[1:-1]]
    assert inner == list(range(1, len(prepared.encoding) - 1))
    vectors = [np.array(pipeline_vectors(model, window.ids)) for window in prepared.windows]
    expected = np.concatenate(vectors).mean(axis=0)
    np.testing.assert_allclose(answer_on(model, task, text)["embedding"], expected, atol=1e-5)
    shared = our_task(tmp_path, TextOptions(stride=10, max_window=50)).prepare(text)
    assert all(first[-11:-1] == second[1:11] for first, second in zip(shared.places, shared.places[1:], strict=False))
    assert {len(places) for places in shared.places[:-1]} == {50}


def pipeline_vectors(model: Any, ids: tuple[int, ...]) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0].double().numpy()


def test_the_labels_of_a_long_text_are_those_of_the_window_that_knows_most_around_a_token(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "NystromformerForTokenClassification", "bert", num_labels=3)
    task = our_task(tmp_path)
    prepared = task.prepare(CONTEXT)
    assert len(prepared.windows) > 1
    entities = answer_on(model, task, CONTEXT)
    assert [one["index"] for one in entities] == list(range(1, len(prepared.encoding) - 1))
    for one in entities:
        assert CONTEXT[one["start"] : one["end"]].strip()
    # the middle of the first window is judged by the first window alone
    first = task.answer(short := task.prepare(CONTEXT[: prepared.windows[0].offsets[-2][1]]), outputs(model, short))
    assert_same_answers(copy.deepcopy(entities[:40]), first[:40], LIMIT)


def outputs(model: Any, prepared: Any) -> dict[str, np.ndarray]:
    import torch

    with torch.no_grad():
        found = model(**{name: torch.from_numpy(value) for name, value in prepared.feeds.items()})
    return {"logits": found.logits.numpy()}


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("NystromformerForMaskedLM", ("Paris is not.",), r"has no \[MASK\]; write it where"),
        ("NystromformerForMaskedLM", ("",), "the text is empty"),
        ("NystromformerForMaskedLM", ("\u200b",), "has no tokens"),
        ("NystromformerForMaskedLM", ("[MASK] " * 95,), "has 97 tokens; this model takes 96, and fill-mask needs all"),
        ("NystromformerForMaskedLM", ("[MASK] \udcff",), r"not valid Unicode: character 7 is U\+DCFF"),
        ("NystromformerForSequenceClassification", ("x " * 95,), "has 97 tokens; .* shorten the text, or split it"),
        ("NystromformerForQuestionAnswering", ("Where?",), "needs two texts: a question, and the context"),
        ("NystromformerForQuestionAnswering", ("Where?", ""), "the second text is empty"),
        ("NystromformerForQuestionAnswering", ("Where " * 90, CONTEXT), "expected a smaller --stride, or a shorter qu"),
    ],
)
def test_a_text_that_a_task_cannot_take_is_refused_with_the_remedy(
    tmp_path: Path, kind: str, arguments: tuple[str, ...], message: str
) -> None:
    checkpoint(tmp_path, kind, "bert")
    with pytest.raises(UserError, match=message):
        our_task(tmp_path).prepare(*arguments)


def test_a_model_that_continues_texts_or_knows_no_mask_fills_none(tmp_path: Path) -> None:
    checkpoint(tmp_path / "lm", "ReformerModelWithLMHead", "reformer", is_decoder=True)
    with pytest.raises(UserError, match="continues texts: use --generate"):
        our_task(tmp_path / "lm")
    checkpoint(tmp_path / "mlm", "NystromformerForMaskedLM", "bert")
    config = tmp_path / "mlm" / "tokenizer_config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"mask_token": "[MASK]"', '"mask_token": null'))
    with pytest.raises(UserError, match="has no mask token"):
        our_task(tmp_path / "mlm")


def test_a_graph_that_selects_the_tokens_itself_is_given_the_places_of_the_masks(tmp_path: Path) -> None:
    """An artifact of build --top-k has the input `positions`, and the outputs `scores` and `tokens`."""
    model = checkpoint(tmp_path, "NystromformerForMaskedLM", "bert")
    task = our_task(tmp_path)
    text = "[MASK] is the [MASK] of France."
    prepared = (in_graph := FillMask(task.reader, top=3, in_graph=4)).prepare(text)
    assert prepared.feeds["positions"].tolist() == [[1, 4]]
    (feeds,) = prepared.runs
    assert feeds["positions"].shape == (1, 2)
    logits = outputs(model, task.prepare(text))["logits"]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares = np.take_along_axis(shares / shares.sum(-1, keepdims=True), prepared.feeds["positions"][..., None], axis=1)
    tokens = np.argsort(-shares, axis=-1)[..., :4]
    given = in_graph.answer(prepared, {"scores": np.take_along_axis(shares, tokens, axis=-1), "tokens": tokens})
    assert_same_answers(given, answer_on(model, our_task(tmp_path, TextOptions(top=3)), text), LIMIT)
    with pytest.raises(UserError, match="top is 9; this artifact returns the 4 most probable"):
        FillMask(task.reader, top=9, in_graph=4)


@pytest.mark.parametrize("field", ["top", "stride", "max_window", "max_answer_tokens"])
def test_options_that_make_no_sense_are_refused(field: str) -> None:
    with pytest.raises(UserError, match=f"{field} is -1; expected at least"):
        TextOptions(**{field: -1})


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, marks=pytest.mark.soak if name not in EXPORTED else ())
        for number, name in enumerate(TOKENIZERS)
    ],
)
def test_exported_checkpoints_fill_masks_as_transformers_does(tmp_path: Path, name: str, number: int) -> None:
    """Twenty checkpoints from the folder to the answer, every second one a Reformer with LSH layers."""
    from small_builds import module_from_path

    kind = ("NystromformerForMaskedLM", "ReformerForMaskedLM")[number % 2]
    if name == "reformer":
        kind = "ReformerForMaskedLM"
    model = checkpoint(tmp_path / "checkpoint", kind, name, seed=number)
    effexport.build(checkpoint=tmp_path / "checkpoint", output=tmp_path / "out")
    fill = pipeline("fill-mask", tmp_path / "checkpoint", model)
    module = module_from_path(open_artifact(tmp_path / "out").spec, tmp_path / "checkpoint")
    with effexport.load_text(tmp_path / "out") as answer:
        for text in texts_for(fill.tokenizer):
            with same_rotations(module):
                expected = fill(text)
            assert_same_answers(answer(text), expected, LIMIT)


@OF_PIPELINE
@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize(
    ("task", "kind", "arguments"),
    [
        ("question-answering", "NystromformerForQuestionAnswering", ("Where is the dog?", SENTENCES[1])),
        ("text-classification", "ReformerForSequenceClassification", (SENTENCES[0],)),
        pytest.param(
            "text-classification",
            "NystromformerForSequenceClassification",
            (SENTENCES[0],),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "token-classification",
            "NystromformerForTokenClassification",
            (SENTENCES[3],),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_exported_checkpoints_answer_as_transformers_does(
    tmp_path: Path, task: str, kind: str, arguments: tuple[str, ...]
) -> None:
    from small_builds import module_from_path

    model = checkpoint(tmp_path / "checkpoint", kind, "bert-with-words")
    effexport.build(checkpoint=tmp_path / "checkpoint", output=tmp_path / "out")
    pipe = pipeline(task, tmp_path / "checkpoint", model)
    module = module_from_path(open_artifact(tmp_path / "out").spec, tmp_path / "checkpoint")
    with effexport.load_text(tmp_path / "out") as answer, same_rotations(module):
        assert answer.task.name == task
        names = ("question", "context") if len(arguments) == 2 else ()
        expected = pipe(**dict(zip(names, arguments, strict=True))) if names else pipe(*arguments)
        given = answer(*arguments)
        if task == "text-classification":
            given, expected = given[:1], expected
        assert_same_answers(given, expected, LIMIT)


@pytest.mark.parametrize("names", [["A"], {"x": "A"}, {"9" * 5000: "A"}, "A"])
def test_names_of_classes_that_are_none_are_one_error(names: Any) -> None:
    with pytest.raises(UserError, match="expected an object with a name for the number of each class"):
        labels_from_config({"id2label": names}, 2)
