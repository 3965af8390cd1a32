// Stand-ins for the entry points of CUDA's driver, over runtime.h. Compiled against the real cuda.h,
// which declares every function below, so that a wrong prototype is a conflicting declaration. They
// check their arguments as a driver would, and more strictly where the manual calls something undefined.
#define __CUDA_API_VERSION_INTERNAL  // declares the old and the new form of every versioned function
#include <cuda.h>

#include "batch.h"

namespace {

std::atomic<int> driver_version{CUDA_VERSION};
std::atomic<int64_t> registration_ceiling{INT64_MAX};
std::atomic<int> sticky{CUDA_SUCCESS};  // what a failed registration leaves for the next call
thread_local std::vector<CUcontext> contexts;
thread_local std::string why;
int context_marks[fake::kDevices];  // their addresses stand for the primary contexts

CUresult refuse(CUresult result, const std::string& reason) {
  why = reason;
  return result;
}

int device_of(CUcontext context) {
  for (int device = 0; device < fake::kDevices; device++)
    if (context == reinterpret_cast<CUcontext>(&context_marks[device])) return device;
  return -1;
}

int current_device() { return contexts.empty() ? -1 : device_of(contexts.back()); }

// What every call does first. An injected failure stands for any reason that a driver may have.
CUresult begin(const char* call, bool needs_context = true) {
  if (const int error = sticky.exchange(CUDA_SUCCESS))
    return refuse(static_cast<CUresult>(error), "left behind by an earlier failure");
  if (const int error = fake::injected_failure(call))
    return refuse(static_cast<CUresult>(error), std::string("injected: ") + call);
  if (needs_context && current_device() < 0)
    return refuse(CUDA_ERROR_INVALID_CONTEXT, "no context is current in this thread");
  return CUDA_SUCCESS;
}

#define BEGIN(...) \
  if (const CUresult failed = begin(__func__ __VA_OPT__(, ) __VA_ARGS__)) return failed

CUresult enqueue(fake::Stream& stream, const char* what, std::vector<fake::Piece> pieces) {
  try {
    fake::push_copies(stream, what, std::move(pieces));
  } catch (const fake::Error& error) {
    return refuse(CUDA_ERROR_UNKNOWN, error.what());
  }
  return CUDA_SUCCESS;
}

uintptr_t as_number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

CUresult check_device(CUdevice device) {
  if (device < 0 || device >= fake::kDevices)
    return refuse(CUDA_ERROR_INVALID_DEVICE, "no such device");
  return CUDA_SUCCESS;
}

CUresult check_stream(CUstream handle, fake::Stream*& stream) {
  stream = fake::stream_of_handle(handle);
  if (!stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
  if (stream->device != current_device())
    return refuse(CUDA_ERROR_INVALID_CONTEXT, "the stream is of another device than the context");
  if (stream->capturing)
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the stream is being captured");
  return CUDA_SUCCESS;
}

CUresult batch(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
               CUmemcpyAttributes* attrs, size_t* attr_indices, size_t attr_count, size_t* fail_index,
               CUstream handle) {
  if (fail_index) *fail_index = SIZE_MAX;
  if (!dsts || !srcs || !sizes || count == 0)
    return refuse(CUDA_ERROR_INVALID_VALUE, "an array is missing, or there is nothing to copy");
  if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a batch cannot go onto a default stream");
  fake::Stream* stream = nullptr;
  if (const CUresult failed = check_stream(handle, stream)) return failed;
  if (!attrs || !attr_indices || attr_count == 0 || attr_count > count || attr_indices[0] != 0)
    return refuse(CUDA_ERROR_INVALID_VALUE, "attributes must be given, and begin with copy 0");
  for (size_t i = 0; i < attr_count; i++) {
    const auto order = attrs[i].srcAccessOrder;
    if (order != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM &&
        order != CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL &&
        order != CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
      return refuse(CUDA_ERROR_INVALID_VALUE, "srcAccessOrder has no meaning");
    if (attrs[i].flags & ~static_cast<unsigned>(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE))
      return refuse(CUDA_ERROR_INVALID_VALUE, "unknown attribute flags");
    if (i && (attr_indices[i] <= attr_indices[i - 1] || attr_indices[i] >= count))
      return refuse(CUDA_ERROR_INVALID_VALUE, "attrsIdxs must rise, and stay below the count");
  }
  std::vector<fake::Piece> pieces;
  try {
    size_t attr = 0;  // asked for copy after copy
    pieces = fake::check_batch(
        reinterpret_cast<uintptr_t*>(dsts), reinterpret_cast<uintptr_t*>(srcs), sizes, count,
        [&](size_t i) {
          if (attr + 1 < attr_count && attr_indices[attr + 1] == i) attr++;
          return attrs[attr].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        });
  } catch (const fake::PieceError& error) {
    if (fail_index) *fail_index = error.index;
    return refuse(CUDA_ERROR_INVALID_VALUE, error.what());
  } catch (const fake::Error& error) {
    return refuse(CUDA_ERROR_INVALID_VALUE, error.what());
  }
  const CUresult failed = enqueue(*stream, "cuMemcpyBatchAsync", std::move(pieces));
  if (!failed) fake::counters().attributed_calls++;
  return failed;
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuInit(unsigned int flags) {
  BEGIN(false);
  return flags ? refuse(CUDA_ERROR_INVALID_VALUE, "flags must be 0") : CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
  BEGIN(false);
  if (!version) return refuse(CUDA_ERROR_INVALID_VALUE, "nowhere to put the version");
  *version = driver_version;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  BEGIN(false);
  if (!count) return refuse(CUDA_ERROR_INVALID_VALUE, "nowhere to put the number");
  *count = fake::kDevices;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  BEGIN(false);
  if (!device) return refuse(CUDA_ERROR_INVALID_VALUE, "nowhere to put the device");
  if (const CUresult failed = check_device(ordinal)) return failed;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char* name, int length, CUdevice device) {
  BEGIN(false);
  if (!name || length <= 0) return refuse(CUDA_ERROR_INVALID_VALUE, "nowhere to put the name");
  if (const CUresult failed = check_device(device)) return failed;
  snprintf(name, static_cast<size_t>(length), "fake device");
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  BEGIN(false);
  if (!id || length <= 0) return refuse(CUDA_ERROR_INVALID_VALUE, "nowhere to put the bus id");
  if (const CUresult failed = check_device(device)) return failed;
  snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", 0xfa + device);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  BEGIN(false);
  if (!context) return refuse(CUDA_ERROR_INVALID_VALUE, "nowhere to put the context");
  if (const CUresult failed = check_device(device)) return failed;
  *context = reinterpret_cast<CUcontext>(&context_marks[device]);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  BEGIN(false);
  return check_device(device);
}

CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext context) {
  BEGIN(false);
  if (device_of(context) < 0) return refuse(CUDA_ERROR_INVALID_CONTEXT, "not a context");
  contexts.push_back(context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext* context) {
  BEGIN(false);
  if (contexts.empty()) return refuse(CUDA_ERROR_INVALID_CONTEXT, "no context was pushed");
  if (context) *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  BEGIN(false);
  if (!context) return refuse(CUDA_ERROR_INVALID_VALUE, "nowhere to put the context");
  *context = contexts.empty() ? nullptr : contexts.back();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  BEGIN();
  if (!status) return refuse(CUDA_ERROR_INVALID_VALUE, "nowhere to put the answer");
  // NULL is the default stream; nothing can be captured there.
  fake::Stream* stream = handle ? fake::stream_of_handle(handle) : nullptr;
  if (handle && !stream) return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream");
  const bool capturing = stream && stream->capturing;
  *status = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  BEGIN(false);
  if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
    return refuse(CUDA_ERROR_INVALID_VALUE, "there is no such mode");
  const int before = fake::capture_mode();
  fake::capture_mode() = *mode;
  *mode = static_cast<CUstreamCaptureMode>(before);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostRegister_v2(void* address, size_t size, unsigned int flags) {
  BEGIN();
  CUresult failed = CUDA_SUCCESS;
  if (!address || size == 0 || flags & ~0xfu || size > UINTPTR_MAX - as_number(address))
    failed = refuse(CUDA_ERROR_INVALID_VALUE, "nothing to register, or unknown flags");
  else if (size > static_cast<size_t>(registration_ceiling))
    failed = refuse(CUDA_ERROR_INVALID_VALUE, "more than this driver registers at once");
  else
    try {
      fake::register_host(as_number(address), size);
    } catch (const fake::Error& error) {
      failed = refuse(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, error.what());
    }
  sticky = failed;
  return failed;
}

CUresult CUDAAPI cuMemHostUnregister(void* address) {
  BEGIN();
  fake::AllocationPtr found;
  try {
    found = fake::find(as_number(address), 1);
  } catch (const fake::Error&) {
  }
  if (!found || found->owned || found->address != as_number(address))
    return refuse(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "no registration begins there");
  fake::forget(found->address);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream handle) {
  BEGIN();
  if (!handle) return refuse(CUDA_ERROR_INVALID_VALUE, "copies do not belong on the default stream");
  fake::Stream* stream = nullptr;
  if (const CUresult failed = check_stream(handle, stream)) return failed;
  try {
    if (size == 0) throw fake::Error("a copy of no bytes");
    fake::Piece piece{fake::Span(reinterpret_cast<void*>(dst), size),
                fake::Span(reinterpret_cast<void*>(src), size), size};
    if (!piece.dst.on_device() && !piece.src.on_device())
      throw fake::Error("neither side is device memory");
    const bool pageable = !piece.dst.known() || !piece.src.known();
    if (const CUresult failed = enqueue(*stream, "cuMemcpyAsync", {std::move(piece)})) return failed;
    if (pageable) stream->synchronize();  // staged, while the host waits
  } catch (const fake::Error& error) {
    return refuse(CUDA_ERROR_INVALID_VALUE, error.what());
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                                    CUmemcpyAttributes* attrs, size_t* attr_indices,
                                    size_t attr_count, size_t* fail_index, CUstream stream) {
  BEGIN();
  if (driver_version < 12080) return refuse(CUDA_ERROR_NOT_SUPPORTED, "this driver has no batches");
  return batch(dsts, srcs, sizes, count, attrs, attr_indices, attr_count, fail_index, stream);
}

CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes,
                                       size_t count, CUmemcpyAttributes* attrs,
                                       size_t* attr_indices, size_t attr_count, CUstream stream) {
  BEGIN();
  if (driver_version < 13000) return refuse(CUDA_ERROR_NOT_SUPPORTED, "this driver has no such form");
  return batch(dsts, srcs, sizes, count, attrs, attr_indices, attr_count, nullptr, stream);
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** name) {
  static const std::map<int, const char*> names = {
      {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
      {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
      {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
      {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
      {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN"}};
  const auto found = names.find(error);
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  *name = found == names.end() ? nullptr : found->second;
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  (void)error;
  if (!text) return CUDA_ERROR_INVALID_VALUE;
  *text = why.c_str();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t,
                                     CUdriverProcAddressQueryResult* status) {
  BEGIN(false);
  if (!symbol || !function) return refuse(CUDA_ERROR_INVALID_VALUE, "no name, or nowhere to put it");
  *function = nullptr;
  if (version > driver_version)
    return refuse(CUDA_ERROR_INVALID_VALUE, "a version that is newer than the driver's");
  // A name that it does not have, or not for that version, is no failure: the answer is NULL.
  auto found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if (std::string(symbol) == "cuMemcpyBatchAsync" && driver_version >= 12080) {
    found = version < 12080 ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SUCCESS;
    if (version >= 13000)
      *function = reinterpret_cast<void*>(&cuMemcpyBatchAsync_v2);
    else if (version >= 12080)
      *function = reinterpret_cast<void*>(&cuMemcpyBatchAsync);
  }
  if (status) *status = found;
  return CUDA_SUCCESS;
}

void fake_cuda_version(int version) { driver_version = version; }

void fake_cuda_registration_ceiling(int64_t size) { registration_ceiling = size; }

}  // extern "C"
