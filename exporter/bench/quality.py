"""Quality of an advice's candidates: results of `effexport evaluate`, matched with the models that are timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from effexport.base.errors import UserError
from effexport.base.records import read_record
from effexport.base.spec import SCOPES, BuildSpec
from effexport.base.units import listed
from effexport.bench.grid import Model, model_of_case
from effexport.bench.results import BenchCase
from effexport.evaluation.figures import BITS, LANGUAGE, LOSS, Estimate, Evaluation
from effexport.models.attention_spec import SHARED_FIELDS
from effexport.models.contract import ModelContract
from effexport.models.validation import SpecError
from effexport.report.rendering.text import interval_text

EXPECTED = "expected what `effexport evaluate ARTIFACT --data FILE -o FILE.json` writes"


@dataclass(frozen=True)
class Judged:
    """A result of `effexport evaluate`, from a file, and the spec of the model that was judged."""

    path: Path
    found: Evaluation
    spec: BuildSpec


@dataclass(frozen=True)
class CandidateQuality:
    """Quality of a candidate. loss: bits per byte if known, else nats per answer. model: the one that was judged."""

    loss: Estimate
    model: str
    data: str

    @property
    def text(self) -> str:
        """`2.1034 bits per byte (2.0812 to 2.1256)`."""
        value, space, interval = interval_text(self.loss).partition(" ")
        return f"{value} {self.unit}{space}{interval}"

    @property
    def unit(self) -> str:
        return BITS if self.loss.name == BITS else "nats per answer"


def judged_from_files(paths: Iterable[Path]) -> tuple[Judged, ...]:
    """The results in files and folders. Raises UserError for other files, and unless all are of the same answers."""
    files = [file for path in paths for file in (files_of_folder(path) if path.is_dir() else [path])]
    results = tuple(judged_from_json(file) for file in files)
    first = results[0]
    for one in results[1:]:
        if answers_of(one.found) != answers_of(first.found):
            raise UserError(
                f"{first.path} and {one.path} cannot be compared: {told(first.found)}; {told(one.found)}; expected the "
                "same data: evaluate both with the same --data, --window, --stride, --rows and --seed"
            )
    return results


def files_of_folder(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise UserError(f"--quality {folder}: there is no .json in this folder; {EXPECTED}")
    return files


def judged_from_json(path: Path) -> Judged:
    found = read_record(path, Evaluation, EXPECTED)
    try:
        spec = BuildSpec.from_dict(found.spec)
        figures = [end for one in found.estimates for end in (one.value, one.low, one.high) if end is not None]
        if LOSS not in {one.name for one in found.estimates} or not all(map(math.isfinite, figures)):
            raise ValueError("a loss and finite figures are missing")
    except (ValueError, OverflowError, SpecError, KeyError, TypeError) as error:
        raise UserError(f"cannot read --quality {path}; {EXPECTED}: {error}") from error
    if spec.model.scope not in SCOPES:
        raise UserError(
            f"--quality {path} judged {spec.model.title}, a checkpoint or a module; --advise times models that "
            "`effexport build --variant` describes: leave this result out"
        )
    return Judged(path, found, spec)


def answers_of(found: Evaluation) -> tuple[object, ...]:
    """A key that two results share if they are about the same answers."""
    return found.objective, found.data_sha256, found.rows, found.answers


def told(found: Evaluation) -> str:
    return f"{found.objective} on {found.data} (SHA-256 {found.data_sha256[:8]}…), {found.answers:,} answers"


def described_by(spec: BuildSpec) -> dict[str, Any]:
    """The description of a model as in a spec file, apart from the fields of its variant."""
    attention = {name: getattr(spec.attention, name) for name in sorted(SHARED_FIELDS)}
    if attention["bias"] == type(spec.attention).bias:
        del attention["bias"]  # each variant has its own default
    return {"scope": spec.model.scope, "precision": spec.precision, **attention, **spec.model.around_attention}


def models_of_results(results: Sequence[Judged], options: Mapping[str, Any]) -> tuple[Model, ...]:
    """The models that were judged, as candidates. options: those of all candidates, from a spec file."""
    models: dict[str, Model] = {}
    for one in results:
        attention = one.spec.attention
        own = (field for field in fields(attention) if field.name not in SHARED_FIELDS)
        values = {
            field.name: getattr(attention, field.name)
            for field in own
            if field.name in options or getattr(attention, field.name) != field.default
        }
        models[attention.label] = Model(attention.variant, values, attention.label)
    return tuple(models.values())


def quality_of_cases(cases: Sequence[BenchCase], results: Sequence[Judged]) -> dict[tuple[str, str], CandidateQuality]:
    """The quality of candidates by label and runtime: a result in the same runtime, else one in another runtime.

    Raises UserError for a result of a model that is not timed, and for two of one model in one runtime.
    """
    found: dict[str, dict[str, Judged]] = {}
    for one in results:
        label, runtime = matching(cases, one).label, one.found.runtime
        other = found.setdefault(label, {}).setdefault(runtime, one)
        if other is not one:
            raise UserError(
                f"{other.path} and {one.path} both are results of {label} on {runtime}; expected one: leave one out"
            )
    has_bits = all(BITS in {estimate.name for estimate in one.found.estimates} for one in results)
    quality = {}
    for case in cases:
        of_label = found.get(case.label, {})
        judged = of_label.get(case.runtime) or next(iter(of_label.values()), None)
        if judged is not None:
            loss = judged.found.figure(BITS if has_bits else LOSS)
            quality[case.label, case.runtime] = CandidateQuality(loss, judged.found.model, judged.found.data)
    return quality


def matching(cases: Sequence[BenchCase], one: Judged) -> BenchCase:
    """The case whose model was judged. Raises UserError, with what differs, if there is none."""
    alike = [case for case in cases if case.variant == one.spec.attention.variant]
    if not alike:
        known = "; ".join(dict.fromkeys(case.label for case in cases))
        raise UserError(
            f"{one.path} judged {one.found.label}, which is not among the candidates: {known}; leave this result out, "
            "or --variants, so that all models that were judged are candidates"
        )
    closest = min(alike, key=lambda case: len(differences(case, one)))
    found = differences(closest, one)
    if found:
        judged, timed = (listed([f"{name} {pair[n]}" for name, pair in found.items()]) for n in (0, 1))
        raise UserError(
            f"{one.path} judged {one.found.label} with {judged}, but --advise times it with {timed}; time the model "
            "that was judged, or evaluate the one that is timed"
        )
    return closest


def differences(case: BenchCase, one: Judged) -> dict[str, tuple[object, object]]:
    """By name, what was judged and what is timed, where the two differ."""
    judged, timed = facts(one.spec.model), facts(model_of_case(case))
    pairs = {name: (judged.get(name), timed.get(name)) for name in judged | timed}
    pairs["precision"] = (one.found.precision, case.precision)
    # a text is cut into windows, and other rows are as long as they are
    tokens = one.found.tokens if one.found.objective in LANGUAGE else max(one.found.tokens, case.seq_len)
    pairs["tokens per row"] = (tokens, case.seq_len)
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def facts(model: ModelContract) -> dict[str, object]:
    """The fields of a model, flat; two specs of the same model have the same ones."""
    attention = model.attention
    found = {"scope": model.scope, **attention.to_dict(), **model.around_attention}
    # as if they were not given
    if attention.inner_dim == attention.dim:
        found["head_dim"] = None
    if found.get("ff_dim") == 4 * attention.dim:
        found["ff_dim"] = None
    return found
