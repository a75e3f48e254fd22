"""Calls of `F.scaled_dot_product_attention` become the operator exactly where it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from adapted_models import exported, padding, random_states, trained_like
from comparison import relative_error
from torch import Tensor, nn

from effexport.models.adapters.torch_layers import attention_calls_as_operators
from effexport.models.user.modes import written_out

pytestmark = pytest.mark.requires("torch")

HEADS, WIDTH = 2, 16
BATCH = {0: "batch", 1: "seq"}
# Sums of up to 1000 float32 terms in another order: a few 1e-6 of the RMS.
CLOSE = 2e-5


class Caller(nn.Module):
    """Calls the function on q, k, v made of one input, with what `options` makes of a boolean mask, True = keep."""

    def __init__(self, options: Callable[[Tensor], dict[str, object]]) -> None:
        super().__init__()
        self.options = options
        self.project = trained_like(nn.Linear(WIDTH, 3 * WIDTH))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.project(x).chunk(3, dim=2))
        return F.scaled_dot_product_attention(q, k, v, **self.options(keep))


def additive(keep: Tensor) -> Tensor:
    """As the BERT family of transformers makes it."""
    ones = keep[:, None, None, :].expand(-1, 1, keep.shape[1], -1).to(torch.float32)
    inverted = torch.tensor(1.0) - ones
    return inverted.masked_fill(inverted.to(torch.bool), torch.finfo(torch.float32).min)


def of_ten_thousand(keep: Tensor) -> Tensor:
    """Without a visible key, logits still differ."""
    inverted = 1.0 - keep[:, None, None, :].expand(-1, 1, keep.shape[1], -1).to(torch.float32)
    return inverted.masked_fill(inverted.to(torch.bool), -1e4)


def of_all_pairs(keep: Tensor, first: int) -> Tensor:
    """As transformers 5 makes it. first: the number of the first query; below 0, it hides all keys from some."""
    batch, query, key = torch.arange(keep.shape[0]), torch.arange(keep.shape[1]) + first, torch.arange(keep.shape[1])
    from_zero = query[None, None, :, None] >= 0
    mask = query.new_ones((), dtype=torch.bool) & from_zero & keep[batch[:, None, None, None], key[None, None, None, :]]
    return mask.expand(keep.shape[0], -1, keep.shape[1], keep.shape[1])


def changed_later(keep: Tensor) -> Tensor:
    mask = keep[:, None, None, :].expand(-1, HEADS, keep.shape[1], -1).clone()
    return mask.masked_fill_(~causal(torch.ones_like(keep)), False)


def causal(keep: Tensor) -> Tensor:
    position = torch.arange(keep.shape[1])
    return (position[:, None] >= position) & keep[:, None, None, :]


TURNED: dict[str, Callable[[Tensor], dict[str, object]]] = {
    "no mask": lambda keep: {},
    "its own scale": lambda keep: {"scale": 0.7},
    "boolean": lambda keep: {"attn_mask": keep[:, None, None, :]},
    "of one row, for all queries": lambda keep: {"attn_mask": keep[:, None, None, :].expand(-1, -1, keep.shape[1], -1)},
    "of all heads, inverted twice": lambda keep: {
        "attn_mask": ~(keep == 0)[:, None, None, :].expand(-1, HEADS, keep.shape[1], -1)
    },
    "additive": lambda keep: {"attn_mask": additive(keep)},
    "of all pairs": lambda keep: {"attn_mask": of_all_pairs(keep, 0)},
    "of one sample": lambda keep: {"attn_mask": keep[:1, None, None, :]},
}
KEPT: dict[str, Callable[[Tensor], dict[str, object]]] = {
    "causal": lambda keep: {"is_causal": True},
    "causal and padding": lambda keep: {"attn_mask": causal(keep)},
    "changed in place": lambda keep: {"attn_mask": changed_later(keep)},
    "of later queries": lambda keep: {"attn_mask": of_all_pairs(keep, -1)},
    "numbers": lambda keep: {"attn_mask": keep[:, None, None, :].float() * 3},
    "numbers for all queries": lambda keep: {
        "attn_mask": (keep[:, None, None, :].expand(-1, 1, keep.shape[1], -1).float() * 3)
    },
    "-10000 for hidden keys": lambda keep: {"attn_mask": of_ten_thousand(keep)},
    "two axes": lambda keep: {"attn_mask": causal(keep)[0, 0]},
}


@pytest.mark.parametrize("name", [*TURNED, *KEPT])
@torch.no_grad()
def test_a_call_computes_the_same(name: str) -> None:
    module = Caller((TURNED | KEPT)[name]).eval()
    for seq_len in (1, 63, 1000):
        x, keep = random_states(2, seq_len, WIDTH), ~padding(2, seq_len)
        expected = module(x, keep)
        with attention_calls_as_operators() as calls:
            actual = module(x, keep)
        if seq_len == 1 and name == "of later queries":
            assert torch.equal(actual, expected)  # zeros
            continue
        assert relative_error(actual, expected) < CLOSE
        if seq_len > 1:
            assert (calls.turned, calls.kept) == ((1, 0) if name in TURNED else (0, 1))


class Callers(nn.Module):
    """All of these on one input."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.callers = nn.ModuleList(Caller((TURNED | KEPT)[name]) for name in names)

    def forward(self, x: Tensor, keep: Tensor) -> list[Tensor]:
        return [caller(x, keep) for caller in self.callers]


