"""Decoding with engines. They are built for real by TensorRT-RTX; since running one takes a GPU, ONNX Runtime computes
in its place, behind a TensorRT and a CUDA made of Python: tests/support/fake_tensorrt.py says what that proves."""

from __future__ import annotations

import functools
import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_tensorrt import FakeTensorRT
from onnx_in_fake_tensorrt import fake_tensorrt

import effexport
from effexport.artifact import DECODE_STEP, PREFILL, Artifact, open_artifact
from effexport.base.errors import EffexportError, RuntimeFailedError, UserError
from effexport.base.runtimes import engine_name
from effexport.proof.cases import load_reference
from effexport.proof.checks.invariance import check_decoder
from effexport.runners.decode import DecodeRunner
from effexport.runners.options import RunOptions
from effexport.runners.runner import limits_from_spec
from effexport.tensorrt.engine_from_onnx import engine_from_onnx
from effexport.tensorrt.runner import decoder_in_trt
from effexport.tensorrt.sidecar import read_sidecar, write_sidecar
from effexport.tensorrt.spec import EngineSpec, profiles_from_texts

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "rtx"), pytest.mark.usefixtures("kept_traces")]
GRAPHS = RunOptions(runtime="trt", cuda_graph=True)
KINDS = [
    ("linear", "encoder", "fp16"),
    pytest.param("aft-simple", "attention", "fp32", marks=pytest.mark.slow),
    # the types of a state do not depend on the variant, nor its names on the precision
    *(
        pytest.param(*kind, marks=pytest.mark.soak)
        for kind in (
            ("linear", "attention", "fp32"),
            ("linear", "encoder", "fp32"),
            ("linear", "attention", "fp16"),
            ("aft-simple", "encoder", "fp16"),
            ("aft-simple", "encoder", "fp32"),
            ("aft-simple", "attention", "fp16"),
        )
    ),
]
Engines = Callable[..., Path]


