"""The cases of a benchmark, and its messages about impossible ones."""

from __future__ import annotations

import pytest

from effexport.base.errors import UserError
from effexport.base.formatting import lengths, numbers, words
from effexport.bench.grid import Grid, Model, models_from_text
from effexport.bench.presets import PRESETS, published_of
from effexport.models.attention_spec import attention_spec
from effexport.models.variants.lsh import LSHSpec


def test_cases_are_every_combination_shorter_sequences_first() -> None:
    grid = Grid(models=models_from_text("softmax,lsh"), seq_lens=(128, 64), batches=(2, 1), runtimes=("torch", "ort"))
    cases = list(grid.cases())
    assert len(cases) == 2 * 2 * 2 * 2
    assert [(case.seq_len, case.batch, case.label, case.runtime) for case in cases[:5]] == [
        (64, 1, "softmax", "torch"),
        (64, 1, "softmax", "ort"),
        (64, 1, "lsh", "torch"),
        (64, 1, "lsh", "ort"),
        (64, 2, "softmax", "torch"),
    ]


def test_the_spec_of_a_case_has_the_measured_length_and_the_options() -> None:
    case = next(Grid(models=models_from_text("lsh:num_hashes=4"), seq_lens=(300,), heads=2, head_dim=16).cases())
    spec = case.spec
    assert isinstance(spec.model, LSHSpec)
    assert (spec.model.seq_len, spec.model.num_hashes, spec.model.dim, spec.fused) == (300, 4, 32, True)
    # as `effexport build` makes it
    assert spec.model.chunk_length == 64


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("softmax", "softmax"),
        ("nystrom:num_landmarks=32", "nystrom-32"),
        ("lsh:num_hashes=4", "lsh, 4 rounds"),
        ("lsh:num_hashes=1", "lsh, 1 round"),
        ("lsh:num-hashes=4:chunk-length=32", "lsh, num_hashes=4, chunk_length=32"),
        ("linear:eps=1e-5", "linear, eps=1e-05"),
    ],
)
def test_labels_say_what_is_special(text: str, label: str) -> None:
    assert models_from_text(text)[0].label == label


@pytest.mark.parametrize(
    ("text", "message"),
    [("softmax,", "without empty parts"), ("lsh:4", "expected VARIANT:FIELD=VALUE, such as lsh:num_hashes=4")],
)
def test_variants_that_cannot_be_read_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?").replace("(", r"\(")):
        models_from_text(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"runtimes": ("ort", "ort")}, "--runtimes has 'ort' twice"),
        ({"precisions": ("fp8",)}, "--precision has 'fp8'"),
        ({"scope": "layer"}, "--scope has 'layer'"),
        ({"batches": ()}, "--batch is empty"),
        ({"heads": -1}, "--heads has -1"),
        ({"models": (Model("lsh"), Model("lsh"))}, "--variants has 'lsh' twice"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Grid(**fields)  # type: ignore[arg-type]


def test_lists_of_numbers_are_read_or_refused() -> None:
    assert numbers("1, 8", "--batch") == (1, 8)
    assert lengths("512, 2048,32k", "--seq-lens") == (512, 2048, 32_768)
    assert words("torch,ort", "--runtimes") == ("torch", "ort")
    with pytest.raises(UserError, match="--batch has 'many'; expected integers"):
        numbers("1,many", "--batch")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_grid_and_figures_to_compare_with(name: str) -> None:
    preset = PRESETS[name]
    assert preset.name == name
    assert len(list(preset.grid.cases())) >= 10
    assert preset.title
    assert published_of(name)


def test_a_spec_has_the_label_that_its_options_have_in_a_table() -> None:
    texts = ("softmax", "nystrom:num_landmarks=32", "lsh:num_hashes=4", "lsh:chunk_length=32:num_hashes=4")
    for model in models_from_text(",".join(texts)):
        spec = attention_spec(model.variant, {"dim": 64, "heads": 2, "seq_len": 128, **model.options})
        assert spec.label == model.label
