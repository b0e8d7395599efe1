"""The operators torch.ops.qccl: the bits of calls, in the same order, in eager, compiled and exported programs."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import on_ranks as processes
import patience
import pytest
import torch
from thread_ranks import on_ranks
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import qccl
from qccl.base.errors import ArgumentError, EngineError, PeerLost
from qccl.torch import ops, register_group

pytestmark = pytest.mark.starts_first

OPS = torch.ops.qccl


def named(comm: qccl.Communicator) -> str:
    """Give the communicator of a rank, which is a thread, a name of its own."""
    name = f"tp of rank {comm.rank}"
    register_group(name, comm)
    return name


# -- eager programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_operators_give_the_bits_of_calls(comm: qccl.Communicator, dtype: torch.dtype) -> None:
    """Also where a tensor is not contiguous; the outputs are."""
    name = named(comm)
    x = (torch.arange(600.0).reshape(30, 20).sin() + comm.rank).to(dtype).t()
    dense = x.contiguous()
    reduced = comm.quantized_allreduce(dense, torch.empty_like(dense), codec="minmax4", op="avg")
    part = comm.quantized_reduce_scatter(dense, dense.new_empty(10, 30), codec="minmax4", op="max")
    whole = comm.quantized_all_gather(dense, dense.new_empty(40, 30), codec="minmax8")

    found = OPS.all_reduce(x, name, codec="minmax4", op="avg")
    assert torch.equal(found, reduced) and found.is_contiguous()
    assert torch.equal(OPS.reduce_scatter(x, 2, name, "minmax4", "max"), part)
    assert torch.equal(OPS.all_gather(x, 2, name), whole)
    assert OPS.all_gather(torch.tensor(3.0 + comm.rank), 2, name).tolist() == [3, 4]
    OPS.all_reduce_(x, name, "minmax4", op="avg")
    assert torch.equal(x, reduced) and not x.is_contiguous()


@on_ranks(2)
def test_parts_are_equal(comm: qccl.Communicator) -> None:
    name = named(comm)
    text = re.escape(
        "reduce_scatter's tensor, (3, 4), must be a multiple of group_size=2: each rank gets an equal part"
    )
    with pytest.raises(ArgumentError, match=text):
        OPS.reduce_scatter(torch.ones(3, 4), 2, name)


@on_ranks(2)
def test_gradients_belong_to_the_sum_of_the_ranks_losses(comm: qccl.Communicator) -> None:
    name = named(comm)
    weights = [torch.arange(8.0).reshape(4, 2) * (rank + 1) for rank in range(2)]  # a loss for each rank

    def gradient(call: Any, weight: torch.Tensor) -> torch.Tensor:
        x = torch.ones(4, 2, requires_grad=True)
        (call(x) * weight).sum().backward()
        assert x.grad is not None
        return x.grad

    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        OPS.all_reduce_(y, name, "none")
        return y

    own, total = weights[comm.rank], weights[0] + weights[1]
    halves = [weight[:2] for weight in weights]
    doubled = [torch.cat([weight, weight + 1]) for weight in weights]
    all_reduce = partial(OPS.all_reduce, group_name=name, codec="none")
    reduce_scatter = partial(OPS.reduce_scatter, group_size=2, group_name=name, codec="none")
    all_gather = partial(OPS.all_gather, group_size=2, group_name=name, codec="none")
    assert torch.equal(gradient(in_place, own), total)
    assert torch.equal(gradient(all_gather, doubled[comm.rank]), sum(doubled).chunk(2)[comm.rank])
    for op, factor in (("sum", 1.0), ("avg", 0.5), ("mean", 0.5)):
        assert torch.equal(gradient(partial(all_reduce, op=op), own), total * factor)
        assert torch.equal(gradient(partial(reduce_scatter, op=op), halves[comm.rank]), torch.cat(halves) * factor)
    for op in ("min", "max"):
        for call in (partial(all_reduce, op=op), partial(reduce_scatter, op=op)):
            with pytest.raises(ArgumentError, match=f"op='{op}' has no gradient; use op='sum' or 'avg'"):
                gradient(call, torch.ones(()))


@pytest.mark.slow
@on_ranks(1)
def test_pytorchs_checks_of_operators(comm: qccl.Communicator) -> None:
    """Schemas, fake operators, gradients, and graphs with fixed and with symbolic shapes."""
    name = named(comm)
    for requires_grad in (False, True):
        x = torch.randn(4, 6, requires_grad=requires_grad)
        other = torch.randn(6, 4).t().requires_grad_(requires_grad)  # not contiguous
        torch.library.opcheck(OPS.all_reduce.default, (x, name))
        torch.library.opcheck(OPS.all_reduce.default, (other, name, "none", "avg"))
        torch.library.opcheck(OPS.reduce_scatter.default, (x, 1, name, "none", "avg"))
        torch.library.opcheck(OPS.all_gather.default, (x, 1, name, "none"))
    torch.library.opcheck(OPS.all_reduce_.default, (torch.randn(4, 6), name))
    assert str(OPS.all_reduce_.default._schema).startswith("qccl::all_reduce_(Tensor(a0!) x, str group_name, ")


# -- names -----------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_a_name_belongs_to_one_open_group(comm: qccl.Communicator) -> None:
    first, second = comm.split(0), comm.split(0)
    assert first is not None and second is not None
    x = torch.ones(10)
    register_group("a", first)
    register_group("a", first)
    with pytest.raises(ArgumentError, match=r"<Communicator rank 0 of 1, .*> has the name 'a' already; close it first"):
        register_group("a", second)
    first.close()
    for call in (
        lambda: OPS.all_reduce(x, "a"),
        lambda: OPS.reduce_scatter(x, 1, "a"),
        lambda: OPS.all_gather(x, 1, "a"),
    ):
        with pytest.raises(ArgumentError, match=r"'a' does not .* is closed; make a .*register_group\('a', comm\)"):
            call()
    register_group("a", second)
    assert torch.equal(OPS.all_reduce(x, "a"), x)
    second.abort("a test")
    with pytest.raises(PeerLost, match="a test"):  # the group's own failure
        OPS.all_reduce(x, "a")
    register_group("a", comm)
    assert torch.equal(OPS.all_reduce(x, "a"), x)


def test_two_threads_cannot_give_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 stops for a moment between its look for another group and the naming, and rank 1 names its own."""
    looked, refused = threading.Event(), list[str]()

    def checked(comm: qccl.Communicator) -> qccl.Communicator:
        looked.set()
        time.sleep(0.1)
        return comm

    def name(comm: qccl.Communicator) -> None:
        try:
            if comm.rank == 1:
                patience.wait_until(looked.is_set)
            register_group("c", comm)
        except ArgumentError as error:
            refused.append(str(error))
        comm.barrier()

    monkeypatch.setattr(ops, "checked_communicator", checked)
    qccl.run_ranks(2, name)
    assert len(refused) == 1 and "has the name 'c' already" in refused[0]


