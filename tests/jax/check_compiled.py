"""Calls in compiled functions, on the two processes that test_compiled.py starts, each on one processor.

The processes meet by jax.distributed, and use qccl.jax's default communicator.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rank_calls import bound

import qccl
from qccl.jax import allreduce, default_communicator, reduce_gradients

RANK, SIZE = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
PROCESSORS = sorted(os.sched_getaffinity(0))
# before XLA starts its threads: on one processor, a call that waits for another thread of their pool would hang
os.sched_setaffinity(0, {PROCESSORS[RANK % len(PROCESSORS)]})
jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", SIZE, RANK)
COMM = default_communicator()


def equal(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))


def test_the_default_communicator():
    assert (COMM.rank, COMM.size, COMM.transport.name) == (RANK, SIZE, "ucx")
    assert default_communicator() is COMM


def test_the_bits_of_calls_that_are_not_compiled():
    rng = np.random.default_rng(RANK)
    tree = {
        "w": jnp.asarray(rng.standard_normal((400, 70), np.float32)),
        "b": [jnp.asarray(rng.standard_normal(99, np.float32)).astype(jnp.bfloat16), None, jnp.zeros((2, 0))],
        "n": jnp.arange(5) * RANK,
    }
    for codec in ("minmax8", "minmax3:bucket=64", "none"):
        wanted = allreduce(tree, codec, op="sum")
        compiled = jax.jit(lambda tree, codec=codec: allreduce(tree, codec, op="sum"))
        assert equal(compiled(tree), wanted) and equal(compiled(tree), wanted)


def test_memory_is_used_as_it_is():
    x = jnp.ones((300, 1000)).block_until_ready()
    with bound() as calls:
        found = jax.jit(allreduce)(x).block_until_ready()
    addresses = {name: values.address for name, values in calls.pop()[1].items()}
    assert addresses == {"input 0": x.unsafe_buffer_pointer(), "output 0": found.unsafe_buffer_pointer()}


def test_calls_run_in_the_order_of_the_program(monkeypatch):
    """Also those that do not depend on each other, which XLA orders as it likes, and those of other programs."""
    w, made, call = jnp.eye(300) * 0.5, [], qccl.Communicator.quantized_allreduce_coalesced

    def spy(comm, xs, *rest, **options):
        made.append(xs[0].size // 300)
        return call(comm, xs, *rest, **options)

    monkeypatch.setattr(qccl.Communicator, "quantized_allreduce_coalesced", spy)

    @jax.jit
    def independent(x):
        late = x
        for _ in range(3):
            late = jnp.sin(late @ w)
        return allreduce(late[:50]), allreduce(x[:7]), allreduce(jnp.cos(x)[:20]), allreduce(x[:2] + 1)

    x = jnp.ones((300, 300))
    for _ in range(3):
        found = independent(x), jax.jit(lambda x: allreduce(x[:9] + 1))(x), allreduce(x[:3]), independent(x + 1)
    jax.block_until_ready(found)
    assert made == 3 * [50, 7, 20, 2, 9, 3, 50, 7, 20, 2]


def test_large_arrays_in_a_loop():
    """While another program computes. JAX's callbacks that read such arrays hang here, on one processor."""
    w = jnp.eye(400) * 0.5

    @jax.jit
    def loop(x):
        def body(x, _):
            a, b = allreduce([jnp.tanh(x @ w), jnp.sin(x) @ w])
            return a + b + allreduce(jnp.cos(x), op="sum"), None

        return jax.lax.scan(body, x, None, length=6)[0]

    @jax.jit
    def other(x):
        return jnp.tanh(x @ w @ w)

    x = y = jnp.ones((300, 400))
    for _ in range(5):
        x, y = loop(x), other(other(y))
    assert np.isfinite(x).all() and equal(x, allreduce(x, "none")) and np.isfinite(y).all()


def test_control_flow():
    def step(x):
        return allreduce(x, "none", op="sum")

    x = jnp.arange(4.0)
    assert jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: step(c), x))(x).tolist() == (8 * x).tolist()
    grown = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[1] < 5, step, x))(x)
    assert grown.tolist() == (8 * x).tolist()
    chosen = jax.jit(lambda x: jax.lax.cond(x[1] > 0, step, lambda x: x, x))
    assert chosen(x).tolist() == (2 * x).tolist() and chosen(-x).tolist() == (-x).tolist()
    assert equal(jax.jit(lambda y: (step(x), y)[1])(x), x)  # a call whose result is not used runs, too
    assert COMM.calls == int(allreduce(np.int32(COMM.calls), op="sum")) // SIZE


