// Causal attention with rotary positions and QK norm, forward and backward, and RMSNorm, in bfloat16.
//
// Attention takes the projection's rows (batch, time, heads + 2 · kv_heads, width), queries before keys before values,
// and its backward returns their gradient, so that nothing is split or concatenated. A thread computes one key-value
// head of one sequence at a time. It packs the keys and values once, then multiplies each block of queries by the keys
// up to the block's end, starting with the panel that contains the first query's window. Scores and probabilities stay
// in a core's cache; backward recomputes them.

#include <cmath>
#include <limits>

#include "common.h"

namespace attention {
namespace {

constexpr int64_t QUERIES = 64;  // in a block; sequences are padded to whole blocks with rows of zeros
constexpr int64_t KEYS = 64;     // in a panel of packed keys

using Vector = at::vec::Vectorized<float>;

inline __m512 exp(__m512 x) { return Vector(x).exp_u20(); }

inline float inverse_rms(const bf16* x, int64_t width) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < width; j += 16) sum = _mm512_fmadd_ps(load(x + j), load(x + j), sum);
  return 1 / std::sqrt(_mm512_reduce_add_ps(sum) / width + std::numeric_limits<float>::epsilon());
}

// The gradient of y = x · scale: dx = scale · (dy − x · scale² · mean(dy · x)); `along` is the sum of dy · x.
template <class Dy>
inline void norm_back(const bf16* x, float scale, float along, int64_t width, Dy&& dy, bf16* dx) {
  const __m512 scaled = _mm512_set1_ps(scale), back = _mm512_set1_ps(-scale * scale * along / width);
  for (int64_t j = 0; j < width; j += 16)
    store(dx + j, _mm512_mul_ps(_mm512_fmadd_ps(load(x + j), back, dy(j)), scaled));
}

struct Shape {
  int64_t batch, time, heads, kv_heads, width;
  int64_t padded() const { return round_up(time, QUERIES); }
  int64_t group() const { return heads / kv_heads; }
  int64_t stride() const { return (heads + 2 * kv_heads) * width; }
};

// The rows of the rotary table, one per position.
struct Table {
  const bf16 *cos, *sin;
};

// Writes one head's rows, rotated and normed, to out (padded, width).
void turn(const bf16* x, const Shape& shape, Table table, bf16* out) {
  const int64_t half = shape.width / 2;
  for (int64_t t = 0; t < shape.time; ++t) {
    const bf16 *a = x + t * shape.stride(), *b = a + half, *cos = table.cos + t * half, *sin = table.sin + t * half;
    const __m512 scale = _mm512_set1_ps(inverse_rms(a, shape.width));
    for (int64_t j = 0; j < half; j += 16) {
      const __m512 u = _mm512_mul_ps(load(a + j), scale), v = _mm512_mul_ps(load(b + j), scale);
      const __m512 c = load(cos + j), s = load(sin + j);
      store(out + t * shape.width + j, _mm512_fmadd_ps(u, c, _mm512_mul_ps(v, s)));
      store(out + t * shape.width + half + j, _mm512_fmsub_ps(v, c, _mm512_mul_ps(u, s)));
    }
  }
  std::fill(out + shape.time * shape.width, out + shape.padded() * shape.width, bf16(0));
}

// The gradient of x from row `start` on, given dy (rows, width), the gradient of the output of `turn`; overwrites dy.
void turn_back(const bf16* x, const Shape& shape, Table table, int64_t start, int64_t rows, float* dy, bf16* dx) {
  const int64_t half = shape.width / 2;
  for (int64_t t = start; t < std::min(start + rows, shape.time); ++t) {
    const bf16 *row = x + t * shape.stride(), *cos = table.cos + t * half, *sin = table.sin + t * half;
    float* d = dy + (t - start) * shape.width;
    __m512 along = _mm512_setzero_ps();
    for (int64_t j = 0; j < half; j += 16) {
      const __m512 a = _mm512_loadu_ps(d + j), b = _mm512_loadu_ps(d + half + j);
      const __m512 c = load(cos + j), s = load(sin + j);
      const __m512 da = _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), db = _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s));
      along = _mm512_fmadd_ps(da, load(row + j), _mm512_fmadd_ps(db, load(row + half + j), along));
      _mm512_storeu_ps(d + j, da);
      _mm512_storeu_ps(d + half + j, db);
    }
    norm_back(
        row, inverse_rms(row, shape.width), _mm512_reduce_add_ps(along), shape.width,
        [&](int64_t j) { return _mm512_loadu_ps(d + j); }, dx + t * shape.stride());
  }
}

