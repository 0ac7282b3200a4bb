// Operators with kernels of their own: those that cross sides, those that CompositeExplicit kernels would take before
// the fallback, and the ones called most (allocation and views), which need no alias.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

#include "fallback.h"
#include "memory.h"

namespace sim {

inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  for (const at::Tensor* tensor : {static_cast<const at::Tensor*>(&self), &source}) {
    if (!tensor->is_cuda() && !tensor->device().is_cpu()) {
      not_simulated("copies between the simulated CUDA device and " + tensor->device().str());
    }
  }
  if (t_graph && t_mode == KERNEL) t_graph->keep(self);
  if (t_mode != LIVE) {
    host_alias(self).copy_(host_alias(source));
    return self;
  }
  if (t_graph) require_valid();
  if (self.is_cuda() == source.is_cuda()) {
    if (t_graph) record_copy(self, source);
    host_alias(self).copy_(host_alias(source));
    return self;
  }
  const bool upload = self.is_cuda();
  const at::Tensor& host_side = upload ? source : self;
  const at::Tensor& device_side = upload ? self : source;
  const char* kind = upload ? "h2d" : "d2h";
  const bool in_pinned = is_pinned(host_side.storage().data());
  if (!(non_blocking && in_pinned)) {
    // From pageable memory the driver copies through a staging buffer of its own, and waits.
    refuse_in_capture(upload ? "copy from pageable or with a blocking call" : "copy to the host that is waited for");
    if (!upload) ++g_host_waits;
  }
  if (t_graph) {
    record_copy(self, source);
    host_alias(self).copy_(host_alias(source));
    return self;
  }
  call_hook(hooks().copying, kind, host_side, device_side, non_blocking, in_pinned);
  host_alias(self).copy_(host_alias(source));
  call_hook(hooks().copied, kind, host_side, device_side, non_blocking, in_pinned);
  return self;
}

inline void require_device_options(
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(
      !device.has_value() || device->index() <= 0, "CUDA error: invalid device ordinal (asked for ",
      device.value_or(kDevice), ", the simulation has cuda:0 only)");
  if (layout.value_or(c10::kStrided) != c10::kStrided) {
    not_simulated(c10::str("the simulated CUDA device holds plain strided tensors only, not one with layout ", *layout));
  }
}

inline at::Tensor made_on_device(at::Tensor made) {
  if (t_graph && t_mode != PAUSED) t_graph->add_new(made);
  return made;
}

inline at::Tensor empty(
    at::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  require_device_options(layout, device, pin_memory);
  return made_on_device(at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format));
}

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  require_device_options(layout, device, pin_memory);
  return made_on_device(at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype)));
}

inline at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

inline at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(none), 0, {0}, {});
}

// Attention is one operation on a GPU. Here it is the CPU's, where neither gradients nor grouped heads are asked for; what
// is left is composed of operators that the fallback knows. The numbers are those of sdp::SDPBackend.
inline int64_t choose_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>&, double dropout,
    bool, std::optional<double>, bool) {  // also behind torch's own table of such choices, see module.cpp
  constexpr int64_t composed = 0, efficient = 2;
  const bool graded = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  const bool simple = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(1) == k.size(1) && dropout == 0.0;
  return graded || !simple ? composed : efficient;
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias, bool, double,
    bool causal, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  const bool recording = capturing();
  if (recording) require_valid();
  auto compute = [causal, scale](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::optional<at::Tensor>& bias) {
    const auto mask = bias.has_value() ? std::optional<at::Tensor>(host_alias(*bias)) : std::nullopt;
    return device_alias(at::scaled_dot_product_attention(
        host_alias(q), host_alias(k), host_alias(v), mask, /*dropout_p=*/0.0, causal, scale, /*enable_gqa=*/false));
  };
  at::Tensor out = made_on_device(compute(q, k, v, bias));
  if (recording) {
    auto mask = bias.has_value() ? std::optional<at::Tensor>(snapshot(*bias)) : std::nullopt;
    auto run = [compute, q = snapshot(q), k = snapshot(k), v = snapshot(v), mask, out = snapshot(out)] {
      put_result(out, compute(q, k, v, mask));
    };
    t_graph->nodes.push_back({"aten::scaled_dot_product_attention", std::move(run)});
  }
  return {out, at::Tensor(), at::Tensor(), at::Tensor()};
}

