"""Side streams: of each device one CUDA stream for each use, made when that is first asked for and kept."""

from threading import Lock
from typing import Any

import torch

__all__ = ["side_stream"]

_known: dict[tuple[torch.device, str], Any] = {}
_making = Lock()


def side_stream(device: torch.device, use: str) -> Any:
    """The stream of a device for one use. CUDA has 32 of a device at once, and gives them out again from the first."""
    with _making:
        stream = _known.get((device, use))
        if stream is None:
            stream = _known[device, use] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream
