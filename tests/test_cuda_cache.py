"""Compiled kernels on disk: found again, checked, and never a reason to fail."""

from __future__ import annotations

import os

import pytest

from qccl.cuda import cache as cuda_cache


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
        assert cuda_cache.compiled(["source", "sm_90"], compiler) == (b"\x7fELF\n\0cubin", "_Zname")
    assert compiler.count == 1
    for inputs in (["source", "sm_80"], ["sourcesm_90"], ["source", "sm_90", ""]):
        cuda_cache.compiled(inputs, compiler)
    assert compiler.count == 4 and len(list(folder.iterdir())) == 4  # and no file half written


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + b"x", lambda b: b"", lambda b: b"[1]\n" + b])
def test_what_is_damaged_is_made_again(folder, damage):
    compiler = Compiler()
    whole = cuda_cache.compiled(["source"], compiler)
    [path] = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cuda_cache.compiled(["source"], compiler) == whole and compiler.count == 2
    assert cuda_cache.compiled(["source"], compiler) == whole and compiler.count == 2


def test_without_a_place(tmp_path, monkeypatch):
    compiler = Compiler()
    monkeypatch.setenv("QCCL_CACHE_DIR", "")
    assert cuda_cache.folder() is None
    (tmp_path / "file").write_text("in the way")
    for place in ("", str(tmp_path / "file" / "kernels")):
        monkeypatch.setenv("QCCL_CACHE_DIR", place)
        for _ in range(2):
            assert cuda_cache.compiled(["source"], compiler)[1] == "_Zname"
    assert compiler.count == 4


def test_where(monkeypatch):
    monkeypatch.delenv("QCCL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", os.sep + "caches")
    assert str(cuda_cache.folder()) == "/caches/qccl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", os.sep + "home/me")
    assert str(cuda_cache.folder()) == "/home/me/.cache/qccl"
