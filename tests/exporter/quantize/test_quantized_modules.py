"""Modules of users that were once quantised wrongly, or refused with a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import effexport
from effexport.base.errors import EffexportError, UserError
from effexport.proof.check import Kind

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


class Two(nn.Module):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        return self.b(torch.relu(self.a(x)))


class Asked(Two):
    """Looks at the type and the sizes of its layers."""

    def forward(self, x: Any) -> Any:
        for layer in self.children():
            if isinstance(layer, nn.Linear) and layer.out_features == layer.in_features:
                x = torch.relu(layer(x))
        return x


class Named(Two):
    def forward(self, x: Any) -> Any:
        return self.b(input=torch.relu(self.a(input=x)))


class Shared(Two):
    """One layer under two names, called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.c = self.a

    def forward(self, x: Any) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class OneInputOfTwo(Two):
    """Two layers read one tensor, and one of them a wider one, too."""

    def forward(self, x: Any) -> Any:
        return self.a(x) + self.b(x) + self.a(x * 20)


class LargeTwice(nn.Module):  # type: ignore[name-defined, misc]
    """Layers that run twice, with so many weights that torch.onnx leaves their transposition in the graph then; two of
    them share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(32, 288), nn.Linear(288, 32), nn.Linear(288, 32)
        self.c.weight = self.b.weight

    def forward(self, x: Any) -> Any:
        return self.c(torch.relu(self.a(self.b(torch.relu(self.a(x))))))


class Hidden(Two):
    """torch.export forgets which layers run in such blocks. One of them reads rows of tokens, another runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(32, 32, bias=False)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            x = self.c(self.a(x).flatten(0, 1)).unflatten(0, x.shape[:2])
            x = self.a(torch.relu(x))
        return self.b(x)


class Experts(Two):
    """Each layer adds to the tokens that it is chosen for, and one of them is chosen for none."""

    def forward(self, x: Any) -> Any:
        tokens = x.flatten(0, 1)
        for layer, least in ((self.a, 0.0), (self.b, 1e6)):
            (row,) = (tokens[:, 0] > least).nonzero(as_tuple=True)
            tokens = tokens.index_put((row,), layer(tokens[row]), accumulate=True)
        return tokens.view_as(x)


class Padded(Two):
    """Rounds padding, too, and the file, which is traced for 5 tokens, none."""

    def forward(self, x: Any) -> Any:
        n = x.shape[1]
        if n % 5:
            x = nn.functional.pad(x, (0, 0, 0, 5 - n % 5))
        return super().forward(x)[:, :n]


class InPlace(Two):
    """Writes into what a layer has read, and into what attention multiplies."""

    def forward(self, x: Any) -> Any:
        read = 2 * x
        q = self.a(read).unsqueeze(1)
        read.add_(1.7)
        k = self.b(read).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q.mul_(0.3), k, k).squeeze(1)


class Bounded(Two):
    def forward(self, x: Any) -> Any:
        return self.b(torch.clamp(self.a(nn.functional.relu6(x)), -1, 1))


def built(module: Any, folder: Path, **options: Any) -> Any:
    return effexport.export(module.eval(), {"x": torch.randn(2, 5, 32)}, folder / "built", **options)


def samples(folder: Path, scale: float = 1.0) -> Path:
    path = folder / "samples.npz"
    np.savez(path, x=scale * np.random.default_rng(0).standard_normal((64, 5, 32)).astype(np.float32))
    return path


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("module", [InPlace, Asked, Named, Shared, OneInputOfTwo], ids=lambda kind: str(kind.__name__))
def test_roundings_are_compared_whatever_the_module_does_with_its_layers(
    module: Any, precision: str, tmp_path: Path
) -> None:
    assert_roundings_are_compared(built(module(), tmp_path, precision=precision).report)


