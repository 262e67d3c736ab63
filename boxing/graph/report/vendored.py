"""Libraries that a page takes with it: minified files of others, each with its version, licence and hash."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Library", "libraries", "scripts"]

VENDOR = Path(__file__).parent / "vendor"


class Library(NamedTuple):
    """A library by its name on npm; `file` is what the page runs, `text` the file of its licence."""

    name: str
    version: str
    file: str
    licence: str
    text: str
    sha256: str

    @property
    def path(self) -> Path:
        return VENDOR / self.file


@cache
def libraries() -> tuple[Library, ...]:
    """All of them, in the order in which they load."""
    listed = tomllib.loads((VENDOR / "vendored.toml").read_text(encoding="utf-8"))["library"]
    return tuple(Library(**row) for row in listed)


@cache
def scripts() -> str:
    """All of them in one script, each licence once before it."""
    return "\n".join(_scripts())


def _scripts() -> Iterator[str]:
    by_text: dict[str, list[Library]] = {}
    for library in libraries():
        by_text.setdefault(library.text, []).append(library)
    for text, of in by_text.items():
        names = ", ".join(f"{library.name} {library.version}" for library in of)
        yield f"/*! {names}\n{(VENDOR / text).read_text(encoding='utf-8').strip()} */"
    for library in libraries():
        # A map of the source lies beside the file on npm, and nowhere near the page. Control signs, which stand in
        # texts alone, are no XML, so that a page which is some could not be read as such.
        source = re.sub(r"//# sourceMappingURL=.*", "", library.path.read_text(encoding="utf-8"))
        yield re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", lambda sign: f"\\x{ord(sign[0]):02x}", source).strip()
