"""Writing in place reaches what it reaches on one tensor, or is an error; it never goes astray."""

# mypy: disallow-untyped-calls=False

from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
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


@pytest.mark.sampled(15)
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


@pytest.mark.parametrize("said", ["z[1,2]=5.", "z[0:4:2,1:]=v", "z[1:3][0].copy_(v[0,:1])", "z[-1]+=v[0,0]"])
def test_a_part_of_a_part_is_written_through_as_often_as_one_likes(said: str) -> None:
    def law(make: Maker) -> Any:
        seen = []
        for _ in range(2):  # the second time by recipes that are known
            x, y = make(X, True), make(Y, True)
            z, v = x * 2, y[:2, 1:]
            exec(said, {"z": z, "v": v})
            (z * z * z + y * y).sum().backward()
            seen += [z, x.grad, y.grad]
        return seen

    assert not differs(law)


def test_views_of_a_moved_view_follow_its_base() -> None:
    def law(make: Maker) -> tuple[Tensor, ...]:
        x = make(X)
        y, z = x[::2, 1:], x[1:3].expand(2, 2, 6)
        x.mul_(0.5)
        return x, y, z

    assert not differs(law)


def test_a_detached_view_writes_to_its_base_and_not_to_the_graph() -> None:
    def law(make: Maker) -> tuple[Any, ...]:
        x, w = make(X), make(Y, True)
        x[1:3].detach().add_(1)
        x[0].data.mul_(2)
        x[1:2].expand(3, 6).fill_(0.5)
        y = w * 2
        y[1:3].detach().mul_(3)
        with torch.no_grad():
            w[2].detach().fill_(7)
        y.sum().backward()
        return x, y, w, w.grad

    assert not differs(law)


def test_what_returns_its_tensor_as_it_is_does_not_write_to_it() -> None:
    def law(make: Maker) -> Any:
        x = make(X, True)
        y = +x[1:3]
        z = x[:, 1:3].contiguous().ravel()
        (y.sum() + z.sum()).backward()
        return y, z, x.grad

    assert not differs(law)


def test_writing_shows_in_inference_mode() -> None:
    def law(make: Maker) -> tuple[Tensor, ...]:
        x = make(X)
        with torch.inference_mode():
            y = make(X)
            before = x.exp(), y.sort(0)[0]
            x.add_(1)
            y.add_(1)
            return *before, x.exp(), y.sort(0)[0], x, y

    assert not differs(law)


@pytest.mark.parametrize("key", ["slice(None),slice(None,4)", "slice(None,4),0", "slice(1,4),slice(0,4)"])
def test_slices_are_not_taken_for_those_of_another_size(key: str) -> None:
    def law(make: Maker) -> list[Tensor]:
        seen = []
        for shape in ((4, 4), (6, 4), (4, 6)):
            x = make(X.reshape(-1)[: shape[0] * shape[1]].reshape(shape))
            seen.append(x[eval(key)])
            x[eval(key)] = 5.0
            seen.append(x)
        return seen

    assert not differs(law)


def test_reading_by_index_goes_on_where_there_is_nothing() -> None:
    def law(make: Maker) -> tuple[Tensor, ...]:
        x, none = make(X[:0, 0]), torch.zeros(0, dtype=torch.long)
        return x.gather(0, none), torch.take_along_dim(x, x.argsort(0), 0), x.index_select(0, none), x[none]

    assert not differs(law)


def written(make: Maker, write: str) -> Any:
    """A plain tensor that something global is written to: what it then is, and the gradient of what was written."""
    h, i, plain = make(X, grad=True), torch.tensor([2, 0, 2, 1]), torch.zeros(4, 6, dtype=X.dtype)
    out = eval(write, {"h": h, "i": i, "z": plain, "torch": torch})
    result = plain if out is None else out
    (result * Y).sum().backward()
    return result, plain, h.grad


FRESH = """
z.index_add_(0,i,h) | z.add_(h) | z.copy_(h) | z.__setitem__(i,h) | z.__setitem__(slice(1,3),h[1:3]) | z.addcmul_(h,h)
""".strip()


@pytest.mark.parametrize("write", listed(FRESH))
def test_what_is_written_to_a_fresh_plain_tensor_is_there_and_has_its_gradient(write: str) -> None:
    assert not differs(lambda make: written(make, write))


def test_a_plain_tensor_that_others_see_is_not_written_to() -> None:
    make, view = Maker("S(0)"), torch.zeros(2, 4, 6)[0]
    viewed = torch.zeros(4, 6)
    row = viewed[0]
    for plain in (view, viewed, torch.nn.Parameter(torch.zeros(4, 6))):
        with (
            torch.no_grad(),
            pytest.raises(flow.SbpflowError, match=r"add_ would write a global tensor into a plain one"),
        ):
            plain.add_(make(X.float()))
    assert not row.any()
