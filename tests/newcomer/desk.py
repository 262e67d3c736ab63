"""A newcomer's desk: blocks of a page are copied into files, and its commands typed."""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DOCS", "Desk", "Page", "printed"]

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """A page of the docs, such as `plans.md`, whose blocks are copied as they are."""

    name: str

    def blocks(self, kind: str, *, under: str = "") -> list[str]:
        """The blocks of a language in order; those of one section if it is named by its heading, of two or more #."""
        text = (DOCS / self.name).read_text(encoding="utf-8")
        if under:
            level = re.search(rf"^(#+) {re.escape(under)}$", text, re.MULTILINE)
            assert level, f"{self.name} has no section {under!r}"
            text = re.split(rf"^#{{2,{len(level[1])}}} ", text[level.end() :], maxsplit=1, flags=re.MULTILINE)[0]
        return [block for language, block in BLOCK.findall(text) if language == kind]

    def block(self, kind: str, words: str) -> str:
        """The one block in which these words stand."""
        (found,) = (block for block in self.blocks(kind) if words in block)
        return found

    def told(self, words: str) -> str:
        """The one command in the text, between quotes of code, that begins with these words."""
        (found,) = re.findall(rf"`({re.escape(words)}[^`]*)`", (DOCS / self.name).read_text(encoding="utf-8"))
        return str(found)

    def command(self, words: str) -> str:
        """The one command in which these words stand, without what a comment says of it or where it is typed."""
        lines = [line for kind in ("bash", "console") for block in self.blocks(kind) for line in block.splitlines()]
        (found,) = (line for line in lines if words in line)
        return re.sub(r"^\w+\$ ", "", found).partition("#")[0].strip()


def printed(block: str) -> list[str]:
    """The lines that a block says it prints: its comments that begin a line."""
    return [line.removeprefix("#").removeprefix(" ") for line in block.splitlines() if line.startswith("#")]


@dataclass(frozen=True)
class Desk:
    """The environment that was installed, and a folder of the newcomer's own."""

    home: Path
    folder: Path

    def keep(self, name: str, *blocks: str) -> None:
        (self.folder / name).write_text("\n".join(blocks), encoding="utf-8")

    def does(self, command: str, *, code: int = 0) -> str:
        """The output of a command, which must end well."""
        process = self.begins(command)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == code, f"{command}\n{out}"
        return out

    def begins(self, command: str) -> subprocess.Popen[str]:
        """No variable of this test's own process leads back to the tree. pip finds the wheel, and no index."""
        there = {
            "PATH": os.pathsep.join([str(self.home / "venv" / "bin"), os.defpath]),
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.home / "wheels"),
            "PIP_NO_COMPILE": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        line = ["env", *shlex.split(command)]  # which finds the program in the PATH that is given
        pipe = subprocess.PIPE
        return subprocess.Popen(line, cwd=self.folder, env=there, stdout=pipe, stderr=subprocess.STDOUT, text=True)
