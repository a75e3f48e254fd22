"""Read and check SWEEP.toml; unknown or unused keys are errors. docs/sweep.md describes the format."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from effexport.bench.grid import Model
from effexport.errors import UserError
from effexport.models.attention_spec import AttentionSpec, field_names
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.validation import SpecError, check_type, require
from effexport.models.variants import ATTENTION_SPECS
from effexport.runtimes import ENGINE_RUNTIMES
from effexport.spec import BuildSpec
from effexport.sweep.cell import ONNX_ONLY
from effexport.sweep.values import (
    CHECKS,
    check_keys,
    distinct_list,
    model_of,
    require_distinct,
    table,
    tables,
    toml_text,
)
from effexport.tensorrt.spec import EngineSpec, check_target
from effexport.toml_file import read_toml

AXES = ("variants", "seq_lens", "precisions", "targets", "gpus")
# The same for one cell: the keys of [[include]] and [[exclude]].
CELL_KEYS = ("variant", "seq_len", "precision", "target", "gpu")
TABLES = ("build", "options", "engine", "include", "exclude")
# Keys of [build]: all fields of the specs that are not axes and do not belong to a single variant.
BUILD_KEYS = (
    "scope",
    *(
        name
        for spec in (BuildSpec, EncoderSpec, AttentionSpec)
        for name in (item.name for item in fields(spec))
        if name not in ("model", "attention", "seq_len", "precision")
    ),
)
# `profiles` have the syntax of --profile; a timing cache is a file of one machine.
ENGINE_TYPES: dict[str, str] = {
    item.name: str(item.type)
    for item in fields(EngineSpec)
    if item.name not in ("target", "profiles", "compute_capabilities", "timing_cache")
}


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """The contents of a sweep file. An axis that was not given is empty; its one value is the default of the specs.

    engine: engine options by target. include, exclude: cells by CELL_KEYS; an include may also set fields of the spec.
    """

    variants: tuple[Model, ...] = ()
    seq_lens: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    build: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    engine: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    include: Sequence[Mapping[str, Any]] = ()
    exclude: Sequence[Mapping[str, Any]] = ()


def sweep_file_from_path(path: Path) -> SweepFile:
    """Raises UserError, with the name of the file, if it cannot be read or has errors."""
    document = read_toml(path, "sweep", "docs/sweep.md has a complete example")
    try:
        return sweep_file_from_document(document)
    except (SpecError, UserError) as error:
        raise UserError(f"{path}: {error}") from error


def sweep_file_from_document(document: Mapping[str, Any]) -> SweepFile:
    """Raises SpecError and UserError for everything that docs/sweep.md does not allow."""
    check_keys("the file", document, AXES + TABLES)
    axes = {name: distinct_list(name, document[name]) for name in AXES if name in document}
    require(
        "variants" in axes or "include" in document,
        f'the file has no variants; expected a list such as variants = ["softmax", "lsh"], of: '
        f"{', '.join(ATTENTION_SPECS)}",
    )
    variants = tuple(model_of(entry, "variants") for entry in axes.get("variants", ()))
    require_distinct("variants", [model.label for model in variants])
    engine = engine_tables(table("engine", document))
    for name, check in CHECKS.items():
        for value in axes.get(f"{name}s", ()):
            check(f"{name}s", value)
    lists: dict[str, Any] = {f"{name}s": tuple(axes.get(f"{name}s", ())) for name in CHECKS}
    found = SweepFile(
        variants=variants,
        **lists,
        build=build_table(table("build", document)),
        options=option_tables(table("options", document)),
        engine=engine,
        include=tuple(include_of(entry) for entry in tables("include", document)),
        exclude=tuple(exclude_of(entry) for entry in tables("exclude", document)),
    )
    check_options_are_used(found)
    check_engine_is_used(found, document)
    return found


def build_table(given: Mapping[str, Any]) -> Mapping[str, Any]:
    axes = {"variant": "variants", "seq_len": "seq_lens", "precision": "precisions", "target": "targets"}
    for name, axis in axes.items():
        require(
            name not in given, f"[build] has {name}, which a sweep varies; give {axis} = [{toml_text(given.get(name))}]"
        )
    owners = {name: variant for variant, spec in ATTENTION_SPECS.items() for name in field_names(spec)}
    for name in given:
        if name not in BUILD_KEYS and name in owners:
            raise SpecError(
                f"[build] has {name}, a field of single variants; expected it under [options.{owners[name]}]"
            )
    check_keys("[build]", given, BUILD_KEYS)
    return given


def option_tables(given: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    check_keys("[options]", given, ATTENTION_SPECS)
    for variant, options in given.items():
        require(
            isinstance(options, dict), f"[options] has {variant} = {options!r}; expected a table, [options.{variant}]"
        )
        check_keys(f"[options.{variant}]", options, [*field_names(ATTENTION_SPECS[variant]), *BUILD_KEYS])
        require("seq_len" not in options, f"[options.{variant}] has seq_len, which a sweep varies; give seq_lens")
    return given


def engine_tables(given: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Options by target: those of [engine], overridden by those of [engine.TARGET]."""
    common = {name: value for name, value in given.items() if name not in ENGINE_RUNTIMES}
    check_engine_options("[engine]", common, (*ENGINE_TYPES, "profiles", *ENGINE_RUNTIMES))
    merged = {}
    for target in ENGINE_RUNTIMES:
        own = given.get(target, {})
        require(isinstance(own, dict), f"[engine] has {target} = {own!r}; expected a table, [engine.{target}]")
        check_engine_options(f"[engine.{target}]", own, (*ENGINE_TYPES, "profiles"))
        merged[target] = common | own
    return merged