def assert_roundings_are_compared(report: Any) -> None:
    statuses = {check.status for check in report.checks if check.kind == Kind.GIVEN_ROUNDINGS}
    assert (report.verdict, statuses) == ("passed", {"passed"})


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("kind", [LargeTwice, Hidden], ids=lambda kind: str(kind.__name__))
def test_layers_are_found_by_their_weights(kind: Any, precision: str, tmp_path: Path) -> None:
    module = kind().eval()
    result = built(module, tmp_path, precision=precision)
    assert_roundings_are_compared(result.report)
    others = {node.op_type for node in onnx.load(str(result.artifact.model_path)).graph.node}
    assert not {"MatMul", "Gemm", "Transpose"} & others

    x = torch.randn(3, 7, 32)
    with effexport.load(result.artifact.path) as runner, torch.no_grad():
        (found,) = runner.run({"x": x.numpy()}).values()
        expected = module.double()(x.double()).numpy()
    away = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    least, most = {"bf16": (5e-4, 1e-2), "int8": (2e-3, 3e-2)}[precision]
    assert least < away < most


@pytest.mark.parametrize(("kind", "outcomes"), [(Experts, {"passed"}), (Padded, {"passed", "not applicable"})])
def test_a_layer_may_read_no_token_or_others_than_in_the_file(kind: Any, outcomes: set[str], tmp_path: Path) -> None:
    report = built(kind(), tmp_path, precision="int8").report
    assert report.verdict == "passed"
    assert {check.outcome for check in report.checks if check.kind == Kind.GIVEN_ROUNDINGS} == outcomes
    assert {check.status for check in report.checks if check.kind == Kind.QUANTIZED_RUN} == {"passed"}


