"""The TensorRT plugins, tried with TensorRT's own Python packages and without a GPU.

tensorrt/conformance.py runs in the environments that scripts/conformance.sh makes, where there is no torch and no onnx.
It registers the plugins and takes them through the phases of a build; what it saw is compared here. What only a GPU can
show is whether an engine computes the right thing.
"""

from __future__ import annotations

import functools
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel_ptx import NVRTC_CACHE, plugins_alone

from effexport.plugins import tensorrt_plugins
from effexport.plugins.building.library import LibraryError
from effexport.plugins.building.toolchain import find_nvcc
from effexport.plugins.contract import Case, Contract, load_contract
from effexport.plugins.ops import CUDA_OPS, DOMAIN, FLOAT_TYPES
from effexport.plugins.tensorrt_plugins import DATA_TYPES, plugins_of, timing_cache_id_of
from effexport.plugins.trt_plugin import Plugin, Rewrite, int32_bits

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "tensorrt"
ENVIRONMENTS = ROOT / ".venv-tensorrt"
MAJORS = ("11", "10")
INT32_MAX = 2**31 - 1
# the most that a block may have on every GPU without opting in
SHARED_BYTES = 48 * 1024

# Attributes that no case has, for its arrays would be too large.
EXTREMES: dict[str, list[dict[str, Any]]] = {
    "LSHSort": [{"num_buckets": INT32_MAX}],
    "LSHHash": [{"bucket_factors": factors, "chunk_length": 64} for factors in ([2] * 29, [1 << 30])],
}
SIZES = (1, 3, 24, 63, 64, 65, 100, 129, 1000, 4097, 40000)


def sample_sizes(plugin: Plugin, dynamic: bool) -> list[dict[str, int]]:
    """Sizes for the names of a plugin's dimensions, all zeros last if none must be fixed."""
    source = random.Random(plugin.name)
    names = sorted({name for x in plugin.tensors for name in x.dims if not name.isdecimal()})
    fixed = {name: source.choice([size for size in SIZES if size in allowed]) for name, allowed in plugin.fixed.items()}
    drawn = [{name: source.choice(SIZES) for name in names} | fixed for _ in range(4)]
    return [*drawn, dict.fromkeys(names, 0) | fixed] if dynamic else drawn[:1]


def attributes_of(plugin: Plugin) -> list[dict[str, Any]]:
    """The attributes of a plugin in the cases of its operator's contract, and at the ends of what it takes."""
    found: dict[str, dict[str, Any]] = {}
    contract = load_contract(CUDA_OPS[plugin.op])
    for case in (*contract.small, *contract.cases):
        given = contract.attributes(case)
        for choice in CUDA_OPS[plugin.op].load_trt().CHOICES:
            nodes = [given] if choice is plugin else nodes_of(plugin.name, choice, contract, case)
            found |= {json.dumps(x, sort_keys=True): x for x in nodes}
    assert found, f"no case of {plugin.op} has a node {plugin.name}"
    return [found[key] for key in sorted(found)] + EXTREMES.get(plugin.name, [])


def nodes_of(name: str, choice: Plugin | Rewrite, contract: Contract, case: Case) -> Iterator[dict[str, Any]]:
    """The attributes of the nodes of a plugin that a rewrite puts in the place of its operator."""
    if not isinstance(choice, Rewrite):
        return
    given, dims = contract.attributes(case), dims_of(ROWS[name].op, case)
    dtypes = [case.dtype if x.dtype == "T" else x.dtype for x in choice.tensors]
    if choice.why_not(dtypes, dims, given) is None:
        for attributes in re.findall(rf"effexport\.{name} (?:<(.*?)> )?\(", choice.body(dtypes, dims, given)):
            pairs = (pair.split(" = ") for pair in attributes.split(", ") if pair)
            own = {x.split(":")[0]: given[value[1:]] if value[0] == "@" else int(value) for x, value in pairs}
            yield {x: own[x] for x in ROWS[name].attributes}


