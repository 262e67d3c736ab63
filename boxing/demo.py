"""The demo."""

from pathlib import Path

__all__ = ["demo"]


def demo(out: Path) -> None:
    """Print every move between two signatures on a 2 x 2 placement."""
    print(out)
