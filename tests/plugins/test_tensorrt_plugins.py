"""The TensorRT plugins, tried with TensorRT's own Python packages and without a GPU.

tensorrt/conformance.py runs in the environments that scripts/conformance.sh makes, where there is no torch and no onnx.
It registers the plugins and takes them through the phases of a build; what it saw is compared here. What only a GPU can
show is whether an engine computes the right thing.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from effexport.plugins import tensorrt_plugins
from effexport.plugins.building.library import LibraryError
from effexport.plugins.building.toolchain import find_nvcc
from effexport.plugins.iterative_pinv import trt as pinv
from effexport.plugins.lsh_sort import trt as sort
from effexport.plugins.ops import DOMAIN, OPS, PLUGIN_NAMESPACE

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "tensorrt"
ENVIRONMENTS = ROOT / ".venv-tensorrt"
MAJORS = ("11", "10")
# the others run as their function bodies in engines
PLUGINS = {name: op for name, op in OPS.items() if op.has_trt_plugin}
INT32_MAX = 2**31 - 1
# the most that a block may have on every GPU without opting in
SHARED_BYTES = 48 * 1024

PINV_SIZES = (1, 4, 31, 33, 63, 64)
SORT_BUCKETS = (1, 65, 1216, 1217, 4096, 65537, INT32_MAX)
NAMES = {"float32": "FLOAT", "float16": "HALF"}


def pinv_case(dtype: str, m: int | str, iterations: int = 6) -> dict[str, Any]:
    return {
        "op": "IterativePinv",
        "attributes": {"iterations": iterations},
        "inputs": [[dtype, ["N", m, m]], [dtype, ["N", 1, 1]]],
        "sizes": [{"N": count, "m": 8} for count in (1, 7, 96, 0)],
    }


def sort_case(num_buckets: int, dims: tuple[int | str, int | str] = ("N", "n"), dtype: str = "INT32") -> dict[str, Any]:
    return {
        "op": "LSHSort",
        "attributes": {"num_buckets": num_buckets},
        "inputs": [[dtype, list(dims)]],
        "sizes": [{"N": rows, "n": length} for rows, length in ((1, 1), (4, 100), (96, 4097), (3, 40000), (0, 0))],
    }


CASES = {
    **{f"pinv {dtype} {m}": pinv_case(NAMES[dtype], m, 1 + m) for dtype, m in itertools.product(NAMES, PINV_SIZES)},
    **{f"sort {num_buckets}": sort_case(num_buckets) for num_buckets in SORT_BUCKETS},
    "sort static": sort_case(33, (4, 100)),
    "pinv of any size": pinv_case("FLOAT", "m"),
    "pinv too large": pinv_case("FLOAT", 65),
    "pinv bfloat16": pinv_case("BF16", 8),
    "sort of int64": sort_case(33, dtype="INT64"),
}
SERVED = [name for name, case in CASES.items() if name.split()[1] not in ("of", "too", "bfloat16")]


def run_in(major: str, script: str, request: dict[str, Any], cache: Path, folder: Path) -> dict[str, Any]:
    """What a script answers in one of the environments, with no more of `effexport` than its plugins."""
    environment = ENVIRONMENTS / major
    (folder / "effexport").mkdir(exist_ok=True)
    for target in (ROOT / "exporter" / "__init__.py", ROOT / "exporter" / "version.py", ROOT / "plugins"):
        link = folder / "effexport" / target.name
        if not link.is_symlink():
            link.symlink_to(target)
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("EFFEXPORT_", "PYTHON"))},
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "EFFEXPORT_CACHE_DIR": str(cache),
        "LD_LIBRARY_PATH": (environment / "library-path").read_text(encoding="utf-8").strip(),
    }
    done = subprocess.run(
        [environment / "bin" / "python", HERE / script],
        input=json.dumps(request),
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By major version of TensorRT. The older one is given the PTX that NVRTC made beside the newer."""
    folder = tmp_path_factory.mktemp("conformance")
    request = {"ops": list(PLUGINS), "cases": list(CASES.values()), "ptx": None}
    newer = run_in("11", "conformance.py", request, folder / "cache", folder)
    cases = dict(zip(CASES, newer["cases"], strict=True))
    given = {"IterativePinv": cases["pinv float32 4"]["ptx"], "LSHSort": cases["sort 65"]["ptx"]}
    older = run_in("10", "conformance.py", {**request, "ptx": given}, folder / "older", folder)
    return {"11": newer, "10": older}


