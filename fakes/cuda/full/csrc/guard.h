// What libtorch asks a CUDA device for, answered by one device whose calls end before they return.
#pragma once
#include <typeinfo>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "fallback.h"
#include "memory.h"

namespace sim {

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream the_stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return kDevice;
  }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "CUDA error: invalid device ordinal");
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return the_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return the_stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return the_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return the_stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return the_stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronising("stream synchronisation"); }
  void synchronizeEvent(void*) const override { synchronising("event synchronisation"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronising("device synchronisation"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct DeviceHooks final : at::CUDAHooksInterface {
  static const at::Generator& default_generator() {
    static auto* generator = new at::Generator(at::make_generator<DeviceGenerator>());
    return *generator;
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    TORCH_CHECK(device <= 0, "CUDA error: invalid device ordinal");
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<DeviceGenerator>(); }
  void deviceSynchronize(c10::DeviceIndex) const override { synchronising("device synchronisation"); }
};

// torch's import has already made its one hooks object, which says "no CUDA". It has no data, so that pointing it at
// another class's virtual table changes what it is. `hooks_are_plain` makes sure of both before anything is touched.
inline void*& virtual_table(const at::CUDAHooksInterface& object) {
  return *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&object));
}
static_assert(sizeof(at::CUDAHooksInterface) == sizeof(void*), "torch's CUDA hooks have data members");
static_assert(sizeof(DeviceHooks) == sizeof(void*), "torch's CUDA hooks have data members");

inline DeviceHooks& device_hooks() {
  static auto* ours = new DeviceHooks;
  return *ours;
}
inline bool hooks_are_plain() {
  return typeid(at::detail::getCUDAHooks()) == typeid(at::CUDAHooksInterface);
}

}  // namespace sim
