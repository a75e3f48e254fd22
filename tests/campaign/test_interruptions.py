"""A sample of the interruptions; scripts/soak.sh runs hundreds."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest
from campaign import interruptions

CASES = 6


@pytest.mark.slow
@pytest.mark.requires("torch", "onnx", "ort", "small-disk")
def test_an_interrupted_build_leaves_the_old_artifact_or_the_new_one(tmp_path: Path) -> None:
    tally = interruptions.run(CASES, 0, tmp_path)
    assert tally.problems == []
    assert tally.cases == CASES
    assert any(outcome.startswith("stopped") for outcome in tally.outcomes)


def test_a_process_is_stopped_before_the_thing_it_would_do_to_files(tmp_path: Path) -> None:
    import os

    def work() -> int:
        interruptions.on_file_events(tmp_path, lambda count: count > 2 and os.kill(os.getpid(), signal.SIGKILL))
        for name in "abcd":
            (tmp_path / name).mkdir()
        return 0

    assert interruptions.wait_for(interruptions.forked(work)) == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.slow
@pytest.mark.requires("small-disk")
def test_a_small_disk_is_full_soon(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()

    def work() -> int:
        interruptions.mount_disk(tmp_path, 1 << 20)
        try:
            (tmp_path / "disk" / "x").write_bytes(b"x" * (2 << 20))
        except OSError as error:
            return 7 if error.errno == errno.ENOSPC else 8
        return 9

    assert interruptions.wait_for(interruptions.forked(work)) == 7
    assert list((tmp_path / "disk").iterdir()) == []
