"""SWEEP.toml, read and checked, and its cells; docs/sweep.md describes the format."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from effexport.base.dtypes import DTYPE_OF_PRECISION
from effexport.base.errors import UserError
from effexport.base.records import read_toml
from effexport.base.runtimes import ENGINE_RUNTIMES
from effexport.base.spec import BuildSpec, build_spec_from_options
from effexport.bench.cells import ONNX_ONLY, Cell, deciding_versions
from effexport.bench.grid import Model, model_from_text
from effexport.models.attention_spec import AttentionSpec, field_names
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.validation import SpecError, check_type, did_you_mean, require
from effexport.models.variants import ATTENTION_SPECS
from effexport.tensorrt.spec import EngineSpec, check_target, profiles_from_texts

_GPU = re.compile(r"sm_[1-9][0-9]{1,2}")


def check_keys(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        require(
            name in known,
            f"{where} has an unknown key {name!r}{did_you_mean(name, known)} Expected: {', '.join(known)}",
        )


def table(name: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    value = document.get(name, {})
    require(isinstance(value, dict), f"{name} is {value!r}; expected a table, [{name}]")
    return value  # type: ignore[no-any-return]  # checked above


def tables(name: str, document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    value = document.get(name, [])
    is_list = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    require(is_list, f"{name} is {value!r}; expected tables, each under [[{name}]]")
    for entry in value:
        require(bool(entry), f"an [[{name}]] is empty; expected keys of a cell, such as variant")
    return value  # type: ignore[no-any-return]  # checked above


def distinct_list(name: str, value: Any) -> list[Any]:
    require(isinstance(value, list), f"{name} is {value!r}; expected a list, such as {name} = [{toml_text(value)}]")
    require(bool(value), f"{name} is empty; expected at least one value, or leave it out for the default")
    require_distinct(name, value)
    return value  # type: ignore[no-any-return]  # checked above


def require_distinct(name: str, values: Sequence[Any]) -> None:
    seen = set()
    for value in values:
        key = (type(value), repr(value))  # 1 and true are equal in Python, and not in TOML
        require(key not in seen, f"{name} has {value!r} twice; expected every value once")
        seen.add(key)


@dataclass(frozen=True)
class CellKey:
    """A key of a cell, whose plural is an axis. known: its values; if they are not listed, is_valid and expected."""

    known: Collection[str] = ()
    is_valid: Callable[[Any], bool] = lambda value: False
    expected: str = ""

    def check(self, name: str, value: Any) -> None:
        if self.known:
            listed = f"{did_you_mean(value, self.known)} Expected: {', '.join(self.known)}"
            require(isinstance(value, str) and value in self.known, f"{name} has {value!r}{listed}")
        else:
            require(self.is_valid(value), f"{name} has {value!r}; expected {self.expected}")


# The keys of a cell, but for its variant.
KEYS: Mapping[str, CellKey] = {
    "seq_len": CellKey(
        is_valid=lambda value: type(value) is int and value >= 1, expected="lengths in tokens, integers from 1"
    ),
    "precision": CellKey(DTYPE_OF_PRECISION),
    "target": CellKey((ONNX_ONLY, *ENGINE_RUNTIMES)),
    "gpu": CellKey(
        is_valid=lambda value: isinstance(value, str) and _GPU.fullmatch(value) is not None,
        expected='architectures by their compute capability, such as "sm_90" for 9.0',
    ),
}


def model_of(value: Any, name: str) -> Model:
    require(
        isinstance(value, str),
        f'{name} has {value!r}; expected names such as "lsh", with fields after colons: "lsh:num_hashes=4"',
    )
    return model_from_text(value, name)


def toml_text(value: Any) -> str:
    """A value as TOML, for the remedy of an error."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


# The keys of [[include]] and [[exclude]]; the axes are their plurals.
CELL_KEYS = ("variant", *KEYS)
AXES = tuple(f"{key}s" for key in CELL_KEYS)
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


