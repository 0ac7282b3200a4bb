// Every operator that has no kernel of its own here: its CPU kernel runs on aliases of the same memory.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <atomic>

#include "graph.h"
#include "rules.h"

namespace sim {

inline std::atomic<int64_t> g_host_waits{0};

// The host waits for the device here: refused while capturing, counted, and told.
inline void synchronising(const std::string& what) {
  if (t_mode != LIVE) return;
  refuse_in_capture(what);
  ++g_host_waits;
  call_hook(hooks().synchronising, what);
}

// A generator of the device computes with the CPU's engine; kernels take the CPU's class only.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(uint64_t seed = c10::default_rng_seed_val) : CPUGeneratorImpl(seed) {
    device_ = kDevice;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

class OneCall {
 public:
  OneCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack), rule_(rule_of(op)), count_(op.schema().arguments().size()),
        begin_(stack.size() - count_) {}

  void run() {
    require_kernel();
    const bool recording = capturing();
    std::vector<c10::IValue> recorded;
    if (recording) {
      require_valid();
      if (!rule_.changes_nothing) {
        for (size_t i = begin_; i < stack_.size(); ++i) recorded.push_back(snapshot(stack_[i]));
      }
    }
    if (recording || (t_graph && t_mode == KERNEL)) keep_what_is_written();
    for (size_t i = 0; i < count_; ++i) to_host(i);
    if (t_mode == LIVE) refuse_mixing();
    if (mask_) waits_ = waits_ || !fills_by_mask();
    if (waits_) synchronising(op_.schema().name());
    op_.callBoxed(stack_);
    aliases_.write_back();
    put_generator_back();
    std::vector<at::Tensor> made = to_device();
    if (!recording) return;
    for (const at::Tensor& tensor : made) t_graph->add_new(tensor);
    if (rule_.changes_nothing) return;
    std::vector<c10::IValue> results;
    for (auto it = stack_.end() - op_.schema().returns().size(); it != stack_.end(); ++it) {
      results.push_back(snapshot(*it));
    }
    record_operator(op_, std::move(recorded), std::move(results));
  }

 private:
  const c10::Argument& argument(size_t i) const { return op_.schema().arguments()[i]; }

  void require_kernel() const {
    if (!rule_.own) {
      // As on a GPU: an operator that somebody registered for CPUs only.
      TORCH_CHECK_NOT_IMPLEMENTED(
          false, "Could not run '", toString(op_.operator_name()),
          "' with arguments from the 'CUDA' backend: it has no CUDA kernel.");
    }
    if (!op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      not_simulated(
          toString(op_.operator_name()) + " has no CPU kernel, and the full simulated CUDA device runs CPU kernels");
    }
  }

  void keep_what_is_written() const {
    for (size_t i = 0; i < count_; ++i) {
      if (rule_.written[i]) for_each_tensor(stack_[begin_ + i], [](const at::Tensor& tensor) { t_graph->keep(tensor); });
    }
  }