@on_ranks(1)
def test_a_name_keeps_no_group_alive(comm: qccl.Communicator) -> None:
    other = comm.split(0)
    assert other is not None
    register_group("b", other)
    del other
    gc.collect()
    with pytest.raises(ArgumentError, match="the group 'b' does not exist or is closed"):
        OPS.all_reduce(torch.ones(10), "b")


@on_ranks(1)
def test_what_operators_refuse(comm: qccl.Communicator) -> None:
    name, x, closed = named(comm), torch.ones(4, 6), comm.split(0)
    assert closed is not None
    closed.close()

    def compiled(operator: Any, group_size: int) -> None:
        with FakeTensorMode() as mode:
            operator(mode.from_tensor(x), group_size, name)

    texts = {
        "group_size=0 is not possible; pass group_size=comm.size": lambda: compiled(OPS.reduce_scatter, 0),
        "group_size=-1 is not possible; pass": lambda: compiled(OPS.all_gather, -1),
        "the name of a group is a text, not 3": lambda: register_group(3, comm),  # type: ignore[arg-type]
        "takes no calls any more; make another communicator and name that 'd'": lambda: register_group("d", closed),
        "the group 'tp 2' does not exist or is closed; make a communicator": lambda: OPS.all_reduce(x, "tp 2"),
        "written for group_size=2, and the group 'tp of rank 0' has 1 rank": lambda: OPS.all_gather(x, 2, name),
        "written for group_size=0, and": lambda: OPS.reduce_scatter(x, 0, name),
        "keep no state, and 'minmax2+ef' does; use 'minmax2', or": lambda: OPS.all_reduce_(x, name, "minmax2+ef"),
        "comm must be a Communicator": lambda: register_group("tp", "tp"),  # type: ignore[arg-type]
    }
    for text, call in texts.items():
        with pytest.raises(ArgumentError, match=re.escape(text)):
            call()


