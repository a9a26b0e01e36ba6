"The repository itself: notebooks and modules agree, experiments take their parameters, imports are light."
import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lake_engineer.batch import notebook_parameters

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
EXPERIMENTS = [p for p in NOTEBOOKS if p.parent.name == "experiments"]


def cells(path):
    return json.loads(path.read_text())["cells"]


def source(cell):
    return "".join(cell["source"])


def exported(path):
    return [source(c) for c in cells(path) if c["cell_type"] == "code" and source(c).startswith("#| export")]


def code_lines(text):
    return [ln for ln in text.splitlines() if ln.strip() and not ln.strip().startswith("#|")]


def test_modules_are_what_the_notebooks_export(tmp_path):
    for name in ("pyproject.toml", "README.md"):
        if (ROOT / name).exists(): (tmp_path / name).write_text((ROOT / name).read_text())
    subprocess.run(["cp", "-r", str(ROOT / "nbs"), str(tmp_path / "nbs")], check=True)
    (tmp_path / "lake_engineer").mkdir()
    (tmp_path / "lake_engineer/__init__.py").write_text((ROOT / "lake_engineer/__init__.py").read_text())
    subprocess.run([sys.executable, "-c", "from nbdev.doclinks import nbdev_export; nbdev_export()"], cwd=tmp_path, check=True, capture_output=True)
    fresh = {p.name: p.read_text() for p in (tmp_path / "lake_engineer").glob("*.py")}
    here = {p.name: p.read_text() for p in (ROOT / "lake_engineer").glob("*.py")}
    assert fresh.keys() == here.keys(), "a module without a notebook, or the other way round; run nbdev-export"
    assert [n for n in fresh if fresh[n] != here[n]] == [], "edited by hand or not exported; run nbdev-export"


def test_export_cells_are_short():
    sizes = {p.name: {text.splitlines()[1]: len(code_lines(text)) for text in exported(p)} for p in NOTEBOOKS}
    assert [(name, first) for name, found in sizes.items() for first, n in found.items() if n > 30] == []
    assert statistics.median(n for found in sizes.values() for n in found.values()) <= 10
    longer = {name: median for name, found in sizes.items() if len(found) >= 8 and (median := statistics.median(found.values())) > 11}
    assert longer == {}, "the median cell of each notebook is short, too; cut the long ones where an idea ends"


def test_no_cell_id_is_used_twice():
    ids = Counter(c["id"] for p in NOTEBOOKS for c in cells(p))
    assert [i for i, n in ids.items() if n > 1] == []


@pytest.mark.parametrize("number", range(1, 14))
def test_a_chapter_ends_with_exercises_whose_solutions_are_checked(number):
    [path] = [p for p in NOTEBOOKS if p.name.startswith(f"{number:02}_")]
    every = cells(path)
    last = max(i for i, c in enumerate(every) if c["cell_type"] == "markdown" and re.search("^## ", source(c), re.M))
    questions, solutions = every[last::2], every[last + 1::2]
    assert source(questions[0]).startswith("## Exercises\n") and len(questions) == len(solutions) in (2, 3)
    for n, (question, solution) in enumerate(zip(questions, solutions), 1):
        assert question["cell_type"] == "markdown" and re.search(rf"^\*\*{n}\.\*\* ", source(question), re.M)
        assert solution["cell_type"] == "code" and solution["metadata"].get("tags") == ["hide-cell"], "a solution is folded for readers"
        assert re.search(r"^(assert |test_\w+\()", source(solution), re.M) and not source(solution).startswith("#|"), "a solution is checked, and not exported"


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_experiments_take_parameters_and_export_nothing(path):
    code = [c for c in cells(path) if c["cell_type"] == "code"]
    assert code[0]["metadata"].get("tags") == ["parameters"], "papermill would ignore every parameter"
    assert notebook_parameters(path), "batch runs can give it values"
    assert exported(path) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_opens_with_a_title_and_is_clean(path):
    first = cells(path)[0]
    assert first["cell_type"] == "markdown" and source(first).startswith("# ") and "\n> " in source(first)
    ids = [c["id"] for c in cells(path)]
    assert len(set(ids)) == len(ids)
    assert all(c.get("execution_count") is None for c in cells(path))
    for c in cells(path):
        for out in c.get("outputs", []): assert out["output_type"] != "error" and "/work/" not in json.dumps(out) and "/tmp/" not in json.dumps(out)


def test_nbdev_clean_keeps_the_parameters_tag(tmp_path):
    copy = tmp_path / "nbs"
    copy.mkdir()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    path = copy / EXPERIMENTS[0].name
    path.write_text(EXPERIMENTS[0].read_text())
    subprocess.run([str(Path(sys.executable).parent / "nbdev-clean"), "--fname", str(path)], cwd=tmp_path, check=True, capture_output=True)
    assert any("parameters" in c["metadata"].get("tags", []) for c in cells(path))


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, lake_engineer, lake_engineer.lake; print([m for m in ('torch', 'transformers', 'trl', 'pandas', 'matplotlib', 'numba') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_readme_is_the_index_notebook():
    command = [sys.executable, "-m", "nbconvert", "--to", "markdown", "--stdout", "--log-level", "ERROR", "nbs/index.ipynb"]
    fresh = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert fresh.strip() == (ROOT / "README.md").read_text().strip(), "run: make readme"


def test_the_repository_names_no_machine():
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    texts = [f for f in files if Path(f).suffix in (".py", ".ipynb", ".md", ".ini", ".toml", ".txt", ".yml", ".json", "") and (ROOT / f).is_file()]
    assert [f for f in texts if f != "tests/test_project.py" and ("/work/" in (t := (ROOT / f).read_text(errors="ignore")) or "/root/" in t)] == []
