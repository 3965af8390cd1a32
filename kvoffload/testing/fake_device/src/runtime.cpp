#include "runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fake {

// Everything global is made once and never destroyed: worker threads outlive main().
namespace {

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, AllocationPtr> ranges;
};
Memory& memory() {
  static Memory& it = *new Memory;
  return it;
}

struct Pool {
  std::mutex mutex;
  std::map<int64_t, Stream*> streams[kDevices];
  int64_t next[kDevices] = {};
};
Pool& pool() {
  static Pool& it = *new Pool;
  return it;
}

struct Failure {
  int64_t before;  // calls that still work
  int64_t times;
  int code;
};

struct Failures {
  std::mutex mutex;
  std::map<std::string, Failure> planned;  // by call
};
Failures& failures() {
  static Failures& it = *new Failures;
  return it;
}

std::atomic<int64_t> delay_us{0};

size_t whole_pages(size_t size) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (size + page - 1) / page * page;
}

AllocationPtr remember(AllocationPtr made) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().ranges[made->address] = made;
  return made;
}

}  // namespace

Counters& counters() {
  static Counters& it = *new Counters;
  return it;
}

// ---------------------------------------------------------------------------------------- memory

Allocation::~Allocation() {
  if (!owned) return;
  const size_t mapped = whole_pages(size);
  if (reinterpret_cast<uintptr_t>(alias) != address) munmap(alias, mapped);
  munmap(reinterpret_cast<void*>(address), mapped);
}

AllocationPtr allocate_device(int device, size_t size) {
  // One file, mapped twice: the address that is handed out faults whoever touches it.
  const size_t mapped = whole_pages(size);
  const int file = memfd_create("kvoffload-fake-device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(mapped)) != 0) {
    if (file >= 0) close(file);
    throw Error("out of device memory: " + std::to_string(size) + " bytes");
  }
  void* handed_out = mmap(nullptr, mapped, PROT_NONE, MAP_SHARED, file, 0);
  void* alias = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (handed_out == MAP_FAILED || alias == MAP_FAILED) {
    if (handed_out != MAP_FAILED) munmap(handed_out, mapped);
    if (alias != MAP_FAILED) munmap(alias, mapped);
    throw Error("out of device memory: " + std::to_string(size) + " bytes");
  }
  auto made = std::make_shared<Allocation>();
  made->address = reinterpret_cast<uintptr_t>(handed_out);
  made->size = size;
  made->alias = static_cast<char*>(alias);
  made->device = device;
  return remember(made);
}

AllocationPtr allocate_pinned(size_t size) {
  void* mapped = mmap(nullptr, whole_pages(size), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw Error("out of host memory: " + std::to_string(size) + " bytes");
  auto made = std::make_shared<Allocation>();
  made->address = reinterpret_cast<uintptr_t>(mapped);
  made->size = size;
  made->alias = static_cast<char*>(mapped);
  return remember(made);
}

AllocationPtr register_host(uintptr_t address, size_t size) {
  auto made = std::make_shared<Allocation>();
  made->address = address;
  made->size = size;
  made->alias = reinterpret_cast<char*>(address);
  made->owned = false;
  std::lock_guard<std::mutex> lock(memory().mutex);
  for (const auto& [start, range] : memory().ranges)
    if (address < start + range->size && start < address + size)
      throw Error("the range overlaps one that is known already");
  memory().ranges[address] = made;
  return made;
}

AllocationPtr find(uintptr_t address, size_t size) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto after = memory().ranges.upper_bound(address);
  if (after != memory().ranges.begin()) {
    const AllocationPtr& before = std::prev(after)->second;
    const uintptr_t end = before->address + before->size;
    if (address < end || (size == 0 && address == end)) {
      if (size > end - address)
        throw Error("a copy leaves its allocation by " + std::to_string(size - (end - address)) +
                    " bytes");
      return before;
    }
  }
  if (after != memory().ranges.end() && size > after->first - address)
    throw Error("a copy begins before the allocation that it reaches into");
  return nullptr;
}

bool forget(uintptr_t address) {
  AllocationPtr last;  // unmapped after the lock is gone
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = memory().ranges.find(address);
  if (found == memory().ranges.end()) return false;
  last = std::move(found->second);
  memory().ranges.erase(found);
  return true;
}

Span::Span(const void* address, size_t size) : address_(reinterpret_cast<uintptr_t>(address)) {
  if (AllocationPtr owner = find(address_, size)) {
    owner_ = owner;
    known_ = true;
    device_ = owner->device;
  }
}

Span::Open Span::open() const {
  if (!known_) return {nullptr, reinterpret_cast<char*>(address_)};
  AllocationPtr owner = owner_.lock();
  if (!owner)
    throw Error(on_device() ? "device memory was given back before the work on it ran"
                            : "host memory was given back before the work on it ran");
  char* data = owner->alias + (address_ - owner->address);
  return {std::move(owner), data};
}

// ------------------------------------------------------------------------------- streams, events

