"""Small artifacts, built once and shared by every test of this folder, and a command line that runs in this process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from slow_cases import soak
from small_builds import built_artifact, tracing_once
from small_specs import BUILT_VARIANTS, spec_of

from effexport.artifact import Artifact, Manifest, write_manifest
from effexport.base.spec import BuildSpec
from effexport.cli.main import main
from effexport.models.validation import SpecError

SCOPES = ("attention", "encoder")
# One with a hash and several operators, and one without.
LAYERS_ALONE = ("softmax", "lsh")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that ask for `variant` or `scope` run for all of them that are built.

    Of those that ask for both, each variant runs in an encoder, and as a layer alone only those of LAYERS_ALONE do in
    every run: around the same nodes, such a graph has other inputs, which do not depend on the variant.
    """
    names = [name for name in ("variant", "scope") if name in metafunc.fixturenames]
    if names == ["variant", "scope"]:
        cases = [(variant, scope) for variant in BUILT_VARIANTS for scope in SCOPES]
        rare = [variant not in LAYERS_ALONE and scope == "attention" for variant, scope in cases]
        metafunc.parametrize(names, [soak(case) if r else case for case, r in zip(cases, rare, strict=True)])
    elif names:
        metafunc.parametrize(names[0], {"variant": BUILT_VARIANTS, "scope": SCOPES}[names[0]])


@pytest.fixture(scope="session", autouse=True)
def silent_trace_log() -> None:
    """torch traces every export into this logger; pytest would format and keep all of it, at half the cost of the
    export itself."""
    logging.getLogger("torch.__trace").propagate = False


@pytest.fixture(scope="module")
def kept_traces() -> Iterator[None]:
    """Trace a model of ours once in the builds of all tests and runs: most of a build is its trace. For files of tests
    about what surrounds it; those about exports, and about weights that are put into a traced graph, trace."""
    from effexport.pipeline import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "write_graphs", tracing_once()(build.write_graphs))
        yield


@pytest.fixture(scope="session")
def small_spec() -> Callable[..., BuildSpec]:
    """(variant, scope, **fields) → a spec that exports in seconds."""
    return spec_of


@pytest.fixture(scope="session")
def built(worker_folder: Path) -> Callable[..., Artifact]:
    """(variant, scope, **fields) → a healthy artifact, of an earlier run if nothing that decides it has changed since.

    It lies in a folder of this run. Do not change its files: other tests read them.
    """
    from effexport.artifact import open_artifact

    def artifact(variant: str, scope: str = "encoder", **fields: Any) -> Artifact:
        spec = spec_of(variant, scope, **fields)
        if spec.model.custom_ops(fused=True) == spec.model.custom_ops(fused=False):
            fields.pop("fused", None)  # makes no difference
        for field in [*fields]:
            others = {name: value for name, value in fields.items() if name != field}
            with contextlib.suppress(SpecError):  # a field that another one needs
                if spec_of(variant, scope, **others) == spec:
                    fields = others  # the default, which other tests leave out
        name = "-".join([variant, scope, *(f"{name}-{value}" for name, value in sorted(fields.items()))])
        with locked(worker_folder / f"{name}.lock"):
            if not (worker_folder / name).exists():
                shutil.copytree(built_artifact(spec_of(variant, scope, **fields)), worker_folder / name)
        return open_artifact(worker_folder / name)

    return artifact


@pytest.fixture(scope="session")
def worker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the whole run, also when pytest-xdist spreads it over processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "effexport-artifacts"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@pytest.fixture
def copied(built: Callable[..., Artifact], tmp_path: Path) -> Callable[..., Path]:
    """(variant, scope, **fields) → a copy of a healthy artifact, to be damaged."""

    def copy(variant: str = "softmax", scope: str = "attention", **fields: Any) -> Path:
        target = tmp_path / "damaged" / f"{variant}-{scope}"
        shutil.copytree(built(variant, scope, **fields).path, target)
        return target

    return copy


@pytest.fixture(scope="session")
def rewrite_manifest() -> Callable[..., None]:
    """(folder, **changes): state the folder's files anew, as an attacker who knows the checksum would."""

    def rewrite(folder: Path, **changes: Any) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").unlink()
        write_manifest(folder, msgspec.convert(manifest | changes, Manifest))

    return rewrite


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """stdout, which must be one JSON object and nothing else. NaN is not JSON."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        value = json.loads(self.out, parse_constant=refuse)
        assert isinstance(value, dict)
        return value

    def error(self, code: int = 2) -> str:
        """The one message of an expected error, on one paragraph and without a traceback."""
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        assert self.err.count("effexport: error: ") == 1
        return self.err.split("effexport: error: ")[1].strip()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """(*arguments) → what `effexport arguments` did, run in this process."""

    def run(*arguments: str | Path) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        code = stop.value.code
        return Result(code if isinstance(code, int) else 0 if code is None else 1, out, err)

    return run
