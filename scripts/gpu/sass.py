"""Machine code of kernels, as nvdisasm prints it: how many instructions there are, and how many a warp executes.

Which way a branch goes is not in the code. Of all ways through a kernel or a loop, the one with most products is taken
(if the kernel is there for products), then the one that stores and loads most (or stores much and loads least, if that
is asked for), then the one that does most of USEFUL, then the shortest. So a warp has work to do, copies 16 bytes at a
time, and meets no edges and no exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import networkx  # PyTorch needs it too

from effexport.plugins.gpu_check import LOADED

# Besides opcodes, a Cost counts these: all instructions, bytes LOADED from and stored to global memory, multiply-adds.
INSTRUCTIONS, STORED = "instructions", "stored"
TENSOR, FUSED = "products on tensor cores", "products by fused multiply-adds"

LANES = 32
# m16n8k16 is 16816
TENSOR_PRODUCTS = {"16816": 2048, "1688": 1024}
FUSED_PRODUCTS = {"FFMA": LANES, "FFMA2": 2 * LANES}
# Exponential functions and reciprocals, and what lanes and warps exchange.
USEFUL = ("MUFU", "SHFL", "VOTE", "MATCH", "ATOMS")
BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
WORD_BYTES = 4


class Cost(dict[str, float]):
    """How often a warp executes each opcode, without modifiers, and the sums above; 0 for what is not in it."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost({name: self[name] + other[name] for name in {**self, **other}})

    def __mul__(self, factor: float) -> Cost:
        return Cost({name: count * factor for name, count in self.items()})


@dataclass(frozen=True)
class Loop:
    """One time through a loop, and once through the loops in it. depth: how many loops it lies in."""

    depth: int
    cost: Cost


@dataclass(frozen=True)
class Preferred:
    """Which ways are taken: with most products, or without regard to them; and with most loads, or least."""

    products: bool
    loads: bool = True


@dataclass(frozen=True)
class Code:
    """The basic blocks of one kernel, and which follow each."""

    entry: str
    blocks: dict[str, Cost]
    edges: dict[str, list[str]]

    @cached_property
    def total(self) -> Cost:
        """Every instruction once."""
        return sum(self.blocks.values(), Cost())

    @cached_property
    def products(self) -> str:
        """How this kernel multiplies: TENSOR or FUSED."""
        return TENSOR if self.total[TENSOR] else FUSED

    def executed(self, trips: Callable[[int, Cost], float], preferred: Preferred, loops: list[Loop]) -> Cost:
        """What one warp executes. trips(depth, one time through a loop): how often the loop is repeated.

        loops: a list to which all loops are added.
        """

        def rank(cost: Cost) -> tuple[float, ...]:
            products = cost[self.products] if preferred.products else 0
            moved = cost[STORED] + (cost[LOADED] if preferred.loads else -cost[LOADED])
            return products, moved, sum(cost[name] for name in USEFUL), -cost[INSTRUCTIONS]

        return _Walk(self, trips, rank, loops).through(frozenset(self.blocks), self.entry, 0)

    def main_loop(self, products: bool) -> Cost:
        """One time through the innermost loop with at least half of all products, or else of all loads; else empty."""
        loops: list[Loop] = []
        whole = self.executed(lambda depth, cost: 1, Preferred(products), loops)
        marker = self.products if products else LOADED
        holding = [loop for loop in loops if loop.cost[marker] * 2 >= whole[marker] > 0]
        return max(holding, key=lambda loop: (loop.depth, loop.cost[marker])).cost if holding else Cost()


def parse_graphs(text: str) -> dict[str, Code]:
    """Kernels by name, from what `nvdisasm -bbcfg` prints."""
    found = {}
    for part in text.split("subgraph ")[1:]:
        match = re.match(r'"cluster_(\w+)"', part)
        if match is None:  # a division, "$__internal_0_$…", which kernels call
            continue
        labels = dict(re.findall(r'^"([^"]+)"\s*\n\[label="(.*)"\]$', part, re.MULTILINE))
        edges: dict[str, list[str]] = {name: [] for name in labels}
        for start, end in re.findall(r'^"([^"]+)":\w+:\w+ -> "([^"]+)":', part, re.MULTILINE):
            edges[start].append(end)
        found[match[1]] = Code(match[1], {name: cost_of(label) for name, label in labels.items()}, edges)
    return found


def cost_of(label: str) -> Cost:
    """One time through a block. A call is one instruction: what is called are rare exceptions of divisions."""
    cost = Cost()
    for line in label.replace("\\ ", " ").split("\\l"):
        match = re.match(r"[{|]*(?:<\w+>)?\s*(?:@!?\w+\s+)?([A-Z]\w*)((?:\.\w+)*)\s.*;", line)
        if match is None:
            continue
        opcode, modifiers = match[1], match[2].split(".")
        cost[opcode] += 1
        cost[INSTRUCTIONS] += 1
        if opcode == "HMMA":
            cost[TENSOR] += next(TENSOR_PRODUCTS[name] for name in modifiers if name in TENSOR_PRODUCTS)
        elif opcode in FUSED_PRODUCTS:
            cost[FUSED] += FUSED_PRODUCTS[opcode]
        elif opcode in ("LDG", "LDGSTS", "STG"):
            moved = LANES * next((BYTES[name] for name in modifiers if name in BYTES), WORD_BYTES)
            cost[STORED if opcode == "STG" else LOADED] += moved
    return cost


@dataclass(frozen=True)
class _Walk:
    """Finds the best way through a kernel, loop by loop. Collects the loops."""

    code: Code
    trips: Callable[[int, Cost], float]
    rank: Callable[[Cost], tuple[float, ...]]
    loops: list[Loop]

    def through(self, nodes: frozenset[str], first: str, depth: int) -> Cost:
        """From block `first` through these blocks: back to it, if they are a loop, otherwise to an end."""
        edges = self.code.edges
        follow = {node: [to for to in edges[node] if to in nodes and to != first] for node in nodes}
        best = {first: Cost()}  # on arriving at a block
        ends = []
        for group in _in_order(follow, first):
            entrance = max((node for node in group if node in best), key=lambda node: self.rank(best[node]))
            once, repeated = self.code.blocks[entrance], 1.0
            if len(group) > 1 or entrance in follow[entrance]:
                once = self.through(frozenset(group), entrance, depth + 1)
                self.loops.append(Loop(depth, once))
                repeated = self.trips(depth, once)
            way = best[entrance] + once * repeated
            after = {to for node in group for to in edges[node]}
            if first in after or not after - {*group}:
                ends.append(way)
            for to in after & nodes - {*group, first}:
                best[to] = max(best.get(to, way), way, key=self.rank)
        return max(ends, key=self.rank)


def _in_order(follow: dict[str, list[str]], first: str) -> list[list[str]]:
    """Blocks that can be reached from the first one, in groups that can reach each other, in the order of the ways."""
    graph = networkx.DiGraph(follow)
    place = {node: i for i, node in enumerate(networkx.dfs_preorder_nodes(graph, first))}
    groups = networkx.condensation(graph.subgraph(place))
    members = {group: sorted(groups.nodes[group]["members"], key=place.__getitem__) for group in groups}
    # ties in a fixed order, so that every run counts the same
    in_order = networkx.lexicographical_topological_sort(groups, key=lambda group: place[members[group][0]])
    return [members[group] for group in in_order]
