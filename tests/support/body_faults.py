"""Faults in function bodies: every edit of a table, made to every node of every body where it applies.

Edits go by the type of a node, so that they reach whatever bodies there are. An edit that leaves the body as it was, as
a cast to the type that a value already has does, is not made. Other edits that change nothing by the mathematics are
declared in NO_OPS, each with its reason.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from effexport.plugins.ops import DOMAIN, OPS, OPSET_VERSION, PLUGIN_NAMESPACE
from effexport.proof.checks.function_bodies import Call, Definition, OperatorUse

OPSET = 20
# Every body in every form that it takes: (operator, attributes), by name.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "AFTSimpleAttention": ("AFTSimpleAttention", {}),
    "AFTWindowAttention": ("AFTWindowAttention", {"causal": 0}),
    "AFTWindowAttention, causal": ("AFTWindowAttention", {"causal": 1}),
    "BandedAttention": ("BandedAttention", {"scale": 0.25, "left": 9, "right": 5, "block": 1}),
    "BandedAttention, global tokens": (
        "BandedAttention",
        {"scale": 0.25, "left": 9, "right": 5, "block": 1, "with_globals": 1},
    ),
    "BandedAttention, global tokens, biases and blocks": (
        "BandedAttention",
        {"scale": 0.25, "left": 4, "right": 28, "block": 3, "with_globals": 1, "with_bias": 1, "most_globals": 60},
    ),
    "BandedAttention, global tokens in short sequences": (
        "BandedAttention",
        {"scale": 0.25, "left": 9, "right": 5, "block": 1, "with_globals": 1, "most_globals": 60, "all_up_to": 250},
    ),
    "BandedAttention, causal with global tokens": (
        "BandedAttention",
        {"scale": 0.25, "left": 9, "right": 5, "block": 1, "with_globals": 1, "causal": 1},
    ),
    "BandedAttention, bands of several widths": (
        "BandedAttention",
        {"scale": 0.25, "left": 60, "right": 40, "block": 3, "with_bias": 1},
    ),
    "BandedAttention, causal bands of several widths": (
        "BandedAttention",
        {"scale": 0.25, "left": 9, "right": 5, "block": 1, "causal": 1},
    ),
    "CausalConv": ("CausalConv", {"silu": 0}),
    "CausalConv, SiLU": ("CausalConv", {"silu": 1}),
    "EluLinearAttention": ("EluLinearAttention", {"eps": 1e-6, "causal": 0, "chunk_length": 128}),
    "EluLinearAttention, causal": ("EluLinearAttention", {"eps": 1e-6, "causal": 1, "chunk_length": 16}),
    "IterativePinv": ("IterativePinv", {"iterations": 6}),
    "LinearRecurrence": ("LinearRecurrence", {"scale": 0.5, "delta": 1, "chunk_length": 8, "longest": 64}),
    "LinearRecurrence, per channel": (
        "LinearRecurrence",
        {"scale": 0.5, "delta": 1, "per_channel": 1, "chunk_length": 8, "longest": 64},
    ),
    "LinearRecurrence, no delta rule": (
        "LinearRecurrence",
        {"scale": 0.5, "delta": 0, "chunk_length": 8, "longest": 64},
    ),
    "LSHAttention": ("LSHAttention", {"chunk_length": 16, "chunks_before": 1}),
    "LSHAttention, causal": ("LSHAttention", {"chunk_length": 16, "chunks_before": 1, "causal": 1}),
    "LSHAttention, as in checkpoints": (
        "LSHAttention",
        {"chunk_length": 16, "chunks_before": 1, "chunks_after": 1, "causal": 1, "circular": 1, "rounded": 1},
    ),
    "LSHHash": ("LSHHash", {"bucket_factors": (4, 6), "chunk_length": 16}),
    "LSHHash, one factor": ("LSHHash", {"bucket_factors": (10,), "chunk_length": 16}),
    "LSHSort, one digit": ("LSHSort", {"num_buckets": 17}),
    "LSHSort, two digits": ("LSHSort", {"num_buckets": 100}),
    "MaskedAttention": ("MaskedAttention", {"scale": 0.25}),
    "PackedLinear": ("PackedLinear", {"activation": 0}),
    "PackedLinear, GELU or none": ("PackedLinear", {"activation": 1}),
    "PackedLinear, GELU by tanh": ("PackedLinear", {"activation": 2}),
    "PackedLinear, ReLU or GELU": ("PackedLinear", {"activation": 3}),
    "PackedLinear, SiLU": ("PackedLinear", {"activation": 4}),
    "PackedLinear, rounded": ("PackedLinear", {"activation": 0, "round_output": 1}),
    "PackedLinear, rounded or not": ("PackedLinear", {"activation": 0, "round_output": 1}),
    "QuantizedLinear": ("QuantizedLinear", {"activation": 0}),
    "QuantizedLinear, GELU or none": ("QuantizedLinear", {"activation": 1}),
    "QuantizedLinear, GELU by tanh": ("QuantizedLinear", {"activation": 2}),
    "QuantizedLinear, ReLU or GELU": ("QuantizedLinear", {"activation": 3}),
    "QuantizedLinear, SiLU": ("QuantizedLinear", {"activation": 4}),
    "QuantizedLinear, rounded": ("QuantizedLinear", {"activation": 0, "round_output": 1}),
    "SegmentMeans": ("SegmentMeans", {"num_segments": 16}),
    "SequenceConv": ("SequenceConv", {}),
}
# Attributes of another node in the same model, which shares the body.
OTHER_NODES: dict[str, dict[str, Any]] = {
    "BandedAttention, bands of several widths": {"left": 4, "right": 5},
    "BandedAttention, causal bands of several widths": {"left": 4, "right": 7},
    "PackedLinear, GELU or none": {"activation": 0},
    "PackedLinear, ReLU or GELU": {"activation": 1},
    "PackedLinear, rounded or not": {"activation": 0, "round_output": 0},
    "QuantizedLinear, GELU or none": {"activation": 0},
    "QuantizedLinear, ReLU or GELU": {"activation": 1},
}
# Those whose body works in the element type of the model: the others are called in float32, or are for integers.
HALF = tuple(name for name, (op, _) in FORMS.items() if op != "IterativePinv" and "float16" in OPS[op].element_types)

COMMUTATIVE = {"Add", "Mul", "Max", "Min", "And", "Or", "Equal"}
UNARY = {"Abs", "Neg", "Reciprocal", "Relu", "Sqrt", "Tanh"}
# Operator → what it is mistaken for.
CONFUSED = {
    "Add": ("Sub",),
    "And": ("Or", "Xor"),
    "ArgMax": ("ArgMin",),
    "Equal": ("GreaterOrEqual", "LessOrEqual"),
    "Exp": ("Neg", "Relu"),
    "GreaterOrEqual": ("Greater", "LessOrEqual"),
    "Less": ("LessOrEqual", "GreaterOrEqual"),
    "LessOrEqual": ("Less", "GreaterOrEqual"),
    "Log": ("Sqrt", "Neg"),
    "Max": ("Min", "Add"),
    "Min": ("Max", "Add"),
    "Mod": ("Div", "Mul"),
    "Mul": ("Add", "Div"),
    "Neg": ("Relu",),
    "ReduceMax": ("ReduceSum", "ReduceMean", "ReduceMin"),
    "ReduceMean": ("ReduceSum", "ReduceMax"),
    "ReduceSum": ("ReduceMax", "ReduceMean"),
    "Reciprocal": ("Neg", "Sqrt"),
    "Relu": ("Abs", "Neg"),
    "Sigmoid": ("Tanh", "Relu"),
    "Softmax": ("LogSoftmax",),
    "Sqrt": ("Abs", "Reciprocal"),
    "Sub": ("Add",),
}
CASTS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64)
# Values of attributes that a node need not state.
DEFAULTS = {("", "keepdims"): 1, ("", "start"): 0, ("Softmax", "axis"): -1, ("Gather", "axis"): 0}
# Edits that change nothing by the mathematics: a pattern for "FORM | FAULT", and the reason.
NO_OPS: tuple[tuple[str, str], ...] = (
    (
        r"Squeeze (size_scalar|padded|groups|rows_scalar|\w+_count|block|window|pairs|slots_here)"
        r": bypassed, gives its input \w+$"
        r"|SegmentMeans: Squeeze length: bypassed, gives its input length_1d",
        "ONNX Runtime takes a vector of one element as a scalar",
    ),
    (
        r"Unsqueeze (lane|block|position)_row: bypassed, gives its input (lane|block_index|position_1d)"
        r"|IterativePinv: Unsqueeze row: bypassed, gives its input index"
        r"|SequenceConv: Unsqueeze column: bypassed, gives its input column_index"
        r"|Concat triangle_shape: bypassed, gives its input (one|blocks)_1d"
        r"|Expand between_triangle: bypassed, gives its input between_float"
        r"|EluLinearAttention: Shape batch: another attribute, (start = 1|end = 0)"
        r"|Concat kept_shape: bypassed, gives its input heads_1d"
        r"|Shape places_first: another attribute, (start = 1|end = 0)"
        r"|^LSHAttention(, causal)? .*Concat places_shape: bypassed, gives its input (one|chunk)_1d"
        r"|^LSHAttention(, causal)? .*Expand places: bypassed, gives its input place_rows"
        r"|Min some_(samples|heads)_1d: bypassed, gives its input (batch|heads)_1d"
        r"|SequenceConv: Concat samples: bypassed, gives its input one_1d"
        r"|SequenceConv: Expand toeplitz_batch: bypassed, gives its input toeplitz_head",
        "broadcasting does the same, except in an empty batch",
    ),
    (r"SegmentMeans: Shape heads_1d: another attribute, (no start|start = 0)", "the batch stands where a 1 did"),
    (
        r"Sub \w+_whole: bypassed, gives its input (?!\w+_rest)|Sub (chunks|rounds|before)_1d_whole: another operator",
        "ONNX rounds the quotient of integers down itself, and some dividends are multiples already",
    ),
    (
        r"Sub (blocks_or_none|blocks|whole_1d)_whole: another operator"
        r"|Div (blocks|blocks_or_none|whole_1d): bypassed, gives its input \w+_whole"
        r"|Constant (rounding|nearly_block): another constant, (doubled|plus 1)"
        r"|(Banded|CausalC).* Sub (chunks|groups)_whole: another operator"
        r"|(Banded|CausalC).* Div (chunks|groups): bypassed, gives its input (\w+_whole|group$)"
        r"|^BandedAttention, bands .* Div chunks: bypassed, gives its input chunk$"
        r"|(Banded|CausalC).* Constant nearly_(chunk|group): another constant, (doubled|plus 1)"
        r"|Sub nearly_1d: (another operator|bypassed, gives its input block_1d)"
        r"|Max blocks(_1d)?: another operator, Add",
        "more blocks than needed, which hold nothing",
    ),
    (
        r"Sub reach_1d: bypassed, gives its input taps_1d|Max block_1d: another operator, Add"
        r"|Constant least_block: another constant, (?!0)",
        "blocks of another length, which hold the same tokens",
    ),
    (r"ReduceSum (combined|place_sum\d): .*keepdims", "a Reshape follows"),
    (r"Reshape \w+: another attribute, allowzero", "only where there are no samples, heads or channels"),
    (r"AFT.* Constant (absent|floor): another constant, (a hundredth|doubled|halved)", "still far below every key"),
    (r"AFT.* Constant one: another constant, (?!0|minus)", "it divides 0, where nothing is visible"),
    (r"AFT.* Equal none: another operator, LessOrEqual", "a sum of powers is not negative"),
    (r"Concat pads: operands exchanged, 0 and 1: zeros5(?!, missing_1d)", "both are zeros"),
    (
        r"Max blocks: bypassed, gives its input blocks_or_none",
        "only for sequences of no tokens, which are cut off again",
    ),
    (r"MatMul P(Inner|Middle)\d: operands exchanged", "both are polynomials in P, which commute"),
    (r"Add \w+_end0: (another|bypassed, gives its input chunks_1d)", "adds 0"),
    (r"Add \w+_shifted1: (another|bypassed, gives its input \w+_index)", "adds 0"),
    (r"Gather \w+_part1: bypassed, gives its input \w+_flat", "the chunks themselves"),
    (r"Mod \w+_ring_index[01]: bypassed, gives its input \w+_shifted", "-1 counts from the end, and 0 is in range"),
    (r"LSHA.* Constant hidden_logit: another constant, (a hundredth|doubled|halved)", "still below every other logit"),
    (
        r"Constant self_logit: another constant, (a hundredth|plus|minus)"
        r"|^LSHAttention(, causal)? .*Constant self_logit: another constant, (doubled|halved)",
        "still below every visible logit and above hidden ones, and rounded alike",
    ),
    (r"Constant places_fill: another constant, (?!0)", "still beyond every place"),
    (r"Constant positions_fill: another constant, (doubled|minus 1)", "still no position"),
    (r"Constant rows_fill: another constant", "another row, whose logits are hidden"),
    (r"GreaterOrEqual not_later: another operator, Greater", "a token's own key has a logit of its own"),
    (r"Cast place\d: another attribute, to = 6", "an index is an index in 32 bits too"),
    (
        r"Constant beyond\d: another constant, (doubled|plus 1: 1(7|00)|minus 1: 100)",
        "counters that stay empty, or finer digits",
    ),
    (r"Constant step1: another constant, halved", "finer digits, which sort the same way"),
    (r"Constant no_digit: another constant, (doubled|minus 1)", "still no digit"),
    (r"ReduceSum place_sum\d: another operator, ReduceMax", "all others are 0, and places are not negative"),
    (r"Concat projected_shape: operands exchanged, 1 and 2: heads_1d, rounds_1d", "rows stay in the same order"),
    (r"Constant end1: another constant, (doubled|plus 1)", "still the end of the projections"),
    (r"Masked.* Constant hidden_logit: another constant, halved", "still below every other logit"),
    (r"Concat ends: (bypassed, gives its input kept_ends|operands exchanged, 0 and 1: zeros)", "only without tokens"),
    (r"Constant zero_2d: another constant", "an end before or at the first token of a sample without any"),
    (
        r"AFTW.* (Constant nearly_1d: another constant, (doubled|plus|minus)"
        r"|Div blocks_1d: bypassed|Sub blocks_1d_whole: another operator)",
        "more blocks than needed, which hold nothing",
    ),
    (r"AFTW.*, causal .* Mod blocks_1d_rest: another operator, Div", "more blocks than needed, which hold nothing"),
    (
        r"AFTW.* (Mod reached_1d_rest: another operator, Div|Sub reached_1d_whole: another operator"
        r"|Div reached_1d: bypassed|Max reach_1d: another operator, Add)",
        "a longer reach, to keys whose biases are 0",
    ),
    (r"AFTW.* Shape \w+_given_1d: another attribute, (end = 5|no end)", "the last of four dimensions"),
    (
        r"AFTW.* Concat ((bias|group)_rows_shape: operands exchanged, 0 and 2"
        r"|(pair_)?band_flat_shape: operands exchanged, 0 and 1|pair_band_shape: operands exchanged, \d and [12])",
        "a Reshape follows, which restores the shape",
    ),
    (
        r"AFTW.* (Add pair_band_taken_1d: (another|bypassed, gives its input pair)"
        r"|Sub pair_band_after_1d: bypassed, gives its input pair_band_taken"
        r"|Concat pair_band_ends: operands exchanged, \d and [12])",
        "adds 0, or exchanges zeros, or takes 8 for 16 - 8",
    ),
    (
        r"AFTW.* Concat ((pair|group|group_bias)_shape|near(_m)?_by_group): .*: groups_1d, group_1d",
        "both are 8",
    ),
    (r"AFTW.* Slice (near|block)_[nd]: operands exchanged, .*: channels_1d, axis5", "both are 5"),
    (r"AFTW.* Sum all_[nd]: operands exchanged", "a sum has no order"),
    (r"AFTW.* Max (block|far)_top: bypassed, gives its input \w+_largest", "hidden keys stay far below the others"),
    (r"AFTW.* Slice next: operands exchanged, 1 and 3", "both are 2"),
    (
        r"AFTW.* Unsqueeze \w*factor(_sample)?: bypassed, gives its input \w*factor_heads",
        "broadcasting does the same",
    ),
    (r"AFTWindowAttention \| .*Unsqueeze key_block: bypassed, gives its input block_", "broadcasting does the same"),
    (r"AFTW.* Squeeze (blocks|seen)_index: bypassed", "ONNX Runtime takes a vector of one element as a scalar"),
    (r"AFTW.* Sub distance_signed: operands exchanged", "its absolute value follows"),
    (
        r"Banded.* Constant hidden_logit: another constant, (doubled|halved|a hundredth)",
        "not above any other logit; where no key is visible, zeros stand for the weights",
    ),
    (
        r"^BandedAttention(, (causal )?bands .*)? \| .*Constant full: another constant, (doubled|halved|plus 1|a h)",
        "counts that are only compared with 0",
    ),
    (
        r"^BandedAttention(, .* (biases|short) .*|, (causal )?bands .*)? \| .*Constant axis0: another constant, minus",
        "the first axis is the last one",
    ),
    (
        r"Banded.* Constant after_1d: another constant, (doubled|plus 1)"
        r"|Banded.* Unsqueeze after_1d: bypassed, gives its input right"
        r"|Banded.*, causal .*Add missing_after_1d: (another operator, Sub|bypassed, gives its input missing_1d)",
        "keys after those of the last chunk, or none of them",
    ),
    (r"^BandedAttention, causal bands .*(Constant (right|beside_both)|Add both): ", "only biases need it"),
    (r"Banded.* Where local_float: bypassed, gives its input local_keys", "booleans may be padded too"),
    (
        r"Banded.* (ReduceMax most_any: another operator, ReduceSum|Max most: another operator, Add"
        r"|Less is_slot: another operator, LessOrEqual|Constant (most|short): another constant, (doubled|plus 1)"
        r"|Where slot_count: bypassed, gives its input tokens"
        r"|Min slot_count: bypassed, gives its input tokens)",
        "more slots than needed, whose tokens are not global",
    ),
    (r"Banded.* LessOrEqual not_before: another operator, Less", "a global token's own row is replaced"),
    (
        r"Banded.* Max offset_low: (bypassed, gives its input offset_any|another operator, Add)",
        "before the band: hidden",
    ),
    (r"Banded.* Softmax (near|global)_all: another attribute, no axis", "it is the last one"),
    (
        r"Banded.* ReduceSum \w+_count: (bypassed, gives its input \w+_ones|another operator)"
        r"|Banded.*, global .*Constant global_axis: another constant, (halved|minus)"
        r"|Banded.*, causal .*Constant global_axis: another constant, halved",
        "a hidden key has no weight, unless its query sees none",
    ),
    (
        r"LinearRecurrence: (Max states_1d: bypassed, gives its input kv_heads_1d"
        r"|Sub group_1d_whole: another operator, Add)",
        "there is a state, and its heads are a whole number",
    ),
    (
        r"^LinearRecurrence(, no delta rule)? \| .*Concat query_shape: operands exchanged, 4 and 5"
        r"|LinearRecurrence: Concat (result_shape: operands exchanged, 2 and 3|states_\d: another attribute, axis = 4)",
        "a Reshape follows, which restores the shape",
    ),
    (
        r"LinearRecurrence: Transpose total: (bypassed|another attribute, perm = \S0, 1, 2, 3,)",
        "one number for each chunk, or factors of rows of the identity, which may be those of its columns",
    ),
    (
        r"LinearRecurrence: Div (chunks_or_none|count_2): bypassed, gives its input (chunk|two)_1d",
        "more chunks or pairs than needed, which hold nothing",
    ),
    (
        r"LinearRecurrence: Mul pairs_1d: (another operator|bypassed, gives its input key_dim)",
        "ONNX Runtime takes the last size of a shape from the tensor",
    ),
    (r"LinearRecurrence: Equal is_new_8: another operator, GreaterOrEqual", "there is one such block"),
    (
        r"CausalConv: Squeeze (before|taps|batch): bypassed"
        r"|LinearRecurrence: (Squeeze channel_end: bypassed, gives its input key_dim"
        r"|Unsqueeze channel_row: bypassed, gives its input channel$)",
        "a vector of one element is taken as a scalar, and broadcasting does the same",
    ),
    (r"LinearRecurrence: Slice \w+: operands exchanged, \d and 4: axis2, two_1d", "both are 2"),
    (
        r"^LinearRecurrence, no delta rule \| .*Pad right_moved_1: bypassed, gives its input right"
        r"|LinearRecurrence: (Slice right_\w+_1: operands exchanged, 2 and 4"
        r"|Pad right_added_1: bypassed, gives its input right|Concat pads_1: operands exchanged, 0 and 2"
        r"|Slice left_\w+_2: operands exchanged, 2 and [34]|Mul even_2: bypassed, gives its input two_1d"
        r"|Div count_3: operands exchanged|Concat states_2: another attribute, axis = 2)",
        "only the first pair of the second level from the top is read, and the top has one",
    ),
    (r"CausalConv: Constant axis0: another constant, minus", "of vectors, the first axis is the last one"),
    (r"CausalConv: Transpose filters: another attribute, no perm", "two axes are exchanged either way"),
    (
        r"CausalConv: (Add other_place: bypassed, gives its input total"
        r"|Where kept_place: bypassed, gives its input rank)",
        "hidden tokens, which nothing reads, share places with kept ones, which ONNX Runtime writes after them",
    ),
    (r"SegmentMeans: Constant one_float: another constant, halved", "a count is 0, of nothing, or at least 1"),
    (
        r"Linear, ReLU or GELU \| .*(Constant (half|full|root)|Div scaled1|Erf erf1|Add share1|Mul (half1|until1)): ",
        "in the branch of the other node's activation",
    ),
    (
        r"Linear, .*Equal is(\d|_rounded): another operator",
        "the other node's number would be in the wrong branch, not its own",
    ),
    (r"QuantizedL.* Constant largest_code: another constant, negative", "codes and scales change their signs"),
    (r"QuantizedL.* Constant zero_code: another constant, minus 1", "codes reach from −127, which is 0 then"),
)
NO_OPS_IN_HALF = ((r"Constant key_eps: another constant, a hundredth more", "below the rounding of float16"),)


@dataclass(frozen=True)
class BodyFault:
    """One edit of one node. edit: its name. output: of the node. detail: what exactly is edited."""

    op: str
    edit: str
    node_type: str
    output: str
    detail: str
    damaged: onnx.FunctionProto

    def __str__(self) -> str:
        return f"{self.op}: {self.node_type} {self.output}: {self.edit}, {self.detail}"


def reason_for_no_op(fault: BodyFault, form: str, precision: str) -> str:
    """The reason a fault changes nothing; empty if it does."""
    declared = NO_OPS + (NO_OPS_IN_HALF if precision == "fp16" else ())
    if fault.output in unread(form):
        return "nothing reads it in this form of the body"
    return next((reason for pattern, reason in declared if re.search(pattern, f"{form} | {fault}")), "")


@functools.cache
def unread(form: str) -> frozenset[str]:
    """Values of a body that no node reads and that are not its outputs."""
    (function,) = healthy_use(form).model.functions
    nodes = list(with_branches(function.node))
    read = {value for node in nodes for value in node.input} | set(function.output)
    read |= {value.name for node in nodes for attribute in node.attribute for value in attribute.g.output}
    return frozenset(value for node in nodes for value in node.output if value not in read)


def healthy_use(form: str, precision: str = "fp32") -> OperatorUse:
    """A node of an operator, and a model with its body."""
    op, given = FORMS[form]
    module = OPS[op].load()
    attributes = {attribute.name: given.get(attribute.name, 0) for attribute in module.SIGNATURE.attributes}
    inputs, outputs = ([item.name for item in items] for items in (module.SIGNATURE.inputs, module.SIGNATURE.outputs))
    node, *others = (
        helper.make_node(op, inputs, outputs, domain=DOMAIN, **{PLUGIN_NAMESPACE: DOMAIN}, **attributes | changed)
        for changed in ({}, *([OTHER_NODES[form]] if form in OTHER_NODES else []))
    )
    return OperatorUse(model_of(module.onnx_function_body([node, *others], OPSET)), node, precision)


def damaged_use(healthy: OperatorUse, fault: BodyFault) -> OperatorUse:
    return OperatorUse(model_of(fault.damaged), healthy.node, healthy.precision)


def remembered(definition: Definition) -> Definition:
    """Computes each answer once: all faults of a body are compared with the same ones, which take most of the time."""

    def once(compute: Call) -> Call:
        answers: dict[tuple[bytes, ...], Sequence[Any]] = {}

        def run(inputs: Any) -> Sequence[Any]:
            key = tuple(part for x in inputs.values() for part in (str((x.dtype, x.shape)).encode(), x.tobytes()))
            if key not in answers:
                answers[key] = compute(inputs)
            return answers[key]

        return run

    return Definition(once(definition.exact), once(definition.in_float32))


def model_of(function: onnx.FunctionProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    graph = helper.make_graph([], "nothing", [], [])
    version = helper.find_min_ir_version_for([opsets[0]], ignore_unknown=True)
    return helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=version)


def body_faults(use: OperatorUse) -> Iterator[BodyFault]:
    """Every edit of every node of a body."""
    (function,) = use.model.functions
    types = element_types(function, use.dtype)
    for index, node in enumerate(with_branches(function.node)):
        for edit, detail, new in edits(node, types, ranks(function)):
            damaged = onnx.FunctionProto()
            damaged.CopyFrom(function)
            next(itertools.islice(with_branches(damaged.node), index, None)).CopyFrom(new)
            yield BodyFault(function.name, edit, node.op_type, node.output[0], detail, damaged)


def with_branches(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, those of branches before the If that has them."""
    for node in nodes:
        for attribute in node.attribute:
            yield from with_branches(attribute.g.node)
        yield node