@functools.cache
def dims_of(op: str, case: Case) -> list[list[int]]:
    return [[*x.shape] for x in load_contract(CUDA_OPS[op]).inputs(case, "cpu").values()]


def case_of_plugin(plugin: Plugin, dtype: str, attributes: dict[str, Any], dynamic: bool) -> dict[str, Any]:
    sizes = sample_sizes(plugin, dynamic)
    inputs = []
    for x in plugin.tensors:
        named = [dim if dynamic and dim not in plugin.fixed else sizes[0].get(dim, dim) for dim in x.dims]
        dims = [int(dim) if isinstance(dim, str) and dim.isdecimal() else dim for dim in named]
        inputs.append([DATA_TYPES[dtype if x.dtype == "T" else x.dtype][0], dims])
    return {"op": plugin.name, "attributes": attributes, "inputs": inputs, "sizes": sizes}


ROWS = {plugin.name: plugin for plugin in plugins_of(CUDA_OPS)}


@functools.cache
def cases() -> dict[str, dict[str, Any]]:
    """One node of each plugin with these attributes, type and kind of sizes. Made when first needed: inputs of every
    contract take seconds."""
    return {
        f"{name} {dtype} {'dynamic' if dynamic else 'static'} {number}": case_of_plugin(plugin, dtype, given, dynamic)
        for name, plugin in ROWS.items()
        for attributes in [attributes_of(plugin)]
        for dtype in (plugin.types if len(plugin.entries) > 1 else plugin.types[:1])
        for dynamic in (True, False)
        for number, given in enumerate(attributes)
    }


def refused() -> dict[str, dict[str, Any]]:
    pinv = cases()["IterativePinv float32 static 0"]

    def other(kind: str, dims: list[object], **sizes: int) -> dict[str, Any]:
        return {**pinv, "inputs": [[kind, dims], [kind, ["N", 1, 1]]], "sizes": [{"N": 1, **sizes}]}

    return {
        "pinv of any size": other("FLOAT", ["N", "m", "m"], m=8),
        "pinv too large": other("FLOAT", ["N", 65, 65]),
        "pinv of int64": other("INT64", ["N", 8, 8]),
        "sort of int64": {
            "op": "LSHSort",
            "attributes": {"num_buckets": 3},
            "inputs": [["INT64", ["N", "n"]]],
            "sizes": [{"N": 1, "n": 1}],
        },
    }


def run_in(major: str, script: str, request: dict[str, Any], cache: Path, folder: Path) -> dict[str, Any]:
    """The answer of a script in one of the environments, with no more of `effexport` than its plugins."""
    environment = ENVIRONMENTS / major
    libraries = (environment / "library-path").read_text(encoding="utf-8").strip()
    variables = {**plugins_alone(folder, cache), "LD_LIBRARY_PATH": libraries}
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
    request = {"ops": list(CUDA_OPS), "cases": [*cases().values(), *refused().values()], "ptx": None}
    newer = run_in("11", "conformance.py", request, NVRTC_CACHE, folder)
    older = run_in("10", "conformance.py", {**request, "ptx": newer["whole_ptx"]}, folder / "older", folder)
    return {"11": newer, "10": older}


def case_of(answers: dict[str, dict[str, Any]], major: str, name: str) -> dict[str, Any]:
    case: dict[str, Any] = dict(zip([*cases(), *refused()], answers[major]["cases"], strict=True))[name]
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
    assert answers[major]["registered"] == sorted([name, DOMAIN, "1"] for name in ROWS)


@real_tensorrt
def test_the_fields_are_the_attributes_in_their_order(answers: dict[str, Any], major: str) -> None:
    for name, plugin in ROWS.items():
        expected = [[x, "FLOAT32" if kind is float else "INT64"] for x, kind in plugin.attributes.items()]
        assert answers[major]["fields"][name] == expected


