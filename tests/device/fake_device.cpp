// A device without a device, for tests of everything that is not a kernel: memory is the host's, every stream is a
// thread with a queue, copies and `slow_fill` are queued as a GPU queues them, and all other operations wait for
// their stream and run on the processor. What reads memory without waiting for the stream that writes it reads old
// values, as on a GPU; what waits for more than it needs is counted.
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

using namespace c10;

namespace {

constexpr int kDevices = 2, kStreams = 32;

Device device(int index) { return Device(DeviceType::PrivateUse1, static_cast<DeviceIndex>(index)); }

struct Counts {
  std::atomic<int> device_syncs{0}, stream_syncs{0}, event_syncs{0}, copies{0}, pageable{0}, pinned{0}, reads{0};
} counts;

thread_local int current_device = 0;
thread_local int64_t current_stream[kDevices] = {};
thread_local bool in_fallback = false;
std::atomic<bool> may_pin{true}, may_allocate{true};

// Whoever waits lets Python go on: work that ends may give back a tensor that Python knows.
struct WithoutPython {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutPython() {
    if (state) PyEval_RestoreThread(state);
  }
};

// A stream: work in order, on a thread of its own.
class Queue {
 public:
  Queue() { std::thread([this] { run(); }).detach(); }

  uint64_t push(std::function<void()> work) {
    std::lock_guard<std::mutex> hold(lock_);
    work_.push_back(std::move(work));
    came_.notify_one();
    return ++pushed_;
  }

  void wait(uint64_t ticket) {
    WithoutPython scope;
    std::unique_lock<std::mutex> hold(lock_);
    ended_.wait(hold, [&] { return done_ >= ticket; });
  }

  void wait_all() {
    uint64_t ticket;
    { std::lock_guard<std::mutex> hold(lock_); ticket = pushed_; }
    wait(ticket);
  }

  bool is_done(uint64_t ticket) {
    std::lock_guard<std::mutex> hold(lock_);
    return done_ >= ticket;
  }

  bool is_idle() {
    std::lock_guard<std::mutex> hold(lock_);
    return done_ == pushed_;
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> hold(lock_);
        came_.wait(hold, [&] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      work();
      work = nullptr;
      { std::lock_guard<std::mutex> hold(lock_); ++done_; }
      ended_.notify_all();
    }
  }

