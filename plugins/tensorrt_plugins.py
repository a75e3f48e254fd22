"""The TensorRT plugins of our operators: which nodes they support, and how they are registered with TensorRT.

A plugin is one kernel launch, compiled ahead of time: the engine carries its PTX, and needs neither Python nor a
library of ours to run. Operators of several launches are rewritten into several plugins. Nodes that plugins do not
support stay function bodies, which TensorRT builds from its own layers.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import threading
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from effexport.plugins.building.library import known_ops
from effexport.plugins.building.ptx import PtxTarget, isa_of, only_entry, ptx_from_source, ptx_target
from effexport.plugins.errors import LibraryError
from effexport.plugins.ops import DOMAIN
from effexport.plugins.trt_plugin import Plugin, Rewrite, int32_bits

# the oldest version with ahead-of-time plugins; the oldest that was tested is 10.16
MIN_TENSORRT = (10, 13)
_REGISTERING = threading.Lock()
# TensorRT's names of element types: as values, and in combinations of formats
DATA_TYPES = {
    "float32": ("FLOAT", "FP32"),
    "float16": ("HALF", "FP16"),
    "bfloat16": ("BF16", "BF16"),
    "int32": ("INT32", "INT32"),
    "bool": ("BOOL", "BOOL"),
}
# by entry, for the functions that TensorRT calls within a build
_PTX: dict[str, str] = {}
# TensorRT's registry refers to them
_CREATORS: list[Any] = []


def choose(
    op_name: str,
    dtypes: Sequence[str],
    dims: Sequence[Sequence[int | str | None]],
    attributes: Mapping[str, Any],
) -> Plugin | Rewrite | str:
    """The plugin for a node of ours, several in its place, or the reason its body must run, as a sentence for the user.

    op_name: the ONNX name, a key of `known_ops()`. dtypes and dims are those of the node's inputs: NumPy names of types
    ("float32", "bfloat16"), and a name or None for a dynamic dimension. attributes: the node's own, by name.
    """
    op, reason = known_ops()[op_name], ""
    if not op.cuda or (op.package and not (op.user_folder / "trt.py").is_file()):
        return f"{op_name} has no TensorRT plugin."
    for choice in op.load_trt().CHOICES:
        reason = choice.why_not(dtypes, dims, attributes)
        if reason is None:
            assert isinstance(choice, Plugin | Rewrite)
            return choice
    return reason


def plugins_of(ops: Collection[str]) -> list[Plugin]:
    """All plugins of these operators (keys of `known_ops()`)."""
    known = known_ops()
    return [plugin for name in sorted(ops) for plugin in known[name].load_trt().PLUGINS]


def register_plugins(ops: Collection[str], architecture: int) -> PtxTarget | None:
    """Register the plugins of these operators (keys of `known_ops()`) with TensorRT in this process.

    Doing so twice is allowed.

    Compiles their kernels to PTX for this architecture first, or takes it from the cache; engines that are built next
    get it. Returns what the PTX needs to run; None without operators. Raises LibraryError if it cannot be made, or if
    TensorRT is missing or too old.
    """
    if not ops:
        return None
    try:
        import tensorrt
    except ImportError as error:
        raise LibraryError(f"TensorRT does not load ({error}); install it with: pip install tensorrt") from error
    wanted = ".".join(map(str, MIN_TENSORRT))
    given = tuple(int(number) for number in re.findall(r"\d+", tensorrt.__version__)[:2])
    if given < MIN_TENSORRT:
        raise LibraryError(
            f"TensorRT is {tensorrt.__version__}; expected {wanted} or later, for plugins that are compiled "
            f"ahead of time. Install a later one"
        )
    with _REGISTERING:
        # first, because in the functions that TensorRT calls within a build, the text of an error is lost
        texts = {name: ptx_from_source(known_ops()[name], architecture) for name in ops}
        for plugin in plugins_of(ops):
            _PTX.update((entry, only_entry(texts[plugin.op], entry)) for entry in plugin.entries)
            _register(plugin)
    # all are from one compiler
    return ptx_target(architecture, isa_of(next(iter(texts.values()))))


@functools.cache
def _register(plugin: Plugin) -> None:
    """Make the three functions that TensorRT wants of a plugin. It reads their signatures when it registers them."""
    import numpy as np
    import tensorrt as trt
    import tensorrt.plugin as trtp

    type_names = {getattr(trt.DataType, names[0]): name for name, names in DATA_TYPES.items()}
    inputs, results = plugin.tensors, plugin.results

    def given(arguments: Sequence[Any]) -> tuple[list[str], dict[str, Any]]:
        """The types of the inputs, and the attributes, from TensorRT's arguments."""
        tensors, values = arguments[: len(inputs)], arguments[len(inputs) :]
        dtypes = [type_names.get(tensor.dtype, tensor.dtype.name) for tensor in tensors]
        if reason := plugin.why_not_types(dtypes):
            raise TypeError(f"{plugin.name}: {reason}")
        # attributes are arrays: TensorRT 10 fails to make numbers of them with NumPy 2.4 or later
        attributes = {
            name: kind(value.tolist() if kind is tuple else value.item())
            for (name, kind), value in zip(plugin.attributes.items(), values, strict=False)
        }
        return dtypes, attributes

    def sizes_of(arguments: Sequence[Any]) -> Any:
        dtypes, attributes = given(arguments)
        return plugin.sizes_of(dtypes, [list(x.shape_expr) for x in arguments[: len(inputs)]], attributes)

    def describe(*arguments: Any) -> Any:
        sizes = sizes_of(arguments)
        dtypes = [sizes.T if x.dtype == "T" else x.dtype for x in results]
        described = [
            trtp.from_shape_expr(tuple(dims), getattr(trt.DataType, DATA_TYPES[dtype][0]))
            for dims, dtype in zip(plugin.output_dims(sizes), dtypes, strict=True)
        ]
        return described[0] if len(described) == 1 else tuple(described)

    def formats(*arguments: Any) -> Any:
        dtypes, _ = given(arguments[: len(inputs)])
        # networks are strongly typed, so only their types are offered
        dtype = plugin.type_of_t(dtypes)
        names = [DATA_TYPES[dtype if x.dtype == "T" else x.dtype][1] for x in (*inputs, *results)]
        return [trtp.AutoTuneCombination(", ".join(names), "LINEAR")]

    def kernel(*arguments: Any) -> Any:
        *node, _, _ = arguments
        dtypes, attributes = given(node)
        dims = [
            [dim.constant_value() if dim.is_constant else None for dim in tensor.shape_expr]
            for tensor in node[: len(inputs)]
        ]
        if reason := plugin.why_not(dtypes, dims, attributes):
            raise ValueError(f"{plugin.name}: {reason}")
        sizes = sizes_of(node)
        launch = plugin.launch(sizes)
        parameters = trtp.KernelLaunchParams(grid_x=launch.grid, block_x=launch.threads, shared_mem=launch.shared_bytes)
        scalars = trtp.SymIntExprs.from_tuple(tuple(trtp.SymInt32(int32_bits(x)) for x in launch.scalars))
        entry = plugin.entry.format(T=sizes.T)
        return entry, _PTX[entry], parameters, scalars

    tensors = {x.name: trtp.TensorDesc for x in inputs}
    integers, floats = np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.float32]]
    attributes = {name: floats if kind is float else integers for name, kind in plugin.attributes.items()}
    described = types.GenericAlias(tuple, (trtp.TensorDesc,) * len(results))
    answer = trtp.TensorDesc if len(results) == 1 else described
    found = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
    plugin_id = f"{DOMAIN}::{plugin.name}"
    trtp.register(plugin_id)(_with_signature(describe, tensors | attributes, answer))
    trtp.autotune(plugin_id)(_with_signature(formats, tensors | {"outputs": described}, list[trtp.AutoTuneCombination]))
    trtp.aot_impl(plugin_id)(
        _with_signature(kernel, tensors | attributes | {"outputs": described, "tactic": int}, found)
    )
    _tell_apart(plugin)


