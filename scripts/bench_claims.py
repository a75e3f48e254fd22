#!/usr/bin/env python3
"""Measure the CPU speed targets of docs/benchmarks.md, each as a ratio within one run.

Every candidate is first compared with PyTorch (`effexport.bench`). Candidates take turns, and their medians are
compared. Unless stated otherwise, a target is about attention without projections in float32. Those of recurrences and
of precisions are about whole models, in processor time, which other programs lengthen less than wall time.

    .venv/bin/python scripts/bench_claims.py                          # everything, about ten minutes on two cores
    .venv/bin/python scripts/bench_claims.py --claim nystrom --rounds 7
    .venv/bin/python scripts/bench_claims.py --markdown claims.md --output claims.json

The file of --output keeps results by processor, with its instruction sets: those of this one are replaced.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from turns import Call, medians_ms, timed_in_turns

from effexport import load, load_decoder
from effexport.base.environment import describe_machine, usable_cores
from effexport.base.errors import EffexportError
from effexport.base.machine import Processor
from effexport.base.spec import build_spec_from_options
from effexport.bench.candidates import inputs_of_case, onnx_from_case
from effexport.bench.grid import BenchCase, BenchRow, Grid, Model
from effexport.bench.run import Settings, bench
from effexport.export.onnx_from_module import GraphFile, onnx_with_state
from effexport.models.encoder.module import DecodeStep, Encoder, Prefill, module_from_spec
from effexport.models.variants.gated_delta.layer import GatedDeltaAttention
from effexport.pipeline.build import artifact_from_spec
from effexport.plugins.building.library import find_library
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.ort.session import ANY_OPSET

LINEAR_SHAPE = {"seq_len": 6000, "batch": 32, "head_dim": 64}
RECURRENT: dict[str, Any] = {
    "variant": "gated-delta",
    "dim": 512,
    "heads": 8,
    "layers": 12,
    "seq_len": 4096,
    "bias": False,
    "lm_head": True,
}
# Float32 beside float32 in another order of sums, through twelve layers: 2e-6 of the largest logit was measured.
RECURRENT_LIMIT = 1e-4
# Flags by which products of few bits differ in speed, and encoders: True where linear layers take most of the time.
INSTRUCTIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
PRECISIONS = ("fp32", "bf16", "int8")
LOW_PRECISION = {"softmax": False, "linear": True, "nystrom": True, "lsh": False, "aft-simple": True}
# OpenVINO rounds everything to bfloat16, of 8 bits: 0.3 % of the output's RMS with linear. Other answers are not timed.
OPENVINO_LIMIT = 0.02
# Seconds after which the threads of a session no longer wait for work in a loop, which the next one's would share.
PAUSE_S = 0.1
LEAN = ("linear", "nystrom", "lsh", "aft-simple", "aft-local", "aft-conv")


@dataclass(frozen=True)
class Claim:
    """One measured target: a ratio, its limit, and the figures it was computed from.

    at_least: whether the ratio must be at least the limit, not at most.
    """

    what: str
    ratio: float
    limit: float
    at_least: bool
    figures: str

    @property
    def holds(self) -> bool:
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit


def main() -> None:
    arguments = parse_arguments()
    library = find_library()
    if library is None or library.outdated:
        sys.exit("bench_claims.py: the kernel library is missing or outdated; build it with: effexport plugins build")
    torch.set_num_threads(usable_cores())
    claims: list[Claim] = []
    for name in arguments.claim or CLAIMS:
        for claim in CLAIMS[name](arguments.rounds):
            print(line(claim), flush=True)
            claims.append(claim)
    if arguments.markdown:
        arguments.markdown.write_text(markdown(claims), encoding="utf-8")
    if arguments.output:
        kept = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.exists() else {}
        own = [asdict(claim) | {"holds": claim.holds} for claim in claims]
        kept[processor_name()] = {"date": f"{date.today()}", "machine": describe_machine(), "claims": own}
        arguments.output.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    missed = [claim.what for claim in claims if not claim.holds]
    if missed:
        print(f"missed: {'; '.join(missed)}")
    sys.exit(1 if missed else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claim", action="append", choices=list(CLAIMS), help="repeatable; default: all of them")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each candidate (default 15)")
    parser.add_argument("--markdown", type=Path, help="file to write a Markdown table to")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.rounds < 3:
        parser.error("--rounds must be at least 3")
    return arguments


def measured(
    variant: str,
    runtimes: Sequence[str],
    rounds: int,
    *,
    seq_len: int,
    batch: int = 1,
    memory: bool = False,
    options: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> dict[str, BenchRow]:
    """Rows of one model by runtime. Exits if one was not timed or was disturbed."""
    models = (Model(variant, options or {}),)
    grid = Grid(models=models, runtimes=tuple(runtimes), seq_lens=(seq_len,), batches=(batch,), **sizes)
    results = bench(grid, Settings(rounds=rounds, memory=memory, max_seconds=60))
    if not results.complete:
        raise KeyboardInterrupt
    return {row.case.runtime: checked(row) for row in results.rows}


def in_ort(variant: str, rounds: int, **sizes: Any) -> BenchRow:
    return measured(variant, ("ort",), rounds, **sizes)["ort"]


def checked(row: BenchRow) -> BenchRow:
    if not row.is_quotable:
        sys.exit(
            f"bench_claims.py: {row.case.label} on {row.case.runtime} cannot be quoted: {row.status}, {row.reason}"
        )
    return row


def ms(row: BenchRow) -> float:
    assert row.timing is not None
    return row.timing.median_ms


def above_floor(row: BenchRow, limit: float, what: str) -> Claim:
    floor, ratio = row.floor, row.times_floor
    assert floor is not None
    assert ratio is not None
    parts = f"{ms(row):.1f} ms; products {floor.products_ms:.1f} ms, one pass {floor.pass_ms:.1f} ms"
    return Claim(f"{what} ÷ its floor", ratio, limit, False, parts)


def faster(slow_ms: float, fast_ms: float, limit: float, what: str) -> Claim:
    return Claim(what, slow_ms / fast_ms, limit, True, f"{slow_ms:.1f} ms against {fast_ms:.1f} ms")


def lsh(rounds: int) -> Iterator[Claim]:
    rows = measured("lsh", ("naive", "ort"), rounds, seq_len=8192)
    yield faster(ms(rows["naive"]), ms(rows["ort"]), 3, "lsh at 8192: times faster than the naive export")
    yield above_floor(rows["ort"], 1.6, "lsh at 8192")
    theirs, ours = transformers_layer(), layer_with_projections("lsh", 8192)
    times = medians_ms({"theirs": theirs, "ours": ours}, rounds)
    what = "lsh layer with projections at 8192: times faster than transformers' LSHSelfAttention"
    # theirs has no output projection, ours has one
    yield faster(times["theirs"], times["ours"], 4, what)


def transformers_layer() -> Call:
    """transformers' layer with 8 heads × 64, chunks of 64 and two rounds, on 8192 tokens; no output projection."""
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = ReformerConfig(
        hidden_size=512,
        num_attention_heads=8,
        attention_head_size=64,
        lsh_attn_chunk_length=64,
        num_hashes=2,
        num_buckets=None,
        hash_seed=0,
        max_position_embeddings=8192,
        axial_pos_shape=[64, 128],
        axial_pos_embds_dim=[128, 384],
        is_decoder=False,
    )
    layer = LSHSelfAttention(config).eval()
    hidden = torch.randn(1, 8192, 512, generator=torch.Generator().manual_seed(0))

    return without_gradients(partial(layer, hidden))