@pytest.mark.requires("transformers")
def test_conv1d_of_transformers_is_a_linear_layer_whose_weights_other_code_may_read(tmp_path: Path) -> None:
    from transformers.pytorch_utils import Conv1D

    class Block(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.read = Conv1D(96, 32), Conv1D(32, 96), Conv1D(32, 32)
            nn.init.normal_(self.a.bias)

        def forward(self, x: Any) -> Any:
            return (x + self.b(nn.functional.gelu(self.a(x)))) @ self.read.weight

    result = built(Block(), tmp_path, precision="int8")
    assert_roundings_are_compared(result.report)
    nodes = [node.op_type for node in onnx.load(str(result.artifact.model_path)).graph.node]
    assert sorted(nodes) == ["Identity", "Identity", "MatMul", "QuantizedLinear", "QuantizedLinear"]


@pytest.mark.slow
@pytest.mark.requires("transformers")
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "int8", "smooth": 0.5},
        {"precision": "int8", "quantization": "static"},
        {"precision": "fp8"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_every_conv1d_of_gpt2_is_quantised(options: Any, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=100, use_cache=False)
    model = GPT2LMHeadModel(config).eval()
    data = tmp_path / "samples.npz"
    np.savez(data, input_ids=np.random.default_rng(0).integers(0, 100, (64, 16)))
    examples = {"input_ids": torch.randint(0, 100, (2, 16))}
    result = effexport.export(model, examples, tmp_path / "built", calibration=data, **options)

    assert_roundings_are_compared(result.report)
    record = result.artifact.manifest.quantization
    assert record is not None
    paths = [path for path, child in model.named_modules() if type(child).__name__ == "Conv1D"]
    assert [layer.layer for layer in record.layers] == paths
    assert [item.norm.rpartition(".")[2] for item in record.smoothing] == ["ln_1", "ln_2"] * 2 * ("smooth" in options)
    assert {product.layer.rpartition(".")[2] for product in record.products} == {"lm_head", "attn"}


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("module", [OneInputOfTwo, Bounded], ids=lambda kind: str(kind.__name__))
def test_static_scales_belong_to_an_input_and_a_layer(module: Any, precision: str, tmp_path: Path) -> None:
    options = {"precision": precision, "quantization": "static", "calibration": samples(tmp_path)}
    assert built(module(), tmp_path, **options).report.verdict == "passed"


def test_a_layer_with_hooks_stays_float(tmp_path: Path) -> None:
    module = Two()
    module.a.register_forward_hook(lambda layer, inputs, output: 2 * output)
    record = built(module, tmp_path, precision="int8").artifact.manifest.quantization
    assert record is not None
    assert [layer.layer for layer in record.layers] == ["b"]
    assert any("hooks" in product.reason for product in record.products)


def test_a_layer_whose_weights_alone_are_used_stays_float_with_the_reason(tmp_path: Path) -> None:
    class Functional(Two):
        def forward(self, x: Any) -> Any:
            return nn.functional.linear(self.a(x), self.b.weight)

    record = built(Functional(), tmp_path, precision="int8").artifact.manifest.quantization
    assert [layer.layer for layer in record.layers] == ["a"]
    reasons = {(product.layer, product.operator): product.reason for product in record.products}
    assert reasons["b", "Linear"].startswith("it is not called")
    assert "not those of an nn.Linear that is called" in reasons["", "MatMul"]

    module = Functional()
    module.a = nn.Identity()
    with pytest.raises(
        EffexportError, match=r"\(b: it is not called: .*\); an nn.Linear that it calls could be: build"
    ):
        built(module, tmp_path / "none", precision="bf16")


def test_smoothing_is_checked_on_all_samples(tmp_path: Path) -> None:
    class Sometimes(nn.Module):  # type: ignore[name-defined, misc]
        """The norm is also read by a branch that the first sample does not take."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.n, self.a = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x: Any, flag: Any) -> Any:
            y = self.n(x)
            return self.a(y) + torch.where(flag[:, :1, None] > 50, y, torch.zeros_like(y))

    data = tmp_path / "samples.npz"
    flags = np.full((64, 5), 100, np.int64)
    flags[0] = 0
    np.savez(data, x=np.random.default_rng(0).standard_normal((64, 5, 32)).astype(np.float32), flag=flags)
    examples = {"x": torch.randn(2, 5, 32), "flag": torch.tensor([[0] * 5, [100] * 5])}
    result = effexport.export(
        Sometimes().eval(), examples, tmp_path / "built", precision="int8", smooth=0.5, calibration=data
    )
    assert result.artifact.manifest.quantization is not None
    assert result.artifact.manifest.quantization.smoothing == ()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: x.__setitem__((10, 0, 0), np.nan), "not finite in sample 10"),
        (lambda x: x.__imul__(0), "is 0 in all samples"),
    ],
)
def test_samples_that_give_no_scale_are_refused(change: Any, sentence: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((64, 5, 32)).astype(np.float32)
    change(x)
    np.savez(tmp_path / "samples.npz", x=x)
    with pytest.raises(EffexportError, match=sentence):
        built(Two(), tmp_path, precision="int8", quantization="static", calibration=tmp_path / "samples.npz")
    assert not (tmp_path / "built").exists()


def test_a_bare_layer_and_values_of_another_type_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(EffexportError, match="put it into a module"):
        effexport.export(nn.Linear(32, 32).eval(), torch.randn(2, 5, 32), tmp_path / "built", precision="int8")
    for name, value in {"max_loss": "0.1", "smooth": True, "keep_float": 3}.items():
        with pytest.raises(UserError, match=f"{name} is {value!r}; expected a"):
            built(Two(), tmp_path, precision="int8", **{name: value})
    assert not (tmp_path / "built").exists()


def test_a_text_is_no_sample_of_a_model_without_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words " * 1000)
    with pytest.raises(UserError, match=r"this model reads no text; expected FILE\.npz"):
        built(Two(), tmp_path, precision="int8", calibration=text)


def test_embeddings_can_be_kept_float_one_by_one(tmp_path: Path) -> None:
    class Tables(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.token, self.other, self.out = nn.Embedding(50, 32), nn.Embedding(50, 32), nn.Linear(32, 32)

        def forward(self, ids: Any) -> Any:
            return self.out(self.token(ids) + self.other(input=ids))

    result = effexport.export(
        Tables().eval(),
        {"ids": torch.randint(0, 50, (2, 5))},
        tmp_path / "built",
        precision="int8",
        quantize_embeddings=True,
        keep_float=["other"],
    )
    record = result.artifact.manifest.quantization
    assert record is not None
    assert [table.layer for table in record.embeddings] == ["token"]
