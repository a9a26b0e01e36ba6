"The documentation: every notebook is in it, links lead somewhere, pages ask no other host, and the numbers in the cards are those of the records."
import csv
import gzip
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import check
import stage

PAGES = [ROOT / p for p in stage.PAGES] + [ROOT / "README.md"]
INDEX = ROOT / "nbs/index.ipynb"


def prose(path):
    "The markdown of a notebook or page, without what is code."
    if path.suffix == ".ipynb": text = "\n\n".join("".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "markdown")
    else: text = path.read_text()
    return re.sub(r"`[^`\n]*`", "", stage.FENCE.sub("", text))


def anchors(path):
    "What headings can be linked to as."
    heads = re.findall(r"^#+ (.*)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}


def test_every_notebook_and_module_is_in_the_contents():
    listed = set(re.findall(r"<(.+)>", stage.contents()))
    found = {p.relative_to(ROOT).with_suffix("").as_posix() for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts and p != INDEX}
    modules = {f"api/{p.stem}" for p in (ROOT / "lake_engineer").glob("*.py") if not p.stem.startswith("_")}
    assert listed == found | modules | {p.removesuffix(".md") for p in stage.PAGES}


def test_links_between_notebooks_pages_and_files_resolve():
    links = [(p, *m.groups()) for p in [INDEX, *stage.notebooks(), *PAGES] for m in stage.LINK.finditer(prose(p))]
    assert len(links) > 50
    assert [(p.name, to) for p, to, _ in links if stage.target(to, p) is None] == []
    within = [(p, stage.target(to, p), anchor[1:]) for p, to, anchor in links if anchor]
    assert [(p.name, to.name, anchor) for p, to, anchor in within if to.suffix in (".ipynb", ".md") and anchor not in anchors(to)] == []


def test_the_chapter_table_of_the_index_has_every_chapter():
    rows = set(re.findall(r"\]\(nbs/([^/)]+\.ipynb)\)", "".join(prose(INDEX))))
    assert {p.name for p in stage.notebooks() if p.parent.name == "nbs"} <= rows


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    out = tmp_path_factory.mktemp("docs") / "source"
    stage.lay(out)
    return out


def test_the_index_is_laid_at_the_top_with_its_diagram_drawn(sources):
    text = "".join("".join(c["source"]) for c in json.loads((sources / "index.ipynb").read_text())["cells"])
    assert "```mermaid" not in text and "](nbs/12_engineer.ipynb)" in text and "](results/base/tiny/README.md)" in text
    [svg] = re.findall(r"\{image\} /(docs/\S+\.svg)", text)
    drawing = (sources / svg).read_text()
    [source] = [t for c in json.loads(INDEX.read_text())["cells"] if "```mermaid" in (t := "".join(c["source"]))]
    labels = re.findall(r"\[([^\]]+)\](?!\()|\|([^|]+)\||\(\(([^)]+)\)\)", source[source.index("```mermaid"):])
    words = [w for pair in labels for w in re.findall(r"\w+", " ".join(pair).replace("<br/>", " "))]
    assert len(words) > 15 and [w for w in words if w not in drawing] == []
    assert check.requests(sources / svg) == []


def test_what_nbdev_reads_is_not_shown(sources):
    cells = [c for p in sources.rglob("*.ipynb") for c in json.loads(p.read_text())["cells"] if c["cell_type"] == "code"]
    assert [c["id"] for c in cells if "".join(c["source"]).startswith("#|")] == []
    assert sum("export" in c["metadata"].get("tags", []) for c in cells) > 300


def test_laying_again_touches_nothing_and_removes_what_is_gone(sources):
    (sources / "old.md").write_text("# Old")
    before = {p: p.stat().st_mtime_ns for p in sources.rglob("*") if p.is_file() and p.name != "old.md"}
    stage.lay(sources)
    assert {p: p.stat().st_mtime_ns for p in sources.rglob("*") if p.is_file()} == before


PAGE = """# Small

```{toctree}
nbs/18_registration
api/registration
```

`register_when_imported` and `p(1-p)` are code, $p(1-p)$ is a formula.
"""


@pytest.fixture(scope="module")
def site(sources, tmp_path_factory):
    "One chapter and its reference, built as `make docs` builds all."
    tmp = tmp_path_factory.mktemp("site")
    for name in ("nbs/18_registration.ipynb", "api/registration.md"):
        (tmp / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp / "source" / name).write_text(re.sub(r"\[([^\]]*)\]\([^)]*07_env[^)]*\)", r"\1", (sources / name).read_text()))
    (tmp / "source/index.md").write_text(PAGE)
    done = subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "-c", ROOT / "docs", tmp / "source", tmp / "html"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return tmp / "html"


def test_a_page_links_names_and_draws_formulas(site):
    text = (site / "index.html").read_text()
    assert 'href="api/registration.html#lake_engineer.registration.register_when_imported"' in text
    assert "<math" in text and "MathJax" not in text
    chapter = (site / "nbs/18_registration.html").read_text()
    assert "default_exp" not in chapter and "tag_export" in chapter and 'href="../api/registration.html#module-lake_engineer.registration"' in chapter


def test_the_search_finds_a_docstring(site):
    index = json.loads(re.search(r"Search\.setIndex\((.*)\)", (site / "searchindex.js").read_text(), re.S)[1])
    names = {index["docnames"][i] for word in ("gymnasium", "gymnasia") for i in [index["terms"].get(word, [])] for i in ([i] if isinstance(i, int) else i)}
    assert "nbs/18_registration" in names or "api/registration" in names


def test_the_site_asks_no_other_host_and_has_no_dead_links(site, capsys):
    assert check.main(site) == 0, capsys.readouterr().err
    (site / "bad.html").write_text('<script src="https://example.org/a.js"></script><a href="nowhere.html">x</a><a href="https://example.org">y</a>')
    assert check.main(site) == 1
    said = capsys.readouterr().err.splitlines()
    (site / "bad.html").unlink()
    assert [line.split(": ")[1] for line in said] == ["asks another host", "leads nowhere"]


@pytest.mark.parametrize("text", ['<img src="//a.b/c.png">', '<img srcset="x.png 1x, https://a.b/c.png 2x">', '<link rel="stylesheet" href="http://a.b/c.css">', '<iframe src="https://a.b"></iframe>',
                                  '<link rel="dns-prefetch" href="//a.b">', '<style>@import "https://a.b/c.css";</style>', '<p style="background: url(https://a.b/c.png)">', '<script>fetch("https://a.b")</script>'])
def test_a_request_to_another_host_is_seen(tmp_path, text):
    (tmp_path / "a.html").write_text(text)
    assert len(check.requests(tmp_path / "a.html")) == 1


@pytest.mark.parametrize("text", ['<a href="https://a.b">link</a>', '<link rel="canonical" href="https://a.b">', '<img src="data:image/png;base64,AA//">', '<svg xmlns="http://www.w3.org/2000/svg"></svg>',
                                  '<pre>fetch("https://a.b")</pre>'])
def test_what_is_no_request_is_not(tmp_path, text):
    (tmp_path / "a.html").write_text(text)
    assert check.requests(tmp_path / "a.html") == []


def test_parameter_comments_become_fields():
    from lake_engineer.registration import register
    import names
    from fastcore.test import test_eq
    lines = ["What `names` do, with a * and a |."]
    names.describe(None, "function", "", test_eq, None, lines)
    assert lines[0] == r"What `names` do, with a \* and a \|."
    def f(
        size: int,  # cells per side
        seed=0,
    ) -> int:  # a number
        ...
    lines = ["Do."]
    names.describe(None, "function", "", f, None, lines)
    assert lines == ["Do.", "", ":param size: cells per side", ":returns: a number", ""]
    assert names.comments(register) == {}


def test_constants_are_in_the_reference_with_their_comments():
    found = stage.constants("registration") | stage.constants("engineer")
    assert found["ENV_ID"][0].startswith('"lake_engineer/') and found["POLICIES"] == ('("checkpoint", "base")', "the engineers that are the policy itself")
    assert found["FORMS"][0] == found["ENGINEERS"][0] == found["SMOL"][0] == "" and not [n for n in found if n.startswith("_")]
    assert ".. autodata:: lake_engineer.registration.ENV_ID\n\n" in stage.reference("registration", ROOT / "nbs/18_registration.ipynb")


def test_the_configuration_executes_nothing_and_needs_no_host():
    conf = runpy.run_path(str(ROOT / "docs/conf.py"))
    import lake_engineer
    assert conf["nb_execution_mode"] == "off" and conf["nb_ipywidgets_js"] == {} and conf["release"] == lake_engineer.__version__


# ---- cards, citation, changelog

def card(folder):
    from huggingface_hub import DatasetCard, ModelCard
    kind = ModelCard if "base" in folder else DatasetCard
    return kind((ROOT / folder / "README.md").read_text())


def percent(x): return f"{100 * float(x):.1f}"
def interval(row, kind): return f"{percent(row[kind + '_rate'])} [{percent(row[kind + '_low'])}, {percent(row[kind + '_high'])}]"


def test_the_model_card_says_what_the_records_say():
    text, made = card("results/base/tiny").text, json.loads((ROOT / "results/base/tiny/record.json").read_text())
    rates = list(csv.DictReader((ROOT / "results/benchmark/tiny/rates.csv").open()))
    tested = [f"| {r['size']} | {r['n']} | {interval(r, 'valid')} | {interval(r, 'optimal')} |" for r in rates if r["num_agents"] == "2" and r["size"] != "0"]
    whole = [f"| {r['num_agents']} | {r['n']} | {interval(r, 'valid')} | {interval(r, 'optimal')} |" for r in rates if r["size"] == "0"]
    validated = [f"| {r['size']} | {r['n']} | {interval(r, 'valid')} |" for r in made["validation"]]
    settings = [f"| boards with a solution | {made['boards']:,} |", f"| steps of {made['batch_size']} answers | {made['steps']} |", f"| learning rate | {made['learning_rate']}, {made['schedule']} |",
                f"| seed | {made['seed']} |", f"| seconds on two cores | {made['seconds']} |", f"{made['parameters']:,} parameters",
                f"| hole ratios, in equal parts | {', '.join(map(str, made['hole_ratios']))} |", f"| last recorded loss | {made['losses'][-1][1]:.2f} at step {made['losses'][-1][0]} |",
                "| agents | " + ", ".join(f"{k} agents {100 * v:.0f} %" for k, v in made["agents"].items()) + " |", f"{100 * made['wait_ratio']:.0f} % |"]
    assert (len(tested), len(whole), len(validated)) == (8, 4, 6)
    assert [line for line in tested + whole + validated + settings if line not in text] == []


def test_the_header_of_the_model_card_has_the_same_numbers():
    results = card("results/base/tiny").data.eval_results
    rates = {r["num_agents"]: r for r in csv.DictReader((ROOT / "results/benchmark/tiny/rates.csv").open()) if r["size"] == "0"}
    said = {(r.task_name.split(", ")[1][0], r.metric_type): r.metric_value for r in results}
    assert said == {(k, kind): float(percent(r[kind + "_rate"])) for k, r in rates.items() for kind in ("valid", "optimal")}


def test_the_data_card_says_what_the_files_hold(tmp_path):
    folder = ROOT / "results/benchmark/instances"
    text, made = card("results/benchmark/instances").text, json.loads((folder / "record.json").read_text())
    rows = {s: [json.loads(line) for line in gzip.open(folder / f"{s}.jsonl.gz", "rt")] for s in made["boards"]}
    counts = [f"| {s} | {k} | " + " | ".join(str(n or "") for n in by) + f" | {sum(by):,} |" for s, xs in rows.items() for k in range(2, 6)
              if sum(by := [sum(x["size"] == size and len(x["starts"]) == k for x in xs) for size in range(3, 11)])]
    total = sum(map(len, rows.values()))
    numbers = [f"\n{total:,} boards of MAPF", f"from seed {made['seed']}", f"{made['proven_by_cbs']:,} of the {total:,} ({100 * made['proven_by_cbs'] / total:.1f} %)", f"given {made['cbs_nodes']} nodes"]
    sums = [f"| `{name}` | `{digest}` |" for digest, name in map(str.split, (folder / "SHA256SUMS").read_text().splitlines())]
    fields = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|( `.*?`) \| (?:string|int|bool|list)", text, re.M))))
    assert len(counts) == 5 and len(sums) == 3 and [line for line in counts + numbers + sums if line not in text] == []
    assert fields == set().union(*(x for xs in rows.values() for x in xs))


def test_the_folder_of_the_benchmark_is_a_data_set_as_it_is(tmp_path):
    from datasets import load_dataset
    found = load_dataset(str(ROOT / "results/benchmark/instances"), cache_dir=str(tmp_path))
    made = json.loads((ROOT / "results/benchmark/instances/record.json").read_text())
    assert {s: len(rows) for s, rows in found.items()} == made["boards"]


def test_citation_and_changelog_agree_with_the_package():
    import lake_engineer
    import yaml
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == lake_engineer.__version__ and cited["license"] == "Apache-2.0" and cited["cff-version"] == "1.2.0"
    assert "2606.17682" in cited["references"][0]["url"] and {"title", "authors", "message"} <= cited.keys()
    heads = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heads[0] == "Unreleased" and (heads[1:2] == [lake_engineer.__version__] or f"will be {lake_engineer.__version__}" in (ROOT / "CHANGELOG.md").read_text())
    assert set(re.findall(r"^### (\w+)", (ROOT / "CHANGELOG.md").read_text(), re.M)) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_contributing_names_what_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"make ([\w-]+)", text)) - {"a"}
    assert targets and targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = set(re.findall(r"\.venv/bin/([\w-]+)", text)) | set(re.findall(r"python -m (\w+)", text))
    [path] = re.findall(r"nbdev-test (\S+)", text)  # it takes the notebook by position
    assert (ROOT / path).is_file()
    assert commands == {"python", "nbdev-export", "nbdev-test", "nbdev-clean", "pytest", "ruff", "mypy", "ipykernel"}
