"""Every backend makes of a segment what torch makes of it, and says when it could not."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow.nn.graph.compiler.backends import Backend, compiled
from sbpflow.nn.graph.compiler.joint import trace
from sbpflow.nn.graph.lower.localise import Local, LocalCall, Spec
from sbpflow.nn.graph.run.program import Program
from sbpflow.sbp.call import Ref, tensors_in

from ..graphs import F64, GRAPHS, aten, check

CPU = torch.device("cpu")


def local(
    shapes: Sequence[tuple[int, ...]],
    calls: Sequence[tuple[Any, ...]],
    outputs: Sequence[int],
    wants: Sequence[int] | None = None,
) -> Local:
    """A segment of calls (function, arguments), all of whose outputs have gradients."""
    inputs = tuple(Spec(shape, F64, CPU) for shape in shapes)
    wires: list[Tensor] = [torch.empty(shape, dtype=F64) for shape in shapes]
    made = []
    for function, *args in calls:
        out = tensors_in(function(*[wires[a.number] if isinstance(a, Ref) else a for a in args]))
        made.append(LocalCall(function, tuple(args), {}, tuple(Spec(tuple(y.shape), y.dtype, CPU) for y in out), True))
        wires += out
    floats = [i for i, wire in enumerate(outputs) if wires[wire].is_floating_point()]
    wanted = range(len(shapes)) if wants is None else wants
    return Local(tuple(made), inputs, tuple(outputs), tuple(floats), tuple(wanted))


def compare(of: Local, backend: Backend, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """Forward and backward against torch's own, on inputs that `change` may lay out in another way."""
    rng = torch.Generator().manual_seed(1)
    inputs = [change(torch.randn(spec.shape, dtype=spec.dtype, generator=rng)) for spec in of.inputs]
    cotangents = [torch.randn(of.makes[i].shape, dtype=F64, generator=rng) for i in of.returns]
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = of.run(leaves)
    grads = torch.autograd.grad([expected[i] for i in of.returns], leaves, cotangents, allow_unused=True)
    made = compiled(of, backend)
    assert made.backend == backend, made.reason
    assert made.backward is not None
    with torch.no_grad():
        *outputs, saved = made.forward(*inputs)
        found = made.backward(*saved, *(inputs[i] for i in made.again), *cotangents)
    for mine, one in zip(outputs, expected, strict=True):
        torch.testing.assert_close(mine, one.detach())
    for i, mine in zip(of.wants, found, strict=True):
        one = grads[i]
        torch.testing.assert_close(mine, torch.zeros_like(leaves[i]) if one is None else one)


def put(x: Tensor) -> Tensor:
    """A local function that writes into what it makes."""
    out = torch.zeros(6, dtype=x.dtype)
    out[1:5] = x
    return out * out


SEGMENTS: dict[str, Local] = {
    "written in place": local([(4,)], [(put, Ref(0))], [1]),
    "linear": local([(4, 3), (6, 3)], [(aten.linear.default, Ref(0), Ref(1)), (aten.gelu.default, Ref(2))], [2, 3]),
    "an input returned": local([(4,)], [(aten.sin.default, Ref(0))], [0, 1]),
    "views that share": local([(4, 6)], [(aten.t.default, Ref(0)), (aten.view.default, Ref(0), [24])], [1, 2]),
    "one returned twice": local([(4,)], [(aten.exp.default, Ref(0))], [1, 1]),
    "one used twice": local([(4,)], [(aten.mul.Tensor, Ref(0), Ref(0))], [1]),
    "no gradient for one": local([(4,), (4,)], [(aten.sin.default, Ref(0))], [2]),
    "integers come out": local([(4, 6)], [(aten.max.dim, Ref(0), 1)], [1, 2]),
    "nothing in it": local([(0, 3), (6, 3)], [(aten.linear.default, Ref(0), Ref(1))], [2]),
    "several come out": local([(4, 6)], [(aten.split.Tensor, Ref(0), 2, 1)], [1, 3]),
    "a whole expanded": local([()], [(aten.expand.default, Ref(0), [3, 4])], [1]),
    "statistics saved": local([(4, 6), (6,)], [(aten.layer_norm.default, Ref(0), [6], Ref(1))], [2]),
}


@pytest.mark.parametrize("backend", ["autograd", "code"])
@pytest.mark.parametrize("name", SEGMENTS)
def test_forward_and_backward_are_torchs(name: str, backend: Backend) -> None:
    compare(SEGMENTS[name], backend)


@pytest.mark.parametrize("backend", ["autograd", "code"])
@pytest.mark.parametrize("name", SEGMENTS)
def test_inputs_may_lie_in_memory_as_they_like(name: str, backend: Backend) -> None:
    reshaped = local([(4, 6)], [(aten.reshape.default, Ref(0), [24]), (aten.sin.default, Ref(1))], [2])
    for of in (SEGMENTS[name], reshaped):
        if name != "views that share" or of is reshaped:  # torch itself cannot view these so
            compare(of, backend, lambda x: x.t().contiguous().t() if x.dim() == 2 else x)


