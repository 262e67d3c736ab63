"""Changes between two steps that draw what they change: the same of each training that was drawn alike."""

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.nn.graph.trainings import OPTIMIZERS, Training, drawn_layer, halved_states, numbers, whole

__all__ = ["CHANGES", "Change"]

Change = Callable[[Training, Random], Any]
CHANGES: list[Change] = []


def change(made: Change) -> Change:
    CHANGES.append(made)
    return made


def some(t: Training, draw: Random, kind: type[nn.Module] = nn.Module) -> Any:
    """A module of the model, of a kind if it has one."""
    found = [part for part in t.model.modules() if isinstance(part, kind)]
    return draw.choice(found) if found else t.model.head


def weight(t: Training, draw: Random) -> Any:
    return draw.choice(list(t.model.parameters()))


def settled(t: Training, draw: Random) -> Any:
    """A layer with settings, which the model gets where it has none."""
    found = [part for part in t.model.modules() if hasattr(part, "cfg")]
    return draw.choice(found) if found else None


def forget(t: Training, params: list[Any]) -> None:
    """The states of parameters that no group has any more: torch cannot save an optimizer with such."""
    for p in params:
        t.optimizer.state.pop(p, None)


# Modules


def told(t: Training, layer: nn.Module) -> None:
    """The optimizer is told of a new layer."""
    if new := list(layer.parameters()):
        t.optimizer.add_param_group({"params": new})


@change
def layer_replaced(t: Training, draw: Random) -> None:
    t.model.layers[draw.randrange(len(t.model.layers))] = layer = drawn_layer(draw, t)
    told(t, layer)


@change
def layer_replaced_and_left_alone(t: Training, draw: Random) -> None:
    t.model.layers[draw.randrange(len(t.model.layers))] = drawn_layer(draw, t)


@change
def layer_appended(t: Training, draw: Random) -> None:
    t.model.layers.insert(draw.randint(0, len(t.model.layers)), layer := drawn_layer(draw, t))
    told(t, layer)


@change
def layer_removed(t: Training, draw: Random) -> None:
    if len(t.model.layers) > 1:
        t.kept["removed"] = t.model.layers.pop(draw.randrange(len(t.model.layers)))


@change
def layer_put_back(t: Training, draw: Random) -> None:
    if "removed" in t.kept:
        t.model.layers.append(t.kept.pop("removed"))


@change
def layer_twice(t: Training, draw: Random) -> None:
    t.model.layers.append(draw.choice(list(t.model.layers)))


@change
def layers_in_another_order(t: Training, draw: Random) -> None:
    layers = list(t.model.layers)
    draw.shuffle(layers)
    t.model.layers = nn.ModuleList(layers)


@change
def weights_tied(t: Training, draw: Random) -> None:
    found = [part for part in t.model.layers if isinstance(part, nn.Linear)]
    if len(found) > 1:
        found[0].weight = found[1].weight


@change
def bias_removed(t: Training, draw: Random) -> None:
    layer = some(t, draw, nn.Linear)
    if layer is not t.model.head:
        layer.bias = None


@change
def forward_replaced(t: Training, draw: Random) -> None:
    layer, factor = draw.choice(list(t.model.layers)), draw.random()
    before = layer.forward
    layer.forward = lambda x: before(x) * factor


@change
def method_of_the_class(t: Training, draw: Random) -> None:
    before, factor = type(t.model).forward, draw.random()
    type(t.model).forward = lambda self, x: before(self, x) * factor


# Settings


@change
def attribute(t: Training, draw: Random) -> None:
    if (layer := settled(t, draw)) is not None:
        layer.scale = draw.random()


@change
def function_attribute(t: Training, draw: Random) -> None:
    if (layer := settled(t, draw)) is not None:
        layer.act = draw.choice([torch.sin, torch.tanh, torch.sigmoid])


@change
def new_attribute(t: Training, draw: Random) -> None:
    if (layer := settled(t, draw)) is not None:
        layer.skips = not getattr(layer, "skips", False)


@change
def entry(t: Training, draw: Random) -> None:
    if (layer := settled(t, draw)) is not None:
        layer.cfg["k"] = draw.random()


