"""The file that names sites, their ranks and links, and the paths between them (``--sites``).

    [sites.berlin]
    ranks = [0, 1]
    link = "1gbit"          # up and down

    [sites.tokyo]
    ranks = [2, 3]
    up = "20mbit"
    down = "100mbit"

    [[between]]
    sites = ["berlin", "tokyo"]
    delay = "120ms"         # in each direction
    jitter = "5ms"          # optional, like loss
    loss = "0.1%"

At the top ``delay``, ``jitter`` and ``loss`` may stand for the pairs that are not named, and ``queue``, the longest
time that a packet may wait in front of a link.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as File
from typing import Any

from qccl.bench.network import DEFAULT_QUEUE, Network, Path, Site
from qccl.bench.sizes import Link, parse_link, parse_loss
from qccl.scalars import parse_seconds

__all__ = ["parse_sites", "sites_file"]

_PARSERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("link", "up", "down"), parse_link),
    **dict.fromkeys(("delay", "jitter", "queue"), parse_seconds),
    "loss": parse_loss,
}
_OF_A_PATH = ("delay", "jitter", "loss")


def sites_file(name: str) -> str:
    """The text of a file of sites, which is right. Raises ValueError that says what is wrong, and what to write."""
    try:
        text = File(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name!r} cannot be read ({error}); give a file in TOML") from error
    try:
        parse_sites(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return text


def parse_sites(text: str, seed: int = 0) -> Network:
    """The network that the text of such a file describes. Raises ValueError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not TOML: {error}") from error
    _only(table, ("sites", "between", "queue", *_OF_A_PATH), "at the top")
    sites = tuple(_site(name, given) for name, given in _tables(table, "sites").items())
    if len(sites) < 2:
        raise ValueError("it has fewer than two sites; write a table [sites.NAME] for each")
    queue = _value(table, "queue", "at the top") or DEFAULT_QUEUE
    return Network(sites, _paths(table, [site.name for site in sites]), queue, seed)


def _site(name: str, given: Any) -> Site:
    where = f"in [sites.{name}]"
    if not isinstance(given, dict):
        raise ValueError(f"sites.{name} is {given!r}; write a table [sites.{name}] with ranks and link")
    _only(given, ("ranks", "link", "up", "down"), where)
    ranks = given.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
        raise ValueError(f"{where} ranks is {ranks!r}; write a list of numbers, such as ranks = [0, 1]")
    return Site(name, tuple(ranks), *_links(given, where))


def _links(given: Mapping[str, Any], where: str) -> tuple[Link, Link]:
    both = _value(given, "link", where)
    up, down = (_value(given, key, where) or both for key in ("up", "down"))
    if up is None or down is None:
        raise ValueError(f'{where} a rate is missing; write link = "100mbit", or both up and down')
    return up, down


def _paths(table: Mapping[str, Any], names: Sequence[str]) -> dict[tuple[int, int], Path]:
    """The paths in both directions between all pairs of the sites ``names``."""
    found: dict[frozenset[str], Path] = {}
    entries = table.get("between", [])
    if not isinstance(entries, list):
        raise ValueError('between is no list; write [[between]] with two brackets, and sites = ["one", "other"]')
    for entry in entries:
        _only(entry, ("sites", *_OF_A_PATH), "in [[between]]")
        pair = entry.get("sites")
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1] or not set(pair) <= set(names):
            raise ValueError(f"in [[between]] sites is {pair!r}; write two of {', '.join(names)}")
        if frozenset(pair) in found:
            raise ValueError(f"[[between]] names {pair[0]} and {pair[1]} twice; write one for each pair")
        found[frozenset(pair)] = _path({**table, **entry}, f"between {pair[0]} and {pair[1]}")
    for pair in itertools.combinations(names, 2):
        if frozenset(pair) not in found:
            found[frozenset(pair)] = _path(table, f"between {pair[0]} and {pair[1]}")
    both = {frozenset((names[i], names[j])): (i, j) for i, j in itertools.combinations(range(len(names)), 2)}
    return {ends: path for pair, path in found.items() for ends in (both[pair], both[pair][::-1])}


def _path(given: Mapping[str, Any], where: str) -> Path:
    if "delay" not in given:
        raise ValueError(
            f'{where} no delay is given; write [[between]] with these sites and delay = "25ms", or delay = at the top'
        )
    return Path(*(_value(given, key, where) or 0.0 for key in _OF_A_PATH))


def _value(given: Mapping[str, Any], key: str, where: str) -> Any:
    """The parsed value of a key, or None."""
    if key not in given:
        return None
    if not isinstance(given[key], str):
        raise ValueError(f"{where} {key} is {given[key]!r}; write it with a unit, in quotation marks")
    try:
        return _PARSERS[key](given[key])
    except ValueError as error:
        raise ValueError(f"{where}: {key}: {error}") from error


def _tables(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = table.get(key, {})
    return found if isinstance(found, dict) else {}


def _only(given: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in given:
        if key not in allowed:
            raise ValueError(f"{where} there is {key!r}; possible are {', '.join(allowed)}")