def case_of(answers: dict[str, dict[str, Any]], major: str, name: str) -> dict[str, Any]:
    case: dict[str, Any] = dict(zip(CASES, answers[major]["cases"], strict=True))[name]
    return case


def real_tensorrt(test: Any) -> Any:
    """Marks of the tests that run the harness: one worker makes the answers, and each TensorRT is asked."""
    for mark in (
        pytest.mark.requires("tensorrt"),
        pytest.mark.xdist_group("tensorrt"),
        pytest.mark.parametrize("major", MAJORS),
    ):
        test = mark(test)
    return test


@real_tensorrt
def test_tensorrt_is_the_version_that_is_asked_for(answers: dict[str, Any], major: str) -> None:
    pinned = (ROOT / "scripts" / f"conformance-requirements-{major}.txt").read_text(encoding="utf-8")
    assert f"_bindings=={answers[major]['version']}\n" in pinned
    assert answers[major]["version"].startswith(f"{major}.")


@real_tensorrt
def test_the_plugins_need_neither_torch_nor_onnx(answers: dict[str, Any], major: str) -> None:
    modules = set(answers[major]["modules"])
    assert {"tensorrt", "effexport"} <= modules
    assert modules & {"torch", "onnx", "onnxruntime", "onnxscript", "ml_dtypes"} == set()


@real_tensorrt
def test_the_creators_are_in_tensorrts_registry(answers: dict[str, Any], major: str) -> None:
    assert answers[major]["registered"] == sorted([name, DOMAIN, "1"] for name in PLUGINS)


@real_tensorrt
@pytest.mark.requires("onnx", "torch")
def test_the_fields_are_the_attributes_of_the_onnx_operator(answers: dict[str, Any], major: str) -> None:
    for name, op in PLUGINS.items():
        attributes = op.load().SIGNATURE.onnx_schema().attributes
        assert {str(attributes[attribute].type).split(".")[-1] for attribute in attributes} == {"INT", "STRING"}
        # plugin_namespace is for the parser
        expected = [[attribute, "INT64"] for attribute in attributes if attribute != PLUGIN_NAMESPACE]
        assert answers[major]["fields"][name] == expected


@real_tensorrt
def test_what_is_wrong_is_refused(answers: dict[str, Any], major: str) -> None:
    # otherwise it would mean nothing that ours are not
    refusals = answers[major]["refusals"]
    expected = {
        "attribute type": "not a supported serializable type",
        "result of autotune": "Return types can only be AutoTuneCombination",
        "arguments of aot_impl": "does not match the expected input arg schema",
        "unregistered plugin": "is not registered",
        "no aot_impl": "AOT implementation requested, but not defined",
        # TensorRT 10 fails before that, with NumPy 2.4 or later: hence the arrays of one in our plugins
        "an int attribute": {"11": "AOT implementation requested", "10": "only 0-dimensional arrays"}[major],
    }
    assert set(refusals) == set(expected)
    for what, message in expected.items():
        assert message in (refusals[what] or "nothing was said"), what


@real_tensorrt
@pytest.mark.parametrize("name", SERVED)
def test_a_node_becomes_a_plugin_that_is_compiled_ahead_of_time(answers: dict[str, Any], major: str, name: str) -> None:
    case = case_of(answers, major, name)
    assert case.get("error") is None
    assert case["interface"] == "_TemplateAOTPlugin"
    # no choice of tactics: TensorRT takes its default
    assert case["tactics"] == []


