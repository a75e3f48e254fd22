"""`effexport::LSHSort`, beyond its contract (test_contract.py). Every result is exact."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_kernels import ALL_BLOCKS, assert_guard_is_intact, guarded
from implementations import implementation

from effexport.plugins.contract import Case
from effexport.plugins.lsh_sort.contract import CONTRACT
from effexport.plugins.lsh_sort.op import BLOCK, MAX_RADIX, lsh_sort, onnx_function_body, radices
from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

# one less, equal to and one more than one and two digits of 32
BUCKETS = [1, 2, 31, 32, 33, 257, 1025, 4096]


TILE = 8192
INT32_MAX = 2**31 - 1


def bucket_rows(length: int, num_buckets: int) -> np.ndarray:
    """Random, all equal to the first and to the last bucket, descending, alternating, and nearly sorted."""
    generator = np.random.default_rng(length * 10007 + num_buckets)
    position = np.arange(length)
    return np.stack(
        [
            generator.integers(0, num_buckets, length),
            np.zeros(length, dtype=np.int64),
            np.full(length, num_buckets - 1),
            (length - 1 - position) * num_buckets // length,
            np.where(position % 2 == 0, num_buckets - 1, 0),
            np.sort(generator.integers(0, num_buckets, length))[np.roll(position, 1)],
        ]
    ).astype(np.int32)


def case_of(buckets: np.ndarray, num_buckets: int) -> Case:
    return Case((*buckets.shape, num_buckets), dtype="int32")


def assert_sorted(buckets: np.ndarray, num_buckets: int, order: np.ndarray, rank: np.ndarray) -> None:
    """Exactly the contract's order and rank, of the buckets moved into range."""
    inside = {"buckets": torch.from_numpy(buckets.clip(0, num_buckets - 1))}
    exact = CONTRACT.exact(case_of(buckets, num_buckets), inside)
    for found, expected in zip((order, rank), exact.values(), strict=True):
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected.numpy())


def sorted_by_cuda(buckets: np.ndarray, num_buckets: int, **how: int) -> list[np.ndarray]:
    found: list[np.ndarray] = implementation("LSHSort", "cuda").answers(
        case_of(buckets, num_buckets), {"buckets": torch.from_numpy(buckets)}, **how
    )
    return found


@pytest.mark.requires("native")
def test_libraries_of_one_process_count_their_own_launches(tmp_path: Path) -> None:
    emulated = implementation("LSHSort", "cuda").emulated
    other = ctypes.CDLL(shutil.copy(emulated.library._name, tmp_path / "other.so"))
    sorted_by_cuda(np.zeros((5, 1), np.int32), 1)
    result = np.zeros((3, 1), np.int32)
    arrays = (ctypes.c_void_p * 3)(result.ctypes.data, result.ctypes.data, None)
    other.effexport_check_lsh_sort(0, arrays, (ctypes.c_int64 * 3)(3, 1, 1), None, None, None)
    assert emulated.launch()[0] == 5


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [1, 7, 1216, 1217, 4096, INT32_MAX])
def test_cuda_takes_buckets_out_of_range_for_the_nearest_in_range(num_buckets: int) -> None:
    generator = np.random.default_rng(0)
    buckets = generator.integers(-(2**31), 2**31, (2, 300)).astype(np.int32)
    buckets[:, ::3] = generator.integers(0, num_buckets, (2, 100))
    buckets[:, ::5] = [[-1], [num_buckets if num_buckets < INT32_MAX else -2]]
    assert_sorted(buckets, num_buckets, *sorted_by_cuda(buckets, num_buckets))


@pytest.mark.requires("native")
@pytest.mark.parametrize("length", [TILE - 1, TILE, TILE + 1, 3 * TILE + 77])
@pytest.mark.parametrize("num_buckets", [3, 1025])
def test_blocks_share_long_rows(num_buckets: int, length: int) -> None:
    buckets = bucket_rows(length, num_buckets)[[0, 3]]
    for max_blocks in (ALL_BLOCKS, 3):
        assert_sorted(buckets, num_buckets, *sorted_by_cuda(buckets, num_buckets, max_blocks=max_blocks, seed=length))
        assert implementation("LSHSort", "cuda").emulated.launch()[0] == 2 * -(-length // TILE)


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    ("rows", "length", "num_buckets"), [(1, 5 * TILE + 1, 1), (2, 40963, 2), (1, 9 * TILE, 700), (3, 65537, 1216)]
)
@pytest.mark.parametrize("offset", [0, 1])
def test_parts_of_long_rows_are_counted_by_a_launch_of_their_own(
    rows: int, length: int, num_buckets: int, offset: int
) -> None:
    generator, cuda = np.random.default_rng(length + offset), implementation("LSHSort", "cuda")
    whole = generator.integers(0, num_buckets, offset + rows * length).astype(np.int32)
    whole[::5] = generator.integers(-(2**31), 2**31, whole[::5].shape)
    buckets = whole[offset:].reshape(rows, length)  # at any element: a few tokens are read at a time where they can be
    blocks = rows * -(-length // TILE)
    for max_blocks in (ALL_BLOCKS, 3):
        before = cuda.emulated.library.count_launches()
        answers = sorted_by_cuda(buckets, num_buckets, max_blocks=max_blocks, seed=length)
        assert_sorted(buckets, num_buckets, *answers)
        assert cuda.emulated.library.count_launches() == before + 2
        assert [cuda.emulated.launch(i)[0] for i in (1, 0)] == [blocks, blocks]
    assert cuda.scratch_bytes(case_of(buckets, num_buckets)) == 4 * blocks * num_buckets


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    ("rows", "tiles", "counted"), [(1, 5, 0), (1, 6, 6), (32, 4, 0), (32, 8, 128), (64, 10, 128), (128, 100, 0)]
)
def test_a_launch_counts_where_it_saves_five_tiles(rows: int, tiles: int, counted: int) -> None:
    case = Case((rows, tiles * TILE, 7), dtype="int32")
    assert implementation("LSHSort", "cuda").scratch_bytes(case) == 4 * counted * 7


