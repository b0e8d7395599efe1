"""docs/adding-a-codec.md is true: its code is compiled as it stands there, for the host and the emulated device."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
from oracle import Place

import qccl
from qccl import codecs

PAGE = Path(__file__).parents[1] / "docs" / "adding-a-codec.md"
KERNELS = Path(__file__).parents[1] / "kernels"
CUDA = Path(__file__).parent / "cuda"

HOST = """
#include "host/team.h"
#include "ternary.h"
using namespace q;
extern "C" void encode(const float* x, unsigned n, unsigned char* codes, unsigned char* meta) {
  Ternary::encode<Float32>(HostTeam(nullptr), BucketOptions{}, Stamp{}, x, n, codes, meta);
}
extern "C" void decode(const unsigned char* codes, const unsigned char* meta, unsigned n, float* y) {
  Ternary::decode<Float32>(HostTeam(meta), BucketOptions{}, Stamp{}, codes, meta, n, [=](int i, float v) { y[i] = v; });
}
"""
DEVICE = """
#include "cuda/team.h"
#include "ternary.h"
using namespace q;
extern "C" void encode(const float* x, unsigned n, unsigned char* codes, unsigned char* meta) {
  emulator::run_grid(1, 1, n, [=] {
    Ternary::encode<Float32>(BlockTeam(), BucketOptions{}, Stamp{}, x, n, codes, meta);
  });
}
extern "C" void decode(const unsigned char* codes, const unsigned char* meta, unsigned n, float* y) {
  emulator::run_grid(1, 1, n, [=] {
    Ternary::decode<Float32>(BlockTeam(), BucketOptions{}, Stamp{}, codes, meta, n, [=](int i, float v) { y[i] = v; });
  });
}
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(text: str) -> dict:
    """The names that a block of Python makes; without this file's own __future__."""
    names: dict = {"__name__": "ternary"}
    exec(compile(text, PAGE.name, "exec", dont_inherit=True), names)
    return names


def compiled(text: str, folder: Path, *options: str) -> ctypes.CDLL:
    (folder / "ternary.h").write_text(blocks("cpp")[0])
    (folder / "test.cpp").write_text(text)
    target = folder / "test.so"
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-DQCCL_NAMESPACE=q"]
    command += [f"-I{KERNELS}", f"-I{folder}", *options, str(folder / "test.cpp"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize("side", ["host", "device"])
def test_the_header_makes_the_oracles_bytes(side: str, tmp_path: Path) -> None:
    options = ("-include", str(CUDA / "shim.h"), "-Wno-unknown-pragmas") if side == "device" else ()
    library = compiled(HOST if side == "host" else DEVICE, tmp_path, *options)
    reference = run(blocks("python")[1])["Ternary"](1 << 13)
    rng = np.random.default_rng(0)
    for n in (1, 7, 16, 100, 255, 1024, 5001):
        for scale in (1.0, 0.0, np.nan):
            x = (rng.standard_normal(n) * scale).astype(np.float32)
            room = np.full(reference.sizes(n, "float32")[0] + 4, 0xA5, np.uint8)
            y = np.zeros(n, np.float32)
            codes, meta = room[:-4], room[-4:]
            library.encode(
                *(ctypes.c_void_p(x.ctypes.data), n), *(ctypes.c_void_p(a.ctypes.data) for a in (codes, meta))
            )
            wanted = reference.encode_bucket(x, "float32", Place())
            assert codes.tobytes() == wanted[0].tobytes() and meta.tobytes() == wanted[1].tobytes()
            library.decode(*(ctypes.c_void_p(a.ctypes.data) for a in (codes, meta)), n, ctypes.c_void_p(y.ctypes.data))
            decoded = reference.decode_bucket(codes, meta, n, "float32", Place())
            assert oracle.from_float(y, "float32").tobytes() == oracle.from_float(decoded, "float32").tobytes()


def test_the_dataclass_agrees_with_the_oracle_about_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ternary", type(sys)("ternary"))
    names, reference = run(blocks("python")[0]), run(blocks("python")[1])
    codec = names["Ternary"](64)
    assert (codec.spec(), repr(codec), codec.kernel().type) == ("ternary:bucket=64", "Ternary(bucket=64)", "Ternary")
    with pytest.raises(qccl.errors.CodecError):
        names["Ternary"](63)
    for count in (0, 1, 63, 64, 65, 1000):
        x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        wire = reference["Ternary"](64).encode(x, "float32", Place())
        assert codec.encoded_nbytes(count, "float32") == wire.size
        error = np.abs(reference["Ternary"](64).decode(wire, count, "float32", Place()) - x)
        assert (error <= codec.error_bound(x)).all()
    assert issubclass(names["Ternary"], codecs.BucketCodec)