# -- versions of PyTorch -----------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_without_ordered_effects_eager_calls_work_and_compilers_are_refused() -> None:
    """Otherwise a compiler would drop calls and change their order."""
    program = """
import torch
import torch._higher_order_ops.effects as effects
del effects._register_effectful_op
import qccl, qccl.torch
from torch._subclasses import FakeTensorMode

def body(comm):
    qccl.torch.register_group("tp", comm)
    x = torch.ones(6)
    print(torch.equal(torch.ops.qccl.all_reduce(x, "tp", "none"), x))
    try:
        with FakeTensorMode() as mode:
            torch.ops.qccl.all_reduce(mode.from_tensor(x), "tp", "none")
    except qccl.EngineError as error:
        print(error)

qccl.run_ranks(1, body)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert re.fullmatch(
        r"True\nPyTorch \S+ cannot compile the operators torch.ops.qccl: cannot import name '_register_effectful_op' .*"
        r"; use PyTorch 2.13 or 2.14, or make the calls outside of compiled programs\n",
        found.stdout,
    )


@pytest.mark.slow
def test_inductors_that_lose_the_order_or_errors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    def fake() -> None:
        with FakeTensorMode() as mode:
            OPS.all_reduce(mode.from_tensor(torch.ones(6)), "tp", "none")

    with (
        lowering.V.set_graph_handler(SimpleNamespace(operations=[], effectful_ops={})),
        pytest.raises(EngineError, match=r"no attribute 'additional_buffer_deps'; use PyTorch 2.13 or 2.14"),
    ):
        ops._lower(OPS.all_reduce.default)
    with lowering.V.set_graph_handler(SimpleNamespace(aot_mode=True)):
        fake()
        monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.12.1+cpu"))
        with pytest.raises(
            EngineError, match=r"PyTorch 2\.12\.1.cpu .* packages ignore errors before PyTorch 2.13; use"
        ):
            fake()
    monkeypatch.delattr(lowering, "lowerings")
    with pytest.raises(EngineError, match="Inductor has no table of lowerings; use PyTorch"):
        fake()


# -- compiled and exported programs ----------------------------------------------------------------------------------


class RowParallel(torch.nn.Module):
    """Two layers of tensor parallelism: each rank has a part of the middle, and the sums are reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reduced = OPS.all_reduce(self.down(torch.relu(self.up(x))), "tp", "minmax8:bucket=256")
        return torch.relu(x + reduced)


