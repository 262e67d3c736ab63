"""The surface of torch, walked: what takes a tensor gives for a global one what it gives for a plain one, or raises.

Most of torch asks `__torch_function__`. What does not would see the empty shell of a global tensor, and such functions
come and go with torch's versions; so every function of these modules is called with whatever arguments it takes.
"""

# mypy: disallow-untyped-calls=False

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional
import torch.utils.dlpack
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import sbpflow as flow
from sbpflow import S
from sbpflow.placement.errors import SbpError

LINE = flow.placement("cpu", range(2))
WHOLE = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 10], [2, 4, 9]])
OTHER = torch.tensor([[2.0, 1, 3], [1, 5, 2], [7, 3, 1], [1, 4, 8]])
MODULES = [
    torch, torch.nn.functional, torch.linalg, torch.fft, torch.special, torch.nested, torch.sparse, torch.jit,
    torch.autograd, torch.autograd.functional, torch.func, torch.utils.dlpack, torch.nn.utils, torch.nn.init,
    torch.nn.parameter, torch._C._nn,
]  # fmt: skip
PATTERNS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "x": lambda x, z: (x,),
    "z, x": lambda x, z: (z, x),
    "x, z": lambda x, z: (x, z),
    "[x]": lambda x, z: ([x],),
    "z, [x]": lambda x, z: (z, [x]),
    "x, 0": lambda x, z: (x, 0),
    "x, f": lambda x, z: (x, lambda element: element + 1),
    "f, x": lambda x, z: (lambda tensor: (tensor * 2).sum(), x),
}
# What is no function of its tensors' values: settings of the process, memory that was not filled, addresses.
SETTINGS = (
    "set_", "manual_seed", "seed", "init_num", "use_deterministic", "autocast", "clear_autocast", "save", "load",
    "import_ir", "fork", "wait", "unify_type", "is_warn", "has_torch_function", "fbgemm", "empty", "compile",
)  # fmt: skip
ADDRESSES = {"data_ptr", "const_data_ptr", "untyped_storage"}


