"""Small Debian systems without a compiler, in which tests install wheels; as root, with debootstrap.

The packages are unpacked, not configured, so that those of another architecture need no emulator for that. A program
runs in namespaces of its own, where qemu runs the programs of aarch64; nothing of the machine changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from pip._vendor import certifi

DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
#: the suite whose qemu is used: by the 7.2 of Debian 12 programs of Debian 13 hang
EMULATOR_OF = "trixie"
#: programs for aarch64 by their first bytes, as the kernel's binfmt_misc reads it; F: qemu is opened outside the system
BINFMT = (
    r":aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:{qemu}:F"
)
ENTER = """
set -e
root=$1 folder=$2 emulation=$3 shared=$4
shift 4
if [ -n "$emulation" ]; then
    mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
    printf %s "$emulation" >/proc/sys/fs/binfmt_misc/register
fi
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind "$folder" "$root/mnt"
if [ -n "$shared" ]; then mount --rbind "$shared" "$root/$shared"; fi
exec chroot "$root" /usr/bin/env -i PATH=/mnt/venv/bin:/usr/bin:/bin HOME=/mnt LANG=C.UTF-8 "$@"
"""


def why_not(architecture: str) -> str:
    """What this machine lacks for a system of an architecture; empty if nothing."""
    if os.geteuid():
        return "root makes the systems"
    if shutil.which("debootstrap") is None:
        return "needs debootstrap (Debian's package of that name)"
    if architecture not in (os.uname().machine, "aarch64"):
        return f"needs a machine of {architecture}: only aarch64 is emulated"
    return ""


def _downloaded(suite: str, architecture: str, names: str, folder: Path) -> list[Path]:
    """The packages of a suite's smallest system and those named; debootstrap checks their signatures."""
    command = ["debootstrap", "--download-only", "--variant=minbase", f"--include={names}"]
    command += [f"--arch={DEBIAN[architecture]}", suite, str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    return sorted((folder / "var/cache/apt/archives").glob("*.deb"))


def _unpack(package: Path, root: Path, *files: str) -> None:
    """Put the files of a package into ``root``; only those named, if any are."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as archive:
        command = ["tar", "-x", "--keep-directory-symlink", "-C", str(root), *files]
        subprocess.run(command, stdin=archive.stdout, check=True, timeout=300)
    assert archive.returncode == 0, package


def emulator(folder: Path) -> Path:
    """qemu for programs of aarch64, linked statically, below ``folder``, where it is kept."""
    root = folder / "emulator"
    program = root / "usr/bin/qemu-aarch64"
    if (root / "complete").exists():
        return program
    shutil.rmtree(root, ignore_errors=True)
    packages = root / "packages"
    downloaded = _downloaded(EMULATOR_OF, os.uname().machine, "qemu-user", packages)
    (package,) = (each for each in downloaded if each.name.startswith("qemu-user_"))
    _unpack(package, root, "./usr/bin/qemu-aarch64")
    shutil.rmtree(packages)
    (root / "complete").touch()
    return program


def unpacked(suite: str, architecture: str, folder: Path) -> Path:
    """The system of a suite with Python and nothing that compiles, below ``folder``, where it is kept."""
    root = folder / f"{suite}-{architecture}"
    if (root / "complete").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    packages = root / "packages"
    downloaded = _downloaded(suite, architecture, "python3,python3-venv", packages)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for package in downloaded:
        _unpack(package, root)
    shutil.rmtree(packages)
    certificates = root / "etc/ssl/certs/ca-certificates.crt"  # pip reads them, although it uses no network there
    certificates.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(certifi.where(), certificates)
    for name in ("proc", "dev", "mnt"):
        (root / name).mkdir(exist_ok=True)
    (root / "complete").touch()
    return root


def run(root: Path, architecture: str, folder: Path, *command: str, shared: str = "", limit: float) -> str:
    """What a command writes in a system whose /mnt is ``folder``; it and what it starts end after ``limit`` seconds.

    ``shared`` is a folder of this machine that the system has, too, under the same path.
    """
    if shared:
        (root / shared.lstrip("/")).mkdir(parents=True, exist_ok=True)
    emulation = "" if architecture == os.uname().machine else BINFMT.format(qemu=emulator(root.parent))
    # as a user namespace's root, which has the kernel's table of formats to itself
    namespaces = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
    done = subprocess.run(
        [*namespaces, "bash", "-c", ENTER, "-", str(root), str(folder), emulation, shared, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
