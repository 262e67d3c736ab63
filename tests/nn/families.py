"""Models of four libraries by family, tiny and with random weights, trained in four ways beside one device.

python -m tests.nn.families            # what becomes of each, and docs/evidence/families.md anew: an hour
python -m tests.nn.families llama t5   # of these alone, and their rows
"""

import argparse
import copy
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.sbp import SbpLike
from tests.libraries import library
from tests.nn.family_tables.diffusers_models import DIFFUSERS
from tests.nn.family_tables.family import Family, named_loss
from tests.nn.family_tables.timm_models import TIMM
from tests.nn.family_tables.torchvision_models import TORCHVISION
from tests.nn.family_tables.transformers_models import WORDS
from tests.nn.family_tables.transformers_senses import SENSES

__all__ = [
    "FAMILIES", "LIBRARIES", "WAYS", "Loss", "known", "layers_of", "made", "make_page", "near", "outcome", "rows_of",
    "said", "table",
]  # fmt: skip

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "families.md"
RIGHT = "right"
LIBRARIES = ("transformers", "diffusers", "timm", "torchvision")
STEPS = 2
OFF = 1e-5  # many compute in float32 inside, whatever their weights are
FAMILIES: dict[str, Family] = {
    **WORDS,
    **SENSES,
    **{f"diffusers {name}": family for name, family in DIFFUSERS.items()},
    **{f"timm {name}": family for name, family in TIMM.items()},
    **{f"torchvision {name}": family for name, family in TORCHVISION.items()},
}


def made(name: str, *, otherwise: bool = False, small: Mapping[str, Any] | None = None) -> nn.Module:
    """In float64, where what is rounded differently shows least; `small` goes before `SMALL`."""
    family = FAMILIES[name]
    said = {"said": family.otherwise} if otherwise else {}
    torch.manual_seed(0)
    return family.make({**(small or {}), **said}).double()


Step: TypeAlias = Callable[..., Tensor]
Loss: TypeAlias = Callable[..., Tensor]


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def plain(
    model: nn.Module,
    lay: Callable[[Tensor], Tensor] = lambda value: value,
    momentum: float = 0.0,
    loss_fn: Loss = named_loss,
) -> Step:
    """The loop that everybody writes, on a batch that is laid out first."""
    optimizer = sgd(model, momentum)

    def step(**batch: Tensor) -> Tensor:
        loss = loss_fn(model, **{name: lay(value) for name, value in batch.items()})
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def eager(hints: dict[str, SbpLike], model: nn.Module, loss_fn: Loss) -> Step:
    where = flow.placement("cpu", range(4))
    flow.nn.to_global(model, where, hints)
    return plain(model, lambda value: flow.tensor(value, placement=where, sbp=S(0)), loss_fn=loss_fn)


def graph(model: nn.Module, loss_fn: Loss) -> Step:
    return flow.compile(model, loss_fn, sgd(model), placement=flow.placement("cpu:[0-3] as (data=2, tensor=2)"))


def pipeline(model: nn.Module, loss_fn: Loss) -> Step:
    """The longest list of layers in halves; the rest goes where its neighbours are."""
    stages = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
    flow.nn.pipeline(list(layers_of(model)[1]), stages)
    return flow.compile(model, loss_fn, sgd(model), micro_batches=2)


