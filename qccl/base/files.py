"""Opens files that a user names, to read or to write them; no other module of qccl does.

Reading takes regular files of a limited size, and opens no pipe or device that would make the program wait. Written
files are complete even if the program is killed. In a folder where other users may write, a name can be a link to a
file that this user did not mean. The kernel's ``fs.protected_symlinks`` does not help here: a writer that replaces
files resolves links itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from qccl.base.errors import ArgumentError

__all__ = ["check_writable", "read_file", "reading", "replacing", "writing"]

Path = str | os.PathLike[str]

#: most links that a path may go through: the kernel's limit
_MOST_LINKS = 40
_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


# -- reading -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(
    path: Path, most: int, *, name: str = "", pipes: bool = False, folder: int | None = None, follow: bool = True
) -> Iterator[BinaryIO]:
    """A regular file of at most ``most`` bytes, to read.

    ``name`` stands for the file in errors. With ``pipes`` a pipe may take the file's place: reading waits for its
    writers, and a named pipe that no process has open to write is empty. ``folder`` is the descriptor of the folder
    that ``path`` is in. Without ``follow`` a symbolic link is not opened.

    Raises OSError if the file cannot be opened, and ArgumentError if it is larger, or not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        if pipes and stat.S_ISFIFO(found.st_mode):
            os.set_blocking(descriptor, True)
        elif not stat.S_ISREG(found.st_mode):
            kinds = "a regular file or a pipe" if pipes else "a regular file"
            raise ArgumentError(f"{name or _quoted(path)} cannot be read: it is {_kind(found.st_mode)}; give {kinds}")
        elif found.st_size > most:
            raise _too_large(path, name, f"{found.st_size:,} bytes", most)
    except BaseException:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        yield file


def read_file(path: Path, most: int, *, name: str = "", pipes: bool = False) -> bytes:
    """The content of a file of at most ``most`` bytes. The arguments and errors are those of reading()."""
    with reading(path, most, name=name, pipes=pipes) as file:
        content = file.read(most + 1)
    if len(content) > most:  # a pipe has no size, and a file may have grown
        raise _too_large(path, name, "more bytes", most)
    return content


def _too_large(path: Path, name: str, has: str, most: int) -> ArgumentError:
    return ArgumentError(f"{name or _quoted(path)} cannot be read: it has {has}, and at most {most:,} are allowed")


def _quoted(path: Path) -> str:
    return repr(os.fspath(path))


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


