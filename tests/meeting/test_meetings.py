"""The names of jobs, by which ranks tell their meetings apart, and the places where they meet."""

from __future__ import annotations

import socket

import pytest

from qccl import ArgumentError, EngineError
from qccl.meeting import ancestors, meetings
from qccl.meeting.launchers import Launcher

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n1",
}
SRUN = Launcher("srun", 0, 2, 0, 0)


def name_and_place(launcher: Launcher, environ: dict[str, str]) -> tuple[str, tuple[str, int]]:
    job = meetings._job(launcher, environ)
    return job, meetings._place(launcher, environ, job, is_local=meetings._is_local(launcher, environ))


@pytest.mark.parametrize(
    "other",
    [
        {"SLURM_STEP_ID": "1"},
        {"SLURM_JOB_ID": "8"},
        {"SLURM_STEP_NODELIST": "n2"},  # the other group of a heterogeneous job
        {"SLURM_HET_GROUP_ID": "1"},
        {"SLURM_PACK_GROUP_ID": "1"},
    ],
)
def test_steps_of_slurm_have_names_and_ports_of_their_own(other):
    (name, (host, port)), (other_name, (_, other_port)) = (name_and_place(SRUN, each) for each in (STEP, STEP | other))
    assert name != other_name and port != other_port and host == "127.0.0.1"


def test_ranks_of_one_step_have_one_name():
    per_rank = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)} for rank in range(2)]
    assert len({name_and_place(SRUN, STEP | each) for each in per_rank}) == 1
    # set by hand in a step that has all ranks, and in one step for each rank
    by_hand = Launcher("torchrun", 0, 2, 0, 0)
    assert "SLURM_STEP_ID=0" in meetings._job(by_hand, STEP)
    alone = [STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": str(step)} for step in range(2)]
    assert {meetings._job(by_hand, each) for each in alone} == {"SLURM_JOB_ID=7"}


def test_a_node_whose_name_is_not_known():
    """The ranks of one node need no name; the others learn at once what is missing."""
    assert name_and_place(SRUN, STEP | {"SLURM_STEP_NODELIST": "no-such-host.invalid"})[1][0] == "127.0.0.1"
    with pytest.raises(EngineError, match=r"'no-such-host.invalid', cannot be found .* set MASTER_ADDR"):
        name_and_place(SRUN, STEP | {"SLURM_STEP_NODELIST": "no-such-host.invalid", "SLURM_STEP_NUM_NODES": "2"})


def test_two_mpiexecs_have_names_of_their_own(monkeypatch):
    """MPICH's gives its ranks no name. They are told apart by the process above them."""
    local = Launcher("MPICH", 0, 2, 0, 2)
    assert meetings._mpiexec().split()[0].isdecimal()
    tree = {
        50: ("sh", 40, "5"),
        40: ("hydra_pmi_proxy", 30, "4"),
        30: ("mpiexec", 1, "3"),
        60: ("hydra_pmi_proxy", 1, "9"),
        1: ("init", 0, "1"),
    }
    monkeypatch.setattr(ancestors, "_stat", tree.__getitem__)
    names = []
    for parent in (50, 40, 60):  # a rank that a shell started, its sibling, and one of another job
        monkeypatch.setattr(ancestors.os, "getppid", lambda parent=parent: parent)
        names.append(name_and_place(local, {}))
    assert names[0] == names[1] != names[2]


def test_the_first_process_of_a_container_has_no_parent(monkeypatch):
    monkeypatch.setattr(ancestors.os, "getppid", lambda: 0)
    assert "mpiexec=" in name_and_place(Launcher("MPICH", 0, 1, 0, 1), {})[0]


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node", "node"), ("a,b", "a"), ("node[03-07,9],other", "node03"), ("n[8],m", "n8"), ("a-1.b[2]", "a-1.b2")],
)
def test_the_first_host_of_a_list_of_slurm(hosts, first):
    assert meetings.first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", ",a", "[1-3]"])
def test_lists_that_are_not_readable(hosts):
    with pytest.raises(ArgumentError, match=r"SLURM_STEP_NODELIST=.* is not readable; set MASTER_ADDR and MASTER_PORT"):
        meetings.first_host(hosts)


def test_the_place_of_a_job_on_one_machine():
    """MASTER_ADDR, or this machine, at QCCL_PORT or at a port of the job's own."""
    local, master = Launcher("torchrun", 1, 4, 1, 4), {"MASTER_ADDR": "there", "MASTER_PORT": "1234"}
    assert name_and_place(local, master | {"QCCL_PORT": "1300"})[1] == ("there", 1300)
    assert name_and_place(local, {"QCCL_PORT": "1300"})[1] == ("127.0.0.1", 1300)
    places = {name_and_place(local, {"TORCHELASTIC_RUN_ID": job})[1] for job in "aab"}
    assert len(places) == 2 and all(host == "127.0.0.1" and port >= meetings._FIRST_PORT for host, port in places)


def test_a_name_service_that_does_not_answer(monkeypatch):
    """The meeting tries again; only a name that does not exist is an error at once."""

    def busy(*arguments):
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    monkeypatch.setattr(socket, "getaddrinfo", busy)
    step = STEP | {"SLURM_STEP_NODELIST": "n3", "SLURM_STEP_NUM_NODES": "2"}
    assert name_and_place(SRUN, step)[1][0] == "n3"


def test_a_meeting_of_one():
    assert meetings.alone().gather(b"note", 1.0) == [b"note"]