def functions(home: ModuleType | type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions of a module, the old classes that make tensors, and of tensors also their attributes."""
    for name in dir(home):
        kept = name.startswith(("_foreach_", "_fused_")) or not name.startswith("_")
        if not kept or name.startswith(SETTINGS) or name in ADDRESSES:
            continue
        found = getattr(home, name)
        if home is Tensor:
            if callable(found):
                yield name, lambda x, *args, name=name: getattr(x, name)(*args)
            else:
                yield name, lambda x, name=name: getattr(x, name)
                yield f"{name} = ", lambda x, value, name=name: setattr(x, name, value)
        elif callable(found) and (not inspect.isclass(found) or name.endswith(("Tensor", "Variable", "Parameter"))):
            yield name, found


def read(value: Any) -> Any:
    """Tensors by their whole values, what is no value by its type."""
    if isinstance(value, flow.GlobalTensor):
        return read(value.full_tensor())
    if isinstance(value, Tensor):
        odd = value.layout is not torch.strided or value.is_nested
        return str(value) if odd else (value.dtype, value.detach().clone())
    if isinstance(value, list | tuple):
        return [type(value), *map(read, value)]
    return value if isinstance(value, bool | int | float | str | torch.dtype | torch.device) else type(value)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result, and what the arguments are afterwards; None if it raises."""
    torch.manual_seed(0)
    try:
        result = function(*args)
    except (Exception, torch.jit.Error):  # any: most functions do not take such arguments
        return None
    return read(result), [read(a) for a in args if not inspect.isfunction(a)]


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("home", [*MODULES, Tensor], ids=lambda home: home.__name__)
def test_torch_answers_for_a_global_tensor_as_for_its_value_or_not_at_all(home: Any) -> None:
    wrong, met = [], 0
    for name, function in functions(home):
        for pattern, args in PATTERNS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wanted = outcome(function, args(WHOLE.clone(), OTHER.clone()))
                if wanted is None:
                    continue
                met += 1
                got = outcome(function, args(flow.tensor(WHOLE, placement=LINE, sbp=S(0)), OTHER.clone()))
            if got is not None and not same(wanted, got):
                wrong.append(f"{name}({pattern})")
    assert not wrong
    assert met or home in (torch.nested,)


def x() -> Any:
    return flow.tensor(WHOLE, placement=LINE, sbp=S(0))


PAST: dict[str, Callable[[], object]] = {
    "torch.tensor": lambda: torch.tensor(x()),
    "Tensor": lambda: torch.Tensor(x()),
    "FloatTensor": lambda: torch.FloatTensor(x()),
    "Variable": lambda: torch.autograd.Variable(x()),
    "new": lambda: OTHER.new(x()),
    "new_tensor": lambda: OTHER.new_tensor(x()),
    "asarray, which drops requires_grad": lambda: torch.asarray(x(), requires_grad=True),
    "set_": lambda: OTHER.clone().set_(x()),
    "set_ to plain memory": lambda: x().set_(OTHER.untyped_storage(), 0, (4, 3)),
    "data": lambda: setattr(OTHER.clone(), "data", x()),
    "as_subclass": lambda: x().as_subclass(Tensor),
    "nested_tensor": lambda: torch.nested.nested_tensor([x()]),
    "as_nested_tensor": lambda: torch.nested.as_nested_tensor([x()]),
    "sparse_coo_tensor": lambda: torch.sparse_coo_tensor(torch.arange(4)[None], x()),
    "jit.trace": lambda: torch.jit.trace(lambda t: t * 2, (x(),)),
    "jit.script": lambda: torch.jit.script(flow.nn.to_global(torch.nn.Linear(3, 3), LINE)),
    "make_fx": lambda: make_fx(lambda t: t * 2)(x()),
    "export": lambda: torch.export.export(torch.nn.ReLU(), (x(),)),
    "torch.compile": lambda: torch.compile(flow.nn.to_global(torch.nn.Linear(3, 3), LINE)),
    "Module.compile": lambda: flow.nn.to_global(torch.nn.Linear(3, 3), LINE).compile(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAST)
def test_a_conversion_past_torch_function_is_an_error_and_no_empty_tensor(name: str) -> None:
    with pytest.raises(SbpError, match=r"(?s)\n  .*(full_tensor|flow\.|x\.clone)"):
        PAST[name]()


def test_set_takes_the_values_of_a_plain_tensor() -> None:
    given = x()
    assert torch.equal(given.set_(OTHER).full_tensor(), OTHER)
    assert given.sbp == x().sbp


@pytest.mark.filterwarnings("ignore")
def test_plain_code_is_scripted_as_before() -> None:
    """A function may call others of where it is written: torch.distributed.optim does."""

    def doubled(t: Tensor) -> Tensor:
        return t * 2

    def shown(t: Tensor) -> Tensor:
        return doubled(t) + 1

    assert torch.jit.script(shown)(torch.ones(1)).item() == 3
    assert importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer


@pytest.mark.filterwarnings("ignore")
def test_the_error_names_the_tensor_the_line_and_what_to_write() -> None:
    with pytest.raises(
        SbpError, match=r"(?s)aten\.alias.*\(4, 3\)  float32 .*test_surface\.py:\d+: torch\.Tensor\(x"
    ) as e:
        torch.Tensor(x())
    assert "x.full_tensor()" in str(e.value)


def test_elements_changed_by_a_python_function_are_changed() -> None:
    y = x()
    y.apply_(lambda a: a + 1)
    y.map_(x(), lambda a, b: a * b)
    assert torch.equal(y.full_tensor(), (WHOLE + 1) * WHOLE)


def test_a_tensor_set_to_another_has_its_values() -> None:
    y, weight = x(), flow.tensor(OTHER, placement=LINE, sbp=S(1), requires_grad=True)
    change: Any = weight.set_
    with torch.no_grad():
        assert change(y) is weight
    assert weight.is_leaf
    assert weight.requires_grad
    assert torch.equal(weight.full_tensor(), WHOLE)


def test_plain_data_is_still_swapped() -> None:
    z = torch.nn.Parameter(OTHER.clone())
    z.data = WHOLE
    assert z.data.data_ptr() == WHOLE.data_ptr()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_of_global_tensors_gives_what_it_gives_uncompiled() -> None:
    def f(t: Tensor, u: Tensor) -> Any:
        return (t @ u.mT).relu().sum(0), t.shape, u * 2

    w = flow.tensor(OTHER, placement=LINE, sbp=S(1), requires_grad=True)
    got = torch.compile(f, backend="eager")(x(), w)
    got[0].sum().backward()
    assert same(read(got), read(f(WHOLE, OTHER)))
    assert torch.equal(w.grad.full_tensor(), WHOLE.sum(0).expand(4, 3))  # type: ignore[union-attr]
