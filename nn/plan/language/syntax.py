"""The syntax of one line of a plan: from its letters to a statement, by the grammar in plan.lark."""

from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedInput, VisitError

from ....actors.schedules.definition import FORMULAS
from ....actors.schedules.published import PUBLISHED, published
from ....boxing.encoders.named import encoder_of
from ....boxing.picture.palette import FAMILIES
from ....placement.errors import PlacementError, SbpError, ScheduleError
from ....placement.ranks import check_type
from ....placement.text import parse as check_placement
from ...model.path_syntax import TextFault
from .statements import (
    AxisEntries,
    Cast,
    Compress,
    ExpectAtMost,
    ExpectGathered,
    ExpectMoves,
    Flow,
    Grid,
    GridAxis,
    Input,
    Inside,
    Kind,
    Limit,
    Offload,
    Pipe,
    Place,
    Recompute,
    Rest,
    Seek,
    Statement,
    TakePlan,
)
from .syntax_error import expected
from .terms import Columns, axis_of, bytes_of, column, entry_of, fraction, kinds_of, known_word, path_of, whole
from .words import MICRO_BATCHES, TAKEN, TYPES

__all__ = ["ReadLine", "reading"]

LETTERS = 10_000  # of a statement
MOVES = tuple(kind for family in FAMILIES.values() for kind in family.kinds if kind != "view")
SECONDS = {"ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}  # others are seconds


class ReadLine(NamedTuple):
    """A statement, and the columns of its parts."""

    statement: Statement
    spans: Columns


@lru_cache(4096)
def reading(code: str) -> ReadLine:
    """The statement of a line without its comment; raises a `TextFault`."""
    if len(code) > LETTERS:
        raise TextFault(0, f"a line of {len(code)} letters", f"a statement has at most {LETTERS}")
    try:
        return _grammar()(code)
    except VisitError as error:
        raise error.orig_exc from None
    except UnexpectedInput as error:
        raise expected(code, error) from None


@cache
def _grammar() -> Callable[[str], ReadLine]:
    text = Path(__file__).with_name("plan.lark").read_text(encoding="utf-8")
    # Contextual: a word of a statement is one only where it can stand, so an axis may be called `over`.
    return cast(
        "Callable[[str], ReadLine]",
        Lark(text, parser="lalr", lexer="contextual", transformer=_StatementBuilder()).parse,
    )


@v_args(inline=True)
class _StatementBuilder(Transformer[Token, Any]):
    """Statements from the grammar's rules, which carry the names of these methods."""

    def signature(self, *entries: tuple[Token, Token]) -> tuple[AxisEntries, Columns]:
        spans: Columns = {}
        found = []
        for name, entry in entries:
            if f"axis:{name}" in spans:
                raise TextFault(column(name), f"the axis {str(name)!r} stands twice", "give each axis one signature")
            found.append((axis_of(name, spans), entry_of(entry)))
            spans[f"entry:{name}"] = column(entry)
        return tuple(found), spans

    def hole(self, token: Token) -> tuple[AxisEntries, Columns]:
        return None, {"entry": column(token)}

    def entry(self, name: Token, value: Token) -> tuple[Token, Token]:
        return name, value

    def rest(self, first: Token, second: Token | None, signature: tuple[AxisEntries, Columns]) -> ReadLine:
        path = first if second is None else second
        spans = {"statement": column(first), "path": column(path)}
        kinds = kinds_of(None if second is None else first, spans)
        return ReadLine(Rest(path_of(path), signature[0], cast("tuple[Kind, ...]", kinds)), spans | signature[1])

    def flow(self, path: Token, arrow: Token, signature: tuple[AxisEntries, Columns]) -> ReadLine:
        spans = {"statement": column(path), "path": column(path), "arrow": column(arrow)}
        made = Flow(path_of(path), signature[0], "result" if arrow == "->" else "input")
        return ReadLine(made, spans | signature[1])

    def input(self, word: Token, path: Token, arrow: Token, signature: tuple[AxisEntries, Columns]) -> ReadLine:
        spans = {"statement": column(word), "path": column(path), "arrow": column(arrow)}
        return ReadLine(Input(path_of(path), signature[0]), spans | signature[1])

    def placed(self, word: Token, token: Token) -> ReadLine:
        try:
            check_placement(str(token).strip())
        except PlacementError as error:
            first, *rest = str(error).split("\n")
            mark = next((line.index("^") - 2 for line in rest if line.strip() == "^"), 0)
            raise TextFault(
                column(token) + mark, first, (rest or [""])[-1].strip(" ^") or "as in grid cuda:[0-7]"
            ) from None
        return ReadLine(
            Grid(placement=" ".join(token.split())), {"statement": column(word), "placement": column(token)}
        )

    def grid(self, word: Token, device: Token | None, *axes: tuple[Token, Token, Token | None]) -> ReadLine:
        spans = {"statement": column(word)}
        if device is not None:
            spans["type"] = column(device)
            try:
                check_type(device.lower())
            except PlacementError as error:
                first, fix = str(error).split("\n")
                raise TextFault(column(device), first, fix.strip()) from None
        spans["axes"] = column(axes[0][0])
        made, sizes = [], dict[str, int | str]()
        for name, size, folds in axes:
            if str(name) in sizes:
                raise TextFault(
                    column(name), f"the axis {str(name)!r} stands twice", "give each axis a name of its own"
                )
            if size == "*" and "*" in sizes.values():
                raise TextFault(column(size), "two axes are *", "what the launcher has left can be one axis alone")
            sizes[str(name)] = size.value if size in ("*", "?") else whole(size, 1)
            made.append(GridAxis(axis_of(name, spans), cast(Any, sizes[str(name)]), folds and str(folds)))
            spans[f"size:{name}"] = column(size)
        for name, size, folds in axes:
            if folds is not None:
                plain = [axis.name for axis in made if axis.folds is None and axis.name != str(name)]
                spans[f"folds:{name}"], of = (
                    column(folds),
                    known_word(folds, str(folds), plain, "axis that can be folded"),
                )
                mine, there = sizes[str(name)], sizes[of]
                if isinstance(mine, int) and isinstance(there, int) and there % mine:
                    what = f"{mine} ranks of {name} do not divide the {there} of {of}"
                    raise TextFault(
                        column(size), what, f"{name} is the ranks of {of} once more, all or in equal groups"
                    )
        return ReadLine(Grid(tuple(made), device and device.lower()), spans)

    def axis(self, name: Token, size: Token, folds: Token | None) -> tuple[Token, Token, Token | None]:
        return name, size, folds

    def take(self, word: Token, what: Token, over: Token) -> ReadLine:
        spans = {"statement": column(word), "what": column(what)}
        known = known_word(what, what.lower(), TAKEN, "plan of a config")
        return ReadLine(TakePlan(known, axis_of(over, spans, "over")), spans)

    def place(self, word: Token, path: Token, axis: Token, at: Token) -> ReadLine:
        spans = {"statement": column(word), "path": column(path), "at": column(at)}
        return ReadLine(Place(path_of(path), axis_of(axis, spans), whole(at)), spans)

    def schedule(self, name: Token, *marks: tuple[Token, Token]) -> tuple[Token, tuple[tuple[Token, Token], ...]]:
        return name, marks

    def mark(self, name: Token, value: Token) -> tuple[Token, Token]:
        return name, value

    amount = mark

    def pipe(self, word: Token, path: Token, over: Token, by: Any, *amounts: tuple[Token, Token]) -> ReadLine:
        spans = {"statement": column(word), "path": column(path)}
        many = dict[str, int]()
        for value, unit in amounts:
            name = "micro-batches" if unit.type == "MICRO_BATCHES" else "slices"
            if name in many:
                raise TextFault(column(value), f"{name} stand twice", "leave one out")
            many[name], spans[name] = whole(value, 1), column(value)
        slices = many.get("slices")
        schedule = "1f1b" if slices is None else "terapipe"
        marks = list[tuple[str, int]]()
        if by is not None:
            schedule, spans["schedule"] = by[0].lower(), column(by[0])
            try:
                cuts = published(schedule).slices
            except ScheduleError:
                cuts = known_word(by[0], schedule, PUBLISHED, "schedule") == ""
            if cuts != (slices is not None):
                what = "cuts sequences into slices" if cuts else "does not cut sequences into slices"
                fix = f"say how many, as in {schedule}, 8 micro-batches, 4 slices" if cuts else "terapipe does"
                raise TextFault(column(by[0]), f"{schedule} {what}", fix)
            for name, value in by[1]:
                known_word(name, str(name), ("v", *FORMULAS), "mark of a schedule that is a number")
                if f"mark:{name}" in spans:
                    raise TextFault(column(name), f"the mark {name} stands twice", "leave one out")
                spans[f"mark:{name}"] = column(name)
                marks.append((str(name), whole(value, int(name == "v"))))
        made = Pipe(
            path_of(path), axis_of(over, spans, "over"), schedule, tuple(marks), many.get("micro-batches"), slices
        )
        return ReadLine(made, spans)

    def ops(self, *names: Token) -> tuple[Token, ...]:
        return names

    def recompute(self, word: Token, path: Token, *ops: Any) -> ReadLine:
        spans = {"statement": column(word), "path": column(path)}
        keep, only = ops[1], ops[3]
        if keep and only:
            raise TextFault(
                column(ops[2]), "keep and only stand together", "say which ops are kept, or which alone run again"
            )
        for name in (*(keep or ()), *(only or ())):
            if f"op:{name}" in spans:
                raise TextFault(column(name), f"the op {str(name)!r} stands twice", "leave one out")
            spans[f"op:{name}"] = column(name)
        return ReadLine(Recompute(path_of(path), tuple(map(str, keep or ())), tuple(map(str, only or ()))), spans)

    def offload(self, word: Token, first: Token, second: Token | None, _to: Token, to: Token, ahead: Any) -> ReadLine:
        path = first if second is None else second
        spans = {"statement": column(word), "path": column(path), "to": column(to)}
        what = kinds_of(first, spans, ("saved",)) if second is not None else ("states",)
        if len(what) > 1:
            raise TextFault(column(first), "several kinds of values are offloaded", "give each a line of its own")
        where = known_word(to, to.lower(), ("cpu", "disk"), "place to offload to")
        if ahead is not None:
            spans["ahead"] = column(ahead)
        return ReadLine(Offload(path_of(path), cast(Any, what[0]), cast(Any, where), ahead and whole(ahead)), spans)

    def cast(self, word: Token, first: Token, second: Token | None, _to: Token, type: Token) -> ReadLine:
        path = first if second is None else second
        spans = {"statement": column(word), "path": column(path), "type": column(type)}
        kinds = kinds_of(None if second is None else first, spans)
        names = {also: name for name, others in TYPES.items() for also in (name, *others)}
        known = names[known_word(type, type.lower().removeprefix("torch."), names, "type")]
        return ReadLine(Cast(path_of(path), known, cast("tuple[Kind, ...]", kinds)), spans)

    def compress(self, word: Token, first: Token, second: Token | None, by: Token, over: Token | None) -> ReadLine:
        path = first if second is None else second
        spans = {"statement": column(word), "path": column(path), "by": column(by)}
        what = "grads" if second is None else known_word(first, first.lower(), ("grads", "hops"), "kind of move")
        try:
            encoder = str(encoder_of(by))
        except SbpError as error:
            message, _, fix = str(error).partition("\n")
            raise TextFault(column(by), message, fix.strip()) from None
        axis = None if over is None else axis_of(over, spans, "over")
        return ReadLine(Compress(path_of(path), encoder, axis, cast(Any, what)), spans)

    def inside(self, word: Token, path: Token, _use: Token, use: Token, *over: Token) -> ReadLine:
        spans = {"statement": column(word), "path": column(path), "use": column(use)}
        return ReadLine(Inside(path_of(path), str(use), tuple(axis_of(axis, spans, "over") for axis in over)), spans)

    def size(self, value: Token, unit: Token) -> tuple[Token, int]:
        return value, bytes_of(value, unit)

    def limit(self, word: Token, what: Token, size: tuple[Token, int]) -> ReadLine:
        return ReadLine(Limit(size[1]), {"statement": column(word), "what": column(what), "limit": column(size[0])})

    def seek(self, word: Token, *things: Token) -> ReadLine:
        spans = {"statement": column(word)}
        for thing in things:
            name = MICRO_BATCHES if thing.lower().replace("_", "-") == MICRO_BATCHES else str(thing)
            if f"what:{name}" in spans:
                raise TextFault(column(thing), f"{name} stands twice", "leave one out")
            spans[f"what:{name}"] = column(thing)
        return ReadLine(Seek(tuple(name[5:] for name in spans if name.startswith("what:"))), spans)

    def move(self, count: Token, kind: Token) -> tuple[Token, Token]:
        return count, kind

    def moves(self, *moves: tuple[Token, Token]) -> tuple[tuple[Token, Token], ...]:
        return moves

    def expect_moves(self, word: Token, most: Any, moves: Any, over: Any, layer: Any, direction: Any) -> ReadLine:
        spans = {"statement": column(word)}
        found = list[tuple[int, str]]()
        for count, kind in moves:
            plain = kind.lower().replace("-", "_")
            name = known_word(kind, plain if plain in MOVES else plain.removesuffix("s"), MOVES, "move")
            if f"move:{name}" in spans:
                raise TextFault(column(kind), f"{name} stands twice", "leave one out")
            spans[f"move:{name}"] = column(kind)
            found.append((0 if count.type == "NO" else whole(count), name))
        over = over and axis_of(over, spans, "over")
        way = direction and direction.lower()
        return ReadLine(ExpectMoves(tuple(found), over, layer is not None, way, most is not None), spans)

    def expect_gathered(self, word: Token, _at_once: Token, _less: Token, layers: Token, _word: Token) -> ReadLine:
        return ReadLine(ExpectGathered(whole(layers)), {"statement": column(word), "limit": column(layers)})

    def expect_memory(self, word: Token, _memory: Token, _less: Token, size: tuple[Token, int]) -> ReadLine:
        return ReadLine(ExpectAtMost("memory", size[1]), {"statement": column(word), "limit": column(size[0])})

    def expect_time(self, word: Token, _time: Token, _less: Token, value: Token, end: Token) -> ReadLine:
        spans = {"statement": column(word), "limit": column(value)}
        limit = fraction(value)
        if end.type == "FILE":
            spans["of"] = column(end)
            return ReadLine(ExpectAtMost("time", float(limit), str(end).strip()), spans)
        return ReadLine(ExpectAtMost("time", float(limit * (SECONDS.get(end.lower()) or 1))), spans)
