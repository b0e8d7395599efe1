"""How Sphinx builds these pages; see scripts/docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from sphinx.domains.python import PyObject

import qccl
from qccl.bench.cli import main

DOCS = Path(__file__).parent
#: characters of a name that need not break in a table, because a phone has room for them
LONG_NAME = 12
sys.path.insert(0, str(DOCS))

project = "qccl"
author = "the qccl authors"
release = version = qccl.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

html_theme = "furo"
html_title = f"qccl {release}"
html_static_path = ["_static"]
html_css_files = ["qccl.css"]
html_copy_source = False
html_show_copyright = False

smartquotes = False  # quotes and dashes stand in code
highlight_language = "none"  # blocks without a language are shell commands, tables and drawings
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autoclass_content = "both"
add_module_names = False
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True


for field in PyObject.doc_field_types:
    if field.name == "variable":
        field.label = "Attributes"


def setup(app: Any) -> None:
    """What is made while the pages are read."""
    app.connect("source-read", add_generated)
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("doctree-resolved", set_dashes)
    app.connect("doctree-resolved", break_names)


def add_generated(app: Any, docname: str, source: list[str]) -> None:
    """The tables of docs/results, and the help of the commands, at the end of their pages."""
    from results_tables import markdown

    if docname == "results-collectives":
        source[0] += markdown(DOCS / "results")
    if docname == "reference/command":
        source[0] += "\n".join(f"## {name}\n\n```text\n{text}\n```\n" for name, text in helps())


def helps() -> list[tuple[str, str]]:
    """The names of the commands, and the text of each one's --help."""
    top = click.Context(main, info_name="qccl-bench", terminal_width=100, **main.context_settings)
    commands = [click.Context(command, top, name, terminal_width=100) for name, command in main.commands.items()]
    return [("qccl-bench", main.get_help(top)), *((str(c.info_name), c.command.get_help(c)) for c in commands)]


def hide_constructor(app: Any, what: str, name: str, obj: object, options: Any, signature: str, returns: str) -> Any:
    """The arguments of classes whose objects only qccl makes."""
    return ("", "") if name in ("qccl.Plan", "qccl.Work", "qccl.torch.Compression") else None


def set_dashes(app: Any, doctree: nodes.document, docname: str) -> None:
    """The dash that Sphinx puts between a parameter and its description, without smartquotes."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def break_names(app: Any, doctree: nodes.document, docname: str) -> None:
    """Let long names in tables, such as codecs with options, break into lines after their punctuation."""
    for entry in doctree.findall(nodes.entry):
        for text in list(entry.findall(nodes.Text)):
            parts = re.split(r"(?<=[,:/._(])(?=\w)|(?=\+)", text)
            if len(parts) > 1 and any(len(word) > LONG_NAME for word in text.split()):
                line_break = nodes.raw("", "<wbr>", format="html")
                broken = [node for part in parts for node in (line_break.deepcopy(), nodes.Text(part))]
                text.parent.replace(text, broken[1:])
