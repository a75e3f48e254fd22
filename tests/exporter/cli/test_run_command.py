"""`effexport run` on arrays: how much a model was given, in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_specs import spec_of

from effexport.base.spec import BuildSpec
from effexport.cli.run import amount_of
from effexport.models.user.spec import ModuleSpec
from effexport.models.variants.pytorch import PyTorchSpec


def module_of(*axes: Any) -> BuildSpec:
    model = ModuleSpec(
        vocab_size=2,
        seq_len=6,
        module="theirs",
        attention_fields=PyTorchSpec(seq_len=6).to_dict(),
        attention_layers=1,
        fused_op_counts={},
        unfused_op_counts={},
        input_dims={"x": axes},
        output_dims={"y": axes},
        longest=None,
        mask="",
    )
    return BuildSpec(model=model)


@pytest.mark.parametrize(
    ("axes", "shape", "text"),
    [
        (("batch", 3, 8, 8), (2, 3, 8, 8), "2 samples"),
        (("batch", "seq", 8), (2, 5, 8), "10 tokens"),
        (("seq", "batch"), (5, 3), "15 tokens"),
        (("seq", 8), (5, 8), "5 tokens"),
        ((4, 8), (4, 8), "1 sample"),
        ((), (), "1 sample"),
    ],
)
def test_a_module_was_given_tokens_or_samples(axes: tuple[Any, ...], shape: tuple[int, ...], text: str) -> None:
    assert amount_of({"x": np.zeros(shape, np.float32)}, module_of(*axes)) == text


def test_of_other_models_the_kept_tokens_count() -> None:
    spec = spec_of("linear")
    ids = np.zeros((2, 5), np.int64)
    assert amount_of({"input_ids": ids}, spec) == "10 tokens"
    assert (
        amount_of({"input_ids": ids, "attention_mask": np.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])}, spec)
        == "6 tokens"
    )
    hidden = {"hidden_states": np.zeros((2, 5, 32), np.float32)}
    assert amount_of(hidden, spec_of("linear", "attention")) == "10 tokens"
