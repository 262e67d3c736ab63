"""Recorded work: one graph of a card, the arguments that it reads, and the results that it writes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ....placement.device import family, on_stream, side_stream
from ..compiler.generated_calls import Shards

__all__ = ["RecordedWork", "copied"]


class RecordedWork:
    """Work on arguments like these, recorded and not yet run. Memory that it makes is its own until it is dropped."""

    def __init__(
        self, device: torch.device, given: Mapping[str, Shards], work: Callable[[Mapping[str, Shards]], Any]
    ) -> None:
        self.given = {name: tuple(map(torch.empty_like, shards)) for name, shards in given.items()}
        kind = family(device.type)
        self.graph: Any = getattr(kind.module, str(kind.graphs))()
        kind.module.synchronize(device)  # freed memory whose use nobody has waited for is not looked at while recording
        with on_stream(side_stream(device, "record")):  # on which nothing runs: no other stream waits for it
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.made = work(self.given)
            except BaseException:
                with suppress(RuntimeError):  # which says that something was wrong before
                    self.graph.capture_end()
                raise
            self.graph.capture_end()

    def takes(self, given: Mapping[str, Shards]) -> bool:
        """Whether arguments are such as were recorded."""
        return all(
            (x.shape, x.dtype) == (mine.shape, mine.dtype)
            for name, shards in given.items()
            for x, mine in zip(shards, self.given[name], strict=True)
        )

    def run(self, given: Mapping[str, Shards]) -> None:
        """The work on these arguments, behind what the current stream has got."""
        for name, shards in given.items():
            for mine, new in zip(self.given[name], shards, strict=True):
                mine.copy_(new, non_blocking=True)
        self.graph.replay()


def copied(shards: Sequence[Tensor]) -> Shards:
    """Shards that the next replay does not write to."""
    return tuple([x.clone() for x in shards])
