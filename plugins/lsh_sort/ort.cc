// effexport::LSHSort for ONNX Runtime: checks its input and forwards it to the kernels.

#include "native/ort_op.h"

#include "lsh_sort/kernel.h"

namespace effexport::lsh_sort {
namespace {

struct Arrays {
  const std::int32_t* buckets;
  std::int32_t* order;
  std::int32_t* rank;  // null if no node reads it
  std::int64_t rows;
  std::int64_t n;
};

void sort_on_cpu(const Ort::KernelContext& context, const Arrays& x, std::int64_t num_buckets) {
  Lowest bad;
  parallel_ranges(context, x.rows, [&](std::int64_t first, std::int64_t last) {
    std::vector<char> workspace(cpu_workspace_bytes(num_buckets));
    for (std::int64_t row = first; row < last; ++row) {
      const std::int64_t start = row * x.n;
      std::int32_t* const rank = x.rank == nullptr ? nullptr : x.rank + start;
      const std::int64_t found =
          sort_row_cpu(x.buckets + start, x.n, num_buckets, workspace.data(), x.order + start, rank);
      if (found >= 0) return bad.offer(start + found);
    }
  });
  if (bad.found()) {
    const std::int64_t index = bad.value();
    throw_invalid("buckets[", index / x.n, ", ", index % x.n, "] is ", x.buckets[index], "; expected 0 to ",
                  num_buckets - 1, " (num_buckets is ", num_buckets, ")");
  }
}

template <Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "LSHSort";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"buckets", kInt32, "N n"}};
  static constexpr Parameter kOutputs[] = {{"order", kInt32, "N n"}, {"rank", kInt32, "N n", true}};

  static constexpr Range kBuckets{1, std::numeric_limits<std::int32_t>::max()};

  explicit Kernel(Ort::ConstKernelInfo info) : num_buckets_(integer_attribute(info, "num_buckets", kBuckets)) {}

  void compute(const Ort::KernelContext& context) {
    const auto [rows, n] = sizes_of<Kernel>(context);
    if (n > std::numeric_limits<std::int32_t>::max()) {
      throw_invalid("buckets has shape ", shape_text({rows, n}), "; expected rows of at most 2147483647");
    }
    const Arrays arrays{input<std::int32_t>(context, 0), output<std::int32_t>(context, 0, {rows, n}),
                        optional_output<std::int32_t>(context, 1, {rows, n}), rows, n};
    if (arrays.rows == 0 || arrays.n == 0) return;
    if constexpr (kOn == Device::kCuda) {
      const Scratch<kOn> scratch(context, cuda_scratch_bytes(rows, n, num_buckets_, arrays.rank != nullptr));
      return check_launch(launch_cuda(arrays.buckets, rows, n, num_buckets_, arrays.order, arrays.rank, scratch.get(),
                                      context.GetGPUComputeStream()));
    }
    return sort_on_cpu(context, arrays, num_buckets_);
  }

 private:
  std::int64_t num_buckets_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_kernel<Kernel>(domain); }

}  // namespace effexport::lsh_sort
