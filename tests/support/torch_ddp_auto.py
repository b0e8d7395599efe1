"""compress(codec="auto") on ranks (torch_ddp_ranks.py runs it)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from profiles import profile
from rank_calls import error_of
from torch_ddp_models import (
    GROUPS,
    assert_close,
    assert_same_everywhere,
    backward,
    batches,
    bits,
    gradients,
    loss_of,
    on_all,
    step,
    wrapped,
)

import qccl
import qccl.torch
import qccl.torch.auto
import qccl.torch.compression
from qccl.torch.auto import CANDIDATES, MEASURED_STEPS
from qccl.torch.link import Link

auto = partial(qccl.torch.compress, codec="auto", **GROUPS)
#: a link on which no budget of some milliseconds is enough for uncompressed gradients, nor for 8 bits
SLOW = Link(200_000.0, 0.0)


class measured_as:
    """Inside, the ranks find this link between them; what they measure themselves depends on the machine."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __enter__(self) -> None:
        self._own = qccl.torch.auto.measure_link
        qccl.torch.auto.measure_link = lambda comm, timeout: self._link

    def __exit__(self, *error: object) -> None:
        qccl.torch.auto.measure_link = self._own


class choosing:
    """Inside, the ranks choose for each free parameter the next of these codecs; their own choice depends on times."""

    def __init__(self, *specs: str) -> None:
        self._specs = specs

    def __enter__(self) -> None:
        self._own = qccl.torch.auto.choose
        qccl.torch.auto.choose = self._choose

    def __exit__(self, *error: object) -> None:
        qccl.torch.auto.choose = self._own

    def _choose(self, layers, *given):
        found, specs = self._own(layers, *given), cycle(self._specs)
        pairs = zip(layers, found.codecs, strict=True)
        chosen = (qccl.codecs.get(next(specs)) if len(layer.errors) > 1 else codec for layer, codec in pairs)
        return replace(found, codecs=tuple(chosen))


def codecs_of(handle) -> dict[str, str]:
    return {name: group.codec_spec for group in handle._groups for name in group.names}


def auto_chooses() -> None:
    """The first steps are exact; then all ranks choose the same, by the link that they measure, and say why."""
    plain, model = wrapped(), wrapped()
    with auto(model) as handle:
        assert handle.statistics() == {}
        for i, x in enumerate(batches(MEASURED_STEPS)):
            assert f"codec='auto' measures: {i} of {MEASURED_STEPS} steps" in handle.table()
            backward(x, plain, model)
            assert_close(plain, model)
            found = handle.statistics()
            assert found["qccl/bytes_sent"] >= found["qccl/bytes_raw"] * (dist.get_world_size() - 1) / 2
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        for x in batches(3, seed=1):
            step(model, optimizer, x)
        assert_same_everywhere(model)
        decision = handle._auto.decision
        assert len(set(on_all(decision.text()))) == 1
        assert set(codecs_of(handle).values()) <= set(CANDIDATES)
        assert decision.rate > 0 and decision.computation > 0 and decision.budget == 0.05 * decision.computation
        text = handle.table()
        for words in ("Mbit/s in each direction of a rank", "computation of a step", "predicted step", "what limits"):
            assert words in text, text
        rows = {line.split()[-1]: line.split() for line in text.splitlines()[1 : 1 + len(codecs_of(handle))]}
        assert {name: row[1] for name, row in rows.items()} == codecs_of(handle)


