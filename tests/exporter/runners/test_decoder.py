"""`effexport.load_decoder`: prompts and single tokens give what the whole model gives, or an error says what to do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import effexport
from effexport.artifact import PREFILL, Artifact, open_artifact
from effexport.base.errors import EffexportError, UserError
from effexport.base.formatting import listed
from effexport.base.spec import BuildSpec
from effexport.export.module_source import module_from_seed
from effexport.export.onnx_from_module import GraphFile, onnx_with_state
from effexport.models.encoder.module import DecodeStep, Prefill
from effexport.models.user.model import model_of_ours
from effexport.models.variants import WITH_STATE
from effexport.proof.cases import load_reference
from effexport.proof.checks.invariance import check_decoder
from effexport.proof.reference import reference_from_model
from effexport.proof.tolerances import arithmetic_limit, relative_error
from effexport.runners.decode import DecodeRunner
from effexport.runners.ort.runner import decoder_in_ort
from effexport.runners.runner import Runner, limits_from_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
LENGTHS = (1, 63, 100, 1000)
BLOCKS = ("pre-norm", "post-norm", "reversible")


@pytest.fixture(
    scope="module",
    params=[("linear", "encoder"), pytest.param(("aft-simple", "attention"), marks=pytest.mark.slow)],
    ids=lambda kind: kind[0],
)
def artifact(request: pytest.FixtureRequest, built: Built) -> Artifact:
    variant, scope = request.param
    longest = {"seq_len": 1024, "layers": 2} if scope == "encoder" else {}
    return built(variant, scope, causal=True, **longest)


@pytest.fixture(scope="module")
def opened(artifact: Artifact) -> Iterator[DecodeRunner]:
    with effexport.load_decoder(artifact.path) as decoder:
        yield decoder


@pytest.fixture
def decoder(opened: DecodeRunner) -> DecodeRunner:
    opened.reset()
    return opened


@pytest.fixture(scope="module")
def runner(artifact: Artifact) -> Iterator[Runner]:
    """The whole model."""
    with effexport.load(artifact.path) as runner:
        yield runner


def tokens_of(artifact: Artifact, batch: int, seq_len: int) -> np.ndarray:
    """Values for the first input of an artifact: token ids or hidden states."""
    rng = np.random.default_rng(seq_len)
    if artifact.spec.model.scope == "encoder":
        return rng.integers(0, 258, (batch, seq_len))
    return rng.standard_normal((batch, seq_len, artifact.spec.attention.dim), dtype=np.float32)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """[…, channels], relative to the scale of the whole."""
    width = expected.shape[-1]
    assert actual.shape == expected.shape
    return relative_error(actual.reshape(-1, width), expected.reshape(-1, width))[0]


def stepped(decoder: DecodeRunner, tokens: np.ndarray) -> np.ndarray:
    """The outputs of single steps, [batch, seq, dim]."""
    name = decoder.inputs[0].name
    steps = [decoder.step({name: tokens[:, t : t + 1]})["last_hidden_state"] for t in range(tokens.shape[1])]
    return np.concatenate(steps, axis=1)


def test_single_steps_answer_as_the_whole_model_also_after_a_reset(
    artifact: Artifact, decoder: DecodeRunner, runner: Runner
) -> None:
    tokens = tokens_of(artifact, 2, 12)
    whole = runner.run({decoder.inputs[0].name: tokens})["last_hidden_state"]
    for _ in range(2):
        assert error(stepped(decoder, tokens), whole) <= arithmetic_limit(artifact.spec).value
        decoder.reset()


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_a_prefill_answers_as_the_whole_model_and_leaves_the_state_of_single_steps(
    artifact: Artifact, decoder: DecodeRunner, runner: Runner, seq_len: int
) -> None:
    tokens, name, limit = tokens_of(artifact, 2, seq_len), decoder.inputs[0].name, arithmetic_limit(artifact.spec).value
    whole = runner.run({name: tokens})["last_hidden_state"]
    assert error(decoder.prefill({name: tokens})["last_hidden_state"], whole) <= limit
    state, position = decoder.state, decoder.position
    decoder.reset()
    stepped(decoder, tokens)
    np.testing.assert_array_equal(decoder.position, position)
    assert {key: error(value, decoder.state[key]) <= limit for key, value in state.items()} == dict.fromkeys(
        state, True
    )


def test_samples_of_a_padded_prompt_go_on_after_their_own_last_token(
    artifact: Artifact, decoder: DecodeRunner, runner: Runner
) -> None:
    lengths, more = np.array([63, 100, 1, 20]), 5
    tokens, name = tokens_of(artifact, 4, 100), decoder.inputs[0].name
    later = tokens_of(artifact, 4, more)
    mask = (np.arange(100) < lengths[:, None]).astype(np.int64)
    decoder.prefill({name: tokens, "attention_mask": mask})
    np.testing.assert_array_equal(decoder.position, lengths)
    answers = stepped(decoder, later)
    for row, length in enumerate(lengths):
        alone = np.concatenate([tokens[row : row + 1, :length], later[row : row + 1]], axis=1)
        whole = runner.run({name: alone})["last_hidden_state"]
        assert error(answers[row], whole[0, length:]) <= arithmetic_limit(artifact.spec).value


def test_a_prompt_may_follow_other_tokens_and_a_copied_state_continues(
    artifact: Artifact, decoder: DecodeRunner, runner: Runner
) -> None:
    tokens, name, limit = tokens_of(artifact, 2, 100), decoder.inputs[0].name, arithmetic_limit(artifact.spec).value
    whole = runner.run({name: tokens})["last_hidden_state"]
    decoder.prefill({name: tokens[:, :30]})
    stepped(decoder, tokens[:, 30:33])
    state, position = dict(decoder.state), decoder.position
    for _ in range(2):
        answer = decoder.prefill({name: tokens[:, 33:]})["last_hidden_state"]
        assert error(answer, whole[:, 33:]) <= limit
        decoder.state, decoder.position = state, position


def test_a_sample_without_kept_tokens_keeps_its_state(artifact: Artifact, decoder: DecodeRunner) -> None:
    tokens, name = tokens_of(artifact, 2, 10), decoder.inputs[0].name
    decoder.prefill({name: tokens})
    before = decoder.state
    mask = np.zeros((2, 10), dtype=np.int64)
    mask[1] = 1
    decoder.prefill({name: tokens, "attention_mask": mask})
    np.testing.assert_array_equal(decoder.position, [10, 20])
    for key, value in decoder.state.items():
        np.testing.assert_array_equal(value[0], before[key][0])
    assert any(not np.array_equal(value[1], before[key][1]) for key, value in decoder.state.items())


@pytest.fixture(scope="module")
def opened_of_tokens(built: Built) -> Iterator[DecodeRunner]:
    with effexport.load_decoder(built("linear", "encoder", causal=True, seq_len=1024, layers=2).path) as decoder:
        yield decoder


@pytest.fixture
def of_tokens(opened_of_tokens: DecodeRunner) -> DecodeRunner:
    """A decoder that has read two prompts of three tokens, given as lists."""
    opened_of_tokens.reset()
    opened_of_tokens.prefill({"input_ids": [[1, 2, 3], [4, 5, 6]]})
    return opened_of_tokens


@pytest.mark.parametrize(
    ("call", "feeds", "message"),
    [
        ("step", {}, r"input 'input_ids' is missing; expected: input_ids int64 \[batch, 1\]$"),
        ("step", [[1], [2]], r"the inputs are given as list; expected a dictionary with an array for: input_ids"),
        ("step", {"input_ids": [[1], [-1]]}, "input_ids contains -1; expected 0 to 257"),
        ("step", {"input_ids": [[1], [258]]}, r"input_ids contains 258; expected 0 to 257; see input_ids\[1, 0\]"),
        (
            "step",
            {"input_ids": [[1, 2], [3, 4]]},
            r"'input_ids' is int64 \[2, 2\]; expected input_ids int64 \[batch, 1",
        ),
        (
            "step",
            {"input_ids": [["a"], ["b"]]},
            "a list that numpy reads as str32; expected input_ids int64",
        ),
        (
            "step",
            {"input_ids": [[None]]},
            "a list that numpy reads as object; expected input_ids int64",
        ),
        ("step", {"input_ids": [[10**30]]}, r"\[batch, 1\], as nested lists of integers that fit in int64$"),
        ("step", {"input_ids": []}, r"'input_ids' is float64 \[0\], which is empty; expected at least one element"),
        ("step", {"input_ids": [[]]}, r"'input_ids' is float64 \[1, 0\], which is empty; expected at least one"),
        ("step", {"input_ids": [[1]]}, r"the batch size is 1, but the state is of 2; call reset\(\) to begin"),
        ("step", {"input_ids": [[1], [2]], "position": [0, 0]}, "unknown input 'position'"),
        ("prefill", {}, r"input 'input_ids' is missing; expected: input_ids int64 \[batch, seq\], attention_mask"),
        ("prefill", {"input_ids": [[1, -1], [1, 2]]}, "input_ids contains -1; expected 0 to 257"),
        ("prefill", {"input_ids": [[1, 2], [3]]}, "'input_ids' has rows of different lengths; pad them"),
        ("prefill", {"input_ids": [[1, 2]]}, r"the batch size is 1, but the state is of 2; call reset\(\)"),
        ("prefill", {"input_ids": np.ones((2, 1022), int)}, "token 1025 is beyond the 1024 learned positions"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_state_stays(
    of_tokens: DecodeRunner, call: str, feeds: object, message: str
) -> None:
    state, position = dict(of_tokens.state), of_tokens.position
    with pytest.raises(UserError, match=message) as refused:
        getattr(of_tokens, call)(feeds)
    assert "\n" not in str(refused.value)
    assert of_tokens.state == state
    assert of_tokens.position is position
    of_tokens.step({"input_ids": [[1], [2]]})
    of_tokens.reset()
    of_tokens.step({"input_ids": [[1]]})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("position", np.int64(-1), "position is -1; expected one integer, or one for each sample, from 0 to 1024$"),
        ("position", [3, 1025], "position is 1025; expected one integer, or one for each sample, from 0 to 1024$"),
        ("position", "a", r"position is str32 \[\]; expected one integer"),
        ("position", None, r"position is object \[\]; expected one integer"),
        ("position", 10**20, "position is object|position is 100000000000000000000"),
        ("position", 1.0, r"position is float64 \[\]; expected one integer"),
        ("position", [[1], [2]], r"position is int64 \[2, 1\]; expected .*, int64 \[\] or \[batch\]"),
        ("position", [[1], [2, 3]], "position is .*; expected one integer"),
        ("state", {"x": 1}, "the state has 'x'; expected .*, or an empty dictionary"),
        ("state", None, "the state is given as NoneType; expected a dictionary of arrays"),
    ],
)
def test_a_state_or_position_that_does_not_fit_is_refused_when_it_is_set(
    of_tokens: DecodeRunner, name: str, value: object, message: str
) -> None:
    before = getattr(of_tokens, name)
    with pytest.raises(UserError, match=message) as refused:
        setattr(of_tokens, name, value)
    assert "\n" not in str(refused.value)
    assert getattr(of_tokens, name) is before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda array: None, "is a NoneType that numpy reads as object; expected an array: "),
        (lambda array: array.astype(np.float64), r"is float64 .*; expected .*: convert it with .astype\('float32'\)"),
        (lambda array: array[..., :-1], "is float32 .*; expected "),
        (lambda array: array[:1], "but batch is 2 in .*; expected the same batch in all states"),
    ],
)
def test_one_wrong_array_of_a_state_is_refused(
    of_tokens: DecodeRunner, change: Callable[[np.ndarray], object], message: str
) -> None:
    name = of_tokens.states[-1].name
    with pytest.raises(UserError, match=f"state '{name}' .*{message}"):
        of_tokens.state = {**of_tokens.state, name: change(of_tokens.state[name])}  # type: ignore[dict-item]
    of_tokens.step({"input_ids": [[1], [2]]})


def test_what_was_written_into_a_state_or_position_is_checked_before_the_next_step(of_tokens: DecodeRunner) -> None:
    of_tokens.position = [7, 8, 9]
    with pytest.raises(UserError, match=r"the batch size is 2, but the position is of 3; call reset\(\)"):
        of_tokens.step({"input_ids": [[1], [2]]})
    of_tokens.position = 3
    of_tokens.position[...] = -2
    with pytest.raises(UserError, match="position is -2; expected one integer"):
        of_tokens.step({"input_ids": [[1], [2]]})


def test_padding_may_lie_beyond_the_last_position(of_tokens: DecodeRunner) -> None:
    mask = np.ones((2, 1022), dtype=np.int64)
    mask[:, -1] = 0
    of_tokens.prefill({"input_ids": np.ones((2, 1022), int), "attention_mask": mask})
    np.testing.assert_array_equal(of_tokens.position, [1024, 1024])
    with pytest.raises(UserError, match="token 1025 is beyond the 1024 learned positions of this model; call reset"):
        of_tokens.step({"input_ids": [[1], [1]]})


def test_a_decoder_takes_settings_and_says_what_it_is(built: Built) -> None:
    path = built("linear", "encoder", causal=True, seq_len=1024, layers=2).path
    with effexport.load_decoder(path, effexport.RunOptions(threads=1)) as decoder:
        assert decoder.settings.threads == 1
        decoder.prefill({"input_ids": [[1, 2, 3]]})
        assert repr(decoder) == (
            "<DecodeRunner: input_ids int64 [batch, 1] → last_hidden_state float32 [batch, 1, 32]; next positions: [3]>"
        )
    for call in (decoder.step, decoder.prefill):
        with pytest.raises(EffexportError, match="this runner is closed"):
            call({"input_ids": [[1]]})
    with pytest.raises(UserError, match=r"onnxruntime .* has no CUDAExecutionProvider"):
        effexport.load_decoder(path, effexport.RunOptions(runtime="ort-cuda"))


def test_an_artifact_without_a_decode_step_says_which_have_one(built: Built) -> None:
    message = f"has no decode step; only causal models of {listed(WITH_STATE)} have one"
    with pytest.raises(UserError, match=message):
        effexport.load_decoder(built("softmax", "encoder").path)


def test_an_artifact_from_before_there_was_a_prefill_still_decodes(
    copied: Callable[..., Path], rewrite_manifest: Callable[..., None]
) -> None:
    folder = copied("aft-simple", "attention", causal=True)
    (folder / PREFILL).unlink()
    rewrite_manifest(folder)
    token = np.zeros((1, 1, 32), np.float32)
    with effexport.load_decoder(folder) as decoder:
        decoder.step({"hidden_states": token})
        with pytest.raises(UserError, match="has no prefill, because an older effexport built it; build it again, or"):
            decoder.prefill({"hidden_states": token})
    artifact = open_artifact(folder)
    with effexport.load_decoder(folder) as decoder:
        checks = check_decoder(decoder, load_reference(artifact.reference_path), artifact.spec)
    assert [(check.kind, check.status) for check in checks] == [("decode step", "passed")]


def test_the_report_proves_the_prefill_on_every_case_and_its_state(artifact: Artifact) -> None:
    summary = artifact.manifest.parity.summary
    cases = load_reference(artifact.reference_path)
    assert summary["prefill"].passed == len(cases)
    assert summary["prefill state"].passed == summary["decode step"].passed == 1


def with_stale_state(model: onnx.ModelProto) -> None:
    """Return one tensor of the state as it came in."""
    name = next(value.name for value in model.graph.output if value.name.startswith("next_"))
    replace_input(model, name, [name.removeprefix("next_")], "Identity")


def without_mask(model: onnx.ModelProto) -> None:
    """Keep every token, whatever the mask says."""
    for node in model.graph.node:
        node.input[:] = ["keep_all" if name == "attention_mask" else name for name in node.input]
    model.graph.node.insert(0, onnx.helper.make_node("Equal", ["attention_mask"] * 2, ["same"]))
    model.graph.node.insert(1, onnx.helper.make_node("Cast", ["same"], ["keep_all"], to=onnx.TensorProto.INT64))


def replace_input(model: onnx.ModelProto, output: str, inputs: list[str], op: str) -> None:
    """Compute an output of the graph by one node."""
    for node in model.graph.node:
        node.output[:] = [name if name != output else f"unused_{name}" for name in node.output]
    model.graph.node.append(onnx.helper.make_node(op, inputs, [output]))


@pytest.mark.parametrize(
    ("damage", "failing"),
    [(with_stale_state, {"prefill state", "prefill"}), (without_mask, {"prefill"})],
)
def test_a_damaged_prefill_is_found(
    artifact: Artifact, tmp_path: Path, damage: Callable[[onnx.ModelProto], None], failing: set[str]
) -> None:
    assert artifact.prefill_path is not None
    model = onnx.load(artifact.prefill_path)
    damage(model)
    onnx.save(model, tmp_path / PREFILL)
    cases = load_reference(artifact.reference_path)
    limits = limits_from_spec(artifact.spec)
    with decoder_in_ort(artifact.decode_step_path, tmp_path / PREFILL, limits) as decoder:
        checks = check_decoder(decoder, cases, artifact.spec)
    assert {check.kind for check in checks if check.status == "failed"} == failing


PROVEN = {
    ("linear", "post-norm", "fp32"),
    ("linear", "reversible", "fp16"),
    ("aft-simple", "pre-norm", "fp16"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "block", "precision"),
    [
        # every block, precision and kind of state; the soak run has all of them
        (name, block, precision)
        if (name, block, precision) in PROVEN
        else pytest.param(name, block, precision, marks=pytest.mark.soak)
        for name, block, precision in itertools.product(("linear", "aft-simple"), BLOCKS, ("fp32", "fp16"))
    ],
)
def test_decoders_of_every_block_are_proven(
    small_spec: Callable[..., BuildSpec], tmp_path: Path, name: str, block: str, precision: str
) -> None:
    spec = small_spec(
        name, "encoder", causal=True, layers=2, block=block, precision=precision, seq_len=300, batch=2, lm_head=True
    )
    module = module_from_seed(spec)
    onnx_with_state(DecodeStep, module, GraphFile(tmp_path / "step.onnx", spec))
    onnx_with_state(Prefill, module, GraphFile(tmp_path / PREFILL, spec))
    cases = reference_from_model(model_of_ours(module), spec, 7).cases
    with decoder_in_ort(tmp_path / "step.onnx", tmp_path / PREFILL, limits_from_spec(spec)) as decoder:
        checks = check_decoder(decoder, cases, spec)
    assert {check.status for check in checks} == {"passed"}, checks