def ranks(function: onnx.FunctionProto) -> dict[str, int]:
    return {item.name: len(item.dims.split()) for item in OPS[function.name].load().SIGNATURE.inputs}


def element_types(function: onnx.FunctionProto, dtype: str) -> dict[str, int]:
    """The element types of the values of a body, as far as its casts depend on them."""
    own = (
        TensorProto.INT32
        if OPS[function.name].element_types == ("int32",)
        else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    )
    types = {
        item.name: own if item.dtype == "T" else helper.np_dtype_to_tensor_dtype(np.dtype(item.dtype))
        for item in OPS[function.name].load().SIGNATURE.inputs
    }
    for node in with_branches(function.node):
        if node.op_type == "If":
            kind = types[node.attribute[0].g.output[0].name]
        elif node.op_type == "Cast":
            kind = helper.get_node_attr_value(node, "to")
        elif node.op_type == "CastLike":
            kind = types[node.input[1]]
        elif node.op_type in ("Shape", "ArgMax"):
            kind = TensorProto.INT64
        elif node.op_type == "Constant":
            untyped = {"value_int": TensorProto.INT64, "value_float": TensorProto.FLOAT}
            kind = untyped.get(node.attribute[0].name, node.attribute[0].t.data_type)
        elif node.op_type in ("Equal", "Less", "LessOrEqual", "GreaterOrEqual", "And"):
            kind = TensorProto.BOOL
        elif node.op_type in ("QuantizeLinear", "MatMulInteger"):
            kind = TensorProto.UINT8 if node.op_type == "QuantizeLinear" else TensorProto.INT32
        else:
            kind = types[node.input[1 if node.op_type == "Where" else 0]]
        types |= dict.fromkeys(node.output, kind)
    return types


