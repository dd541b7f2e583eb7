// The device "delayed": host memory, but every operation runs late and in its stream's order.
//
// A GPU runs behind the host, and its streams run beside each other. Code that forgets a
// wait_stream, or a record_stream, is wrong there, yet right on a CPU, where all is done at once.
// Here each stream has a queue, and a thread that runs an entry only when it is due, or when the
// host waits for it. Freed memory is overwritten, as a caching allocator would reuse it.

#include "delayed.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/python_headers.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace delayed {

// ---------------------------------------------------------------------------------------- Streams

struct Entry {
  Clock::time_point due;
  std::string name;
  std::function<void()> work; // nothing for a wait and a record
  MarkPtr waits_for;
  MarkPtr records;
};

struct Queue {
  c10::StreamId id;
  int rank; // 0 for the default stream, then in the order of creation
  std::deque<Entry> entries{};
  uint64_t enqueued = 0, completed = 0;
  uint64_t forced = 0; // up to here somebody waits: run without regard to when it is due
  Queue* blocked_on = nullptr;
  std::condition_variable wake{}, progress{};
};

enum class Order { same, early, late, mixed };

constexpr int kPool = 8, kStreams = 32; // ids 1..8 for futures, 9..40 for torch.Stream
constexpr c10::StreamId kJanitor = -1, kForeignStream = -2;

// One lock for all: what it guards takes no time, and nobody takes the GIL while holding it.
// Never destroyed, as threads use it until the process is gone.
struct Runtime {
  std::mutex mutex;
  std::map<c10::StreamId, std::unique_ptr<Queue>> queues;
  double delay = 0.005;
  Order order = Order::mixed;
  Queue* last = nullptr; // the queue of the latest entry; see delay_of
  uint64_t burst = 0;
  std::exception_ptr error;
  bool forked = false;
  std::atomic<int64_t> foreign{0}; // how often the host has made the other rank's device current
  std::atomic<int64_t> host_waits{0}, uploads{0}, forbidden{0}, forbidden_uploads{0};
  std::atomic<int64_t> next_pool{0}, next_stream{0}, next_own{1000};
};

Runtime& runtime() {
  static auto* it = [] {
    // A forked process may free what it has inherited, but no threads run there.
    pthread_atfork([] { runtime().mutex.lock(); }, [] { runtime().mutex.unlock(); },
                   [] {
                     runtime().forked = true;
                     runtime().mutex.unlock();
                   });
    return new Runtime;
  }();
  return *it;
}

thread_local c10::StreamId t_current = 0;
// Every thread begins on a device that is another rank's, as threads of CUDA begin on device 0. It
// has no memory, and what its stream is given is done at once.
constexpr c10::DeviceIndex kForeign = 1;
thread_local c10::DeviceIndex t_index = kForeign;
thread_local Queue* t_worker = nullptr; // the queue whose thread this is

c10::Device device() { return {c10::kPrivateUse1, 0}; }
c10::StreamId current_stream() { return t_current; }
c10::StreamId own_stream() { return runtime().next_own++; }

// All functions named *_locked want the lock to be held.
void force_locked(Queue& queue, uint64_t place) {
  if (queue.forced < place) {
    queue.forced = place;
    queue.wake.notify_all();
  }
}

void run_queue(Queue& queue) {
  auto& r = runtime();
  t_worker = &queue;
  c10::GradMode::set_enabled(false);
  Silence silence; // no one would know of which call a thread warns
  c10::WarningUtils::WarningHandlerGuard quiet(&silence);
  std::unique_lock lock(r.mutex);
  while (true) {
    queue.wake.wait(lock, [&] { return !queue.entries.empty(); });
    const uint64_t place = queue.completed + 1;
    const auto due = queue.entries.front().due;
    while (queue.forced < place && Clock::now() < due) queue.wake.wait_until(lock, due);
    if (auto mark = queue.entries.front().waits_for) {
      queue.blocked_on = mark->queue;
      while (mark->queue->completed < mark->place) {
        // Whoever waits for this stream waits for the other up to here as well.
        if (queue.forced >= place) force_locked(*mark->queue, mark->place);
        queue.wake.wait(lock);
      }
      queue.blocked_on = nullptr;
    }
    Entry entry = std::move(queue.entries.front());
    queue.entries.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      if (entry.work) entry.work();
    } catch (const std::exception& e) {
      error = std::make_exception_ptr(
          std::runtime_error("delayed operation " + entry.name + ": " + e.what()));
    }
    entry.work = nullptr; // what it holds may be freed here, which takes the lock
    lock.lock();
    if (error && !r.error) r.error = error; // the next who waits learns of it
    if (entry.records) entry.records->ran = Clock::now();
    ++queue.completed;
    queue.progress.notify_all();
    for (auto& [id, other] : r.queues)
      if (other->blocked_on == &queue) other->wake.notify_all();
  }
}

