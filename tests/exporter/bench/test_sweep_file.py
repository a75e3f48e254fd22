"""SWEEP.toml: what it may say, what becomes of it, and that nothing in it is ignored."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from effexport.base.errors import UserError
from effexport.base.spec import build_spec_from_options
from effexport.bench.cells import Cell
from effexport.bench.sweep_file import MAX_CELLS, cells_from_document, cells_from_path
from effexport.models.validation import SpecError

ROOT = Path(__file__).parents[3]
PLAIN = 'variants = ["softmax", "lsh"]\nseq_lens = [64, 128]\n'


def cells_of(text: str) -> list[Cell]:
    return cells_from_document(tomllib.loads(text))


def message_of(text: str) -> str:
    with pytest.raises((SpecError, UserError)) as error:
        cells_of(text)
    return str(error.value)


def test_bfloat16_is_of_linear_layers_without_an_engine() -> None:
    cells = cells_of('variants = ["softmax"]\nprecisions = ["bf16"]\ntargets = ["onnx", "trt-rtx"]')
    assert [cell.spec.bf16 for cell in cells] == ["linear", "graph"]


def test_cells_are_the_product_of_the_axes_in_the_order_of_the_file() -> None:
    text = PLAIN + 'precisions = ["fp32", "fp16"]\ntargets = ["onnx", "trt-rtx", "trt"]\ngpus = ["sm_86", "sm_89"]'
    cells = cells_of(text)
    assert len(cells) == 2 * 2 * 2 * (1 + 2 + 2)
    assert len({cell.id for cell in cells}) == len(cells)
    assert [cell.title for cell in cells[:6]] == [
        "softmax, 64 tokens, fp32, onnx",
        "softmax, 64 tokens, fp32, trt-rtx, sm_86",
        "softmax, 64 tokens, fp32, trt-rtx, sm_89",
        "softmax, 64 tokens, fp32, trt, sm_86",
        "softmax, 64 tokens, fp32, trt, sm_89",
        "softmax, 64 tokens, fp16, onnx",
    ]
    rtx, trt = cells[1].engine, cells[3].engine
    assert rtx is not None
    assert rtx.compute_capabilities == (86,)
    assert trt is not None
    assert trt.compute_capabilities == ()
    assert [cell.needs_gpu for cell in cells[:4]] == [False, False, False, True]


def test_what_the_file_leaves_out_has_the_defaults_of_the_specs() -> None:
    (cell,) = cells_of('variants = ["nystrom"]')
    assert cell.spec == build_spec_from_options({"variant": "nystrom"}, None)
    assert cell.engine is None


def test_options_reach_the_cells_that_they_are_for() -> None:
    text = PLAIN.replace('"lsh"', '"lsh", "lsh:num_hashes=4:chunk_length=8"')
    text += '[build]\nscope = "attention"\ndim = 32\nbatch = 3\nseed = 7\n[options.lsh]\nchunk_length = 16\n'
    cells = cells_of(text)
    chunks = [getattr(cell.spec.attention, "chunk_length", None) for cell in cells]
    assert chunks == [None, None, 16, 16, 8, 8]
    assert {(cell.spec.model.scope, cell.spec.attention.dim, cell.spec.batch, cell.spec.seed) for cell in cells} == {
        ("attention", 32, 3, 7)
    }
    assert [cell.label for cell in cells[2::2]] == ["lsh", "lsh, num_hashes=4, chunk_length=8"]


def test_engine_options_are_common_or_of_one_target() -> None:
    text = 'variants = ["softmax"]\ntargets = ["trt", "trt-rtx"]\n[engine]\noptimization_level = 2\n'
    text += 'profiles = ["batch=1:2:8"]\n[engine.trt]\noptimization_level = 4\nversion_compatible = true\n'
    trt, rtx = (cell.engine for cell in cells_of(text))
    assert trt is not None
    assert rtx is not None
    assert (trt.optimization_level, trt.version_compatible) == (4, True)
    assert (rtx.optimization_level, rtx.version_compatible) == (2, False)
    assert str(rtx.profiles[0]).startswith("batch=1:2:8,seq=")


def test_excludes_take_away_and_includes_add() -> None:
    text = PLAIN + '[[exclude]]\nvariant = "lsh"\nseq_len = [128, 64]\n'
    text += '[[include]]\nvariant = "lsh"\nseq_len = 256\nprecision = "fp16"\nnum_hashes = 8\n'
    text += '[[include]]\nvariant = "softmax"\nseq_len = 64\n'
    cells = cells_of(text)
    assert [cell.title for cell in cells] == [
        "softmax, 64 tokens, fp32, onnx",
        "softmax, 128 tokens, fp32, onnx",
        "lsh, 8 rounds, 256 tokens, fp16, onnx",
    ], "an include that says what the product has is the same cell"


def test_the_hash_is_of_everything_that_decides_the_result_and_of_nothing_else() -> None:
    text = 'variants = ["softmax", "lsh"]\ntargets = ["onnx", "trt-rtx"]\nseq_lens = [64, 128]\n'
    before = {cell.title: cell.digest for cell in cells_of(text)}
    reordered = text.replace("[64, 128]", "[256, 128, 64]").replace('"softmax", "lsh"', '"lsh", "softmax"')
    after = {cell.title: cell.digest for cell in cells_of(reordered)}
    assert {title: after[title] for title in before} == before
    for change in ("[build]\nseed = 1", "[build]\nbatch = 2", "[build]\ncausal = true", "[build]\nfused = false"):
        changed = {cell.digest for cell in cells_of(f"{text}{change}")}
        assert changed.isdisjoint(before.values()), change
    engine = {cell.title: cell.digest for cell in cells_of(f"{text}[engine]\ntf32 = true")}
    assert {title for title in before if engine[title] != before[title]} == {
        title for title in before if "rtx" in title
    }
    (cell, *_) = cells_of(text)
    newer = Cell(label=cell.label, spec=cell.spec, versions={**cell.versions, "torch": "9.9"})
    assert newer.digest != cell.digest


def test_cells_survive_the_way_to_another_machine() -> None:
    text = PLAIN + 'targets = ["onnx", "trt-rtx"]\ngpus = ["sm_89"]\n[build]\nnum_hashes = 2\n'.replace(
        "[build]\nnum_hashes", "[options.lsh]\nnum_buckets = [4, 8]\nnum_hashes"
    )
    for cell in cells_of(text):
        again = Cell.from_dict(cell.to_dict())
        assert again == cell
        assert again.id == cell.id


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file has no variants; expected a list such as"),
        ('variants = ["softmax"]\nlengths = [64]', "unknown key 'lengths'; did you mean 'seq_lens'?"),
        ('variants = ["sofmax"]', "unknown variant 'sofmax' in variants; did you mean 'softmax'?"),
        ('variants = "softmax"', "variants is 'softmax'; expected a list, such as variants = [\"softmax\"]"),
        ("variants = []", "variants is empty; expected at least one value"),
        ('variants = ["lsh", "lsh"]', "variants has 'lsh' twice"),
        ("variants = [3]", "variants has 3; expected names such as"),
        (PLAIN.replace("64", '"64"'), "seq_lens has '64'; expected lengths in tokens"),
        (PLAIN.replace("64", "0"), "seq_lens has 0; expected lengths in tokens"),
        (PLAIN.replace("64", "true"), "seq_lens has True; expected lengths in tokens"),
        (PLAIN.replace("64", "128"), "seq_lens has 128 twice"),
        (
            PLAIN + 'precisions = ["fp7"]',
            "precisions has 'fp7'; did you mean 'fp8'? Expected: fp32, fp16, bf16, int8, fp8",
        ),
        (PLAIN + 'targets = ["tensorrt"]', "targets has 'tensorrt'"),
        (PLAIN + 'targets = ["trt"]\ngpus = ["H100"]', "gpus has 'H100'; expected architectures by their compute"),
        (PLAIN + 'gpus = ["sm_89"]', "gpus is for engines, and no target asks for one"),
        (PLAIN + "[engine]\ntf32 = true", "engine is for engines, and no target asks for one"),
        (PLAIN + 'targets = ["trt-rtx"]\n[engine.trt]\ntf32 = true', "[engine.trt] is for a target that the sweep"),
        (PLAIN + 'targets = ["trt"]\n[engine]\ntf32 = 1', "tf32 of [engine] is 1; expected true or false"),
        (PLAIN + 'targets = ["trt"]\n[engine]\nlevel = 1', "[engine] has an unknown key 'level'"),
        (PLAIN + 'targets = ["trt"]\n[engine]\nprofiles = "seq=1"', "profiles of [engine] is 'seq=1'; expected a list"),
        (PLAIN + 'targets = ["trt"]\n[engine]\nprofiles = ["seq"]', "cannot read the profile 'seq'"),
        (PLAIN + "[build]\nseq_len = 4", "[build] has seq_len, which a sweep varies; give seq_lens = [4]"),
        (PLAIN + "[build]\nnum_hashes = 4", "[build] has num_hashes, a field of single variants; expected it under"),
        (PLAIN + "[build]\nhead = 4", "[build] has an unknown key 'head'; did you mean 'heads'?"),
        (
            PLAIN + "[build]\nheads = 3",
            "the cell softmax, 64 tokens, onnx cannot be built: dim 256 cannot be split into 3",
        ),
        (PLAIN + '[build]\ndim = "x"', "dim is 'x'; expected an integer"),
        (PLAIN + "[options]\nlsh = 3", "[options] has lsh = 3; expected a table, [options.lsh]"),
        (PLAIN + "[options.lsch]\nnum_hashes = 3", "[options] has an unknown key 'lsch'; did you mean 'lsh'?"),
        (PLAIN + "[options.linear]\neps = 1e-6", "[options.linear] is for a variant that the sweep does not have"),
        (PLAIN + "[options.lsh]\nwindow = 3", "[options.lsh] has an unknown key 'window'"),
        (PLAIN + "[options.lsh]\nnum_buckets = 3", "num_buckets is 3; each count must be even"),
        (PLAIN + '[[exclude]]\nvariant = "linear"', "[[exclude]] with variant = ['linear'] matches no cell"),
        (PLAIN + '[[exclude]]\nvariant = ["lsh", "softmax"]', "the sweep is empty: [[exclude]] removes all 4 cells"),
        (
            PLAIN + "[[exclude]]\nseq_lens = [64]",
            "an [[exclude]] has an unknown key 'seq_lens'; did you mean 'seq_len'?",
        ),
        (PLAIN + "[[exclude]]", "an [[exclude]] is empty"),
        (PLAIN + "[[include]]\nseq_len = 64", "an [[include]] has no variant"),
        (
            PLAIN + '[[include]]\nvariant = "lsh"\nwindow = 3',
            "window does not apply to lsh, only to: aft-local, window; leave it out",
        ),
        (PLAIN + '[exclude]\nvariant = "lsh"', "each under [[exclude]]"),
        (
            PLAIN + 'targets = ["trt-rtx"]\ngpus = ["sm_90"]',
            "TensorRT-RTX does not build for SM 90; expected some of: 75, 80, 86, 89, 120, 121",
        ),
        ('variants = ["nystrom"]\n[build]\ncausal = true', "nystrom attention has no causal form"),
    ],
)
def test_whatever_is_wrong_is_named_with_what_was_expected(text: str, said: str) -> None:
    assert said in message_of(text)


def test_an_impossible_cell_comes_with_the_exclude_that_leaves_it_out() -> None:
    text = PLAIN + 'targets = ["onnx", "trt-rtx"]\ngpus = ["sm_89", "sm_90"]\n'
    message = message_of(text)
    assert '[[exclude]] with some of variant = "softmax", seq_len = 64, target = "trt-rtx", gpu = "sm_90"' in message
    assert len(cells_of(text + '[[exclude]]\ntarget = "trt-rtx"\ngpu = "sm_90"')) == 8


def test_a_product_beyond_what_anybody_meant_is_refused_before_it_is_made() -> None:
    lengths = ", ".join(map(str, range(1, MAX_CELLS + 2)))
    assert f"expected at most {MAX_CELLS:,}: split it" in message_of(f'variants = ["lsh"]\nseq_lens = [{lengths}]')


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no sweep file at"),
        (b"variants = [", "cannot read the sweep file"),
        (b"\xff", "cannot read the sweep file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_message(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "sweep.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        cells_from_path(path)


def example_of_the_documentation() -> str:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8"), re.DOTALL)
    return str(example)


def test_the_example_of_the_documentation_is_a_sweep() -> None:
    cells = cells_of(example_of_the_documentation())
    counts: dict[str, Any] = {}
    for cell in cells:
        counts[cell.target] = counts.get(cell.target, 0) + 1
    assert counts == {"onnx": 17, "trt-rtx": 15, "trt": 18}