@pytest.mark.parametrize(
    "names",
    [[name for name in TURNED if name != "additive"], ["additive"], [*KEPT]],
    ids=["turned", "additive", "kept"],
)
def test_a_call_is_turned_while_torch_export_traces(names: list[str]) -> None:
    module = Callers(names).eval()
    free = torch.export.Dim("batch", min=2), torch.export.Dim("seq", min=2)
    axes = {"x": dict(enumerate(free)), "keep": dict(enumerate(free))}
    with attention_calls_as_operators() as calls:
        program = torch.export.export(
            module, (random_states(2, 9, WIDTH), ~padding(2, 9)), dynamic_shapes=axes, strict=False
        )
    made = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    turned = sum(name in TURNED for name in names)
    assert made.count("effexport.masked_attention.default") == calls.turned == turned
    assert calls.kept == len(names) - turned
    if turned and names != ["additive"]:
        assert not any("masked_fill" in target for target in made), "a mask of all queries is left"
    x, keep = random_states(3, 63, WIDTH), ~padding(3, 63)
    with torch.no_grad():
        for name, found, expected in zip(names, program.module()(x, keep), module(x, keep), strict=True):
            assert relative_error(found, expected) < CLOSE, name


def test_shapes_that_the_operator_does_not_take_stay_pytorchs() -> None:
    x = random_states(2, 4, 9, 8)
    with attention_calls_as_operators() as calls:
        F.scaled_dot_product_attention(x[0], x[0], x[0])
        F.scaled_dot_product_attention(x, x[:1], x[:1])
        F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True)
    assert (calls.turned, calls.kept) == (0, 3)


@pytest.mark.parametrize("name", ["boolean", "of all pairs", "additive"])
def test_a_sample_that_sees_nothing_is_as_in_pytorch(name: str) -> None:
    module, keep = Caller(TURNED[name]).eval(), ~padding(2, 9)
    keep[1] = False
    x = random_states(2, 9, WIDTH)
    with torch.no_grad():
        expected = module(x, keep)
        with attention_calls_as_operators() as calls:
            actual = module(x, keep)
    assert calls.turned == 1
    assert relative_error(actual, expected) < CLOSE
    # the lowest number is not −∞: all keys are alike
    assert bool(expected[1].eq(0).all()) == (name != "additive")


def test_outside_the_block_nothing_is_turned() -> None:
    x = random_states(2, 2, 9, 8)
    with attention_calls_as_operators() as calls:
        pass
    F.scaled_dot_product_attention(x, x, x)
    assert (calls.turned, calls.kept) == (0, 0)


@pytest.mark.requires("onnx", "ort")
def test_an_exported_call_runs_in_onnx_runtime(tmp_path: Path) -> None:
    module = Caller(TURNED["additive"]).eval()
    example = {"x": random_states(2, 9, WIDTH), "keep": ~padding(2, 9)}
    with attention_calls_as_operators():
        run, counts = exported(module, example, dict.fromkeys(example, BATCH), tmp_path / "model.onnx")
    assert counts == {"MaskedAttention": 1}
    for seq_len in (1, 63, 100, 1000):
        inputs = {"x": random_states(3, seq_len, WIDTH), "keep": ~padding(3, seq_len)}
        with torch.no_grad():
            assert relative_error(run(**inputs)[0], module(**inputs)) < CLOSE


class Encoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort", "transformers")
@pytest.mark.parametrize(
    "family", ["Bert", *(pytest.param(n, marks=pytest.mark.soak) for n in ("DistilBert", "Roberta"))]
)
def test_models_of_the_bert_family_get_the_operator(family: str, tmp_path: Path) -> None:
    import transformers

    sizes = {"vocab_size": 50, "max_position_embeddings": 300}
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    distil = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    config = getattr(transformers, f"{family}Config")(**sizes, **(distil if family == "DistilBert" else small))
    model = trained_like(Encoder(getattr(transformers, f"{family}Model")(config)))
    ids = torch.arange(2 * 20).reshape(2, 20) % 40 + 5
    example = {"input_ids": ids, "attention_mask": (~padding(2, 20)).long()}
    with attention_calls_as_operators():
        run, counts = exported(model, example, dict.fromkeys(example, BATCH), tmp_path / "model.onnx")
    assert counts == {"MaskedAttention": 2}
    for seq_len in (1, 63, 200):
        keep = ~padding(3, seq_len)
        inputs = {"input_ids": torch.arange(3 * seq_len).reshape(3, -1) % 40 + 5, "attention_mask": keep.long()}
        with torch.inference_mode():
            assert relative_error(run(**inputs)[0], model(**inputs), keep) < CLOSE


@pytest.mark.parametrize("axes", [2, 3, 4])
@pytest.mark.parametrize("kind", ["none", "boolean", "floats", "causal"])
def test_calls_that_stay_are_written_out_as_pytorch_computes_them(axes: int, kind: str) -> None:
    torch.manual_seed(axes)
    q, k, v = (torch.randn(2, 2, 7, 8)[(0,) * (4 - axes)] for _ in range(3))
    keep = torch.ones(7, 7).tril(-1).bool()  # the first query sees nothing
    masks = {"boolean": keep, "floats": torch.zeros(7, 7).masked_fill(~keep, float("-inf"))}
    found = written_out(q, k, v, masks.get(kind), kind == "causal", 0.3, False)
    expected = F.scaled_dot_product_attention(q, k, v, masks.get(kind), is_causal=kind == "causal", scale=0.3)
    assert relative_error(found, expected) <= CLOSE
    assert kind not in masks or not found[..., 0, :].any()
