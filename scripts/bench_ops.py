"""Time the custom operators on this CPU: kernel, function body and PyTorch, next to a lower bound.

Every candidate is compared with the reference before it is timed. Candidates take turns (A B C, A B C, …) within one
process, and the medians of their turns are reported. Only the ratios of one run are worth quoting. Before each turn the
thread pools of the others get time to go idle, because ONNX Runtime's threads spin for a while after a run.

    .venv/bin/python scripts/bench_ops.py                         # the shapes of docs/kernels.md
    .venv/bin/python scripts/bench_ops.py --sort 16,65536,4096 --pinv 768,64 --output ops.json
    .venv/bin/python scripts/bench_ops.py --banded 12,4096,64,256 --threads 1
    .venv/bin/python scripts/bench_ops.py --recurrence 2048,8,8,64 --conv 2048,8192,4 --threads 1
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch.nn.functional import scaled_dot_product_attention

from effexport.base.environment import versions
from effexport.base.machine import peak_bytes_of
from effexport.export.custom_nodes import attach_function_bodies
from effexport.export.onnx_from_module import mark_custom_nodes, register_schemas
from effexport.models.checkpoints.longformer import BandedAttentionLayer
from effexport.models.checkpoints.longformer_spec import BandedSpec
from effexport.models.layers import fused_operators
from effexport.plugins.banded_attention import SIGNATURE
from effexport.plugins.building.library import find_library
from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import CARRIER_OPSET, CONTRIB_DOMAIN, DOMAIN, OPS, OPSET_VERSION, PLUGIN_NAMESPACE
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.ort.session import ANY_OPSET

ITERATIONS = 6
PAUSE_SECONDS = 0.02
# Compared with float64; tests/plugins/test_ort_kernels.py and test_iterative_pinv.py give the reasons for such limits.
PINV_LIMIT = 1e-4
# Of float32 beside float32.
BANDED_LIMIT = 1e-4
# As of the operator's contract, of both.
RECURRENCE_LIMIT = 4e-6
CONV_LIMIT = 2e-6
RULES = ("linear", "gated", "delta", "gated_delta")


@dataclass(frozen=True)
class Candidate:
    """One implementation to be timed; `run` makes one call, `bare` the same without a memory arena, to see its peak."""

    name: str
    run: Callable[[], object]
    bare: Callable[[], object] | None = None


@dataclass(frozen=True)
class Timing:
    name: str
    median_us: float
    lowest_us: float
    highest_us: float
    times_kernel: float
    peak_bytes: int | None


def main() -> None:
    arguments = parse_arguments()
    library = find_library()
    if library is None or library.outdated:
        sys.exit("bench_ops.py: the kernel library is missing or outdated; build it with: effexport plugins build")
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    results: dict[str, Any] = {"environment": versions(), "machine": platform.machine(), "threads": arguments.threads}
    for rows, n, num_buckets in arguments.sort or [(16, 8192, 256)]:
        title = f"LSHSort {rows} × {n}, {num_buckets} buckets"
        results[title] = report(title, sort_candidates(rows, n, num_buckets, arguments.threads), arguments.turns)
    for count, m in arguments.pinv or [(96, 64)]:
        title = f"IterativePinv {count} × {m} × {m}, {ITERATIONS} iterations"
        results[title] = report(title, pinv_candidates(count, m, arguments.threads), arguments.turns)
    for heads, n, d, reach in arguments.banded or [(12, 4096, 64, 256)]:
        title = f"BandedAttention {heads} × {n} × {d}, {reach} keys to each side"
        results[title] = report(title, banded_candidates(heads, n, d, reach, arguments.threads), arguments.turns)
    for n, heads, kv_heads, d in arguments.recurrence or [(2048, 8, 8, 64)]:
        for rule in RULES:
            title = f"LinearRecurrence {n} tokens, {heads} heads over {kv_heads} states of {d} × {d}, {rule}"
            candidates = recurrence_candidates(n, heads, kv_heads, d, rule, arguments.threads)
            results[title] = report(title, candidates, arguments.turns)
    for n, channels, taps in arguments.conv or [(2048, 8192, 4)]:
        title = f"CausalConv {n} tokens × {channels} channels, {taps} taps, SiLU"
        results[title] = report(title, conv_candidates(n, channels, taps, arguments.threads), arguments.turns)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sort", type=sizes(3), action="append", metavar="ROWS,N,BUCKETS", help="repeatable")
    parser.add_argument("--pinv", type=sizes(2), action="append", metavar="COUNT,M", help="repeatable")
    parser.add_argument("--banded", type=sizes(4), action="append", metavar="HEADS,N,D,REACH", help="repeatable")
    parser.add_argument("--recurrence", type=sizes(4), action="append", metavar="N,HEADS,STATES,D", help="repeatable")
    parser.add_argument("--conv", type=sizes(3), action="append", metavar="N,CHANNELS,TAPS", help="repeatable")
    parser.add_argument("--turns", type=int, default=30, help="turns of each candidate (default 30)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of every candidate")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.turns < 3 or arguments.threads < 1:
        parser.error("--turns must be at least 3 and --threads at least 1")
    return arguments


def sizes(count: int) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        values = tuple(int(part) for part in text.split(","))
        if len(values) != count or min(values) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not {count} positive numbers, separated by commas")
        return values

    return parse


def op_model(op: str, inputs: dict[str, tuple[int, list[Any]]], outputs: list[str], **attributes: float) -> bytes:
    """A serialised model of one custom node with its function body."""
    node = helper.make_node(op, list(inputs), outputs, domain=DOMAIN, **{PLUGIN_NAMESPACE: DOMAIN}, **attributes)
    element, dims = next(iter(inputs.values()))
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, element, dims) for name in outputs],
    )
    model = helper.make_model(
        graph,
        functions=[OPS[op].load().onnx_function_body([node], 20)],
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=10,
    )
    return bytes(model.SerializeToString())


def runners(model: bytes, threads: int, *, memory_arena: bool = True) -> tuple[OrtRunner, OrtRunner]:
    """Two runners of the model: one with kernels, one with function bodies."""
    kernel, body = (
        OrtRunner(model, RunOptions(implementation=choice, threads=threads, memory_arena=memory_arena))
        for choice in ("kernel", "body")
    )
    assert set(kernel.implementation.values()) == {"kernel"}
    assert set(body.implementation.values()) == {"body"}
    return kernel, body


def sort_candidates(rows: int, n: int, num_buckets: int, threads: int) -> list[Candidate]:
    buckets = np.random.default_rng(0).integers(0, num_buckets, (rows, n)).astype(np.int32)
    given = torch.from_numpy(buckets)
    inputs = {"buckets": (TensorProto.INT32, ["N", "n"])}
    kernel, body = runners(op_model("LSHSort", inputs, ["order", "rank"], num_buckets=num_buckets), threads)
    feeds = {"buckets": buckets}

    def double_argsort() -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.argsort(given, stable=True)
        return order, torch.argsort(order)

    expected = [x.numpy() for x in double_argsort()]
    for runner in (kernel, body):
        for given_array, wanted in zip(runner.run(feeds).values(), expected, strict=True):
            assert np.array_equal(given_array, wanted)
    bound = kernel.bind(feeds)
    # the bytes of the input and of both outputs; a copy reads and writes each
    source = torch.ones(3 * buckets.nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    source_array, target_array = source.numpy(), target.numpy()
    return [
        Candidate("kernel", bound.run),
        Candidate("kernel, outputs allocated", lambda: kernel.run(feeds)),
        Candidate("body in ONNX Runtime", lambda: body.run(feeds)),
        Candidate("torch argsort(argsort)", double_argsort),
        Candidate("lower bound: one thread copies the bytes", lambda: np.copyto(target_array, source_array)),
        Candidate("lower bound: all threads copy them", lambda: target.copy_(source)),
    ]


def pinv_candidates(count: int, m: int, threads: int) -> list[Candidate]:
    a = torch.softmax(2 * torch.randn(count, m, m, generator=torch.Generator().manual_seed(0)), dim=-1)
    scale = a.sum(dim=-2).amax(dim=-1).reshape(count, 1, 1)
    feeds = {"A": a.numpy(), "scale": scale.numpy()}
    inputs = {"A": (TensorProto.FLOAT, ["N", "m", "m"]), "scale": (TensorProto.FLOAT, ["N", 1, 1])}
    kernel, body = runners(op_model("IterativePinv", inputs, ["Z"], iterations=ITERATIONS), threads)
    reference = OPS["IterativePinv"].load().reference
    expected = reference(a.double(), scale.double(), ITERATIONS)
    for z in (kernel.run(feeds)["Z"], body.run(feeds)["Z"], reference(a, scale, ITERATIONS).numpy()):
        error = (torch.from_numpy(z).double() - expected).abs().max() / expected.abs().max()
        assert error <= PINV_LIMIT, error
    bound = kernel.bind(feeds)
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(4 * ITERATIONS):
            torch.bmm(a, a, out=out)

    return [
        Candidate("kernel", bound.run),
        Candidate("body in ONNX Runtime", lambda: body.run(feeds)),
        Candidate("torch eager", lambda: reference(a, scale, ITERATIONS)),
        Candidate("lower bound: the 24 products, in torch", products),
    ]


def banded_candidates(heads: int, n: int, d: int, reach: int, threads: int) -> list[Candidate]:
    """The operator with one global token, as in Longformer, and a layer of it beside that of transformers."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    torch.manual_seed(0)
    config = LongformerConfig(hidden_size=heads * d, num_attention_heads=heads, attention_window=[2 * reach])
    layer = LongformerSelfAttention(config, layer_id=0).eval()
    hidden, is_global = torch.randn(1, n, heads * d), torch.arange(n)[None] == 0
    mask, is_hidden = torch.where(is_global, 10000.0, 0.0), torch.zeros_like(is_global)
    names = {"q": "query", "k": "key", "v": "value"}
    linears = {
        f"{short}{kind}": getattr(layer, f"{name}{kind}") for kind in ("", "_global") for short, name in names.items()
    }
    feeds = {
        name: linear(hidden).view(1, n, heads, d).transpose(1, 2).contiguous().numpy()
        for name, linear in linears.items()
    }
    feeds |= {"keep": ~is_hidden.numpy(), "is_global": is_global.numpy(), "bias": np.zeros((heads, 1), np.float32)}
    axes = {4: ["b", "h", "n", "d"], 2: ["b", "n"]}
    inputs = {name: (helper.np_dtype_to_tensor_dtype(x.dtype), axes[x.ndim]) for name, x in feeds.items()}
    inputs["bias"] = (TensorProto.FLOAT, ["h", 1])
    numbers = {"scale": d**-0.5, "left": reach, "right": reach, "block": 1}
    model = op_model("BandedAttention", inputs, ["out"], **numbers, with_globals=1)
    kernel, body = runners(model, threads)
    bare, bare_body = runners(model, threads, memory_arena=False)
    without, _ = runners(op_model("BandedAttention", inputs, ["out"], **numbers, with_globals=0), threads)
    of_layer = longformer_layer_model(layer, reach)
    own, _ = runners(of_layer, threads)
    bare_own, _ = runners(of_layer, threads, memory_arena=False)
    layer_feeds = {"hidden_states": hidden.numpy(), "keep": feeds["keep"], "is_global": feeds["is_global"]}

    def transformers_layer() -> torch.Tensor:
        out: torch.Tensor = layer(hidden, mask, None, is_hidden, is_global, is_global_attn=True)[0]
        return out

    expected = transformers_layer()
    by_head = expected.view(1, n, heads, d).transpose(1, 2)
    for found, wanted in ((kernel.run(feeds), by_head), (body.run(feeds), by_head), (own.run(layer_feeds), expected)):
        error = (torch.from_numpy(found["out"]) - wanted).abs().max() / wanted.abs().max()
        assert error <= BANDED_LIMIT, error
    bound, bound_without = kernel.bind(feeds), without.bind(feeds)
    q, k, v = (torch.from_numpy(feeds[name]) for name in "qkv")
    # as many multiply-adds as both products of the band have, in a large product
    side = 1024
    left, right = torch.randn(2 * n * (2 * reach + 1) * d * heads // side**2, side), torch.randn(side, side)

    def products_of_layer() -> None:
        for name, linear in linears.items():
            if name != "q_global":  # of one token
                linear(hidden)
        left @ right

    def dense() -> torch.Tensor:
        return (q @ k.mT * d**-0.5).softmax(dim=-1) @ v

    def sdpa() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v)

    return [
        Candidate("kernel", bound.run, lambda: bare.run(feeds)),
        Candidate("kernel, no global token", bound_without.run),
        Candidate("body in ONNX Runtime", lambda: body.run(feeds), lambda: bare_body.run(feeds)),
        Candidate("torch SDPA, all tokens", sdpa, sdpa),
        Candidate("torch eager, all tokens", dense, dense),
        Candidate("lower bound: its products, in torch", lambda: left @ right),
        Candidate("layer", lambda: own.run(layer_feeds), lambda: bare_own.run(layer_feeds)),
        Candidate("lower bound of it: its products, in torch", products_of_layer),
        Candidate("transformers' layer, eager", transformers_layer, transformers_layer),
    ]


