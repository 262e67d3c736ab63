"""Ctrl-C while `python -m sbpflow` still imports: it ends as it does later, without a traceback.

Python imports a package before its `__main__`, so that this is the first module which the package imports.
"""

import os
import signal
import sys
from typing import NoReturn

__all__ = ["STOPPED", "raised"]

STOPPED = 130  # as of a program that Ctrl-C has ended


def _stop(*_: object) -> NoReturn:
    """Nothing has begun that would have to be ended; an exception might be caught by whichever module is imported."""
    os.write(2, b"stopped\n")
    os._exit(STOPPED)


def raised() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_told = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]  # to Python, up to the module that it runs
_command = sys.argv[:1] == ["-m"] and _told[-1].removeprefix("-m") == "sbpflow"
if _command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
    signal.signal(signal.SIGINT, _stop)
