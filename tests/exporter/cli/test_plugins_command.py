"""`effexport plugins build | info | path` and what `effexport doctor` says of the library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from effexport.base.environment import kernel_library_version

if TYPE_CHECKING:
    from fake_machine import Machine

pytest_plugins = ["fake_machine"]
pytestmark = pytest.mark.requires("native")
Cli = Callable[..., Any]


def test_the_group_explains_itself(cli: Cli) -> None:
    for arguments in (["plugins", "-h"], ["plugins", "--help"]):
        text = cli(*arguments).out
        assert "Build and locate the kernel library" in text
        assert all(f"\n  {verb} " in text for verb in ("build", "info", "path"))
    assert "\n  plugins " in cli("--help").out
    for verb in ("build", "info", "path"):
        assert "--json" in cli("plugins", verb, "-h").out


def test_a_mistyped_subcommand_is_one_error(cli: Cli) -> None:
    assert cli("plugins", "xyzzy", "--json").json["error"].endswith("Commands: build, info, path")
    assert "Commands:" in cli("plugins").err


def test_build_path_and_info_agree(cli: Cli, machine: Machine) -> None:
    built = cli("plugins", "build", "--json")
    assert built.code == 0, built.err
    assert built.json["built_now"] is True
    assert built.json["outdated"] is False
    assert built.json["warnings"] == []
    assert built.json["cuda"] is False
    path = cli("plugins", "path")
    assert (path.code, path.out, path.err) == (0, built.json["library"] + "\n", "")
    assert cli("plugins", "path", "--json").json == {"path": built.json["library"], "outdated": False}
    info = cli("plugins", "info", "--json")
    assert info.code == 0
    assert info.json["library"] == built.json["library"]
    assert info.json["sha256_ok"] is True
    assert info.json["header_version"] == 21
    assert {"name": "LSHSort", "element_types": ["int32"], "providers": ["CPU"]} in info.json["operators"]
    assert info.json["cache_folder"] == str(machine.cache)
    assert cli("plugins", "build", "--json").json["built_now"] is False
    assert cli("plugins", "build", "--force", "--json").json["built_now"] is True


def test_a_cpu_only_build_says_so_and_says_why(cli: Cli, machine: Machine) -> None:
    built = cli("plugins", "build")
    assert "CPU only: no nvcc was found" in built.out
    assert "building for the CPU only: no nvcc was found" in built.err
    assert "CPU only: no nvcc was found; install the CUDA toolkit" in cli("plugins", "info").out
    machine.program("nvcc", "print('sm_90')")
    found = f"CPU only, although nvcc is installed ({machine.bin / 'nvcc'})"
    add = "; add the CUDA kernels with: effexport plugins build"
    assert f"{found}, because there is no GPU{add} --cuda\n" in cli("plugins", "info").out
    built = cli("plugins", "build")
    assert f"{found}, because there is no GPU{add} --cuda\n" in built.out
    assert "but there is no GPU; --cuda compiles for one" in built.err
    machine.has_gpus("9.0")
    assert f"{found}{add}\n" in cli("plugins", "info").out


def test_a_cuda_build_names_its_architectures(cli: Cli, machine: Machine, nvcc: Path) -> None:
    assert "CPU and CUDA (sm_75, sm_80, sm_90, PTX for later GPUs)" in cli("plugins", "build", "--cuda").out
    info = cli("plugins", "info", "--json").json
    assert info["cuda_architectures"] == [75, 80, 90]
    assert info["operators"][0]["providers"] == ["CPU", "CUDA"]
    text = cli("plugins", "info").out
    assert "IterativePinv: float32, float16, bfloat16; providers: CPU, CUDA" in text
    assert f"{nvcc}: Cuda, release 12.4, V12.4.1" in text
    assert cli("plugins", "build", "--no-cuda", "--json").json["cuda"] is False
    assert cli("plugins", "info", "--json").json["cuda"] is False
    machine.install_cuda_wheel()
    info = cli("plugins", "info", "--json").json
    assert (info["cuda"], info["cuda_architectures"]) == (True, [75, 90])
    assert info["operators"][0]["providers"] == ["CPU", "CUDA"]
    shown = "CPU and CUDA (sm_75, sm_90, PTX for later GPUs, effexport-kernels-cuda 1.2.3)"
    assert shown in cli("plugins", "info").out


def test_without_a_library_path_fails_and_info_does_not(cli: Cli, machine: Machine) -> None:
    path = cli("plugins", "path")
    assert path.out == ""
    assert path.error(1) == "the kernel library is not built; build it with: effexport plugins build"
    info = cli("plugins", "info", "--json")
    assert info.code == 0
    assert info.json["library"] is None
    assert "none: custom operators run as their ONNX function bodies" in info.err


def test_an_outdated_library_is_loud_everywhere(cli: Cli, machine: Machine) -> None:
    library = cli("plugins", "build", "--json").json["library"]
    (machine.sources / "native" / "ort_op.h").write_text("// changed")
    path = cli("plugins", "path")
    assert path.out == library + "\n"
    assert "WARNING: the library was built from different sources; rebuild it with: effexport plugins build" in path.err
    info = cli("plugins", "info", "--json")
    assert info.json["outdated"] is True
    assert ", OUTDATED)" in info.err
    assert "OUTDATED" in cli("doctor").out


def test_the_library_of_a_wheel_is_named_with_its_digest_everywhere(cli: Cli, machine: Machine) -> None:
    path = machine.install_wheel()
    info = cli("plugins", "info", "--json")
    digest = info.json["sha256"]
    assert (info.json["library"], info.json["sha256_ok"], info.json["damaged_builds"]) == (str(path), True, {})
    origin = f"effexport-kernels 1.2.3, SHA-256 {digest[:12]}"
    assert f"{path} ({origin}, up to date)" in info.err
    assert f"{digest}, as built" in info.err
    assert f"kernel library: CPU only, {origin}\n" in cli("doctor").out
    assert kernel_library_version() == f"{origin} for the CPU"
    assert cli("plugins", "build", "--json").json["origin"].startswith("build ")
    machine.install_wheel(source_hash="0" * 64)
    assert cli("plugins", "info", "--json").json["origin"].startswith("build ")


def test_damage_is_found_by_info(cli: Cli, machine: Machine) -> None:
    library = Path(cli("plugins", "build", "--json").json["library"])
    content = library.read_bytes()
    library.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    info = cli("plugins", "info", "--json")
    assert info.code == 1
    assert info.json["sha256_ok"] is False
    assert "DAMAGED; rebuild it with: effexport plugins build" in info.err
    assert cli("plugins", "build", "--json").json["built_now"] is True
    (library.parent / "build.json").write_text("{")
    info = cli("plugins", "info", "--json")
    assert info.code == 0
    assert info.json["library"] is None
    assert "build.json is damaged" in info.json["damaged_builds"][str(library.parent)]


def test_builds_that_are_not_used_are_counted(cli: Cli, machine: Machine, nvcc: Path) -> None:
    first = cli("plugins", "build", "--cuda", "--json").json["key"]
    cli("plugins", "build", "--no-cuda")
    assert cli("plugins", "info", "--json").json["other_builds"] == [first]


def test_a_named_library_is_used_and_said(cli: Cli, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = machine.bin / "tiny.so"
    monkeypatch.setenv("EFFEXPORT_LIBRARY", str(given))
    assert cli("plugins", "path").out == f"{given}\n"
    info = cli("plugins", "info", "--json")
    assert info.json["explicit"] is True
    assert info.json["sha256_ok"] is None
    assert "given by EFFEXPORT_LIBRARY" in info.err
    assert cli("doctor", "--json").json["library"]["path"] == str(given)
    assert "that file is used instead of this library" in cli("plugins", "build").err


def test_a_named_library_that_is_not_there_is_one_error(
    cli: Cli, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFEXPORT_LIBRARY", str(machine.folder / "absent.so"))
    for verb in ("path", "info"):
        assert "EFFEXPORT_LIBRARY is" in cli("plugins", verb).error()
    doctor = cli("doctor", "--json")
    assert doctor.code == 1
    assert "EFFEXPORT_LIBRARY is" in doctor.json["library"]["problem"]


def test_a_failed_build_exits_1_and_a_missing_tool_2(cli: Cli, machine: Machine) -> None:
    (machine.bin / "cmake.error").write_text("x.cc:1: error: planted")
    assert "x.cc:1: error: planted" in cli("plugins", "build").error(1)
    as_json = cli("plugins", "build", "--json")
    assert as_json.json["exit_code"] == 1
    assert "error: planted" in as_json.json["error"]
    (machine.bin / "c++").unlink()
    assert "no C++ compiler found" in cli("plugins", "build").error(2)
    assert "--cuda was given, but no nvcc was found" in cli("plugins", "build", "--cuda").error(2)


@pytest.mark.requires("torch", "onnx", "ort")
def test_doctor_says_whether_the_library_is_there_and_does_not_insist(cli: Cli, machine: Machine) -> None:
    result = cli("doctor", "--json")
    assert result.code == 0
    assert result.json["library"]["path"] is None
    assert result.json["library"]["remedy"] == "effexport plugins build"
    assert "function bodies" in cli("doctor").out
    library = cli("plugins", "build", "--json").json["library"]
    assert json.loads(cli("doctor", "--json").out)["library"] == {
        "path": library,
        "origin": f"build {Path(library).parent.name[:12]}",
        "outdated": False,
        "cuda": False,
        "problem": None,
        "remedy": None,
    }
    assert "kernel library: CPU only" in cli("doctor").out