def longformer_layer_model(theirs: torch.nn.Module, reach: int) -> bytes:
    """Our layer with the weights of transformers' `LongformerSelfAttention`: hidden_states, keep, is_global → out."""
    heads, dim = theirs.num_heads, theirs.embed_dim
    layer = BandedAttentionLayer(BandedSpec(dim=dim, heads=heads, seq_len=4096, reach=reach)).eval()
    layer.load_state_dict(theirs.state_dict(), strict=False)
    layer.out = torch.nn.Identity()  # transformers has it in another module

    example = (torch.randn(2, 8, dim), torch.ones(2, 8, dtype=torch.bool), torch.eye(8, dtype=torch.bool)[:2])
    dynamic = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},) * 3
    translations = {torch.ops.effexport.banded_attention.default: SIGNATURE.onnx_translation()}
    register_schemas()
    with fused_operators(layer, True):
        program = torch.export.export(layer, example, dynamic_shapes=dynamic)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            output_names=["out"],
            opset_version=20,
            custom_translation_table=translations,
            verbose=False,
        )
    mark_custom_nodes(exported.model)
    attach_function_bodies(exported.model, 20)
    return bytes(exported.model_proto.SerializeToString())


def recurrence_candidates(n: int, heads: int, kv_heads: int, d: int, rule: str, threads: int) -> list[Candidate]:
    """The kernel, the body, and the operators that --carrier puts in its place."""
    contract = load_contract(OPS["LinearRecurrence"])
    case = Case((1, n, heads, kv_heads, d, d, int("delta" in rule), 0), (d**-0.5,))
    arrays = {name: x.numpy() for name, x in contract.inputs(case, "cpu").items()}
    if "gated" not in rule:
        arrays["decay"][:] = 0
    if "delta" not in rule:
        arrays["beta"][:] = 1
    inputs = {name: (TensorProto.FLOAT, list(x.shape)) for name, x in arrays.items()}
    model = op_model("LinearRecurrence", inputs, ["out", "present"], **contract.attributes(case))
    kernel, body = runners(model, threads)
    contrib, scan = (carrier(model, rule, (heads, kv_heads, d), domain, threads) for domain in (CONTRIB_DOMAIN, ""))
    wanted = contrib.run(arrays)
    for runner in (kernel, body, scan):
        for given, right in zip(runner.run(arrays).values(), wanted.values(), strict=True):
            assert np.abs(given - right).max() <= RECURRENCE_LIMIT * np.abs(right).max()
    # each token decays and writes each number of a state, finds what it holds for the delta rule, and reads it
    state, rows = torch.ones(d, d), torch.ones(n * (kv_heads * (2 + case.sizes[6]) + heads), d)
    products = torch.empty_like(rows)
    return [
        Candidate("kernel", kernel.bind(arrays).run),
        Candidate("body in ONNX Runtime", lambda: body.run(arrays)),
        Candidate("com.microsoft::LinearAttention", contrib.bind(arrays).run),
        Candidate("ai.onnx::LinearAttention, a Scan", scan.bind(arrays).run),
        Candidate("lower bound: its multiply-adds, in torch", lambda: torch.mm(rows, state, out=products)),
    ]


