"""`effexport build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._engine_options import ENGINE_FLAGS, engine_options, engines_from_flags
from effexport.commands._help import HelpfulCommand
from effexport.commands._options import (
    common_options,
    length_option,
    result_console,
    runtime_options,
    settings_from_options,
    stage_progress,
    stderr_console,
)
from effexport.commands._result import print_result
from effexport.commands._types import Named, OneOf
from effexport.dtypes import DTYPE_OF_PRECISION
from effexport.environment import require_torch
from effexport.errors import UserError
from effexport.models.checkpoints.spec import tasks
from effexport.models.encoder.spec import POOLINGS
from effexport.models.variants import ATTENTION_SPECS
from effexport.one_line import say
from effexport.runtimes import ORT_RUNTIMES
from effexport.spec import GOLDEN, SCOPES

if TYPE_CHECKING:
    from effexport.report.model import Report

SECTIONS = {
    "What to export": (
        *("variant", "checkpoint", "task", "factory", "inputs", "independent_samples", "spec_file", "weights"),
        "tokenizer",
    ),
    "Sizes and options of the model": (
        *("scope", "dim", "heads", "layers", "seq_len", "batch", "causal", "num_hashes", "pinv_init", "seed"),
    ),
    "What it returns": ("lm_head", "pool", "truncate_dim", "normalize", "top_k"),
    "The ONNX file": ("precision", "opset", "external_data", "fused", "inline"),
    "Quantisation, with --precision int8 or fp8": (
        *("quantization", "calibration", "evaluate", "max_loss", "smooth", "keep_float", "quantize_embeddings"),
    ),
    "The check": ("runtime", "implementation", "device", "reference", "golden", "trace"),
    "TensorRT engines": ENGINE_FLAGS,
}
EXAMPLES = (
    "effexport build --variant lsh                  # random weights, to try it out",
    "effexport build --checkpoint DIR -o OUT        # a trained Reformer or Nyströmformer",
    "effexport build --module my_model:make         # any model of your own",
    "effexport build --checkpoint DIR --task base --pool mean --normalize   # one vector for each text",
    "effexport build --variant linear --causal --seq-len 4096 --precision fp16",
    "effexport build --variant lsh --target trt-rtx --profile batch=1:4:16,seq=128:1024:4096",
)


@click.command("build", cls=HelpfulCommand, sections=SECTIONS, examples=EXAMPLES)
@click.option(
    "--variant",
    type=Named(ATTENTION_SPECS),
    metavar="NAME",
    help=f"Attention: {', '.join(ATTENTION_SPECS)}. See also: effexport list.",
)
@click.option("--scope", type=OneOf(SCOPES), help="A whole encoder (default), or one attention layer.")
@click.option("--dim", type=int, help="Model width.")
@click.option("--heads", type=int, help="Attention heads.")
@click.option("--layers", type=int, help="Encoder blocks.")
@length_option("--seq-len", help="Length to export and tune for, in tokens, such as 512 or 32k.")
@click.option("--batch", type=int, help="Batch size of the exported example, which is also checked.")
@click.option(
    "--causal/--no-causal", default=None, help="Let every position attend to itself and to earlier positions only."
)
@click.option(
    "--precision",
    type=OneOf(DTYPE_OF_PRECISION),
    help="Of weights and activations; default: fp32. Operations that would overflow or lose accuracy stay in float32; "
    "int8 and fp8 are for linear layers.",
)
@click.option(
    "--quantization",
    type=OneOf(("dynamic", "static")),
    help="Scales of activations: one for each token as the model runs (default of int8), or from --calibration, which "
    "engines and fp8 need.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="At least 64 samples of what the model will read: a text, FILE.jsonl with a text in each line, or FILE.npz.",
)
@click.option(
    "--evaluate",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Labelled data, as for effexport evaluate: compare the task's figures with those of the float model.",
)
@click.option(
    "--max-loss",
    type=float,
    metavar="SHARE",
    help="Put layers back to float until quantisation costs at most this: the RMS error against the float model, or "
    "with --evaluate the share that is added to the task's loss.",
)
@click.option(
    "--smooth", type=float, metavar="ALPHA", help="Fold SmoothQuant into layer norms before quantising, usually 0.5."
)
@click.option(
    "--keep-float",
    multiple=True,
    metavar="LAYER",
    help="Leave a layer, or all within a module, in float, such as lm_head or blocks.0. May be repeated.",
)
@click.option(
    "--quantize-embeddings/--no-quantize-embeddings", default=None, help="Round tables of embeddings to int8, too."
)
@click.option("--opset", type=int, help="ONNX opset, 18 to 24.")
@click.option("--seed", type=int, help="Seed of the random weights.")
@click.option(
    "--external-data/--no-external-data", default=None, help="Store the weights in a second file, model.onnx.data."
)
@click.option(
    "--fused/--unfused",
    default=None,
    help="Export attention as one fused operator where available (default), or as standard operators.",
)
@click.option(
    "--inline/--no-inline",
    default=None,
    help="Write standard operators only, for tools that know no model-local functions; kernels then do not apply.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A trained Reformer or Nyströmformer: a folder with config.json and weights.",
)
@click.option(
    "--task",
    type=Named(tasks()),
    metavar="NAME",
    help=f"With --checkpoint: the head to export, if not the one in config.json: {', '.join(tasks())}.",
)
@click.option(
    "--pool",
    type=OneOf(POOLINGS),
    help="One vector for each sample instead of hidden states: the mean or the largest of every channel over its "
    "tokens, or its first token.",
)
@click.option("--truncate-dim", type=int, metavar="N", help="With --pool: only the first N channels of the vector.")
@click.option(
    "--normalize/--no-normalize", default=None, help="With --pool: scale the vector, after --truncate-dim, to length 1."
)
@click.option("--lm-head/--no-lm-head", default=None, help="Output logits over the vocabulary, not hidden states.")
@click.option(
    "--top-k",
    type=int,
    metavar="N",
    help="Of a language model: only the N likeliest tokens and their probabilities, at the places that the input "
    "positions names.",
)
@click.option("--num-hashes", type=int, help="Hash rounds of LSH attention; may exceed the number used in training.")
@click.option(
    "--pinv-init",
    type=OneOf(("per_head", "global")),
    help="Scale of Nyström's pseudo-inverse: for each head, or for the whole batch, as in published checkpoints.",
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="safetensors file with weights for the variant; default: random weights.",
)
@click.option(
    "--module",
    "factory",
    metavar="MODULE:FUNCTION",
    help="A function, my.module:make or file.py:make, without arguments, that returns your nn.Module, or (nn.Module, "
    "example inputs). Known attention layers of other packages become effexport's, with their weights.",
)
@click.option(
    "--independent-samples",
    is_flag=True,
    default=None,
    help="With --module: say that no sample depends on the others of its batch. The check tries it, and servers then "
    "join requests.",
)
@click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="With --module: its inputs, a table [inputs.NAME] for each, with dims, dtype, range and mask.",
)
@click.option(
    "--spec",
    "spec_file",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="File with options of the model; options of the command line override it.",
)
@click.option(
    "--tokenizer",
    metavar="DIR|none",
    help="Folder with the tokenizer that travels with the model; default: that of the checkpoint, if it has one.",
)
@runtime_options(ORT_RUNTIMES)
@engine_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder to write; default: artifacts/ and the name of the variant or checkpoint.",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    metavar="FILE.safetensors",
    help="Also compare with the model that the weights come from: its inputs and answers, each under its name.",
)
@click.option(
    "--golden",
    type=OneOf(GOLDEN),
    help="Which inputs and answers of the check the artifact keeps, for effexport verify: all (full, default), some "
    "of at most 1 MB (small), or none. All are checked.",
)
@click.option(
    "--trace", is_flag=True, help="Also compare the values inside the graph; the report then shows errors by layer."
)
@click.option("--force", is_flag=True, help="Replace an existing artifact.")
@common_options
def command(
    checkpoint: Path | None,
    weights: Path | None,
    factory: str | None,
    inputs: Path | None,
    spec_file: Path | None,
    tokenizer: str | None,
    calibration: Path | None,
    evaluate: Path | None,
    runtime: str,
    implementation: str,
    device: int,
    output: Path | None,
    reference: Path | None,
    trace: bool,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Export a model to ONNX, check it against PyTorch and write an artifact folder.

    The artifact is written only if every check passes. --runtime and --implementation choose how the check runs the
    model; the exported model does not depend on them.
    """
    from effexport.artifact import ARTIFACT_FOLDER
    from effexport.build_quantization import QuantizationData, with_scales_for_engines
    from effexport.build_request import BuildRequest
    from effexport.cli import print_json
    from effexport.evaluation.evaluate import TaskData

    require_torch("effexport build")
    engine_flags = {name: flags.pop(name) for name in ENGINE_FLAGS}
    flags["keep_float"] = flags["keep_float"] or None
    flags = with_scales_for_engines(flags, [target for target in engine_flags["targets"] if target != "none"])
    request = BuildRequest(flags, spec_file, checkpoint, weights, factory, inputs, tokenizer=tokenizer)
    settings = settings_from_options(runtime, implementation, device)
    with stage_progress(stderr_console()) as progress:
        spec, source = request.resolve(progress)
    if implementation == "kernel" and not spec.custom_ops:
        what = f"{spec.model.title} with --inline" if spec.inline else spec.model.title
        raise UserError(f"--implementation kernel: {what} has no custom operators; leave it out")
    engines = engines_from_flags(engine_flags, spec)
    output = output or Path("artifacts") / source.name
    ARTIFACT_FOLDER.check(output, force=force)
    quantization = QuantizationData(calibration, None if evaluate is None else TaskData(evaluate))
    from effexport.build import artifact_from_spec, capabilities_of

    quantization.check(spec, [engine.target for engine in engines], capabilities_of(engines))

    with stage_progress(stderr_console()) as progress:
        artifact, report = artifact_from_spec(
            spec,
            output,
            source=source,
            engines=engines,
            tokenizer=request.tokenizer_source,
            settings=settings,
            reference=reference,
            quantization=quantization,
            trace=trace,
            force=force,
            on_stage=progress,
            on_progress=progress.step,
        )
    if as_json:
        import msgspec

        answer = {"artifact": str(output), "verdict": report.verdict, "implementation": report.implementation}
        print_json(answer | msgspec.to_builtins(artifact.manifest))
    console = result_console(as_json=as_json)
    print_result(console, artifact, report)
    if weights is not None:
        say(console, proven_text(report, reference))


def proven_text(report: Report, reference: Path | None) -> str:
    """What has been proven about weights that come from another model, and what has not."""
    layer = f"the {report.title} of effexport with the weights of {report.weights_from}"
    if reference is not None:
        return f"proven: the file computes what {layer} computes, and what the answers in {reference} say"
    return (
        f"proven: the file computes what {layer} computes. NOT compared with the model that these weights were trained "
        "in: name its inputs and answers with --reference FILE.safetensors; a model made of layers of effexport can "
        "itself be exported with --module"
    )
