"""qccl.jax on ranks that are threads, between compiled functions; test_compiled.py has compiled ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rank_calls import bound
from rank_forks import outputs
from start_ranks import needs_ucx, start_plain
from thread_ranks import on_ranks

import qccl

jax = pytest.importorskip("jax")
jnp = jax.numpy

import qccl.jax  # noqa: E402

ROOT = Path(__file__).parents[2]


def tree_of(rank: int) -> dict:
    """Leaves of all element types that are encoded, some empty, small or missing."""
    rng = np.random.default_rng(rank)

    def normal(*shape: int, dtype: str = "float32") -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)

    return {
        "layers": [{"w": normal(300, 7), "b": normal(7)}, {"w": normal(11, 5, dtype="bfloat16"), "b": None}],
        "half": normal(999, dtype="float16"),
        "empty": normal(0, 3),
        "scale": normal(),
        "last": normal(40, dtype="bfloat16"),
    }


def bits(tree) -> list[tuple]:
    return [(x.shape, str(x.dtype), np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def test_arrays_of_another_layout():
    """They are copied: a result is row-major."""
    from jax.experimental.layout import Format, Layout

    def run(comm):
        x = jnp.arange(24.0).reshape(4, 6)
        turned = jax.device_put(x, Format(Layout((1, 0)), x.sharding))
        assert turned.format.layout.major_to_minor == (1, 0)
        return bits(qccl.jax.allreduce({"w": turned}, comm=comm)) == bits(qccl.jax.allreduce({"w": x}, comm=comm))

    assert all(qccl.run_ranks(2, run))


@pytest.mark.parametrize("codec", ["minmax8", "minmax4:bucket=64", "none", "topk:k=4"])
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_the_bits_of_coalesced_calls(codec, op):
    def run(comm):
        tree = tree_of(comm.rank)
        found = qccl.jax.allreduce(tree, codec, op=op, comm=comm)
        assert jax.tree.structure(found) == jax.tree.structure(tree) and found["layers"][1]["b"] is None
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(found))
        leaves = jax.tree.leaves(tree)
        outs = [np.empty(x.shape, x.dtype) for x in leaves]
        for dtype in ("bfloat16", "float16", "float32"):
            chosen = [i for i, x in enumerate(leaves) if x.dtype == dtype and x.size]
            xs = [leaves[i] for i in chosen]
            comm.quantized_allreduce_coalesced(xs, [outs[i] for i in chosen], op=op, codec=codec)
        assert bits(found) == bits(outs)
        return bits(found)

    first, second = qccl.run_ranks(2, run, timeout=30)
    assert first == second


def test_ranks_that_share_nodes_use_two_levels():
    """Without a word about nodes."""
    nodes = (0, 0, 1, 1)

    def run(comm):
        comm.nodes = nodes
        return bits(qccl.jax.allreduce({"w": jnp.ones((512, 1024)) * comm.rank, "b": jnp.ones(512)}, comm=comm))

    with bound() as calls:
        first, *others = qccl.run_ranks(4, run, timeout=30)
    assert all(other == first for other in others)
    assert [(spec.name, spec.node_ids) for spec, _ in calls] == [("hierarchical_allreduce_coalesced", nodes)] * 4


@on_ranks(1)
def test_a_program_for_a_gpu_is_refused(comm, monkeypatch):
    """When it is traced, with what to do instead."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(qccl.ArgumentError, match="programs for gpu cannot call qccl; call it between"):
        jax.jit(lambda x: qccl.jax.allreduce(x, comm=comm)).trace(jnp.ones(100))


@on_ranks(1)
def test_memory_is_used_as_it_is(comm):
    """The call reads JAX's memory, and JAX uses the call's output."""
    for x in (jnp.arange(5000.0), jnp.ones((3, 5), jnp.bfloat16), jnp.float16(2)):
        with bound() as calls:
            found = qccl.jax.allreduce(x, comm=comm)
        [(_, arrays)] = calls
        addresses = {"input 0": x.unsafe_buffer_pointer(), "output 0": found.unsafe_buffer_pointer()}
        assert {name: values.address for name, values in arrays.items()} == addresses
        assert (np.asarray(x) == np.asarray(found)).all()


