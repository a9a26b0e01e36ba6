"The documentation site: `make docs` lays the sources (stage.py), builds them with Sphinx, and checks the pages (check.py). Nothing is executed or fetched."
from pathlib import Path
import sys

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import lake_engineer

project, author = "lake_engineer", "The lake_engineer developers"
release = lake_engineer.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "names"]
html_theme, html_title, html_static_path = "furo", "lake_engineer", [str(Path(__file__).parent / "static")]
html_css_files = ["style.css"]
html_copy_source = html_show_sphinx = html_show_copyright = False

nb_execution_mode = "off"  # the outputs that are stored in the notebooks are shown
nb_ipywidgets_js: dict = {}  # would come from another host
nb_merge_streams, nb_render_markdown_format = True, "myst"
nb_code_prompt_show, nb_code_prompt_hide = "Show the solution", "Hide the solution"  # of an exercise; folded imports say so themselves
myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors, myst_update_mathjax = 3, False
html_math_renderer = "mathml"  # in names.py; MathJax would come from another host

autodoc_inherit_docstrings = False  # those of other libraries are not written for this reader
default_role = "names"  # `name` in a docstring, see names.py
autodoc_default_options = {"undoc-members": True, "member-order": "bysource"}
add_module_names = False
autodoc_typehints_format, python_maximum_signature_line_length = "short", 100
python_display_short_literal_types = True
suppress_warnings = ["myst.strikethrough", "mystnb.unknown_mime_type", "misc.highlighting_failure"]
