// A step of Muon, one thread per matrix: momentum, equilibration, orthogonalization with bfloat16 products,
// normalization, weight decay and the update, as in optim/muon.py. The matrix stays in a core's cache, zero-padded to
// whole tiles of 32 × 32; the padding stays zero.

#include <cmath>

#include "common.h"

namespace muon {
namespace {

// out (m, n) = scale · before + factor · a (m, k) · packed b; `before` may be null, or out. A symmetric product
// is computed from the diagonal down.
template <bool symmetric>
void product(int64_t m, int64_t n, int64_t k, const bf16* a, const bf16* b, float factor, const bf16* before,
             float scale, bf16* out) {
  const __m512 times = _mm512_set1_ps(factor), keep = _mm512_set1_ps(scale);
  multiply<symmetric>(m, n, k, a, b, [&](const float* c, int64_t start, int64_t rows, int64_t column, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < columns; j += 16) {
        const int64_t at = (start + r) * n + column + j;
        __m512 value = _mm512_mul_ps(_mm512_loadu_ps(c + r * columns + j), times);
        if (before) value = _mm512_fmadd_ps(load(before + at), keep, value);
        store(out + at, value);
      }
  });
  const int64_t columns = panel<symmetric>(n);
  for (int64_t j = 0, below = columns; symmetric && below < n; j = below, below += columns)
    transpose<false>(out + below * n + j, n - below, columns, out + j * n + below, n, n);
}

// The parts of a matrix that are normalized separately; numbered as in blocks.py.
enum Parts : int64_t { NONE, ROWS, COLUMNS, MATRIX };

// A matrix, and room for one number per row or column.
struct Matrix {
  float* x;  // (rows, stride), zero beyond the columns
  int64_t rows, columns, stride;
  float* numbers;

  int64_t count(Parts parts) const { return parts == ROWS ? rows : parts == COLUMNS ? columns : 1; }

  // numbers = the sum of squares of each part.
  void squares(Parts parts) const {
    std::fill_n(numbers, round_up(count(parts), 32), 0.f);
    for (int64_t r = 0; r < rows; ++r) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t j = 0; j < stride; j += 16) {
        const __m512 value = _mm512_loadu_ps(x + r * stride + j);
        if (parts == COLUMNS)
          _mm512_storeu_ps(numbers + j, _mm512_fmadd_ps(value, value, _mm512_loadu_ps(numbers + j)));
        else
          sum = _mm512_fmadd_ps(value, value, sum);
      }
      if (parts != COLUMNS) numbers[parts == ROWS ? r : 0] += _mm512_reduce_add_ps(sum);
    }
  }

  // Multiplies each part by its number.
  void scale(Parts parts) const {
    for (int64_t r = 0; r < rows; ++r) {
      const __m512 same = _mm512_set1_ps(numbers[parts == ROWS ? r : 0]);
      for (int64_t j = 0; j < stride; j += 16) {
        float* at = x + r * stride + j;
        _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), parts == COLUMNS ? _mm512_loadu_ps(numbers + j) : same));
      }
    }
  }

  // `normalize` of optim/muon.py.
  void normalize(Parts parts, float eps) const {
    squares(parts);
    const float norm = std::sqrt((float)std::min(rows, columns) / count(parts));
    for (int64_t i = 0; i < count(parts); ++i) numbers[i] = norm / std::max(std::sqrt(numbers[i]), eps);
    scale(parts);
  }

  // `normuon` of optim/muon.py; v: a second moment for each part.
  void normuon(Parts parts, float* v, float beta, float least) const {
    squares(parts);
    float before = 0, after = 0;
    for (int64_t i = 0; i < count(parts); ++i) {
      const float mean = numbers[i] * count(parts) / (rows * columns);
      v[i] += (1 - beta) * (mean - v[i]);
      numbers[i] = 1 / std::sqrt(std::max(v[i], least));
      before += mean;
      after += mean * numbers[i] * numbers[i];
    }
    const float keep = std::sqrt(before / std::max(after, least));
    for (int64_t i = 0; i < count(parts); ++i) numbers[i] *= keep;
    scale(parts);
  }
};

// X ← (a + b X Xᵀ + c (X Xᵀ)²) X for each of the polynomials; x (rows, columns), multiples of 32 with rows ≤ columns.
void orthogonalize(bf16* x, int64_t rows, int64_t columns, const std::vector<double>& polynomials, bf16* gram,
                   bf16* polynomial, bf16* packed) {
  for (size_t i = 0; i < polynomials.size(); i += 3) {
    const float a = polynomials[i], b = polynomials[i + 1], c = polynomials[i + 2];
    pack_transposed<true>(x, rows, columns, packed);
    product<true>(rows, rows, columns, x, packed, 1, nullptr, 0, gram);
    pack_rows<false, true>(gram, rows, rows, packed);
    product<true>(rows, rows, rows, gram, packed, c, gram, b, polynomial);
    pack_rows<false>(x, rows, columns, packed);
    product<false>(rows, columns, rows, polynomial, packed, 1, x, a, x);
  }
}