def auto_behind_a_slow_link() -> None:
    """A slow link has coarse codecs; a generous budget has none; patterns stay; the figures have the bytes."""
    with measured_as(SLOW):
        model = wrapped()
        with auto(model, codecs={"inner.1.*": "topk:k=0.1+ef"}, exclude=["inner.2.*"]) as handle:
            handle.lr = 0.02
            assert codecs_of(handle)["inner.1.weight"].startswith("topk")
            plain = wrapped()
            for x in batches(MEASURED_STEPS):
                backward(x, plain, model)
                assert_close(plain, model)  # also what a pattern names
            exact = handle.statistics()
            for x in batches(3, seed=1):
                step(model, torch.optim.SGD(model.parameters(), 0.02), x)
            chosen = codecs_of(handle)
            assert chosen["inner.1.weight"].startswith("topk") and chosen["inner.2.weight"] == "none"
            assert chosen["norm.weight"] == "none" and chosen["inner.0.weight"] in CANDIDATES[2:], chosen
            assert_same_everywhere(model)
            assert (
                "no choice fits the budget" in handle.table() and "limits the step: the link's rate" in handle.table()
            )
            found = handle.statistics(residuals=True)
            assert all(isinstance(each, float) for each in found.values())
            assert found["qccl/bytes_raw"] == exact["qccl/bytes_raw"] == 4 * sum(p.numel() for p in model.parameters())
            assert found["qccl/bytes_sent"] < exact["qccl/bytes_sent"] / 2
            parts = [each for name, each in found.items() if name.endswith("/bytes_sent") and name.count("/") == 2]
            assert abs(sum(parts) - found["qccl/bytes_sent"]) <= 1e-9 * sum(parts)
            assert 0 <= found["qccl/seconds_hidden"] <= found["qccl/seconds"]
            assert found["qccl/calls"] == len(handle._groups)
            assert 0.01 < found["qccl/inner.0.weight/relative_error"] < 1
            assert found["qccl/inner.0.weight/residual_norm"] > 0
            handle.lr = 0.002  # of the next step
            assert handle.statistics(residuals=True) == found
        model = wrapped()
        with auto(model, budget="100 s") as handle:
            for x in batches(MEASURED_STEPS + 1):
                backward(x, model)
            assert set(codecs_of(handle).values()) == {"none"} and handle._auto.decision.fits


def auto_and_nonfinite() -> None:
    """Gradients that are never finite while they are measured are sent as they are; warm-up steps measure later."""
    with measured_as(SLOW):
        model = wrapped()
        with auto(model, warmup_steps=MEASURED_STEPS + 2) as handle:
            for i, x in enumerate(batches(MEASURED_STEPS + 3)):
                assert (handle._auto.decision is None) and f"{i} of {MEASURED_STEPS + 2} steps" in handle.table()
                model.zero_grad()
                out = model(x).square().mean()
                for name, p in model.module.named_parameters():
                    if name == "inner.3.weight" and dist.get_rank() == 1:
                        out = out + (p * torch.nan).sum()
                    if name == "inner.2.weight":
                        out = out + p.sum() * 1e-38
                out.backward()
            chosen = codecs_of(handle)
            assert chosen["inner.3.weight"] == "none" and chosen["inner.0.weight"] != "none"
            assert handle._auto.decision.layers["inner.3.weight"].error is None


def auto_resumes() -> None:
    """From a saved state training goes on with the same codecs and bits, and nothing is measured."""
    path = Path(os.environ["FOLDER"]) / f"auto {dist.get_rank()}.pt"
    ends = []
    for is_resumed in (False, True):
        if is_resumed:
            saved, model = torch.load(path), wrapped()  # with its default, weights_only=True
            model.module.load_state_dict(saved["model"])
            handle = auto(model)
            refuses_others(handle, saved["qccl"])
            handle.load_state_dict(saved["qccl"])
            assert handle.step == 8 and handle.statistics() == {} and "predicted step" in handle.table()
        else:
            model = wrapped()
            with measured_as(SLOW):
                handle = auto(model)
                for x in batches(8):
                    step(model, torch.optim.SGD(model.parameters(), 0.02), x)
            torch.save({"model": model.module.state_dict(), "qccl": handle.state_dict()}, path)
            full, states = handle.full_state_dict(), on_all(handle.state_dict())
        for x in batches(3, seed=1):
            step(model, torch.optim.SGD(model.parameters(), 0.02), x)
        state = handle.state_dict()
        ends.append((bits(model), state["choice"], {n: t.numpy().tobytes() for n, t in state["residuals"].items()}))
        assert any(t.any() for t in state["residuals"].values())
        handle.close()
    assert ends[0] == ends[1]
    alone = dist.new_group([0])
    for given in (full, states) if dist.get_rank() == 0 else ():
        model = wrapped(process_group=alone)
        with auto(model) as handle:
            handle.load_state_dict(given)
            assert handle._auto.text() == ends[0][1]
            backward(batches(1)[0], model)
    model = wrapped()
    with auto(model) as handle:  # a state from before the choice: the measurements begin anew
        for x in batches(2):
            backward(x, model)
        early = handle.state_dict()
        assert early["choice"] == ""
        handle.load_state_dict(states)
        assert handle.step == 8 and handle._auto.decision is not None
        handle.load_state_dict(early)
        assert handle.step == 2 and f"2 of {2 + MEASURED_STEPS} steps" in handle.table()
        for x in batches(MEASURED_STEPS + 1):
            backward(x, model)
        assert handle._auto.decision is not None


