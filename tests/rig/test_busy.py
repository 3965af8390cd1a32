"""How a stream without a gate is kept busy: with few products, however fast the device is."""

from __future__ import annotations

import pytest

from kvoffload.rig.torch_device import HOLD_SECONDS, LARGEST, MOST_PRODUCTS, SMALLEST, busy_work


@pytest.mark.parametrize("operations_per_second", [1e9, 1e11, 1e13, 5e13, 1e15, 1e18])
@pytest.mark.parametrize("least_seconds", [1e-7, 5e-6, 1e-4])
def test_few_products_hold_the_stream(operations_per_second: float, least_seconds: float) -> None:
    def seconds_of(size: int, products: int) -> float:
        return products * max(2 * size**3 / operations_per_second, least_seconds)

    size, products = busy_work(seconds_of)
    assert SMALLEST <= size <= LARGEST
    assert products <= MOST_PRODUCTS or size == LARGEST
    held = seconds_of(size, products)
    assert held >= HOLD_SECONDS
    assert held <= 1.5 * HOLD_SECONDS or products == 1


def test_a_slow_device_is_not_asked_for_more_than_it_needs() -> None:
    assert busy_work(lambda _, products: products * 0.1) == (SMALLEST, 6)
