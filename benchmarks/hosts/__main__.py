"""Training steps over slow links between hosts that are played: bytes on these links and seconds, beside torch's ways.

    python -m benchmarks.hosts [--quick] [--only mlp ...] [--networks two ...] [--ways DDP ...] [--write]

two      two hosts of two ranks, 200 Mbit/s each
unequal  a host of two ranks at 400 Mbit/s, and two of one at 200 and at 100
pairs    two pairs of hosts of one rank at 400 Mbit/s, between the pairs a trunk of 100

Ways are DDP, FSDP2 (fully_shard), HSDP (fully_shard over hosts x ranks, or pairs x hosts), plans by hand (whole weights
everywhere, ZeRO-1, ZeRO-3), and the planner's answer for a cluster file with these rates. A case, one model on one
network, has processes of its own under torchrun, in which the ways go in turn; one that fails is tried again way by
way, so that the others count. Losses of all ways are those of DDP. Needs root and `ip`.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import SIGTERM, signal
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

import sbpflow as flow
from benchmarks.hosts.models import MODELS
from benchmarks.hosts.networks import SHAPES, Counters, Shape, put_whole
from benchmarks.hosts.ways import OURS, PEERS, WAITS, Way, way
from benchmarks.parts.alone import aligned
from benchmarks.parts.command import command_line, reported
from tools.hosts import Network, lacking

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = ROOT / "benchmarks" / "measured" / "hosts.jsonl"
WARM, ROUNDS, STEPS, LIMIT = 2, 3, 1, 600.0
AIM, HALF = 1.0, 0.8  # of the quickest peer's time: in each case, and in half of them
Row: TypeAlias = dict[str, Any]


def main() -> None:
    parser = command_line(__doc__, MODELS)
    parser.add_argument("--networks", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--ways", nargs="+", choices=[*PEERS, *OURS], default=[*PEERS, *OURS])
    parser.add_argument("--rows", type=Path, help="a file of rows: cases that it has are not run again, others added")
    options = parser.parse_args()
    if options.job:
        rank(json.loads(options.job))
        return
    if said := lacking():
        print(f"benchmarks.hosts: {said}")
        return
    signal(SIGTERM, lambda *_: sys.exit("ended"))  # what plays the hosts is taken down
    rows = list(_measured(options))
    if options.write:
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = f"{platform.machine()}, {os.cpu_count()} cores for all hosts, torch {torch.__version__}, one thread a rank."
    reported("hosts", [head, "", *shown(rows)], write=options.write)


def _measured(options: argparse.Namespace) -> Iterator[Row]:
    models = options.only[:1] if options.quick else options.only
    known = [json.loads(line) for line in options.rows.open()] if options.rows and options.rows.exists() else []
    yield from known
    for name in options.networks[:1] if options.quick else options.networks:
        for model in models:
            job = {"model": model, "network": name, "rounds": 1 if options.quick else ROUNDS}
            there = {row["way"] for row in known if (row["model"], row["network"]) == (model, name)}
            ways = [each for each in options.ways if each not in there and (each != "HSDP" or SHAPES[name].mesh)]
            for row in case(job, ways) if ways else ():
                print(_line(row), file=sys.stderr, flush=True)
                if options.rows:
                    with options.rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                yield row


def case(job: Row, ways: list[str]) -> list[Row]:
    """A model on a network by all of these ways; where that fails, each of them alone."""
    rows, why = _played(job, ways)
    for row in rows:
        for a, b in zip(row["losses"], rows[0]["losses"], strict=True):
            if abs(a - b) > 1e-3 * abs(b):
                row["failed"] = f"losses {row['losses']}, those of {rows[0]['way']} {rows[0]['losses']}"
    left = [each for each in ways if each not in {row["way"] for row in rows}]
    if left == ways[-1:] and len(ways) == 1:
        rows.append({**job, "way": ways[0], "failed": why})
    elif left:
        rows += [row for each in left for row in case(job, [each])]
    return rows


def _played(job: Row, ways: list[str]) -> tuple[list[Row], str]:
    """The findings of ranks before they ended or the time was up, and the words that were said last."""
    shape = SHAPES[job["network"]]
    with tempfile.TemporaryDirectory(prefix="sbpflow-hosts-") as name, Network(shape.hosts, trunk=shape.trunk) as net:
        folder = Path(name)
        shape.cluster.save(folder / "cluster.toml")
        told = json.dumps({**job, "ways": ways, "folder": name})
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with (folder / "said").open("w") as out:
            running = net.torchrun("-m", "benchmarks.hosts", "--job", told, env=env, out=out)
            until, answered = time.monotonic() + LIMIT, 0
            while any(each.poll() is None for each in running.values()) and time.monotonic() < until:
                if (folder / f"asked{answered}").exists():
                    put_whole(folder / f"answer{answered}", {**net.sent(), **net.crossed()})
                    answered += 1
                if any(each.poll() for each in running.values()):
                    until = min(until, time.monotonic() + 20)  # for what the others have to say
                time.sleep(0.005)
        late = any(each.poll() is None for each in running.values())
        rows = [json.loads(path.read_text()) for path in sorted(folder.glob("row-*"))]
        lines = [line for line in (folder / "said").read_text().splitlines() if "Error" in line] or ["nothing"]
        return rows, f"took more than {LIMIT:g} s" if late else lines[0].strip()[:300]


def rank(job: Row) -> None:
    """The work of each rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, shape = Path(job["folder"]), SHAPES[job["network"]]
    flow.use_cluster(folder / "cluster.toml")
    flow.init(timeout=300)
    counted = Counters(folder)
    made: dict[str, Way] = {}
    rows: dict[str, Row] = {}
    for name in job["ways"]:
        began = time.monotonic()
        made[name] = way(name, MODELS[job["model"]], shape.mesh)
        losses = [made[name].loss() for _ in range(WARM)]
        rows[name] = {"model": job["model"], "network": job["network"], "way": name, "losses": losses}
        rows[name] |= {"first": time.monotonic() - began, "seconds": [], "sent": {}}
    for _ in range(job["rounds"]):
        for name, each in made.items():
            seconds, sent = counted.during(each.step, STEPS)
            rows[name]["seconds"].append(seconds)
            rows[name]["sent"] = sent
    for name, each in made.items():
        rows[name] |= each.about()
        if dist.get_rank() == 0:
            put_whole(folder / f"row-{list(made).index(name)}", rows[name])
    dist.barrier()
    dist.destroy_process_group()


