"""Errors of the user's own code, such as a misspelled name in the file of a model, told by the user's lines."""

import sysconfig
from traceback import TracebackException

from ....placement.errors import OURS, is_ours

__all__ = ["told_of_user"]

PASSES = "__torch_function__"  # through ours a call of the user's goes to torch, which may refuse it
LAST = 4  # lines of the user's that are shown
STDLIB = sysconfig.get_paths()["stdlib"]


def told_of_user(error: Exception, model: str) -> str | None:
    """Python's words on an error of the user's code, and on which lines it arose; None where the code is ours."""
    told = TracebackException.from_exception(error)
    *where, said = told.format_exception_only()
    if isinstance(error, SyntaxError) and error.filename is not None and not is_ours(error.filename):
        return "".join([f"{model} is no Python\n", *where, f"  {said}"]).rstrip()
    frames = [frame for frame in told.stack if _counts(frame.filename) and frame.name != PASSES]
    if not frames or is_ours(frames[-1].filename):
        return None
    lines = [f"  at {frame.filename}:{frame.lineno}: {frame.line}" for frame in frames if not is_ours(frame.filename)]
    return "\n".join([f"{model} raises {said.rstrip()}", *lines[-LAST:]])


def _counts(path: str) -> bool:
    """Whether a frame is of the user's or our code; torch and Python itself act for either."""
    packages = "site-packages" in path or "dist-packages" in path
    if path.startswith("<") or (path.startswith(STDLIB) and not packages):
        return False
    return path.startswith(OURS) or not is_ours(path)
