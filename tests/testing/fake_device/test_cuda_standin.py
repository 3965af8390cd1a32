"""The stand-ins for CUDA's driver check what a driver checks, and do what it does."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kvoffload.testing.fake_device import FakeDevice, load
from kvoffload.testing.fake_device.build import SOURCES
from tests.testing.fake_device.held import until_waited_for

pytestmark = pytest.mark.fake

SUCCESS = 0
INVALID_VALUE = 1
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED = 900
UNKNOWN = 999

IN_STREAM_ORDER, DURING_THE_CALL, IN_ANY_ORDER = 1, 2, 3
NO_INDEX = 2**64 - 1
PAGE = 4096

SOURCE = (SOURCES / "cuda_driver.cpp").read_text()
EXPORTED = re.findall(r"^CUresult CUDAAPI (cu\w+)\(", SOURCE, flags=re.MULTILINE)
NEVER_FAIL = ("cuGetErrorName", "cuGetErrorString")  # they tell of failures

Int, Long, Address = ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p
Size = ctypes.c_size_t
POINTERS = ctypes.POINTER(Long)
SIZES = ctypes.POINTER(Size)


class Location(ctypes.Structure):
    _fields_ = (("type", Int), ("id", Int))


class Attributes(ctypes.Structure):
    _fields_ = (
        ("order", Int),
        ("src_hint", Location),
        ("dst_hint", Location),
        ("flags", ctypes.c_uint),
    )


ATTRIBUTES = ctypes.POINTER(Attributes)
BATCH = (POINTERS, POINTERS, SIZES, Size, ATTRIBUTES, SIZES, Size)
SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (Address,),
    "cuDeviceGetCount": (Address,),
    "cuDeviceGet": (Address, Int),
    "cuDeviceGetName": (Address, Int, Int),
    "cuDeviceGetPCIBusId": (Address, Int, Int),
    "cuDevicePrimaryCtxRetain": (Address, Int),
    "cuDevicePrimaryCtxRelease_v2": (Int,),
    "cuCtxPushCurrent_v2": (Address,),
    "cuCtxPopCurrent_v2": (Address,),
    "cuCtxGetCurrent": (Address,),
    "cuStreamIsCapturing": (Address, Address),
    "cuThreadExchangeStreamCaptureMode": (Address,),
    "cuMemHostRegister_v2": (Address, Size, ctypes.c_uint),
    "cuMemHostUnregister": (Address,),
    "cuMemcpyAsync": (Long, Long, Size, Address),
    "cuMemcpyBatchAsync": (*BATCH, SIZES, Address),
    "cuMemcpyBatchAsync_v2": (*BATCH, Address),
    "cuGetErrorName": (Int, Address),
    "cuGetErrorString": (Int, Address),
    "cuGetProcAddress_v2": (ctypes.c_char_p, Address, Int, Long, Address),
}


class Answer(NamedTuple):
    """Of a batch: its result, and which copy was at fault."""

    result: int
    failed: int


class Driver:
    """Calls the stand-ins as a program that links against the driver."""

    def __init__(self, fake: FakeDevice) -> None:
        self.fake = fake
        self.library = ctypes.CDLL(str(fake.path))
        for name, arguments in SIGNATURES.items():
            getattr(self.library, name).argtypes = arguments
        self.contexts: dict[int, int] = {}
        self.library.fake_cuda_version.argtypes = [Int]
        self.library.fake_cuda_registration_ceiling.argtypes = [ctypes.c_int64]

    def call(self, name: str, *arguments: object) -> int:
        result: int = getattr(self.library, name)(*arguments)
        return result

    def done(self, name: str, *arguments: object) -> None:
        assert self.call(name, *arguments) == SUCCESS, self.why()

    def why(self) -> str:
        """Why the last call of this thread failed."""
        text = ctypes.c_char_p()
        self.call("cuGetErrorString", 0, ctypes.byref(text))
        return (text.value or b"").decode()

    def number(self, name: str, *arguments: object) -> int:
        """What a call answers through its first argument."""
        out = Int(-1)
        self.done(name, ctypes.byref(out), *arguments)
        return out.value

    def context(self, device: int) -> int:
        if device not in self.contexts:
            out = Address()
            self.done("cuDevicePrimaryCtxRetain", ctypes.byref(out), device)
            assert out.value is not None
            self.contexts[device] = out.value
        return self.contexts[device]

    def register(self, array: np.ndarray, flags: int = 0) -> int:
        return self.call("cuMemHostRegister_v2", array.ctypes.data, array.nbytes, flags)

    def copy(self, dst: int, src: int, nbytes: int, stream: int | None) -> int:
        return self.call("cuMemcpyAsync", dst, src, nbytes, stream)

    def batch(
        self,
        dsts: Sequence[int],
        srcs: Sequence[int],
        sizes: Sequence[int],
        stream: int | None,
        *,
        orders: Sequence[int] = (IN_STREAM_ORDER,),
        indices: Sequence[int] = (0,),
        flags: int = 0,
        new: bool = False,
        missing: str = "",
        count: int | None = None,
        attr_count: int | None = None,
    ) -> Answer:
        """A batch in the old form, which tells the copy at fault, or in the new one."""
        attributes = (Attributes * len(orders))(*(Attributes(order=o, flags=flags) for o in orders))
        arrays: dict[str, object] = {
            "dsts": (Long * len(dsts))(*dsts),
            "srcs": (Long * len(srcs))(*srcs),
            "sizes": (Size * len(sizes))(*sizes),
            "attrs": attributes,
            "indices": (Size * len(indices))(*indices),
        }
        if missing:
            arrays[missing] = None
        failed = Size(0)
        arguments = (
            *(arrays["dsts"], arrays["srcs"], arrays["sizes"]),
            len(sizes) if count is None else count,
            *(arrays["attrs"], arrays["indices"]),
            len(orders) if attr_count is None else attr_count,
        )
        if new:
            return Answer(self.call("cuMemcpyBatchAsync_v2", *arguments, stream), 0)
        result = self.call("cuMemcpyBatchAsync", *arguments, ctypes.byref(failed), stream)
        return Answer(result, failed.value)

    def batch_function(self, version: int) -> tuple[int, str, int]:
        """What cuGetProcAddress answers for the batch: result, name of the function, status."""
        function, status = Address(1), Int(-1)
        result = self.call(
            *("cuGetProcAddress_v2", b"cuMemcpyBatchAsync", ctypes.byref(function), version, 0),
            ctypes.byref(status),
        )
        names = {
            ctypes.cast(getattr(self.library, name), Address).value: name
            for name in ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")
        }
        return result, names.get(function.value, ""), status.value


@pytest.fixture
def driver() -> Iterator[Driver]:
    """The driver, its first context current; afterwards as it was."""
    fake = load()
    if not fake.has_cuda:
        pytest.skip("built without cuda.h")
    made = Driver(fake)
    made.done("cuCtxPushCurrent_v2", made.context(0))
    registrations = fake.counts().registrations
    yield made
    fake.calm()
    made.library.fake_cuda_version(13000)
    made.library.fake_cuda_registration_ceiling(2**63 - 1)
    popped = Address()
    while made.call("cuCtxPopCurrent_v2", ctypes.byref(popped)) == SUCCESS:
        pass
    assert fake.counts().registrations == registrations


class Stream:
    """One of torch's, as torch and as the driver name it."""

    def __init__(self, device: str = "fake:0") -> None:
        self.torch = torch.Stream(device=device)
        self.handle = int(self.torch.native_handle)  # type: ignore[attr-defined]

    def error(self) -> str:
        """What the next event says."""
        event = self.torch.record_event()
        event.synchronize()
        try:
            assert event.query()
        except RuntimeError as error:
            return str(error)
        return ""


