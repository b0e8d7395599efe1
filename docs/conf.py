"""How Sphinx builds these pages; see scripts/docs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import qccl

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

project = "qccl"
author = "the qccl authors"
release = version = qccl.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_click"]

html_theme = "furo"
html_title = f"qccl {release}"
html_static_path = ["_static"]
html_css_files = ["qccl.css"]
html_copy_source = False
html_show_copyright = False

highlight_language = "none"  # blocks without a language are shell commands, tables and drawings
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "both"
add_module_names = False
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def setup(app: Any) -> None:
    """What is made while the pages are read."""
    app.connect("source-read", add_results)
    app.connect("autodoc-process-signature", hide_constructor)


def add_results(app: Any, docname: str, source: list[str]) -> None:
    """The tables of docs/results."""
    from results_tables import markdown

    if docname == "results":
        source[0] += markdown(DOCS / "results")


def hide_constructor(app: Any, what: str, name: str, obj: object, options: Any, signature: str, returns: str) -> Any:
    """The arguments of classes whose objects only qccl makes."""
    return ("", "") if obj in (qccl.Plan, qccl.Work) else None
