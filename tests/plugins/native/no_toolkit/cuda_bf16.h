// Stands in for the CUDA toolkit's header: cuda_on_cpu.h defines what the kernels use.