def test_derivatives():
    """Compiled or not, inside loops and around them: the sum of the ranks' cotangents."""
    x = jnp.arange(4.0)

    def weighted(x):
        return (RANK + 1) * allreduce({"x": x, "n": jnp.arange(4)}, "none", op="sum")["x"].sum()

    for gradient in (jax.jit(jax.grad(weighted)), jax.grad(jax.jit(weighted)), jax.grad(weighted)):
        assert gradient(x).tolist() == [3, 3, 3, 3]

    assert jax.grad(lambda x: (RANK + 1) * 3 * allreduce(x, "none").sum())(x).tolist() == [4.5] * 4  # of the mean

    def looped(x):
        return jax.lax.scan(lambda c, _: (allreduce(c, "none", op="sum"), None), x, None, length=3)[0].sum()

    def invariant(x):
        return jax.lax.scan(lambda c, _: (c + allreduce(x, "none", op="sum").sum(), None), 0.0, None, length=3)[0]

    for function, wanted in ((looped, 8), (invariant, 6)):
        for gradient in (jax.grad(function), jax.jit(jax.grad(function))):
            assert gradient(x).tolist() == [wanted] * 4
    second = jax.jit(jax.grad(lambda x: jax.grad(lambda x: (allreduce(x, "none", op="sum") ** 3).sum())(x).sum()))
    assert second(x).tolist() == (2 * 2 * 6 * SIZE * x).tolist()
    inside = jax.jit(lambda x: jax.lax.scan(lambda c, _: (c - allreduce(jax.grad(weighted)(c)), None), x, None, 2)[0])
    assert np.abs(inside(x) - (x - 6)).max() < 0.1


def test_error_feedback():
    """State is the same as without jit, and its keys too."""
    tree = {"w": jnp.asarray(np.random.default_rng(RANK).standard_normal((50, 3), np.float32)), "b": jnp.ones(3)}
    step = jax.jit(lambda tree: allreduce(tree, "onebit+ef", key="jit"))
    for _ in range(3):
        assert equal(step(tree), allreduce(tree, "onebit+ef", key="eager"))
    keys = COMM.state_dict()["keys"]
    assert {key for key in keys if key.startswith("jit")} == {"jit['w']", "jit['b']"}
    for leaf in ("['w']", "['b']"):
        a, b = (keys[name + leaf]["values"] for name in ("jit", "eager"))
        assert a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def test_transformations_of_two_models():
    """Each has the residuals of its own model, and refuses another one when it is traced."""
    updates = [reduce_gradients("onebit+ef").update for _ in range(2)]
    steps, x = [jax.jit(lambda x, update=update: update(x, ())[0]) for update in updates], jnp.arange(6.0)
    for step in steps:
        jax.block_until_ready(step(x * (RANK + 1)))
    kept = [COMM.state_dict()["keys"][name]["values"]["residual"] for name in ("gradients", "gradients#2")]
    assert kept[0].any() and (kept[0] == kept[1]).all()
    with pytest.raises(qccl.ArgumentError, match="residuals of one model"):
        steps[0](jnp.arange(7.0))


def test_a_constant_of_a_compiled_function():
    """It is reduced when the program runs, not when it is traced."""
    constant, calls = jnp.ones(3), COMM.calls
    compiled = jax.jit(lambda x: x + allreduce(constant, "none", op="sum")).lower(constant).compile()
    assert COMM.calls == calls
    assert compiled(constant).tolist() == [3, 3, 3] and COMM.calls == calls + 1


def test_what_is_refused():
    x = jnp.ones(3)
    with pytest.raises(qccl.ArgumentError, match="lr is a traced value"):
        jax.jit(lambda lr: allreduce(x, "minmax4+ef", key="lr", lr=lr))(0.1)
    with pytest.raises(ValueError, match="Cannot `vmap` ordered IO callback"):
        jax.vmap(allreduce)(jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(allreduce, (x,), (x,))
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.jit(jax.grad(lambda x: jax.checkpoint(allreduce)(x).sum()))(x)


def test_zz_an_error_of_the_call():
    """The last one, because the communicator ends with it."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"MismatchError: the ranks do not agree: rank . called"):
        jax.block_until_ready(jax.jit(allreduce)(jnp.ones(10 + RANK)))
    with pytest.raises((qccl.MismatchError, jax.errors.JaxRuntimeError), match="the ranks do not agree"):
        allreduce(jnp.ones(3))
