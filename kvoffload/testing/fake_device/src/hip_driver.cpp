// Stand-ins for the entry points of HIP's runtime, over runtime.h. They check their arguments as it
// would, and more strictly where the manual calls something undefined.
#include "batch.h"
#include "hip_api.h"

namespace {

constexpr int kFirstBatches = 70100000;           // 7.1: major * 10,000,000 + minor * 100,000 + patch
constexpr int kFirstAttributes = 71300000;        // 7.13
constexpr size_t kMostCopiesOfABatch = 8192;      // more of them fault

std::atomic<int> runtime_version{71300000};
std::atomic<int64_t> registration_ceiling{INT64_MAX};
thread_local hipError_t last_error = hipSuccess;  // until somebody asks for it
thread_local int current_device = 0;
thread_local std::string why;

hipError_t refuse(hipError_t result, const std::string& reason) {
  why = reason;
  last_error = result;
  return result;
}

hipError_t begin(const char* call) {
  if (const int error = fake::injected_failure(call))
    return refuse(static_cast<hipError_t>(error), std::string("injected: ") + call);
  return hipSuccess;
}

#define BEGIN() \
  if (const hipError_t failed = begin(__func__)) return failed

hipError_t check_device(int device) {
  if (device < 0 || device >= fake::kDevices)
    return refuse(hipErrorInvalidDevice, "no such device");
  return hipSuccess;
}

hipError_t check_stream(hipStream_t handle, fake::Stream*& stream) {
  if (!handle) return refuse(hipErrorInvalidValue, "copies do not belong on the default stream");
  stream = fake::stream_of_handle(handle);
  if (!stream) return refuse(hipErrorInvalidHandle, "not a stream");
  if (stream->device != current_device)
    return refuse(hipErrorInvalidHandle, "the stream is of another device");
  if (stream->capturing)
    return refuse(hipErrorStreamCaptureUnsupported, "the stream is being captured");
  return hipSuccess;
}

hipError_t enqueue(fake::Stream& stream, const char* what, std::vector<fake::Piece> pieces) {
  try {
    fake::push_copies(stream, what, std::move(pieces));
  } catch (const fake::Error& error) {
    return refuse(hipErrorUnknown, error.what());
  }
  return hipSuccess;
}

uintptr_t as_number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

}  // namespace

