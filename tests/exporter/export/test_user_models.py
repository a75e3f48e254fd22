"""Models of the user's own, exported as they stand or with layers replaced: what is proven, and what is said."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from written_module import check_answers

import effexport
from effexport.base.errors import StageError, UserError
from effexport.cli.main import cli, main
from effexport.models import attention_from_spec
from effexport.models.adapters import replace
from effexport.models.adapters.adapter import Adapter, NotExportableError, NotReplaceableError, Replacement
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.softmax import SoftmaxSpec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")

DIM = 16
Table = dict[str, tuple[Adapter, Replacement]]


class TheirAttention(nn.Module):
    """Softmax attention as another package might write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.to_out = nn.Linear(DIM, DIM, bias=False)
        self.heads = 2

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, None], -1e30)
        return self.to_out((logits.softmax(dim=-1) @ v).transpose(1, 2).flatten(-2))


class Ours(nn.Module):
    def __init__(self, theirs: TheirAttention) -> None:
        super().__init__()
        self.layer = attention_from_spec(SoftmaxSpec(dim=DIM, heads=theirs.heads, bias=False))
        weights = theirs.qkv.weight.detach().chunk(3)
        for linear, weight in zip((self.layer.query, self.layer.key, self.layer.value), weights, strict=True):
            linear.weight.data = weight.clone()
        self.layer.out.weight.data = theirs.to_out.weight.detach().clone()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(x, mask)


@dataclasses.dataclass
class Answer:
    states: Tensor
    pooled: Tensor | None = None
    nothing: None = None


class Model(nn.Module):
    def __init__(self, attention: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, DIM)
        self.block = nn.Sequential()
        self.block.attn = attention or TheirAttention()
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Answer:
        states = self.drop(self.block.attn(self.embed(tokens), mask))
        return Answer(states, states.mean(dim=1))


EXAMPLES = {"tokens": torch.arange(80).reshape(2, 40) % 50, "mask": torch.arange(80).reshape(2, 40) % 40 < 30}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Table:
    """A table of adapters in which only TheirAttention is known."""
    name = f"{TheirAttention.__module__}.{TheirAttention.__qualname__}"
    table = {name: (Adapter("pytest", ("0.1",), {}), lambda layer, seq_len: Ours(layer))}
    monkeypatch.setattr(replace, "replacements", lambda: table)
    return table


def test_a_known_layer_is_replaced_and_the_original_is_the_reference(known: Table, tmp_path: Path) -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = effexport.export(model, EXAMPLES, tmp_path / "out")
    report = result.report
    assert report.verdict == "passed"
    assert result.artifact.spec.custom_ops == {"MaskedAttention": 1}
    assert any(
        "TheirAttention runs as effexport's softmax attention, with its weights: block.attn." in note
        for note in report.notes
    )
    assert any("pytest " in note and "was not tested with effexport, which knows 0.1" in note for note in report.notes)
    labels = {check.case.name for check in report.checks if check.kind == "replaced layers"}
    assert labels == {
        "export",
        "odd length",
        "short",
        "single token",
        "longer",
        "padded batch",
        "padded single",
        "nothing kept",
        "example",
    }
    assert isinstance(model.block.attn, TheirAttention)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with effexport.load(result.path) as runner:
        outputs = runner.run({"tokens": EXAMPLES["tokens"].numpy(), "mask": EXAMPLES["mask"].numpy()})
    assert set(outputs) == {"states", "pooled"}
    with torch.no_grad():
        expected = model.eval()(**EXAMPLES)
    # float32 rounding of sums in another order
    np.testing.assert_allclose(outputs["states"][:, :30], expected.states[:, :30], atol=1e-6)
    assert effexport.verify(result.path).verdict == "passed"


