"""A handler moves blocks between two media, asynchronously, and reports each job once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvoffload.core.engine import CURRENT_STREAM, After, TransferEngine, TransferResult
from kvoffload.core.errors import UnroutableError
from kvoffload.core.lanes import Lane
from kvoffload.core.specs import LoadStoreSpec, TransferSpec


class OffloadingHandler(ABC):
    """Moves blocks from one medium to another."""

    @abstractmethod
    def transfer_async(
        self,
        job_id: int,
        spec: tuple[LoadStoreSpec, LoadStoreSpec],
        *,
        after: After = CURRENT_STREAM,
    ) -> bool:
        """Start a transfer and return at once.

        Args:
            job_id: any integer that is not in flight.
            spec: source and destination.
            after: what the copy starts after; by default everything that the calling thread's
                stream holds now.

        Returns:
            True: the job was created, and :meth:`get_finished` will report it.

        Raises:
            SpecError: the arguments are wrong; no job was created.
            ClosedError: after :meth:`shutdown`.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Results of the jobs that ended since the last call; never waits."""

    @abstractmethod
    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until the jobs have ended; unknown ids are ignored. Results come as always."""

    @abstractmethod
    def fence(self, job_ids: Iterable[int]) -> None:
        """Make the caller's current stream wait for the jobs; unknown ids are ignored."""

    @abstractmethod
    def cancel(self, job_ids: Iterable[int]) -> None:
        """Let the jobs fail as cancelled once they have stopped; unknown ids are ignored."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End all jobs and give resources back. Works twice.

        Args:
            timeout: seconds to wait for jobs; by default as long as it takes.
        """


class EngineOffloadingHandler(OffloadingHandler):
    """All directions of a :class:`TransferEngine`."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def transfer_async(
        self,
        job_id: int,
        spec: tuple[LoadStoreSpec, LoadStoreSpec],
        *,
        after: After = CURRENT_STREAM,
    ) -> bool:
        self._engine.submit(job_id, *TransferSpec.of(spec), after=after)
        return True

    def get_finished(self) -> list[TransferResult]:
        return self._engine.finished()

    def wait(self, job_ids: Iterable[int]) -> None:
        self._engine.wait(job_ids)

    def fence(self, job_ids: Iterable[int]) -> None:
        self._engine.fence(job_ids)

    def cancel(self, job_ids: Iterable[int]) -> None:
        self._engine.cancel(job_ids)

    def shutdown(self, timeout: float | None = None) -> None:
        self._engine.shutdown(timeout)


class SingleDirectionOffloadingHandler(EngineOffloadingHandler):
    """One direction of a :class:`TransferEngine`: only stores, only loads, or only copies."""

    def __init__(self, engine: TransferEngine, lane: Lane) -> None:
        super().__init__(engine)
        self._lane = lane

    def transfer_async(
        self,
        job_id: int,
        spec: tuple[LoadStoreSpec, LoadStoreSpec],
        *,
        after: After = CURRENT_STREAM,
    ) -> bool:
        src, dst = TransferSpec.of(spec)
        if (src.medium(), dst.medium()) != self._lane.media:
            raise UnroutableError(
                f"this handler moves {' → '.join(self._lane.media)}, "
                f"not {src.medium()} → {dst.medium()}"
            )
        return super().transfer_async(job_id, spec, after=after)

    def get_finished(self) -> list[TransferResult]:
        return self._engine.finished(self._lane)
