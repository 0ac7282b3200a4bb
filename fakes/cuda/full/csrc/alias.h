// One memory, two tensors: every device tensor can be seen as a CPU tensor over the same bytes, and back.
#pragma once
#include <c10/core/CPUAllocator.h>

#include "mode.h"

namespace sim {

c10::Allocator* device_allocator();  // memory.h

inline void drop_owner(void* owner) { delete static_cast<c10::Storage*>(owner); }

// A storage on `device` over another storage's memory, which it keeps alive. The alias of an alias is the original.
inline c10::Storage storage_over(const c10::Storage& memory, c10::Device device) {
  auto* impl = memory.unsafeGetStorageImpl();
  const c10::DataPtr& pointer = impl->mutable_data_ptr();  // makes a lazy clone real
  if (pointer.get_deleter() == &drop_owner) {
    const auto& origin = *static_cast<c10::Storage*>(pointer.get_context());
    if (origin.device().type() == device.type() && origin.data() == pointer.get() && origin.nbytes() == memory.nbytes()) {
      return origin;
    }
  }
  c10::DataPtr alias(pointer.get(), new c10::Storage(memory), &drop_owner, device);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), memory.nbytes(), std::move(alias),
      device.is_cuda() ? device_allocator() : c10::GetCPUAllocator(), /*resizable=*/true);
}

// A tensor of the same shape, strides and flags over another storage. conj and neg are lazy bits: an alias without
// them shows other numbers.
inline at::Tensor tensor_over(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

inline void require_strided(const at::Tensor& tensor) {
  if (tensor.layout() != c10::kStrided || !tensor.has_storage() || tensor.is_quantized()) {
    not_simulated(
        std::string("the simulated CUDA device holds plain strided tensors only, not one with layout ") +
        (tensor.is_quantized() ? "quantized" : c10::str(tensor.layout())));
  }
}

inline at::Tensor host_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  require_strided(tensor);
  return tensor_over(tensor, storage_over(tensor.storage(), kHost), c10::DispatchKey::CPU);
}

inline at::Tensor device_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  require_strided(tensor);
  return tensor_over(tensor, storage_over(tensor.storage(), kDevice), c10::DispatchKey::CUDA);
}

inline c10::StorageImpl* storage_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// The aliases of one operator call: `host` on the way in, `device` on the way out.
class Aliases {
 public:
  const at::Tensor& host(const at::Tensor& tensor) {
    for (const auto& pair : pairs_) {
      if (pair.device.is_same(tensor)) return pair.host;
    }
    require_strided(tensor);
    c10::Storage storage;
    for (const auto& pair : pairs_) {
      if (storage_of(pair.device) == storage_of(tensor)) storage = pair.host.storage();
    }
    if (!storage) storage = storage_over(tensor.storage(), kHost);
    pairs_.push_back({tensor, tensor_over(tensor, std::move(storage), c10::DispatchKey::CPU)});
    return pairs_.back().host;
  }

  // An argument again, a view of one, or a new tensor; `is_new` says that it is the last.
  at::Tensor device(at::Tensor result, bool* is_new = nullptr) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (const auto& pair : pairs_) {
      if (pair.host.is_same(result)) return pair.device;
    }
    require_strided(result);
    for (const auto& pair : pairs_) {
      if (storage_of(pair.host) == storage_of(result)) {
        return tensor_over(result, pair.device.storage(), c10::DispatchKey::CUDA);
      }
    }
    if (is_new != nullptr) *is_new = true;
    return device_alias(result);
  }

  // Carry over what an operator did to its arguments besides writing: other memory, another shape.
  void write_back() {
    for (const auto& pair : pairs_) {
      auto* host = storage_of(pair.host);
      auto* device = storage_of(pair.device);
      if (host->data() != device->data()) {
        c10::DataPtr moved(host->mutable_data(), new c10::Storage(pair.host.storage()), &drop_owner, kDevice);
        device->set_data_ptr_noswap(std::move(moved));
        device->set_nbytes(host->nbytes());
      }
      if (!pair.device.sizes().equals(pair.host.sizes()) || !pair.device.strides().equals(pair.host.strides()) ||
          pair.device.storage_offset() != pair.host.storage_offset()) {
        pair.device.unsafeGetTensorImpl()->set_sizes_and_strides(
            pair.host.sizes(), pair.host.strides(), pair.host.storage_offset());
      }
    }
  }

  bool empty() const { return pairs_.empty(); }

 private:
  struct Pair {
    at::Tensor device, host;
  };
  c10::SmallVector<Pair, 4> pairs_;
};

}  // namespace sim
