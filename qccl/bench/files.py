"""Writing files that are complete at any time, even if the program is killed."""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["write_json"]


def write_json(path: str, document: Any) -> None:
    """Replace the file by ``document``: readers find the old one or the new one, complete."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
