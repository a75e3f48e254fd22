"""The cases of a benchmark: models × lengths × batches × runtimes. Loads no framework."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from effexport.base.dtypes import FLOAT_PRECISIONS
from effexport.base.errors import UserError
from effexport.base.runtimes import BENCH_RUNTIMES, DEFAULT_RUNTIME
from effexport.base.spec import BuildSpec
from effexport.base.units import tokens_from_text
from effexport.bench.results import BenchCase
from effexport.models.attention_spec import AttentionSpec, attention_spec
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.shapes import Product
from effexport.models.validation import did_you_mean
from effexport.models.variants import ATTENTION_SPECS

SCOPES = ("core", "attention", "encoder")


@dataclass(frozen=True)
class Model:
    """A variant with some fields of its spec set, and what tables call it."""

    variant: str
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", ATTENTION_SPECS[self.variant].label_with(self.options))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The choices of a benchmark; every combination is a case.

    scope: "core" times attention on ready queries, keys and values, "attention" a layer with its projections, "encoder"
    a whole encoder. encoder: fields of its spec that differ from their defaults.
    """

    models: tuple[Model, ...] = tuple(Model(variant) for variant in ("softmax", "linear", "nystrom", "lsh"))
    seq_lens: tuple[int, ...] = (512, 2048, 8192)
    batches: tuple[int, ...] = (1,)
    precisions: tuple[str, ...] = ("fp32",)
    runtimes: tuple[str, ...] = ("torch", DEFAULT_RUNTIME)
    scope: str = "core"
    heads: int = 8
    head_dim: int = 64
    encoder: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names("--runtimes", self.runtimes, BENCH_RUNTIMES)
        check_names("--precision", self.precisions, FLOAT_PRECISIONS)
        check_names("--scope", (self.scope,), SCOPES)
        for option, values in (
            ("--seq-lens", self.seq_lens),
            ("--batch", self.batches),
            ("--heads", (self.heads,)),
            ("--head-dim", (self.head_dim,)),
        ):
            check_distinct(option, values)
            for value in values:
                if value < 1:
                    raise UserError(f"{option} has {value}; expected positive integers")
        check_distinct("--variants", [model.label for model in self.models])
        # a spec that cannot work is refused before anything is measured
        for case in self.cases():
            spec_from_case(case)

    def cases(self) -> Iterator[BenchCase]:
        """Shorter sequences first; of one size, model by model."""
        sizes = itertools.product(sorted(self.seq_lens), sorted(self.batches), self.precisions)
        for (seq_len, batch, precision), model, runtime in itertools.product(sizes, self.models, self.runtimes):
            yield BenchCase(
                label=model.label,
                variant=model.variant,
                runtime=runtime,
                scope=self.scope,
                seq_len=seq_len,
                batch=batch,
                precision=precision,
                heads=self.heads,
                head_dim=self.head_dim,
                options=model.options,
                encoder=self.encoder,
            )


def models_from_text(text: str, option: str = "--variants") -> tuple[Model, ...]:
    """`softmax,nystrom:num_landmarks=32,lsh:num_hashes=4:chunk_length=32` → models.

    Raises UserError for text of another form; an unknown variant or field is reported by Grid.
    """
    return tuple(model_from_text(part, option) for part in words(text, option))


def model_from_text(text: str, option: str) -> Model:
    variant, *settings = text.split(":")
    if variant not in ATTENTION_SPECS:
        raise UserError(
            f"unknown variant {variant!r} in {option}{did_you_mean(variant, ATTENTION_SPECS)} "
            f"Expected some of: {', '.join(ATTENTION_SPECS)}"
        )
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"cannot read {text!r} in {option}; expected VARIANT:FIELD=VALUE, such as lsh:num_hashes=4")
        options[name.replace("-", "_")] = value_from_text(value)
    return Model(variant, options)


def value_from_text(text: str) -> Any:
    """An integer, a number, true, false, none, or the text itself."""
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def words(text: str, option: str) -> tuple[str, ...]:
    """The parts of a list with commas. Raises UserError for an empty one."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise UserError(f"{option} is {text!r}; expected a list with commas, without empty parts")
    return parts


def numbers(text: str, option: str) -> tuple[int, ...]:
    parts = words(text, option)
    for part in parts:
        if not part.lstrip("-").isdecimal():
            raise UserError(f"{option} has {part!r}; expected integers with commas between them, such as 512,2048")
    return tuple(int(part) for part in parts)


def lengths(text: str, option: str) -> tuple[int, ...]:
    return tuple(tokens_from_text(part, option) for part in words(text, option))


def check_names(option: str, given: Collection[str], known: Collection[str]) -> None:
    check_distinct(option, given)
    for name in given:
        if name not in known:
            raise UserError(
                f"unknown name {name!r} in {option}{did_you_mean(name, known)} Expected: {', '.join(known)}"
            )


def check_distinct(option: str, given: Collection[object]) -> None:
    if not given:
        raise UserError(f"{option} is empty; expected at least one value")
    for value in given:
        if list(given).count(value) > 1:
            raise UserError(f"{option} has {value} twice")


def spec_from_case(case: BenchCase) -> BuildSpec:
    """The model of a case as it is exported: seq_len is the measured length, and our operators are fused if possible.

    Raises SpecError for options that cannot work.
    """
    return BuildSpec(model=model_of_case(case), batch=case.batch, precision=case.precision, fused=True)  # type: ignore[arg-type]


def model_of_case(case: BenchCase) -> AttentionSpec | EncoderSpec:
    sizes = {"dim": case.heads * case.head_dim, "heads": case.heads, "seq_len": case.model_seq_len or case.seq_len}
    attention = attention_spec(case.variant, sizes | case.options)
    return EncoderSpec(attention=attention, **case.encoder) if case.scope == "encoder" else attention


def products_of_case(case: BenchCase) -> tuple[Product, ...]:
    """The matrix products of one call: for the scope "core" those of attention alone, else with all projections."""
    model = model_of_case(case)
    products = model.attention.core_products if case.scope == "core" else model.products
    return tuple(products(case.batch, case.seq_len))


def logits_bytes(case: BenchCase) -> int:
    """The largest intermediate value of the plain formula, float32, such as the logits of softmax."""
    return 4 * model_of_case(case).attention.largest_intermediate(case.batch, case.seq_len)
