#!/usr/bin/env python
"""Writes the table of docs/your_models.md: other people's layers, exported, against the originals in PyTorch.

Each row is a small model around one layer, with random weights that make every term count. It is built for 1000 tokens,
and its file is then run at other lengths, with kernels and with function bodies. Run it in .venv, with the packages of
scripts/foreign-requirements.txt; a row takes about 20 seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import table, with_part
from torch import Tensor, nn

from effexport.base.spec import BuildSpec
from effexport.models.sources import source_from_user
from effexport.models.user.spec import ModuleSpec
from effexport.models.user.spec_from_module import Calling, model_and_spec
from effexport.pipeline.build import artifact_from_spec
from effexport.proof.cases import Case, kept_tokens
from effexport.proof.check import Kind
from effexport.proof.inputs import random_inputs
from effexport.proof.module_runs import RepeatedRuns, hash_modules
from effexport.proof.reference import Original
from effexport.proof.verify import verify_candidate
from effexport.runners.options import RunOptions

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "your_models.md"
BEGIN, END = "<!-- table: scripts/foreign_table.py -->", "<!-- end of the table -->"
DIM, HEADS, TOKENS = 64, 4, 1000
# Lengths of the comparison, and one longer than that of the build.
LENGTHS = (1, 63, 100, 1000, 1251)
# Relative to the RMS of the original's answer: far above rounding, far below any fault in a formula.
LIMIT = 1e-4


@dataclass(frozen=True)
class Row:
    """package, layer, option: for the table. make: the model. masked: its argument for a mask of tokens, "" for none.
    tokens: the length that it is built for. lengths: those that are compared, as far as the model takes them."""

    package: str
    layer: str
    option: str
    make: Callable[[], nn.Module]
    masked: str = ""
    tokens: int = TOKENS
    lengths: Sequence[int] = LENGTHS

    @property
    def name(self) -> str:
        return f"{self.package} {self.layer}, {self.option}"


class Residual(nn.Module):
    """x + layer(norm(x)), as a model has it; the mask goes to the argument that the layer has for it."""

    def __init__(self, layer: nn.Module, argument: str = "", **options: Any) -> None:
        super().__init__()
        self.norm, self.layer, self.argument, self.options = nn.LayerNorm(DIM), layer, argument, options

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        masks = {self.argument: mask} if self.argument else {}
        result = self.layer(self.norm(x), **masks, **self.options)
        return x + (result[0] if isinstance(result, tuple) else result)


class Attends(nn.Module):
    """nn.MultiheadAttention on one tensor; its masks are True where a token is hidden."""

    def __init__(self, layer: nn.Module, axes: str = "batch first") -> None:
        super().__init__()
        self.layer, self.axes = layer, axes

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        if self.axes == "batch first":
            return self.layer(x, x, x, key_padding_mask=~mask if mask is not None else None, need_weights=False)[0]
        y = x.transpose(0, 1)
        # labml: [seq, batch, dim], and a mask [queries or 1, keys, batch or 1], without which it fails
        everything = torch.ones_like(y[:, :1, 0], dtype=torch.bool)[None]
        return self.layer(query=y, key=y, value=y, mask=everything).transpose(0, 1)


class OfItself(nn.Module):
    """A layer of queries, keys and values, which are one tensor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


class Calls(nn.Module):
    """F.scaled_dot_product_attention, called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        hidden = None if mask is None else mask[:, None, None]
        return nn.functional.scaled_dot_product_attention(q, k, v, hidden).transpose(1, 2).flatten(-2)


class FastTransformer(nn.Module):
    """An encoder of fast-transformers, which takes masks as objects."""

    def __init__(self, attention_type: str) -> None:
        super().__init__()
        from fast_transformers.builders import TransformerEncoderBuilder

        width = DIM // HEADS
        sizes = {"query_dimensions": width, "value_dimensions": width, "feed_forward_dimensions": 2 * DIM}
        options = {"n_layers": 2, "n_heads": HEADS, "attention_type": attention_type, **sizes}
        self.encoder = TransformerEncoderBuilder.from_kwargs(**options).get()
        self.is_causal = attention_type.startswith("causal")

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        from fast_transformers.masking import LengthMask, TriangularCausalMask

        count = x.shape[1]
        lengths = LengthMask(mask.sum(dim=1), max_len=count)
        return self.encoder(x, attn_mask=TriangularCausalMask(count) if self.is_causal else None, length_mask=lengths)


def residual(layer: Callable[[], nn.Module], argument: str = "", **options: Any) -> Callable[[], nn.Module]:
    return lambda: Residual(layer(), argument, **options)


def padded(padder: Callable[[nn.Module], nn.Module], layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: padder(layer())


def trained(model: nn.Module) -> nn.Module:
    """Weights as large as training makes them: logits of a few units, biases and positions that count."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "bias" not in name:
                scale = 1.5 / weight[0].numel() ** 0.5
            else:
                scale = 0.3 if weight.dim() < 2 else 1.0
            noise = torch.randn(weight.shape, generator=generator)
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            if weight.is_floating_point():
                weight.copy_(centre + scale * noise)
    return model.eval()