def test_dims_of_one_element_have_the_strides_that_were_traced() -> None:
    """Group norm of the CPU looks at them to tell how an image lies; a piece of one sample was an error."""
    channels_last = Spec((1, 4, 3, 3), F64, CPU, (0, 2, 3, 1))
    call = LocalCall(aten.group_norm.default, (Ref(0), 2), {}, (channels_last,), True)
    x = torch.randn(1, 3, 3, 4, dtype=F64).permute(0, 3, 1, 2).as_strided((1, 4, 3, 3), (4, 1, 12, 4))
    made = compiled(Local((call,), (channels_last,), (1,), (), ()), "code")
    torch.testing.assert_close(made.forward(x)[0], torch.group_norm(x.clone(), 2))


@pytest.fixture
def alone() -> Iterator[None]:
    """Inductor without the threads that it would leave running."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


@pytest.mark.sweep
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", SEGMENTS)
def test_inductor_makes_the_same(name: str) -> None:
    compare(SEGMENTS[name], "inductor")
    if name != "views that share":
        compare(SEGMENTS[name], "inductor", lambda x: x.t().contiguous().t() if x.dim() == 2 else x)


@pytest.mark.sweep
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", GRAPHS)
def test_whole_graphs_by_inductor(name: str) -> None:
    graph = GRAPHS[name]()
    program = Program(graph, backend="inductor")
    check(graph, program)
    assert not program.reasons


def test_what_is_saved_is_no_input_and_no_view() -> None:
    made = trace(SEGMENTS["linear"])
    assert made.again == (0, 1)
    assert made.saved == 1  # what gelu is of, and neither the weight nor its transpose
    assert "saved" not in made.forward.module.code


def test_a_view_is_saved_in_the_place_of_what_is_read_by_it_alone() -> None:
    """Its memory is kept either way; where more is read of that, the backward makes the view again."""
    calls: list[tuple[Any, ...]] = [(aten.neg.default, Ref(0)), (aten.view.default, Ref(1), [2, 3, 2])]
    calls += [(aten.transpose.int, Ref(2), 0, 1), (aten.mul.Tensor, Ref(3), Ref(3)), (aten.mul.Tensor, Ref(1), Ref(1))]
    for of, shape in ((local([(2, 6)], calls[:4], [4]), (3, 2, 2)), (local([(2, 6)], calls, [4, 5]), (2, 6))):
        result: Any = trace(of).forward.graph.output_node().args[0]
        assert [tuple(node.meta["val"].shape) for node in result[-1]] == [shape]
        compare(of, "code")


def test_one_of_several_results_is_saved_alone() -> None:
    made = trace(SEGMENTS["statistics saved"])
    result: Any = made.forward.graph.output_node().args[0]
    saved = result[-1]
    assert saved
    assert all(isinstance(node.meta["val"], Tensor) for node in saved)


def test_gradients_that_share_memory_are_known() -> None:
    assert trace(SEGMENTS["linear"]).owns == (True, True)
    assert trace(local([(4,)], [(aten.sum.default, Ref(0))], [1])).owns == (False,)  # one number, seen four times
    assert trace(local([(4,), (4,)], [(aten.add.Tensor, Ref(0), Ref(1))], [2])).owns == (False, False)


def test_without_gradients_nothing_is_saved() -> None:
    made = trace(local([(4, 3), (6, 3)], [(aten.linear.default, Ref(0), Ref(1))], [2], wants=[]))
    assert (made.backward, made.saved, made.again) == (None, 0, ())


def test_what_cannot_be_traced_is_run_by_autograd() -> None:
    def by_value(x: Tensor) -> Tensor:
        return x * x.sum().item()

    of = local([(4,)], [(by_value, Ref(0))], [1])
    made = compiled(of, "auto")
    assert made.backend == "autograd"
    assert made.reason.startswith("code: ")
    x = torch.arange(4.0, dtype=F64)
    *out, saved = made.forward(x)
    assert made.backward is not None
    assert torch.equal(out[0], x * 6)
    assert torch.equal(made.backward(*saved, torch.ones(4, dtype=F64))[0], torch.full((4,), 6.0, dtype=F64))


def test_an_input_that_is_written_to_is_left_to_autograd() -> None:
    made = compiled(local([(4,)], [(torch.relu_, Ref(0))], [1], wants=[]), "code")
    assert (made.backend, made.reason) == ("autograd", "code: Untraceable: an input is written to")


def test_a_wrong_rule_is_an_error_and_not_another_backend() -> None:
    good = local([(4,)], [(aten.sin.default, Ref(0))], [1])
    (call,) = good.calls
    wrong = Local((call._replace(makes=(Spec((5,), F64, CPU),)),), good.inputs, (1,), (0,), (0,))
    with pytest.raises(flow.SbpflowError, match="the rule of one of these is wrong"):
        compiled(wrong, "code")


def test_equal_segments_have_equal_keys_and_numbers_of_other_types_do_not() -> None:
    keys = [local([(4,)], [(aten.mul.Tensor, Ref(0), n)], [1]).key for n in (1, 1, 1.0, True)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_on_the_cpu_auto_is_code() -> None:
    assert compiled(SEGMENTS["linear"], "auto").backend == "code"
