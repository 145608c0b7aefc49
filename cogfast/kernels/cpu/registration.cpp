// Registers the CPU kernels of the ops, whose schemas kernels/*.py define.

#include <torch/library.h>

#include "gelu.h"

TORCH_LIBRARY_IMPL(cogfast, CPU, library) {
  library.impl("gelu", cogfast::gelu);
  library.impl("gelu_backward", cogfast::gelu_backward);
}