// Moves the slow half of each key in (time, width) to the next token; the first token gets zeros.
void delay(const Shape& shape, bf16* keys) {
  const int64_t part = shape.width / 4;
  for (int64_t slow : {part, 3 * part}) {
    for (int64_t t = shape.time - 1; t > 0; --t)
      std::copy_n(keys + (t - 1) * shape.width + slow, part, keys + t * shape.width + slow);
    std::fill_n(keys + slow, part, bf16(0));
  }
}

// Moves the slow half of each key's gradient back to the token that the key came from.
void delay_back(const Shape& shape, float* dk) {
  const int64_t part = shape.width / 4;
  for (int64_t slow : {part, 3 * part}) {
    for (int64_t t = 1; t < shape.time; ++t)
      std::copy_n(dk + t * shape.width + slow, part, dk + (t - 1) * shape.width + slow);
    std::fill_n(dk + (shape.time - 1) * shape.width + slow, part, 0.0f);
  }
}

// Copies one head's rows, `stride` apart, to out (padded, width).
void copy(const bf16* x, const Shape& shape, int64_t stride, bf16* out) {
  for (int64_t t = 0; t < shape.time; ++t) std::copy_n(x + t * stride, shape.width, out + t * shape.width);
  std::fill(out + shape.time * shape.width, out + shape.padded() * shape.width, bf16(0));
}

// The `length` keys from `begin`, the start of a panel, up to but excluding `end`.
struct Keys {
  int64_t begin, end;
  int64_t length() const { return end - begin; }
};

// The keys that a block of queries starting at `start` needs.
inline Keys keys_of(int64_t start, int64_t window) {
  return {std::max<int64_t>(start - window, 0) / KEYS * KEYS, start + QUERIES};
}

// Those columns from j to j + 15 that lie before `end`.
inline __mmask16 before(int64_t end, int64_t j) {
  return end - j >= 16 ? 0xffff : end <= j ? 0 : (1 << (end - j)) - 1;
}

// Those keys from j to j + 15 that a query attends to: its own at `seen` - 1 and `window` before; none if `seen` is 0.
inline __mmask16 attended(int64_t seen, int64_t window, int64_t j) {
  return before(seen, j) & ~before(seen - 1 - window, j);
}

// out (QUERIES, keys), rows `ld` apart and columns counted from key 0, = a (QUERIES, width) · packed keys.
void scores(const bf16* a, const bf16* packed, int64_t width, Keys keys, float* out, int64_t ld) {
  for (int64_t j = keys.begin; j < keys.end; j += KEYS)
    at::native::cpublas::brgemm(QUERIES, KEYS, width, width, KEYS, ld, false, a, packed + j * width, out + j);
}

// out (QUERIES, width) = a (QUERIES, keys) · the packed rows (padded, width) of these keys.
void weigh(const bf16* a, const bf16* rows, int64_t width, Keys keys, float* out, int64_t padded) {
  const int64_t columns = panel(width), length = keys.length();
  for (int64_t j = 0; j < width; j += columns)
    for (int64_t i = 0; i < length; i += DEPTH)
      at::native::cpublas::brgemm(QUERIES, columns, std::min(DEPTH, length - i), length, columns, width, i > 0, a + i,
                                  rows + j * padded + (keys.begin + i) * columns, out + j);
}

