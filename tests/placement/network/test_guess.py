"""A guess for hosts that nobody measured: by an interface's word where that means something, else with care."""

from pathlib import Path

import pytest

from sbpflow.placement import cluster
from sbpflow.placement.network.guess import two_levels
from sbpflow.placement.network.hosts import Hosts, RunHosts
from sbpflow.placement.network.wire import Interface, interface_of


def machine(root: Path, speed: str, *, beside: str = "device") -> Path:
    """The files of a machine with one interface on the way to others."""
    card = root / "sys/class/net/eth3"
    (card / beside).mkdir(parents=True)
    (card / "speed").write_text(speed)
    (root / "proc/net").mkdir(parents=True)
    rows = ["Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"]
    rows += ["eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0", "eth3 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0"]
    (root / "proc/net/route").write_text("\n".join(rows))
    return root


@pytest.mark.parametrize(
    ("speed", "beside", "rate"),
    [("25000", "device", 25e9 / 8), ("-1", "device", 0.0), ("10000", "queues", 0.0), ("200000", "bonding", 200e9 / 8)],
    ids=["a card", "a card that does not tell", "a virtual one", "a bond"],
)
def test_the_interface_towards_the_others_tells_its_rate(tmp_path: Path, speed: str, beside: str, rate: float) -> None:
    found = interface_of({"MASTER_ADDR": "10.0.0.7"}, machine(tmp_path, speed, beside=beside))
    assert found == Interface("eth3", rate)


def test_an_interface_that_the_environment_names_is_taken(tmp_path: Path) -> None:
    assert interface_of({"GLOO_SOCKET_IFNAME": "eth3"}, machine(tmp_path, "1000")) == Interface("eth3", 1e9 / 8)
    assert interface_of({}, tmp_path).name == "eth0"


@pytest.mark.parametrize(
    ("rates", "bandwidth", "said"),
    [
        ((25e9 / 8, 10e9 / 8), 0.8 * 10e9 / 8 / 3, "10 Gbit/s between them, as eth1 says"),
        ((25e9 / 8, 0.0), 0.8 * 1e9 / 8 / 3, "1 Gbit/s between them, with care, as eth1 tells no rate"),
    ],
)
def test_the_slowest_host_counts_and_its_ranks_share_the_wire(
    rates: tuple[float, float], bandwidth: float, said: str
) -> None:
    run = RunHosts(Hosts((0, 0, 1, 1, 1)), ("a", "b"), tuple(Interface(f"eth{k}", r) for k, r in enumerate(rates)))
    (inside, between), origin = two_levels(cluster("cpu").levels, run)
    assert inside.groups == ((0, 1), (2, 3, 4))
    assert inside.bandwidth == 1.5e9
    assert between.bandwidth == pytest.approx(bandwidth)
    assert origin == f"a guess of two levels: 2 hosts, {said}"


def test_cards_with_adapters_beside_them_keep_their_presets_network() -> None:
    run = RunHosts(Hosts((0, 0, 1, 1)), ("a", "b"), (Interface("eth0", 0.0, 4),) * 2)
    (inside, between), _ = two_levels(cluster("h100x8").levels, run)
    assert (inside.size, between.bandwidth) == (2, 40e9)
