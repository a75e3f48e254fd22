"""ModernBERT checkpoints, beyond test_published.py."""

from __future__ import annotations

from typing import Any

import pytest
from originals import spec_of

from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch")


def test_the_spec_describes_the_graph() -> None:
    spec = spec_of("modernbert", "multiple-choice", num_hidden_layers=7)
    assert spec.inputs == dict.fromkeys(["input_ids", "attention_mask"], ("batch", "choices", "seq"))
    assert spec.outputs == {"logits": ("batch", "choices")}
    assert spec.custom_ops(fused=True) == {"MaskedAttention": 3, "BandedAttention": 4}
    assert spec.custom_ops(fused=False) == {}
    assert (spec.seq_len, spec.max_seq_len, spec.why_samples_mix) == (1024, 1100, "")


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        ("base", {"hidden_activation": "gelu_nwe"}, "hidden_activation is 'gelu_nwe'; did you mean 'gelu_new'"),
        ("base", {"classifier_activation": "selu"}, "classifier_activation is 'selu'.*Supported: gelu, "),
        ("base", {"num_attention_heads": 5}, "hidden_size 24 cannot be split into 5 heads of an even size"),
        ("base", {"hidden_size": 6, "num_attention_heads": 2}, "hidden_size 6 cannot be split into 2 heads of an even"),
        ("base", {"local_attention": -1}, "local_attention is -1; expected 0 or more"),
        ("base", {"global_rope_theta": 0}, "global_rope_theta is 0; expected a number > 0"),
        ("base", {"local_rope_theta": "x"}, "local_rope_theta is 'x'; expected a finite number"),
        ("base", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0; expected at least 1"),
        ("base", {"norm_eps": 0}, "norm_eps is 0; expected a number > 0"),
        ("base", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling is .*expected none"),
        ("base", {"classifier_pooling": "max"}, "classifier_pooling is 'max'; expected one of cls, mean"),
        ("base", {"pad_token_id": 41}, "pad_token_id is 41; expected a token, 0 to 40"),
        ("question-answering", {"num_labels": 3}, "num_labels is 3; the task question-answering has 2"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_its_reason(
    task: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message) as failure:
        spec_of("modernbert", task, **fields)
    assert "\n" not in str(failure.value)
