// Kernels of effexport::LSHSort; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major.
#pragma once

#include <cstddef>
#include <cstdint>

namespace effexport::lsh_sort {

// On the CPU, one row: buckets [n] → order [n], and rank [n] unless that is null. One thread; rows are independent, so
// callers may share them out among threads, each with `cpu_workspace_bytes(num_buckets)` bytes.
// Returns the position of the first bucket outside [0, num_buckets), and then order and rank are undefined; or -1.
std::int64_t sort_row_cpu(const std::int32_t* buckets, std::int64_t n, std::int64_t num_buckets, void* workspace,
                          std::int32_t* order, std::int32_t* rank);

std::size_t cpu_workspace_bytes(std::int64_t num_buckets);

// On the GPU: enqueues one launch on `stream` (a cudaStream_t), or two if few rows are long, and returns at once. All
// pointers are to device memory. `rank` may be null. `scratch` has cuda_scratch_bytes(rows, n, num_buckets, whether there
// is a rank) bytes, and may be null where that is 0.
// A bucket out of range is taken for the nearest one in range: a check would have to stop the device.
// Returns a cudaError_t, 0 for success.
int launch_cuda(const std::int32_t* buckets, std::int64_t rows, std::int64_t n, std::int64_t num_buckets,
                std::int32_t* order, std::int32_t* rank, void* scratch, void* stream);

std::size_t cuda_scratch_bytes(std::int64_t rows, std::int64_t n, std::int64_t num_buckets, bool with_rank);

}  // namespace effexport::lsh_sort
