// What cuda_on_cpu.h tells ThreadSanitizer: that the threads of blocks, which are fibers of one thread of the CPU, run
// at the same time, and which of them wait for each other. Without ThreadSanitizer all of it is empty.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void __tsan_read_range(void* first, unsigned long bytes);
void __tsan_write_range(void* first, unsigned long bytes);
}
#endif

namespace cuda_on_cpu {

#if defined(__SANITIZE_THREAD__)

// While one exists, accesses by this thread are not looked at: they are the emulation's own.
class Hidden {
 public:
  Hidden() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Hidden() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  Hidden(const Hidden&) = delete;
};

// What threads do before release() happens before what others do after acquire().
class Order {
 public:
  void release() { __tsan_release(&place_); }
  void acquire() { __tsan_acquire(&place_); }

 private:
  std::uint64_t place_ = 0;
};

// A thread of its own for ThreadSanitizer.
class Identity {
 public:
  Identity() : fiber_(__tsan_create_fiber(0)) {}
  ~Identity() { __tsan_destroy_fiber(fiber_); }
  Identity(const Identity&) = delete;

  void name(const char* kind, unsigned block, int number) {
    const std::string name = std::string(kind) + ' ' + std::to_string(number) + " of block " + std::to_string(block);
    __tsan_set_fiber_name(fiber_, name.c_str());
  }
  // What is done from now on, this one does. No order follows from it.
  void take_over() { switch_to(fiber_); }

  static void* present() { return __tsan_get_current_fiber(); }
  static void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync); }

 private:
  void* fiber_;
};

inline void note_read(const void* first, std::size_t bytes) { __tsan_read_range(const_cast<void*>(first), bytes); }

// What copies for one thread while that goes on. Made when there is a first copy.
class Copier {
 public:
  void name(unsigned block, int thread) {
    block_ = block;
    thread_ = thread;
    if (identity_) identity_->name(kKind, block_, thread_);
  }

  // From null, nothing is read. No variable may be read while another thread's identity is taken: as its access it
  // would have no order with what follows.
  void note_copy(void* to, const void* from, std::size_t bytes) {
    if (!identity_) {
      identity_ = std::make_unique<Identity>();
      identity_->name(kKind, block_, thread_);
    }
    void* const thread = Identity::present();
    Order& begun = begun_;
    begun.release();
    identity_->take_over();
    begun.acquire();
    if (from) __tsan_read_range(const_cast<void*>(from), bytes);
    __tsan_write_range(to, bytes);
    Identity::switch_to(thread);
  }

  // Lets its copies so far happen before what follows arrived.acquire().
  void release(Order& arrived) {
    void* const thread = Identity::present();
    identity_->take_over();
    arrived.release();
    Identity::switch_to(thread);
  }

 private:
  static constexpr const char* kKind = "copies of thread";

  unsigned block_ = 0;
  int thread_ = 0;
  std::unique_ptr<Identity> identity_;
  Order begun_;
};

// Forgets all accesses to whole pages, which become zeros.
inline void forget_accesses(void* pages, std::size_t bytes) {
  const Hidden hidden;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  if (mmap(pages, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == pages) return;
  std::perror("cuda_on_cpu: shared memory has to begin at a multiple of 4096 bytes");
  std::abort();
}

// Whether the environment asks for a run without what stands in this line: EFFEXPORT_WITHOUT=native/tile.h:162.
inline bool is_removed(const char* file, int line) {
  static const std::string removed = [] {
    const char* const given = std::getenv("EFFEXPORT_WITHOUT");
    return given ? '/' + std::string(given) : std::string();
  }();
  if (removed.empty()) return false;
  const std::string place = file + (':' + std::to_string(line));
  return place.size() >= removed.size() &&
         place.compare(place.size() - removed.size(), removed.size(), removed) == 0;
}

#else

struct Hidden {
  ~Hidden() {}
};

struct Order {
  void release() {}
  void acquire() {}
};

struct Identity {
  void name(const char*, unsigned, int) {}
};

struct Copier {
  void name(unsigned, int) {}
  void note_copy(void*, const void*, std::size_t) {}
  void release(Order&) {}
};

inline void note_read(const void*, std::size_t) {}
inline void forget_accesses(void*, std::size_t) {}
constexpr bool is_removed(const char*, int) { return false; }

#endif

}  // namespace cuda_on_cpu