@change
def list_longer(t: Training, draw: Random) -> None:
    if (layer := settled(t, draw)) is not None:
        layer.cfg["powers"].append(draw.random())


@change
def config_attribute(t: Training, draw: Random) -> None:
    if (layer := settled(t, draw)) is not None:
        layer.config.factor = draw.random()


@change
def method_of_an_object(t: Training, draw: Random) -> None:
    if (layer := settled(t, draw)) is not None:
        shift = draw.random()
        layer.mixed = lambda x: x + shift


@change
def number_closed_over(t: Training, draw: Random) -> None:
    for part in t.model.modules():
        if hasattr(part, "put"):
            part.put(draw.random())


@change
def class_attribute(t: Training, draw: Random) -> None:
    type(t.model).also = draw.random()


@change
def norm_setting(t: Training, draw: Random) -> None:
    for part in t.model.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = draw.random()


@change
def rate_of_dropout(t: Training, draw: Random) -> None:
    for part in t.model.modules():
        if isinstance(part, nn.Dropout):
            part.p = draw.choice([0.0, 1.0] if t.beside.micro_batches > 1 else [0.0, 0.3, 1.0])


# Hooks


@change
def forward_hook(t: Training, draw: Random) -> None:
    layer, factor = draw.choice(list(t.model.layers)), draw.random()
    t.kept.setdefault("handles", []).append(layer.register_forward_hook(lambda m, args, out: out * factor))


@change
def forward_pre_hook(t: Training, draw: Random) -> None:
    layer, shift = draw.choice([*t.model.layers, t.model.head]), draw.random()
    t.kept.setdefault("handles", []).append(layer.register_forward_pre_hook(lambda m, args: (args[0] + shift,)))


@change
def hook_removed(t: Training, draw: Random) -> None:
    if t.kept.get("handles"):
        t.kept["handles"].pop(draw.randrange(len(t.kept["handles"]))).remove()


@change
def backward_hook(t: Training, draw: Random) -> None:
    layer, factor = draw.choice(list(t.model.layers)), draw.random()
    hook = layer.register_full_backward_hook(
        lambda m, into, out: tuple(None if x is None else x * factor for x in into)
    )
    t.kept.setdefault("handles", []).append(hook)


@change
def parameter_hook(t: Training, draw: Random) -> None:
    p, factor = weight(t, draw), draw.random()
    if p.requires_grad:
        t.kept.setdefault("handles", []).append(p.register_hook(lambda grad: grad * factor))


