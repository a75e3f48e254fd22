"""The model, the candidates and the limits of `effexport bench --advise`, from its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.runtimes import DEFAULT_RUNTIME

if TYPE_CHECKING:
    from effexport.bench.advice import Limits, Plan
    from effexport.bench.grid import Grid, Model
    from effexport.bench.quality import Judged

# Options that set fields of a spec; they win over the spec file.
DESCRIBING = ("dim", "heads", "head_dim", "layers", "scope", "seq_len", "batch", "precision")


@dataclass(frozen=True)
class AdviceRequest:
    """The options as they were given, by name; None for those that were not."""

    flags: Mapping[str, Any]

    def plan(self) -> Plan:
        """Raises UserError and SpecError for options that contradict each other or cannot work."""
        from effexport.bench.advice import Plan

        self.check()
        limits, results = self.limits(), self.results()
        options = self.described(results)
        fields = self.grid_fields(options)
        grid, refused = grid_of(self.models(results, options), attention_options(options), fields)
        plan = Plan(grid=grid, limits=limits, refused=refused, spec_file=str(self.flags["spec_file"] or ""))
        if not results:
            return plan
        from effexport.bench.quality import quality_of_cases

        return replace(plan, quality=quality_of_cases(plan.cases, results))

    def check(self) -> None:
        from effexport.models.validation import require

        flags = self.flags
        require(flags["seq_lens"] is None, "--seq-lens does not work with --advise; give one --seq-len")
        require(flags["preset"] is None, "--preset and --advise cannot be combined")
        require(
            flags["memory_limit"] is None or not flags["no_memory"],
            "--memory-limit needs the peak memory of every row; leave --no-memory out",
        )

    def limits(self) -> Limits:
        from effexport.bench.advice import Limits
        from effexport.units import bytes_from_text, milliseconds_from_text

        latency, size = self.flags["latency_limit"], self.flags["memory_limit"]
        return Limits(
            latency_ms=None if latency is None else milliseconds_from_text(latency, "--latency-limit"),
            memory_bytes=None if size is None else bytes_from_text(size, "--memory-limit"),
        )

    def results(self) -> tuple[Judged, ...]:
        """Those of --quality."""
        if not self.flags["quality"]:
            return ()
        from effexport.bench.grid import words
        from effexport.bench.quality import judged_from_files

        return judged_from_files(Path(word) for text in self.flags["quality"] for word in words(text, "--quality"))

    def described(self, results: Sequence[Judged]) -> dict[str, Any]:
        """The fields of the model and of its export: those of the spec file, or of the first model that was judged,
        overridden by options."""
        from effexport.bench.grid import numbers, words
        from effexport.models.validation import require
        from effexport.spec import options_from_toml

        file = self.flags["spec_file"]
        if file or not results:
            options = options_from_toml(file) if file else {}
        else:
            from effexport.bench.quality import described_by

            options = described_by(results[0].spec)
        given = {name: self.flags[name] for name in DESCRIBING if self.flags[name] is not None}
        for name, read in (("batch", numbers), ("precision", words)):
            if name in given:
                values = read(given[name], f"--{name}")
                require(len(values) == 1, f"--{name} is {given[name]!r}; --advise works with one value")
                given[name] = values[0]
        options |= given
        require("seq_len" in options, "--advise needs a length, such as --seq-len 8192 or --seq-len 32k")
        length = options["seq_len"]
        require(isinstance(length, int) and length > 0, f"seq_len is {length}; expected a positive integer")
        require(
            options.get("fused", True) is True and options.get("inline", False) is False,
            f"{file} turns fused operators off, and --advise measures fused operators; remove fused and inline",
        )
        return options

    def grid_fields(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the grid, apart from its models and their width."""
        from effexport.bench.grid import words
        from effexport.models.validation import require
        from effexport.spec import ENCODER_FIELDS

        encoder = {name: options[name] for name in ENCODER_FIELDS if name in options}
        scope = options.get("scope", "encoder" if self.flags["spec_file"] or encoder else "attention")
        require(
            scope in ("attention", "encoder"),
            f"--scope {scope} does not work with --advise, which measures what `effexport build` exports; expected "
            "attention or encoder",
        )
        require(
            scope == "encoder" or not encoder,
            f"{', '.join(encoder)} belongs to the encoder; it does not apply to scope attention",
        )
        runtimes = self.flags["runtimes"]
        return {
            "seq_lens": (options["seq_len"],),
            "batches": (options.get("batch", 1),),
            "precisions": (options.get("precision", "fp32"),),
            "runtimes": (DEFAULT_RUNTIME,) if runtimes is None else words(runtimes, "--runtimes"),
            "scope": scope,
            "encoder": encoder,
        }

    def models(self, results: Sequence[Judged], options: Mapping[str, Any]) -> tuple[Model, ...]:
        """Those of --variants, those that were judged, or all variants."""
        from effexport.bench.grid import Model, models_from_text
        from effexport.models.variants import ATTENTION_SPECS

        text = self.flags["variants"]
        if text is None and results:
            from effexport.bench.quality import models_of_results

            return models_of_results(results, options)
        return tuple(Model(variant) for variant in ATTENTION_SPECS) if text is None else models_from_text(text)


def attention_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that describe attention layers, of any variant."""
    from effexport.spec import BUILD_FIELDS, ENCODER_FIELDS

    others = {"variant", "scope", "seq_len", *BUILD_FIELDS, *ENCODER_FIELDS}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if name not in others
    }


def grid_of(
    models: Sequence[Model], options: Mapping[str, Any], fields: Mapping[str, Any]
) -> tuple[Grid, dict[str, str]]:
    """The models with those of the options that they have, and why some cannot have them.

    Raises SpecError for an option that no model has, and if no model can have its options.
    """
    from effexport.bench.grid import Grid, Model
    from effexport.models.attention_spec import AttentionSpec, attention_spec, field_names
    from effexport.models.validation import SpecError, did_you_mean, require
    from effexport.models.variants import ATTENTION_SPECS

    known = {name for model in models for name in field_names(ATTENTION_SPECS[model.variant])}
    for name in options:
        require(
            name in known, f"the spec file sets {name!r}, a field of no compared variant{did_you_mean(name, known)}"
        )
    heads, head_dim = options.get("heads", AttentionSpec.heads), options.get("head_dim")
    by_heads = head_dim is not None and "dim" not in options
    dim = heads * head_dim if by_heads else options.get("dim", AttentionSpec.dim)
    width = attention_spec("softmax", {"dim": dim, "heads": heads, "head_dim": head_dim})
    fields = {**fields, "heads": heads, "head_dim": width.head_size}
    extra = {} if width.inner_dim == dim else {"dim": dim, "head_dim": head_dim}

    possible: list[Model] = []
    refused: dict[str, str] = {}
    for model in models:
        names = [
            name for name in field_names(ATTENTION_SPECS[model.variant]) if name not in ("dim", "heads", "head_dim")
        ]
        own = {name: options[name] for name in names if name in options} | extra | model.options
        described = Model(model.variant, own, model.label)
        try:
            Grid(models=(described,), **fields)
            possible.append(described)
        except SpecError as error:
            refused[model.label] = str(error)
    if not possible:
        raise SpecError(next(iter(refused.values())))
    return Grid(models=tuple(possible), **fields), refused