@dataclass(frozen=True)
class Combination:
    """A combination of values of the axes. None and "": not given, or not applicable."""

    model: Model
    seq_len: int | None = None
    precision: str | None = None
    target: str = ONNX_ONLY
    gpu: str = ""

    def matches(self, pattern: Mapping[str, Sequence[Any]]) -> bool:
        """True if a pattern of [[exclude]] applies; a variant may be given with or without its options."""
        own = {name: {value} for name, value in self.named.items()}
        own["variant"].add(self.model.label)
        return all(own[name] & set(values) for name, values in pattern.items())

    @property
    def named(self) -> dict[str, Any]:
        """The values by the keys of [[exclude]]."""
        return {"variant": self.model.variant} | {key: getattr(self, key) for key in CELL_KEYS if key != "variant"}

    def __str__(self) -> str:
        words = [self.model.label, self.seq_len and f"{self.seq_len} tokens", self.precision, self.target, self.gpu]
        return ", ".join(str(word) for word in words if word)


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """The contents of a sweep file.

    axes: those that were given. engine: engine options by target. include: cells beside the product, each with its own
    fields of the spec. exclude: values by CELL_KEYS.
    """

    axes: Mapping[str, Sequence[Any]]
    build: Mapping[str, Any]
    options: Mapping[str, Mapping[str, Any]]
    engine: Mapping[str, Mapping[str, Any]]
    include: Sequence[tuple[Combination, Mapping[str, Any]]]
    exclude: Sequence[Mapping[str, Any]]

    @property
    def targets(self) -> set[str]:
        """Those of any cell, without the artifact alone."""
        return {*self.axes.get("targets", ()), *(place.target for place, _ in self.include)} - {ONNX_ONLY}


def cells_from_path(path: Path) -> list[Cell]:
    """The cells of a sweep file. Raises UserError, with its name, if it cannot be read or has errors."""
    document = read_toml(path, "sweep", "docs/sweep.md has a complete example")
    try:
        return cells_from_file(sweep_file_from_document(document))
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
    if "variants" in axes:
        axes["variants"] = [model_of(entry, "variants") for entry in axes["variants"]]
        require_distinct("variants", [model.label for model in axes["variants"]])
    engine = engine_tables(table("engine", document))
    for name, key in KEYS.items():
        for value in axes.get(f"{name}s", ()):
            key.check(f"{name}s", value)
    found = SweepFile(
        axes=axes,
        build=build_table(table("build", document)),
        options=option_tables(table("options", document)),
        engine=engine,
        include=[include_of(entry) for entry in tables("include", document)],
        exclude=[exclude_of(entry) for entry in tables("exclude", document)],
    )
    check_options_are_used(found)
    check_engine_is_used(found, document)
    return found


