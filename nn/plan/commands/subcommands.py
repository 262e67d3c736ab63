"""The commands of a model under a plan: check, plan, explain, report, draw, diff and simulate.

python -m sbpflow plan LlamaForCausalLM --gpus 16xH100              finds a plan, and writes it
python -m sbpflow plan LlamaForCausalLM --gpus 64xH100 --no-seek    without pipelines and other degrees
python -m sbpflow plan LlamaForCausalLM --gpus xH100 --sweep 8..1024    a table over counts of cards
python -m sbpflow check my.plan LlamaForCausalLM --cluster h100x8*2
python -m sbpflow explain my.plan LlamaForCausalLM
python -m sbpflow report my.plan LlamaForCausalLM -o step.html
python -m sbpflow draw my.plan LlamaForCausalLM -o step.svg
python -m sbpflow diff a.plan b.plan
python -m sbpflow diff --html a.plan b.plan LlamaForCausalLM    a page of both side by side
python -m sbpflow simulate LlamaForCausalLM my.plan
"""

import json
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....boxing.graph.report.page_diff import page_of_two
from ....placement.errors import ASKED, SbpError, SbpflowError
from ...graph.capture.interceptor import WHILE_CAPTURED
from ...graph.step import Step
from ..check import Checked, planned_step, priced_by, stepped
from ..language.diff import PlanDiff, diff
from ..plan import Plan
from ..search.estimates.degrees import THINGS
from ..training import PUBLISHED
from .cards import card_kinds
from .model_source import NamedModel
from .plan_command import checked, named, run_check, run_plan
from .users_error import told_of_user
from .words import count, one_of

__all__ = ["add_commands", "run_command"]

PAGE = Path("step.html")
PICTURE = Path("step.svg")


def add_commands(commands: Any) -> None:
    """Add the subcommands to a parser."""
    planning = _command(commands, "plan", "find a plan for a model, or check one", "LlamaForCausalLM --gpus 8xH100")
    _model_of(planning)
    planning.add_argument("plan", metavar="PLAN", nargs="?", type=Path, help="the file of a plan, to check")
    planning.add_argument("-o", "--out", type=Path, metavar="FILE", help="write what was found (default MODEL.plan)")
    planning.add_argument("--memory", type=float, metavar="GIB", help="GiB of a rank within which to stay")
    seeks = f"look for {', '.join(THINGS)} too (default with --gpus and no PLAN; --no-seek: data and tensor by levels)"
    planning.add_argument("--seek", action=BooleanOptionalAction, default=None, help=seeks)
    planning.add_argument("--sweep", metavar="N..M", help="each count from N to M, doubled, of --gpus xKIND")
    planning.add_argument("--svg", type=Path, metavar="FILE", help="draw a sweep, as .svg or .png")
    dtypes = "bf16", "fp16", "fp32"
    taken = "{" + ",".join(dtypes) + "}"
    planning.add_argument(
        "--dtype", type=one_of(*dtypes), metavar=taken, help="weights; states are fp32 (bf16 on --gpus)"
    )
    _rent_of(planning)
    checking = _command(commands, "check", "check a plan for a model", "my.plan LlamaForCausalLM --gpus 8xH100")
    _plan_first(checking)
    _rent_of(checking)
    checking.set_defaults(sweep=None, memory=None, dtype=None, out=None, svg=None, seek=None)  # what `plan` looks for
    explaining = _command(commands, "explain", "tell all of a step under a plan: its ops, moves and memory", _PAIR)
    _plan_first(explaining)
    reporting = _command(commands, "report", "write the page of a step under a plan", f"{_PAIR} -o {PAGE}")
    _plan_first(reporting)
    reporting.add_argument("-o", "--out", type=Path, default=PAGE, metavar="FILE", help=f"a page (default {PAGE})")
    drawing = _command(commands, "draw", "draw the step of a model under a plan", f"{_PAIR} -o {PICTURE}")
    _plan_first(drawing)
    pictures = f".svg, .png, .pdf, .dot or .html (default {PICTURE})"
    drawing.add_argument("-o", "--out", type=Path, default=PICTURE, metavar="FILE", help=pictures)
    differing = _command(commands, "diff", "show what two plans say differently", "a.plan b.plan MODEL -o diff.html")
    differing.add_argument("a", type=Path)
    differing.add_argument("b", type=Path)
    differing.add_argument("named", metavar="MODEL", nargs="?", help="also what each costs for a model")
    differing.add_argument("--model", metavar="MODEL", help="the same, by its name")
    differing.add_argument("--html", action="store_true", help="a page of both side by side, for a model: diff.html")
    differing.add_argument("-o", "--out", type=Path, metavar="FILE", help="the same page in another file")
    _batch_of(differing)


