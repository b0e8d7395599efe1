"""Chaos: ranks that are killed, stopped, interrupted, late or different, in and between their calls, by a seed.

``chaos.py --cases 3000 --seed 0`` runs a group of 3 or 4 ranks for each case, over UCX's shared memory, UCX's TCP and
wan in turn; ``--transports gloo`` runs 2 to 4 ranks over gloo. One strike hits one rank (chaos_cases.py). It is checked
that

- every rank whose process is left ends within its deadline: with right results, bit for bit, or with an error of
  qccl's that names a rank; an error ends the process within the calls' timeout and ``--grace`` seconds of the strike;
- it ends as Python ends a program, and not by a signal, whether the error is caught or not and whether the communicator
  is closed or not;
- over UCX the survivors of a killed rank name it within ``--notice`` seconds;
- the records that the ranks have left, given to the code of ``qccl-bench explain``, name the rank that was struck.

Whether a strike was inside a transfer is told by the records, too: the victim's, or those of the ranks that had
transfers with it under way. The table says in how many cases of each kind it alone was named, it and others, others
alone, and none. There is nothing to name where no call has failed, as where connections were cut and made again, or
where a call was too slow for its deadline on a busy machine before the strike. The exit status is 1 where a rank did
what it must not, or where fewer than 95% of the ranks were named. ``--write`` makes docs/results/chaos-DATE.json, and
the table of docs/howto/hangs.md.

``chaos.py --seconds 600 --seed 0`` keeps groups busy that last (chaos_groups.py): over UCX ranks are killed, stopped
and joined while strangers call their sockets; over UCX, wan and gloo (``--strikes exceptions``) exceptions of signals
and of other threads come at random moments. It is checked that every result is right, bit for bit; that after each
event the ranks that are left are in one group, and no two groups have one number; that nobody is left out but who was
stopped; that ranks that lost others leave no descriptor open; and that an exception is told to the others long before
their deadlines. The last line is JSON.

The ranks are forks of this process (forked_ranks.py): the import of PyTorch takes longer than a case.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / folder) for folder in ("bench", "tests/support", "tests/transports", "tests/meeting")]
import runs  # noqa: E402 -- it is in one of these folders
from chaos_calls import known  # noqa: E402
from chaos_cases import STRIKES, STYLES, UNNAMED, Case, CaseGroup, strikes_over  # noqa: E402
from chaos_groups import CALLS, EVENTS, LastingGroup, Plan  # noqa: E402

#: those of the results file, and gloo, which needs PyTorch
TRANSPORTS = ("ucx", "ucx-tcp", "wan")
ALL_TRANSPORTS = (*TRANSPORTS, "gloo")
#: the part of the ranks that must be named
NAMED = 0.95
OUTCOMES = ("named", *UNNAMED, "nothing to name")
HEAD = ("fault", "struck", "cases", *OUTCOMES)


Group = TypeVar("Group", CaseGroup, LastingGroup)


def run(groups: Iterator[Group], jobs: int) -> Iterator[Group]:
    """Each group when it has ended; so many run at a time."""
    gc.freeze()  # the end of a process need not look through all of it
    running: list[Group] = []
    try:
        while True:
            running += itertools.islice(groups, jobs - len(running))
            if not running:
                return
            for group in running[:]:
                if group.advance():
                    running.remove(group)
                    yield group
            time.sleep(0.005)
    finally:
        for group in running:
            group.end()


# -- cases -----------------------------------------------------------------------------------------------------------


def run_cases(of: argparse.Namespace) -> bool:
    """Run all cases and say what became of them; at once, where it was not as it should be. Whether all was well."""
    begin, shared, found = time.monotonic(), known(), list[dict[str, Any]]()
    cases = (
        Case(number, of.seed, of.transports[number % len(of.transports)], of.timeout, of.strikes, of.styles)
        for number in range(of.first, of.first + of.cases)
    )
    for group in run((CaseGroup(case, shared) for case in cases), of.jobs):
        found.append(each := group.verdict(of.grace, of.notice))
        if each["wrong"] or each["outcome"] in UNNAMED:
            print(json.dumps(each), file=sys.stderr, flush=True)
    found.sort(key=lambda each: each["case"])
    runs.print_table(HEAD, cells(rows(found)))
    total = summary(found)
    print(json.dumps(total), flush=True)
    if of.write:
        write(found, of, time.monotonic() - begin)
    is_named = total["named"] >= NAMED * total["to name"]
    return is_named and not (total["hangs"] or total["wrong values"] or total["other wrongs"])


def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table: by strike and whether it was inside a transfer, how many cases had which outcome."""
    counts = Counter((each["strike"], each["inside"], each["outcome"]) for each in found)
    kinds = sorted({(name, inside) for name, inside, _ in counts}, key=lambda kind: (STRIKES.index(kind[0]), kind[1]))
    return [
        {"fault": name, "inside": inside, **{outcome: counts[name, inside, outcome] for outcome in OUTCOMES}}
        for name, inside in kinds
    ]


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """All cases together."""
    outcomes = Counter(each["outcome"] for each in found)
    texts = [text for each in found for text in each["wrong"]]
    hangs, values = (sum(mark in text for text in texts) for mark in (" hung", "took wrong values"))
    return {
        **{"cases": len(found), "inside": sum(each["inside"] for each in found), "hangs": hangs},
        **{"wrong values": values, "other wrongs": len(texts) - hangs - values},
        **{"to name": len(found) - outcomes["nothing to name"]},
        **{outcome: outcomes[outcome] for outcome in OUTCOMES[:-1]},
        **{"styles": Counter(each["style"] for each in found)},
        **{"seconds to end": round(max((each["seconds to end"] for each in found), default=0.0), 2)},
    }


