"""The command line as its users meet it: what it prints where, how it ends, and what it says about bad input."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.shell_completion import ShellComplete
from fused_operators import FUSED
from onnx import numpy_helper

from effexport import __version__
from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.base.termination import Terminated
from effexport.cli.main import cli as effexport_cli
from effexport.models.variants import ATTENTION_SPECS
from effexport.plugins.building.library import find_library
from effexport.report import inspection

pytestmark = [pytest.mark.requires("torch", "onnx", "ort"), pytest.mark.usefixtures("kept_traces")]
Cli = Callable[..., Any]
Built = Callable[..., Artifact]
FRAMEWORKS = ("torch", "onnx", "onnxruntime", "tensorrt", "numpy", "onnxscript", "jinja2")
SMALL = ["--scope", "attention", "--dim", "32", "--heads", "2", "--seq-len", "64"]


def modules_after(code: str, *arguments: str | Path) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """Top-level modules that a fresh Python has imported after `code`."""
    tail = "\nimport sys\nprint('MODULES', *{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    command = [sys.executable, "-c", code + tail, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "MODULES" in result.stderr, result.stderr
    return set(result.stderr.split("MODULES")[1].split()), result


# One command after the other; a word "then" is between two.
RUN_CLI = """
import itertools, sys
from effexport.cli.main import main
for is_end, words in itertools.groupby(sys.argv[1:], "then".__eq__):
    try:
        is_end or main(list(words))
    except SystemExit as stop:
        print("EXIT", stop.code, file=sys.stderr)
"""


def test_help_list_and_doctor_load_no_framework_so_they_are_fast() -> None:
    commands = "--help then --version then list --json then build --help then doctor"
    modules, result = modules_after(RUN_CLI, *commands.split())
    assert not modules & {*FRAMEWORKS, "ray", "openvino"}
    assert result.stderr.count("EXIT 0") == 5
    for text in ("Usage: effexport [OPTIONS]", f"version {__version__}", '"variants"', "effexport build [", "nvcc"):
        assert text in result.stdout


def test_a_refused_spec_loads_no_torch() -> None:
    modules, result = modules_after(RUN_CLI, "build", "--variant", "nystrom", "--causal", "-o", "/nowhere/at/all")
    assert "EXIT 2" in result.stderr
    assert "nystrom attention has no causal form" in result.stderr
    assert "torch" not in modules


def test_golden_verification_needs_no_torch(built: Built) -> None:
    without_torch = "import sys; sys.modules['torch'] = None\n" + RUN_CLI  # as if it were not installed
    modules, result = modules_after(
        without_torch, "verify", built("lsh", "attention").path, "--reference", "golden", "--json"
    )
    assert "EXIT 0" in result.stderr
    assert "onnxscript" not in modules
    answer = json.loads(result.stdout)
    assert answer["passed"] is True
    bodies = [check["status"] for check in answer["checks"] if check["name"].startswith("function body of")]
    # without PyTorch, the kernels define what bodies must compute
    assert bodies == ["passed" if find_library() else "not run"] * 3


def test_running_needs_no_torch(built: Built, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    modules, result = modules_after(RUN_CLI, "run", built("lsh", "encoder").path, "--text", tmp_path / "a.txt")
    assert "EXIT 0" in result.stderr
    assert not modules & {"torch", "onnxscript"}


@pytest.mark.requires("torch", "onnx", "ort")
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "terminated")],
)
def test_a_signal_is_one_line_and_nothing_is_left_behind(tmp_path: Path, number: int, code: int, word: str) -> None:
    model = ["--variant", "aft-simple", "--scope", "attention", "--dim", "32", "--heads", "2", "--seq-len", "64"]
    command = [sys.executable, "-P", "-m", "effexport", "build", *model, "-o", "new/a"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # a shell starts what it puts into the background with SIGINT ignored, nohup with SIGHUP, and that is inherited
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("… exporting to ONNX"):
            assert process.poll() is None
        process.send_signal(number)
        errors = [line for line in process.stderr if not line.startswith("…")]
    assert process.returncode == code
    assert [line.strip() for line in errors if line.strip()] == [f"effexport: error: {word}"]
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_too_long_and_exhausted_memory_are_one_line(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"the name '{'x' * 80}'… is too long; choose a shorter one" in cli("inspect", "x" * 300).error()

    def exhausted(path: Path) -> None:
        raise MemoryError

    monkeypatch.setattr(inspection, "describe", exhausted)
    result = cli("inspect", "x")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "the memory is exhausted" in result.err


def test_python_dash_m_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise AssertionError")
    command = [sys.executable, "-m", "effexport", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"effexport, version {__version__}\n")


OWN_MODULE = """
from effexport.models.encoder.module import Encoder
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.variants.aft_simple import AFTSimpleSpec


