"""qccl.torch.compress(): the policy in this process, and the hook on ranks that are processes (torch_ddp_ranks.py)."""

from __future__ import annotations

import importlib.util

import pytest
from start_ranks import start_plain

from qccl import codecs
from qccl.errors import ArgumentError

pytestmark = pytest.mark.starts_first

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

SETTINGS = {"QCCL_TRANSPORT": "auto", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(size, *names, folder="", transport="auto"):
    environment = SETTINGS | {"FOLDER": str(folder), "QCCL_TRANSPORT": transport}
    program = ("tests/support/torch_ddp_ranks.py", *names)
    ended = start_plain(size, *program, limit=240, imported="torch.distributed", **environment)
    assert ended.status == 0, ended.output
    return ended.output


BOTH = ("none_equals_plain", "within_the_bound", "replicas", "low_rank_loses_nothing")


@pytest.mark.slow
def test_two_ranks(tmp_path):
    names = (*BOTH, "resumes", "warms_up", "accumulates", "leaves_parameters_unused", "freezes")
    names += ("other_element_types", "keeps_the_order_of_memory", "traces", "changes_the_rate", "joins", "refuses")
    names += ("loads_in_place", "follows_the_scale", "skips", "clips", "checkpoints_activations", "compiles")
    names += ("low_rank_projects", "low_rank_and_nonfinite", "low_rank_trains", "low_rank_resumes", "low_rank_refuses")
    run(2, *names, folder=tmp_path)


@pytest.mark.slow
def test_two_ranks_choose_codecs(tmp_path):
    names = ("auto_chooses", "auto_behind_a_slow_link", "auto_and_nonfinite", "auto_and_zeros", "auto_resumes")
    names += ("auto_chooses_again", "auto_refuses", "auto_by_measured_calls")
    run(2, *names, folder=tmp_path)


@pytest.mark.slow
def test_four_ranks():
    run(4, *BOTH, "loads_at_another_size", "low_rank_loads_at_another_size")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_rank_that_dies(tmp_path, transport):
    run(3, "dies", folder=tmp_path, transport=transport)
    if transport == "auto":
        run(3, "goes_on", folder=tmp_path)


# -- the policy and the groups ---------------------------------------------------------------------------------------


@pytest.fixture
def parameters():
    import torch

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
    from qccl.torch.groups import Policy, form_groups

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


def test_the_largest_rank_within_a_number_of_bytes(parameters):
    from qccl.torch.groups import Policy, rank_within, table

    def encoded(rank):
        lines = table(groups_of(parameters, low_rank=rank)).splitlines()
        return int(lines[-1].split()[3])

    policy = Policy("minmax8", min_elements=100)
    for rank in (1, 2, 3, 6):
        assert rank_within(parameters.items(), policy, encoded(rank)) == rank
        if rank > 1:
            assert rank_within(parameters.items(), policy, encoded(rank) - 1) == rank - 1
    with pytest.raises(ArgumentError, match=f"already has {encoded(1)} encoded bytes"):
        rank_within(parameters.items(), policy, encoded(1) - 1)
    with pytest.raises(ArgumentError, match="no parameter is large enough"):
        rank_within(parameters.items(), Policy("minmax8", min_elements=10_000), 1000)


def test_momentum_is_kept_where_values_are_sent_as_they_are(parameters):
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
    import torch

    mib = {f"{i}.weight": torch.nn.Parameter(torch.zeros(512, 512)) for i in range(10)}
    groups = groups_of(mib, group_bytes=4 << 20)
    assert [group.nbytes >> 20 for group in groups] == [1, 4, 4, 1]
    assert groups[0].names == ("9.weight",)


def test_a_pattern_that_matches_nothing(parameters):
    from qccl.torch.groups import Policy

    for policy in (Policy("minmax8", exclude=("c.*",)), Policy("minmax8", {"c.*": "none"})):
        with pytest.raises(ArgumentError, match=r"'c\.\*' matches no parameter.*embedding\.weight"):
            policy.check(parameters)


def test_the_table(parameters):
    from qccl.torch.groups import table

    lines = table(groups_of(parameters)).splitlines()
    assert lines[0].split() == ["group", "codec", "dtype", "elements", "bytes", "encoded", "parameters"]
    found = {line.split()[1]: line.split()[3:6] for line in lines[1:-1]}
    encoded = sum(codecs.get("minmax8").encoded_nbytes(n, "float32") for n in (1600, 1024, 1024))
    assert found["minmax8"] == ["3648", str(4 * 3648), str(encoded)]
    assert found["exact"] == ["9", "72", "72"]
    assert lines[-1].split()[1:3] == ["3769", str(4 * 3760 + 72)]


def test_pytorch_is_loaded_only_when_asked_for():
    import subprocess
    import sys

    program = "import sys, qccl; qccl.Work; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "False"


def test_the_table_counts_both_codecs_of_a_pair() -> None:
    """A rank sends the first codec's bytes in one round, and the second one's in the other."""
    import torch

    from qccl.torch.groups import Policy, form_groups, table

    named = [("weight", torch.nn.Parameter(torch.zeros(64, 1024)))]
    sizes = {}
    for codec in ("minmax2", "minmax4", "minmax2/minmax4+ef"):
        (group,) = form_groups(named, Policy(codec), 4 << 20)
        sizes[codec] = group.encoded_nbytes
        assert f" {group.encoded_nbytes}  weight" in table([group])
    assert sizes["minmax2/minmax4+ef"] == (sizes["minmax2"] + sizes["minmax4"]) / 2
