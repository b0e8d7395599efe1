"""Chaos: ranks that are killed, stopped, interrupted, late or different, in and between their calls, by a seed.

``chaos.py --cases 3000 --seed 0`` runs a group of 3 or 4 ranks for each case, over UCX's shared memory, UCX's TCP and
wan in turn; ``--transports gloo`` runs 2 to 4 ranks over gloo. One fault strikes one rank, mostly in the middle of a
large call. It is checked that

- every rank whose process is left ends within its deadline: with right results, bit for bit, or with an error of
  qccl's that names a rank; an error ends the process within the calls' timeout and ``--grace`` seconds of the fault;
- it ends as Python ends a program, and not by a signal, whether the error is caught or not and whether the communicator
  is closed or not;
- in some cases over UCX the survivors of a killed rank go on: each names it within ``--notice`` seconds, they shrink,
  take in a process that joins, make right sums, and leave no descriptor open;
- the records that the ranks have left, given to the code of ``qccl-bench explain``, name the rank that was struck.

Whether a fault has struck inside a transfer is told by the records, too: the victim's, or those of the ranks that had
transfers with it under way. The table says in how many cases of each kind it alone was named, it and others, others
alone, and none. There is nothing to name where no call has failed, as where connections were cut and made again, or
where a call was too slow for its deadline on a busy machine before the fault. The exit status is 1 where a rank did
what it must not, or where fewer than 95% of the ranks were named. ``--write`` makes docs/results/chaos-DATE.json, and
the table of docs/howto/hangs.md.

The ranks are forks of this process (forked_ranks.py): the import of PyTorch takes longer than a case.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from chaos_calls import Array, Results, given, results
from chaos_rank import (
    FAULTS,
    HARMLESS,
    REGROUPS,
    STYLES,
    UNCAUGHT,
    Case,
    be_a_newcomer,
    be_a_rank,
    faults_over,
    styles_of,
)
from forked_ranks import Forks
from plain_ranks import free_ports

from qccl.bench.verdict import findings
from qccl.records import GroupRecord, read_record

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))
import runs  # noqa: E402 -- it is in that folder

#: those of the results file, and gloo, which needs PyTorch
TRANSPORTS = ("ucx", "ucx-tcp", "wan")
ALL_TRANSPORTS = (*TRANSPORTS, "gloo")
SIZES = (2, 3, 4)
#: of the calls, in seconds; and what else a case may take, mostly to start
TIMEOUT, PATIENCE = 2.0, 30.0
#: the part of the ranks that must be named
NAMED = 0.95
OUTCOMES = ("named", "among others", "wrongly named", "not named", "nothing to name")
_UNNAMED = OUTCOMES[1:4]
HEAD = ("fault", "struck", "cases", *OUTCOMES)


class Group:
    """The ranks of a case; a process that joins them has the number ``case.size``."""

    def __init__(self, case: Case, arrays: list[Array], right: Results) -> None:
        self.case = case
        self.folder = Path(tempfile.mkdtemp(prefix="chaos."))
        self.forks = Forks(self.folder)
        self.numbers = list(range(case.size))
        self.hung: list[int] = []
        self.limit = time.monotonic() + PATIENCE + 5 * case.timeout
        address = f"127.0.0.1:{free_ports(1)[0]}"
        for rank in self.numbers:
            self.forks.start(rank, partial(be_a_rank, case, rank, self.folder, address, arrays[rank], right))

    def advance(self) -> bool:
        """Do what is due; whether all processes have ended."""
        self.forks.watch()
        if self.case.victim in self.forks.stopped:
            self.end_stop()
        if self.case.style == "grows" and self.case.size not in self.numbers:
            self.let_join()
        if time.monotonic() > self.limit and self.forks.running:
            self.hung += self.forks.running
            self.forks.end()
        return not self.forks.running

    def end_stop(self) -> None:
        case, since = self.case, self.forks.stopped[self.case.victim]
        if case.fault == "stopped" and time.monotonic() > since + case.pause:
            self.forks.signal(case.victim, signal.SIGCONT)
        elif case.fault == "stopped for good" and len(self.forks.running) == 1:
            self.forks.signal(case.victim, signal.SIGKILL)

    def let_join(self) -> None:
        """Start a process that joins, when a survivor has said where."""
        if addresses := [what["address"] for what in self.said().values() if "address" in what]:
            self.numbers.append(self.case.size)
            self.forks.start(self.case.size, partial(be_a_newcomer, self.case, self.folder, addresses[0]))

    # -- what became of it

    def said(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {number: {} for number in self.numbers}
        for number, what in found.items():
            path = self.folder / f"{number}.out"
            text = path.read_text() if path.exists() else ""
            for line in text[: text.rfind("\n") + 1].splitlines():
                what.update(json.loads(line))
        return found

    def wrongs(self, said: dict[int, dict[str, Any]], grace: float, notice: float) -> Iterator[str]:
        """What must not happen, whatever the fault."""
        case = self.case
        struck = said[case.victim].get("struck")
        is_gone = case.fault in ("killed", "stopped for good") and struck is not None
        if case.style == "grows" and case.size not in said:
            yield "nobody could join"
        for rank, what in said.items():
            status = self.forks.statuses[rank]
            if rank in self.hung:
                yield f"rank {rank} hung"
                continue
            if "wrong" in what:
                yield f"rank {rank} took wrong values for right: {what['wrong']}"
            if re.search("terminate called|Fatal Python error", self.forks.errors(rank)):
                yield f"rank {rank} aborted"
            if rank == case.victim and is_gone and status == -signal.SIGKILL:
                continue
            if status != self.status_of(what):
                yield f"rank {rank} ended with {status}"
            if "done" not in what and "error" not in what:
                yield f"rank {rank} said nothing"
            if rank != case.victim and "error" in what:
                yield from self.wrongs_of_error(rank, what, struck, notice)
            if struck and self.seconds_to_end(rank, what, struck) > case.timeout + grace:
                yield f"rank {rank} ended {self.seconds_to_end(rank, what, struck):.1f} s after the fault"

    def status_of(self, what: dict[str, Any]) -> int:
        """The exit status of a process that has said so."""
        if "error" not in what or self.case.style not in UNCAUGHT:
            return 0
        return -signal.SIGINT if what["error"] == "KeyboardInterrupt" else 1

    def seconds_to_end(self, rank: int, what: dict[str, Any], struck: float) -> float:
        """From the fault to the end of a rank that its error has ended; 0 where a rank had a reason to stay longer."""
        case = self.case
        stays = case.style in REGROUPS or case.fault in HARMLESS
        stays |= rank == case.victim and case.fault not in ("raised", "interrupted")
        return 0.0 if stays or "error" not in what else self.forks.ends[rank] - struck

    def wrongs_of_error(self, rank: int, what: dict[str, Any], struck: float | None, notice: float) -> Iterator[str]:
        """What is wrong with the error of a rank that was not struck, and with what followed it."""
        case = self.case
        if not what["is_ours"]:
            yield f"rank {rank} raised {what['error']}"
        if not re.search(r"\brank \d+", what["text"]):
            yield f"rank {rank} raised an error that names no rank: {what['text']}"
        if case.style not in REGROUPS:
            return
        if what["error"] != "PeerLost" or not re.search(rf"\brank {case.victim} was lost", what["text"]):
            yield f"rank {rank} does not name the lost rank: {what['text']}"
        if struck is None or what["at"] > struck + notice:
            yield f"rank {rank} raised late: {what['at']}, after {struck}"
        if what.get("descriptors"):
            yield f"rank {rank} has {what['descriptors']} more descriptors"
        if "done" not in what:
            yield f"rank {rank} did not go on"

    def verdict(self, grace: float, notice: float) -> dict[str, Any]:
        """The case, its outcome, and what was wrong."""
        case, said = self.case, self.said()
        records = {record.rank: record for record in map(read_record, (self.folder / "records").glob("*.json"))}
        found = findings(records) if records else []
        blamed = sorted({rank for each in found for rank in each.ranks})
        wrong = list(self.wrongs(said, grace, notice))
        struck = said[case.victim].get("struck")
        if not struck or not any("error" in what for rank, what in said.items() if rank != case.victim):
            outcome = "nothing to name"
        elif not blamed:
            outcome = "not named"
        elif case.victim in blamed:
            outcome = "named" if blamed == [case.victim] else "among others"
        else:
            outcome = "wrongly named"
        result = {
            **{"case": case.number, "transport": case.transport, "fault": case.fault, "style": case.style},
            **{
                "size": case.size,
                "victim": case.victim,
                "inside": is_inside(records, case.victim),
                "outcome": outcome,
                "wrong": wrong,
            },
            "seconds to end": max(self.seconds_to_end(rank, what, struck) for rank, what in said.items())
            if struck
            else 0,
        }
        if wrong or outcome in _UNNAMED:
            errors = {rank: self.forks.errors(rank)[-3000:] for rank in said}
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
    numbers = range(of.first, of.first + of.cases)
    transports = [of.transports[n % len(of.transports)] for n in numbers]
    waiting = (
        Case(number, of.seed, transport, of.timeout, of.faults, of.styles)
        for number, transport in zip(numbers, transports, strict=True)
    )
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
                    found.append(group.verdict(of.grace, of.notice))
                    report(found[-1])
            if time.monotonic() > shown + 30:
                shown = time.monotonic()
                print(f"{len(found)} of {of.cases} cases in {shown - begin:.0f} s", file=sys.stderr, flush=True)
            time.sleep(0.005)
    finally:
        for group in groups:
            group.forks.end()


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
        **{"styles": Counter(each["style"] for each in found)},
        **{"seconds to end": round(max((each["seconds to end"] for each in found), default=0.0), 2)},
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


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat some")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="of the ranks' calls, in seconds")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds from the timeout to the end of a process")
    parser.add_argument("--notice", type=float, default=2.0, help="seconds from a kill to the error over UCX")
    lists = {"transports": ALL_TRANSPORTS, "faults": FAULTS, "styles": STYLES}
    for name, allowed in lists.items():
        parser.add_argument(f"--{name}", default=",".join(allowed), help="of " + ", ".join(allowed))
    parser.set_defaults(transports=",".join(TRANSPORTS))
    parser.add_argument("--records", help="a file for the cases that were not as they should be, with all records")
    parser.add_argument("--write", action="store_true", help="write docs/results/chaos-DATE.json")
    of = parser.parse_args()
    for name, allowed in lists.items():
        setattr(of, name, getattr(of, name).split(","))
        if unknown := [each for each in getattr(of, name) if each not in allowed]:
            parser.error(f"--{name}: {unknown[0]!r} is not one of {', '.join(allowed)}")
    for transport in of.transports:
        faults = faults_over(transport, of.faults)
        if not faults or not all(styles_of(transport, fault, of.styles) for fault in faults):
            parser.error(f"--faults and --styles leave no case of a kind over {transport}")
    if of.write and (of.transports, of.faults, of.styles) != (list(TRANSPORTS), list(FAULTS), list(STYLES)):
        parser.error("--write is for the transports, faults and styles that are chosen by default")
    return of


def main() -> None:
    """Run the cases and say what became of them."""
    of = parsed()
    if "gloo" in of.transports:
        importlib.import_module("torch.distributed")
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
