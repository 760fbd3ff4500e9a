// Products of bfloat16 matrices by oneDNN's block kernels, as shipped with PyTorch, and the packing they need.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "operators.h"

using bf16 = at::BFloat16;

namespace {

constexpr int64_t DEPTH = 512;  // of one block product; with HEIGHT, its operands fit the L1 cache
constexpr int64_t HEIGHT = 128;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
template <bool narrow = false>
inline int64_t panel(int64_t columns) {
  return narrow || columns % 64 ? 32 : 64;
}

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m256i round(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __m256i read(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void write(bf16* p, __m256i x) { _mm256_storeu_si256((__m256i*)p, x); }
inline __m512 load(const bf16* p) { return widen(read(p)); }
inline void store(bf16* p, __m512 x) { write(p, round(x)); }
inline __m512i round(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
inline __m512i read_all(const bf16* p) { return _mm512_loadu_si512(p); }
inline __m512 widen_low(__m512i x) { return widen(_mm512_castsi512_si256(x)); }
inline __m512 widen_high(__m512i x) { return widen(_mm512_extracti64x4_epi64(x, 1)); }
inline __m512 maximum(__m512 x) { return _mm512_max_ps(_mm512_setzero_ps(), x); }  // in this order NaN stays NaN
inline void stream(bf16* p, __m512i x) { _mm512_stream_si512((__m512i*)p, x); }
inline void write(bf16* p, __m512i x) { _mm512_storeu_si512(p, x); }

// A thread's memory, reused between calls.
class Scratch {
 public:
  template <class T>
  T* take(int64_t count) {
    if (buffers().size() == next_) buffers().emplace_back();
    Buffer& buffer = buffers()[next_++];
    const size_t bytes = count * sizeof(T) + 64;
    if (buffer.bytes < bytes) {
      buffer.memory.reset();  // freed before the larger one is allocated
      buffer.memory.reset(new char[bytes]);
      buffer.bytes = bytes;
    }
    return (T*)round_up((int64_t)buffer.memory.get(), 64);
  }

 private:
  struct Buffer {
    std::unique_ptr<char[]> memory;
    size_t bytes = 0;
  };
  static std::vector<Buffer>& buffers() {
    thread_local std::vector<Buffer> all;
    return all;
  }
  size_t next_ = 0;
};

// A packed matrix (k, n) has panels (k / 2, columns, 2) of 64 columns, or of 32 if `narrow` or 64 does not divide n.

// Packs the transpose of w (n, k).
template <bool narrow = false>
inline void pack_transposed(const bf16* w, int64_t n, int64_t k, bf16* out) {
  const int64_t columns = panel<narrow>(n);
  for (int64_t j = 0; j < n; j += 16)
    for (int64_t i = 0; i < k; i += 32)
      at::vec::transpose_mxn<float>((const float*)(w + j * k + i), k / 2,
                                    (float*)(out + j / columns * columns * k) + i / 2 * columns + j % columns, columns,
                                    16, 16);
}

// Packs w (rows, n) into the matrix, starting at row `offset`; `far` bypasses the caches, for later use.
template <bool far, bool narrow = false>
inline void pack_rows(const bf16* w, int64_t rows, int64_t n, bf16* out, int64_t k, int64_t offset) {
  const int64_t columns = panel<narrow>(n);
  for (int64_t i = 0; i < rows; i += 2)
    for (int64_t j = 0; j < n; j += 16) {
      const __m512i even = _mm512_cvtepu16_epi32(read(w + i * n + j));
      const __m512i odd = _mm512_cvtepu16_epi32(read(w + (i + 1) * n + j));
      const __m512i pairs = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
      bf16* to = out + j / columns * columns * k + (offset + i) * columns + j % columns * 2;
      far ? stream(to, pairs) : write(to, pairs);
    }
}

template <bool far, bool narrow = false>
inline void pack_rows(const bf16* w, int64_t k, int64_t n, bf16* out) {
  pack_rows<far, narrow>(w, k, n, out, k, 0);
}

// out (columns, rows) = the transpose of x (rows, columns), with rows `stride` and `from` apart; `far` as above.
template <bool far>
inline void transpose(const bf16* x, int64_t rows, int64_t columns, bf16* out, int64_t stride, int64_t from) {
  alignas(64) float tile[16 * 16], turned[16 * 16];
  for (int64_t r = 0; r < rows; r += 32)
    for (int64_t c = 0; c < columns; c += 16) {
      for (int64_t i = 0; i < 16; ++i) {
        const bf16* pair = x + (r + 2 * i) * from + c;
        const __m512i even = _mm512_cvtepu16_epi32(read(pair)), odd = _mm512_cvtepu16_epi32(read(pair + from));
        _mm512_store_si512(tile + 16 * i, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
      }
      at::vec::transpose_mxn<float>(tile, 16, turned, 16, 16, 16);
      for (int64_t i = 0; i < 16; ++i) {
        const __m512i row = _mm512_load_si512(turned + 16 * i);
        far ? stream(out + (c + i) * stride + r, row) : write(out + (c + i) * stride + r, row);
      }
    }
}

template <bool far>
inline void transpose(const bf16* x, int64_t rows, int64_t columns, bf16* out) {
  transpose<far>(x, rows, columns, out, rows, columns);
}

// Computes each part c (rows, columns) of a (m, k) · b and calls then(c, first row, rows, first column, columns);
// `lower`: only from the diagonal down, with a narrow b, so that little above the diagonal is computed.
template <bool lower = false, class Then>
inline void multiply(int64_t m, int64_t n, int64_t k, const bf16* a, const bf16* b, Then&& then) {
  alignas(64) float c[HEIGHT * 64];
  const int64_t columns = panel<lower>(n);
  for (int64_t j = 0; j < n; j += columns)
    for (int64_t r = lower ? j : 0; r < m; r += HEIGHT) {
      const int64_t rows = std::min(HEIGHT, m - r);
      for (int64_t i = 0; i < k; i += DEPTH)
        at::native::cpublas::brgemm(rows, columns, std::min(DEPTH, k - i), k, columns, columns, i > 0, a + r * k + i,
                                    b + j * k + i * columns, c);
      then(c, r, rows, j, columns);
    }
}

// c, in panels (m, columns), = a (m, k) · b, added to c if `add`.
inline void accumulate(int64_t m, int64_t n, int64_t k, int64_t columns, const bf16* a, const bf16* b, float* c,
                       bool add) {
  for (int64_t j = 0; j < n; j += columns)
    for (int64_t r = 0; r < m; r += HEIGHT)
      at::native::cpublas::brgemm(std::min(HEIGHT, m - r), columns, k, k, columns, columns, add, a + r * k, b + j * k,
                                  c + j * m + r * columns);
}

// Copies the result of `accumulate` to out (m, n), its rows `stride` apart.
inline void unpack(const float* c, int64_t m, int64_t n, int64_t columns, bf16* out, int64_t stride) {
  for (int64_t j = 0; j < n; j += columns)
    for (int64_t i = 0; i < m; ++i, c += columns)
      for (int64_t l = 0; l < columns; l += 32)
        stream(out + i * stride + j + l, round(_mm512_loadu_ps(c + l), _mm512_loadu_ps(c + l + 16)));
}

// Finishes a thread's work: makes its streamed stores visible to others and releases the processor's tiles.
inline void finish() {
  _mm_sfence();
  at::native::cpublas::brgemm_release();
}

}  // namespace
