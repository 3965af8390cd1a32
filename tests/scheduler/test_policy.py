"""The order of eviction by itself."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.policy import LRUPolicy


def keys(names: str) -> list[OffloadKey]:
    return [OffloadKey(name.encode()) for name in names]


def access(policy: LRUPolicy, request_id: str, names: str) -> None:
    """The request uses these keys, which nothing else does."""
    policy.access(request_id, keys(names))


def order(
    policy: LRUPolicy, count: int, spared: Collection[OffloadKey] = (), request_id: str = "?"
) -> str | None:
    victims = policy.victims(count, spared, request_id)
    return None if victims is None else b"".join(key.block_hash for key in victims).decode()


def test_a_shared_head_belongs_to_the_request_that_used_it_last() -> None:
    policy = LRUPolicy()
    access(policy, "A", "abc")
    access(policy, "B", "abx")
    assert order(policy, 4) == "cxba"


def test_a_request_that_goes_on_takes_its_whole_prefix_along_E14() -> None:
    policy = LRUPolicy()
    access(policy, "A", "ab")
    access(policy, "B", "ab")  # shares the head, and is over
    policy.finish("B")
    access(policy, "A", "cd")
    assert order(policy, 4) == "dcba"


def test_a_head_that_comes_back_is_not_the_tail_E14() -> None:
    policy = LRUPolicy()
    access(policy, "A", "abcd")
    access(policy, "B", "a")
    access(policy, "A", "ab")
    assert order(policy, 4) == "dcba"


def test_a_key_that_was_evicted_does_not_come_back_by_itself() -> None:
    policy = LRUPolicy()
    access(policy, "A", "ab")
    access(policy, "B", "b")
    policy.forget(keys("b"))
    access(policy, "A", "c")
    assert order(policy, 2) == "ca"
    assert order(policy, 3) is None
    access(policy, "A", "b")  # stored again, at its place
    assert order(policy, 3) == "cba"


def test_a_name_that_comes_again_is_another_request() -> None:
    policy = LRUPolicy()
    access(policy, "A", "ab")
    policy.finish("A")
    access(policy, "B", "cd")
    access(policy, "A", "x")
    assert order(policy, 5) == "badcx"


def test_a_request_loses_its_own_prefix_only_when_nothing_else_is_left() -> None:
    policy = LRUPolicy()
    access(policy, "A", "ab")
    access(policy, "B", "cd")
    assert order(policy, 1, request_id="A") == "d"
    assert order(policy, 3, request_id="A") == "dcb"
    assert order(policy, 3, request_id="B") == "bad"


def test_keys_in_use_or_spared_are_no_victims() -> None:
    policy = LRUPolicy()
    access(policy, "A", "abcd")
    policy.hold(keys("c")[0])
    assert order(policy, 2, spared=keys("d")) == "ba"
    assert order(policy, 3, spared=keys("d")) is None
    policy.free(keys("c")[0])
    assert order(policy, 3, spared=keys("d")) == "cba"
    assert order(policy, 0) == ""


def test_asking_changes_nothing() -> None:
    policy = LRUPolicy()
    for name in "abc":
        access(policy, name, name)
    assert [order(policy, n) for n in (1, 3, 4, 1, 3)] == ["a", "abc", None, "a", "abc"]


def test_forgotten_keys_leave_nothing_behind() -> None:
    policy = LRUPolicy()
    for number in range(1000):
        access(policy, str(number), "ab")
        policy.finish(str(number))
        policy.forget(keys("ab"))
    assert not policy._access_of
    assert not policy._running
    assert not policy._owner
    assert len(policy._cold) <= 64


def test_a_policy_stays_small_when_requests_come_and_go() -> None:
    policy = LRUPolicy()
    for number in range(10_000):
        access(policy, str(number), "abc")
        policy.finish(str(number))
    assert len(policy._cold) <= 4 * 3 + 65


@pytest.mark.parametrize("seed", range(20))
def test_victims_agree_with_sorting_everything(seed: int) -> None:
    """Against a model that sorts all keys by their request's last call and place in its prefix."""
    rng, policy = random.Random(seed), LRUPolicy()
    last: dict[str, int] = {}  # when the request called last
    owner: dict[OffloadKey, tuple[str, int]] = {}  # request and place
    held: set[OffloadKey] = set()
    chains = {
        name: [OffloadKey(b"%s%d" % (name[0].encode(), i)) for i in range(8)] for name in "ABCDEF"
    }
    reach = dict.fromkeys(chains, 0)
    for step in range(300):
        name = rng.choice(sorted(chains))
        reach[name] = min(reach[name] + rng.randint(1, 3), 8)
        policy.access(name, chains[name][: reach[name]])
        last[name] = step
        for place, key in enumerate(chains[name][: reach[name]]):
            owner[key] = (name, place)
        key = rng.choice(sorted(owner))
        if key in held:
            held.discard(key)
            policy.free(key)
        elif rng.random() < 0.5:
            held.add(key)
            policy.hold(key)
        idle = [k for k in owner if k not in held]
        expected = sorted(idle, key=lambda k: (last[owner[k][0]], -owner[k][1]))
        count = rng.randint(0, len(idle))
        assert policy.victims(count, (), "?") == expected[:count]
        assert policy.victims(len(idle) + 1, (), "?") is None


def test_victims_cost_what_is_evicted_and_not_what_is_kept_or_in_use() -> None:
    policy = LRUPolicy()
    for number in range(20_000):
        key = OffloadKey(b"%d" % number)
        policy.access(str(number), [key])
        if number < 10_000:
            policy.hold(key)
    policy.victims(1, (), "?")  # passes over what has come into use since it was asked last
    looked_at = 0
    add_victims = policy._add_victims

    def count(*args: object) -> None:
        nonlocal looked_at
        looked_at += 1
        add_victims(*args)  # type: ignore[arg-type]

    policy._add_victims = count  # type: ignore[method-assign, assignment]
    assert policy.victims(5, (), "?") == [OffloadKey(b"%d" % n) for n in range(10_000, 10_005)]
    assert looked_at == 5
