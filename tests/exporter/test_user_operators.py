"""Operators of users: where they are found, how they get into the kernel library, and what is wrong with others."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import effexport
from effexport.base.errors import KernelWarning, StageError, UserError
from effexport.plugins.building.build import build_library
from effexport.plugins.building.library import find_library, known_ops
from effexport.plugins.errors import LibraryError
from effexport.plugins.ops import OPS
from effexport.plugins.user_operators import GROUP, REQUIRED_FILES, installed_operators, loaded, operator_of_folder
from effexport.runners.options import RunOptions
from effexport.runners.ort.kernels import kernels_for

if TYPE_CHECKING:
    from fake_machine import Machine

pytest_plugins = ["fake_machine"]
pytestmark = pytest.mark.requires("onnx")
# a package is imported once per process, so each test has names of its own
NUMBERS = itertools.count()
ROW = 'from effexport.plugins import Op\nOP = Op("{0}", "{1}", package=__name__)\n'
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_operator"
Cli = Callable[..., Any]


def names() -> tuple[str, str]:
    number = next(NUMBERS)
    return f"planted_op_{number}", f"PlantedOp{number}"


def write_operator(parent: Path, row: str = ROW, folder: str | None = None) -> Path:
    """A folder with the files of an operator. row: contents of __init__.py."""
    torch_name, onnx_name = names()
    path = parent / (folder or torch_name)
    path.mkdir(parents=True)
    for name in REQUIRED_FILES:
        (path / name).write_text(f"// {name}\n")
    (path / "__init__.py").write_text(row.format(torch_name, onnx_name))
    return path


@pytest.fixture(autouse=True)
def no_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache without builds, in which no operator was asked for before."""
    monkeypatch.setenv("EFFEXPORT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """install(package, value, name) is what pip does with an entry point `name = value` of a package."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    installed_operators.cache_clear()

    def install(package: str, value: str, name: str) -> None:
        folder = tmp_path / "site" / f"{package}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {value}\n")
        installed_operators.cache_clear()

    yield install
    installed_operators.cache_clear()


def test_an_installed_operator_is_known_by_its_entry_point(tmp_path: Path, install: Callable[..., None]) -> None:
    folder = write_operator(tmp_path / "site")
    install("planted", f"{folder.name}:OP", folder.name)
    (op,) = installed_operators()
    assert (op.torch_name, op.user_folder) == (folder.name, folder)
    assert known_ops() == OPS | {op.onnx_name: op}


