// What CUDA does otherwise than a CPU, by operator: which operators wait for the device, and which take host tensors.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace sim {

using Names = std::unordered_set<std::string>;

// Their results' shapes or values are needed on the host, so that the host waits.
// Source: native_functions.yaml and aten/src/ATen/native/cuda.
inline const Names kReadByHost = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "bincount", "is_nonzero", "_ctc_loss", "histogram"};

// The check of devices makes no exception for 0-dim CPU tensors: these do not go through TensorIterator.
inline const Names kNoHostScalars = {
    "cat", "stack", "index_select", "index_copy", "index_copy_", "index_add", "index_add_", "gather", "scatter",
    "scatter_", "scatter_add", "scatter_add_", "take", "embedding", "mm", "bmm", "addmm", "addmv", "dot", "equal",
    "searchsorted"};

// The second argument is a list of indices, which may be on the host.
inline const Names kIndexed = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index",
                               "_unsafe_index_put"};

// Which argument and which result live on the host (-1: none).
struct HostSide {
  int argument, result;
};
inline const std::unordered_map<std::string, HostSide> kHostSide = {
    {"_pack_padded_sequence", {1, 1}}, {"_pack_padded_sequence_backward", {2, -1}}};

struct Rule {
  bool own = false;           // torch's own operator, which has CUDA kernels of its own
  bool read_by_host = false;
  bool repeats = false;       // repeat_interleave: waits unless told the size
  bool host_scalars = true;
  bool indexed = false;
  int values = -1;            // of an indexed assignment: which argument
  int host_argument = -1, host_result = -1;
  bool changes_nothing = false;  // a view, an empty tensor, or a question: a graph has no node for it
  std::vector<bool> written;     // by argument
};

inline Rule rule_for(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string& full = schema.operator_name().name;
  const auto colons = full.find("::");
  const std::string space = full.substr(0, colons), name = full.substr(colons + 2);
  Rule rule;
  rule.own = space == "aten" || space == "prims" || space == "prim" || space == "rngprims";
  if (rule.own) {
    rule.read_by_host = kReadByHost.count(name) > 0;
    rule.repeats = name == "repeat_interleave";
    rule.host_scalars = kNoHostScalars.count(name) == 0;
    rule.indexed = kIndexed.count(name) > 0;
    if (rule.indexed && schema.arguments().size() > 2) rule.values = 2;
    auto found = kHostSide.find(name);
    if (found != kHostSide.end()) {
      rule.host_argument = found->second.argument;
      rule.host_result = found->second.result;
    }
  }
  bool writes = false, views = true;
  for (const auto& argument : schema.arguments()) {
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    rule.written.push_back(written);
    writes = writes || written;
  }
  for (const auto& result : schema.returns()) {
    views = views && (result.alias_info() != nullptr || result.type()->kind() != c10::TypeKind::TensorType);
    if (result.type()->kind() == c10::TypeKind::ListType && result.alias_info() == nullptr) views = false;
  }
  rule.changes_nothing = !writes && views;
  return rule;
}

// Schemas live as long as their operators; a library that is unloaded and loaded again may reuse an address, so the
// name is compared too.
inline const Rule& rule_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const void*, std::pair<c10::OperatorName, Rule>> known;
  auto found = known.find(&op.schema());
  if (found == known.end() || found->second.first != op.operator_name()) {
    found = known.insert_or_assign(&op.schema(), std::make_pair(op.operator_name(), rule_for(op))).first;
  }
  return found->second.second;
}

}  // namespace sim
