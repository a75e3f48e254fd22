"""Files of other exporters beside the module, an artifact or another file: right ones pass, and each fault is found by
the check that is meant for it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import onnx
import proven_models
import pytest
import torch
from onnx import TensorProto, helper
from proven_models import Edit, edited
from slow_cases import soak
from small_builds import built_artifact
from small_specs import spec_of

import effexport
from effexport.base.dtypes import TensorInfo
from effexport.base.errors import UserError
from effexport.models.user.inputs import ModuleInput, ModuleInputs
from effexport.proof.check import Kind
from effexport.proof.matching import (
    Offer,
    guessed_inputs,
    matched_inputs,
    named_axes,
    offers_of,
    with_sizes_of_module,
    with_sums,
)
from effexport.proof.prove import precision_of_file

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Files = Callable[..., Path]
MODULE = "proven_models:masked"
EXAMPLE = "proven_models:with_example"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Exports the module once for each way."""
    folder = tmp_path_factory.mktemp("files")

    def make(edit: Edit | None = None, **way: bool) -> Path:
        name = "-".join(f"{key}-{value}" for key, value in way.items())
        path = folder / f"plain{name}.onnx"
        if not path.exists():
            proven_models.exported(path, **way)
        return path if edit is None else edited(path, folder / f"{edit.__name__}.onnx", edit)

    return make


def failed(report: Any) -> set[str]:
    return {str(check.kind) for check in report.checks if check.status == "failed"}


def half(model: onnx.ModelProto) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model.CopyFrom(convert_float_to_float16(model, keep_io_types=True))


def half_inside_and_out(model: onnx.ModelProto) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model.CopyFrom(convert_float_to_float16(model))


