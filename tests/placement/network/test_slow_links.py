"""A slow link is told by what hosts send to each other; equal hosts are never told, whatever they send and when."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from sbpflow.placement.network.slow_links import FACTOR, LinkJudge, LinkUse, slow_links, together

MB = 1e6
Flow = tuple[str, str, LinkUse]


def shares(links: dict[str, float], pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Bytes a second of each where all send at once: the busiest link is shared evenly, then the next."""
    room = {(host, end): rate for host, rate in links.items() for end in (0, 1)}
    found: dict[tuple[str, str], float] = {}
    while open_ := [pair for pair in pairs if pair not in found]:
        users = {each: [pair for pair in open_ if pair[each[1]] == each[0]] for each in room}
        tight = min((each for each in room if users[each]), key=lambda each: room[each] / len(users[each]))
        rate = room[tight] / len(users[tight])
        for pair in users[tight]:
            found[pair] = rate
            for end in (0, 1):
                room[pair[end], end] -= rate
    return found


def window(links: dict[str, float], sends: dict[tuple[str, str], float], seconds: float = 5.0) -> Iterator[Flow]:
    """Traffic over links of so many bytes a second, as long as there is some."""
    left, busy, at = dict(sends), dict.fromkeys(sends, 0.0), 0.0
    while left and at < seconds:
        rates = shares(links, [*left])
        step = min([seconds - at, *(left[pair] / rates[pair] for pair in left)])
        for pair, rate in rates.items():
            left[pair] -= rate * step
            busy[pair] += step
            if left[pair] <= 1:
                del left[pair]
        at += step
    for pair, size in sends.items():
        yield (*pair, LinkUse(round(size - left.get(pair, 0)), busy[pair], busy[pair] // 0.5 * 0.5))


def everybody(hosts: str, size: float) -> dict[tuple[str, str], float]:
    return {(a, b): size for a in hosts for b in hosts if a != b}


def judge(hosts: str, known: dict[str, float] | None = None) -> LinkJudge:
    return LinkJudge({host: f"host {host}" for host in hosts}, lambda: known or {})


@pytest.mark.parametrize("hosts", ["abc", "abcd", "abcdefgh"])
@pytest.mark.parametrize("times", [5, 10, 50])
def test_the_host_of_a_slow_link_is_told_with_how_many_times_it_is_slower(hosts: str, times: float) -> None:
    links = dict.fromkeys(hosts, 25 * MB) | {"b": 25 * MB / times}
    found = slow_links(together(window(links, everybody(hosts, 3 * MB))), hosts, {})
    assert [*found] == ["b"]
    assert times / 1.5 < found["b"].times < times * 1.5


@pytest.mark.parametrize("sends", [True, False])
def test_a_link_that_is_slow_one_way_is_told_as_that(sends: bool) -> None:
    slow, quick = LinkUse(5_000_000, 4.5, 4.0), LinkUse(5_000_000, 0.25, 0.0)
    traffic = {ends: slow if ends[not sends] == "b" else quick for ends in everybody("abc", 0)}
    found = slow_links(traffic, "abc", {})
    assert [*found] == ["b"]
    assert found["b"].sends is sends


@pytest.mark.parametrize("seed", range(100))
def test_hosts_with_equal_links_are_never_told(seed: int) -> None:
    """Whatever they send to whom: all to all, by a root, along a line, in turns, one with more ranks than others."""
    draw = random.Random(seed)
    hosts = "abcdefgh"[: draw.randint(3, 8)]
    size = 10 ** draw.uniform(4, 8)
    pairs = {
        "all": everybody(hosts, size),
        "root": {("a", b): size for b in hosts[1:]},
        "line": dict.fromkeys(itertools.pairwise(hosts), size),
        "back and forth": {p: size for x in itertools.pairwise(hosts) for p in (x, x[::-1])},
        "any": {p: size * draw.random() for p in everybody(hosts, 0) if draw.random() < 0.5},
    }[draw.choice(["all", "root", "line", "back and forth", "any"])]
    links = dict.fromkeys(hosts, 25 * MB)
    made = judge(hosts)
    for _ in range(4):
        assert made.judge([*window(links, pairs), *window(links, pairs)][:: draw.choice([1, 1, 2])]) == []


@pytest.mark.parametrize("computes", range(3))
def test_who_computes_for_long_or_is_stopped_is_not_told(computes: int) -> None:
    """Little goes to it and comes from it, and its link could do more."""
    host = "abc"[computes]
    flows = [
        (*ends, LinkUse(100_000, 0.2, 0.0) if host in ends else LinkUse(40_000_000, 3.0, 2.5))
        for ends in everybody("abc", 0)
    ]
    made = judge("abc")
    assert [made.judge(flows) for _ in range(4)] == [[]] * 4


def test_small_messages_that_wait_for_their_answers_are_not_told() -> None:
    """Each takes as long as an answer needs, whatever the link: nothing waited behind it."""
    flows = [(*ends, LinkUse(2_000_000, 4.9, 0.0)) for ends in (("a", "b"), ("b", "a"))]
    flows += [(*ends, LinkUse(60_000_000, 2.0, 1.5)) for ends in (("a", "c"), ("c", "a"))]
    made = judge("abc")
    assert [made.judge(flows) for _ in range(4)] == [[]] * 4


def test_a_slow_link_that_is_known_is_no_news_until_it_is_worse() -> None:
    known = {"a": 25.0, "b": 2.5, "c": 25.0}
    for rate, told in ((2.5, 0), (1.2, 0), (0.25, 1)):
        made = judge("abc", known)
        flows = [*window({"a": 25 * MB, "b": rate * MB, "c": 25 * MB}, everybody("abc", 2 * MB))]
        assert sum(len(made.judge(flows)) for _ in range(4)) == told


def test_it_is_told_once_when_two_windows_say_it_and_again_when_it_changed() -> None:
    hosts, made = "abc", judge("abc")
    quick = dict.fromkeys(hosts, 25 * MB)
    news = []
    for slow in (1, 10, 10, 10, 10, 100, 100, 100, 1, 1):
        sizes = everybody(hosts, 2 * MB)
        news.append(made.judge([*window(quick | {"b": 25 * MB / slow}, sizes)]))
    assert [len(each) for each in news] == [0, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert news[2][0].startswith("host b has a slow link: it ")
    assert news[8][0] == "host b has a link as quick as the others again"
    assert not made.lines


def test_a_window_in_which_little_was_sent_leaves_a_suspicion() -> None:
    made, sizes = judge("abc"), everybody("abc", 2 * MB)
    slow = [*window({"a": 25 * MB, "b": 2 * MB, "c": 25 * MB}, sizes)]
    assert [len(made.judge(each)) for each in (slow, [], [], slow, [])] == [0, 0, 0, 1, 0]
    assert [*made.lines] == ["b"]


def test_how_many_times_slower_goes_by_the_best_that_others_showed_lately() -> None:
    """Two others send little to each other, and in a single window they may show half of what their links give."""
    made, sizes = judge("abc"), everybody("abc", 3 * MB)
    slow = dict.fromkeys("abc", 25 * MB) | {"b": 2.5 * MB}
    news = made.judge([*window(slow, sizes)])
    tired = [
        (a, b, sent if "b" in (a, b) else sent._replace(seconds=2.4 * sent.seconds))
        for a, b, sent in window(slow, sizes)
    ]
    news += made.judge(tired)
    assert len(news) == 1
    assert 9 < made.told["b"].times < 11
    assert 3 < slow_links(together(tired), "abc", {})["b"].times < 5


def test_one_window_alone_is_not_told() -> None:
    made, sizes, quick = judge("abc"), everybody("abc", 8 * MB), dict.fromkeys("abc", 25 * MB)
    slow = [*window(quick | {"b": 2 * MB}, sizes)]
    assert [len(made.judge(each)) for each in (slow, [*window(quick, sizes)], slow)] == [0, 0, 0]


def test_of_two_hosts_the_link_is_told_where_it_gives_less_than_before() -> None:
    made = judge("ab")
    news = []
    for rate in (25, 25, 2.5, 2.5, 2.5, 25):
        news.append(made.judge([*window(dict.fromkeys("ab", rate * MB), everybody("ab", 10 * MB))]))
    assert [len(each) for each in news] == [0, 0, 0, 1, 0, 1]
    assert news[3] == ["the link between host a and host b is slow: 2.5 MB/s, 10.0 times less than the 25 MB/s before"]
    assert news[5] == ["the link between host a and host b is as quick as before again"]


def test_two_hosts_that_begin_with_little_are_not_told() -> None:
    made = judge("ab")
    for size in (0.01, 0.1, 1, 10, 100, 0.1, 100):
        assert made.judge([*window(dict.fromkeys("ab", 25 * MB), everybody("ab", size * MB))]) == []


def test_processes_of_a_host_add_up() -> None:
    def of(flows: Sequence[Flow]) -> dict[str, float]:
        return {host: found.times for host, found in slow_links(together(flows), "abc", {}).items()}

    flows = [*window({"a": 25 * MB, "b": 2 * MB, "c": 25 * MB}, everybody("abc", 3 * MB))]
    halves = [(a, b, LinkUse(sent.bytes // 2, sent.seconds, sent.full)) for a, b, sent in flows for _ in range(2)]
    assert of(flows)["b"] == pytest.approx(of(halves)["b"])
    assert of(flows)["b"] > FACTOR
