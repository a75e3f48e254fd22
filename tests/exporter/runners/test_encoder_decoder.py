"""`effexport.load_encoder_decoder` and `generate` of `effexport.hf`: LED, beside transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_artifacts import CheckpointArtifact, checkpoint_artifact

import effexport
from effexport.artifact import open_artifact
from effexport.base.errors import RuntimeFailedError, UserError
from effexport.proof.cases import stored_cases
from effexport.proof.checks.invariance import check_encoder_decoder
from effexport.runners.decode import EncoderDecoderRunner
from effexport.runners.ort.runner import OrtRunner

# the artifact takes half a minute
pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "transformers"), pytest.mark.slow]
# The limit that docs/checkpoints.md states, of the RMS.
LIMIT = 1e-4
MOST_TOKENS = 50
TOKEN = "decoder_input_ids"


@pytest.fixture(scope="module")
def folders() -> CheckpointArtifact:
    return checkpoint_artifact("LEDForConditionalGeneration", "roberta")


@pytest.fixture(scope="module")
def original(folders: CheckpointArtifact) -> Any:
    import transformers

    return transformers.LEDForConditionalGeneration.from_pretrained(folders.checkpoint).eval()


@pytest.fixture
def model(folders: CheckpointArtifact) -> Iterator[EncoderDecoderRunner]:
    with effexport.load_encoder_decoder(folders.artifact) as opened:
        yield opened


def source(batch: int, seq_len: int, *, padded: bool = True) -> dict[str, torch.Tensor]:
    """Padding of other lengths in each row but the first, at the end and at the beginning."""
    generator = torch.Generator().manual_seed(seq_len)
    ids = torch.randint(3, 420, (batch, seq_len), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch if padded else 1):
        hidden = slice(seq_len - seq_len // (row + 2), None) if row % 2 else slice(seq_len // (row + 2))
        mask[row, hidden] = 0
    marks = (torch.rand(ids.shape, generator=generator) < 0.1).long()
    return {"input_ids": torch.where(mask == 1, ids, 1), "attention_mask": mask, "global_attention_mask": marks}


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in tensors.items()}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("implementation", ["kernel", "body"])
@torch.no_grad()
def test_steps_equal_transformers_at_any_length(
    implementation: str, padded: bool, folders: CheckpointArtifact, original: Any
) -> None:
    settings = effexport.RunOptions(implementation=implementation)
    with effexport.load_encoder_decoder(folders.artifact, settings) as model:
        for seq_len, target_len in ((1, 3), (2, 9), (4, 1), (13, 17), (31, MOST_TOKENS), (50, 30)):
            inputs = source(3, seq_len, padded=padded)
            target = torch.randint(0, 420, (3, target_len), generator=torch.Generator().manual_seed(target_len))
            expected = original(**inputs, decoder_input_ids=target).logits
            model.encode(arrays(inputs))
            steps = [model.step({TOKEN: target[:, i : i + 1].numpy()})["logits"] for i in range(target_len)]
            error = np.abs(np.concatenate(steps, axis=1) - expected.numpy()).max()
            assert error <= LIMIT * float(expected.square().mean().sqrt()), (seq_len, target_len)
            assert model.length == target_len


@torch.no_grad()
def test_the_state_of_a_caller_s_beam_search_gives_the_scores_of_transformers(
    model: EncoderDecoderRunner, original: Any
) -> None:
    beams, count, batch = 4, 20, 3
    inputs = source(batch, 40)
    options = {"num_beams": beams, "max_new_tokens": count, "length_penalty": 0.0, "eos_token_id": None}
    expected = original.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)

    model.encode(arrays(inputs))
    model.state = {name: np.repeat(rows, beams, axis=0) for name, rows in model.state.items()}
    target = np.full((batch * beams, 1), 2)
    # at first, all beams of a sample are alike, so only one counts
    scores = np.where(np.arange(beams) == 0, 0.0, -np.inf)[None].repeat(batch, axis=0)
    for _ in range(count):
        logits = model.step({TOKEN: target[:, -1:]})["logits"][:, 0]
        logs = torch.from_numpy(logits).log_softmax(-1).numpy().reshape(batch, beams, -1)
        totals = (scores[:, :, None] + logs).reshape(batch, -1)
        best = np.argsort(-totals, axis=1, kind="stable")[:, :beams]
        scores = np.take_along_axis(totals, best, axis=1)
        rows = (best // logs.shape[-1] + beams * np.arange(batch)[:, None]).ravel()
        target = np.concatenate([target[rows], (best % logs.shape[-1]).reshape(-1, 1)], axis=1)
        model.state = {name: array[rows] for name, array in model.state.items()}
    np.testing.assert_array_equal(target[::beams], expected.sequences.numpy())
    np.testing.assert_allclose(scores[:, 0], expected.sequences_scores.numpy(), atol=count * LIMIT)


def test_an_empty_answer_is_an_error(model: EncoderDecoderRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, run = arrays(source(2, 9)), OrtRunner._run
    model.encode(inputs)
    monkeypatch.setattr(OrtRunner, "_run", lambda *given: {k: v[:0] for k, v in run(*given).items()})
    with pytest.raises(RuntimeFailedError, match=r"'logits' is \[0, 1, 420\]; expected \[2, 1, 420\]"):
        model.step({TOKEN: np.full((2, 1), 2)})
    with pytest.raises(RuntimeFailedError, match=r" is \[0, .*; expected \[2, "):
        model.encode(inputs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 4, "length_penalty": 2.0},
        {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True, "no_repeat_ngram_size": 2},
        {"decoder_input_ids": torch.tensor([[5, 7, 9], [11, 4, 6], [3, 8, 3]]), "use_cache": False},
    ],
    ids=["greedy", "beams", "several answers", "a beginning"],
)
@torch.no_grad()
def test_generate_gives_the_tokens_of_transformers(
    options: dict[str, Any], folders: CheckpointArtifact, original: Any
) -> None:
    model = effexport.hf.model(folders.artifact)
    found = set()
    for seq_len in (1, 6, 50):
        inputs = source(3, seq_len)
        expected = original.generate(**inputs, max_new_tokens=25, **options)
        assert torch.equal(model.generate(**inputs, max_new_tokens=25, **options), expected)
        found |= set(expected.flatten().tolist())
    assert len(found) > 5, "random weights that repeat themselves would show little"


@torch.no_grad()
def test_a_call_with_a_target_gives_its_logits(folders: CheckpointArtifact, original: Any) -> None:
    model, inputs, target = effexport.hf.model(folders.artifact), source(2, 30), torch.arange(20).reshape(2, 10)
    expected = original(**inputs, decoder_input_ids=target).logits
    read = model.get_encoder()(**inputs)
    for found in (
        model(**inputs, decoder_input_ids=target).logits,
        model(encoder_outputs=read, decoder_input_ids=target).logits,
        model(encoder_outputs=read, decoder_input_ids=target, return_dict=False)[0],
    ):
        assert float((found - expected).abs().max()) <= LIMIT * float(expected.square().mean().sqrt())


def test_a_pipeline_summarises_as_with_the_checkpoint(folders: CheckpointArtifact, original: Any) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folders.artifact, model_max_length=50)
    texts = ["the first text is short", "and another one has a few more words than that"]
    answers = [
        transformers.pipeline("summarization", model=one, tokenizer=tokenizer)(texts, max_new_tokens=20, num_beams=2)
        for one in (original, effexport.hf.model(folders.artifact))
    ]
    assert answers[0] == answers[1]


BAD: list[tuple[Callable[[EncoderDecoderRunner], object], str]] = [
    (lambda model: model.step({TOKEN: np.ones((2, 1), int)}), "there is no source to decode from; call encode first"),
    (lambda model: model.encode({"input_ids": np.full((1, 53), 5)}), "the sequence has 53 tokens; .* positions for 52"),
    (lambda model: model.encode({"input_ids": np.full((1, 5), 420)}), "input_ids contains 420; expected 0 to 419"),
    (
        lambda model: model.encode({"input_ids": np.ones((2, 5), int), "attention_mask": np.ones((2, 4), int)}),
        "seq is 5 in 'input_ids'",
    ),
    (lambda model: model.encode({TOKEN: np.ones((2, 1), int)}), "unknown input 'decoder_input_ids'"),
    (lambda model: setattr(model, "state", {"layer0_keys": np.zeros(3)}), "the state has 'layer0_keys'; expected "),
    (lambda model: setattr(model, "state", 3), "the state is given as int; expected a dictionary"),
]
BAD_LATER: list[tuple[Callable[[EncoderDecoderRunner], object], str]] = [
    (lambda model: model.step({TOKEN: np.ones((3, 1), int)}), "the batch size is 3, but the state is of 2; give one"),
    (lambda model: model.step({TOKEN: np.ones((2, 2), int)}), r"is int64 \[2, 2\]; expected decoder_input_ids"),
    (lambda model: model.step({TOKEN: np.full((2, 1), 420)}), "decoder_input_ids contains 420; expected 0 to 419"),
    (lambda model: model.step({"input_ids": np.ones((2, 1), int)}), "unknown input 'input_ids'"),
    (
        lambda model: setattr(model, "state", {**model.state, "layer1_keys": model.state["layer1_keys"][:, :, :1]}),
        "state 'layer1_keys' is .* but past is 2 in 'layer0_keys'; expected the same past in all states",
    ),
    (
        lambda model: setattr(model, "state", {**model.state, "memory_layer0_keys": np.zeros((2, 4, 0, 8), "float32")}),
        "state 'memory_layer0_keys' is .*, which is empty",
    ),
    (
        lambda model: setattr(model, "state", {name: rows[:0] for name, rows in model.state.items()}),
        "state 'attention_mask' is .*, which is empty",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_refused_in_one_line(
    call: Callable[[EncoderDecoderRunner], object], message: str, model: EncoderDecoderRunner
) -> None:
    with pytest.raises(UserError, match=message) as error:
        call(model)
    assert "\n" not in str(error.value)
    assert (model.state, model.length) == ({}, 0)


@pytest.mark.parametrize(("call", "message"), BAD_LATER)
def test_bad_input_leaves_the_state_as_it_was(
    call: Callable[[EncoderDecoderRunner], object], message: str, model: EncoderDecoderRunner
) -> None:
    token = {TOKEN: np.array([[2], [7]])}
    model.encode(arrays(source(2, 9)))
    for _ in range(2):
        model.step(token)
    before = model.state
    with pytest.raises(UserError, match=message) as error:
        call(model)
    assert "\n" not in str(error.value)
    assert model.state is before
    expected = model.step(token)["logits"]
    model.state = before
    assert np.array_equal(model.step(token)["logits"], expected)


def test_tokens_end_with_the_positions(model: EncoderDecoderRunner, folders: CheckpointArtifact) -> None:
    model.encode(arrays(source(1, 9)))
    for _ in range(MOST_TOKENS):
        model.step({TOKEN: np.array([[7]])})
    with pytest.raises(UserError, match="token 51 is beyond the 50 positions of this decoder; call encode to begin a"):
        model.step({TOKEN: np.array([[7]])})
    with (
        effexport.load(folders.artifact) as whole,
        pytest.raises(UserError, match=r"target is 51 in .* for 50: shorten"),
    ):
        whole.run({"input_ids": np.full((1, 3), 5), TOKEN: np.full((1, 51), 5)})


def test_other_artifacts_and_runtimes_are_refused(folders: CheckpointArtifact) -> None:
    other = checkpoint_artifact("NystromformerForMaskedLM").artifact
    with pytest.raises(UserError, match=r"is nystromformer masked-lm, not an encoder-decoder; run it"):
        effexport.load_encoder_decoder(other)
    for runtime in ("trt-rtx", "openvino"):
        expected = f"{runtime} does not run the decode steps of encoder-decoders; expected one of: ort, ort-cuda$"
        with pytest.raises(UserError, match=expected):
            effexport.load_encoder_decoder(folders.artifact, runtime=runtime)
    with pytest.raises(UserError, match=r"it is an encoder-decoder; open it with effexport.load_enc"):
        effexport.load_decoder(folders.artifact)
    with pytest.raises(UserError, match=r"cannot generate text: it reads a source first, which effexport.hf"):
        effexport.load_generator(folders.artifact)
    with pytest.raises(UserError, match=r"a text cannot be the input of this model, which takes .*decoder"):
        effexport.load_text(folders.artifact)
    model = effexport.hf.model(folders.artifact)
    with pytest.raises(UserError, match="a state that is a tuple does not work with an artifact"):
        model(encoder_outputs=(torch.zeros(1),), decoder_input_ids=torch.ones(1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"precision": "int8"},
            "does not apply to led seq2seq-lm, whose decode step is not quantised",
        ),
        ({"targets": ("trt",)}, "TensorRT does not run the decode step of led seq2seq-lm, .*; leave it out"),
        ({"pool": "mean"}, r"the model returns logits \[batch, target, 420\]"),
        ({"top_k": 5}, r"the model returns logits \[batch, target, 420\]"),
    ],
)
def test_what_a_build_cannot_have_is_refused_first(
    options: dict[str, Any], message: str, folders: CheckpointArtifact, tmp_path: Path
) -> None:
    with pytest.raises((UserError, ValueError), match=message) as error:
        effexport.build(checkpoint=folders.checkpoint, output=tmp_path / "built", **options)
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_a_target_is_judged_as_by_transformers(folders: CheckpointArtifact, original: Any) -> None:
    inputs, labels = source(3, 20), torch.randint(3, 420, (3, 12), generator=torch.Generator().manual_seed(5))
    labels[1, 9:] = -100
    target = original.prepare_decoder_input_ids_from_labels(labels)
    found = effexport.evaluate(folders.artifact, data=arrays({**inputs, TOKEN: target, "labels": labels}))
    assert (found.objective, found.answers) == ("sequence to sequence", 33)
    assert abs(found.figure("loss").value - float(original(**inputs, labels=labels).loss)) <= LIMIT
    with pytest.raises(UserError, match=r"labels is int64 \[3, 5\]; expected integers \[3, 12\]: one for each token"):
        effexport.evaluate(folders.artifact, data=arrays({**inputs, TOKEN: target, "labels": labels[:, :5]}))


class Forgetful(EncoderDecoderRunner):
    """Its steps get a part of the state wrong."""

    def __init__(self, real: EncoderDecoderRunner, fault: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]):
        self.__dict__.update(real.__dict__)
        self.fault = fault

    def step(self, token: Any) -> dict[str, np.ndarray]:
        self._state = self.fault(self._state)
        return super().step(token)


def without_mask(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**state, "attention_mask": np.ones_like(state["attention_mask"])}


def with_rows_of_the_first(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**state, "layer1_values": np.repeat(state["layer1_values"][:1], len(state["layer1_values"]), axis=0)}


def without_earlier_tokens(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**state, "layer0_keys": np.zeros_like(state["layer0_keys"])}


@pytest.mark.parametrize("fault", [without_mask, with_rows_of_the_first, without_earlier_tokens])
def test_the_proof_finds_a_wrong_state(fault: Any, model: EncoderDecoderRunner, folders: CheckpointArtifact) -> None:
    artifact = open_artifact(folders.artifact)
    case = next(c for c in stored_cases(artifact.reference_path, artifact.spec) if c.name == "padded batch")
    assert check_encoder_decoder(model, case, artifact.spec).status == "passed"
    assert check_encoder_decoder(Forgetful(model, fault), case, artifact.spec).status == "failed"


def test_verify_checks_the_steps_or_says_why_not(folders: CheckpointArtifact) -> None:
    for runtime, expected in (("ort", ["passed"] * 7), ("openvino", ["not run"])):
        report = effexport.verify(folders.artifact, runtime=runtime)
        assert [check.status for check in report.checks if check.name == "decode step"] == expected
        assert report.verdict == "passed"


def test_a_build_in_half_precision_is_proven_and_decodes(folders: CheckpointArtifact) -> None:
    half = checkpoint_artifact("LEDForConditionalGeneration", "roberta", precision="fp16").artifact
    inputs, target = arrays(source(3, 40)), np.arange(30).reshape(3, 10)
    answers = []
    for folder in (folders.artifact, half):
        with effexport.load_encoder_decoder(folder) as model:
            model.encode(inputs)
            answers.append(
                np.concatenate([model.step({TOKEN: target[:, i : i + 1]})["logits"] for i in range(10)], axis=1)
            )
    assert answers[1].dtype == np.float16
    exact = answers[0]
    # as the proof allows fp16
    assert np.abs(answers[1] - exact).max() <= 0.01 * np.sqrt(np.mean(exact**2))


@torch.no_grad()
def test_a_refit_gives_both_graphs_other_weights(folders: CheckpointArtifact, tmp_path: Path) -> None:
    import transformers
    from checkpoint_artifacts import LED
    from transformers_models import saved

    saved(tmp_path / "other", "LEDForConditionalGeneration", LED, seed=1)
    effexport.refit(folders.artifact, checkpoint=tmp_path / "other", output=tmp_path / "refitted")
    other = transformers.LEDForConditionalGeneration.from_pretrained(tmp_path / "other").eval()
    inputs = source(2, 20)
    model = effexport.hf.model(tmp_path / "refitted")
    assert torch.equal(model.generate(**inputs, max_new_tokens=9), other.generate(**inputs, max_new_tokens=9))
