// What the tensor level and the kernels of qk_norm_rope3d share.

#pragma once

#include <cstdint>

namespace cogfast {

// Heads of q, k or v, [B, S, H, D] with a dense last dim and any other strides, in elements.
template <class T>
struct Heads {
  const T* data;
  int64_t stride_b, stride_s, stride_h;
};

struct HeadNorm {
  const float *weight, *bias;  // [D]
};

struct QkNormRope3d {
  int64_t num_tokens, num_heads, width;  // S, H, D
  bool has_norm;
  float eps;
  HeadNorm norm[2];  // of q and k
  // Null for no rotation. An angle of Rotation.table is two neighbours here: first come all cosines as cos, cos,
  // then all sines as -sin, sin. A rotated x is then x cos + (x with neighbours swapped) sin.
  const float* angles;
  int64_t num_text, t, h, w;
  const int* order;  // Rotation.order, or null
};

}  // namespace cogfast
