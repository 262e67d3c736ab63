"""The statements `expect`: what a plan that came out is held to; nn/plan/expect.py does it."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Self

from .....boxing.picture.palette import FAMILIES
from ..statement import LineForm, Statement
from ..terms import Columns, Token, axis_of, bytes_text, column, fraction, known_word, once, whole

__all__ = ["ExpectAtMost", "ExpectGathered", "ExpectMoves"]

MOVES = tuple(kind for family in FAMILIES.values() for kind in family.kinds if kind != "view")
SECONDS = {"ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}  # others are seconds


@dataclass(frozen=True)
class ExpectMoves(Statement):
    """An expected count of moves of each kind, exact or at most.

    It is over an axis or all, in a layer or the whole step, in one direction or both."""

    moves: tuple[tuple[int, str], ...]
    over: str | None = None
    a_layer: bool = False
    direction: Literal["forward", "backward", "update"] | None = None
    at_most: bool = False

    form = LineForm(
        heads=("expect",),
        grammar=r"""
expect_moves: _EXPECT [AT_MOST] moves ["over"i NAME] [A_LAYER] [DIRECTION]
moves: move ("and"i move)*
move: (INT | NO) WORD
NO.2: /no(?!\S)/i
AT_MOST.2: /at\s+most(?!\S)/i
A_LAYER.2: /(a|an|per|each)\s+layer(?!\S)/i
DIRECTION: /forward|backward|update/i
""",
        words={
            "AT_MOST": "'at most'",
            "A_LAYER": "'a layer'",
            "DIRECTION": "'forward', 'backward', 'update'",
            "WORD": "a move such as all_gather",
        },
        examples={
            "expect 2 all_gather over tensor a layer forward": (((2, "all_gather"),), "tensor", True, "forward"),
            "expect 2 all_gather and 2 reduce_scatter over tensor": (
                ((2, "all_gather"), (2, "reduce_scatter")),
                "tensor",
            ),
            "expect no all_gather over data": (((0, "all_gather"),), "data"),
            "expect at most 4 all_reduce": (((4, "all_reduce"),), None, False, None, True),
            "expect 1 all_to_all backward": (((1, "all_to_all"),), None, False, "backward"),
        },
        says="moves: so many, `no` or `at most`, of a kind or several (`and`); over an axis or all; in a layer or the "
        "step; `forward`, `backward` or `update`",
        subject=("over", "a_layer", "direction"),
    )

    @classmethod
    def read(cls, at: Columns, most: Any, moves: Any, over: Any, layer: Any, direction: Any) -> Self:
        found = list[tuple[int, str]]()
        for count, kind in moves:
            plain = kind.lower().replace("-", "_")
            name = known_word(kind, plain if plain in MOVES else plain.removesuffix("s"), MOVES, "move")
            once(at, f"move:{name}", kind, name)
            found.append((0 if count.type == "NO" else whole(count), name))
        over = over and axis_of(over, at, "over")
        return cls(tuple(found), over, layer is not None, direction and direction.lower(), most is not None)

    def __str__(self) -> str:
        listed = " and ".join(f"{n or 'no'} {kind}" for n, kind in self.moves)
        return (
            f"expect {'at most ' if self.at_most else ''}{listed}"
            + (f" over {self.over}" if self.over else "")
            + (" a layer" if self.a_layer else "")
            + (f" {self.direction}" if self.direction else "")
        )


@dataclass(frozen=True)
class ExpectGathered(Statement):
    """At most the gathered weights of so many layers are there at once."""

    layers: int

    form = LineForm(
        heads=("expect gathered",),
        grammar=r"""
expect_gathered: _EXPECT _GATHERED _LESS INT _LAYERS
_GATHERED.2: /gathered(\s+at\s+once)?(?=[\s<≤])/i
_LAYERS: /layers?/i
""",
        words={"GATHERED": "'gathered at once'"},
        examples={"expect gathered at once <= 2 layers": (2,)},
        says="how many layers' weights are whole at once",
        subject=(),
    )

    @classmethod
    def read(cls, at: Columns, layers: Token) -> Self:
        at["limit"] = column(layers)
        return cls(whole(layers))

    def __str__(self) -> str:
        return f"expect gathered at once <= {self.layers} layers"


@dataclass(frozen=True)
class ExpectAtMost(Statement):
    """Memory of the fullest rank, in bytes, or time of a step: in seconds, or as a multiple of another plan's."""

    what: Literal["memory", "time"]
    limit: float
    of: str | None = None  # the file of the other plan

    form = LineForm(
        heads=("expect memory", "expect time"),
        grammar=r"""
expect_at_most: _EXPECT MEMORY _LESS size
              | _EXPECT TIME _LESS NUMBER ("of"i FILE | SECONDS)
TIME.2: /time(?=[\s<≤]|$)/i
SECONDS: /s(econds?)?|ms|us/i
FILE: /\S.*/
""",
        words={"FILE": "the file of a plan", "SECONDS": "'s'"},
        examples={
            "expect memory <= 40 GiB": ("memory", 40 * 2**30),
            "expect time <= 0.2 s": ("time", 0.2),
            "expect time <= 0.123456789 s": ("time", 0.123456789),
            "expect time <= 1.1 of other.plan": ("time", 1.1, "other.plan"),
        },
        says="bytes of the fullest rank; time of a step, in `s` or as a multiple of another plan's, `1.1 of a.plan`",
        subject=("what",),
    )

    @classmethod
    def read(cls, at: Columns, what: Token, value: Any, end: Token | None = None) -> Self:
        if end is None:
            at["limit"] = column(value[0])
            return cls("memory", value[1])
        at["limit"] = column(value)
        limit = fraction(value)
        if end.type == "FILE":
            at["of"] = column(end)
            return cls("time", float(limit), str(end).strip())
        return cls("time", float(limit * (SECONDS.get(end.lower()) or 1)))

    def __str__(self) -> str:
        if self.what == "memory":
            return f"expect memory <= {bytes_text(int(self.limit))}"
        return f"expect time <= {repr(self.limit).removesuffix('.0')}" + (f" of {self.of}" if self.of else " s")
