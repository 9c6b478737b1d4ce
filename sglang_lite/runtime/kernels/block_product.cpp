// Products with matrices quantised in blocks of 32 along their rows, of 4 bits (value = scale * q + minimum) or 8 bits
// (scale * q, with or without a minimum, or with a scale for each half).
//
// Activations are rounded to 16-bit integers, with a scale for each 32 of a row, and a block's product is a sum of
// integers. Blocks are read once for several rows, and are stored as registers need them: LANES neighbouring outputs,
// two inputs of each, which one instruction multiplies and adds. `block_product.py` documents the functions.

#include <cmath>

#include "bf16.h"
#include "packed_blocks.h"

static const int PREFETCHED_BYTES = 1024;  // bytes to prefetch ahead

template <class A>
static void round(const void *x, int64_t from, int64_t to, Integers out) {
    for (int64_t block = from; block < to; block++) {
        const A *of = static_cast<const A *>(x) + block * BLOCK;
        int16_t *numbers = out.numbers + block * BLOCK;
        float in[BLOCK], highest = 0, sum = 0;
        for (int i = 0; i < BLOCK; i++) in[i] = of[i];
        for (int i = 0; i < BLOCK; i++) highest = std::fabs(in[i]) > highest ? std::fabs(in[i]) : highest;
        for (int i = 0; i < BLOCK; i++) sum += in[i];
        float factor = highest > 0 ? 32767 / highest : 0;
        for (int i = 0; i < BLOCK; i++) numbers[i] = int16_t(int32_t(in[i] * factor + (in[i] < 0 ? -0.5f : 0.5f)));
        out.scale[block] = highest / 32767;
        out.sum[block] = sum;
    }
}

// Multiplies R rows by S * LANES outputs.
template <int R, int S, class Block, class A>
static inline void multiply(const Matrix &matrix, Integers rows, int64_t row, void *out, int64_t apart, int64_t group) {
    int64_t inputs = matrix.inputs, count = inputs / BLOCK;
    const Block *blocks = static_cast<const Block *>(matrix.blocks) + group * count;
    const int16_t *x = rows.numbers + row * inputs;
    const float *scale = rows.scale + row * count, *sum = rows.sum + row * count;
    Floats sums[R][S];
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) sums[r][s] = no_floats();
    for (int b = 0; b < count; b++, x += BLOCK) {
        const Block *w = blocks + b;  // neighbouring groups are `count` blocks apart
        // At the end, the next groups are prefetched.
        int64_t last = (count - b) * sizeof(Block) > PREFETCHED_BYTES ? 0 : (S - 1) * count;
        for (int s = 0; s < S; s++) {
            for (size_t at = 0; at < sizeof(Block); at += 64)  // hardware prefetchers stop at 4 KB boundaries
                __builtin_prefetch(reinterpret_cast<const char *>(w + s * count + last) + PREFETCHED_BYTES + at);
            Floats least = w[s * count].least();
            for (int r = 0; r < R; r++) sums[r][s] = fma(least, all(sum[r * count + b]), sums[r][s]);
        }
#pragma GCC unroll 1
        for (int g = 0; g < Block::GROUPS; g++) {
            Ints products[R][S];
            for (int r = 0; r < R; r++)
                for (int s = 0; s < S; s++) products[r][s] = no_ints();
#pragma GCC unroll 1
            for (int i = BLOCK / 8 / Block::GROUPS * g; i < BLOCK / 8 / Block::GROUPS * (g + 1); i++) {
#pragma GCC unroll 4
                for (int part = 0; part < 4; part++) {
                    Ints pairs[S];
                    for (int s = 0; s < S; s++) pairs[s] = w[s * count].pairs(i, part);
                    for (int r = 0; r < R; r++) {
                        Ints of_row = spread(x + r * inputs + 8 * i + 2 * part);
                        for (int s = 0; s < S; s++) products[r][s] = add_pairs(products[r][s], pairs[s], of_row);
                    }
                }
            }
            for (int s = 0; s < S; s++) {
                Floats factor = halves(w[s * count].scale[g]);
                for (int r = 0; r < R; r++)
                    sums[r][s] = fma(as_floats(products[r][s]) * factor, all(scale[r * count + b]), sums[r][s]);
            }
        }
    }
    const A *bias = matrix.bias ? static_cast<const A *>(matrix.bias) + group * LANES : nullptr;
    for (int r = 0; r < R; r++) {
        float y[S * LANES];
        for (int s = 0; s < S; s++) store(y + s * LANES, sums[r][s]);
        A *to = static_cast<A *>(out) + (row + r) * apart + group * LANES;
        for (int i = 0; i < S * LANES; i++) to[i] = A(bias ? y[i] + float(bias[i]) : y[i]);
    }
}

