// A torch device (PrivateUse1) over runtime.h: what torch needs to allocate, copy, gather and scatter.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>

#include "runtime.h"

namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;

thread_local int current_device = 0;
thread_local int64_t current_stream[fake::kDevices] = {};

int device_or_current(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}

c10::Stream as_torch(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, static_cast<c10::DeviceIndex>(device)), id);
}

fake::Stream& ours(const c10::Stream& stream) {
  return fake::stream(stream.device_index(), stream.id());
}

fake::Stream& current(int device) { return fake::stream(device, current_stream[device]); }

// ------------------------------------------------------------------------------------ allocators

// Device memory is given back in the order of the stream that it was allocated on, as torch's caching
// allocators do: work of another stream that still needs it will fail, unless that was recorded.
struct Block {
  uintptr_t address;
  std::mutex mutex;
  std::vector<fake::Stream*> users;
};

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  auto left = std::make_shared<std::atomic<size_t>>(block->users.size());
  for (fake::Stream* user : block->users)
    user->push_quietly([left, address = block->address] {
      if (--*left == 0) fake::forget(address);
    });
  delete block;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kFake, static_cast<c10::DeviceIndex>(current_device));
    if (size == 0) return {nullptr, device};
    auto made = fake::allocate_device(current_device, size);
    auto* block = new Block;
    block->address = made->address;
    block->users.push_back(&current(current_device));
    return {reinterpret_cast<void*>(made->address), block, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dst, const void* src, size_t size) const override {
    memcpy(fake::Span(dst, size).open().data(), fake::Span(src, size).open().data(), size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (auto* block = static_cast<Block*>(data.get_context())) {
      std::lock_guard<std::mutex> lock(block->mutex);
      block->users.push_back(&ours(stream));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

// Pinned memory is given back at once: a copy that still needs it will fail, unless somebody held it.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (size == 0) return {nullptr, cpu};
    if (fake::injected_failure("pin_memory")) throw fake::Error("injected: pinning was refused");
    auto made = fake::allocate_pinned(size);
    void* data = reinterpret_cast<void*>(made->address);
    return {data, data, &give_back_pinned, cpu};
  }
  static void give_back_pinned(void* data) { fake::forget(reinterpret_cast<uintptr_t>(data)); }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back_pinned; }
  void copy_data(void* dst, const void* src, size_t size) const override { memcpy(dst, src, size); }
};

DeviceAllocator& device_allocator() {
  static DeviceAllocator& it = *new DeviceAllocator;
  return it;
}

PinnedAllocator& pinned_allocator() {
  static PinnedAllocator& it = *new PinnedAllocator;
  return it;
}

// ------------------------------------------------------------------------------- guard and hooks

using EventPtr = std::shared_ptr<fake::Event>;

struct CountedEvent {
  explicit CountedEvent(EventPtr event) : event(std::move(event)) { fake::counters().live_events++; }
  ~CountedEvent() { fake::counters().live_events--; }
  EventPtr event;
};

EventPtr event_of(void* event) { return static_cast<CountedEvent*>(event)->event; }

