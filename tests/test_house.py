"""Figures of scripts/house.py for a small package, and the places of faults that scripts/mutants.py plants."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "scripts" / "house.py"
# whole, it would count as a file that names it
OPERATOR = "Segment" + "Means"
FILES = {
    "README.md": "one\ntwo\n",
    "plugins/segment_means/__init__.py": f'OP = Op("segment_means", "{OPERATOR}")\n',
    "plugins/ops.py": f"# {OPERATOR}\n",
    "models/spec.py": "class Case: ...\n",
    "exporter/__init__.py": "",
    "exporter/one.py": "from effexport.two import g\n\nclass Case:\n    f = isinstance(0, EncoderSpec)\n",
    "exporter/two.py": "def g(a, b, c, d, e, f, g, h, i, j, k, l, m):\n    from effexport import one\n    x = 'trt'\n",
    "exporter/words.py": '"""Which words."""\n\nasync def f():\n    "\\nWhy?"\n\ndef g():\n    "Whatever: a noun."\n',
    "exporter/typed.py": "if TYPE_CHECKING:\n    from effexport import one\n\ndef f():\n    import effexport.one\n",
    "exporter/names.py": f'OP = "{OPERATOR}"\nNEXT = getattr(spec.model, "mask", None)\n',
}
FIGURES = {
    "README lines": 2,
    "modules": 9,
    "circles": 1,
    # typed, one, two: an import that types need and the program, too, counts
    "longest chain": 3,
    "class names used twice": 1,
    "functions above 12 parameters": 1,
    "isinstance of model kinds": 1,
    "getattr of a model": 1,
    "operator names in exporter/": 1,
    "runtime names outside the table": 1,
    "files that name one operator": 2,
    "docstrings that begin as questions": 2,
}


def house(*arguments: object) -> str:
    done = subprocess.run([sys.executable, HOUSE, *map(str, arguments)], capture_output=True, text=True, check=True)
    return done.stdout


def test_what_is_counted(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    found = json.loads(house("--checkout", tmp_path, "--json"))
    assert {name: found[name] for name in FIGURES} == FIGURES
    assert "effexport.one effexport.two" in house("--checkout", tmp_path, "--where", "circles")


def test_every_fault_that_mutants_plants_has_one_place() -> None:
    texts = {one.file: (ROOT / "plugins" / one.file).read_text(encoding="utf-8") for one in MUTANTS}
    assert [(one.file, one.old) for one in MUTANTS if texts[one.file].count(one.old) != 1] == []
