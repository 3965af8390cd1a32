"""The worker: one place to submit every transfer to, whatever its media."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence

from kvoffload.core.backend import Backend, HostOrder
from kvoffload.core.engine import CURRENT_STREAM, After, TransferEngine, TransferResult
from kvoffload.core.errors import ConfigurationError, StateError, UnroutableError
from kvoffload.core.handler import EngineOffloadingHandler, OffloadingHandler
from kvoffload.core.host_pool import HostCapacity
from kvoffload.core.kv_caches import CanonicalKVCaches
from kvoffload.core.specs import (
    DeviceLoadStoreSpec,
    HostLoadStoreSpec,
    LoadStoreSpec,
    TransferSpec,
)


class OffloadingWorker:
    """Routes each transfer to the handler that serves its pair of spec types."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[type[LoadStoreSpec], type[LoadStoreSpec]], OffloadingHandler]
        self._handlers = {}
        self._distinct: list[OffloadingHandler] = []
        self._finished: list[TransferResult] = []  # of a poll that a handler broke off
        self.engine: TransferEngine | None = None
        """The engine behind the device ↔ host handlers, if :meth:`for_caches` made one."""

    @classmethod
    def for_caches(
        cls,
        backend: Backend,
        caches: CanonicalKVCaches,
        *,
        host_bytes: int | str,
        block_size_factor: int = 1,
        host_order: HostOrder | None = None,
        null_block: int | None = None,
        tokens_per_block: int | Sequence[int] | None = None,
        longest_request: int | None = None,
        numa_node: int | None = None,
        job_deadline: float | None = None,
    ) -> OffloadingWorker:
        """A worker that stores blocks of ``caches`` in host memory and loads them back.

        It owns the backend from here on: :meth:`shutdown` closes it.

        Args:
            backend: as chosen by ``kvoffload.select_backend``.
            caches: the engine's KV cache.
            host_bytes: budget of host memory, a number or a string such as ``"4GiB"``.
            block_size_factor: device blocks per chunk.
            host_order, null_block, tokens_per_block, longest_request, numa_node, job_deadline:
                see :class:`TransferEngine`.

        Raises:
            CapacityError: the budget is malformed, below one chunk, or above the machine's memory.
            ConfigurationError: the caches are not on the backend's device.
        """
        engine = TransferEngine(
            backend,
            caches,
            host_bytes=host_bytes,
            block_size_factor=block_size_factor,
            host_order=host_order,
            null_block=null_block,
            tokens_per_block=tokens_per_block,
            longest_request=longest_request,
            numa_node=numa_node,
            job_deadline=job_deadline,
        )
        worker = cls()
        worker.engine = engine
        handler = EngineOffloadingHandler(engine)
        for src, dst in (
            (DeviceLoadStoreSpec, HostLoadStoreSpec),
            (HostLoadStoreSpec, DeviceLoadStoreSpec),
            (DeviceLoadStoreSpec, DeviceLoadStoreSpec),
        ):
            worker.register_handler(src, dst, handler)
        return worker

    def register_handler(
        self,
        src: type[LoadStoreSpec],
        dst: type[LoadStoreSpec],
        handler: OffloadingHandler,
    ) -> None:
        """Serve transfers from specs of type ``src`` to specs of type ``dst`` with ``handler``.

        Raises:
            ConfigurationError: the pair is served already.
        """
        if (src, dst) in self._handlers:
            raise ConfigurationError(f"{src.__name__} → {dst.__name__} has a handler already")
        self._handlers[src, dst] = handler
        if handler not in self._distinct:
            self._distinct.append(handler)

    def transfer_async(
        self,
        job_id: int,
        spec: tuple[LoadStoreSpec, LoadStoreSpec],
        *,
        after: After = CURRENT_STREAM,
    ) -> bool:
        """Start a transfer and return at once; see :meth:`OffloadingHandler.transfer_async`.

        Raises:
            UnroutableError: no handler serves this pair of spec types.
            SpecError: the arguments are wrong; no job was created.
        """
        return self._handler_of(spec).transfer_async(job_id, spec, after=after)

    def _handler_of(self, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> OffloadingHandler:
        src, dst = (type(side) for side in TransferSpec.of(spec))
        for kinds in itertools.product(src.__mro__, dst.__mro__):
            if kinds in self._handlers:
                return self._handlers[kinds]
        served = ", ".join(f"{s.__name__} → {d.__name__}" for s, d in self._handlers)
        raise UnroutableError(
            f"no handler for {src.__name__} → {dst.__name__}; served: {served or 'none'}"
        )

    def copy_blocks(
        self,
        job_id: int,
        src: DeviceLoadStoreSpec,
        dst: DeviceLoadStoreSpec,
        *,
        after: After = CURRENT_STREAM,
    ) -> bool:
        """Start copying device blocks to device blocks; as :meth:`transfer_async` in all else.

        Args:
            src, dst: blocks of the same groups; each goes to the one at its position. No block is
                on both sides.
        """
        return self.transfer_async(job_id, (src, dst), after=after)

    def get_finished(self) -> list[TransferResult]:
        """Results of all jobs that ended since the last call; never waits."""
        for handler in self._distinct:
            self._finished += handler.get_finished()
        results, self._finished = self._finished, []
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until the jobs have ended; unknown ids are ignored. Results come as always."""
        wanted = list(job_ids)
        for handler in self._distinct:
            handler.wait(wanted)

    def fence(self, job_ids: Iterable[int]) -> None:
        """Make the caller's current stream wait for the jobs; the calling thread goes on.

        For device work that reads what a load writes, or overwrites what a store still reads.
        Unknown ids are ignored.
        """
        wanted = list(job_ids)
        for handler in self._distinct:
            handler.fence(wanted)

    @property
    def num_chunks(self) -> list[int]:
        """Chunk ids that each group can use; what a manager is built with."""
        return list(self.capacity.chunks)

    @property
    def pool_of_group(self) -> list[int]:
        """Groups with the same number share chunk ids; what a manager is built with."""
        return [int(pool) for pool in self._require_engine().geometry.pool_of_group]

    @property
    def capacity(self) -> HostCapacity:
        """What the host budget bought."""
        return self._require_engine().host.layout.capacity

    def host_bytes_resident(self) -> int:
        """Bytes of host memory that the chunks occupy now, read from the operating system."""
        return self._require_engine().host.resident_bytes()

    def _require_engine(self) -> TransferEngine:
        if self.engine is None:
            raise StateError("this worker has no caches; build it with OffloadingWorker.for_caches")
        return self.engine

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Let the jobs fail as cancelled, once nothing of them runs any more.

        Their blocks are free with their results, and not before. Unknown ids are ignored.
        """
        wanted = list(job_ids)
        for handler in self._distinct:
            handler.cancel(wanted)

    def reset(self) -> None:
        """Cancel all jobs, and block until nothing of them runs any more."""
        self._require_engine().reset()

    def unregister(self, timeout: float | None = None) -> None:
        """Wait for all jobs and let go of the caches and of host memory; the backend stays open.

        For an engine that sleeps: when it wakes, :meth:`for_caches` takes the same backend again.

        Args:
            timeout: see :meth:`TransferEngine.unregister`.
        """
        self._require_engine().unregister(timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """End all jobs and shut every handler down. Works twice.

        Args:
            timeout: seconds to wait for jobs; what runs then is reported as stalled. By default as
                long as it takes.
        """
        with contextlib.ExitStack() as all_of_them:
            for handler in reversed(self._distinct):
                all_of_them.callback(handler.shutdown, timeout)