@pytest.mark.slow
def test_a_file_of_torch_is_equal_to_the_module(files: Files) -> None:
    report = effexport.prove(files(), proven_models.masked(), proven_models.example())
    assert report.verdict == "passed", report.sentence
    kinds = {str(check.kind) for check in report.checks if check.status == "passed"}
    assert {"arithmetic", "overall error", "repeatable", "finite", "reference", "batch invariance"} <= kinds
    shapes = {check.case.shape for check in report.checks}
    assert len(shapes) >= 5, shapes
    assert any(check.case.padded for check in report.checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "way", "module", "note"),
    [
        (None, {"legacy": True}, MODULE, ""),
        (half, {}, EXAMPLE, "The file has numbers in fp16, so the limits are those of fp16."),
        (proven_models.other_names, {}, MODULE, "The input tokens.1 of the file is input_ids of"),
        soak((None, {"free": False}, MODULE, "batch is 2 in the file, which was compared at that size only.")),
        soak((half_inside_and_out, {}, MODULE, "limits are those of fp16")),
        soak((proven_models.swapped, {}, MODULE, "")),
        soak((proven_models.int32_inputs, {}, EXAMPLE, "")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)) if not isinstance(value, str) else "",
)
def test_a_right_file_is_equal(files: Files, edit: Edit | None, way: dict[str, bool], module: str, note: str) -> None:
    report = effexport.prove(files(edit, **way), module)
    assert report.verdict == "passed", (report.sentence, failed(report))
    assert any(note in one for one in report.notes) or not note, report.notes
    compared = [check for check in report.checks if check.kind == "arithmetic"]
    assert compared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "way", "expected"),
    [
        (proven_models.free_in_name, {"free": False}, {"runs"}),
        (proven_models.transposed, {}, {"signature"}),
        soak((proven_models.other_weights, {}, {"arithmetic", "overall error"})),
        soak((proven_models.without_mask, {}, {"arithmetic", "overall error"})),
        soak((proven_models.unscaled, {}, {"arithmetic", "overall error"})),
        (proven_models.noisy, {}, {"repeatable"}),
        (proven_models.integers, {}, {"signature", "arithmetic"}),
        (proven_models.infinite, {}, {"finite"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_file_fails_in_the_check_for_it(
    files: Files, edit: Edit, way: dict[str, bool], expected: set[str]
) -> None:
    report = effexport.prove(files(edit, **way), EXAMPLE)
    assert report.verdict == "failed"
    assert expected <= failed(report)


@pytest.mark.slow
def test_a_fault_is_traced_to_its_node(files: Files) -> None:
    report = effexport.prove(files(proven_models.without_mask), MODULE)
    assert report.divergence.startswith("first divergence: value `masked_fill`"), report.divergence
    padded = {check.case.name for check in report.checks if check.status == "failed"}
    assert padded
    assert padded <= {"padded batch", "padded single", "nothing kept"}


@pytest.mark.slow
def test_two_files_are_compared(files: Files) -> None:
    """One of them renames everything, so that matches are by type; a file with one size decides the sizes."""
    plain, fixed = files(), files(free=False)
    report = effexport.prove(files(proven_models.other_names), plain)
    assert (report.verdict, report.reference) == ("passed", str(plain))
    report = effexport.prove(plain, fixed)
    assert report.verdict == "passed", (report.sentence, failed(report))
    assert any("is free in the file, and" in note and "takes 12 only" in note for note in report.notes)
    report = effexport.prove(files(proven_models.other_weights), plain)
    assert "arithmetic" in failed(report)


@pytest.mark.slow
def test_an_artifact_judges_a_file_without_pytorch(files: Files, tmp_path: Path) -> None:
    built = effexport.build(module=EXAMPLE, output=tmp_path / "built")
    for edit, code in ((None, 0), (proven_models.other_names, 0), (half, 0), (proven_models.other_weights, 1)):
        words = [sys.executable, "-c", WITHOUT_TORCH, "prove", str(files(edit)), "--against", str(built.path), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert json.loads(done.stdout)["passed"] == (code == 0)


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from effexport.cli.main import main; main(sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"precision": "int8"}, {"precision": "bf16", "bf16": "linear"}], ids=str)
def test_the_file_of_a_quantised_artifact_has_the_limits_of_the_artifact(fields: dict[str, Any]) -> None:
    """It keeps numbers in another precision than it computes everything else in."""
    folder = built_artifact(spec_of("softmax", **fields))
    report = effexport.prove(folder / "model.onnx", against=folder)
    assert report.verdict == "passed"
    assert not [note for note in report.notes if "limits" in note]
    assert Kind.GIVEN_ROUNDINGS in {check.kind for check in report.checks}


@pytest.mark.slow
@pytest.mark.requires("native")
@pytest.mark.parametrize(("file", "artifact"), [("fp16", "fp32"), ("fp32", "fp16")])
def test_the_coarser_of_two_precisions_has_the_limits(file: str, artifact: str) -> None:
    """Also those of the function bodies, which run because a kernel does."""
    subject, against = (built_artifact(spec_of("linear", precision=one)) for one in (file, artifact))
    report = effexport.prove(subject / "model.onnx", against=against)
    assert report.verdict == "passed", report.sentence
    assert Kind.FUNCTION_BODIES in {check.kind for check in report.checks}
    assert [note for note in report.notes if note.endswith("so the limits are those of fp16.")] != []


def test_the_command_writes_reports_and_exits_with_1(files: Files, tmp_path: Path, cli: Callable[..., Any]) -> None:
    xml, page = tmp_path / "report.xml", tmp_path / "report.html"
    wrong = files(proven_models.other_weights)
    assert cli("prove", wrong, "--against", MODULE, "-o", xml).code == 1
    suite = ElementTree.parse(xml).getroot()[0]
    assert int(suite.attrib["failures"]) > 0
    assert f"effexport prove {wrong} --against {MODULE}" in xml.read_text()
    assert cli("prove", files(), "--against", MODULE, "-o", page).code == 0
    assert "Build it again" not in page.read_text()


def test_what_cannot_be_compared_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"

    def refused(inputs: list[str], op: str, domain: str, against: object) -> str:
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 8]) for name in inputs]
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])
        graph = helper.make_graph([helper.make_node(op, inputs[:1], ["y"], domain=domain)], "g", values, [output])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), str(path))
        with pytest.raises(UserError) as error:
            effexport.prove(path, against)  # type: ignore[arg-type]
        return str(error.value)

    module = proven_models.masked()
    assert "model.onnx has operators that nothing here can run: far::Odd; expected" in refused(
        ["x"], "Odd", "far", module
    )
    message = refused(["x", "y2", "z"], "Relu", "", module)
    assert "Masked does not take" in message
    assert "z float32 [batch, 8]" in message
    assert "the file does not take attention_mask" in refused(["x"], "Relu", "", module)
    assert "there is no such path" in refused(["x"], "Relu", "", "nowhere")
    assert "<class" in refused(["x"], "Relu", "", proven_models.Masked)


IDS, KEEP = TensorInfo("a", "int64", ("n", "s")), TensorInfo("b", "bool", ("n", "s"))