void check_that_queries_are_allowed() {
  TORCH_CHECK(!fake::global_capture() || fake::capture_mode() == 2,
              "operation not permitted when stream is capturing");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device getDevice() const override {
    return c10::Device(kFake, static_cast<c10::DeviceIndex>(current_device));
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < fake::kDevices,
                "there is no device fake:", static_cast<int>(device.index()));
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return fake::kDevices; }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    fake::synchronize_device(device < 0 ? current_device : device);
  }

  c10::Stream getStream(c10::Device device) const override {
    const int index = device_or_current(device);
    return as_torch(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_torch(device_or_current(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? fake::kHighestPriority : fake::kLowestPriority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    const int index = device_or_current(device);
    return as_torch(index, fake::next_stream(index, priority).id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int index = stream.device_index();
    const auto before = as_torch(index, current_stream[index]);
    current_stream[index] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return stream.id() == 0 ? nullptr : &ours(stream);  // the default stream is NULL, as CUDA's
  }
  bool queryStream(const c10::Stream& stream) const override {
    check_that_queries_are_allowed();
    return ours(stream).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override { ours(stream).synchronize(); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return ours(stream).capturing; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (!*event) {
      const bool timing = flag == c10::EventFlag::BACKEND_DEFAULT;
      *event = new CountedEvent(std::make_shared<fake::Event>(stream.device_index(), timing));
    }
    TORCH_CHECK(event_of(*event)->device == stream.device_index(),
                "an event and a stream of different devices");
    ours(stream).record(event_of(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) ours(stream).wait(event_of(event));
  }
  bool queryEvent(void* event) const override {
    check_that_queries_are_allowed();
    return !event || event_of(event)->query();
  }
  void synchronizeEvent(void* event) const override {
    if (event) event_of(event)->synchronize();
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "an event that was not recorded");
    return event_of(start)->milliseconds_to(*event_of(end));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<CountedEvent*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return fake::kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    current_device = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    try {
      auto found = fake::find(reinterpret_cast<uintptr_t>(data), 1);
      return found && found->device == fake::kHost;
    } catch (const fake::Error&) {
      return false;
    }
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override;
  c10::Device getDeviceFromPtr(void* data) const override {
    auto found = fake::find(reinterpret_cast<uintptr_t>(data), 1);
    TORCH_CHECK(found && found->device != fake::kHost, "not device memory");
    return c10::Device(kFake, static_cast<c10::DeviceIndex>(found->device));
  }
};

// ------------------------------------------------------------------------------------ operations

// A tensor's memory as a worker sees it when its turn comes.
class View {
 public:
  explicit View(const at::Tensor& tensor)
      : span_(tensor.const_data_ptr(), extent(tensor)),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        options_(at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU)) {}
  const fake::Span& span() const { return span_; }
  fake::Span::Open open() const { return span_.open(); }
  at::Tensor tensor() const {
    auto opened = std::make_shared<fake::Span::Open>(span_.open());
    return at::from_blob(opened->data(), sizes_, strides_, [opened](void*) {}, options_);
  }

 private:
  static size_t extent(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return 0;
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
    return static_cast<size_t>(last + 1) * tensor.element_size();
  }
  fake::Span span_;
  std::vector<int64_t> sizes_, strides_;
  at::TensorOptions options_;
};

// Dimension 0 as rows of adjacent bytes, where the tensor is that.
struct Rows {
  bool are = false;
  int64_t count = 0;
  size_t bytes = 0, step = 0;
  explicit Rows(const at::Tensor& tensor) {
    if (tensor.dim() == 0) return;
    int64_t inner = 1;
    for (int64_t d = tensor.dim() - 1; d > 0; d--) {
      if (tensor.size(d) != 1 && tensor.stride(d) != inner) return;
      inner *= tensor.size(d);
    }
    are = true;
    count = tensor.size(0);
    bytes = static_cast<size_t>(inner) * tensor.element_size();
    step = static_cast<size_t>(tensor.stride(0)) * tensor.element_size();
  }
};

fake::Stream& stream_of(const at::Tensor& tensor) { return current(tensor.get_device()); }

void kernel(fake::Stream& stream, const char* what, std::function<void()> work) {
  fake::counters().kernels++;
  stream.push(what, [work = std::move(work)] {
    at::NoGradGuard no_grad;
    try {
      work();
    } catch (const c10::Error& error) {
      throw fake::Error(error.what_without_backtrace());
    }
  });
}

void check_index(int64_t index, int64_t count) {
  if (index < 0 || index >= count)
    throw fake::Error("index " + std::to_string(index) + " is out of range: there are " +
                      std::to_string(count));
}

bool plain_index(const at::Tensor& index) {
  return index.scalar_type() == at::kLong && index.dim() == 1 && index.is_contiguous() &&
         index.device().type() == kFake;
}

// out[i] = self[index[i]]
void gather(const at::Tensor& out, const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  const Rows from(self), to(out);
  TORCH_CHECK(index.device() == self.device() && out.device() == self.device(),
              "index_select: tensors of different devices");
  TORCH_CHECK(out.dtype() == self.dtype(), "index_select: out has another dtype");
  if (out.numel() == 0) return;
  View o(out), s(self), x(index);
  if (dim != 0 || !from.are || !to.are || !plain_index(index)) {
    kernel(stream_of(self), "index_select",
           [=] { o.tensor().copy_(at::index_select(s.tensor(), dim, x.tensor())); });
    return;
  }
  kernel(stream_of(self), "index_select", [=, n = index.numel()] {
    const auto opened_out = o.open(), opened_self = s.open(), opened_index = x.open();
    const auto* ids = reinterpret_cast<const int64_t*>(opened_index.data());
    for (int64_t i = 0; i < n; i++) {
      check_index(ids[i], from.count);
      memcpy(opened_out.data() + i * to.step, opened_self.data() + ids[i] * from.step, from.bytes);
    }
  });
}

// self[index[i]] = source[i]
void scatter(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& source,
             const char* what) {
  TORCH_CHECK(index.device() == self.device() && source.device() == self.device(), what,
              ": tensors of different devices");
  TORCH_CHECK(source.dtype() == self.dtype(), what, ": tensors of different dtypes");
  TORCH_CHECK(index.dim() == 1 && index.scalar_type() == at::kLong, what,
              ": the fake device takes int64 indices in one dimension");
  auto sizes = self.sizes().vec();
  sizes[static_cast<size_t>(dim)] = index.numel();
  TORCH_CHECK(source.sizes() == at::IntArrayRef(sizes), what, ": as many slices as indices, alike");
  if (source.numel() == 0) return;
  const Rows to(self), from(source);
  View t(self), x(index), s(source);
  if (dim != 0 || !from.are || !to.are || from.bytes != to.bytes || !plain_index(index)) {
    kernel(stream_of(self), what,
           [=] { t.tensor().index_copy_(dim, x.tensor(), s.tensor()); });
    return;
  }
  kernel(stream_of(self), what, [=, n = index.numel()] {
    const auto opened_self = t.open(), opened_index = x.open(), opened_source = s.open();
    const auto* ids = reinterpret_cast<const int64_t*>(opened_index.data());
    for (int64_t i = 0; i < n; i++) {
      check_index(ids[i], to.count);
      memcpy(opened_self.data() + ids[i] * to.step, opened_source.data() + i * from.step, to.bytes);
    }
  });
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device && device->has_index() ? *device : Guard().getDevice());
  return at::detail::empty_generic(size, &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device && device->has_index() ? *device : Guard().getDevice());
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void finish(fake::Stream& stream) {
  auto end = std::make_shared<fake::Event>(stream.device, false);
  stream.record(end);
  fake::counters().synchronizations++;
  end->synchronize();
  end->query();
}

// What comes on one stream from here on waits for what is on the other.
void follow(fake::Stream& stream, fake::Stream& other) {
  auto here = std::make_shared<fake::Event>(other.device, false);
  other.record(here);
  stream.wait(here);
}

// From device to device it is work of the source's stream, which the destination's waits for.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  const bool on_device = self.device().type() == kFake && dst.device().type() == kFake;
  fake::Stream& stream = stream_of(self.device().type() == kFake ? self : dst);
  fake::Stream* peer = on_device && self.device() != dst.device() ? &stream_of(dst) : nullptr;
  if (peer) follow(stream, *peer);
  View from(self), to(dst);
  const bool alike = self.dtype() == dst.dtype() && self.sizes() == dst.sizes() &&
                     self.is_contiguous() && dst.is_contiguous();
  if (alike) {
    const size_t size = dst.nbytes();
    fake::counters().copies++;
    fake::counters().copy_calls++;
    fake::counters().copied_bytes += static_cast<int64_t>(size);
    stream.push("copy", [=] { memcpy(to.open().data(), from.open().data(), size); });
  } else {
    kernel(stream, "copy", [=] {
      auto source = from.tensor();
      to.tensor().copy_(source);
    });
  }
  if (peer) follow(*peer, stream);
  // Pageable memory, and memory that is not in one piece, is copied while the host waits.
  const bool pinned = from.span().known() && to.span().known();
  if (!on_device && !(non_blocking && alike && pinned)) finish(stream);
  return dst;
}

// Other memory for a storage, with what was in it; the old memory stays until that is copied.
void regrow(const c10::Storage& storage, size_t size) {
  const c10::DeviceGuard guard(storage.device());
  fake::Stream& stream = current(storage.device().index());
  const size_t kept = std::min(size, storage.nbytes());
  c10::DataPtr fresh = device_allocator().allocate(size);
  if (kept) {
    const fake::Span from(storage.data(), kept), to(fresh.get(), kept);
    stream.push("resize_", [=] { memcpy(to.open().data(), from.open().data(), kept); });
    device_allocator().recordStream(storage.data_ptr(), as_torch(stream.device, stream.id));
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const {
  regrow(storage, size);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  const size_t needed = at::detail::computeStorageNbytesContiguous(
      size, self.element_size(), static_cast<size_t>(self.storage_offset()));
  if (needed > self.storage().nbytes()) regrow(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  dim = at::maybe_wrap_dim(dim, self.dim());
  auto sizes = self.sizes().vec();
  sizes[static_cast<size_t>(dim)] = index.numel();
  auto out = at::empty(sizes, self.options());
  gather(out, self, dim, index);
  return out;
}

at::Tensor& index_select_out(const at::Tensor& self, int64_t dim, const at::Tensor& index,
                             at::Tensor& out) {
  dim = at::maybe_wrap_dim(dim, self.dim());
  auto sizes = self.sizes().vec();
  sizes[static_cast<size_t>(dim)] = index.numel();
  TORCH_CHECK(out.sizes() == at::IntArrayRef(sizes), "index_select: out has another shape");
  gather(out, self, dim, index);
  return out;
}

at::Tensor& index_copy_(at::Tensor& self, int64_t dim, const at::Tensor& index,
                        const at::Tensor& source) {
  dim = at::maybe_wrap_dim(dim, self.dim());
  scatter(self, dim, index, source, "index_copy_");
  return self;
}

at::Tensor& index_put_(at::Tensor& self, const c10::List<std::optional<at::Tensor>>& indices,
                       const at::Tensor& values, bool accumulate, bool) {
  TORCH_CHECK(values.device() == self.device() || values.dim() == 0,
              "index_put_: tensors of different devices");
  TORCH_CHECK(values.dtype() == self.dtype(), "index_put_: tensors of different dtypes");
  std::vector<std::optional<at::Tensor>> there;  // torch takes indices that the host has as well
  for (const std::optional<at::Tensor>& index : indices)
    there.push_back(index && index->defined() ? std::optional(index->to(self.device()))
                                              : std::nullopt);
  const at::Tensor source = values.to(self.device());
  if (!accumulate && there.size() == 1 && there[0] && plain_index(*there[0])) {
    auto rows = self.sizes().vec();
    rows[0] = there[0]->numel();
    scatter(self, 0, *there[0], source.expand(rows), "index_put_");
    return self;
  }
  std::vector<std::optional<View>> views;
  for (const auto& index : there) views.push_back(index ? std::optional<View>(*index) : std::nullopt);
  kernel(stream_of(self), "index_put_", [=, t = View(self), s = View(source)] {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : views)
      list.push_back(each ? std::optional(each->tensor()) : std::nullopt);
    auto target = t.tensor();
    at::_index_put_impl_(target, list, s.tensor(), accumulate, /*unsafe=*/false);
  });
  return self;
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  View to(self);
  kernel(stream_of(self), "fill_", [=] { to.tensor().fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

at::Tensor as_strided(const at::Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, at::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset,
                        at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "set_: a storage of another device");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (!stride.empty())
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {c10::SymInt(count)}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// All else is done on the host, while everything waits.
void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (int device = 0; device < fake::kDevices; device++) fake::synchronize_device(device);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("index_select", &index_select);
  m.impl("index_select.out", &index_select_out);
  m.impl("index_copy_", &index_copy_);
  m.impl("_index_put_impl_", &index_put_);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

}  // namespace

extern "C" void fake_register_with_torch() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kFake, &device_allocator());
}
