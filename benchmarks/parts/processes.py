"""A part of a benchmark in processes of its own, one a rank, each with one thread."""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parts.alone import Times

__all__ = ["launched", "worker"]

ROOT = Path(__file__).resolve().parent.parent.parent


def launched(module: str, ranks: int, job: Mapping[str, Any]) -> Times:
    """Run a job by a command of benchmarks/; of several ranks the slowest one's time of each round counts."""
    with tempfile.TemporaryDirectory(prefix="sbpflow-bench-") as folder:
        told = json.dumps({**job, "folder": folder})
        launch = [sys.executable]
        if ranks > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        subprocess.run(
            [*launch, "-m", f"benchmarks.{module}", "--job", told], cwd=ROOT, env=environment, check=True, timeout=900
        )
        each = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return {
        what: {way: [max(us) for us in zip(*(times[what][way] for times in each), strict=True)] for way in ways}
        for what, ways in each[0].items()
    }


def worker(job: Mapping[str, Any], measure: Callable[[], Times]) -> None:
    """The work of each of these processes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    times = measure()
    Path(job["folder"], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(times))
    if dist.is_initialized():
        dist.destroy_process_group()
