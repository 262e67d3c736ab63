"""docs/hosts.md: the lines of the page, as they stand there, start its script on played hosts, by each launcher."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from subprocess import Popen
from typing import Any

import pytest

from tools.hosts import Host, Network, lacking

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "hosts.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [(hit[1], hit[2]) for hit in BLOCK.finditer(PAGE)]
SCRIPT = next(text for kind, text in BLOCKS if kind == "python")
LOSSES = [text.removeprefix("# ") for text in PAGE.splitlines() if text.startswith("# step ")]
PATHS = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

hosts = pytest.mark.skipif(bool(lacking()), reason=lacking())


def console(word: str) -> dict[str, str]:
    """Of the block with this word the command by host."""
    text = next(text for kind, text in BLOCKS if kind == "console" and word in text)
    return dict(line.split("$ ", 1) for line in text.splitlines())


def bash(word: str) -> str:
    return next(text for kind, text in BLOCKS if kind == "bash" and word in text)


class Played:
    """Hosts with the names of the page in a folder that all see, where its script lies."""

    def __init__(self, net: Network, home: Path) -> None:
        self.net, self.home = net, home
        self.running: dict[str, Popen[Any]] = {}

    def start(self, host: str, command: str, env: dict[str, str] | None = None) -> None:
        # Without GLOO_SOCKET_IFNAME, which the tool sets: a reader of the page has not set it.
        line = f"unset GLOO_SOCKET_IFNAME; cd {self.home}; {command}"
        with (self.home / f"{host}.said").open("ab") as out:
            self.running[host] = self.net.start(host, ["sh", "-c", line], PATHS | (env or {}), out)

    def said(self, host: str) -> str:
        return (self.home / f"{host}.said").read_text()

    def losses(self, host: str = "node1") -> list[str]:
        return re.findall(r"^step \d+: \d\.\d{4}$", self.said(host), re.MULTILINE)

    def end(self, *hosts: str, seconds: float = 200) -> list[int]:
        try:
            return [self.running[host].wait(seconds) for host in hosts or self.running]
        except subprocess.TimeoutExpired:
            pytest.fail("\n".join(f"{host}: {self.said(host)[-3000:]}" for host in self.running))

    def wait_until(self, true: Callable[[], bool], host: str = "node1") -> None:
        for _ in range(8000):
            if true():
                return
            assert self.running[host].poll() is None, self.said(host)[-5000:]
            time.sleep(0.05)
        pytest.fail(self.said(host)[-5000:])


def debian(names: list[str], name: str) -> str:
    """A file of hosts as Debian's installer leaves it: the own name is an address of loopback."""
    others = [f"10.77.0.{names.index(other) + 1} {other}" for other in names if other != name]
    return "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others]) + "\n"


@contextmanager
def played(home: Path, *names: str, known: bool = True) -> Iterator[Played]:
    (home / "train.py").write_text(SCRIPT)
    files = {name: home / f"{name}.hosts" for name in names if known}
    for name, file in files.items():
        file.write_text(debian([*names], name))
    with Network([Host(name) for name in names], names={name: str(file) for name, file in files.items()}) as net:
        yield Played(net, home)


@hosts
@pytest.mark.sweep
def test_torchrun_on_two_hosts(tmp_path: Path) -> None:
    with played(tmp_path, "node1", "node2") as net:
        for host, line in console("--node-rank").items():
            net.start(host, line)
        assert net.end() == [0, 0], net.said("node1")
        assert net.losses() == LOSSES
    assert sorted(path.name for path in (tmp_path / "runs" / "hosts").iterdir()) == ["step-4", "step-6"]


@hosts
@pytest.mark.sweep
def test_torchrun_on_hosts_that_know_no_names(tmp_path: Path) -> None:
    """By addresses, `--local-addr` where the rendezvous c10d would tell a name; other numbers of ranks, too."""
    line = console("1:3")["node1"].replace("1:3", "2").replace("node1", "10.77.0.1")
    first, other = re.findall(r"`(--[^`]*is_host=\w+)`", re.sub(r"\s+", " ", PAGE))
    with played(tmp_path, "node1", "node2", known=False) as net:
        net.start("node1", line.replace("train.py", f"{first.replace('10.0.0.1', '10.77.0.1')} train.py"))
        net.start("node2", line.replace("per-node 2", "per-node 1").replace("train.py", f"{other} train.py"))
        assert net.end() == [0, 0], net.said("node1")
        assert net.losses() == LOSSES


