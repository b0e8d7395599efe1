"""Time to the same quality behind slow links: ``python bench/train_slow_link.py`` (takes hours; needs root).

It trains a model of docs/examples on 4 ranks, with PyTorch's DistributedDataParallel, its own hooks (fp16, PowerSGD),
qccl's codecs, its low-rank compression ("low_rank:4:minmax8+ef": rank 4, and the codec of the factors), and DiLoCo
("diloco:period=8,fragments=2,delay=3:trellis2+ef": its arguments, and the codec of the outer steps).
``--model`` is word_gpt, a word-level GPT with AdamW, byte_model, a byte-level model with SGD, or resnet, a ResNet of
this folder with batch normalisation and SGD. The batch, schedule, learning rate and number of steps are the model's,
and the same for all methods except in the section "rates".
Sections:

- "curves": validation quality by step, for several seeds, without a link: the results do not depend on it;
- "rates": the same for the first seed, with half and twice the learning rate; "long": with six times the steps, so that
  DiLoCo with a period of 15 takes 200 outer steps. By default they have some of the methods only, see
  training_report.py;
- "steps": the time of a step behind each link; "100mbit 25ms 0.1% bbr" is a link of 100 Mbit/s with a delay of 25 ms in
  each direction and 0.1% loss, with bbr as TCP's congestion control, and qccl's transport wan. Four ranks do not fit
  on two cores, so each rank sleeps instead of computing, as long as the forward pass, each gradient and the optimiser
  take one rank alone on this machine; gradients of the same shapes go through DistributedDataParallel, the hook, the
  codec and the link;
- "whole": one whole training behind one link; its parameters must equal those without a link, bit for bit;
- "scaling": the time of a step on 1 to 8 ranks.

The target is the mean quality of fp32 after ``--budget`` steps, plus one standard deviation of its seeds. A method's
time is that of its first step whose quality reaches the target; the learning rate of the language models is constant,
so that each method can reach it.
Beside each step's time stands its limit, a lower bound: the link carries no byte of a gradient before the gradient is
ready, and the computation takes its time. In the limit encoding and decoding take no time. The step without a link, in
shared memory, shows how long they and PyTorch take while four ranks share the processors. Behind a link with a delay,
the limit contains one delay, for which the last gradient waits for the other ranks' shares.

``--save`` writes docs/results/training-<model>-<date>.json after each row; with ``--resume`` the newest such file is
continued, and only what it lacks is measured. ``--write`` makes the tables of docs/results.md and README.md and the
figures docs/training.png and docs/training-all.png from the newest files of all models; with ``--sections ""`` nothing
is measured.

With ``--threads`` the ranks of "curves", "rates" and "long" are threads of one process (training_threads.py), which
takes less processor time; codecs send the same bits. The results file and the table in the page have their own names.

With another number of ranks (``--ranks 2 --sections steps``) the results file and the table in the page have their own
names. On two cores, 2 ranks show the step without sharing a core. A file without curves has no times to the target.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click
import training_report
from runs import commit, cpu, machine, rewrite_table, run_ranks, run_undisturbed
from without_ddp import is_local

from qccl.bench.params import split_codecs

__all__ = ["limit"]

_ROOT = Path(__file__).parent.parent
_SCRIPT = str(Path(__file__).with_name("training_rank.py"))
#: the codec of the sections "whole" and "scaling"
EXAMPLE = "onebit:reconstruct=mean+ef"
#: default number of ranks; the names of other numbers' files and tables contain the number
RANKS = 4
#: multiples of the learning rate in the section "rates", and of the steps in the section "long"
_FACTORS, _LONGER = (0.5, 2.0), 6


@click.command()
@click.option("--model", default="word_gpt", type=click.Choice(list(training_report.MODELS)), show_default=True)
@click.option("--sections", default="curves,rates,long,steps,whole,scaling", show_default=True)
@click.option("--ranks", default=RANKS, show_default=True, help="In all sections but scaling.")
@click.option("--threads", is_flag=True, help="Compute curves in one process, with fp32 and codecs only.")
@click.option("--links", default="100mbit,1gbit,100mbit 25ms 0.1% bbr", show_default=True)
@click.option("--methods", help="In all sections  [default: each section's own]")
@click.option("--seeds", default=5, show_default=True)
@click.option("--steps", default=500, show_default=True, help="Steps of a training.")
@click.option("--budget", default=350, show_default=True, help="Steps of fp32 whose quality is the target.")
@click.option("--patience", default=0.0, show_default=True, help="Seconds to wait for an idle machine, in all.")
@click.option("--resume", is_flag=True, help="Continue the newest file: measure only what it lacks.")
@click.option("--save", is_flag=True, help="Write the results file; sections that did not run stay.")
@click.option("--write", is_flag=True, help="Make the documentation's tables and figures from the results files.")
def main(**given: Any) -> None:
    """Measure, and print tables."""
    name = _name(given["model"], given["ranks"], given["threads"])
    path = _ROOT / "docs" / "results" / f"training-{name}-{date.today().isoformat()}.json"
    before = _newest(name) if given["resume"] else path
    document = json.loads(before.read_text(encoding="utf-8")) if before and before.exists() else {}
    sections = [section for section in given["sections"].split(",") if section]
    if given["threads"] and given["methods"] is None:
        given["methods"] = ",".join(training_report.BY_THREADS)
    _check_fp32(given["methods"], sections, document if given["resume"] else {})
    if sections:
        document |= {"machine": machine(), "model": given["model"], "budget": given["budget"]}
    given |= {"until": time.monotonic() + given["patience"]}
    for section in sections:
        document[section] = document.get(section, []) if given["resume"] else []
        for row in _measured(section, given, document):
            document[section].append(row)
            if given["save"]:  # after each row, so that an interruption loses little
                _save(document, before or path, path)
                before = path
    if document:
        print("\n" + "\n\n".join(training_report.paragraphs(document)))
    if given["write"]:
        write_pages()


def _check_fp32(methods: str | None, sections: Sequence[str], document: dict[str, Any]) -> None:
    """Raise UsageError if the tables of these sections would lack the row that they compare with."""
    for section in {"curves", "steps", "rates", "long"} & set(sections):
        if "fp32" not in [
            *_methods(section, methods, document.get("model", "")),
            *(row["method"] for row in document.get(section, [])),
        ]:
            raise click.UsageError(
                f"the section {section!r} compares each method with fp32: add fp32 to --methods, or continue a file "
                f"that has it, with --resume"
            )


def _name(model: str, ranks: int, threads: bool = False) -> str:
    """The part of a results file's name with the model, the number of ranks, and whether they are threads."""
    return model + ("" if ranks == RANKS else f"-{ranks}-ranks") + ("-threads" if threads else "")