def layers_of(model: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential]:
    """The longest list of layers with its path; of equally long ones the first, and a list before a sequence."""
    kept = [(path, part) for path, part in model.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    several = [each for each in kept if len(each[1]) > 1] or kept
    lists = [each for each in several if isinstance(each[1], nn.ModuleList)] or several
    return max(lists, key=lambda each: len(each[1]))


WAYS: dict[str, Callable[[nn.Module, Loss], Step]] = {
    "data parallel": lambda model, loss_fn: eager({}, model, loss_fn),
    "all S(0)": lambda model, loss_fn: eager({"*": S(0)}, model, loss_fn),
    "graph": graph,
    "pipeline": pipeline,
}


def outcome(name: str, way: str, *, otherwise: bool = False) -> str:
    """`right`, or the first line of the error; weights after some steps are compared. A wrong value raises."""
    model = made(name, otherwise=otherwise).train(way != "pipeline")  # whose dropout is drawn by micro-batch
    family = FAMILIES[name]
    batches = [family.batch() for _ in range(STEPS)]
    one = copy.deepcopy(model)
    if way == "graph" and family.eagerly and not otherwise:
        flow.nn.eager(model.get_submodule(family.eagerly[0]))
    wanted = losses_of(plain(one, loss_fn=family.loss), batches)
    try:
        losses = losses_of(WAYS[way](model, family.loss), batches)
    except flow.SbpflowError as error:
        return str(error).splitlines()[0]
    mine = dict(everything(model))
    apart = {name: distance(mine[name], value) for name, value in everything(one)}
    off = {name: by for name, by in apart.items() if not by < OFF}  # which nan is not
    assert all(near(a, b) for a, b in zip(losses, wanted, strict=True)), f"{losses} for {wanted}"
    assert not off, f"these are off: {off}"
    return RIGHT


def near(mine: float, wanted: float) -> bool:
    return abs(mine - wanted) < OFF * max(1.0, abs(wanted))  # which nan is not


def losses_of(step: Step, batches: list[dict[str, Tensor]]) -> list[float]:
    torch.manual_seed(1)
    return [step(**batch).item() for batch in batches]


def everything(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def distance(mine: Tensor, wanted: Tensor) -> float:
    whole = mine.full_tensor() if isinstance(mine, flow.GlobalTensor) else mine
    return (whole.double().to(wanted.device) - wanted.double()).abs().max().item() if wanted.numel() else 0.0


def table(page: Path = PAGE) -> dict[tuple[str, str], str]:
    """Words of docs/evidence/families.md, or of another such page, on each family and way."""
    rows = [line.strip("| ").split("|") for line in page.read_text().splitlines() if line.startswith("|")]
    head, _, *rest = [[entry.strip() for entry in row] for row in rows]
    return {(row[0], way): said for row in rest for way, said in zip(head[1:], row[1:], strict=True)}


TOP = """# Families of models

Models of {count} families, as {versions} have them
and nobody changed them, tiny and with random weights in float64. Each is trained for {steps} steps of SGD in four ways,
and losses, weights and buffers are held to those of one device. `make test` runs a sample, `make sweep` one way of
each family and `make rest` all others, and hold them to this page, which is generated:

```sh
python -m tests.nn.families
```

- **data parallel**: weights `B`, the batch `S(0)`, on 4 ranks, eagerly. **all S(0)**: weights `S(0)` too.
- **graph**: `flow.compile` on 2 x 2 ranks, which chooses all signatures.
- **pipeline**: layers on two stages, two micro-batches, the model in evaluation, where batch norm does not mix samples.

Names without a library are of transformers. *refused* is an error that names the op and the line; it is quoted below.

"""
OTHERS = """
## Seen beside these

- A loss that compares samples with each other, as CLIP's, cannot be cut into micro-batches: `flow.compile` without
  stages takes it, and so do stages under gpipe, where it waits for all of them.
- LED, Longformer, ProphetNet, losses by CTC, and models with layer drop, such as Informer, ask what a tensor holds in
  Python (`if`, `.item()`, `nonzero()`): a graph refuses them with the line and the module to mark, and takes them as
  eager parts. The same holds for DETR's loss, Encodec's convolutions and LongCat's experts. Eagerly as a whole,
  Longformer and LED are refused.
- RWKV rescales its weights in place when it evaluates: in training a graph is right, in evaluation it is an error that
  names the parameter.
- PaliGemma without `token_type_ids` masks otherwise while it is traced, so that `torch.compile` and `flow.compile` both
  give another loss than its eager call.
- LeViT of timm keeps a table of biases from step to step in evaluation: the second backward of plain torch is an error.
"""


def page(found: dict[tuple[str, str], str]) -> str:
    """The table as a page, and why what is refused is."""
    versions = ", ".join(f"{name} {library(name).__version__.partition('+')[0]}" for name in LIBRARIES)
    top = TOP.format(count=len(FAMILIES), versions=versions, steps=STEPS)
    lines = ["", "In all four ways these are right:", ""]
    for name, family in FAMILIES.items():
        lines += [f"- {name} with `{key}={value!r}` in its config" for key, value in family.otherwise.items()]
    lines += ["", "In graphs these are marked, so that they [run eagerly](../reference/captured.md#eager-parts):", ""]
    for name, family in FAMILIES.items():
        if family.eagerly:
            path, why = family.eagerly
            lines.append(f"- {name}: `flow.nn.eager(model{path and f'.{path}'})`, because {why}")
    return top + rows_of(found, FAMILIES, WAYS) + "\n".join(lines) + "\n" + OTHERS


def rows_of(found: dict[tuple[str, str], str], names: Iterable[str], ways: Iterable[str]) -> str:
    """The outcome of each family in each way, and the reasons of what is refused."""
    ways = list(ways)
    rows = [["family", *ways], ["---"] * (1 + len(ways))]
    rows += [[name, *(said(found[name, way]) for way in ways)] for name in names]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    reasons: dict[str, list[str]] = {}
    for (name, way), text in found.items():
        if text != RIGHT:
            reasons.setdefault(re.sub(r"\S*/(?=[^/]+\.py:\d+)", "", text), []).append(f"{name} ({way})")
    if reasons:
        lines += ["", "## Refused", "", *(f"- {', '.join(where)}: `{text}`" for text, where in reasons.items())]
    return "\n".join(lines) + "\n"


def known(page: Path) -> dict[tuple[str, str], str]:
    """The outcomes that a page tells, with the reasons of what is refused."""
    text, found = page.read_text(), table(page)
    for where, reason in re.findall(r"^- (.+?\)): `(.+)`$", text.partition("## Refused")[2], re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"(?:^|, )([^(]+) \(([^)]+)\)", where), reason)
    return found


def said(found: str) -> str:
    return RIGHT if found == RIGHT else "refused"


def make_page(
    title: str | None,
    names: Collection[str],
    ways: Iterable[str],
    outcome: Callable[[str, str], str],
    page: Callable[[dict[tuple[str, str], str]], str],
    path: Path,
) -> None:
    """The command that tells what becomes of these names, or of all, in each way, and writes their rows of the page."""
    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    given = parser.parse_args()
    ways = list(ways)
    found = {key: text for key, text in known(path).items() if given.names and key[0] in names and key[1] in ways}
    if given.names and (lacking := sorted({name for name in names if (name, ways[0]) not in found} - {*given.names})):
        parser.error(f"the page has no row of {', '.join(lacking)}: name these too")
    for name in given.names or names:
        for way in ways:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name, way] = outcome(name, way)
            print(f"{name:20} {way:30} {found[name, way]}", flush=True)
    path.write_text(page({(name, way): found[name, way] for name in names for way in ways}))


if __name__ == "__main__":
    make_page(__doc__, FAMILIES, WAYS, outcome, page, PAGE)