@pytest.mark.slow
@pytest.mark.requires("native")
def test_many_rows_have_a_block_each_which_takes_their_tiles_in_turn() -> None:
    buckets = np.random.default_rng(0).integers(0, 9, (65, TILE + 1)).astype(np.int32)
    answers = sorted_by_cuda(buckets, 9, max_blocks=1)
    assert implementation("LSHSort", "cuda").emulated.launch()[0] == 65
    assert_sorted(buckets, 9, *answers)


@pytest.mark.requires("native")
@pytest.mark.parametrize("length", [1000, TILE + 1, 5 * TILE + 1])
@pytest.mark.parametrize("num_buckets", [33, 1216, 1217])
def test_cuda_writes_rank_only_if_wanted(num_buckets: int, length: int) -> None:
    buckets, cuda = bucket_rows(length, num_buckets), implementation("LSHSort", "cuda")
    order, several_passes = np.full_like(buckets, -1), num_buckets == 1217
    cuda.library.set_schedule(0, ALL_BLOCKS)
    # effexport::lsh_sort::cuda_scratch_bytes(int64, int64, int64, bool), as GCC and Clang name it
    scratch_bytes = cuda.library._ZN9effexport8lsh_sort18cuda_scratch_bytesElllb
    scratch_bytes.argtypes, scratch_bytes.restype = [*[ctypes.c_int64] * 3, ctypes.c_bool], ctypes.c_size_t
    with_rank, without = (scratch_bytes(6, length, num_buckets, wanted) for wanted in (True, False))
    if several_passes:  # which keep the unfinished order in it
        assert (with_rank, without) == (0, 4 * 6 * length)
    else:
        assert with_rank == without
    scratch, whole = guarded((without,), np.dtype(np.uint8))
    case, addresses = case_of(buckets, num_buckets), [buckets.ctypes.data, order.ctypes.data, 0]
    assert cuda.launch(case, addresses) == (1 if without else 0)
    assert cuda.launch(case, addresses, scratch.ctypes.data) == 0
    assert_guard_is_intact(whole)
    assert_sorted(buckets, num_buckets, order, sorted_by_cuda(buckets, num_buckets)[1])


@pytest.mark.soak
@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [*BUCKETS, INT32_MAX])
def test_long_rows_are_sorted(num_buckets: int) -> None:
    buckets = bucket_rows(65536, num_buckets)
    assert_sorted(buckets, num_buckets, *sorted_by_cuda(buckets, num_buckets, seed=num_buckets))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("row", "token", "bucket"), [(0, 0, -1), (1, 62, 33), (7, 5, 2**31 - 1), (7, 0, -(2**31))])
def test_the_kernel_names_the_first_bucket_out_of_range(row: int, token: int, bucket: int) -> None:
    buckets = np.random.default_rng(0).integers(0, 33, (8, 63)).astype(np.int32)
    buckets[row, token] = buckets[7, 62] = bucket
    expected = rf"LSHSort: buckets\[{row}, {token}\] is {bucket}; expected 0 to 32 \(num_buckets is 33\)"
    with pytest.raises(Exception, match=expected):
        implementation("LSHSort", "kernel").answers(case_of(buckets, 33), {"buckets": torch.from_numpy(buckets)})


@pytest.mark.parametrize(
    ("buckets", "text"),
    [
        (torch.full((2, 5), 4, dtype=torch.int32), "buckets run from 4 to 4; expected 0 to 3"),
        (torch.tensor([[0, -1]], dtype=torch.int32), "buckets run from -1 to 0; expected 0 to 3"),
    ],
)
def test_buckets_out_of_range_are_errors_of_the_operator(buckets: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lsh_sort(buckets, 4)


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
        assert_sorted(buckets[f"buckets{i}"], counts[i], *results[2 * i : 2 * i + 2])


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("num_buckets", BUCKETS)
def test_one_hot_rows_of_the_body_never_grow_with_the_buckets(num_buckets: int) -> None:
    from onnx import numpy_helper

    nodes = sort_model(20, [num_buckets]).functions[0].node
    assert sum(node.op_type == "MatMul" for node in nodes) == 3 * len(radices(num_buckets))
    constants = [numpy_helper.to_array(node.attribute[0].t) for node in nodes if node.op_type == "Constant"]
    assert any(BLOCK in x for x in constants)