  std::mutex lock_;
  std::condition_variable came_, ended_;
  std::deque<std::function<void()>> work_;
  uint64_t pushed_ = 0, done_ = 0;
};

Queue* queues[kDevices][kStreams];
std::once_flag made[kDevices][kStreams];
std::atomic<int64_t> streams_made{0};

Queue& queue(int index, int64_t stream) {
  std::call_once(made[index][stream], [&] { queues[index][stream] = new Queue(); });
  return *queues[index][stream];
}

Queue& queue(const Stream& stream) { return queue(stream.device_index(), stream.id()); }
Queue& queue_now(int index) { return queue(index, current_stream[index]); }

struct Event {
  int device;
  int64_t stream;
  uint64_t ticket;
};

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::PrivateUse1; }
  Device getDevice() const override { return device(current_device); }
  void setDevice(Device to) const override { current_device = to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { current_device = to.index(); }
  Device exchangeDevice(Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream stream(Device on, int64_t id) const { return Stream(Stream::UNSAFE, on, id); }
  Stream getStream(Device on) const override { return stream(on, current_stream[on.index()]); }
  Stream getDefaultStream(Device on) const override { return stream(on, 0); }
  Stream getNewStream(Device on, int) const override { return stream(on, streams_made++ % (kStreams - 1) + 1); }
  Stream getStreamFromGlobalPool(Device on, bool) const override { return getNewStream(on, 0); }
  Stream exchangeStream(Stream to) const override {
    auto before = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return before;
  }
  bool queryStream(const Stream& of) const override { return queue(of).is_idle(); }
  void synchronizeStream(const Stream& of) const override {
    ++counts.stream_syncs;
    queue(of).wait_all();
  }
  void synchronizeDevice(const DeviceIndex) const override {
    ++counts.device_syncs;
    for (auto& row : queues)
      for (auto* each : row)
        if (each) each->wait_all();
  }

  void record(void** event, const Stream& on, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = new Event();
    *static_cast<Event*>(*event) = Event{on.device_index(), on.id(), queue(on).push([] {})};
  }
  void block(void* event, const Stream& on) const override {
    if (!event) return;
    auto e = *static_cast<Event*>(event);
    queue(on).push([e] { queue(e.device, e.stream).wait(e.ticket); });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto e = *static_cast<Event*>(event);
    return queue(e.device, e.stream).is_done(e.ticket);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    ++counts.event_syncs;
    auto e = *static_cast<Event*>(event);
    queue(e.device, e.stream).wait(e.ticket);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct DeviceMemory final : Allocator {
  DataPtr allocate(size_t nbytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, may_allocate, "no memory is left");
    void* at = std::calloc(1, nbytes + 64);
    return {at, at, &std::free, device(current_device)};
  }
  DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(DeviceType::PrivateUse1, &device_memory);

std::mutex pins_lock;
std::map<uintptr_t, size_t> pins;

void unpin(void* at) {
  { std::lock_guard<std::mutex> hold(pins_lock); pins.erase(reinterpret_cast<uintptr_t>(at)); }
  std::free(at);
}

bool is_pinned(const void* pointer) {
  auto at = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> hold(pins_lock);
  auto next = pins.upper_bound(at);
  if (next == pins.begin()) return false;
  auto [begin, size] = *std::prev(next);
  return at < begin + size;
}

struct PinnedMemory final : at::HostAllocator {
  DataPtr allocate(size_t nbytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, may_pin, "no memory can be pinned");
    ++counts.pinned;
    void* at = std::calloc(1, nbytes + 64);
    { std::lock_guard<std::mutex> hold(pins_lock); pins[reinterpret_cast<uintptr_t>(at)] = nbytes + 64; }
    return {at, at, &unpin, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory pinned_memory;
REGISTER_HOST_ALLOCATOR(DeviceType::PrivateUse1, &pinned_memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device); }
  void setCurrentDevice(DeviceIndex to) const override { current_device = to; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override {
    auto before = getCurrentDevice();
    current_device = to;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchangeDevice(to); }
  Device getDeviceFromPtr(void*) const override { return device(current_device); }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

struct OnDevice {  // allocate on the device that was asked for
  int before = current_device;
  explicit OnDevice(std::optional<Device> on) {
    if (on && on->has_index()) current_device = on->index();
  }
  ~OnDevice() { current_device = before; }
};

at::Tensor empty(IntArrayRef size, std::optional<ScalarType> type, std::optional<Layout>, std::optional<Device> on,
                 std::optional<bool>, std::optional<MemoryFormat> format) {
  OnDevice scope(on);
  DispatchKeySet keys(DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, dtype_or_default(type), format);
}

at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> type, std::optional<Layout>,
                         std::optional<Device> on, std::optional<bool>) {
  OnDevice scope(on);
  DispatchKeySet keys(DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, dtype_or_default(type));
}

at::Tensor on_host(const at::Tensor& t) {
  if (t.is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()));
}

// Queued on the current stream. As CUDA's: a copy from or to pageable memory is waited for, whatever was asked for.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  auto& stream = queue_now(to.is_cpu() ? self.device().index() : to.device().index());
  auto from = self, target = to;
  auto ticket = stream.push([from, target] {
    at::NoGradGuard no_grad;
    impl::ExcludeDispatchKeyGuard plain(autograd_dispatch_keyset);
    on_host(target).copy_(on_host(from));
  });
  const auto& host = self.is_cpu() ? self : to;
  if (host.is_cpu()) {
    bool pinned = is_pinned(host.data_ptr());
    if (!in_fallback) {
      ++counts.copies;
      if (!pinned && host.numel()) ++counts.pageable;
    }
    if (!non_blocking || !pinned) stream.wait(ticket);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Tensor as_strided(const at::Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, IntArrayRef size) { return at::native::view(self, size); }

const at::Tensor& resize(const at::Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  int64_t numel = 1;
  for (auto n : size) numel *= n;
  size_t needed = (numel + self.storage_offset()) * self.itemsize();
  auto storage = self.storage();
  if (storage.nbytes() < needed) {
    auto memory = device_memory.allocate(needed);
    std::memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

void record_stream(at::Tensor&, Stream) {}

void fallback(const OperatorHandle& op, torch::jit::Stack* stack) {
  for (int index = 0; index < kDevices; ++index)
    if (queues[index][current_stream[index]]) queue_now(index).wait_all();
  const auto& name = op.schema().name();  // what gives the processor a value waits for the device
  if (name == "aten::_local_scalar_dense" || name == "aten::equal" || name == "aten::is_nonzero") ++counts.reads;
  bool before = in_fallback;
  in_fallback = true;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    in_fallback = before;
    throw;
  }
  in_fallback = before;
}

// A kernel that takes a while: after `ms` the tensor holds `value`.
void slow_fill(at::Tensor t, double value, int64_t ms) {
  queue_now(t.device().index()).push([t, value, ms] {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    at::NoGradGuard no_grad;
    on_host(t).fill_(value);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("slow_fill", &slow_fill, py::call_guard<py::gil_scoped_release>());
  m.def("current_stream", [](int index) { return current_stream[index]; });
  m.def("set_device", [](int index) { current_device = index; });
  m.def("current_device", [] { return current_device; });
  m.def("allow_pinning", [](bool allowed) { may_pin = allowed; });
  m.def("allow_memory", [](bool allowed) { may_allocate = allowed; });
  m.def("counts", [] {
    return std::map<std::string, int>{
        {"device_syncs", counts.device_syncs}, {"stream_syncs", counts.stream_syncs},
        {"event_syncs", counts.event_syncs},   {"copies", counts.copies},
        {"pageable", counts.pageable},         {"pinned", counts.pinned},
        {"reads", counts.reads},
    };
  });
}