@pytest.fixture
def stream(driver: Driver) -> Iterator[Stream]:
    made = Stream()
    yield made
    driver.fake.calm()
    made.error()


def device_memory(nbytes: int, device: str = "fake:0") -> torch.Tensor:
    made = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8).to(device)
    torch.accelerator.synchronize(torch.device(device))
    return made


def pinned_memory(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)


def host_memory(nbytes: int) -> np.ndarray:
    """Pageable, and the only thing in its pages."""
    whole = np.zeros(nbytes + PAGE, dtype=np.uint8)
    offset = -whole.ctypes.data % PAGE
    return whole[offset : offset + nbytes]


# -------------------------------------------------------------------------------- what is exported


def test_every_function_has_a_signature_here() -> None:
    assert sorted(EXPORTED) == sorted(SIGNATURES)


def call_by_name(driver: Driver, name: str, stream: Stream) -> int:
    """Call a function in a way that works, and leave nothing behind."""
    dst, src = device_memory(8), pinned_memory(8)
    out, text = Address(), ctypes.create_string_buffer(64)
    array = host_memory(PAGE)
    if name == "cuMemHostUnregister":
        assert driver.register(array) == SUCCESS
    if name == "cuDevicePrimaryCtxRelease_v2":
        driver.context(0)
    if name == "cuCtxPopCurrent_v2":
        driver.done("cuCtxPushCurrent_v2", driver.context(1))
    copies = driver.fake.counts().copies
    if name.startswith("cuMemcpyBatchAsync"):
        result = driver.batch(
            *([dst.data_ptr()], [src.data_ptr()], [8], stream.handle), new=name.endswith("_v2")
        ).result
    else:
        arguments: dict[str, tuple[object, ...]] = {
            "cuInit": (0,),
            "cuDeviceGet": (ctypes.byref(out), 0),
            "cuDeviceGetName": (text, 64, 0),
            "cuDeviceGetPCIBusId": (text, 64, 0),
            "cuDevicePrimaryCtxRetain": (ctypes.byref(out), 0),
            "cuDevicePrimaryCtxRelease_v2": (0,),
            "cuCtxPushCurrent_v2": (driver.context(0),),
            "cuStreamIsCapturing": (stream.handle, ctypes.byref(out)),
            "cuMemHostRegister_v2": (array.ctypes.data, PAGE, 0),
            "cuMemHostUnregister": (array.ctypes.data,),
            "cuMemcpyAsync": (dst.data_ptr(), src.data_ptr(), 8, stream.handle),
            "cuGetProcAddress_v2": (b"cuMemcpyBatchAsync", ctypes.byref(out), 12080, 0, None),
        }
        result = driver.call(name, *arguments.get(name, (ctypes.byref(out),)))
    if name == "cuMemHostRegister_v2" and result == SUCCESS:
        driver.done("cuMemHostUnregister", array.ctypes.data)
    if name == "cuMemHostUnregister" and result != SUCCESS:
        driver.done(name, array.ctypes.data)
    assert stream.error() == ""
    copied = "cuMemcpy" in name and result == SUCCESS
    assert driver.fake.counts().copies - copies == copied
    return result


