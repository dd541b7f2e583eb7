// The operations of the device "delayed", and its Python module.
//
// None is written anew: each runs on tensors without data when it is called, which says what comes
// out, and later, in its stream's turn, on CPU tensors over the same memory.

#include "delayed.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <unordered_set>

void bind_collectives(py::module& module); // collectives.cpp

namespace delayed {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// The same value with each tensor, and the device, replaced.
template <class F>
IValue replace(const IValue& value, c10::Device to, F&& tensor) {
  if (value.isTensor()) return tensor(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(tensor(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> each : value.toOptionalTensorList())
      list.push_back(each ? std::optional(tensor(*each)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) return to;
  return value;
}

// Tensors of the CPU are read when the call is made: numbers a kernel gets by value, and all else
// is copied to the device first.
at::Tensor copied(const at::Tensor& tensor, const std::string& name) {
  if (!tensor.defined()) return tensor;
  if (tensor.dim() > 0) count_upload(name);
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

Stack on_cpu(const Stack& arguments, const std::string& name) {
  Aliases alias;
  Stack result;
  for (const auto& value : arguments)
    result.push_back(replace(value, c10::kCPU, [&](const at::Tensor& tensor) {
      return on_device(tensor) ? alias(tensor) : copied(tensor, name);
    }));
  return result;
}

Stack on_meta(const Stack& arguments) {
  std::vector<std::pair<c10::TensorImpl*, at::Tensor>> known; // the same tensor twice stays one
  Stack result;
  for (const auto& value : arguments)
    result.push_back(replace(value, c10::kMeta, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
      for (auto& [impl, meta] : known)
        if (impl == tensor.unsafeGetTensorImpl()) return meta;
      auto options = tensor.options().device(c10::kMeta).pinned_memory(false);
      auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), options);
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        meta.unsafeGetTensorImpl()->set_wrapped_number(true);
      known.emplace_back(tensor.unsafeGetTensorImpl(), meta);
      return meta;
    }));
  for (auto& value : result)
    if (value.isGenerator()) value = IValue();
  return result;
}

at::Tensor empty_like_it(const at::Tensor& like) {
  if (!like.defined()) return like;
  auto options = like.options().device(device()).pinned_memory(false);
  if (!like.is_non_overlapping_and_dense()) return at::empty(like.sizes(), options);
  return at::empty_strided(like.sizes(), like.strides(), options);
}

// Those that a write goes to, in the order of the schema.
std::vector<size_t> written(const std::vector<c10::Argument>& arguments) {
  std::vector<size_t> which;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) which.push_back(i);
  return which;
}

bool is_new(const c10::Argument& result) { return !result.alias_info(); }

// Copies the tensors among an operation's new results to where they belong; runs late.
void deliver(const c10::FunctionSchema& schema, const Stack& results, std::vector<at::Tensor>& to) {
  size_t next = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!is_new(schema.returns()[i])) continue;
    replace(results[i], c10::kCPU, [&](const at::Tensor& tensor) {
      auto& out = to.at(next++);
      // What isn't needed the CPU may leave empty, where other devices have something.
      if (out.defined() && tensor.defined() && out.numel() && tensor.numel()) out.copy_(tensor);
      return tensor;
    });
  }
}

// What the caller gets: the tensors that were written to, or new ones like `results`, of which
// `out` receives the aliases. The k-th written result is the k-th written argument.
Stack prepared(const c10::FunctionSchema& schema, const Stack& arguments, const Stack& results,
               std::vector<at::Tensor>& out) {
  Aliases alias;
  Stack prepared;
  size_t next = 0;
  const auto writes = written(schema.arguments());
  for (size_t i = 0; i < results.size(); ++i) {
    if (!is_new(schema.returns()[i])) {
      prepared.push_back(arguments.at(writes.at(next++)));
      continue;
    }
    prepared.push_back(replace(results[i], device(), [&](const at::Tensor& like) {
      auto tensor = empty_like_it(like);
      out.push_back(tensor.defined() ? alias(tensor) : tensor);
      return tensor;
    }));
  }
  return prepared;
}

