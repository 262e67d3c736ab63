"""Eight plans of a small GPT and a small Llama, steps of them, and their values whole, whatever they lie in."""

from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B
from tests.nn.graph import pipes

HOMES = {
    "gpt": ("{words,places,order}", "{norm,head}", "blocks"),
    "llama": ("model.{embed_tokens,rotary_emb}", "{model.norm,lm_head}", "model.layers"),
}
ROWS = {"gpt": "**.{qkv,up}", "llama": "**.{q_proj,k_proj,v_proj,gate_proj,up_proj}"}
COLUMNS = {"gpt": "**.{out,down}.weight", "llama": "**.{o_proj,down_proj}.weight"}
NAMES = ["one", "data", "zero1", "zero3", "tensor", "stages", "stages x tensor", "three"]
WORLD = {"one": 1, "stages": 2, "three": 3}  # ranks, else 4


def plan(name: str, kind: str) -> str:
    """The text of a plan."""
    layers = HOMES[kind][2]
    pipe = f"pipe {layers} over pipe by 1f1b, 2 micro-batches"
    cut = f"{ROWS[kind]}: tensor=S(0)\n{COLUMNS[kind]}: tensor=S(1)"
    return {
        "one": "grid cpu (data=1)",
        "data": "grid cpu (data=4)\n**: data=B",
        "zero1": "grid cpu (data=4)\nstates **: data=S(0)",
        "zero3": "grid cpu (data=4)\n**: data=S(0)",
        "tensor": f"grid cpu (tensor=4)\n{cut}",
        "stages": f"grid cpu (pipe=2)\n{pipe}",
        "stages x tensor": f"grid cpu (pipe=2, tensor=2)\n{pipe}\n{cut}",
        "three": "grid cpu (data=3)\n**: data=S(0)",
    }[name]


def made(kind: str, *, meta: bool = False) -> nn.Module:
    with torch.device("meta" if meta else "cpu"):
        return pipes.of(kind)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, name: str, kind: str) -> Any:
    return flow.compile(model, pipes.words_loss, optimizer, plan=plan(name, kind))


def batch(at: int) -> tuple[Tensor]:
    return pipes.text(at, 12)


def everywhere() -> flow.Placement:
    return flow.placement("cpu", range(torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1))


def whole(value: Any, where: flow.Placement | None = None) -> Any:
    """A value as one tensor on every process, also on those that have nothing of it, or on some ranks."""
    if not isinstance(value, flow.GlobalTensor):
        return value.detach().clone() if isinstance(value, Tensor) else value
    if not torch.distributed.is_initialized():
        return value.detach().full_tensor().clone()
    shard: Tensor = value.detach().to_global(placement=where or everywhere(), sbp=B).to_local()
    return shard.clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    held = (*model.named_parameters(), *model.named_buffers())
    return {name: whole(value) for name, value in held}


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By name and key, the states that are here, whole; those of other stages are theirs."""
    held = [value for group in optimizer.param_groups for value in group["params"]]
    names = [name for name, _ in model.named_parameters()]
    assert len(held) == len(names)
    return {
        f"{name}.{key}": whole(part, getattr(part, "placement", None))
        for name, value in zip(names, held, strict=True)
        for key, part in sorted(optimizer.state.get(value, {}).items())
    }


def same(mine: dict[str, Any], others: dict[str, Any]) -> None:
    """Bit by bit."""
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        assert torch.equal(value, others[name]), name
        assert value.dtype is others[name].dtype, name
