// What the parts of the device "delayed" know of each other: streams, marks in them, and memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace delayed {

using Clock = std::chrono::steady_clock;
struct Queue; // a stream's entries and the thread that runs them

// A place in a stream's queue, which is what an event records.
struct Mark {
  Queue* queue;
  uint64_t place;
  Clock::time_point ran{};
};
using MarkPtr = std::shared_ptr<Mark>;

// Memory of the device. The DataPtr of a storage owns one share, every enqueued operation another:
// so freeing on the host is seen at once, though the bytes stay for what still reads them.
struct Block {
  char* data;
  size_t size;
  c10::StreamId stream;            // current when it was allocated
  std::set<c10::StreamId> used_on; // record_stream
  ~Block();
};
using BlockPtr = std::shared_ptr<Block>;

c10::Device device();
c10::StreamId current_stream();
c10::StreamId own_stream(); // a stream that nothing else gets: for a communicator
void enqueue(c10::StreamId stream, std::string name, std::function<void()> work);
MarkPtr record(c10::StreamId stream);
void wait(c10::StreamId stream, const MarkPtr& mark);
bool has_run(const MarkPtr& mark);
void host_wait(const MarkPtr& mark, const std::string& what); // counted; refused where forbidden
MarkPtr end_of(c10::StreamId stream); // its last place, which needs no entry of its own
void wait_for(const std::vector<MarkPtr>& marks); // of the host, not counted
void count_upload(const std::string& what); // a copy to the device that a GPU's host waits for

c10::Allocator& allocator();
BlockPtr block_of(const c10::DataPtr& data);
void record_stream(const c10::DataPtr& data, c10::StreamId stream);
void resize_storage(c10::StorageImpl& storage, size_t size);
bool is_pinned(const at::Tensor& tensor);
void register_hooks();

void set_delay(double seconds, const std::string& order);
bool drain(double seconds);
int64_t foreign_devices(); // how often a rank made another rank's device current
int64_t host_waits();
int64_t uploads();
void forbid(int waits, int uploads);

// For warnings of what is run in another's place.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// CPU tensors over the device's memory, for use in enqueued work; one for each operation, so that
// tensors that share a storage still do.
class Aliases {
 public:
  at::Tensor operator()(const at::Tensor& tensor);

 private:
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> known_;
};

} // namespace delayed
