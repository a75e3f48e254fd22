"""The options of the verbs, each declared once; option_fields.py says how a field is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from effexport.base.dtypes import Scales
from effexport.base.errors import UserError
from effexport.base.formatting import tokens_from_text
from effexport.base.option_fields import (
    A_FACTORY,
    A_FILE,
    A_FOLDER,
    A_NUMBER,
    Option,
    Options,
    argument,
    file_option,
    given,
    option,
    python_option,
)
from effexport.base.runtimes import ARTIFACT_RUNTIMES, DEFAULT_RUNTIME, ENGINE_RUNTIMES, ORT_RUNTIMES
from effexport.base.spec import ENCODER_FIELDS, BuildSpec, Carrier, Golden, Precision
from effexport.keyless import TOKEN_VARIABLE, TRUST_CONFIG, IdentityOptions
from effexport.models.attention_spec import field_names
from effexport.models.checkpoints.spec import tasks
from effexport.models.encoder.spec import Pooling
from effexport.models.variants import ATTENTION_SPECS
from effexport.runners.options import IMPLEMENTATIONS, RunOptions
from effexport.tensorrt.spec import EngineSpec

if TYPE_CHECKING:
    from torch import nn

    from effexport.base.dtypes import Array

    Module = nn.Module | str
    OnlyModule = nn.Module
    AnyModel = nn.Module | str | Path
else:  # types of arguments are read when a command is made, which imports no PyTorch
    Module = OnlyModule = AnyModel = Array = object

# Called with the name of a stage as it begins, and None; and while TensorRT builds an engine, with what it is doing and
# how much of that is done, 0 to 1.
Progress = Callable[[str, float | None], None]


def quiet(stage: str, share: float | None) -> None:
    """Ignore progress."""


WHAT, SIZES, RETURNS, FILE = "What to export", "Sizes of the model", "What it returns", "The ONNX file"
QUANTISATION = "Quantisation, with --precision int8 or fp8"
CHECK, RUNS, ENGINES = "The check", "How the model runs", "TensorRT engines"
# In the order of --help.
SECTIONS = (WHAT, SIZES, RETURNS, FILE, QUANTISATION, CHECK, RUNS, ENGINES)
GENERATED = "With --generate: {}; default: {}."
MODULE = "an nn.Module, not its class, or 'package.module:factory'"
AGAINST = "an nn.Module, 'package.module:factory', an artifact folder or an ONNX file"
COMPARED = "a path, '@' and a runtime, both, or 'torch'"
HINTS = tuple(dict.fromkeys(hint for runtime in ARTIFACT_RUNTIMES.values() for hint in runtime.precision_hints))


@dataclass(frozen=True, kw_only=True)
class ProgressOptions(Options):
    progress: Progress = python_option(quiet, "Called as each stage begins.")


@dataclass(frozen=True, kw_only=True)
class SpecOptions(Options):
    """Fields of a BuildSpec and of its model; None leaves them to a spec file, and then to their default there."""

    scope: Literal["encoder", "attention"] | None = option(
        None, "encoder (default), or attention: one layer.", SIZES, metavar="WHAT", in_file=True
    )
    dim: int | None = option(None, "Model width.", SIZES, metavar=A_NUMBER, in_file=True)
    heads: int | None = option(None, "Attention heads.", SIZES, metavar=A_NUMBER, in_file=True)
    layers: int | None = option(None, "Encoder blocks.", SIZES, metavar=A_NUMBER, in_file=True)
    seq_len: int | None = option(
        None,
        "Tokens to export and tune for, such as 512 or 32k.",
        SIZES,
        metavar="LENGTH",
        read=tokens_from_text,
        in_file=True,
    )
    batch: int | None = option(None, "Batch of the example, which is checked.", SIZES, metavar=A_NUMBER, in_file=True)
    causal: bool | None = option(None, "Attend to earlier positions only.", SIZES, in_file=True)
    num_hashes: int | None = option(None, "Hash rounds of LSH attention.", SIZES, metavar=A_NUMBER, in_file=True)
    pinv_init: Literal["per_head", "global"] | None = option(
        None, "Scale of Nyström's inverse: per_head, global.", SIZES, metavar="SCALE", in_file=True
    )
    window: int | None = option(None, "Tokens that window and aft-local see.", SIZES, metavar=A_NUMBER, in_file=True)
    global_tokens: int | None = option(
        None, "First tokens that all see; in checkpoints, the most.", SIZES, metavar=A_NUMBER, in_file=True
    )
    seed: int | None = option(None, "Seed of the random weights.", SIZES, metavar=A_NUMBER, in_file=True)

    lm_head: bool | None = option(None, "Logits, not hidden states.", RETURNS, in_file=True)
    pool: Pooling | None = option(
        None, "A vector for each sample: mean, cls or max.", RETURNS, metavar="HOW", in_file=True
    )
    truncate_dim: int | None = option(
        None, "With --pool: only the first N channels.", RETURNS, metavar=A_NUMBER, in_file=True
    )
    normalize: bool | None = option(None, "With --pool: scale to length 1.", RETURNS, in_file=True)
    top_k: int | None = option(
        None, "Of a language model: the N likeliest tokens.", RETURNS, metavar=A_NUMBER, in_file=True
    )

    precision: Precision | None = option(
        None, "fp32 (default), fp16, bf16, int8 or fp8.", FILE, metavar="TYPE", in_file=True
    )
    bf16: Literal["linear", "graph"] | None = file_option(
        None, "With --precision bf16: linear layers only (default without an engine), or the graph, for GPUs.", FILE
    )
    opset: int | None = option(None, "ONNX opset, 18 to 24.", FILE, metavar=A_NUMBER, in_file=True)
    external_data: bool | None = option(None, "Weights in a file of their own.", FILE, in_file=True)
    fused: bool | None = option(
        None, "Attention as one operator (default).", FILE, flag="--fused/--unfused", in_file=True
    )
    inline: bool | None = option(None, "Standard operators only; no kernels.", FILE, in_file=True)
    carrier: Carrier | None = option(
        None, "Of recurrences: auto, own, contrib, standard.", FILE, metavar="WHOSE", in_file=True
    )

    quantization: Scales | None = option(
        None, "dynamic (int8's default), or static scales.", QUANTISATION, metavar="SCALES", in_file=True
    )
    max_loss: float | None = option(
        None, "Keep layers float until it costs at most this.", QUANTISATION, metavar="SHARE", in_file=True
    )
    keep_float: Sequence[str] | None = option(
        None, "Leave a layer in float, as lm_head. Repeatable.", QUANTISATION, metavar="LAYER", in_file=True
    )
    smooth: float | None = file_option(None, "α of SmoothQuant, folded into layer norms; usually 0.5.", QUANTISATION)
    quantize_embeddings: bool | None = file_option(None, "Round tables of embeddings to int8, too.", QUANTISATION)
    golden: Golden | None = option(
        None, "Values to keep: full (default), small, none.", CHECK, metavar="HOW", in_file=True
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """Fields of an EngineSpec; None leaves them to the table [engine] of a spec file, and then to their default."""

    targets: Sequence[str] = option(
        (),
        "Also an engine: trt, or trt-rtx (needs no GPU).",
        ENGINES,
        flag="--target",
        metavar="NAME",
        choices=(*ENGINE_RUNTIMES, "none"),
        expected="a list of names, such as ['trt-rtx']",
    )
    profiles: Sequence[str] | None = option(
        None,
        "Sizes, as seq=128:1024:4096. Repeatable.",
        ENGINES,
        flag="--profile",
        metavar="DIM=MIN:OPT:MAX",
        in_file=True,
    )
    timing_cache: str | Path | None = option(
        None, "trt: kernel times, for a faster next build.", ENGINES, metavar=A_FILE
    )
    refittable: bool | None = option(None, "trt: let weights be replaced.", ENGINES, flag="--refittable", in_file=True)
    plugins: Literal["auto", "require", "never"] | None = option(
        None,
        "trt: plugins: auto (default), require, never.",
        ENGINES,
        metavar="HOW",
        in_file=True,
    )
    optimization_level: int | None = file_option(
        None, "How long TensorRT searches for fast kernels, 0 to 5; default: TensorRT's own.", ENGINES
    )
    workspace: str | int | None = file_option(
        None, "Most scratch memory on the GPU, such as 500MB or 2GiB; default: all of it.", ENGINES
    )
    tf32: bool | None = file_option(None, "Allow TF32 in float32 matrix products.", ENGINES)
    compute_capabilities: Sequence[int] | None = file_option(
        None,
        "trt-rtx: GPUs to build for, such as [86, 89]; default: SM 80 and later.",
        ENGINES,
        expected="a list of numbers, such as [86, 89]",
    )
    version_compatible: bool | None = file_option(None, "trt: later TensorRT releases can load the engine.", ENGINES)
    hardware_compatibility: Literal["none", "ampere+", "same-compute-capability"] | None = file_option(
        None, "trt: other GPUs that can run the engine.", ENGINES
    )
    weight_streaming: bool | None = file_option(
        None, "Keep the weights in host memory, for models larger than the GPU's.", ENGINES
    )


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    """The runtime of a model, and its options."""

    runtime: str = option(DEFAULT_RUNTIME, "Such as openvino or trt.", RUNS, metavar="NAME", choices=ARTIFACT_RUNTIMES)
    implementation: str = option(
        "auto",
        "Custom operators: auto (default), kernel, body.",
        RUNS,
        metavar="HOW",
        choices=IMPLEMENTATIONS,
        is_open=True,
    )
    device: int = option(0, "Which GPU, for ort-cuda and ort-trt.", RUNS, metavar=A_NUMBER)


@dataclass(frozen=True, kw_only=True)
class OrtOptions(DeviceOptions, ProgressOptions):
    """The runtime of the check of a new artifact."""

    runtime: str = option(
        DEFAULT_RUNTIME, "Of the check, such as ort-cuda.", RUNS, metavar="NAME", choices=ORT_RUNTIMES
    )
    settings: RunOptions | None = python_option(
        None, "How ONNX Runtime runs the model.", RUNS, expected="an effexport.RunOptions"
    )

    def run_options(self) -> RunOptions:
        """Raises UserError for a GPU that the runtime cannot be told to use."""
        from effexport.runners.artifact_runner import options_from_flags

        if self.settings is not None:
            if given(self, DeviceOptions):
                raise UserError("settings and runtime were both given; give one of them")
            return self.settings
        return options_from_flags(self.runtime, implementation=self.implementation, device=self.device)


@dataclass(frozen=True, kw_only=True)
class RunnerOptions(DeviceOptions):
    """The runtime of an artifact."""

    precision_hint: str = option(
        "", "Compute in bf16, where the CPU supports it.", RUNS, metavar="TYPE", choices=HINTS, is_open=True
    )

    def run_options(self, *, memory_arena: bool = True) -> RunOptions:
        """Raises UserError for options that the runtime does not have."""
        from effexport.runners.artifact_runner import options_from_flags

        return options_from_flags(
            self.runtime,
            implementation=self.implementation,
            device=self.device,
            precision_hint=self.precision_hint,
            memory_arena=memory_arena,
        )


@dataclass(frozen=True)
class ArtifactOptions(Options):
    artifact: str | Path = field(metadata=argument("An artifact folder."))


@dataclass(frozen=True, kw_only=True)
class NewArtifactOptions(OrtOptions):
    """Options of all verbs that write an artifact and check it."""

    force: bool = option(False, "Replace an existing artifact.")


@dataclass(frozen=True, kw_only=True)
class AnyBuildOptions(SpecOptions, EngineOptions, NewArtifactOptions):
    """Options that `build` and `export` share."""

    calibration: str | Path | None = option(
        None, "At least 64 samples: a text, .jsonl or .npz.", QUANTISATION, metavar=A_FILE
    )
    evaluate: str | Path | None = option(
        None, "Labelled data: compare the task's figures, too.", QUANTISATION, metavar=A_FILE
    )
    reference: str | Path | None = option(
        None, "Answers of the original model, to compare with.", CHECK, metavar=A_FILE
    )
    trace: bool = option(False, "Also compare the values inside the graph.", CHECK)
    engines: Sequence[EngineSpec] = python_option(
        (), "TensorRT engines with options of their own.", ENGINES, expected="a list of EngineSpec"
    )
    dynamic: Mapping[str, object] | None = python_option(None, "The free axes, such as {'x': {0: 'batch'}}.", WHAT)
    independent_samples: bool | None = option(
        None, "With --module: no sample depends on others.", WHAT, flag="--independent-samples"
    )


@dataclass(frozen=True)
class ExportOptions(AnyBuildOptions):
    """The options of `effexport.export`."""

    module: OnlyModule = field(metadata=argument("The module to export.", expected="an nn.Module"))
    example_inputs: object = python_option(None, "What the module is called with.")
    output: str | Path | None = python_option(None, "The folder to write.")


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    """The source of the model of a build."""

    variant: str | None = option(
        None,
        "One of our attention layers: effexport list.",
        WHAT,
        metavar="NAME",
        choices=ATTENTION_SPECS,
        is_open=True,
        in_file=True,
        expected="the name of a variant",
    )
    checkpoint: str | Path | None = option(
        None, "A trained Longformer, ModernBERT, Reformer etc.", WHAT, metavar=A_FOLDER
    )
    module: Module | None = option(
        None, "A function that returns your nn.Module.", WHAT, metavar=A_FACTORY, expected=MODULE
    )
    weights: str | Path | None = option(None, "Weights of the variant, as safetensors.", WHAT, metavar=A_FILE)
    task: str | None = option(
        None, "Of a checkpoint: another head than its own.", WHAT, metavar="NAME", choices=tasks(), is_open=True
    )
    inputs: str | Path | None = option(None, "Of a module: what it takes.", WHAT, metavar="FILE.toml")
    examples: object = python_option(None, "What the module is called with.", WHAT)
    tokenizer: str | Path | None = option(
        None, "Its tokenizer; default: the checkpoint's.", WHAT, metavar="DIR|none", expected="a path, or 'none'"
    )


@dataclass(frozen=True)
class BuildOptions(AnyBuildOptions, SourceOptions):
    """The options of `effexport build`."""

    spec: BuildSpec | Mapping[str, Any] | str | Path | None = option(
        None,
        "More options, in a file; those given here win.",
        WHAT,
        metavar="FILE.toml",
        expected="a path, a BuildSpec or a dictionary of options",
    )
    output: str | Path | None = option(None, "Folder to write; default: artifacts/NAME.", short="-o", metavar=A_FOLDER)

    _: KW_ONLY
    # fields of a variant and its encoder that have no option, such as num_landmarks; in Python, arguments like options
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def arguments(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, with fields that have no option in `others`."""
        known = {name for one in ATTENTION_SPECS.values() for name in field_names(one)}.union(ENCODER_FIELDS)
        others = {name: given[name] for name in given.keys() & known.difference(cls.__dataclass_fields__)}
        return {name: value for name, value in given.items() if name not in others} | {"others": others}

    @classmethod
    def of_export(cls, given: ExportOptions) -> BuildOptions:
        """The build of a module that is given with its examples."""
        shared = {name: getattr(given, name) for name in AnyBuildOptions.__dataclass_fields__}
        return cls(module=given.module, examples=given.example_inputs, output=given.output, **shared)