@pytest.mark.parametrize("name", [name for name in EXPORTED if name not in NEVER_FAIL])
def test_every_function_fails_once_when_told(driver: Driver, stream: Stream, name: str) -> None:
    assert call_by_name(driver, name, stream) == SUCCESS
    driver.fake.fail_call(name, code=700)
    assert call_by_name(driver, name, stream) == 700
    assert call_by_name(driver, name, stream) == SUCCESS


def test_a_failure_may_come_later(driver: Driver) -> None:
    driver.fake.fail_call("cuDriverGetVersion", code=2, after=2)
    out = Int()
    results = [driver.call("cuDriverGetVersion", ctypes.byref(out)) for _ in range(4)]
    assert results == [0, 0, 2, 0]
    driver.fake.fail_call("cuDriverGetVersion", code=2)
    driver.fake.calm()
    assert driver.call("cuDriverGetVersion", ctypes.byref(out)) == SUCCESS


@pytest.mark.parametrize(
    "name",
    [
        *("cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName"),
        *("cuDeviceGetPCIBusId", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent"),
        *("cuStreamIsCapturing", "cuGetErrorName", "cuGetErrorString", "cuGetProcAddress_v2"),
    ],
)
def test_nowhere_to_put_the_answer_is_no_crash(driver: Driver, name: str) -> None:
    nothing = [None if kind in (Address, ctypes.c_char_p) else 0 for kind in SIGNATURES[name]]
    assert driver.call(name, *nothing) == INVALID_VALUE


# ------------------------------------------------------------------------- devices and contexts


def test_the_driver_names_its_devices(driver: Driver) -> None:
    driver.done("cuInit", 0)
    assert driver.call("cuInit", 1) == INVALID_VALUE
    assert driver.number("cuDeviceGetCount") == 2
    assert [driver.number("cuDeviceGet", n) for n in range(2)] == [0, 1]
    text = ctypes.create_string_buffer(64)
    driver.done("cuDeviceGetName", text, 64, 1)
    assert text.value == b"fake device"
    ids = set()
    for device in range(2):
        driver.done("cuDeviceGetPCIBusId", text, 64, device)
        ids.add(text.value)
    assert len(ids) == 2
    driver.done("cuDeviceGetPCIBusId", text, 4, 0)  # cut, and ended
    assert text.value == b"000"


@pytest.mark.parametrize("device", [-1, 2])
def test_there_is_no_third_device(driver: Driver, device: int) -> None:
    out, text = Address(), ctypes.create_string_buffer(64)
    assert driver.call("cuDeviceGet", ctypes.byref(out), device) == INVALID_DEVICE
    assert driver.call("cuDeviceGetName", text, 64, device) == INVALID_DEVICE
    assert driver.call("cuDeviceGetPCIBusId", text, 64, device) == INVALID_DEVICE
    assert driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(out), device) == INVALID_DEVICE
    assert driver.call("cuDevicePrimaryCtxRelease_v2", device) == INVALID_DEVICE


