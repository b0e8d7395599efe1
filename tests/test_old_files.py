"""Files that an older qccl wrote (old_files/write.py): a new object of the same model goes on with what they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from old_trainings import FOLDER, SIZE, TRAININGS, check_goes_on

import qccl
from qccl.bench.cli import main
from qccl.communicator.profile import GroupProfile
from qccl.observe.records import read_record

RECORDS = sorted(FOLDER.glob("*-rank-*.json"))


def test_every_file_is_loaded_here() -> None:
    """Those of PyTorch and JAX in tests/torch and tests/jax."""
    trainings = {path.name.split(".")[0] for path in FOLDER.glob("*.npz")}
    assert trainings - {path.name.split(".")[0] for path in FOLDER.glob("*.pt")} == {*TRAININGS, "demo", "jax"}
    others = {path.name for path in FOLDER.iterdir() if path.suffix == ".json"} - {path.name for path in RECORDS}
    assert others == {"group_profile.json"}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    check_goes_on(TRAININGS[name], name, tmp_path)


def test_momenta_of_demo_can_still_be_read() -> None:
    """The class is an example now, docs/examples/demo.py."""
    for rank in range(SIZE):
        state = qccl.load_state(FOLDER / f"demo.rank{rank}.npz")["demo"]
        assert (state["steps"], state["lr"]) == (3, 0.5) and state["momenta"][0].shape == (6, 64)


def test_a_groups_profile_has_the_same_times() -> None:
    path = FOLDER / "group_profile.json"
    given = json.loads(path.read_text())
    profile = GroupProfile.load(path)
    assert profile.as_dict() == given

    def run(comm: qccl.Communicator) -> str:
        comm._adopt(profile)
        plan = comm.plan("allreduce", 1 << 20, "float32", codec="auto")
        assert comm.profile() == profile
        return plan.explain()

    fastest = min(given["curves"], key=lambda curve: curve["points"][-1][1])
    assert fastest["points"][-1][0] == 1 << 20
    for text in qccl.run_ranks(SIZE, run):
        assert f"profile: {fastest['with']} by {fastest['way']} {fastest['points'][-1][1] * 1e3:.3g} ms" in text


def test_records_name_the_rank_that_was_late() -> None:
    records = [read_record(path) for path in RECORDS]
    assert [(record.rank, record.size, len(record.calls)) for record in records] == [(0, 2, 2), (1, 2, 2)]
    assert [record.calls[1].missing for record in records] == [(1,), ()]
    assert records[1].calls[1].transfers[0].peer == 0 and records[0].calls[0].state == "ended"
    for record, path in zip(records, RECORDS, strict=True):
        assert record.as_dict() == json.loads(path.read_text()) | {
            **{"calls": record.as_dict()["calls"], "error": "", "lost": None}
        }
    result = CliRunner().invoke(main, ["explain", *map(str, RECORDS)])
    assert result.exit_code == 0, result.output
    assert "rank 1 made call 1, allreduce(count=1000" in result.output
    assert "rank 1 did not make this call" in result.output
