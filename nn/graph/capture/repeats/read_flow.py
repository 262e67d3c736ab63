"""Read flow: which argument of a call a value becomes that code reads, when it does nothing else with it.

    cache.update(keys, values, self.layer_idx)      the attribute layer_idx is the argument 2, and goes nowhere else

Said by the instructions between the read and the call: all of them put more onto the stack on top of the value.
"""

import dis
from bisect import bisect
from functools import lru_cache
from types import CodeType
from typing import Any

__all__ = ["argument_of"]

# How many values an instruction puts onto the stack; it takes none.
_PUSHES = {
    "LOAD_FAST": 1, "LOAD_FAST_CHECK": 1, "LOAD_FAST_BORROW": 1, "LOAD_DEREF": 1, "LOAD_CONST": 1, "LOAD_SMALL_INT": 1,
    "LOAD_FAST_LOAD_FAST": 2, "LOAD_FAST_BORROW_LOAD_FAST_BORROW": 2,
    "NOP": 0, "PRECALL": 0, "KW_NAMES": 0, "EXTENDED_ARG": 0, "CACHE": 0,
}  # fmt: skip


@lru_cache(1024)
def argument_of(code: CodeType, read: int, call: int) -> int | str | None:
    """The argument, by position or name, that the value of the instruction at `read` is of the one at `call`. None
    where it may be anything else too.

    >>> def f(cache, x): cache.update(x, cache.place, last=x)
    >>> at = {step.opname: step.offset for step in dis.get_instructions(f) if step.argval == "place"}
    >>> calls = [step.offset for step in dis.get_instructions(f) if step.opname in ("CALL", "CALL_KW")]
    >>> argument_of(f.__code__, *at.values(), *calls)
    1
    """
    above, met = 0, False
    names: tuple[str, ...] = ()
    last: Any = None  # the constant on top
    steps = list(dis.get_instructions(code))
    offsets = [step.offset for step in steps]  # a frame may stand behind an instruction, in the cache of it
    read, call = (offsets[bisect(offsets, at) - 1] for at in (read, call))
    for step in steps:
        if step.offset == read:
            if step.opname != "LOAD_ATTR" or ((step.arg or 0) & 1 and _is_method(step)):
                return None
            met = True
        elif met and step.offset == call:
            return _place(step, above, last if step.opname == "CALL_KW" else names)
        elif met and step.opname == "LOAD_ATTR" and above and not _is_method(step):
            continue  # of the value on top
        elif met and step.opname in _PUSHES:
            above += _PUSHES[step.opname]
            if step.opname == "KW_NAMES":
                names = code.co_consts[step.arg or 0]
            elif step.opname == "LOAD_CONST":
                last = step.argval
        elif met:
            return None
    return None


def _is_method(step: dis.Instruction) -> bool:
    """Whether a read of an attribute is one for a call, which is told by its number since Python 3.12."""
    return "NULL" in step.argrepr


def _place(step: dis.Instruction, above: int, names: tuple[str, ...]) -> int | str | None:
    count = step.arg or 0
    if step.opname == "CALL_KW":  # the names lie on top
        above -= 1
    elif step.opname != "CALL":
        return None
    at = count - 1 - above
    if at < 0:
        return None
    plain = count - len(names)
    return at if at < plain else names[at - plain]
