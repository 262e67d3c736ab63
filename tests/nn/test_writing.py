"""Writing in place reaches what it reaches on one tensor, or is an error; it never goes astray."""

# mypy: disallow-untyped-calls=False

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.either import Maker, X, Y, differs

IN_PLACE = """
add_(1) | mul_(2) | sub_(y) | neg_() | zero_() | fill_(3.) | clamp_(min=0.) | exp_() | copy_(y) | pow_(2)
addcmul_(y,y,value=2) | lerp_(y,.5) | masked_fill_(y>0,5.) | add_(y[0]) | mul_(y[:,:1]) | t_() | transpose_(0,1)
unsqueeze_(0) | resize_(2,3) | index_fill_(0,i,2.) | index_add_(0,i,y[:2]) | cumsum_(0) | tanh_() | fill_diagonal_(3.)
copy_(y.float()) | add_(alpha=s,other=y) | index_put_((i,),y[:2]) | masked_scatter_(y>0,y) | eq_(y) | logical_not_()
""".replace("\n", "|")
VIEWS = """
x.view(6,4) | x.view(-1) | x.t() | x[1] | x[:,2] | x[1:3] | x[...,::2] | x.unsqueeze(0) | x.flatten() | x.detach()
x.data | x.permute(1,0) | x.narrow(1,1,2) | x.diagonal() | x.unfold(1,2,2) | x.T | x[None] | x[...] | x.view(4,2,3)
x.view(2,12) | x.chunk(2)[1] | x.unbind(0)[2] | x.as_strided((2,2),(6,1)) | x.unflatten(1,(2,3)) | next(iter(x))
""".replace("\n", "|")
KEYS = """
1 | -1 | slice(1,3) | (slice(None),2) | (slice(None),-1) | ... | (...,0) | i | g | (slice(None),i) | m | gm | (gm[:,0],)
[0,2] | None | (None,1) | (slice(None),None,2) | (i,slice(1,2)) | True | slice(2,2) | (slice(None),[0,1]) | 7 | 1.5
""".replace("\n", "|")
INTO = """
torch.add(x,y,out=o) | torch.matmul(x,y.T,out=o) | torch.sum(x,0,out=o) | torch.cat([x,y],out=o) | torch.exp(x,out=x)
torch.max(x,1,out=(o,k)) | torch.topk(x,2,out=(o,k)) | torch.where(x>0,x,y,out=o) | torch.add(x,1,out=k)
""".replace("\n", "|")


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split("|") if part.strip()]


def names(make: Maker, **more: Any) -> dict[str, Any]:
    i = torch.tensor([2, 0])
    made = {"i": i, "g": make(i), "m": Y > 0, "gm": make(Y) > 0, "y": make(Y), "s": make(torch.tensor(2.0))}
    return {**made, "torch": torch, **more}


@pytest.mark.parametrize("said", listed(IN_PLACE))
def test_an_op_in_place_changes_the_tensor_and_returns_it(said: str) -> None:
    def law(make: Maker) -> tuple[Any, ...]:
        x = make(X)
        out = eval("x." + said, names(make, x=x))
        return x, out is x

    assert not differs(law)


@pytest.mark.parametrize("said", listed(VIEWS))
def test_a_write_to_a_view_reaches_the_tensor_or_is_refused(said: str) -> None:
    def law(make: Maker) -> tuple[Tensor, Tensor]:
        x = make(X)
        y = eval(said, {"x": x})
        y.add_(1)
        return x, y

    assert not differs(law, severed=True)


@pytest.mark.parametrize("said", listed(VIEWS))
def test_gradients_go_through_a_written_view(said: str) -> None:
    def law(make: Maker) -> Any:
        x = make(X, True)
        z = x * 1
        try:
            eval(said, {"x": z}).mul_(2)
        except RuntimeError:
            return "refused"  # torch's own: several views of one call
        (z * z).sum().backward()
        return z, x.grad

    if said not in ("x.chunk(2)[1]", "x.unbind(0)[2]", "next(iter(x))"):  # whose refusals have different names
        assert not differs(law, severed=True)


@pytest.mark.parametrize("value", ["number", "global", "plain"])
@pytest.mark.parametrize("key", listed(KEYS))
def test_setitem_writes_what_it_writes_on_one_tensor(key: str, value: str) -> None:
    def law(make: Maker) -> Tensor:
        x, env = make(X), names(make)
        part = X[eval(key, names(Maker(None)))]
        values: dict[str, Any] = {"number": 5.0, "global": make(part * 3), "plain": part * 3}
        x[eval(key, env)] = values[value]
        return x

    assert not differs(law)


@pytest.mark.parametrize("key", listed(KEYS))
def test_getitem_and_its_gradient_are_those_of_one_tensor(key: str) -> None:
    def law(make: Maker) -> tuple[Any, ...]:
        x = make(X, True)
        y = x[eval(key, names(make))]
        (y * y).sum().backward()
        return y, x.grad

    assert not differs(law)


@pytest.mark.parametrize("size", [(0,), (4, 6), (2,)], ids=str)
@pytest.mark.parametrize("said", listed(INTO))
def test_out_takes_the_result_and_its_size(said: str, size: tuple[int, ...]) -> None:
    def law(make: Maker) -> tuple[Any, ...]:
        x, o, k = make(X), make(torch.zeros(size, dtype=torch.float64)), make(torch.zeros(0, dtype=torch.long))
        eval(said, names(make, x=x, o=o, k=k))
        return x, o, k

    assert not differs(law)


def test_a_leaf_is_written_to_without_gradients_only() -> None:
    def allowed(make: Maker) -> tuple[Any, ...]:
        x = make(X, True)
        with torch.no_grad():
            x.add_(1)
            x[0] = 3.0
        (x * x).sum().backward()
        return x, x.grad

    assert not differs(allowed)
    assert not differs(lambda make: make(X, True).add_(1))


def test_what_backward_needs_may_not_be_written_to() -> None:
    def law(make: Maker) -> None:
        y = make(X, True).exp()
        y.add_(1)
        y.sum().backward()

    assert not differs(law)