// The rows of out (padded, width) for these keys += a (keys, QUERIES) · packed rows (QUERIES, width).
void spread(const bf16* a, const bf16* rows, int64_t width, Keys keys, float* out) {
  const int64_t columns = panel(width);
  for (int64_t j = 0; j < width; j += columns)
    at::native::cpublas::brgemm(keys.length(), columns, QUERIES, QUERIES, columns, width, true, a, rows + j * QUERIES,
                                out + keys.begin * width + j);
}

// A projection (batch, time, heads + 2 · kv_heads, width) and the rotary table, cos and sin (time, width / 2).
struct Input {
  const Tensor projected, cosines, sines;
  const Shape shape;

  Input(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t kv_heads)
      : projected(contiguous(x)),
        cosines(contiguous(cos)),
        sines(contiguous(sin)),
        shape{x.size(0), x.size(1), x.size(2) - 2 * kv_heads, kv_heads, x.size(3)} {}

  std::tuple<const bf16*, Shape, Table> pointers() const {
    return {data<const bf16>(projected), shape, {data<const bf16>(cosines), data<const bf16>(sines)}};
  }
};

// Returns y (batch, time, heads, width) and the logarithm of each softmax's sum, (batch, heads, time).
std::tuple<Tensor, Tensor> forward(const Tensor& projected, const Tensor& cos, const Tensor& sin, int64_t keys_values,
                                   int64_t window, bool key_offset) {
  const Input input(projected, cos, sin, keys_values);
  const auto [x, shape, table] = input.pointers();
  const auto [batch, time, heads, kv_heads, width] = shape;
  const Tensor output = new_empty(input.projected, {batch, time, heads, width});
  const Tensor normalisers = new_empty(input.projected, {batch, heads, time}, ScalarType::Float);
  bf16* y = data<bf16>(output);
  float* normaliser = data<float>(normalisers);
  const int64_t padded = shape.padded();
  const float factor = 1 / std::sqrt(float(width));
  at::parallel_for(0, batch * kv_heads, 1, [&](int64_t from, int64_t to) {
    Scratch scratch;
    bf16* rows = scratch.take<bf16>(padded * width);
    bf16* keys = scratch.take<bf16>(padded * width);
    bf16* values = scratch.take<bf16>(padded * width);
    float* s = scratch.take<float>(QUERIES * padded);
    bf16* p = scratch.take<bf16>(QUERIES * padded);
    float* out = scratch.take<float>(QUERIES * width);
    for (int64_t i = from; i < to; ++i) {
      const int64_t b = i / kv_heads, kv = i % kv_heads;
      const bf16* sequence = x + b * time * shape.stride();
      turn(sequence + (heads + kv) * width, shape, table, rows);
      if (key_offset) delay(shape, rows);
      pack_transposed(rows, padded, width, keys);
      copy(sequence + (heads + kv_heads + kv) * width, shape, shape.stride(), rows);
      pack_rows<false>(rows, padded, width, values);
      for (int64_t head = kv * shape.group(); head < (kv + 1) * shape.group(); ++head) {
        turn(sequence + head * width, shape, table, rows);
        for (int64_t start = 0; start < padded; start += QUERIES) {
          const Keys met = keys_of(start, window);
          const int64_t queries = std::min(QUERIES, time - start);
          float sums[QUERIES];
          scores(rows + start * width, keys, width, met, s, padded);
          for (int64_t r = 0; r < QUERIES; ++r) {
            const float* row = s + r * padded;
            const int64_t seen = start + r + 1;
            __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::infinity()), sum = _mm512_setzero_ps();
            for (int64_t j = met.begin; j < seen; j += 16)
              most = _mm512_mask_max_ps(most, attended(seen, window, j), most, _mm512_loadu_ps(row + j));
            const float largest = factor * _mm512_reduce_max_ps(most);
            for (int64_t j = met.begin; j < met.end; j += 16) {
              const __m512 shifted =
                  _mm512_fmsub_ps(_mm512_loadu_ps(row + j), _mm512_set1_ps(factor), _mm512_set1_ps(largest));
              const __m512 e = _mm512_maskz_mov_ps(attended(seen, window, j), exp(shifted));
              sum = _mm512_add_ps(sum, e);
              store(p + r * met.length() + j - met.begin, e);
            }
            sums[r] = _mm512_reduce_add_ps(sum);
            if (r < queries) normaliser[(b * heads + head) * time + start + r] = largest + std::log(sums[r]);
          }
          weigh(p, values, width, met, out, padded);
          for (int64_t r = 0; r < queries; ++r)
            for (int64_t j = 0; j < width; j += 16)
              store(y + ((b * time + start + r) * heads + head) * width + j,
                    _mm512_mul_ps(_mm512_loadu_ps(out + r * width + j), _mm512_set1_ps(1 / sums[r])));
        }
      }
    }
    finish();
  });
  return {output, normalisers};
}

