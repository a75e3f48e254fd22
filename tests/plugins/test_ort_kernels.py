"""The kernel library in ONNX Runtime: against the function bodies, the torch operators and float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kernel_sessions import session

from effexport.plugins.building.library import get_library_path
from effexport.plugins.ops import DOMAIN, OPS, OPSET_VERSION, PLUGIN_NAMESPACE

pytestmark = pytest.mark.requires("native", "onnx", "ort")


def one_node_model(
    op: str, dtype: str, dims: Sequence[Any], *, body: bool, out_dims: Any = "same", **attributes: Any
) -> bytes:
    """A model of one custom node. dims: of its first input."""
    import onnx
    from onnx import helper

    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = {"IterativePinv": ["A", "scale"], "LSHSort": ["buckets"]}[op]
    outputs = {"IterativePinv": ["Z"], "LSHSort": ["order", "rank"]}[op]
    node = helper.make_node(op, inputs, outputs, domain=DOMAIN, **{PLUGIN_NAMESPACE: DOMAIN}, **attributes)
    shapes = [dims, None if dims is None else [dims[0], 1, 1]]
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(n, element, s) for n, s in zip(inputs, shapes, strict=False)],
        [helper.make_tensor_value_info(n, element, dims if out_dims == "same" else out_dims) for n in outputs],
    )
    model = helper.make_model(
        graph,
        functions=[OPS[op].load().onnx_function_body([node], 20)] if body else [],
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=10,
    )
    assert isinstance(model, onnx.ModelProto)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("name", [None, ""])
@pytest.mark.parametrize("num_buckets", [33, 2**20 + 1])
def test_sort_leaves_out_a_rank_that_the_node_does_not_name(num_buckets: int, name: str | None) -> None:
    import onnx

    content = one_node_model("LSHSort", "int32", ["N", "n"], body=False, num_buckets=num_buckets)
    model = onnx.load_from_string(content)
    del model.graph.node[0].output[1:]
    model.graph.node[0].output.extend([] if name is None else [name])
    del model.graph.output[1:]
    buckets = np.random.default_rng(0).integers(0, num_buckets, (3, 1000)).astype(np.int32)
    (order,) = session(model).run(None, {"buckets": buckets})
    assert np.array_equal(order, np.argsort(buckets, axis=1, kind="stable"))


@pytest.mark.parametrize("last", [np.nan, np.inf])
def test_pinv_says_which_matrix_is_not_finite(last: float) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    opened = session(one_node_model("IterativePinv", "float32", None, body=False, iterations=6))
    a = np.ones((2, 3, 3), np.float32)
    a.flat[-1] = last
    with pytest.raises(InvalidArgument, match="IterativePinv: matrix 1 of A holds NaN or infinity; expected finite"):
        opened.run(None, {"A": a, "scale": np.ones((2, 1, 1), np.float32)})
    good = {"A": np.ones((1, 2, 2), np.float32), "scale": np.ones((1, 1, 1), np.float32)}
    assert np.isfinite(opened.run(None, good)[0]).all(), "a refused input does not spoil the session"


def test_what_overflows_is_refused_with_the_name_of_the_operator() -> None:
    # no channels: the rotations take no memory, however many rounds there are
    from one_node import one_node_model as any_model

    feeds = {
        "qk": np.zeros((4, 1, 1, 0), np.float32),
        "rotations": np.zeros((1, 0, 2**39, 1), np.float32),
        "keep": np.ones((4, 1), bool),
    }
    opened = session(any_model("LSHHash", feeds, body=False, bucket_factors=[2], chunk_length=1))
    with pytest.raises(Exception, match=r"LSHHash: an output of \[4, 1, 549755813888, 1\] elements was requested; exp"):
        opened.run(None, feeds)
    feeds["rotations"] = np.zeros((1, 0, 2**41, 1), np.float32)
    with pytest.raises(Exception, match=r"LSHHash: an input of \[1, 0, 2199023255552, 1\] elements was requested; exp"):
        opened.run(None, feeds)


def test_a_product_of_sizes_beyond_all_memory_is_refused() -> None:
    from one_node import one_node_model as any_model

    shape = (1, 1, 1, 2**21)
    feeds = {name: np.zeros(shape, np.float16) for name in "qkv"} | {"keep": np.ones((1, 1), bool)}
    opened = session(any_model("EluLinearAttention", feeds, body=False, eps=1e-6))
    with pytest.raises(Exception, match=r"EluLinearAttention: an intermediate result of .* was requested; expected"):
        opened.run(None, feeds)


def test_unknown_dimensions_keep_the_rank_and_cause_no_warning(capfd: pytest.CaptureFixture[str]) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(get_library_path()))
    model = one_node_model("LSHSort", "int32", [None, None], body=False, out_dims=None, num_buckets=4)
    opened = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    # two names, because equal ones would say that the sizes are equal
    assert len(set(opened.get_outputs()[0].shape)) == 2
    opened.run(None, {"buckets": np.zeros((2, 3), np.int32)})
    assert "does not match actual shape" not in capfd.readouterr().err


def test_the_library_refuses_a_runtime_that_is_older_than_its_headers() -> None:
    """RegisterCustomOps called with an API base that knows only older versions, as an old ONNX Runtime would."""
    import ctypes

    library = ctypes.CDLL(str(get_library_path()))
    messages = []
    get_api_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    create_status_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)

    @create_status_type
    def create_status(code: int, message: bytes) -> int:
        messages.append((code, message.decode()))
        return 0x1234

    api = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p))

    @get_api_type
    def get_api(version: int) -> int | None:
        return ctypes.addressof(api) if version == 1 else None

    @ctypes.CFUNCTYPE(ctypes.c_void_p)
    def get_version() -> int:
        return ctypes.cast(ctypes.c_char_p(b"1.2.3"), ctypes.c_void_p).value or 0

    base = (ctypes.c_void_p * 2)(*(ctypes.cast(f, ctypes.c_void_p) for f in (get_api, get_version)))
    library.RegisterCustomOps.restype = ctypes.c_void_p
    assert library.RegisterCustomOps(None, base) == 0x1234
    ((code, message),) = messages
    assert code == 1
    assert "compiled for the API of ONNX Runtime 1." in message
    assert "but this is 1.2.3; upgrade onnxruntime" in message
