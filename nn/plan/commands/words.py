"""Words of a command line: a parser that says, for one that it does not know, the nearest that it does."""

import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ....placement.errors import did_you_mean

__all__ = ["CommandParser", "count", "one_of"]


def count(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: give a number of 1 or more")
    return int(text)


def one_of(*words: str) -> Callable[[str], str]:
    """The type of an option that takes one of these words."""

    def taken(word: str) -> str:
        if word not in words:
            raise ArgumentTypeError(f"{word!r} is none of them\n  {did_you_mean(word, words)}")
        return word

    return taken


class CommandParser(ArgumentParser):
    """A parser of commands or of one of them; its errors end with what to write."""

    def __init__(self, *given: Any, example: str = "", **options: Any) -> None:
        self.example = example
        self.flags: list[str] = []
        self.commands: Action | None = None
        super().__init__(*given, **options)

    def add_argument(self, *names: Any, **options: Any) -> Action:
        self.flags += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def add_commands(self) -> Any:
        """The place for subcommands, each with a parser like this one."""
        self.commands = self.add_subparsers(dest="command", required=True)
        return self.commands

    def read(self, given: Sequence[str] | None = None) -> Namespace:
        """The namespace of a command line, as `parse_args` has it; of what is unknown the error names the nearest."""
        words = list(sys.argv[1:] if given is None else given)
        known: dict[str, Any] = dict(self.commands.choices or {}) if self.commands else {}
        first = next((word for word in words if not word.startswith("-")), None)
        if known and first is not None and first not in known:
            self.error(f"no command is called {first!r}\n  {did_you_mean(first, known)}")
        found, more = self.parse_known_args(words)
        if more:
            known.get(getattr(found, "command", ""), self).refuse(more[0])
        return found

    def refuse(self, word: str) -> NoReturn:
        """End with an error on a word that is too many, or not known."""
        name = word.partition("=")[0]
        if name.startswith("-"):
            self.error(f"no option is called {name}\n  {did_you_mean(name, self.flags)}")
        self.error(f"{word!r} is one word too many")

    def error(self, message: str) -> NoReturn:
        example = f"\n  as in {self.prog} {self.example}" if self.example and "\n" not in message else ""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}{example}\n")
