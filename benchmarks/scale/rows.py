"""The rows of the published tables, as settings; what a table does not say is assumed, and told with the row."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

from .setting import Architecture, Published, Run

__all__ = ["TABLES", "rows"]

Line = Mapping[str, str]
MOST_CHUNKS = 8  # of a stage, where a table does not say how many
FOLDERS = {name: Path(__file__).with_name(name) for name in ("published", "later")}
LLAMA = {
    "8B": Architecture("llama", 32, 4096, 32, 128256, 8192, 14336, 8),
    "70B": Architecture("llama", 80, 8192, 64, 128256, 8192, 28672, 8),
    "405B": Architecture("llama", 126, 16384, 128, 128256, 8192, 53248, 8),
}


def rows(table: str) -> list[Published]:
    """The rows of a table that we can ask, those that were read later behind the others. What is left out is not of
    one step, or of something that we do not have."""
    found = []
    for folder, files in FOLDERS.items():
        path = files / f"{table}.csv"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in csv.DictReader(line for line in lines if not line.startswith("#")):
            found += [replace(row, table=table, later=folder == "later") for row in TABLES[table](line)]
    return found


def _gpt(line: Line, length: int, vocabulary: int, *, fused: bool = False) -> Architecture:
    layers, hidden, heads = (int(line[key]) for key in ("layers", "hidden", "heads"))
    return Architecture("gpt", layers, hidden, heads, vocabulary, length, fused=fused)


def _degrees(hardware: str, line: Line) -> Run:
    """A run of the degrees that most tables have under these names."""
    data, tensor, pipe = (int(line[key]) for key in ("dp", "tp", "pp"))
    chunks = int(line.get("virtual_stages") or 1)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    samples = int(line.get("microbatch") or 1)
    return Run(hardware, data, tensor, pipe, schedule=schedule, chunks=chunks, samples=samples)


def _halves(run: Run) -> Run:
    """A run in fp16: gradients are of fp16, too, unless Megatron-LM is asked to add up in float32."""
    return replace(run, dtype="fp16", gradients="fp16")


def _selective(hardware: str, line: Line) -> Run:
    """A run of which a table says no micro-batch: one sample, attention run again, sequence parallel, ZeRO-1."""
    run = _degrees(hardware, line)
    return replace(run, micro_batches=int(line["global_batch"]) // run.data, again="core", sequence=True, zero=1)


def ptdp(line: Line) -> Iterator[Published]:
    """Micro-batches, schedule and full recomputation are said."""
    many = int(line["microbatches_per_pipeline"])
    run = replace(_halves(_degrees("a100", line)), micro_batches=many, again="full")
    yield Published(line["model"], _gpt(line, 2048, 51200), run, float(line["iter_s_derived"]))


def korthikanti(line: Line) -> Iterator[Published]:
    run = _halves(_degrees("a100", line))
    run = replace(run, micro_batches=int(line["global_batch"]) // run.data // run.samples)
    of = _gpt(line, 2048, 51200)
    full = replace(run, again="full")
    yield Published(f"{line['model']} full", of, full, float(line["iter_s_full_recompute"]))
    core = replace(run, again="core", sequence=True)
    seconds = float(line["iter_s_seqpar_selective"])
    yield Published(f"{line['model']} sequence, selective", of, core, seconds)


def mtnlg(line: Line) -> Iterator[Published]:
    run = _degrees("a100", line)
    run = replace(run, micro_batches=int(line["global_batch"]) // run.data, again="full")
    of = Architecture("gpt", 105, 20480, 128, 51200, 2048, fused=False)
    yield Published(f"{line['gpus']} GPUs", of, run, float(line["iteration_s"]), assumed="1 sample")


def megascale(line: Line) -> Iterator[Published]:
    """The rows of Megatron-LM, without the fused attention that the paper adds to it."""
    run, of = _selective("a100", line), _gpt(line, 2048, 64000)
    said, seconds = "1 sample, selective, ZeRO-1, no fused attention", float(line["iteration_s"])
    yield Published(f"{line['gpus']} GPUs", of, run, seconds, assumed=said)


def megatron_h100(line: Line) -> Iterator[Published]:
    """Neither micro-batch nor virtual stages are said, and that data, tensor and pipeline moves are overlapped is."""
    run = replace(_selective("h100", line), hides="all")
    per_stage = int(line["layers"]) // run.pipe
    most = max(v for v in range(1, MOST_CHUNKS + 1) if per_stage % v == 0)
    samples = (1, 2, 4) if run.pipe == 1 else (1, 2)
    first, *others = _runs(run, samples, (1, most) if run.pipe > 1 else (1,))
    of, seconds = _gpt(line, 4096, 131072, fused=True), float(line["iter_s_derived"])
    said = "selective, ZeRO-1"
    yield Published(line["model"], of, first, seconds, assumed=said, others=tuple(others))


def _runs(run: Run, samples: Iterable[int], chunks: Iterable[int]) -> Iterator[Run]:
    """The same batch in micro-batches of so many samples, in stages of so many chunks."""
    whole = run.micro_batches * run.samples
    for many, v in product(samples, chunks):
        if whole % many == 0:
            schedule = "interleaved" if v > 1 else "1f1b"
            yield replace(run, samples=many, micro_batches=whole // many, chunks=v, schedule=schedule)


def oneflow(line: Line) -> Iterator[Published]:
    many = int(line["accumulation_steps"])
    run = replace(_degrees("v100 one adapter", line), micro_batches=many, again="full", dtype="fp16")
    name = f"{line['group']} {line['dp']}x{line['tp']}x{line['pp']} {line['accumulation_steps']}"
    memory, seconds = float(line["memory_MiB"]) * 2**20, float(line["latency_ms"]) / 1e3
    yield Published(name, _gpt(line, 2048, 50688), run, seconds, memory, "used")


def zero_bubble(line: Line) -> Iterator[Published]:
    """Stages of one layer less at both ends, which `pipe` finds by what layers take."""
    stages, samples, many = (int(line[key]) for key in ("stages_gpus", "microbatch", "microbatches"))
    schedule = {"1F1B": "1f1b", "ZB-1p": "zb_h1"}[line["schedule"]]
    run = _halves(Run("a100", pipe=stages, samples=samples, micro_batches=many, schedule=schedule))
    seconds = samples * many / (float(line["samples_per_gpu_per_s"]) * stages)
    name = f"{line['model']} {line['schedule']} {many}"
    memory = float(line["memory_GB"]) * 1e9
    yield Published(name, _gpt(line, 1024, 51200), run, seconds, memory)


def torchtitan(line: Line) -> Iterator[Published]:
    """A pipeline has as many micro-batches as stages, and weights and gradients whole all the while, as the trainer's
    source says."""
    words = line["parallelism"].split()
    named = ("FSDP", "TP", "CP", "PP")
    data, tensor, context, pipe = (int(words[words.index(name) + 1]) if name in words else 1 for name in named)
    length, samples = int(line["seq"]), int(line["local_batch"])
    run = Run(
        "h100 slow memory",
        data=data,
        tensor=tensor,
        context=context,
        pipe=pipe,
        schedule="interleaved" if "Interleaved" in words else "1f1b",
        chunks=2 if "Interleaved" in words else 1,
        micro_batches=pipe,
        samples=samples // pipe,
        again="full" if line["activation_ckpt"] == "full" else "products",
        sequence=tensor > 1,
        zero=3 if pipe == 1 else 1,
        dtype="fp8" if line["dtype"] == "float8" else "bf16",
        compiled="compile" in words,
        hides="all" if "AsyncTP" in words else "",
    )
    of = replace(LLAMA[line["model"]], family="titan", length=length)
    seconds = samples * data * length / (float(line["tokens_per_s_per_gpu"]) * run.gpus)
    name = f"{line['model']} {line['parallelism']} {length} {line['dtype']}"
    memory = float(line["memory_GiB"]) * 2**30 if line["memory_GiB"] else None
    yield Published(name, of, run, seconds, memory, "taken")


def llama3(line: Line) -> Iterator[Published]:
    """Moves between stages and ranks of data are said to be asynchronous; of those of tensors nothing is said. Words
    and head are pieces of their own, so that 128 make up the stages. All of attention counts, as in other tables."""
    of = replace(LLAMA["405B"], family="even", length=int(line["seq"]))
    work = 6 * 405e9 + 12 * of.layers * of.hidden * of.length  # FLOPs of a word
    rate = float(line["tflops_per_gpu"]) * 1e12 * int(line["gpus"])
    seconds = float(line["tokens_per_batch_M"]) * 2**20 * work / rate
    many, context = int(line["batch_per_dp"]), int(line["cp"])
    run = Run("h100", int(line["dp"]), 8, int(line["pp"]), context, micro_batches=many, sequence=True, zero=1)
    run = replace(run, hides="between nodes")
    first, *others = _runs(run, (1,), (1, (of.layers + 2) // run.pipe))
    name, said = f"{line['gpus']} GPUs" + f", {of.length} words" * (context > 1), "ZeRO-1"
    yield Published(name, of, first, seconds, assumed=said, others=tuple(others))


def vtrain(line: Line) -> Iterator[Published]:
    data, tensor, pipe = (int(line[f"{kind} parallelism"]) for kind in ("data", "tensor", "pipeline"))
    samples, length = int(line["micro batch"]), int(line["sequence length"])
    of = Architecture(
        "gpt", int(line["layers"]), int(line["hidden size"]), int(line["attention heads"]), 51200, length, fused=False
    )
    many = int(line["global batch"]) // data // samples
    if data * samples * many != int(line["global batch"]):
        return
    run = _halves(Run("a100 waits for Python", data, tensor, pipe, micro_batches=many, samples=samples, again="full"))
    name = f"{of.hidden} x {of.layers}, {data}x{tensor}x{pipe}, {samples} of {line['global batch']}"
    yield Published(name, of, run, float(line["iteration time (ms)"]) / 1e3, assumed="full recomputation")


TABLES: dict[str, Callable[[Line], Iterator[Published]]] = {
    "ptdp_table1": ptdp,
    "korthikanti2022_table5": korthikanti,
    "zb_table4_throughput": zero_bubble,
    "torchtitan_202412": torchtitan,
    "torchtitan_202506": torchtitan,
    "megatron_h100_weak": megatron_h100,
    "megascale_table2": megascale,
    "mtnlg530b": mtnlg,
    "oneflow_dlperf_gpt": oneflow,
    "llama3_405b": llama3,
    "vtrain_multi": vtrain,
    "vtrain_single": vtrain,
}
