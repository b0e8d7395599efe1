"""Values of flags: sizes, rates of links, lists of codecs, and codecs of the user's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_runs import USERS
from click.testing import CliRunner, Result

import qccl
from qccl.bench import params
from qccl.bench.cli import main
from qccl.bench.options import SweepOptions


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_lists_of_codecs_keep_the_commas_of_options() -> None:
    assert params.codec_list("minmax8,minmax4:bucket=256,rounding=stochastic, seed=7,none") == (
        "minmax8",
        "minmax4:bucket=256,rounding=stochastic,seed=7",
        "none",
    )
    assert params.list_of(("a", "b"))("all") == ("a", "b")


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with a codec in the current folder; its name."""
    name = f"users_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    sys.modules.pop(name, None)


def test_a_codec_of_the_users_is_named_by_module_and_class(users: str) -> None:
    text = f"{users}:Half,{users}:Half:bucket=128+ef+nesterov:mu=0.5,minmax8:bucket=64"
    specs = params.codec_list(text)
    assert ",".join(specs) == text
    plain, stateful, minmax = (params.codec_of(spec) for spec in specs)
    assert (plain.spec(), minmax.spec()) == ("half", "minmax8:bucket=64")
    assert stateful.spec() == "half:bucket=128+ef+nesterov:mu=0.5" and stateful.plain.bucket == 128


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}:Half:buckets=3", "half has no key 'buckets'; its keys: bucket"),
        ("{}:Hallf", "cannot be imported .*has no attribute 'Hallf'"),
        ("{}:number", "is 5; it must be a dataclass that inherits from qccl.codecs.PythonCodec"),
        ("no_such_module:Half", "cannot be imported .*No module named 'no_such_module'"),
        ("minmax8:bucket", "'bucket' is not key=value"),
        ("minmux8:bucket=8", "there is no codec 'minmux8'"),
    ],
)
def test_what_is_no_codec_of_the_users_is_refused(users: str, text: str, reason: str) -> None:
    with pytest.raises(qccl.CodecError, match=reason):
        params.codec_list(text.format(users))


def test_specifications_elsewhere_import_nothing(users: str) -> None:
    """A specification may come from an untrusted file or dict."""
    with pytest.raises(qccl.CodecError):
        qccl.codecs.get(f"{users}:Half")
    assert users not in sys.modules


def test_a_codec_of_the_users_is_measured(users: str) -> None:
    flags = ["-b64K", "-n1", "-w0", "-dfloat", f"--codec={users}:Half,minmax8", "--json=speed.json"]
    result = invoke("codec", *flags)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if not line.startswith("#")]
    assert [row.split(maxsplit=10)[-1].strip() for row in rows] == ["half (Python, slow)", "minmax8"]
    assert [row["slow"] for row in json.loads(Path("speed.json").read_text())["results"]] == [True, False]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("0", 0), ("4096", 4096), ("64K", 65536), ("1.5M", 3 << 19), ("2g", 2 << 30), ("8KiB", 8192)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert params.parse_size(text) == nbytes
    assert params.parse_size(params.format_size(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5", "1e6", "0x10", "1 M", "9" * 400])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        params.parse_size(text)


def test_links() -> None:
    assert params.parse_link("1GBIT") == params.Link("1gbit", 125e6, 66_000)
    assert params.parse_link("10gbit").burst == 250_000
    assert params.parse_link("100mbit").burst == params.parse_link("10mbit").burst == 18_200
    for text in ("1gb", "10", "0gbit", "1tbit", "1kbit"):
        with pytest.raises(ValueError, match="is not a link's rate"):
            params.parse_link(text)


def test_sweeps_are_those_of_nccl_tests() -> None:
    assert list(SweepOptions(8, 128, 1, 4).sizes()) == [8, 32, 128]
    assert list(SweepOptions(0, 10, 4, None).sizes()) == [0, 4, 8]
    assert list(SweepOptions(5, 5, 0, None).sizes()) == [5]
    assert list(SweepOptions(0, 0, 1, 2).sizes()) == [0]