@hosts
@pytest.mark.sweep
def test_a_host_that_goes_and_comes_back_under_torchrun(tmp_path: Path) -> None:
    quick = re.search(r"--rdzv-conf \S+=\d", PAGE)
    assert quick is not None
    lines = {host: line.replace("train.py", f"{quick[0]} train.py") for host, line in console("1:3").items()}
    with played(tmp_path, *lines) as net:
        slow = SCRIPT.replace("steps=6", "steps=999").replace("timeout=60", "timeout=20")
        slow = slow.replace("def batch(number):", "def batch(number):\n    nap(0.3)")
        (tmp_path / "train.py").write_text(f"from time import sleep as nap\n{slow}")
        for host, line in lines.items():
            net.start(host, line)
        net.wait_until(lambda: saved_by(tmp_path) == 6)
        net.running["node3"].send_signal(signal.SIGKILL)
        net.wait_until(lambda: saved_by(tmp_path) == 4)
        net.start("node3", lines["node3"])
        net.wait_until(lambda: saved_by(tmp_path) == 6)
        found = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): (\d\.\d{4})", net.said("node1"))]
    first = dict(reversed(found))
    assert [*sorted(first)] == [*range(1, max(first) + 1)]
    assert all(abs(loss - first[step]) < 1e-4 for step, loss in found)  # those that were made again are the same


def saved_by(home: Path) -> int:
    """The number of ranks by whose plan the newest checkpoint was saved."""
    found = sorted(
        (home / "runs" / "hosts").glob("step-*[0-9]/manifest.json"), key=lambda path: int(path.parent.name[5:])
    )
    try:
        size = re.search(r"\(data=(\d+)\)", found[-1].read_text()) if found else None
    except FileNotFoundError:  # a newer one has come since
        return 0
    return int(size[1]) if size else 0


# SLURM, played by what its commands print and what they set in the environment

SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"\n'
SRUN = '#!/bin/sh\nenv > "$HOME/environment"; for word; do printf "%s\\n" "$word"; done > "$HOME/command"\n'


def slurm(script: str, home: Path) -> tuple[str, dict[str, str]]:
    """The command and the environment that srun is given by a batch script."""
    tools = home / "tools"
    tools.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "4711", "SLURM_PROCID": "0"}
    environment = os.environ | job | {"HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-eu", "-c", script], env=environment, check=True)
    told = dict(line.split("=", 1) for line in (home / "environment").read_text().splitlines() if "=" in line)
    own = {name: told[name] for name in told if name.startswith(("SLURM_", "MASTER_"))}
    return shlex.join((home / "command").read_text().splitlines()), own


