"""Compiles ONNX files in OpenVINO: bodies in place of custom operators, and the precision of the arithmetic."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.errors import MissingExtraError, RuntimeUnsupportedError, UserError
from effexport.export.inlined import inlined
from effexport.export.onnx_graph import external_sizes, load_graph
from effexport.runtimes import BFLOAT16_RUNTIME

if TYPE_CHECKING:
    import onnx

    from effexport.runners.options import RunOptions

DEVICE = "CPU"
# --precision-hint → OpenVINO's name of the element type that it computes in.
PRECISIONS: dict[str, str] = {"fp32": "f32", "bf16": "bf16"}
LONGEST_REASON = 300


def import_openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingExtraError("openvino", BFLOAT16_RUNTIME.package.extra) from error
    return openvino


@functools.cache
def core_of(openvino: Any) -> Any:
    """The only Core of the process, which stays. Each Core sets an alternate stack for signals (OpenVINO 2026.4); if
    Cores end in another order than that of their creation, a freed stack stays in use, and the next signal that Python
    handles ends the process with SIGSEGV."""
    return openvino.Core()


def onnx_from_source(model: Path | bytes) -> onnx.ModelProto:
    """A model without its external data. model: path of the file, or the serialised model."""
    import onnx

    return onnx.ModelProto.FromString(model) if isinstance(model, bytes) else load_graph(model)


def compiled_model(proto: onnx.ModelProto, folder: Path | None, options: RunOptions) -> Any:
    """OpenVINO's compiled model. folder: of the external data, if there is any.

    Raises MissingExtraError without OpenVINO, UserError for a model without function bodies and for a precision that
    this CPU does not support, and RuntimeUnsupportedError if OpenVINO refuses the model.
    """
    core = core_of(import_openvino())
    check_precision(core, options.precision_hint)
    properties: dict[str, Any] = {
        # OpenVINO would choose bfloat16 by itself where the CPU has it
        "INFERENCE_PRECISION_HINT": PRECISIONS[options.precision_hint or "fp32"],
        "PERFORMANCE_HINT": "LATENCY",
    }
    if options.threads is not None:
        properties["INFERENCE_NUM_THREADS"] = options.threads
    try:
        # weights are read while the model is compiled, and not later
        with tempfile.TemporaryDirectory(prefix="effexport-") as name:
            path = standard_file(proto, folder, Path(name))
            return core.compile_model(core.read_model(path), DEVICE, properties)
    except RuntimeError as error:
        raise RuntimeUnsupportedError(f"OpenVINO {version()} refuses the model: {reason_of(error)}") from error


def standard_file(proto: onnx.ModelProto, folder: Path | None, output: Path) -> Path:
    """Write a model into `output`, with standard operators only, beside its external data.

    OpenVINO does not know model-local functions, and does not follow symbolic links out of the model's folder.
    """
    for location in external_sizes(proto):
        (output / location).parent.mkdir(parents=True, exist_ok=True)
        source = ((folder or Path()) / location).resolve()
        try:
            os.link(source, output / location)
        except OSError:  # on another file system
            shutil.copyfile(source, output / location)
    path = output / "model.onnx"
    path.write_bytes(inlined(proto).SerializeToString())
    return path


def version() -> str:
    """The release, such as 2026.4.1, without the name of the build."""
    return BFLOAT16_RUNTIME.package.version or "of unknown version"


def check_precision(core: Any, precision_hint: str) -> None:
    """Raises UserError for a precision that OpenVINO would emulate, or ignore, on this CPU."""
    capabilities = core.get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    if precision_hint and precision_hint.upper() not in capabilities:
        raise UserError(
            f"--precision-hint {precision_hint}: OpenVINO {version()} computes on this CPU in "
            f"{', '.join(sorted(capabilities))}; leave it out, or use a CPU with AVX512-BF16 or AMX"
        )


def reason_of(error: RuntimeError) -> str:
    """The sentence that says why, on one line: OpenVINO puts places in its own sources around it."""
    lines = [line.strip() for line in str(error).splitlines()]
    words = [line for line in lines if line and not line.startswith(("Exception from ", "Check '", "FrontEnd API"))]
    reason = " ".join(words or lines)
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} …"