def rows() -> Iterator[Row]:
    """Every row whose package is installed."""
    torch.manual_seed(0)
    package = f"torch {torch.__version__.partition('+')[0]}"
    attention = partial(nn.MultiheadAttention, DIM, HEADS, batch_first=True)
    yield Row(package, "MultiheadAttention", "padding", lambda: Attends(attention()), "mask")
    yield Row(package, "F.scaled_dot_product_attention", "padding", Calls, "mask")
    layer = partial(nn.TransformerEncoderLayer, DIM, HEADS, 2 * DIM, batch_first=True, norm_first=True)
    yield Row(package, "TransformerEncoder", "pre-norm", lambda: nn.TransformerEncoder(layer(), 2, None, False))
    yield from rows_of_nystrom_attention()
    yield from rows_of_linear_attention_transformer()
    yield from rows_of_aft()
    yield from rows_of_reformer_pytorch()
    yield from rows_of_fast_transformers()
    yield from rows_of_retention()


def rows_of_nystrom_attention() -> Iterator[Row]:
    from nystrom_attention import NystromAttention, Nystromformer

    package = "nystrom-attention 0.0.14"
    make = partial(NystromAttention, DIM, dim_head=16, heads=HEADS, num_landmarks=32)
    yield Row(package, "NystromAttention", "no mask", residual(make))
    yield Row(package, "NystromAttention", "padding", residual(make, "mask"), "mask")
    yield Row(package, "NystromAttention", "no convolution", residual(partial(make, residual=False), "mask"), "mask")
    yield Row(package, "NystromAttention", "2 iterations", residual(partial(make, pinv_iterations=2), "mask"), "mask")
    whole = partial(Nystromformer, dim=DIM, depth=2, dim_head=16, heads=HEADS, num_landmarks=32)
    yield Row(package, "Nystromformer", "2 layers", whole)


def rows_of_linear_attention_transformer() -> Iterator[Row]:
    from linear_attention_transformer.linear_attention_transformer import LinearAttentionTransformer, SelfAttention

    package = "linear-attention-transformer 0.19.1"
    for causal in (False, True):
        layer = partial(SelfAttention, DIM, HEADS, causal=causal)
        option = "causal, padding" if causal else "padding"
        yield Row(package, "SelfAttention", option, residual(layer, "input_mask"), "mask")
    whole = partial(LinearAttentionTransformer, DIM, 2, 2048, heads=HEADS)
    yield Row(package, "LinearAttentionTransformer", "2 layers", whole)


def rows_of_aft() -> Iterator[Row]:
    from aft_pytorch.aft_pytorch import AFTFull, AFTLocal, AFTSimple
    from labml_nn.transformers.aft import AFTLocal as LabmlLocal

    package = "aft-pytorch 0.2.2"
    for hidden in (48, 96):
        for layer in (AFTFull, AFTSimple):
            yield Row(package, layer.__name__, f"hidden_dim {hidden}", residual(partial(layer, 1300, DIM, hidden)))
    # its forward makes max_seqlen² numbers in Python
    few = (1, 63, 100)
    local = residual(partial(AFTLocal, 128, DIM, 48, s=20))
    yield Row(package, "AFTLocal", "s 20", local, tokens=100, lengths=few)
    yield Row("labml-nn 0.5.1", "AFTLocal", "window 20", lambda: Attends(LabmlLocal(DIM, 1300, 20), "labml"))


def rows_of_reformer_pytorch() -> Iterator[Row]:
    from reformer_pytorch import Autopadder, LSHSelfAttention, Reformer, ReformerLM

    package = "reformer-pytorch 1.4.4"
    options = {"heads": HEADS, "bucket_size": 32, "n_hashes": 2}
    choices: dict[str, dict[str, Any]] = {
        "padding": {},
        "causal, padding": {"causal": True},
        "own bucket only": {"attend_across_buckets": False},
        "duplicates once": {"allow_duplicate_attention": False},
        "one value head": {"one_value_head": True},
    }
    for option, more in choices.items():
        layer = padded(Autopadder, partial(LSHSelfAttention, DIM, **options, **more))
        yield Row(package, "LSHSelfAttention in Autopadder", option, residual(layer, "input_mask"), "mask")
    alone = residual(partial(LSHSelfAttention, DIM, **options))
    yield Row(package, "LSHSelfAttention", "multiples of 64 tokens", alone, tokens=1024, lengths=(64, 1024, 1280))
    stack = padded(Autopadder, partial(Reformer, DIM, 2, ff_chunks=4, **options))
    yield Row(package, "Reformer in Autopadder", "2 layers", stack)
    language = partial(ReformerLM, 200, DIM, 2, 2048, dim_head=16, ff_chunks=4, causal=True, **options)
    for option, more in {"rotary positions": {}, "absolute positions": {"absolute_position_emb": True}}.items():
        make = padded(Autopadder, partial(language, **more))
        yield Row(package, "ReformerLM in Autopadder", f"causal, {option}", make)


