"""The verdict of TensorRT's own Python package on our plugins. Runs in an environment of scripts/conformance.sh.

TensorRT's bindings are real, and so are its validation, its plugin registry and the class that turns our functions into
a plugin. Only the builder is missing, so this file takes its part: it calls the plugin's methods in the order of a
build, with symbolic dimensions of its own. No engine is built and no kernel runs.

Reads JSON from stdin and prints JSON in the last line:

    {"ops": ["LSHSort"],
     "ptx": PTX by operator, or null to compile it here with NVRTC,
     "cases": [{"op": "LSHSort", "attributes": {"num_buckets": 65},
                "inputs": [["INT32", ["N", "n"]]], "sizes": [{"N": 4, "n": 100}]}]}

In the answer, `ptx` is the code that plugins gave to TensorRT, by entry, and `whole_ptx` the compiler's, by operator.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorrt as trt
import tensorrt.plugin as trtp
from tensorrt_bindings.plugin import _tensor

from effexport.plugins import tensorrt_plugins
from effexport.plugins.building import ptx, sources
from effexport.plugins.ops import OPS

# by entry: what the plugins gave to TensorRT
PTX: dict[str, str] = {}
OPERATIONS: dict[Any, Callable[[int, int], int]] = {
    trt.DimensionOperation.SUM: operator.add,
    trt.DimensionOperation.SUB: operator.sub,
    trt.DimensionOperation.PROD: operator.mul,
    trt.DimensionOperation.MAX: max,
    trt.DimensionOperation.MIN: min,
    trt.DimensionOperation.FLOOR_DIV: operator.floordiv,
    trt.DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
    trt.DimensionOperation.EQUAL: lambda a, b: int(a == b),
    trt.DimensionOperation.LESS: lambda a, b: int(a < b),
}


class Dimension(trt.IDimensionExpr):
    """An expression of named dimensions. TensorRT's class has no constructor, so `of` goes round it."""

    evaluate: Callable[[Mapping[str, int]], int]
    names: frozenset[str]

    @classmethod
    def of(cls, evaluate: Callable[[Mapping[str, int]], int], names: frozenset[str]) -> Dimension:
        made = cls.__new__(cls)
        made.evaluate, made.names = evaluate, names
        return made

    def is_constant(self) -> bool:
        return not self.names

    def get_constant_value(self) -> int:
        assert not self.names, "TensorRT leaves the value of an expression that is not constant undefined"
        return self.evaluate({})


class Builder:
    """Makes expressions, as TensorRT's IExprBuilder does."""

    def constant(self, value: int) -> Dimension:
        return Dimension.of(lambda sizes: value, frozenset())

    def named(self, name: str) -> Dimension:
        return Dimension.of(lambda sizes: sizes[name], frozenset([name]))

    def operation(self, op: Any, a: Dimension, b: Dimension) -> Dimension:
        return Dimension.of(lambda sizes: OPERATIONS[op](a.evaluate(sizes), b.evaluate(sizes)), a.names | b.names)


class Scalars(dict[int, Any]):
    """Further arguments of the kernel, as the plugin passes them."""

    nbSymExprs = 0  # noqa: N815  (TensorRT's name)


def record_expressions() -> None:
    """TensorRT's ISymExpr can be written and not read: what goes into one is kept beside it."""
    real = _tensor.SymExprImpl

    def make(expression: Any) -> Any:
        made = real(expression)  # with its own checks
        assert isinstance(expression._expr, Dimension), "an expression without a value"
        return SimpleNamespace(made=made, type=type(expression).__name__, dimension=expression._expr)

    _tensor.SymExprImpl = make


def description(dtype: str, dims: list[int | str], sizes: Mapping[str, int]) -> Any:
    """Of a tensor with dynamic dimensions, whose one optimisation profile has the given sizes."""
    made = trt.DynamicPluginTensorDesc()
    made.desc.dims = trt.Dims([-1 if isinstance(dim, str) else dim for dim in dims])
    made.desc.type = getattr(trt.DataType, dtype)
    made.desc.format = trt.TensorFormat.LINEAR
    made.min = made.opt = made.max = trt.Dims([sizes[dim] if isinstance(dim, str) else dim for dim in dims])
    return made


def field_data(value: float | list[int]) -> Any:
    """As the ONNX parser makes it: an array, of one if the attribute is a number."""
    return np.atleast_1d(np.array(value, np.float32 if isinstance(value, float) else np.int64))