def test_inputs_are_matched_by_name_then_by_type() -> None:
    offers = [Offer("mask", "b", ("x", "y"), is_needed=True), Offer("ids", "i", ("x", "y"), is_needed=True)]
    match = matched_inputs(Path("m"), [IDS, KEEP], offers, "net")
    assert match.names == {"a": "ids", "b": "mask"}
    assert match.notes == (
        "The input a of the file is ids of net, by type and shape.",
        "The input b of the file is mask of net, by type and shape.",
    )
    assert matched_inputs(Path("m"), [IDS, KEEP], offers_of([KEEP, IDS]), "net").notes == ()
    same = [Offer(name, "i", ("x", "y"), is_needed=True) for name in ("first", "second")]
    other = TensorInfo("c", "int32", ("n", "s"))
    assert "the first of 2 that fit" in matched_inputs(Path("m"), [IDS, other], same, "net").notes[0]


@pytest.mark.parametrize(
    ("tensors", "merged", "expected"),
    [
        ([IDS, KEEP], False, [("batch", "seq"), ("batch", "seq")]),
        ([TensorInfo("x", "float32", (4, 16, 8))], False, [("batch", "seq", 8)]),
        ([TensorInfo("x", "float32", ("n", 3, "h", "w"))], False, [("batch", 3, "h_size", "w_size")]),
        ([TensorInfo("x", "float32", ("n", 16, "time"))], False, [("batch", 16, "time_size")]),
        ([IDS, TensorInfo("b", "int64", ("n2", "s2"))], False, [("batch", "seq"), ("n2_size", "s2_size")]),
        ([IDS, TensorInfo("b", "int64", ("n2", "s2"))], True, [("batch", "seq"), ("batch", "seq")]),
        ([TensorInfo("a", "int64", ("?", "?"))], False, [("batch", "seq")]),
        ([IDS, TensorInfo("b", "float32", ("n", 1, "s", "s"))], False, [("batch", "seq"), ("batch", 1, "seq", "seq")]),
        (
            [IDS, TensorInfo("b", "int64", ("n", "p + s")), TensorInfo("c", "float32", ("n", 4, "p", 8))],
            False,
            [("batch", "seq"), ("batch", "p_size+seq"), ("batch", 4, "p_size", 8)],
        ),
        ([IDS, TensorInfo("b", "int64", ("n", "s + 1"))], True, [("batch", "seq"), ("batch", "seq+1")]),
        ([IDS, TensorInfo("b", "int64", ("n", "p + s"))], False, [("batch", "seq"), ("batch", "p___s_size")]),
    ],
)
def test_axes_of_a_file_are_named(
    tensors: list[TensorInfo], merged: bool, expected: list[tuple[int | str, ...]]
) -> None:
    assert list(named_axes(tensors, merged=merged).values()) == expected


@pytest.mark.parametrize(
    ("names", "second"),
    [(("s43", "s53", "s72", "s70"), ("batch", "seq")), (("n", "s", "m", "t"), ("m_size", "t_size"))],
    ids=["made up by torch.onnx", "chosen by a user"],
)
def test_made_up_names_of_axes_are_first_taken_for_one(names: tuple[str, ...], second: tuple[str, str]) -> None:
    tensors = [TensorInfo("ids", "int64", names[:2]), TensorInfo("keep", "int64", names[2:])]
    guess = guessed_inputs(tensors, {"ids": "ids", "keep": "keep"}, {})[0]
    assert [one.dims for one in guess.inputs] == [("batch", "seq"), second]