// Views: the CPU's own code says which part of the storage they show.
void make_view(const OperatorHandle& op, const Stack& arguments, Stack* stack) {
  auto results = on_cpu(arguments, op.schema().name());
  op.callBoxed(results);
  const at::Tensor* base = nullptr;
  for (const auto& value : arguments)
    if (value.isTensor() && on_device(value.toTensor())) {
      base = &value.toTensor();
      break;
    }
  for (const auto& value : results)
    stack->push_back(replace(value, device(), [&](const at::Tensor& view) {
      auto tensor = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base->storage()), base->key_set(), view.dtype());
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
          view.sizes(), view.strides(), view.storage_offset());
      return tensor;
    }));
}

// Whether even a GPU needs the values before the host can go on.
bool depends_on_data(const OperatorHandle& op, const Stack& arguments) {
  static const std::unordered_set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
      "aten::bincount", "aten::repeat_interleave", "aten::equal", "aten::_local_scalar_dense"};
  for (const auto& value : arguments) { // x[mask] = y looks for where the mask is true
    if (!value.isOptionalTensorList()) continue;
    for (const std::optional<at::Tensor> index : value.toOptionalTensorList())
      if (index && index->defined() && at::isIntegralType(index->scalar_type(), true) &&
          index->itemsize() == 1)
        return true;
  }
  return names.count(op.schema().name()) || op.hasTag(at::Tag::data_dependent_output);
}

std::mutex g_mutex;
std::set<std::string> g_synchronous; // operations of which only the data says what comes out

void run_now(const OperatorHandle& op, const Stack& arguments, Stack* stack) {
  const auto name = op.schema().name();
  if (depends_on_data(op, arguments)) {
    host_wait(end_of(current_stream()), name);
  } else { // a GPU would not wait, and so neither is this counted
    wait_for({end_of(current_stream())});
    std::lock_guard lock(g_mutex);
    g_synchronous.insert(name);
  }
  auto results = on_cpu(arguments, name);
  std::vector<size_t> outs;
  for (size_t i : written(op.schema().arguments()))
    if (op.schema().arguments()[i].is_out()) outs.push_back(i);
  for (size_t i : outs) // of sizes that are only known afterwards
    results[i] = IValue(at::empty({0}, results[i].toTensor().options()));
  op.callBoxed(results);
  for (size_t k = 0; k < outs.size(); ++k) {
    auto out = arguments[outs[k]].toTensor(), value = results.at(k).toTensor();
    if (out.sizes() != value.sizes()) out.resize_(value.sizes());
    out.copy_(value);
  }
  std::vector<at::Tensor> out;
  auto given = prepared(op.schema(), arguments, results, out);
  enqueue(current_stream(), name, [schema = op.schema(), results, out]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    deliver(schema, results, out);
  });
  stack->insert(stack->end(), given.begin(), given.end());
}

void resize_outputs(const c10::FunctionSchema& schema, const Stack& arguments, const Stack& meta) {
  for (size_t i : written(schema.arguments())) {
    if (!schema.arguments()[i].is_out() || !arguments[i].isTensor()) continue;
    auto out = arguments[i].toTensor(), wanted = meta[i].toTensor();
    if (out.sizes() == wanted.sizes()) continue;
    out.resize_(wanted.sizes());
    if (wanted.is_non_overlapping_and_dense())
      out.unsafeGetTensorImpl()->set_sizes_and_strides(wanted.sizes(), wanted.strides());
  }
}

void run(const OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const Stack arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  bool views = false, only_tensors = true, only_writes = true;
  for (const auto& result : schema.returns()) {
    auto type = result.type();
    if (auto list = type->cast<c10::ListType>()) type = list->getElementType();
    views |= result.alias_info() && !result.alias_info()->isWrite();
    only_tensors &= type->kind() == c10::TypeKind::TensorType;
    only_writes &= !is_new(result);
  }
  for (size_t i : written(schema.arguments())) only_writes &= !schema.arguments()[i].is_out();
  if (views) return make_view(op, arguments, stack);
  // Of these the CPU gives results of other sizes than other devices, and its backward wants them.
  static const std::unordered_set<std::string> peculiar{
      "aten::_embedding_bag", "aten::_embedding_bag_forward_only"};
  // Random numbers are drawn in the order of the host's calls, as on a GPU.
  const bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  if (depends_on_data(op, arguments) || !only_tensors || draws || peculiar.count(schema.name()))
    return run_now(op, arguments, stack);

  Stack results;
  try { // on tensors without data, which says what comes out, and that the call is right
    Silence silence; // the operation itself warns its caller no more, as it runs elsewhere
    c10::WarningUtils::WarningHandlerGuard quiet(&silence);
    const auto metas = on_meta(arguments);
    results = metas;
    op.callBoxed(results);
    resize_outputs(schema, arguments, metas);
  } catch (const c10::NotImplementedError&) {
    if (!only_writes) return run_now(op, arguments, stack);
    results.assign(schema.returns().size(), IValue()); // in place: nothing comes out
  }
  std::vector<at::Tensor> out;
  auto given = prepared(schema, arguments, results, out);
  auto values = on_cpu(arguments, schema.name());
  enqueue(current_stream(), schema.name(), [op, values = std::move(values), out]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(values);
    deliver(op.schema(), values, out);
  });
  stack->insert(stack->end(), given.begin(), given.end());
}

OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const OperatorHandle&, Stack* stack) { run(find("aten::convolution"), stack); }

void convolution_backward(const OperatorHandle&, Stack* stack) {
  const size_t first = stack->size() - 10; // the other operation wants the bias's size as well
  const auto weight = stack->at(first + 2).toTensor();
  const bool transposed = stack->at(first + 6).toBool();
  const int64_t groups = stack->at(first + 8).toInt();
  std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  stack->insert(stack->begin() + first + 3, IValue(bias));
  run(find("aten::convolution_backward"), stack);
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator(), kKeys, c10::dtype_or_default(dtype));
}

void resize_storage(c10::StorageImpl& storage, size_t size) {
  auto data = allocator().allocate(size);
  auto from = block_of(storage.data_ptr()), to = block_of(data);
  if (from && to)
    enqueue(current_stream(), "resize", [from, to] {
      std::memcpy(to->data, from->data, std::min(from->size, to->size));
    });
  storage.set_data_ptr_noswap(std::move(data)); // the old memory is poisoned after the copy
  storage.set_nbytes(size);
}

void fit_storage(const at::Tensor& tensor) {
  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_storage(*storage, needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  fit_storage(self);
  return self;
}

at::Tensor& set_part(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                     at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  fit_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_part(self, std::move(source), 0, {size}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_part(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Aliases alias;
  at::Tensor from = source, into = to;
  if (on_device(source)) from = alias(source);
  else if (!non_blocking || !is_pinned(source)) from = source.clone();
  if (source.is_cpu() && !non_blocking) count_upload("a copy to the device");
  if (on_device(to)) into = alias(to);
  auto copy = [from, into] {
    at::AutoDispatchBelowADInplaceOrView guard;
    into.copy_(from);
  };
  if (on_device(to) || non_blocking) {
    enqueue(current_stream(), "copy", copy);
  } else {
    host_wait(end_of(current_stream()), "a copy to the CPU");
    copy();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& to) {
  to.resize_(source.sizes());
  return copy_from(source, to, false);
}

void record_stream_of_tensor(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream.id());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream_of_tensor);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// A copy is what makes these lazy views real: it must get them as they are.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// torch.autocast, with CUDA's lists.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FP32)
#define FP32_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

// ----------------------------------------------------------------------------------------- Python

void enqueue_python(py::function function, std::optional<c10::Stream> stream) {
  // The last reference may go on any thread.
  auto held = std::shared_ptr<PyObject>(function.release().ptr(), [](PyObject* object) {
    py::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
  enqueue(stream ? stream->id() : current_stream(), "enqueued function", [held] {
    py::gil_scoped_acquire gil;
    try {
      py::reinterpret_borrow<py::function>(held.get())();
    } catch (py::error_already_set& error) { // which only one with the GIL may destroy
      throw std::runtime_error(error.what());
    }
  });
}

} // namespace delayed

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace delayed;
  register_hooks();
  m.def("set_delay", set_delay);
  m.def("foreign_devices", foreign_devices);
  m.def("host_waits", host_waits);
  m.def("uploads", uploads);
  m.def("forbid", forbid);
  m.def("drain", drain);
  m.def("cpu_alias", [](const at::Tensor& tensor) { return Aliases()(tensor); });
  m.def("enqueue", enqueue_python);
  m.def("synchronous", [] {
    std::lock_guard lock(g_mutex);
    return g_synchronous;
  });
  bind_collectives(m);
}
