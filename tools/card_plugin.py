"""Ordinary tests on a card, as pytest sees them: where tensors lie, which tests run, and what is no failure.

`tools.card_tests` loads it. A test that comes to one of NOISE fails for what it is, and counts as expected to fail;
values that differ, devices that do not fit and tests that hang fail.
"""

import faulthandler
import gc
import inspect
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from hashlib import sha256
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

HANGS = 300.0  # seconds after which a test hangs; the process ends with its traceback
# Errors that are a test's doing or the played card's, by what their text says.
NOISE = {
    r"can't convert cuda:\d device type tensor to numpy": "numpy reads the host's memory",
    r"\('RuntimeError', 'raised'\), not \('TypeError', 'raised'\)": "global tensors give numpy what lies on cards",
    r"(?i)sparse": "the played card has no sparse tensors",
    r"_thnn_fused|not implemented for|no kernel|Could not run .* with arguments": "the host has no such kernel",
    r"(?m)^E +(AssertionError: )?assert [\d(][\d\s()+*<>=!-]*$": "it counts calls, of which a card has others",
    r"(?m)^E +(AssertionError: )?assert \(?\[?['\"]": "it looks into a text, or at names of kernels",
    r"<built-in method (startswith|endswith) of str": "it looks into a text",
    r"device-side assert triggered.*out of (bounds|range)": "a card takes no index that is out of range",
    r"'cuda' is no place on the host|give plain tensors of the host": "it is of tensors of the host",
    r"no cluster is called 'cuda'": "clusters have names of their own",
    r"Tensors of the same index must be on the same device": "torch lays the numbers of steps on the default card",
    r"Regex pattern did not match|Failed: DID NOT WARN": "it looks into a text",
}
# The same by a test's name.
NAMED = {
    r"\[(rolled|mirrored|repeated at the edge)": "how kernels of a card leave these in memory is in nobody's table",
    r"test_windows_and_spaces_are_those_of_torch": "torch.normal does not heed the default device",
    r"boxing/test_demo.py": "what the demonstration makes is the host's",
    r"(host|runtime)/test_card.py": "it plays a card of its own",
    r"model/test_fp8.py": "the played card rounds products of 8 bits to bfloat16",
    r"exchange/test_shared_memory.py": "it is of tensors of the host",
    r"boxing/test_gradients.py": "the gradients that it makes lie on one card",
    r"test_devices_of_another_kind_are_refused": "the other kind is this one",
    r"test_op_by_op_a_step_of_a_card_is_priced": "the played card has no compiler of kernels, by which it is priced",
    r"rediscovery.py.*memory_is_short|recomputation.py.*are_those_of_sel": "what the host's kernels keep is counted",
    r"test_replaced.py.*\[moved\]": "it mixes tensors of two cards",
    r"test_autocast_runs_losses.*cross_entropy": "torch's autocast for cards halves it, ours does not",
    r"host/test_copies.py.*later_is_not_seen": "it writes to what is being copied, which a step does not",
    r"host/test_copies.py.*(\[disk\]|in_a_file)": "a thread writes files beside a card, and has them meanwhile",
    r"could_be_wrong_is_refused.*of_zeros": "a sum with torch's zeros is on meta for the host only",
}


# A card takes no index that is out of range: what such a test did is an error of all that comes behind it.
POISON = re.compile(r"raises\([^:]*\bIndexError")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ranks", action="store_true", help="only tests on real ranks, and else none of these")
    parser.addoption("--sample", type=int, default=0, help="so many of the tests, drawn by --drawn-by")
    parser.addoption("--drawn-by", type=int, default=0, help="the seed")


def pytest_collection_finish() -> None:
    """Materialise draws on the host if nobody says otherwise; tests compare that with what modules draw."""
    from sbpflow.nn.model.values.materialise import materialise  # modules make tensors of the tests' default device

    assert materialise.__kwdefaults__ is not None
    materialise.__kwdefaults__["device"] = "cuda"


def pytest_configure() -> None:
    torch.testing.assert_close = wherever(torch.testing.assert_close)
    torch.equal, torch.allclose = wherever(torch.equal), wherever(torch.allclose)


def wherever(compared: Callable[..., Any]) -> Callable[..., Any]:
    """A comparison of tensors on several cards: each result lies on the card of its rank."""

    @wraps(compared)
    def run(*given: Any, **named: Any) -> Any:
        leaves, shape = tree_flatten(given)
        plain = [type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda for x in leaves]
        if len({x.device for x, here in zip(leaves, plain, strict=True) if here}) > 1:
            moved = [x.to("cuda:0") if here else x for x, here in zip(leaves, plain, strict=True)]
            given = tree_unflatten(moved, shape)
        return compared(*given, **named)

    return run


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ranked = {"ranks4", "ranks8", "fresh"}
    half = [x for x in items if bool(ranked & {*getattr(x, "fixturenames", ())}) == config.getoption("--ranks")]
    half = [x for x in half if not (isinstance(x, pytest.Function) and POISON.search(inspect.getsource(x.obj)))]
    count = config.getoption("--sample") or len(half)
    seed = config.getoption("--drawn-by")  # by name, so that a new test changes one of the sample at most
    drawn = {*sorted(half, key=lambda x: sha256(f"{seed} {x.nodeid}".encode()).digest())[:count]}
    chosen = [x for x in half if x in drawn]
    config.hook.pytest_deselected(items=[x for x in items if x not in {*chosen}])
    items[:] = chosen


@pytest.fixture(autouse=True)
def all_on_cards() -> Iterator[None]:
    """Prices are those of the host, by which tests know what is chosen."""
    from sbpflow import use_cluster

    torch.set_default_device("cuda")
    with use_cluster("cpu"):
        yield
    torch.set_default_device(None)
    torch.cuda.synchronize()  # an error of a test is told in it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A step's thread for files ends with the step, and the step with the threads of its queues."""
    for _ in range(5):
        if not any(each.name.startswith("offload") and not each.daemon for each in threading.enumerate()):
            break
        gc.collect()
        time.sleep(0.05)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    faulthandler.dump_traceback_later(HANGS, exit=True, file=ERRORS)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


ERRORS = os.dup(2)  # pytest puts a file in the place of what is written there


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (why := noise(item.nodeid, report.longreprtext)):
        report.outcome, report.wasxfail = "skipped", why
        if call.excinfo is not None:
            traceback.clear_frames(call.excinfo.tb)  # a step that it holds would have a thread, which counts as left
    return report


def noise(name: str, error: str) -> str:
    """Why a failure is none; nothing where it is one."""
    said = "\n".join(line for line in error.splitlines() if line.startswith("E "))
    found = (
        why for rules, text in ((NAMED, name), (NOISE, said)) for rule, why in rules.items() if re.search(rule, text)
    )
    return next(found, "")
