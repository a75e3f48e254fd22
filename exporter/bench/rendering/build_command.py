"""The `effexport build` command for a model that was measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effexport.bench.grid import model_of_case
from effexport.bench.results import Case
from effexport.models.attention_spec import field_names
from effexport.runtimes import RUNTIMES
from effexport.shell import Word, command_line
from effexport.spec import BUILD_FIELDS, ENCODER_FIELDS, options_from_toml

# The file for fields that have no option of their own, if the user gave none.
WRITTEN_FILE = "model.toml"
# Fields of a case's options that have one.
_WITH_OPTION = ("num_hashes", "pinv_init", "layers")


@dataclass(frozen=True)
class BuildCommand:
    """A command, and how `file`, which it reads, must be changed first: lines to add, and fields to remove."""

    text: str
    file: str = ""
    lines: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()

    @property
    def before(self) -> str:
        """What to do first, as a sentence; "" if nothing."""
        add = f"write these lines to {self.file}: {'; '.join(self.lines)}" if self.lines else ""
        remove = f"remove {', '.join(self.remove)} from {self.file}, which this variant does not have"
        steps = [step for step in (add, remove if self.remove else "") if step]
        return f"First {' and '.join(steps)}." if steps else ""


def command_from_case(case: Case, spec_file: str = "") -> BuildCommand | None:
    """The command that exports the model of a case; None if its runtime does not run an export of ours.

    spec_file: the TOML file that described the model, or "".
    """
    runtime = RUNTIMES[case.runtime]
    if runtime.graph != "ours":
        return None
    given = options_from_toml(Path(spec_file)) if spec_file else {}
    attention = model_of_case(case).attention
    flags: dict[str, Any] = {
        "variant": case.variant,
        "scope": case.scope,
        "dim": attention.dim,
        "heads": attention.heads,
    }
    flags["seq_len"] = case.seq_len
    flags |= {"batch": case.batch} if case.batch != given.get("batch", 1) else {}
    flags |= {"precision": case.precision} if case.precision != given.get("precision", "fp32") else {}
    flags |= {"target": case.runtime} if runtime.engine else {}
    switches, lines = [], []
    for name, value in (case.options | case.encoder).items():
        if name in flags or (name in given and given[name] == value):
            continue
        if name == "causal":
            switches.append("--causal" if value else "--no-causal")
        elif name in _WITH_OPTION:
            flags[name] = value
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    file = spec_file or (WRITTEN_FILE if lines else "")
    words: list[Word] = ["effexport", "build"]
    words += ["--spec", Path(file)] if file else []
    words += [(f"--{name.replace('_', '-')}", value) for name, value in flags.items()]
    known = {"variant", *BUILD_FIELDS, "scope", *ENCODER_FIELDS, *field_names(type(attention))}
    remove = tuple(name for name in given if name not in known)
    return BuildCommand(command_line(*words, *switches), file, tuple(lines), remove)
