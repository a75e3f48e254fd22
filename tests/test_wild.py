"""Published models as scripts/wild.py runs them: two whose packages the suite has."""

from __future__ import annotations

from pathlib import Path

import pytest
from slow_cases import soak

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


@pytest.mark.slow
@pytest.mark.requires("transformers", "foreign", "native")
@pytest.mark.parametrize(
    ("name", "operator"), [("Nystromformer", "IterativePinv"), soak(("LongT5 local", "BandedAttention"))]
)
def test_a_published_model_is_exported_as_it_is(name: str, operator: str, tmp_path: Path) -> None:
    from wild.measure import measured
    from wild.models import MODELS

    found = measured(next(model for model in MODELS if model.name == name), tmp_path)
    assert found["result"] == "any size", found
    # three lengths, with the batches of the comparison and that of the example
    assert len(found["sizes"]) == 9
    assert operator in found["operators"]
    assert {"eager", "ours"} <= found["latency_ms"].keys()


def test_a_file_that_is_wrong_is_called_wrong() -> None:
    from wild.measure import LIMIT, problem_of

    assert problem_of({"max": 2 * LIMIT, "rms": 0.0})
    assert problem_of({"max": float("nan"), "rms": 0.0})
    assert not problem_of({"max": LIMIT / 2, "rms": 0.0})


def test_every_model_has_a_name_of_its_own() -> None:
    from wild.models import MODELS

    names = [model.name for model in MODELS]
    assert len(set(names)) == len(names) >= 30