def try_case(case: dict[str, Any]) -> dict[str, Any]:
    """A plugin for one node, taken through the phases of a build."""
    creator = trt.get_plugin_registry().get_creator(case["op"], "1", "effexport")
    request = trt.QuickPluginCreationRequest.STRICT_AOT
    # fields refer to their data, and do not keep it
    data = {name: field_data(value) for name, value in case["attributes"].items()}
    kinds = {np.dtype(np.float32): trt.PluginFieldType.FLOAT32, np.dtype(np.int64): trt.PluginFieldType.INT64}
    fields = trt.PluginFieldCollection([trt.PluginField(name, x, kinds[x.dtype]) for name, x in data.items()])
    plugin = creator.create_plugin(case["op"], "effexport", fields, trt.TensorRTPhase.BUILD, request)
    builder, types, dims = Builder(), [x[0] for x in case["inputs"]], [x[1] for x in case["inputs"]]

    output_types = plugin.get_output_data_types([getattr(trt.DataType, x) for x in types], [len(x) for x in dims])
    symbols = [[builder.named(d) if isinstance(d, str) else builder.constant(d) for d in shape] for shape in dims]
    plugin.get_output_shapes(symbols, [], builder)
    shapes = [[expression._expr for expression in desc.shape_expr] for desc in plugin.output_descs]

    sizes = case["sizes"][0]
    described = [description(*x, sizes) for x in case["inputs"]]
    for dtype, shape in zip(output_types, shapes, strict=True):
        named = {str(i): dim.evaluate(sizes) for i, dim in enumerate(shape)}
        outer = [str(i) if dim.names else dim.evaluate({}) for i, dim in enumerate(shape)]
        described.append(description(dtype.name, outer, named))
    combinations = plugin.get_supported_format_combinations(described, len(types))
    plugin.configure_plugin(described[: len(types)], described[len(types) :])
    tactics = plugin.get_valid_tactics()
    plugin.set_tactic(0)
    launch, scalars = SimpleNamespace(), Scalars()
    plugin.get_launch_params(symbols, described, len(types), launch, scalars, builder)
    statics = [x.desc for x in described]
    entry, ptx = plugin.get_kernel(statics[: len(types)], statics[len(types) :])
    entry = entry if isinstance(entry, str) else entry.decode()
    PTX[entry] = ptx.decode()
    return {
        "interface": type(plugin).__name__,
        "timing_cache_ids": [plugin.get_timing_cache_id(), plugin.clone().get_timing_cache_id()],
        "num_outputs": plugin.get_num_outputs(),
        "output_types": [x.name for x in output_types],
        "output_shapes": [[[d.evaluate(sizes) for d in shape] for shape in shapes] for sizes in case["sizes"]],
        "combinations": [[x.type.name, x.format.name] for x in combinations],
        "tactics": tactics,
        "entry": entry,
        "scalar_types": [scalars[i].type for i in range(scalars.nbSymExprs)],
        "scalars": [
            [scalars[i].dimension.evaluate(sizes) for i in range(scalars.nbSymExprs)] for sizes in case["sizes"]
        ],
        "launches": [
            {name: x.dimension.evaluate(sizes) for name, x in vars(launch).items()} for sizes in case["sizes"]
        ],
    }


def refusals() -> dict[str, str | None]:
    """TensorRT's messages to plugins that are wrong: without these, its approval would prove nothing."""

    def message(attempt: Callable[[], Any]) -> str | None:
        try:
            attempt()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def right(x: trtp.TensorDesc) -> trtp.TensorDesc:
        return x.like()

    def plain(x: trtp.TensorDesc, steps: int) -> trtp.TensorDesc:
        return x.like()

    def listed(x: trtp.TensorDesc, steps: list[int]) -> trtp.TensorDesc:
        return x.like()

    def formats(x: trtp.TensorDesc, outputs: tuple[trtp.TensorDesc]) -> str:
        return "FP32, FP32"

    def kernel(x: trtp.TensorDesc, outputs: tuple[trtp.TensorDesc]) -> tuple[str, str, str, str]:
        return "", "", "", ""

    # this file postpones the evaluation of annotations, and TensorRT reads them
    for function in (right, plain, listed, formats, kernel):
        function.__annotations__ = {name: eval(text, globals()) for name, text in function.__annotations__.items()}
    trtp.register("effexport::Right")(right)
    trtp.register("effexport::Plain")(plain)
    return {
        "attribute type": message(lambda: trtp.register("effexport::Wrong")(listed)),
        "result of autotune": message(lambda: trtp.autotune("effexport::Right")(formats)),
        "arguments of aot_impl": message(lambda: trtp.aot_impl("effexport::Right")(kernel)),
        "unregistered plugin": message(lambda: trtp.aot_impl("effexport::Unknown")(kernel)),
        "no aot_impl": message(lambda: try_case({"op": "Right", "attributes": {}, "inputs": []})),
        "an int attribute": message(lambda: try_case({"op": "Plain", "attributes": {"steps": 1}, "inputs": []})),
    }


def main() -> None:
    request = json.load(sys.stdin)
    if given := request["ptx"]:
        texts = {sources.FOLDER / OPS[name].cuda_source: text for name, text in given.items()}
        ptx.find_ptx_compiler = lambda: ptx.PtxCompiler(
            "given", (json.dumps(given),), lambda source, _: texts[source], None
        )
    else:
        ptx.choose_nvcc = lambda: None  # and hence NVRTC
    tensorrt_plugins.register_plugins(request["ops"], 75)
    target = tensorrt_plugins.register_plugins(request["ops"], 75)
    record_expressions()
    registry = trt.get_plugin_registry()
    names = [plugin.name for plugin in tensorrt_plugins.plugins_of(request["ops"])]
    creators = {name: registry.get_creator(name, "1", "effexport") for name in names}
    cases: list[dict[str, Any]] = []
    for case in request["cases"]:
        try:
            cases.append(try_case(case))
        except Exception as error:
            cases.append({"error": f"{type(error).__name__}: {error}"})
    answer = {
        "version": trt.__version__,
        "compiler": ptx.find_ptx_compiler().name,
        "target": str(target),
        "modules": sorted({name.split(".")[0] for name in sys.modules}),
        "registered": sorted(
            [x.name, x.plugin_namespace, x.plugin_version] for x in registry.all_creators if x.plugin_namespace
        ),
        "fields": {name: [[f.name, f.type.name] for f in x.field_names] for name, x in creators.items()},
        "cases": cases,
        "ptx": PTX,
        "whole_ptx": {name: ptx.ptx_from_source(OPS[name], 75) for name in request["ops"]},
        "refusals": refusals(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
