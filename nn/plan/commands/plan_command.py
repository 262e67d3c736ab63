"""The command `plan`: a plan that is checked, or found for the cards that one would rent, as text or json."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

from ....boxing.figures import duration, volume
from ....boxing.picture.draw import written
from ....placement import Cluster, Jitter, cluster
from ....placement.errors import PlacementError, SbpError
from ..expect import expected
from ..language.statements import Grid, Offload
from ..plan import Plan
from ..prediction import Prediction, predict
from ..search.estimates.ahead import processes_here
from ..search.estimates.degrees import THINGS
from ..search.fewest import FewestCards, NothingFits, fewest
from ..search.open_degrees import leaves_degrees
from ..search.planner import FoundPlan, find_plan
from ..search.sweep import Attempted, ends_of, swept
from ..search.sweep_chart import sweep_chart
from ..training import Failures
from .cards import CardKind, cards_of
from .model_source import NamedModel, model_called

__all__ = ["checked", "named", "run_check", "run_plan"]


def named(asked: Namespace, name: str) -> NamedModel:
    """The model that a user means."""
    tell(f"making {name} on meta")
    found = model_called(name, asked.batch, asked.tokens)
    if found.loss_fn is None and not hasattr(found.model, "config"):  # models of transformers have a loss
        tell(f"{name} names no loss function: the loss is the result's own, or else the mean of its first tensor")
    return found


def checked(asked: Namespace, of: NamedModel, path: Path, jitter: Jitter | None = None) -> Prediction:
    """The prediction of a plan of a file, all of whose expectations hold."""
    tell(f"planning by {path}")
    text = Plan.load(path)
    cluster, ranks = asked.cluster, asked.ranks
    found = predict(of.model, of.batch, text, loss_fn=of.loss_fn, cluster=cluster, ranks=ranks, jitter=jitter)
    expected(text, found.checked.findings)
    return found


def tell(line: str) -> None:
    """Print progress, apart from the answer."""
    print(line, file=sys.stderr)


def run_plan(asked: Namespace) -> None:
    """Check a plan, or find one, or many for a sweep."""
    kind, money = _rented(asked), (asked.total_tokens, asked.price, _failures(asked))
    _jitter(asked)  # what is wrong of it is said before anything is made
    if asked.sweep is not None:
        assert kind is not None
        _sweep(asked, kind, *money)
        return
    of = named(asked, asked.model)
    if asked.plan is not None and not _opens(asked.plan):
        _check(asked, of, *money)
        return
    try:
        found = _found(asked, of, asked.cluster, asked.ranks)
    except NothingFits as short:
        if kind is None:
            raise
        raise _too_few(asked, of, kind, short) from None
    path = found.save(asked.out or Path(f"{of.name}.plan"))
    if asked.json:
        print(json.dumps(_dict(found, *money) | {"file": str(path)} | found.checked.dict(), indent=1))
    else:
        print(f"{found}\n{found.table()}\n")
        print("\n".join([*found.prediction.lines(*money), *_without_host(found, kind, _limit(asked)), f"wrote {path}"]))


def run_check(asked: Namespace) -> None:
    """Check a plan, which says all."""
    if _opens(asked.plan):
        raise SbpError(
            f"{asked.plan} leaves degrees open, which are looked for before it is checked\n"
            f"  write python -m sbpflow plan {asked.model} {asked.plan}"
        )
    run_plan(asked)


def _check(asked: Namespace, of: NamedModel, *money: Any) -> None:
    known = checked(asked, of, asked.plan, _jitter(asked))
    said = known.checked.dict() | {"prediction": known.dict(*money)}
    print(json.dumps(said, indent=1) if asked.json else "\n".join([str(known.checked), *known.lines(*money)]))


def _found(asked: Namespace, of: NamedModel, cluster: str | None, ranks: int | None) -> FoundPlan:
    """The planner's answer for so many ranks."""
    lines = [f"cast ** to {asked.dtype}", "cast {grads,states} ** to fp32"] if asked.dtype else []
    lines += [f"seek {', '.join(THINGS)}"] if asked.seek else []
    return find_plan(
        of.model,
        of.batch,
        plan=asked.plan or "\n".join(lines) or None,
        cluster=_uneven(asked, cluster),
        memory=_limit(asked),
        loss_fn=of.loss_fn,
        ranks=ranks,
        told=tell,
        processes=processes_here(),
    )


def _opens(path: Path) -> bool:
    """Whether the plan of a file leaves degrees to the planner."""
    return leaves_degrees(Plan.load(path))


def _limit(asked: Namespace) -> float | None:
    return None if asked.memory is None else asked.memory * 2**30


def _without_host(found: FoundPlan, kind: CardKind | None, limit: float | None) -> Iterator[str]:
    """A line on the cards that a plan takes at least which is not to keep states on their hosts."""
    if kind is None or not any(isinstance(line, Offload) for line in found.statements):
        return
    rest = found.prediction.resting
    least = rest.ranks(limit or found.checked.device.room, host=False)
    count = next((count for count in kind.doubled(1) if count >= least), None)
    if count is not None and count > found.prediction.ranks:
        whole = volume(rest.whole)
        yield f"  hosts    without them {count} x {kind.name} or more: weights, gradients and states are {whole}"


