"""When a transfer counts as ended for the scheduler: when every worker has said so."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvoffload.core.errors import ConfigurationError, UnexpectedAcknowledgementError

K = TypeVar("K", bound=Hashable)


@dataclass
class _Open:
    missing: int  # workers
    failed: bool = False


class Acknowledgements(Generic[K]):
    """Counts the workers that have ended a transfer. The failure of one fails it.

    Args:
        workers: that take part in every transfer.

    Raises:
        ConfigurationError: there is none.
    """

    def __init__(self, workers: int) -> None:
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigurationError(f"workers must be at least 1, not {workers!r}")
        self._workers = workers
        self._open: dict[K, _Open] = {}

    def expect(self, name: K) -> None:
        """The workers are told of this transfer now."""
        self._open[name] = _Open(self._workers)

    def add(self, name: K, ended: int = 1, failed: int = 0) -> bool | None:
        """Some workers have ended the transfer.

        Args:
            name: of the transfer.
            ended: how many workers, those included where it failed.
            failed: how many of them failed.

        Returns:
            None as long as a worker is missing; with the last, and only then, whether all have
            succeeded.

        Raises:
            UnexpectedAcknowledgementError: it is not in flight, or so many workers are not missing.
        """
        entry = self._open.get(name)
        if entry is None or ended > entry.missing:
            raise UnexpectedAcknowledgementError(
                f"{ended} workers acknowledge transfer {name!r}, which "
                + ("is not in flight" if entry is None else f"{entry.missing} have not ended")
            )
        entry.missing -= ended
        entry.failed = entry.failed or failed > 0
        if entry.missing:
            return None
        del self._open[name]
        return not entry.failed

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._open))
