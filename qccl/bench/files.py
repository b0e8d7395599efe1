"""Writing of JSON files, which are complete even if the program is killed."""

from __future__ import annotations

import json
from typing import Any

from qccl.files import writing

__all__ = ["write_json"]


def write_json(path: str, document: Any) -> None:
    """Replace the file by ``document``; see qccl.files.writing()."""
    text = json.dumps(document, indent=1) + "\n"
    with writing(path) as file:
        file.write(text.encode())