def make():
    import own_widths

    attention = AFTSimpleSpec(dim=own_widths.DIM, heads=2, seq_len=48)
    return Encoder(EncoderSpec(attention=attention, layers=1))
"""


@pytest.mark.soak
@pytest.mark.requires("torch", "onnx", "ort")
def test_a_folder_named_triton_disturbs_nothing_that_is_started_beside_it(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "own_models.py").write_text(OWN_MODULE)
    (tmp_path / "own_widths.py").write_text("DIM = 32\n")
    build = "[build]\ndim = 32\nheads = 2\nlayers = 1\n"
    (tmp_path / "sweep.toml").write_text(f'variants = ["aft-simple"]\nseq_lens = [48]\n{build}')
    bench = ["bench", "--variants", "aft-simple", "--seq-lens", "64", "--runtimes", "torch,compile"]
    for arguments in (
        ["build", "--module", "own_models:make", "--seq-len", "48", "-o", "own"],
        ["sweep", "sweep.toml", "-o", "swept", "--processes"],
        [*bench, "-o", "bench", "--json"],
    ):
        command = [sys.executable, "-m", "effexport", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert all(row["peak_bytes"] is not None for row in rows)


@pytest.mark.parametrize(("command", "code"), [("list", 0), ("list --json", 0), ("lsit", 2)])
def test_a_reader_that_goes_away_changes_neither_messages_nor_exit_status(command: str, code: int) -> None:
    # `true` reads nothing and ends long before Python has started
    pipeline = f"{sys.executable} -m effexport {command} 2>&1 | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", pipeline], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_stdout_on_a_full_disk_is_one_error() -> None:
    command = f"{sys.executable} -m effexport list > /dev/full"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    message = "effexport: error: cannot write to stdout: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, message)


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version").out == f"effexport, version {__version__}\n"
    result = cli("--help")
    assert result.code == 0
    for verb in ("list", "build", "verify", "run", "inspect", "doctor", "completion"):
        assert f"\n  {verb} " in result.out
        help_text = cli(verb, "-h")
        assert help_text.code == 0
        assert "--json" in help_text.out


def test_no_command_at_all_shows_the_help_once(cli: Cli) -> None:
    result = cli()
    assert (result.code, result.out) == (2, "")
    assert result.err.count("Usage:") == result.err.count("Commands:") == 1
    assert "error" not in result.err


def test_list_is_one_object_with_all_variants(cli: Cli) -> None:
    result = cli("list", "--json")
    variants = result.json["variants"]
    assert [entry["name"] for entry in variants] == list(ATTENTION_SPECS)
    assert {entry["name"] for entry in variants if not entry["causal"]} == {"nystrom"}
    for entry in variants:
        assert entry["formula"]
        assert entry["cost"].startswith("O(")
        assert entry["defaults"]["dim"] == 256
    text = cli("list")
    assert text.err == ""
    assert all(name in text.out for name in ATTENTION_SPECS)


def test_build_prints_one_object_and_progress_elsewhere(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "a deep" / "aft é"
    result = cli("build", "--variant", "aft-simple", *SMALL, "--seed", "3", "-o", output, "--json")
    assert result.code == 0
    assert result.json["artifact"] == str(output)
    assert result.json["verdict"] == "passed"
    assert result.json["spec"]["seed"] == 3
    assert json.loads((output / "manifest.json").read_text()).items() <= result.json.items()
    assert "… exporting to ONNX" in result.err
    assert f'Next: effexport verify "{output}"' in result.err
    again = cli("build", "--variant", "aft-simple", *SMALL, "-o", output)
    assert "exists; choose another folder with -o, or replace it with --force" in again.error()


def test_the_default_output_is_named_after_the_variant(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts" / "linear").mkdir(parents=True)
    assert "artifacts/linear exists" in cli("build", "--variant", "linear").error()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to export is given; expected one of"),
        (["--seq-len", "512"], "--variant NAME            an encoder of ours: softmax, linear"),
        (["--variant", "nystrom", "--causal"], "nystrom attention has no causal form"),
    ],
)
def test_a_build_that_cannot_work_says_why_and_writes_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message.lower() in cli("build", *arguments).error().lower()
    as_json = cli("build", *arguments, "--json")
    assert message.lower() in as_json.json["error"].lower()
    assert as_json.json["exit_code"] == as_json.code == 2
    assert "no command 'xyzzy'" in cli("xyzzy", "--json").json["error"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requires("native")
def test_verify_of_a_healthy_artifact(cli: Cli, built: Built) -> None:
    path = built("nystrom", "encoder").path
    result = cli("verify", path, "--reference", "torch", "--json")
    assert result.code == 0, result.err
    assert result.json["passed"] is True
    assert result.json["implementation"]["IterativePinv"] == "kernel"
    assert set(result.json["implementation"].values()) == {"kernel"}
    assert result.json["runtime"] == "ort"
    assert "effexport::IterativePinv ran as kernel" in result.err
    assert len(result.json["checks"]) > 10
    assert "equal to PyTorch" in result.err
    both = cli("verify", path, "--json")
    # each reference has checks of its own; function bodies are the file's, and checked once; so is PyTorch itself
    bodies = [check["name"] for check in result.json["checks"] if check["name"].startswith("function bod")]
    assert bodies == [*(f"function body of {op}" for op in FUSED["nystrom"]), "function bodies"]
    of_pytorch = [check["name"] for check in result.json["checks"] if check["name"].startswith("reference")]
    assert of_pytorch == ["reference repeatable", "reference", "reference"]
    assert len(both.json["checks"]) == 2 * len(result.json["checks"]) - len(bodies) - len(of_pytorch)
    one = cli("verify", path, "--case", "short", "--json")
    assert not [check for check in one.json["checks"] if check["name"].startswith("function bod")]


@pytest.mark.requires("native")
def test_verify_finds_a_broken_body_behind_a_good_kernel(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("nystrom", "attention", fused=False)
    model = onnx.load(str(artifact.model_path))
    (function,) = (function for function in model.functions if function.name == "IterativePinv")
    node = next(node for node in function.node if node.op_type == "Sub")
    node.input[0], node.input[1] = node.input[1], node.input[0]
    onnx.save(model, str(tmp_path / "other.onnx"))
    result = cli("verify", artifact.path, "--model", tmp_path / "other.onnx", "--json")
    assert result.code == 1
    assert set(result.json["implementation"].values()) == {"kernel"}
    failed = {check["name"] for check in result.json["checks"] if check["status"] == "failed"}
    assert failed == {"function body of IterativePinv", "function bodies"}
    assert "failed: function body of IterativePinv" in result.err


def test_verify_of_function_bodies(cli: Cli, built: Built) -> None:
    result = cli("verify", built("nystrom", "encoder").path, "--implementation", "body", "--json")
    assert result.code == 0, result.err
    assert result.json["implementation"]["IterativePinv"] == "body"
    assert set(result.json["implementation"].values()) == {"body"}
    assert "effexport::IterativePinv ran as body" in result.err


@pytest.mark.parametrize("factor", [1.01, pytest.param(float("nan"), marks=pytest.mark.slow)])
def test_verify_of_a_damaged_model_exits_1(cli: Cli, built: Built, tmp_path: Path, factor: float) -> None:
    artifact = built("softmax", "attention")
    model = onnx.load(str(artifact.model_path))
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
    array = numpy_helper.to_array(weight) * np.float32(factor)
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, str(tmp_path / "bad.onnx"))
    for reference in ("golden", "torch"):
        result = cli("verify", artifact.path, "--model", tmp_path / "bad.onnx", "--reference", reference, "--json")
        assert result.code == 1, result.err
        assert result.json["passed"] is False
        assert "NOT proven equal to PyTorch" in result.err
        assert "failed: arithmetic" in result.err
        assert "Traceback" not in result.err


def test_verify_of_another_healthy_file(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("lsh", "attention")
    copy = tmp_path / "copy.onnx"
    copy.write_bytes(artifact.model_path.read_bytes())
    result = cli("verify", artifact.path, "--model", copy, "--reference", "golden", "--json")
    assert result.code == 0
    assert result.json["model"] == str(copy)


def test_verify_of_a_model_with_other_inputs_is_an_error(cli: Cli, built: Built) -> None:
    other = built("softmax", "encoder").model_path
    result = cli("verify", built("softmax", "attention").path, "--model", other, "--reference", "golden")
    message = result.error()
    assert "is another model: its inputs are input_ids int64 [batch, seq], attention_mask" in message
    assert "are hidden_states float32 [batch, seq, 32], attention_mask" in message


TEXT_SIZES = {"one byte": b"x", "non-UTF-8": bytes(range(256)), "two windows and a bit": b"abc" * 50}


@pytest.mark.parametrize("name", TEXT_SIZES)
def test_text_becomes_windows(cli: Cli, built: Built, tmp_path: Path, name: str) -> None:
    data = TEXT_SIZES[name]
    (tmp_path / "in.txt").write_bytes(data)
    output = tmp_path / "out.npz"
    result = cli("run", built("lsh", "encoder").path, "--text", tmp_path / "in.txt", "--output", output, "--json")
    assert result.code == 0, result.err
    windows, width = -(-len(data) // 64), min(64, len(data))
    assert result.json["outputs"] == {"last_hidden_state": {"dtype": "float32", "shape": [windows, width, 32]}}
    assert re.search(rf"\b{len(data)} tokens? in", result.err)
    with np.load(output) as file:
        arrays = dict(file)
    assert set(arrays) == {"input_ids", "attention_mask", "last_hidden_state"}
    kept = arrays["input_ids"][arrays["attention_mask"] == 1]
    assert bytes((kept - 2).astype(np.uint8)) == data
    assert np.isfinite(arrays["last_hidden_state"]).all()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in.txt", "out.npz"]


def test_text_comes_from_standard_input_for_a_dash(
    cli: Cli, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"some text")))
    result = cli("run", built("lsh", "encoder").path, "--text", "-", "-o", tmp_path / "out.npz")
    assert (result.code, "9 tokens in" in result.out) == (0, True), result.err
    assert (tmp_path / "out.npz").is_file()


def test_arrays_are_asked_for_where_no_text_can_be_read(cli: Cli, built: Built) -> None:
    message = cli("run", built("lsh", "attention").path, "--text", __file__).error()
    assert "does not read text: its inputs are hidden_states, attention_mask; give arrays with --input" in message


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_run_on_arrays(cli: Cli, built: Built, tmp_path: Path) -> None:
    hidden = np.random.default_rng(0).standard_normal((2, 5, 32), dtype=np.float32)
    source = npz(tmp_path / "in.npz", hidden_states=hidden)
    output = tmp_path / "out.npz"
    output.write_text("old")
    result = cli("run", built("softmax", "attention").path, "--input", source, "--output", output, "--force", "--json")
    assert result.code == 0
    assert result.json["output_file"] == str(output)
    with np.load(output) as arrays:
        assert {name: arrays[name].shape for name in arrays} == {"last_hidden_state": (2, 5, 32)}
    assert "10 tokens in" in result.err
    dry = cli("run", built("softmax", "attention").path, "--input", source)
    assert "not saved; add --output FILE.npz to save the outputs" in dry.out


IDS = np.ones((2, 5), np.int64)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": IDS}, "unknown input 'ids'; did you mean 'input_ids'? Expected: input_ids int64 [batch, seq]"),
        ({"input_ids": IDS.astype(np.float32)}, "is float32 [2, 5]; expected input_ids int64 [batch, seq]"),
        ({"input_ids": IDS[0]}, "of rank 1; expected rank 2"),
        ({"input_ids": np.array([{"a": 1}], dtype=object)}, "is not an .npz file of plain arrays"),
        ({"input_ids": IDS, "attention_mask": IDS[:1]}, "expected the same batch in all inputs"),
        ({}, "input 'input_ids' is missing"),
    ],
)
def test_arrays_that_do_not_fit(cli: Cli, built: Built, tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    source, output = npz(tmp_path / "in.npz", **arrays), tmp_path / "out.npz"
    result = cli("run", built("lsh", "encoder").path, "--input", source, "--output", output)
    assert message in result.error()
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


def broken_npz(kind: str, path: Path) -> Path:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, input_ids=np.arange(4000).reshape(4, 1000))
    data = buffer.getvalue()
    if kind == "zip of something else":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "hello")
        return path
    if kind == "single array":
        with path.open("wb") as stream:
            np.save(stream, np.arange(5))
        return path
    path.write_bytes(
        {
            "empty": b"",
            "text": b"input_ids = 1",
            "truncated": data[: len(data) // 2],
            "damaged inside": data[:200] + bytes(64) + data[264:],
        }[kind]
    )
    return path


@pytest.mark.parametrize(
    "kind", ["empty", "text", "truncated", "damaged inside", "zip of something else", "single array"]
)
def test_files_that_are_no_arrays(cli: Cli, built: Built, tmp_path: Path, kind: str) -> None:
    source = broken_npz(kind, tmp_path / "in.npz")
    message = cli("run", built("lsh", "encoder").path, "--input", source).error()
    expected = {"single array": "holds a single array; expected an .npz", "zip of something else": "readme.txt"}
    assert expected.get(kind, "is not an .npz file of plain arrays") in message


def test_a_full_disk_leaves_no_half_output(
    cli: Cli, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = npz(tmp_path / "in.npz", input_ids=IDS), tmp_path / "out.npz"
    output.write_text("old")

    def full(stream: Any, *arguments: Any, **options: Any) -> None:
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    result = cli("run", built("lsh", "encoder").path, "--input", source, "--output", output, "--force")
    assert result.code == 1
    assert "out.npz: the disk is full (" in result.err
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz", "out.npz"]


@pytest.mark.requires("native")
def test_inspect_of_an_artifact_and_of_a_bare_file(cli: Cli, built: Built) -> None:
    artifact = built("lsh", "encoder")
    whole = cli("inspect", artifact.path, "--json").json
    assert whole["variant"] == "lsh"
    assert whole["parity"]["passed"] is True
    graph = whole["graph"]
    assert graph["inputs"][0] == {"name": "input_ids", "dtype": "int64", "dims": ["batch", "seq"]}
    assert graph["opset"] == 20
    kernel = {"count": 1, "body": True, "implementation": "kernel"}
    assert graph["custom_ops"] == {"LSHHash": kernel, "LSHSort": kernel, "LSHAttention": kernel}
    assert graph["ops"]["effexport::LSHSort"] == 1
    assert graph["bytes"] == artifact.model_path.stat().st_size
    assert graph["parameters"] > 258 * 32
    bare = cli("inspect", artifact.model_path, "--json").json
    assert bare["graph"] == graph
    assert "variant" not in bare
    text = cli("inspect", artifact.path)
    assert text.err == ""
    for word in (
        "input_ids int64 [batch, seq]",
        "effexport::LSHSort × 1, with its function body; runs here as kernel",
        "num_hashes=2",
        "parameters",
    ):
        assert word in text.out


def test_inspect_counts_external_weights(cli: Cli, built: Built) -> None:
    artifact = built("aft-simple", "attention", external_data=True)
    graph = cli("inspect", artifact.path, "--json").json["graph"]
    files = artifact.manifest.files
    assert graph["bytes"] == files["model.onnx"].bytes + files["model.onnx.data"].bytes


@pytest.mark.usefixtures("each_processor")
@pytest.mark.parametrize("each_processor", ["AVX2", "AMX"], indirect=True)  # the shortest and the longest text
def test_doctor_of_a_healthy_machine(cli: Cli) -> None:
    result = cli("doctor", "--json")
    assert result.code == 0
    assert result.json["ok"] is True
    assert {part["name"] for part in result.json["parts"]} >= {"torch", "onnx", "onnxruntime"}
    assert result.json["environment"]["effexport"] == __version__
    assert result.json["library"].keys() == {"path", "origin", "outdated", "cuda", "problem", "remedy"}
    assert result.json["loaded"] is False
    assert cli("doctor", "--load", "--json").json["loaded"] is True
    text = cli("doctor").out
    assert "everything needed is installed" in text
    assert max(map(len, text.splitlines())) <= 80
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    # cmake is named by its extra where it is missing
    for extra in extras.keys() - {"test", "dev"}:
        assert extra in ("kernels", "prebuilt") or f" {extra} " in text
    for tool in ("C++ compiler", "cmake", "nvcc", "GPU", "driver"):
        assert f"\n{tool} " in text
    ways = {way["runtime"]: way for way in result.json["tensorrt"]}
    assert list(ways) == ["trt", "trt-rtx", "ort-trt", "ort-rtx"]
    for way in ways.values():
        assert (way["release"] or f"none; add the extra {way['extra']}") in text


@pytest.mark.parametrize(
    ("driver", "found", "remedy"),
    [
        (None, None, "install a driver of CUDA 13.0 or later"),
        ((12, 9), "CUDA 12.9: too old, install a driver of CUDA 13.0 or later", None),
        ((13, 0), "CUDA 13.0", None),
        ((14, 1), "CUDA 14.1", None),
    ],
)
def test_doctor_says_which_driver_tensorrt_plugins_need(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int] | None, found: str | None, remedy: str | None
) -> None:
    monkeypatch.setattr("effexport.plugins.building.toolchain.driver_cuda", lambda: driver)
    (tool,) = [tool for tool in cli("doctor", "--json").json["tools"] if tool["name"] == "driver"]
    assert tool == {"name": "driver", "purpose": "run TensorRT plugins", "found": found, "remedy": remedy}
    assert (found or "none; install a driver of").split(":")[0] in cli("doctor").out


def test_doctor_finds_a_part_that_does_not_load_if_asked(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openvino.py").write_text("raise ImportError('libopenvino.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "openvino", raising=False)
    monkeypatch.setattr("effexport.base.runtimes.Package.version", property(lambda package: "1.0"))
    assert cli("doctor").code == 0
    broken = cli("doctor", "--load")
    assert broken.code == 1
    assert "openvino: does not load: libopenvino.so is missing" in broken.out


def test_doctor_takes_optional_parts_that_are_missing_for_no_problem(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = {"torch", "onnxscript", "tensorrt", "tensorrt_rtx", "openvino", "cuda.bindings", "ray"}
    left_out |= {"onnxruntime_ep_nv_tensorrt_rtx", "tokenizers", "transformers", "cryptography", "sigstore"}
    for module in left_out:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(
        "effexport.base.runtimes.Package.version", property(lambda package: None if package.optional else "1.0")
    )
    result = cli("doctor", "--json")
    assert result.code == 0, result.err
    optional = {part["name"]: part for part in result.json["parts"] if part["optional"]}
    # onnxruntime for GPUs, for OpenVINO, and its plugins with CUDA, which are one module
    assert optional.keys() == left_out | {"onnxruntime", "onnxruntime_ep_cuda", "uvicorn"}
    assert all(part["problem"] == "missing" for part in optional.values())
    assert optional["tensorrt_rtx"]["remedy"] == "pip install 'effexport[rtx]'"


def test_doctor_of_a_machine_without_a_runtime(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = cli("doctor", "--json")
    assert result.code == 1
    (part,) = [part for part in result.json["parts"] if not part["works"] and not part["optional"]]
    assert part["name"] == "onnxruntime"
    assert part["remedy"] == "pip install 'effexport[cpu]'"
    text = cli("doctor")
    assert text.code == 1
    assert "pip install 'effexport[cpu]'" in text.out


def test_a_missing_runtime_names_the_extra(
    cli: Cli, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, source = built("lsh", "encoder").path, npz(tmp_path / "in.npz", input_ids=IDS)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr("effexport.base.runtimes.Package.version", None)
    for arguments in (
        ["run", path, "--input", source],
        ["verify", path, "--reference", "golden"],
        ["build", "--variant", "lsh", "-o", tmp_path / "new"],
    ):
        assert "pip install 'effexport[cpu]'" in cli(*arguments).error()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(cli: Cli, shell: str) -> None:
    result = cli("completion", shell)
    assert result.code == 0
    assert "_EFFEXPORT_COMPLETE" in result.out
    assert cli("completion", shell, "--json").json == {"shell": shell, "script": result.out.removesuffix("\n")}


def test_completion_completes() -> None:
    environment = os.environ | {"_EFFEXPORT_COMPLETE": "bash_complete", "COMP_WORDS": "effexport bu", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from effexport.cli.main import main; main()"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stdout.strip() == "plain,build"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("build --variant l", ["linear", "lsh"]),
        ("build --target ", ["trt", "trt-rtx", "none"]),
        ("build --task m", ["masked-lm", "multiple-choice"]),
        ("verify DIR --reference g", ["golden"]),
        ("run DIR --runtime trt", ["trt", "trt-rtx"]),
        ("report DIR --format ", ["html", "json", "markdown", "junit"]),
        ("bench --runtimes torch,op", ["torch,openvino"]),
        ("bench --preset aft", ["aft-table"]),
        ("package DIR --kind ", ["cpu", "gpu"]),
        ("plugins in", ["info"]),
        ("completion z", ["zsh"]),
    ],
)
def test_the_shell_completes_values(words: str, completed: list[str]) -> None:
    *before, incomplete = words.split(" ")
    items = ShellComplete(effexport_cli, {}, "effexport", "_EFFEXPORT_COMPLETE").get_completions(before, incomplete)
    assert [item.value for item in items] == completed


def test_debug_shows_the_traceback_of_an_error_and_nothing_else_does(cli: Cli, tmp_path: Path) -> None:
    plain = cli("inspect", tmp_path / "absent")
    assert "Traceback" not in plain.err
    debug = cli("inspect", tmp_path / "absent", "--debug")
    assert debug.code == 2
    assert "Traceback (most recent call last)" in debug.err
    assert "effexport: error: nothing is at " in debug.err


def test_an_error_that_quotes_a_file_is_short_and_does_not_control_the_terminal(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise UserError("a name\n\x1b[2J" + "x" * 5_000, "another line")

    monkeypatch.setattr(effexport_cli, "main", fail)
    first, second = cli("list").err.splitlines()
    assert first.startswith("effexport: error: a name\\n\\x1b[2Jxxx")
    assert len(first) < 1_600
    assert second == "another line"


def test_a_flag_of_thousands_of_digits_is_not_repeated_in_full(cli: Cli) -> None:
    result = cli("build", "--variant", "lsh", "--dim", "9" * 5_000)
    assert result.code == 2
    assert len(result.err) < 1_000
    assert len(result.err.splitlines()) == 1


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from effexport.cli.main import main

    def bug(*arguments: object, **options: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("effexport.base.environment.examine", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["doctor"])


@pytest.mark.parametrize(
    ("stop", "code", "word"), [(KeyboardInterrupt(), 130, "interrupted"), (Terminated(15), 143, "terminated")]
)
def test_a_signal_during_the_import_of_a_module_in_cpp_is_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, stop: BaseException, code: int, word: str
) -> None:
    def imported(*arguments: object, **options: object) -> None:
        raise ImportError("initialization failed") from stop  # as pybind11 does

    monkeypatch.setattr("effexport.base.environment.examine", imported)
    assert cli("doctor").error(code) == word


def test_an_interrupt_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("effexport.base.environment.examine", interrupt)
    assert cli("doctor").error(130) == "interrupted"


def test_a_failed_stage_exits_1_and_leaves_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from effexport.base.errors import StageError

    def fail(*arguments: object, **options: object) -> None:
        raise StageError("export", "planted")

    monkeypatch.setattr(importlib.import_module("effexport.export.onnx_from_module"), "onnx_from_module", fail)
    arguments = ["build", "--variant", "softmax", *SMALL, "-o", tmp_path / "out"]
    assert cli(*arguments).error(1) == "export: planted"
    assert cli(*arguments, "--json").json == {"error": "export: planted", "exit_code": 1}
    assert list(tmp_path.iterdir()) == []


def test_signs_that_an_encoding_lacks_are_written_as_their_numbers() -> None:
    command = [sys.executable, "-m", "effexport", "doctor"]
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment)
    assert b"\\u2013" in done.stdout
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {"LC_ALL": "C"}),
        ([], {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        (["-X", "utf8=0"], {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}),
        (["-E"], {"LC_ALL": "C"}),
        ([], {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}),
    ],
)
def test_names_in_utf_8_work_in_the_locale_c(
    options: list[str], settings: dict[str, str], built: Built, tmp_path: Path
) -> None:
    folder = tmp_path / "modèle 日本"
    folder.symlink_to(built("softmax", "attention").path)
    outputs = []
    for arguments in (["inspect", folder, "--json"], ["inspect", folder], ["inspect", tmp_path / "modele 日本"]):
        command = [sys.executable, *options, "-m", "effexport", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, env={**os.environ, **settings})
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        outputs.append(done)
    assert json.loads(outputs[0].stdout)["path"] == str(folder)
    name = str(folder).encode("ascii", "backslashreplace") if "PYTHONIOENCODING" in settings else str(folder).encode()
    assert name in outputs[1].stdout
    assert outputs[2].returncode == 2
    assert outputs[2].stderr.count(b"effexport: error: nothing is at ") == 1


def test_a_name_that_python_cannot_use_in_its_locale_is_one_error_of_the_functions(tmp_path: Path) -> None:
    code = (
        "import effexport\ntry:\n    effexport.load('\\u00e9')\nexcept effexport.UserError as error:\n    print(error)"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith(r"path is '\xe9', and in this locale Python has ascii for the names of files;"), done
