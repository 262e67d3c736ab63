"""Devices of the hosts of a run, by kernels that all their ranks time at once."""

import platform
from collections.abc import Callable, Sequence

import torch

from ..cluster import preset_here
from ..device import family
from ..hardware import Device, RankDevice
from ..network.hosts import Hosts
from .fit import fitted_device, mean_times
from .timing import KernelTime

__all__ = ["devices_of", "unlike"]

UNLIKE = 1.15  # times as long as on the first host, by which a host's devices are others


def devices_of(
    hosts: Hosts, names: Sequence[str], times: Sequence[Sequence[KernelTime]], type: str, when: str
) -> tuple[Device, ...]:
    """The device of each host, by the times of each rank."""
    sheet, kind = preset_here(type).device, family(type)
    card = str(kind.module.get_device_name()) if kind.card else ""
    known = bool(card) and sheet.name in card
    found = []
    for name, ranks in zip(names, hosts.groups, strict=True):
        many = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} at once"
        source = f"on {card or platform.machine()} of {name}, {when}, torch {torch.__version__}, {many}"
        made = fitted_device(sheet, mean_times([times[rank] for rank in ranks]), source, known=known)
        found.append(made)
    return tuple(found)


def unlike(hosts: Hosts, devices: Sequence[Device]) -> tuple[RankDevice, ...]:
    """The hosts whose devices take longer or less long than those of the first."""
    rows = zip(hosts.groups, devices, strict=True)
    return tuple(RankDevice(tuple(ranks), device) for ranks, device in rows if _apart(devices[0], device))


def _apart(one: Device, other: Device) -> bool:
    figures: tuple[Callable[[Device], float], ...] = (
        lambda device: device.flops["float32"] * (device.fitted.product if device.fitted else 1.0),
        lambda device: device.memory_bandwidth * (device.fitted.memory if device.fitted else 1.0),
        lambda device: device.fitted.launch if device.fitted else 0.0,
        lambda device: device.fitted.host if device.fitted else 0.0,
    )
    pairs = (sorted((of(one), of(other))) for of in figures)
    return any(more > UNLIKE * less for less, more in pairs)