@pytest.mark.requires("onnx", "torch")
@pytest.mark.parametrize("name", sorted(CUDA_OPS))
def test_what_plugins_say_of_an_operator_is_what_its_signature_says(name: str) -> None:
    signature = CUDA_OPS[name].load().SIGNATURE
    types = {"T": "T" if CUDA_OPS[name].element_types != ("int32",) else "int32"}
    given = [(x.name, types.get(x.dtype, x.dtype), len(x.dims.split())) for x in signature.inputs]
    for choice in CUDA_OPS[name].load_trt().CHOICES:
        assert [(x.name, x.dtype, len(x.dims)) for x in choice.tensors] == given
        # TensorRT passes attributes by position
        assert [*choice.attributes.items()] == [
            (attribute.name, attribute.type if attribute.type in (int, float) else tuple)
            for attribute in signature.attributes
        ]
        if isinstance(choice, Plugin):
            assert choice.name == name
            results = [(x.name, types.get(x.dtype, x.dtype), len(x.dims.split())) for x in signature.outputs]
            assert [(x.name, x.dtype, len(x.dims)) for x in choice.results] == results


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
def test_a_node_becomes_a_plugin_that_is_compiled_ahead_of_time(answers: dict[str, Any], major: str) -> None:
    for name in cases():
        case = case_of(answers, major, name)
        assert case.get("error") is None, name
        assert case["interface"] == "_TemplateAOTPlugin"
        # no choice of tactics: TensorRT takes its default
        assert case["tactics"] == []


@real_tensorrt
def test_nodes_have_one_timing_cache_id_exactly_if_they_are_the_same_work(answers: dict[str, Any], major: str) -> None:
    of_node: dict[tuple[str, str], set[str]] = {}
    for name, given in cases().items():
        own, of_clone = case_of(answers, major, name)["timing_cache_ids"]
        assert own == of_clone
        # types and shapes of inputs and outputs are in TensorRT's key already
        of_node.setdefault((given["op"], json.dumps(given["attributes"], sort_keys=True)), set()).add(own)
    assert all(len(ids) == 1 for ids in of_node.values())
    ids = [timing_id for ids in of_node.values() for timing_id in ids]
    assert len(set(ids)) == len(ids)
    # cases of one plugin that differ in nothing but attributes, or the test would prove little
    assert len(ids) > len(ROWS)


