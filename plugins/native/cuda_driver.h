// The CUDA kernels, which are a file beside the library, effexport_cuda.fatbin, and NVIDIA's driver, which runs them. The
// driver is opened when it is asked for, so that the library also loads without one; CUDA's runtime is not needed.
//
// All of it is for the whole process, and for any thread. A kernel belongs to no context: the driver launches it in that
// of the stream (CUDA Driver API, cuLaunchKernelEx), and loads its code there when it is first needed.
#pragma once

#include <cstddef>
#include <string>

namespace effexport::cuda_driver {

// Names the file of kernels, in place of the one beside the library. Later calls count until the kernels are loaded.
void use_file(const char* path);

// True if there is a file of kernels, whether or not it can be used.
bool has_file();

// Why the kernels cannot run here, and a remedy, in one sentence; "" if they can. CUDA is not initialised. The text stays
// valid until use_file names another file.
const char* problem();

// Loads the kernels, unless they are. Throws std::runtime_error. Sessions call it when they are made: while a stream is
// captured, drivers before CUDA 12.3 refuse to load code.
void load_kernels();

// Enqueues a kernel of one-dimensional blocks on a stream (a CUstream or cudaStream_t; with null, that of the current
// context). after: its blocks may start while the launch before it ends, if it has been compiled for SM 90 or later, and if
// the driver can capture that, as those of CUDA 12.3 can. arguments: the address of each. Returns a CUresult, 0 for
// success; throws as load_kernels.
int launch(const char* kernel, unsigned blocks, unsigned threads, std::size_t shared_bytes, bool after, void* stream,
           void** arguments);

// How many multiprocessors the GPU of a stream has; 0 for a stream whose launches fail. While a stream is captured, too.
int multiprocessors(void* stream);

// Lets the blocks of a kernel have all shared memory of each GPU, instead of 48 KiB, at the first call for this kernel;
// returns how many bytes that is on the GPU of a stream, or 0 if it is not known or the kernel was compiled for SM 75, as it
// may be for any GPU. Sessions call it when they are made, because the first call may load code.
std::size_t shared_memory_of(const char* kernel, void* stream);

// Name and description of a CUresult.
std::string error_text(int error);

}  // namespace effexport::cuda_driver