def test_a_replacement_that_computes_something_else_is_caught_and_named(known: Table, tmp_path: Path) -> None:
    def careless(layer: Any, seq_len: int) -> nn.Module:
        ours = Ours(layer)
        ours.layer.query.weight.data *= 1.01
        return ours

    name, (adapter, _) = next(iter(known.items()))
    known[name] = (adapter, careless)
    with pytest.raises(
        StageError, match=r"(?s)the first layer that differs is block.attn \(.*TheirAttention\).*stands for"
    ):
        effexport.export(Model(), EXAMPLES, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_magnifies_rounding_is_not_the_fault_of_a_layer(known: Table, tmp_path: Path) -> None:
    class Magnified(Model):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            states = self.block.attn(self.embed(tokens), mask)
            return (1e6 * states).sin()

    with pytest.raises(StageError, match="the model magnifies the rounding of float32 on these inputs") as raised:
        effexport.export(Magnified(), EXAMPLES, tmp_path / "out")
    assert "at fault" not in str(raised.value)


def test_a_layer_that_cannot_be_replaced_is_exported_as_it_stands_and_the_report_says_why(
    known: Table, tmp_path: Path
) -> None:
    def refuse(layer: Any, seq_len: int) -> nn.Module:
        raise NotReplaceableError("it has 2 heads")

    name, (adapter, _) = next(iter(known.items()))
    known[name] = (adapter, refuse)
    report = effexport.export(Model(), EXAMPLES, tmp_path / "out").report
    assert report.verdict == "passed"
    assert any(
        "block.attn (" in note and "exported as PyTorch has it: it has 2 heads." in note for note in report.notes
    )


def test_a_layer_that_no_file_can_have_ends_the_build_with_its_path(known: Table, tmp_path: Path) -> None:
    def refuse(layer: Any, seq_len: int) -> nn.Module:
        raise NotExportableError("it asks the weather")

    name, (adapter, _) = next(iter(known.items()))
    known[name] = (adapter, refuse)
    with pytest.raises(UserError, match=r"block.attn \(.*TheirAttention\): it asks the weather"):
        effexport.export(Model(), EXAMPLES, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer, "forward", lambda x, mask=None: x), "its forward was replaced"),
        (lambda layer: layer.register_forward_hook(lambda _, given, result: 2 * result), "it has forward hooks"),
    ],
)
def test_a_patched_layer_is_exported_as_it_stands(known: Table, change: Any, reason: str, tmp_path: Path) -> None:
    model = Model()
    change(model.block.attn)
    report = effexport.export(model, EXAMPLES, tmp_path / "out").report
    assert report.verdict == "passed"
    assert any(reason in note for note in report.notes)


def test_one_layer_in_two_places_stays_one_layer(known: Table) -> None:
    shared = TheirAttention()
    found = replace.with_our_layers(nn.Sequential(shared, nn.Sequential(shared)), 8)
    assert list(found.replaced) == ["0"]
    assert found.module[0] is found.module[1][0]


def test_an_unknown_layer_is_exported_as_it_stands_and_nothing_is_guessed_from_its_names(tmp_path: Path) -> None:
    report = effexport.export(Model(), EXAMPLES, tmp_path / "out").report
    assert report.verdict == "passed"
    assert not any("TheirAttention" in note or "resembles" in note for note in report.notes)


def test_a_layer_kept_for_one_reason_in_several_places_is_one_note(known: Table) -> None:
    layers = [TheirAttention() for _ in range(5)]
    for layer in layers:
        layer.register_forward_hook(lambda _, given, result: 2 * result)
    model = nn.Sequential(*layers)
    found = replace.with_our_layers(model, 8)
    (note,) = replace.remarks_on(model, found, turned={})
    assert note.startswith("0, 1, 2 and 2 more (")
    assert "are exported as PyTorch has it: it has forward hooks" in note


def test_dropout_that_is_on_is_said_and_off_in_the_file(tmp_path: Path) -> None:
    report = effexport.export(Model(dropout=0.5), EXAMPLES, tmp_path / "out").report
    assert report.verdict == "passed"
    note = "Model is in training mode, which changes drop (Dropout); it is exported as after eval()."
    assert note in report.notes


class Counting(TheirAttention):
    calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().forward(x, mask) + self.calls


def test_a_layer_that_keeps_a_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"first layer that does is block.attn \(.*Counting\): it keeps a state"):
        effexport.export(Model(Counting()), EXAMPLES, tmp_path / "out")


class DataDependent(TheirAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * (2 if float(x.sum()) > 0 else 1)


def test_a_layer_that_torch_onnx_cannot_export_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StageError,
        match=r"torch.onnx could not export the module: in block.attn \(.*DataDependent\) \(test_user_models.py, line",
    ):
        effexport.export(Model(DataDependent()), EXAMPLES, tmp_path / "out")