NOTHING_GIVEN = BuildOptions()


@dataclass(frozen=True)
class RefitOptions(ArtifactOptions, NewArtifactOptions):
    """The options of `effexport refit`."""

    _: KW_ONLY
    weights: str | Path | None = option(None, "Weights for the variant, or for --module.", metavar=A_FILE)
    checkpoint: str | Path | None = option(None, "A checkpoint of the same architecture.", metavar=A_FOLDER)
    module: Module | None = option(
        None, "Your module, with other weights; as for build.", metavar=A_FACTORY, expected=MODULE
    )
    examples: object = python_option(None, "What the module is called with.")
    output: str | Path | None = option(None, "Folder to write; default: the artifact.", short="-o", metavar=A_FOLDER)


@dataclass(frozen=True, kw_only=True)
class ResultOptions(Options):
    """Options of all verbs that write a file on request."""

    output: str | Path | None = option(None, "Also write the result, as FILE.json.", short="-o", metavar=A_FILE)
    force: bool = option(False, "Replace an existing file.")


@dataclass(frozen=True)
class VerifyOptions(IdentityOptions, ArtifactOptions, ResultOptions, RunnerOptions, ProgressOptions):
    """The options of `effexport verify`."""

    _: KW_ONLY
    model: str | Path | None = option(None, "ONNX file to check instead of its own.", metavar=A_FILE)
    weights: str | Path | None = option(None, "What it was built from: a checkpoint or a file.", metavar="PATH")
    module: Module | None = option(None, "The module that it was built from.", metavar=A_FACTORY, expected=MODULE)
    examples: object = python_option(None, "What the module is called with.")
    reference: str = option(
        "auto",
        "auto (default), NAME, a file, or PATH@RUNTIME.",
        metavar="NAME",
        choices=("auto", "golden", "torch", "transformers"),
        is_open=True,
    )
    data: str | Path | None = option(None, "Also compare answers on this data.", metavar=A_FILE)
    cases: Sequence[str] = option((), "Check only this case. Repeatable.", flag="--case", metavar="NAME")
    trace: bool = option(False, "Find the first value that differs, in any case.")
    output: str | Path | None = option(None, "Also a report: .html, .md, .json or .xml.", short="-o", metavar=A_FILE)


