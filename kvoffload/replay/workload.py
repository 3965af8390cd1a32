"""The built-in workload: people who chat in several turns.

Each session opens with one of a few system prompts and then takes turns. A turn's prompt is the
whole conversation so far and a new message; the answer becomes part of the next prompt. So a turn
shares all full blocks with the turn before, if they are still there after a minute or so of
thinking in which other sessions ran. Lengths are exponential, in tokens: about 600 for a message,
300 for an answer. Sessions begin at a constant rate; turns of one follow each other after about
60 seconds.
"""

from __future__ import annotations

import heapq
import itertools
import random

from kvoffload.core.errors import ConfigurationError
from kvoffload.replay.trace import TOKENS_PER_BLOCK, Request

SYSTEM_PROMPTS = 4
SYSTEM_TOKENS = 2048
MESSAGE_TOKENS = 600
ANSWER_TOKENS = 300
TURNS = 8
THINK_MS = 60_000.0
SESSION_INTERVAL_MS = 1_500.0
MOST_REQUESTS = 1_000_000
"""What memory holds with ease."""


def chat(seed: int, requests: int = 2000) -> list[Request]:
    """The earliest ``requests`` turns, in order of arrival; the same for the same seed.

    Raises:
        ConfigurationError: more than :data:`MOST_REQUESTS`.
    """
    if requests > MOST_REQUESTS:
        raise ConfigurationError(
            f"--limit {requests}: the built-in workload has at most {MOST_REQUESTS:,} requests"
        )
    rng = random.Random(seed)
    ids = itertools.count()
    systems = [
        [next(ids) for _ in range(SYSTEM_TOKENS // TOKENS_PER_BLOCK)] for _ in range(SYSTEM_PROMPTS)
    ]
    turns: list[Request] = []
    # Turns that have come before any later session begins are enough once there are so many.
    to_come: list[float] = []
    come = 0
    for session in itertools.count():
        now = session * SESSION_INTERVAL_MS
        while to_come and to_come[0] <= now:
            heapq.heappop(to_come)
            come += 1
        if come >= requests:
            break
        blocks = list(rng.choice(systems))
        tokens = len(blocks) * TOKENS_PER_BLOCK
        for turn in range(rng.randint(1, 2 * TURNS - 1)):
            tokens += 1 + int(rng.expovariate(1 / MESSAGE_TOKENS))
            while len(blocks) < tokens // TOKENS_PER_BLOCK:
                blocks.append(next(ids))
            # The last block is partial: with the next turn it will be another.
            partial = [next(ids)] if tokens % TOKENS_PER_BLOCK else []
            source = f"session {session}, turn {turn}"
            turns.append(Request(now, [*blocks, *partial], source))
            heapq.heappush(to_come, now)
            tokens += 1 + int(rng.expovariate(1 / ANSWER_TOKENS))
            now += rng.expovariate(1 / THINK_MS)
    turns.sort(key=lambda request: request.timestamp)
    return turns[:requests]
