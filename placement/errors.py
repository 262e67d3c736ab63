"""Every error a user can meet: one root, and under it the builtin type that Python would have raised.

A message says what was asked, and on which line of the user's, then what was found, then a fix. It is raised before
anything is sent.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from types import FrameType

import torch

__all__ = [
    "ASKED",
    "ArgumentError",
    "DtypeError",
    "FileError",
    "MissingError",
    "PlacementError",
    "SbpError",
    "SbpflowError",
    "ScheduleError",
    "ShapeError",
    "TransportError",
    "caret",
    "did_you_mean",
    "is_ours",
    "nearest",
    "some_of",
    "user_line",
]


LONG = 2000  # letters of a line, of which more is left out: what was asked may be as long as a file
AROUND = 200  # letters of a line on each side of a caret
ROOMS = str(Path(__file__).resolve().parent.parent)
OURS = tuple(f"{ROOMS}/{room}/" for room in ("sbpflow", "placement", "sbp", "boxing", "actors", "nn"))
PRIVATE = (
    *OURS,
    f"{Path(torch.__file__).resolve().parent}/",  # autograd calls back from there
    contextlib.__file__,
    functools.__file__,  # what is worked out when it is first asked for
    threading.__file__,
)
COMMAND = str(Path("sbpflow", "__main__.py"))
ASKED: list[str] = []  # from where threads were set to work; the model of a command


class SbpflowError(Exception):
    """The root: `except SbpflowError` catches whatever this package raises on purpose.

    >>> issubclass(ShapeError, SbpflowError) and issubclass(ShapeError, ValueError)
    True
    >>> len(str(ShapeError("x" * 10**6))) < 2100
    True
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(shortened(arg) if isinstance(arg, str) and len(arg) > LONG else arg for arg in args))


def shortened(text: str) -> str:
    """The text with the middle of long lines left out."""
    half = LONG // 2
    return "\n".join(
        line if len(line) <= LONG else f"{line[:half]} ... {len(line) - LONG} letters left out ... {line[-half:]}"
        for line in text.split("\n")
    )


class PlacementError(SbpflowError, ValueError):
    """A placement, cluster or process group that cannot be: where tensors live."""


class SbpError(SbpflowError, ValueError):
    """A signature, layout or rule that does not fit: how a tensor lies."""


class ShortageError(SbpError):
    """A limit of memory within which no plan was found."""


class ShapeError(SbpflowError, ValueError):
    """A shape, size or dim that does not fit the tensor or its ranks."""


class DtypeError(SbpflowError, TypeError):
    """A dtype that the operator or the transport cannot carry."""


class ArgumentError(SbpflowError, TypeError):
    """Arguments that a function of the user's does not take."""


class ScheduleError(SbpflowError, ValueError):
    """A schedule or network of actors that cannot run: what runs when."""


class TransportError(SbpflowError, RuntimeError):
    """A peer failed, answered too late, or asked for something else."""


class FileError(SbpflowError, OSError):
    """A file that is not there, cannot be read, or holds the weights of another model."""


class MissingError(SbpflowError, ImportError):
    """An optional dependency is not installed; the message names the command that installs it."""


def caret(text: str, pos: int, message: str) -> str:
    """The message, and under it the line of `text` that holds position `pos`, with a caret below.

    A position at or past the end points just behind the last character. Text of several lines shows the
    number of the line.

    >>> print(caret("cpu:[0-3", 8, "a ']' is missing"))
    a ']' is missing
      cpu:[0-3
              ^
    """
    pos = max(0, min(pos, len(text)))
    start = text.rfind("\n", 0, pos) + 1
    end = text.find("\n", pos)
    line = text[start : end if end >= 0 else len(text)].rstrip("\r")
    gutter = f"  {text.count(chr(10), 0, pos) + 1} | " if "\n" in text.rstrip("\n") else "  "
    # A tab stays a tab, so that the caret stands under its character whatever the terminal's tab width.
    if len(line) > LONG:
        cut = max(0, pos - start - AROUND)
        line = "... " * bool(cut) + line[cut : pos - start + AROUND] + " ..." * (pos - start + AROUND < len(line))
        start += cut - 4 * bool(cut)
    indent = "".join("\t" if c == "\t" else " " for c in line[: pos - start])
    return f"{message}\n{gutter}{line}\n{' ' * len(gutter)}{indent}^"


def some_of(names: list[str], most: int = 4) -> str:
    """The first names of many, for an error.

    >>> some_of(["a", "b"]), some_of(["a", "b", "c", "d", "e", "f"])
    ('a, b', 'a, b, c, d and 2 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The word that is spelled most like one, in large letters or small, and the next if it is as near; or none.

    >>> nearest("BF61", ["fp8", "bf16"]), nearest("x", ["fp8", "bf16"])
    (['bf16'], [])
    """
    word, spelled = word.casefold(), {each.casefold(): each for each in known}
    found = {near: SequenceMatcher(None, near, word).ratio() for near in get_close_matches(word, spelled, 2, 0.65)}
    return [spelled[near] for near, like in found.items() if like > max(found.values()) - 0.1]


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of an error about a word that is not known: the nearest of those that are, or else what is said
    otherwise, or else all of these.

    >>> print(did_you_mean("chek", ["check", "plan"]))
    did you mean 'check'?
    >>> print(did_you_mean("x", ["check", "plan"]), did_you_mean("x", ["check", "plan"], "write one of them"), sep="; ")
    there are check, plan; write one of them
    """
    words = list(known)
    near = nearest(word, words)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"there are {some_of(words, 30) or 'none'}" if otherwise is None else otherwise


def user_line(frame: FrameType | None = None) -> str:
    """The innermost line outside this package and torch, as file:line; of the caller, or of a frame of any thread.

    >>> user_line().rpartition(":")[2].isdigit()
    True
    """
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and is_ours(frame.f_code.co_filename) and not _of_command(frame):
        frame = frame.f_back
    if ASKED and (is_ours(frame.f_code.co_filename) or _of_command(frame)):
        return ASKED[-1]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _of_command(frame: FrameType) -> bool:
    """Whether it is the command line's, beyond which lie the interpreter's own lines and none of a user."""
    return frame.f_code.co_filename.endswith(COMMAND)


_known: dict[str, bool] = {}


def is_ours(path: str) -> bool:
    """Whether a file is of this package, torch, or what these call back from."""
    known = _known.get(path)
    if known is None:
        whole = str(Path(path).resolve()) if not path.startswith("<") else path
        known = _known[path] = whole.startswith(PRIVATE)
    return known