@real_tensorrt
@pytest.mark.parametrize("name", SERVED)
def test_outputs_have_the_shape_and_type_of_the_first_input(answers: dict[str, Any], major: str, name: str) -> None:
    given, case = CASES[name], case_of(answers, major, name)
    dtype, dims = given["inputs"][0]
    assert case["num_outputs"] == (1 if given["op"] == "IterativePinv" else 2)
    assert case["output_types"] == [dtype] * case["num_outputs"]
    shapes = [[sizes.get(dim, dim) for dim in dims] for sizes in given["sizes"]]
    assert case["output_shapes"] == [[shape] * case["num_outputs"] for shape in shapes]


@real_tensorrt
@pytest.mark.parametrize("name", SERVED)
def test_the_only_format_is_dense_and_of_the_networks_type(answers: dict[str, Any], major: str, name: str) -> None:
    dtype = CASES[name]["inputs"][0][0]
    # two inputs and an output, or an input and two outputs
    assert case_of(answers, major, name)["combinations"] == [[dtype, "LINEAR"]] * 3


@real_tensorrt
@pytest.mark.parametrize("name", [name for name in SERVED if name.startswith("pinv")])
def test_the_iteration_is_launched_as_its_kernel_wants(answers: dict[str, Any], major: str, name: str) -> None:
    given, case = CASES[name], case_of(answers, major, name)
    _, dtype, size = name.split()
    m = int(size)
    assert case["entry"] == f"effexport_iterative_pinv_{dtype}"
    for sizes, launch, scalars in zip(given["sizes"], case["launches"], case["scalars"], strict=True):
        # a grid of no blocks cannot be launched
        assert launch == launch_of(max(sizes["N"], 1), pinv.BLOCK_THREADS, pinv.shared_bytes(m))
        assert scalars == [sizes["N"], m, given["attributes"]["iterations"]]


