"""Time to resume: from the death of a rank to the first new step, and where it goes; from a disk, and from memory.

    python -m benchmarks.restart [--gib 0.1] [--folder PATH] [--quick]

Four processes under torchrun train; one kills itself, and all are started again. In memory each stands for a host: what
the dead one had is gone with it, and its part is read from the copy on the next.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import sbpflow as flow
from benchmarks.parts.alone import aligned
from sbpflow.placement.network.this_host import memory_folder

ROOT = Path(__file__).resolve().parent.parent
RANKS, DIES, WIDTH = 4, 3, 1024
PHASES = {  # by the moment at which each ends
    "begins": "noticed, others ended, processes started and torch loaded",
    "joined": "ranks meet",
    "loaded": "checkpoint found and loaded",
    "stepped": "first new step",
}


def train(gib: float, place: Path, memory: bool) -> None:
    """The work that torchrun starts: a few steps with a checkpoint, a death, and on its second life one step."""
    told = place / "moments"

    def moment(what: str) -> None:
        with told.open("a") as out:
            out.write(json.dumps([what, time.time()]) + "\n")

    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    if again:
        moment("begins")
    me = int(os.environ["RANK"])
    if memory:
        os.environ["SBPFLOW_HOST"] = f"host {me}"
    flow.init(timeout=60)
    grid = flow.placement("cpu", range(RANKS))
    x = flow.ones(8, WIDTH, placement=grid, sbp=flow.S(0)) + 0
    if again:
        moment("joined")
    torch.manual_seed(0)
    layers = max(1, round(gib * 2**30 / (4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    flow.nn.to_global(model, grid, {"*": flow.S(0)})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    folder, more = (place / f"host-{me}", 1) if memory else (place / "saved", 0)
    if again:
        found = flow.newest(folder, neighbours=more)
        assert found is not None
        flow.load(found.path, model, optimizer=optimizer, neighbours=more)
        moment("loaded")
    for step in range(2, 3) if again else range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            flow.save(folder / "step-2", model, optimizer=optimizer, step=2, neighbours=more)
        if step == 2 and not again and me == DIES:
            if memory:
                shutil.rmtree(folder)
            moment("died")
            os.kill(os.getpid(), signal.SIGKILL)
    moment("stepped")


def measured(gib: float, memory: bool, folder: str | None) -> dict[str, float]:
    """Seconds of each phase, of the slowest process."""
    with tempfile.TemporaryDirectory(prefix="sbpflow-restart-", dir=memory_folder() if memory else folder) as place:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        work = ["-m", "benchmarks.restart", "--gib", str(gib), "--place", place, *(["--memory"] if memory else [])]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*launch, "--max-restarts", "1", *work],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        moments = [json.loads(line) for line in Path(place, "moments").read_text().splitlines()]
    died = next(when for what, when in moments if what == "died")
    ends = {what: max(when for each, when in moments if each == what) for what in PHASES}
    starts = [died, *ends.values()]
    return {what: end - start for (what, end), start in zip(ends.items(), starts, strict=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.1, help="of parameters; a checkpoint is three times that")
    parser.add_argument("--folder", help="a folder on the disk that is to be measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round: whether all runs, not how fast")
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.place:
        train(options.gib, options.place, options.memory)
        return
    count = 1 if options.quick else options.rounds
    rounds = {
        kind: [measured(options.gib, kind == "memory", options.folder) for _ in range(count)]
        for kind in ("disk", "memory")
    }
    seconds = {
        kind: {what: statistics.median(each[what] for each in of) for what in PHASES} for kind, of in rounds.items()
    }
    print(f"{RANKS} processes, {options.gib:g} GiB of parameters with AdamW's two states; medians of seconds.\n")
    rows = [[PHASES[what], *(f"{seconds[kind][what]:.2f}" for kind in seconds)] for what in PHASES]
    total = ["together", *(f"{sum(of.values()):.2f}" for of in seconds.values())]
    print("\n".join(aligned([["s", *(f"from {kind}" for kind in seconds)], *rows, total])))


if __name__ == "__main__":
    main()
