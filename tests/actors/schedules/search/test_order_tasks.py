"""Orders of any tasks under limits of memory: within them, in order, and the shortest where all orders can be tried."""

import random
from math import inf

import pytest

from sbpflow.actors import After, DeviceTask, TaskGraph, order_tasks
from sbpflow.placement.errors import ScheduleError

X, Y = DeviceTask("a", "x"), DeviceTask("b", "x")


def drawn(seed: int, most: int) -> TaskGraph:
    """Some tasks at random; what one takes, it frees itself or one behind it on its device."""
    draw = random.Random(seed)
    many, devices = draw.randint(4, most), draw.randint(1, 3)
    place = [f"d{draw.randrange(devices)}" for _ in range(many)]
    after = [
        After(f"t{n}", f"t{k}", draw.choice([0, 0, 1])) for n in range(many) for k in range(n) if draw.random() < 0.25
    ]
    takes, frees = [draw.randint(0, 3) for _ in range(many)], [0] * many
    for n in range(many):
        behind = [int(edge.task[1:]) for edge in after if edge.first == f"t{n}"]
        frees[draw.choice([k for k in behind if place[k] == place[n]] or [n])] += takes[n]
    tasks = (DeviceTask(f"t{n}", place[n], draw.randint(1, 5), takes[n], frees[n]) for n in range(many))
    return TaskGraph(tuple(tasks), tuple(after), draw.choice([3, 4, 5]))


def shortest(graph: TaskGraph) -> float:
    """The end of the best of all orders, one after the other; none: infinite."""

    def best(done: dict[str, float], free: dict[str, float], held: dict[str, float]) -> float:
        if len(done) == len(graph.tasks):
            return max(done.values())
        found = inf
        for task in graph.tasks:
            first = [edge for edge in graph.after if edge.task == task.name]
            if task.name in done or any(edge.first not in done for edge in first):
                continue
            if held.get(task.device, 0.0) + task.takes > float(str(graph.memory)):
                continue
            ready = max((done[edge.first] + edge.delay for edge in first), default=0.0)
            end = max(ready, free.get(task.device, 0.0)) + task.time
            now = held.get(task.device, 0.0) + task.takes - task.frees
            found = min(found, best({**done, task.name: end}, {**free, task.device: end}, {**held, task.device: now}))
        return found

    return best({}, {}, {})


def check(graph: TaskGraph) -> bool:
    """Whether there is an order; that it is one, and the shortest."""
    wanted = shortest(graph)
    if wanted == inf:
        with pytest.raises(ScheduleError, match="no order exists that fits into memory"):
            order_tasks(graph)
        return False
    found = order_tasks(graph)
    assert found.end == pytest.approx(wanted)
    assert found.bound == pytest.approx(wanted)
    assert all(most <= float(str(graph.memory)) for most in found.memory.values())
    assert sorted(name for row in found.rows for name in row) == sorted(task.name for task in graph.tasks)
    tasks = {task.name: task for task in graph.tasks}
    for edge in graph.after:
        assert found.starts[edge.task] >= found.starts[edge.first] + tasks[edge.first].time + edge.delay
    for row in found.rows:
        ends = [found.starts[name] + tasks[name].time for name in row]
        assert all(found.starts[name] >= end for name, end in zip(row[1:], ends, strict=False))
    return True


def test_the_order_of_a_few_tasks_is_the_shortest_there_is() -> None:
    there = [check(drawn(seed, 6)) for seed in range(40)]
    assert there.count(True) > 20
    assert False in there


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(200))
def test_the_order_of_more_tasks_is_the_shortest_there_is(seed: int) -> None:
    check(drawn(seed, 8))


def test_many_tasks_end_near_the_bound_within_their_memory() -> None:
    draw = random.Random(2)
    tasks = [DeviceTask(f"t{n}", f"d{n % 4}", draw.randint(1, 9), 1, 1) for n in range(120)]
    after = [After(f"t{n}", f"t{draw.randrange(n)}", 1) for n in range(8, 120)]
    graph = TaskGraph(tuple(tasks), tuple(after), {"d0": 1, "d1": 2})
    found, again = order_tasks(graph), order_tasks(graph)
    assert found.rows == again.rows
    assert found.memory == dict.fromkeys(graph.devices, 1.0)
    assert found.bound <= found.end <= 1.02 * found.bound


def test_memory_makes_one_wait_that_could_run() -> None:
    """Two long tasks fit one behind the other only."""
    tasks = [DeviceTask("a", "x", 1, takes=2), DeviceTask("b", "x", 1, takes=2), *(DeviceTask(n, "y", 4) for n in "cd")]
    tasks += [DeviceTask("e", "x", 1, frees=2), DeviceTask("f", "x", 1, frees=2)]
    after = (After("c", "a"), After("d", "b"), After("e", "c"), After("f", "d"))
    ends = [order_tasks(TaskGraph(tuple(tasks), after, {"x": memory})).end for memory in (2, 4)]
    assert ends == [12, 10]


@pytest.mark.parametrize(
    ("tasks", "after", "memory", "message"),
    [
        ([DeviceTask("a", "x"), DeviceTask("a", "y")], [], 1, "two tasks are called a"),
        ([DeviceTask("a", "x", -1)], [], 1, "a has time=-1"),
        ([DeviceTask("a", "x", takes=inf)], [], 1, "a has takes=inf"),
        ([X], [After("a", "b")], 1, "no task is called b"),
        (
            [X, Y],
            [After("a", "b"), After("b", "a")],
            1,
            "a, b wait for each other",
        ),
        ([X, Y], [After("a", "b", -1)], 1, "a delay of -1"),
        ([X], [], -1, "limited to -1"),
        ([DeviceTask("a", "x", takes=3)], [], 2, "no order exists that fits into memory: x 2"),
    ],
)
def test_tasks_that_cannot_be_are_refused(
    tasks: list[DeviceTask], after: list[After], memory: float, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        order_tasks(TaskGraph(tuple(tasks), tuple(after), memory))


def test_no_tasks_take_no_time() -> None:
    assert order_tasks(TaskGraph(())).end == 0