class ReducedLinear(torch.nn.Linear):
    """A layer with nothing to fuse."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPS.all_reduce(super().forward(x), "tp", "minmax8:bucket=256")


@contextmanager
def connected() -> Iterator[qccl.Communicator]:
    """The communicator "tp" of the process group; its timeout lets another rank compile on a busy machine."""
    from torch.utils import cpp_extension  # imports setuptools, which warns

    inductor = torch._inductor.config
    inductor.fx_graph_cache = False  # it may have graphs of other versions of the operators
    torch._functorch.config.enable_autograd_cache = False
    inductor.compile_threads = 1
    # C++ that is compiled in 4 seconds in place of 15
    inductor.cpp.vec_isa_ok = inductor.cpp_cache_precompile_headers = False
    inductor.aot_inductor.precompile_headers, inductor.aot_inductor.compile_wrapper_opt_level = False, "O0"

    with TemporaryDirectory() as folder, qccl.Communicator.from_torch(timeout=3600) as comm:
        # Inductor does not quote the path of PyTorch in the compiler's command, and it may contain a blank.
        link = Path(folder) / "torch"
        link.symlink_to(Path(torch.__file__).parent)
        cpp_extension._TORCH_PATH, cpp_extension.TORCH_LIB_PATH = str(link), str(link / "lib")
        register_group("tp", comm)
        torch.manual_seed(comm.rank)
        yield comm


@pytest.mark.slow
@processes.on_ranks(2)
def test_a_compiled_layer_gives_the_eager_bits() -> None:
    """By Inductor on one rank; and it goes on with a later group of the same name, without another compilation."""
    with connected() as comm, torch.inference_mode():
        layer, backend = RowParallel(), "inductor" if comm.rank == 0 else "aot_eager"
        batches = [torch.randn(count, 32, generator=torch.Generator().manual_seed(count)) for count in (16, 5, 7)]
        wanted = [layer(x) for x in batches]
        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
        assert all(torch.equal(compiled(x), y) for x, y in zip(batches, wanted, strict=True))
    torch._dynamo.config.error_on_recompile = True
    with torch.inference_mode():
        with pytest.raises(ArgumentError, match="the group 'tp' does not exist or is closed"):
            compiled(batches[0])
        with connected():
            assert torch.equal(compiled(batches[0]), wanted[0])


@pytest.mark.slow
@processes.on_ranks(2)
def test_a_compiled_rank_makes_all_calls_in_the_order_of_an_eager_one() -> None:
    """Otherwise the ranks' calls, which have different sizes, would not match.

    The function has nothing to fuse, because to compile C++ takes long.
    """
    random = "minmax4:rounding=stochastic,seed=1"  # with other numbers in each call

    def step(xs: list[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
        ys = [x @ weight for x in xs]
        OPS.all_gather(ys[0], 2, "tp", "none")  # its result is not used
        OPS.all_reduce_(ys[1], "tp", "none")  # nor is this one
        equal = [OPS.all_reduce(ys[2], "tp", random), OPS.all_reduce(ys[2], "tp", random)]
        OPS.all_reduce_(ys[3], "tp", "none")
        late = OPS.all_gather(OPS.reduce_scatter(ys[5], 2, "tp", "minmax8"), 2, "tp", "minmax8")
        early = OPS.all_reduce(ys[4], "tp", "none")
        return [early, late, *equal, ys[3]]

    with connected() as comm:
        run = torch.compile(step, fullgraph=True) if comm.rank == 0 else step
        xs = [torch.linspace(-1, 1, 8 * n).reshape(n, 8).requires_grad_(n != 3) for n in range(1, 7)]
        weight = torch.eye(8)
        for number in range(2):
            outputs = run(xs, weight)
            assert not torch.equal(outputs[2], outputs[3])
            assert comm.calls == number * 12 + 8
            sum(y.square().sum() for y in outputs).backward()  # two calls for `late`, one each for `early` and ys[3]
            assert comm.calls == number * 12 + 12
            for each in (*outputs, *[x.grad for x in xs[3:]]):
                assert each is not None
                mine = each.detach().numpy().tobytes()
                assert comm.allgather(mine) == [mine, mine]


@pytest.mark.slow
@processes.on_ranks(2)
def test_a_checkpoint_that_keeps_the_results_makes_no_call_twice() -> None:
    """Eager, and compiled by Inductor on one rank. A checkpoint that keeps none makes each call again, going back."""
    keep = partial(create_selective_checkpoint_contexts, [OPS.all_reduce.default])

    def checkpointed(layers: torch.nn.Sequential, x: torch.Tensor, **how: Any) -> torch.Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False, **how)
        return x

    with connected() as comm:
        layers, x = torch.nn.Sequential(RowParallel(), RowParallel()), torch.linspace(-1, 1, 512).reshape(16, 32)

        def trained(call: Any) -> tuple[int, list[torch.Tensor]]:
            """The calls of a step, and its gradients."""
            before, leaf = comm.calls, x.clone().requires_grad_()
            layers.zero_grad()
            call(layers, leaf).square().sum().backward()
            found = [leaf.grad, *(each.grad for each in layers.parameters())]
            return comm.calls - before, [each.clone() for each in found if each is not None]

        calls, wanted = trained(lambda layers, x: layers(x))
        assert (calls, len(wanted)) == (4, 7)
        assert trained(checkpointed)[0] == 6
        kept = partial(checkpointed, context_fn=keep)
        for call in (kept, torch.compile(kept, fullgraph=True) if comm.rank == 0 else kept):
            for _ in range(2):
                calls, found = trained(call)
                assert calls == 4
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
@processes.on_ranks(2)
def test_exported_and_packaged_programs_give_the_eager_bits(tmp_path: Path) -> None:
    """torch.export, and AOTInductor, whose package of one rank runs on all of them."""
    with connected() as comm, torch.no_grad():
        layer, package = ReducedLinear(32, 32, bias=False), tmp_path / "layer.pt2"
        x = torch.linspace(-1, 1, 512).reshape(16, 32)
        program = torch.export.export(layer, (x,))
        wanted = layer(x)
        assert torch.equal(program.module()(x), wanted)
        if comm.rank == 0:
            torch._inductor.aoti_compile_and_package(program, package_path=str(package))
        comm.barrier()
        packaged = torch._inductor.aoti_load_package(str(package))
        packaged.load_constants(dict(layer.state_dict()), check_full_update=True)
        assert torch.equal(packaged(x), wanted)
    with pytest.raises(RuntimeError, match="the group 'tp' does not exist or is closed"):
        packaged(x)