def test_starting_effexport_reads_no_entry_points() -> None:
    code = (
        "import importlib.metadata; importlib.metadata.entry_points = None\n"
        "import effexport, effexport.plugins\nfrom effexport.cli.main import main\nmain(['--help'])"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


def test_a_broken_entry_point_is_one_error_that_names_the_package(
    tmp_path: Path, install: Callable[..., None], cli: Cli
) -> None:
    folder = write_operator(tmp_path / "site", "import no_such_module\n")
    install("some-planted-package", f"{folder.name}:OP", folder.name)
    with pytest.raises(LibraryError) as failure:
        known_ops()
    assert str(failure.value) == (
        f"operator {folder.name} of the installed package some-planted-package does not load: ModuleNotFoundError: "
        f"No module named 'no_such_module'; expected {folder.name}:OP to be its row. Repair some-planted-package, or "
        "uninstall it"
    )
    assert "some-planted-package does not load" in cli("plugins", "build").error(2)


def test_two_packages_with_one_operator_are_refused_by_name(tmp_path: Path, install: Callable[..., None]) -> None:
    folder = write_operator(tmp_path / "site")
    for package in ("first", "second"):
        install(package, f"{folder.name}:OP", folder.name)
    with pytest.raises(LibraryError, match=r"installed package (first|second) and operator .* (first|second) are both"):
        known_ops()


def test_an_entry_point_has_the_name_of_its_operator(tmp_path: Path, install: Callable[..., None]) -> None:
    folder = write_operator(tmp_path / "site")
    install("planted", f"{folder.name}:OP", "another")
    with pytest.raises(
        LibraryError, match=r"operator another of the installed package planted is named planted_op_\d+"
    ):
        known_ops()


BAD_ROWS = {
    "": "its row is a NoneType; expected, in __init__.py, OP = Op(",
    "OP = 1": "its row is a int; expected, in __init__.py, OP = Op(",
    "raise RuntimeError('planted')": "failed with RuntimeError: planted",
    ROW.replace("__name__", "'absent'"): "package is 'absent'; expected the package that holds the row",
    ROW.replace("{0}", "another"): "and its name 'another'; expected one word of lower-case letters",
    ROW.replace("{1}", "LSHSort"): "effexport itself has planted_op_",
    ROW.replace("{1}", "RMSNormalization"): "ONNX has a standard operator RMSNormalization",
    ROW.replace("{1}", "my_op"): "its ONNX name is 'my_op'; expected letters and digits",
    ROW.replace("package", "element_types=('float64',), package"): r"element_types is ('float64',); expected some of",
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.items())
def test_a_row_that_cannot_work_is_refused(tmp_path: Path, row: str, message: str) -> None:
    folder = write_operator(tmp_path, row)
    with pytest.raises(LibraryError) as failure:
        operator_of_folder(folder)
    assert str(failure.value).startswith(f"--with {folder}: ")
    assert message in str(failure.value)


def test_the_name_of_one_of_our_folders_is_refused(tmp_path: Path) -> None:
    folder = write_operator(tmp_path / "user", ROW.replace("{0}", "native"), "native")
    with pytest.raises(LibraryError, match="effexport itself has native"):
        operator_of_folder(folder)


def test_folders_that_are_no_operators_say_what_is_missing(tmp_path: Path, cli: Cli) -> None:
    folder = write_operator(tmp_path)
    absent = tmp_path / "absent"
    assert f"--with {absent}: there is no such folder" in cli("plugins", "build", "--with", absent).error(2)
    error = cli("plugins", "build", "--with", tmp_path).error(2)
    assert f"--with {tmp_path}: the folder has no op.py; expected the folder of an operator: name the folder" in error
    assert str(folder) in error
    (folder / "ort.cc").unlink()
    assert f"{folder} lacks ort.cc; expected op.py, kernel.h, kernel_cpu.cc, ort.cc. Add the file" in cli(
        "plugins", "build", "--with", folder
    ).error(2)


def test_a_folder_inside_a_package_is_imported_under_its_full_name(tmp_path: Path) -> None:
    (tmp_path / "planted_parent").mkdir()
    (tmp_path / "planted_parent" / "__init__.py").touch()
    folder = write_operator(tmp_path / "planted_parent")
    assert operator_of_folder(folder).package == f"planted_parent.{folder.name}"
    assert str(tmp_path) not in sys.path


def test_a_folder_that_hides_behind_another_package_is_refused(tmp_path: Path) -> None:
    folder = write_operator(tmp_path / "one")
    operator_of_folder(folder)
    other = write_operator(tmp_path / "two", folder=folder.name)
    with pytest.raises(LibraryError, match=f"Python finds {folder.name} in {folder}"):
        operator_of_folder(other)


@pytest.mark.requires("native")
def test_a_library_with_an_operator_is_found_without_flags(machine: Machine, tmp_path: Path) -> None:
    folder = write_operator(tmp_path)
    library = build_library(folders=[folder])
    assert f"-DEFFEXPORT_OPERATORS={folder}" in machine.cmake_calls()[0]
    assert library.info is not None
    (built,) = library.info.operators
    assert (built.torch_name, built.cuda) == (folder.name, False)
    found = find_library()
    assert found == dataclasses.replace(library, built_now=False)
    assert built.onnx_name in known_ops()
    build_library()
    assert built.onnx_name not in known_ops()
    assert not build_library(folders=[folder]).built_now
    assert built.onnx_name in known_ops()


@pytest.mark.requires("native")
def test_an_edited_operator_makes_the_library_outdated_and_not_one_without_it_current(
    machine: Machine, tmp_path: Path
) -> None:
    folder = write_operator(tmp_path / "a folder")
    build_library()
    library = build_library(folders=[folder])
    (folder / "kernel_cpu.cc").write_text("// edited")
    found = find_library()
    assert found is not None
    assert (found.path, found.outdated) == (library.path, True)
    assert found.rebuild_command == f"effexport plugins build --with '{folder}'"
    assert build_library(folders=[folder]).path != library.path
    shutil.rmtree(folder)
    found = find_library()
    assert found is not None
    assert found.outdated
    assert known_ops() == OPS


@pytest.mark.requires("native")
def test_an_installed_operator_is_compiled_without_flags_and_not_twice(
    machine: Machine, tmp_path: Path, install: Callable[..., None], cli: Cli
) -> None:
    folder = write_operator(tmp_path / "site")
    before = build_library()
    install("planted", f"{folder.name}:OP", folder.name)
    found = find_library()
    assert found is not None
    assert found.outdated
    library = build_library()
    assert library.path != before.path
    assert library.info is not None
    assert [built.torch_name for built in library.info.operators] == [folder.name]
    assert not build_library(folders=[folder]).built_now
    info = cli("plugins", "info", "--json").json
    onnx_name = library.info.operators[0].onnx_name
    assert info["operators"][-1] == {
        "name": onnx_name,
        "element_types": ["float32", "float16", "bfloat16"],
        "providers": ["CPU"],
    }
    copy = write_operator(tmp_path / "copy", folder=folder.name)
    with pytest.raises(LibraryError, match=f"an installed package has an operator {folder.name}, in {folder}"):
        build_library(folders=[copy])


@pytest.mark.requires("native")
def test_a_library_records_which_operators_have_a_cuda_kernel(machine: Machine, nvcc: Path, tmp_path: Path) -> None:
    first, second = write_operator(tmp_path), write_operator(tmp_path)
    (second / "kernel_cuda.cu").write_text("// a kernel")
    info = build_library(cuda=True, folders=[first, second]).info
    assert info is not None
    assert {built.torch_name: built.cuda for built in info.operators} == {first.name: False, second.name: True}


@pytest.mark.requires("native")
def test_a_compile_error_is_shown_with_its_line(machine: Machine, tmp_path: Path, cli: Cli) -> None:
    folder = write_operator(tmp_path)
    (machine.bin / "cmake.error").write_text(f"{folder}/ort.cc:12:3: error: 'Kernal' was not declared")
    error = cli("plugins", "build", "--with", folder).error(1)
    assert f"{folder}/ort.cc:12:3: error: 'Kernal' was not declared" in error


@pytest.mark.requires("native", "ort")
def test_an_operator_that_the_library_lacks_runs_as_its_body_with_a_warning(machine: Machine, tmp_path: Path) -> None:
    folder = write_operator(tmp_path)
    op = operator_of_folder(folder).onnx_name
    library = build_library()
    with pytest.warns(KernelWarning, match=f"has no kernel of {op}.*effexport plugins build"):
        kernels = kernels_for((op, "LSHSort"), (), RunOptions())
    assert (kernels.ops, kernels.bodies) == (("LSHSort",), (op,))
    assert kernels.library is not None
    assert kernels.library.path == library.path
    with pytest.raises(UserError, match=f"kernels were requested, but .* has no kernel of {op}"):
        kernels_for((op,), (), RunOptions(implementation="kernel"))
    build_library(folders=[folder])
    assert kernels_for((op, "LSHSort"), (), RunOptions(implementation=f"{op}=kernel")).ops == (op, "LSHSort")


@pytest.mark.requires("native", "ort")
def test_an_operator_without_a_cuda_kernel_runs_as_its_body_on_a_gpu(
    machine: Machine, nvcc: Path, tmp_path: Path
) -> None:
    folder = write_operator(tmp_path)
    op = operator_of_folder(folder).onnx_name
    build_library(cuda=True, folders=[folder])
    assert kernels_for((op, "LSHSort"), (), RunOptions(runtime="ort-cuda")).bodies == (op,)


@pytest.mark.requires("torch", "ort")
def test_a_module_with_an_operator_is_exported_with_its_body(
    tmp_path: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    module = importlib.import_module("gated_model").make()
    settings = RunOptions(implementation="body")
    with pytest.raises(StageError, match="No installed package declares effexport::gated_rms_norm; install the one"):
        effexport.build(module=module, output=tmp_path / "unknown", settings=settings)
    install("gated-rms-norm", "gated_rms_norm:OP", "gated_rms_norm")
    result = effexport.build(module=module, output=tmp_path / "known", settings=settings)
    assert result.artifact.manifest.custom_ops == {"EluLinearAttention": 1, "GatedRMSNorm": 1}
    passed = [check.kind for check in result.report.checks if check.status == "passed"]
    assert "function body of GatedRMSNorm" in passed


@pytest.mark.requires("torch")
def test_the_gradient_of_the_example_is_that_of_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.syspath_prepend(str(EXAMPLE))
    op = importlib.import_module("gated_rms_norm.op")
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5), (2, 3, 5), (5,))]
    assert torch.autograd.gradcheck(lambda *given: op.gated_rms_norm(*given, 1e-5), tensors)


def test_an_op_file_that_does_not_load_or_lacks_a_part_is_named(tmp_path: Path) -> None:
    broken, partial = (write_operator(tmp_path) for _ in range(2))
    with pytest.raises(LibraryError, match=r"op\.py does not load: SyntaxError: .*; correct it"):
        loaded(operator_of_folder(broken))
    (partial / "op.py").write_text("SIGNATURE = reference = None\n")
    with pytest.raises(LibraryError, match=r"op\.py lacks onnx_function_body; expected SIGNATURE, reference, onnx"):
        loaded(operator_of_folder(partial))
