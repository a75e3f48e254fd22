"""SWEEP.toml, read and checked, and its cells; docs/sweep.md describes the format."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from effexport.base.dtypes import DTYPE_OF_PRECISION
from effexport.base.errors import UserError
from effexport.base.records import read_toml
from effexport.base.runtimes import ENGINE_RUNTIMES
from effexport.base.spec import BUILD_FIELDS, ENCODER_FIELDS, BuildSpec, build_spec_from_options
from effexport.bench.cells import ONNX_ONLY, Cell, deciding_versions
from effexport.bench.grid import Model, check_distinct, known_name, model_from_text, title_of_cell
from effexport.models.attention_spec import AttentionSpec, field_names
from effexport.models.validation import SpecError, check_type, did_you_mean, require
from effexport.models.variants import ATTENTION_SPECS
from effexport.tensorrt.spec import EngineSpec, profiles_from_texts

# For the remedy of an error: JSON's booleans, numbers, strings and lists are TOML's too. Dates are TOML's alone.
toml_text = partial(json.dumps, default=str)


def model_of(name: str, value: Any) -> Model:
    require(
        isinstance(value, str),
        f'{name} has {value!r}; expected names such as "lsh", with fields after colons: "lsh:num_hashes=4"',
    )
    return model_from_text(value, name)


def length_of(name: str, value: Any) -> int:
    require(type(value) is int and value >= 1, f"{name} has {value!r}; expected lengths in tokens, integers from 1")
    return int(value)


def gpu_of(name: str, value: Any) -> str:
    require(
        isinstance(value, str) and re.fullmatch("sm_[1-9][0-9]{1,2}", value) is not None,
        f'{name} has {value!r}; expected architectures by their compute capability, such as "sm_90" for 9.0',
    )
    return str(value)


# Key of a cell, as in [[include]] and [[exclude]] → what makes its value of (name for errors, value), or refuses it.
KEYS: Mapping[str, Callable[[str, Any], Any]] = {
    "variant": model_of,
    "seq_len": length_of,
    "precision": partial(known_name, known=tuple(DTYPE_OF_PRECISION)),
    "target": partial(known_name, known=(ONNX_ONLY, *ENGINE_RUNTIMES)),
    "gpu": gpu_of,
}
AXES = tuple(f"{key}s" for key in KEYS)
TABLES = ("build", "options", "engine", "include", "exclude")
# Keys of [build]: all fields of the specs that are not axes and do not belong to a single variant.
_FIELDS = ("scope", *BUILD_FIELDS, *ENCODER_FIELDS, *(item.name for item in fields(AttentionSpec)))
BUILD_KEYS = tuple(name for name in _FIELDS if name not in ("seq_len", "precision"))
# `profiles` have the syntax of --profile; a timing cache is a file of one machine.
ENGINE_TYPES: dict[str, str] = {
    item.name: str(item.type)
    for item in fields(EngineSpec)
    if item.name not in ("target", "profiles", "compute_capabilities", "timing_cache")
}
# A larger sweep is probably larger than intended.
MAX_CELLS = 10_000


@dataclass(frozen=True)
class Combination:
    """A combination of values of KEYS; None and "": not given, or not applicable.

    own: fields of the spec that an [[include]] sets, which become part of the label of its cell.
    """

    variant: Model
    seq_len: int | None = None
    precision: str | None = None
    target: str = ONNX_ONLY
    gpu: str = ""
    own: Mapping[str, Any] = field(default_factory=dict)

    def matches(self, pattern: Mapping[str, Sequence[Any]]) -> bool:
        """True if a pattern of [[exclude]] applies; a variant may be given with or without its options."""
        values: dict[str, tuple[Any, ...]] = {name: (getattr(self, name),) for name in KEYS}
        values["variant"] = (self.variant.variant, self.variant.label)
        return all(set(values[name]) & set(wanted) for name, wanted in pattern.items())

    def __str__(self) -> str:
        return title_of_cell(self.variant.label, self.seq_len, self.precision, self.target, self.gpu)


def cells_from_path(path: Path) -> list[Cell]:
    """The cells of a sweep file. Raises UserError, with its name, if it cannot be read or has errors."""
    document = read_toml(path, "sweep", "docs/sweep.md has a complete example")
    try:
        return cells_from_document(document)
    except (SpecError, UserError) as error:
        raise UserError(f"{path}: {error}") from error


def cells_from_document(document: Mapping[str, Any]) -> list[Cell]:
    """Every cell once, in the order of the file.

    Raises SpecError and UserError for what docs/sweep.md does not allow, and for a cell that cannot be built.
    """
    check_keys("the file", document, AXES + TABLES)
    axes = {key: axis_of(f"{key}s", document[f"{key}s"]) for key in KEYS if f"{key}s" in document}
    require(
        "variant" in axes or "include" in document,
        f'the file has no variants; expected a list such as variants = ["softmax", "lsh"], of: '
        f"{', '.join(ATTENTION_SPECS)}",
    )
    if "variant" in axes:
        check_distinct("variants", [model.label for model in axes["variant"]])
    engine = engine_tables(table("engine", document))
    build = build_table(table("build", document))
    options = option_tables(table("options", document))
    include = [include_of(entry) for entry in tables("include", document)]
    exclude = [exclude_of(entry) for entry in tables("exclude", document)]
    models = [*axes.get("variant", ()), *(point.variant for point in include)]
    check_tables_are_used("options", options, "variant", {model.variant for model in models})
    targets = {*axes.get("target", ()), *(point.target for point in include)} - {ONNX_ONLY}
    for name in ("engine", "gpus"):
        require(
            not document.get(name) or bool(targets),
            f'{name} is for engines, and no target asks for one; add targets = ["onnx", "trt-rtx"] or leave it out',
        )
    check_tables_are_used("engine", ENGINE_RUNTIMES.keys() & document.get("engine", {}), "target", targets)

    points = product_of(axes)
    for pattern in exclude:
        texts = ", ".join(f"{name} = {list(values)}" for name, values in pattern.items())
        require(
            any(point.matches(pattern) for point in points),
            f"[[exclude]] with {texts} matches no cell; expected values of the sweep, or leave it out",
        )
    kept = [point for point in points if not any(point.matches(pattern) for pattern in exclude)]
    require(bool(kept or include), f"the sweep is empty: [[exclude]] removes all {len(points)} cells; exclude fewer")
    cells = [
        cell_of(point, build | options.get(point.variant.variant, {}), engine.get(point.target, {}))
        for point in (*kept, *include)
    ]
    # an [[include]] may repeat a cell of the product
    return list({cell.digest: cell for cell in cells}.values())


def axis_of(name: str, given: Any) -> list[Any]:
    require(isinstance(given, list), f"{name} is {given!r}; expected a list, such as {name} = [{toml_text(given)}]")
    require(bool(given), f"{name} is empty; expected at least one value, or leave it out for the default")
    check_distinct(name, given)
    return [KEYS[name.removesuffix("s")](name, value) for value in given]


def check_keys(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        require(
            name in known,
            f"{where} has an unknown key {name!r}{did_you_mean(name, known)} Expected: {', '.join(known)}",
        )


def table(name: str, document: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """The table `name` of a document, or of its table `inside`; an empty one if it is not given."""
    value = document.get(name, {})
    where, heading = (f"[{inside}] has {name} =", f"{inside}.{name}") if inside else (f"{name} is", name)
    require(isinstance(value, dict), f"{where} {value!r}; expected a table, [{heading}]")
    return dict(value)


def tables(name: str, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    value = document.get(name, [])
    is_list = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    require(is_list, f"{name} is {value!r}; expected tables, each under [[{name}]]")
    require(all(value), f"an [[{name}]] is empty; expected keys of a cell, such as variant")
    return list(value)


def build_table(given: dict[str, Any]) -> dict[str, Any]:
    for name in ("variant", "seq_len", "precision", "target"):
        remedy = f"give {name}s = [{toml_text(given.get(name))}]"
        require(name not in given, f"[build] has {name}, which a sweep varies; {remedy}")
    owners = {name: variant for variant, spec in ATTENTION_SPECS.items() for name in field_names(spec)}
    for name in given:
        require(
            name in BUILD_KEYS or name not in owners,
            f"[build] has {name}, a field of single variants; expected it under [options.{owners.get(name)}]",
        )
    check_keys("[build]", given, BUILD_KEYS)
    return given


def option_tables(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    check_keys("[options]", given, ATTENTION_SPECS)
    for variant in given:
        options = table(variant, given, "options")
        check_keys(f"[options.{variant}]", options, [*field_names(ATTENTION_SPECS[variant]), *BUILD_KEYS])
        require("seq_len" not in options, f"[options.{variant}] has seq_len, which a sweep varies; give seq_lens")
    return given


def engine_tables(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options by target: those of [engine], overridden by those of [engine.TARGET]."""
    common = {name: value for name, value in given.items() if name not in ENGINE_RUNTIMES}
    check_engine_options("[engine]", common, (*ENGINE_TYPES, "profiles", *ENGINE_RUNTIMES))
    merged = {}
    for target in ENGINE_RUNTIMES:
        own = table(target, given, "engine")
        check_engine_options(f"[engine.{target}]", own, (*ENGINE_TYPES, "profiles"))
        merged[target] = common | own
    return merged


