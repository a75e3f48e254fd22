"""Rules for the whole suite: which tests need what, which of them are slow, and which files take longest.

EFFEXPORT_REQUIRE lists optional parts, separated by commas: EFFEXPORT_REQUIRE=torch,onnx,ort,transformers,native.
A test marked `requires("ort")` is skipped if onnxruntime is missing, unless the list names "ort": then the run stops
before the first test. So a run never skips silently what it says must be present.

Tests marked `slow` run with scripts/test.sh --all only. A test that requires one of SLOW_PARTS is slow by itself.
Tests marked `soak` run with scripts/soak.sh only, and so do the rows that soak.toml leaves out.

No test sees the instructions of the machine's processor: all stand on the plainest of PROCESSORS, and those of what
depends on them ask for `each_processor`. Child processes of tests see the machine; what is asserted of them holds on
every processor.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from effexport.base.machine import Processor
from effexport.base.runtimes import RUNTIMES

if TYPE_CHECKING:
    import page_browser

ROOT = Path(__file__).resolve().parents[1]
SOAK = Path(__file__).with_name("soak.toml")
VARIABLE = "EFFEXPORT_REQUIRE"
# As in scripts/portability/environments.py, which is not there when this file is tested by itself.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Part(Protocol):
    """An optional part that tests may need."""

    name: str

    def is_present(self) -> bool: ...

    def version(self) -> str: ...


@dataclass(frozen=True)
class Package:
    """A Python module that one of several distributions provides."""

    name: str
    distributions: tuple[str, ...]

    def is_present(self) -> bool:
        """True if the module is installed. It is not imported: a broken one fails in its tests."""
        try:
            spec = importlib.util.find_spec(self.name)
        except (ImportError, ValueError):
            return False
        # a folder left behind by an uninstalled package has no loader of its own
        return spec is not None and spec.origin is not None

    def version(self) -> str:
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "of unknown version"


@dataclass(frozen=True)
class Packages:
    """Several modules that are only useful together."""

    members: tuple[Package, ...]

    @property
    def name(self) -> str:
        return " with ".join(member.name for member in self.members)

    def is_present(self) -> bool:
        return all(member.is_present() for member in self.members)

    def version(self) -> str:
        return " with ".join(f"{member.name} {member.version()}" for member in self.members)


class KernelLibrary:
    """The library that `effexport plugins build` makes from the present sources."""

    name = "kernel library of the present sources (effexport plugins build)"

    def is_present(self) -> bool:
        from effexport.plugins.building.library import LibraryError, find_library

        try:
            library = find_library()
        except LibraryError as error:  # EFFEXPORT_LIBRARY does not name a file: whoever set it wants to know
            raise pytest.UsageError(str(error)) from error
        return library is not None and not library.outdated

    def version(self) -> str:
        from effexport.plugins.building.library import find_library

        library = find_library()
        if library is None or library.info is None:
            return "given by EFFEXPORT_LIBRARY"
        return "for CPU and CUDA" if library.info.has_cuda else "for the CPU only"


class CudaCompiler:
    """nvcc, found as the build finds it."""

    name = "nvcc"

    def is_present(self) -> bool:
        from effexport.plugins.building.toolchain import find_nvcc

        return find_nvcc() is not None

    def version(self) -> str:
        from effexport.plugins.building.toolchain import find_nvcc

        return str(find_nvcc())


class Browser:
    """Chromium, or Chrome, which shares its protocol."""

    name = "Chromium (chromium, chromium-browser or google-chrome on PATH)"

    @staticmethod
    def path() -> str | None:
        found = map(shutil.which, BROWSERS)
        return next((path for path in found if path), None)

    def is_present(self) -> bool:
        return self.path() is not None

    def version(self) -> str:
        return str(self.path())


class TensorRTBindings:
    """TensorRT's own Python packages, in environments that scripts/conformance.sh made from the present files."""

    name = "environment with TensorRT's Python packages (scripts/conformance.sh)"

    def is_present(self) -> bool:
        return all(self._is_fresh(major) for major in ("11", "10"))

    def version(self) -> str:
        texts = [self._requirements(major).read_text(encoding="utf-8") for major in ("11", "10")]
        return " and ".join(re.search(r"^tensorrt_\w+_bindings==(\S+)", text, re.MULTILINE)[1] for text in texts)

    def _requirements(self, major: str) -> Path:
        return ROOT / "scripts" / f"conformance-requirements-{major}.txt"

    def _is_fresh(self, major: str) -> bool:
        """As make_environment in scripts/test_environment.sh decides."""
        try:
            stamp = (ROOT / ".venv-tensorrt" / major / "effexport.stamp").read_text(encoding="utf-8").strip()
            files = (self._requirements(major), ROOT / "tests" / "plugins" / "tensorrt" / "shim.c")
            made_from = b"".join([f"{ROOT}\n".encode(), *(path.read_bytes() for path in files)])
            return stamp == hashlib.sha256(made_from).hexdigest()
        except OSError:
            return False