  const at::Tensor& tensor_to_host(const at::Tensor& tensor, size_t i) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cuda()) {
      if (!(rule_.host_argument == static_cast<int>(i))) on_device_ = true;
      return aliases_.host(tensor);
    }
    const bool may_be_host = rule_.host_argument == static_cast<int>(i) || (rule_.indexed && i == 1) ||
                             (tensor.dim() == 0 && rule_.host_scalars && !rule_.written[i]);
    if (!may_be_host && !stray_.defined()) stray_ = tensor;
    return tensor;
  }

  void to_host(size_t i) {
    c10::IValue& value = stack_[begin_ + i];
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined() && tensor.is_cuda()) value = tensor_to_host(tensor, i);
      else tensor_to_host(tensor, i);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(tensor_to_host(tensor, i));
      value = std::move(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const auto& entry : value.toOptionalTensorList()) {
        std::optional<at::Tensor> tensor = entry;
        if (tensor.has_value() && tensor->defined()) {
          const bool mask = tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte;
          if (rule_.indexed && mask) mask_ = true;
          if (rule_.indexed && tensor->is_cuda() && tensor->dim() > 0) device_index_ = true;
          const bool before = on_device_;
          tensor = tensor_to_host(*tensor, i);
          if (rule_.indexed) on_device_ = before;
        }
        all.push_back(std::move(tensor));
      }
      value = std::move(all);
    } else if (value.isDevice()) {
      const c10::Device device = value.toDevice();
      TORCH_CHECK(
          !device.is_cuda() || device.index() <= 0, "CUDA error: invalid device ordinal (asked for ", device,
          ", the simulation has cuda:0 only)");
      if (device.is_cuda()) value = kHost;
    } else if (value.isGenerator()) {
      generator_ = value.toGenerator();
      if (generator_.defined() && generator_.device().is_cuda()) {
        auto* own = static_cast<at::CPUGeneratorImpl*>(generator_.unsafeGetGeneratorImpl());
        host_generator_ = at::make_generator<at::CPUGeneratorImpl>();
        static_cast<at::CPUGeneratorImpl*>(host_generator_.unsafeGetGeneratorImpl())->set_engine(own->engine());
        value = host_generator_;
      }
    } else if (value.isBool() && value.toBool() && argument(i).name() == "pin_memory") {
      TORCH_CHECK(false, "Only dense CPU tensors can be pinned");
    }
    if (i == 0 && on_device_ && rule_.read_by_host) waits_ = true;
    if (rule_.repeats && i == 0 && on_device_) waits_ = true;
    if (rule_.repeats && argument(i).name() == "output_size" && !value.isNone()) waits_ = false;
  }

  // x[mask] = number is one masked_fill on a GPU, which needs no count of the mask's elements.
  // Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp, canDispatchToMaskedFill.
  bool fills_by_mask() const {
    if (rule_.values < 0) return false;
    const at::Tensor& values = stack_[begin_ + rule_.values].toTensor();
    const c10::IValue& accumulate = stack_[begin_ + rule_.values + 1];
    if (values.numel() != 1 || !values.device().is_cpu() || accumulate.toBool()) return false;
    int masks = 0;
    for (const auto& entry : stack_[begin_ + 1].toOptionalTensorList()) {
      const std::optional<at::Tensor> tensor = entry;
      if (!tensor.has_value() || !tensor->defined()) continue;
      if (tensor->scalar_type() != at::kBool && tensor->scalar_type() != at::kByte) return false;
      if (++masks > 1) return false;
    }
    return true;
  }

  void put_generator_back() const {
    if (!host_generator_.defined()) return;
    auto* used = static_cast<at::CPUGeneratorImpl*>(host_generator_.unsafeGetGeneratorImpl());
    static_cast<at::CPUGeneratorImpl*>(generator_.unsafeGetGeneratorImpl())->set_engine(used->engine());
  }

  void refuse_mixing() const {
    if (rule_.indexed && device_index_ && !on_device_) {
      TORCH_CHECK(false, "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
    }
    if (stray_.defined() && on_device_) {
      TORCH_CHECK(
          false, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ",
          stray_.device(), "! (when checking the arguments of ", op_.schema().name(), ")");
    }
  }

  std::vector<at::Tensor> to_device() {
    std::vector<at::Tensor> made;
    const auto returns = op_.schema().returns().size();
    for (size_t i = 0; i < returns; ++i) {
      if (rule_.host_result == static_cast<int>(i)) continue;
      c10::IValue& value = stack_[stack_.size() - returns + i];
      if (value.isTensor()) {
        value = one_to_device(std::move(value).toTensor(), made);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> all;
        for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(one_to_device(tensor, made));
        value = std::move(all);
      }
    }
    return made;
  }

  at::Tensor one_to_device(at::Tensor result, std::vector<at::Tensor>& made) {
    bool is_new = false;
    at::Tensor on_device = aliases_.device(std::move(result), &is_new);
    if (is_new && t_graph) made.push_back(on_device);
    return on_device;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const Rule& rule_;
  const size_t count_, begin_;
  Aliases aliases_;
  at::Generator generator_, host_generator_;
  at::Tensor stray_;  // a host tensor that may not meet device tensors
  bool on_device_ = false, device_index_ = false, mask_ = false, waits_ = false;
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  OneCall(op, *stack).run();
}

}  // namespace sim
