// Checks every number of the half types; prints a line for each type that is wrong, and exits with their number.
#include "native/element_types.h"

#include <cmath>
#include <cstdio>
#include <limits>

namespace {

// Every number of the type survives the way to float and back; halfway between neighbours the even one wins.
template <class T>
int failures(const char* type, std::uint16_t infinity) {
  const auto back = [](float value) { return effexport::from_float<T>(value).bits; };
  for (std::uint16_t bits = 0; bits < infinity; ++bits) {
    const float value = effexport::to_float(T{bits});
    const auto next = static_cast<std::uint16_t>(bits + 1);
    // after the largest number comes infinity, as if it were one step away
    const float step = next < infinity ? effexport::to_float(T{next}) - value
                                       : value - effexport::to_float(T{static_cast<std::uint16_t>(bits - 1)});
    const float middle = value + step / 2;
    const bool right = back(value) == bits && back(-value) == (bits | 0x8000u) &&
                       back(middle) == (bits % 2 ? next : bits) &&
                       back(std::nextafter(middle, 0.0f)) == bits &&
                       back(std::nextafter(middle, std::numeric_limits<float>::infinity())) == next;
    if (!right) {
      std::printf("%s: %g (bits %04x) is not rounded to nearest even\n", type, static_cast<double>(value), bits);
      return 1;
    }
  }
  const float huge = std::numeric_limits<float>::infinity();
  const bool special =
      back(huge) == infinity && effexport::to_float(T{infinity}) == huge &&
      std::isnan(effexport::to_float(effexport::from_float<T>(std::numeric_limits<float>::quiet_NaN())));
  if (!special) std::printf("%s: infinity or NaN does not survive\n", type);
  return special ? 0 : 1;
}

}  // namespace

int main() { return failures<effexport::Half>("float16", 0x7c00) + failures<effexport::BFloat16>("bfloat16", 0x7f80); }
