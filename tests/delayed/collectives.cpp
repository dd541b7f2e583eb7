// A torch.distributed backend for the device, in stream order as NCCL's.
//
// Each collective waits on the communicator's own stream for what the caller had enqueued, and runs
// there over Gloo, on the memory of the device. Waiting for it makes the caller's stream wait, not
// the host. All run one after another in the order of the calls, and are matched by that alone.

#include "delayed.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace delayed {

using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
template <class T>
using Ptr = c10::intrusive_ptr<T>;

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, MarkPtr mark, Ptr<c10::ivalue::Future> future, Tensors outputs)
      : c10d::Work(rank, type), mark_(std::move(mark)), future_(std::move(future)),
        outputs_(std::move(outputs)) {}
  bool isCompleted() override { return has_run(mark_); }
  bool isSuccess() const override { return has_run(mark_); }
  bool wait(std::chrono::milliseconds) override {
    delayed::wait(current_stream(), mark_);
    if (retrieveOpType() == OpType::BARRIER) host_wait(mark_, "barrier"); // as with NCCL
    return true;
  }
  void synchronize() override { delayed::wait(current_stream(), mark_); }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs_; }
  Ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  MarkPtr mark_;
  Ptr<c10::ivalue::Future> future_;
  Tensors outputs_;
};

Tensors parts(const at::Tensor& tensor, int64_t count) {
  TORCH_CHECK_VALUE(tensor.numel() % count == 0, tensor.numel(), " elements for ", count, " ranks");
  return tensor.view({count, -1}).unbind();
}