Queue& queue_locked(c10::StreamId id) {
  auto& queue = runtime().queues[id];
  if (!queue) {
    queue.reset(new Queue{id, id == 0 ? 0 : static_cast<int>(runtime().queues.size())});
    std::thread(run_queue, std::ref(*queue)).detach();
  }
  return *queue;
}

// With equal delays all would happen in the order of the host's calls, in which nothing is wrong.
// So side streams run ahead of the default stream ("early": they read what isn't there yet), or
// behind it ("late": what they read is overwritten), and likewise with regard to each other.
// "mixed" decides anew whenever the host goes from one stream to another.
bool early_locked() {
  auto& r = runtime();
  if (r.order == Order::mixed) return (r.burst * 0x9E3779B97F4A7C15ull) >> 63;
  return r.order == Order::early;
}

double delay_of_locked(Queue& queue) {
  auto& r = runtime();
  if (r.last != &queue) {
    r.last = &queue;
    ++r.burst;
  }
  if (queue.rank == 0 || r.order == Order::same) return r.delay;
  const int rank = 1 + (queue.rank - 1) % 4;
  return r.delay * (early_locked() ? std::pow(0.25, rank) : 1.0 + rank);
}

uint64_t push_locked(Queue& queue, Entry entry) {
  const auto delay = std::chrono::duration<double>(delay_of_locked(queue));
  entry.due = Clock::now() + std::chrono::duration_cast<Clock::duration>(delay);
  queue.entries.push_back(std::move(entry));
  if (queue.entries.size() == 1) queue.wake.notify_all(); // else it waits for those before
  return ++queue.enqueued;
}

void enqueue(c10::StreamId stream, std::string name, std::function<void()> work) {
  std::lock_guard lock(runtime().mutex);
  push_locked(queue_locked(stream), {{}, std::move(name), std::move(work), nullptr, nullptr});
}

MarkPtr record(c10::StreamId stream) {
  std::lock_guard lock(runtime().mutex);
  Queue& queue = queue_locked(stream);
  auto mark = std::make_shared<Mark>(Mark{&queue, queue.enqueued + 1});
  push_locked(queue, {{}, "record", nullptr, nullptr, mark});
  return mark;
}

void wait(c10::StreamId stream, const MarkPtr& mark) {
  std::lock_guard lock(runtime().mutex);
  push_locked(queue_locked(stream), {{}, "wait", nullptr, mark, nullptr});
}

bool has_run(const MarkPtr& mark) {
  std::lock_guard lock(runtime().mutex);
  return mark->queue->completed >= mark->place;
}

// The last place of a stream, which needs no entry of its own.
MarkPtr end_of(c10::StreamId stream) {
  std::lock_guard lock(runtime().mutex);
  Queue& queue = queue_locked(stream);
  return std::make_shared<Mark>(Mark{&queue, queue.enqueued});
}

// Enqueued Python functions need the GIL, so nobody keeps it while waiting for them.
struct WithoutGil {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// One after another, as what comes later is not forced yet, and the order of streams shows.
void wait_for(const std::vector<MarkPtr>& marks) {
  auto& r = runtime();
  TORCH_CHECK(!t_worker, "an enqueued function waits for its own device");
  TORCH_CHECK(!r.forked, "the device does not run in a forked process");
  std::exception_ptr error;
  {
    WithoutGil no_gil;
    std::unique_lock lock(r.mutex);
    for (const auto& mark : marks) {
      force_locked(*mark->queue, mark->place);
      mark->queue->progress.wait(lock, [&] { return mark->queue->completed >= mark->place; });
    }
    std::swap(error, r.error);
  }
  if (error) std::rethrow_exception(error);
}

void count_host_wait(const std::string& what) {
  TORCH_CHECK(runtime().forbidden == 0, "the host would wait for the device: ", what);
  ++runtime().host_waits;
}

void host_wait(const MarkPtr& mark, const std::string& what) {
  count_host_wait(what);
  wait_for({mark});
}

void count_upload(const std::string& what) {
  TORCH_CHECK(runtime().forbidden_uploads == 0, "the host would copy to the device: ", what);
  ++runtime().uploads;
}

// Of all streams, those first that run ahead.
std::vector<MarkPtr> all_ends() {
  std::lock_guard lock(runtime().mutex);
  std::vector<MarkPtr> marks;
  for (auto& [id, queue] : runtime().queues)
    marks.push_back(std::make_shared<Mark>(Mark{queue.get(), queue->enqueued}));
  std::sort(marks.begin(), marks.end(), [](const auto& a, const auto& b) {
    return a->queue->rank < b->queue->rank;
  });
  if (early_locked()) std::reverse(marks.begin(), marks.end());
  return marks;
}

// ----------------------------------------------------------------------------------------- Memory

constexpr int kGarbage = 0xFF; // NaN as floating-point numbers of any size

// Memory that PyTorch views as a tensor anew, when it writes a storage to a file, has its block too.
struct Blocks {
  std::mutex mutex;
  std::map<const char*, std::weak_ptr<Block>> by_address;

