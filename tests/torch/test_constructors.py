"""Tensors that qccl makes have an element type and a device of their own: programs change PyTorch's defaults."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).parents[2] / "qccl"
#: that torch.set_default_device() changes, as are those that torch.set_default_dtype() changes
NAMES = {function.__name__ for function in _device_constructors()}


def constructors(source: str) -> list[ast.Call]:
    """The calls of constructors of torch in a program."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func).startswith("torch.") and call.func.attr in NAMES]


def lacking(call: ast.Call) -> set[str]:
    given = {keyword.arg for keyword in call.keywords}
    return set() if None in given else {"dtype", "device"} - given  # **options


def test_constructors_have_a_type_and_a_device() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}": lacking(call)
        for path in PACKAGE.rglob("*.py")
        for call in constructors(path.read_text(encoding="utf-8"))
    }
    assert len(found) > 4 and not any(found.values()), {call: without for call, without in found.items() if without}
