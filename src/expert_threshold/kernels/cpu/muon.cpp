// A step of Muon, one thread per matrix: momentum, Newton-Schulz with bfloat16 products, and the update, in a core's
// cache.

#include <cmath>

#include "common.h"

namespace muon {
namespace {

// out (m, n) = scale · before + factor · a (m, k) · packed b; `before` may be null, or out.
void product(int64_t m, int64_t n, int64_t k, const bf16* a, const bf16* b, float factor, const bf16* before,
             float scale, bf16* out) {
  const __m512 times = _mm512_set1_ps(factor), keep = _mm512_set1_ps(scale);
  multiply(m, n, k, a, b, [&](const float* c, int64_t start, int64_t rows, int64_t column, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < columns; j += 16) {
        const int64_t at = (start + r) * n + column + j;
        __m512 value = _mm512_mul_ps(_mm512_loadu_ps(c + r * columns + j), times);
        if (before) value = _mm512_fmadd_ps(load(before + at), keep, value);
        store(out + at, value);
      }
  });
}

// X ← (a + b X Xᵀ + c (X Xᵀ)²) X, `steps` times; x (rows, columns), with rows ≤ columns.
void newton_schulz(bf16* x, int64_t rows, int64_t columns, int64_t steps, float a, float b, float c, bf16* gram,
                   bf16* polynomial, bf16* packed) {
  for (int64_t i = 0; i < steps; ++i) {
    pack_transposed(x, rows, columns, packed);
    product(rows, rows, columns, x, packed, 1, nullptr, 0, gram);
    pack_rows<false>(gram, rows, rows, packed);
    product(rows, rows, rows, gram, packed, c, gram, b, polynomial);
    pack_rows<false>(x, rows, columns, packed);
    product(rows, columns, rows, polynomial, packed, 1, x, a, x);
  }
}

// The matrices of stacks (matrices, rows, columns) float32.
std::vector<float*> matrices_of(const std::vector<Tensor>& stacks) {
  std::vector<float*> matrices;
  for (const Tensor& stack : stacks)
    for (int64_t i = 0; i < stack.size(0); ++i) matrices.push_back(data<float>(stack) + i * stack.stride(0));
  return matrices;
}

// Moves the weights and momenta; a, b, c: coefficients; eps: the smallest norm.
void step(const std::vector<Tensor>& weights, const std::vector<Tensor>& grads, const std::vector<Tensor>& momenta,
          int64_t steps, const std::vector<double>& coefficients, double smallest, double nesterov_decay, double lr) {
  std::vector<Tensor> dense;
  for (const Tensor& grad : grads) dense.push_back(contiguous(grad));
  const auto weight = matrices_of(weights), grad = matrices_of(dense), momentum = matrices_of(momenta);
  const int64_t matrices = weight.size(), rows = weights[0].size(-2), columns = weights[0].size(-1);
  const float a = coefficients[0], b = coefficients[1], c = coefficients[2];
  const float eps = smallest, decay = nesterov_decay, rate = lr;
  const int64_t numbers = rows * columns, small = std::min(rows, columns), large = std::max(rows, columns);
  at::parallel_for(0, matrices, 1, [&](int64_t from, int64_t to) {
    Scratch scratch;
    float* nesterov = scratch.take<float>(numbers);
    bf16* x = scratch.take<bf16>(numbers);
    bf16* turned = scratch.take<bf16>(numbers);
    bf16* packed = scratch.take<bf16>(numbers);
    bf16* gram = scratch.take<bf16>(small * small);
    bf16* polynomial = scratch.take<bf16>(small * small);
    for (int64_t i = from; i < to; ++i) {
      const __m512 keep = _mm512_set1_ps(decay), gain = _mm512_set1_ps(1 - decay);
      __m512 squares = _mm512_setzero_ps();
      for (int64_t j = 0; j < numbers; j += 16) {
        const __m512 g = _mm512_loadu_ps(grad[i] + j), old = _mm512_loadu_ps(momentum[i] + j);
        const __m512 m = _mm512_fmadd_ps(_mm512_sub_ps(g, old), gain, old);
        const __m512 n = _mm512_fmadd_ps(_mm512_sub_ps(m, g), keep, g);
        _mm512_storeu_ps(momentum[i] + j, m);
        _mm512_storeu_ps(nesterov + j, n);
        squares = _mm512_fmadd_ps(n, n, squares);
      }
      const __m512 norm = _mm512_set1_ps(std::max(std::sqrt(_mm512_reduce_add_ps(squares)), eps));
      for (int64_t j = 0; j < numbers; j += 16) store(x + j, _mm512_div_ps(_mm512_loadu_ps(nesterov + j), norm));
      if (rows > columns) transpose<false>(x, rows, columns, turned);
      newton_schulz(rows > columns ? turned : x, small, large, steps, a, b, c, gram, polynomial, packed);
      if (rows > columns) transpose<false>(turned, columns, rows, x);
      for (int64_t j = 0; j < numbers; j += 16)
        _mm512_storeu_ps(weight[i] + j,
                         _mm512_fnmadd_ps(load(x + j), _mm512_set1_ps(rate), _mm512_loadu_ps(weight[i] + j)));
    }
    finish();
  });
}

STABLE_TORCH_LIBRARY_IMPL(expert_threshold, CPU, m) { m.impl("muon_step", TORCH_BOX(&step)); }

}  // namespace
}  // namespace muon