def _newest(name: str) -> Path | None:
    """The newest results file of a model and number of ranks."""
    digits = "[0-9]" * 4 + "-[0-9][0-9]-[0-9][0-9]"
    return max((_ROOT / "docs" / "results").glob(f"training-{name}-{digits}.json"), default=None)


def _save(document: dict[str, Any], before: Path, path: Path) -> None:
    """Write the file; it replaces the one that the run continues."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if before != path:
        before.unlink()


def write_pages() -> None:
    """Make the tables and the figures of the documentation from the newest results files."""
    documents = {}
    for model, (ranks, threads) in itertools.product(
        training_report.MODELS, ((RANKS, False), (2, False), (RANKS, True))
    ):
        path = _newest(_name(model, ranks, threads))
        if path:
            document = json.loads(path.read_text(encoding="utf-8"))
            options = f" --model {model}" + ("" if ranks == RANKS else f" --ranks {ranks}") + " --threads" * threads
            text = "\n\n".join(training_report.paragraphs(document))
            rewrite_table(str(_ROOT / "docs" / "results.md"), f"python bench/train_slow_link.py{options}", text)
            if ranks == RANKS and not threads:
                documents[model] = document
    whole = [document for document in documents.values() if {"curves", "steps"} <= document.keys()]
    if whole:
        far = training_report.headline(whole, has_delay=True)
        for page, methods, more in (("docs/results.md", (), far), ("README.md", training_report.FIRST, "")):
            text = "\n\n".join(filter(None, [training_report.headline(whole, methods), more]))
            rewrite_table(str(_ROOT / page), "python bench/train_slow_link.py", text)
        training_report.draw(whole, _ROOT / "docs")


def _measured(section: str, given: dict[str, Any], document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure one section, without the rows that the document has."""
    model, ranks, until = given["model"], given["ranks"], given["until"]
    methods, links = _methods(section, given["methods"], model), given["links"].split(",")
    curve = {"measure": "curve", "model": model, "steps": given["steps"]}
    train = _train_in_threads if given["threads"] else _run

    def is_missing(task: dict[str, Any]) -> bool:
        return not any(task.items() <= row.items() for row in document[section])

    match section:
        case "curves":
            for seed, method in itertools.product(range(given["seeds"]), methods):
                task = curve | {"method": method, "seed": seed}
                if is_missing(task):
                    yield train(ranks, task)
        case "rates":
            for factor, method in itertools.product(_FACTORS, methods):
                task = curve | {"method": method, "seed": 0, "factor": factor}
                if is_missing(task):
                    yield train(ranks, task)
        case "long":
            for method in methods:
                task = curve | {"method": method, "seed": 0, "steps": _LONGER * given["steps"]}
                if is_missing(task):
                    yield train(ranks, task)
        case "steps":
            for link, method in itertools.product([*links, None], methods):
                if is_missing({"method": method, "link": link}):
                    yield _step(ranks, method, link, _compute(document, until), until)
        case "whole":
            task = curve | {"method": EXAMPLE, "seed": 0}
            if is_missing(task):
                yield _run(ranks, task, links[0])
        case "scaling":
            for n, method in itertools.product((1, 2, 4, 8), ("fp32", EXAMPLE)):
                if is_missing({"method": method, "ranks": n}):
                    yield _step(n, method, links[0] if n > 1 else None, _compute(document, until), until)
        case _:
            raise click.BadParameter(f"unknown section {section!r}; use curves, rates, long, steps, whole or scaling")


