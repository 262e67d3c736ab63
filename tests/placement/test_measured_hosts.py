"""On played hosts the doctor finds the links that were set, and a run without a file knows its hosts."""

from pathlib import Path
from subprocess import DEVNULL

import pytest

from sbpflow.placement import cluster
from tools.hosts import Host, Network, lacking

pytestmark = [pytest.mark.sweep, pytest.mark.skipif(bool(lacking()), reason=lacking())]
NETWORKS = {
    "two hosts": ([Host("a"), Host("b")], 200.0, [12.5e6]),
    "three unequal hosts": (
        [Host("a", 3, 200.0), Host("b", 2, 100.0), Host("c", 1, 50.0)],
        200.0,
        [6.25e6, 6.25e6],
    ),
    "two pairs with a thin trunk": (
        [Host("a"), Host("b"), Host("c", switch=1), Host("d", switch=1)],
        50.0,
        [12.5e6, 1.56e6],
    ),
}
SAYS = """
import sys
from sbpflow.placement import default_cluster
from sbpflow.placement.world import init
with open(f"{sys.argv[1]}/{init().rank}", "w") as said:
    print(default_cluster("cpu").said, file=said)
"""


@pytest.mark.parametrize("which", NETWORKS)
def test_what_is_measured_is_what_was_set(which: str, tmp_path: Path) -> None:
    hosts, trunk, expected = NETWORKS[which]
    with Network(hosts, trunk=trunk) as net:
        command = ("-m", "sbpflow", "doctor", "--measure", "links", "--out", str(tmp_path / "links.toml"))
        ended = [process.wait(200) for process in net.torchrun(*command, out=DEVNULL).values()]
    assert not any(ended)
    inside, *between = cluster(tmp_path / "links.toml").levels
    assert inside.bandwidth > 2 * between[0].bandwidth
    assert [level.bandwidth for level in between] == pytest.approx(expected, rel=0.4)


@pytest.mark.parametrize("file", [False, True])
def test_all_hosts_price_by_the_file_of_rank_0_or_by_one_guess(file: bool, tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text(SAYS)
    cluster("two_level").with_node(2).save(tmp_path / "own.toml")
    with Network([Host("a", 2), Host("b", 1)]) as net:
        env = {"SBPFLOW_CLUSTER": str(tmp_path / "own.toml")} if file else {}
        ended = [each.wait(200) for each in net.torchrun(str(tmp_path / "said.py"), str(tmp_path), env=env).values()]
    assert not any(ended)
    (said,) = {(tmp_path / str(rank)).read_text().strip() for rank in range(3)}
    guess = "a guess of two levels: 2 hosts, 1 Gbit/s between them, with care, as eth0 tells no rate"
    assert said == (f"as {tmp_path / 'own.toml'} has it" if file else guess)