def cells(of_strikes: list[dict[str, Any]]) -> Iterator[list[str]]:
    """The lines of the table that is printed, from its rows()."""
    for row in of_strikes:
        counts = [row[outcome] for outcome in OUTCOMES]
        yield [row["fault"], "inside a transfer" if row["inside"] else "outside", *map(str, (sum(counts), *counts))]


def write(found: list[dict[str, Any]], of: argparse.Namespace, seconds: float) -> None:
    """The results file, with what was not as it should be, and the table of docs/howto/hangs.md."""
    document = {
        "machine": runs.machine(),
        "command": f"python tests/tools/chaos.py --cases {of.cases} --seed {of.seed} --timeout {of.timeout:g}",
        **{"seed": of.seed, "seconds": round(seconds), "timeout": of.timeout, "jobs": of.jobs, **summary(found)},
        "rows": rows(found),
        "by transport": {name: summary([each for each in found if each["transport"] == name]) for name in TRANSPORTS},
        "failed": [
            {key: each for key, each in case.items() if key != "stderr"}
            for case in found
            if case["wrong"] or case["outcome"] in UNNAMED
        ],
    }
    path = ROOT / "docs" / "results" / f"chaos-{date.today().isoformat()}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    table = runs.document_table(HEAD, cells(document["rows"]), document["machine"])
    runs.rewrite_table(str(ROOT / "docs" / "howto" / "hangs.md"), "python tests/tools/chaos.py", table)


# -- groups that last ------------------------------------------------------------------------------------------------


def run_groups(of: argparse.Namespace) -> bool:
    """Keep ``--jobs`` groups until the time is over, and say what became of them; whether all was well."""
    shared, until = known(), time.monotonic() + of.seconds
    events = [event for event in of.strikes if event != "exceptions"]
    kinds = [(name, False) for name in of.transports if events and name.startswith("ucx")]
    kinds += [(name, True) for name in of.transports if "exceptions" in of.strikes]

    def made() -> Iterator[LastingGroup]:
        for number, (transport, interrupts) in enumerate(itertools.cycle(kinds)):
            if time.monotonic() > until:
                return
            left_out = ["split"] * (not interrupts) + ["shrink", "join"] * (not interrupts or transport == "gloo")
            calls = [call for call in CALLS if call not in left_out]
            yield LastingGroup(Plan(f"{of.seed} {number}", transport, calls, interrupts, shared), events, until)

    counts, wrong = {name: Counter[str]() for name in of.transports}, 0
    for group in run(made(), of.jobs):
        counts[group.plan.transport] += group.counts
        wrong += len(group.wrong)
        print(*group.wrong, sep="\n", end="\n" * bool(group.wrong), flush=True)
    print(json.dumps({"seconds": of.seconds, "seed": of.seed, **counts, "wrong": wrong}), flush=True)
    return not wrong


# -- the command -----------------------------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seconds", type=float, help="groups that last, in place of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat some")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="groups at a time")
    parser.add_argument("--timeout", type=float, default=2.0, help="of the ranks' calls, in seconds")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds from the timeout to the end of a process")
    parser.add_argument("--notice", type=float, default=2.0, help="seconds from a kill to the error over UCX")
    parser.add_argument("--write", action="store_true", help="write docs/results/chaos-DATE.json")
    parser.add_argument("--strikes", help=f"of {', '.join(STRIKES)}; with --seconds of {', '.join(EVENTS)}")
    lists = {"transports": ALL_TRANSPORTS, "styles": STYLES}
    for name, allowed in lists.items():
        parser.add_argument(f"--{name}", default=",".join(allowed), help="of " + ", ".join(allowed))
    parser.set_defaults(transports=",".join(TRANSPORTS))
    of = parser.parse_args()
    lists["strikes"] = EVENTS if of.seconds else STRIKES
    of.strikes = of.strikes or ",".join(lists["strikes"])
    for name, allowed in lists.items():
        setattr(of, name, getattr(of, name).split(","))
        if unknown := [each for each in getattr(of, name) if each not in allowed]:
            parser.error(f"--{name}: {unknown[0]!r} is not one of {', '.join(allowed)}")
    for transport in of.transports if not of.seconds else ():
        if not strikes_over(transport, of.strikes):
            parser.error(f"--strikes leaves no case over {transport}")
    if of.write and (of.transports, of.strikes, of.styles) != (list(TRANSPORTS), list(STRIKES), list(STYLES)):
        parser.error("--write is for the transports, strikes and styles that are chosen by default")
    return of


if __name__ == "__main__":
    given = parsed()
    if "gloo" in given.transports:
        importlib.import_module("torch.distributed")
    sys.exit(not (run_groups(given) if given.seconds else run_cases(given)))
