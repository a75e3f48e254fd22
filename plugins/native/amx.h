// Products on the tiles of AMX: of up to 32 rows with a panel of 64 columns, in steps of two bfloat16 numbers, summed in
// float32, or of four int8 codes, summed in int32.
//
// EFFEXPORT_EMULATED_AMX is the same without the instructions, after Intel's pseudocode, so that all around them can be
// tested on any processor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "native/cpu_dispatch.h"
#include "native/element_types.h"

#if defined(__linux__) && !defined(EFFEXPORT_EMULATED_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace effexport::amx {

// A tile has 16 rows of 64 bytes: 16 steps of 4 bytes, or 16 sums. A block of sums is two tiles high.
constexpr int kTileRows = 16, kSteps = 16, kTileBytes = 64, kRows = 2 * kTileRows, kColumns = 64;

// What LDTILECFG reads: the sizes of tiles.
struct alignas(64) Configuration {
  std::uint8_t palette, start, reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};
static_assert(sizeof(Configuration) == 64);

#ifdef EFFEXPORT_EMULATED_AMX
#define EFFEXPORT_AMX
struct Tile {
  int rows;
  std::uint32_t words[kTileRows][kSteps];
};
inline thread_local Tile tiles[8];

inline void configure(const Configuration& sizes) {
  for (int tile = 0; tile < 8; ++tile) tiles[tile].rows = sizes.rows[tile];
}
inline void release() { std::memset(tiles, 0, sizeof tiles); }
template <int kTile>
void zero() {
  std::memset(tiles[kTile].words, 0, sizeof tiles[kTile].words);
}
template <int kTile>
void load(const void* from, std::int64_t stride) {
  for (int i = 0; i < tiles[kTile].rows; ++i) {
    std::memcpy(tiles[kTile].words[i], static_cast<const char*>(from) + i * stride, kTileBytes);
  }
}
template <int kTile>
void store(void* to, std::int64_t stride) {
  for (int i = 0; i < tiles[kTile].rows; ++i) {
    std::memcpy(static_cast<char*>(to) + i * stride, tiles[kTile].words[i], kTileBytes);
  }
}

inline float widened(std::uint32_t half) {  // a bfloat16; denormal ones are zeros
  return float_of_bits((half & 0x7f80) == 0 ? 0 : half << 16);
}
// The sum of a row of steps times a column of them. Products of even and of odd bfloat16 are summed by themselves.
inline void add_products(float& sum, const std::uint32_t* row, const Tile& columns, int column) {
  float even = 0, odd = 0;
  for (int k = 0; k < kSteps; ++k) {
    even += widened(row[k] & 0xffff) * widened(columns.words[k][column] & 0xffff);
    odd += widened(row[k] >> 16) * widened(columns.words[k][column] >> 16);
  }
  sum += even + odd;
}
inline void add_products(std::int32_t& sum, const std::uint32_t* row, const Tile& columns, int column) {
  for (int k = 0; k < kSteps; ++k) {
    for (int bit = 0; bit < 32; bit += 8) {
      sum += static_cast<std::int8_t>(row[k] >> bit) * static_cast<std::int8_t>(columns.words[k][column] >> bit);
    }
  }
}
template <class Sum, int kSums, int kLeft, int kRight>
void multiply() {
  for (int i = 0; i < tiles[kSums].rows; ++i) {
    for (int j = 0; j < kSteps; ++j) {
      Sum sum;
      std::memcpy(&sum, &tiles[kSums].words[i][j], sizeof sum);
      add_products(sum, tiles[kLeft].words[i], tiles[kRight], j);
      std::memcpy(&tiles[kSums].words[i][j], &sum, sizeof sum);
    }
  }
}
#else
#define EFFEXPORT_AMX __attribute__((target("amx-tile,amx-bf16,amx-int8")))
// Compilers do not know that these instructions read memory, all of it: the empty ones before them say so.
EFFEXPORT_AMX inline void configure(const Configuration& sizes) {
  __asm__ volatile("" : : "r"(&sizes) : "memory");
  _tile_loadconfig(&sizes);
}
EFFEXPORT_AMX inline void release() { _tile_release(); }
template <int kTile>
void zero();
template <int kTile>
void load(const void* from, std::int64_t stride);
template <int kTile>
void store(void* to, std::int64_t stride);
template <class Sum, int kSums, int kLeft, int kRight>
void multiply();
// the compiler's own functions want literals
#define EFFEXPORT_TILE(n)                                              \
  template <>                                                          \
  EFFEXPORT_AMX inline void zero<n>() {                                \
    _tile_zero(n);                                                     \
  }                                                                    \
  template <>                                                          \
  EFFEXPORT_AMX inline void load<n>(const void* from, std::int64_t stride) { \
    _tile_loadd(n, from, stride);                                      \
  }                                                                    \
  template <>                                                          \
  EFFEXPORT_AMX inline void store<n>(void* to, std::int64_t stride) {  \
    _tile_stored(n, to, stride);                                       \
  }
