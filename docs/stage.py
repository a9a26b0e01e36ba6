"Lay the sources of the documentation site: notebooks, pages and what they link to, as one tree with `index` at its top."
from __future__ import annotations

from pathlib import Path
import ast
import copy
import hashlib
import json
import os
import re
import shutil
import sys

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "Contributing", "CHANGELOG.md": "Changelog", "results/base/tiny/README.md": "Model card: the base",
         "results/benchmark/instances/README.md": "Data card: the benchmark", "environments/mapf_frozen_lake/README.md": "Taskset for verifiers"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")  # a relative link in markdown: target and anchor
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)


def notebooks() -> list[Path]:
    "Every notebook but the index, in the order of reading: the tour, the chapters, the experiments."
    chapters = sorted((ROOT / "nbs").glob("[0-9]*.ipynb"))
    others = sorted(p for p in (ROOT / "nbs").glob("*.ipynb") if p not in chapters and p.stem != "index")
    return [*others, *chapters, *sorted((ROOT / "nbs/experiments").glob("*.ipynb"))]


def modules() -> dict[str, Path]:
    "Module name to the notebook that exports it."
    named = {p: re.search(r"#\| default_exp (\w+)", p.read_text()) for p in notebooks()}
    return {m[1]: p for p, m in named.items() if m}


def home(path: Path) -> Path:
    "The folder that a file's relative links start from; the index is also the README, so its links start at the root."
    return ROOT if path == ROOT / "nbs/index.ipynb" else path.parent


def title(path: Path) -> str:
    "The title of a notebook, with the chapter's number."
    number = re.match(r"\d+(?=_)", path.stem)
    first = "".join(json.loads(path.read_text())["cells"][0]["source"]).splitlines()[0].removeprefix("# ")
    return f"{number[0]} {first}" if number else first


def contents() -> str:
    "The tables of contents, as hidden directives."
    def listed(caption: str, entries: list[str]) -> str: return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"])
    entry = {p: f"{title(p)} <{p.relative_to(ROOT).with_suffix('')}>" for p in notebooks()}
    pages = [f"{name} <{path.removesuffix('.md')}>" for path, name in PAGES.items() if (ROOT / path).exists()]
    parts = {"Chapters": [e for p, e in entry.items() if p.parent.name == "nbs"], "Reference": [f"{m} <api/{m}>" for m in sorted(modules())],
             "Experiments": [e for p, e in entry.items() if p.parent.name == "experiments"], "Project": pages}
    return "\n\n".join(listed(*part) for part in parts.items())


def target(link: str, path: Path) -> Path | None:
    "The file or folder in the repository that a relative link of the page `path` means; None if there is none."
    found = Path(os.path.normpath(home(path) / link))
    return found if found.exists() and found.is_relative_to(ROOT) else None


def relink(text: str, path: Path, wanted: set[Path]) -> str:
    "Links as the site needs them; what they lead to is added to `wanted`. A folder leads to its README; what is no page stays plain text."
    def one(m: re.Match[str]) -> str:
        found = target(m[1], path)
        if found is None: raise SystemExit(f"error: {path.relative_to(ROOT)} links to {m[1]}, which does not exist.")
        if found.is_dir(): return f"{m[1].rstrip('/')}/README.md" if (found / "README.md").exists() else "#"
        if found == ROOT / "nbs/index.ipynb": return os.path.relpath(ROOT / "index.ipynb", home(path))
        if found.suffix == ".md" and found.relative_to(ROOT).as_posix() not in PAGES: return "#"
        if found.suffix not in (".ipynb", ".md"): wanted.add(found)
        return m[0]
    return re.sub(r"\[([^\]]*)\]\(#\)", r"\1", LINK.sub(one, text))


def diagram(text: str, wanted: set[Path]) -> str:
    "The drawn figure in the place of a mermaid diagram, which a browser could draw only with a script from elsewhere."
    def drawn(m: re.Match[str]) -> str:
        svg = ROOT / "docs" / f"diagram-{hashlib.sha256(m[1].encode()).hexdigest()[:8]}.svg"
        if not svg.exists(): raise SystemExit(f"error: docs/{svg.name} is missing; draw the diagram with: python docs/diagram.py")
        wanted.add(svg)
        return f"```{{image}} /docs/{svg.name}\n:alt: The loop\n:width: 100%\n```"
    return re.sub(r"^```mermaid\n(.*?)^```", drawn, text, flags=re.M | re.S)