def test_axes_of_images_are_free_as_far_as_the_module_takes_other_sizes() -> None:
    class Images(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.conv2d(x, torch.ones(4, 3, 3, 3)).unflatten(3, (-1, 6))

    file = (TensorInfo("x", "float32", ("n", "c", "h", "w")),)
    (found,) = with_sizes_of_module(file, Images(), {}, {"x": torch.ones(2, 3, 10, 8)})
    assert found.dims == ("n", 3, "h", 8)


class Cached(torch.nn.Module):
    """Takes a mask of its cache and its tokens."""

    def __init__(self, tokens: int | None = None) -> None:
        super().__init__()
        self.tokens, self.linear = tokens, torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, past: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        assert self.tokens in (None, past.shape[2])
        return self.linear(torch.cat([past[:, 0], x], 1)) * keep[..., None]


CACHED = {"x": torch.ones(2, 16, 8), "past": torch.ones(2, 1, 5, 8), "keep": torch.ones(2, 21, dtype=torch.int64)}


def test_a_sum_keeps_the_size_that_the_module_takes() -> None:
    dims = {"x": ("n", "s", 8), "past": ("n", 1, "p", 8), "keep": ("n", "p + s")}
    file = [TensorInfo(name, "float32", own) for name, own in dims.items()]
    assert [found.dims for found in with_sizes_of_module(file, Cached(), {}, CACHED)] == list(dims.values())
    fixed = with_sizes_of_module(file, Cached(5), {}, CACHED)
    assert [found.dims for found in fixed] == [("n", "s", 8), ("n", 1, 5, 8), ("n", "5 + s")]
    assert named_axes(fixed, merged=False)["keep"] == ("batch", "5+seq")


@pytest.mark.parametrize(
    ("mask", "size", "expected"),
    [
        (TensorInfo("keep", "int64", ("n", "total")), 21, "p + s"),
        (TensorInfo("keep", "bool", ("n", "past_len + seq_len")), 21, "p + s"),
        (TensorInfo("keep", "int64", ("n", "total")), 20, "total"),
        (TensorInfo("keep", "int64", ("n", "p")), 5, "p"),
        (TensorInfo("keep", "float32", ("n", "total")), 21, "total"),
        (TensorInfo("keep", "int64", ("n", 21)), 21, 21),
    ],
)
def test_a_mask_of_cached_and_new_tokens_is_known_by_its_sizes(
    mask: TensorInfo, size: int, expected: int | str
) -> None:
    file = [TensorInfo("x", "float32", ("n", "s", 8)), TensorInfo("past", "float32", ("n", 1, "p", 8)), mask]
    found = with_sums(file, CACHED | {"keep": torch.ones(2, size)})
    assert found == (*file[:2], TensorInfo("keep", mask.dtype, ("n", expected)))


def test_axes_whose_sizes_add_up_by_chance_are_no_sum() -> None:
    ids, mask = TensorInfo("ids", "int64", ("b", "s")), TensorInfo("keep", "int64", ("m", "t"))
    cache = TensorInfo("past", "float32", ("b", "h", "p", 4))
    example = {"ids": torch.ones(2, 6), "keep": torch.ones(2, 8), "past": torch.ones(2, 2, 2, 4)}
    assert with_sums([ids, mask], example) == (ids, mask)
    # heads, too, are as many as tokens in the cache
    assert with_sums([ids, mask, cache], example)[1].dims == ("m", "p + s")
    tokens = example | {"keep": torch.full((2, 8), 7)}  # which are no mask
    assert with_sums([ids, mask, cache], tokens)[1] == mask


def test_a_fixed_length_is_fixed_in_sums() -> None:
    dims: dict[str, tuple[int | str, ...]] = {"x": ("batch", "seq"), "keep": ("batch", "past+seq"), "y": ("seq+1",)}
    inputs = ModuleInputs(
        inputs=tuple(ModuleInput(name=name, dims=own) for name, own in dims.items()), sizes={"seq": 3, "past": 2}
    )
    assert [one.dims for one in inputs.without_seq().inputs] == [("batch", 3), ("batch", "past+3"), (4,)]


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "notes"), [("p + s", 0), ("total", 1)], ids=["named as a sum", "another name"])
def test_a_mask_of_cache_and_tokens_has_the_size_of_both(axis: str, notes: int, tmp_path: Path) -> None:
    """optimum-onnx names this axis with the sum, and onnxruntime-genai otherwise."""
    module, path = Cached().eval(), tmp_path / "cached.onnx"
    free = {"x": {0: "n", 1: "s"}, "past": {0: "n", 2: "p"}, "keep": {0: "n", 1: axis}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = list(CACHED)
        torch.onnx.export(
            module, tuple(CACHED.values()), path, input_names=names, dynamic_axes=free, dynamo=False, verbose=False
        )
    report = effexport.prove(path, module, CACHED)
    assert report.verdict == "passed", report.sentence
    assert len({check.case.shape for check in report.checks}) >= 5
    assert sum("cached and new tokens" in note for note in report.notes) == notes


def test_a_cast_to_float16_among_weights_in_float32_widens_no_limit() -> None:
    def precision(*weights: int, unread: int | None = None) -> str:
        nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)]
        nodes += [helper.make_node("Identity", [f"w{kind}"], [f"of{kind}"]) for kind in weights if kind != unread]
        values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])]
        tensors = [helper.make_tensor(f"w{kind}", kind, [1], [0]) for kind in weights]
        return precision_of_file(helper.make_model(helper.make_graph(nodes, "g", values, values, tensors)))

    assert precision() == "fp16"
    assert precision(TensorProto.FLOAT) == "fp32"
    assert precision(TensorProto.FLOAT, TensorProto.BFLOAT16) == "bf16"
    assert precision(TensorProto.FLOAT, TensorProto.BFLOAT16, unread=TensorProto.BFLOAT16) == "fp32"