EFFEXPORT_TILE(0)
EFFEXPORT_TILE(1)
EFFEXPORT_TILE(2)
EFFEXPORT_TILE(3)
EFFEXPORT_TILE(4)
EFFEXPORT_TILE(5)
EFFEXPORT_TILE(6)
EFFEXPORT_TILE(7)
#undef EFFEXPORT_TILE
#define EFFEXPORT_PRODUCT(sums, left, right)                           \
  template <>                                                          \
  EFFEXPORT_AMX inline void multiply<float, sums, left, right>() {     \
    _tile_dpbf16ps(sums, left, right);                                 \
  }                                                                    \
  template <>                                                          \
  EFFEXPORT_AMX inline void multiply<std::int32_t, sums, left, right>() { \
    _tile_dpbssd(sums, left, right);                                   \
  }
EFFEXPORT_PRODUCT(0, 4, 6)
EFFEXPORT_PRODUCT(1, 4, 7)
EFFEXPORT_PRODUCT(2, 5, 6)
EFFEXPORT_PRODUCT(3, 5, 7)
#undef EFFEXPORT_PRODUCT
#endif

// The instructions of the code around the tiles.
#ifdef EFFEXPORT_EMULATED_AMX
#define EFFEXPORT_AROUND_TILES "sse2"
#else
#define EFFEXPORT_AROUND_TILES "avx512f,avx512bw"
#endif

// True if the processor has tiles, and the system lets this process use them. Linux saves them only for a process that
// asks, once for all threads.
inline bool is_there([[maybe_unused]] const X86Features& found) {
#ifdef EFFEXPORT_EMULATED_AMX
  return true;
#elif defined(__linux__)
  constexpr long kAskFor = 0x1023, kTileData = 18;
  return found.amx && syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
#else
  return false;
#endif
}

// This thread's tiles, for as long as this lives: they are 8 KiB that the system saves.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  EFFEXPORT_AMX ~Tiles() {
    if (rows_ != 0) release();
  }

  // The sums of up to 32 rows times a panel, [rows, 64]. steps: of the first row, whose next one begins `stride` steps
  // later. panel: [count, 64] steps. count: a multiple of 16. The sums of a row do not depend on how many there are.
  // Rows of the panel and of sums begin so many steps and sums apart.
  template <class Sum, class Step>
  EFFEXPORT_AMX void multiply_rows(int rows, const Step* steps, std::int64_t stride, std::int64_t count,
                                   const Step* panel, Sum* to, std::int64_t panel_stride = kColumns,
                                   std::int64_t sums_stride = kColumns) {
    static_assert(sizeof(Step) == 4 && sizeof(Sum) == 4);
    if (rows != rows_) resize(rows);
    __asm__ volatile("" : : "r"(steps), "r"(panel) : "memory");
    const bool has_more = rows > kTileRows;
    const std::int64_t row_bytes = stride * 4, panel_bytes = panel_stride * 4, sums_bytes = sums_stride * 4;
    for (int half = 0; half < kColumns; half += 2 * kSteps) {
      zero<0>();
      zero<1>();
      zero<2>();
      zero<3>();
      for (std::int64_t k = 0; k < count; k += kSteps) {
        const Step* const columns = panel + k * panel_stride + half;
        load<4>(steps + k, row_bytes);
        load<6>(columns, panel_bytes);
        load<7>(columns + kSteps, panel_bytes);
        multiply<Sum, 0, 4, 6>();
        multiply<Sum, 1, 4, 7>();
        if (!has_more) continue;
        load<5>(steps + kTileRows * stride + k, row_bytes);
        multiply<Sum, 2, 5, 6>();
        multiply<Sum, 3, 5, 7>();
      }
      Sum* const first = to + half;
      store<0>(first, sums_bytes);
      store<1>(first + kSteps, sums_bytes);
      if (!has_more) continue;
      store<2>(first + kTileRows * sums_stride, sums_bytes);
      store<3>(first + kTileRows * sums_stride + kSteps, sums_bytes);
    }
  }

 private:
  EFFEXPORT_AMX void resize(int rows) {
    Configuration sizes{};
    sizes.palette = 1;
    const int low = std::min(rows, kTileRows), high = std::max(rows - kTileRows, 1);
    const int of_tile[8] = {low, low, high, high, low, high, kTileRows, kTileRows};
    for (int tile = 0; tile < 8; ++tile) {
      sizes.row_bytes[tile] = kTileBytes;
      sizes.rows[tile] = static_cast<std::uint8_t>(of_tile[tile]);
    }
    configure(sizes);
    rows_ = rows;
  }

  int rows_ = 0;
};

}  // namespace effexport::amx