inline bool no_cudnn_ctc(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) {
  return false;
}
inline bool no_cudnn_ctc_of_tensors(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t) {
  return false;
}

inline void record_stream(at::Tensor&, c10::Stream) {}  // memory is freed when the last reference goes

inline void register_kernels(torch::Library& aten) {
  aten.impl("copy_", &copy_);
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("view", &at::native::view);
  aten.impl("as_strided", &at::native::as_strided_tensorimpl);
  aten.impl("_reshape_alias", &at::native::_reshape_alias);
  aten.impl("unfold", &at::native::unfold);
  aten.impl("resize_", &at::native::resize_);
  aten.impl("set_.source_Storage", &set_storage);
  aten.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  aten.impl("set_.source_Tensor", &at::native::set_tensor_);
  aten.impl("set_", &set_nothing);
  aten.impl("_fused_sdp_choice", &choose_attention);
  aten.impl("_scaled_dot_product_efficient_attention", &attention);
  aten.impl("_use_cudnn_ctc_loss", &no_cudnn_ctc);
  aten.impl("_use_cudnn_ctc_loss.Tensor", &no_cudnn_ctc_of_tensors);
  aten.impl("_use_miopen_ctc_loss", &no_cudnn_ctc);
  aten.impl("_use_miopen_ctc_loss.Tensor", &no_cudnn_ctc_of_tensors);
  aten.impl("record_stream", &record_stream);
}

// Operators with a CPU kernel that torch would rather compose of others for a device without a kernel of its own: that
// rounds otherwise (native_layer_norm), or does the work of checking twice (structured operators: `add` allocates, and
// calls `add.out`). There are 400; each costs 0.2 ms to install, so the ones that engines call often get the fallback.
inline void register_composed(torch::Library& aten) {
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor", "mul.Tensor",
        "mul_.Tensor", "div.Tensor", "div_.Tensor", "div.Tensor_mode", "remainder.Scalar", "eq.Scalar", "eq.Tensor",
        "ne.Scalar", "ne.Tensor", "lt.Scalar", "lt.Tensor", "le.Scalar", "le.Tensor", "gt.Scalar", "gt.Tensor",
        "ge.Scalar", "ge.Tensor", "bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_not", "maximum", "minimum", "clamp",
        "neg", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid", "silu",
        "pow.Tensor_Scalar", "sum.dim_IntList", "mean.dim", "amax", "amin", "argmax", "all", "any", "cumsum", "cat",
        "index.Tensor", "index_copy_", "index_add_", "gather", "scatter_.src", "scatter_.value", "topk", "sort.stable",
        "tril", "triu", "mm", "bmm", "addmm", "baddbmm", "_softmax", "_log_softmax"}) {
    aten.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// Kinds of CUDA tensors that are not strided memory are refused where they are made. What slips through has no kernels.
struct MakesKind {
  c10::DispatchKey kind;
  const char* name;
};
constexpr MakesKind kMakesKinds[] = {
    {c10::DispatchKey::SparseCUDA, "_sparse_coo_tensor_with_dims_and_tensors"},
    {c10::DispatchKey::SparseCUDA, "_sparse_coo_tensor_with_dims"},
    {c10::DispatchKey::SparseCUDA, "empty.memory_format"},
    {c10::DispatchKey::SparseCsrCUDA, "empty.memory_format"},
    {c10::DispatchKey::QuantizedCUDA, "empty_quantized"},
    {c10::DispatchKey::QuantizedCUDA, "empty.memory_format"},
    {c10::DispatchKey::QuantizedCUDA, "_empty_affine_quantized"},
};

inline void refuse_kind(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  not_simulated(
      "the simulated CUDA device holds plain strided tensors only: " + toString(op.operator_name()) +
      " is to make a sparse or quantized one");
}

}  // namespace sim
