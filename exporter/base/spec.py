"""The spec of a build: a model spec and export options, from command-line flags and a TOML file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from effexport.base.dtypes import DTYPE_OF_PRECISION, QUANTIZED, Scales, TensorInfo
from effexport.base.records import read_toml
from effexport.models.attention_spec import AttentionSpec, attention_spec, field_names, known_fields
from effexport.models.checkpoints.spec import spec_from_checkpoint
from effexport.models.contract import GLOBAL_MASK, PAST, ModelContract, contract_from_recipe
from effexport.models.encoder.spec import TOKENS, EncoderSpec, Head, Pooling
from effexport.models.shapes import count
from effexport.models.size_formula import shape_of
from effexport.models.validation import (
    ShortRepr,
    SpecError,
    check_field_types,
    did_you_mean,
    require,
    shown,
    shown_name,
)
from effexport.models.variants import ATTENTION_SPECS
from effexport.plugins.ops import CARRIER_OPSET, OPS

if TYPE_CHECKING:
    from effexport.models.user.spec import ModuleSpec

Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
# What --precision bf16 applies to: linear layers, of a model that is float32 otherwise, or the whole graph.
Bfloat16 = Literal["linear", "graph"]
# What computes a linear recurrence: our operator ("own", for which "auto" stands), ONNX Runtime's or ONNX's.
Carrier = Literal["auto", "own", "contrib", "standard"]
CARRIERS: tuple[str, ...] = get_args(Carrier)
# Which golden values an artifact keeps.
Golden = Literal["full", "small", "none"]
GOLDEN: tuple[str, ...] = get_args(Golden)
# fp8 in Q/DQ pairs
OPSET_OF_FP8 = 19
OPSETS = range(18, 25)
# Scopes that options choose; a checkpoint and a module have their own.
SCOPES = ("encoder", "attention")
MASK_NAME = "attention_mask"
# Values of missing inputs: every token is kept and belongs to the first segment, and none is said to be global.
INPUT_DEFAULTS: dict[str, int] = {MASK_NAME: 1, "token_type_ids": 0, GLOBAL_MASK: 0}
# The graph of a decode step returns each state under the name of its input with this prefix.
NEXT_PREFIX = "next_"
# protobuf is limited to 2 GB; this leaves room for the graph itself
EXTERNAL_DATA_THRESHOLD_BYTES = 1_800_000_000
# Of users' own modules, which cannot say it themselves.
INDEPENDENT = "independent_samples"
QUANTIZATION_FIELDS = ("quantization", "keep_float", "quantize_embeddings", "smooth", "max_loss")
# Those that linear layers in bfloat16 have, too.
WITHOUT_SCALES = ("keep_float", "max_loss")


def opset_with(carrier: str, opset: int) -> int:
    """The opset of the file of a trace with this one."""
    return CARRIER_OPSET if carrier == "standard" else opset


def is_optional(tensor: TensorInfo) -> bool:
    """True if an input may be left out: one of INPUT_DEFAULTS, but no mask of floats that are added to scores."""
    return tensor.name in INPUT_DEFAULTS and not tensor.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True, kw_only=True, repr=False)
class BuildSpec(ShortRepr):
    """A model and how to export it.

    batch: the batch size of the first case of the parity check.
    fused: whether attention is exported as one custom operator if the variant has one, or as standard operators, for
    tools that support neither our kernels nor function bodies.
    inline: whether the file has the bodies of custom operators in place of the operators, so that it contains standard
    operators only.
    bf16: what is bfloat16 in that precision: linear layers, which any CPU runs, or the whole graph, for GPUs. None:
    a build decides, and an artifact has the whole graph.
    carrier: what computes operators that ONNX Runtime and ONNX have too. "auto" is "own", which is faster; see
    plugins/linear_recurrence/README.md.
    pool, truncate_dim, normalize, top_k: of the `head`.
    quantization: whether int8 activations get a scale for each token as the model runs ("dynamic", default of int8),
    or one for all from calibration ("static", and fp8).
    keep_float: layers that are not quantised, by path, or modules around them. quantize_embeddings: round tables of
    embeddings to int8, too. smooth: α of SmoothQuant, folded into layer norms; None without it.
    max_loss: the largest RMS error against the float model that quantisation may cause, as a share of the RMS: layers
    are put back to float until it holds.
    golden: which cases of the proof the artifact keeps, with PyTorch's answers: all, some short ones, or none.
    """

    model: ModelContract
    batch: int = 1
    precision: Precision = "fp32"
    opset: int = 20
    seed: int = 0
    external_data: bool = False
    fused: bool = True
    inline: bool = False
    bf16: Bfloat16 | None = None
    carrier: Carrier = "auto"
    pool: Pooling | None = None
    truncate_dim: int | None = None
    normalize: bool = False
    top_k: int | None = None
    quantization: Scales | None = None
    keep_float: tuple[str, ...] = ()
    quantize_embeddings: bool = False
    smooth: float | None = None
    max_loss: float | None = None
    golden: Golden = "full"

    def __post_init__(self) -> None:
        check_field_types(self)
        require(
            self.precision in list(DTYPE_OF_PRECISION),  # a list compares, a dict would hash what may be a list
            f"precision is {shown(self.precision)}; expected {', '.join(DTYPE_OF_PRECISION)}",
        )
        self.check_quantization()
        require(self.batch >= 1, f"batch is {self.batch}; expected at least 1")
        require(self.opset in OPSETS, f"opset is {self.opset}; expected {OPSETS.start} to {OPSETS.stop - 1}")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}; expected 0 to 2^63 - 1")
        require(self.carrier in CARRIERS, f"carrier is {shown(self.carrier)}; expected {', '.join(CARRIERS)}")
        self.check_carrier()
        require(self.golden in GOLDEN, f"golden is {shown(self.golden)}; expected {', '.join(GOLDEN)}")
        self.head.check(self.model)

    def check_quantization(self) -> None:
        """Raise SpecError for options of quantisation that contradict each other or cannot work."""
        require(
            not self.is_quantized or self.model.decoder is None,
            f"--precision {self.precision}{' of linear layers' * (self.precision == 'bf16')} does not apply to "
            f"{self.model.title}, whose decode step is not quantised; use fp16 or fp32, or bf16 of the whole graph",
        )
        require(self.bf16 in (None, "linear", "graph"), f"bf16 is {shown(self.bf16)}; expected linear or graph")
        require(
            self.bf16 is None or self.precision == "bf16",
            f"bf16 is {self.bf16}, which applies to --precision bf16 only; this is {self.precision}",
        )
        in_linear = self.precision == "bf16" and self.bf16 != "graph"
        allowed = QUANTIZATION_FIELDS if self.precision in QUANTIZED else WITHOUT_SCALES if in_linear else ()
        wrong = [n for n in QUANTIZATION_FIELDS if n not in allowed and getattr(self, n) not in (None, (), False)]
        kinds = f"int8{', linear layers in bf16' * (set(wrong) <= set(WITHOUT_SCALES))} and fp8"
        require(
            not wrong,
            f"{' and '.join(wrong)} applies to --precision {kinds} only; this is {self.precision}"
            f"{' of the whole graph' * (self.bf16 == 'graph')}",
        )
        require(
            isinstance(self.keep_float, tuple) and all(isinstance(name, str) for name in self.keep_float),
            f"keep_float is {shown(self.keep_float)}; expected a list of layers, such as ['lm_head']",
        )
        known = ("dynamic", "static")
        require(
            self.quantization in (None, *known),
            f"quantization is {shown(self.quantization)}; expected {' or '.join(known)}",
        )
        require(
            self.precision != "fp8" or self.quantization != "dynamic",
            "fp8 has static scales; leave --quantization out, or use --precision int8",
        )
        require(
            self.precision != "fp8" or self.opset >= OPSET_OF_FP8,
            f"opset is {self.opset}; expected at least {OPSET_OF_FP8} for fp8",
        )
        require(
            self.smooth is None or 0 < self.smooth < 1,
            f"smooth is {self.smooth}; expected a number between 0 and 1, usually 0.5",
        )
        require(
            self.max_loss is None or self.max_loss > 0,
            f"max_loss is {self.max_loss}; expected a positive number, such as 0.02 for 2 % of the output's RMS",
        )

    def check_carrier(self) -> None:
        """Raise SpecError if no other operator can stand for one of the model's. What a user's own module calls is
        known when it is traced."""
        if not self.is_carried:
            return
        require(
            not (self.inline and self.carrier == "contrib"),
            "--inline leaves standard operators only, and --carrier contrib is an operator of ONNX Runtime; use "
            "--carrier standard, or leave one of them out",
        )
        called = self.model.custom_ops(self.fused)
        if not self.model.is_traced_as_found and not any(OPS[op].carrier for op in called):
            raise SpecError(self.why_not_carried)

    @property
    def why_not_carried(self) -> str:
        """The error for a model without operators that another can stand for."""
        unfused = "" if self.fused else " with --unfused"
        names = ", ".join(op.onnx_name for op in OPS.values() if op.carrier)
        return (
            f"--carrier {self.carrier} was given, and {self.model.title}{unfused} has nothing that it computes; "
            f"expected a model with {names}; leave it out"
        )

    @property
    def is_carried(self) -> bool:
        """True if operators of ONNX Runtime or of ONNX stand for ours."""
        return self.carrier in ("contrib", "standard")

    @property
    def opset_of_file(self) -> int:
        """The opset of the file, which may be newer than that of the trace."""
        return opset_with(self.carrier, self.opset)

    def decided(self, *, has_engines: bool) -> BuildSpec:
        """The spec with what a build decides: where bfloat16 is, if that was left open."""
        if self.precision != "bf16" or self.bf16 is not None:
            return self
        return replace(self, bf16="graph" if has_engines or self.model.decoder is not None else "linear")

    def computed_in(self, precision: str) -> BuildSpec:
        """The spec of a file that computes in another precision as a whole."""
        unset = {item.name: item.default for item in fields(self) if item.name in (*QUANTIZATION_FIELDS, "bf16")}
        return replace(self, precision=precision, **unset)  # type: ignore[arg-type]

    @property
    def is_quantized(self) -> bool:
        """True if only products with weights are computed in the precision, and everything else in float32."""
        return self.precision in QUANTIZED or self.bf16 == "linear"

    @property
    def scales(self) -> Scales | None:
        """Of the inputs of quantised layers; None for bfloat16, which has none."""
        if self.precision == "bf16":
            return None
        return self.quantization or ("static" if self.precision == "fp8" else "dynamic")

    @property
    def arithmetic(self) -> str:
        """The precision of everything that is not quantised."""
        return "fp32" if self.is_quantized else self.precision

    @property
    def head(self) -> Head:
        """The file's outputs, if they differ from the model's."""
        return Head(self.pool, self.normalize, self.truncate_dim, self.top_k)

    @property
    def attention(self) -> AttentionSpec:
        attention: AttentionSpec = self.model.attention
        return attention

    @property
    def dtype(self) -> str:
        """Element type of the float inputs and outputs."""
        return DTYPE_OF_PRECISION[self.arithmetic]

    @property
    def custom_ops(self) -> dict[str, int]:
        """The number of nodes of each custom operator in the file."""
        return self._left_in_file(self.model.custom_ops(self.fused))

    @property
    def prefill_ops(self) -> dict[str, int]:
        """The same of the file that reads a prompt."""
        return self._left_in_file(self.model.prefill_ops(self.fused))

    def _left_in_file(self, called: Mapping[str, int]) -> dict[str, int]:
        """The operators of a trace that nothing else replaces."""
        gone = {op.onnx_name for op in OPS.values() if op.carrier and self.is_carried}
        return {} if self.inline else {op: count for op, count in called.items() if op not in gone}

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        of_model = tuple(
            TensorInfo(name, self.dtype_of(name, self.dtype if name == "hidden_states" else "int64"), dims)
            for name, dims in self.model.inputs.items()
        )
        return (*of_model, *(TensorInfo(name, "int64", dims) for name, dims in self.head.inputs().items()))

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        if self.head.is_wanted:
            return tuple(
                TensorInfo(name, "int64" if name == TOKENS else self.dtype, dims)
                for name, dims in self.head.outputs(self.model).items()
            )
        outputs = self.model.outputs.items()
        return tuple(TensorInfo(name, self.dtype_of(name, self.dtype), dims) for name, dims in outputs)

    @property
    def has_decode_step(self) -> bool:
        """True if the artifact also has the graphs of a causal model that run token by token."""
        return self.model.has_decode_step and not self.head.is_wanted

    @property
    def decodes(self) -> bool:
        """True if the artifact also has graphs that run token by token, be it after a prompt or for a source."""
        return self.has_decode_step or self.model.decoder is not None

    @property
    def source_tensors(self) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
        """Inputs and outputs of the graph of an encoder-decoder that reads the source."""
        assert self.model.decoder is not None
        token, memory = self.model.decoder.token, self.model.decoder.memory
        source = tuple(tensor for tensor in self.inputs if tensor.name != token)
        return source, tuple(TensorInfo(name, self.dtype, dims) for name, dims in memory.items())

    @property
    def step_tensors(self) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
        """Inputs and outputs of the graph of an encoder-decoder that decodes a token: the first input and the first
        output are the caller's, and all others belong to the state."""
        (source, memory), decoder = self.source_tensors, self.model.decoder
        assert decoder is not None
        token = next(tensor for tensor in self.inputs if tensor.name == decoder.token)
        first = [replace(tensor, dims=("batch", 1, *tensor.dims[2:])) for tensor in (token, self.outputs[0])]
        mask = [tensor for tensor in source if tensor.name == self.model.mask]
        cache = [TensorInfo(name, self.dtype, dims) for name, dims in decoder.cache.items()]
        # as torch.onnx writes it
        longer = {dim: f"{PAST} + 1" if dim == PAST else dim for tensor in cache for dim in tensor.dims}
        grown = [replace(t, name=NEXT_PREFIX + t.name, dims=tuple(longer[dim] for dim in t.dims)) for t in cache]
        return (first[0], *mask, *memory, *cache), (first[1], *grown)

    @property
    def pooled_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that have no axis of tokens."""
        fixed = self.model.fixed_seq_len is not None and not self.head.is_wanted  # then the length is a number
        return () if fixed else tuple(tensor.name for tensor in self.outputs if "seq" not in tensor.dims)

    @property
    def ranked_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that are indices in the order of their scores."""
        return () if self.top_k is None else (TOKENS,)

    def dtype_of(self, name: str, usual: str) -> str:
        """The element type of an input or output. usual: if the model does not say otherwise."""
        found = self.model.element_types.get(name, usual)
        return self.dtype if found == "float" else found

    @property
    def least_bytes(self) -> int:
        """Memory that no build can do without: the weights in float32, and one call with the example's batch and
        length. A build takes several times this."""
        others = {dim: 1 for tensor in self.inputs for dim in tensor.dims if isinstance(dim, str)}
        sizes = {**others, "batch": self.batch, "seq": self.model.seq_len}
        outputs = (math.prod(shape_of(tensor.dims, sizes)) for tensor in self.outputs)
        call = max(self.model.least_elements(self.batch, self.model.seq_len), sum(outputs))
        return 4 * (count(self.model.weights()) + call)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; `from_dict` reads it back."""
        # without what it does not use, an older effexport can read it
        left_out = [*(() if self.is_quantized else QUANTIZATION_FIELDS), *["golden"] * (self.golden == "full")]
        left_out += ["carrier"] * (self.carrier == "auto") + ["bf16"] * (self.bf16 is None)
        plain = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("model", *left_out)
        }
        recipe = self.model.recipe
        return {"scope": recipe.pop("scope"), **plain, **recipe}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BuildSpec:
        """The inverse of `to_dict`. Raises SpecError for values that cannot work."""
        options = dict(values)
        scope, model = options.pop("scope", None), options.pop("model", None)
        require(isinstance(model, Mapping), f"the spec has {shown(model)} as its model; expected a table of fields")
        return cls(model=contract_from_recipe(scope, model), **known_fields(cls, options, "a build"))


BUILD_FIELDS = [field.name for field in fields(BuildSpec) if field.name != "model"]
ENCODER_FIELDS = [name for name in field_names(EncoderSpec) if name != "attention"]
_EXAMPLE = 'expected a TOML file with options of the model, such as variant = "lsh"'
_TABLES = ("attention", "encoder", "build")


@dataclass(frozen=True)
class SpecFile:
    """The contents of a spec file. name: for messages. values: options, flat. engine: those of engines."""

    name: str
    values: dict[str, Any]
    engine: dict[str, Any]


def build_spec_from_options(flags: Mapping[str, Any], spec_file: SpecFile | Path | None) -> BuildSpec:
    """Merge a TOML file with flags; flags win, and a flag of None means "not given".

    Any field of BuildSpec, EncoderSpec or the variant's AttentionSpec may be set, plus `variant` and `scope`.
    Raises UserError for an unreadable file and SpecError for fields that do not exist or values that cannot work.
    """
    file = read_spec_file(spec_file) if isinstance(spec_file, Path) else spec_file
    options = dict(file.values) if file else {}
    options |= {name: value for name, value in flags.items() if value is not None}
    names = ", ".join(ATTENTION_SPECS)
    require("variant" in options, f"no variant given{f' in {file.name}' if file else ''}; expected one of: {names}")
    variant, scope = options.pop("variant"), options.pop("scope", "encoder")
    require(scope in SCOPES, f"scope is {shown(scope)}; expected {' or '.join(SCOPES)}")
    # an unknown variant is reported before its options are looked at
    known_attention = field_names(type(attention_spec(variant)))

    groups: dict[str, dict[str, Any]] = {"build": {}, "encoder": {}, "attention": {}}
    for name, value in options.items():
        value = tuple(value) if isinstance(value, list) else value
        if name in BUILD_FIELDS:
            groups["build"][name] = value
        elif name in ENCODER_FIELDS:
            require(scope == "encoder", f"{name} belongs to the encoder; it does not apply to scope attention")
            groups["encoder"][name] = value
        else:
            known = known_attention + BUILD_FIELDS + ENCODER_FIELDS
            label = f"--{name.replace('_', '-')}" if flags.get(name) is not None else name
            elsewhere = [other for other, spec in ATTENTION_SPECS.items() if name in field_names(spec)]
            require(
                name in known_attention or not elsewhere,
                f"{label} does not apply to {variant}, only to: {', '.join(elsewhere)}; leave it out",
            )
            require(
                name in known_attention,
                f"{variant} has no field {shown(name)}{did_you_mean(name, known)} Fields: {', '.join(known)}",
            )
            groups["attention"][name] = value
    attention = attention_spec(variant, groups["attention"])
    model = EncoderSpec(attention=attention, **groups["encoder"]) if scope == "encoder" else attention
    return BuildSpec(model=model, **groups["build"])


# Fields of some variants that have an option of their own.
VARIANT_OPTIONS = ("num_hashes", "pinv_init", "window", "global_tokens")
# Fields that flags may set for a checkpoint; config.json decides all others.
_CHECKPOINT_OPTIONS = ("task", "seq_len", "num_hashes", "pinv_init", "global_tokens")


def build_spec_from_checkpoint(flags: Mapping[str, Any], folder: Path) -> tuple[BuildSpec, tuple[str, ...]]:
    """The spec of a checkpoint folder, and sentences that its users should read.

    The seed of the build also draws the rotations of LSH layers, unless config.json has a hash_seed.
    Raises SpecError for a folder that is not a checkpoint, an unsupported one, or flags that it decides itself.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given:
        require(
            name in _CHECKPOINT_OPTIONS or name in BUILD_FIELDS,
            f"--{name.replace('_', '-')} was given with --checkpoint, whose config.json decides it; leave it out",
        )
    options = {name: given[name] for name in _CHECKPOINT_OPTIONS if name in given}
    model, notes = spec_from_checkpoint(folder, options, given.get("seed"))
    return BuildSpec(model=model, **build_fields(given)), notes


