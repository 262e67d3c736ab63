"""The setting of a published step: which model, how it was trained, and on which hardware."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Architecture", "Published", "Run"]


@dataclass(frozen=True)
class Architecture:
    """A transformer. `ffn` and `keys` are those of Llama; a GPT has 4 times its width, and as many heads of keys.

    With experts, a token goes through those `chosen` and the `shared` ones, each of width `expert_ffn`; the first
    `dense` layers have none. `latent` are the ranks of DeepSeek's queries, and of its keys and values."""

    family: Literal["gpt", "llama", "even", "titan", "mixtral", "deepseek"]
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    ffn: int = 0
    keys: int = 0
    fused: bool = True  # attention in one kernel; the tables of 2021 and 2022 have none
    experts: int = 0
    chosen: int = 0
    expert_ffn: int = 0
    shared: int = 0
    dense: int = 0
    latent: tuple[int, int] = (0, 0)

    @property
    def flops(self) -> float:
        """FLOPs of a forward of one sequence: products of weights and all of attention, the causal half not counted."""
        h, s = self.hidden, self.length
        if self.experts:
            raise NotImplementedError("no table has experts, so that no baseline of work is asked of them")
        inner, keys = (3 * self.ffn, self.keys) if self.family in ("llama", "even", "titan") else (8 * h, self.heads)
        weights = h * (2 * h + 2 * h * keys // self.heads + inner)
        scores = 2 * h * s * (0.5 if self.fused else 1.0)  # fused attention skips what it does not see
        return 2.0 * s * (self.layers * (weights + scores) + h * self.vocabulary)


@dataclass(frozen=True)
class Run:
    """How it was trained: degrees, schedule with virtual stages, micro-batches, and what the backward runs again."""

    hardware: str
    data: int = 1
    tensor: int = 1
    pipe: int = 1
    context: int = 1
    expert: int = 1  # of the ranks of `data`
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batches: int = 1
    samples: int = 1  # of a micro-batch, on a rank of `data`
    again: Literal["", "full", "core", "products"] = ""  # `products`: all but products, as in selective checkpoints
    sequence: bool = False  # whether the results of norms are cut along tensor, too
    zero: int = 0
    dtype: str = "bf16"
    gradients: str = "fp32"
    compiled: bool = False  # else a trainer runs kernels one by one
    hides: Literal["", "between nodes", "all"] = ""  # moves that its trainer has beside the computing

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipe * self.context

    @property
    def batch(self) -> int:
        return self.data * self.samples * self.micro_batches


@dataclass(frozen=True)
class Published:
    """One row of a table: the seconds of its step, and bytes of the fullest rank where it says so.

    Where it does not say how it was run, `others` are the runs that may have been meant: the quickest that fits."""

    name: str
    architecture: Architecture
    run: Run
    seconds: float
    memory: float | None = None
    means: Literal["memory", "taken", "used"] = "memory"  # those alive, with gaps, or with all that a driver counts
    assumed: str = ""  # what the table does not say
    others: tuple[Run, ...] = ()
    table: str = ""
    later: bool = False  # read when all constants stood
