#include "emulation.h"

#include "tile_products.cu"

extern "C" int tile_products(int dtype, const void* left, const void* right, int columns, int product, float* out) {
  switch (dtype) {
    case 0: return launch_tile_products<float>(left, right, columns, product, out);
    case 1: return launch_tile_products<effexport::Half>(left, right, columns, product, out);
    default: return launch_tile_products<effexport::BFloat16>(left, right, columns, product, out);
  }
}
