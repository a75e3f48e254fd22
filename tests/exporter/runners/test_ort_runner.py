"""`effexport.load`: a runner that answers as PyTorch did, or says precisely what is wrong with its input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import effexport
from effexport.artifact import Artifact
from effexport.base.dtypes import TensorInfo
from effexport.base.errors import EffexportError, MissingExtraError, UserError
from effexport.proof.cases import load_reference
from effexport.proof.tolerances import arithmetic_limit, relative_error
from effexport.runners.runner import Runner

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
Feeds = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def encoder(built: Built) -> Iterator[Runner]:
    with effexport.load(built("softmax", "encoder").path) as runner:
        yield runner


@pytest.fixture(scope="module")
def attention(built: Built) -> Iterator[Runner]:
    with effexport.load(str(built("softmax", "attention").path)) as runner:
        yield runner


def ids(batch: int = 2, seq_len: int = 10) -> np.ndarray:
    return np.random.default_rng(0).integers(2, 258, (batch, seq_len))


def ones(batch: int = 2, seq_len: int = 10) -> np.ndarray:
    return np.ones((batch, seq_len), dtype=np.int64)


def test_inputs_and_outputs_have_name_dtype_and_dims(encoder: Runner, attention: Runner) -> None:
    mask = TensorInfo("attention_mask", "int64", ("batch", "seq"))
    assert encoder.inputs == (TensorInfo("input_ids", "int64", ("batch", "seq")), mask)
    assert encoder.outputs == (TensorInfo("last_hidden_state", "float32", ("batch", "seq", 32)),)
    assert attention.inputs == (TensorInfo("hidden_states", "float32", ("batch", "seq", 32)), mask)


def test_a_run_gives_the_golden_answer(built: Built, variant: str, scope: str) -> None:
    artifact = built(variant, scope)
    limit = arithmetic_limit(artifact.spec)  # nothing hashes differently in float32, so it holds for lsh as well
    with effexport.load(artifact.path) as runner:
        for case in load_reference(artifact.reference_path):
            (given,), (expected,) = runner.run(case.inputs).values(), case.outputs.values()
            assert given.shape == expected.shape
            for row, keep in enumerate(case.keep):
                assert relative_error(given[row][keep], expected[row][keep])[0] <= limit.value, limit.reason


def test_a_missing_mask_means_no_padding(encoder: Runner) -> None:
    (without,) = encoder.run({"input_ids": ids()}).values()
    (with_ones,) = encoder.run({"input_ids": ids(), "attention_mask": ones()}).values()
    assert np.array_equal(without, with_ones)


def test_the_mask_is_not_ignored(encoder: Runner) -> None:
    mask = ones()
    mask[:, 5:] = 0
    (padded,) = encoder.run({"input_ids": ids(), "attention_mask": mask}).values()
    (without,) = encoder.run({"input_ids": ids()}).values()
    assert not np.allclose(padded[:, :5], without[:, :5])


def test_inputs_may_come_in_any_order_and_layout(encoder: Runner) -> None:
    wide = np.repeat(ids(), 2, axis=1)
    (strided,) = encoder.run({"attention_mask": ones(), "input_ids": wide[:, ::2]}).values()
    (plain,) = encoder.run({"input_ids": ids()}).values()
    assert np.array_equal(strided, plain)


def test_input_arrays_are_not_changed(attention: Runner) -> None:
    hidden = np.random.default_rng(0).standard_normal((2, 9, 32), dtype=np.float32)
    before = hidden.copy()
    feeds = {"hidden_states": hidden}
    attention.run(feeds)
    assert np.array_equal(hidden, before)
    assert list(feeds) == ["hidden_states"]


def test_read_only_inputs_work(encoder: Runner) -> None:
    frozen = ids()
    frozen.flags.writeable = False
    encoder.run({"input_ids": frozen})


def test_a_closed_runner_says_so(built: Built) -> None:
    with effexport.load(built("softmax", "encoder").path) as runner:
        runner.run({"input_ids": ids()})
    with pytest.raises(EffexportError, match="this runner is closed; load the artifact again"):
        runner.run({"input_ids": ids()})
    runner.close()


def test_eight_threads_get_the_bits_of_one(encoder: Runner) -> None:
    inputs = [np.random.default_rng(i).integers(0, 258, (1 + i % 3, 5 + 7 * (i % 8))) for i in range(48)]
    alone = [encoder.run({"input_ids": x})["last_hidden_state"] for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda x: encoder.run({"input_ids": x})["last_hidden_state"], inputs))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"input_id": ids()}, r"unknown input 'input_id'; did you mean 'input_ids'\? Expected: input_ids int64 \["),
        ({"input_ids": ids(), "hidden_states": ids()}, "unknown input 'hidden_states'"),
        ({}, r"input 'input_ids' is missing; expected: input_ids int64 \[batch, seq\]"),
        ({"attention_mask": ones()}, "input 'input_ids' is missing"),
        ({"input_ids": ids().astype(np.int32)}, r"is int32 \[2, 10\]; expected input_ids int64 .*\.astype\('int64'\)"),
        ({"input_ids": ids().astype(float)}, r"is float64 .*expected input_ids int64"),
        ({"input_ids": ids()[0]}, r"is int64 \[10\], of rank 1; expected rank 2: input_ids int64 \[batch, seq\]"),
        ({"input_ids": np.int64(3)}, "of rank 0; expected rank 2"),
        ({"input_ids": [["a"]]}, "expected input_ids int64"),
        ({"input_ids": ids(), "attention_mask": ones(3)}, r"batch is 2 in 'input_ids'; expected the same batch"),
        ({"input_ids": ids(), "attention_mask": ones(2, 9)}, "seq is 10 in 'input_ids'; expected the same seq"),
        ({"input_ids": ids(), "attention_mask": ones() > 0}, r"is bool .*expected attention_mask int64"),
        ({"input_ids": ids(0)}, "which is empty; expected at least one element"),
        ({"input_ids": ids(2, 0)}, "which is empty"),
        ({"input_ids": ids(1, 65)}, r"has 65 tokens; this model has positions for 64: .*larger --seq-len"),
        ({"input_ids": ids() + 256}, r"input_ids contains 5\d\d; expected 0 to 257"),
        ({"input_ids": ids() - 500}, r"input_ids contains -\d+; expected 0 to 257"),
        (
            {"input_ids": ids(), "attention_mask": ones() * 2},
            "values other than 0 and 1; expected 1 for tokens to keep",
        ),
        ({"input_ids": ids(), "attention_mask": ones() - 2}, "values other than 0 and 1"),
    ],
)
def test_a_wrong_input_says_what_was_given_and_expected(encoder: Runner, feeds: Feeds, message: str) -> None:
    with pytest.raises(UserError, match=message):
        encoder.run(feeds)
    assert encoder.run({"input_ids": ids()}), "a refused input does not spoil the runner"


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 10, 31), "float32", r"is float32 \[2, 10, 31\]; expected hidden_states float32 \[batch, seq, 32\]"),
        ((2, 10), "float32", "of rank 2; expected rank 3"),
        ((2, 10, 32), "float16", "is float16"),
        ((2, 10, 32), "float64", r"is float64 .*\.astype\('float32'\)"),
    ],
)
def test_wrong_hidden_states_say_what_was_expected(
    attention: Runner, shape: tuple[int, ...], dtype: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        attention.run({"hidden_states": np.zeros(shape, dtype)})


def test_an_attention_layer_runs_beyond_the_length_it_was_exported_for(attention: Runner) -> None:
    (output,) = attention.run({"hidden_states": np.ones((1, 200, 32), np.float32)}).values()
    assert output.shape == (1, 200, 32)


def test_without_onnxruntime_the_error_names_the_extra(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    path = built("softmax", "encoder").path
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr("effexport.base.runtimes.Package.version", None)
    with pytest.raises(MissingExtraError, match=r"onnxruntime is not installed; .*pip install 'effexport\[cpu\]'"):
        effexport.load(path)


def test_a_model_that_fails_while_running_is_an_expected_error() -> None:
    """A graph that hard-codes a length, say after someone's optimisation, is a bad model and no bug of ours."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from effexport.runners.ort.runner import OrtRunner

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    shape = numpy_helper.from_array(np.array([2, 3]), "shape")
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    graph = helper.make_graph([node], "fixed", [x], [y], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    runner = OrtRunner(model.SerializeToString())
    assert runner.run({"x": np.zeros(6, np.float32)})["y"].shape == (2, 3)
    with pytest.raises(EffexportError, match=r"ONNX Runtime failed on x \[7\]: ") as failure:
        runner.run({"x": np.zeros(7, np.float32)})
    assert failure.value.exit_code == 1
