// Memory of the CPU kernels: padded sizes, and arrays that are cut from the workspace of a thread.
#pragma once

#include <cstddef>
#include <cstdint>
#ifndef __CUDACC_RTC__  // NVRTC has no exceptions; there, this header is read for its sizes only
#include <stdexcept>
#endif

namespace effexport {

// Rows of a tile of a matrix product (products.h). Matrices have whole tiles of rows.
constexpr int kTileRows = 4;
// Rows of matrices are multiples of this many floats, which is a cache line: whole registers of every instruction set.
constexpr std::int64_t kRowStep = 16;

constexpr std::int64_t round_up(std::int64_t size, std::int64_t step) { return (size + step - 1) / step * step; }

// Cuts arrays from a block of memory that begins on a cache line; so does each of them. Without memory (null) it only
// counts the bytes.
class Carver {
 public:
  explicit Carver(void* memory) : memory_(static_cast<char*>(memory)) {}

  // Throws std::length_error for more than 2^40 elements, and in all for more than 2^44 bytes.
  template <class T>
  T* take(std::int64_t count) {
#ifndef __CUDACC_RTC__
    if (count < 0 || count > std::int64_t{1} << 40 || bytes_ > std::size_t{1} << 44) {
      throw std::length_error("inputs of these sizes need more than 2^40 numbers of working memory");
    }
#endif
    T* const taken = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(sizeof(T)), 64));
    return taken;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  std::size_t bytes_ = 0;
};

}  // namespace effexport
