// Stands in, in tests, for what a processor with AVX-512 but without AVX512_BF16 lacks: rounding to bfloat16, and the
// block products of oneDNN. The compiler includes it before our sources.
//
// Rounding is to nearest, ties to even, as the instructions do it, but keeps denormal numbers, which they flush to zero.
// Products of bfloat16 are exact in float32; their sums are rounded in float32 after each, in ascending order of k: a
// relative error of at most k · 2⁻²⁴ of Σ |a b|, as of any order of summation.

#pragma once

#include <ATen/native/CPUBlas.h>
#include <immintrin.h>

namespace emulated {

inline __m256i round(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, quiet), 16));
}

inline __m512i round_both(__m512 high, __m512 low) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(round(low)), round(high), 1);
}

}  // namespace emulated

namespace at::native::cpublas {

// c (m, n) = a (m, k) · b, added to c if `add`; b (k / 2, n, 2); n is a multiple of 16, k of 2.
inline void emulated_brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                            const at::BFloat16* a, const at::BFloat16* b, float* c) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; j += 16) {
      __m512 sum = add ? _mm512_loadu_ps(c + i * ldc + j) : _mm512_setzero_ps();
      for (int64_t l = 0; l < k; l += 2) {
        const __m512i pair = _mm512_loadu_si512(b + l * ldb + 2 * j);
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
        const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(0xffff0000)));
        sum = _mm512_fmadd_ps(_mm512_set1_ps(float(a[i * lda + l])), even, sum);
        sum = _mm512_fmadd_ps(_mm512_set1_ps(float(a[i * lda + l + 1])), odd, sum);
      }
      _mm512_storeu_ps(c + i * ldc + j, sum);
    }
}

}  // namespace at::native::cpublas

#define _mm512_cvtneps_pbh emulated::round
#define _mm512_cvtne2ps_pbh emulated::round_both
#define brgemm emulated_brgemm
