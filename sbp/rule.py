"""Rules as text, one op a line: dims that share a *factor* are split everywhere at once, or not at all.

    mm           m k+, k+ n -> m n             ; lin(0|1) hollow
    linear       ... k+, n k+, & n -> ... n    ; lin(0,2|1,2) hollow
    amax         *[dim]:max -> *[dim]:max
    div.Tensor   *, * -> *                     ; lin(0)

    k  k+  k:max  k!   a factor; reduced, so that the output is P of that kind (+ :max :min :avg); never split
    ...  *             a factor for each dim that is not named, aligned from the right, broadcasting
    *[dim]+            the dims that the argument `dim` names are marked (all, where it is None or empty)
    1  ()  _           a dim of size one; a tensor without dims; a tensor that is never split, or absent
    {p}  & p           p for each tensor of a list; p is added to the result and may have fewer dims
    lin(0,1|2)         linear in 0 and 1 together, and in 2 alone: where those are P and the rest B, the result is P
    hollow             ranks may be left without any element
    where dim is None  the rule, or the `lin` right before it, holds only then (is not None, == 1, != "mean", and)
    or                 another rule follows, for calls that the one before has nothing to say of

Dims that are reduced or never split may be gone from an output, or be of size 1 there, as `keepdim` has it.
"""

from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch

from ..placement.errors import SbpError, caret
from .call import Call, Match, Way, tensors_in
from .pattern import MARKS, WORD, Operand, PatternReader, Unread, lay
from .schema import Operands, operands, suggest

__all__ = ["RULES", "BookLine", "Rule", "RuleAnswer", "TextRule", "define", "load", "parse", "register"]

RuleAnswer: TypeAlias = Match | Sequence[Way] | None
Rule: TypeAlias = Callable[[Call], RuleAnswer]
R = TypeVar("R", bound=Rule)

RULES: dict[str, Rule] = {}  # by the names of their ops, as far as they are read: `registry.known` has all


def register(*names: str) -> Callable[[R], R]:
    """A decorator: this function is the rule of these ops; the names are those of `Call.name`."""

    def put(rule: R) -> R:
        for name in names:
            if name in RULES:
                raise ValueError(f"{name} has a rule already")
            RULES[name] = rule
        return rule

    return put


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on an argument, as in `where dim is None`."""

    attr: str
    holds: Callable[[Any], bool]
    at: int


@dataclass(frozen=True, slots=True)
class Linear:
    """Groups of operands in which an op is linear, under conditions."""

    groups: tuple[tuple[int, ...], ...]
    tests: tuple[Condition, ...]
    at: int


@dataclass(frozen=True, slots=True)
class TextRule:
    """A rule that was read; called with a call, it says how that may be split."""

    name: str
    text: str
    source: str  # where it was written
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    linear: tuple[Linear, ...]
    hollow: bool
    tests: tuple[Condition, ...]

    def __call__(self, call: Call) -> Match | None:
        bound = call.bound
        shape = operands(call.op)
        assert shape is not None
        if len(shape.inputs) != len(self.inputs) or len(shape.outputs) != len(self.outputs):
            self.check(shape)  # an op that was unknown when its rule was read
        if not all(test.holds(bound[test.attr]) for test in self.tests):
            return None
        patterns: list[Operand] = []
        places: list[list[int]] = []  # of each operand's tensors among `call.inputs`
        for pattern, name in zip(self.inputs, shape.inputs, strict=True):
            here = tensors_in(bound[name])
            places.append(list(range(len(patterns), len(patterns) + len(here))))
            patterns += [pattern] * len(here)
        results = self.outputs * len(call.outputs) if self.outputs[0].kind == "many" else self.outputs
        if len(results) != len(call.outputs):
            return None
        match = lay(
            [(pattern, tensor.shape) for pattern, tensor in zip(patterns, call.inputs, strict=True)],
            [(pattern, tensor.shape) for pattern, tensor in zip(results, call.outputs, strict=True)],
            bound,
        )
        if match is None:
            return None
        linear = tuple(self._linear(bound, [bound[name] for name in shape.inputs], places))
        addends = frozenset(i for i, pattern in enumerate(patterns) if pattern.kind == "addend")
        return replace(match, linear=linear, addends=addends, hollow=self.hollow)

    def _linear(
        self, bound: Mapping[str, Any], values: list[Any], places: list[list[int]]
    ) -> Iterator[tuple[int, ...]]:
        for linear in self.linear:
            if not all(test.holds(bound[test.attr]) for test in linear.tests):
                continue
            for group in linear.groups:
                # x + 2 is not linear in x, but x + 0 is (as `sum` begins); of floats what is chosen must hold for all.
                said = [values[i] for i in group]
                if any(isinstance(v, float | complex) or (isinstance(v, int) and v) for v in said):
                    continue
                found = tuple(place for i in group for place in places[i])
                booleans = any(tensor.dtype == torch.bool for i in group for tensor in tensors_in(values[i]))
                if found and not booleans:  # which do not add up
                    yield found

    def check(self, shape: Operands) -> None:
        """Hold the rule against its op: as many operands, lists where lists are, arguments that exist."""
        for side, said, has in (("tensors", self.inputs, shape.inputs), ("results", self.outputs, shape.outputs)):
            if len(said) != len(has):
                at = said[len(has)].at if len(said) > len(has) else said[-1].at
                listed = f": {', '.join(has)}" if side == "tensors" else ""
                self.wrong(
                    at,
                    f"{len(said)} {side}, but {self.name} has {len(has)}{listed}",
                    f"write {len(has)} patterns on this side; `_` stands for one that is never split or absent",
                )
            for pattern, (name, many) in zip(said, has.items(), strict=True):
                if pattern.kind != "any" and many != (pattern.kind == "many"):
                    fix = "write {p} for a list of tensors, p for one"
                    self.wrong(pattern.at, f"{name} is {'a list of tensors' if many else 'one tensor'}", fix)
        patterns = (*self.inputs, *self.outputs)
        tests = (*self.tests, *(test for linear in self.linear for test in linear.tests))
        used = [(dim.attr, dim.at) for pattern in patterns for dim in pattern.dims if dim.attr]
        for attr, at in (*used, *((test.attr, test.at) for test in tests)):
            if attr not in shape.arguments:
                self.wrong(at, f"{self.name} has no argument {attr!r}", f"it has {', '.join(shape.arguments)}")

    def wrong(self, at: int, what: str, fix: str) -> NoReturn:
        """Raise, pointing at a place in the rule's text."""
        raise wrong(self.name, self.text, self.source, at, what, fix)


