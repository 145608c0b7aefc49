// Numbers that the tensor level of FusedEmaAdam computes for its kernel.

#pragma once

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

}  // namespace cogfast