@change
def accumulated_hook(t: Training, draw: Random) -> None:
    p, factor = weight(t, draw), draw.random()

    def shrunk(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(factor)

    if p.requires_grad:
        t.kept.setdefault("handles", []).append(p.register_post_accumulate_grad_hook(shrunk))


@change
def optimizer_hook(t: Training, draw: Random) -> None:
    factor = draw.random()

    def slower(optimizer: Any, *args: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= factor

    t.kept.setdefault("handles", []).append(t.optimizer.register_step_pre_hook(slower))


# Parameters and buffers


@change
def frozen(t: Training, draw: Random) -> None:
    layer = draw.choice([t.model.front, *t.model.layers])
    layer.requires_grad_(not all(p.requires_grad for p in layer.parameters()))


@change
def weight_frozen(t: Training, draw: Random) -> None:
    p = weight(t, draw)
    if p is not t.model.head.weight:
        p.requires_grad = not p.requires_grad


@change
def written(t: Training, draw: Random) -> None:
    p = weight(t, draw)
    with torch.no_grad():
        p.mul_(0.5).add_(0.1)
        p[...] = p * 1.5


@change
def copied_into(t: Training, draw: Random) -> None:
    p = weight(t, draw)
    with torch.no_grad():
        p.copy_(t.like(numbers(draw, *p.shape), p))


@change
def data(t: Training, draw: Random) -> None:
    p = weight(t, draw)
    p.data = t.like(numbers(draw, *p.shape), p)


@change
def data_written(t: Training, draw: Random) -> None:
    weight(t, draw).data.mul_(draw.random())


@change
def memory_set(t: Training, draw: Random) -> None:
    p = weight(t, draw)
    with torch.no_grad():
        p.set_(t.like(numbers(draw, *p.shape), p))


@change
def vector(t: Training, draw: Random) -> None:
    if t.beside.stages == 1:
        vector_to_parameters(parameters_to_vector(t.model.parameters()) * 0.9, t.model.parameters())


@change
def parameter_replaced(t: Training, draw: Random) -> None:
    head = t.model.head
    head.weight = nn.Parameter(head.weight.detach().clone() * 0.5)
    t.optimizer.add_param_group({"params": [head.weight], "lr": 0.01})


@change
def loaded(t: Training, draw: Random) -> None:
    t.model.load_state_dict({name: whole(x) * 0.9 for name, x in t.model.state_dict().items()})


@change
def loaded_by_assigning(t: Training, draw: Random) -> None:
    state = {name: x.detach().clone() for name, x in t.model.state_dict().items()}
    t.model.load_state_dict(state, assign=True)
    forget(t, t.optimizer.param_groups[0]["params"])
    t.optimizer.param_groups[0]["params"][:] = []
    held = {id(p) for group in t.optimizer.param_groups for p in group["params"]}
    t.optimizer.param_groups[0]["params"] += [p for p in t.model.parameters() if id(p) not in held]


@change
def buffer_replaced(t: Training, draw: Random) -> None:
    for part in t.model.modules():
        if hasattr(part, "shift"):
            part.shift = t.like(numbers(draw, *part.shift.shape), part.shift)


@change
def buffer_written(t: Training, draw: Random) -> None:
    for part in t.model.modules():
        if hasattr(part, "shift"):
            part.shift.add_(draw.random())


@change
def copied(t: Training, draw: Random) -> None:
    t.kept["copy"] = copy.deepcopy(t.model)


@change
def copy_loaded(t: Training, draw: Random) -> None:
    if "copy" in t.kept and t.kept["copy"].state_dict().keys() == t.model.state_dict().keys():
        t.model.load_state_dict(t.kept["copy"].state_dict())


@change
def copy_averaged(t: Training, draw: Random) -> None:
    with torch.no_grad():
        if "copy" in t.kept:
            mine = dict(t.model.named_parameters())
            for name, p in t.kept["copy"].named_parameters():
                if name in mine and mine[name].shape == p.shape:
                    mine[name].lerp_(p, 0.5)


# Optimizers


@change
def rates(t: Training, draw: Random) -> None:
    for group in t.optimizer.param_groups:
        group["lr"] = 0.1 * draw.random()


@change
def rate_of_a_group(t: Training, draw: Random) -> None:
    group = draw.choice(t.optimizer.param_groups)
    group["weight_decay"], group["lr"] = 0.1 * draw.random(), 0.02


@change
def momentum(t: Training, draw: Random) -> None:
    for group in t.optimizer.param_groups:
        if "betas" in group:
            group["betas"] = 0.9 * draw.random(), 0.9
        else:
            group["momentum"], group["nesterov"] = draw.choice([0.0, 0.5, 0.9]), False


@change
def maximized(t: Training, draw: Random) -> None:
    group = draw.choice(t.optimizer.param_groups)
    group["maximize"] = not group["maximize"]


@change
def optimizer_loaded(t: Training, draw: Random) -> None:
    t.optimizer.load_state_dict(halved_states(t.optimizer))


@change
def optimizer_saved(t: Training, draw: Random) -> None:
    t.kept["optimizer"] = type(t.optimizer), copy.deepcopy(t.optimizer.state_dict())


@change
def optimizer_put_back(t: Training, draw: Random) -> None:
    kind, state = t.kept.get("optimizer", (None, None))
    sizes = [len(group["params"]) for group in t.optimizer.param_groups]
    if kind is type(t.optimizer) and [len(group["params"]) for group in state["param_groups"]] == sizes:
        t.optimizer.load_state_dict(state)


@change
def states_forgotten(t: Training, draw: Random) -> None:
    t.optimizer.state.clear()


@change
def state_written(t: Training, draw: Random) -> None:
    for group in t.optimizer.param_groups:
        for p in group["params"]:
            for name, x in t.optimizer.state.get(p, {}).items():
                if isinstance(x, Tensor) and name != "step":
                    x.mul_(0.5)


@change
def group_dropped(t: Training, draw: Random) -> None:
    if len(t.optimizer.param_groups) > 1:
        forget(t, t.optimizer.param_groups.pop(draw.randrange(len(t.optimizer.param_groups)))["params"])


@change
def parameter_dropped(t: Training, draw: Random) -> None:
    group = draw.choice(t.optimizer.param_groups)
    if len(group["params"]) > 1:
        forget(t, [group["params"].pop(draw.randrange(len(group["params"])))])


@change
def parameters_in_another_order(t: Training, draw: Random) -> None:
    draw.shuffle(draw.choice(t.optimizer.param_groups)["params"])


@change
def another_optimizer(t: Training, draw: Random) -> None:
    t.optimizer = OPTIMIZERS[draw.choice(t.kinds)](t.model.parameters())
    if t.way.mode == "graph":
        t.step.optimizer = t.optimizer


@change
def grads_cleared(t: Training, draw: Random) -> None:
    t.optimizer.zero_grad(set_to_none=draw.random() < 0.5)


@change
def grads_zeroed(t: Training, draw: Random) -> None:
    t.model.zero_grad(set_to_none=draw.random() < 0.5)


@change
def grad_by_hand(t: Training, draw: Random) -> None:
    p = weight(t, draw)
    if p.requires_grad:
        p.grad = t.like(numbers(draw, *p.shape), p.detach())


@change
def stepped_by_hand(t: Training, draw: Random) -> None:
    p = weight(t, draw)
    if p.requires_grad:
        p.grad = t.like(numbers(draw, *p.shape), p.detach())
        t.optimizer.step()
        t.optimizer.zero_grad()


# Calls of the model by itself


def eager_loss(t: Training, draw: Random) -> Tensor | None:
    """Of a batch, in eager code; none in stages, or with layers that are on ranks only from the next step on."""
    batch = t.batch(draw, 8)
    return None if t.beside.stages > 1 or t.fresh else t.loss(t.model, *t.given(*batch))


@change
def looked_at(t: Training, draw: Random) -> Tensor | None:
    with torch.no_grad():
        return eager_loss(t, draw)


@change
def looked_at_in_evaluation(t: Training, draw: Random) -> Tensor | None:
    modes = [(part, part.training) for part in t.model.modules()]
    t.model.eval()
    with torch.no_grad():
        found = eager_loss(t, draw)
    for part, mode in modes:
        part.training = mode
    return found


@change
def trained_in_eager_code(t: Training, draw: Random) -> Tensor | None:
    loss, steps = eager_loss(t, draw), draw.random() < 0.6
    if loss is not None and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
        if steps:
            t.optimizer.step()
            t.optimizer.zero_grad()
    return loss


# Modes


@change
def evaluated(t: Training, draw: Random) -> None:
    some(t, draw).train(draw.random() < 0.5)


@change
def autocast(t: Training, draw: Random) -> None:
    t.autocast = not t.autocast and t.dtype is torch.float32


# Losses


@change
def number_of_the_loss(t: Training, draw: Random) -> None:
    t.put_alpha(draw.random())


@change
def default_of_the_loss(t: Training, draw: Random) -> None:
    if t.loss.__defaults__:
        t.loss.__defaults__ = (draw.random(),)


@change
def global_number(t: Training, draw: Random) -> None:
    t.globals["FACTOR"] = draw.random()


@change
def global_entry(t: Training, draw: Random) -> None:
    t.globals["FACTORS"]["more"][0] = draw.random()


@change
def global_function(t: Training, draw: Random) -> None:
    t.globals["squares"] = draw.choice([torch.abs, torch.cosh])


@change
def another_loss(t: Training, draw: Random) -> None:
    t.loss = draw.choice(t.losses)
    if t.way.mode == "graph":
        t.step.loss = t.loss