def shown(cell: dict) -> dict | None:
    "A code cell as a reader needs it: nbdev's directives become tags, cells that it hides are left out."
    text = "".join(cell["source"])
    if text.startswith(("#| hide", "#| default_exp")): return None
    tags, body = cell["metadata"].setdefault("tags", []), re.sub(r"\A(#\|.*\n?)+\n*", "", text)
    if text.startswith("#| export"): tags.append("export")
    if "export" in tags and all(re.match(r"(from|import|if TYPE_CHECKING|else|\s|#|\)|$)", line) for line in body.splitlines()):
        tags.append("hide-input")
        cell["metadata"]["mystnb"] = dict(code_prompt_show="Show the imports", code_prompt_hide="Hide the imports")
    if any("text/markdown" in out.get("data", {}) for out in cell["outputs"]): tags.append("remove-input")
    return cell | dict(source=body) if body.strip() else None


def notebook(path: Path, wanted: set[Path]) -> str:
    "A notebook as the site shows it."
    nb, out = json.loads(path.read_text()), []
    for cell in copy.deepcopy(nb["cells"]):
        if cell["cell_type"] == "markdown": cell["source"] = relink(diagram("".join(cell["source"]), wanted), path, wanted)
        kept = shown(cell) if cell["cell_type"] == "code" else cell
        if kept: out.append(kept)
    module = next((m for m, p in modules().items() if p == path), None)
    if module: out[0]["source"] += f"\n\n{{.module}}\nModule {{py:mod}}`lake_engineer.{module}`: the cells with a blue edge."
    if path.stem == "index": out.append(dict(cell_type="markdown", id="contents", metadata={}, source=contents()))
    return json.dumps(nb | dict(cells=out), indent=1)


def page(path: Path, wanted: set[Path]) -> str:
    "A page of markdown, without the YAML header that only a hub reads."
    return relink(re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.S), path, wanted)


def exported(module: str) -> list[str]:
    "`__all__` of a module, which is read and not imported."
    body = ast.parse((ROOT / "lake_engineer" / f"{module}.py").read_text()).body
    return next(ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__")


def constants(module: str) -> dict[str, tuple[str, str]]:
    "The public constants of a module, with their value where it is short, and the comment beside them."
    lines = (ROOT / "lake_engineer" / f"{module}.py").read_text().splitlines()
    found = [re.match(r"([A-Z][A-Z_\d]+)(?:: [^=]+)? = (.*?)(?:  # (.*))?$", line) for line in lines]
    return {m[1]: (m[2] if literal(m[2]) else "", m[3] or "") for m in found if m and m[1] in exported(module)}


def literal(text: str) -> bool:
    "Whether a value is short and written out, not computed or filled later."
    try: return len(text) <= 80 and bool(ast.literal_eval(text))
    except (ValueError, SyntaxError): return False


def reference(module: str, path: Path) -> str:
    "The page of a module."
    name = f"lake_engineer.{module}"
    data = [line for c, (value, _) in constants(module).items() for line in (f".. autodata:: {name}.{c}", *([] if value else ["   :no-value:"]), "")]
    return "\n".join([f"# {module}", "", f"Written in [{title(path)}](../{path.relative_to(ROOT)}).", "", "```{eval-rst}", f".. automodule:: {name}", "   :members:", "", *data, "```", ""])


def lay(out: Path) -> None:
    "Write the tree to `out`; files that have not changed are not touched, those of a former build that are no longer needed go."
    wanted: set[Path] = set()
    texts = {p.relative_to(ROOT).as_posix(): notebook(p, wanted) for p in notebooks()} | {"index.ipynb": notebook(ROOT / "nbs/index.ipynb", wanted)}
    texts |= {p: page(ROOT / p, wanted) for p in PAGES if (ROOT / p).exists()} | {f"api/{m}.md": reference(m, p) for m, p in modules().items()}
    whole = {name: text.encode() for name, text in texts.items()} | {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in wanted}
    for name, data in whole.items():
        file = out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_bytes() != data: file.write_bytes(data)
    for file in [p for p in out.rglob("*") if p.is_file() and p.relative_to(out).as_posix() not in whole]: file.unlink()


if __name__ == "__main__":
    if "--fresh" in sys.argv: shutil.rmtree(sys.argv[1], ignore_errors=True)
    lay(Path(sys.argv[1]))
