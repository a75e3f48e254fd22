// CUDA kernel of effexport::GatedRMSNorm: one warp per row, whose lanes take every 32nd channel.
#include "gated_rms_norm/kernel.h"
#include "native/cuda.h"

namespace effexport::gated_rms_norm {
namespace {

constexpr int kWarp = 32;
constexpr int kRows = 4;  // of a block
constexpr int kThreads = kWarp * kRows;

template <class T>
__device__ void normalise_rows(const T* x, const T* gate, const T* weight, int rows, int channels, float epsilon,
                               T* out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kWarp; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * kRows) {
    const std::int64_t start = row * channels;
    float sum = 0.0f;
    for (int c = lane; c < channels; c += kWarp) {
      const float value = widen(x[start + c]);
      sum += value * value;
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    const float scale = 1.0f / sqrtf(sum / static_cast<float>(channels) + epsilon);
    for (int c = lane; c < channels; c += kWarp) {
      const float open = widen(gate[start + c]);
      // e^−open overflows to infinity, of which the quotient is 0
      const float silu = open / (1.0f + expf(-open));
      narrow(widen(x[start + c]) * scale * widen(weight[c]) * silu, out[start + c]);
    }
  }
}

}  // namespace

#define EFFEXPORT_GATED_RMS_NORM(dtype, T)                                                                         \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_gated_rms_norm_##dtype(                         \
      const T* __restrict__ x, const T* __restrict__ gate, const T* __restrict__ weight, std::int32_t rows,        \
      std::int32_t channels, float epsilon, T* __restrict__ out) {                                                 \
    normalise_rows(x, gate, weight, rows, channels, epsilon, out);                                                 \
  }

EFFEXPORT_GATED_RMS_NORM(float32, float)
EFFEXPORT_GATED_RMS_NORM(float16, Half)
EFFEXPORT_GATED_RMS_NORM(bfloat16, BFloat16)

#undef EFFEXPORT_GATED_RMS_NORM

#ifndef EFFEXPORT_FOR_TENSORRT
template <class T>
int launch_cuda(const Problem<T>& p, void* stream) {
  if (!fit_int32({p.rows, p.channels + kWarp})) return cudaErrorInvalidValue;
  const cudaLaunchConfig_t launch = launch_of(parts(p.rows, kRows), kThreads, 0, stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_gated_rms_norm), p.x, p.gate, p.weight,
                            int32(p.rows), int32(p.channels), p.epsilon, p.out);
}

template int launch_cuda(const Problem<float>&, void*);
template int launch_cuda(const Problem<Half>&, void*);
template int launch_cuda(const Problem<BFloat16>&, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::gated_rms_norm
