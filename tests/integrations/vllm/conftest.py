"""What the tests on a real engine share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.integrations.vllm import tiny
from tests.integrations.vllm.engine import VLLM, Tokens, close_engine, prompts, right_answers

ON_ENGINE = {
    f"{__package__}.{name}"
    for name in ("test_engine", "test_failures_on_engine", "test_hybrid_on_engine")
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those on an engine are left out where there is none; they start slowly, and warn a lot."""
    for item in items:
        if item.module.__name__ not in ON_ENGINE:  # type: ignore[attr-defined]
            continue
        item.add_marker(pytest.mark.timeout(240))
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if not VLLM:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; see make test-vllm"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are all alike."""
    return tiny.save("Llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def right(llama: Path) -> Tokens:
    """What the model answers to :func:`prompts` without offloading."""
    return right_answers(llama, prompts(4))


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> None:
    """An engine keeps its threads from test to test; see below."""


@pytest.fixture(scope="module", autouse=True)
def _no_engine_left_behind() -> Iterator[None]:
    yield
    close_engine()
    left = [thread.name for thread in threading.enumerate() if "kvoffload" in thread.name]
    assert not left, f"threads still running: {left}"