def _dict(found: FoundPlan, *money: Any) -> dict[str, Any]:
    others = [{"name": one.name, "why": one.why, "plan": str(one.plan)} for one in found.runners_up]
    return {"plan": str(found), "runners_up": others, "prediction": found.prediction.dict(*money)}


def _too_few(asked: Namespace, of: NamedModel, kind: CardKind, short: NothingFits) -> SbpError:
    """The error where nothing fits on so many cards: it names the fewest that do, and their plan."""
    counts = [count for count in kind.doubled(asked.ranks) if count > asked.ranks]
    tell(f"nothing fits on {asked.ranks} x {kind.name}: how many do?")
    able = fewest(short, counts, lambda count: _found(asked, of, kind.cluster(count), count), tell)
    text = f"{asked.gpus}: {short.needs}\n  {_enough(able, kind, short)}"
    if asked.json:
        found = None if able.found is None else _dict(able.found)
        said = {"cards": able.count, "bound": found is None, "tried": able.tried, "found": found}
        print(json.dumps({"fits": False, "why": text, "fewest": said}, indent=1))
    return SbpError(text)


def _sweep(asked: Namespace, kind: CardKind, *money: Any) -> None:
    """The table of a sweep: of the planner's answers, or of a plan with an axis that has what is left."""
    first, last = ends_of(asked.sweep)
    if kind.whole(first) != first or first > kind.nodes.capacity[-1]:
        node = kind.in_node
        raise SbpError(
            f"--sweep {asked.sweep}: nodes have {node} cards, and all are {kind.nodes.capacity[-1]}\n"
            f"  write --sweep {min(first, kind.nodes.capacity[-1]) // node * node}..{last}"
        )
    given = None if asked.plan is None or _opens(asked.plan) else _with_star(asked.plan)
    if asked.svg is not None and asked.svg.suffix.lower() not in (".svg", ".png"):
        raise SbpError(f"--svg {asked.svg} is neither\n  write {asked.svg.with_suffix('.svg')}")
    of, jitter = named(asked, asked.model), _jitter(asked)

    def attempt(count: int) -> Attempted:
        cluster = kind.cluster(count)
        if given is None:
            found = _found(asked, of, cluster, count)
            return found.prediction, found.found, str(found)
        known = predict(of.model, of.batch, given, loss_fn=of.loss_fn, cluster=cluster, ranks=count, jitter=jitter)
        return known, str(asked.plan), given.text

    made = swept(kind.name, kind.doubled(first, last), attempt, tell)
    print(json.dumps(made.dict(*money), indent=1) if asked.json else "\n".join(made.lines(*money)))
    if asked.svg is not None:
        tell(f"drew {written(sweep_chart(made) + chr(10), asked.svg)}")
    if made.stopped:
        raise SystemExit(130)  # as a program that Ctrl-C has ended


def _with_star(path: Path) -> Plan:
    """A plan that takes any number of cards."""
    given = Plan.load(path)
    axes = [axis for line in given.statements if isinstance(line, Grid) for axis in line.axes]
    if not any(axis.size == "*" for axis in axes):
        grid = next((str(line) for line in given.statements if isinstance(line, Grid)), "no grid")
        star = next((axis for axis in axes if axis.name == "data" and axis.folds is None), None)
        fix = grid.replace(str(star), "data=*") if star else "grid cuda (data=*)"
        raise SbpError(f"{path} is for one number of cards: {grid}\n  leave an axis to the sweep, as in {fix}")
    return given


def _enough(able: FewestCards[FoundPlan], kind: CardKind, short: NothingFits) -> str:
    """Words on the fewest cards, or on the bound."""
    found = able.found
    if found is not None:
        lines = [line for line in str(found.without_comments()).splitlines() if line.strip()]
        return (
            f"--gpus {able.count}x{kind.name} does, by the plan {found.found!r}: {duration(found.checked.seconds)} "
            f"a step, {volume(found.checked.memory)} a rank\n"
            + "\n".join([*(f"    {line}" for line in lines), *_without_host(found, kind, short.limit)])
        )
    known = f"; {', '.join(map(str, able.tried))} were tried and do not do" if able.tried else ""
    rest = volume((short.bytes.weights + short.bytes.gradients) / max(able.count, 1))
    return (
        f"it takes {able.count} x {kind.name} or more, a bound: of weights and gradients alone these have "
        f"{rest} each{known}\n  try --gpus {able.count}x{kind.name}, or a smaller --batch"
    )


def _failures(asked: Namespace) -> Failures:
    """Failures of a training, as far as they are said."""
    said = {name: getattr(asked, name) for name in ("rate", "storage", "restart")}
    known = {name: value for name, value in said.items() if value is not None}
    if known and asked.total_tokens is None:
        raise SbpError(
            f"--{next(iter(known))} is of a whole training\n  say of how many words, as in --total-tokens 15e12"
        )
    return Failures(**known)


