// Runs the CPU kernels on heap blocks of the exact sizes, for the sanitizers, and compares them with plain loops: one
// file per operator in drivers/. Prints one line per failure; exits with their number, at most 99.

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

int main() {
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