def auto_chooses_again() -> None:
    """A state from before the choice leaves nothing of the old choice, so a handle goes on as a new one does.

    A pattern has state in the saved one (zeros), and its group has another number after the choice.
    """
    ends = []
    for is_new in (False, True):
        model = wrapped()
        with auto(model, codecs={"inner.1.weight": "topk:k=0.1+ef"}) as handle:
            early = handle.state_dict()
            if not is_new:
                with choosing("minmax4+ef", "trellis2+ef"):
                    for x in batches(MEASURED_STEPS + 3):
                        backward(x, model)
                assert handle.state_dict()["residuals"]["inner.0.weight"].any()
            handle.load_state_dict(early)
            for specs in (("trellis2+ef", "minmax4+ef"), ("minmax4+ef", "trellis2+ef"), ("minmax4+ef",)):
                with choosing(*specs):
                    for x in batches(MEASURED_STEPS + 2):
                        backward(x, model)
                assert set(specs) <= set(codecs_of(handle).values())
                ends.append({name: gradient.numpy().tobytes() for name, gradient in gradients(model).items()})
                handle.load_state_dict(early)
    assert ends[:3] == ends[3:]


def auto_and_zeros() -> None:
    """Of gradients that are zero at times, the last others count; those that are never anything else have no codec.

    One rank sees only zeros of inner.1.weight, all ranks see only zeros of inner.2.weight, and inner.3.weight is unused
    in the last measured step.
    """
    with measured_as(SLOW):
        model = wrapped()
        with auto(model) as handle:
            for i, x in enumerate(batches(MEASURED_STEPS + 1)):
                model.zero_grad()
                factors = {
                    "inner.1.weight": dist.get_rank(),
                    "inner.2.weight": 0,
                    "inner.3.weight": i + 1 < MEASURED_STEPS,
                }
                hooks = [
                    p.register_hook(partial(torch.mul, factors[name]))
                    for name, p in model.module.named_parameters()
                    if name in factors
                ]
                loss_of(model, x).backward()
                for hook in hooks:
                    hook.remove()
            errors = {name: layer.error for name, layer in handle._auto.decision.layers.items()}
            assert errors["inner.2.weight"] is None and codecs_of(handle)["inner.2.weight"] == "none"
            for name in ("inner.0.weight", "inner.1.weight", "inner.3.weight"):
                assert errors[name] > 0.01 and codecs_of(handle)[name] != "none", (name, errors)


def refuses_others(handle, state) -> None:
    """What is no choice for these parameters is refused, and changes nothing."""
    refused = partial(error_of, kind=qccl.ArgumentError)
    text = state["choice"]
    before = codecs_of(handle)
    numbers = ('"rate": ', '"rate": -'), ('"ready": ', '"ready": NaN, "x": '), ("inner.0.weight", "inner.9.weight")
    fields = {"rate": 10**400, "delay": 1, "limit": "the\x1b[2Jweather", "ranks": 2.5, "budget": "1", "seconds": True}
    wrong = [json.dumps(json.loads(text) | {name: value}) for name, value in fields.items()]
    wrong += [text.replace(*each) for each in (*numbers, ("+ef", "+ef+nesterov"), ('"fits": ', '"fits": "", "x": '))]
    assert text not in wrong
    for given in (0, [], b"", torch.zeros(3), 5):
        for whole in (state | {"choice": given}, [state | {"choice": given}] * 2):
            assert "is a text, not" in refused(partial(handle.load_state_dict, whole)), given
    for given in (*wrong, "{", "[]", "7", "[" * 100_000, '{"layers": {}}'):
        assert "has no choice of codecs" in refused(partial(handle.load_state_dict, state | {"choice": given})), given
    without = {name: value for name, value in state.items() if name != "choice"}
    assert "the state has no choice of codecs" in refused(lambda: handle.load_state_dict(without))
    assert "has no residuals" in refused(lambda: handle.load_state_dict(state | {"residuals": {}}))
    assert codecs_of(handle) == before and handle.step == 0 and handle._auto.decision is None


