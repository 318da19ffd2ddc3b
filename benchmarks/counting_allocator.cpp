// Allocator of CPU tensors that counts their bytes, and the most at once, whichever thread frees them.
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

constexpr std::size_t ALIGNMENT = 64;  // also the bytes before a tensor's, which hold its size
std::atomic<long> live{0}, peak{0};

void release(void* data) {
  if (data == nullptr) return;
  char* memory = static_cast<char*>(data) - ALIGNMENT;
  live -= *reinterpret_cast<long*>(memory);
  std::free(memory);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    void* memory = nullptr;
    if (posix_memalign(&memory, ALIGNMENT, bytes + ALIGNMENT)) throw std::bad_alloc();
    *static_cast<long*>(memory) = static_cast<long>(bytes);
    const long now = live += static_cast<long>(bytes);
    long highest = peak;
    while (now > highest && !peak.compare_exchange_weak(highest, now)) {
    }
    void* data = static_cast<char*>(memory) + ALIGNMENT;
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

CountingAllocator allocator;

}  // namespace

extern "C" {
void install() { c10::SetCPUAllocator(&allocator, 255); }
long live_bytes() { return live; }
long peak_bytes() { return peak; }
void reset_peak() { peak = live.load(); }
}