@dataclass(frozen=True)
class Environment:
    """An environment that scripts/test_environment.sh makes of the present requirements: .venv-NAME."""

    name: str
    folder: str
    package: str

    @property
    def requirements(self) -> Path:
        return ROOT / "scripts" / f"{self.folder.removeprefix('.venv-')}-requirements.txt"

    def is_present(self) -> bool:
        """As make_environment in scripts/test_environment.sh decide."""
        try:
            stamp = (ROOT / self.folder / "effexport.stamp").read_text(encoding="utf-8").strip()
            made_from = f"{ROOT}\n".encode() + self.requirements.read_bytes()
        except OSError:
            return False
        return stamp == hashlib.sha256(made_from).hexdigest()

    def version(self) -> str:
        found = re.search(rf"{self.package}[ =]+(\d\S+)", self.requirements.read_text(encoding="utf-8"))
        return found[1] if found else "of unknown version"


class SmallDisk:
    """A file system of a few kilobytes that a process can mount for itself, to fill it."""

    name = "right to mount a file system (unshare --user --mount)"

    def is_present(self) -> bool:
        command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    def version(self) -> str:
        return "tmpfs"


class PortabilityTools:
    """The environments of the tools of docs/portability.md, made from the present requirements."""

    name = "environments of other people's tools (scripts/portability.py --prepare)"

    def is_present(self) -> bool:
        # the suite that test_requirements.py makes has no scripts
        if importlib.util.find_spec("portability") is None:
            return False
        from portability.environments import all_made

        return all_made()

    def version(self) -> str:
        return "as in scripts/portability/requirements"


ORT, OPENVINO, RTX, ORT_RTX = (RUNTIMES[name].package for name in ("ort", "openvino", "trt-rtx", "ort-rtx"))
PARTS: dict[str, Part] = {
    "torch": Package("torch", ("torch",)),
    "onnx": Package("onnx", ("onnx",)),
    "ort": Package(ORT.module, ORT.distributions),
    "openvino": Package(OPENVINO.module, OPENVINO.distributions),
    "transformers": Package("transformers", ("transformers",)),
    "foreign": Packages(
        (
            Package("aft_pytorch", ("aft-pytorch",)),
            Package("labml_nn", ("labml-nn",)),
            Package("linear_attention_transformer", ("linear-attention-transformer",)),
            Package("nystrom_attention", ("nystrom-attention",)),
            Package("reformer_pytorch", ("reformer-pytorch",)),
            Package("yet_another_retnet", ("yet-another-retnet",)),
        )
    ),
    "native": KernelLibrary(),
    "ray": Package("ray", ("ray",)),
    "serve": Packages(
        (
            Package("starlette", ("starlette",)),
            Package("uvicorn", ("uvicorn",)),
            Package("httptools", ("httptools",)),
            Package("orjson", ("orjson",)),
            Package("prometheus_client", ("prometheus-client",)),
            Package("tritonclient", ("tritonclient",)),
        )
    ),
    # the second is what the first imports and does not require
    "model-signing": Packages((Package("model_signing", ("model-signing",)), Package("OpenSSL", ("pyopenssl",)))),
    "ray-serve": Packages((Package("ray", ("ray",)), Package("fastapi", ("fastapi",)))),
    "nvcc": CudaCompiler(),
    "browser": Browser(),
    "tensorrt": TensorRTBindings(),
    "triton": Environment(
        "environment with tritonserver (scripts/test.sh --all makes it)", ".venv-triton", "tritonserver"
    ),
    "transformers5": Environment(
        "environment with transformers 5 (scripts/test.sh --all makes it)", ".venv-transformers5", "transformers"
    ),
    "portability": PortabilityTools(),
    "small-disk": SmallDisk(),
    "rtx": Packages((Package(RTX.module, RTX.distributions), Package("cuda.bindings.runtime", ("cuda-bindings",)))),
    "ort-rtx": Package(ORT_RTX.module, ORT_RTX.distributions),
}
# Flags of four kinds of x86 processors, the plainest first.
PROCESSORS = {
    "AVX2": "sse4_2 avx fma avx2",
    "AVX-512": "sse4_2 avx fma avx2 avx512f avx512bw avx512vl",
    "VNNI": "sse4_2 avx fma avx2 avx512f avx512bw avx512vl avx512_vnni",
    "AMX": "sse4_2 avx fma avx2 avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8",
}
# What takes long to install, to start or to run: the fast part of the suite does without.
SLOW_PARTS = {"ray", "ray-serve", "nvcc", "browser", "tensorrt", "triton", "transformers5", "portability", "small-disk"}
LONGEST_ID = 80
REQUIRED = pytest.StashKey[tuple[str, ...]]()
PRESENT = pytest.StashKey[set[str]]()
SECONDS = pytest.StashKey[Counter[str]]()


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


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REQUIRED] = parse_required(os.environ.get(VARIABLE, ""))
    config.stash[SECONDS] = Counter()
    config.pluginmanager.register(FileTimes(config.stash[SECONDS]))