def edits(
    node: onnx.NodeProto, types: dict[str, int], ranks: dict[str, int]
) -> Iterator[tuple[str, str, onnx.NodeProto]]:
    """Name and detail of each edit of a node, and the node that replaces it."""
    if node.op_type == "Constant":
        for detail, value in other_constants(node):
            new = helper.make_node("Constant", [], node.output, value=numpy_helper.from_array(value))
            yield "another constant", detail, new
        return
    for first, second in itertools.combinations(range(len(node.input)), 2):
        if node.op_type not in COMMUTATIVE and node.input[first] != node.input[second]:
            order = list(node.input)
            order[first], order[second] = order[second], order[first]
            yield (
                "operands exchanged",
                f"{first} and {second}: {order[second]}, {order[first]}",
                changed(node, inputs=order),
            )
    for value in dict.fromkeys(node.input):
        changes = node.op_type not in ("Cast", "CastLike", "Identity") or types[value] != types[node.output[0]]
        if changes:
            yield "bypassed", f"gives its input {value}", helper.make_node("Identity", [value], node.output)
    for other in CONFUSED.get(node.op_type, ()):
        kept = [] if other in UNARY else list(node.attribute)
        yield "another operator", other, changed(node, op_type=other, attributes=kept)
    for detail, attributes in other_attributes(node, ranks):
        yield "another attribute", detail, changed(node, attributes=attributes)