def test_another_attribute_or_other_ptx_is_another_timing_cache_id(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = ROWS["EluLinearAttentionStates"]
    monkeypatch.setattr(tensorrt_plugins, "_PTX", dict.fromkeys(plugin.entries, "ptx"))
    attributes = attributes_of(plugin)[0]
    name, value = next(iter(attributes.items()))
    ids = {timing_cache_id_of(plugin, given) for given in (attributes, dict(reversed(attributes.items())))}
    assert len(ids) == 1
    ids.add(timing_cache_id_of(plugin, attributes | {name: value + 1}))
    tensorrt_plugins._PTX[plugin.entries[0]] = "other ptx"
    ids.add(timing_cache_id_of(plugin, attributes))
    assert len(ids) == 3


def plain(name: str) -> list[tuple[Plugin, Any, list[list[int]]]]:
    """The row of a case, with its sizes as plain integers, and the dimensions of its outputs."""
    given = cases()[name]
    plugin = ROWS[given["op"]]
    dtypes = [next(x for x, (trt, _) in DATA_TYPES.items() if trt == dtype) for dtype, _ in given["inputs"]]
    found = []
    for named in given["sizes"]:
        dims = [[named.get(dim, dim) for dim in dims] for _, dims in given["inputs"]]
        sizes = plugin.sizes_of(dtypes, dims, given["attributes"])
        found.append((plugin, sizes, plugin.output_dims(sizes)))
    return found


@real_tensorrt
def test_outputs_have_the_shapes_types_and_formats_that_are_declared(answers: dict[str, Any], major: str) -> None:
    for name in cases():
        case = case_of(answers, major, name)
        plugin, sizes, _ = plain(name)[0]
        types = [DATA_TYPES[sizes.T if x.dtype == "T" else x.dtype][0] for x in (*plugin.tensors, *plugin.results)]
        assert case["output_types"] == types[len(plugin.tensors) :]
        assert case["output_shapes"] == [dims for _, _, dims in plain(name)]
        # dense, and of the network's types
        assert case["combinations"] == [[dtype, "LINEAR"] for dtype in types]


@real_tensorrt
def test_symbolic_sizes_give_the_launches_of_plain_ones(answers: dict[str, Any], major: str) -> None:
    for name in cases():
        case = case_of(answers, major, name)
        for (plugin, sizes, _), launch, scalars in zip(plain(name), case["launches"], case["scalars"], strict=True):
            expected = plugin.launch(sizes)
            assert case["entry"] == plugin.entry.format(T=sizes.T)
            assert launch == launch_of(expected.grid, expected.threads, expected.shared_bytes)
            assert scalars == list(map(int32_bits, expected.scalars))


def launch_of(grid: int, block: int, shared_mem: int) -> dict[str, int]:
    ones = dict.fromkeys(("grid_y", "grid_z", "block_y", "block_z"), 1)
    return {"grid_x": grid, "block_x": block, "shared_mem": shared_mem, **ones}


@real_tensorrt
def test_ptx_has_the_entry_with_the_arguments_that_tensorrt_passes(answers: dict[str, Any], major: str) -> None:
    for name in cases():
        case, (plugin, sizes, _) = case_of(answers, major, name), plain(name)[0]
        ptx = answers[major]["ptx"][case["entry"]]
        # and no other entry, which the engine would carry in vain
        assert re.findall(r"\.entry (\w+)", ptx) == [case["entry"]]
        entry = re.search(rf"\.visible \.entry {case['entry']}\(([^)]*)\)([^{{]*){{", ptx)
        assert entry is not None
        scalars = ["f32" if isinstance(x, float) else "u32" for x in plugin.launch(sizes).scalars]
        assert case["scalar_types"] == ["SymInt32"] * len(scalars)
        # pointers to the inputs, scalars of 32 bits, pointers to the outputs
        pointers = [["u64"] * len(plugin.tensors), ["u64"] * len(plugin.results)]
        assert re.findall(r"\.param \.(\w+) ", entry[1]) == [*pointers[0], *scalars, *pointers[1]]
        most_threads = int(re.search(r"\.maxntid (\d+)", entry[2])[1])
        for launch in case["launches"]:
            assert 32 <= launch["block_x"] <= most_threads <= 1024
            assert 0 <= launch["shared_mem"] <= SHARED_BYTES
        # all shared memory is what the launch asks for
        assert not re.search(r"^\s*\.shared", ptx, re.MULTILINE)


@pytest.mark.requires("tensorrt")
@pytest.mark.xdist_group("tensorrt")
def test_nvrtc_compiles_without_nvcc_for_the_architecture_that_is_asked_for(answers: dict[str, Any]) -> None:
    assert answers["11"]["compiler"] == "NVRTC 13.0"
    assert answers["11"]["target"] == "SM 75 or later, and a driver of CUDA 13.0 or later (PTX 9.0)"
    for text in answers["11"]["ptx"].values():
        assert re.search(r"^\.version 9\.0\n\.target sm_75$", text, re.MULTILINE)


@pytest.mark.requires("tensorrt", "nvcc")
@pytest.mark.xdist_group("tensorrt")
@pytest.mark.parametrize(
    "architecture", ["sm_90", *(pytest.param(name, marks=pytest.mark.soak) for name in ("sm_75", "sm_80", "sm_120"))]
)
def test_ptxas_assembles_the_ptx_without_warnings(answers: dict[str, Any], architecture: str, tmp_path: Path) -> None:
    ptxas = find_nvcc().resolve().parent / "ptxas"
    # of one type, for kernels differ in little else; the soak run assembles all
    types = ("float32", "bfloat16") if architecture == "sm_90" else ()
    for entry, text in answers["11"]["ptx"].items():
        if entry.endswith(types):
            continue
        source = tmp_path / f"{entry}.ptx"
        source.write_text(text, encoding="utf-8")
        command = [ptxas, f"-arch={architecture}", "--warning-as-error", source, "-o", tmp_path / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


@real_tensorrt
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pinv of any size", "The dimension m of its inputs is not known"),
        ("pinv too large", "The dimension m of its inputs is 65"),
        # these do not come as far as the launch
        ("pinv of int64", "Its inputs are INT64 and INT64"),
        ("sort of int64", "Its input buckets is INT64; the TensorRT plugin takes int32"),
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


def reason(op: str, dtypes: list[str], dims: list[list[int | str | None]], attributes: dict[str, Any]) -> str | None:
    chosen = tensorrt_plugins.choose(op, dtypes, dims, attributes)
    return chosen if isinstance(chosen, str) else None


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("m", [1, 31, 64])
def test_the_iteration_is_a_plugin_up_to_64(dtype: str, m: int) -> None:
    assert reason("IterativePinv", [dtype] * 2, [[None, m, m], [None, 1, 1]], {"iterations": 6}) is None


@pytest.mark.parametrize(
    ("dtypes", "m", "attributes", "message"),
    [
        (["float32"] * 2, 65, {"iterations": 6}, "m of its inputs is 65; .* a fixed number from 1 to 64."),
        (["float32"] * 2, 0, {"iterations": 6}, "m of its inputs is 0; "),
        (["float32"] * 2, "landmarks", {"iterations": 6}, "is landmarks; the TensorRT plugin needs a fixed number"),
        (["float32"] * 2, None, {"iterations": 6}, "is not known; the TensorRT plugin needs a fixed number"),
        (
            ["float64"] * 2,
            64,
            {"iterations": 6},
            "Its inputs are float64 and float64; .* float32 or float16 or bfloat16",
        ),
        (["float32", "float16"], 64, {"iterations": 6}, "Its inputs are float32 and float16; .* one type for all"),
        (["float32"] * 2, 64, {}, "has no attribute `iterations`"),
        (["float32"] * 2, 64, {"iterations": 0}, "`iterations` is 0; "),
    ],
)
def test_the_iteration_says_why_it_runs_as_its_body(
    dtypes: list[str], m: int | str | None, attributes: dict[str, Any], message: str
) -> None:
    assert re.search(message, reason("IterativePinv", dtypes, [["N", m, m], ["N", 1, 1]], attributes) or "")


@pytest.mark.parametrize("num_buckets", [1, 65, 353, INT32_MAX])
def test_the_sort_is_a_plugin_for_any_number_of_buckets(num_buckets: int) -> None:
    assert reason("LSHSort", ["int32"], [["N", None]], {"num_buckets": num_buckets}) is None
    assert reason("LSHSort", ["int32"], [[96, 1 << 20]], {"num_buckets": num_buckets}) is None


@pytest.mark.parametrize(
    ("dtype", "dims", "attributes", "message"),
    [
        ("int64", ["N", "n"], {"num_buckets": 4}, "Its input buckets is int64; the TensorRT plugin takes int32."),
        ("int32", [1, 1 << 31], {"num_buckets": 4}, "The dimension n of its inputs is 2147483648; "),
        ("int32", ["N", "n"], {"num_buckets": 1 << 31}, "`num_buckets` is 2147483648; "),
        ("int32", ["N", "n"], {"num_buckets": 0}, "`num_buckets` is 0; "),
        ("int32", ["N", "n"], {}, "has no attribute `num_buckets`"),
    ],
)
def test_the_sort_says_why_it_runs_as_its_body(
    dtype: str, dims: list[int | str | None], attributes: dict[str, Any], message: str
) -> None:
    assert message in (reason("LSHSort", [dtype], [dims], attributes) or "")


FLOATS: list[list[int | str | None]] = [["b", 8, "n", 64]] * 3 + [["b", "n"]]


@pytest.mark.parametrize(
    ("op", "dtypes", "dims", "attributes", "message"),
    [
        (
            "EluLinearAttention",
            ["float32"] * 3 + ["bool"],
            [["b", 8, "n", "d"]] * 3 + [["b", "n"]],
            {"eps": 1e-6, "causal": 0, "chunk_length": 128},
            "The dimension head_dim of its inputs is d; the TensorRT plugin needs a fixed number",
        ),
        (
            "EluLinearAttention",
            ["float32"] * 3 + ["bool"],
            FLOATS,
            {"eps": 1e-6, "chunk_length": 128},
            "has no attribute `causal`",
        ),
        (
            "AFTSimpleAttention",
            ["float32", "float16", "float32", "bool"],
            FLOATS,
            {},
            "Its inputs are float32 and float16 and float32; ",
        ),
        (
            "AFTWindowAttention",
            ["float32"] * 3 + ["bool", "float16"],
            [*FLOATS, [8, 1, 63]],
            {"causal": 0},
            "Its input bias is float16; the TensorRT plugin takes float32.",
        ),
        (
            "AFTWindowAttention",
            ["float32"] * 3 + ["bool", "float32"],
            [*FLOATS, [8, 1, 62]],
            {"causal": 0},
            "taps of its inputs is 62, and `causal` is 0; the TensorRT plugin takes odd numbers.",
        ),
        (
            "SequenceConv",
            ["float32"] * 2 + ["bool", "float32"],
            [["b", 8, "n", 64], [8, 1, 64, 1], ["b", "n"], ["b", 8, "n", 64]],
            {},
            "taps of its inputs is 64; the TensorRT plugin needs a fixed odd number from 1 to ",
        ),
        (
            "LSHHash",
            ["float32", "float32", "bool"],
            [["b", 8, "n", 64], [8, 64, 4, 16], ["b", "n"]],
            {"bucket_factors": [1 << 31], "chunk_length": 64},
            "`bucket_factors` is [2147483648]; ",
        ),
        *(
            (
                "LSHHash",
                ["float32", "float32", "bool"],
                [["b", 8, "n", 64], [8, 64, 4, 16], ["b", "n"]],
                {"bucket_factors": factors, "chunk_length": 64},
                f"`bucket_factors` is {factors}; the TensorRT plugin takes even numbers with a product below 2^31.",
            )
            for factors in ([], [33], [1 << 16, 1 << 15])
        ),
        (
            "MaskedAttention",
            ["float32"] * 3 + ["bool"],
            [["b", 8, "n", 64], [8, "n", 64], ["b", 8, "n", 64], ["b", "n"]],
            {"scale": 1.0},
            "Its input k has 3 dimensions; the TensorRT plugin takes 4.",
        ),
        ("MaskedAttention", ["float32"], [["b", 8, "n", 64]], {"scale": 1.0}, "It has 1 inputs; "),
        (
            "LSHHash",
            ["float32", "float32", "bool"],
            [["b", 8, "n", 64], [8, 64, 4, 16], ["b", "n"]],
            {"bucket_factors": [32], "chunk_length": 0},
            "`chunk_length` is 0; ",
        ),
        (
            "LSHAttention",
            ["float32"] * 2 + ["int64", "int32", "bool"],
            [["b", 8, "n", 64]] * 2 + [["r", "p"]] * 2 + [["b", "n"]],
            {},
            "Its input order is int64; the TensorRT plugin takes int32.",
        ),
    ],
)
def test_an_operator_says_why_it_runs_as_its_body(
    op: str, dtypes: list[str], dims: list[list[int | str | None]], attributes: dict[str, Any], message: str
) -> None:
    assert message in (reason(op, dtypes, dims, attributes) or "")


def test_no_operators_need_no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert tensorrt_plugins.register_plugins([], 80) is None


def test_a_missing_tensorrt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(LibraryError, match=r"TensorRT does not load .*pip install tensorrt"):
        tensorrt_plugins.register_plugins(["LSHSort"], 80)


@pytest.mark.parametrize("version", ["8.6.1", "10.12.0.36"])
def test_an_old_tensorrt_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("tensorrt")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    with pytest.raises(LibraryError, match=rf"TensorRT is {version}; expected 10\.13 or later"):
        tensorrt_plugins.register_plugins(["LSHSort"], 80)
