"""Hosts that are played: network namespaces of this machine with links between them that are as slow as one says.

    with Network([Host("a", ranks=2), Host("b", ranks=2, rate=100)]) as net:
        running = net.torchrun("script.py")
        net.cut("b")

A host has an own network, name, processes and shared memory, as another machine has; files and cores are shared. Needs
root, `ip` and `tc`: `lacking()` says what is not there. Hosts of one switch see each other at their own rates; between
switches there is one trunk.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from shutil import which
from subprocess import Popen
from typing import IO, Any

__all__ = ["Host", "Network", "lacking"]

RATE = 200.0  # Mbit/s
PORT = 29511
_numbers = count()
# No server of names answers in there, and whoever asks one waits; a file that is empty has none.
INSIDE = (
    'hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mount --bind /dev/null /etc/resolv.conf && '
    '{ [ -z "$2" ] || mount --bind "$2" /etc/hosts; } && ip link set lo up && shift 2 && exec "$@"'
)


@dataclass(frozen=True)
class Host:
    """A host with so many ranks; `rate` is that of its link in Mbit/s, each way, to the switch it stands at."""

    name: str
    ranks: int = 2
    rate: float = RATE
    switch: int = 0


@dataclass
class Network:
    """Hosts with addresses 10.77.0.1 and on, in their order. What runs on them ends with the `with`.

    They know no names, but for those of `names`, a file such as /etc/hosts for each host that is to know some.
    """

    hosts: Sequence[Host]
    trunk: float = RATE  # Mbit/s between switches
    names: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)
    prefix: str = field(default_factory=lambda: f"f{os.getpid()}n{next(_numbers)}")
    running: list["Popen[Any]"] = field(default_factory=list)

    def __enter__(self) -> "Network":
        if said := lacking():
            raise RuntimeError(said)
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        for space in (self._middle, *(self.space(host.name) for host in self.hosts)):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", space)

    @property
    def _middle(self) -> str:
        return f"{self.prefix}-middle"

    def space(self, name: str) -> str:
        """The network namespace of a host."""
        return f"{self.prefix}-{name}"

    def address(self, name: str) -> str:
        return f"10.77.0.{[host.name for host in self.hosts].index(name) + 1}"

    def _build(self) -> None:
        _ip("netns", "add", self._middle)
        switches = sorted({host.switch for host in self.hosts})
        for switch in switches:
            _in(self._middle, "ip link add", f"switch{switch}", "type bridge")
            _in(self._middle, "ip link set", f"switch{switch}", "up")
        for host in self.hosts:
            space, wire = self.space(host.name), _wire(host.name)
            _ip("netns", "add", space)
            _in(self._middle, "ip link add", wire, "type veth peer name eth0 netns", space)
            _in(self._middle, "ip link set", wire, f"master switch{host.switch} up")
            _in(space, "ip addr add", f"{self.address(host.name)}/24", "dev eth0")
            _in(space, "ip link set eth0 up")
            _in(space, "ip link set lo up")
            self.slow(host.name, host.rate)
        for at, switch in enumerate(switches[1:]):  # a star around the first
            _in(self._middle, f"ip link add up{at} type veth peer name down{at}")
            for end, of in ((f"up{at}", switches[0]), (f"down{at}", switch)):
                _in(self._middle, "ip link set", end, f"master switch{of} up")
                _limit(self._middle, end, self.trunk)

    def slow(self, name: str, rate: float) -> None:
        """Give a host's link another rate, in Mbit/s, from now on."""
        _limit(self.space(name), "eth0", rate)
        _limit(self._middle, _wire(name), rate)

    def cut(self, name: str) -> None:
        """Pull the cable of a host: nothing comes through, and nobody is told."""
        _in(self._middle, "ip link set", _wire(name), "down")

    def mend(self, name: str) -> None:
        _in(self._middle, "ip link set", _wire(name), "up")

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, out: IO[Any] | int | None = None
    ) -> "Popen[Any]":
        """Start a command on a host, with `out` for what it says. To kill that process is to take the host away."""
        enter = ["ip", "netns", "exec", self.space(name), "unshare", "--uts", "--mount", "--ipc", "--pid", "--fork"]
        enter += ["--kill-child", "--mount-proc", "sh", "-c", INSIDE, "sh", name, str(self.names.get(name, ""))]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0"} | dict(env or {})
        running = Popen([*enter, *command], env=environment, stdout=out, stderr=out, start_new_session=True)
        self.running.append(running)
        return running

    def torchrun(
        self, *script: str, env: Mapping[str, str] | None = None, out: IO[Any] | int | None = None, **options: object
    ) -> "dict[str, Popen[Any]]":
        """Start a script on every host as one does on real ones; options such as max_restarts=2 are torchrun's."""
        started = {}
        for at, host in enumerate(self.hosts):
            said: dict[str, object] = {"nnodes": len(self.hosts), "node_rank": at, "nproc_per_node": host.ranks}
            said |= {"master_addr": self.address(self.hosts[0].name), "master_port": PORT} | options
            words = [f"--{key.replace('_', '-')}={value}" for key, value in said.items() if value is not None]
            command = [sys.executable, "-m", "torch.distributed.run", *words, *script]
            started[host.name] = self.start(host.name, command, env, out)
        return started

    def sent(self) -> dict[str, int]:
        """Bytes that each host has put on its wire so far, by the counter of its interface."""
        return dict(self._counters())

    def _counters(self) -> Iterator[tuple[str, int]]:
        for host in self.hosts:
            yield host.name, _sent(self.space(host.name), "eth0")

    def crossed(self) -> dict[str, int]:
        """Bytes that went over each trunk so far, by its ends: from the first switch `up0`, to it `down0`."""
        trunks = len({host.switch for host in self.hosts}) - 1
        return {end: _sent(self._middle, end) for at in range(trunks) for end in (f"up{at}", f"down{at}")}


def lacking() -> str:
    """Why no hosts can be played here; nothing where they can."""
    if absent := [name for name in ("ip", "tc", "unshare") if not which(name)]:
        return f"hosts are played by {' and '.join(absent)}, which this machine lacks (Debian: iproute2, util-linux)"
    tried = f"{os.getpid()}-try"
    try:
        _ip("netns", "add", tried)
        _ip("netns", "del", tried)
    except subprocess.CalledProcessError as error:
        return f"network namespaces need root: {error.stderr.strip()}"
    return ""


def _wire(name: str) -> str:
    """The switch's end of a host's cable; Linux bears no more letters."""
    return f"to-{name}"[-15:]


def _limit(space: str, wire: str, rate: float) -> None:
    # A burst of 4 ms: what a switch holds back in its buffers, and no more.
    burst = max(int(rate * 1e6 / 8 * 0.004), 16_000)
    # Changed in place, a queue whose first packet is larger than the new burst stands still for ever.
    with suppress(subprocess.CalledProcessError):
        _in(space, f"tc qdisc del dev {wire} root")
    _in(space, f"tc qdisc add dev {wire} root tbf rate {rate:g}mbit burst {burst} latency 100ms")


def _sent(space: str, wire: str) -> int:
    sent: int = json.loads(_in(space, f"ip -s -j link show {wire}"))[0]["stats64"]["tx"]["bytes"]
    return sent


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _in(space: str, *words: str) -> str:
    command = ["ip", "netns", "exec", space, *" ".join(words).split()]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
