"""Files of clusters, in TOML: what is in one, and how it is written."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from .errors import PlacementError
from .hardware import Calibration, Device, Jitter, Level, MoveShares, RankDevice, RankLink
from .network.link_graph import LinkGraph

__all__ = ["parts_of", "written"]


_PARTS = {"fitted": Calibration, "jitter": Jitter}  # of a device's table, each a table of its own


def parts_of(table: Mapping[str, object], where: str, of: type) -> dict[str, Any]:
    """The fields of a cluster, the dataclass `of`, from its TOML table; `where` says in an error where that stood."""
    top = _fields(table, of, where)
    for name in ("levels", "links", "devices"):
        if not isinstance(top.get(name, []), list):
            raise PlacementError(f"{name} of {where} are written as [[{name}]]\n  found {top[name]!r}")
    links = [_fields(link, RankLink, f"link {k} of {where}") for k, link in enumerate(top.get("links", []))]
    others = [_fields(each, RankDevice, f"device {k} of {where}") for k, each in enumerate(top.get("devices", []))]
    graph = _fields(top["graph"], LinkGraph, f"graph of {where}") if "graph" in top else None
    return {
        "name": str(top["name"]),
        "origin": str(top.get("origin", "")),
        "levels": tuple(_level(each, f"level {k} of {where}") for k, each in enumerate(top["levels"])),
        "device": _device(top["device"], f"device of {where}"),
        "links": tuple(RankLink(**{**link, "ranks": _ranks(link["ranks"], where)}) for link in links),
        "devices": tuple(
            RankDevice(_ranks(each["ranks"], where), _device(each["device"], f"a device of {where}")) for each in others
        ),
        "graph": None if graph is None else LinkGraph(**{**graph, "links": tuple(_pairs(graph["links"], where))}),
    }


def written(
    name: str,
    origin: str,
    levels: Iterable[Level],
    device: Device,
    links: Iterable[RankLink],
    devices: Iterable[RankDevice],
    graph: LinkGraph | None = None,
) -> list[str]:
    """The lines of a cluster's file."""
    lines = [f"name = {_toml(name)}", *([f"origin = {_toml(origin)}"] if origin else [])]
    for level in levels:
        said = [f.name for f in fields(level) if f.name != "shares" and (f.name != "groups" or level.groups)]
        lines += ["", "[[levels]]", *(f"{name} = {_toml(getattr(level, name))}" for name in said)]
        if level.shares != MoveShares():
            parts = (f"{f.name} = {_toml(getattr(level.shares, f.name))}" for f in fields(MoveShares))
            lines += ["", "[levels.shares]", *parts]
    for link in links:
        lines += ["", "[[links]]", *(f"{f.name} = {_toml(getattr(link, f.name))}" for f in fields(link))]
    if graph is not None:
        lines += ["", "[graph]", *(f"{f.name} = {_toml(getattr(graph, f.name))}" for f in fields(graph))]
    lines += _device_lines("device", device)
    for each in devices:
        lines += ["", "[[devices]]", f"ranks = {_toml(each.ranks)}", *_device_lines("devices.device", each.device)]
    return lines


def _level(table: object, where: str) -> Level:
    found = _fields(table, Level, where)
    groups = found.get("groups", [])
    if not isinstance(groups, list):
        raise PlacementError(f"groups of {where} are lists of ranks, as in [[0, 1, 2], [3, 4]]\n  found {groups!r}")
    shares = {"shares": _part(found["shares"], MoveShares, "shares", where)} if "shares" in found else {}
    return Level(**{**found, "groups": tuple(_ranks(group, where) for group in groups), **shares})


def _device(table: object, where: str) -> Device:
    found = _fields(table, Device, where)
    parts = {name: _part(found[name], of, name, where) for name, of in _PARTS.items() if name in found}
    return Device(**{**found, **parts})


def _part(table: object, of: type, name: str, where: str) -> Any:
    """A table in a table."""
    constants = _fields(table, of, f"{name} in {where}")
    try:
        return of(**constants)
    except PlacementError as error:
        raise PlacementError(f"{name} in {where}: {error}") from None


def _ranks(given: object, where: str) -> Any:
    if not isinstance(given, list):
        raise PlacementError(f"ranks in {where} are a list, as in [1, 2]\n  found {given!r}")
    return tuple(given)


def _pairs(given: object, where: str) -> Iterator[tuple[int, int]]:
    for pair in given if isinstance(given, list) else [given]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(rank) is int for rank in pair):
            raise PlacementError(f"links of the graph of {where} are pairs of ranks, as in [0, 1]\n  found {pair!r}")
        yield pair[0], pair[1]


_NUMBERS = (int, float, float | None, Mapping[str, float])


def _fields(table: object, of: type, where: str) -> dict[str, Any]:
    """The entries of a TOML table, which must be those of the dataclass `of` but for defaults, each of its type."""
    wanted = {f.name: f.type for f in fields(of)}
    if not isinstance(table, dict):
        raise PlacementError(f"{where} is a table of {', '.join(wanted)}\n  found {table!r}")
    needed = {f.name for f in fields(of) if f.default is MISSING}
    missing, unknown = needed - table.keys(), table.keys() - wanted.keys()
    if missing or unknown:
        pairs = (("missing", missing), ("unknown", unknown))
        found = "; ".join(f"{word} {', '.join(sorted(names))}" for word, names in pairs if names)
        raise PlacementError(f"{where} needs {', '.join(wanted)}\n  found {found}")
    for name, value in table.items():
        parts = value.values() if isinstance(value, dict) else [value]
        if wanted[name] in _NUMBERS and not all(isinstance(v, int | float) and v == v for v in parts):
            raise PlacementError(f"{name} in {where} is a number\n  found {value!r}")
    return table


def _device_lines(name: str, device: Device) -> list[str]:
    plain = [f.name for f in fields(device) if f.name not in ("flops", *_PARTS)]
    rates = [f"{_toml(dtype)} = {_toml(rate)}" for dtype, rate in device.flops.items()]
    lines = ["", f"[{name}]", *(f"{f} = {_toml(getattr(device, f))}" for f in plain), "", f"[{name}.flops]", *rates]
    for part in _PARTS:
        held = getattr(device, part)
        known = [(f.name, getattr(held, f.name)) for f in fields(held)] if held else []
        said = [f"{name} = {_toml(value)}" for name, value in known if value is not None]
        lines += ["", f"[{name}.{part}]", *said] if said else []
    return lines


def _toml(value: object) -> str:
    # JSON's strings and numbers are TOML's too, but for infinity, which JSON lacks.
    return "inf" if value == float("inf") else json.dumps(value, ensure_ascii=False)