def rows_of_fast_transformers() -> Iterator[Row]:
    if importlib.util.find_spec("fast_transformers") is None:
        print("pytorch-fast-transformers is not installed: without its rows", file=sys.stderr)
        return
    for kind in ("linear", "causal-linear", "full"):
        make = partial(FastTransformer, kind)
        yield Row("pytorch-fast-transformers 0.4.0", "TransformerEncoder", f"{kind}, padding", make, "mask")


def rows_of_retention() -> Iterator[Row]:
    from yet_another_retnet.retention import MultiScaleRetention
    from yet_another_retnet.retnet import RetNetDecoder, RetNetDecoderLayer

    package = "yet-another-retnet 0.5.1"
    for option, positions in {"rotary positions": True, "no positions": False}.items():
        layer = partial(MultiScaleRetention, DIM, HEADS, relative_position=positions)
        yield Row(package, "MultiScaleRetention", option, residual(lambda layer=layer: OfItself(layer())))
    yield Row(package, "RetNetDecoder", "2 layers", lambda: RetNetDecoder(RetNetDecoderLayer(DIM, HEADS, 2 * DIM), 2))


@dataclass(frozen=True)
class Measured:
    """errors: the largest, relative to the RMS, by implementation. remarks: of the report. cases: how many compared."""

    row: Row
    errors: dict[str, float]
    remarks: tuple[str, ...]
    cases: int


def measured(row: Row) -> Measured:
    """Build the model of a row, and run its file at every length."""
    torch.manual_seed(1)
    model = trained(row.make())
    examples: dict[str, Tensor] = {}
    name = next(iter(inspect.signature(model.forward).parameters))
    if any(isinstance(child, nn.Embedding) for child in model.modules()):
        examples[name] = torch.randint(0, 200, (2, row.tokens))
    else:
        examples[name] = torch.randn(2, row.tokens, DIM)
    if row.masked:
        examples[row.masked] = torch.ones(2, row.tokens, dtype=torch.bool)
    user, described = model_and_spec(model, row.layer, row.tokens, Calling(examples=examples))
    assert isinstance(described, ModuleSpec)
    spec = BuildSpec(model=described)
    runs = RepeatedRuns("PyTorch")
    original = Original(user, spec, runs)
    rng = np.random.default_rng(3)
    cases = []
    for count in row.lengths:
        if described.longest is not None and count > described.longest:
            continue
        kept = [count, max(1, count * 2 // 3)] if described.mask else None
        inputs = random_inputs(spec, rng, 2, count, kept)
        empty = Case(f"{count} tokens", inputs, {}, tokens=kept_tokens(inputs, spec))
        cases.append(original.answer(empty).case)
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        source = replace(source_from_user(user, spec.model, row.layer), notes=described.remarks)
        artifact, report = artifact_from_spec(spec, Path(folder) / "model", source=source)
        hashes = list(hash_modules(user.module))
        for implementation in ("kernel", "body"):
            if implementation == "kernel" and not spec.custom_ops:
                continue
            settings = RunOptions(implementation=implementation)
            checks = verify_candidate(artifact.model_path, cases, spec, hashes, settings).checks
            failed = [check for check in checks if check.status == "failed"]
            assert not failed, failed
            kinds = (Kind.ARITHMETIC, Kind.GIVEN_BUCKETS)
            values = [check.value for check in checks if check.kind in kinds and check.value is not None]
            errors[implementation] = float(np.max(values))  # not the built-in max, which may drop NaN
    return Measured(row, errors, tuple(report.notes), len(cases))


def table_of_results(found: Sequence[Measured]) -> str:
    rows = []
    for one in found:
        row = one.row
        shown = [f"{one.errors[name]:.1e}" if name in one.errors else "–" for name in ("kernel", "body")]
        kept = "as PyTorch has it" if any("as PyTorch has it" in note for note in one.remarks) else "ours"
        rows.append((row.package, f"`{row.layer}`", row.option, kept, *shown))
    return table(("package", "layer", "option", "operators", "max / RMS, kernels", "bodies"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this; nothing is written")
    options = parser.parse_args()
    found = []
    for row in rows():
        if options.only not in row.name:
            continue
        one = measured(row)
        found.append(one)
        print(row.name, one.errors, f"{one.cases} lengths", file=sys.stderr)
        for note in one.remarks:
            print("   ", note, file=sys.stderr)
    if not options.only:
        page = with_part(DOCUMENT.read_text(encoding="utf-8"), BEGIN, END, table_of_results(found))
        DOCUMENT.write_text(page, encoding="utf-8")
    worst = float(np.max([error for one in found for error in one.errors.values()]))
    print(f"worst: {worst:.2g}, limit {LIMIT:g}")
    sys.exit(int(not worst <= LIMIT))


if __name__ == "__main__":
    main()