def slow(row: Row) -> tuple[float, float]:
    """Bytes a step on the slow link, of all its ends and of the busiest."""
    ends = SHAPES[row["network"]].slow or tuple(host.name for host in SHAPES[row["network"]].hosts)
    sent = [row["sent"][end] for end in ends]
    return sum(sent), max(sent)


def _line(row: Row) -> str:
    if "failed" in row:
        return f"{row['network']} {row['model']} {row['way']}: failed: {row['failed']}"
    total, most = slow(row)
    said = f"{row['network']} {row['model']} {row['way']}: {total / 1e6:.1f} MB, busiest {most / 1e6:.1f}, "
    told = f", predicted {row['predicted']:.3f}" if row.get("predicted") else ""
    seconds = statistics.median(row["seconds"])
    return f"{said}{seconds:.3f} s{told}, first {row['first']:.1f} s, loss {row['losses'][-1]:.5f}"


def shown(rows: Sequence[Row]) -> Iterator[str]:
    """A table a network: bytes of the busiest end of the slow link and seconds, by ways."""
    yield (
        "**A training step over slow links**, forward, backward and AdamW: MB that the busiest end of the slow link "
        "sends a step (by the counters of interfaces), and seconds of a step, of the slowest rank, median of rounds in "
        "turn. *found* is the planner's answer for a file with the network's rates. Ratios are to the best peer of the "
        "row: bytes of all ends of the slow link, and time. *hidden* is what the answer takes less than with each move "
        "waited for at once, and *told* what `explain()` says of that."
    )
    for network in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == network]
        ways = [each for each in (*PEERS, *OURS) if each != WAITS and any(row["way"] == each for row in mine)]
        yield ""
        yield f"{network}: {_about(SHAPES[network])}"
        yield ""
        head = [
            "model",
            *(f"{'found' if each == 'planner' else each}, MB | s" for each in ways),
            "bytes",
            "time",
            "hidden, s",
            "told",
        ]
        table = [" | ".join(head).split(" | ")]
        for model in dict.fromkeys(row["model"] for row in mine):
            found = {row["way"]: row for row in mine if row["model"] == model}
            cells = [cell for each in ways for cell in _cells(found.get(each))]
            table.append([model, *cells, *_ratios(found), *_hidden(found)])
        yield from aligned(table)


def _hidden(found: dict[str, Row]) -> tuple[str, str]:
    """Seconds that waiting for each move at once takes more, and how many `explain()` tells as hidden."""
    mine, waiting = (found.get(name, {"failed": ""}) for name in ("planner", WAITS))
    if "failed" in mine or "failed" in waiting:
        return "", ""
    more = statistics.median(waiting["seconds"]) - statistics.median(mine["seconds"])
    return f"{more:.2f}", f"{mine['hidden']:.2f}"


def _about(shape: Shape) -> str:
    hosts = ", ".join(f"{host.ranks} ranks at {host.rate:g} Mbit/s" for host in shape.hosts)
    return f"hosts of {hosts}" + (f"; trunk {shape.trunk:g} Mbit/s" if shape.slow else "")


def _cells(row: Row | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    if "failed" in row:
        return "failed", ""
    return f"{slow(row)[1] / 1e6:.1f}", f"{statistics.median(row['seconds']):.2f}"


def _ratios(found: dict[str, Row]) -> tuple[str, str]:
    """Bytes and seconds of the planner's answer, of those of the best peer."""
    peers = [row for name, row in found.items() if name in PEERS and "failed" not in row]
    mine = found.get("planner", {"failed": ""})
    if not peers or "failed" in mine:
        return "", ""
    least = min(slow(row)[0] for row in peers)
    quickest = min(statistics.median(row["seconds"]) for row in peers)
    return f"{slow(mine)[0] / least:.2f}", f"{statistics.median(mine['seconds']) / quickest:.2f}"


if __name__ == "__main__":
    main()