def conv_candidates(n: int, channels: int, taps: int, threads: int) -> list[Candidate]:
    """The kernel, the body and ONNX Runtime's own operator, which has channels before tokens."""
    contract, case = load_contract(OPS["CausalConv"]), Case((1, n, channels, taps, 1), kind="visible")
    arrays = {name: x.numpy() for name, x in contract.inputs(case, "cpu").items()}
    inputs = {name: (helper.np_dtype_to_tensor_dtype(x.dtype), list(x.shape)) for name, x in arrays.items()}
    kernel, body = runners(op_model("CausalConv", inputs, ["y", "present"], silu=1), threads)
    swapped = {name: np.ascontiguousarray(arrays[name].swapaxes(1, 2)) for name in ("x", "past")}
    feeds = {"x": swapped["x"], "weight": arrays["weight"][:, None], "bias": arrays["bias"], "past": swapped["past"]}
    own = contrib_runner("CausalConvWithState", list(feeds), feeds, ["y", "present"], threads, activation="silu")
    wanted = own.run(feeds)
    for runner in (kernel, body):
        for given, right in zip(runner.run(arrays).values(), wanted.values(), strict=True):
            assert np.abs(given.swapaxes(1, 2) - right).max() <= CONV_LIMIT * np.abs(right).max()
    source, target = arrays["x"], np.empty_like(arrays["x"])
    return [
        Candidate("kernel", kernel.bind(arrays).run),
        Candidate("body in ONNX Runtime", lambda: body.run(arrays)),
        Candidate("ONNX Runtime's CausalConvWithState", own.bind(feeds).run),
        Candidate("lower bound: one thread copies x", lambda: np.copyto(target, source)),
    ]


