// CUDA graphs: what is called while a thread captures is recorded, and can be run again over the same memory.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "alias.h"

namespace sim {

// A recorded tensor is a snapshot of (storage, sizes, strides, offset): the object that the engine holds may be
// squeezed, resized or pointed elsewhere later, which a graph does not see.
inline at::Tensor snapshot(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return tensor_over(tensor, tensor.storage(), c10::DispatchKey::CUDA);
}
inline at::Tensor host_snapshot(const at::Tensor& tensor) {
  return tensor.is_cuda() ? snapshot(tensor) : tensor_over(tensor, tensor.storage(), c10::DispatchKey::CPU);
}

inline c10::IValue snapshot(const c10::IValue& value) {
  if (value.isTensor()) return snapshot(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(snapshot(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const auto& entry : value.toOptionalTensorList()) {
      std::optional<at::Tensor> tensor = entry;
      all.push_back(tensor.has_value() ? std::optional<at::Tensor>(snapshot(*tensor)) : std::nullopt);
    }
    return all;
  }
  return value;
}

inline void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  }
}

struct Node {
  std::string name;
  std::function<void()> run;
};

// Nothing that is captured runs on a GPU until the replay. Shapes and errors are needed at once, so here it does run;
// `begin` to `end` keep what was overwritten and put it back. Memory that came into being meanwhile is filled with
// 0xFF: NaN in every floating-point dtype.
class Graph {
 public:
  std::vector<Node> nodes;
  std::string error;  // of the operation that made this graph invalid
  bool captured = false;

  // Only what the tensor spans: a small view of a large workspace costs little.
  void keep(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
    const c10::Storage& storage = tensor.storage();
    const size_t offset = tensor.storage_offset() * tensor.itemsize();
    const size_t end = offset + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
    if (storage.data() == nullptr || end > storage.nbytes() || known_.count(storage.data()) != 0) return;
    const auto* bytes = static_cast<const char*>(storage.data()) + offset;
    if (kept_.insert({bytes, end - offset}).second) before_.push_back({storage, offset, std::string(bytes, end - offset)});
  }
  void add_new(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.storage().nbytes() == 0) return;
    if (known_.insert(tensor.storage().data()).second) new_.push_back(tensor.storage());
  }
  void undo() {
    for (auto kept = before_.rbegin(); kept != before_.rend(); ++kept) {  // what was kept first is the oldest
      if (kept->offset + kept->bytes.size() > kept->storage.nbytes()) continue;
      std::memcpy(static_cast<char*>(kept->storage.mutable_data()) + kept->offset, kept->bytes.data(), kept->bytes.size());
    }
    for (auto& storage : new_) std::memset(storage.mutable_data(), 0xFF, storage.nbytes());
    before_.clear();
    kept_.clear();
    known_.clear();
    new_.clear();
  }

 private:
  struct Kept {
    c10::Storage storage;
    size_t offset;
    std::string bytes;
  };
  std::vector<Kept> before_;
  std::set<std::pair<const char*, size_t>> kept_;
  std::unordered_set<const void*> known_;  // storages that came into being meanwhile
  std::vector<c10::Storage> new_;
};

inline bool g_installed = false;
inline thread_local std::shared_ptr<Graph> t_graph;  // the one that this thread captures into

inline bool capturing() { return t_graph != nullptr && t_mode == LIVE; }

constexpr const char* kInvalidated = "CUDA error: operation failed due to a previous error during capture";

// Before anything is enqueued: a capture that failed takes no more.
inline void require_valid() {
  TORCH_CHECK(t_graph->error.empty(), kInvalidated, " (", t_graph->error, ")");
}

// For what the host would have to wait for, or what is no stream operation at all.
inline void refuse_in_capture(const std::string& what) {
  if (!capturing()) return;
  require_valid();
  t_graph->error = "CUDA error: operation not permitted when stream is capturing (" + what + ")";
  TORCH_CHECK(false, t_graph->error);
}

inline void begin_capture(const std::shared_ptr<Graph>& graph) {
  TORCH_CHECK(t_graph == nullptr, "CUDA error: a capture is underway in this thread already");
  graph->nodes.clear();
  graph->error.clear();
  graph->captured = false;
  t_graph = graph;
}

// Returns the error that made the graph invalid, or "".
inline std::string end_capture() {
  TORCH_CHECK(t_graph != nullptr, "CUDA error: no capture is underway in this thread");
  auto graph = std::move(t_graph);
  t_graph = nullptr;
  graph->undo();
  graph->captured = graph->error.empty();
  if (!graph->captured) graph->nodes.clear();
  return graph->error;
}

inline void replay(Graph& graph) {
  if (t_graph != nullptr && t_mode == LIVE) refuse_in_capture("replay of another graph");
  TORCH_CHECK(g_installed, "the simulated CUDA device that this graph was captured on has been left");
  TORCH_CHECK(graph.captured, "Called CUDAGraph::replay without a preceding successful capture.");
  at::AutoDispatchBelowADInplaceOrView below;
  ModeGuard quiet(KERNEL);
  for (Node& node : graph.nodes) node.run();
}

// Results of a replayed operation land where those of the captured one lie.
inline void put_result(const at::Tensor& recorded, const at::Tensor& result) {
  if (!recorded.defined() || storage_of(recorded)->data() == storage_of(result)->data()) return;
  TORCH_CHECK(
      recorded.sizes().equals(result.sizes()), "an operation gives shape ", result.sizes(), " at replay, it gave ",
      recorded.sizes(), " at capture");
  host_alias(recorded).copy_(host_alias(result));
}

inline void put_result(const c10::IValue& recorded, const c10::IValue& result) {
  if (recorded.isTensor()) {
    put_result(recorded.toTensor(), result.toTensor());
  } else if (recorded.isTensorList()) {
    auto to = recorded.toTensorVector();
    auto from = result.toTensorVector();
    for (size_t i = 0; i < to.size(); ++i) put_result(to[i], from[i]);
  }
}

inline void record_operator(
    const c10::OperatorHandle& op, std::vector<c10::IValue> arguments, std::vector<c10::IValue> results) {
  auto run = [op, arguments = std::move(arguments), results = std::move(results)] {
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    op.callBoxedForDispatchKey(c10::DispatchKey::CUDA, stack);
    for (size_t i = 0; i < results.size(); ++i) put_result(results[i], stack[i]);
  };
  t_graph->nodes.push_back({toString(op.operator_name()), std::move(run)});
}

inline void record_copy(const at::Tensor& to, const at::Tensor& from) {
  t_graph->keep(to);
  auto run = [to = host_snapshot(to), from = host_snapshot(from)] { host_alias(to).copy_(host_alias(from)); };
  t_graph->nodes.push_back({"aten::copy_", std::move(run)});
}

inline void record_call(pybind11::object function) {
  auto* held = function.release().ptr();
  std::shared_ptr<PyObject> owner(held, [](PyObject* object) {
    if (!Py_IsInitialized()) return;
    pybind11::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
  auto run = [owner] {
    pybind11::gil_scoped_acquire gil;
    pybind11::reinterpret_borrow<pybind11::object>(owner.get())();
  };
  t_graph->nodes.push_back({"kernel", std::move(run)});
}

}  // namespace sim
