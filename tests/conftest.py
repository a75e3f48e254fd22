"""The declared-requirements rule: nothing that a run says must be present is skipped silently.

EFFEXPORT_REQUIRE lists optional parts, separated by commas: EFFEXPORT_REQUIRE=torch,onnx,ort,transformers.
A test marked `requires("ort")` is skipped where onnxruntime is missing, unless the list names "ort": then the
run stops before the first test.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import pytest

VARIABLE = "EFFEXPORT_REQUIRE"
# part → (module, distributions that provide it)
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch": ("torch", ("torch",)),
    "onnx": ("onnx", ("onnx",)),
    "ort": ("onnxruntime", ("onnxruntime", "onnxruntime-gpu")),
    "transformers": ("transformers", ("transformers",)),
}
REQUIRED = pytest.StashKey[tuple[str, ...]]()


def parse_required(text: str) -> tuple[str, ...]:
    """The parts that EFFEXPORT_REQUIRE names. Raises UsageError for unknown, empty or repeated names."""
    if not text.strip():
        return ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in PARTS:
            raise pytest.UsageError(f"{VARIABLE} names {name!r}; expected a list of: {', '.join(PARTS)}")
        if names.count(name) > 1:
            raise pytest.UsageError(f"{VARIABLE} names {name!r} twice: {text!r}")
    return names


def is_present(part: str) -> bool:
    """True when the part's module is installed. It is not imported: a broken one fails in its tests."""
    try:
        spec = importlib.util.find_spec(PARTS[part][0])
    except (ImportError, ValueError):
        return False
    # a folder left behind by an uninstalled package has no loader of its own
    return spec is not None and spec.origin is not None


def version_of(part: str) -> str:
    for distribution in PARTS[part][1]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REQUIRED] = parse_required(os.environ.get(VARIABLE, ""))


def pytest_sessionstart(session: pytest.Session) -> None:
    missing = [part for part in session.config.stash[REQUIRED] if not is_present(part)]
    if missing:
        modules = ", ".join(PARTS[part][0] for part in missing)
        pytest.exit(
            f"{VARIABLE} requires {', '.join(missing)}, but there is no {modules}; install what is missing, "
            f"or take it out of {VARIABLE}",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("requires"):
        for part in marker.args:
            if part not in PARTS:
                pytest.fail(
                    f"requires({part!r}) names no known part; expected one of: {', '.join(PARTS)}",
                    pytrace=False,
                )
            if is_present(part):
                continue
            reason = f"{PARTS[part][0]} is not installed"
            if part in item.config.stash[REQUIRED]:
                pytest.fail(f"{reason}, but {VARIABLE} names {part}", pytrace=False)
            pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    required = config.stash[REQUIRED]
    present = ", ".join(f"{part} {version_of(part)}" for part in required) or f"none ({VARIABLE} is not set)"
    terminalreporter.write_line(f"required parts, all present: {present}" if required else f"required parts: {present}")
    optional_missing = [part for part in PARTS if part not in required and not is_present(part)]
    if optional_missing:
        terminalreporter.write_line(f"missing, tests skipped: {', '.join(optional_missing)}")