def auto_refuses() -> None:
    compress, model = qccl.torch.compress, wrapped()
    refused = partial(error_of, kind=qccl.ArgumentError)
    for budget in (0, -1.0, float("nan"), float("inf"), "fast", "5 min", "0 ms", True, [1]):
        assert "budget" in refused(lambda: auto(model, budget=budget)), budget  # noqa: B023
    assert "budget is for codec='auto'" in refused(lambda: compress(model, budget=1.0))
    assert "leave low_rank and step_bytes out" in refused(lambda: auto(model, low_rank=2))
    assert "leave low_rank and step_bytes out" in refused(lambda: auto(model, step_bytes=10_000))
    assert "codec=auto and +nesterov exclude" in refused(lambda: auto(model, codecs={"inner.*": "minmax8+nesterov"}))
    assert "written in small letters" in refused(lambda: compress(model, "AUTO"))
    assert "leave the pattern out" in refused(lambda: compress(model, codecs={"inner.*": "auto"}))
    assert "nothing to choose" in refused(lambda: auto(model, exclude=["*"]))
    text = error_of(lambda: auto(model, budget=1 + dist.get_rank()), qccl.MismatchError)
    assert "budget=1.0" in text and "budget=2.0" in text
    deep = wrapped(torch.nn.Sequential(torch.nn.Linear(4, 2), *(torch.nn.Linear(4, 4) for _ in range(60))))
    smallest = 8 + dist.get_rank()  # the first parameter has 8 elements, and comes last, behind 300 characters of names
    text = error_of(lambda: compress(deep, "auto", min_elements=smallest), qccl.MismatchError)
    assert "rank 0 has codec='auto' for 0.weight" in text
    with auto(model) as handle:
        loss_of(model, batches(1)[0]).backward()
        assert gradients(model)["inner.0.weight"].any() and handle.step == 1


def auto_by_measured_calls() -> None:
    """With "auto:CODEC" each group has CODEC or none, as the profile says; and the ranks choose alike without one."""
    for fast in ("none", "minmax4+ef"):
        ends = []
        for codec in ("auto:minmax4+ef", fast):
            with qccl.Communicator.from_torch(timeout=60) as comm:
                comm._adopt(profile(comm, (fast, "two_round"), codec="minmax4+ef"))
                model = wrapped()
                with qccl.torch.compress(model, codec, comm=comm, **GROUPS) as handle:
                    for x in batches(3):
                        backward(x, model)
                    ends.append((codecs_of(handle), {n: g.numpy().tobytes() for n, g in gradients(model).items()}))
        assert ends[0] == ends[1] and set(ends[0][0].values()) == {"none", fast}
    model = wrapped()
    with qccl.torch.compress(model, "auto:minmax4", **GROUPS) as handle:
        chosen = codecs_of(handle)
        backward(batches(1)[0], model)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, chosen)
    assert all(each == chosen for each in found) and set(chosen.values()) <= {"none", "minmax4"}
    refused = partial(error_of, kind=qccl.ArgumentError)
    model = wrapped()
    assert "codec=auto and +nesterov exclude" in refused(lambda: qccl.torch.compress(model, "auto:minmax8+nesterov"))
    text = error_of(lambda: qccl.torch.compress(model, codecs={"inner.*": "auto:minmax8"}), qccl.CodecError)
    assert "choose a codec, in calls and plans of a communicator" in text
    alone = dist.new_group([0])
    with qccl.Communicator.from_torch(timeout=60) as comm:
        if dist.get_rank() == 0:
            text = refused(lambda: qccl.torch.compress(wrapped(process_group=alone), "auto:minmax4", comm=comm))
            assert f"comm is rank 0 of {comm.size}, but" in text
        assert comm.calls == 0
        comm.barrier()
    codec = "auto:minmax4" if dist.get_rank() else "minmax4"
    text = error_of(lambda: qccl.torch.compress(wrapped(), codec), qccl.MismatchError)
    assert "rank 0 has a codec, and rank 1 has the faster one of none and minmax4" in text
    with qccl.Communicator.from_torch(timeout=60) as comm:  # as if the first job had measured other times
        comm._adopt(profile(comm, ("none", "two_round"), codec="minmax4+ef"))
        model = wrapped()
        with qccl.torch.compress(model, "minmax4+ef", **GROUPS) as handle:
            backward(batches(1)[0], model)
            state = handle.state_dict()
        with qccl.torch.compress(wrapped(), "auto:minmax4+ef", comm=comm, **GROUPS) as handle:
            assert "and with codec='auto:CODEC' a comm with the same profile" in refused(
                lambda: handle.load_state_dict(state)
            )
