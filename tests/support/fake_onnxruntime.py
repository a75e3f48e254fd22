"""An onnxruntime made of Python, which has the providers that a test gives it and opens every model.

It proves what we ask of ONNX Runtime, and what we make of its answers: which provider comes first, with which options,
and who runs which operator. It computes nothing.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from effexport.base.runtimes import CPU
from effexport.plugins.building.library import Library
from effexport.runners.ort import kernels
from effexport.runners.ort import session as ort_session
from effexport.tensorrt.ort_providers import TF32_VARIABLE

HEAD = '<ir_version: 10, opset_import: ["" : 20, "effexport" : 1]> '
FUNCTION = '<domain: "effexport", opset_import: ["" : 20]> LSHSort (a) => (b) { b = Neg (a) }'


def parsed(body: str = "{ y = Neg (x) }", *functions: str) -> onnx.ModelProto:
    """A model from its nodes, or from a whole graph."""
    graph = body if body.startswith("g ") else f"g (float[b, 4] x) => (float[b, 4] y) {body}"
    model: onnx.ModelProto = onnx.parser.parse_model("\n".join((HEAD + graph, *functions)))
    return model


PLAIN: bytes = parsed().SerializeToString()
# A library whose CUDA kernels nobody looks at.
BUILT = SimpleNamespace(
    has_cuda=True, source_hash="", nvcc="nvcc", cuda_architectures=(90,), sha256="", cuda_sha256=None
)
WITH_CUDA = Library(Path("lib.so"), outdated=False, info=BUILT)  # type: ignore[arg-type]
WITH_SORT: bytes = parsed("{ y = effexport.LSHSort (x) }", FUNCTION).SerializeToString()


class FakeOrt:
    """The module. available: the providers it is built with. gpus: how many the machine has.

    assigned: per provider, the operators that it runs, or its nodes with their names; None is an onnxruntime that
    cannot say. final: the graph that it writes when asked to, if any. starts: whether the first provider does.
    refusal: what it says of every model. refuses_graphs: whether it refuses CUDA graphs.
    failure: what it says when it is to load a plugin provider. missing: libraries that its loader does not find.
    """

    __version__ = "9.9"

    def __init__(self, *available: str, folder: Path = Path("onnxruntime")) -> None:
        self.__file__ = str(folder / "__init__.py")
        self.available = [*available, CPU]
        self.gpus = 2
        self.assigned: dict[str, Any] | None = {}
        self.final: onnx.ModelProto | None = parsed()
        self.starts = True
        self.refusal: Exception | None = None
        self.refuses_graphs = False
        self.failure: Exception | None = None
        self.missing: list[str] = []
        # what was asked of it
        self.libraries: list[tuple[str, str]] = []
        self.added: list[tuple[list[Any], dict[str, str]]] = []
        self.kernels: list[str] = []
        self.opened: list[SimpleNamespace] = []

    def get_available_providers(self) -> list[str]:
        return self.available

    def register_execution_provider_library(self, name: str, library: str) -> None:
        if self.missing:
            raise RuntimeError(f"{self.missing[0]}: cannot open shared object file: No such file or directory")
        if self.failure is not None:
            raise self.failure
        if self.libraries:
            raise RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : EP library is already registered under {name}")
        self.libraries.append((name, library))
        if self.gpus:
            self.available.append(name)  # as from 1.26 on

    def get_ep_devices(self) -> list[Any]:
        # the second GPU of the machine comes first
        found = [
            SimpleNamespace(ep_name=name, number=number, ep_metadata={"cuda_device_id": str(number)})
            for name, _ in self.libraries
            for number in reversed(range(self.gpus))
        ]
        return [SimpleNamespace(ep_name=CPU, ep_metadata={}), *found]

    def SessionOptions(self) -> Any:
        entries: dict[str, str] = {}
        return SimpleNamespace(
            entries=entries,
            optimized_model_filepath="",
            add_session_config_entry=entries.__setitem__,
            add_provider_for_devices=lambda devices, options: self.added.append((devices, options)),
            register_custom_ops_library=self.kernels.append,
        )

    def InferenceSession(self, source: Any, options: Any, *, providers: list[Any], enable_fallback: int) -> Any:
        if self.refusal is not None:
            raise self.refusal
        named = {one if isinstance(one, str) else one[0]: {} if isinstance(one, str) else one[1] for one in providers}
        device = next((one["device_id"] for one in named.values() if "device_id" in one), "0")
        if named and int(device) >= max(self.gpus, 1):
            raise RuntimeError(f"Invalid device ID: {device}, must be between 0 and {self.gpus}")
        opened = SimpleNamespace(source=source, options=options, providers=providers, fallback=enable_fallback)
        opened.options_of = named
        self.opened.append(opened)
        if self.refuses_graphs and any(one.get("enable_cuda_graph") == "1" for one in named.values()):
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        if options.optimized_model_filepath and self.final is not None:
            onnx.save(self.final, options.optimized_model_filepath)
        names = list(named) or [*(name for name, _ in self.libraries if self.added), CPU]
        session = SimpleNamespace(get_providers=lambda: names if self.starts else names[1:])
        if self.assigned is not None:
            assigned = self.assigned or {names[0]: ["Neg"]}
            parts = [
                SimpleNamespace(ep_name=name, get_nodes=lambda of=of: nodes_of(of)) for name, of in assigned.items()
            ]
            session.get_provider_graph_assignment_info = lambda: parts
        return session


def nodes_of(operators: Any) -> list[SimpleNamespace]:
    """Of operators, or of {name: operator}."""
    named = operators.items() if isinstance(operators, dict) else [(op, op) for op in operators]
    return [SimpleNamespace(name=name, op_type=op) for name, op in named]


def install(monkeypatch: pytest.MonkeyPatch, ort: FakeOrt, cache: Path) -> FakeOrt:
    """Put the stand-in in place: without kernels, in a process that forbids TF32, with a cache of its own."""
    monkeypatch.setattr(ort_session, "import_onnxruntime", lambda: ort)
    monkeypatch.setattr(kernels, "find_library", lambda: None)
    monkeypatch.setenv("EFFEXPORT_CACHE_DIR", str(cache))
    monkeypatch.setenv(TF32_VARIABLE, "0")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: None)
    return ort
