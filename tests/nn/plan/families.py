"""Models of transformers by family, under plans of the language beside one device.

python -m tests.nn.plan.families            # what becomes of each, and docs/plan_families.md anew
python -m tests.nn.plan.families llama t5   # of these alone
"""

import argparse
import copy
import importlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.nn.plan.taken import taken
from tests.nn.families import FAMILIES, RIGHT, Step, distance, everything, loss_fn, losses_of, made, plain, rows_of, sgd

__all__ = ["PAGE", "PLANS", "WITH_A_PLAN", "apart", "compiled", "noted", "outcome"]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "plan_families.md"
STEPS = 2
WITH_A_PLAN = [  # a tp_plan
    "arcee", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "gpt_neox", "granite", "llama", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmoe", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
]  # fmt: skip
OFF = 1e-3  # of what a step changes in a tensor: many models compute in float32 inside, whatever their weights are


def noted(model: nn.Module, lines: list[str]) -> nn.Module:
    """The model with notes of what the lines say of weights; a star is one part of a path."""
    names = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    for line in lines:
        said = line.partition("  #")[0]
        if not said.startswith("#") and "->" not in said and "<-" not in said:
            path, axis, entry = said.replace(": ", "=").split("=")
            meets = re.compile(re.escape(path).replace(r"\*", "[^.]*")).fullmatch
            flow.nn.shard(model, {name: {axis: entry} for name in filter(meets, names)})
    return model


def compiled(model: nn.Module, grid: str) -> flow.nn.Graph:
    return flow.compile(model, loss_fn, sgd(model), placement=flow.placement(grid))


def data_parallel(model: nn.Module) -> Step:
    where = flow.placement("cpu:[0-3] as (data=4)")
    step = compiled(flow.nn.shard(model, {"*": B}), "cpu:[0-3] as (data=4)")
    return lambda **batch: step(**{name: flow.tensor(x, placement=where, sbp=S(0)) for name, x in batch.items()})


def tensor_parallel(model: nn.Module) -> Step:
    return compiled(noted(model, taken(model, "tensor")), "cpu:[0-3] as (tensor=4)")


def staged(model: nn.Module) -> Step:
    """Two stages, each cut over two ranks."""
    grid = flow.placement("cpu:[0-3] as (pipe=2, tensor=2)")
    noted(model, taken(model, "tensor"))
    layers = max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len)
    flow.nn.pipeline(layers, [grid.at(pipe=0), grid.at(pipe=1)])
    return flow.compile(model, loss_fn, sgd(model), micro_batches=2, schedule="1f1b")


PLANS: dict[str, Callable[[nn.Module], Step]] = {
    "data parallel": data_parallel,
    "tensor parallel": tensor_parallel,
    "2 stages x 2 tensor": staged,
}


def outcome(name: str, plan: Callable[[nn.Module], Step], *, train: bool = True) -> str:
    """`right`, or the first line of the error; losses, and what steps change, are compared. A wrong value raises."""
    model = made(name).train(train)
    batches = [FAMILIES[name].batch() for _ in range(STEPS)]
    one, before = copy.deepcopy(model), copy.deepcopy(model)
    wanted = losses_of(plain(one), batches)
    try:
        losses = losses_of(plan(model), batches)
    except flow.SbpflowError as error:
        return str(error).splitlines()[0]
    assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-5, f"{losses} for {wanted}"
    off = apart(model, one, before)
    worst = max(off, key=lambda path: off[path])
    assert off[worst] < OFF, f"{worst} changes by {off[worst]} of itself more or less than on one device"
    return RIGHT


def apart(model: nn.Module, one: nn.Module, before: nn.Module) -> dict[str, float]:
    """How much otherwise each tensor changed than on one device, as a part of the change."""
    mine, first = dict(everything(model)), dict(everything(before))
    return {
        path: distance(mine[path], value) / (distance(first[path], value) + 1e-7) for path, value in everything(one)
    }


TOP = """# Families of models under plans

Models of {count} families, as transformers {version} has them and nobody changed them, tiny and with random weights in
float64, under plans. Each is trained for {steps} steps of SGD; losses, and what every tensor changes by, hence its
gradients, are held to those of one device. `make sweep` runs all of them, `make test` a sample, and both hold them to
this page, which is generated:

```sh
python -m tests.nn.plan.families
```

- **data parallel**: weights `B`, the batch `S(0)`, on 4 ranks.
- **tensor parallel**: what `take tp_plan over tensor` says of weights, on 4 ranks; most of these have 2 heads of keys.
- **2 stages x 2 tensor**: the same on 2 ranks, layers in two stages, two micro-batches.

"""
REFUSED = "*refused* is an error that names the op and the line; it is quoted below.\n\n"


def page(found: dict[tuple[str, str], str]) -> str:
    hub: Any = importlib.import_module("transformers")
    top = TOP.format(count=len(WITH_A_PLAN), version=hub.__version__, steps=STEPS)
    return top + REFUSED * (set(found.values()) != {RIGHT}) + rows_of(found, WITH_A_PLAN, PLANS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=[])
    given = parser.parse_args()
    found = {}
    for name in given.families or WITH_A_PLAN:
        for plan, run in PLANS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name, plan] = outcome(name, run, train=run is not staged)
            print(f"{name:20} {plan:20} {found[name, plan]}", flush=True)
    if not given.families:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