def _jitter(asked: Namespace) -> Jitter | None:
    """How unevenly devices compute, as far as it is said."""
    words = {"scatter": "jitter", "slow": "slow", "one_in": "one-in", "seed": "seed"}
    said = {name: getattr(asked, word.replace("-", "_")) for name, word in words.items()}
    known = {name: value for name, value in said.items() if value is not None}
    if known.keys() == {"seed"}:
        raise SbpError(f"--seed {asked.seed} is of a jitter\n  say how much tasks scatter, as in --jitter 0.03")
    try:
        return Jitter(**known) if known else None
    except PlacementError as error:
        raise SbpError(f"{' '.join(f'--{words[name]} {value:g}' for name, value in known.items())}: {error}") from None


def _uneven(asked: Namespace, which: str | None) -> Cluster | str | None:
    """The cluster by this name, whose devices compute as unevenly as is said."""
    jitter = _jitter(asked)
    if jitter is None:
        return which
    if which is None:
        raise SbpError(f"a jitter is of devices: {jitter}\n  say of which, as in --gpus 8xH100 or --cluster mine.toml")
    return cluster(which).with_jitter(jitter)


def _rented(asked: Namespace) -> CardKind | None:
    """The cards that `--gpus` says; but in a sweep it sets the cluster and the ranks of so many."""
    _refuse(asked)
    if asked.gpus is None:
        return None
    count, kind = cards_of(asked.gpus)
    asked.dtype = asked.dtype or "bf16"
    asked.seek = asked.plan is None and asked.seek in (None, True)
    sweep = asked.sweep or "8..64"
    if asked.sweep is None and count is None:
        raise SbpError(
            f"--gpus {asked.gpus} says no number\n"
            f"  write so many, as in 8x{kind.name}, or a sweep: --gpus x{kind.name} --sweep {sweep}"
        )
    if asked.sweep is not None and count is not None:
        raise SbpError(
            f"--gpus {asked.gpus} is one number of cards, and --sweep many\n  write --gpus x{kind.name} --sweep {sweep}"
        )
    if count is not None:
        asked.cluster, asked.ranks = kind.cluster(count), asked.ranks or count
    return kind


def _refuse(asked: Namespace) -> None:
    """Refuse words that say nothing beside the others."""
    sweeps, given = asked.sweep is not None, asked.plan is not None
    said = given and not _opens(asked.plan)
    for wrong, what, fix in (
        (
            asked.price is not None and asked.total_tokens is None,
            "--price is that of a whole training",
            "say of how many words, as in --total-tokens 15e12",
        ),
        (
            said and asked.memory is not None,
            f"--memory {asked.memory} is a limit for what is looked for, and {asked.plan} is given",
            f"write it there, as in expect memory <= {asked.memory} GiB",
        ),
        (
            asked.memory is not None and not 0 < asked.memory < inf,
            f"--memory {asked.memory} is no room",
            "say how many GiB of a rank, as in --memory 72",
        ),
        (
            given and asked.dtype is not None,
            f"--dtype {asked.dtype} is for what is looked for, and {asked.plan} is given",
            f"write it there, as in cast ** to {asked.dtype}",
        ),
        (
            given and asked.seek is not None,
            f"--{'no-' * (not asked.seek)}seek is for what no plan says, and {asked.plan} is given",
            f"write it there, as in seek {', '.join(THINGS)}" if asked.seek else "leave it out",
        ),
        (
            said and asked.out is not None,
            f"-o {asked.out} is for what is looked for, and {asked.plan} is given",
            "leave it out, or PLAN",
        ),
        (
            asked.total_tokens is not None and not 0 < asked.total_tokens < inf,
            f"--total-tokens {asked.total_tokens} is no training",
            "say of how many words, as in --total-tokens 15e12",
        ),
        (
            asked.gpus is not None and asked.cluster is not None,
            f"--gpus {asked.gpus} is not understood beside --cluster",
            "give one of them: --cluster prices and --ranks counts cards that have no name here",
        ),
        (
            asked.svg is not None and not sweeps,
            f"--svg {asked.svg} is the chart of a sweep",
            "give it one, as in --gpus xH100 --sweep 8..64; a step is drawn by python -m sbpflow draw",
        ),
        (
            sweeps and asked.gpus is None,
            f"--sweep {asked.sweep} says no kind of cards",
            f"give that too, as in --gpus xH100 --sweep {asked.sweep}",
        ),
        (
            sweeps and asked.out is not None,
            f"-o {asked.out} is one plan, and a sweep has one for each number of cards",
            "leave it out: --json has their texts; or ask for one, as in --gpus 8xH100",
        ),
        (sweeps and asked.ranks is not None, f"--ranks {asked.ranks} beside --sweep {asked.sweep}", "leave it out"),
    ):
        if wrong:
            raise SbpError(f"{what}\n  {fix}")
