"""Python runs this file first of all: torch asks once, when it is loaded, whether there are cards."""

import ctypes
import os
import sys
from pathlib import Path

if "PLAYED_CARD" in os.environ:
    ctypes.CDLL(os.environ["PLAYED_CARD"], ctypes.RTLD_GLOBAL)
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from tools.played_card import facade

    facade.install()

    if "CARD_LINES" in os.environ:
        from tools import card_lines

        card_lines.record(os.environ["CARD_LINES"])
