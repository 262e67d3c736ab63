"""The peaks of the gallery's plans: the bytes of a rank that the account tells, beside those that are seen.

python -m tests.nn.plan.peaks            # of every plan, and the table of docs/evidence/benchmarks.md anew
python -m tests.nn.plan.peaks zero1      # of these alone

A hook on every op counts the storages that it makes until they are gone. Ranks of a straight step are simulated in one
process, where they are alike; those of pipelines are real, since every stage has its peak at another time.
"""

import argparse
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

import sbpflow as flow
from sbpflow.actors.runtime.channel import UnderWay
from sbpflow.nn.graph.run.proved_pipeline import ProvedPipeline
from sbpflow.nn.graph.run.transfers import BundleLink
from sbpflow.placement.world import world
from tests.nn.graph.memory.test_liveness import Live
from tests.ranks import Nursery, Ranks

from .test_gallery import GALLERY, NAMES, Pictures, Sparse, loss_fn, text_of

__all__ = ["NEAR", "PIPED", "STRAIGHT", "Peak", "fullest", "peak", "ranks_of", "table"]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "evidence" / "benchmarks.md"
BEGIN, END = "<!-- peaks:begin -->\n", "<!-- peaks:end -->"
NEAR = 0.1
LENGTH, WIDTH = 128, 256
PIPED = [name for name in NAMES if re.search("^pipe ", (GALLERY / f"{name}.plan").read_text(), re.MULTILINE)]
STRAIGHT = [name for name in NAMES if name not in PIPED]


class Peak(NamedTuple):
    """Bytes of a rank: told by the account, and seen."""

    told: int
    seen: int


def model_for(name: str) -> nn.Module:
    """So large that tensors count, and little else."""
    torch.manual_seed(0)
    if name == "gshard":
        return Sparse(WIDTH, 6)
    if name == "one_weird_trick":
        return Pictures(LENGTH, WIDTH)
    layers = 8 if name == "interleaved" else 4 if name in PIPED else 2
    if name == "slapo":
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=layers, n_embd=WIDTH, n_head=8, vocab_size=512, n_positions=LENGTH)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        config.bos_token_id = config.eos_token_id = None
        gpt: nn.Module = GPT2LMHeadModel(config)
        return gpt
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512}
    llama: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers))
    return llama


def ranks_of(name: str) -> int:
    """How many there are in the plan as it runs here."""
    grid = next(line for line in text_of(name).splitlines() if line.startswith("grid")).partition("#")[0]
    return prod(int(size) for size in re.findall(r"=(\d+)(?! folds)", grid))


@contextmanager
def received(live: Live) -> Iterator[None]:
    """Messages from other ranks are counted too: threads of the step make their memory."""
    plain = BundleLink.receive

    def receive(link: BundleLink, label: int) -> tuple[Sequence[UnderWay], Callable[[], Any]]:
        posted, value = live.beside(plain)(link, label)
        return posted, live.beside(value)

    with patch.object(BundleLink, "receive", receive):
        yield


def fullest(ranks: Sequence[Peak]) -> Peak:
    """The most that is told of any rank, and the most that is seen on any."""
    return Peak(max(each.told for each in ranks), max(each.seen for each in ranks))


def peak(name: str) -> Peak:
    """Of the third step that AdamW trains, on the rank that this process is, or on one of all that it owns."""
    model = model_for(name)
    rows = 32 if name in PIPED else 16
    words = torch.randint(64, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    # Where GPipe's ranks take what comes first, as much is alive as chance will have it.
    with patch.object(ProvedPipeline, "ordered", True):
        step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-3), plan=text_of(name))
        for _ in range(2):
            step(words, words)
        told = sum(of.total + of.host for rank, of in step.planned.held().items() if world().rank in (None, rank))
    with Live() as live, received(live):
        step(words, words)
    # On simulated devices memory of the host is as any other.
    buffers = sum(x.nbytes for of in step.planned.model.offloaded for x in (of.host.buffers if of.host else ()))
    rest = sum(of.total for of in step.memory_at_rest().values()) + buffers
    owned = ranks_of(name) if world().rank is None else 1
    return Peak(told // owned, (rest + live.peak) // owned)


def table() -> dict[str, Peak]:
    """The table of the page."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| (\w+) +\|[^|]*\| +([\d.]+) \| +([\d.]+) \|", text, re.MULTILINE)
    return {name: Peak(*(round(float(n) * 1e6) for n in (told, seen))) for name, told, seen in rows}


def written(found: Mapping[str, Peak]) -> str:
    """The table of a page."""
    lines = ["| plan | ranks | told, MB | seen, MB | told / seen |", "|---|---:|---:|---:|---:|"]
    for name, (told, seen) in found.items():
        lines.append(f"| {name} | {ranks_of(name)} | {told / 1e6:.2f} | {seen / 1e6:.2f} | {told / seen:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", default=[])
    given = parser.parse_args().plans
    nursery, found = Nursery(), {}
    named = import_module("tests.nn.plan.peaks").peak  # which ranks find by its module
    for name in given or NAMES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name in PIPED:
                ranks = Ranks(nursery, ranks_of(name))
                found[name] = fullest(ranks(named, name, timeout=600.0))
                ranks.close()
            else:
                found[name] = peak(name)
        print(written({name: found[name]}).splitlines()[-1], flush=True)
    nursery.close()
    if not given:
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(before + BEGIN + written(found) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
