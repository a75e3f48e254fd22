"""Check that a module has the names that our code uses. Runs by itself, in any environment's Python, without effexport.

Reads JSON from stdin and prints JSON:

    {"module": "tensorrt",
     "members": {"": ["Logger", "__version__"], "Builder": ["create_network"], "Logger.Severity": ["ERROR"]},
     "keywords": {"Runtime.deserialize_cuda_engine": ["serialized_engine"]}}

    {"missing": ["Builder.create_network", ...], "checked": 5, "version": "11.4.0.106"}

members: names by their class, "" for the module itself. keywords: arguments that are given by name. Extension modules
have no signatures that Python can see, so these are looked up in the first lines of the documentation, where pybind11
and Cython write them. A missing keyword is reported as "Class.method(keyword=)".
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from typing import Any

ABSENT = object()


def find(module: Any, path: str) -> Any:
    """The thing under a dotted path below the module; ABSENT where there is none."""
    found = module
    for name in path.split(".") if path else []:
        found = getattr(found, name, ABSENT)
        if found is ABSENT:
            break
    return found


def parameters(function: Any) -> set[str]:
    """The names of the arguments; of all overloads together."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        pass
    constructor = function.__init__.__doc__ if inspect.isclass(function) else ""
    lines = f"{function.__doc__ or ''}\n{constructor or ''}".splitlines()
    signatures = [line for line in lines if re.match(r"\s*(\d+\. )?\w+\(.*\)", line)]
    return {name for line in signatures for name in re.findall(r"[(,]\s*(\w+)\s*(?=[:=,)])", line)}


def missing_members(module: Any, request: dict[str, Any]) -> list[str]:
    missing = []
    for path, names in request["members"].items():
        owner = find(module, path)
        missing += [
            f"{path}.{name}".lstrip(".") for name in names if owner is ABSENT or getattr(owner, name, ABSENT) is ABSENT
        ]
    for path, names in request.get("keywords", {}).items():
        function = find(module, path)
        known = set() if function is ABSENT else parameters(function)
        missing += [f"{path}({name}=)" for name in names if name not in known]
    return missing


def main() -> None:
    request = json.load(sys.stdin)
    module = importlib.import_module(request["module"])
    checked = sum(map(len, request["members"].values())) + sum(map(len, request.get("keywords", {}).values()))
    answer = {
        "missing": missing_members(module, request),
        "checked": checked,
        "version": getattr(module, "__version__", None),
    }
    # TensorRT's own messages may come before it
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
