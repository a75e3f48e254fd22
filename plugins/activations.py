"""Activations and roundings of operators that are linear layers: names, and the nodes of function bodies. Loads no
framework."""

from __future__ import annotations

import itertools
from collections.abc import Set

# By the value of the attribute; GELU by the distribution function, and by tanh.
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu")
# Nodes that make z of z0, with the number of the activation in the names of other values.
NODES = {
    0: "z = Identity (z0)",
    1: """
        scaled1 = Div (z0, root)
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
        root = 1.4142135
        cubed = 0.044715
        slope = 1.5957691"""


def activation_nodes(activations: Set[int]) -> str:
    """Nodes of a function body that make z of z0, and their constants.

    activations: those of the operator's nodes in a model, of which the body computes a node's own.
    """
    wanted = sorted(activations)
    if len(wanted) == 1:
        return f"{CONSTANTS}\n{NODES[wanted[0]]}"
    choices = [chosen_if(number, other) for other, number in itertools.pairwise(wanted)]
    first = NODES[wanted[0]].replace("z = ", f"until{wanted[0]} = ")
    last = choices[-1].replace(f"until{wanted[-1]}", "z")
    own = "own = Constant <value_int: int = @activation> ()"
    return "\n".join([CONSTANTS, own, first, *choices[:-1], last])


def chosen_if(number: int, other: int) -> str:
    """Nodes for the activation of a number if it is the node's own, else what was chosen until another number.

    Not by Where: runtimes remove an If whose condition is constant, with the branch that is not taken.
    """
    nodes = NODES[number].replace("z = ", f"z{number} = ")
    return f"""
        number{number} = {number}
        is{number} = Equal (own, number{number})
        until{number} = If (is{number}) <
            then_branch = then{number} () => (z{number}) {{{nodes}
            }},
            else_branch = else{number} () => (other{number}) {{ other{number} = Identity (until{other}) }}
        >"""


def rounding_nodes(roundings: Set[int]) -> str:
    """Nodes of the body that make the result of the sum: rounded to bfloat16, as it is, or as a node's own attribute
    says."""
    if roundings == {0}:
        return "result = Identity (sum)"
    if roundings == {1}:
        return "result = Cast <to = 16> (sum)"
    return """
        rounds = Constant <value_int: int = @round_output> ()
        rounded_number = 1
        is_rounded = Equal (rounds, rounded_number)
        result = If (is_rounded) <
            then_branch = rounded () => (coarse_float) {
                coarse = Cast <to = 16> (sum)
                coarse_float = Cast <to = 1> (coarse)
            },
            else_branch = unrounded () => (same) { same = Identity (sum) }
        >"""
