// The Python module: installing the device, aliases, capture, protection. Mechanism only; rules about what is a fault
// are Python's.
#include <torch/csrc/utils/device_lazy_init.h>

#include "guard.h"
#include "kernels.h"

namespace sim {
namespace {

void* g_hooks_before = nullptr;  // virtual table of torch's own hooks

// Registrations that are withdrawn when these go.
std::vector<std::unique_ptr<torch::Library>> g_registered;

std::string why_not() {
  if (g_installed) return "it is installed already";
  const auto guard = static_cast<size_t>(c10::DeviceType::CUDA);
  if (at::globalContext().hasCUDA() || c10::impl::device_guard_impl_registry[guard].load() != nullptr) {
    return "this torch has CUDA of its own";
  }
  if (!hooks_are_plain()) return "torch's CUDA hooks are not the ones of a CPU build";
  return "";
}

void uninstall() {
  if (!g_installed) return;
  g_installed = false;
  if (t_graph) end_capture();
  unwatch_traps();
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(nullptr);
  g_registered.clear();
  virtual_table(at::detail::getCUDAHooks()) = g_hooks_before;
  c10::SetAllocator(c10::DeviceType::CUDA, nullptr);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(nullptr);
  // torch asks torch.cuda._lazy_init once; it is to ask again.
  torch::utils::set_requires_device_init(c10::DeviceType::CUDA, true);
}

void install() {
  const std::string reason = why_not();
  TORCH_CHECK(reason.empty(), reason);
  static DeviceGuard guard;
  g_installed = true;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  c10::SetAllocator(c10::DeviceType::CUDA, device_allocator());
  g_hooks_before = std::exchange(virtual_table(at::detail::getCUDAHooks()), virtual_table(device_hooks()));
  try {
    auto everything = std::make_unique<torch::Library>(
        torch::Library::IMPL, "_", std::make_optional(c10::DispatchKey::CUDA), __FILE__, __LINE__);
    everything->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    g_registered.push_back(std::move(everything));
    auto aten = std::make_unique<torch::Library>(
        torch::Library::IMPL, "aten", std::make_optional(c10::DispatchKey::CUDA), __FILE__, __LINE__);
    register_kernels(*aten);
    register_composed(*aten);
    g_registered.push_back(std::move(aten));
    for (const MakesKind& makes : kMakesKinds) {
      auto refused = std::make_unique<torch::Library>(
          torch::Library::IMPL, "aten", std::make_optional(makes.kind), __FILE__, __LINE__);
      refused->impl(makes.name, torch::CppFunction::makeFromBoxedFunction<&refuse_kind>());
      g_registered.push_back(std::move(refused));
    }
  } catch (...) {
    uninstall();
    throw;
  }
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  watch_traps();
}

at::Tensor host(const at::Tensor& tensor) {
  // Inside a kernel that is being captured, what is asked for may be written.
  if (t_graph && t_mode == KERNEL && tensor.is_cuda()) t_graph->keep(tensor);
  return host_alias(tensor);
}

at::Tensor adopt(const at::Tensor& tensor) { return made_on_device(device_alias(tensor)); }

py::list names(const Graph& graph) {
  py::list all;
  for (const Node& node : graph.nodes) all.append(node.name);
  return all;
}

int set_mode(int mode) {
  const int before = t_mode;
  t_mode = mode;
  return before;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("why_not", &why_not);
  m.def("install", &install);
  m.def("uninstall", &uninstall);
  m.def("set_hooks", [](py::object not_simulated, py::object copying, py::object copied, py::object synchronising,
                        py::object trapped) {
    set_hook(hooks().not_simulated, not_simulated);
    set_hook(hooks().copying, copying);
    set_hook(hooks().copied, copied);
    set_hook(hooks().synchronising, synchronising);
    set_hook(hooks().trapped, trapped);
  });
  m.attr("LIVE") = static_cast<int>(LIVE);
  m.attr("KERNEL") = static_cast<int>(KERNEL);
  m.attr("PAUSED") = static_cast<int>(PAUSED);
  m.def("set_mode", &set_mode);
  m.def("mode", [] { return t_mode; });

  m.def("host", &host);
  m.def("adopt", &adopt);
  m.def("snapshot", [](const at::Tensor& tensor) { return snapshot(tensor); });
  m.def("host_waits", [] { return g_host_waits.load(); });
  m.def("synchronising", &synchronising);

  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("__len__", [](const Graph& graph) { return graph.nodes.size(); })
      .def("names", &names)
      .def_readonly("captured", &Graph::captured)
      .def_readonly("error", &Graph::error)
      .def("keep", [](Graph& graph, const at::Tensor& tensor) { graph.keep(tensor); })
      .def("replay", [](Graph& graph) { replay(graph); });
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("capturing", &capturing);
  m.def("capture_graph", [] { return t_graph; });
  m.def("record_call", &record_call);
  m.def("refuse_in_capture", &refuse_in_capture);
  m.def("require_valid", [] { if (capturing()) require_valid(); });

  m.def("is_pinned", [](const at::Tensor& tensor) { return is_pinned(tensor.storage().data()); });
  m.def("protect", &protect);
  m.attr("CLOSED") = PROT_NONE;
  m.attr("READABLE") = PROT_READ;
  m.attr("OPEN") = kOpen;
  m.def("traps", [] {
    py::list all;
    for (const Trap& trap : take_traps()) {
      all.append(py::make_tuple(reinterpret_cast<int64_t>(trap.address), trap.access, trap.id));
    }
    return all;
  });
}

}  // namespace sim
