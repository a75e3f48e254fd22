"""`effexport::LSHSort`: the torch operator, its schema and its body of standard nodes. Every result is exact."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from bucket_patterns import bucket_rows
from torch import Tensor

from effexport.plugins.lsh_sort.op import BLOCK, MAX_RADIX, lsh_sort, onnx_function_body, radices
from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

FORBIDDEN = {"TopK", "Loop", "CumSum", "Scan", "Sort", "If", "ReduceLogSumExp", "Unique", "NonZero"}
# one less, equal to and one more than a block of the body's prefix sums, and several blocks
LENGTHS = [1, 2, 63, 100, 127, 128, 129, 1000, 4096]
# one less, equal to and one more than one and two digits of 32
BUCKETS = [1, 2, 31, 32, 33, 257, 1025, 4096]


def slow_sort(row: list[int]) -> tuple[list[int], list[int]]:
    """A counting sort, a token at a time."""
    places: dict[int, list[int]] = {}
    for token, bucket in enumerate(row):
        places.setdefault(bucket, []).append(token)
    order = [token for bucket in sorted(places) for token in places[bucket]]
    rank = [0] * len(row)
    for place, token in enumerate(order):
        rank[token] = place
    return order, rank


def assert_sorted(buckets: np.ndarray, order: np.ndarray, rank: np.ndarray) -> None:
    """Exact equality of values, shapes and dtypes."""
    assert order.shape == rank.shape == buckets.shape
    assert order.dtype == rank.dtype == np.int32
    for row, given_order, given_rank in zip(buckets.tolist(), order.tolist(), rank.tolist(), strict=True):
        assert (given_order, given_rank) == slow_sort(row)


@pytest.mark.parametrize("num_buckets", BUCKETS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_operator_is_a_stable_counting_sort(length: int, num_buckets: int) -> None:
    buckets = bucket_rows(length, num_buckets)
    order, rank = lsh_sort(torch.from_numpy(buckets), num_buckets)
    assert_sorted(buckets, order.numpy(), rank.numpy())


@pytest.mark.parametrize("seed", range(20))
def test_order_and_rank_are_inverse_permutations(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows, length, num_buckets = (int(generator.integers(1, high)) for high in (5, 300, 100))
    buckets = torch.from_numpy(generator.integers(0, num_buckets, (rows, length)).astype(np.int32))
    order, rank = lsh_sort(buckets, num_buckets)
    everyone = torch.arange(length, dtype=torch.int32).expand(rows, length)
    assert torch.equal(order.gather(1, rank.long()), everyone)
    assert torch.equal(rank.gather(1, order.long()), everyone)
    assert torch.all(buckets.gather(1, order.long()).diff(dim=1) >= 0)


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 0)])
def test_the_operator_accepts_empty_inputs(shape: tuple[int, int]) -> None:
    for result in lsh_sort(torch.zeros(shape, dtype=torch.int32), 4):
        assert result.shape == shape
        assert result.dtype == torch.int32


@pytest.mark.parametrize(
    "buckets",
    [
        torch.from_numpy(bucket_rows(63, 5)),
        torch.from_numpy(bucket_rows(1, 5)),
        torch.from_numpy(bucket_rows(20, 5)).T.contiguous().T,
        torch.zeros(0, 7, dtype=torch.int32),
    ],
)
def test_the_operator_keeps_the_rules_of_torch_library(buckets: Tensor) -> None:
    torch.library.opcheck(torch.ops.effexport.lsh_sort.default, (buckets, 5))


@pytest.mark.parametrize(
    ("buckets", "num_buckets", "text"),
    [
        (torch.zeros(5, dtype=torch.int32), 4, r"buckets has shape \(5,\); expected \[N, n\]"),
        (torch.zeros(1, 2, 5, dtype=torch.int32), 4, r"buckets has shape \(1, 2, 5\); expected \[N, n\]"),
        (torch.zeros(2, 5, dtype=torch.int64), 4, "buckets is torch.int64; expected torch.int32"),
        (torch.zeros(2, 5), 4, "buckets is torch.float32; expected torch.int32"),
        (torch.zeros(2, 5, dtype=torch.int32), 0, "num_buckets is 0; expected at least 1"),
        (torch.full((2, 5), 4, dtype=torch.int32), 4, "buckets run from 4 to 4; expected 0 to 3"),
        (torch.tensor([[0, -1]], dtype=torch.int32), 4, "buckets run from -1 to 0; expected 0 to 3"),
    ],
)
def test_wrong_inputs_are_refused(buckets: Tensor, num_buckets: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lsh_sort(buckets, num_buckets)


@pytest.mark.parametrize("num_buckets", [*BUCKETS, 3, 1024, 32767, 32768, 32769])
def test_radices_cover_the_buckets_with_few_narrow_digits(num_buckets: int) -> None:
    digits = radices(num_buckets)
    assert np.prod(digits) >= num_buckets
    assert max(digits) <= MAX_RADIX
    assert len(digits) == next(passes for passes in range(1, 9) if MAX_RADIX**passes >= num_buckets)


def sort_model(opset: int, counts: list[int], *, dims: tuple = ("N", "n"), same_input: bool = False):
    """A model of one custom node for every entry of `counts`, its num_buckets, with the body that they share."""
    import onnx
    from onnx import helper

    int32 = onnx.TensorProto.INT32
    names = ["buckets0" if same_input else f"buckets{i}" for i in range(len(counts))]
    nodes = [
        helper.make_node(
            "LSHSort",
            [names[i]],
            [f"order{i}", f"rank{i}"],
            domain=DOMAIN,
            **{"num_buckets": count, PLUGIN_NAMESPACE: DOMAIN},
        )
        for i, count in enumerate(counts)
    ]
    graph = helper.make_graph(
        nodes,
        "sort",
        [helper.make_tensor_value_info(name, int32, dims) for name in dict.fromkeys(names)],
        [helper.make_tensor_value_info(name, int32, dims) for node in nodes for name in node.output],
    )
    return helper.make_model(
        graph,
        functions=[onnx_function_body(nodes, opset)],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=helper.find_min_ir_version_for([helper.make_opsetid("", opset)], ignore_unknown=True),
    )


def ort_session(model):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.requires("onnx")
@pytest.mark.requires("ort")
@pytest.mark.parametrize("opset", [18, 20, 24])
@pytest.mark.parametrize("num_buckets", BUCKETS)
def test_the_body_equals_the_operator_in_onnx_runtime(num_buckets: int, opset: int) -> None:
    import onnx

    model = sort_model(opset, [num_buckets])
    onnx.checker.check_model(model)
    session = ort_session(model)
    for length in LENGTHS:
        buckets = bucket_rows(length, num_buckets)
        order, rank = session.run(None, {"buckets0": buckets})
        assert_sorted(buckets, order, rank)


@pytest.mark.requires("onnx")
@pytest.mark.requires("ort")
def test_the_body_sorts_one_row_like_many() -> None:
    session = ort_session(sort_model(20, [33]))
    buckets = bucket_rows(129, 33)
    together = session.run(None, {"buckets0": buckets})
    for row in range(len(buckets)):
        alone = session.run(None, {"buckets0": buckets[row : row + 1]})
        assert all(np.array_equal(a, t[row : row + 1]) for a, t in zip(alone, together, strict=True))


@pytest.mark.requires("onnx")
@pytest.mark.requires("ort")
def test_an_empty_batch_is_an_error_of_onnx_runtime_and_never_a_wrong_result() -> None:
    # its MatMul refuses an empty right operand below a matrix; the other body and the operator accept one
    session = ort_session(sort_model(20, [33]))
    with pytest.raises(Exception, match="MatMul"):
        session.run(None, {"buckets0": np.zeros((0, 200), np.int32)})


@pytest.mark.requires("onnx")
@pytest.mark.requires("ort")
@pytest.mark.parametrize("counts", [[4, 1025], [1025, 4], [33, 32, 31]])
def test_one_body_serves_nodes_with_different_bucket_counts(counts: list[int]) -> None:
    model = sort_model(20, counts)
    assert len(model.functions) == 1
    buckets = {f"buckets{i}": bucket_rows(300, count) for i, count in enumerate(counts)}
    results = ort_session(model).run(None, buckets)
    for i in range(len(counts)):
        assert_sorted(buckets[f"buckets{i}"], *results[2 * i : 2 * i + 2])


def integer_constants(body) -> Iterator[int]:
    """Integers that the body holds as constants."""
    import onnx

    for node in body.node:
        if node.op_type == "Constant":
            yield from onnx.numpy_helper.to_array(node.attribute[0].t).flatten().tolist()


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("opset", [18, 20, 24])
@pytest.mark.parametrize("num_buckets", BUCKETS)
def test_the_body_holds_no_node_that_a_runtime_lacks_or_runs_serially(num_buckets: int, opset: int) -> None:
    body = sort_model(opset, [num_buckets]).functions[0]
    kinds = {node.op_type for node in body.node}
    assert not kinds & FORBIDDEN
    assert not {kind for kind in kinds if kind.startswith("Random")}
    assert {node.domain for node in body.node} == {""}
    assert [(entry.domain, entry.version) for entry in body.opset_import] == [("", opset)]
    # a one-hot row never grows with the buckets
    assert sum(node.op_type == "MatMul" for node in body.node) == 3 * len(radices(num_buckets))
    assert BLOCK in set(integer_constants(body))


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("dims", [("N", "n"), (6, "n"), ("N", 128), (6, 128)])
def test_shape_inference_keeps_symbolic_dimensions(dims: tuple) -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    model = sort_model(20, [33], dims=dims)
    onnx.checker.check_model(model, full_check=True)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    for output in inferred.graph.output:
        tensor = output.type.tensor_type
        assert tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim) == dims
        assert tensor.elem_type == onnx.TensorProto.INT32


@pytest.mark.requires("onnx")
def test_the_schema_says_what_the_operator_takes() -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    schema = onnx.defs.get_schema("LSHSort", OPSET_VERSION, DOMAIN)
    assert [p.name for p in schema.inputs] == ["buckets"]
    assert [p.name for p in schema.outputs] == ["order", "rank"]
    assert set(schema.attributes) == {"num_buckets", PLUGIN_NAMESPACE}
    assert schema.attributes["num_buckets"].required
    assert not schema.attributes[PLUGIN_NAMESPACE].required
