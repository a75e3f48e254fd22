"""Faults in and around fused operators: wrong attributes, operands, masks and filters of one node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
from planted_faults import FAULTS, Damage, Fault, Graph, applied, attribute, set_attribute, sliced

from effexport.plugins.ops import OPS

# Fused operator → the place of its mask among the inputs. A mask that hashes lack is a fault of its own.
MASK_INPUT = {
    op: [x.name for x in signature.inputs].index("keep")
    for op in OPS
    if (signature := OPS[op].load().SIGNATURE).outputs[0].dtype == "T" and "keep" in [x.name for x in signature.inputs]
}


def fused_nodes(graph: Graph, *ops: str) -> list[onnx.NodeProto]:
    return graph.nodes(*(ops or MASK_INPUT))


def recurrences(graph: Graph) -> list[onnx.NodeProto]:
    return fused_nodes(graph, "LinearRecurrence")


def operands_exchanged(first: int, second: int, graph: Graph) -> bool:
    nodes = (recurrences(graph) or fused_nodes(graph))[:1]
    for node in nodes:
        node.input[first], node.input[second] = node.input[second], node.input[first]
    return bool(nodes)


def attribute_is(name: str, value: Any, graph: Graph) -> bool:
    nodes = [node for node in fused_nodes(graph) if attribute(node, name) is not None]
    for node in nodes:
        set_attribute(node, name, value)
    return bool(nodes)


def scale_to_the_power(power: float, graph: Graph) -> bool:
    nodes = fused_nodes(graph, "MaskedAttention", "BandedAttention")
    for node in nodes:
        set_attribute(node, "scale", float(attribute(node, "scale") ** power))
    return bool(nodes)


def band_wider(side: str, graph: Graph) -> bool:
    nodes = fused_nodes(graph, "BandedAttention")
    for node in nodes:
        set_attribute(node, side, attribute(node, side) + 1)
    return bool(nodes)


def global_queries_lost(graph: Graph) -> bool:
    """Global tokens have the query 0 where they look at all others."""
    nodes = fused_nodes(graph, "BandedAttention")
    for node in nodes:
        node.input[3] = graph.add("Sub", [node.input[3], node.input[3]])
    return bool(nodes)


def around_exchanged(graph: Graph) -> bool:
    nodes = fused_nodes(graph, "LSHAttention")
    for node in nodes:
        before, after = attribute(node, "chunks_before"), attribute(node, "chunks_after")
        set_attribute(node, "chunks_before", after)
        set_attribute(node, "chunks_after", before)
    return bool(nodes)


def masks_ignored(graph: Graph) -> bool:
    nodes = fused_nodes(graph)
    for node in nodes:
        keep = node.input[MASK_INPUT[node.op_type]]
        node.input[MASK_INPUT[node.op_type]] = graph.add("Or", [keep, graph.add("Not", [keep])])
    return bool(nodes)


def padding_hashed(graph: Graph) -> bool:
    """Padding gets an ordinary bucket instead of the one behind all others."""
    nodes = fused_nodes(graph, "LSHHash")
    for node in nodes:
        node.input[2] = graph.add("Or", [node.input[2], graph.add("Not", [node.input[2]])])
    return bool(nodes)


def rotations_changed(change: Callable[[np.ndarray], np.ndarray], graph: Graph) -> bool:
    """Rotations [heads, head_dim, rounds, width] of every hash."""
    nodes = fused_nodes(graph, "LSHHash")
    for node in nodes:
        rotations = graph.constant(node.input[1])
        assert rotations is not None
        graph.overwrite(node.input[1], change(rotations))
    return bool(nodes)


def heads_of_values_reversed(graph: Graph) -> bool:
    """Every head gets the values of another one."""
    heads = graph.spec.attention.heads
    for node in fused_nodes(graph, "EluLinearAttention", "LSHAttention", "MaskedAttention", "BandedAttention"):
        place = 1 if node.op_type == "LSHAttention" else 2
        other = graph.new_constant(np.arange(heads)[::-1].copy())
        node.input[place] = graph.add("Gather", [node.input[place], other], axis=1)
        return True
    return False


def segments_halved(graph: Graph) -> bool:
    """Segments of twice the length; the landmarks of the second half are copies of the first."""
    nodes = [node for node in fused_nodes(graph) if attribute(node, "num_segments") is not None]
    for node in nodes:
        count = attribute(node, "num_segments")
        set_attribute(node, "num_segments", count // 2)
        (means,) = node.output
        halved = graph.cut(means)
        graph.add("Concat", [halved, halved], means, axis=2)
    return bool(nodes)


def filter_reversed(graph: Graph) -> bool:
    nodes = fused_nodes(graph, "SequenceConv")
    for node in nodes:
        weight = graph.constant(node.input[1])
        assert weight is not None
        graph.overwrite(node.input[1], weight[:, :, ::-1])
    return bool(nodes)


def residual_of_convolution_lost(graph: Graph) -> bool:
    nodes = fused_nodes(graph, "SequenceConv")
    for node in nodes:
        node.input[3] = graph.add("Sub", [node.input[3], node.input[3]])
    return bool(nodes)


PAST, DECAY, BETA = 3, 4, 5


def input_lost(place: int, graph: Graph) -> bool:
    """Zeros in the place of an input."""
    nodes = recurrences(graph)
    for node in nodes:
        node.input[place] = graph.add("Sub", [node.input[place], node.input[place]])
    return bool(nodes)


def decay_after_the_write(graph: Graph) -> bool:
    """A token decays what it has written, too: the decays of all tokens one token late."""
    nodes = recurrences(graph)
    for node in nodes:
        none = graph.add("Sub", [node.input[DECAY], node.input[DECAY]])
        first, rest = sliced(graph, none, 0, 1), sliced(graph, node.input[DECAY], 0, -1)
        node.input[DECAY] = graph.add("Concat", [first, rest], axis=1)
    return bool(nodes)


def beta_of_the_value_alone(graph: Graph) -> bool:
    """k (β v − Sᵀ k)ᵀ and not β k (v − Sᵀ k)ᵀ: what the state holds is erased whatever β is."""
    nodes = recurrences(graph)
    for node in nodes:
        node.input[2] = graph.add("Mul", [node.input[2], node.input[BETA]])
        zero = graph.add("Sub", [node.input[BETA], node.input[BETA]])
        node.input[BETA] = graph.add("Exp", [zero])
    return bool(nodes)


def state_not_reset(graph: Graph) -> bool:
    """A tenth in each number of the state before the first token."""
    nodes = recurrences(graph)
    for node in nodes:
        node.input[PAST] = graph.add("Add", [node.input[PAST], graph.new_constant(np.array(0.1, np.float32))])
    return bool(nodes)


def padding_decays(graph: Graph) -> bool:
    """Hidden tokens decay the state: a fault of a prefill, as in a model nothing is read after padding at the end, and
    the state is zero before the first token. Their keys are zero, so they write nothing."""
    return applied([graph.bypass(graph.upstream(node.input[DECAY], "Where"), 1) for node in recurrences(graph)])


def taps_reversed(graph: Graph) -> bool:
    """The first tap is of the token itself."""
    taps = {node.input[1]: graph.constant(node.input[1]) for node in fused_nodes(graph, "CausalConv")}
    return applied([graph.overwrite(name, array[:, ::-1]) for name, array in taps.items() if array is not None])


def fault(name: str, description: str, damage: Damage, *at: str, causal: bool = False) -> Fault:
    return Fault(name, description, damage, at, ("fused causal",) if causal else ("fused",))


FUSED_FAULTS: tuple[Fault, ...] = (
    fault(
        "fused: query is key",
        "query and key exchanged",
        partial(operands_exchanged, 0, 1),
        "softmax",
        "linear",
        "window",
    ),
    fault(
        "fused: key is value",
        "key and value exchanged",
        partial(operands_exchanged, 1, 2),
        "linear",
        "aft-simple",
        "aft-local",
        "window",
    ),
    fault("fused: query is value", "query-key and value exchanged", partial(operands_exchanged, 0, 1), "lsh"),
    fault("fused: order is rank", "the inverse of the sort", partial(operands_exchanged, 2, 3), "lsh"),
    fault(
        "fused: mask ignored",
        "all tokens are kept",
        masks_ignored,
        *("softmax", "linear", "nystrom", "lsh", "aft-simple", "aft-local", "aft-conv", "window"),
    ),
    fault(
        "fused: values of another head",
        "heads of the values reversed",
        heads_of_values_reversed,
        *("softmax", "linear", "nystrom", "lsh", "window"),
    ),
    fault("fused: scale lost", "logits without 1/√d", partial(scale_to_the_power, 0), "softmax", "nystrom", "window"),
    fault("fused: scale doubled", "1/√d applied twice", partial(scale_to_the_power, 2), "softmax", "nystrom", "window"),
    fault("fused: eps lost", "eps of the denominator is 0", partial(attribute_is, "eps", 0.0), "linear"),
    fault("fused: look-around direction", "the chunk after, not before", around_exchanged, "lsh"),
    fault("fused: look-around lost", "only the own chunk", partial(attribute_is, "chunks_before", 0), "lsh"),
    fault("fused: look-around wraps", "the first chunk sees the last", partial(attribute_is, "circular", 1), "lsh"),
    fault("fused: chunks of half length", "8 tokens, not 16", partial(attribute_is, "chunk_length", 8), "lsh"),
    fault("fused: padding hashed", "padding has no bucket of its own", padding_hashed, "lsh"),
    fault("fused: rotation sign", "rotations negated", partial(rotations_changed, np.negative), "lsh"),
    fault(
        "fused: rotations shuffled",
        "the directions of a round in reverse",
        partial(rotations_changed, lambda a: a[:, :, :, ::-1]),
        "lsh",
    ),
    fault(
        "fused: rotations of another head",
        "heads of the rotations reversed",
        partial(rotations_changed, lambda a: a[::-1]),
        "lsh",
    ),
    fault("fused: fewer segments", "half as many landmarks, twice", segments_halved, "nystrom"),
    fault("fused: filter reversed", "the convolution runs backwards", filter_reversed, "nystrom"),
    fault("fused: only the convolution", "its residual is zero", residual_of_convolution_lost, "nystrom"),
    fault(
        "fused: later tokens seen",
        "the node is not causal",
        partial(attribute_is, "causal", 0),
        *("linear", "lsh", "aft-local", "window"),
        causal=True,
    ),
    fault("fused: window too wide", "one token more before a query", partial(band_wider, "left"), "window"),
    fault("fused: window too narrow", "none after a query", partial(attribute_is, "right", 0), "window"),
    fault("fused: window in blocks", "a band for each two queries", partial(attribute_is, "block", 2), "window"),
    fault(
        "fused: no global token", "the first token is like others", partial(attribute_is, "with_globals", 0), "window"
    ),
    fault("recurrence: query is key", "query and key exchanged", partial(operands_exchanged, 0, 1), "gated-delta"),
    fault("recurrence: key is value", "key and value exchanged", partial(operands_exchanged, 1, 2), "gated-delta"),
    fault("recurrence: no decay", "the state is kept for ever", partial(input_lost, DECAY), "gated-delta"),
    fault("recurrence: decay late", "decay after the write", decay_after_the_write, "gated-delta"),
    fault("recurrence: beta of the value", "beta is on the wrong side", beta_of_the_value_alone, "gated-delta"),
    fault("recurrence: state not reset", "a sequence begins with another's state", state_not_reset, "gated-delta"),
    fault("recurrence: taps reversed", "the convolution runs backwards", taps_reversed, "gated-delta"),
    fault("fused: global queries lost", "a global token's own query is another", global_queries_lost, "window"),
)

ALL_FAULTS: tuple[Fault, ...] = (*FAULTS, *FUSED_FAULTS)
