"""Mutated artifacts: damage that the checksums must notice, and edits with the checksums made right again."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kernel_sessions import run_values, session

from campaign import records
from campaign.commands import WORKERS, Case, Ended, Tally, in_workers, run_command
from campaign.onnx_mutations import mutated_model
from campaign.strange import FORGED, OPTION, any_number_of_digits, contents, damage, mutated_json, text_of

# What verify's limits allow in float32; a wrong answer is far beyond it.
WRONG = 1e-2
# Of the cases, those that are about other files than artifacts.
SHARE_OF_RECORDS = 0.1
ENGINE = "inspect engine"


def run(cases: int, seed: int, folder: Path, workers: int = WORKERS) -> Tally:
    """Mutate artifacts of several kinds and give each to a command."""
    return in_workers(cases, attacker, healthy_artifacts(), folder, seed, workers=workers)


def healthy_artifacts() -> Path:
    """The folder of the artifacts that are copied and attacked, from an earlier run if nothing has changed since."""
    from kept import kept
    from small_builds import what_decides_a_build

    return kept("campaign", [Path(__file__), *what_decides_a_build()], make_artifacts)


def make_artifacts(folder: Path) -> None:
    """One small artifact for each kind of content that artifacts may have; most are those of other tests, too."""
    from checkpoint_artifacts import checkpoint_artifact
    from small_builds import built_artifact
    from small_specs import spec_of

    import effexport

    built = {
        "lsh": built_artifact(spec_of("lsh", "encoder")),
        "lm": built_artifact(spec_of("linear", "encoder", lm_head=True)),
        "decoder": built_artifact(spec_of("aft-simple", "attention", causal=True)),
        "int8": built_artifact(spec_of("linear", precision="int8")),
        "external": built_artifact(spec_of("aft-simple", "attention", external_data=True)),
        "text": checkpoint_artifact("NystromformerForSequenceClassification").artifact,
    }
    for name, path in built.items():
        shutil.copytree(path, folder / name)
    if importlib.util.find_spec("tensorrt_rtx") is not None:
        spec = spec_of("softmax", "attention", dim=16, seq_len=16)
        effexport.build(spec, folder / "engine", targets=["trt-rtx"])


def attacker(healthy: Path, work: Path, seed: int, number: int) -> Case:
    """The function of a case, in one worker."""
    mine = work / f"worker-{number}"
    mine.mkdir(parents=True, exist_ok=True)
    originals = [Original(folder, mine / f"{folder.name}.npz") for folder in sorted(healthy.iterdir())]
    end_servers_at_once()
    for original in originals:  # imports what commands import
        assert started("verify", original, original.folder, mine).code == 0

    def case(index: int) -> str:
        dice = random.Random(f"{seed}-{index}")
        if dice.random() < SHARE_OF_RECORDS:
            return records.attack(dice, mine / "records", healthy)
        original = dice.choice(originals)
        attacked = mine / "attacked"
        shutil.rmtree(attacked, ignore_errors=True)
        shutil.copytree(original.folder, attacked, symlinks=True)
        mutation = dice.choice(MUTATIONS)
        what = f"{original.folder.name}: {mutation.__name__}: {mutation(attacked, dice)}"
        before = contents(attacked)
        name = dice.choice(list(COMMANDS))
        output = mine / "output"
        output.mkdir(exist_ok=True)
        try:
            outcome = attack(name, original, attacked, output)
            assert contents(attacked) == before, f"{name} changed the artifact"
            # of an engine, only its own two files are looked at
            assert outcome != "accepted" or mutation is not damaged_file or name == ENGINE, f"{name} accepted damage"
        except AssertionError as error:
            raise AssertionError(f"{what}: {str(error).replace(str(mine), '')}") from error
        finally:
            shutil.rmtree(output, ignore_errors=True)
        return outcome

    return case


def attack(name: str, original: Original, attacked: Path, output: Path) -> str:
    """Run a command on an attacked artifact; the outcome, or AssertionError for one that must not be."""
    ended = started(name, original, attacked, output)
    outcome = ended.check()
    left = [path.name for path in output.iterdir()] if output.exists() else []
    if outcome == "refused":
        assert not left, f"{name} refused and left {left}"
    if outcome == "accepted" and name == "verify":
        difference = original.difference(attacked)
        assert difference < WRONG, f"verify passed a model whose outputs differ by {difference:g}"
    if outcome == "accepted":
        check_shown(ended, name)
    if outcome == "accepted" and name == "package":
        records.check_pages(output / "triton", name)
    return outcome


def check_shown(ended: Ended, name: str) -> None:
    """Raise AssertionError for a line, or an option of a command, that a text of the artifact has made."""
    lines = [line.strip() for line in (ended.out + ended.err).splitlines()]
    assert not [line for line in lines if line.startswith(FORGED)], f"{name}: a text made a line of its own"
    commands = [line for line in lines if line.startswith("effexport ")]
    options = [line for line in commands if OPTION in line.split()]
    assert not options, f"{name}: a text became an option: {options[:1]}"


class Original:
    """A healthy artifact: inputs, and what they must give."""

    def __init__(self, folder: Path, inputs: Path) -> None:
        self.folder = folder
        self.inputs = inputs
        self.feeds = self._feeds()
        np.savez(self.inputs, **self.feeds)  # type: ignore[arg-type]
        self.outputs = self._run(folder / "model.onnx")

    def _feeds(self) -> dict[str, np.ndarray[Any, Any]]:
        from safetensors.numpy import load_file

        tensors = load_file(str(self.folder / "reference.safetensors"))
        first = sorted(tensors)[0].partition("/")[0]
        return {key.split("/", 2)[2]: value for key, value in tensors.items() if key.startswith(f"{first}/inputs/")}

    def _run(self, model: Path) -> list[np.ndarray[Any, Any]]:
        return run_values(session(model, library=False, level=4), self.feeds)

    def difference(self, attacked: Path) -> float:
        """By how much the outputs of an attacked model differ, relative to the largest."""
        given = self._run(attacked / "model.onnx")
        if [one.shape for one in given] != [one.shape for one in self.outputs]:
            return float("inf")
        differences = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(given, self.outputs, strict=True)]
        return float(np.nan_to_num(max(differences), nan=np.inf))


def damaged_file(folder: Path, dice: random.Random) -> str:
    """A file is damaged, missing or something else, and no checksum made right."""
    return damage(dice.choice([file for file in files_of(folder) if file.stat().st_size]), dice)


def manifest_edit(folder: Path, dice: random.Random) -> str:
    values, what = mutated_json(manifest_of(folder), dice)
    write_manifest(folder, values)
    return what


def report_edit(folder: Path, dice: random.Random) -> str:
    return edited_json(folder, folder / "report.json", dice)


def record_edit(folder: Path, dice: random.Random) -> str:
    """A change in a sidecar, or in a file of the tokenizer."""
    files = [
        file
        for file in files_of(folder)
        if file.suffix == ".json" and file.name not in ("manifest.json", "report.json")
    ]
    return edited_json(folder, dice.choice(files or [folder / "report.json"]), dice)


def model_edit(folder: Path, dice: random.Random) -> str:
    file = dice.choice([file for file in files_of(folder) if file.suffix == ".onnx"])
    data, what = mutated_model(file.read_bytes(), dice)
    file.write_bytes(data)
    make_right(folder)
    return f"{file.name}: {what}"


def answers_edit(folder: Path, dice: random.Random) -> str:
    """Golden values that are another, or another kind of, safetensors file."""
    file = folder / "reference.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    how = dice.choice(("header", "header", "header", "length", "bytes", "metadata"))
    if how == "length":
        length = dice.choice((0, 1, length + 1, 2**31, 2**63))
        file.write_bytes(length.to_bytes(8, "little") + data[8:])
        what = str(length)
    elif how == "bytes":
        changed = bytearray(data)
        changed[dice.randrange(8 + length, len(changed))] ^= 1 << dice.randrange(8)
        file.write_bytes(changed)
        what = "flipped"
    else:
        header = json.loads(data[8 : 8 + length])
        if how == "metadata":
            key = dice.choice(list(header["__metadata__"]))
            inner, what = mutated_json(json.loads(header["__metadata__"][key]), dice)
            header["__metadata__"][key] = text_of(inner)
        else:
            header, what = mutated_json(header, dice)
        text = text_of(header).encode("utf-8", "surrogatepass")
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    make_right(folder)
    return f"{how} {what}"


def large_manifest(folder: Path, dice: random.Random) -> str:
    """A manifest of many megabytes, with its checksum made right where that is quick."""
    file = folder / "manifest.json"
    values = manifest_of(folder)
    megabytes = dice.choice((1, 7, 9, 100))
    how = dice.choice(("text", "lists", "spaces", "keys"))
    if how == "text":
        values["notes"] = ["\U0001f600" * (megabytes << 18)]
    elif how == "lists":
        values["spec"]["x"] = [[]] * (megabytes << 17)
    elif how == "keys":
        values["environment"] = {f"k{i}": "" for i in range(megabytes << 15)}
    if how == "spaces":
        file.write_text(file.read_text(encoding="utf-8") + " " * (megabytes << 20), encoding="utf-8")
    elif megabytes < 10:
        write_manifest(folder, values)
    else:
        file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return f"{how} {megabytes} MB"


MUTATIONS: Sequence[Callable[[Path, random.Random], str]] = (
    *(damaged_file,) * 2, *(manifest_edit,) * 3, report_edit, record_edit, *(model_edit,) * 3, answers_edit,
    large_manifest,
)  # fmt: skip


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def edited_json(folder: Path, file: Path, dice: random.Random) -> str:
    values, what = mutated_json(json.loads(file.read_text(encoding="utf-8")), dice)
    file.write_text(text_of(values), encoding="utf-8")
    make_right(folder)
    return f"{file.name}: {what}"


def manifest_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return values


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """Write a manifest with the checksum that belongs to it."""
    from effexport.artifact import manifest_digest

    with any_number_of_digits():
        values["integrity"] = manifest_digest(values)
    (folder / "manifest.json").write_text(text_of(values), encoding="utf-8")


def make_right(folder: Path) -> None:
    """Write the manifest that belongs to the present files."""
    from effexport.base.files import file_digest

    values = manifest_of(folder)
    for name in values["files"]:
        file = folder / name
        values["files"][name] = {"sha256": file_digest(file), "bytes": file.stat().st_size}
    write_manifest(folder, values)


# Paths stand in braces: of the attacked artifact, of its healthy original, of inputs, and of an empty folder.
COMMANDS = {
    "inspect": "inspect {artifact}",
    ENGINE: "inspect {artifact}/engine/trt-rtx.engine",
    "inspect --json": "inspect {artifact} --json",
    "report html": "report {artifact} -o {output}/r.html",
    "report markdown": "report {artifact} --format markdown",
    "report junit": "report {artifact} --format junit",
    "report json": "report {artifact} --json",
    "report of two": "report {artifact} {healthy} -o {output}/r.html",
    "report of two, text": "report {healthy} {artifact} --format markdown",
    "verify": "verify {artifact}",
    "verify --json": "verify {artifact} --json -o {output}/v.html",
    "run": "run {artifact} --input {inputs} -o {output}/o.npz",
    "run --text": "run {artifact} --classify some-text",
    "inline": "inline {artifact} -o {output}/i.onnx",
    "package": "package {artifact} -o {output}/triton --name m",
    "card": "package {artifact} -o {output}/card --format card",
    "hub": "package {artifact} -o {output}/hub --format hub",
    "refit": "refit {artifact} --weights {artifact}/nowhere.safetensors -o {output}/refitted",
    "serve": "serve {artifact} --port 0",
}


def started(name: str, original: Original, artifact: Path, output: Path) -> Ended:
    paths = {"artifact": artifact, "healthy": original.folder, "inputs": original.inputs, "output": output}
    return run_command([word.format(**paths) for word in COMMANDS[name].split()])


def end_servers_at_once() -> None:
    """Let `effexport serve` in this process go as far as the moment in which it would listen."""
    import effexport.serving.http.server as server

    server.run_server = lambda app, bound, on_ready: (bound.close(), asyncio.run(app.state.service.models.close()))  # type: ignore[assignment]
