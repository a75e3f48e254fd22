"""A hundred mistakes, each answered with one clear line and the right exit status, without a traceback.

Every row runs in this process, in a folder with one small artifact `art`, a folder `swept` of a sweep, a folder
`checkpoint` whose weights are missing, two modules that exit, and files of other kinds. Afterwards the folder
is as it was: what cannot work leaves nothing behind.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from effexport.artifact import Artifact
from effexport.cli.main import COMMANDS

pytestmark = pytest.mark.requires("torch", "onnx", "ort")

# Command line, exit status, what the line contains.
MISTAKES: list[tuple[str, int, str]] = [
    # the command line itself
    ("--nope", 2, "there is no option --nope. See: effexport --help"),
    ("lsit", 2, "no command 'lsit'; did you mean 'list'? Commands: list, build, verify"),
    ("list extra", 2, "unexpected extra argument (extra); expected: effexport list [OPTIONS]"),
    ("list --format json", 2, "there is no option --format. See: effexport list --help"),
    ("doctor everything", 2, "expected: effexport doctor [OPTIONS]"),
    ("completion", 2, "SHELL is missing; expected: effexport completion [OPTIONS] SHELL"),
    ("completion tcsh", 2, "unknown shell 'tcsh'; did you mean 'zsh'? Expected: bash, zsh, fish"),
    ("plugins xyz", 2, "no command 'xyz'. Commands: build, info, path"),
    ("plugins info extra", 2, "expected: effexport plugins info [OPTIONS]"),
    ("plugins build --cude", 2, "there is no option --cude; did you mean '--cuda'?"),
    ("inspect a\udcff", 2, r"'a\udcff' is not UTF-8; expected a text that is"),
    ("verify ''", 2, "the argument after verify is empty; expected a value: is a shell variable unset?"),
    ("run art --text text -o ''", 2, "the argument after -o is empty"),
    # build: what to export
    ("build extra", 2, "unexpected extra argument (extra)"),
    ("build --variant", 2, "option '--variant' requires an argument"),
    ("build --variant reformer", 2, "unknown variant 'reformer'; its attention is called 'lsh' here"),
    ("build --variant Nystromformer", 2, "its attention is called 'nystrom' here"),
    ("build --variant sofmax", 2, "unknown variant 'sofmax'; did you mean 'softmax'?"),
    ("build --variant nystrom --causal", 2, "nystrom attention has no causal form"),
    ("build --variant lsh --dimm 32", 2, "there is no option --dimm; did you mean '--dim'?"),
    ("build --variant lsh --seq-len many", 2, "--seq-len has 'many'; expected a length in tokens"),
    ("build --variant lsh --seq-len -5", 2, "seq_len is -5; expected a positive integer"),
    ("build --variant lsh --dim 99999999999999999999", 2, "dim is 99999999999999999999; expected at most 2147483647"),
    (
        "build --variant softmax --scope attention --dim 16777216 --heads 2",
        2,
        "1,125,899,973,951,488 parameters and needs at",
    ),
    ("build --variant softmax --batch 999999999", 2, "999999999 × 1024 tokens; this machine has"),
    ("build --variant lsh --layers 999999999", 2, "layers is 999999999; expected at most 10000"),
    ("build --variant lsh --seq-len 99999999999k", 2, "expected at most 2147483647"),
    ("build --variant lsh --heads two", 2, "--heads: 'two' is not a valid integer"),
    ("build --variant lsh --heads 3", 2, "use dim 255 or 258, heads 2 or 4"),
    ("build --variant lsh --scope layer", 2, "unknown --scope 'layer'"),
    ("build --variant lsh --scope model", 2, "unknown --scope 'model'; did you mean 'encoder'?"),
    ("build --variant lsh --precision float16", 2, "unknown --precision 'float16'; did you mean 'fp16'?"),
    ("build --variant lsh --precision int7", 2, "Expected: fp32, fp16, bf16, int8, fp8"),
    ("build --variant lsh --opset 9", 2, "opset is 9; expected 18 to 24"),
    ("build --variant lsh --batch 0", 2, "batch is 0; expected at least 1"),
    ("build --variant lsh --seed -1", 2, "seed is -1; expected 0 to 2^63 - 1"),
    ("build --variant softmax --num-hashes 4", 2, "--num-hashes does not apply to softmax"),
    ("build --variant lsh --pinv-init global", 2, "--pinv-init does not apply to lsh"),
    ("build --variant lsh --task masked-lm", 2, "--task only works with --checkpoint"),
    ("build --variant lsh --scope attention --layers 2", 2, "layers belongs to the encoder"),
    (
        "build --variant aft-full --implementation kernel",
        2,
        "aft-full encoder has no custom operators",
    ),
    ("build --spec nope.toml", 2, "no spec file at nope.toml; expected a TOML file with options of the model, such as"),
    ("build --spec art", 2, "the spec file art is a folder; expected a TOML file"),
    ("build --spec garbage", 2, "cannot read the spec file garbage: it is not text; expected TOML"),
    ("build --spec text", 2, "cannot read the spec file text: it is not TOML"),
    ("build --checkpoint google/reformer-enwik8", 2, "hf download google/reformer-enwik8 --local-dir reformer-enwik8"),
    (
        "build --checkpoint nope",
        2,
        "there is no folder nope; expected a checkpoint folder",
    ),
    ("build --checkpoint art", 2, "no config.json in art; a checkpoint folder has config.json and weights"),
    ("build --checkpoint art/reference.safetensors", 2, "is a file; expected a checkpoint folder"),
    ("build --checkpoint checkpoint", 2, "checkpoint has no weights; expected one of: model.safetensors"),
    (
        "build --checkpoint checkpoint --variant lsh",
        2,
        "--variant was given with --checkpoint, whose config.json decides it",
    ),
    ("build --checkpoint checkpoint --weights text", 2, "--checkpoint and --weights cannot be combined"),
    ("build --variant lsh --weights nope", 2, "no weights file at nope; expected a safetensors file with weights"),
    ("build --variant lsh --weights art", 2, "art is a folder; expected a weights file"),
    ("build --variant lsh --weights checkpoint", 2, "export a checkpoint with --checkpoint checkpoint"),
    ("build --variant lsh --weights garbage", 2, "garbage is not a readable weights file"),
    ("build --variant lsh --weights art/reference.safetensors", 2, "do not fit the model"),
    ("build --module nope", 2, "--module is 'nope'; expected package.module:factory"),
    ("build --module nope:make", 2, "No module named 'nope'; expected a function that can be imported from here"),
    ("build --module json:nope", 2, "module 'json' has no attribute 'nope'"),
    ("build --module sys:exit -o x", 2, "--module sys:exit failed with SystemExit; --debug shows all of it"),
    ("build --module leaving:make -o x", 2, "--module leaving:make failed with SystemExit: 3 (leaving.py, line 4)"),
    ("build --module usage:make -o x", 2, "importing usage failed with SystemExit: usage: make MODEL (usage.py, line"),
    ("build --module os:getcwd", 2, "--module os:getcwd returned a str; expected an nn.Module"),
    # build: where, and for what
    ("build --variant lsh --runtime cuda", 2, "unknown --runtime 'cuda'; did you mean 'ort-cuda'?"),
    ("build --variant lsh --runtime ort-cuda", 2, "has no CUDAExecutionProvider"),
    ("build --variant lsh --implementation kernels", 2, "did you mean 'kernel'?"),
    ("build --variant lsh --target tensorrt", 2, "unknown --target 'tensorrt'; did you mean 'trt'?"),
    ("build --variant lsh --profile seq=64", 2, "--profile: only for engines, and none was requested"),
    ("build --variant lsh --target trt-rtx --profile seq=1:2", 2, "cannot read the range '1:2' of seq"),
    ("build --variant lsh --plugins never", 2, "--plugins: only for engines, and none was requested"),
    ("build --variant lsh --target trt --plugins some", 2, "unknown --plugins 'some'"),
    ("build --variant lsh --target trt-rtx --profile seq=1:2:4294967296", 2, "expected at most 2147483647"),
    ("build --variant lsh -o art", 2, "art exists; choose another folder with -o, or replace it with --force"),
    ("build --variant lsh -o text", 2, "text is a file; expected the path of a folder to create"),
    ("build --variant lsh -o text --force", 2, "text is a file"),
    ("build --variant lsh -o text/below", 2, "cannot write to text: not a folder; choose another folder with -o"),
    (
        "build --variant lsh -o checkpoint",
        2,
        "checkpoint has other files in it, such as 'config.json', and is not an artifact, so --force does not replace "
        "it; choose another folder with -o, such as checkpoint/artifact",
    ),
    ("build --variant lsh -o .", 2, "choose another folder with -o, such as artifact"),
    ("build --variant lsh -o checkpoint --force", 2, "is not an artifact, so --force does not replace it"),
    ("build --variant lsh -o dangling", 2, "dangling is a link to nowhere, which does not exist; remove the link"),
    ("build --variant lsh -o /proc --force", 2, "/proc is a mount point, which cannot be replaced"),
    ("build --variant lsh -o /proc/out", 2, "cannot write to /proc"),
    # verify
    ("verify art --reference torch --weights loop", 2, "loop"),
    ("report art -o loop", 2, "Symlink loop from "),
    ("inline art -o loop", 2, "Symlink loop from "),
    ("package art -o loop", 2, "Symlink loop from "),
    ("sign art", 2, "expected --key FILE, or --sigstore to sign with an identity"),
    ("sign art --key text", 2, "text cannot be read, or has another password; expected a private key in PEM"),
    ("sign nope --key text", 2, "no artifact at nope"),
    ("verify art --identity text", 2, "text cannot be read; expected a public key in PEM"),
    ("evaluate art", 2, "--data is missing; see: effexport evaluate --help"),
    ("evaluate art --data nope", 2, "returns last_hidden_state, which labels cannot judge"),
    ("evaluate nope --data text", 2, "no artifact at nope; make one with: effexport build"),
    ("verify", 2, "ARTIFACT is missing; expected: effexport verify [OPTIONS] ARTIFACT"),
    ("prove", 2, "MODEL is missing; expected: effexport prove [OPTIONS] MODEL"),
    ("prove nowhere.onnx", 2, "--against is missing; see: effexport prove --help"),
    ("prove nowhere.onnx --against also.onnx", 2, "no model file at nowhere.onnx; expected the path of an ONNX file"),
    ("verify nope", 2, "no artifact at nope; make one with: effexport build"),
    (
        "verify .",
        2,
        ". is not an artifact: it has no manifest.json; expected a folder made by",
    ),
    ("verify art/model.onnx", 2, "it is a file; expected a folder made by effexport build, such as art"),
    ("verify checkpoint", 2, "export it first: effexport build --checkpoint checkpoint"),
    ("verify foreign", 2, "it has no format_version; expected one that effexport build wrote"),
    ("verify art --model nope.onnx", 2, "no model file at nope.onnx; expected the path of an ONNX file"),
    (
        "verify art --model garbage",
        2,
        "garbage is not an ONNX model: it has another format or is damaged; expected the path",
    ),
    ("verify art --runtime orrt", 2, "unknown --runtime 'orrt'; did you mean 'ort'?"),
    ("verify art --model empty", 2, "empty is not an ONNX model"),
    ("verify art --model swept", 2, "swept is a folder; expected the path of an ONNX file"),
    ("verify art --implementation kernels", 2, "unknown --implementation 'kernels'; did you mean 'kernel'?"),
    ("verify art --runtime ort-cuda", 2, "has no CUDAExecutionProvider, only "),
    ("verify art --runtime trt-rtx", 2, "art has no trt-rtx engine"),
    ("verify art --precision-hint bf16", 2, "does not apply to --runtime ort"),
    ("verify art --reference gold", 2, "unknown --reference 'gold'; did you mean 'golden'?"),
    ("verify art --reference nope.safetensors", 2, "no reference file at nope.safetensors"),
    ("verify art --reference nope@ort", 2, "there is no nope; expected an artifact or an ONNX file before the @"),
    ("verify art --reference golden --case nope", 2, "there is no case 'nope'. Expected: 'export'"),
    ("verify art -o nope/x.html", 2, "nope does not exist; create the folder"),
    # run
    ("run art", 2, "nothing to run given; expected one of --input FILE.npz, --text FILE or a task: --fill-mask"),
    ("run art --text text --input in.npz", 2, "--input and --text given; expected one of"),
    ("run art --fill-mask x --classify y", 2, "--fill-mask and --classify were given; expected one task"),
    ("run art --text text --classify y", 2, "--text and --classify given; expected one of"),
    ("run art --answer who", 2, "a question and its context go together: --answer QUESTION --context FILE"),
    ("run art --text text --context text", 2, "a question and its context go together"),
    ("run art --text text --top 3", 2, "--top only works with --fill-mask, --classify or --answer"),
    ("run art --fill-mask x --stride 3", 2, "--stride does not apply to --fill-mask"),
    ("run art --input in.npz --stride 3", 2, "it does not apply to --input"),
    ("run art --text text --stride -3", 2, "stride is -3; expected at least 0"),
    ("run art --embed text --stride -3", 2, "stride is -3; expected at least 0"),
    ("run art --fill-mask x --top 0", 2, "top is 0; expected at least 1"),
    ("run art --fill-mask x", 2, "art answers feature-extraction, so --fill-mask does not apply; use --embed"),
    ("run art --fill-mask x -o out.npz", 2, "--fill-mask prints its answer; leave out --output"),
    ("run art --embed nope", 2, "no text file at nope"),
    ("run art --embed garbage -o out.npz", 2, "garbage is not UTF-8: byte 0 is 0x"),
    ("build --variant lsh --tokenizer nope", 2, "--tokenizer is nope; expected a folder with tokenizer.json, or none"),
    (
        "build --variant lsh --tokenizer swept -o new",
        2,
        "swept has no tokenizer; expected a folder with tokenizer.json",
    ),
    ("run nope --text text", 2, "no artifact at nope"),
    ("run art --text nope", 2, "no text file at nope"),
    ("run art --text .", 2, "cannot read .: Is a directory"),
    ("run art --text empty", 2, "is empty; expected at least one byte of text"),
    ("run art --text text --implementation kernels", 2, "did you mean 'kernel'?"),
    ("run art --input nope.npz", 2, "no input file at nope.npz; expected an .npz file with one array per input name"),
    ("run art --input -", 2, "--input does not read standard input; expected an .npz file. A text can be piped"),
    ("run art --input art", 2, "art is a folder; expected an .npz file with one array per input name"),
    ("run art --input garbage", 2, "it has another format or is damaged; expected an .npz file with one array"),
    ("run art --input empty", 2, "it has another format or is damaged; expected an .npz file with one array"),
    ("run art --input objects.npz", 2, "objects.npz is not an .npz file of plain arrays: Object arrays cannot be"),
    ("run art --input in.npz", 2, "unknown input 'ids'; did you mean 'input_ids'?"),
    ("run art --text text -o out.txt", 2, "out.txt does not end in .npz"),
    ("run art --text text -o nope/out.npz", 2, "nope does not exist; create the folder"),
    ("run art --text text -o in.npz", 2, "in.npz exists; choose another file with -o, or replace it with --force"),
    ("run art --input in.npz -o in.npz --force", 2, "in.npz is the input itself, which the outputs would replace"),
    ("run art --text text -o art/out.npz", 2, "would change the artifact"),
    ("run art --text text -o art", 2, "art is a folder"),
    ("run art --text text --runtime ort-cuda", 2, "has no CUDAExecutionProvider"),
    # inspect and report
    ("inspect", 2, "PATH is missing; expected: effexport inspect [OPTIONS] PATH"),
    (
        "inspect nope",
        2,
        "nothing is at nope; expected an artifact folder, a checkpoint folder, an ONNX file or an engine",
    ),
    ("inspect .", 2, "is not an artifact"),
    ("inspect google/reformer-enwik8", 2, "hf download google/reformer-enwik8 --local-dir reformer-enwik8"),
    ("inspect art/reference.safetensors", 2, "but a .safetensors file; expected an artifact folder, a checkpoint"),
    ("inspect art/manifest.json", 2, "but a .json file; expected an artifact folder"),
    ("inspect in.npz", 2, "but a .npz file; expected an artifact folder"),
    ("inspect garbage", 2, "garbage is not an ONNX model"),
    ("report art -o dangling", 2, "dangling is not a regular file; choose another file with -o"),
    ("inspect nope.engine", 2, "no engine at nope.engine"),
    ("report", 2, "no artifact given"),
    (
        "report swept",
        2,
        "its own report is swept/report.html; expected",
    ),
    ("report art --format pdf", 2, "unknown --format 'pdf'. Expected: html, json, markdown, junit"),
    ("report art -o report.pdf", 2, "the suffix does not name a format; expected one of .html"),
    ("report art -o nope/x.html", 2, "nope does not exist; create the folder"),
    ("report art -o text/x.html", 2, "text is not a folder; choose another file with -o"),
    ("report art -o text", 2, "text exists; choose another file with -o, or replace it with --force"),
    ("report art -o art/other.html", 2, "would change the artifact"),
    # inline and package
    ("inline art", 2, "--output is missing; see: effexport inline --help"),
    ("inline nope -o x.onnx", 2, "no artifact at nope"),
    ("inline art -o nope/x.onnx", 2, "nope does not exist; create the folder"),
    ("inline art -o art/x.onnx", 2, "would change the artifact"),
    ("refit", 2, "ARTIFACT is missing; expected: effexport refit [OPTIONS] ARTIFACT"),
    ("refit art", 2, "expected new weights as either --weights FILE or --checkpoint DIR"),
    ("refit nope --weights new.safetensors", 2, "no artifact at nope"),
    ("refit art --weights nope.safetensors", 2, "nope.safetensors"),
    ("refit art --weights new.safetensors -o art/inside", 2, "would change the artifact"),
    ("package art", 2, "--output is missing"),
    ("package nope -o repository", 2, "no artifact at nope"),
    ("package art -o art", 2, "art is an artifact; expected the folder of a model repository"),
    ("package art -o repository --backend trt", 2, "unknown --backend 'trt'; did you mean 'tensorrt'?"),
    ("package art -o repository --backend tensorrt", 2, "art has no TensorRT engine"),
    ("package art -o repository --name a/b", 2, "the model's name is 'a/b'"),
    ("package art -o repository --preferred-batch x", 2, "--preferred-batch has 'x'; expected integers"),
    ("package art -o repository --kind tpu", 2, "unknown --kind 'tpu'; did you mean 'gpu'? Expected: cpu, gpu"),
    ("package art -o repository --format helm", 2, "unknown --format 'helm'. Expected: triton"),
    # serve
    ("serve nope", 2, "no artifact at nope"),
    ("serve art --port 99999", 2, "--port is 99999; expected 0 to 65535"),
    ("serve art --port http", 2, "--port: 'http' is not a valid integer"),
    ("serve art --host nowhere.invalid", 2, "--host is 'nowhere.invalid', which is not an address"),
    ("serve art --runtime orrt", 2, "unknown --runtime 'orrt'; did you mean 'ort'?"),
    ("serve art --concurrent-runs 3000", 2, "--concurrent-runs is 3000; expected at most 256"),
    ("serve art --batch-delay-ms 1e300", 2, "--batch-delay-ms is 1e+300; expected a number from 0 to 8.64e+07"),
    ("serve art --max-batch 0", 2, "--max-batch is 0; expected at least 1"),
    ("serve art --min-replicas 2", 2, "--min-replicas only works with --ray"),
    # names that are nearly right
    ("verify arts", 2, "no artifact at arts; did you mean art?"),
    ("run arts --text text", 2, "no artifact at arts; did you mean art?"),
    ("evaluate arts --data text", 2, "no artifact at arts; did you mean art?"),
    ("refit arts --weights text", 2, "no artifact at arts; did you mean art?"),
    ("inline arts -o x.onnx", 2, "no artifact at arts; did you mean art?"),
    ("serve arts", 2, "no artifact at arts; did you mean art?"),
    ("package arts -o repo", 2, "no artifact at arts; did you mean art?"),
    ("report arts", 2, "no artifact at arts; did you mean art?"),
    ("report art arts", 2, "no artifact at arts; did you mean art?"),
    ("verify ART", 2, "no artifact at ART; did you mean art?"),
    ("verify swepd/cells/aft-simple-0123abcd/artifact", 2, "did you mean swept/cells/aft-simple-0123abcd/artifact?"),
    ("verify chekpoint", 2, "no artifact at chekpoint; make one with: effexport build"),
    ("inspect chekpoint", 2, "nothing is at chekpoint; did you mean checkpoint?"),
    ("verify art --reference arts@ort", 2, "there is no arts; did you mean art?"),
    ("build --checkpoint chekpoint", 2, "there is no folder chekpoint; did you mean checkpoint?"),
    ("build --variant lsh --weights art/referenc.safetensors", 2, "did you mean art/reference.safetensors?"),
    # bench
    ("bench --variants performer", 2, "unknown variant 'performer' in --variants"),
    ("bench --variants lhs", 2, "unknown variant 'lhs' in --variants; did you mean 'lsh'?"),
    ("bench --variants lsh:rounds=4", 2, "lsh attention has no field 'rounds'"),
    ("bench --seq-lens long", 2, "--seq-lens has 'long'; expected a length in tokens, such as 512 or 32k"),
    ("bench --precision int8", 2, "--precision has 'int8'"),
    ("bench --runtimes cuda", 2, "--runtimes has 'cuda'; did you mean 'ort-cuda'?"),
    ("bench --runtimes ort-cuda", 2, "--runtimes ort-cuda cannot run here: ort-cuda: "),
    ("bench --scope layer", 2, "unknown --scope 'layer'"),
    ("bench --threads 100000", 2, "--threads is 100000; expected at most "),
    ("bench --rounds 0", 2, "--rounds is 0; expected at least 1"),
    ("bench --preset linear", 2, "unknown --preset 'linear'; did you mean 'linear-blog'?"),
    ("bench --advise", 2, "--advise needs a length, such as --seq-len 8192"),
    ("bench --memory-limit 1GB", 2, "--memory-limit only works with --advise"),
    ("bench --quality text", 2, "--quality only works with --advise"),
    (
        "bench --advise --quality nope.json",
        2,
        "nope.json cannot be read: No such file or directory; expected what `effexport evaluate",
    ),
    (
        "bench --advise --quality art/manifest.json",
        2,
        "missing required field `model`; expected what `effexport evaluate ARTIFACT",
    ),
    ("bench --advise --quality a.json,,b.json", 2, "expected a list with commas, without empty parts"),
    ("bench -o art", 2, "art has other files in it, such as 'manifest.json', and is not a benchmark, so --force does"),
    ("bench -o text/below", 2, "cannot write to text"),
    # sweep
    ("sweep", 2, "SWEEP.toml is missing; expected: effexport sweep [OPTIONS] SWEEP.toml"),
    ("sweep nope.toml", 2, "no sweep file at nope.toml; docs/sweep.md has a complete example"),
    ("sweep art", 2, "the sweep file art is a folder; docs/sweep.md has a complete example"),
    ("sweep text", 2, "cannot read the sweep file text: it is not TOML"),
    ("sweep nope.toml --jobs 0", 2, "--jobs is 0; expected a number above 0"),
]


@pytest.fixture(scope="module")
def folder(built: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the mistakes are made."""
    folder = tmp_path_factory.mktemp("mistakes")
    artifact = built("aft-simple", "encoder").path
    shutil.copytree(artifact, folder / "art")
    shutil.copytree(artifact, folder / "swept" / "cells" / "aft-simple-0123abcd" / "artifact")
    (folder / "swept" / "report.html").write_text("<p>a sweep</p>")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text(
        '{"model_type": "nystromformer", "architectures": ["NystromformerModel"]}'
    )
    (folder / "text").write_text("no TOML, but a text\n")
    (folder / "garbage").write_bytes(bytes([0xFF, 0x80, *range(256)]))
    (folder / "empty").touch()
    (folder / "leaving.py").write_text("import sys\n\ndef make():\n    sys.exit(3)\n")
    (folder / "usage.py").write_text("import sys\n\nsys.exit('usage: make MODEL')\n")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "manifest.json").write_text("{}")
    np.savez(folder / "objects.npz", ids=np.array([{}], dtype=object))
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    np.savez(folder / "in.npz", ids=np.ones((1, 4), np.int64))
    return folder


@pytest.fixture
def unchanged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in the folder; afterwards it has the same files as before."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("line", "code", "words"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_answered_with_one_line(
    cli: Callable[..., Any], unchanged: None, line: str, code: int, words: str
) -> None:
    result = cli(*shlex.split(line))
    message = result.error(code)
    assert "\n" not in message
    assert words in message
    assert result.out == ""
    assert all(line.startswith(("… ", "effexport: error: ")) for line in result.err.splitlines())


def test_the_table_has_a_hundred_rows_and_covers_every_command() -> None:
    lines = [line for line, _, _ in MISTAKES]
    assert len(set(lines)) == len(lines) >= 100
    assert {line.split()[0] for line in lines} >= set(COMMANDS)