@real_tensorrt
@pytest.mark.parametrize("name", [name for name in SERVED if name.startswith("sort")])
def test_the_sort_is_launched_as_its_kernel_wants(answers: dict[str, Any], major: str, name: str) -> None:
    given, case = CASES[name], case_of(answers, major, name)
    num_buckets = given["attributes"]["num_buckets"]
    assert case["entry"] == "effexport_lsh_sort"
    for sizes, launch, scalars in zip(given["sizes"], case["launches"], case["scalars"], strict=True):
        rows, length = (sizes.get(dim, dim) for dim in given["inputs"][0][1])
        # several blocks for a long row, if one pass sorts it
        blocks = rows if num_buckets > sort.MAX_RADIX else min(rows * -(-length // sort.TILE), max(rows, 128))
        assert launch == launch_of(max(blocks, 1), sort.BLOCK_THREADS, sort.shared_bytes(num_buckets))
        assert scalars == [rows, length, num_buckets]


def launch_of(grid: int, block: int, shared_mem: int) -> dict[str, int]:
    ones = dict.fromkeys(("grid_y", "grid_z", "block_y", "block_z"), 1)
    return {"grid_x": grid, "block_x": block, "shared_mem": shared_mem, **ones}


@real_tensorrt
@pytest.mark.parametrize("name", SERVED)
def test_ptx_has_the_entry_with_the_arguments_that_tensorrt_passes(
    answers: dict[str, Any], major: str, name: str
) -> None:
    case = case_of(answers, major, name)
    entry = re.search(rf"\.visible \.entry {case['entry']}\(([^)]*)\)([^{{]*){{", case["ptx"])
    assert entry is not None
    assert case["scalar_types"] == ["SymInt32"] * 3
    # pointers to the inputs, int32 scalars, pointers to the outputs
    inputs = len(CASES[name]["inputs"])
    assert re.findall(r"\.param \.(\w+) ", entry[1]) == ["u64"] * inputs + ["u32"] * 3 + ["u64"] * case["num_outputs"]
    most_threads = int(re.search(r"\.maxntid (\d+)", entry[2])[1])
    for launch in case["launches"]:
        assert 32 <= launch["block_x"] <= most_threads <= 1024
        assert 0 < launch["shared_mem"] <= SHARED_BYTES
    # all shared memory is what the launch asks for
    assert not re.search(r"^\s*\.shared", case["ptx"], re.MULTILINE)


@pytest.mark.requires("tensorrt")
@pytest.mark.xdist_group("tensorrt")
def test_nvrtc_compiles_the_kernels_without_nvcc(answers: dict[str, Any]) -> None:
    assert answers["11"]["compiler"] == "NVRTC 13.0"
    for name in ("pinv float16 64", "sort 65"):
        text = case_of(answers, "11", name)["ptx"]
        assert re.search(r"^\.version 9\.0\n\.target sm_75$", text, re.MULTILINE)


@pytest.mark.requires("tensorrt", "nvcc")
@pytest.mark.xdist_group("tensorrt")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_ptxas_assembles_the_ptx_without_warnings(answers: dict[str, Any], architecture: str, tmp_path: Path) -> None:
    ptxas = find_nvcc().resolve().parent / "ptxas"
    for number, text in enumerate({case_of(answers, "11", name)["ptx"] for name in ("pinv float32 4", "sort 65")}):
        source = tmp_path / f"{number}.ptx"
        source.write_text(text, encoding="utf-8")
        command = [ptxas, f"-arch={architecture}", "--warning-as-error", source, "-o", tmp_path / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


@real_tensorrt
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pinv of any size", "The size of its matrices is not known"),
        ("pinv too large", "Its matrices are 65 × 65"),
        # these do not come as far as the launch
        ("pinv bfloat16", "its inputs are BF16; expected FLOAT or HALF"),
        ("sort of int64", "buckets are INT64; expected INT32"),
    ],
)
def test_what_a_plugin_cannot_do_is_an_error_and_no_wrong_launch(
    answers: dict[str, Any], major: str, name: str, message: str
) -> None:
    assert message in case_of(answers, major, name)["error"]


def surface(module: str, **request: Any) -> dict[str, Any]:
    return {"module": module, "members": {}, **request}


@real_tensorrt
def test_a_member_that_tensorrt_does_not_have_is_reported(major: str, tmp_path: Path) -> None:
    members = {
        "": ["Logger", "Builder", "MadeUp"],
        "Builder": ["create_network", "made_up"],
        "BuilderFlag": ["TF32", "MADE_UP"],
        "Logger.Severity": ["ERROR"],
        "MadeUpToo": ["anything"],
    }
    keywords = {"Builder": ["logger", "made_up"], "Runtime.deserialize_cuda_engine": ["serialized_engine", "made_up"]}
    request = surface("tensorrt", members=members, keywords=keywords)
    answer = run_in(major, "api_surface.py", request, tmp_path / "cache", tmp_path)
    assert answer["missing"] == [
        "MadeUp",
        "Builder.made_up",
        "BuilderFlag.MADE_UP",
        "MadeUpToo.anything",
        "Builder(made_up=)",
        "Runtime.deserialize_cuda_engine(made_up=)",
    ]
    assert answer["checked"] == 13


@pytest.mark.requires("tensorrt")
def test_a_member_that_the_cuda_runtime_does_not_have_is_reported(tmp_path: Path) -> None:
    request = surface("cuda.bindings.runtime", members={"": ["cudaMalloc", "cudaMadeUp"]})
    answer = run_in("11", "api_surface.py", request, tmp_path / "cache", tmp_path)
    assert answer["missing"] == ["cudaMadeUp"]


PINV_DIMS: list[list[int | str | None]] = [["N", 64, 64], ["N", 1, 1]]
why_pinv = functools.partial(tensorrt_plugins.why_body, "IterativePinv")
why_sort = functools.partial(tensorrt_plugins.why_body, "LSHSort")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("m", [1, 31, 64])
def test_the_iteration_is_a_plugin_up_to_64(dtype: str, m: int) -> None:
    assert why_pinv([dtype] * 2, [[None, m, m], [None, 1, 1]], {"iterations": 6}) is None


@pytest.mark.parametrize(
    ("dtypes", "m", "attributes", "message"),
    [
        (["float32"] * 2, 65, {"iterations": 6}, "Its matrices are 65 × 65; .* 1 × 1 to 64 × 64."),
        (["float32"] * 2, 0, {"iterations": 6}, "Its matrices are 0 × 0; "),
        (["float32"] * 2, "landmarks", {"iterations": 6}, "is landmarks; the TensorRT plugin needs a fixed number."),
        (["float32"] * 2, None, {"iterations": 6}, "is not known; the TensorRT plugin needs a fixed number."),
        (["bfloat16"] * 2, 64, {"iterations": 6}, "Its inputs are bfloat16 and bfloat16; .* float32 or float16"),
        (["float32", "float16"], 64, {"iterations": 6}, "Its inputs are float32 and float16; "),
        (["float32"] * 2, 64, {}, "has no attribute `iterations`"),
        (["float32"] * 2, 64, {"iterations": 0}, "`iterations` is 0; "),
    ],
)
def test_the_iteration_says_why_it_runs_as_its_body(
    dtypes: list[str], m: int | str | None, attributes: dict[str, Any], message: str
) -> None:
    assert re.search(message, why_pinv(dtypes, [["N", m, m], ["N", 1, 1]], attributes))


@pytest.mark.parametrize("num_buckets", [1, 65, 353, INT32_MAX])
def test_the_sort_is_a_plugin_for_any_number_of_buckets(num_buckets: int) -> None:
    assert why_sort(["int32"], [["N", None]], {"num_buckets": num_buckets}) is None
    assert why_sort(["int32"], [[96, 1 << 20]], {"num_buckets": num_buckets}) is None


@pytest.mark.parametrize(
    ("dtype", "dims", "attributes", "message"),
    [
        ("int64", ["N", "n"], {"num_buckets": 4}, "Its buckets are int64; the TensorRT plugin takes int32."),
        ("int32", [1, 1 << 31], {"num_buckets": 4}, "a dimension of 2147483648; "),
        ("int32", ["N", "n"], {"num_buckets": 1 << 31}, "`num_buckets` is 2147483648; "),
        ("int32", ["N", "n"], {"num_buckets": 0}, "`num_buckets` is 0; "),
        ("int32", ["N", "n"], {}, "has no attribute `num_buckets`"),
    ],
)
def test_the_sort_says_why_it_runs_as_its_body(
    dtype: str, dims: list[int | str | None], attributes: dict[str, Any], message: str
) -> None:
    assert message in why_sort([dtype], [dims], attributes)


@pytest.mark.parametrize("name", [name for name in OPS if name not in PLUGINS])
def test_an_operator_without_a_plugin_runs_as_its_body_whatever_its_inputs(name: str) -> None:
    assert (tensorrt_plugins.why_body(name, [], [], {}) or "").startswith("it has no TensorRT plugin")


def test_no_operators_need_no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    tensorrt_plugins.register_plugins([])


def test_a_missing_tensorrt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(LibraryError, match=r"TensorRT does not load .*pip install tensorrt"):
        tensorrt_plugins.register_plugins(["LSHSort"])


@pytest.mark.parametrize("version", ["8.6.1", "10.12.0.36"])
def test_an_old_tensorrt_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("tensorrt")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    with pytest.raises(LibraryError, match=rf"TensorRT is {version}; expected 10\.13 or later"):
        tensorrt_plugins.register_plugins(["LSHSort"])
