"A Sphinx extension: names in backticks lead to the reference, comments beside parameters become their descriptions, formulas become MathML."
from __future__ import annotations

from functools import cache
from typing import Any
import dataclasses
import inspect
import re

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

from stage import constants, exported, modules


@cache
def public() -> dict[str, str]:
    "Every public name and its full name; a name that several modules have is left out, unless it is asked for as `module.name`."
    short: dict[str, set[str]] = {}
    for module in modules():
        for name in exported(module):
            if not name.startswith("_"): short.setdefault(name, set()).add(f"lake_engineer.{module}.{name}")
            short[f"{module}.{name}"] = {f"lake_engineer.{module}.{name}"}
    return {name: full.pop() for name, full in short.items() if len(full) == 1}


def reference(text: str, module: str = "") -> nodes.Node:
    "Code that leads to the reference if it is a public name, of `module` first; else code."
    name, code = re.sub(r"\(.*\)$", "", text), nodes.literal(text, text)
    full = public().get(f"{module}.{name}") or public().get(name)
    if not full: return code
    return addnodes.pending_xref("", code, refdomain="py", reftype="obj", reftarget=full, refexplicit=True, refwarn=False)


class Names(SphinxRole):
    "What stands in single backticks."
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        return [reference(self.text, (self.env.ref_context.get("py:module") or "").rpartition(".")[2])], []


def link_prose(app: Sphinx, document: nodes.document) -> None:
    "Names in the prose of a chapter lead to the reference; in headings and links they stay as they are."
    module = next((m for m, p in modules().items() if p.stem == app.env.docname.rpartition("/")[2]), "")
    for code in list(document.findall(nodes.literal)):
        inside = (nodes.title, nodes.reference, addnodes.pending_xref, addnodes.desc_signature)
        if not any(isinstance(p, inside) for p in _above(code)): code.replace_self(reference(code.astext(), module))


def _above(node: nodes.Node) -> list[nodes.Node]:
    above = []
    while node.parent is not None:
        node = node.parent
        above.append(node)
    return above


def escaped(text: str) -> str:
    "A docstring of plain words for docutils: only backticks mean something."
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(p if i % 2 else re.sub(r"([*|_\\])", r"\\\1", p) for i, p in enumerate(pieces))


def comments(obj: Any) -> dict[str, str]:
    "The comments beside the parameters or fields of a function or class, where they are."
    from fastcore.docments import docments
    try: found = docments(obj, full=True)
    except (OSError, TypeError, ValueError, SyntaxError, KeyError, IndexError): return {}
    return {name: about["docment"] for name, about in found.items() if isinstance(about, dict) and about.get("docment")}


def describe(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    "Add the comments beside parameters to a docstring."
    if what == "data":  # the docstring of its type says nothing of a constant; the comment beside it does
        lines[:] = [escaped(constants(name.split(".")[1]).get(name.rpartition(".")[2], ("", ""))[1])]
        return
    lines[:] = [escaped(line) for line in lines]
    if what not in ("function", "method", "class"): return
    said = comments(obj.__init__ if what == "class" and not dataclasses.is_dataclass(obj) and "__init__" in vars(obj) else obj)
    lines += ["", *(f":{'returns' if k == 'return' else f'param {k}'}: {escaped(' '.join(v.split()))}" for k, v in said.items()), ""] if said else []


def signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, text: str | None, returns: str | None) -> tuple[str | None, str | None]:
    "A default that a factory makes is no Python and is shown as `...`."
    return (text and text.replace("<factory>", "...")), returns


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    "Fields are described with their class, and a chapter that draws another's name does not document it again."
    if what == "class" and not inspect.isroutine(obj) and not isinstance(obj, (property, type, classmethod, staticmethod)): return True
    return None


def mathml(self: Any, node: Any) -> None:
    "A formula as MathML, which browsers draw by themselves."
    from latex2mathml.converter import convert
    self.body.append(convert(node.astext(), display="block" if isinstance(node, nodes.math_block) else "inline"))
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_role("names", Names())
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.connect("autodoc-process-docstring", describe)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skip)
    app.connect("doctree-read", link_prose)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
