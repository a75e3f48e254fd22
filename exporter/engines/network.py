"""Parses a model into a network of TensorRT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from effexport.engines.api import Api, Builder, IAttentionInputLayer, INetworkDefinition, OnnxParser
from effexport.engines.builder_log import BuildLog, explain, plain
from effexport.errors import StageError

STAGE = "TensorRT's parser"


@dataclass(frozen=True)
class Network:
    """A parsed model. The parser owns weights that the network refers to, so both must be kept."""

    definition: INetworkDefinition
    parser: OnnxParser


def network_from_model(api: Api, builder: Builder, log: BuildLog, target: str, model: bytes, path: Path) -> Network:
    """Parse a serialised model. path: its file, beside which external weights are looked for.

    Raises StageError with the node, the reason and the remedy.
    """
    known = api.NetworkDefinitionCreationFlag
    # by default, TensorRT makes plugins that call Python at run time; ours are compiled ahead of time
    wanted = [known.STRONGLY_TYPED, known.PREFER_AOT_PYTHON_PLUGINS] if target == "trt" else [known.STRONGLY_TYPED]
    definition = builder.create_network(sum(1 << int(flag) for flag in wanted))
    parser = api.OnnxParser(definition, log.logger)
    if not parser.parse(model, str(path)):
        raise StageError(STAGE, parse_failure(parser, log))
    return Network(definition, parser)


def keep_attention_whole(api: Api, definition: INetworkDefinition) -> None:
    """Forbid the builder to take Attention apart, so that it makes one kernel of each or refuses to build."""
    for layer in map(definition.get_layer, range(definition.num_layers)):
        if layer.type == api.LayerType.ATTENTION_INPUT:
            whole: Any = layer
            whole.__class__ = api.IAttentionInputLayer  # get_layer returns the base class
            cast(IAttentionInputLayer, whole).attention.decomposable = False


def parse_failure(parser: OnnxParser, log: BuildLog) -> str:
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        where = (
            f"node {error.node_name() or '(without a name)'} ({error.node_operator()})" if error.node_operator() else ""
        )
        if "Plugin not found" in error.desc():
            return (
                f"{where} is an operator that TensorRT does not have, without a function body or a plugin; attach a "
                "body to the model, or use another operator"
            )
        if where and error.desc() in ("false", "unsupported"):
            return f"{where} is an operator that TensorRT does not import; use another one"
        if where:
            return f"{where}: {plain(error.desc())}; build an artifact with effexport, or report this graph"
        return f"the model cannot be read: {plain(error.desc())}"
    return explain(log.errors)
