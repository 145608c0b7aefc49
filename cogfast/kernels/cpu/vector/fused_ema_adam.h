// Numbers that the tensor level of FusedEmaAdam computes for its kernel.

#pragma once

#include <cstdint>

namespace cogfast {

// The numbers of one tensor's update. kernels/fused_ema_adam.py has the formulas.
struct AdamFactors {
  float gradient_scale;
  float l2;         // weight decay that is added to the gradient; 0 in adam_w_mode
  float decay;      // lr * weight_decay in adam_w_mode, else 0
  float one_minus_beta1, beta2, one_minus_beta2;
  float step_size;    // lr / (1 - beta1^t)
  float root_factor;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float ema_weight;  // 1 - d
};

constexpr int64_t MOMENT_BLOCK = 256;  // elements that share the largest code

// The 8-bit moments of a block of elements.
struct MomentCodes {
  uint8_t *m, *v;
  int16_t *largest_m, *largest_v;
};

// A hash of 32 bits without patterns: C. Wellons' lowbias32.
inline uint32_t scramble(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352dU;
  x = (x ^ x >> 15) * 0x846ca68bU;
  return x ^ x >> 16;
}

}  // namespace cogfast
