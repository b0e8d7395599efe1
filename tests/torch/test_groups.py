"""The groups that compress() makes of a model's parameters: codecs by patterns, sizes, factors, and their table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qccl import codecs
from qccl.base.errors import ArgumentError
from qccl.torch.groups import Policy, faster, form_groups, table


@pytest.fixture
def parameters():
    def of(*shape, dtype=torch.float32):
        return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

    return {
        "embedding.weight": of(100, 16),
        "norm.weight": of(16),
        "a.weight": of(64, 16),
        "a.bias": of(64),
        "b.weight": of(16, 64),
        "head.weight": of(2, 16),
        "head.scale": of(3, 3, dtype=torch.float64),
    }


def groups_of(parameters, group_bytes=1 << 20, **policy):
    return form_groups(parameters.items(), Policy(**{"codec": "minmax8", "min_elements": 100} | policy), group_bytes)


def specs(groups):
    return {name: group.codec_spec for group in groups for name in group.names}


def test_small_parameters_and_those_of_one_dimension_are_sent_as_they_are(parameters):
    found = specs(groups_of(parameters))
    assert found.pop("head.scale") == "exact"
    assert {name for name, spec in found.items() if spec == "minmax8"} == {"embedding.weight", "a.weight", "b.weight"}
    assert set(found.values()) == {"minmax8", "none"}


def test_patterns(parameters):
    chosen = {"embedding.*": "topk:k=0.1+ef", "*.bias": "onebit", "a.*": "minmax4"}
    found = specs(groups_of(parameters, codecs=chosen, exclude=["b.*"]))
    assert found["embedding.weight"] == codecs.get("topk:k=0.1+ef").spec()
    assert (found["a.bias"], found["a.weight"], found["b.weight"]) == ("onebit", "minmax4", "none")
    found = specs(groups_of(parameters, codecs={"head.weight": "minmax4"}, exclude=["embedding.weight"]))
    assert (found["head.weight"], found["embedding.weight"]) == ("minmax4", "none")


def test_large_matrices_travel_by_factors(parameters):
    """Those that the usual codec encodes, if their factors have less than half of their elements."""
    parameters["inner.weight"] = parameters["a.weight"].new_zeros(64, 16).t().requires_grad_()
    found = {name: group.rank for group in groups_of(parameters, low_rank=2, exclude=["b.*"]) for name in group.names}
    assert {name for name, rank in found.items() if rank == 2} == {"embedding.weight", "a.weight", "inner.weight"}
    assert {rank for rank in found.values()} == {0, 2}
    assert specs(groups_of(parameters, low_rank=2))["a.weight"] == "low_rank:2:minmax8"
    assert not any(group.rank for group in groups_of(parameters, low_rank=2, codecs={"*": "minmax4"}))
    assert {g.rank for g in groups_of(parameters, low_rank=6)} == {0, 6}  # (64 + 16) * 6 * 2 < 64 * 16 < 7 * 2 * 80
    assert not any(group.rank for group in groups_of(parameters, low_rank=7))


def test_momentum_is_kept_where_values_are_sent_as_they_are(parameters):
    del parameters["head.scale"]
    found = specs(groups_of(parameters, codec="minmax4+ef+nesterov:mu=0.8", codecs={"b.*": "none"}))
    assert found["norm.weight"] == "none+nesterov:mu=0.8" and found["b.weight"] == "none"


def test_groups_are_in_the_order_of_the_backward_pass(parameters):
    groups = groups_of(parameters, group_bytes=8192)
    assert [group.names for group in groups] == [
        ("head.scale",),
        ("b.weight", "a.weight"),
        ("head.weight", "a.bias", "norm.weight"),
        ("embedding.weight",),
    ]
    assert [group.key for group in groups] == ["group 0", "group 1", "group 2", "group 3"]
    assert all(group.nbytes <= 8192 for group in groups)
    assert [len(group.names) for group in groups_of(parameters, group_bytes=1)] == [1] * 7


def test_the_first_group_is_small():
    mib = {f"{i}.weight": torch.nn.Parameter(torch.zeros(512, 512)) for i in range(10)}
    groups = groups_of(mib, group_bytes=4 << 20)
    assert [group.nbytes >> 20 for group in groups] == [1, 4, 4, 1]
    assert groups[0].names == ("9.weight",)


def test_a_pattern_that_matches_nothing(parameters):
    for policy in (Policy("minmax8", exclude=("c.*",)), Policy("minmax8", {"c.*": "none"})):
        with pytest.raises(ArgumentError, match=r"'c\.\*' matches no parameter.*embedding\.weight"):
            policy.check(parameters)


def test_the_table(parameters):
    lines = table(groups_of(parameters)).splitlines()
    assert lines[0].split() == ["group", "codec", "dtype", "elements", "bytes", "encoded", "parameters"]
    found = {line.split()[1]: line.split()[3:6] for line in lines[1:-1]}
    encoded = sum(codecs.get("minmax8").encoded_nbytes(n, "float32") for n in (1600, 1024, 1024))
    assert found["minmax8"] == ["3648", str(4 * 3648), str(encoded)]
    assert found["exact"] == ["9", "72", "72"]
    assert lines[-1].split()[1:3] == ["3769", str(4 * 3760 + 72)]


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_momentum_is_refused_for_parameters_that_the_process_group_reduces(parameters, dtype):
    parameters["head.scale"] = torch.nn.Parameter(torch.zeros(3, 3, dtype=getattr(torch, dtype)))
    for policy in ({"codec": "minmax8+ef+nesterov"}, {"codecs": {"head.scale": "none+nesterov"}}):
        with pytest.raises(ArgumentError, match=f"head.scale has the element type {dtype}, and .nesterov keeps"):
            groups_of(parameters, **policy)
    momenta = {"codec": "minmax8+nesterov:mu=0.8", "codecs": {"head.scale": "none"}}  # as the error advises
    assert specs(groups_of(parameters, **momenta))["head.scale"] == "exact"


def test_the_table_counts_both_codecs_of_a_pair() -> None:
    """A rank sends the first codec's bytes in one round, and the second one's in the other."""
    named = [("weight", torch.nn.Parameter(torch.zeros(64, 1024)))]
    sizes = {}
    for codec in ("minmax2", "minmax4", "minmax2/minmax4+ef"):
        (group,) = form_groups(named, Policy(codec), 4 << 20)
        sizes[codec] = group.encoded_nbytes
        assert f" {group.encoded_nbytes}  weight" in table([group])
    assert sizes["minmax2/minmax4+ef"] == (sizes["minmax2"] + sizes["minmax4"]) / 2


@pytest.mark.parametrize("is_faster", [True, False])
@pytest.mark.parametrize(("codec", "has_key"), [("minmax8", False), ("minmax8+ef", True)])
def test_measured_calls_choose_for_groups_of_the_usual_codec_alone(parameters, codec, has_key, is_faster):
    """A pattern's codec and factors stay, and so does the codec where its calls are faster."""
    del parameters["head.scale"]
    groups = groups_of(parameters, codec=codec, low_rank=2, codecs={"embedding.*": "minmax4"}, exclude=["a.*"])
    groups += groups_of(parameters, codec=codec, exclude=["embedding.*", "a.*"])
    kinds = {(group.codec_spec, group.rank) for group in groups}
    assert kinds == {("none", 0), ("minmax4", 0), (f"low_rank:2:{codec}", 2), (codec, 0)}
    free = [group for group in groups if (group.codec_spec, group.rank) == (codec, 0)]
    chosen, asked = codec if is_faster else "none", []

    def plan(*given, **options):
        asked.append((given, options))
        return SimpleNamespace(spec=SimpleNamespace(codec=codecs.get(chosen)))

    found = faster(groups, codecs.get(codec), SimpleNamespace(plan=plan))
    for before, after in zip(groups, found, strict=True):
        assert after.codec_spec == (chosen if before in free else before.codec_spec)
        assert (after.names, after.rank) == (before.names, before.rank)
    given = [("allreduce", sum(group.counts), "float32") for group in free]
    options = [{"codec": f"auto:{codec}", "key": group.key if has_key else None} for group in free]
    assert asked == list(zip(given, options, strict=True))
