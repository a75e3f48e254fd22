"""Operators of users: those of installed packages, and those in folders that need not be installed.

An operator package is a folder that is a Python package. Its `__init__.py` has the row `OP` and loads no framework; the
other files are those of our own operators. An installed package declares it as an entry point of the group
`effexport.operators`, such as `gated_rms_norm = "gated_rms_norm:OP"`. docs/kernels.md explains it to users.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from effexport.plugins.errors import LibraryError
from effexport.plugins.ops import FLOAT_TYPES, OPS, Op

GROUP = "effexport.operators"
REQUIRED_FILES = ("op.py", "kernel.h", "kernel_cpu.cc", "ort.cc")
# What op.py defines.
IN_OP = ("SIGNATURE", "reference", "onnx_function_body")
ELEMENT_TYPES = (*FLOAT_TYPES, "int32")


def user_operators(folders: Iterable[str], *, strict: bool = False) -> tuple[Op, ...]:
    """The operators of installed packages, then those in the folders.

    A folder that is gone, or whose operator is installed by now, is passed over; strict: it is an error.
    Raises LibraryError for an operator that cannot be used.
    """
    installed = {op.torch_name: op for op in installed_operators()}
    found = [(op, f"the installed operator in {op.user_folder}") for op in installed.values()]
    for folder in map(Path, folders):
        known = installed.get(folder.name)
        if strict and known and known.user_folder != folder:
            raise LibraryError(
                f"--with {folder}: an installed package has an operator {known.torch_name}, in {known.user_folder}, "
                "which is compiled without --with. Leave --with out, or uninstall that package"
            )
        if not known and (strict or folder.is_dir()):
            found.append((operator_of_folder(folder), f"--with {folder}"))
    return found_once(found)


@functools.cache
def installed_operators() -> tuple[Op, ...]:
    """The operators that installed packages declare, by name. Raises LibraryError, which names the package."""
    found: list[tuple[Op, str]] = []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else "unknown"
        where = f"operator {entry.name} of the installed package {package}"
        try:
            row = entry.load()
        except Exception as error:  # code of the user's, which may raise anything
            raise LibraryError(
                f"{where} does not load: {type(error).__name__}: {error}; expected {entry.value} to be its row. "
                f"Repair {package}, or uninstall it"
            ) from error
        found.append((checked(row, where), where))
        if entry.name != row.torch_name:
            raise LibraryError(
                f"{where} is named {row.torch_name} in {entry.value}; expected one name. Correct the entry point"
            )
    return found_once(found)


def operator_of_folder(folder: Path) -> Op:
    """The operator in a folder, which is imported as the package that it is. Raises LibraryError."""
    where = f"--with {folder}"
    if not folder.is_dir():
        raise LibraryError(f"{where}: there is no such folder; expected the folder of an operator, with op.py in it")
    if not (folder / "op.py").is_file():
        inside = ", ".join(str(path.parent) for path in sorted(folder.glob("*/op.py")))
        remedy = f"name the folder in it: {inside}" if inside else "see `Your own operator` in docs/kernels.md"
        raise LibraryError(f"{where}: the folder has no op.py; expected the folder of an operator: {remedy}")
    names, root = [folder.name], folder.parent
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    package = ".".join(names)
    importlib.invalidate_caches()  # the folder may be younger than Python's list of the files there
    sys.path.insert(0, str(root))
    try:
        module = importlib.import_module(package)
    except Exception as error:  # code of the user's, which may raise anything
        raise LibraryError(f"{where}: importing {package} failed with {type(error).__name__}: {error}") from error
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have removed it
            sys.path.remove(str(root))
    if Path(module.__file__ or "").resolve().parent != folder.resolve():
        raise LibraryError(
            f"{where}: Python finds {package} in {module.__file__ or 'another folder'}; expected it there, with an "
            "__init__.py. Rename the folder, or add the file"
        )
    return checked(getattr(module, "OP", None), where)


def loaded(op: Op) -> ModuleType:
    """The `op.py` of an operator. Raises LibraryError for one of a user's that does not load, or lacks a part."""
    if not op.package:
        return op.load()
    try:
        module = op.load()
    except Exception as error:  # code of the user's, which may raise anything
        place = f"{op.user_folder / 'op.py'} does not load: {type(error).__name__}: {error}"
        raise LibraryError(f"{place}; correct it") from error
    if missing := [name for name in IN_OP if not hasattr(module, name)]:
        raise LibraryError(f"{module.__file__} lacks {', '.join(missing)}; expected {', '.join(IN_OP)}. Add it")
    return module


def checked(row: object, where: str) -> Op:
    """The row of a user's operator. Raises LibraryError if its names are taken or wrong, or if files are missing."""
    for problem in _problems(row):
        raise LibraryError(f"{where}: {problem}")
    assert isinstance(row, Op)
    return row


def _problems(row: object) -> Iterable[str]:
    if not isinstance(row, Op):
        example = 'OP = Op("my_op", "MyOp", package=__name__)'
        yield f"its row is a {type(row).__name__}; expected, in __init__.py, {example}, of effexport.plugins.Op"
        return
    if row.package not in sys.modules:
        yield f"package is {row.package!r}; expected the package that holds the row: write package=__name__"
    if row.user_folder.name != row.torch_name or not re.fullmatch("[a-z][a-z0-9_]*", row.torch_name):
        yield (
            f"its folder is {row.user_folder.name} and its name {row.torch_name!r}; expected one word of lower-case "
            "letters, digits and underscores, which is also its C++ namespace"
        )
    if (Path(__file__).parent / row.torch_name).exists() or row.onnx_name in OPS:
        yield f"effexport itself has {row.torch_name} or {row.onnx_name}; expected other names. Rename the operator"
    if not re.fullmatch("[A-Z][A-Za-z0-9]*", row.onnx_name):
        yield f"its ONNX name is {row.onnx_name!r}; expected letters and digits, the first an upper-case letter"
    if _is_standard(row.onnx_name):
        yield f"ONNX has a standard operator {row.onnx_name}, for which tools may take it; rename the operator"
    if not row.element_types or not set(row.element_types) <= set(ELEMENT_TYPES):
        yield f"element_types is {row.element_types!r}; expected some of {', '.join(ELEMENT_TYPES)}"
    if missing := [name for name in REQUIRED_FILES if not (row.user_folder / name).is_file()]:
        yield f"{row.user_folder} lacks {', '.join(missing)}; expected {', '.join(REQUIRED_FILES)}. Add the file"


def _is_standard(onnx_name: str) -> bool:
    import onnx.defs

    return bool(onnx.defs.has(onnx_name))


def found_once(found: Sequence[tuple[Op, str]]) -> tuple[Op, ...]:
    """The operators, each with where it was found. Raises LibraryError if two have a name in common."""
    places: dict[str, str] = {}
    for op, where in found:
        for name in (op.torch_name, op.onnx_name):
            if name in places:
                raise LibraryError(f"{where} and {places[name]} are both named {name}; uninstall or rename one of them")
            places[name] = where
    return tuple(op for op, _ in found)