class Backend final : public c10d::Backend {
 public:
  Backend(Ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)),
        stream_(own_stream()) {}
  const std::string getBackendName() const override { return "delayedccl"; }
  Ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("delayedccl", gloo_->getBackendOptions()->timeout);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  Ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto cpu = aliases(tensors);
    return submit(OpType::ALLREDUCE, tensors, tensors, [this, cpu, op = opts.reduceOp] {
      for (const auto& tensor : cpu) reduce_all(tensor, op);
    });
  }

  Ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }

  Ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto cpu = aliases(tensors);
    return submit(OpType::BROADCAST, tensors, tensors, [this, cpu, opts] {
      for (const auto& tensor : cpu) {
        auto options = opts;
        options.rootTensor = 0;
        Tensors one{tensor};
        gloo_->broadcast(one, options)->wait();
      }
    });
  }

  Ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto cpu = aliases(tensors);
    return submit(OpType::REDUCE, tensors, tensors, [this, cpu, opts] {
      for (const auto& tensor : cpu) {
        auto sum = tensor.clone();
        reduce_all(sum, opts.reduceOp);
        if (getRank() == opts.rootRank) tensor.copy_(sum);
      }
    });
  }

  Ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions&) override {
    Tensors all, in = aliases(inputs);
    std::vector<Tensors> out;
    for (auto& list : outputs) {
      all.insert(all.end(), list.begin(), list.end());
      out.push_back(aliases(list));
    }
    return submit(OpType::ALLGATHER, inputs, all, [this, in, out] {
      for (size_t i = 0; i < in.size(); ++i) gather_all(out.at(i), in[i]);
    });
  }

  Ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                  const c10d::AllgatherOptions&) override {
    Tensors outputs{output}, inputs{input}, each{};
    auto out = parts(aliases(outputs)[0], getSize());
    return submit(OpType::_ALLGATHER_BASE, inputs, outputs,
                  [this, out, in = aliases(inputs)[0].view(-1)] { gather_all(out, in); });
  }

  Ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    Ptr<c10d::Work> last;
    for (size_t i = 0; i < inputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], opts);
    return last; // whoever waits for the last has waited for all
  }

  Ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::ReduceScatterOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    auto in = aliases(inputs)[0], out = aliases(outputs)[0];
    return submit(OpType::_REDUCE_SCATTER_BASE, inputs, outputs,
                  [this, in, out, op = opts.reduceOp] {
                    auto sum = in.clone();
                    reduce_all(sum, op);
                    out.view(-1).copy_(parts(sum, getSize()).at(getRank()));
                  });
  }

  Ptr<c10d::Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                 const c10d::ReduceScatterOptions& opts) override {
    TORCH_CHECK_VALUE(outputs.size() == 1 && inputs.size() == 1, "one tensor a rank");
    auto in = aliases(inputs[0]);
    auto out = aliases(outputs)[0];
    return submit(OpType::REDUCE_SCATTER, inputs[0], outputs, [this, in, out, op = opts.reduceOp] {
      for (size_t i = 0; i < in.size(); ++i) {
        auto sum = in[i].clone();
        reduce_all(sum, op);
        if (static_cast<int>(i) == getRank()) out.copy_(sum);
      }
    });
  }

  Ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    Ptr<c10d::Work> last;
    for (size_t i = 0; i < inputs.size(); ++i)
      last = _reduce_scatter_base(outputs[i], inputs[i], opts);
    return last;
  }

  Ptr<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                          const c10d::ScatterOptions& opts) override {
    Tensors all, out = aliases(outputs);
    std::vector<Tensors> in; // empty on all ranks but the root
    for (auto& list : inputs) {
      all.insert(all.end(), list.begin(), list.end());
      in.push_back(aliases(list));
    }
    return submit(OpType::SCATTER, all, outputs, [this, out, in, opts]() mutable {
      gloo_->scatter(out, in, opts)->wait();
    });
  }

  Ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return submit(OpType::BARRIER, {}, {}, [this] { gloo_->barrier()->wait(); });
  }

 private:
  // The caller may free the tensors as soon as it has called, so their memory is kept for the
  // communicator's stream; the work itself is what runs late.
  Ptr<c10d::Work> submit(OpType type, const Tensors& inputs, const Tensors& outputs,
                         std::function<void()> work) {
    delayed::wait(stream_, record(current_stream()));
    for (const auto* list : {&inputs, &outputs})
      for (const auto& tensor : *list) record_stream(tensor.storage().data_ptr(), stream_);
    auto self = Ptr<Backend>::reclaim_copy(this); // outlives what is enqueued
    enqueue(stream_, c10d::opTypeToString(type), [self, work = std::move(work)] {
      at::AutoDispatchBelowADInplaceOrView guard;
      work();
    });
    ++sequence_;
    auto mark = record(stream_);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device()});
    c10::StreamGuard on_it(c10::Stream(c10::Stream::UNSAFE, device(), stream_));
    future->markCompleted(outputs);
    return c10::make_intrusive<Work>(getRank(), type, std::move(mark), std::move(future), outputs);
  }

  Tensors aliases(const Tensors& tensors) const {
    Aliases alias;
    Tensors result;
    for (const auto& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.is_privateuseone() && tensor.is_contiguous(),
                        "delayedccl wants contiguous tensors of its device");
      result.push_back(alias(tensor));
    }
    return result;
  }

  void reduce_all(const at::Tensor& tensor, const ReduceOp& op) {
    if (tensor.numel() == 0) return;
    c10d::AllreduceOptions options;
    const bool average = op == ReduceOp::AVG; // which Gloo doesn't know
    options.reduceOp = average ? ReduceOp(ReduceOp::SUM) : op;
    Tensors one{tensor};
    gloo_->allreduce(one, options)->wait();
    if (!average) return;
    if (tensor.is_floating_point()) tensor.div_(getSize());
    else tensor.div_(getSize(), "trunc");
  }

  void gather_all(const Tensors& outputs, const at::Tensor& input) {
    if (input.numel() == 0) return;
    std::vector<Tensors> out{outputs};
    Tensors in{input};
    gloo_->allgather(out, in)->wait();
  }

  Ptr<c10d::Backend> gloo_;
  c10::StreamId stream_;
  uint64_t sequence_ = 0;
};

} // namespace delayed

void bind_collectives(py::module& module) {
  using delayed::Backend;
  // The class that this one is derived from is known to Python only then.
  py::module::import("torch._C._distributed_c10d");
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(module, "Backend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
