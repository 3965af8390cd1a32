"""Capabilities and the probe: what is claimed is true, and what is not claimed is not used."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import fields

import torch

from kvoffload.core.backend import Backend, Capabilities, HostOrder, Probe
from kvoffload.core.lanes import Lane
from kvoffload.testing.conformance.check import Guarantee, MakeBackend, check, require, skip
from kvoffload.testing.conformance.lab import Cache, Lab


@check(Guarantee.PROBE, cache=None)
def the_probe_answers_and_never_raises(make_backend: MakeBackend) -> None:
    with contextlib.closing(make_backend()) as backend:
        for _ in range(2):
            found: object = backend.probe()
            require(isinstance(found, Probe), f"it returned {found!r}, not a Probe")
            probe = backend.probe()
            require(probe.available is True, f"it says that it cannot run: {probe.reason}")
            require(isinstance(probe.reason, str) and probe.reason, "it gives no reason")


@check(Guarantee.PROBE, cache=None)
def making_a_backend_does_nothing_to_the_device(make_backend: MakeBackend) -> None:
    with Lab(make_backend()) as lab:
        lab.rig.synchronize()
        before = lab.rig.allocated_bytes()
        made = [make_backend() for _ in range(3)]
        require(lab.rig.allocated_bytes() == before, "it took device memory")
        require(not any(backend.bound for backend in made), "it is bound before it was used")
        for backend in made:
            backend.close()


@check(Guarantee.CAPABILITIES, cache=None)
def capabilities_are_what_they_should_be(make_backend: MakeBackend) -> None:
    with contextlib.closing(make_backend()) as backend:
        claimed: object = backend.capabilities
        if not isinstance(claimed, Capabilities):
            require(False, f"they are {claimed!r}, not Capabilities")
            return
        for field in fields(claimed):
            value = getattr(claimed, field.name)
            if field.name == "host_order":
                fits = isinstance(value, HostOrder)
            elif field.name in ("register_limit", "max_batch", "queue_depth"):
                fits = value is None or (type(value) is int and value > 0)
            else:
                fits = type(value) is bool
            require(fits, f"{field.name} is {value!r}")
        require(
            claimed.batch_copy or claimed.max_batch is None, "max_batch without batch_copy is void"
        )
        require(type(backend.fallback) is bool, f"fallback is {backend.fallback!r}")


@check(Guarantee.CAPABILITIES, cache=None)
def the_device_is_named(make_backend: MakeBackend) -> None:
    with contextlib.closing(make_backend()) as backend:
        named: object = backend.device
        require(named is not None, "device is None: name the device where the caches live")
        require(isinstance(named, torch.device), f"device is {named!r}, not a torch.device")


@check(Guarantee.CAPABILITIES)
def memory_is_pinned_if_and_only_if_that_is_claimed(lab: Lab) -> None:
    claimed, memory = lab.backend.capabilities.pinned_memory, lab.engine.host.memory
    require(
        memory.pinned is claimed, f"pinned_memory is {claimed}, the memory says {memory.pinned}"
    )
    known = _torch_says_pinned(lab.backend, lab)
    if known is not None:
        require(known is claimed, f"pinned_memory is {claimed}, torch says {known}")


def _torch_says_pinned(backend: Backend, lab: Lab) -> bool | None:
    """Whether torch knows the memory as pinned; None where torch does not know the device."""
    if backend.device is None or backend.device.type == "cpu":
        return None
    with contextlib.suppress(RuntimeError):
        torch.empty(1).pin_memory()  # torch answers only once it has met the device
    return bool(lab.engine.host.memory.tensor.is_pinned())


@check(Guarantee.CAPABILITIES)
def a_result_tells_bytes_media_and_seconds(lab: Lab) -> None:
    lab.fill_all()
    page = sum(lab.cache.pages)
    began = time.perf_counter()
    stored, loaded = lab.finish(lab.store([1, 2, 3], [0, 1, 2]), lab.load([0, 1], [4, 5]))
    wall = time.perf_counter() - began
    sizes = (stored.transfer_size, loaded.transfer_size)
    require(sizes == (3 * page, 2 * page), f"bytes are {sizes}")
    require(stored.transfer_type == ("device", "host"), f"media are {stored.transfer_type}")
    require(loaded.transfer_type == ("host", "device"), f"media are {loaded.transfer_type}")
    for result in (stored, loaded):
        seconds = result.transfer_time
        if not lab.backend.capabilities.timing_events:
            require(seconds is None, "there are seconds without timing events")
            continue
        require(
            isinstance(seconds, float) and math.isfinite(seconds) and seconds >= 0,
            f"seconds are {seconds!r}",
        )
        if lab.rig.one_copy(4096, Lane.STORE) is not None:
            # A device clock may tick coarsely, but no copy takes longer than all of this did.
            require(float(seconds or 0) <= wall + 1e-3, f"{seconds} s of a copy in {wall} s")


@check(Guarantee.CAPABILITIES, needs=("timing_events",))
def seconds_exclude_what_a_transfer_waited_for(lab: Lab) -> None:
    if lab.rig.one_copy(4096, Lane.STORE) is None:
        skip("time means nothing on this device")
    lab.fill_all()
    lab.rig.synchronize()
    lab.hold()
    began = time.perf_counter()
    job = lab.store([1], [0])
    while time.perf_counter() - began < 0.25 and lab.rig.holding:
        lab.collect()
    held = time.perf_counter() - began
    lab.rig.release()
    (result,) = lab.finish(job)
    require(
        result.transfer_time is not None and result.transfer_time < held,
        f"{result.transfer_time} s of a copy that waited {held} s",
    )


@check(Guarantee.CAPABILITIES, cache=Cache(pages=(64,) * 4, groups=((0, 1, 2, 3),), blocks=300,
                                           chunks=300))  # fmt: skip
def more_copies_than_one_call_or_queue_takes_still_move(lab: Lab) -> None:
    lab.fill_all()
    jobs = []
    for _ in range(8):
        blocks, chunks = (lab.rng.permutation(300).tolist() for _ in range(2))
        jobs.append(lab.store(blocks, chunks))
        jobs.append(lab.load(chunks, blocks[::-1]))
    lab.succeed(*jobs)
    lab.check()
