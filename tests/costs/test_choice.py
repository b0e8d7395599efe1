"""The choice of codecs by a budget: a pure function of measurements."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from qccl import codecs
from qccl.codecs import NoCodec
from qccl.costs.choice import Layer, choose
from qccl.costs.profile import Profile
from qccl.costs.step import Speed, Step, encoded_nbytes, sent_nbytes

SPECS = ("none", "minmax8", "minmax4+ef", "minmax2:bucket=256+ef", "trellis2+ef")
CODECS = tuple(codecs.get(spec) for spec in SPECS)
ERRORS = dict(zip(CODECS, (0.0, 0.006, 0.1, 0.45, 0.3), strict=True))
SPEEDS = {codec: Speed(each * 1e-9, 0.2e-9, 0.0) for codec, each in zip(CODECS[1:], (0.2, 0.7, 0.7, 2.8), strict=True)}
#: elements that take 0.1 s uncompressed on a link of 12.5 MB/s between two ranks
TENTH = 312_500
BACKWARD = 0.2


def layers(*counts: int, **given) -> list[Layer]:
    """In the order of the backward pass, at an even pace."""
    times = [BACKWARD * (i + 1) / len(counts) for i in range(len(counts))]
    return [Layer(f"{i}", n, at, 1.0, ERRORS, **given) for i, (n, at) in enumerate(zip(counts, times, strict=True))]


def a_step(rate: float = 12.5e6, ranks: int = 2, **given) -> Step:
    return Step(Profile((), 0.1, BACKWARD, 0.0), ranks, rate, **{"processors": 4.0} | given)


def chosen(these, step, budget):
    """The numbers of the codecs in CODECS: the larger, the cheaper."""
    return [CODECS.index(codec) for codec in choose(these, SPEEDS, step, budget).codecs]


def test_a_fast_link_needs_no_codec() -> None:
    found = choose(layers(TENTH, TENTH, TENTH), SPEEDS, a_step(rate=1e10), 0.015)
    assert found.codecs == (NoCodec(),) * 3 and found.fits and found.limit == "the computation"
    assert found.seconds == pytest.approx(0.3, abs=0.015)


def test_a_slow_link_has_the_cheapest_codecs_and_the_choice_says_that_they_do_not_fit() -> None:
    found = choose(layers(4 * TENTH, 4 * TENTH), SPEEDS, a_step(rate=1e5), 0.015)
    assert not found.fits and found.limit == "the link's rate"
    assert found.codecs == (codecs.get("trellis2+ef"),) * 2
    sent = sum(sent_nbytes(encoded_nbytes(codec, 4 * TENTH), 2) for codec in found.codecs)
    assert found.seconds >= sent / 1e5  # nothing is faster than the bytes


def test_the_gradient_that_is_ready_last_gets_the_coarser_codec() -> None:
    """The first two travel beside the backward pass, so only the last one lengthens the step."""
    found = chosen(layers(TENTH // 4, TENTH // 4, TENTH), a_step(), 0.03)
    assert found[:2] == [0, 0] and found[2] > 0


def test_a_large_layer_pays_more_than_a_small_one_of_the_same_norm() -> None:
    """The error that a codec adds is the same, and the large one saves more seconds."""
    found = [replace(layer, ready=BACKWARD) for layer in layers(TENTH // 10, TENTH)]
    small, large = chosen(found, a_step(), 0.05)
    assert small < large


def test_of_equal_layers_the_one_with_the_smaller_norm_gets_the_coarser_codec() -> None:
    weak, strong = (replace(layers(TENTH)[0], ready=BACKWARD, norm=norm) for norm in (0.1, 10.0))
    for order in ((weak, strong), (strong, weak)):
        found = chosen(order, a_step(), 0.1)
        assert found[order.index(weak)] > found[order.index(strong)]


def test_slow_encoding_is_not_chosen_where_the_link_is_fast_enough() -> None:
    """trellis2 has a smaller error than minmax2, but 1,000 times the time: it must not become the bottleneck."""
    slow = SPEEDS | {codecs.get("trellis2+ef"): Speed(3e-6, 0.2e-9, 0.0)}
    found = choose(layers(TENTH, TENTH), slow, a_step(rate=1.25e6), 0.02)
    assert codecs.get("trellis2+ef") not in found.codecs and codecs.get("minmax2:bucket=256+ef") in found.codecs
    lame = dict.fromkeys(SPEEDS, Speed(1e-5, 1e-5, 0.0))
    assert choose(layers(TENTH, TENTH), lame, a_step(), 0.02).codecs == (NoCodec(),) * 2


def test_fixed_layers_stay_and_count() -> None:
    fixed = replace(layers(TENTH)[0], errors={NoCodec(): 0.0}, ready=BACKWARD)
    free = replace(layers(TENTH)[0], ready=BACKWARD)
    assert chosen([fixed, free], a_step(rate=1e6), 0.01)[0] == 0
    assert chosen([fixed, free], a_step(), 0.12)[1] > chosen([free], a_step(), 0.12)[0]


def random_case(seed: int) -> tuple[list[Layer], Step]:
    rng = random.Random(seed)
    found = layers(*(rng.choice((0, 1, 7, 5000, 40_000, 300_000)) for _ in range(rng.randint(1, 12))))
    found = [
        replace(
            layer,
            norm=rng.choice((0.0, 1e-30, 1.0, 1e30)),
            ready=layer.ready if rng.random() < 0.8 else BACKWARD,
            errors={codec: error * rng.uniform(0.5, 2) for codec, error in ERRORS.items()},
        )
        for layer in found
    ]
    step = a_step(10 ** rng.uniform(4.5, 9.5), rng.randint(1, 5), delay=rng.choice((0.0, 0.02)))
    return found, step


@pytest.mark.parametrize("seed", range(25))
def test_a_larger_budget_gives_no_layer_a_cheaper_codec(seed: int) -> None:
    """And a budget is kept wherever some choice keeps it, but for the tolerance; equal arguments, equal choices."""
    these, step = random_case(seed)
    budgets = [10**each for each in (-6, -3, -2, -1.5, -1, -0.5, 0, 1, 4)]
    found = [choose(these, SPEEDS, step, budget) for budget in budgets]
    for coarse, fine in itertools.pairwise(found):
        pairs = zip(coarse.codecs, fine.codecs, strict=True)
        assert all(CODECS.index(a) >= CODECS.index(b) for a, b in pairs)
    least = min(choice.seconds for choice in found) - step.profile.computation
    for budget, choice in zip(budgets, found, strict=True):
        longer = choice.seconds - step.profile.computation
        assert choice.fits == (longer <= budget)
        assert longer <= max(budget, least * 1.1 + 1e-9)
    assert found[-1].codecs == (NoCodec(),) * len(these)
    assert choose(these, SPEEDS, step, budgets[3]) == found[3]


def test_many_layers_are_chosen_with_little_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    from qccl.costs import choice

    numbers = Counter()

    def count(owner, name):
        own = getattr(owner, name)

        def counting(*given):
            numbers[name] += 1
            return own(*given)

        monkeypatch.setattr(owner, name, counting)

    count(choice, "predicted")
    count(choice._Sequence, "_gain")
    found = choose(layers(*[5000] * 300), SPEEDS, a_step(rate=1e6), 0.5)
    assert len(set(found.codecs)) > 1 and numbers["predicted"] < 60
    # a layer's gains are computed at the start and after its own moves, of which each is to a cheaper codec
    assert numbers["_gain"] <= 300 * len(CODECS) ** 2
