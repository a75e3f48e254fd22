"""The cells of a sweep: the product of its axes, minus [[exclude]], plus [[include]]."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from effexport.bench.grid import Model
from effexport.errors import UserError
from effexport.models.validation import SpecError, require
from effexport.models.variants import ATTENTION_SPECS
from effexport.runtimes import ENGINE_RUNTIMES
from effexport.spec import BuildSpec, build_spec_from_options
from effexport.sweep.cell import ONNX_ONLY, Cell, deciding_versions
from effexport.sweep.sweep_file import CELL_KEYS, SweepFile
from effexport.tensorrt.spec import EngineSpec, profiles_from_texts

# A larger sweep is probably larger than intended.
MAX_CELLS = 10_000


@dataclass(frozen=True)
class Point:
    """A point in the product of the axes. None and "": not given, or not applicable."""

    model: Model
    seq_len: int | None
    precision: str | None
    target: str
    gpu: str

    def matches(self, pattern: Mapping[str, Sequence[Any]]) -> bool:
        """Whether a pattern of [[exclude]] applies; a variant may be given with or without its options."""
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
    cells = [cell_of(point, {**file.build, **file.options.get(point.model.variant, {})}, file) for point in kept]
    cells += [included(entry, file) for entry in file.include]
    require(
        bool(cells),
        f"the sweep is empty: [[exclude]] removes all {len(points)} cells; exclude fewer",
    )
    # an [[include]] may repeat a cell of the product
    return list({cell.digest: cell for cell in cells}.values())


def product_of(file: SweepFile) -> list[Point]:
    if not file.variants:
        return []
    targets = file.targets or (ONNX_ONLY,)
    places = [(target, gpu) for target in targets for gpu in (file.gpus if target != ONNX_ONLY else ()) or ("",)]
    axes = (file.variants, file.seq_lens or (None,), file.precisions or (None,), places)
    count = math.prod(len(axis) for axis in axes)
    require(
        count <= MAX_CELLS,
        f"the sweep has {count:,} cells; expected at most {MAX_CELLS:,}: split it into several files",
    )
    return [Point(model, seq, precision, *place) for model, seq, precision, place in itertools.product(*axes)]


def included(entry: Mapping[str, Any], file: SweepFile) -> Cell:
    model: Model = entry["variant"]
    target = entry.get("target", ONNX_ONLY)
    require(
        "gpu" not in entry or target != ONNX_ONLY,
        'an [[include]] has a gpu and no target; add target = "trt" or "trt-rtx", or leave the gpu out',
    )
    point = Point(model, entry.get("seq_len"), entry.get("precision"), target, entry.get("gpu", ""))
    own = {name: value for name, value in entry.items() if name not in CELL_KEYS}
    return cell_of(point, {**file.build, **file.options.get(model.variant, {}), **own}, file, own)


def cell_of(point: Point, fields: Mapping[str, Any], file: SweepFile, own: Mapping[str, Any] | None = None) -> Cell:
    """own: fields that an [[include]] sets; they become part of the label."""
    axes = {"seq_len": point.seq_len, "precision": point.precision}
    flags = {**fields, **point.model.options, **axes, "variant": point.model.variant}
    try:
        spec = build_spec_from_options({name: tuples(value) for name, value in flags.items()}, None)
        engine = engine_of(point, spec, file)
    except SpecError as error:
        excluding = exclusion(point)
        problem = f"the cell {point} cannot be built: {error}"
        raise UserError(problem, f"  To leave such cells out: {excluding}") from error
    label = ATTENTION_SPECS[point.model.variant].label_with({**point.model.options, **(own or {})})
    return Cell(label=label, spec=spec, engine=engine, gpu=point.gpu, versions=deciding_versions(point.target))


def tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def exclusion(point: Point) -> str:
    """The table that excludes a point, for an error message."""
    texts = ", ".join(f"{name} = {value!r}".replace("'", '"') for name, value in point.named.items() if value)
    return f"[[exclude]] with some of {texts}"


def engine_of(point: Point, spec: BuildSpec, file: SweepFile) -> EngineSpec | None:
    if point.target == ONNX_ONLY:
        return None
    options = dict(file.engine.get(point.target, {}))
    profiles = profiles_from_texts(options.pop("profiles", ()), spec)
    if point.gpu and not ENGINE_RUNTIMES[point.target].built_where_it_runs:
        options["compute_capabilities"] = (int(point.gpu.removeprefix("sm_")),)
    return EngineSpec(target=point.target, profiles=profiles, **options)