# -- writing -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write, which replaces ``path`` when the block ends, with the owner and mode of the old file.

    Readers find either the complete old or the complete new file; an exception in the block keeps the old one. This
    user's symbolic link stays, and so does root's: its target is replaced. A link, pipe or device that another user
    can have planted is replaced itself. Other pipes, terminals and devices, such as /dev/null, are written into.

    Raises OSError if the file cannot be written, or no other file in its folder; if a folder on the way can have been
    planted by another user; and for a named pipe that no process has open to read.
    """
    with _placed(path) as place:
        if place.is_special:
            with open(_opened_stream(place), "wb") as file:
                yield file
        else:
            with replacing(place.name, folder=place.folder) as file:
                if place.old is not None and not place.is_planted:
                    _adopt(file.fileno(), place.old)
                yield file


@contextlib.contextmanager
def replacing(path: str, *, mode: int = 0o666, folder: int | None = None) -> Iterator[BinaryIO]:
    """A new binary file, which gets the name ``path`` when the block ends, and is removed after an exception.

    ``mode`` is reduced by the umask; ``folder`` is the descriptor of the folder that ``path`` is in.
    """
    # O_EXCL and a random name: in a folder that others may write nobody can have put a link there
    place, name = os.path.split(path)
    temporary = os.path.join(place, f"{name[:50]}.{secrets.token_hex(8)}.tmp")  # names have a greatest length
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise


def check_writable(path: Path) -> None:
    """Raise the OSError, as far as it can be foreseen, with which writing() would fail."""
    with _placed(path) as place:
        if not os.access(place.name if place.is_special else ".", os.W_OK, dir_fd=place.folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place.name)


class _FilePlace(NamedTuple):
    """The place of a file: a descriptor of its folder, its name there, and the status of what has that name."""

    folder: int
    name: str
    old: os.stat_result | None
    is_planted: bool

    @property
    def is_special(self) -> bool:
        """Whether the file is to be written into, not to be replaced."""
        return self.old is not None and not self.is_planted and _is_special(self.old)


@contextlib.contextmanager
def _placed(path: Path) -> Iterator[_FilePlace]:
    """The place of ``path``, which errors name in place of a part of it, or of the temporary file beside it."""
    text = os.fspath(path)
    try:
        place = _walk(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, text) from error
    try:
        yield place
    except OSError as error:
        if isinstance(error.filename, str) and error.filename.startswith(place.name[:50]):
            raise OSError(error.errno, error.strerror, text) from error
        raise
    finally:
        os.close(place.folder)


def _walk(path: str) -> _FilePlace:
    """Open folder after folder, and follow links, but nothing that another user can have planted. Raises OSError."""
    parts, links = path.split("/")[::-1], 0  # reversed, because pop() takes the last part
    at = os.open("/" if path.startswith("/") else ".", _FOLDER_FLAGS)
    try:
        while True:
            name = parts.pop() or "."
            if parts and name == ".":
                continue
            found = _status(name, at)
            is_link = found is not None and stat.S_ISLNK(found.st_mode)
            is_planted = found is not None and _is_planted(found, os.fstat(at), is_last=not parts)
            if not parts:
                if found is not None and stat.S_ISDIR(found.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                stream = _stream_behind(name, at) if is_link and not is_planted else None
                if is_planted or not is_link or stream:
                    return _FilePlace(at, name, stream or found, is_planted)
            elif is_planted:
                raise PermissionError(errno.EACCES, f"{name!r} belongs to another user; give a folder of your own")
            if is_link:
                target = os.readlink(name, dir_fd=at)
                parts += target.split("/")[::-1]
                name, links = "/" if target.startswith("/") else ".", links + 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            below = os.open(name, _FOLDER_FLAGS, dir_fd=at)
            os.close(at)
            at = below
    except BaseException:
        os.close(at)
        raise


def _is_planted(found: os.stat_result, folder: os.stat_result, *, is_last: bool) -> bool:
    """Whether another user can have put an entry there for this user to open. Root and the folder's owner are trusted.

    A link in the file's place (``is_last``) can be replaced, so only links of this user and of root are followed.
    """
    if is_last and stat.S_ISLNK(found.st_mode):
        return found.st_uid not in (0, os.geteuid())
    return bool(folder.st_mode & stat.S_IWOTH) and found.st_uid not in (0, os.geteuid(), folder.st_uid)


def _status(name: str, folder: int) -> os.stat_result | None:
    """The status of a name, which may be a link's; None if the folder has no such name."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _stream_behind(link: str, folder: int) -> os.stat_result | None:
    """The status of a link's target if it is a pipe, terminal or device; the target of /proc/self/fd/1 has no path."""
    with contextlib.suppress(OSError):
        found = os.stat(link, dir_fd=folder)
        return found if _is_special(found) else None
    return None


def _is_special(found: os.stat_result) -> bool:
    return not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode))


def _opened_stream(place: _FilePlace) -> int:
    """A descriptor that writes into a pipe, terminal or device. Does not wait for a pipe's reader."""
    try:
        descriptor = os.open(place.name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=place.folder)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no process has this pipe open to read", place.name) from error
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _adopt(descriptor: int, old: os.stat_result) -> None:
    """Give the new file the owner and the mode of the old one, as far as this user may."""
    with contextlib.suppress(PermissionError):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
