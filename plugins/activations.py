"""What operators that are linear layers apply to their sums: names, and the nodes of function bodies. Loads no
framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

# By the value of the attribute; GELU by the distribution function, and by tanh.
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu")
# Activations of z0 as z with the number of the activation.
NODES = {
    0: "z = Identity (z0)",
    1: """
        scaled1 = Mul (z0, root)
        erf1 = Erf (scaled1)
        share1 = Add (erf1, full)
        half1 = Mul (z0, half)
        z = Mul (half1, share1)""",
    2: """
        square2 = Mul (z0, z0)
        cubed2 = Mul (square2, cubed)
        factor2 = Add (cubed2, full)
        scaled2 = Mul (z0, slope)
        argument2 = Mul (scaled2, factor2)
        share2 = Sigmoid (argument2)
        z = Mul (z0, share2)""",
    3: "z = Max (z0, nothing)",
    4: """
        share4 = Sigmoid (z0)
        z = Mul (z0, share4)""",
}
CONSTANTS = """
        half = 0.5
        full = 1.0
        nothing = 0.0
        root = 0.70710678
        cubed = 0.044715
        slope = 1.5957691"""


def activation_nodes(nodes: Sequence[onnx.NodeProto]) -> str:
    """Nodes of a function body that make z of z0, and their constants.

    nodes: the operator's nodes in a model. They may differ in their activations: the body computes those that occur, and
    takes a node's own.
    """
    import onnx

    wanted = {onnx.helper.get_node_attr_value(node, "activation") if node.attribute else 0 for node in nodes}
    return f"{CONSTANTS}\n{_chosen(sorted(wanted))}"


def _chosen(wanted: Sequence[int]) -> str:
    if len(wanted) == 1:
        return NODES[wanted[0]]
    nodes = ["own = Constant <value_int: int = @activation> ()"]
    last = "z0"
    for i, number in enumerate(wanted):
        if number == 0:
            continue
        result = "z" if i == len(wanted) - 1 else f"until{number}"
        nodes.append(NODES[number].replace("z = ", f"z{number} = "))
        nodes.append(f"number{number} = {number}")
        nodes.append(f"is{number} = Equal (own, number{number})")
        nodes.append(f"{result} = Where (is{number}, z{number}, {last})")
        last = result
    return "\n".join(nodes)