def contrib_runner(
    op: str, inputs: list[str], feeds: dict[str, np.ndarray], outputs: list[str], threads: int, **attributes: Any
) -> OrtRunner:
    """A runner of an operator of ONNX Runtime's own. inputs: with "" for one that is left out; all are float32."""
    node = helper.make_node(op, inputs, outputs, domain="com.microsoft", **attributes)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in feeds.items()]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "own", values, made), opset_imports=opsets, ir_version=10)
    return OrtRunner(model.SerializeToString(), RunOptions(threads=threads))


def carrier(model: bytes, rule: str, sizes: tuple[int, int, int], domain: str, threads: int) -> OrtRunner:
    """A runner of LinearAttention in the place of the only node of a model. sizes: heads, kv_heads and width of heads.
    ONNX Runtime opens the opset of ONNX's operator only if it is told to."""
    proto = onnx.ModelProto.FromString(model)
    heads, kv_heads, d = sizes
    opset = 20 if domain else CARRIER_OPSET
    function = (
        OPS["LinearRecurrence"]
        .load()
        .carrier_body(
            proto.graph.node[0],
            {"heads": heads, "kv_heads": kv_heads, "key_dim": d, "value_dim": d},
            {name: fill for name, fill, part in (("decay", 0, "gated"), ("beta", 1, "delta")) if part not in rule},
            domain=domain,
            opset=opset,
            element_type=TensorProto.FLOAT,
        )
    )
    proto.functions[0].CopyFrom(function)
    del proto.opset_import[:]
    proto.opset_import.extend([*function.opset_import, helper.make_opsetid(DOMAIN, OPSET_VERSION)])
    os.environ[ANY_OPSET] = "0"
    return OrtRunner(proto.SerializeToString(), RunOptions(implementation="body", threads=threads))


