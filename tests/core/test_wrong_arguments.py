"""Wrong arguments raise, and create no job."""

from __future__ import annotations

import pytest

from kvoffload.core.errors import (
    BlockCountError,
    BlockRangeError,
    DuplicateBlockError,
    DuplicateJobError,
    SpecError,
    UnroutableError,
)
from kvoffload.core.specs import DeviceLoadStoreSpec, HostLoadStoreSpec, LoadStoreSpec
from kvoffload.testing.conformance import Lab


def device(*ids: int) -> DeviceLoadStoreSpec:
    return DeviceLoadStoreSpec(list(ids))


def host(*ids: int) -> HostLoadStoreSpec:
    return HostLoadStoreSpec(list(ids))


@pytest.mark.parametrize(
    ("src", "dst", "error"),
    [
        (device(12), host(0), BlockRangeError),
        (device(-1), host(0), BlockRangeError),
        (device(0), host(8), BlockRangeError),
        (host(-1), device(0), BlockRangeError),
        (device(0, 1), host(0), BlockCountError),
        (device(0, 1), host(2, 2), DuplicateBlockError),
        (host(0, 1), device(3, 3), DuplicateBlockError),
        (host(0), host(1), UnroutableError),
        (device(0, 1), device(1, 2), DuplicateBlockError),
        (device(0, 1), device(2, 2), DuplicateBlockError),
        (device(0), device(1, 2), BlockCountError),
        (DeviceLoadStoreSpec([0, 1], [1, 1]), host(0, 1), BlockCountError),
    ],
)
def test_wrong_specs(
    lab: Lab, src: LoadStoreSpec, dst: LoadStoreSpec, error: type[Exception]
) -> None:
    with pytest.raises(error):
        lab.worker.transfer_async(1, (src, dst))
    assert lab.engine.in_flight == []
    assert lab.worker.get_finished() == []


@pytest.mark.parametrize("job_id", ["1", True, 1.0, None])
def test_wrong_job_ids(lab: Lab, job_id: object) -> None:
    with pytest.raises(SpecError):
        lab.worker.transfer_async(job_id, (device(0), host(0)))  # type: ignore[arg-type]
    assert lab.engine.in_flight == []


def test_a_job_id_that_is_in_flight(lab: Lab) -> None:
    lab.rig.hold()
    job = lab.store([0], [0])
    with pytest.raises(DuplicateJobError):
        lab.worker.transfer_async(job, (device(1), host(1)))
    lab.rig.release()
    lab.succeed(job)
