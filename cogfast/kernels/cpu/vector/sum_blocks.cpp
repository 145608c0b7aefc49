#include "kernels.h"
#include "rows.h"

namespace cogfast::CPU_CAPABILITY {

void sum_blocks(const float* partial, int64_t count, int64_t n, float* total, int64_t begin, int64_t end) {
  for_each_vector(end - begin, [&](int64_t i, auto width) {
    Vec value(0.f);
    for (int64_t block = 0; block < count; ++block) value = value + load(partial + block * n + begin + i, width);
    store(total + begin + i, value, width);
  });
}

}  // namespace cogfast::CPU_CAPABILITY
