"""Files of states, such as Communicator.state_dict(): read without executing anything, with every part checked.

A file is an uncompressed .npz: "state.npy" has the structure as JSON text, and "0.npy", "1.npy", ... its arrays.
numpy.load() opens it, too. Reading takes memory of a few times the file's size at most.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from io import BytesIO
from os import SEEK_END, PathLike
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from qccl.base.errors import ArgumentError
from qccl.base.files import reading, writing

if TYPE_CHECKING:
    import numpy as np

__all__ = ["load_state", "save_state"]

_STRUCTURE = "state"
#: most bytes of a file, 1 TiB: more than the memory of a machine, which a state must fit several times
_MOST_NBYTES = 1 << 40
#: the errors that NumPy, zipfile and json raise for damaged or made-up files
_DAMAGE: tuple[type[Exception], ...] = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, MemoryError)
_DAMAGE += (EOFError, OSError, SyntaxError, ArithmeticError, zipfile.BadZipFile)


def save_state(file: str | PathLike[str] | BinaryIO, state: Mapping[str, Any]) -> None:
    """Write a state_dict() of a communicator, of DiLoCo or of LowPrecisionDecentralized; load_state() reads it.

    ``file`` is a path or a binary file. A path's file is replaced when the new one is complete: a program that is
    killed before that leaves the old one. A link that another user has put in the file's place is itself replaced.

    Raises ArgumentError if the state is not a dict, or contains other values than dicts, lists, numbers, strings,
    bools, None and arrays of numbers, or other keys than numbers, strings, bools and None; OSError if the file or a
    temporary file in its folder cannot be written, or if another user may have planted a folder of its path.
    """
    import numpy as np

    if not isinstance(state, Mapping):
        raise ArgumentError(
            f"the state must be a dict, such as comm.state_dict() returns, not a {type(state).__name__}"
        )
    arrays: dict[str, np.ndarray] = {}
    structure = json.dumps(_described(state, arrays)).encode()
    arrays[_STRUCTURE] = np.frombuffer(structure, np.uint8)
    with writing(file) if isinstance(file, str | PathLike) else nullcontext(file) as to:
        if isinstance(file, str | PathLike) and not S_ISREG(os.fstat(to.fileno()).st_mode):
            content = BytesIO()  # zipfile cannot seek in a device, such as /dev/null
            cast(Any, np.savez)(content, **arrays)
            to.write(content.getbuffer())
        else:
            cast(Any, np.savez)(to, **arrays)


def load_state(file: str | PathLike[str] | BinaryIO) -> dict[str, Any]:
    """Read the state that save_state() wrote to ``file``. No file can execute code.

    ``file`` is a path of a regular file, or a binary file that can seek. Raises OSError if it cannot be opened, and
    ArgumentError for any other file. load_state_dict() checks the state's contents.
    """
    with reading(file, _MOST_NBYTES) if isinstance(file, str | PathLike) else nullcontext(file) as opened:
        try:
            with zipfile.ZipFile(opened) as archive:
                arrays = _read(archive, opened.seek(0, SEEK_END))
            state = _value(json.loads(arrays.pop(_STRUCTURE).tobytes()), arrays)
        except _DAMAGE as error:
            raise ArgumentError(f"the file is not one that save_state() wrote, or it is damaged ({error!r})") from error
    if not isinstance(state, dict):
        raise ArgumentError(f"the file has no state, but a {type(state).__name__}")
    return state


def _described(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Describe a value in JSON, and add its arrays to ``arrays``."""
    import numpy as np

    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {"dict": [[_key(key), _described(each, arrays)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_described(each, arrays) for each in value]}
    name = f"{len(arrays)}"
    if isinstance(value, np.ndarray) and value.dtype.name == "bfloat16":  # of ml_dtypes, unknown to NumPy's files
        arrays[name] = value.view(np.uint16)
        return {"bfloat16": name}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        arrays[name] = value
        return {"array": name}
    kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    raise ArgumentError(
        f"the state contains {kind}; a state that save_state() writes has dicts, lists, numbers, strings, bools, None "
        f"and NumPy arrays of numbers"
    )


def _key(key: Any) -> Any:
    """Check a dict's key for JSON. A tuple is refused: JSON would read it as a list, which cannot be a key."""
    if isinstance(key, tuple):
        raise ArgumentError(
            f"the state contains a tuple as a key, {key!r}; a state that save_state() writes has numbers, strings, "
            f"bools and None as keys"
        )
    return _described(key, {})


def _value(described: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The inverse of _described(). Raises one of _DAMAGE."""
    if not isinstance(described, dict):
        return described
    [(kind, content)] = described.items()
    if kind == "dict":
        return {_value(key, arrays): _value(each, arrays) for key, each in content}
    if kind == "list":
        return [_value(each, arrays) for each in content]
    if kind == "bfloat16":
        import ml_dtypes

        return arrays[content].view(ml_dtypes.bfloat16)
    return {"array": arrays}[kind][content]


def _read(archive: zipfile.ZipFile, nbytes: int) -> dict[str, np.ndarray]:
    """Read the arrays of an archive of ``nbytes``, by name. Raises one of _DAMAGE."""
    if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
        raise ValueError("its parts are compressed")
    if sum(member.file_size for member in archive.infolist()) > nbytes:
        raise ValueError("its parts share bytes")
    return {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in archive.infolist()}


def _array(content: bytes) -> np.ndarray:
    """Read the array of an .npy file. Raises ValueError."""
    from numpy.lib import format as npy

    data = BytesIO(content)
    try:
        version = npy.read_magic(data)
        shape, _, dtype = npy.read_array_header_1_0(data) if version == (1, 0) else npy.read_array_header_2_0(data)
        # before read_array(), which allocates as much as the header says
        if dtype.kind not in "biuf" or min(shape, default=0) < 0:
            raise ValueError(f"an array of {dtype} in the shape {shape}")
        if math.prod(shape) * dtype.itemsize != len(content) - data.tell():
            raise ValueError(f"not the elements of {dtype} in the shape {shape}")
        data.seek(0)
        return npy.read_array(data, allow_pickle=False)
    except Exception as error:  # NumPy documents no exceptions for headers; tokenize.TokenError is one
        raise ValueError(f"one of its arrays cannot be read: {error!r}") from error
