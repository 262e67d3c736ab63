"""Played hosts see each other over their links and share nothing else."""

from pathlib import Path

import pytest

from tools.hosts import Host, Network, lacking

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())
SCRIPT = """
import os, socket, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
open(f"/dev/shm/{dist.get_rank()}", "w").close()
x = torch.full((250_000,), float(dist.get_rank()))
dist.all_reduce(x)
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as said:
    print(socket.gethostname(), int(x[0]), sorted(os.listdir("/dev/shm")), file=said)
dist.barrier()
dist.destroy_process_group()
"""


def test_hosts_have_a_name_a_network_and_a_memory_each(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Network([Host("one", ranks=1), Host("two", ranks=1)]) as net:
        before = net.sent()
        ended = {name: process.wait(90) for name, process in net.torchrun(str(script), str(tmp_path)).items()}
        sent = {name: after - before[name] for name, after in net.sent().items()}
    assert ended == {"one": 0, "two": 0}
    assert (tmp_path / "0").read_text().split() == ["one", "1", "['0']"]
    assert (tmp_path / "1").read_text().split() == ["two", "1", "['1']"]
    assert all(1_000_000 < bytes < 1_200_000 for bytes in sent.values())
