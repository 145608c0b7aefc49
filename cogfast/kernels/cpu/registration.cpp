// Registers the CPU kernels of the ops, whose schemas kernels/*.py define.

#include <torch/library.h>

#include "adaptive_layernorm.h"
#include "attention.h"
#include "fused_ema_adam.h"
#include "gelu.h"
#include "qk_norm_rope3d.h"

TORCH_LIBRARY_IMPL(cogfast, CPU, library) {
  library.impl("adaptive_layernorm", cogfast::adaptive_layernorm);
  library.impl("adaptive_layernorm_backward", cogfast::adaptive_layernorm_backward);
  library.impl("cpu_attention", cogfast::attention);
  library.impl("cpu_attention_backward", cogfast::attention_backward);
  library.impl("average_", cogfast::average_);
  library.impl("ema_adam_", cogfast::ema_adam_);
  library.impl("sum_of_squares", cogfast::sum_of_squares);
  library.impl("gelu", cogfast::gelu);
  library.impl("gelu_backward", cogfast::gelu_backward);
  library.impl("qk_norm_rope3d", cogfast::qk_norm_rope3d);
  library.impl("qk_norm_rope3d_backward", cogfast::qk_norm_rope3d_backward);
}