@on_ranks(2, timeout=30)
def test_exact_leaves(comm):
    """Integers and float64 are sums to the bit, beside encoded ones."""
    tree = {"n": np.arange(3) + 2**24 * comm.rank, "x": jnp.ones(10), "small": jnp.int8(100), "u": np.uint32([7])}
    found = qccl.jax.allreduce(tree, op="sum", comm=comm)
    assert found["n"].tolist() == [2**24, 2**24 + 2, 2**24 + 4] and found["n"].dtype == np.int32
    assert found["small"] == np.int8(200 - 256) and found["u"].tolist() == [14] and (found["x"] == 2).all()
    with jax.enable_x64(True):
        wide = jnp.asarray([1.0 + 2.0**-40, 1e300 * comm.rank])
        mean = qccl.jax.allreduce(wide, "minmax4", comm=comm)
        assert mean.dtype == np.float64 and mean.tolist() == [1.0 + 2.0**-40, 5e299]
        with pytest.raises(qccl.ArgumentError, match=r"float64, and \+nesterov keeps momenta of bfloat16, float16"):
            qccl.jax.allreduce(wide, "minmax4+nesterov", key="a", comm=comm)
    with pytest.raises(qccl.MismatchError, match=r"rank 0 has int32\[2\], and rank 1 int32\[3\]"):
        qccl.jax.allreduce(jnp.zeros(2 + comm.rank, int), op="sum", comm=comm)
    assert (qccl.jax.allreduce(jnp.ones(4), comm=comm) == 1).all()


@on_ranks(1)
def test_trees_without_values(comm):
    calls = comm.calls
    assert qccl.jax.allreduce({}, comm=comm) == {} and qccl.jax.allreduce(None, comm=comm) is None
    assert qccl.jax.allreduce([jnp.zeros((0, 3))], comm=comm)[0].shape == (0, 3)
    assert comm.calls == calls


@on_ranks(2, timeout=30)
def test_error_feedback_by_path(comm):
    """Each leaf has its own state, with the bits of single calls, which survives a resume and other leaves."""
    rng = np.random.default_rng(comm.rank)
    trees = [{"w": rng.standard_normal((64, 3), np.float32), "b": [np.ones(3, np.float32)]} for _ in range(4)]

    def steps(numbers):
        return [bits(qccl.jax.allreduce(trees[i], "onebit+ef", key="grads", comm=comm, lr=0.5)) for i in numbers]

    whole = steps(range(2))
    saved = comm.state_dict()
    assert list(saved["keys"]) == ["grads['b'][0]", "grads['w']"]
    whole += steps(range(2, 4))
    out = np.empty((64, 3), np.float32)
    for tree, found in zip(trees, whole, strict=True):
        comm.quantized_allreduce(tree["w"], out, op="avg", codec="onebit+ef", key="other", lr=0.5)
        assert out.tobytes() == found[1][2]
    comm.load_state_dict(saved)
    assert steps(range(2, 4)) == whole[2:]
    tree = trees[0] | {"new": np.ones(5, np.float32)}
    qccl.jax.allreduce(tree, "onebit+ef", key="grads", comm=comm, lr=0.5)
    assert list(comm.state_dict()["keys"]) == ["grads['b'][0]", "grads['w']", "grads['new']"]


