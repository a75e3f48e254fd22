"""README.md runs from top to bottom; the examples of docs/ parse or run as they stand, and links lead somewhere."""

from __future__ import annotations

import functools
import http.server
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import readme_run
from page_browser import Browser
from triton_server import ENVIRONMENT, TritonServer, environment

from effexport.base.spec import build_spec_from_options
from effexport.cli.main import COMMANDS, cli, main
from effexport.pipeline.build import artifact_from_spec

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PYTHON_PAGE = ROOT / "docs" / "python.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
PORT = 8000


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def prose(page: Path) -> str:
    """The page without code blocks, whose lines may look like headings and links."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands_of(page: Path) -> list[list[str]]:
    """The effexport commands of a page's shell blocks, as lists of words."""
    lines = [
        re.split(" [>&]", line)[0] for block in blocks(page, "sh") for line in block.replace("\\\n", "").splitlines()
    ]
    words = [shlex.split(line, comments=True) for line in lines]
    return [command[1:] for command in words if command and command[0] == "effexport"]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a web server for the files of a folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.soak
@pytest.mark.requires("torch", "onnx", "ort", "transformers", "browser", "portability")
def test_the_readme_runs_from_top_to_bottom_twice_in_one_folder(tmp_path: Path, browser: Browser) -> None:
    """A fresh clone, whose environment README's own commands make; onnxruntime, npm and a browser predict one byte."""
    folder = readme_run.prepared_folder(tmp_path / "clone")
    for _ in range(2):
        taken = list(readme_run.run_page(folder))
        assert taken[-1].status == 0, f"{taken[-1].line}\n{taken[-1].output}"
        builds = [done for done in taken if done.step.text.startswith("effexport build")]
        assert all("Next: " in done.output for done in builds)
    predictions = re.findall(r"^next byte: .*$", "".join(done.output for done in taken), re.MULTILINE)
    assert len(predictions) == (2 if shutil.which("npm") else 1)
    with served(folder / "share") as url:
        predictions.append(browser.logged(url).rstrip("\n"))
    assert len(set(predictions)) == 1
    shutil.rmtree(folder)  # a GB


def test_the_lines_of_the_readme_that_are_not_run_are_on_the_page() -> None:
    commands = {step.text for step in readme_run.steps_of_pages()}
    assert set(readme_run.NOT_RUN) <= commands


@pytest.mark.slow
@pytest.mark.requires("torch", "onnx", "ort", "native")
def test_the_examples_of_docs_python_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"dim": 32, "heads": 2, "layers": 1, "seq_len": 64}
    causal = {"variant": "linear", "causal": True}
    writer = causal | {"lm_head": True, "seq_len": 256}
    for name, options in {"lsh": {"variant": "lsh"}, "linear": causal, "writer": writer}.items():
        artifact_from_spec(build_spec_from_options(small | options, None), Path("artifacts") / name)
    examples = blocks(PYTHON_PAGE, "python")
    assert len(examples) == 10
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    assert names["out"].shape == (2, 1000, 256)
    assert names["hidden"].shape == (2, 1, 32)
    assert [value.name for value in names["session"].get_inputs()] == ["input_ids", "attention_mask"]


@pytest.mark.requires("torch", "onnx", "ort", "native", "triton")
@pytest.mark.xdist_group("triton")
def test_the_serving_example_packages_an_artifact_and_gets_its_answers_from_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = build_spec_from_options({"variant": "lsh", "dim": 32, "heads": 2, "layers": 1, "seq_len": 64}, None)
    artifact_from_spec(spec, Path("artifacts/lsh"))
    lines = [line for block in blocks(README, "sh") for line in block.replace("\\\n", "").splitlines()]
    commands = [line.split("  #")[0] for line in lines]
    (package,) = (line for line in commands if line.startswith("effexport package"))
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(package)[1:])
    assert stop.value.code == 0
    (curl,) = (line.split(" | ")[0] for line in commands if line.startswith("curl") and "/lsh/" in line)
    (client,) = (block for block in blocks(ROOT / "docs" / "triton.md", "python") if 'infer("lsh"' in block)
    with TritonServer(Path("triton-models"), tmp_path / "log", ["lsh"]) as server:

        def here(text: str) -> str:
            return text.replace(f"localhost:{PORT}", f"127.0.0.1:{server.http}")

        answer = subprocess.run(shlex.split(here(curl)), capture_output=True, text=True, check=True, timeout=60)
        assert '"shape":[1,4,32]' in answer.stdout
        command = [str(ENVIRONMENT / "bin" / "python"), "-c", here(client)]
        result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)
        assert result.returncode == 0, result.stderr
        assert result.stdout == "(1, 4, 32)\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_exists_with_all_its_options(page: Path) -> None:
    for words in commands_of(page):
        parse(words)


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_example_of_a_help_text_exists_with_all_its_options(verb: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    for line in getattr(command, "examples", ()):
        name, *words = shlex.split(line, comments=True)
        assert name == "effexport"
        parse(words)


def parse(words: list[str]) -> None:
    """Parse a command line as click does, without running it. Raises click.UsageError for an unknown option."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        _, found, words = command.resolve_command(click.Context(command), list(words))
        assert found is not None
        command = found
    command.make_context(command.name, words, **cli.context_settings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}; headings are {sorted(anchors(file))}"


def test_every_message_on_the_page_of_refusals_is_one_of_ours() -> None:
    page = (ROOT / "docs" / "refused.md").read_text(encoding="utf-8")
    table = page[page.index("|---|") : page.index("A note is not a refusal")]
    messages = [text for row in table.splitlines()[1:] for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert len(messages) > 15
    sources = "".join(
        path.read_text(encoding="utf-8") for top in ("exporter", "models") for path in (ROOT / top).rglob("*.py")
    )
    # a message may go on in the next literal
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    assert [message for message in messages if message not in joined] == []