template <int S, class Block, class A>
static void multiply_rows(const Matrix &matrix, Integers x, int64_t rows, void *out, int64_t apart, int64_t group) {
    int64_t row = 0;
    for (; row + Block::ROWS <= rows; row += Block::ROWS)
        multiply<Block::ROWS, S, Block, A>(matrix, x, row, out, apart, group);
    for (; row + 4 <= rows; row += 4) multiply<4, S, Block, A>(matrix, x, row, out, apart, group);
    for (; row + 2 <= rows; row += 2) multiply<2, S, Block, A>(matrix, x, row, out, apart, group);
    for (; row < rows; row++) multiply<1, S, Block, A>(matrix, x, row, out, apart, group);
}

template <class Block, class A>
static void multiply_all(const Matrix &matrix, Integers x, int64_t rows, void *out, int64_t apart, int64_t from,
                         int64_t to) {
    const int S = Block::SIDE_BY_SIDE;
    int64_t group = from / LANES;
    if (rows >= 4)  // fewer rows are bound by memory, which is read fastest in one run of blocks
        for (; group + S <= to / LANES; group += S) multiply_rows<S, Block, A>(matrix, x, rows, out, apart, group);
    for (; group < to / LANES; group++) multiply_rows<1, Block, A>(matrix, x, rows, out, apart, group);
}

struct Product {
    const Matrix &matrix;
    const void *x;
    void *out;
    int64_t rows;
    Integers integers;
};

static void share_rounding(void *data) {
    const auto &p = *static_cast<const Product *>(data);
    Share blocks(p.rows * p.matrix.inputs / BLOCK);
    p.matrix.round(p.x, blocks.from, blocks.to, p.integers);
}

static void share_outputs(void *data) {
    const auto &p = *static_cast<const Product *>(data);
    Share outputs(p.matrix.outputs, LANES);
    p.matrix.multiply(p.matrix, p.integers, p.rows, p.out, p.matrix.outputs, outputs.from, outputs.to);
}

template <class Block>
static void pack(const uint8_t *q, const uint16_t *scale, const uint16_t *minimum, int64_t outputs, int inputs,
                 Block *out) {
    int count = inputs / BLOCK;
    for (int64_t n = 0; n < outputs; n++)
        for (int b = 0; b < count; b++) {
            Block &to = out[n / LANES * count + b];
            int lane = n % LANES;
            for (int g = 0; g < Block::GROUPS; g++) to.scale[g][lane] = scale[(n * count + b) * Block::GROUPS + g];
            if (minimum) to.put_minimum(lane, minimum[n * count + b]);
#pragma GCC unroll 1
            for (int i = 0; i < BLOCK / 8; i++)
                for (int j = 0; j < 2; j++) to.put(lane, i, j, q + n * inputs + b * BLOCK + 8 * i + j);
        }
}

template <class Q>
static void decode(const Q *q, const float *scale, const float *minimum, int64_t groups, int size, bf16 *out) {
    for (int64_t group = 0; group < groups; group++, q += size, out += size) {
        float by = scale[group], least = minimum ? minimum[group] : 0;
        for (int i = 0; i < size; i++) out[i] = bf16(by * q[i] + least);
    }
}

#define OF(Block, name)                                                                                              \
    void pack_##name(const uint8_t *q, const uint16_t *scale, const uint16_t *minimum, int64_t outputs, int inputs,  \
                     Block *out) {                                                                                   \
        pack(q, scale, minimum, outputs, inputs, out);                                                               \
    }                                                                                                                \
    void multiply_##name##_float32(const Matrix &matrix, Integers x, int64_t rows, void *out, int64_t apart,         \
                                   int64_t from, int64_t to) {                                                       \
        multiply_all<Block, float>(matrix, x, rows, out, apart, from, to);                                           \
    }                                                                                                                \
    void multiply_##name##_bfloat16(const Matrix &matrix, Integers x, int64_t rows, void *out, int64_t apart,        \
                                    int64_t from, int64_t to) {                                                      \
        multiply_all<Block, bf16>(matrix, x, rows, out, apart, from, to);                                            \
    }

extern "C" {
OF(Block4, 4)
OF(Block8<1>, 8)
OF(Block8<2>, 8_halves)
OF(Block8WithMinimum, 8_minimum)

void decode_uint8(const uint8_t *q, const float *scale, const float *minimum, int64_t groups, int size, bf16 *out) {
    decode(q, scale, minimum, groups, size, out);
}
void decode_int8(const int8_t *q, const float *scale, const float *minimum, int64_t groups, int size, bf16 *out) {
    decode(q, scale, minimum, groups, size, out);
}

void round_float32(const void *x, int64_t from, int64_t to, Integers out) { round<float>(x, from, to, out); }
void round_bfloat16(const void *x, int64_t from, int64_t to, Integers out) { round<bf16>(x, from, to, out); }

void product(const Matrix *matrix, const void *x, void *out, int64_t rows, float *room, int threads) {
    int64_t count = rows * matrix->inputs / BLOCK;
    Product p{*matrix, x, out, rows, {reinterpret_cast<int16_t *>(room + 2 * count), room, room + count}};
    if (rows < 8)
        matrix->round(x, 0, count, p.integers);
    else
        GOMP_parallel(share_rounding, &p, threads, 0);
    GOMP_parallel(share_outputs, &p, threads, 0);
}
}