def _methods(section: str, given: str | None, model: str) -> list[str]:
    """The given methods, or else the section's own; codecs with momentum only for the model with SGD."""
    if given is not None:
        return split_codecs(given)
    own = {"rates": training_report.TUNED, "long": training_report.LONG}
    methods = own.get(section, training_report.THEIRS + training_report.OURS)
    return [method for method in methods if model == "byte_model" or "+nesterov" not in method]


def _compute(document: dict[str, Any], until: float) -> dict[str, Any]:
    """The measured times of the computation of one rank, alone on the machine."""
    if "compute" not in document:
        document["compute"] = _run(1, {"measure": "compute", "model": document["model"]}, until=until)
    return document["compute"]


def _step(ranks: int, method: str, link: str | None, compute: dict[str, Any], until: float) -> dict[str, Any]:
    """Time a step behind a link, or without one in shared memory."""
    found = _run(ranks, {"measure": "step", "method": method, "compute": compute, "link": link}, link, until)
    del found["compute"]
    network = training_report.network_of(link) if link else None
    rate, delay = (network.rate.rate, network.delay or 0.0) if network and network.rate else (math.inf, 0.0)
    if is_local(method):  # outer steps may overlap the local ones
        found["limit"] = max(training_report.computation({"compute": compute}), found["nbytes"] / rate)
    else:
        found["limit"] = limit(compute, found["nbytes"], rate, delay)
    return found


def limit(compute: dict[str, Any], nbytes: float, rate: float, delay: float = 0.0) -> float:
    """The least seconds of a step that sends ``nbytes`` bytes at ``rate`` bytes per second.

    Bytes arrive ``delay`` seconds after the link has carried them. ``compute`` is a result of training_rank.py: seconds
    of "forward" and "optimiser", and in "ready" the gradients. A gradient's share of the bytes is its share of the
    elements.
    """
    counts = [math.prod(shape) for shape, _ in compute["ready"]]
    left, end = nbytes, compute["ready"][-1][1]
    for count, (_, ready) in zip(counts, compute["ready"], strict=True):
        end = max(end, ready + left / rate)
        left -= nbytes * count / sum(counts)
    return float(compute["forward"] + end + delay + compute["optimiser"])


def _train_in_threads(ranks: int, task: dict[str, Any]) -> dict[str, Any]:
    """Train with ranks that are threads of this process."""
    from training_threads import curve

    row = curve(ranks, task)
    print(f"curve {row['method']}: {row['summary']}", file=sys.stderr, flush=True)
    return row | {"ranks": ranks, "cpu": cpu(), "commit": commit()}


def _run(ranks: int, task: dict[str, Any], link: str | None = None, until: float = 0.0) -> dict[str, Any]:
    """Start the ranks; if other programs disturb them, start them again, until the time ``until``.

    Returns the task with the results of rank 0.
    """

    def run() -> list[dict[str, Any]]:
        network = training_report.network_of(link) if link else None
        transport = "wan" if network and network.is_far else "ucx"
        return run_ranks(_SCRIPT, ranks, task, transport, network.lab(ranks) if network else None, plain=None)

    (row,) = run_undisturbed(run, until)
    print(f"{row['measure']} {row.get('method', '')} {link or ''}: {row['summary']}", file=sys.stderr, flush=True)
    return row | {"ranks": ranks, "cpu": cpu()}  # a run that is continued may be on another machine


if __name__ == "__main__":
    main()
