// Device memory, and pinned host memory on pages of its own that can be closed while a copy is in flight.
#pragma once
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "alias.h"

namespace sim {

constexpr size_t kDeviceAlignment = 512;  // bytes; what CUDA's caching allocator gives

// Every block is born with the host storage that operators compute on: an alias of it costs no allocation then.
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &std::free, kDevice};
    const size_t rounded = (size + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
    void* memory = std::aligned_alloc(kDeviceAlignment, rounded);
    TORCH_CHECK_WITH(
        OutOfMemoryError, memory != nullptr, "CUDA out of memory. Tried to allocate ", size,
        " bytes (on the host, which the simulated device lives on)");
    c10::DataPtr own(memory, memory, &std::free, kHost);
    auto* host = new c10::Storage(
        c10::Storage::use_byte_size_t(), size, std::move(own), c10::GetCPUAllocator(), /*resizable=*/true);
    return {memory, host, &drop_owner, kDevice};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

inline c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

// Pinned blocks. `id` tells a block from a later one at the same address.
struct Block {
  size_t length;
  int64_t id;
};
struct PinnedBlocks {
  std::mutex mutex;
  std::map<char*, Block> by_address;
  int64_t last_id = 0;
};
inline PinnedBlocks& pinned() {
  static auto* all = new PinnedBlocks;
  return *all;
}
inline std::map<char*, Block>::iterator find_pinned(const void* address) {  // with the mutex held
  auto& blocks = pinned().by_address;
  auto at = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (at == blocks.begin()) return blocks.end();
  --at;
  return address < at->first + at->second.length ? at : blocks.end();
}
inline bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  return find_pinned(address) != pinned().by_address.end();
}

// Closed blocks, in a form that a signal handler may read: no lock, no allocation.
constexpr int kOpen = PROT_READ | PROT_WRITE;
constexpr int kMaxClosed = 1024;
struct Closed {
  std::atomic<char*> base{nullptr};
  std::atomic<size_t> length{0};
  std::atomic<int> access{kOpen};
  std::atomic<int64_t> id{0};
};
inline Closed g_closed[kMaxClosed];
inline std::atomic<int> g_closed_end{0};  // slots in use lie below

struct Trap {
  char* address;
  int access;
  int64_t id;
};
constexpr int kMaxTraps = 1024;
inline Trap g_traps[kMaxTraps];
inline std::atomic<int> g_trap_count{0};

inline int tell_of_traps(void*) {
  try {
    call_hook(hooks().trapped);
  } catch (pybind11::error_already_set& error) {
    error.discard_as_unraisable("the hook of trapped accesses");
  }
  return 0;
}

inline struct sigaction g_segv_before;

// The access itself is let through: the block is opened and the instruction runs again. The fault is synchronous, at a
// write to tensor memory, so Python may be called from here if this thread is one of Python's: its stack is the
// culprit's. Threads without an interpreter state (pools inside of operators) are reported from the main thread later.
inline void on_segv(int signal, siginfo_t* info, void* context) {
  auto* address = static_cast<char*>(info->si_addr);
  for (int i = 0, end = g_closed_end.load(); i < end; ++i) {
    Closed& block = g_closed[i];
    char* base = block.base.load();
    if (base == nullptr || address < base || address >= base + block.length.load()) continue;
    int access = block.access.exchange(kOpen);
    mprotect(base, block.length.load(), kOpen);
    if (access == kOpen) return;  // another thread came first
    int index = g_trap_count.fetch_add(1);
    if (index < kMaxTraps) g_traps[index] = {address, access, block.id.load()};
    if (PyGILState_GetThisThreadState() != nullptr) {
      pybind11::gil_scoped_acquire gil;
      pybind11::error_scope pending_error;
      tell_of_traps(nullptr);
    } else {
      Py_AddPendingCall(&tell_of_traps, nullptr);
    }
    return;
  }
  if (g_segv_before.sa_flags & SA_SIGINFO) {
    g_segv_before.sa_sigaction(signal, info, context);
  } else if (g_segv_before.sa_handler == SIG_DFL || g_segv_before.sa_handler == SIG_IGN) {
    sigaction(SIGSEGV, &g_segv_before, nullptr);  // runs into it again on return, and dies of it
  } else {
    g_segv_before.sa_handler(signal);
  }
}

inline bool segv_is_ours() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  return (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_segv;
}
inline void watch_traps() {
  if (segv_is_ours()) return;
  struct sigaction ours;
  std::memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = &on_segv;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;  // not on the alternate stack: it is too small for Python
  sigaction(SIGSEGV, &ours, &g_segv_before);
}
inline void unwatch_traps() {
  if (segv_is_ours()) sigaction(SIGSEGV, &g_segv_before, nullptr);
}

inline void forget_closed(char* base) {
  for (int i = 0, end = g_closed_end.load(); i < end; ++i) {
    if (g_closed[i].base.load() == base) g_closed[i].base.store(nullptr);
  }
}

// Close the pinned block around an address to writes (PROT_READ) or to all access (PROT_NONE), or open it. Returns the
// block's id; 0 if the address is not in pinned memory.
inline int64_t protect(int64_t address, int access) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto found = find_pinned(reinterpret_cast<void*>(address));
  if (found == pinned().by_address.end()) return 0;
  char* base = found->first;
  const Block& block = found->second;
  if (access == kOpen) {
    mprotect(base, block.length, kOpen);
    forget_closed(base);
    return block.id;
  }
  watch_traps();  // somebody may have installed a handler over ours since
  int slot = -1;
  int end = g_closed_end.load();
  for (int i = 0; i < end && (slot < 0 || g_closed[slot].base.load() != base); ++i) {
    char* used = g_closed[i].base.load();
    if (used == base || (used == nullptr && slot < 0)) slot = i;
  }
  if (slot < 0) {
    TORCH_CHECK(end < kMaxClosed, "more than ", kMaxClosed, " pinned buffers have copies in flight at once");
    slot = end;
    g_closed_end.store(end + 1);
  }
  g_closed[slot].length.store(block.length);
  g_closed[slot].id.store(block.id);
  g_closed[slot].access.store(access);
  g_closed[slot].base.store(base);
  mprotect(base, block.length, access);
  return block.id;
}

inline std::vector<Trap> take_traps() {
  int count = std::min(g_trap_count.exchange(0), kMaxTraps);
  return std::vector<Trap>(g_traps, g_traps + count);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    static const size_t page = sysconf(_SC_PAGESIZE);
    size_t length = (std::max<size_t>(size, 1) + page - 1) / page * page;
    auto* memory = static_cast<char*>(std::aligned_alloc(page, length));
    TORCH_CHECK(memory != nullptr, "CUDA error: out of memory (", size, " bytes of pinned host memory)");
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().by_address[memory] = {length, ++pinned().last_id};
    return {memory, memory, &free, kHost};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  static void free(void* memory) {
    {
      std::lock_guard<std::mutex> lock(pinned().mutex);
      auto found = pinned().by_address.find(static_cast<char*>(memory));
      if (found != pinned().by_address.end()) {
        mprotect(memory, found->second.length, kOpen);
        forget_closed(found->first);
        pinned().by_address.erase(found);
      }
    }
    std::free(memory);
  }
};

inline c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

}  // namespace sim
