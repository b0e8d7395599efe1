"""What ``scripts/wheels`` checks beside the usual tools: ``wheel_contents.py WHEEL...`` ends at the first fault.

The extension needs glibc alone, shows Python's entry point alone, is hardened, and names no folder of the machine that
built it. Nothing else is compiled: the lab's delay line is left out. Each wheel holds the licences of what is linked
in, as the compiler's package has them.
"""

from __future__ import annotations

import io
import re
import sys
import sysconfig
import zipfile
from pathlib import Path

import ziglang
from elftools.elf.elffile import ELFFile

GLIBC = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
LICENCES = ("LICENSE", "licenses/llvm.txt", "licenses/nanobind.txt", "licenses/robin-map.txt", "licenses/zig.txt")
ZIG = Path(ziglang.__file__).parent
#: folders of this machine that no file may name: of the build, of the tools, and of the Python that runs this
FOLDERS = {str(Path.cwd()), str(Path.home()), sysconfig.get_path("stdlib"), str(ZIG)}
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
    both = [each for each in extension.iter_segments("PT_LOAD") if each["p_flags"] & 3 == 3]
    check(not both, f"{name} has memory that is both writable and executable")
    for tag in ("DT_RPATH", "DT_RUNPATH", "DT_TEXTREL"):
        check(not [*dynamic.iter_tags(tag)], f"{name} has {tag}")


def check_wheel(path: Path) -> None:
    tag = re.search(r"manylinux_2_(\d+)_", path.name)
    check(tag and int(tag[1]) <= 28, f"{path.name} is not a wheel for glibc 2.28")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        lab = [each for each in names if "delay_line" in each or "/lab/" in each]
        check(not lab, f"{path.name} has {lab}, which only the benchmarks of a checkout need")
        extensions = [each for each in names if ".so" in each]
        check(len(extensions) == 1, f"{path.name} has {extensions}, not one extension")
        check_extension(f"{path.name}: {extensions[0]}", ELFFile(io.BytesIO(wheel.read(extensions[0]))))
        for name in names:
            named = [each for each in FOLDERS if each.encode() in wheel.read(name)]
            check(not named, f"{path.name}: {name} names {named}, folders of this machine")
        for licence in LICENCES:
            found = [each for each in names if each.endswith(f".dist-info/licenses/{licence}")]
            check(len(found) == 1, f"{path.name} has {len(found)} files {licence} among its licences, not one")
            if licence in SOURCES:
                same = wheel.read(found[0]).split() == SOURCES[licence].read_bytes().split()
                check(same, f"{licence} is not what the compiler's package has; copy {SOURCES[licence]}")


def sizes(path: Path) -> str:
    """A row of the table: the wheel's size, and that of what it installs."""
    with zipfile.ZipFile(path) as wheel:
        files = wheel.infolist()
    (extension,) = (each.file_size for each in files if ".so" in each.filename)
    installed = sum(each.file_size for each in files)
    return f"{path.stat().st_size / 1e6:8.2f} {installed / 1e6:8.2f} {extension / 1e6:8.2f}  {path.name}"


if __name__ == "__main__":
    wheels = [Path(argument) for argument in sys.argv[1:]]
    for each in wheels:
        check_wheel(each)
    print("Each needs glibc alone, is hardened, and holds its licences. In MB: wheel, installed, its extension")
    print(*map(sizes, wheels), sep="\n")