  BlockPtr at(const void* address) {
    std::lock_guard lock(mutex);
    auto next = by_address.upper_bound(static_cast<const char*>(address));
    return next == by_address.begin() ? nullptr : std::prev(next)->second.lock();
  }
};
Blocks& blocks() {
  static auto* it = new Blocks;
  return *it;
}

Block::~Block() {
  {
    std::lock_guard lock(blocks().mutex);
    blocks().by_address.erase(static_cast<const char*>(data));
  }
  std::free(data);
}

void poison(const BlockPtr& block) { std::memset(block->data, kGarbage, block->size); }

// The host frees the memory: work that comes later on the stream of its allocation may get it, so
// it is overwritten in that stream's turn. After record_stream it is not reused before what is
// then enqueued on those streams has run; the allocating stream goes on meanwhile.
void free_block(void* context) {
  std::unique_ptr<BlockPtr> block(static_cast<BlockPtr*>(context));
  std::set<c10::StreamId> used_on;
  {
    std::lock_guard lock(runtime().mutex);
    used_on = (*block)->used_on;
  }
  used_on.erase((*block)->stream);
  auto work = [block = *block] { poison(block); };
  if (used_on.empty()) return enqueue((*block)->stream, "free", std::move(work));
  used_on.insert((*block)->stream);
  for (auto stream : used_on) wait(kJanitor, record(stream));
  enqueue(kJanitor, "free", std::move(work));
}

BlockPtr block_of(const c10::DataPtr& data) {
  if (!data.get()) return nullptr;
  if (data.get_deleter() == &free_block) return *static_cast<BlockPtr*>(data.get_context());
  auto block = blocks().at(data.get());
  TORCH_CHECK(block, "this memory is not of the device 'delayed'");
  return block;
}

void record_stream(const c10::DataPtr& data, c10::StreamId stream) {
  auto block = block_of(data);
  std::lock_guard lock(runtime().mutex);
  if (block) block->used_on.insert(stream);
}

char* host_memory(size_t size) {
  auto* data = static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
  TORCH_CHECK(data, "no host memory for ", size, " bytes");
  std::memset(data, kGarbage, size);
  return data;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, device()};
    auto* block = new BlockPtr(new Block{host_memory(size), size, current_stream(), {}});
    std::lock_guard lock(blocks().mutex);
    blocks().by_address[static_cast<const char*>((*block)->data)] = *block;
    return {(*block)->data, block, &free_block, device()};
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "copied by the host");
  }
};
c10::Allocator& allocator() {
  static auto* it = new Allocator;
  return *it;
}
REGISTER_ALLOCATOR(c10::kPrivateUse1, &allocator())

// Pinned memory is host memory that a non_blocking copy reads late.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    char* data = host_memory(std::max<size_t>(size, 1));
    std::lock_guard lock(mutex);
    sizes[data] = std::max<size_t>(size, 1);
    return {data, data, &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  static void release(void* data);
  bool holds(const void* data) {
    std::lock_guard lock(mutex);
    auto after = sizes.upper_bound(static_cast<const char*>(data));
    if (after == sizes.begin()) return false;
    --after;
    return static_cast<const char*>(data) < after->first + after->second;
  }
  std::mutex mutex;
  std::map<const char*, size_t> sizes;
};
PinnedAllocator& pinned() {
  static auto* it = new PinnedAllocator;
  return *it;
}
void PinnedAllocator::release(void* data) {
  {
    std::lock_guard lock(pinned().mutex);
    pinned().sizes.erase(static_cast<char*>(data));
  }
  std::free(data);
}
bool is_pinned(const at::Tensor& tensor) { return pinned().holds(tensor.const_data_ptr()); }