def _tell_apart(plugin: Plugin) -> None:
    """Give nodes of a plugin that differ in attributes, or were made from other PTX, an id each in a timing cache.

    TensorRT's own class answers with the same id for all. The creator that TensorRT has registered makes the plugins
    all the same, and another one takes its place in the registry.
    """
    import tensorrt as trt

    class Creator(trt.IPluginCreatorV3Quick):
        def __init__(self, registered: Any) -> None:
            super().__init__()
            self.registered = registered
            self.name, self.plugin_namespace = registered.name, registered.plugin_namespace
            self.plugin_version, self.field_names = registered.plugin_version, registered.field_names

        def create_plugin(self, name: str, namespace: str, fields: Any, phase: Any, request: Any = None) -> Any:
            made = self.registered.create_plugin(name, namespace, fields, phase, request)
            timing_cache_id = timing_cache_id_of(plugin, {field.name: field.data.tolist() for field in fields})
            # on the object, because its clones copy its attributes and not its class
            made.get_timing_cache_id = lambda: timing_cache_id
            return made

    registry = trt.get_plugin_registry()
    registered = registry.get_creator(plugin.name, "1", DOMAIN)
    registry.deregister_creator(registered)
    _CREATORS.append(Creator(registered))
    registry.register_creator(_CREATORS[-1], DOMAIN)


def timing_cache_id_of(plugin: Plugin, attributes: Mapping[str, Any]) -> str:
    """Two nodes with one id, and inputs and outputs of the same types and shapes, do the same work on a GPU."""
    ptx = hashlib.sha256("\0".join(_PTX[entry] for entry in plugin.entries).encode()).hexdigest()[:32]
    return json.dumps([plugin.name, sorted(attributes.items()), ptx])


def _with_signature(function: Any, parameters: Mapping[str, Any], returns: Any) -> Any:
    """The function, called with arguments in this order, as one that has named and annotated parameters."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()],
        return_annotation=returns,
    )

    def call(*arguments: Any, **named: Any) -> Any:
        return function(*signature.bind(*arguments, **named).args)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
