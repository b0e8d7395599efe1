"""Compiled kernels on disk: found again, checked, and never a reason to fail."""

from __future__ import annotations

import os

import pytest

from qccl.engine.cuda import cache as cuda_cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("QCCL_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


class Compiler:
    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return b"\x7fELF\n\0cubin", "_Zname"


def test_a_kernel_is_compiled_once(folder):
    compiler = Compiler()
    for _ in range(3):
        assert cuda_cache.load_or_make(["source", "sm_90"], compiler) == (b"\x7fELF\n\0cubin", "_Zname")
    assert compiler.count == 1
    for inputs in (["source", "sm_80"], ["sourcesm_90"], ["source", "sm_90", ""]):
        cuda_cache.load_or_make(inputs, compiler)
    assert compiler.count == 4 and len(list(folder.iterdir())) == 4  # and no file half written


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + b"x", lambda b: b"", lambda b: b"[1]\n" + b])
def test_what_is_damaged_is_made_again(folder, damage):
    compiler = Compiler()
    whole = cuda_cache.load_or_make(["source"], compiler)
    [path] = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cuda_cache.load_or_make(["source"], compiler) == whole and compiler.count == 2
    assert cuda_cache.load_or_make(["source"], compiler) == whole and compiler.count == 2


def test_a_kernel_under_another_name_is_made_again(folder):
    """What is read belongs to the inputs, whatever the file is called."""
    compiler = Compiler()
    cuda_cache.load_or_make(["source"], compiler)
    [path] = folder.iterdir()
    cuda_cache.load_or_make(["another"], compiler)
    [other] = {*folder.iterdir()} - {path}
    other.write_bytes(path.read_bytes())
    cuda_cache.load_or_make(["another"], compiler)
    assert compiler.count == 3


def of_another_user(path):
    os.chown(path, 12345, -1)


def for_everybody(path):
    path.chmod(0o777)


def for_the_group(path):
    path.chmod(0o770)


@pytest.mark.parametrize("change", [of_another_user, for_everybody, for_the_group])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_can_write_is_refused(folder, what, change):
    """It would run with this user's rights. A file is replaced; a folder is not used, and a warning says why."""
    if change is of_another_user and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    compiler = Compiler()
    whole = cuda_cache.load_or_make(["source"], compiler)
    [path] = folder.iterdir()
    change(path if what == "file" else folder)
    if what == "file":
        for _ in range(2):
            assert cuda_cache.load_or_make(["source"], compiler) == whole and compiler.count == 2
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (os.geteuid(), 0o600)
    else:
        for count in (2, 3):
            with pytest.warns(RuntimeWarning, match=r"other users can write .*kernels; .*QCCL_CACHE_DIR"):
                assert cuda_cache.load_or_make(["source"], compiler) == whole and compiler.count == count
        assert [*folder.iterdir()] == [path]


def test_a_link_in_place_of_a_kernel_is_not_followed(folder, tmp_path):
    compiler = Compiler()
    whole = cuda_cache.load_or_make(["source"], compiler)
    [path] = folder.iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cuda_cache.load_or_make(["source"], compiler) == whole and compiler.count == 2


def test_without_a_place(tmp_path, monkeypatch):
    compiler = Compiler()
    monkeypatch.setenv("QCCL_CACHE_DIR", "")
    assert cuda_cache.folder() is None
    (tmp_path / "file").write_text("in the way")
    for place in ("", str(tmp_path / "file" / "kernels")):
        monkeypatch.setenv("QCCL_CACHE_DIR", place)
        for _ in range(2):
            assert cuda_cache.load_or_make(["source"], compiler)[1] == "_Zname"
    assert compiler.count == 4


def test_where(monkeypatch):
    monkeypatch.delenv("QCCL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", os.sep + "caches")
    assert str(cuda_cache.folder()) == "/caches/qccl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", os.sep + "home/me")
    assert str(cuda_cache.folder()) == "/home/me/.cache/qccl"
