// Quantised blocks of 32 along a matrix's rows as products read them: LANES neighbouring outputs, two inputs of each, which
// one instruction multiplies and adds. Also the processor's operations on vectors of such numbers.

#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

#include "block_product.h"

// The processor's operations on vectors of LANES 32-bit numbers, or twice as many 16-bit ones.

#if defined(__AVX512BW__)
static const int LANES = 16;
typedef __m512i Ints;
typedef __m512 Floats;
static inline Ints load(const void *x) { return _mm512_loadu_si512(x); }
static inline Ints spread(const int16_t *pair) {
    int32_t x;
    std::memcpy(&x, pair, 4);
    return _mm512_set1_epi32(x);
}
static inline Ints nibbles(Ints x, int part) {
    return _mm512_and_si512(_mm512_srli_epi16(x, 4 * part), _mm512_set1_epi16(15));
}
static inline Ints widened(const int8_t *x) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)x)); }
static inline Ints add_pairs(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
static inline Ints no_ints() { return _mm512_setzero_si512(); }
static inline Floats no_floats() { return _mm512_setzero_ps(); }
static inline Floats as_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
static inline Floats halves(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }
static inline Floats all(float x) { return _mm512_set1_ps(x); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline void store(float *out, Floats x) { _mm512_storeu_ps(out, x); }
#else
static const int LANES = 8;
typedef __m256i Ints;
typedef __m256 Floats;
static inline Ints load(const void *x) { return _mm256_loadu_si256((const __m256i *)x); }
static inline Ints spread(const int16_t *pair) {
    int32_t x;
    std::memcpy(&x, pair, 4);
    return _mm256_set1_epi32(x);
}
static inline Ints nibbles(Ints x, int part) {
    return _mm256_and_si256(_mm256_srli_epi16(x, 4 * part), _mm256_set1_epi16(15));
}
static inline Ints widened(const int8_t *x) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)x)); }
static inline Ints add_pairs(Ints sum, Ints a, Ints b) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    asm("" : "+x"(sum));  // adds at once: GCC would first compute all products and keep them in memory
    return sum;
}
static inline Ints no_ints() { return _mm256_setzero_si256(); }
static inline Floats no_floats() { return _mm256_setzero_ps(); }
static inline Floats as_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
static inline Floats halves(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }
static inline Floats all(float x) { return _mm256_set1_ps(x); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
static inline void store(float *out, Floats x) { _mm256_storeu_ps(out, x); }
#endif

// Block of LANES outputs. Inputs 8 i + 2 part and 8 i + 2 part + 1 are the pair `part` (0 … 3) of group i.
struct Block4 {
    static const int ROWS = LANES / 2, SIDE_BY_SIDE = 2;  // computed at once: as many sums as registers hold
    static const int GROUPS = 1;                          // groups of inputs that share a scale
    uint16_t scale[GROUPS][LANES], minimum[LANES];        // float16
    uint16_t q[BLOCK / 8][LANES][2];                      // four parts of 4 bits
    Ints pairs(int i, int part) const { return nibbles(load(q[i]), part); }
    Floats least() const { return halves(minimum); }
    void put(int lane, int i, int j, const uint8_t *x) { q[i][lane][j] = x[0] | x[2] << 4 | x[4] << 8 | x[6] << 12; }
    void put_minimum(int lane, uint16_t value) { minimum[lane] = value; }
};

template <int N>
struct Block8 {
    static const int ROWS = 8, SIDE_BY_SIDE = 1;
    static const int GROUPS = N;
    uint16_t scale[GROUPS][LANES];
    int8_t q[BLOCK / 8][4][LANES][2];
    Ints pairs(int i, int part) const { return widened(q[i][part][0]); }
    Floats least() const { return no_floats(); }
    void put(int lane, int i, int j, const uint8_t *x) {
        for (int part = 0; part < 4; part++) q[i][part][lane][j] = int8_t(x[2 * part]);
    }
    void put_minimum(int, uint16_t) {}
};

struct Block8WithMinimum : Block8<1> {
    uint16_t minimum[LANES];
    Floats least() const { return halves(minimum); }
    void put_minimum(int lane, uint16_t value) { minimum[lane] = value; }
};
