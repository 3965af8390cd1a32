"""The order of eviction by itself."""

from __future__ import annotations

from kvoffload.scheduler.keys import OffloadKey
from kvoffload.scheduler.policy import LRUPolicy


def keys(names: str) -> list[OffloadKey]:
    return [OffloadKey(name.encode()) for name in names]


def order(policy: LRUPolicy, count: int) -> str:
    victims = policy.victims(count, lambda _: True)
    assert victims is not None
    return b"".join(key.block_hash for key in victims).decode()


def test_a_shared_head_belongs_to_the_request_that_used_it_last() -> None:
    policy = LRUPolicy()
    policy.access("A", keys("abc"))
    policy.access("B", keys("abx"))
    assert order(policy, 4) == "cxba"


def test_a_name_that_comes_again_is_another_request() -> None:
    policy = LRUPolicy()
    policy.access("A", keys("ab"))
    policy.finish("A")
    policy.access("B", keys("cd"))
    policy.access("A", keys("x"))
    assert order(policy, 5) == "badcx"


def test_forgotten_keys_leave_nothing_behind() -> None:
    policy = LRUPolicy()
    for number in range(100):
        policy.access(str(number), keys("ab"))
        policy.finish(str(number))
        policy.forget(keys("ab"))
    assert not policy._accesses
    assert not policy._access_of
    assert not policy._running


def test_too_few_evictable_keys_are_none_at_all() -> None:
    policy = LRUPolicy()
    policy.access("A", keys("abc"))
    assert policy.victims(3, lambda key: key.block_hash != b"b") is None
    assert policy.victims(0, lambda _: False) == []


def test_victims_cost_what_is_evicted_not_what_is_kept() -> None:
    policy = LRUPolicy()
    for number in range(1000):
        policy.access(str(number), [OffloadKey(b"%d" % number)])
    asked = 0

    def evictable(_: OffloadKey) -> bool:
        nonlocal asked
        asked += 1
        return True

    policy.victims(5, evictable)
    assert asked == 5