Stream::Stream(int device, int64_t id, int priority) : device(device), id(id), priority(priority) {
  std::thread([this] { run(); }).detach();
}

void Stream::run() {
  for (;;) {
    std::function<void()> step;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [&] { return !queue_.empty(); });
      step = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
    }
    step();
    step = nullptr;  // what it holds goes before anybody hears that it is done
    {
      std::lock_guard<std::mutex> lock(mutex_);
      busy_ = false;
    }
    done_.notify_all();
  }
}

void Stream::push_quietly(std::function<void()> step) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(step));
  }
  work_.notify_one();
}

void Stream::push(const char* what, std::function<void()> work) {
  bool fails = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fail_submit_) {
      fail_submit_ = false;
      throw Error(std::string("injected: ") + what + " was refused");
    }
    std::swap(fails, fail_execute_);
  }
  push_quietly([this, what, fails, work = std::move(work)] {
    if (const int64_t us = delay_us.load()) std::this_thread::sleep_for(std::chrono::microseconds(us));
    if (error_.empty()) {
      try {
        if (fails) throw Error("injected");
        work();
      } catch (const std::exception& error) {
        error_ = std::string(what) + " failed on the device: " + error.what();
      }
    }
  });
}

void Stream::record(const std::shared_ptr<Event>& event) {
  auto recording = std::make_shared<Event::Recording>();
  {
    std::lock_guard<std::mutex> lock(event->mutex_);
    event->last_ = recording;
  }
  push_quietly([this, recording] {
    {
      std::lock_guard<std::mutex> lock(recording->mutex);
      recording->error = std::exchange(error_, {});
      recording->at = std::chrono::steady_clock::now();
      recording->reached = true;
      std::lock_guard<std::mutex> own(mutex_);
      busy_ = false;  // whoever sees the last event reached, sees the stream idle
    }
    recording->changed.notify_all();
  });
}

void Stream::wait(const std::shared_ptr<Event>& event) {
  if (auto recording = event->last()) push_quietly([recording] { recording->wait(); });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (queue_.empty() && !busy_) return;
  counters().synchronizations++;
  done_.wait(lock, [&] { return queue_.empty() && !busy_; });
}

void Stream::hold() {
  uint64_t until;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    until = released_ + static_cast<uint64_t>(++holds_);
  }
  push_quietly([this, until] {
    std::unique_lock<std::mutex> lock(mutex_);
    gate_.wait(lock, [&] { return released_ >= until; });
  });
}

void Stream::release() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    released_ += static_cast<uint64_t>(holds_);
    holds_ = 0;
  }
  gate_.notify_all();
}

void Stream::fail_next(bool at_submit) {
  std::lock_guard<std::mutex> lock(mutex_);
  (at_submit ? fail_submit_ : fail_execute_) = true;
}

void Stream::fail_no_more() {
  std::lock_guard<std::mutex> lock(mutex_);
  fail_submit_ = fail_execute_ = false;
}

void Event::Recording::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return reached; });
}

std::shared_ptr<Event::Recording> Event::last() {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

bool Event::query() {
  const auto recording = last();
  if (!recording) return true;
  std::lock_guard<std::mutex> lock(recording->mutex);
  if (!recording->reached) return false;
  if (!recording->error.empty()) throw Error(recording->error);
  return true;
}

void Event::synchronize() {
  if (const auto recording = last()) recording->wait();
}

bool Event::recorded() { return last() != nullptr; }

double Event::milliseconds_to(Event& end) {
  if (!timing || !end.timing) throw Error("an event without timing");
  std::chrono::steady_clock::time_point from, to;
  for (auto [event, at] : {std::pair{this, &from}, std::pair{&end, &to}}) {
    const auto recording = event->last();
    if (!recording) throw Error("an event that was not recorded");
    std::lock_guard<std::mutex> lock(recording->mutex);
    if (!recording->reached) throw Error("an event that was not reached yet");
    *at = recording->at;
  }
  return std::chrono::duration<double, std::milli>(to - from).count();
}

Stream& stream(int device, int64_t id) {
  if (device < 0 || device >= kDevices) throw Error("no device " + std::to_string(device));
  std::lock_guard<std::mutex> lock(pool().mutex);
  Stream*& made = pool().streams[device][id];
  if (!made) made = new Stream(device, id, kLowestPriority);
  return *made;
}

Stream& next_stream(int device, int priority) {
  int64_t id;
  {
    std::lock_guard<std::mutex> lock(pool().mutex);
    id = 1 + pool().next[device]++ % kStreamsPerDevice;
  }
  Stream& found = stream(device, id);
  found.priority = std::clamp(priority, kHighestPriority, kLowestPriority);
  return found;
}

std::vector<Stream*> streams(int device) {
  std::lock_guard<std::mutex> lock(pool().mutex);
  std::vector<Stream*> found;
  for (const auto& [id, each] : pool().streams[device]) found.push_back(each);
  return found;
}

Stream* stream_of_handle(const void* handle) {
  for (int device = 0; device < kDevices; device++)
    for (Stream* each : streams(device))
      if (each == handle) return each;
  return nullptr;
}

void synchronize_device(int device) {
  for (Stream* each : streams(device)) each->synchronize();
}

int& capture_mode() {
  thread_local int mode = 0;
  return mode;
}

std::atomic<bool>& global_capture() {
  static std::atomic<bool>& it = *new std::atomic<bool>{false};
  return it;
}

int injected_failure(const char* call) {
  std::lock_guard<std::mutex> lock(failures().mutex);
  auto found = failures().planned.find(call);
  if (found == failures().planned.end()) return 0;
  auto& [before, times, code] = found->second;
  if (before > 0) {
    before--;
    return 0;
  }
  const int result = code;
  if (--times <= 0) failures().planned.erase(found);
  return result;
}

}  // namespace fake

