// Memory that weights are packed into: in order, and on large pages where the system has them. One token reads
// all of it once; with small pages a fifth of that time goes to finding them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>

namespace headroom {

class WeightMemory {
 public:
  // The one of the process. What was taken lives as long as somebody holds it.
  static WeightMemory& shared() {
    static WeightMemory* memory = new WeightMemory();
    return *memory;
  }

  // `bytes` at a multiple of 64, never written before. Neighbours in time are neighbours in memory.
  std::shared_ptr<char> take(int64_t bytes) {
    std::lock_guard<std::mutex> one(busy_);
    bytes = (bytes + 63) / 64 * 64;
    if (chunk_ == nullptr || used_ + bytes > size_) {
      size_ = std::max(kChunk, (bytes + kPage - 1) / kPage * kPage);
      chunk_ = map(size_);
      used_ = 0;
    }
    std::shared_ptr<char> taken(chunk_, chunk_.get() + used_);
    used_ += bytes;
    return taken;
  }

 private:
  static constexpr int64_t kPage = 2 << 20;
  static constexpr int64_t kChunk = 32 << 20;

  // Pages take memory only once they are touched, so the rest of the last chunk costs nothing.
  static std::shared_ptr<char> map(int64_t size) {
    void* start = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    const auto aligned = (reinterpret_cast<uintptr_t>(start) + kPage - 1) / kPage * kPage;
#if defined(MADV_HUGEPAGE)
    madvise(reinterpret_cast<void*>(aligned), size, MADV_HUGEPAGE);  // a wish: small pages do as well
#endif
    auto unmap = [start, size](char*) { munmap(start, size + kPage); };
    return std::shared_ptr<char>(reinterpret_cast<char*>(aligned), unmap);
  }

  std::mutex busy_;
  std::shared_ptr<char> chunk_;
  int64_t size_ = 0;
  int64_t used_ = 0;
};

}  // namespace headroom
