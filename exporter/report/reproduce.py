"""Commands that repeat what a report says: the build, and every row of its checks.

A report records options of `effexport verify` and `prove`. It may come from anybody, and a command on its page is there
to be copied: only these options are read, with values that can be theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from effexport.artifact import REMEDY
from effexport.base.errors import UserError
from effexport.base.formatting import Word, command_line
from effexport.base.option_fields import options_of, words_of
from effexport.base.runtimes import ARTIFACT_RUNTIMES, DEFAULT_RUNTIME, ENGINE_RUNTIMES
from effexport.base.spec import INDEPENDENT, BuildSpec
from effexport.models.attention_spec import attention_spec
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.sources import SEED
from effexport.options import BuildOptions
from effexport.proof.check import ALL_CASES, GOLDEN_SUFFIX, NAMED, OF_THE_REFERENCE, Check, Kind, is_about_bodies
from effexport.report.report import Report
from effexport.report.wording import flat_fields
from effexport.runners.options import LAST_DEVICE, implementation_per_op

MODEL, WEIGHTS, DATA, REFERENCE = "--model", "--weights", "--data", "--reference"
AGAINST = "--against"  # of prove
IMPLEMENTATION, DEVICE, PRECISION_HINT = "--implementation", "--device", "--precision-hint"


def is_path(value: str) -> bool:
    return value != "" and value.isprintable() and not value.startswith("-")


def is_reference(value: str) -> bool:
    runtime = value.rpartition("@")[2]
    return value in NAMED or (is_path(value) and (value.endswith(GOLDEN_SUFFIX) or runtime in ARTIFACT_RUNTIMES))


def is_implementation(value: str) -> bool:
    try:
        implementation_per_op(value)
    except UserError:
        return False
    return is_path(value)


def is_device(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= len(str(LAST_DEVICE))


def is_precision_hint(value: str) -> bool:
    return any(value in runtime.precision_hints for runtime in ARTIFACT_RUNTIMES.values())


# What an option's value may be.
RECORDED: dict[str, Callable[[str], bool]] = {
    AGAINST: is_path,
    MODEL: is_path,
    WEIGHTS: is_path,
    DATA: is_path,
    REFERENCE: is_reference,
    IMPLEMENTATION: is_implementation,
    DEVICE: is_device,
    PRECISION_HINT: is_precision_hint,
}


def check_options(options: Sequence[str], file: Path) -> None:
    """Raise UserError unless a report that was read from a file has options that effexport records, each once."""
    names, values = options[::2], options[1::2]
    problem = next((name for name in names if name not in RECORDED or names.count(name) > 1), None)
    for name, value in zip(names, values, strict=False):
        if problem is None and not RECORDED[name](value):
            problem = f"{name} {value}"
    if problem is None and len(names) != len(values):
        problem = names[-1]
    if problem is not None:
        raise UserError(f"{file} is damaged: effexport records no option {problem[:80]!r}; {REMEDY}")


# They are the subjects of other flags.
_IDENTITY = ("scope", "variant")
# Checks of inputs that are made on the spot, of data of the user, or of another model than model.onnx.
_WITHOUT_CASE = (
    *(Kind.DECODE_STEP, Kind.PREFILL_STATE, Kind.LONG_SEQUENCE, Kind.ANSWERS, Kind.ANSWER_NEAR_TIES),
    *(Kind.QUANTIZED_PRODUCTS, Kind.TASK_LOSS),
)
MODULE, MODULE_FAMILY = "--module", "module"
# Where a build is repeated: beside the artifact, not in its place.
REBUILT = "rebuilt"
# A factory that --module imports: of a package, or of a file.
_FACTORY = re.compile(r"[^\s:][^\n\r:]*:[A-Za-z_]\w*")


def repeat_command(report: Report, artifact: str, *further: Word) -> str:
    """Checks an artifact as a report says that it was checked; with further options."""
    options = dict(zip(report.options[::2], report.options[1::2], strict=True))
    other = options.get(AGAINST, "")
    if is_proof(report) and not (_FACTORY.fullmatch(other) or Path(other).exists()):
        return f"effexport.prove({artifact!r}, model)  # in Python; model: a {' '.join(other.split())}"
    verb = "prove" if is_proof(report) else "verify"
    return command_line("effexport", verb, Path(artifact), *options.items(), *further)


def is_proof(report: Report) -> bool:
    """True for a file that was compared with another model, and not built."""
    return AGAINST in report.options


def verify_command(check: Check, report: Report, artifact: str) -> str:
    """Repeats one check of an artifact: its case, on the runtime that it is about. What needs a module of the user's
    that has no name on the command line is repeated by building again."""
    further: list[Word] = []
    runtime = check.target or report.runtime
    if is_proof(report):
        return repeat_command(report, artifact, *[("--runtime", runtime)] * (runtime != DEFAULT_RUNTIME))
    golden = report.spec.get("golden", "full")
    of_torch = check.kind == Kind.PYTORCH_MODULE or check.kind in OF_THE_REFERENCE
    without_case = of_torch or check.case == ALL_CASES or check.kind in _WITHOUT_CASE or is_about_bodies(check)
    if without_case:
        further += (
            [] if REFERENCE in report.options else [(REFERENCE, "torch" if of_torch or golden == "none" else "golden")]
        )
    else:
        further.append(("--case", check.case.name))
    if of_torch or golden == "none" or (golden == "small" and not without_case):
        source = source_option(report)
        if source is None:
            return build_command(report, REBUILT)
        further += [(name, value) for name, value in source if name not in report.options]
    if runtime != DEFAULT_RUNTIME:
        further.append(("--runtime", runtime))
    return repeat_command(report, artifact, *further)


def source_option(report: Report) -> list[tuple[str, str]] | None:
    """The option of `effexport verify` that names what the weights came from; none for those of the seed. None for an
    object of Python, which has no name on the command line."""
    origin = report.weights_from
    if report.spec["model"].get("family") == MODULE_FAMILY:
        return [(MODULE, origin)] if _FACTORY.fullmatch(origin) else None
    return [] if origin in ("", SEED) else [(WEIGHTS, origin)]


def build_command(report: Report, output: str, record: type = BuildOptions) -> str:
    """Builds the artifact of a report again, into `output`; with a spec file where flags do not reach. "" for a file
    that effexport has not built.

    record: whose fields become flags.
    """
    spec = report.spec
    if is_proof(report):
        return ""
    if spec.get("scope") == "checkpoint":
        return _checkpoint_command(report, output, record)
    changed = _changed_fields(spec)
    if None in changed.values():
        return _python_command(spec, output)
    first: dict[str, Any] = {"variant": _variant(spec)}
    if "attention" not in spec["model"]:
        first["scope"] = "attention"
    if report.weights_from not in ("", SEED):
        first["weights"] = report.weights_from
    return _command(first | changed, report, output, record)


def _checkpoint_command(report: Report, output: str, record: type) -> str:
    """Flags are those of the build and what may be chosen for a checkpoint: config.json has said the rest."""
    model = report.spec["model"]
    is_module = model.get("family") == MODULE_FAMILY
    build = {name: value for name, value in report.spec.items() if name not in (*_IDENTITY, "model")}
    defaults = _build_defaults()
    changed = {n: v for n, v in build.items() if _listed(v) != _listed(defaults[n])}
    declared = {INDEPENDENT: True} if model.get(INDEPENDENT) else {}
    if is_module and not _FACTORY.fullmatch(report.weights_from):
        options = "".join(f", {name}={value!r}" for name, value in (changed | declared | _data(report)).items())
        origin = " ".join(report.weights_from.split())  # in one line, as it is in a comment
        return f"effexport.export(model, example_inputs, {output!r}{options})  # in Python; model: a {origin}"
    kind = "module" if is_module else "checkpoint"
    chosen = ("seq_len",) if is_module else ("seq_len", "task", "num_hashes", "pinv_init", "global_tokens")
    own = {name: model[name] for name in chosen if model.get(name) is not None and model.get("has_seq", True)}
    first = {kind: report.weights_from or kind.upper()}
    return _command(first | changed | declared | own, report, output, record)


def _command(values: dict[str, Any], report: Report, output: str, record: type) -> str:
    """`effexport build` with these values of options; a spec file has those that are not on the command line."""
    known = options_of(record)
    decided = "graph" if report.engines else "linear"
    values = {name: value for name, value in values.items() if (name, value) != ("bf16", decided)}
    in_file = {name: value for name, value in values.items() if name not in known or not known[name].flags}
    words: list[Word] = ["effexport", "build", *words_of(record, values)]
    if in_file:
        words.append(("--spec", "spec.toml"))
    targets = dict.fromkeys(engine.target for engine in report.engines)  # causal models have several engines of each
    more = _data(report) | {"targets": [target for target in targets if target in ENGINE_RUNTIMES]}
    build = command_line(*words, *words_of(record, more), "-o", Path(output))
    if not in_file:
        return build
    # JSON's booleans, numbers, strings and lists are TOML's too
    return "\n".join(["cat > spec.toml <<'END'", *(f"{n} = {json.dumps(v)}" for n, v in in_file.items()), "END", build])


def _python_command(spec: dict[str, Any], output: str) -> str:
    """Neither flags nor TOML can unset a field; only Python can have built this."""
    return "\n".join(
        [
            "python - <<'END'",
            "import effexport",
            "from effexport.base.spec import BuildSpec",
            f"effexport.build(BuildSpec.from_dict({spec!r}), {output!r})",
            "END",
        ]
    )


def _changed_fields(spec: dict[str, Any]) -> dict[str, Any]:
    """Fields of a variant's spec that are not at their default, flat. A field that this release does not know stays."""
    attention = attention_spec(_variant(spec))
    model = EncoderSpec(attention=attention) if "attention" in spec["model"] else attention
    default: dict[str, Any] = flat_fields(model.to_dict()) | _build_defaults()
    given = flat_fields({k: v for k, v in spec.items() if k != "model"}) | flat_fields(spec["model"])
    missing = object()
    return {n: v for n, v in given.items() if n not in _IDENTITY and _listed(default.get(n, missing)) != _listed(v)}


def _build_defaults() -> dict[str, Any]:
    spec = BuildSpec(model=attention_spec("softmax"))
    return {"scope": spec.model.scope, **{field.name: getattr(spec, field.name) for field in fields(spec)[1:]}}


def _variant(spec: dict[str, Any]) -> str:
    return str(spec["model"].get("attention", spec["model"])["variant"])


def _data(report: Report) -> dict[str, str]:
    """The files of a quantised build, by the names of their options."""
    record = report.quantization
    found = {} if record is None else {"calibration": record.samples.source, "evaluate": record.task_data}
    return {name: file for name, file in found.items() if file}


def _listed(value: Any) -> Any:
    """JSON has lists where Python had tuples."""
    return list(value) if isinstance(value, tuple) else value
