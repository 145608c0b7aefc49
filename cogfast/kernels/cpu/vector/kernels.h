// The kernels, compiled for the instruction set of this machine (library.py), in a namespace of its own.

#pragma once

#include <cstdint>

#include <c10/util/BFloat16.h>

#include "fused_ema_adam.h"
#include "qk_norm_rope3d.h"

namespace cogfast {
namespace AVX2 {
#include "kernels.inc"
}
namespace AVX512 {
#include "kernels.inc"
}
}  // namespace cogfast
