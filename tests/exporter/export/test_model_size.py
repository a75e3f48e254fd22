"""A model that this machine cannot hold is refused before anything is allocated, and any other is not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_builds import module_from_path

from effexport.base.environment import address_space_bytes, memory_info, total_memory_bytes
from effexport.base.errors import StageError, UserError
from effexport.base.spec import BuildSpec, build_spec_from_checkpoint, build_spec_from_options
from effexport.export import module_source
from effexport.export.module_source import check_memory, module_from_seed
from effexport.models.attention_spec import attention_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
HUGE_CONFIG = {"model_type": "reformer", "vocab_size": 10**9, "architectures": ["ReformerModel"]}


def test_a_model_is_refused_only_if_its_weights_and_one_call_exceed_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = build_spec_from_options({"variant": "softmax", "layers": 1}, None)
    monkeypatch.setattr(module_source, "total_memory_bytes", lambda: spec.least_bytes)
    check_memory(spec)
    larger = dataclasses.replace(spec, batch=2)
    with pytest.raises(UserError, match=r"has [\d,]+ parameters and needs at least .* MB .* 2 × 1024 tokens; this"):
        check_memory(larger)
    monkeypatch.setattr(module_source, "total_memory_bytes", lambda: None)
    check_memory(larger)


def test_no_module_is_made_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the linear attention has 16,000,"):
        module_from_seed(BuildSpec(model=attention_spec("linear", {"dim": 2 * 10**9, "heads": 1})))
    (tmp_path / "config.json").write_text(json.dumps(HUGE_CONFIG))
    spec, _ = build_spec_from_checkpoint({}, tmp_path)
    with pytest.raises(UserError, match=r"the reformer base has 256,.*check the sizes in its config"):
        module_from_path(spec, tmp_path)


def test_logits_count_unless_only_the_likeliest_tokens_are_returned() -> None:
    flags = {"variant": "softmax", "batch": 64, "vocab_size": 50_000, "lm_head": True}
    logits = 4 * 64 * 1024 * 50_000
    assert build_spec_from_options(flags, None).least_bytes > logits
    assert build_spec_from_options(flags | {"top_k": 5}, None).least_bytes < logits / 10


def test_a_chunk_length_counts_because_inputs_are_padded_to_it() -> None:
    spec = build_spec_from_options({"variant": "lsh", "scope": "attention", "num_buckets": 2}, None)
    padded = dataclasses.replace(spec, model=dataclasses.replace(spec.model, chunk_length=10**9))  # type: ignore[type-var]
    assert padded.least_bytes > 10**12 > 10**9 > spec.least_bytes


def test_the_memory_of_this_machine_includes_swap_and_respects_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "limit"
    info = {"MemTotal": 8_000, "SwapTotal": 1_000}
    monkeypatch.setattr("effexport.base.environment.memory_info", lambda: info)
    monkeypatch.setattr("effexport.base.environment.CONTAINER_LIMITS", ((limit, limit),))
    monkeypatch.setattr("effexport.base.environment.address_space_bytes", lambda: None)
    assert total_memory_bytes() == 9_000
    limit.write_text("max\n")
    assert total_memory_bytes() == 9_000
    limit.write_text("5000\n")
    assert total_memory_bytes() == 6_000
    monkeypatch.setattr("effexport.base.environment.address_space_bytes", lambda: 3_000)
    assert total_memory_bytes() == 3_000
    info.clear()
    limit.unlink()
    monkeypatch.setattr("effexport.base.environment.address_space_bytes", lambda: None)
    assert total_memory_bytes() is None


def test_the_memory_of_the_real_machine_is_known() -> None:
    assert memory_info()
    total = total_memory_bytes()
    assert total is not None
    assert total <= (address_space_bytes() or total)


def test_inspect_tells_the_size_of_a_checkpoint_that_this_machine_cannot_hold(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUGE_CONFIG))
    described = json.loads(cli("inspect", tmp_path, "--json").out)
    assert described["parameters"] > 256 * 10**9
    assert described["notes"][-1].startswith("It cannot be built here: the reformer base has 256,")


def test_memory_that_runs_out_in_a_stage_is_one_message_that_names_it() -> None:
    from effexport.pipeline.build import Stopwatch

    with (
        pytest.raises(StageError, match=r"exporting: not enough memory.*; use a smaller --dim"),
        Stopwatch(lambda name: None).stage("exporting"),
    ):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 TB")
