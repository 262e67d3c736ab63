"""The doctor and the command line: every line says ok or what to do, and errors come without a traceback."""

import re
import socket
import sys
from pathlib import Path

import pytest
import torch

from sbpflow.__main__ import main
from sbpflow.placement import cluster
from sbpflow.placement.doctor import Finding, findings, meeting_point, report
from sbpflow.placement.measure import LinkTimes
from sbpflow.placement.network.hosts import Hosts
from sbpflow.placement.network.levels import PairLink

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


def found(thing: str, environment: dict[str, str]) -> Finding:
    return next(finding for finding in findings(environment) if finding.thing == thing)


@pytest.fixture
def port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def test_every_line_is_marked_and_every_missing_thing_has_a_remedy() -> None:
    assert all(re.match(r"(ok     |missing)  \w[\w ]{10}  \S", line) for line in report().splitlines())
    assert all(finding.ok or finding.fix for finding in findings({}))


def test_the_report_names_what_runs() -> None:
    assert found("torch", {}).found == torch.__version__
    assert {"python", "sbpflow", "cores", "gloo", "nccl", "mpi", "pictures", "cluster"} <= {
        f.thing for f in findings({})
    }


def test_no_launcher_is_no_fault() -> None:
    assert str(found("launcher", {})) == "ok       launcher     none: this one process owns every rank"


def test_a_launcher_is_quoted(port: str) -> None:
    assert found("launcher", LAUNCHED | {"MASTER_PORT": port}).ok
    assert found("master port", LAUNCHED | {"MASTER_PORT": port}).found == f"localhost:{port} is free here"


def test_half_a_launcher_is_told_what_is_missing() -> None:
    half = found("launcher", {"RANK": "0", "MASTER_ADDR": "localhost"})
    assert not half.ok
    assert half.fix == "also set WORLD_SIZE, MASTER_PORT, or start with torchrun"


def test_a_listening_master_answers() -> None:
    with socket.create_server(("localhost", 0)) as server:
        where = f"localhost:{server.getsockname()[1]}"
        assert meeting_point(*where.split(":")) == Finding("master port", True, f"{where} answers")


@pytest.mark.parametrize("port", ["", "x", "0", "65536", "-1"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    assert meeting_point("localhost", port).fix == "set MASTER_PORT to a number from 1 to 65535"


def test_an_address_nobody_has_is_missing(port: str) -> None:
    assert not meeting_point("no-such-host.invalid", port).ok


def test_doctor_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert f"torch        {torch.__version__}\n" in capsys.readouterr().out


def test_doctor_saves_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def pretend(ranks: int, kernels: bool) -> LinkTimes:
        assert kernels
        return LinkTimes(Hosts((0,) * ranks), ("here",), (PairLink((0,), 7e-5, 3e9, 1),))

    monkeypatch.setattr(sys.modules[LinkTimes.__module__], "measure", pretend)
    assert main(["doctor", "--measure", "--ranks", "3", "--save", str(tmp_path / "c.toml")]) == 0
    assert "links between 3 ranks on 1 host" in capsys.readouterr().out
    level = cluster(tmp_path / "c.toml").levels[0]
    assert (level.latency, level.bandwidth) == (7e-5, 3e9)


def test_errors_are_said_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--measure", "--ranks", "1"]) == 2
    assert capsys.readouterr().err == "cannot measure between 1 ranks\n  a transport needs at least 2\n"


@pytest.mark.parametrize("argv", [["doctor", "--save", "x.toml"], ["doctor", "--ranks", "3"], ["plan"], []])
def test_a_command_that_is_none_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(argv)
    assert refused.value.code == 2