// What Python drives the device with; fake_device/library.py declares the same.
extern "C" {

void fake_hold(int device, int64_t id) { fake::stream(device, id).hold(); }

void fake_release(int device, int64_t id) { fake::stream(device, id).release(); }

void fake_fail_next(int device, int64_t id, int at_submit) {
  fake::stream(device, id).fail_next(at_submit != 0);
}

void fake_set_capturing(int device, int64_t id, int capturing) {
  fake::stream(device, id).capturing = capturing != 0;
}

void fake_set_global_capture(int capturing) { fake::global_capture() = capturing != 0; }

int fake_priority(int device, int64_t id) { return fake::stream(device, id).priority; }

void fake_delay(int64_t microseconds) { fake::delay_us = microseconds; }

void fake_fail_call(const char* call, int64_t after, int64_t times, int code) {
  std::lock_guard<std::mutex> lock(fake::failures().mutex);
  fake::failures().planned[call] = {after, times, code};
}

// Nothing held, nothing delayed, no failure planned.
void fake_calm() {
  fake::delay_us = 0;
  fake::global_capture() = false;
  {
    std::lock_guard<std::mutex> lock(fake::failures().mutex);
    fake::failures().planned.clear();
  }
  for (int device = 0; device < fake::kDevices; device++)
    for (fake::Stream* each : fake::streams(device)) {
      each->release();
      each->fail_no_more();
      each->capturing = false;
    }
}

// Read and write device memory past everything: now, in no order with any stream. 0: there is none.
int fake_peek(uint64_t address, void* out, size_t size) {
  try {
    auto found = fake::find(address, size);
    if (!found) return 0;
    memcpy(out, found->alias + (address - found->address), size);
    return 1;
  } catch (const fake::Error&) {
    return 0;
  }
}

int fake_poke(uint64_t address, const void* in, size_t size) {
  try {
    auto found = fake::find(address, size);
    if (!found) return 0;
    memcpy(found->alias + (address - found->address), in, size);
    return 1;
  } catch (const fake::Error&) {
    return 0;
  }
}

// Work on a stream, for the rig: rows of `page` bytes, `step` bytes apart, past torch and any driver.
// What it writes is taken now; what it reads lands in `out` when the stream comes to it.
void fake_scatter(int device, int64_t id, uint64_t base, int64_t step, const int64_t* rows,
                  int64_t count, int64_t page, const char* data) {
  const std::vector<int64_t> own(rows, rows + count);
  const std::vector<char> bytes(data, data + count * page);
  fake::stream(device, id).push_quietly([=] {
    for (int64_t i = 0; i < count; i++)
      fake_poke(base + static_cast<uint64_t>(own[i] * step), bytes.data() + i * page,
                static_cast<size_t>(page));
  });
}

void fake_gather(int device, int64_t id, uint64_t base, int64_t step, const int64_t* rows,
                 int64_t count, int64_t page, char* out) {
  const std::vector<int64_t> own(rows, rows + count);
  fake::stream(device, id).push_quietly([=] {
    for (int64_t i = 0; i < count; i++)
      fake_peek(base + static_cast<uint64_t>(own[i] * step), out + i * page,
                static_cast<size_t>(page));
  });
}

// In the order of fake_device/library.py's Counts.
void fake_counts(int64_t* out) {
  int64_t device_bytes = 0, device_ranges = 0, pinned_bytes = 0, pinned_ranges = 0, registered = 0;
  {
    std::lock_guard<std::mutex> lock(fake::memory().mutex);
    for (const auto& [start, range] : fake::memory().ranges) {
      if (range->device != fake::kHost) {
        device_bytes += static_cast<int64_t>(range->size);
        device_ranges++;
      } else if (range->owned) {
        pinned_bytes += static_cast<int64_t>(range->size);
        pinned_ranges++;
      } else {
        registered++;
      }
    }
  }
  const fake::Counters& c = fake::counters();
  const int64_t all[] = {device_bytes, device_ranges, pinned_bytes, pinned_ranges, registered,
                         c.copies, c.copy_calls, c.copied_bytes, c.kernels, c.largest_call,
                         c.live_events, c.synchronizations, c.attributed_calls};
  memcpy(out, all, sizeof all);
}

void fake_forget_largest_call() { fake::counters().largest_call = 0; }

}  // extern "C"
