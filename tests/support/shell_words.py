"""The words that bash reads in a line that effexport shows."""

from __future__ import annotations

import os
import subprocess


def words_in_bash(line: str) -> list[str]:
    """Of a command in one line, whose program is replaced by one that prints its words. Names are bytes in UTF-8."""
    assert "\n" not in line
    program, _, rest = line.partition(" ")
    script = f"shown() {{ printf '%s\\0' \"$@\"; }}; shown {program} {rest}"
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, check=True, timeout=60)
    assert not done.stderr
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]
