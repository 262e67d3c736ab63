"""The OneFlow side of benchmarks/boxing.py: times of `to_global` on this rank, written to a folder.

That script starts it under OneFlow's own Python, through `oneflow.distributed.launch`, with the job as JSON. Each call
is followed by a wait, since OneFlow hands its work to another thread.
"""

import json
import os
import sys
import time
from pathlib import Path

import oneflow as of  # type: ignore[import-not-found]

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
EAGER = of._oneflow_internal.eager
SBP = {"S0": of.sbp.split(0), "S1": of.sbp.split(1), "B": of.sbp.broadcast, "P": of.sbp.partial_sum}


def main() -> None:
    job = json.loads(sys.argv[1])
    of.set_num_threads(1)
    place = of.placement("cpu", ranks=list(range(RANKS)))
    times = []
    for side, inner in job["sizes"]:
        whole = of.arange(side * side, dtype=of.float32).reshape(side, side)
        base = whole.to_global(placement=place, sbp=SBP["B"])
        moves = {move: [SBP[end] for end in move.split("->")] for move in job["moves"]}
        sources = {move: base.to_global(sbp=src) for move, (src, _) in moves.items()}
        for move, (_, dst) in moves.items():
            back = sources[move].to_global(sbp=dst).to_global(sbp=SBP["B"]).to_local()
            assert (back.numpy() == whole.numpy()).all(), move
        found: dict[str, list[float]] = {move: [] for move in moves}
        for k in range(-job["warm"], job["rounds"]):
            for move, (_, dst) in moves.items():
                source = sources[move]
                EAGER.Sync()
                EAGER.ClusterSync()
                start = time.perf_counter()
                for _ in range(inner):
                    source.to_global(sbp=dst)
                    EAGER.Sync()
                if k >= 0:
                    found[move].append((time.perf_counter() - start) / inner * 1e6)
        times += [(side, move, "oneflow", us) for move, us in found.items()]
    Path(job["folder"], f"{RANK}.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main()