@on_ranks(2, timeout=30)
def test_a_transformation_has_the_residuals_of_one_model(comm):
    """Of two transformations without a key, as optax.chain() takes them, each has its own; compiled or not."""
    rng = np.random.default_rng(comm.rank)
    inits, updates = zip(*(qccl.jax.reduce_gradients("minmax2+ef", comm=comm) for _ in range(2)), strict=True)
    state = inits[0]({"w": jnp.zeros(500)})
    assert jax.tree.leaves(state) == []
    with pytest.raises(qccl.ArgumentError, match="element type"):  # refused, so it decides no shapes
        updates[0]({"w": np.ones(3, np.complex64)}, ())
    totals, wanted = np.zeros((2, 500)), np.zeros((2, 500))
    for _ in range(12):
        for i, scale in enumerate((100.0, 0.01)):
            x = rng.standard_normal(500, np.float32) * np.float32(scale)
            reduced, state = updates[i]({"w": x}, state, {"w": x})
            totals[i] += reduced["w"]
            wanted[i] += comm.quantized_allreduce(x.copy(), codec="none", op="avg")
    errors = np.linalg.norm(totals - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert errors.max() < 1, errors
    assert [*comm.state_dict()["keys"]] == ["gradients['w']", "gradients#2['w']"]
    with pytest.raises(qccl.ArgumentError, match=r"leaf \"\['v'\]\" was not there, and is \(3,\)"):
        updates[0]({"w": np.ones(500, np.float32), "v": np.ones(3, np.float32)}, ())
    with pytest.raises(qccl.ArgumentError, match=r"leaf \"\['w'\]\" was \(500,\), and is \(5, 100\)"):
        updates[0]({"w": np.ones((5, 100), np.float32)}, ())
    with pytest.raises(qccl.ArgumentError, match=r"belongs to a reduce_gradients\(\) with key='gradients'"):
        qccl.jax.allreduce({"w": np.ones(500, np.float32)}, "minmax2+ef", key="gradients", comm=comm)
    other = qccl.jax.reduce_gradients("minmax2+ef", key="gradients", comm=comm)
    with pytest.raises(qccl.ArgumentError, match="a reduce_gradients\\(\\) with key='gradients' exists"):
        other.update({"w": np.ones(500, np.float32)}, ())


def refused(message: str, tree, *arguments, kind=qccl.ArgumentError, **options):
    def run(comm):
        calls = comm.calls
        with pytest.raises(kind, match=message):
            qccl.jax.allreduce(tree, *arguments, **{"comm": comm, **options})
        assert comm.calls == calls and (qccl.jax.allreduce(jnp.ones(3), comm=comm) == 1).all()

    qccl.run_ranks(1, run)


def test_what_is_refused():
    refused(r"leaf \['a'\]\[1\] has element type complex64; allowed are", {"a": [1.0, jnp.ones(3, complex)]})
    refused(r"the array has element type bool", np.ones(3, bool))
    refused(r"the array has element type key", jax.random.key(0))
    refused(r"leaf \[0\] has element type int32, and op='avg' would round", [jnp.ones(3, int)])
    refused(r"leaf \[0\] is of type str, not an array", ["x"])
    refused(r"op 'max' is not one of avg, sum", jnp.ones(3), op="max")
    refused(r"there is no codec 'minmux'", jnp.ones(3), "minmux", kind=qccl.CodecError)
    refused(r"minmax4\+ef keeps its residual .* pass key=", jnp.ones(3), "minmax4+ef")
    refused(r"comm must be a communicator on host memory", jnp.ones(3), comm="world")
    refused(r"algorithm 'ring' is not one of", jnp.ones(3), algorithm="ring")


@on_ranks(2, timeout=30)
def test_an_error_of_the_call_comes_as_it_is(comm):
    x = jnp.ones(100).at[7].set(jnp.inf if comm.rank else 1)
    with pytest.raises(qccl.ArgumentError, match="not finite"):
        qccl.jax.allreduce({"a": x, "b": x}, "none", nonfinite="error", comm=comm)
    for codec, key in (("none", None), ("minmax4+ef", "g")):
        with pytest.raises(qccl.ArgumentError, match="not finite"):
            qccl.jax.allreduce({"a": x, "b": x}, codec, key=key, nonfinite="error", comm=comm)
    assert (qccl.jax.allreduce(jnp.ones(5), comm=comm) == 1).all()


WITHOUT_TEXT = """
import os, sys, jax, jax.numpy as jnp
from qccl.jax.host_call import call_on_host

class NoText(Exception):
    def __str__(self):
        raise ValueError("no text")

errors = {"NoText": NoText(), "ValueError": ValueError("caf\\udce9")}

def fail(inputs, outputs):
    raise errors[sys.argv[1]]

try:
    print(jax.jit(lambda x: call_on_host(fail, [x]))(jnp.ones(3)), flush=True)
except jax.errors.JaxRuntimeError as error:
    print("raised", f"{sys.argv[1]}: " in str(error), flush=True)
os._exit(0)  # at its end the process would raise the error again
"""


@pytest.mark.parametrize("name", ["NoText", "ValueError"])
def test_an_error_whose_text_cannot_be_had(name):
    """XLA hears of it: otherwise it would take what is in the memory for the result."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_TEXT, name]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert ended.stdout == "raised True\n", ended.stdout + ended.stderr


SEVERAL_DEVICES = """
import jax, numpy as np, pytest, qccl, qccl.jax
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec

def run(comm):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("a")
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, spec))
    reduce = lambda tree: qccl.jax.allreduce(tree, comm=comm)
    own = jax.device_put(np.ones(8, np.float32), jax.devices()[1])
    assert reduce(own).devices() == jax.jit(reduce)(own).devices() == {jax.devices()[1]}
    one = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    alone = jax.shard_map(reduce, mesh=one, in_specs=spec, out_specs=spec)
    assert jax.jit(jax.grad(lambda x: alone(x).sum()))(np.ones(4, np.float32)).tolist() == [1] * 4
    with pytest.raises(qccl.ArgumentError, match=r"leaf \\[0\\] is split over 2 devices"):
        reduce([x])
    for mapped in (jax.pmap(reduce), jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec)):
        with pytest.raises(qccl.ArgumentError, match="inside shard_map.. or pmap.. over 2 devices"):
            mapped(np.ones((2, 4), np.float32))
    both = NamedSharding(mesh, PartitionSpec())
    for sharding in (x.sharding, both):
        with pytest.raises(qccl.ArgumentError, match="compiled for 2 devices, each of which would call qccl"):
            jax.jit(reduce).lower(jax.device_put(np.ones(8, np.float32), sharding))
    made_inside = jax.jit(lambda: reduce(jax.lax.with_sharding_constraint(np.ones(8, np.float32), both)))
    with pytest.raises(qccl.ArgumentError, match="compiled for 2 devices"):
        made_inside()
    explicit(reduce)
    jax.effects_barrier()  # nothing was started
    replicated(comm, reduce, both)

