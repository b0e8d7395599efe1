"""Names, keywords, variables, commands and flags of the last release raise an error that names the replacement."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from pydoc import locate

import numpy as np
import pytest
from click.testing import CliRunner

import qccl
from qccl.base import removed
from qccl.bench.cli import main

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")


def test_names() -> None:
    of_torch = "qccl.torch.Compression.statistics"  # tests/torch/test_arguments.py
    for name, instead in (item for item in removed.NAMES.items() if item[0] != of_torch):
        owner, _, attribute = name.rpartition(".")
        with pytest.raises(AttributeError, match=re.escape(f"{attribute!r} any more; {instead}")):
            getattr(locate(owner), attribute)
    with pytest.raises(AttributeError, match=r"module 'qccl' has no attribute 'never_there'$"):
        _ = qccl.never_there


def test_keywords(monkeypatch) -> None:
    of_torch = {name for name in removed.KEYWORDS if name.startswith("qccl.torch.")}  # tests/torch/test_arguments.py
    of_calls = "qccl.hierarchical_allreduce(exact)"
    for name in removed.KEYWORDS.keys() - of_torch - {of_calls}:
        instead = removed.KEYWORDS[name]
        function, keyword = re.fullmatch(r"([\w.]+)\((\w+)\)", name).groups()
        module, _, attribute = function.rpartition(".")
        found = getattr(import_module(module), attribute)
        assert keyword not in inspect.signature(found).parameters
        with pytest.raises(qccl.ArgumentError, match=re.escape(f"{keyword!r} any more; {instead}")):
            found(**{keyword: 1})

    with qccl.init() as comm:
        x = np.ones(4, np.float32)
        pointers = (x.ctypes.data, x.ctypes.data, 4, "float32", "sum", comm)
        for call in (
            lambda: comm.hierarchical_allreduce(x, exact=False),
            lambda: qccl.hierarchical_allreduce(*pointers, exact=False),
        ):
            with pytest.raises(qccl.ArgumentError, match=re.escape(f"'exact' any more; {removed.KEYWORDS[of_calls]}")):
                call()

    monkeypatch.setitem(removed.KEYWORDS, "f(old)", "use new")

    @removed.without_removed("f")
    def f(new: int) -> int:
        return new

    assert f(new=3) == f(3) == 3
    with pytest.raises(qccl.ArgumentError, match=r"f\(\) has no argument 'old' any more; use new"):
        f(old=3)


def test_values_of_codecs() -> None:
    for spec, instead in removed.VALUES.items():
        name, option = spec.split(":")
        with pytest.raises(qccl.CodecError, match=re.escape(f"there is no {option} any more; {instead}")):
            qccl.codecs.get(f"{qccl.codecs.CODECS[name].examples[0]},{option}")


@pytest.mark.parametrize("start", [qccl.init, lambda: qccl.join("x"), lambda: qccl.run_ranks(1, id)])
def test_variables(start, monkeypatch) -> None:
    monkeypatch.setitem(removed.VARIABLES, "QCCL_OLD", "set QCCL_NEW")
    monkeypatch.setenv("QCCL_OLD", "1")
    with pytest.raises(qccl.ArgumentError, match=r"QCCL_OLD is set, but qccl has no such variable any more.*QCCL_NEW"):
        start()


def test_the_command_of_the_relay() -> None:
    with pytest.raises(SystemExit, match=r"there is no qccl-relay any more; connect the machines by WireGuard or ssh"):
        removed.relay()


def ran(*arguments: str) -> str:
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code != 0
    return found.output


def test_commands_and_flags(monkeypatch) -> None:
    monkeypatch.setitem(removed.COMMANDS, "old", "use new")
    monkeypatch.setitem(removed.FLAGS, "--old", "use --new")
    for name, instead in removed.COMMANDS.items():
        assert f"there is no command {name} any more; {instead}" in ran(name)
    for name, instead in removed.FLAGS.items():
        only, _, flag = name.rpartition(" ")
        commands = [main.commands[only]] if only else main.commands.values()
        assert flag not in {each for command in commands for option in command.params for each in option.opts}
        assert f"there is no {flag} any more; {instead}" in ran(only or "allreduce", flag)
    assert "No such option" in ran("allreduce", "--never-there")


def test_the_changelog_lists_them() -> None:
    kinds = removed.NAMES, removed.KEYWORDS, removed.VALUES, removed.VARIABLES, removed.COMMANDS, removed.FLAGS
    for table in kinds:
        for name in table:
            assert re.sub(r".*\((\w+)\)", r"\1", name) in CHANGELOG, f"CHANGELOG.md does not say that {name} is gone"