def check_engine_options(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    check_keys(where, given, known)
    for name, value in given.items():
        if name == "profiles":
            is_texts = isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
            require(
                is_texts,
                f"profiles of {where} is {value!r}; expected a list of texts, such as "
                'profiles = ["batch=1:4:16,seq=128:1024:4096"]',
            )
        else:
            require(value is not None, f"{name} of {where} is empty")
            check_type(f"{name} of {where}", value, ENGINE_TYPES[name])


def include_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    require("variant" in given, f"an [[include]] has no variant; expected one of: {', '.join(ATTENTION_SPECS)}")
    for name, check in CHECKS.items():
        if name in given:
            check(f"{name} of [[include]]", given[name])
    return {**given, "variant": model_of(given["variant"], "variant of [[include]]")}


def exclude_of(given: Mapping[str, Any]) -> Mapping[str, tuple[Any, ...]]:
    """The values that match, by key."""
    check_keys("an [[exclude]]", given, CELL_KEYS)
    found: dict[str, tuple[Any, ...]] = {}
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        require(bool(values), f"{name} of [[exclude]] is empty; expected a value or a list of values")
        for entry in values:
            if name == "variant":
                model_of(entry, "variant of [[exclude]]")
            else:
                CHECKS[name](f"{name} of [[exclude]]", entry)
        found[name] = tuple(model_of(entry, name).label if name == "variant" else entry for entry in values)
    return found


def check_options_are_used(file: SweepFile) -> None:
    used = {model.variant for model in (*file.variants, *(entry["variant"] for entry in file.include))}
    for variant in file.options:
        require(
            variant in used,
            f'[options.{variant}] is for a variant that the sweep does not have; add "{variant}" to variants, or leave '
            "it out",
        )


def check_engine_is_used(file: SweepFile, document: Mapping[str, Any]) -> None:
    """Raises SpecError for [engine] or gpus without an engine target, which was probably forgotten."""
    used = {*file.targets, *(entry["target"] for entry in file.include if "target" in entry)} - {ONNX_ONLY}
    for target in used:
        check_target(target)
    for name in ("engine", "gpus"):
        require(
            not document.get(name) or bool(used),
            f'{name} is for engines, and no target asks for one; add targets = ["onnx", "trt-rtx"] or leave it out',
        )
    for target in ENGINE_RUNTIMES:
        require(
            target not in document.get("engine", {}) or target in used,
            f"[engine.{target}] is for a target that the sweep does not have; add {toml_text(target)} to targets, or "
            "leave it out",
        )