@dataclass(frozen=True)
class ProveOptions(ResultOptions, RunnerOptions, ProgressOptions):
    """The options of `effexport prove`."""

    model: str | Path = field(metadata=argument("An ONNX file."))
    against: AnyModel = field(
        metadata={"option": Option("MODULE:FUNCTION, an artifact, or a file.", metavar="WHAT", expected=AGAINST)}
    )
    examples: object = python_option(None, "What the module is called with.")
    _: KW_ONLY
    seq_len: int | None = option(None, "Tokens of the first case.", metavar="LENGTH", read=tokens_from_text)
    trace: bool = option(False, "Find the first value that differs, in any case.")
    output: str | Path | None = option(None, "Also a report: .html, .md, .json or .xml.", short="-o", metavar=A_FILE)


@dataclass(frozen=True)
class RunCommandOptions(ArtifactOptions, RunnerOptions):
    """The options of `effexport run`. Those without a default of their own leave it to what they are for."""

    _: KW_ONLY
    input: Path | None = option(None, "Arrays by the names of the inputs: .npz.", metavar=A_FILE)
    text: Path | None = option(None, "A text, or - for standard input.", metavar=A_FILE)
    generate: str | None = option(None, "Continue a text; -: standard input.", metavar="PROMPT")
    max_new_tokens: int | None = option(None, GENERATED.format("end after N", "64"), metavar=A_NUMBER)
    temperature: float | None = option(None, GENERATED.format("0 is greedy", "1"), metavar="T")
    top_k: int | None = option(None, GENERATED.format("choose among K", "all"), metavar="K")
    seed: int | None = option(None, GENERATED.format("repeats a text", "random"), metavar=A_NUMBER)
    fill_mask: str | None = option(None, "Predict the tokens for its masks, as [MASK].", metavar="TEXT")
    classify: str | None = option(None, "Classify a text, or each of its tokens.", metavar="TEXT")
    answer: str | None = option(None, "Find the answer in the text of --context.", metavar="QUESTION")
    context: Path | None = option(None, "With --answer: a text; -: standard input.", metavar=A_FILE)
    embed: Path | None = option(None, "Make a vector of each line of a text.", metavar=A_FILE)
    top: int | None = option(None, "Answers; default: 5 tokens, all labels, 1 span.", metavar=A_NUMBER)
    stride: int | None = option(None, "Tokens that neighbouring windows share.", metavar=A_NUMBER)
    output: Path | None = option(None, "Also write the outputs, as FILE.npz.", short="-o", metavar=A_FILE)
    force: bool = option(False, "Replace an existing file.")