def other_constants(node: onnx.NodeProto) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    (attribute,) = node.attribute
    if attribute.ref_attr_name:
        dtype = np.int64 if attribute.name == "value_int" else np.float32
        yield f"0 and not {attribute.ref_attr_name}", np.array(0, dtype)
        return
    old = numpy_helper.to_array(attribute.t)
    exact = old.astype(np.float64)
    ways = {"0": exact * 0, "doubled": exact * 2, "halved": np.fix(exact / 2) if old.dtype.kind == "i" else exact / 2}
    ways |= {"plus 1": exact + 1, "minus 1": exact - 1}
    if old.dtype.kind == "f":
        ways |= {"negative": -exact, "a hundredth more": exact * 1.01}
    if old.size > 3:
        ways["reversed"] = exact[::-1]
    shown = np.array2string(old, threshold=8)
    for detail, value in ways.items():
        with np.errstate(over="ignore"):
            new = value.astype(old.dtype)
        if not np.array_equal(new, old):
            yield f"{detail}: {shown}", new


def other_attributes(
    node: onnx.NodeProto, ranks: dict[str, int]
) -> Iterator[tuple[str, Sequence[onnx.AttributeProto]]]:
    for place, attribute in enumerate(node.attribute):
        others = [a for i, a in enumerate(node.attribute) if i != place]
        default = DEFAULTS.get((node.op_type, attribute.name), DEFAULTS.get(("", attribute.name)))
        last = node.op_type == "Shape" and attribute.name == "end" and attribute.i == ranks.get(node.input[0])
        for value in other_values(attribute):
            if not (last and value > attribute.i):
                yield f"{attribute.name} = {value}", [*others, helper.make_attribute(attribute.name, value)]
        if attribute.name in ("axis", "keepdims", "start", "end", "perm") and attribute.i != default and not last:
            yield f"no {attribute.name}", others


def other_values(attribute: onnx.AttributeProto) -> Iterator[Any]:
    value = helper.get_attribute_value(attribute)
    if attribute.name == "to":
        yield from (to for to in CASTS if to != value)
    elif attribute.name in ("keepdims", "allowzero"):
        yield 1 - value
    elif attribute.name in ("axis", "start", "end"):
        yield value + 1
        if value != 0:  # -1 is the same axis of a vector
            yield value - 1
    elif attribute.name == "perm":
        yield from (list(p) for p in itertools.permutations(value) if list(p) != list(value))


def changed(
    node: onnx.NodeProto,
    *,
    op_type: str | None = None,
    inputs: Sequence[str] | None = None,
    attributes: Sequence[onnx.AttributeProto] | None = None,
) -> onnx.NodeProto:
    new = onnx.NodeProto()
    new.CopyFrom(node)
    if op_type is not None:
        new.op_type = op_type
    if inputs is not None:
        new.input[:] = inputs
    if attributes is not None:
        del new.attribute[:]
        new.attribute.extend(attributes)
    return new