def without_gradients(call: Call) -> Call:
    return torch.inference_mode()(call)


def layer_with_projections(variant: str, seq_len: int) -> Call:
    """Our layer in ONNX Runtime: 8 heads × 64, with input and output projections."""
    return bound_in_ort(case_of(variant, seq_len, scope="attention"))


def case_of(variant: str, seq_len: int, *, scope: str = "core", options: dict[str, Any] | None = None) -> BenchCase:
    return BenchCase(
        label=variant,
        variant=variant,
        runtime="ort",
        scope=scope,
        seq_len=seq_len,
        batch=1,
        precision="fp32",
        heads=8,
        head_dim=64,
        options=options or {},
    )


def bound_in_ort(case: BenchCase) -> Call:
    """The model of a case in ONNX Runtime, with its inputs in place."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx_from_case(case, path)
        runner = OrtRunner(path, RunOptions(threads=usable_cores()))
    return runner.bind(inputs_of_case(case)).run


def nystrom(rounds: int) -> Iterator[Claim]:
    rows = measured("nystrom", ("torch", "ort"), rounds, options={"num_landmarks": 64}, seq_len=8192)
    yield above_floor(rows["ort"], 1.5, "nystrom-64 with convolution at 8192")
    yield faster(ms(rows["torch"]), ms(rows["ort"]), 1.5, "nystrom-64 at 8192: times faster than eager PyTorch")
    q, k, v = (torch.randn(1, 8, 8192, 64) for _ in range(3))
    attention = without_gradients(partial(nn.functional.scaled_dot_product_attention, q, k, v))
    seconds = medians_ms({"attention": attention}, max(3, rounds // 3))["attention"]
    what = "nystrom-64 at 8192: times faster than scaled_dot_product_attention"
    yield faster(seconds, ms(rows["ort"]), 25, what)


def linear(rounds: int) -> Iterator[Claim]:
    row = in_ort("linear", rounds, heads=1, **LINEAR_SHAPE)
    causal = in_ort("linear", rounds, options={"causal": True}, heads=1, **LINEAR_SHAPE)
    yield above_floor(row, 1.6, "linear, 32 × 6000 × 64")
    yield Claim(
        "linear, causal ÷ not causal", ms(causal) / ms(row), 3, False, f"{ms(causal):.1f} ms against {ms(row):.1f} ms"
    )
    yield faster(
        traditional_attention_ms(), ms(row), 60, "linear, 32 × 6000 × 64: times faster than softmax in PyTorch"
    )


def traditional_attention_ms() -> float:
    """Milliseconds of softmax(Q Kᵀ / √d) V written out in eager PyTorch, 32 × 6000 × 64; it needs 10 GB."""
    q, k, v = (torch.randn(LINEAR_SHAPE["batch"], LINEAR_SHAPE["seq_len"], LINEAR_SHAPE["head_dim"]) for _ in range(3))

    @torch.inference_mode()
    def attention() -> None:
        weights = torch.softmax(torch.einsum("nld,nsd->nls", q, k) / math.sqrt(q.shape[-1]), dim=-1)
        torch.einsum("nls,nsd->nld", weights, v)

    return medians_ms({"attention": attention}, 3)["attention"]


def decode(rounds: int) -> Iterator[Claim]:
    """A causal linear encoder, token by token."""
    spec = build_spec_from_options({"variant": "linear", "causal": True, "seq_len": 8192}, None)
    with tempfile.TemporaryDirectory() as folder:
        artifact, _ = artifact_from_spec(spec, Path(folder) / "linear")
        with load_decoder(artifact.path) as decoder:
            token = np.zeros((1, 1), np.int64)
            seconds = []
            for _ in range(8100):
                start = time.perf_counter()
                decoder.step({"input_ids": token})
                seconds.append(time.perf_counter() - start)
    # the median over 90 tokens, because single calls vary too much
    early, late = (statistics.median(seconds[at : at + 90]) * 1e6 for at in (10, 8000))
    what = "linear decode step, token 8000 ÷ token 10"
    yield Claim(what, late / early, 1.2, False, f"{late:.0f} µs against {early:.0f} µs")


def aft(rounds: int) -> Iterator[Claim]:
    yield above_floor(in_ort("aft-simple", rounds, seq_len=8192), 2, "aft-simple at 8192")
    cases: dict[str, dict[str, Any]] = {"aft-local": {"window": 128}, "aft-conv": {}}
    for variant, options in cases.items():
        in_ort(variant, 3, options=options, seq_len=8192)  # exits if its answer is wrong
        calls = {str(n): bound_in_ort(case_of(variant, n, options=options)) for n in (8192, 16384)}
        times = medians_ms(calls, rounds)
        what = f"{variant}, 16384 tokens ÷ 8192 tokens"
        figures = f"{times['16384']:.1f} ms against {times['8192']:.1f} ms"
        yield Claim(what, times["16384"] / times["8192"], 2.3, False, figures)


def recurrence(rounds: int) -> Iterator[Claim]:
    """A gated-delta model on one thread: a prompt beside a Scan and transformers, a token beside its weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ[ANY_OPSET] = "0"
    spec = build_spec_from_options(RECURRENT, None)
    ours = module_from_spec(spec.model, 0)
    assert isinstance(ours, Encoder)
    graphs = {"ours": (Prefill, spec), "scan": (Prefill, replace(spec, carrier="standard")), "step": (DecodeStep, spec)}
    runners = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, own) in graphs.items():
            path = Path(folder) / f"{name}.onnx"
            onnx_with_state(kind, ours, GraphFile(path, own))
            runners[name] = OrtRunner(path, RunOptions(threads=1))
    model = Prefill(ours)
    state = {name: x.numpy() for name, x in zip(model.state_names, model.initial_state(1), strict=True)}
    tokens = np.random.default_rng(0).integers(2, 258, (1, RECURRENT["seq_len"]))
    prompt = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "position": np.zeros(1, np.int64), **state}
    theirs = with_layers_of_transformers(ours)

    @torch.inference_mode()
    def eager() -> Tensor:
        logits: Tensor = theirs(torch.from_numpy(tokens))
        return logits

    expected = eager().numpy()
    for name in ("ours", "scan"):
        error = np.abs(runners[name].run(prompt)["logits"] - expected).max() / np.abs(expected).max()
        if not error <= RECURRENT_LIMIT:
            sys.exit(f"bench_claims.py: {name} differs from transformers by {error:.2g} of the largest logit")
    calls = {name: runners[name].bind(prompt).run for name in ("ours", "scan")} | {"theirs": eager}
    times = processor_turns(calls, max(3, rounds // 5))
    what = "gated-delta, 12 layers of 512, 4096 tokens: times faster than {}"
    yield claim_of_turns(times, "scan", "ours", 3, True, what.format("ONNX's operator, a Scan"))
    yield claim_of_turns(times, "theirs", "ours", 1.5, True, what.format("with transformers' eager layers"))
    token = {"input_ids": tokens[:, :1], "position": prompt["position"], **state}
    embeddings = {"token_embedding.weight", "position_embedding.weight"}
    count = sum(x.numel() for name, x in ours.named_parameters() if name not in embeddings)
    weights = np.ones(count, np.float32)
    times = processor_turns({"step": runners["step"].bind(token).run, "weights": weights.sum}, 3 * rounds)
    yield claim_of_turns(times, "step", "weights", 1.3, False, "gated-delta decode step ÷ one sum over as many weights")
    torch.set_num_threads(threads)


def with_layers_of_transformers(ours: Encoder) -> nn.Module:
    """The same model and weights with Qwen3-Next's layers, whose eager form takes chunks of 64 tokens."""
    model = copy.deepcopy(ours)
    for block in model.blocks:
        block.attention = layer_of_qwen3_next(block.attention)
    return model


def layer_of_qwen3_next(layer: GatedDeltaAttention) -> nn.Module:
    """The linear attention of Qwen3-Next with the weights of a layer without biases."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

    spec = layer.spec
    config = Qwen3NextConfig(
        hidden_size=spec.dim,
        rms_norm_eps=spec.norm_eps,
        linear_conv_kernel_dim=spec.conv_size,
        linear_num_key_heads=spec.heads,
        linear_num_value_heads=spec.heads,
        linear_key_head_dim=spec.head_size,
        linear_value_head_dim=spec.value_size,
    )
    theirs = Qwen3NextGatedDeltaNet(config, layer_idx=0).eval()
    qkvz, ba = (
        torch.cat([one.weight.unflatten(0, (spec.heads, -1)) for one in projections], dim=1).flatten(0, 1)
        for projections in ((layer.query, layer.key, layer.value, layer.gate), (layer.beta, layer.decay))
    )
    theirs.load_state_dict(
        {
            "in_proj_qkvz.weight": qkvz,
            "in_proj_ba.weight": ba,
            "conv1d.weight": layer.taps.unsqueeze(1),
            "A_log": layer.a_log,
            "dt_bias": layer.dt_bias,
            "norm.weight": layer.norm.weight,
            "out_proj.weight": layer.out.weight,
        }
    )
    return theirs


def processor_turns(calls: dict[str, Call], turns: int, pause: float = 0) -> dict[str, list[Any]]:
    """Milliseconds of the processor, and those that passed, of each turn of calls."""

    def clocks() -> Any:
        return 1e3 * np.array((time.process_time(), time.perf_counter()))

    return timed_in_turns(calls, turns, clock=clocks, pause=pause)


def claim_of_turns(
    times: dict[str, list[Any]], over: str, under: str, limit: float, at_least: bool, what: str
) -> Claim:
    """The median ratio of two calls, turn by turn, in processor time."""
    medians = np.median([times[over], times[under]], axis=1).T.ravel()
    figures = "processor {:.1f} ms against {:.1f} ms, wall {:.1f} ms against {:.1f} ms".format(*medians)
    ratio = float(statistics.median(a[0] / b[0] for a, b in zip(times[over], times[under], strict=True)))
    return Claim(what, ratio, limit, at_least, figures)


def processor_name() -> str:
    """With the instructions that products of few bits take: clouds call very different processors the same."""
    here = Processor.here()
    return " ".join((here.name, *(flag for flag in INSTRUCTIONS if flag in here.flags)))


def precision(rounds: int) -> Iterator[Claim]:
    """Encoders of the default size at 1024 tokens: bf16 and int8 beside float32, then bf16 beside OpenVINO's."""
    here, tokens = Processor.here(), {"input_ids": np.random.default_rng(0).integers(2, 258, (1, 1024))}
    fast = here.has_bfloat16_products or here.has_bfloat16_tiles
    cases = [(variant, threads) for variant in LOW_PRECISION for threads in (1, 2)]

    def claims(runners: dict[str, Any], over: str, limits: dict[str, float], what: str) -> Iterator[Claim]:
        calls = {name: partial(x.run, tokens) for name, x in runners.items()}
        times = processor_turns(calls, rounds, pause=PAUSE_S)
        for name, limit in limits.items():
            yield claim_of_turns(times, over, name, limit, True, f"{what}: times faster in {name} than {over}")

    with tempfile.TemporaryDirectory() as folder:
        paths = {(variant, name): Path(folder) / variant / name for variant in LOW_PRECISION for name in PRECISIONS}
        for (variant, name), path in paths.items():
            spec = build_spec_from_options({"variant": variant, "seq_len": 1024, "precision": name}, None)
            path.parent.mkdir(exist_ok=True)
            artifact_from_spec(spec.decided(has_engines=False), path)
        for variant, threads in cases:
            runners = {name: load(paths[variant, name], RunOptions(threads=threads)) for name in PRECISIONS}
            limits = {"bf16": 1.5 if fast else 1 / 1.1}
            if LOW_PRECISION[variant] and here.has_int8_products:
                limits["int8"] = 2.5 if "amx_int8" in here.flags else 2.0
            yield from claims(runners, "fp32", limits, f"{variant}, threads: {threads}")
        for variant, threads in cases:
            options = RunOptions(runtime="openvino", precision_hint="bf16", threads=threads)
            try:
                other = load(paths[variant, "fp32"], options)
            except EffexportError as error:
                print(f"not compared with OpenVINO: {variant}, threads: {threads}; {error}")
                continue
            exact, found = (
                x.run(tokens)["last_hidden_state"] for x in (load(paths[variant, "fp32"], RunOptions()), other)
            )
            error = np.sqrt(np.mean(np.square(found - exact)) / np.mean(np.square(exact)))
            if not error <= OPENVINO_LIMIT:
                sys.exit(f"bench_claims.py: {variant} in OpenVINO differs from float32 by {error:.2g} of the output")
            both = {"bf16": load(paths[variant, "bf16"], RunOptions(threads=threads)), "OpenVINO's bf16": other}
            yield from claims(both, "OpenVINO's bf16", {"bf16": 1}, f"{variant}, threads: {threads}")


def memory(rounds: int) -> Iterator[Claim]:
    # at 16384 eager softmax needs 26 GB; its logits, and so its memory, grow with the square of the length
    quarter = measured("softmax", ("torch",), 3, memory=True, seq_len=8192)["torch"].peak_bytes
    assert quarter is not None
    softmax = 4 * quarter
    for variant in LEAN:
        own = in_ort(variant, 3, memory=True, seq_len=16384).peak_bytes
        assert own is not None
        what = f"{variant} at 16384: peak memory ÷ that of eager softmax (4 × 8192)"
        yield Claim(what, own / softmax, 1 / 8, False, f"{own / 1e6:.0f} MB against {softmax / 1e6:.0f} MB")


CLAIMS: dict[str, Callable[[int], Iterator[Claim]]] = {
    "lsh": lsh,
    "nystrom": nystrom,
    "linear": linear,
    "decode": decode,
    "aft": aft,
    "recurrence": recurrence,
    "precision": precision,
    "memory": memory,
}


def line(claim: Claim) -> str:
    verdict, sign = "ok  " if claim.holds else "MISS", "≥" if claim.at_least else "≤"
    return f"{verdict} {claim.what}: {claim.ratio:.3g} ({sign} {claim.limit:.3g}); {claim.figures}"


def markdown(claims: Sequence[Claim]) -> str:
    rows = [
        f"| {claim.what} | {claim.ratio:.3g} | {'≥' if claim.at_least else '≤'} {claim.limit:.3g} | "
        f"{'yes' if claim.holds else '**no**'} | {claim.figures} |"
        for claim in claims
    ]
    return "\n".join(["| | measured | wanted | held | |", "|---|--:|--:|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    main()