class Classifier(nn.Module):
    """PyTorch's default encoder on padded tokens, averaged over all of them: hidden tokens count, as zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, DIM, padding_idx=0)
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(self.embed(tokens), src_key_padding_mask=tokens == 0).mean(dim=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("examples", [None, torch.ones(2, 40, dtype=torch.int64)])
def test_padding_by_tokens_is_part_of_the_proof(examples: Tensor | None, tmp_path: Path) -> None:
    result = effexport.export(Classifier(), examples, tmp_path / "out", seq_len=40)
    assert result.report.verdict == "passed"
    assert {"padding at the end", "padding at the beginning"} <= {check.case.name for check in result.report.checks}
    tokens = torch.randint(1, 50, (3, 30))
    tokens[1, 20:] = 0
    check_answers(result.path, Classifier().eval(), tokens)


def test_an_lsh_layer_that_is_called_twice_is_refused(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = attention_from_spec(LSHSpec(dim=DIM, heads=2, seq_len=32))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    with pytest.raises(UserError, match="the LSH layer layer of Twice is called 2 times in one run; expected one call"):
        effexport.export(Twice(), torch.randn(2, 32, DIM), tmp_path / "out")


class Cumulative(TheirAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask).cumsum(dim=1)


def test_operators_that_only_tensorrt_minds_are_noted(tmp_path: Path) -> None:
    report = effexport.export(Model(Cumulative()), EXAMPLES, tmp_path / "out").report
    assert report.verdict == "passed"
    assert any("TensorRT engines of effexport do without (CumSum: " in note for note in report.notes)


def test_a_model_without_values_or_on_another_device_is_refused(tmp_path: Path) -> None:
    model = Model()
    model.block.attn.to_out.to("meta")
    with pytest.raises(UserError, match=r"Model: block.attn.to_out has its weight on meta; expected cpu; "):
        effexport.export(model, EXAMPLES, tmp_path / "out")


def test_a_model_that_returns_something_else_is_refused(tmp_path: Path) -> None:
    class Returns(Model):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Any:
            return {"states": self.embed(tokens), "cache": object()}

    with pytest.raises(UserError, match="the model returns object as cache; expected tensors"):
        effexport.export(Returns(), EXAMPLES, tmp_path / "out")


class ImageAndText(nn.Module):
    """Two inputs of different lengths, and outputs of other types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = nn.Linear(DIM, DIM)

    def forward(self, image: Tensor, *, text: Tensor, scale: float = 1.0) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        weights = (self.attend(image) @ text.transpose(1, 2) * scale).softmax(dim=-1)
        return weights @ text, (weights.argmax(dim=-1), weights.amax(dim=(1, 2)) > 0.5)


def test_several_inputs_with_axes_of_their_own_and_outputs_of_any_type(tmp_path: Path) -> None:
    examples = {"image": torch.randn(2, 12, DIM), "text": torch.randn(2, 5, DIM), "scale": 3.0}
    dynamic = {"image": {0: "batch", 1: "seq"}, "text": {0: "batch", 1: "words"}}
    result = effexport.export(ImageAndText(), examples, tmp_path / "out", dynamic=dynamic)
    assert result.report.verdict == "passed"
    spec = result.artifact.spec
    assert [str(tensor) for tensor in (*spec.inputs, *spec.outputs)] == [
        "image float32 [batch, seq, 16]",
        "text float32 [batch, words, 16]",
        "output0 float32 [batch, seq, 16]",
        "output1_0 int64 [batch, seq]",
        "output1_1 bool [batch]",
    ]
    given = {"image": torch.randn(3, 30, DIM), "text": torch.randn(3, 11, DIM)}
    with effexport.load(result.path) as runner:
        outputs = runner.run({name: value.numpy() for name, value in given.items()})
    expected = ImageAndText()(**given, scale=3.0)[0].detach()
    np.testing.assert_allclose(outputs["output0"], expected, atol=1e-5)  # float32 rounding