def wrong(name: str, text: str, source: str, at: int, what: str, fix: str) -> SbpError:
    """The error that points at a place in a rule's text."""
    line = f"{name}  {text}".replace("\n", " ")
    return SbpError(caret(line, len(name) + 2 + at, f"{source}: {what}") + f"\n  {fix}")


@dataclass(frozen=True, slots=True)
class Either:
    """The first of several rules that has something to say."""

    rules: tuple[TextRule, ...]

    def __call__(self, call: Call) -> Match | None:
        return next((match for rule in self.rules if (match := rule(call)) is not None), None)


def parse(name: str, text: str, source: str = "rule") -> TextRule | Either:
    """Read the rule of one op; `source` says where it stands, for errors.

    >>> rule = parse("mm", "m k+, k+ n -> m n ; lin(0|1) hollow")
    >>> len(rule.inputs), rule.hollow
    (2, True)
    """
    rules = tuple(replace(rule, name=name, text=text, source=source) for rule in _read(text, name, source))
    for rule in rules:
        _check(rule)
    return Either(rules) if len(rules) > 1 else rules[0]


def _check(rule: TextRule) -> None:
    _check_factors(rule)
    for linear in rule.linear:
        if any(i >= len(rule.inputs) for group in linear.groups for i in group):
            fix = f"they are counted from 0 to {len(rule.inputs) - 1}"
            rule.wrong(linear.at, f"lin names an operand that the rule has not: it has {len(rule.inputs)}", fix)
    try:
        shape = operands(rule.name)
    except LookupError as unknown:
        rule.wrong(-len(rule.name) - 2, f"there is no op {rule.name}", suggest(str(unknown)))
    if shape is not None:
        rule.check(shape)


@dataclass(frozen=True)
class BookLine:
    """The rule of an op as a line has it, which is read when it is first called: a process calls few of the book's."""

    name: str
    text: str
    source: str

    @cached_property
    def rule(self) -> TextRule | Either:
        return parse(self.name, self.text, self.source)

    def __call__(self, call: Call) -> Match | None:
        return self.rule(call)


def define(name: str, text: str, source: str = "rule") -> TextRule | Either:
    """Read the rule of an op and put it into the book. The rule of an op that torch does not know is checked when the
    op is called."""
    line = BookLine(name, text, source)
    rule = line.rule
    _put(line)
    return rule


def _put(line: BookLine) -> None:
    if line.name in RULES:
        said = f"{line.name} has a rule already"
        raise wrong(line.name, line.text, line.source, -len(line.name) - 2, said, "keep one of the two")
    RULES[line.name] = line


def load(text: str, source: str) -> None:
    """Put every line of a text into the book: names of ops, parted by `|`, and their rule. `#` begins a comment.

    A line goes on behind a `|` at its end, and where the next begins with `or`. A name that ends in `?` is of an op
    that some versions of torch lack; there it has no rule.
    """
    for number, line in _lines(text):
        names, _, body = line.partition(" ")
        for name in names.split("|"):
            if not name.endswith("?") or _exists(name[:-1]):
                _put(BookLine(name.removesuffix("?"), body.strip(), f"{source}:{number}"))


