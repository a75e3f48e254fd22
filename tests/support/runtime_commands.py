"""Commands that work without PyTorch and the ONNX exporter, and commands that name the extra that adds them."""

from __future__ import annotations

from pathlib import Path

# Commands in an order in which they can run in one folder, with words of their output. ARTIFACT: a finished artifact.
WORKING: tuple[tuple[str, str], ...] = (
    ("--help", "Commands"),
    ("--version", "effexport, version"),
    ("list", "nystrom"),
    ("doctor", "onnxruntime"),
    ("plugins info", "cache"),
    ("completion bash", "_EFFEXPORT_COMPLETE"),
    ("inspect ARTIFACT", "encoder"),
    ("inspect ARTIFACT/model.onnx", "operators"),
    ("report ARTIFACT", "Passed"),
    ("report ARTIFACT -o report.html", "report.html"),
    ("run ARTIFACT --text input.txt --output out.npz", "last_hidden_state"),
    ("verify ARTIFACT", "equal to PyTorch"),
    ("verify ARTIFACT --reference golden --json", '"passed": true'),
    ("inline ARTIFACT -o inlined.onnx", "equal to PyTorch"),
    ("verify ARTIFACT --model inlined.onnx", "equal to PyTorch"),
    ("package ARTIFACT --format triton -o repository", "version 1 added"),
    ("package ARTIFACT --format triton -o python-model --backend python", "version 1 added"),
    ("build --help", "--variant"),
    ("bench --help", "--variants"),
    ("sweep sweep.toml --dry-run", "aft-simple"),
)
# Commands that need PyTorch: exit status 2, and one line with the remedy.
REFUSED: tuple[str, ...] = (
    "build --variant linear -o new",
    "build --module factories:encoder -o new",
    "bench --variants softmax --seq-lens 64 --runtimes ort -o new",
    "sweep sweep.toml --processes -o new",
    "verify ARTIFACT --reference torch",
    "verify ARTIFACT --reference transformers",
)
REMEDY = "pip install 'effexport[build]'"
TEXT = "Some text, whose bytes are the tokens. " * 3
SWEEP = 'variants = ["aft-simple"]\nseq_lens = [64]\n'


def prepare(folder: Path) -> None:
    """Write the files that the commands read."""
    (folder / "input.txt").write_text(TEXT, encoding="utf-8")
    (folder / "sweep.toml").write_text(SWEEP, encoding="utf-8")


def words(command: str, artifact: Path) -> list[str]:
    return [word.replace("ARTIFACT", str(artifact)) for word in command.split()]