@pytest.mark.parametrize("dynamic", [None, {"x": {0: "batch", 1: "seq"}}])
def test_an_example_of_one_token_leaves_the_number_of_tokens_free(dynamic: Any, tmp_path: Path) -> None:
    import onnxruntime

    class Mixer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x @ x.transpose(1, 2), dim=-1) @ x

    effexport.export(Mixer(), {"x": torch.randn(2, 1, DIM)}, tmp_path / "out", dynamic=dynamic)
    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
    for seq_len in (1, 2, 33):
        x = torch.randn(3, seq_len, DIM)
        np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], Mixer()(x).numpy(), atol=1e-5)


def test_bytes_are_inputs(tmp_path: Path) -> None:
    class Pixels(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return (image.float() / 255).mean(dim=-1)

    image = torch.arange(4 * 96, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(4, 8, 12)
    effexport.export(Pixels(), {"image": image}, tmp_path / "out")
    opened = effexport.load(tmp_path / "out")
    (name,) = (tensor.name for tensor in opened.outputs)
    np.testing.assert_allclose(opened.run({"image": image.numpy()})[name], Pixels()(image).numpy(), atol=1e-6)
    with pytest.raises(UserError, match=r"'image' is int64 .*expected image uint8 .*convert it with"):
        opened.run({"image": image.long().numpy()})


def test_a_model_without_a_sequence_is_exported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    result = effexport.export(model, torch.randn(2, 3, 8, 8), tmp_path / "out", precision="fp16")
    assert result.report.verdict == "passed"
    assert [str(tensor) for tensor in result.artifact.spec.inputs] == ["input float16 [batch, 3, 8, 8]"]
    assert not any("token" in note for note in result.report.notes)


FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
    def forward(self, words, keep):
        return self.embed(words) * keep[..., None]

def make():
    return Model()

def with_examples():
    return Model(), {"words": torch.zeros(2, 20, dtype=torch.int64), "keep": torch.ones(2, 20)}

def wrong():
    return Model(), None, None, 3
"""
INPUTS = """
[inputs.words]
dims = ["batch", "seq"]
dtype = "int32"
[inputs.keep]
dims = ["batch", "seq"]
dtype = "bool"
mask = "keep"
[sizes]
seq = 20
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_model.py").write_text(FACTORY)
    (tmp_path / "inputs.toml").write_text(INPUTS)
    yield tmp_path
    sys.modules.pop("their_model", None)


def test_the_command_reads_the_inputs_from_a_file(factory: Path) -> None:
    result = CliRunner().invoke(
        cli, ["build", "--module", "their_model:make", "--inputs", "inputs.toml", "-o", "out", "--json"]
    )
    assert result.exit_code == 0, result.output
    manifest = json.loads(result.stdout)
    assert [(tensor["name"], tensor["dtype"]) for tensor in manifest["inputs"]] == [
        ("words", "int32"),
        ("keep", "bool"),
    ]
    with effexport.load("out") as runner:
        ones = np.ones((1, 3), bool)
        with pytest.raises(UserError, match="words contains 30; expected 0 to 29"):
            runner.run({"words": np.full((1, 3), 30, np.int32), "keep": ones})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--module", "their_model:make"], "forward of their_model:make takes words, keep; describe the inputs"),
        (["--module", "their_model:wrong"], "returned a tuple; expected an nn.Module, or (module, example inputs), or"),
        (["--module", "their_model:with_examples", "--inputs", "inputs.toml"], "were both given; give one"),
        (["--module", "their_model:make", "--inputs", "none.toml"], "no inputs file at none.toml; expected a TOML"),
        (["--variant", "lsh", "--inputs", "inputs.toml"], "--inputs describes the inputs of a --module"),
    ],
)
def test_mistakes_are_one_sentence_with_exit_code_2(
    factory: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["build", *arguments, "-o", "out"])
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (factory / "out").exists()


def test_a_report_shows_itself_in_a_notebook(factory: Path) -> None:
    stages: list[str] = []
    result = effexport.build(module="their_model:with_examples", progress=lambda stage, share: stages.append(stage))
    page = result._repr_html_()
    assert "<table>" in page
    assert "arithmetic" in page
    assert "passed" in page
    assert stages[0] == "running the module, to see what it takes and which of its sizes are free"
    assert "exporting to ONNX" in stages
