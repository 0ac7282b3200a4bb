// What a thread is doing, and how C++ speaks to Python: errors and hooks.
#pragma once
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

namespace sim {

// LIVE: engine code runs, everything counts. KERNEL: inside one declared device operation, whose parts are nobody's
// business. PAUSED: harness code. Outside of LIVE nothing is recorded, counted, told to a hook or refused.
enum Mode : int { LIVE = 0, KERNEL = 1, PAUSED = 2 };
inline thread_local int t_mode = LIVE;

struct ModeGuard {
  explicit ModeGuard(int mode) : before(t_mode) { t_mode = mode; }
  ~ModeGuard() { t_mode = before; }
  int before;
};

inline const c10::Device kDevice(c10::DeviceType::CUDA, 0);
inline const c10::Device kHost(c10::DeviceType::CPU);

// Never destroyed: at exit the interpreter is gone before these are.
struct Hooks {
  PyObject* not_simulated = nullptr;  // exception class
  PyObject* copying = nullptr;        // (kind, host_side, device_side, non_blocking, pinned), before a copy
  PyObject* copied = nullptr;         // the same, after it
  PyObject* synchronising = nullptr;  // (what), before an operation that makes the host wait for the stream
  PyObject* trapped = nullptr;        // (), after a trapped access; see memory.h
};
inline Hooks& hooks() {
  static Hooks* all = new Hooks;
  return *all;
}

inline void set_hook(PyObject*& slot, const pybind11::object& value) {
  PyObject* before = slot;
  slot = value.is_none() ? nullptr : pybind11::object(value).release().ptr();
  Py_XDECREF(before);
}

[[noreturn]] inline void not_simulated(const std::string& message) {
  pybind11::gil_scoped_acquire gil;
  PyErr_SetString(hooks().not_simulated ? hooks().not_simulated : PyExc_NotImplementedError, message.c_str());
  python_error error;
  error.persist();
  throw std::move(error);
}

// A hook is harness code: what it does with tensors is not looked at.
template <class... Args>
inline void call_hook(PyObject* hook, Args&&... args) {
  if (hook == nullptr) return;
  pybind11::gil_scoped_acquire gil;
  ModeGuard quiet(PAUSED);
  pybind11::reinterpret_borrow<pybind11::object>(hook)(std::forward<Args>(args)...);
}

}  // namespace sim
