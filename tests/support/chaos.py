"""Chaos: ranks that are killed, stopped, interrupted, late or different, in and between their calls, by a seed.

``chaos.py --cases 3000 --seed 0`` runs a group of 3 or 4 ranks for each case, over UCX's shared memory, UCX's TCP and
wan in turn. One fault strikes one rank, mostly in the middle of a large call. It is checked that

- every rank whose process is left ends within its deadline: with right results, bit for bit, or with an error that
  names a rank;
- the records that the ranks have left, given to the code of ``qccl-bench explain``, name the rank that was struck.

Whether a fault has struck inside a transfer is told by the records, too: the victim's, or those of the ranks that had
transfers with it under way. The table says in how many cases of each kind it alone was named, it and others, others
alone, and none. There is nothing to name where no call has failed, as where connections were cut and made again, or
where a call was too slow for its deadline on a busy machine before the fault. The exit status is 1 where a rank hung or
took wrong values for right, or where fewer than 95% of the ranks were named. ``--write`` makes
docs/results/chaos-DATE.json, and the table of docs/howto/hangs.md.

The ranks are forks of this process, which has loaded no UCX, and waits for its children all the time: UCX takes a
process that has ended, but was not waited for, to be alive.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from chaos_calls import Array, Results, given, results
from chaos_rank import FAULTS, Case, be_a_rank
from plain_ranks import free_ports

from qccl.bench.verdict import findings
from qccl.records import GroupRecord, read_record

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))
import runs  # noqa: E402 -- it is in that folder

TRANSPORTS = ("ucx", "ucx-tcp", "wan")
SIZES = (3, 4)
#: of the calls, in seconds; and what else a case may take, mostly to start
TIMEOUT, PATIENCE = 2.0, 30.0
#: the part of the ranks that must be named
NAMED = 0.95
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
OUTCOMES = ("named", "among others", "wrongly named", "not named", "nothing to name")
_UNNAMED = OUTCOMES[1:4]
HEAD = ("fault", "struck", "cases", *OUTCOMES)


class Group:
    """The ranks of a case."""

    def __init__(self, case: Case, arrays: list[Array], right: Results) -> None:
        self.case = case
        self.folder = Path(tempfile.mkdtemp(prefix="chaos."))
        self.running: dict[int, int] = {}  # by rank, the process
        self.statuses: dict[int, int] = {}
        self.hung: list[int] = []
        self.stopped = 0.0
        self.limit = time.monotonic() + PATIENCE + 5 * case.timeout
        address = f"127.0.0.1:{free_ports(1)[0]}"
        for rank in range(case.size):
            self.running[rank] = self.fork(rank, address, arrays[rank], right)

    def fork(self, rank: int, address: str, array: Array, right: Results) -> int:
        if pid := os.fork():
            return pid
        status = 1
        try:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped rank would stay when this program is killed
            os.setpgid(0, 0)  # the end of the shell that started this program would continue a stopped process
            os.dup2(os.open(self.folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
            faulthandler.enable()
            be_a_rank(self.case, rank, self.folder, address, array, right)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def advance(self) -> bool:
        """Do what is due; whether all processes have ended."""
        for rank, pid in list(self.running.items()):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                self.stopped = time.monotonic()
            elif found:
                self.statuses[rank] = os.waitstatus_to_exitcode(status)
                del self.running[rank]
        now = time.monotonic()
        if self.stopped and self.case.victim in self.running:
            self.end_stop(now)
        if now > self.limit and self.running:
            self.hung += self.running
            self.end()
        return not self.running

    def end_stop(self, now: float) -> None:
        victim = self.running[self.case.victim]
        if self.case.fault == "stopped" and now > self.stopped + self.case.pause:
            os.kill(victim, signal.SIGCONT)
            self.stopped = 0.0
        elif self.case.fault == "stopped for good" and len(self.running) == 1:
            os.kill(victim, signal.SIGKILL)
            self.stopped = 0.0

    def end(self) -> None:
        """End the processes; their tracebacks are in their files."""
        for pid in self.running.values():
            for which in (signal.SIGCONT, signal.SIGABRT):
                os.kill(pid, which)
        time.sleep(0.5)
        for rank, pid in list(self.running.items()):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self.running[rank]

    # -- what became of it

    def said(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {rank: {} for rank in range(self.case.size)}
        for rank, what in found.items():
            path = self.folder / f"{rank}.out"
            for line in path.read_text().splitlines() if path.exists() else ():
                what.update(json.loads(line))
        return found

    def wrongs(self, said: dict[int, dict[str, Any]]) -> Iterator[str]:
        """What must not happen, whatever the fault."""
        gone = {"killed": -signal.SIGKILL, "stopped for good": -signal.SIGKILL}
        for rank, what in said.items():
            status = self.statuses.get(rank)
            is_gone = rank == self.case.victim and gone.get(self.case.fault) == status
            if rank in self.hung:
                yield f"rank {rank} hung"
            elif "wrong" in what:
                yield f"rank {rank} took wrong values for right: {what['wrong']}"
            elif status != 0 and not is_gone:
                yield f"rank {rank} ended with {status}"
            elif not is_gone and "done" not in what and "error" not in what:
                yield f"rank {rank} said nothing"
            elif rank != self.case.victim and "error" in what and not re.search(r"\brank \d+", what["text"]):
                yield f"rank {rank} raised an error that names no rank: {what['text']}"

    def verdict(self) -> dict[str, Any]:
        """The case, its outcome, and what was wrong."""
        case, said = self.case, self.said()
        records = {record.rank: record for record in map(read_record, (self.folder / "records").glob("*.json"))}
        found = findings(records) if records else []
        blamed = sorted({rank for each in found for rank in each.ranks})
        wrong = list(self.wrongs(said))
        is_struck = "struck" in said[case.victim]
        if not is_struck or all("done" in what for rank, what in said.items() if rank != case.victim):
            outcome = "nothing to name"
        elif not blamed:
            outcome = "not named"
        elif case.victim in blamed:
            outcome = "named" if blamed == [case.victim] else "among others"
        else:
            outcome = "wrongly named"
        result = {
            **{"case": case.number, "transport": case.transport, "fault": case.fault, "size": case.size},
            **{"victim": case.victim, "inside": is_inside(records, case.victim), "outcome": outcome, "wrong": wrong},
        }
        if wrong or outcome in _UNNAMED:
            errors = {rank: (self.folder / f"{rank}.err").read_text()[-3000:] for rank in said}
            sentences = [each.text for each in found]
            result |= {"said": said, "blamed": blamed, "sentences": sentences, "stderr": errors}
            result["records"] = {rank: record.as_dict() for rank, record in records.items()}
        shutil.rmtree(self.folder)
        return result


def is_inside(records: dict[int, GroupRecord], victim: int) -> bool:
    """Whether a transfer of the victim was under way in the call that has not ended."""
    if victim in records:
        return any(call.transfers for call in records[victim].calls if call.state != "ended")
    calls = [call for record in records.values() for call in record.calls if call.state != "ended"]
    return any(each.peer == victim for call in calls if victim not in call.missing for each in call.transfers)


def run(of: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all cases, some at a time; their verdicts."""
    arrays = [given(rank) for rank in range(max(SIZES))]
    right = results(SIZES, arrays)
    gc.freeze()  # the end of a process need not look through all of it
    transports = of.transports.split(",")
    numbers = range(of.first, of.first + of.cases)
    waiting = (Case(n, of.seed, transports[n % len(transports)], of.timeout) for n in numbers)
    groups: list[Group] = []
    found: list[dict[str, Any]] = []
    begin = shown = time.monotonic()
    try:
        while True:
            while len(groups) < of.jobs and (case := next(waiting, None)) is not None:
                groups.append(Group(case, arrays, right))
            if not groups:
                return found
            for group in groups[:]:
                if group.advance():
                    groups.remove(group)
                    found.append(group.verdict())
                    report(found[-1])
            if time.monotonic() > shown + 30:
                shown = time.monotonic()
                print(f"{len(found)} of {of.cases} cases in {shown - begin:.0f} s", file=sys.stderr, flush=True)
            time.sleep(0.005)
    finally:
        for group in groups:
            with suppress(OSError):
                group.end()


