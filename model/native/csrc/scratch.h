// Memory of a thread that is used again and again.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace headroom {

class Scratch {
 public:
  static Scratch& of_thread() {
    static thread_local Scratch own;
    return own;
  }

  // Begins anew with room for `bytes` in a few arrays; what was taken before is lost.
  void start(int64_t bytes) {
    bytes += kArrays * kAlign;
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;  // there may be no more memory
      memory_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t(kAlign))));
      size_ = bytes;
    }
    used_ = 0;
  }

  // The next array, at a multiple of 64 bytes; not cleared.
  template <class T>
  T* take(int64_t count) {
    char* at = memory_.get() + used_;
    used_ += (count * int64_t(sizeof(T)) + kAlign - 1) / kAlign * kAlign;
    return reinterpret_cast<T*>(at);
  }

 private:
  static constexpr int64_t kAlign = 64;
  static constexpr int64_t kArrays = 16;
  struct Free {
    void operator()(char* at) const { ::operator delete(at, std::align_val_t(kAlign)); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
  int64_t used_ = 0;
};

}  // namespace headroom
