#!/usr/bin/env python3
"""Measure what a reader of the code has to hold, and fail above the ceilings in scripts/house.toml.

    python scripts/house.py                            # figures and ceilings; exit status 1 above one
    python scripts/house.py --where "circles"          # the places behind a figure
    python scripts/house.py --checkout ../earlier      # the figures of another checkout
    python scripts/house.py --lower                    # lower the ceilings to the figures

Reads files as text and runs none. Ceilings only go down, but for what a new capability needs: then the commit says why.
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CEILINGS = Path(__file__).with_name("house.toml")
ROOTS = {"exporter": "effexport", "models": "effexport.models", "plugins": "effexport.plugins"}
RUNTIMES = {"ort", "ort-cuda", "ort-trt", "ort-rtx", "trt", "trt-rtx", "openvino", "ort-openvino"}
KINDS = re.compile(r"(Attention|Encoder|Checkpoint|Module|Nystrom|LSH|Linear|Softmax|AFT\w*)Spec\b")
MOST_PARAMETERS = 12
QUESTION = re.compile(r"(What|Whether|How|Where|Who|Which|Why)\b")
# The folder of the operator whose name stands for those of all.
OPERATOR = "segment_means"


@dataclass(frozen=True)
class Figure:
    """A number, and the places or names that it counts, if it counts any."""

    value: float
    places: tuple[str, ...] = ()


def counted(places: Iterator[str]) -> Figure:
    found = tuple(places)
    return Figure(len(found), found)


@dataclass(frozen=True)
class Checkout:
    """The tracked files of a checkout, and the modules of the package."""

    top: Path

    @functools.cached_property
    def tracked(self) -> list[Path]:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=self.top, capture_output=True, text=True, check=True)
        return [path for name in listed.stdout.split("\0") if name and (path := self.top / name).is_file()]

    def lines(self, folder: str, *suffixes: str) -> int:
        """Lines of tracked files below a folder, or of one file."""
        below = [path for path in self.tracked if path.is_relative_to(self.top / folder)]
        return sum(path.read_bytes().count(b"\n") for path in below if not suffixes or path.suffix in suffixes)

    @functools.cached_property
    def modules(self) -> dict[str, Path]:
        found = {}
        for folder, package in ROOTS.items():
            for path in sorted((self.top / folder).rglob("*.py")):
                parts = [package, *path.relative_to(self.top / folder).with_suffix("").parts]
                found[".".join(parts).removesuffix(".__init__")] = path
        return found

    @functools.cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.modules.items()}

    def nodes(self, *kinds: type[Any], outside: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
        """Nodes of some kinds with their place, but for those of packages whose names begin with `outside`."""
        for name, tree in self.trees.items():
            if not name.startswith(outside or ("-",)):
                path = self.modules[name].relative_to(self.top)
                yield from ((f"{path}:{node.lineno}", node) for node in ast.walk(tree) if isinstance(node, kinds))

    def imported(self, tree: ast.AST) -> set[str]:
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                names |= {name if name in self.modules else node.module for name in whole}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        return names & self.modules.keys()

    @functools.cached_property
    def imports(self) -> dict[str, set[str]]:
        """The imports of each module, inside functions and for types as well: a reader follows these, too."""
        return {name: self.imported(tree) - {name} for name, tree in self.trees.items()}

    @functools.cached_property
    def imports_at_run_time(self) -> dict[str, set[str]]:
        """The imports of each module but for those that only type checkers see."""
        trees = {name: WithoutTypes().visit(copy.deepcopy(tree)) for name, tree in self.trees.items()}
        return {name: self.imported(tree) - {name} for name, tree in trees.items()}

    @functools.cached_property
    def operators(self) -> set[str]:
        rows = [path.read_text(encoding="utf-8") for path in self.top.glob("plugins/*/__init__.py")]
        return set(re.findall(r'\bOp\(\s*"\w+",\s*"(\w+)"', "".join(rows)))

    def literals(self, words: set[str], outside: tuple[str, ...]) -> Figure:
        """String literals that are one of some words; docstrings are not."""
        found = self.nodes(ast.Constant, outside=outside)
        return counted(f"{place} {node.value}" for place, node in found if node.value in words)


class WithoutTypes(ast.NodeTransformer):
    """Removes `if TYPE_CHECKING:` blocks, which import nothing when the program runs."""

    def visit_If(self, node: ast.If) -> Any:
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def circles(graph: dict[str, set[str]]) -> Iterator[str]:
    """Sets of modules that import each other in a circle: strongly connected components (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[str]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                yield from visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                yield " ".join(sorted(group))

    for node in graph:
        if node not in index:
            yield from visit(node)


def longest_chain(graph: dict[str, set[str]]) -> tuple[str, ...]:
    """The longest way down from one module to the next: beyond a dozen, nobody keeps the story in mind."""
    chains: dict[str, tuple[str, ...]] = {}

    def chain(node: str, above: frozenset[str]) -> tuple[str, ...]:
        if node not in chains:
            others = (chain(other, above | {node}) for other in sorted(graph[node] - above - {node}))
            chains[node] = (node, *max(others, key=len, default=()))
        return chains[node]

    return max((chain(node, frozenset()) for node in graph), key=len, default=())


def measure(here: Checkout) -> dict[str, Figure]:
    importers = collections.Counter(other for others in here.imports.values() for other in others)
    lines = {
        str(path.relative_to(here.top)): path.read_text(encoding="utf-8").count("\n") for path in here.modules.values()
    }
    classes = collections.Counter(node.name for _, node in here.nodes(ast.ClassDef))
    import_lines = sum(node.end_lineno - node.lineno + 1 for _, node in here.nodes(ast.Import, ast.ImportFrom))
    chain = longest_chain(here.imports_at_run_time)
    inner = ("effexport.models", "effexport.plugins")
    longest = max(lines, key=lines.__getitem__)
    return {
        "package lines": Figure(sum(lines.values())),
        "native lines": Figure(here.lines("plugins", ".cu", ".cc", ".h")),
        "script lines": Figure(here.lines("scripts", ".py", ".sh")),
        "test lines": Figure(here.lines("tests", ".py", ".cc", ".h", ".cu")),
        "README lines": Figure(here.lines("README.md")),
        "tracked files": Figure(len(here.tracked)),
        "modules": Figure(len(lines)),
        "modules with one importer": counted(name for name, count in sorted(importers.items()) if count == 1),
        "import share, %": Figure(round(100 * import_lines / sum(lines.values()), 1)),
        "circles": counted(circles(here.imports)),
        "longest chain": Figure(len(chain), chain),
        "longest module": Figure(lines[longest], (longest,)),
        "class names used twice": counted(name for name, count in sorted(classes.items()) if count > 1),
        "functions above 12 parameters": counted(wide_functions(here)),
        "isinstance of model kinds": counted(checks_of_kinds(here, inner)),
        "getattr of a model": counted(
            f"{place} {ast.unparse(node)}"
            for place, node in here.nodes(ast.Call, outside=inner)
            if re.match(r"getattr\((\w+\.)*model,", ast.unparse(node))
        ),
        "operator names in exporter/": here.literals(here.operators, inner),
        "runtime names outside the table": here.literals(RUNTIMES, (*inner, "effexport.base.runtimes")),
        "files that name one operator": counted(files_that_name(here, OPERATOR)),
        "click options": counted(options_of(here)),
        "docstrings that begin as questions": counted(questions(here)),
    }


def wide_functions(here: Checkout) -> Iterator[str]:
    for place, node in here.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        arguments = node.args
        count = len(arguments.args) + len(arguments.kwonlyargs) + len(arguments.posonlyargs)
        # the parameters of a command are its options, which are counted
        if count > MOST_PARAMETERS and not any("command" in ast.unparse(one) for one in node.decorator_list):
            yield f"{place} {node.name}"


def checks_of_kinds(here: Checkout, outside: tuple[str, ...]) -> Iterator[str]:
    for place, node in here.nodes(ast.Call, outside=outside):
        call = ast.unparse(node)
        if call.startswith("isinstance(") and KINDS.search(call):
            yield f"{place} {call}"


def files_that_name(here: Checkout, operator: str) -> Iterator[str]:
    name, folder = operator.title().replace("_", ""), f"{operator}/"
    for path in here.tracked:
        place = str(path.relative_to(here.top))
        if (
            folder not in place
            and path.suffix not in {".svg", ".xz", ".json"}
            and name in path.read_text(errors="ignore")
        ):
            yield place


def options_of(here: Checkout) -> Iterator[str]:
    for place, node in here.nodes(ast.Call):
        if ast.unparse(node).startswith("click.option("):
            yield place


def questions(here: Checkout) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in here.tracked:
        for node in ast.walk(ast.parse(path.read_bytes())) if path.suffix == ".py" else ():
            if isinstance(node, documented) and QUESTION.match(ast.get_docstring(node) or ""):
                yield f"{path.relative_to(here.top)}:{node.body[0].lineno}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--where", metavar="FIGURE", help="list the places behind a figure")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to the figures")
    args = parser.parse_args()
    figures = measure(Checkout(args.checkout.resolve()))
    if args.where:
        print("\n".join(figures[args.where].places))
        return 0
    if args.json:
        print(json.dumps({name: figure.value for name, figure in figures.items()}))
        return 0
    ceilings = tomllib.loads(CEILINGS.read_text(encoding="utf-8"))["ceilings"] if CEILINGS.exists() else {}
    if args.lower:
        ceilings = {name: min(figure.value, ceilings.get(name, figure.value)) for name, figure in figures.items()}
        write_ceilings(ceilings)
    return show(figures, ceilings)


def show(figures: dict[str, Figure], ceilings: dict[str, float]) -> int:
    above = [name for name, figure in figures.items() if figure.value > ceilings[name]]
    for name, figure in figures.items():
        print(f"{name:34} {figure.value:>8,} of {ceilings[name]:,}{'  above' * (name in above)}")
    if above:
        print(
            f"above a ceiling of {CEILINGS.name}: {', '.join(above)}; see the places with --where NAME", file=sys.stderr
        )
    return int(bool(above))


def write_ceilings(ceilings: dict[str, float]) -> None:
    head = "# The most that scripts/house.py may count; with --lower, it lowers these to the figures of the day."
    rows = (f"{json.dumps(name)} = {json.dumps(value)}" for name, value in ceilings.items())
    CEILINGS.write_text("\n".join([head, "[ceilings]", *rows, ""]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
