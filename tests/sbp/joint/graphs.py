"""Graphs to choose in, and every plan of a small one."""

import numpy as np

from sbpflow.sbp.joint.problem import Edge, Problem, Vector

GRAPHS = 48  # of each kind
MANY_GRAPHS = 120  # in the sweep


def small(seed: int, *, tied: bool = False, dense: bool = False) -> Problem:
    """Up to 8 nodes of up to 6 candidates, an eighth of all forbidden; in every other graph many costs are equal.

    Dense ones have an edge, or two, between almost any two nodes, and forbid less, or nothing would be left.
    """
    rng = np.random.default_rng(seed)
    whole = seed % 2 == 0

    def values(*shape: int) -> Vector:
        found = rng.integers(0, 12, shape).astype(np.float64) if whole else rng.random(shape) * 10
        found[rng.random(shape) < (0.03 if dense else 0.12)] = np.inf
        return found

    count = int(rng.integers(1, 9))
    numbers = [int(t) if tied else -1 for t in rng.integers(-1, 3, count)]
    sizes = [int(size) for size in rng.integers(1, 7, count)]
    sizes = [sizes[numbers.index(t)] if t >= 0 else size for t, size in zip(numbers, sizes, strict=True)]
    while np.prod(sizes) > 5_000:
        sizes = [min(size, max(sizes) - 1) for size in sizes]
    costs = tuple(values(size) for size in sizes)
    memory = tuple(rng.integers(1, 50, size).astype(np.float64) for size in sizes)
    pairs = [(i, j) for i in range(count) for j in range(count) if rng.random() < (0.7 if dense else 0.35)]
    edges = tuple(Edge(i, j, values(sizes[i], sizes[j])) for i, j in pairs)
    return Problem(costs, edges, memory, numbers if tied else ())


def plans(problem: Problem, *, ties: bool = True) -> list[tuple[float, float, tuple[int, ...]]]:
    """Seconds, bytes and choice of every plan that is allowed, the cheapest first."""
    shape = tuple(len(cost) for cost in problem.costs)
    at = np.indices(shape).reshape(len(shape), -1)  # [node, plan]
    seconds = sum((cost[k] for cost, k in zip(problem.costs, at, strict=True)), np.zeros(at.shape[1]))
    seconds = sum((edge.matrix[at[edge.i], at[edge.j]] for edge in problem.edges), seconds)
    held = sum((memory[k] for memory, k in zip(problem.memory, at, strict=False)), np.zeros(at.shape[1]))
    allowed = seconds < np.inf
    for i, number in enumerate(problem.tied if ties else ()):
        if number >= 0:
            allowed &= at[i] == at[list(problem.tied).index(number)]
    every = zip(seconds[allowed].tolist(), held[allowed].tolist(), at[:, allowed].T.tolist(), strict=True)
    return sorted((cost, memory, tuple(choice)) for cost, memory, choice in every)


def ladder(length: int, size: int, *, seed: int = 0) -> Problem:
    """Forward and backward chains that meet at every node, with a residual stream: too wide for degree two."""
    rng = np.random.default_rng(seed)
    costs = tuple(rng.random(size) for _ in range(2 * length))
    pairs = [(n, n + 1) for n in range(2 * length - 1)]
    pairs += [(n, 2 * length - 1 - n) for n in range(length)] + [(n, n + 4) for n in range(0, length - 4, 3)]
    return Problem(costs, tuple(Edge(i, j, rng.random((size, size))) for i, j in pairs))


def transformer(blocks: int, nodes: int, size: int, *, seed: int = 0) -> Problem:
    """Equal blocks of forward and backward nodes whose tensors each have a dozen states; first and last stand alone."""
    rng = np.random.default_rng(seed)
    half, states = nodes // 2, 12
    price = rng.random((states, states))
    np.fill_diagonal(price, 0)
    held = {way: [rng.integers(0, states, (size, 4)) for _ in range(half)] for way in "fb"}
    cost = {way: [rng.random(size) * 0.3 for _ in range(half)] for way in "fb"}
    memory = {way: [rng.integers(1, 100, size).astype(np.float64) * 1e6 for _ in range(half)] for way in "fb"}
    shared: dict[tuple[str, int, str, int, int], Vector] = {}

    def between(one: str, i: int, other: str, j: int, tensor: int) -> Vector:
        if (one, i, other, j, tensor) not in shared:
            shared[one, i, other, j, tensor] = price[np.ix_(held[one][i][:, 0], held[other][j][:, tensor])]
        return shared[one, i, other, j, tensor]

    at = {("f", b, i): b * half + i for b in range(blocks) for i in range(half)}
    at |= {("b", b, i): 2 * blocks * half - 1 - (b * half + i) for b in range(blocks) for i in range(half)}
    name = {n: key for key, n in at.items()}
    names = [name[n] for n in range(len(name))]
    inner = [0 < b < blocks - 1 for _, b, _ in names]
    edges = []
    for b in range(blocks):
        for i in range(half):
            for way, other in (("f", b * half + i + 1), ("b", b * half + i - 1)):
                if 0 <= other < blocks * half:
                    to = (way, other // half, other % half)
                    edges.append(Edge(at[way, b, i], at[to], between(way, i, way, other % half, 1)))
            if i % 3 == 1:
                edges.append(Edge(at["f", b, i], at["b", b, i], between("f", i, "b", i, 3)))
        for way, i, j in (("f", 0, half // 2), ("f", half // 2, half - 1), ("b", half - 1, half // 2)):
            edges.append(Edge(at[way, b, i], at[way, b, j], between(way, i, way, j, 2)))
    return Problem(
        tuple(cost[way][i] for way, _, i in names),
        tuple(edges),
        tuple(memory[way][i] for way, _, i in names),
        [i + half * (way == "b") if tied else -1 for (way, _, i), tied in zip(names, inner, strict=True)],
        [b for _, b, _ in names],
    )