// Returns the gradient of the projection; y and normalisers are the results of `forward`.
Tensor backward(const Tensor& upstream, const Tensor& projected, const Tensor& cos, const Tensor& sin,
                const Tensor& output, const Tensor& normalisers, int64_t window, bool key_offset) {
  const Input input(projected, cos, sin, (projected.size(2) - output.size(2)) / 2);
  const auto [x, shape, table] = input.pointers();
  const auto [batch, time, heads, kv_heads, width] = shape;
  const Tensor given = contiguous(upstream), result = new_empty(input.projected, input.projected.sizes());
  const bf16 *dy = data<const bf16>(given), *y = data<const bf16>(output);
  const float* normaliser = data<const float>(normalisers);
  bf16* dx = data<bf16>(result);
  const int64_t padded = shape.padded();
  const float factor = 1 / std::sqrt(float(width));
  at::parallel_for(0, batch * kv_heads, 1, [&](int64_t from, int64_t to) {
    Scratch scratch;
    bf16* q = scratch.take<bf16>(padded * width);
    bf16* rows = scratch.take<bf16>(padded * width);  // keys, values, then dy
    bf16* keys = scratch.take<bf16>(padded * width);
    bf16* keys_transposed = scratch.take<bf16>(padded * width);
    bf16* values_transposed = scratch.take<bf16>(padded * width);
    bf16* block = scratch.take<bf16>(QUERIES * width);
    float* s = scratch.take<float>(QUERIES * padded);
    float* dp = scratch.take<float>(QUERIES * padded);
    bf16* p = scratch.take<bf16>(QUERIES * padded);
    bf16* ds = scratch.take<bf16>(QUERIES * padded);
    bf16* transposed = scratch.take<bf16>(QUERIES * padded);
    float* dq = scratch.take<float>(QUERIES * width);
    float* dk = scratch.take<float>(padded * width);
    float* dv = scratch.take<float>(padded * width);
    for (int64_t i = from; i < to; ++i) {
      const int64_t b = i / kv_heads, kv = i % kv_heads;
      const int64_t key = b * time * shape.stride() + (heads + kv) * width, value = key + kv_heads * width;
      turn(x + key, shape, table, rows);
      if (key_offset) delay(shape, rows);
      pack_rows<false>(rows, padded, width, keys);
      pack_transposed(rows, padded, width, keys_transposed);
      copy(x + value, shape, shape.stride(), rows);
      pack_transposed(rows, padded, width, values_transposed);
      std::fill_n(dk, padded * width, 0.0f);
      std::fill_n(dv, padded * width, 0.0f);
      for (int64_t head = kv * shape.group(); head < (kv + 1) * shape.group(); ++head) {
        const int64_t query = b * time * shape.stride() + head * width, result = (b * time * heads + head) * width;
        turn(x + query, shape, table, q);
        copy(dy + result, shape, heads * width, rows);
        for (int64_t start = 0; start < padded; start += QUERIES) {
          const Keys met = keys_of(start, window);
          const int64_t queries = std::min(QUERIES, time - start);
          scores(q + start * width, keys_transposed, width, met, s, padded);
          scores(rows + start * width, values_transposed, width, met, dp, padded);
          for (int64_t r = 0; r < QUERIES; ++r) {
            const int64_t t = start + r, seen = r < queries ? t + 1 : 0;
            __m512 along = _mm512_setzero_ps();
            for (int64_t j = 0; r < queries && j < width; j += 16)
              along = _mm512_fmadd_ps(load(rows + t * width + j), load(y + result + t * heads * width + j), along);
            const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(along)), scale = _mm512_set1_ps(factor);
            const __m512 log = _mm512_set1_ps(r < queries ? normaliser[(b * heads + head) * time + t] : 0);
            for (int64_t j = met.begin; j < met.end; j += 16) {
              const int64_t place = r * met.length() + j - met.begin;
              const __m512 shifted = _mm512_fmsub_ps(_mm512_loadu_ps(s + r * padded + j), scale, log);
              const __m512 e = _mm512_maskz_mov_ps(attended(seen, window, j), exp(shifted));
              const __m512 change = _mm512_sub_ps(_mm512_loadu_ps(dp + r * padded + j), mean);
              store(p + place, e);
              store(ds + place, _mm512_mul_ps(_mm512_mul_ps(e, scale), change));
            }
          }
          weigh(ds, keys, width, met, dq, padded);
          turn_back(x + query, shape, table, start, QUERIES, dq, dx + query);
          transpose<false>(p, QUERIES, met.length(), transposed);
          pack_rows<false>(rows + start * width, QUERIES, width, block);
          spread(transposed, block, width, met, dv);
          transpose<false>(ds, QUERIES, met.length(), transposed);
          pack_rows<false>(q + start * width, QUERIES, width, block);
          spread(transposed, block, width, met, dk);
        }
      }
      if (key_offset) delay_back(shape, dk);
      turn_back(x + key, shape, table, 0, time, dk, dx + key);
      for (int64_t t = 0; t < time; ++t)
        for (int64_t j = 0; j < width; j += 16)
          store(dx + value + t * shape.stride() + j, _mm512_loadu_ps(dv + t * width + j));
    }
    finish();
  });
  return result;
}