@pytest.fixture(scope="module")
def with_engines(built: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """(variant, scope, precision, *profiles) → the folder of a causal artifact, with engines of its two graphs."""

    @functools.cache
    def make(variant: str, scope: str, precision: str, *texts: str) -> Path:
        artifact = built(variant, scope, causal=True, **({} if precision == "fp32" else {"precision": precision}))
        folder = tmp_path_factory.mktemp("engines") / variant
        shutil.copytree(artifact.path, folder)
        spec = EngineSpec(target="trt-rtx", profiles=profiles_from_texts(texts, artifact.spec))
        for model in (DECODE_STEP, PREFILL):
            path = folder / engine_name("trt-rtx", model)
            engine_from_onnx(folder / model, spec, path, precision=precision)
        return folder

    return make


@pytest.fixture
def engines(with_engines: Engines, tmp_path: Path) -> Engines:
    """As `with_engines`, in a folder of the test's own; by default an encoder of linear attention in float32."""

    def copy(variant: str = "linear", scope: str = "encoder", precision: str = "fp32", *texts: str) -> Path:
        folder = tmp_path / variant
        shutil.copytree(with_engines(variant, scope, precision, *texts), folder)
        return folder

    return copy


class Session:
    """A decoder on a GPU of its own."""

    def __init__(self, folder: Path, target: str = "trt-rtx", settings: RunOptions | None = None) -> None:
        self.spec = open_artifact(folder).spec
        self.api: FakeTensorRT = fake_tensorrt(folder)
        self.cuda = self.api.cuda
        self.decoder: DecodeRunner = decoder_in_trt(
            folder,
            target,
            limits_from_spec(self.spec),
            settings,
            cuda=self.cuda,
            api=self.api,  # type: ignore[arg-type]
        )

    def stepped(self, tokens: np.ndarray) -> np.ndarray:
        """The outputs of single steps, [batch, seq, dim]."""
        name = self.decoder.inputs[0].name
        steps = [self.decoder.step({name: tokens[:, t : t + 1]}) for t in range(tokens.shape[1])]
        return np.concatenate([next(iter(outputs.values())) for outputs in steps], axis=1)


def tokens(batch: int, seq_len: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 258, (batch, seq_len))


def as_trt(folder: Path) -> Path:
    """The same engines for a TensorRT that captures graphs."""
    for model in (DECODE_STEP, PREFILL):
        rtx, trt = (folder / engine_name(target, model) for target in ("trt-rtx", "trt"))
        info = read_sidecar(rtx)
        rtx.rename(trt)
        write_sidecar(trt, replace(info, target="trt", tensorrt_version="11.4.0.106", compute_capabilities=(90,)))
    return folder


@pytest.mark.parametrize(("name", "model_scope", "precision"), KINDS)
def test_engines_of_both_graphs_decode_as_the_whole_model_with_the_types_of_the_model(
    engines: Engines, name: str, model_scope: str, precision: str
) -> None:
    folder = engines(name, model_scope, precision)
    for model in (DECODE_STEP, PREFILL):
        info = read_sidecar(folder / engine_name("trt-rtx", model))
        assert info.model == model
        (profile,) = info.profiles
        assert {(smallest[0], largest[0]) for smallest, _, largest in profile.values()} == {(1, 4)}
        lengths = [shape[1] for shape in profile[info.inputs[0].name]]
        assert lengths == [1, 1, 1] if model == DECODE_STEP else lengths[2] >= 64
        # every layer has at least four products, and norms or sums between them
        assert info.tensors_compared >= 10
    session = Session(folder)
    with session.decoder as decoder:
        checks = check_decoder(decoder, load_reference(folder / "reference.safetensors"), session.spec)
    assert {(check.kind, check.status) for check in checks} == {
        (kind, "passed") for kind in ("decode step", "prefill state", "prefill")
    }
    session.cuda.assert_nothing_left()


@pytest.mark.parametrize("settings", [None, GRAPHS], ids=["plain", "graphs"])
def test_only_tokens_and_outputs_are_copied_and_nothing_is_allocated_between_steps(
    engines: Engines, settings: RunOptions | None
) -> None:
    session = Session(as_trt(engines()), "trt", settings)
    counts = session.cuda.counts
    with session.decoder as decoder:
        decoder.prefill({"input_ids": tokens(2, 20)})
        session.stepped(tokens(2, 4))  # graphs are captured for both places of the state
        before = dict(counts)
        session.stepped(tokens(2, 10))
        grown = {name: counts[name] - before.get(name, 0) for name in counts if counts[name] != before.get(name, 0)}
    # the token and its position; the output
    assert (grown.pop("copy_to_device"), grown.pop("copy_to_host")) == (20, 10)
    assert grown.pop("launch", 0) == (0 if settings is None else 10)
    assert grown == {"synchronize": 10}
    session.cuda.assert_nothing_left()


def test_decoding_with_graphs_gives_the_answers_of_onnx_runtime(engines: Engines) -> None:
    folder = as_trt(engines())
    prompt, later = tokens(2, 20), tokens(2, 12, seed=1)
    with effexport.load_decoder(folder) as decoder:
        decoder.prefill({"input_ids": prompt})
        expected = [decoder.step({"input_ids": later[:, t : t + 1]})["last_hidden_state"] for t in range(12)]
    session = Session(folder, "trt", GRAPHS)
    with session.decoder as decoder:
        for _ in range(2):
            decoder.prefill({"input_ids": prompt})
            np.testing.assert_allclose(session.stepped(later), np.concatenate(expected, axis=1), atol=1e-6)
            decoder.reset()
    assert session.api.alive == {"engine": 0, "context": 0}


def test_sessions_that_take_turns_never_share_a_state(engines: Engines) -> None:
    folder = engines()
    both = tokens(2, 8)
    alone = []
    for row in both:
        with Session(folder).decoder as decoder:
            alone.append([decoder.step({"input_ids": row[None, t : t + 1]})["last_hidden_state"] for t in range(8)])
    first, second = Session(folder), Session(folder)
    with first.decoder as one, second.decoder as other:
        for t in range(8):
            for decoder, row, answers in zip((one, other), both, alone, strict=True):
                np.testing.assert_array_equal(
                    decoder.step({"input_ids": row[None, t : t + 1]})["last_hidden_state"], answers[t]
                )


def test_a_state_can_be_read_and_set_again_to_try_several_continuations(engines: Engines) -> None:
    session = Session(engines())
    with session.decoder as decoder:
        assert decoder.state == {}
        decoder.prefill({"input_ids": tokens(2, 8)})
        state, position = decoder.state, decoder.position
        assert {name: array.shape[0] for name, array in state.items()} == {t.name: 2 for t in decoder.states}
        first = session.stepped(tokens(2, 3, seed=1))
        session.stepped(tokens(2, 2, seed=2))
        decoder.state, decoder.position = state, position
        np.testing.assert_array_equal(session.stepped(tokens(2, 3, seed=1)), first)
        # a beam of another size, from one of the samples
        decoder.state = {name: array[[0] * 4] for name, array in state.items()}
        decoder.position = position[[0] * 4]
        wide = session.stepped(np.repeat(tokens(2, 3, seed=1)[:1], 4, axis=0))
        np.testing.assert_allclose(wide[3], first[0], atol=1e-6)
        with pytest.raises(UserError, match="the state has 'x'; expected layer0_"):
            decoder.state = {"x": np.zeros(1)}


def test_a_batch_or_a_prompt_beyond_the_profile_is_one_error_and_the_state_stays(engines: Engines) -> None:
    session = Session(engines("linear", "encoder", "fp32", "batch=1:2:2,seq=1:16:32"))
    with session.decoder as decoder:
        decoder.step({"input_ids": [[5]]})
        before = decoder.state
        with pytest.raises(UserError, match="the batch size is 3, but the state is of 1"):
            decoder.step({"input_ids": [[1], [2], [3]]})
        with pytest.raises(UserError, match=r"have seq 33, batch 1; .* built for .*seq 1 to 32|have batch 1, seq 33; "):
            decoder.prefill({"input_ids": tokens(1, 33)})
        np.testing.assert_equal(decoder.state, before)
        decoder.reset()
        with pytest.raises(
            UserError, match=r"have batch 3; this engine was built for batch 1 to 2: .* --profile batch=1:3:3"
        ):
            decoder.step({"input_ids": [[1], [2], [3]]})
        assert decoder.state == {}
        decoder.step({"input_ids": [[1], [2]]})


def test_a_run_that_fails_leaves_the_state_as_it_was(engines: Engines) -> None:
    session = Session(engines())
    with session.decoder as decoder:
        session.stepped(tokens(2, 3))
        before, position = decoder.state, decoder.position
        session.api.enqueue_fails = True
        for call in (decoder.step, decoder.prefill):
            with pytest.raises(RuntimeFailedError, match="TensorRT-RTX failed on input_ids"):
                call({"input_ids": [[1], [2]]})
        session.api.enqueue_fails = False
        np.testing.assert_equal(decoder.state, before)
        np.testing.assert_array_equal(decoder.position, position)


def test_an_answer_without_elements_is_an_error_of_the_user_and_leaves_the_state_as_it_was(engines: Engines) -> None:
    session = Session(engines())
    with session.decoder as decoder:
        decoder.prefill({"input_ids": tokens(2, 3)})
        before, position = decoder.state, decoder.position
        usual = [(model, model.output_shapes) for model in session.api.models.values()]
        for model, shapes in usual:
            model.output_shapes = lambda given, shapes=shapes: {**shapes(given), decoder.outputs[0].name: (2, 0, 4)}
        for call in (decoder.step, decoder.prefill):
            with pytest.raises(UserError, match=r"is \[2, 0, 4\], which is empty, for inputs input_ids \[2, 1\]"):
                call({"input_ids": [[1], [2]]})
        for model, shapes in usual:
            model.output_shapes = shapes
        np.testing.assert_equal(decoder.state, before)
        np.testing.assert_array_equal(decoder.position, position)
        decoder.prefill({"input_ids": tokens(2, 2)})


def test_a_prefill_that_does_not_load_leaves_the_decode_step_at_work(engines: Engines) -> None:
    session = Session(engines())
    with session.decoder as decoder:
        session.stepped(tokens(1, 2))
        session.api.refuses_to_load = True
        with pytest.raises(EffexportError, match=r"does not load .*prefill\.engine: the plan is of a lamp"):
            decoder.prefill({"input_ids": [[1]]})
        session.stepped(tokens(1, 2))
    session.cuda.assert_nothing_left()


def test_a_closed_decoder_says_so_and_one_that_is_dropped_frees_its_memory(engines: Engines) -> None:
    folder = engines()
    session = Session(folder)
    decoder = session.decoder
    decoder.prefill({"input_ids": [[1, 2]]})
    decoder.close()
    for call in (decoder.step, decoder.prefill):
        with pytest.raises(EffexportError, match="this runner is closed"):
            call({"input_ids": [[1]]})
    dropped = Session(folder)
    cuda = dropped.cuda
    dropped.decoder.prefill({"input_ids": [[1, 2]]})
    del dropped
    gc.collect()
    cuda.assert_nothing_left()


def test_a_damaged_engine_closes_the_gpu_or_never_opens_it(engines: Engines) -> None:
    folder = engines()
    path = folder / engine_name("trt-rtx", PREFILL)
    info = read_sidecar(path)
    write_sidecar(path, replace(info, compute_capabilities=(89,)))
    with pytest.raises(UserError, match=r"prefill\.engine was built for SM 89, and this GPU is SM 90"):
        Session(folder)
    write_sidecar(path, replace(info, onnx_sha256="0" * 64))
    with pytest.raises(UserError, match=r"was built from another prefill\.onnx"):
        Session(folder)
