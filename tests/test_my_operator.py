"""examples/my_operator as a user runs it: in a folder of its own, with the package installed from a wheel, whose native
sources are compiled there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
from package_builds import ROOT, build, copy_tree

from effexport.plugins.building.build import find_headers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.requires("torch", "onnx", "ort", "native"),
    pytest.mark.xdist_group("my_operator"),
]
# compiling all kernels on two busy cores
TIMEOUT_S = 1200


@dataclass(frozen=True)
class User:
    """Someone with effexport in `site`, a copy of the example in `work`, and a cache of their own."""

    folder: Path

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def pip_install(self, source: Path) -> None:
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", self.site)
        subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)

    def effexport(self, *arguments: object, code: int = 0) -> Any:
        """The JSON of a command, run in `work`."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.site),
            "EFFEXPORT_CACHE_DIR": str(self.folder / "cache"),
            "EFFEXPORT_ORT_INCLUDE_DIR": str(find_headers().folder),
        }
        environment.pop("EFFEXPORT_LIBRARY", None)
        command = [sys.executable, "-P", "-m", "effexport", *map(str, arguments), "--json"]
        done = subprocess.run(
            command, cwd=self.work, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def build(self, output: str) -> Any:
        return self.effexport("build", "--module", "gated_model:make", "-o", output)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    """A user who has compiled the example's operator with --with."""
    user = User(tmp_path_factory.mktemp("user"))
    build(copy_tree(tmp_path_factory.mktemp("tree")), user.folder, "--wheel")
    user.pip_install(next(user.folder.glob("*.whl")))
    copytree(ROOT / "examples" / "my_operator", user.work, ignore=ignore_patterns("__pycache__"))
    library = user.effexport("plugins", "build", "--no-cuda", "--with", "gated_rms_norm")
    assert library["with"] == [str(user.work / "gated_rms_norm")]
    return user


def names(checks: list[dict[str, Any]], status: str) -> set[str]:
    return {check["name"] for check in checks if check["status"] == status}


def test_the_example_is_exported_and_proven_with_its_kernel_and_its_body(user: User) -> None:
    installed = user.effexport("plugins", "info")
    assert "GatedRMSNorm" in [op["name"] for op in installed["operators"]]
    assert Path(installed["library"]).is_relative_to(user.folder / "cache")
    assert str(user.site) in json.loads((Path(installed["library"]).parent / "build.json").read_text())["installation"]
    user.build("artifacts/gated")
    artifact = user.work / "artifacts" / "gated"
    assert json.loads((artifact / "manifest.json").read_text())["custom_ops"] == {
        "EluLinearAttention": 1,
        "GatedRMSNorm": 1,
    }
    report = json.loads((artifact / "report.json").read_text())
    assert report["implementation"] == {"EluLinearAttention": "kernel", "GatedRMSNorm": "kernel"}
    assert {"function body of GatedRMSNorm", "function bodies"} <= names(report["checks"], "passed")
    assert names(report["checks"], "failed") == set()
    for how in ("kernel", "body"):
        verified = user.effexport("verify", artifact, "--implementation", f"GatedRMSNorm={how}")
        assert verified["implementation"]["GatedRMSNorm"] == how
        assert "function body of GatedRMSNorm" in names(verified["checks"], "passed")


def test_an_error_in_the_users_source_is_shown_with_its_file_and_line(user: User) -> None:
    source = user.work / "gated_rms_norm" / "ort.cc"
    text = source.read_text()
    source.write_text(text.replace("class Kernel {", "klass Kernel {"))
    line = text[: text.index("class Kernel {")].count("\n") + 1
    try:
        error = user.effexport("plugins", "build", "--no-cuda", "--with", "gated_rms_norm", code=1)["error"]
    finally:
        source.write_text(text)
    assert f"{source}:{line}:" in error
    assert "The library built before is kept" in error


def test_an_installed_operator_needs_no_flag(user: User) -> None:
    user.pip_install(user.work)
    # the same sources, which are compiled already
    assert user.effexport("plugins", "build", "--no-cuda")["built_now"] is False
    assert user.effexport("plugins", "info")["with"] == []
    user.build("artifacts/installed")
    verified = user.effexport("verify", "artifacts/installed")
    assert verified["implementation"]["GatedRMSNorm"] == "kernel"
    error = user.effexport("plugins", "build", "--no-cuda", "--with", "gated_rms_norm", code=2)["error"]
    assert "an installed package has an operator gated_rms_norm" in error
