"""What ``scripts/wheels`` checks beside the usual tools: ``wheel_contents.py WHEEL...`` ends at the first fault.

The extension needs glibc alone, shows Python's entry point alone, and is hardened. Each wheel holds the licences of
what is linked in, as the compiler's package has them.
"""

from __future__ import annotations

import io
import re
import sys
import zipfile
from pathlib import Path

import ziglang
from elftools.elf.elffile import ELFFile

GLIBC = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
LICENCES = ("LICENSE", "licenses/llvm.txt", "licenses/nanobind.txt", "licenses/robin-map.txt", "licenses/zig.txt")
ZIG = Path(ziglang.__file__).parent
SOURCES = {"licenses/zig.txt": ZIG / "LICENSE", "licenses/llvm.txt": ZIG / "lib/libcxx/LICENSE.TXT"}


def check(condition: object, fault: str) -> None:
    if not condition:
        raise SystemExit(f"wheel_contents.py: {fault}")


def check_extension(name: str, extension: ELFFile) -> None:
    dynamic, symbols = extension.get_section_by_name(".dynamic"), extension.get_section_by_name(".dynsym")
    needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    check(
        needed <= GLIBC | LOADERS,
        f"{name} needs {sorted(needed - GLIBC - LOADERS)}, which no manylinux system promises",
    )
    shown = {each.name for each in symbols.iter_symbols() if each["st_shndx"] != "SHN_UNDEF"}
    check(shown == {"PyInit__host"}, f"{name} shows {sorted(shown)[:9]}, not PyInit__host alone")
    used = {each.name for each in symbols.iter_symbols()} - shown
    if extension["e_machine"] == "EM_X86_64":  # for aarch64 zig links functions of its own, which are not seen here
        check("__stack_chk_fail" in used, f"{name} has no stack protector")
    check(any(each.startswith("__") and each.endswith("_chk") for each in used), f"{name} has no checks by FORTIFY")
    flags = [tag["d_val"] for tag in dynamic.iter_tags("DT_FLAGS")]
    check(any(each & 8 for each in flags), f"{name} is not linked with -z now")  # DF_BIND_NOW
    segments = {each["p_type"]: each["p_flags"] for each in extension.iter_segments()}
    check("PT_GNU_RELRO" in segments, f"{name} is not linked with -z relro")
    check(not segments.get("PT_GNU_STACK", 1) & 1, f"{name} has an executable stack")


def check_wheel(path: Path) -> None:
    tag = re.search(r"manylinux_2_(\d+)_", path.name)
    check(tag and int(tag[1]) <= 28, f"{path.name} is not a wheel for glibc 2.28")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        extensions = [each for each in names if ".so" in each]
        check(len(extensions) == 1, f"{path.name} has {extensions}, not one extension")
        check_extension(f"{path.name}: {extensions[0]}", ELFFile(io.BytesIO(wheel.read(extensions[0]))))
        for licence in LICENCES:
            found = [each for each in names if each.endswith(f".dist-info/licenses/{licence}")]
            check(len(found) == 1, f"{path.name} has {len(found)} files {licence} among its licences, not one")
            if licence in SOURCES:
                same = wheel.read(found[0]).split() == SOURCES[licence].read_bytes().split()
                check(same, f"{licence} is not what the compiler's package has; copy {SOURCES[licence]}")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        check_wheel(Path(argument))
        print(f"{Path(argument).name}: needs glibc alone, is hardened, holds its licences")
