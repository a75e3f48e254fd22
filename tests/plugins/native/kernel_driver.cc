// Runs the CPU kernels on heap blocks of the exact sizes, for the sanitizers, and compares them with plain loops: one
// file per operator in drivers/. Prints the instruction sets that this machine has, those that each operator was run
// with, and one line per failure; exits with the number of failures, at most 99.

#include "drivers/checks.h"

void check_element_types();
void check_aft_simple_attention();
void check_aft_window_attention();
void check_iterative_pinv();
void check_linear_attention();
void check_lsh_attention();
void check_lsh_hash();
void check_lsh_sort();
void check_masked_attention();
void check_segment_means();
void check_sequence_conv();

void print_instructions() {
  std::printf("instructions:");
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) std::printf(" avx512");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) std::printf(" avx2");
#endif
  std::printf(" baseline\n");
}

int main() {
  print_instructions();
  check_element_types();
  check_aft_simple_attention();
  check_aft_window_attention();
  check_iterative_pinv();
  check_linear_attention();
  check_lsh_attention();
  check_lsh_hash();
  check_lsh_sort();
  check_masked_attention();
  check_segment_means();
  check_sequence_conv();
  std::printf("%d failures\n", failures);
  return std::min(failures, 99);
}