extern "C" {

hipError_t hipInit(unsigned int flags) {
  BEGIN();
  return flags ? refuse(hipErrorInvalidValue, "flags must be 0") : hipSuccess;
}

hipError_t hipRuntimeGetVersion(int* version) {
  BEGIN();
  if (!version) return refuse(hipErrorInvalidValue, "nowhere to put the version");
  *version = runtime_version;
  return hipSuccess;
}

hipError_t hipGetDeviceCount(int* count) {
  BEGIN();
  if (!count) return refuse(hipErrorInvalidValue, "nowhere to put the number");
  *count = fake::kDevices;
  return hipSuccess;
}

hipError_t hipDeviceGetName(char* name, int length, int device) {
  BEGIN();
  if (!name || length <= 0) return refuse(hipErrorInvalidValue, "nowhere to put the name");
  if (const hipError_t failed = check_device(device)) return failed;
  snprintf(name, static_cast<size_t>(length), "fake device");
  return hipSuccess;
}

hipError_t hipDeviceGetPCIBusId(char* id, int length, int device) {
  BEGIN();
  if (!id || length <= 0) return refuse(hipErrorInvalidValue, "nowhere to put the bus id");
  if (const hipError_t failed = check_device(device)) return failed;
  snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", 0xfa + device);
  return hipSuccess;
}

hipError_t hipGetDevice(int* device) {
  BEGIN();
  if (!device) return refuse(hipErrorInvalidValue, "nowhere to put the device");
  *device = current_device;
  return hipSuccess;
}

hipError_t hipSetDevice(int device) {
  BEGIN();
  if (const hipError_t failed = check_device(device)) return failed;
  current_device = device;
  return hipSuccess;
}

hipError_t hipHostRegister(void* address, size_t size, unsigned int flags) {
  BEGIN();
  if (!address || size == 0 || flags & ~0xfu)
    return refuse(hipErrorInvalidValue, "nothing to register, or unknown flags");
  if (size > static_cast<size_t>(registration_ceiling.load()))
    return refuse(hipErrorInvalidValue, "more than this runtime registers at once");
  try {
    fake::register_host(as_number(address), size);
  } catch (const fake::Error& error) {
    return refuse(hipErrorHostMemoryAlreadyRegistered, error.what());
  }
  return hipSuccess;
}

hipError_t hipHostUnregister(void* address) {
  BEGIN();
  fake::AllocationPtr found;
  try {
    found = fake::find(as_number(address), 1);
  } catch (const fake::Error&) {
  }
  if (!found || found->owned || found->address != as_number(address))
    return refuse(hipErrorHostMemoryNotRegistered, "no registration begins there");
  fake::forget(found->address);
  return hipSuccess;
}

hipError_t hipMemcpyAsync(void* dst, const void* src, size_t size, hipMemcpyKind kind,
                          hipStream_t handle) {
  BEGIN();
  fake::Stream* stream = nullptr;
  if (const hipError_t failed = check_stream(handle, stream)) return failed;
  if (kind != hipMemcpyDefault || size == 0)
    return refuse(hipErrorInvalidValue, "a copy of no bytes, or of a kind that nobody asks for");
  try {
    fake::Piece piece{fake::Span(dst, size), fake::Span(src, size), size};
    if (!piece.dst.on_device() && !piece.src.on_device())
      return refuse(hipErrorInvalidValue, "neither side is device memory");
    const bool pageable = !piece.dst.known() || !piece.src.known();
    if (const hipError_t failed = enqueue(*stream, "hipMemcpyAsync", {std::move(piece)}))
      return failed;
    if (pageable) stream->synchronize();  // staged, while the host waits
  } catch (const fake::Error& error) {
    return refuse(hipErrorInvalidValue, error.what());
  }
  return hipSuccess;
}

hipError_t hipMemcpyBatchAsync(void** dsts, void** srcs, size_t* sizes, size_t count,
                               hipMemcpyAttributes* attrs, size_t* attr_indices, size_t attr_count,
                               size_t* fail_index, hipStream_t handle) {
  BEGIN();
  if (runtime_version < kFirstBatches)
    return refuse(hipErrorNotSupported, "this runtime has no batches");
  if (fail_index) *fail_index = SIZE_MAX;
  if (!dsts || !srcs || !sizes || count == 0)
    return refuse(hipErrorInvalidValue, "an array is missing, or there is nothing to copy");
  fake::Stream* stream = nullptr;
  if (const hipError_t failed = check_stream(handle, stream)) return failed;
  if (attr_count > 0 && runtime_version < kFirstAttributes)
    return refuse(hipErrorNotSupported, "this runtime takes no attributes");
  if (attr_count > 0 && (!attrs || !attr_indices || attr_count > count || attr_indices[0] != 0))
    return refuse(hipErrorInvalidValue, "attributes must begin with copy 0");
  for (size_t i = 0; i < attr_count; i++) {
    if (attrs[i].srcAccessOrder < hipMemcpySrcAccessOrderStream ||
        attrs[i].srcAccessOrder > hipMemcpySrcAccessOrderAny || attrs[i].flags > 1)
      return refuse(hipErrorInvalidValue, "an attribute has no meaning");
    if (i && (attr_indices[i] <= attr_indices[i - 1] || attr_indices[i] >= count))
      return refuse(hipErrorInvalidValue, "attrsIdxs must rise, and stay below the count");
  }
  std::vector<fake::Piece> pieces;
  try {
    size_t attr = 0;  // asked for copy after copy
    pieces = fake::check_batch(
        reinterpret_cast<uintptr_t*>(dsts), reinterpret_cast<uintptr_t*>(srcs), sizes, count,
        [&](size_t i) {
          if (attr + 1 < attr_count && attr_indices[attr + 1] == i) attr++;
          return attr_count && attrs[attr].srcAccessOrder != hipMemcpySrcAccessOrderStream;
        });
  } catch (const fake::PieceError& error) {
    if (fail_index) *fail_index = error.index;
    return refuse(hipErrorInvalidValue, error.what());
  } catch (const fake::Error& error) {
    return refuse(hipErrorInvalidValue, error.what());
  }
  if (count > kMostCopiesOfABatch) {
    stream->push("hipMemcpyBatchAsync", [] { throw fake::Error("memory access fault"); });
    return hipSuccess;
  }
  const hipError_t failed = enqueue(*stream, "hipMemcpyBatchAsync", std::move(pieces));
  if (!failed && attr_count) fake::counters().attributed_calls++;
  return failed;
}

hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode) {
  BEGIN();
  if (!mode || *mode < hipStreamCaptureModeGlobal || *mode > hipStreamCaptureModeRelaxed)
    return refuse(hipErrorInvalidValue, "there is no such mode");
  const int before = fake::capture_mode();
  fake::capture_mode() = *mode;
  *mode = static_cast<hipStreamCaptureMode>(before);
  return hipSuccess;
}

hipError_t hipGetLastError() {
  const hipError_t error = last_error;
  last_error = hipSuccess;
  return error;
}

const char* hipGetErrorName(hipError_t error) {
  static const std::map<int, const char*> names = {
      {hipErrorInvalidValue, "hipErrorInvalidValue"},
      {hipErrorNoDevice, "hipErrorNoDevice"},
      {hipErrorInvalidDevice, "hipErrorInvalidDevice"},
      {hipErrorInvalidHandle, "hipErrorInvalidHandle"},
      {hipErrorHostMemoryAlreadyRegistered, "hipErrorHostMemoryAlreadyRegistered"},
      {hipErrorHostMemoryNotRegistered, "hipErrorHostMemoryNotRegistered"},
      {hipErrorNotSupported, "hipErrorNotSupported"}};
  const auto found = names.find(error);
  return found == names.end() ? "hipErrorUnknown" : found->second;
}

const char* hipGetErrorString(hipError_t) { return why.c_str(); }

void fake_hip_version(int version) { runtime_version = version; }

void fake_hip_registration_ceiling(int64_t size) { registration_ceiling = size; }

// What hipGetLastError would say in this thread, without taking it.
int fake_hip_pending_error() { return last_error; }

}  // extern "C"
