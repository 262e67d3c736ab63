"""Ranks that share one card, and their answers."""

from typing import Any

from tests.ranks import Ended

__all__ = ["answers", "nccl_hosts"]


def nccl_hosts(rank: int) -> dict[str, str]:
    """NCCL refuses two ranks on one card of one host, and so is told that they are on two."""
    return {"NCCL_HOSTID": f"host{rank}", "LOCAL_RANK": str(rank)}


def answers(ends: list[Ended]) -> list[Any]:
    errors = [end.answer.error if end.answer else end.stderr for end in ends]
    assert all(end.answer and not end.answer.error for end in ends), "\n".join(map(str, errors))
    return [end.answer and end.answer.value for end in ends]