def explicit(reduce):  # the default of make_mesh(): the types of traced arrays say how they are split
    mesh, refused = jax.make_mesh((2,), ("a",)), "compiled for 2 devices, each of which would call qccl"
    assert mesh.axis_types == (AxisType.Explicit,)
    for spec in (PartitionSpec("a"), PartitionSpec(None, "a"), PartitionSpec()):
        x = jax.device_put(np.ones((4, 10), np.float32), NamedSharding(mesh, spec))
        twice = lambda x: jax.lax.scan(lambda x, _: (reduce(x), None), x, None, 2)[0]
        for each in (reduce, twice, jax.grad(lambda x: reduce(x).sum()), lambda x: reduce({"x": x, "y": x.sum()})):
            with pytest.raises(qccl.ArgumentError, match=refused):
                jax.jit(each).lower(x)
    one = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    x = jax.device_put(np.ones((4, 10), np.float32), NamedSharding(one, PartitionSpec("a")))
    assert jax.jit(reduce)(x).tolist() == reduce(x).tolist() == x.tolist()

def replicated(comm, reduce, both):  # one copy is sent, and every device gets the result
    rng, calls = np.random.default_rng(comm.rank), comm.calls
    given = {"w": rng.standard_normal((30, 4), np.float32), "n": np.float32(3), "b": rng.standard_normal(7, np.float32)}
    tree = {"w": jax.device_put(given["w"], both), "n": given["n"], "b": jax.device_put(given["b"], both)}
    turned = Format(Layout((1, 0)), both)
    wanted, found = reduce(given), reduce(tree)
    again = reduce(tree | {"w": jax.device_put(given["w"], turned)})
    assert comm.calls == calls + 3
    for name in ("w", "b"):
        assert found[name].sharding == again[name].sharding == both
        for x in (*found[name].addressable_shards, *again[name].addressable_shards):
            assert np.asarray(x.data).tobytes() == np.asarray(wanted[name]).tobytes(), name
        assert {x.device for x in found[name].addressable_shards} == set(jax.devices())
    assert float(found["n"]) == 3
    gradient = jax.grad(lambda w: (reduce(w) ** 2).sum())(tree["w"])
    assert gradient.shape == (30, 4)

qccl.run_ranks(1, run)
print("refused")
"""


def test_arrays_on_several_devices():
    """JAX must be told of two devices when it starts."""
    assert outputs(SEVERAL_DEVICES, XLA_FLAGS="--xla_force_host_platform_device_count=2") == ["refused\n"]


UNDER_WAY = """
import jax, jax.numpy as jnp, qccl.jax

@jax.jit
def late(x):
    for _ in range(12):
        x = jnp.sin(x @ x)
    return x

step, x = jax.jit(qccl.jax.allreduce), jnp.ones((1500, 1500))
step(x).block_until_ready()
print(" under way " if not step(late(x)).is_ready() else " too early ")
"""


@needs_ucx
@pytest.mark.slow
def test_a_process_that_ends_before_its_last_call():
    """It makes the call first."""
    ended = start_plain(2, "-c", UNDER_WAY, limit=200, JAX_PLATFORMS="cpu")
    assert ended.status == 0 and ended.output.split() == 2 * ["under", "way"], ended.output
