// A few threads that share out the chunks of a job, each taking the next one when it is free.
//
// Whoever calls works too, and waits for chunks that were taken, not for threads that have not come: a thread
// that the system runs late costs nothing, which on a machine whose cores also serve the network is the
// common case. Workers look for a job for some time after the last one (30 to 100 us on x86) and then sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headroom {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Threads {
 public:
  // The one pool of the process; it is never taken down, as its threads hold nothing.
  static Threads& shared() {
    static Threads* pool = new Threads();
    return *pool;
  }

  // Calls work(chunk) once for each chunk in [0, chunks), by at most `count` threads; returns when all are done.
  template <class Work>
  void run(int count, int64_t chunks, const Work& work) {
    if (chunks <= 1 || count <= 1) {
      for (int64_t i = 0; i < chunks; ++i) work(i);
      return;
    }
    std::lock_guard<std::mutex> one(busy_);  // two engines in a process take turns
    grow(count - 1);
    call_ = [](const void* what, int64_t chunk) { (*static_cast<const Work*>(what))(chunk); };
    work_ = &work;
    chunks_ = chunks;
    helpers_.store(int(std::min<int64_t>(count, chunks)) - 1, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t generation = (left_.load(std::memory_order_relaxed) >> 32) + 1;
    left_.store(generation << 32 | uint64_t(chunks), std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) left_.notify_all();
    while (take()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) != chunks; ++spins) {
      spins < kSpinsBeforeYield ? relax() : std::this_thread::yield();
    }
    if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  }

 private:
  static constexpr int kSpinsBeforeYield = 200;
  static constexpr int kSpinsBeforeSleep = 2000;

  // Takes the next chunk and does it; false if there is none. The chunk is taken together with the
  // generation of its job, so that who comes late cannot take one of a job that is over.
  bool take() {
    uint64_t left = left_.load(std::memory_order_acquire);
    while ((left & 0xffffffffu) != 0) {
      if (left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) {
        attempt(chunks_ - int64_t(left & 0xffffffffu));
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  // A chunk that fails counts as done: the job ends before its caller hears of the first failure.
  void attempt(int64_t chunk) {
    try {
      call_(work_, chunk);
    } catch (...) {
      std::lock_guard<std::mutex> one(failing_);
      if (!failed_) failed_ = std::current_exception();
    }
  }

  void grow(int workers) {
    try {
      for (; workers_ < workers; ++workers_) std::thread([this, own = workers_] { serve(own); }).detach();
    } catch (const std::system_error&) {  // the system gives no more: those that are there do it
    }
  }

  void serve(int own) {
    for (int spins = 0;;) {
      const uint64_t seen = left_.load(std::memory_order_acquire);
      const bool wanted = (seen & 0xffffffffu) != 0 && own < helpers_.load(std::memory_order_relaxed);
      if (wanted && take()) {
        spins = 0;
      } else if (++spins < kSpinsBeforeSleep) {
        relax();
      } else {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        left_.wait(seen, std::memory_order_seq_cst);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        spins = 0;
      }
    }
  }

  std::mutex busy_, failing_;
  std::exception_ptr failed_;
  int workers_ = 0;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* work_ = nullptr;
  int64_t chunks_ = 0;
  alignas(64) std::atomic<uint64_t> left_{0};  // generation of the job, and how many of its chunks are not taken
  alignas(64) std::atomic<int64_t> done_{0};
  std::atomic<int> helpers_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace headroom
