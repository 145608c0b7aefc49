// Tensor level of FusedEmaAdam; kernels/fused_ema_adam.py has the formulas.

#pragma once

#include <cmath>
#include <vector>

#include "ops.h"

namespace cogfast {

// The elements of many tensors as one row of pieces, so that threads share all of them at once.
class Pieces {
 public:
  explicit Pieces(at::TensorList tensors) {
    for (const Tensor& x : tensors) {
      numels_.push_back(x.numel());
      first_.push_back(first_.back() + (x.numel() + SIZE - 1) / SIZE);
    }
  }

  int64_t count() const { return first_.back(); }

  // Calls body(piece, tensor, first element, number of elements) for all pieces; threads take pieces.
  template <class Body>
  void parallel(const Body& body) const {
    at::parallel_for(0, count(), grain(SIZE), [&](int64_t begin, int64_t end) {
      int64_t tensor = std::upper_bound(first_.begin(), first_.end(), begin) - first_.begin() - 1;
      for (int64_t piece = begin; piece < end; ++piece) {
        while (first_[tensor + 1] <= piece) ++tensor;
        const int64_t start = (piece - first_[tensor]) * SIZE;
        body(piece, tensor, start, std::min(SIZE, numels_[tensor] - start));
      }
    });
  }

 private:
  static constexpr int64_t SIZE = 4096;  // elements, a multiple of MOMENT_BLOCK
  std::vector<int64_t> numels_;
  std::vector<int64_t> first_ = {0};  // first piece of each tensor, and at the end the number of pieces
};

// Calls body with a zero of the dtype of x: float, at::BFloat16 or at::Half.
template <class Body>
void for_adam_dtype(const Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kHalf) return body(at::Half{});
  for_dtype(x, body);
}

using OptionalTensors = c10::List<OptionalTensor>;

// None becomes an undefined tensor.
inline std::vector<Tensor> defined_or_not(const OptionalTensors& list) {
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < list.size(); ++i) tensors.push_back(list.get(i).value_or(Tensor()));
  return tensors;
}

struct AdamOptions {
  double lr, beta1, beta2, eps, weight_decay;
  bool bias_correction, adam_w_mode;
  double ema_decay;
  bool use_num_updates;
  double gradient_scale;

  // Factors of update t. They are float64 until here: 1 - beta2 loses digits in float32.
  AdamFactors at(double t) const {
    const double correction1 = bias_correction ? 1 - std::pow(beta1, t) : 1;
    const double correction2 = bias_correction ? 1 - std::pow(beta2, t) : 1;
    double ema_weight = 1 - ema_decay;
    if (use_num_updates) ema_weight = std::max(ema_weight, 9 / (10 + t));  // 1 - (1 + t) / (10 + t)
    return {
        .gradient_scale = static_cast<float>(gradient_scale),
        .l2 = static_cast<float>(adam_w_mode ? 0 : weight_decay),
        .decay = static_cast<float>(adam_w_mode ? lr * weight_decay : 0),
        .one_minus_beta1 = static_cast<float>(1 - beta1),
        .beta2 = static_cast<float>(beta2),
        .one_minus_beta2 = static_cast<float>(1 - beta2),
        .step_size = static_cast<float>(lr / correction1),
        .root_factor = static_cast<float>(1 / std::sqrt(correction2)),
        .eps = static_cast<float>(eps),
        .ema_weight = static_cast<float>(ema_weight)};
  }
};

