"""Long runs of scripts/fuzz: turns, findings, targets that fail, interruptions. Shell scripts stand for the targets."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import ModuleType

import patience
import pytest

#: as libFuzzer begins: the corpus has five inputs
BEGIN = 'echo "#5\tINITED cov: 3 ft: 4" >&2\n'
#: and as it ends; it has executed 15
END = 'echo "#15\tDONE cov: 7 ft: 9" >&2\necho "stat::number_of_executed_units: 15" >&2\n'
#: a new finding, which ends a turn
FINDING = """
for each in "$@"; do
    case "$each" in -artifact_prefix=*) mktemp "${each#*=}crash-XXXXXX" >/dev/null;; esac
done
exit 77
"""


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).with_name("fuzz"))
    import campaign

    monkeypatch.setattr(campaign, "ROOT", tmp_path)
    monkeypatch.setattr(campaign, "BUILD", tmp_path)
    monkeypatch.setattr(campaign, "FINDINGS", tmp_path / "findings")
    monkeypatch.setattr(campaign, "_versions", dict)
    monkeypatch.setattr(campaign.runs, "machine", lambda: {"commit": "own"})
    monkeypatch.setattr(campaign.runs, "commit", lambda: "own")
    return campaign


def target(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)


def test_the_corpus_is_not_counted_and_turns_add_up(campaign, monkeypatch, tmp_path):
    monkeypatch.setattr(campaign, "_TURN_SECONDS", 1)
    for name in ("codecs", "frames"):
        target(tmp_path, name, f"echo turn >>{tmp_path}/{name}.turns\n{BEGIN}sleep 0.5\n{END}")
    made = campaign.Campaign(["codecs", "frames"], 2, 2, tmp_path / "results.json")
    made.run()
    assert made.is_complete
    for result in made.results:
        turns = len((tmp_path / f"{result.target}.turns").read_text().splitlines())
        assert turns > 1 and result.inputs == 10 * turns
        assert (result.covered, result.findings, result.stopped) == (7, [], None)
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["complete"] and document["inputs"] == sum(result.inputs for result in made.results)


def test_a_target_goes_on_after_findings_until_it_has_many(campaign, monkeypatch, tmp_path):
    monkeypatch.setattr(campaign, "_MOST_FINDINGS", 3)
    target(tmp_path, "codecs", BEGIN + END + FINDING)
    made = campaign.Campaign(["codecs"], 10_000, 1, None)
    made.run()
    [result] = made.results
    assert not made.is_complete and result.stopped == "it has many findings"
    assert len(set(result.findings)) == 3 and result.inputs == 30
    assert all((tmp_path / path).exists() for path in result.findings)


def test_a_target_that_fails_does_not_end_the_others(campaign, tmp_path):
    target(tmp_path, "codecs", 'echo "no such library" >&2\nexit 3\n')
    target(tmp_path, "frames", BEGIN + "sleep 1\n" + END)
    made = campaign.Campaign(["codecs", "frames"], 2, 1, None)
    made.run()
    failed, other = made.results
    assert not made.is_complete
    assert (failed.inputs, failed.stopped) == (0, "it ended with 3, see codecs.log")
    assert other.inputs and other.stopped is None


def test_one_finding_again_and_again_stops_its_target(campaign, tmp_path):
    target(tmp_path, "codecs", BEGIN + FINDING.replace("mktemp", "touch"))
    made = campaign.Campaign(["codecs"], 10_000, 1, None)
    made.run()
    [result] = made.results
    assert len(result.findings) == 1 and result.stopped == "it ended with 77, see codecs.log"


def test_an_interrupted_run_writes_what_it_has_found(campaign, tmp_path):
    target(tmp_path, "codecs", f'{BEGIN}echo "#12\tNEW cov: 6" >&2\nexec sleep 600\n')
    made = campaign.Campaign(["codecs", "frames"], 10_000, 1, tmp_path / "results.json")
    runner = threading.Thread(target=made.run)
    runner.start()
    try:
        limit = patience.Limit(20)
        log = tmp_path / "codecs.log"
        while not (log.exists() and "NEW" in log.read_text()):
            assert limit.left()
            time.sleep(0.01)
    finally:
        made.interrupt()
        limit = patience.Limit(4 * campaign._END_SECONDS)  # a shell may lose the signal just before it becomes sleep
        while runner.is_alive() and limit.left():
            runner.join(0.1)
    assert not runner.is_alive()
    document = json.loads((tmp_path / "results.json").read_text())
    codecs, frames = document["targets"]
    assert not document["complete"]
    assert (codecs["inputs"], codecs["covered"], codecs["stopped"]) == (7, 6, None) and frames["inputs"] == 0


def test_no_target_goes_on_when_the_results_cannot_be_written(campaign, tmp_path):
    target(tmp_path, "codecs", BEGIN + "sleep 1\n" + END)
    target(tmp_path, "frames", f"echo $$ >{tmp_path}/pid\nexec sleep 600\n")
    made = campaign.Campaign(["codecs", "frames"], 10_000, 2, tmp_path / "removed/results.json")
    with pytest.raises(FileNotFoundError):
        made.run()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--write", "gone/a.json"], "there is no folder gone"), (["--add", "--write", "a.json"], "would replace a.json")],
)
def test_files_of_results_that_are_refused(arguments, says, campaign, monkeypatch, tmp_path, capsys):
    """Before a target runs, so that neither its results nor those of others are lost."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text('{"machine": {}, "rows": [1]}')
    monkeypatch.setattr("sys.argv", ["scripts/fuzz", *arguments])
    monkeypatch.setattr(campaign, "Campaign", None)
    with pytest.raises(SystemExit):
        campaign.main()
    assert says in capsys.readouterr().err


def test_a_run_adds_to_the_results_of_another(campaign, tmp_path):
    path = tmp_path / "results.json"
    target(tmp_path, "codecs", BEGIN + END + FINDING)
    target(tmp_path, "frames", BEGIN + END + "exit 3\n")  # has no more turns: they would go on for the 10,000 seconds
    campaign.Campaign(["codecs", "frames"], 10_000, 2, path).run()
    first = json.loads(path.read_text())
    first["machine"]["commit"] = "another"
    target(tmp_path, "codecs", BEGIN + "sleep 1\n" + END)
    campaign.Campaign(["codecs"], 1, 1, path, first).run()
    both = json.loads(path.read_text())
    assert both["machine"]["commit"] == "another, own"
    (codecs, frames), (codecs_before, frames_before) = both["targets"], first["targets"]
    assert (both["runs"], both["inputs"]) == (2, first["inputs"] + 10) and frames == frames_before
    assert codecs["inputs"] == codecs_before["inputs"] + 10 and codecs["findings"] == codecs_before["findings"]