def _exists(name: str) -> bool:
    try:
        return operands(name) is not None
    except LookupError:
        return False


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Every rule, joined from the lines it takes, with the number of the first."""
    begin, whole = 0, ""
    for number, full in enumerate(text.splitlines(), 1):
        line = full.partition("#")[0].strip()
        if whole.endswith("|"):
            whole += line
        elif line.startswith("or "):
            whole += " " + line
        elif line:
            if whole:
                yield begin, whole
            begin, whole = number, line
    if whole:
        yield begin, whole


def _check_factors(rule: TextRule) -> None:
    """An error for a rule that is wrong whatever its op: a factor lost or invented, two marks, an unknown mark."""
    inputs = [dim for pattern in rule.inputs for dim in pattern.dims if dim.name != "1"]
    outputs = [dim for pattern in rule.outputs for dim in pattern.dims if dim.name != "1"]
    marks: dict[str, str] = {}
    for dim in (*inputs, *outputs):
        if dim.mark not in ("", *MARKS.values()):
            rule.wrong(dim.at + len(dim.name), f"unknown mark {dim.mark!r}", f"the marks are {' '.join(MARKS)}")
        if dim.attr and not dim.mark:
            rule.wrong(dim.at, f"[{dim.attr}] marks nothing", f"add one of {' '.join(MARKS)} behind it")
        if dim.mark and marks.setdefault(dim.name, dim.mark) != dim.mark:
            rule.wrong(dim.at, f"{dim.name} has two marks", "give it one")
    whole = {dim.name for dim in (*inputs, *outputs) if dim.mark and not dim.attr}
    for dim in inputs:
        if dim.name not in {out.name for out in outputs} | whole:
            fix = f"write {dim.name}+ if the op sums over it (or :max :min :avg), {dim.name}! if it must not be split"
            rule.wrong(dim.at, f"{dim.name} is in no output", fix)
    for dim in outputs:
        if dim.name not in [other.name for other in inputs] and marks.get(dim.name) != "never":
            rule.wrong(dim.at, f"{dim.name} is in no input", f"write {dim.name}! for a dim that is never split")
        if dim.name != "*" and marks.get(dim.name, "never") != "never":
            rule.wrong(dim.at, f"{dim.name} is reduced, so it is in no output", "leave it out, or write 1 if it stays")


def _read(text: str, name: str, source: str) -> tuple[TextRule, ...]:
    try:
        return _RuleReader(text).rules()
    except Unread as error:
        fix = "rules look like  m k+, k+ n -> m n ; lin(0|1) hollow"
        raise wrong(name, text, source, error.at, "cannot read the rule", fix) from None


class _RuleReader(PatternReader):
    """Reads what stands behind an op's name.

    By hand, not by lark as other texts, because every process reads some before its first step, and lark took 0.3 s to
    load and to prepare the grammar.
    """

    def rules(self) -> tuple[TextRule, ...]:
        found = self.each(self.rule, r"or\b")
        if self.at < len(self.text):
            raise Unread(self.at)
        return found

    def rule(self) -> TextRule:
        inputs = self.each(self.operand, ",")
        self.need("->")
        outputs = self.each(self.operand, ",")
        linear, tests, hollow = list[Linear](), list[Condition](), False
        note = self.need(_NOTES) if self.found(";") else None
        while note:
            if note == "lin":
                linear.append(self.linear())
            elif note == "where":
                tests += self.each(self.test, _AND)
            hollow = hollow or note == "hollow"
            note = self.found(_NOTES)
        return TextRule("", "", "", inputs, outputs, tuple(linear), hollow, tuple(tests))

    def linear(self) -> Linear:
        self.need(r"\(")
        at = self.at
        groups = self.each(lambda: self.each(lambda: int(self.need(r"\d+")), ","), r"\|")
        self.need(r"\)")
        return Linear(groups, self.each(self.test, _AND) if self.found(r"where\b") else (), at)

    def test(self) -> Condition:
        at, attr = self.at, self.need(WORD)
        if self.found(r"is\b"):
            absent = not self.found(r"not\b")
            self.need(r"None\b")
            return Condition(attr, lambda value: (value is None) == absent, at)
        equal = self.need("==|!=") == "=="
        wanted = _literal(self.need(r"-?(?:\d+(?:\.\d+)?|inf)|True|False|'[^']*'|\"[^\"]*\""))
        return Condition(attr, lambda value: bool(value == wanted) == equal, at)


_NOTES, _AND = r"(?:lin|hollow|where)\b", r"and\b"


def _literal(text: str) -> object:
    return float(text) if text.endswith("inf") else literal_eval(text)