class FileTimes:
    """A pytest plugin that adds up the seconds of each file, in all worker processes."""

    def __init__(self, seconds: Counter[str]) -> None:
        self.seconds = seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.split("::")[0]] += report.duration


def pytest_make_parametrize_id(val: object) -> str | None:
    """The beginning of a long value: ids are sent to all workers, and stand in the environment of child processes."""
    return str(val[:LONGEST_ID]) if isinstance(val, str | bytes) and len(val) > LONGEST_ID else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(SLOW_PARTS.intersection(marker.args) for marker in item.iter_markers("requires")):
            item.add_marker(pytest.mark.slow)
    mark_soak(items, tomllib.loads(SOAK.read_text(encoding="utf-8")))


def mark_soak(items: list[pytest.Item], kept: dict[str, dict[str, int]]) -> None:
    """Mark the rows of tests as soak tests after the first so many. kept: file in tests/ → test → rows of every run.

    Rows that are marked already do not count. Who names one row alone gets it.
    """
    rows = Counter[tuple[str, str]]()
    for item in items:
        file, test = item.path.relative_to(SOAK.parent).as_posix(), getattr(item, "originalname", item.name)
        if item.get_closest_marker("soak") is None and (most := kept.get(file, {}).get(test)) is not None:
            rows[file, test] += 1
            if rows[file, test] > most:
                item.add_marker(pytest.mark.soak)


def pytest_collection_finish() -> None:
    """Collect garbage less often, and not among modules and tests: exports make millions of objects, and a tenth of
    their time went into looking at those that stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_sessionstart(session: pytest.Session) -> None:
    # looked up once: a test that hides a part from itself must not hide it from the rest of the run
    present = session.config.stash[PRESENT] = {part for part in PARTS if PARTS[part].is_present()}
    missing = [part for part in session.config.stash[REQUIRED] if part not in present]
    if missing:
        names = ", ".join(PARTS[part].name for part in missing)
        pytest.exit(
            f"{VARIABLE} requires {', '.join(missing)}, but {names} is missing; install it or change the list",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("requires"):
        for part in marker.args:
            if part not in PARTS:
                pytest.fail(
                    f"requires({part!r}) names an unknown part; expected one of: {', '.join(PARTS)}",
                    pytrace=False,
                )
            if part in item.config.stash[PRESENT]:
                continue
            reason = f"{PARTS[part].name} is missing"
            if part in item.config.stash[REQUIRED]:
                pytest.fail(f"{reason}, but {VARIABLE} names {part}", pytrace=False)
            pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    required = config.stash[REQUIRED]
    present = ", ".join(f"{part} {PARTS[part].version()}" for part in required) or f"none ({VARIABLE} is not set)"
    terminalreporter.write_line(f"required parts, all present: {present}" if required else f"required parts: {present}")
    optional_missing = [part for part in PARTS if part not in required and part not in config.stash[PRESENT]]
    if optional_missing:
        terminalreporter.write_line(f"missing, so tests that need it do not run: {', '.join(optional_missing)}")
    if len(config.stash[SECONDS]) > 1:
        terminalreporter.write_line("slowest files, in seconds of all workers together:")
        for name, seconds in config.stash[SECONDS].most_common(10):
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")


def stand_on(flags: str, patch: pytest.MonkeyPatch) -> None:
    """Give this process an x86 processor with these flags."""
    here = replace(Processor.here(), machine="x86_64", flags=frozenset(flags.split()))
    patch.setattr(Processor, "here", lambda: here)


@pytest.fixture(scope="session", autouse=True)
def plainest_processor() -> Iterator[None]:
    """Run as on a plain AVX2 processor: its settings for ONNX Runtime are right on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        stand_on(PROCESSORS["AVX2"], patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_token_of_the_machine() -> Iterator[None]:
    """Clusters of the tests ask for no token. Ray would take one that the user has in ~/.ray."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield


@pytest.fixture(params=PROCESSORS)
def each_processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs on each of PROCESSORS; its key.

    It must not compute in int8: with the flags of a better processor than the machine's, products may overflow.
    """
    name: str = request.param
    stand_on(PROCESSORS[name], monkeypatch)
    return name


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[page_browser.Browser]:
    """For tests that require "browser"."""
    import page_browser

    program = next(path for path in map(shutil.which, BROWSERS) if path)
    running = page_browser.Browser(program, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()