def report(found: dict[str, Any]) -> None:
    """Say at once what was not as it should be."""
    if found["wrong"] or found["outcome"] in _UNNAMED:
        print(json.dumps({key: each for key, each in found.items() if key != "records"}), file=sys.stderr, flush=True)


def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table: by fault and whether it struck inside a transfer, how many cases had which outcome."""
    counts = Counter((each["fault"], each["inside"], each["outcome"]) for each in found)
    kinds = sorted({(fault, inside) for fault, inside, _ in counts}, key=lambda kind: (FAULTS.index(kind[0]), kind[1]))
    return [
        {"fault": fault, "inside": inside, **{outcome: counts[fault, inside, outcome] for outcome in OUTCOMES}}
        for fault, inside in kinds
    ]


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """All cases together."""
    outcomes = Counter(each["outcome"] for each in found)
    to_name = sum(outcomes[outcome] for outcome in ("named", *_UNNAMED))
    texts = [text for each in found for text in each["wrong"]]
    hangs, values = (sum(mark in text for text in texts) for mark in (" hung", "took wrong values"))
    return {
        **{"cases": len(found), "inside": sum(each["inside"] for each in found), "hangs": hangs},
        **{"wrong values": values, "other wrongs": len(texts) - hangs - values, "to name": to_name},
        **{outcome: outcomes[outcome] for outcome in ("named", *_UNNAMED)},
    }


def cells(of_faults: list[dict[str, Any]]) -> Iterator[list[str]]:
    """The lines of the table that is printed, from its rows()."""
    for row in of_faults:
        counts = [row[outcome] for outcome in OUTCOMES]
        struck = "inside a transfer" if row["inside"] else "outside"
        yield [row["fault"], struck, *map(str, (sum(counts), *counts))]


def write(found: list[dict[str, Any]], of: argparse.Namespace, seconds: float) -> None:
    """The results file, with what was not as it should be, and the table of docs/howto/hangs.md."""
    document = {
        "machine": runs.machine(),
        "command": f"python tests/support/chaos.py --cases {of.cases} --seed {of.seed} --timeout {of.timeout:g}",
        **{"seed": of.seed, "seconds": round(seconds), "timeout": of.timeout, "jobs": of.jobs, **summary(found)},
        "rows": rows(found),
        "by transport": {name: summary([each for each in found if each["transport"] == name]) for name in TRANSPORTS},
        "failed": [
            {key: each for key, each in case.items() if key not in ("records", "stderr")}
            for case in found
            if case["wrong"] or case["outcome"] in _UNNAMED
        ],
    }
    path = ROOT / "docs" / "results" / f"chaos-{date.today().isoformat()}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    table = runs.document_table(HEAD, cells(document["rows"]), document["machine"])
    runs.rewrite_table(str(ROOT / "docs" / "howto" / "hangs.md"), "python tests/support/chaos.py", table)


def main() -> None:
    """Run the cases and say what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat some")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="of the ranks' calls, in seconds")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="in turn, of " + ", ".join(TRANSPORTS))
    parser.add_argument("--records", help="a file for the cases that were not as they should be, with all records")
    parser.add_argument("--write", action="store_true", help="write docs/results/chaos-DATE.json")
    of = parser.parse_args()
    begin = time.monotonic()
    found = sorted(run(of), key=lambda each: each["case"])
    runs.print_table(HEAD, cells(rows(found)))
    total = summary(found)
    print(json.dumps(total), flush=True)
    if of.records:
        failed = [each for each in found if "records" in each]
        Path(of.records).write_text(json.dumps(failed, indent=1), encoding="utf-8")
    if of.write:
        write(found, of, time.monotonic() - begin)
    is_named = total["named"] >= NAMED * total["to name"]
    sys.exit(bool(total["hangs"] or total["wrong values"] or total["other wrongs"] or not is_named))


if __name__ == "__main__":
    main()
