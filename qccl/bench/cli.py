"""The command ``qccl-bench``."""

from __future__ import annotations

import click

import qccl
from qccl.bench.codec import codec
from qccl.bench.collective import command
from qccl.bench.columns import columns_help
from qccl.bench.doctor import doctor
from qccl.bench.explain import explain
from qccl.bench.info import info
from qccl.bench.kinds import KINDS, NCCL_OTHERS, NCCL_TESTS
from qccl.bench.launched import LaunchedGroup
from qccl.bench.run import run
from qccl.bench.simulate import simulate
from qccl.bench.token import token
from qccl.bench.top import top

__all__ = ["main"]


class _Commands(LaunchedGroup):
    """Commands that nccl-tests' names find, too, such as all_reduce_perf."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = cmd_name.removesuffix("_perf")
        if name in NCCL_OTHERS:
            ctx.fail(f"there is no {cmd_name}, as nccl-tests has; {NCCL_OTHERS[name]}")
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, NCCL_TESTS.get(name, ""))


@click.group(cls=_Commands, epilog=columns_help(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(qccl.__version__, prog_name="qccl-bench")
def main() -> None:
    """Measure what compressed collectives gain on this machine and this network."""


for _command in (*map(command, KINDS), codec, run, doctor, simulate, explain, top, info, token):
    main.add_command(_command)