at::Tensor Aliases::operator()(const at::Tensor& tensor) {
  auto* from = tensor.storage().unsafeGetStorageImpl();
  auto found = std::find_if(
      known_.begin(), known_.end(), [&](const auto& pair) { return pair.first == from; });
  if (found == known_.end()) {
    auto block = block_of(from->data_ptr());
    auto release = [](void* context) { delete static_cast<BlockPtr*>(context); };
    auto data = block ? c10::DataPtr(block->data, new BlockPtr(block), +release, c10::kCPU)
                      : c10::DataPtr(nullptr, c10::kCPU);
    known_.emplace_back(
        from,
        c10::Storage(c10::Storage::use_byte_size_t(), from->nbytes(), std::move(data), nullptr));
    found = known_.end() - 1;
  }
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return alias;
}

// ---------------------------------------------------- What PyTorch asks a device and its streams

c10::Stream as_stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
c10::Device foreign() { return {c10::kPrivateUse1, kForeign}; }
bool is_foreign(c10::Device d) { return (d.has_index() ? d.index() : t_index) == kForeign; }
c10::Stream foreign_stream() { return c10::Stream(c10::Stream::UNSAFE, foreign(), kForeignStream); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kPrivateUse1, t_index}; }
  // CUDA makes a context on the device, unless the thread is on it already.
  void setDevice(c10::Device d) const override {
    if (d.index() == kForeign && t_index != kForeign) runtime().foreign++;
    t_index = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { t_index = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device d) const override {
    return is_foreign(d) ? foreign_stream() : as_stream(t_current);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return is_foreign(d) ? foreign_stream() : as_stream(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_stream(1 + runtime().next_pool++ % kPool);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return as_stream(1 + kPool + runtime().next_stream++ % kStreams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    if (is_foreign(stream.device())) return foreign_stream();
    return as_stream(std::exchange(t_current, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return has_run(end_of(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait(end_of(stream.id()), "Stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    count_host_wait("synchronize");
    wait_for(all_ends());
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream.id());
  }

  // Like CUDA's, these two make the stream's device current, and then the device before it.
  c10::Device on(c10::Device d) const {
    const auto before = getDevice();
    setDevice(d);
    return before;
  }
  // An event is a pointer to the mark that it recorded last.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag)
      const override {
    const auto before = on(stream.device());
    if (!*event) *event = new MarkPtr;
    *static_cast<MarkPtr*>(*event) = delayed::record(stream.id());
    setDevice(before);
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto before = on(stream.device());
    if (event) wait(stream.id(), *static_cast<MarkPtr*>(event));
    setDevice(before);
  }
  bool queryEvent(void* event) const override {
    return !event || has_run(*static_cast<MarkPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_wait(*static_cast<MarkPtr*>(event), "Event.synchronize");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const auto &start = *static_cast<MarkPtr*>(from), &end = *static_cast<MarkPtr*>(to);
    TORCH_CHECK(has_run(start) && has_run(end), "an event has not run yet");
    return std::chrono::duration<double, std::milli>(end->ran - start->ran).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return index != kForeign; }
  c10::DeviceIndex deviceCount() const override { return 2; }
  c10::DeviceIndex getCurrentDevice() const override { return t_index; }
  void setCurrentDevice(c10::DeviceIndex index) const override { t_index = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(t_index, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(t_index, index);
  }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  bool isPinnedPtr(const void* data) const override { return pinned().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator(); // all random numbers are drawn on the CPU
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), size);
  }
};

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

// ------------------------------------------------------------------------ For Python's functions

void set_delay(double seconds, const std::string& order) {
  static const std::map<std::string, Order> orders{{"same", Order::same}, {"early", Order::early},
                                                   {"late", Order::late}, {"mixed", Order::mixed}};
  TORCH_CHECK_VALUE(seconds >= 0 && orders.count(order), "no such delay: ", seconds, " ", order);
  std::lock_guard lock(runtime().mutex);
  runtime().delay = seconds;
  runtime().order = orders.at(order);
}

// At the end of the process: what is enqueued runs, if it does so soon.
bool drain(double seconds) {
  auto& r = runtime();
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(seconds));
  const auto marks = all_ends();
  WithoutGil no_gil;
  std::unique_lock lock(r.mutex);
  for (const auto& mark : marks) force_locked(*mark->queue, mark->place);
  for (const auto& mark : marks) {
    auto done = [&] { return mark->queue->completed >= mark->place; };
    if (!mark->queue->progress.wait_until(lock, until, done)) return false;
  }
  return true;
}

int64_t foreign_devices() { return runtime().foreign; }
int64_t host_waits() { return runtime().host_waits; }
int64_t uploads() { return runtime().uploads; }

void forbid(int waits, int uploads) {
  runtime().forbidden += waits;
  runtime().forbidden_uploads += uploads;
}

} // namespace delayed