def report(title: str, candidates: list[Candidate], turns: int) -> list[dict[str, Any]]:
    timings = timed(candidates, turns)
    print(f"\n{title}")
    print(f"  {'':46}{'median':>12}{'lowest':>12}{'highest':>12}{'÷ kernel':>12}{'peak':>12}")
    for t in timings:
        peak = "" if t.peak_bytes is None else f"{t.peak_bytes / 1e6:9.0f} MB"
        print(
            f"  {t.name:46}{t.median_us:9.0f} µs{t.lowest_us:9.0f} µs{t.highest_us:9.0f} µs{t.times_kernel:12.2f}{peak}"
        )
    return [asdict(timing) for timing in timings]


def timed(candidates: list[Candidate], turns: int) -> list[Timing]:
    """Timings of all candidates; each is compared with the first one turn by turn. Peaks come before, one by one."""
    peaks = [None if candidate.bare is None else peak_bytes_of(candidate.bare) for candidate in candidates]
    seconds: list[list[float]] = [[] for _ in candidates]
    for _ in range(turns):
        for own, candidate in zip(seconds, candidates, strict=True):
            own.append(turn(candidate))
    # a ratio per turn, so that slow phases of the machine cancel out
    return [
        Timing(
            candidate.name,
            statistics.median(own) * 1e6,
            min(own) * 1e6,
            max(own) * 1e6,
            statistics.median(x / kernel for x, kernel in zip(own, seconds[0], strict=True)),
            peak,
        )
        for candidate, own, peak in zip(candidates, seconds, peaks, strict=True)
    ]


def turn(candidate: Candidate, runs: int = 3) -> float:
    """Median of a few runs in a row, after a pause and a run that wakes threads and fills caches."""
    time.sleep(PAUSE_SECONDS)
    candidate.run()
    measured = []
    for _ in range(runs):
        start = time.perf_counter()
        candidate.run()
        measured.append(time.perf_counter() - start)
    return statistics.median(measured)


if __name__ == "__main__":
    main()