@dataclass(frozen=True)
class EvaluateOptions(ArtifactOptions, ResultOptions, RunnerOptions, ProgressOptions):
    """The options of `effexport evaluate`."""

    data: str | Path | Mapping[str, Array] = field(
        metadata={"option": Option("A text; texts and labels, .jsonl; or .npz.", metavar=A_FILE)}
    )
    _: KW_ONLY
    compare: str | None = option(None, "PATH, @RUNTIME, both, or torch.", metavar="WITH", expected=COMPARED)
    weights: str | Path | None = option(None, "What it was built from, for torch.", metavar="PATH")
    window: int | None = option(None, "Tokens of a window; default: all it takes.", metavar=A_NUMBER)
    stride: int = option(0, "Tokens that neighbouring windows share.", metavar=A_NUMBER)
    rows: int | None = option(None, "Use only the first N rows.", metavar=A_NUMBER)
    seed: int = option(0, "Of the tokens that are masked.", metavar=A_NUMBER)


@dataclass(frozen=True)
class SignOptions(ArtifactOptions):
    """The options of `effexport sign`."""

    _: KW_ONLY
    key: str | Path | None = option(None, "Private key, P-256, P-384 or P-521, in PEM.", metavar=A_FILE)
    sigstore: bool = option(False, "Without a key: with an identity, by Sigstore.")
    identity_token: str | None = field(
        default=None,
        repr=False,
        metadata={
            "option": Option(f"Of that identity; or set {TOKEN_VARIABLE}.", metavar="TOKEN", variable=TOKEN_VARIABLE)
        },
    )
    trust_config: str | Path | None = option(None, TRUST_CONFIG, metavar=A_FILE)


@dataclass(frozen=True)
class InspectOptions(Options):
    """The options of `effexport inspect`."""

    path: str | Path = field(metadata=argument("An artifact, a checkpoint, an ONNX file or an engine."))