def build_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a BuildSpec among these; lists become tuples."""
    fields = {name: given[name] for name in BUILD_FIELDS if name in given}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def build_spec_from_module(flags: Mapping[str, Any], model: ModuleSpec) -> BuildSpec:
    """The spec of a user's own module. model: from `spec_from_module`, which reads the flag seq_len.

    Raises SpecError for flags that the module decides itself.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    for key in given:
        require(
            key in ("seq_len", INDEPENDENT) or key in BUILD_FIELDS,
            f"--{key.replace('_', '-')} was given with --module, which decides it; leave it out",
        )
    independent = given.get(INDEPENDENT, False)
    return BuildSpec(model=replace(model, independent_samples=independent), **build_fields(given))


def read_spec_file(source: str | Path | Mapping[str, Any]) -> SpecFile:
    """A spec file, or the dictionary of one; the tables [attention], [encoder] and [build] are optional grouping."""
    document = dict(source) if isinstance(source, Mapping) else read_toml(Path(source), "spec", _EXAMPLE)
    name = "spec" if isinstance(source, Mapping) else str(source)
    engine = document.pop("engine", {})
    require(isinstance(engine, dict), f"{name} has engine = {shown(engine)}; expected a table, [engine]")
    values: dict[str, Any] = {}
    tables = [document.pop(table) for table in _TABLES if isinstance(document.get(table), dict)]
    for key, value in (pair for table in (document, *tables) for pair in table.items()):
        field = key.replace("-", "_")
        require(
            not isinstance(value, dict),
            f"unknown table [{shown_name(key)}] in {name}; expected {', '.join((*_TABLES, 'engine'))}",
        )
        require(field not in values, f"{name} sets {shown_name(field)} twice")
        values[field] = value
    return SpecFile(name, values, {key.replace("-", "_"): value for key, value in engine.items()})


def options_from_toml(path: Path) -> dict[str, Any]:
    """The options of a spec file, but for those of engines."""
    return read_spec_file(path).values