def test_contexts_are_a_stack_of_each_thread(driver: Driver) -> None:
    def current() -> int | None:
        out = Address()
        driver.done("cuCtxGetCurrent", ctypes.byref(out))
        return out.value

    first, second = driver.context(0), driver.context(1)
    assert current() == first
    driver.done("cuCtxPushCurrent_v2", second)
    assert current() == second
    popped = Address()
    driver.done("cuCtxPopCurrent_v2", ctypes.byref(popped))
    assert popped.value == second
    assert current() == first
    assert driver.call("cuCtxPushCurrent_v2", 12345) == INVALID_CONTEXT
    elsewhere: list[object] = []

    def look() -> None:
        elsewhere.append(current())
        elsewhere.append(driver.call("cuCtxPopCurrent_v2", ctypes.byref(popped)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert elsewhere == [None, INVALID_CONTEXT]


def test_a_fresh_thread_has_no_context_and_can_do_nothing(driver: Driver, stream: Stream) -> None:
    dst, src, array = device_memory(8), pinned_memory(8), host_memory(PAGE)
    results: list[int] = []

    def work() -> None:
        out = Int()
        results.append(driver.register(array))
        results.append(driver.call("cuMemHostUnregister", array.ctypes.data))
        results.append(driver.copy(dst.data_ptr(), src.data_ptr(), 8, stream.handle))
        arrays = [dst.data_ptr()], [src.data_ptr()], [8]
        results.extend(
            driver.batch(*arrays, stream.handle, new=new).result for new in (False, True)
        )
        results.append(driver.call("cuStreamIsCapturing", stream.handle, ctypes.byref(out)))
        driver.done("cuCtxPushCurrent_v2", driver.context(0))
        results.append(driver.copy(dst.data_ptr(), src.data_ptr(), 8, stream.handle))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [INVALID_CONTEXT] * 6 + [SUCCESS]


def test_errors_have_names(driver: Driver) -> None:
    name = ctypes.c_char_p()
    for code, expected in {
        INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
        INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
        ALREADY_REGISTERED: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        NOT_REGISTERED: b"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
    }.items():
        driver.done("cuGetErrorName", code, ctypes.byref(name))
        assert name.value == expected
    assert driver.call("cuGetErrorName", 987654, ctypes.byref(name)) == INVALID_VALUE
    assert name.value is None


# --------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("driver_version", "asked", "expected"),
    [
        (13000, 13000, (SUCCESS, "cuMemcpyBatchAsync_v2", 0)),
        (13000, 12080, (SUCCESS, "cuMemcpyBatchAsync", 0)),
        (13000, 12040, (SUCCESS, "", 2)),  # there, but not in so old a form
        (12080, 12080, (SUCCESS, "cuMemcpyBatchAsync", 0)),
        (12080, 13000, (INVALID_VALUE, "", -1)),  # newer than the driver
        (12040, 12040, (SUCCESS, "", 1)),
        (12040, 12080, (INVALID_VALUE, "", -1)),
        (12040, 13000, (INVALID_VALUE, "", -1)),
    ],
)
def test_the_form_of_a_batch_is_that_of_the_version_asked_for(
    driver: Driver, driver_version: int, asked: int, expected: tuple[int, str, int]
) -> None:
    driver.library.fake_cuda_version(driver_version)
    assert driver.number("cuDriverGetVersion") == driver_version
    assert driver.batch_function(asked) == expected


def test_a_function_that_there_is_not_is_not_found(driver: Driver) -> None:
    function, status = Address(1), Int(-1)
    driver.done(
        *("cuGetProcAddress_v2", b"cuNonsense", ctypes.byref(function), 12080, 0),
        ctypes.byref(status),
    )
    assert (function.value, status.value) == (None, 1)


def test_an_old_driver_has_no_batches(driver: Driver, stream: Stream) -> None:
    dst, src = device_memory(8), pinned_memory(8)
    results = []
    for version in (12040, 12080, 13000):
        driver.library.fake_cuda_version(version)
        for new in (False, True):
            answer = driver.batch([dst.data_ptr()], [src.data_ptr()], [8], stream.handle, new=new)
            results.append(answer.result)
    assert results == [NOT_SUPPORTED, NOT_SUPPORTED, SUCCESS, NOT_SUPPORTED, SUCCESS, SUCCESS]


# ----------------------------------------------------------------------------------- registration


def test_registered_memory_is_counted_until_it_is_not(driver: Driver) -> None:
    array, before = host_memory(2 * PAGE), driver.fake.counts().registrations
    assert driver.register(array) == SUCCESS
    assert driver.fake.counts().registrations == before + 1
    driver.done("cuMemHostUnregister", array.ctypes.data)
    assert driver.fake.counts().registrations == before
    assert driver.call("cuMemHostUnregister", array.ctypes.data) == NOT_REGISTERED


@pytest.mark.parametrize(
    "part", [np.s_[:], np.s_[: 2 * PAGE], np.s_[3 * PAGE :], np.s_[PAGE : 2 * PAGE]]
)
def test_no_byte_is_registered_twice(driver: Driver, part: slice) -> None:
    array = host_memory(4 * PAGE)
    middle = array[PAGE:-PAGE] if part != np.s_[3 * PAGE :] else array[PAGE:]
    assert driver.register(middle) == SUCCESS
    assert driver.register(array[part]) == ALREADY_REGISTERED
    driver.call("cuInit", 0)  # takes what it left behind
    assert driver.call("cuMemHostUnregister", array.ctypes.data + 2 * PAGE) == NOT_REGISTERED
    driver.done("cuMemHostUnregister", middle.ctypes.data)


def test_neighbours_may_both_be_registered(driver: Driver) -> None:
    array = host_memory(2 * PAGE)
    assert driver.register(array[:PAGE]) == SUCCESS
    assert driver.register(array[PAGE:]) == SUCCESS
    driver.done("cuMemHostUnregister", array.ctypes.data)
    driver.done("cuMemHostUnregister", array.ctypes.data + PAGE)


def test_the_memory_of_others_is_not_registered(driver: Driver) -> None:
    for tensor in (device_memory(PAGE), pinned_memory(PAGE)):
        address = tensor.data_ptr()
        assert driver.call("cuMemHostRegister_v2", address, PAGE, 0) == ALREADY_REGISTERED
        driver.call("cuInit", 0)
        assert driver.call("cuMemHostUnregister", address) == NOT_REGISTERED


def test_registering_checks_its_arguments(driver: Driver) -> None:
    array = host_memory(PAGE)
    address = array.ctypes.data
    for arguments in ((None, PAGE, 0), (address, 0, 0), (address, PAGE, 0x10)):
        assert driver.call("cuMemHostRegister_v2", *arguments) == INVALID_VALUE
        driver.call("cuInit", 0)
    assert driver.call("cuMemHostRegister_v2", address, 2**64 - 1, 0) == INVALID_VALUE
    driver.call("cuInit", 0)
    for flags in (0x1, 0x2, 0x8, 0x9):
        assert driver.register(array, flags) == SUCCESS
        driver.done("cuMemHostUnregister", address)


@pytest.mark.parametrize("nbytes", [PAGE, 2**63])
def test_more_than_the_ceiling_is_refused(driver: Driver, nbytes: int) -> None:
    array = host_memory(PAGE)
    driver.library.fake_cuda_registration_ceiling(PAGE - 1)
    assert driver.call("cuMemHostRegister_v2", array.ctypes.data, nbytes, 0) == INVALID_VALUE
    assert "more than this driver registers" in driver.why()
    driver.call("cuInit", 0)
    driver.library.fake_cuda_registration_ceiling(PAGE)
    assert driver.register(array) == SUCCESS
    driver.done("cuMemHostUnregister", array.ctypes.data)


def test_a_failed_registration_is_told_again_by_the_next_call_and_then_gone(
    driver: Driver,
) -> None:
    assert driver.call("cuMemHostRegister_v2", None, PAGE, 0) == INVALID_VALUE
    version = Int(-1)
    assert driver.call("cuDriverGetVersion", ctypes.byref(version)) == INVALID_VALUE
    assert version.value == -1
    assert "left behind" in driver.why()
    assert driver.number("cuDriverGetVersion") == 13000


def test_memory_unregistered_before_its_copy_ran_is_an_error(
    driver: Driver, stream: Stream
) -> None:
    array, dst = host_memory(PAGE), device_memory(PAGE)
    assert driver.register(array) == SUCCESS
    driver.fake.hold(stream.torch)
    assert driver.copy(dst.data_ptr(), array.ctypes.data, PAGE, stream.handle) == SUCCESS
    driver.done("cuMemHostUnregister", array.ctypes.data)
    driver.fake.release(stream.torch)
    assert "host memory was given back" in stream.error()


# ------------------------------------------------------------------------------------- one copy


def test_a_copy_moves_bytes_either_way(driver: Driver, stream: Stream) -> None:
    one, other = device_memory(300), torch.zeros(300, dtype=torch.uint8, device="fake:0")
    torch.accelerator.synchronize()
    host = pinned_memory(300)
    assert driver.copy(other.data_ptr() + 1, one.data_ptr(), 200, stream.handle) == SUCCESS
    assert driver.copy(host.data_ptr(), other.data_ptr(), 300, stream.handle) == SUCCESS
    assert stream.error() == ""
    expected = np.zeros(300, dtype=np.uint8)
    expected[1:201] = np.arange(200)
    assert np.array_equal(host.numpy(), expected)


def test_a_copy_of_pinned_or_registered_memory_does_not_wait(
    driver: Driver, stream: Stream
) -> None:
    dst, pinned, array = device_memory(PAGE), pinned_memory(PAGE), host_memory(PAGE)
    assert driver.register(array) == SUCCESS
    driver.fake.hold(stream.torch)
    assert driver.copy(pinned.data_ptr(), dst.data_ptr(), PAGE, stream.handle) == SUCCESS
    assert driver.copy(array.ctypes.data, dst.data_ptr(), PAGE, stream.handle) == SUCCESS
    assert not stream.torch.query()
    assert not array.any()
    driver.fake.release(stream.torch)
    assert stream.error() == ""
    assert np.array_equal(array, pinned.numpy())
    assert array.any()
    driver.done("cuMemHostUnregister", array.ctypes.data)


def test_a_copy_of_pageable_memory_waits(driver: Driver, stream: Stream) -> None:
    src, array = device_memory(PAGE), host_memory(PAGE)
    with until_waited_for(driver.fake, stream.torch):
        assert driver.copy(array.ctypes.data, src.data_ptr(), PAGE, stream.handle) == SUCCESS
    assert np.array_equal(array, src.cpu().numpy())


def test_a_copy_checks_its_arguments(driver: Driver, stream: Stream) -> None:
    there, pinned = device_memory(PAGE), pinned_memory(PAGE)
    dst, src, known = there.data_ptr(), pinned.data_ptr(), stream.handle
    assert driver.copy(dst, src, PAGE, None) == INVALID_VALUE
    assert driver.copy(dst, src, PAGE, 0xDEAD) == INVALID_HANDLE
    assert driver.copy(dst, src, PAGE, Stream("fake:1").handle) == INVALID_CONTEXT
    assert driver.copy(dst, src, 0, known) == INVALID_VALUE
    assert driver.copy(dst, src, PAGE + 1, known) == INVALID_VALUE
    assert driver.copy(dst + 1, src, PAGE, known) == INVALID_VALUE
    assert driver.copy(dst - 1, src, 2, known) == INVALID_VALUE
    assert driver.copy(dst, src, 2**64 - 1, known) == INVALID_VALUE
    assert driver.copy(src, src, 8, known) == INVALID_VALUE
    assert "neither side is device memory" in driver.why()
    driver.fake.set_capturing(stream.torch, True)
    assert driver.copy(dst, src, PAGE, known) == CAPTURE_UNSUPPORTED
    driver.fake.set_capturing(stream.torch, False)
    assert driver.copy(dst, src, PAGE, known) == SUCCESS
    assert stream.error() == ""


def test_a_refused_copy_says_what_the_device_said(driver: Driver, stream: Stream) -> None:
    there, pinned = device_memory(8), pinned_memory(8)
    driver.fake.fail_next(stream.torch, at_submit=True)
    assert driver.copy(there.data_ptr(), pinned.data_ptr(), 8, stream.handle) == UNKNOWN
    assert "injected" in driver.why()
    driver.fake.fail_next(stream.torch, at_submit=False)
    assert driver.copy(there.data_ptr(), pinned.data_ptr(), 8, stream.handle) == SUCCESS
    assert "injected" in stream.error()


def test_the_driver_knows_which_stream_is_captured(driver: Driver, stream: Stream) -> None:
    assert driver_status(driver, stream.handle) == 0
    driver.fake.set_capturing(stream.torch, True)
    assert driver_status(driver, stream.handle) == 1
    assert driver_status(driver, None) == 0
    out = Int()
    assert driver.call("cuStreamIsCapturing", 0xDEAD, ctypes.byref(out)) == INVALID_HANDLE


def driver_status(driver: Driver, handle: int | None) -> int:
    out = Int(-1)
    driver.done("cuStreamIsCapturing", handle, ctypes.byref(out))
    return out.value


# --------------------------------------------------------------------------------------- batches


class Copies(NamedTuple):
    """Four copies of a page each, that a batch would take."""

    there: torch.Tensor
    pinned: torch.Tensor
    dsts: list[int]
    srcs: list[int]
    sizes: list[int]


@pytest.fixture
def copies(driver: Driver) -> Copies:
    there, pinned = device_memory(4 * PAGE), pinned_memory(4 * PAGE)
    dsts, srcs = ([each.data_ptr() + n * PAGE for n in range(4)] for each in (there, pinned))
    return Copies(there, pinned, dsts, srcs, [PAGE] * 4)


@pytest.fixture
def nothing_ran(driver: Driver, stream: Stream, copies: Copies) -> Iterator[None]:
    """What the test asks for is refused without a trace."""
    before = driver.fake.counts()
    yield
    after = driver.fake.counts()
    assert after.copies == before.copies
    assert after.attributed_calls == before.attributed_calls
    assert stream.error() == ""


@pytest.mark.usefixtures("nothing_ran")
class TestABatchIsRefused:
    """Both forms check the same; the old one says which copy is at fault."""

    @pytest.mark.parametrize("new", [False, True])
    @pytest.mark.parametrize("missing", ["dsts", "srcs", "sizes", "attrs", "indices"])
    def test_when_an_array_is_missing(
        self, driver: Driver, stream: Stream, copies: Copies, missing: str, new: bool
    ) -> None:
        answer = driver.batch(*copies[2:], stream.handle, missing=missing, new=new)
        assert answer == (INVALID_VALUE, 0 if new else NO_INDEX)

    def test_when_there_is_nothing_to_copy(
        self, driver: Driver, stream: Stream, copies: Copies
    ) -> None:
        answer = driver.batch(*copies[2:], stream.handle, count=0)
        assert answer == (INVALID_VALUE, NO_INDEX)

    @pytest.mark.parametrize("handle", [None, 1, 2], ids=["null", "legacy", "per thread"])
    def test_on_a_default_stream(self, driver: Driver, copies: Copies, handle: int | None) -> None:
        assert driver.batch(*copies[2:], handle) == (INVALID_VALUE, NO_INDEX)
        assert "default stream" in driver.why()

    def test_on_no_stream(self, driver: Driver, copies: Copies) -> None:
        assert driver.batch(*copies[2:], 0xDEAD).result == INVALID_HANDLE

    def test_on_a_stream_of_another_device(self, driver: Driver, copies: Copies) -> None:
        assert driver.batch(*copies[2:], Stream("fake:1").handle).result == INVALID_CONTEXT

    def test_in_the_context_of_another_device(
        self, driver: Driver, stream: Stream, copies: Copies
    ) -> None:
        driver.done("cuCtxPushCurrent_v2", driver.context(1))
        assert driver.batch(*copies[2:], stream.handle).result == INVALID_CONTEXT

    def test_on_a_stream_that_is_captured(
        self, driver: Driver, stream: Stream, copies: Copies
    ) -> None:
        driver.fake.set_capturing(stream.torch, True)
        assert driver.batch(*copies[2:], stream.handle).result == CAPTURE_UNSUPPORTED
        driver.fake.set_capturing(stream.torch, False)

    @pytest.mark.parametrize("attr_count", [0, 5])
    def test_with_no_attributes_or_too_many(
        self, driver: Driver, stream: Stream, copies: Copies, attr_count: int
    ) -> None:
        answer = driver.batch(
            *(*copies[2:], stream.handle),
            orders=[IN_STREAM_ORDER] * 5,
            indices=range(5),
            attr_count=attr_count,
        )
        assert answer == (INVALID_VALUE, NO_INDEX)

    @pytest.mark.parametrize("order", [0, 4, -1, 0x7FFFFFFF])
    def test_with_an_order_that_has_no_meaning(
        self, driver: Driver, stream: Stream, copies: Copies, order: int
    ) -> None:
        answer = driver.batch(*copies[2:], stream.handle, orders=[order])
        assert answer == (INVALID_VALUE, NO_INDEX)
        assert "srcAccessOrder" in driver.why()

    def test_with_flags_that_have_no_meaning(
        self, driver: Driver, stream: Stream, copies: Copies
    ) -> None:
        answer = driver.batch(*copies[2:], stream.handle, flags=2)
        assert answer == (INVALID_VALUE, NO_INDEX)

    @pytest.mark.parametrize("indices", [(1, 2), (0, 0), (0, 4), (0, 2, 1), (0, 2**64 - 1)])
    def test_with_indices_that_do_not_rise_from_0_to_below_the_count(
        self, driver: Driver, stream: Stream, copies: Copies, indices: tuple[int, ...]
    ) -> None:
        orders = [IN_STREAM_ORDER] * len(indices)
        answer = driver.batch(*copies[2:], stream.handle, orders=orders, indices=indices)
        assert answer == (INVALID_VALUE, NO_INDEX)

    @pytest.mark.parametrize("order", [DURING_THE_CALL, IN_ANY_ORDER])
    def test_when_device_memory_is_read_out_of_order(
        self, driver: Driver, stream: Stream, copies: Copies, order: int
    ) -> None:
        answer = driver.batch(
            *(copies.srcs, copies.dsts, copies.sizes, stream.handle),
            orders=[IN_STREAM_ORDER, order],
            indices=[0, 2],
        )
        assert answer == (INVALID_VALUE, 2)

    @pytest.mark.parametrize("at_fault", [0, 3])
    def test_when_a_copy_is_of_no_bytes(
        self, driver: Driver, stream: Stream, copies: Copies, at_fault: int
    ) -> None:
        copies.sizes[at_fault] = 0
        assert driver.batch(*copies[2:], stream.handle) == (INVALID_VALUE, at_fault)
        assert f"copy {at_fault}" in driver.why()

    @pytest.mark.parametrize("at_fault", [0, 3])
    @pytest.mark.parametrize("side", ["dsts", "srcs"])
    @pytest.mark.parametrize("offset", [-1, 1, 2**62])
    def test_when_a_copy_leaves_its_allocation(
        self,
        driver: Driver,
        stream: Stream,
        copies: Copies,
        side: str,
        at_fault: int,
        offset: int,
    ) -> None:
        # From the edges of the memory, whichever copy it is.
        start = copies._asdict()[side][0 if offset < 0 else 3]
        copies._asdict()[side][at_fault] = start + offset
        assert driver.batch(*copies[2:], stream.handle) == (INVALID_VALUE, at_fault)

    @pytest.mark.parametrize("nbytes", [5 * PAGE, 2**63, 2**64 - 1])
    def test_when_a_size_is_far_too_large(
        self, driver: Driver, stream: Stream, copies: Copies, nbytes: int
    ) -> None:
        copies.sizes[1] = nbytes
        assert driver.batch(*copies[2:], stream.handle) == (INVALID_VALUE, 1)

    def test_when_host_memory_is_not_registered(
        self, driver: Driver, stream: Stream, copies: Copies
    ) -> None:
        copies.srcs[2] = host_memory(PAGE).ctypes.data
        assert driver.batch(*copies[2:], stream.handle) == (INVALID_VALUE, 2)
        assert "registered" in driver.why()

    @pytest.mark.parametrize("shift", [0, 1, -1])
    def test_when_two_copies_write_the_same_bytes(
        self, driver: Driver, stream: Stream, copies: Copies, shift: int
    ) -> None:
        copies.dsts[0] = copies.dsts[2] + shift
        assert driver.batch(*copies[2:], stream.handle).result == INVALID_VALUE
        assert "write the same bytes" in driver.why()

    @pytest.mark.parametrize("shift", [0, 1, -1])
    def test_when_one_copy_reads_what_another_writes(
        self, driver: Driver, stream: Stream, copies: Copies, shift: int
    ) -> None:
        copies.srcs[0] = copies.dsts[2] + shift
        copies.dsts[1] = copies.srcs[3]
        assert driver.batch(*copies[2:], stream.handle).result == INVALID_VALUE
        assert "reads what the batch writes" in driver.why()

    def test_when_the_stream_refuses(self, driver: Driver, stream: Stream, copies: Copies) -> None:
        calls = driver.fake.counts().copy_calls
        driver.fake.fail_next(stream.torch, at_submit=True)
        assert driver.batch(*copies[2:], stream.handle).result == UNKNOWN
        assert driver.fake.counts().copy_calls == calls


@pytest.mark.parametrize("new", [False, True])
def test_a_batch_says_that_no_copy_was_at_fault(
    driver: Driver, stream: Stream, copies: Copies, new: bool
) -> None:
    before = driver.fake.counts()
    answer = driver.batch(*copies[2:], stream.handle, flags=1, new=new)
    assert answer == (SUCCESS, 0 if new else NO_INDEX)
    assert stream.error() == ""
    after = driver.fake.counts()
    assert after.copies - before.copies == 4
    assert after.copy_calls - before.copy_calls == 1
    assert after.copied_bytes - before.copied_bytes == 4 * PAGE
    assert after.attributed_calls - before.attributed_calls == 1
    assert not copies.there.cpu().any()


def test_host_memory_may_be_read_in_any_order(
    driver: Driver, stream: Stream, copies: Copies
) -> None:
    back = pinned_memory(PAGE)
    other = device_memory(PAGE)
    answer = driver.batch(
        [*copies.dsts, back.data_ptr()],
        [*copies.srcs, other.data_ptr()],
        [*copies.sizes, PAGE],
        stream.handle,
        orders=[IN_ANY_ORDER, DURING_THE_CALL, IN_STREAM_ORDER],
        indices=[0, 2, 4],
    )
    assert answer == (SUCCESS, NO_INDEX)
    assert stream.error() == ""
    assert torch.equal(back, other.cpu())


@pytest.mark.parametrize("order", [DURING_THE_CALL, IN_ANY_ORDER, IN_STREAM_ORDER])
def test_host_memory_in_another_order_than_the_streams_is_read_at_the_call(
    driver: Driver, stream: Stream, copies: Copies, order: int
) -> None:
    copies.pinned.fill_(5)
    driver.fake.hold(stream.torch)
    answer = driver.batch(*copies[2:], stream.handle, orders=[order])
    assert answer == (SUCCESS, NO_INDEX)
    copies.pinned.fill_(6)
    driver.fake.release(stream.torch)
    assert stream.error() == ""
    expected = 6 if order == IN_STREAM_ORDER else 5
    assert set(copies.there.tolist()) == {expected}


@pytest.mark.parametrize("new", [False, True])
def test_every_byte_of_ten_thousand_copies_lands_where_it_should(
    driver: Driver, stream: Stream, rng: np.random.Generator, new: bool
) -> None:
    count, step = 10_000, 48
    sizes = rng.integers(1, step + 1, size=count)
    there = device_memory(count * step)
    array = host_memory(count * step)
    array[:] = rng.integers(0, 256, size=len(array))
    assert driver.register(array) == SUCCESS
    targets, origins = (rng.permutation(count) * step for _ in range(2))
    expected = there.cpu().numpy().copy()
    for target, origin, size in zip(targets, origins, sizes, strict=True):
        expected[target : target + size] = array[origin : origin + size]
    driver.fake.forget_largest_call()
    answer = driver.batch(
        (targets + there.data_ptr()).tolist(),
        (origins + array.ctypes.data).tolist(),
        sizes.tolist(),
        stream.handle,
        new=new,
    )
    assert answer.result == SUCCESS, driver.why()
    assert stream.error() == ""
    assert np.array_equal(there.cpu().numpy(), expected)
    assert driver.fake.counts().largest_call == count
    driver.done("cuMemHostUnregister", array.ctypes.data)


def test_a_batch_takes_its_turn_among_torchs_work(
    driver: Driver, stream: Stream, copies: Copies
) -> None:
    back, ones = pinned_memory(4 * PAGE), torch.ones(PAGE, dtype=torch.uint8).pin_memory()
    copies.pinned.fill_(5)
    driver.fake.hold(stream.torch)
    with stream.torch:
        copies.there.fill_(9)  # before it
        driver.batch(copies.dsts[:2], copies.srcs[:2], copies.sizes[:2], stream.handle)
        copies.there[PAGE : 2 * PAGE].copy_(ones, non_blocking=True)  # after it
        back.copy_(copies.there, non_blocking=True)
    assert not back.any()
    driver.fake.release(stream.torch)
    assert stream.error() == ""
    pages = back.reshape(4, PAGE)
    assert [page.unique().tolist() for page in pages] == [[5], [1], [9], [9]]


def test_a_batch_that_fails_is_told_by_torchs_next_event(
    driver: Driver, stream: Stream, copies: Copies
) -> None:
    driver.fake.fail_next(stream.torch, at_submit=False)
    assert driver.batch(*copies[2:], stream.handle).result == SUCCESS
    assert "cuMemcpyBatchAsync failed on the device" in stream.error()
    assert copies.there.cpu().any()


def test_memory_freed_before_its_batch_ran_is_an_error(driver: Driver, stream: Stream) -> None:
    there, pinned = device_memory(PAGE), pinned_memory(PAGE)
    driver.fake.hold(stream.torch)
    driver.batch([there.data_ptr()], [pinned.data_ptr()], [PAGE], stream.handle)
    del there
    torch.accelerator.current_stream().synchronize()
    driver.fake.release(stream.torch)
    assert "device memory was given back" in stream.error()