_PAIR = "my.plan LlamaForCausalLM"


def _command(commands: Any, name: str, help: str, example: str) -> ArgumentParser:
    made: ArgumentParser = commands.add_parser(name, help=help, example=example)
    made.add_argument("--json", action="store_true", help="print the answer as json")
    return made


def _plan_first(parser: ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", type=Path, help="the file of a plan")
    _model_of(parser)


def _rent_of(parser: ArgumentParser) -> None:
    """Add the words on cards that one would rent, and for how long."""
    parser.add_argument("--gpus", metavar="NxKIND", help=f"so many cards of {', '.join(card_kinds())}, as in 8xH100")
    parser.add_argument("--total-tokens", type=float, metavar="N", help="words of a whole training, as in 15e12")
    parser.add_argument("--price", type=float, metavar="MONEY", help="of a card and hour")
    _failures_of(parser)
    _jitter_of(parser)


def add_model(parser: ArgumentParser) -> None:
    """Add the words that `simulate` takes where it is given a model and a plan."""
    parser.add_argument("plan", metavar="PLAN", nargs="?", type=Path, help="a plan: NAME is then a model")
    _batch_of(parser)


def _model_of(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="module:function, file.py:function, a class of transformers, or a config file"
    )
    _batch_of(parser)


def _batch_of(parser: ArgumentParser) -> None:
    parser.add_argument("--cluster", metavar="NAME", help="prices, such as h100x8*16 or a .toml file")
    parser.add_argument("--batch", type=count, default=8, metavar="N", help="samples, where the model comes without")
    parser.add_argument("--tokens", type=count, default=1024, metavar="N", help="tokens of each (default 1024)")
    parser.add_argument("--ranks", type=count, metavar="N", help="ranks, of which `*` in a grid is what is left")


def _failures_of(parser: ArgumentParser) -> None:
    """Add the words on what stops a training; their defaults are published figures."""
    for name, unit, what in (
        ("rate", "N", f"unplanned stops of a card and hour (default {PUBLISHED.rate:.3g})"),
        ("storage", "BYTES", f"bytes a second and card, as saves are written (default {PUBLISHED.storage:.3g})"),
        ("restart", "SECONDS", f"from a stop until saves are read (default {PUBLISHED.restart:g})"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar=unit, help=f"of --total-tokens: {what}")


def _jitter_of(parser: ArgumentParser) -> None:
    """Add the words on devices that compute unevenly; without them all are alike."""
    parser.add_argument("--jitter", type=float, metavar="SHARE", help="by which a task's time scatters, as in 0.03")
    parser.add_argument("--slow", type=float, metavar="SHARE", help="by which slow cards take longer, as in 0.2")
    parser.add_argument("--one-in", type=float, metavar="N", help="cards of which one is slow")
    parser.add_argument("--seed", type=int, metavar="N", help="of what is drawn for these (default 0)")


def run_command(asked: Namespace) -> None:
    """Run one of them. Where no line of the user made an op, as where torch's own module is the model, the name that
    the user gave the model stands for it."""
    _in_order(asked)
    of = {"check": run_check, "plan": run_plan, "explain": _explain, "report": _report, "draw": _draw}
    model = next((name for word in ("model", "named", "schedule") if (name := getattr(asked, word, None))), "")
    ASKED.append(model)
    try:
        {**of, "diff": _diff, "simulate": _simulate}[asked.command](asked)
    except Exception as error:
        if isinstance(error, SbpflowError):
            raise
        if any(note.startswith(WHILE_CAPTURED) for note in getattr(error, "__notes__", ())):
            raise SbpError(
                "\n  ".join(str(error).splitlines() + error.__notes__)
            ) from None  # torch's word on the model
        told = told_of_user(error, model)
        if told is None:
            raise
        raise SbpError(told) from None
    finally:
        ASKED.pop()


def _in_order(asked: Namespace) -> None:
    """Take a plan and a model in either order, where it is plain which is which."""
    name = "schedule" if asked.command == "simulate" else "model"
    plan, model = getattr(asked, "plan", None), getattr(asked, name, None)
    if plan is not None and model is not None and Path(model).suffix == ".plan" and plan.suffix != ".plan":
        asked.plan = Path(model)
        setattr(asked, name, str(plan))


def _explain(asked: Namespace) -> None:
    """All of a step as text."""
    _, found = _stepped(asked)
    print(json.dumps(found.report.dict(), indent=1) if asked.json else found.report.full())


def _report(asked: Namespace) -> None:
    """All of a step as a page."""
    if asked.out.suffix != ".html":
        raise SbpError(f"-o {asked.out}: a report is a page\n  write -o {asked.out.with_suffix('.html')}")
    _, found = _stepped(asked)
    found.report.save(asked.out)
    _wrote(asked, asked.out)


def _draw(asked: Namespace) -> None:
    step, found = _stepped(asked)
    if asked.out.suffix == ".html":
        found.report.save(asked.out)
    else:
        from ....boxing.graph.picture.draw import draw

        draw(step.graph, asked.out, prices=found.report.prices)
    _wrote(asked, asked.out)


def _stepped(asked: Namespace) -> tuple[Step, Checked]:
    return _stepped_by(Plan.load(asked.plan), asked, named(asked, asked.model))


def _stepped_by(plan: Plan, asked: Namespace, of: NamedModel) -> tuple[Step, Checked]:
    with priced_by(asked.cluster):
        return stepped(plan, of.model, of.batch, loss_fn=of.loss_fn, ranks=asked.ranks)


def _wrote(asked: Namespace, path: Path) -> None:
    print(json.dumps({"file": str(path), "bytes": path.stat().st_size}) if asked.json else f"drew {path}")


def _diff(asked: Namespace) -> None:
    a, b, model = Plan.load(asked.a), Plan.load(asked.b), asked.model or asked.named
    found = diff(a, b)
    if asked.html or asked.out:
        _diff_page(asked, found, a, b, model)
        return
    if not asked.json:
        print(found)  # first what takes no time
    costs: dict[str, Checked] = {}
    if model:
        of = named(asked, model)
        costs = {str(path): checked(asked, of, path).checked for path in (asked.a, asked.b)}
    if asked.json:
        print(json.dumps({**found.dict(), "checked": {name: one.dict() for name, one in costs.items()}}, indent=1))
        return
    for one in costs.values():
        print(one)


def _diff_page(asked: Namespace, said: PlanDiff, a: Plan, b: Plan, model: str | None) -> None:
    """Write the page of two plans, whose steps are planned for a model."""
    if model is None:
        raise SbpError(
            "the page of two plans draws the steps of both, so it needs a model\n"
            f"  name it: python -m sbpflow diff --html {asked.a} {asked.b} MODEL"
        )
    out = asked.out or Path("diff.html")
    if out.suffix != ".html":
        raise SbpError(f"-o {out}: two plans side by side are a page\n  write -o {out.with_suffix('.html')}")
    of = named(asked, model)
    plans = [_stepped_by(each, asked, of)[1] for each in (a, b)]
    lines = [(row.change, str(row.a or ""), str(row.b or "")) for row in said.rows]
    one, other = (each.report for each in plans)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page_of_two((str(asked.a), str(asked.b)), lines, one, other), encoding="utf-8")
    _wrote(asked, out)


def _simulate(asked: Namespace) -> None:
    """The course of micro-batches before anything runs."""
    of = named(asked, asked.schedule)
    with priced_by(asked.cluster):
        step = planned_step(Plan.load(asked.plan), of.model, of.batch, loss_fn=of.loss_fn, ranks=asked.ranks)
    pieces = step.plan.pieces
    if pieces is None:
        raise SbpError(
            f"{asked.plan} has no pipeline, so that there is no course of micro-batches\n"
            "  give it one, as in pipe model.layers over pipe by 1f1b, 8 micro-batches; or see its moves: "
            "python -m sbpflow explain PLAN MODEL"
        )
    schedule, costs, many = pieces.options.policy, pieces.costs(), pieces.options.micro_batches
    stages = len(pieces.course().stages)
    if schedule.linear and stages < len(costs):
        shown = schedule.show(m=many, costs=costs, devices=pieces.first.variant.where.group)
    else:
        shown = schedule.show(stages, many, v=len(costs) // stages, costs=costs)
    course, shown = pieces.course(), replace(shown, in_seconds=True)
    said = {**shown.dict(), "seconds": course.seconds, "once": course.once} if asked.json else {}
    print(json.dumps(said, indent=1) if asked.json else f"{shown}\n{course}")
    if asked.svg is not None:
        print(f"drew {shown.draw(asked.svg)}", file=sys.stderr if asked.json else sys.stdout)
