// What native/ort_op.h takes of CUDA's header, for tests without a toolkit.
#pragma once

#define CUDART_VERSION 13000

enum cudaError_t : int {};
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheTest"; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error of the test"; }
