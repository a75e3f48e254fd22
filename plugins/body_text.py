"""The syntax in which function bodies are written: that of onnx.parser, with literals. Loads nothing."""

from __future__ import annotations

import re

_LITERAL = re.compile(r"^([ \t]*\w+) = (-?[\d.][-+.\de]*|\[[-\d, ]*\])[ \t]*$", re.MULTILINE)


def with_constants(nodes: str) -> str:
    """Nodes in the syntax of onnx.parser, with every line such as `eps = 1e-06`, `zero = 0` or `axes = [1, 3]` written
    out as a Constant: a float32 scalar, an int64 scalar, or an int64 vector. Unused constants are left out."""

    def constant(match: re.Match[str]) -> str:
        name, literal = match.groups()
        if len(re.findall(rf"\b{name.strip()}\b", nodes)) == 1:
            return ""
        if literal.startswith("["):
            values = literal[1:-1]
            tensor_type = f"int64[{len(values.split(','))}]"
        else:
            values = literal
            tensor_type = "int64" if re.fullmatch(r"-?\d+", literal) else "float"
        return f"{name} = Constant <value = {tensor_type} {{{values}}}> ()"

    return _LITERAL.sub(constant, nodes)