// Returns x / rms(x) over the last dimension.
Tensor norm(const Tensor& given) {
  const Tensor rows = contiguous(given), result = new_empty(rows, rows.sizes());
  const int64_t width = rows.size(-1);
  const bf16* x = data<const bf16>(rows);
  bf16* y = data<bf16>(result);
  at::parallel_for(0, rows.numel() / width, 256, [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      const __m512 scale = _mm512_set1_ps(inverse_rms(x + r * width, width));
      for (int64_t j = r * width; j < (r + 1) * width; j += 16) store(y + j, _mm512_mul_ps(load(x + j), scale));
    }
  });
  return result;
}

Tensor norm_backward(const Tensor& upstream, const Tensor& given) {
  const Tensor slopes = contiguous(upstream), rows = contiguous(given), result = new_empty(rows, rows.sizes());
  const int64_t width = rows.size(-1);
  const bf16 *dy = data<const bf16>(slopes), *x = data<const bf16>(rows);
  bf16* dx = data<bf16>(result);
  at::parallel_for(0, rows.numel() / width, 256, [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      const bf16 *row = x + r * width, *d = dy + r * width;
      __m512 along = _mm512_setzero_ps();
      for (int64_t j = 0; j < width; j += 16) along = _mm512_fmadd_ps(load(row + j), load(d + j), along);
      norm_back(
          row, inverse_rms(row, width), _mm512_reduce_add_ps(along), width, [&](int64_t j) { return load(d + j); },
          dx + r * width);
    }
  });
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(expert_threshold, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&forward));
  m.impl("attention_backward", TORCH_BOX(&backward));
  m.impl("norm", TORCH_BOX(&norm));
  m.impl("norm_backward", TORCH_BOX(&norm_backward));
}

}  // namespace
}  // namespace attention