// Counts an update of every tensor and makes it. Lists have an entry per tensor; those of OptionalTensors may be
// None. With largest_ms and largest_vs, the moments are 8-bit codes.
inline void ema_adam_(
    at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
    const OptionalTensors& shadows_, const OptionalTensors& copies_, const OptionalTensors& largest_ms_,
    const OptionalTensors& largest_vs_, at::TensorList steps, double lr, double beta1, double beta2, double eps,
    double weight_decay, bool bias_correction, bool adam_w_mode, double ema_decay, bool use_num_updates,
    double gradient_scale) {
  const AdamOptions options{lr,          beta1,     beta2,           eps,           weight_decay, bias_correction,
                            adam_w_mode, ema_decay, use_num_updates, gradient_scale};
  const auto shadows = defined_or_not(shadows_), copies = defined_or_not(copies_);
  const auto largest_ms = defined_or_not(largest_ms_), largest_vs = defined_or_not(largest_vs_);
  std::vector<AdamFactors> factors;
  std::vector<uint32_t> seeds;
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor& p = params[i];
    const bool is_coded = largest_ms[i].defined();
    for (const Tensor& x : {exp_avgs[i], exp_avg_sqs[i]})
      TORCH_CHECK(
          x.scalar_type() == (is_coded ? at::kByte : at::kFloat), "the optimizer's moments must be ",
          is_coded ? "uint8" : "float32", ", not ", x.dtype());
    for (const Tensor& x : {shadows[i], steps[i]})
      TORCH_CHECK(
          !x.defined() || x.scalar_type() == at::kFloat, "the optimizer's state must be float32, not ", x.dtype());
    for (const Tensor& x : {p, grads[i], exp_avgs[i], exp_avg_sqs[i], shadows[i], copies[i]})
      TORCH_CHECK(
          !x.defined() || (x.is_contiguous() && x.sizes() == p.sizes()), "tensors of one parameter must be ",
          p.sizes(), " and contiguous, not ", x.sizes());
    const int64_t blocks = (p.numel() + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
    for (const Tensor& x : {largest_ms[i], largest_vs[i]})
      TORCH_CHECK(
          x.defined() == is_coded && (!is_coded || (x.scalar_type() == at::kShort && x.numel() == blocks)),
          "8-bit moments need int16 [", blocks, "]");
    TORCH_CHECK(steps[i].numel() == 1, "a count of updates must be one number, not ", steps[i].sizes());
  }
  for (const Tensor& step : steps) {
    const float t = *pointer<float>(step) += 1;
    factors.push_back(options.at(t));
    seeds.push_back(scramble(static_cast<uint32_t>(t)));
  }
  Pieces(params).parallel([&](int64_t, int64_t i, int64_t start, int64_t n) {
    for_adam_dtype(params[i], [&](auto p_zero) {
      using P = decltype(p_zero);
      for_adam_dtype(grads[i], [&](auto g_zero) {
        using G = decltype(g_zero);
        const auto run = [&](auto* copy) {
          float* const shadow = pointer<float>(shadows[i]);
          const auto update = [&](int64_t first, int64_t length, float* m, float* v) {
            COGFAST_RUN(
                ema_adam, pointer<P>(params[i]) + first, pointer<G>(grads[i]) + first, m, v,
                shadow ? shadow + first : nullptr, copy ? copy + first : nullptr, length, factors[i]);
          };
          if (!largest_ms[i].defined())
            return update(start, n, pointer<float>(exp_avgs[i]) + start, pointer<float>(exp_avg_sqs[i]) + start);
          for (int64_t first = start; first < start + n; first += MOMENT_BLOCK) {
            const int64_t block = first / MOMENT_BLOCK, length = std::min(MOMENT_BLOCK, start + n - first);
            const MomentCodes codes{
                pointer<uint8_t>(exp_avgs[i]) + first, pointer<uint8_t>(exp_avg_sqs[i]) + first,
                pointer<int16_t>(largest_ms[i]) + block, pointer<int16_t>(largest_vs[i]) + block};
            float m[MOMENT_BLOCK], v[MOMENT_BLOCK];
            COGFAST_RUN(decode_moments, codes, m, v, length);
            update(first, length, m, v);
            COGFAST_RUN(encode_moments, m, v, codes, length, seeds[i], static_cast<uint32_t>(first));
          }
        };
        if (!copies[i].defined()) return run(static_cast<P*>(nullptr));
        for_adam_dtype(copies[i], [&](auto c_zero) { run(pointer<decltype(c_zero)>(copies[i])); });
      });
    });
  });
}

// shadow += weight (p - shadow), weight [].
inline void average_(const Tensor& shadow, const Tensor& p, const Tensor& weight) {
  for (const Tensor& x : {shadow, p, weight})
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "an average takes dense float32 tensors");
  TORCH_CHECK(shadow.numel() == p.numel() && weight.numel() == 1, "an average takes tensors of one length");
  Pieces(p).parallel([&](int64_t, int64_t, int64_t start, int64_t n) {
    COGFAST_RUN(average, pointer<float>(shadow) + start, pointer<float>(p) + start, *pointer<float>(weight), n);
  });
}

// Sum of the squares of all elements of all tensors, [] float64.
inline Tensor sum_of_squares(at::TensorList tensors_) {
  std::vector<Tensor> tensors;
  for (const Tensor& x : tensors_) tensors.push_back(x.contiguous());
  const Pieces pieces(tensors);
  std::vector<double> sums(pieces.count());
  pieces.parallel([&](int64_t piece, int64_t i, int64_t start, int64_t n) {
    for_dtype(tensors[i], [&](auto zero) {
      sums[piece] = COGFAST_RUN(sum_of_squares, pointer<decltype(zero)>(tensors[i]) + start, n);
    });
  });
  Tensor total = at::zeros({}, at::kDouble);
  for (const double sum : sums) *pointer<double>(total) += sum;
  return total;
}

}  // namespace cogfast
