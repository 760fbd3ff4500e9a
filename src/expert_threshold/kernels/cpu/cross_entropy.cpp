// Cross-entropy of a softcapped head in bfloat16, with the gradients of its sum, and no logits in memory.
//
// The scaled weights yield z = 2 l / cap; with σ = sigmoid(z), a capped logit is cap (2 σ − 1), which lies within ±cap
// for any l. So exponentials e are summed without subtracting a maximum: e^±60 and the sum of 2⁴⁰ of them are far from
// the limits of float32 and bfloat16. Gradients follow from e σ (1 − σ), which is rounded before the sum is known; the
// sum later scales whole rows of the products. The target's own term is added in float32.

#include "common.h"

namespace cross_entropy {
namespace {

constexpr int64_t GROUP = 256;         // tokens over which a weight's gradient is summed at a time
constexpr int64_t ROWS = 64;           // tokens in a block of a group
constexpr int64_t WORDS = 256;         // words of the vocabulary in one tile of the weight's gradient
constexpr int64_t TILE_COLUMNS = 768;  // columns of that tile

constexpr float LOG2_E = 1.44269504f;

inline __m512 power_of_two(__m512 x) {  // a polynomial on the fraction of x, within 2e-7 of its value
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.87757867e-3f);
  for (const float c : {8.98933862e-3f, 5.58263152e-2f, 2.40153620e-1f, 6.93153072e-1f, 9.99999925e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, x);
}

inline __m512 sigmoid(__m512 z) {  // at least 2⁻⁸⁰; the minimum's operand order keeps NaN
  const __m512 one = _mm512_set1_ps(1);
  const __m512 power = power_of_two(_mm512_min_ps(_mm512_set1_ps(80), _mm512_mul_ps(z, _mm512_set1_ps(-LOG2_E))));
  const __m512 below = _mm512_add_ps(one, power);
  const __m512 near = _mm512_rcp14_ps(below);  // to 14 bits, which a Newton step doubles
  return _mm512_fmadd_ps(near, _mm512_fnmadd_ps(below, near, one), near);
}

struct Head {
  const bf16* x;           // (tokens, width)
  const bf16* weight;      // (vocab, width), times 2 / cap
  const int64_t* targets;  // (tokens,), −1 means none
  int64_t tokens, width, vocab;
  float cap;
  const bf16 *to_logits, *to_width;  // the packed weight; to_width in parts of DEPTH words
};

// Computes the losses of rows start … start + count and, if `slope` is not null, the factors of gradients: `turned`
// (width, rounded) and, in parts of DEPTH words, `packed` (rounded, words). They belong to a group in which these rows
// start at `offset`.
void compute_rows(const Head& h, int64_t start, int64_t count, int64_t offset, int64_t rounded, Scratch& scratch,
                  float* losses, float* slope, bf16* dx, bf16* turned, bf16* packed) {
  const int64_t m = round_up(count, 32), width = h.width;
  bf16* xs = scratch.take<bf16>(ROWS * width);
  bf16* g = scratch.take<bf16>(ROWS * h.vocab);  // in parts of DEPTH words, each (m, words)
  alignas(64) float sum[ROWS] = {}, at_target[ROWS] = {};
  std::memcpy(xs, h.x + start * width, count * width * sizeof(bf16));
  std::memset((void*)(xs + count * width), 0, (m - count) * width * sizeof(bf16));
  const __m512 one = _mm512_set1_ps(1), cap = _mm512_set1_ps(LOG2_E * h.cap);  // as a power of 2
  const __m512 twice_cap = _mm512_add_ps(cap, cap);

  multiply(m, h.vocab, width, xs, h.to_logits, [&](auto c, int64_t, int64_t, int64_t column, int64_t columns) {
    const int64_t part = column / DEPTH * DEPTH, words = std::min(DEPTH, h.vocab - part);
    for (int64_t r = 0; r < count; ++r) {
      __m512 sums = _mm512_setzero_ps();
      for (int64_t j = 0; j < columns; j += 32) {
        __m512 slopes[2];
        for (const int i : {0, 1}) {
          const __m512 s = sigmoid(_mm512_loadu_ps(c + r * columns + j + 16 * i));
          const __m512 e = power_of_two(_mm512_fmsub_ps(twice_cap, s, cap));
          sums = _mm512_add_ps(sums, e);
          slopes[i] = _mm512_mul_ps(e, _mm512_mul_ps(s, _mm512_sub_ps(one, s)));
        }
        if (slope) write(g + part * m + r * words + column - part + j, round(slopes[0], slopes[1]));
      }
      sum[r] += _mm512_reduce_add_ps(sums);
      const int64_t target = h.targets[start + r] - column;
      if (0 <= target && target < columns)
        at_target[r] = _mm512_cvtss_f32(sigmoid(_mm512_set1_ps(c[r * columns + target])));
    }
  });
  for (int64_t r = 0; r < count; ++r) {
    const bool wanted = h.targets[start + r] >= 0;
    const float loss = std::log(sum[r]) - h.cap * (2 * at_target[r] - 1);
    losses[start + r] = wanted && !(loss < 0) ? loss : 0;  // only rounding makes it negative, near probability 1
    if (slope) slope[start + r] = wanted ? at_target[r] * (1 - at_target[r]) : 0;
    sum[r] = wanted ? 1 / sum[r] : 0;  // now the scale of the row
  }
  if (!slope) return;

  alignas(64) float c[ROWS * 64];
  const int64_t columns = panel(width);
  for (int64_t j = 0; j < width; j += columns) {
    for (int64_t part = 0; part < h.vocab; part += DEPTH) {
      const int64_t words = std::min(DEPTH, h.vocab - part);
      at::native::cpublas::brgemm(m, columns, words, words, columns, columns, part > 0, g + part * m,
                                  h.to_width + part * width + j * words, c);
    }
    for (int64_t r = 0; r < count; ++r) {
      const bf16* word = h.weight + std::max<int64_t>(h.targets[start + r], 0) * width + j;
      const __m512 scale = _mm512_set1_ps(sum[r]), own = _mm512_set1_ps(slope[start + r]);
      for (int64_t l = 0; l < columns; l += 16)
        store(dx + (start + r) * width + j + l,
              _mm512_fnmadd_ps(own, load(word + l), _mm512_mul_ps(scale, _mm512_loadu_ps(c + r * columns + l))));
    }
  }
  for (int64_t part = 0; part < h.vocab; part += DEPTH) {
    const int64_t words = std::min(DEPTH, h.vocab - part);
    std::memset((void*)(g + part * m + count * words), 0, (m - count) * words * sizeof(bf16));
    pack_rows<true>(g + part * m, m, words, packed + part * rounded, rounded, offset);
  }
  for (int64_t r = 0; r < count; ++r)
    for (int64_t j = 0; j < width; j += 16)
      store(xs + r * width + j, _mm512_mul_ps(load(xs + r * width + j), _mm512_set1_ps(sum[r])));
  transpose<true>(xs, m, width, turned + offset, rounded, width);
}

// Returns the losses (tokens,), 0 where the target is negative, and the gradients of their sum in x and weight, up to
// factors of 2 cap and 4; gradients are empty without `with_gradient`. `scaled` is the weight times 2 / cap. Processing
// `chunk` tokens at a time, a multiple of 256, bounds the memory for the factors of gradients.
std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& given, const Tensor& scaled, const Tensor& wanted,
                                                 double softcap, int64_t chunk, bool with_gradient) {
  const Tensor inputs = contiguous(given), weights = contiguous(scaled), labels = contiguous(wanted);
  const int64_t tokens = inputs.size(0), width = inputs.size(1), vocab = weights.size(0);
  const int64_t rows = with_gradient ? tokens : 0, words = with_gradient ? vocab : 0;
  const auto room = [&](int64_t m, int64_t n) { return new_empty(inputs, {m, n}); };
  const auto numbers = [&](int64_t m, int64_t n) { return new_empty(inputs, {m, n}, ScalarType::Float); };
  // Packed weights as in Head, and the factors of a chunk's gradients.
  const Tensor for_logits = room(vocab, width), for_width = room(words, width);
  const Tensor slopes = room(std::min(chunk, round_up(rows, 32)), vocab), factors = room(slopes.size(0), width);
  const Tensor own = numbers(rows, 1);
  const Tensor results = new_empty(inputs, {tokens}, ScalarType::Float), gradient = room(rows, width);
  const Tensor weight_gradient = numbers(words, width);
  const float cap = float(softcap);
  const bf16 *x = data<const bf16>(inputs), *weight = data<const bf16>(weights);
  const int64_t* targets = data<const int64_t>(labels);
  bf16 *to_logits = data<bf16>(for_logits), *to_width = data<bf16>(for_width), *packed = data<bf16>(slopes);
  bf16 *turned = data<bf16>(factors), *dx = data<bf16>(gradient);
  float *slope = data<float>(own), *losses = data<float>(results);
  float* dweight = with_gradient ? data<float>(weight_gradient) : nullptr;
  const int64_t word_panel = panel(vocab);
  at::parallel_for(0, vocab / word_panel, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from * word_panel; i < to * word_panel; i += word_panel) {
      pack_transposed(weight + i * width, word_panel, width, to_logits + i * width);
      const int64_t part = i / DEPTH * DEPTH;
      if (dweight)
        pack_rows<false>(weight + i * width, word_panel, width, to_width + part * width, std::min(DEPTH, vocab - part),
                         i - part);
    }
  });
  const Head head{x, weight, targets, tokens, width, vocab, cap, to_logits, to_width};
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t end = std::min(tokens, begin + chunk);
    at::parallel_for(0, (end - begin + ROWS - 1) / ROWS, 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        Scratch scratch;
        const int64_t start = begin + i * ROWS, group = (start - begin) / GROUP * GROUP;
        const int64_t rounded = round_up(std::min(GROUP, end - begin - group), 32);
        compute_rows(head, start, std::min(ROWS, end - start), start - begin - group, rounded, scratch, losses,
                     dweight ? slope : nullptr, dx, turned + group * width, packed + group * vocab);
      }
      finish();
    });
    if (!dweight) continue;
    const int64_t across = (width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    at::parallel_for(0, (vocab + WORDS - 1) / WORDS * across, 1, [&](int64_t from, int64_t to) {
      float* sum = Scratch().take<float>(WORDS * TILE_COLUMNS);
      for (int64_t i = from; i < to; ++i) {
        const int64_t row = i / across * WORDS, column = i % across * TILE_COLUMNS;
        const int64_t m = std::min(WORDS, vocab - row), n = std::min(TILE_COLUMNS, width - column);
        const int64_t columns = panel(std::min(DEPTH, vocab - row / DEPTH * DEPTH));  // as its part was packed
        for (int64_t group = 0; group < end - begin; group += GROUP) {
          const int64_t rounded = round_up(std::min(GROUP, end - begin - group), 32);
          accumulate(n, m, rounded, columns, turned + group * width + column * rounded,
                     packed + group * vocab + row * rounded, sum, group > 0);
        }
        alignas(64) float tile[16 * 16];
        for (int64_t j = 0; j < m; j += 16)
          for (int64_t l = 0; l < n; l += 16) {
            const float* square = sum + j / columns * columns * n + l * columns + j % columns;
            at::vec::transpose_mxn<float>(square, columns, tile, 16, 16, 16);
            for (int64_t r = 0; r < 16; ++r) {
              float* to = dweight + (row + j + r) * width + column + l;
              const __m512 part = _mm512_load_ps(tile + 16 * r);
              _mm512_storeu_ps(to, begin ? _mm512_add_ps(_mm512_loadu_ps(to), part) : part);
            }
          }
        for (int64_t t = begin; t < end; ++t)
          if (row <= targets[t] && targets[t] < row + m)
            for (int64_t j = column; j < column + n; j += 16) {
              float* to = dweight + targets[t] * width + j;
              const __m512 own = _mm512_mul_ps(_mm512_set1_ps(slope[t]), load(x + t * width + j));
              _mm512_storeu_ps(to, _mm512_sub_ps(_mm512_loadu_ps(to), own));
            }
      }
      finish();
    });
  }
  return {results, gradient, weight_gradient};
}

STABLE_TORCH_LIBRARY_IMPL(expert_threshold, CPU, m) { m.impl("capped_cross_entropy", TORCH_BOX(&cross_entropy)); }

}  // namespace
}  // namespace cross_entropy
