// The device itself: memory that the host cannot touch, streams on worker threads, events, faults.
// torch_device.cpp makes a torch device of it; the *_driver.cpp files give it a vendor's entry points.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace fake {

constexpr int kDevices = 2;
constexpr int kHost = -1;
constexpr int kStreamsPerDevice = 32;  // as torch's own pools: the next one is the first again
constexpr int kLowestPriority = 0, kHighestPriority = -5;  // as CUDA's

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ---------------------------------------------------------------------------------------- memory

// A range that the device knows: its own memory, pinned memory, or registered host memory.
struct Allocation {
  uintptr_t address = 0;   // as everybody names it
  size_t size = 0;
  char* alias = nullptr;   // where the workers read and write it; the host must not
  int device = kHost;
  bool owned = true;       // false: registered, the memory is somebody else's
  ~Allocation();
};
using AllocationPtr = std::shared_ptr<Allocation>;

AllocationPtr allocate_device(int device, size_t size);
AllocationPtr allocate_pinned(size_t size);
AllocationPtr register_host(uintptr_t address, size_t size);  // throws if it overlaps another range
// The range that holds all of these bytes; null if they touch none; throws if they leave one.
AllocationPtr find(uintptr_t address, size_t size);
bool forget(uintptr_t address);  // the range that begins there; work still to come on it will fail

// Bytes that some work will use when it runs. Memory that was given back by then is an error.
class Span {
 public:
  Span(const void* address, size_t size);
  bool on_device() const { return device_ != kHost; }
  bool known() const { return known_; }  // device memory, or pinned
  int device() const { return device_; }

  class Open {  // keeps the memory while the work runs
   public:
    Open(AllocationPtr owner, char* data) : owner_(std::move(owner)), data_(data) {}
    char* data() const { return data_; }

   private:
    AllocationPtr owner_;
    char* data_;
  };
  Open open() const;  // throws if it was given back

 private:
  std::weak_ptr<Allocation> owner_;
  uintptr_t address_;
  bool known_ = false;
  int device_ = kHost;
};

// ------------------------------------------------------------------------------- streams, events

class Event;

// A queue that one thread works off. An error is told by the next event recorded after the work that
// failed; work in between is skipped.
class Stream {
 public:
  Stream(int device, int64_t id, int priority);
  const int device;
  const int64_t id;
  std::atomic<int> priority;
  std::atomic<bool> capturing{false};

  void push(const char* what, std::function<void()> work);  // device work; may be told to fail
  void push_quietly(std::function<void()> step);            // not work: events, waits, frees
  void record(const std::shared_ptr<Event>& event);
  void wait(const std::shared_ptr<Event>& event);
  bool idle();
  void synchronize();
  void hold();
  void release();
  void fail_next(bool at_submit);
  void fail_no_more();

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable work_, done_, gate_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  int holds_ = 0;
  uint64_t released_ = 0;
  bool fail_submit_ = false, fail_execute_ = false;
  std::string error_;  // of the worker thread alone
};

class Event {
 public:
  Event(int device, bool timing) : device(device), timing(timing) {}
  const int device;
  const bool timing;
  bool query();  // throws the error of the work before it
  void synchronize();
  bool recorded();
  double milliseconds_to(Event& end);

 private:
  friend class Stream;
  // Who waits, waits for the recording that was the last one then, whatever comes after it.
  struct Recording {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
    std::string error;
    std::chrono::steady_clock::time_point at;
    void wait();
  };
  std::shared_ptr<Recording> last();  // null if there is none
  std::mutex mutex_;
  std::shared_ptr<Recording> last_;
};

Stream& stream(int device, int64_t id);  // 0: the default stream
Stream& next_stream(int device, int priority);
Stream* stream_of_handle(const void* handle);  // null if there is none
std::vector<Stream*> streams(int device);
void synchronize_device(int device);

// How the calling thread's calls go together with captures of other threads: 0 global, 1 thread-local,
// 2 relaxed, as CUDA and HIP number it.
int& capture_mode();

// Somebody captures a graph, and nobody may ask how far the device is: until it is false again.
std::atomic<bool>& global_capture();

// What a driver or torch is asked to do by name, and may be told to refuse: 0 if it is not.
int injected_failure(const char* call);

struct Counters {
  std::atomic<int64_t> copies{0};        // pieces of memory moved, each with its own addresses
  std::atomic<int64_t> copy_calls{0};    // calls that moved them
  std::atomic<int64_t> copied_bytes{0};
  std::atomic<int64_t> kernels{0};       // other work: gathers, scatters, fills
  std::atomic<int64_t> largest_call{0};  // most pieces of one call
  std::atomic<int64_t> live_events{0};
  std::atomic<int64_t> synchronizations{0};  // the host waited for a stream or the device
  std::atomic<int64_t> attributed_calls{0};  // batch calls that came with attributes
};
Counters& counters();

}  // namespace fake