@hosts
@pytest.mark.sweep
def test_a_batch_script_of_slurm_that_starts_torchrun(tmp_path: Path) -> None:
    command, environment = slurm(bash("srun torchrun"), tmp_path)
    with played(tmp_path, "node1", "node2") as net:
        for at, host in enumerate(("node1", "node2")):
            step = {"SLURM_PROCID": str(at), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
            net.start(host, command, environment | step)
        assert net.end() == [0, 0], net.said("node1")
        assert net.losses() == LOSSES


@hosts
@pytest.mark.sweep
def test_a_batch_script_of_slurm_that_starts_the_ranks(tmp_path: Path) -> None:
    command, environment = slurm(bash("srun python"), tmp_path)
    assert environment["MASTER_PORT"] == "24711"
    with played(tmp_path, "node1", "node2") as net:
        tasks(net, command, lambda rank: environment | {
            "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_LOCALID": str(rank % 2)
        })  # fmt: skip


def tasks(net: Played, command: str, environment: Any) -> None:
    """Two ranks on each of two hosts, started without torchrun; a host's ranks are children of one shell."""
    for at, host in enumerate(("node1", "node2")):
        said = [environment(2 * at + local) for local in range(2)]
        words = [" ".join(f"{name}={shlex.quote(value)}" for name, value in each.items()) for each in said]
        net.start(host, f"{words[0]} {command} & {words[1]} {command} & wait $! && wait %1")
    assert net.end() == [0, 0], net.said("node1")
    assert net.losses() == LOSSES


# Kubernetes, played by the environment that the operator sets


@hosts
@pytest.mark.sweep
def test_a_pytorch_job(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(next(text for kind, text in BLOCKS if kind == "yaml"))
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert (job["apiVersion"], job["kind"], container["name"]) == ("kubeflow.org/v1", "PyTorchJob", "pytorch")
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    names = [f"{job['metadata']['name']}-worker-{at}" for at in range(worker["replicas"])]
    environment = {each["name"]: each["value"] for each in container["env"]} | {
        "PET_RDZV_ENDPOINT": f"{names[0]}:23456",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }
    with played(tmp_path, *names) as net:
        for name in names:
            net.start(name, shlex.join(container["command"]), environment)
        assert net.end() == [0, 0], net.said(names[0])
        assert sorted(net.losses(names[0]) + net.losses(names[1])) == LOSSES


# MPI


@hosts
@pytest.mark.sweep
@pytest.mark.parametrize("launcher", ["Open MPI", "MPICH"])
def test_the_words_of_mpirun(tmp_path: Path, launcher: str) -> None:
    """Of the page's line what is behind mpirun's own options, with the environment in which mpirun starts it."""
    line = next(line for line in bash("mpirun").splitlines() if launcher in line).partition("#")[0]
    rank, size, local = {
        "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    }[launcher]
    assert re.search(r"(-x|-genv) MASTER_ADDR[= ]node1", line)
    with played(tmp_path, "node1", "node2") as net:
        tasks(net, line[line.index("python") :].strip(), lambda at: {
            rank: str(at), size: "4", local: str(at % 2), "MASTER_ADDR": "node1"
        })  # fmt: skip


@pytest.mark.sweep
@pytest.mark.skipif(not which("mpirun"), reason="mpirun is not installed")
def test_mpirun_itself_on_one_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    launcher = "Open MPI" if "Open MPI" in version else "MPICH"
    line = next(line for line in bash("mpirun").splitlines() if launcher in line).partition("#")[0]
    here = line.replace("node1:2,node2:2", "localhost:4").replace("node1,node2 -ppn 2", "localhost")
    root = {f"OMPI_ALLOW_RUN_AS_ROOT{more}": "1" for more in ("", "_CONFIRM")}
    environment = os.environ | PATHS | root | {"PATH": f"{PATHS['PATH']}"}
    ran = here.replace("node1", "localhost").replace(" python ", f" {sys.executable} ")
    done = subprocess.run(ran, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, re.findall(r"^step .*", done.stdout, re.MULTILINE)) == (0, LOSSES), done.stderr


# Ray

DYING = """
import os
import train as page

whole = page.batch

def batch(number):
    import torch.distributed as dist

    mark = os.environ["MARK"]
    if mark and number == 4 and dist.get_rank() == 1 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), 9)
    return whole(number)

def train(folder):
    page.batch = batch
    page.train(folder)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("dies", [False, True], ids=["whole", "a_worker_dies"])
def test_a_worker_group_of_ray(tmp_path: Path, dies: bool) -> None:
    """The page's trainer; in the second run rank 1 kills itself in the fifth step, behind the save of the fourth."""
    pytest.importorskip("ray")
    trainer = next(text for kind, text in BLOCKS if kind == "py")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "dying.py").write_text(DYING)
    (tmp_path / "train_ray.py").write_text(trainer.replace("from train import", "from dying import"))
    environment = os.environ | PATHS | {"MARK": str(tmp_path / "died") if dies else "", "RAY_DEDUP_LOGS": "0"}
    environment["PYTHONPATH"] += f":{tmp_path}"
    done = subprocess.run(
        [sys.executable, "train_ray.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert {*re.findall(r"step \d: \d\.\d{4}", said)} == {*LOSSES}
    assert sorted(path.name for path in (tmp_path / "runs" / "ray").iterdir()) == ["step-4", "step-6"]
    assert ("TransportError: rank 1 died" in said) == dies
    assert said.count("Started training worker group of size 2") == 1 + dies
    # What was before the save is not done again
    begun = said.rpartition("Started training worker group")[2]
    assert {*re.findall(r"step \d", begun)} == {f"step {number}" for number in range(5 if dies else 1, 7)}