def build_table(given: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("variant", "seq_len", "precision", "target"):
        remedy = f"give {name}s = [{toml_text(given.get(name))}]"
        require(name not in given, f"[build] has {name}, which a sweep varies; {remedy}")
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


def include_of(given: Mapping[str, Any]) -> tuple[Combination, Mapping[str, Any]]:
    """A cell, and its own fields, which become part of its label."""
    require("variant" in given, f"an [[include]] has no variant; expected one of: {', '.join(ATTENTION_SPECS)}")
    for name, key in KEYS.items():
        if name in given:
            key.check(f"{name} of [[include]]", given[name])
    require(
        "gpu" not in given or given.get("target", ONNX_ONLY) != ONNX_ONLY,
        'an [[include]] has a gpu and no target; add target = "trt" or "trt-rtx", or leave the gpu out',
    )
    axes = {name: given[name] for name in KEYS if name in given}
    own = {name: value for name, value in given.items() if name not in CELL_KEYS}
    return Combination(model_of(given["variant"], "variant of [[include]]"), **axes), own


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
                KEYS[name].check(f"{name} of [[exclude]]", entry)
        found[name] = tuple(model_of(entry, name).label if name == "variant" else entry for entry in values)
    return found


def check_options_are_used(file: SweepFile) -> None:
    models = (*file.axes.get("variants", ()), *(place.model for place, _ in file.include))
    used = {model.variant for model in models}
    for variant in file.options:
        require(
            variant in used,
            f'[options.{variant}] is for a variant that the sweep does not have; add "{variant}" to variants, or leave '
            "it out",
        )


def check_engine_is_used(file: SweepFile, document: Mapping[str, Any]) -> None:
    """Raises SpecError for [engine] or gpus without an engine target, which was probably forgotten."""
    used = file.targets
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


# A larger sweep is probably larger than intended.
MAX_CELLS = 10_000


def cells_from_file(file: SweepFile) -> list[Cell]:
    """Every cell once, in the order of the file.

    Raises UserError for a cell that cannot be built, and SpecError without cells.
    """
    points = product_of(file)
    kept = [point for point in points if not any(point.matches(pattern) for pattern in file.exclude)]
    for pattern in file.exclude:
        texts = ", ".join(f"{name} = {list(values)}" for name, values in pattern.items())
        require(
            any(point.matches(pattern) for point in points),
            f"[[exclude]] with {texts} matches no cell; expected values of the sweep, or leave it out",
        )
    cells = [cell_of(point, file, {}) for point in kept] + [cell_of(point, file, own) for point, own in file.include]
    require(bool(cells), f"the sweep is empty: [[exclude]] removes all {len(points)} cells; exclude fewer")
    # an [[include]] may repeat a cell of the product
    return list({cell.digest: cell for cell in cells}.values())


def product_of(file: SweepFile) -> list[Combination]:
    given = file.axes
    targets, gpus = given.get("targets", (ONNX_ONLY,)), given.get("gpus", ("",))
    places = [(target, gpu) for target in targets for gpu in (gpus if target != ONNX_ONLY else ("",))]
    axes = (given.get("variants", ()), given.get("seq_lens", (None,)), given.get("precisions", (None,)), places)
    count = math.prod(len(axis) for axis in axes)
    require(
        count <= MAX_CELLS,
        f"the sweep has {count:,} cells; expected at most {MAX_CELLS:,}: split it into several files",
    )
    return [Combination(model, seq, precision, *place) for model, seq, precision, place in itertools.product(*axes)]


def cell_of(point: Combination, file: SweepFile, own: Mapping[str, Any]) -> Cell:
    """own: fields that an [[include]] sets."""
    fields = {**file.build, **file.options.get(point.model.variant, {}), **own, **point.model.options}
    flags = {**fields, "seq_len": point.seq_len, "precision": point.precision, "variant": point.model.variant}
    try:
        spec = build_spec_from_options({name: tuples(value) for name, value in flags.items()}, None)
        engine = engine_of(point, spec, file)
    except SpecError as error:
        excluding = exclusion(point)
        problem = f"the cell {point} cannot be built: {error}"
        raise UserError(problem, f"  To leave such cells out: {excluding}") from error
    label = ATTENTION_SPECS[point.model.variant].label_with({**point.model.options, **own})
    return Cell(label=label, spec=spec, engine=engine, gpu=point.gpu, versions=deciding_versions(point.target))


def tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def exclusion(point: Combination) -> str:
    """The table that excludes a point, for an error message."""
    texts = ", ".join(f"{name} = {value!r}".replace("'", '"') for name, value in point.named.items() if value)
    return f"[[exclude]] with some of {texts}"


def engine_of(point: Combination, spec: BuildSpec, file: SweepFile) -> EngineSpec | None:
    if point.target == ONNX_ONLY:
        return None
    options = dict(file.engine.get(point.target, {}))
    profiles = profiles_from_texts(options.pop("profiles", ()), spec)
    if point.gpu and not ENGINE_RUNTIMES[point.target].built_where_it_runs:
        options["compute_capabilities"] = (int(point.gpu.removeprefix("sm_")),)
    return EngineSpec(target=point.target, profiles=profiles, **options)