// The matrices of stacks (matrices, rows, columns) float32.
std::vector<float*> matrices_of(const std::vector<Tensor>& stacks) {
  std::vector<float*> matrices;
  for (const Tensor& stack : stacks)
    for (int64_t i = 0; i < stack.size(0); ++i) matrices.push_back(data<float>(stack) + i * stack.stride(0));
  return matrices;
}

// Updates the weights, momenta and second moments (empty without NorMuon) as optim/muon.py does.
void step(const std::vector<Tensor>& weights, const std::vector<Tensor>& grads, const std::vector<Tensor>& momenta,
          const std::vector<Tensor>& second_moments, double nesterov_decay, int64_t equilibrate,
          const std::vector<double>& polynomials, double safety, double smallest, int64_t renormalize,
          double normuon_beta, double least, double weight_decay, bool cautious, double lr) {
  std::vector<Tensor> dense;
  for (const Tensor& grad : grads) dense.push_back(contiguous(grad));
  const auto weight = matrices_of(weights), grad = matrices_of(dense), momentum = matrices_of(momenta);
  const auto second = matrices_of(second_moments);
  const int64_t matrices = weight.size(), rows = weights[0].size(-2), columns = weights[0].size(-1);
  const auto has_sides = [&](int64_t m, int64_t n) {
    return second_moments[0].size(-2) == m && second_moments[0].size(-1) == n;
  };
  const Parts of_second = second.empty() ? NONE : has_sides(rows, 1) ? ROWS : COLUMNS;
  const float eps = smallest;
  const __m512 keep = _mm512_set1_ps(nesterov_decay), gain = _mm512_set1_ps(1 - nesterov_decay);
  const __m512 rate = _mm512_set1_ps(lr), shrink = _mm512_set1_ps(weight_decay), zero = _mm512_setzero_ps();
  const int64_t height = round_up(rows, 32), stride = round_up(columns, 32), numbers = height * stride;
  const int64_t small = std::min(height, stride), large = std::max(height, stride);
  // Calls then(first of up to 16 numbers in a row, their mask, their position in an update), row by row.
  const auto for_row_parts = [&](auto&& then) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < stride; j += 16)
        then(r * columns + j, __mmask16((1u << std::clamp<int64_t>(columns - j, 0, 16)) - 1), r * stride + j);
  };
  at::parallel_for(0, matrices, 1, [&](int64_t from, int64_t to) {
    Scratch scratch;
    const Matrix update{scratch.take<float>(numbers), rows, columns, stride, scratch.take<float>(large)};
    bf16* x = scratch.take<bf16>(numbers);
    bf16* turned = scratch.take<bf16>(numbers);
    bf16* packed = scratch.take<bf16>(numbers);
    bf16* gram = scratch.take<bf16>(small * small);
    bf16* polynomial = scratch.take<bf16>(small * small);
    for (int64_t i = from; i < to; ++i) {
      for_row_parts([&](int64_t at, __mmask16 inside, int64_t j) {
        const __m512 g = _mm512_maskz_loadu_ps(inside, grad[i] + at);
        const __m512 old = _mm512_maskz_loadu_ps(inside, momentum[i] + at);
        const __m512 m = _mm512_fmadd_ps(_mm512_sub_ps(g, old), gain, old);
        _mm512_mask_storeu_ps(momentum[i] + at, inside, m);
        _mm512_storeu_ps(update.x + j, _mm512_fmadd_ps(_mm512_sub_ps(m, g), keep, g));
      });
      if (equilibrate) update.normalize((Parts)equilibrate, eps);
      update.squares(MATRIX);
      const __m512 norm = _mm512_set1_ps(std::max(std::sqrt(update.numbers[0]), eps) * (float)safety);
      const int64_t used = rows * stride;
      for (int64_t j = 0; j < used; j += 16) store(x + j, _mm512_div_ps(_mm512_loadu_ps(update.x + j), norm));
      std::memset((void*)(x + used), 0, (numbers - used) * sizeof(bf16));
      if (height > stride) transpose<false>(x, height, stride, turned);
      orthogonalize(height > stride ? turned : x, small, large, polynomials, gram, polynomial, packed);
      if (height > stride) transpose<false>(turned, stride, height, x);
      for (int64_t j = 0; j < used; j += 16) _mm512_storeu_ps(update.x + j, load(x + j));
      if (renormalize) update.normalize((Parts)renormalize, eps);
      if (of_second) update.normuon(of_second, second[i], normuon_beta, least);
      for_row_parts([&](int64_t at, __mmask16 inside, int64_t j) {
        const __m512 u = _mm512_loadu_ps(update.x + j), w = _mm512_maskz_loadu_ps(inside, weight[i] + at);
        const __mmask16 decays = cautious ? _mm512_cmp_ps_mask(_mm512_mul_ps(u, w), zero, _CMP_GE_OQ) : 0xFFFF;
        const __m512 kept = _mm512_mask_fnmadd_ps(w, decays, shrink, w);
        _mm512_mask_storeu_ps(weight[i] + at, inside, _mm512_fnmadd_ps(u, rate, kept));
      });
    }
    finish();
  });
}

STABLE_TORCH_LIBRARY_IMPL(expert_threshold, CPU, m) { m.impl("muon_step", TORCH_BOX(&step)); }

}  // namespace
}  // namespace muon
