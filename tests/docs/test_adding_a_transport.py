"""docs/adding-a-transport.md is true: its transport, as it stands there, works, and its files are those it lists."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-transport.md"
BLOCKS = re.findall(r"^## \d\. [^\n]*`(\S+)`\n.*?^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_a_transport_touches_at_most_three_files() -> None:
    listed = re.findall(r"^\| `((?:qccl|tests)/\S+)` \|", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in BLOCKS] == listed
    assert len(listed) <= 3
    root = PAGE.parents[1]
    assert not any((root / name).exists() for name in listed), "the example is not part of the library"


@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", BLOCKS[1][1], re.MULTILINE))
def test_the_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {}
    for number, (path, text) in enumerate(BLOCKS):
        module = ModuleType(path.removesuffix(".py").replace("/", "."))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
        modules[number] = module
    getattr(modules[1], name)()
