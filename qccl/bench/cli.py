"""The command ``qccl-bench``."""

from __future__ import annotations

import click

from qccl.base import __version__, removed
from qccl.base.errors import QcclError
from qccl.bench.codec import codec
from qccl.bench.doctor.doctor import doctor
from qccl.bench.doctor.simulate import simulate
from qccl.bench.explain import explain
from qccl.bench.info import info
from qccl.bench.options import KINDS, NCCL_OTHERS, NCCL_TESTS, columns_help
from qccl.bench.start.run import run
from qccl.bench.sweep.collective import command
from qccl.bench.token import token

__all__ = ["main"]


class _Commands(click.Group):
    """Commands that nccl-tests' names find, too, such as all_reduce_perf."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = cmd_name.removesuffix("_perf")
        if name in NCCL_OTHERS:
            ctx.fail(f"there is no {cmd_name}, as nccl-tests has; {NCCL_OTHERS[name]}")
        if name in removed.COMMANDS:
            ctx.fail(f"there is no command {name} any more; {removed.COMMANDS[name]}")
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, NCCL_TESTS.get(name, ""))

    def invoke(self, ctx: click.Context) -> object:
        """Run a command. A QcclError becomes the command's error."""
        try:
            removed.check_variables()
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            command = error.ctx.info_name if error.ctx is not None else ""
            name = error.option_name
            if instead := removed.FLAGS.get(f"{command} {name}") or removed.FLAGS.get(name):
                raise click.UsageError(f"there is no {name} any more; {instead}", error.ctx) from None
            raise
        except QcclError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error


@click.group(cls=_Commands, epilog=columns_help(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="qccl-bench")
def main() -> None:
    """Measure what compressed collectives gain on this machine and this network."""


for _command in (*map(command, KINDS), codec, run, doctor, simulate, explain, info, token):
    main.add_command(_command)