def check_engine_options(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    check_keys(where, given, known)
    for name, value in given.items():
        if name != "profiles":
            check_type(f"{name} of {where}", value, ENGINE_TYPES[name])
            continue
        is_texts = isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
        example = 'profiles = ["batch=1:4:16,seq=128:1024:4096"]'
        require(is_texts, f"profiles of {where} is {value!r}; expected a list of texts, such as {example}")


def include_of(given: Mapping[str, Any]) -> Combination:
    require("variant" in given, f"an [[include]] has no variant; expected one of: {', '.join(ATTENTION_SPECS)}")
    values = {name: read(f"{name} of [[include]]", given[name]) for name, read in KEYS.items() if name in given}
    require(
        "gpu" not in given or values.get("target", ONNX_ONLY) != ONNX_ONLY,
        'an [[include]] has a gpu and no target; add target = "trt" or "trt-rtx", or leave the gpu out',
    )
    return Combination(**values, own={name: value for name, value in given.items() if name not in KEYS})


def exclude_of(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values that match, by key; variants by their labels."""
    check_keys("an [[exclude]]", given, tuple(KEYS))
    found: dict[str, list[Any]] = {}
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        require(bool(values), f"{name} of [[exclude]] is empty; expected a value or a list of values")
        read = [KEYS[name](f"{name} of [[exclude]]", entry) for entry in values]
        found[name] = [model.label for model in read] if name == "variant" else read
    return found


def check_tables_are_used(heading: str, names: Collection[str], kind: str, used: Collection[str]) -> None:
    """Raises SpecError for the table of a variant or target that was probably forgotten."""
    for name in names:
        require(
            name in used,
            f'[{heading}.{name}] is for a {kind} that the sweep does not have; add "{name}" to {kind}s, or leave it '
            "out",
        )


def product_of(axes: Mapping[str, Sequence[Any]]) -> list[Combination]:
    gpus = axes.get("gpu", ("",))
    places = [
        (target, gpu) for target in axes.get("target", (ONNX_ONLY,)) for gpu in (gpus if target != ONNX_ONLY else ("",))
    ]
    choices = (axes.get("variant", ()), axes.get("seq_len", (None,)), axes.get("precision", (None,)), places)
    count = math.prod(map(len, choices))
    require(
        count <= MAX_CELLS,
        f"the sweep has {count:,} cells; expected at most {MAX_CELLS:,}: split it into several files",
    )
    return [Combination(model, seq, precision, *place) for model, seq, precision, place in itertools.product(*choices)]


def cell_of(point: Combination, build: Mapping[str, Any], engine: Mapping[str, Any]) -> Cell:
    """build, engine: the fields that its variant and its target have in the file."""
    model = point.variant
    flags = {**build, **point.own, **model.options}
    flags |= {"seq_len": point.seq_len, "precision": point.precision, "variant": model.variant}
    try:
        spec = build_spec_from_options(flags, None).decided(has_engines=point.target != ONNX_ONLY)
        of_target = engine_of(point, spec, dict(engine))
    except SpecError as error:
        values = {name: getattr(point, name) for name in KEYS} | {"variant": model.variant}
        texts = (f"{name} = {toml_text(value)}" for name, value in values.items() if value)
        remedy = f"  To leave such cells out: [[exclude]] with some of {', '.join(texts)}"
        raise UserError(f"the cell {point} cannot be built: {error}", remedy) from error
    label = ATTENTION_SPECS[model.variant].label_with({**model.options, **point.own})
    return Cell(label=label, spec=spec, engine=of_target, gpu=point.gpu, versions=deciding_versions(point.target))


def engine_of(point: Combination, spec: BuildSpec, options: dict[str, Any]) -> EngineSpec | None:
    if point.target == ONNX_ONLY:
        return None
    profiles = profiles_from_texts(options.pop("profiles", ()), spec)
    if point.gpu and not ENGINE_RUNTIMES[point.target].built_where_it_runs:
        options["compute_capabilities"] = (int(point.gpu.removeprefix("sm_")),)
    return EngineSpec(target=point.target, profiles=profiles, **options)
