// Products of many rows of bfloat16 with matrices in quantised blocks, for processors with AVX512_BF16; without it, the
// library is empty.
//
// A thread decodes a tile of outputs to bfloat16, which stays in its cache while it multiplies all rows: pairs of inputs,
// as one instruction multiplies and adds them. `block_product_many.py` documents the functions.

#include "packed_blocks.h"

#if defined(__AVX512BF16__)

#include "bf16.h"

static const int ROWS = 6, VECTORS = 4;        // computed together: as many sums as registers hold
static const int64_t TILE = VECTORS * LANES;   // outputs
static const int64_t MAX_INPUTS = 1536;        // that are decoded together: a fifth of a second-level cache of 1 MB
static const int64_t MAX_ROWS = 768;           // whose sums stay in that cache
static const int64_t LEAST_ROWS = 96;          // that are worth decoding a tile once more, for another thread
static const int PREFETCHED_BLOCKS = 2;

struct Product {
    const void *blocks;  // [outputs / LANES, inputs / BLOCK]
    const bf16 *bias;    // [outputs] or null
    int64_t outputs, inputs;
    const bf16 *x;  // [rows, inputs]
    bf16 *out;      // [rows, outputs]; rows are `apart` elements apart
    int64_t rows, apart;
};

// Some inputs of S * LANES outputs as bfloat16.
template <int S>
struct Decoded {
    int64_t output, from, to;  // first output; range of inputs
    const Ints *pairs;         // [(to - from) / 2, S]
};

static inline Ints first_halves(Ints x) { return _mm512_srai_epi32(_mm512_slli_epi32(x, 16), 16); }
static inline Ints second_halves(Ints x) { return _mm512_srai_epi32(x, 16); }
static inline Floats as_floats(const bf16 *x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}
static inline Ints as_bf16_pairs(Floats first, Floats second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Decodes `count` blocks of each of S * LANES outputs, of which groups of LANES are `apart` blocks apart.
template <int S, class Block>
static void decode(const Block *blocks, int64_t apart, int64_t count, Ints *out) {
    for (int64_t b = 0; b < count; b++, out += BLOCK / 2 * S)
        for (int s = 0; s < S; s++) {
            const Block &block = blocks[s * apart + b];
            for (size_t at = 0; at < sizeof(Block); at += 64)  // hardware prefetchers stop at 4 KB boundaries
                __builtin_prefetch(reinterpret_cast<const char *>(&block + PREFETCHED_BLOCKS) + at);
            Floats least = block.least();
            for (int i = 0; i < BLOCK / 8; i++) {
                Floats scale = halves(block.scale[i * Block::GROUPS / (BLOCK / 8)]);
                for (int part = 0; part < 4; part++) {
                    Ints both = block.pairs(i, part);
                    Floats first = fma(scale, as_floats(first_halves(both)), least);
                    Floats second = fma(scale, as_floats(second_halves(both)), least);
                    out[(4 * i + part) * S + s] = as_bf16_pairs(first, second);
                }
            }
        }
}

// Multiplies R rows. `kept` has their sums over the inputs before, and gets those over more until the last.
template <int R, int S>
static void multiply(const Product &p, const Decoded<S> &w, int64_t row, Floats *kept) {
    const bf16 *x = p.x + row * p.inputs + w.from;
    const Ints *pairs = w.pairs, *end = pairs + (w.to - w.from) / 2 * S;
    Floats sums[R][S];
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) sums[r][s] = w.from ? kept[r * S + s] : no_floats();
    for (; pairs < end; pairs += S, x += 2)
        for (int r = 0; r < R; r++) {
            auto of_row = (__m512bh)spread(reinterpret_cast<const int16_t *>(x + r * p.inputs));
            for (int s = 0; s < S; s++) sums[r][s] = _mm512_dpbf16_ps(sums[r][s], of_row, (__m512bh)pairs[s]);
        }
    if (w.to < p.inputs) {
        for (int r = 0; r < R; r++)
            for (int s = 0; s < S; s++) kept[r * S + s] = sums[r][s];
        return;
    }
    for (int s = 0; s < S; s++) {
        int64_t output = w.output + s * LANES;
        Floats bias = p.bias ? as_floats(p.bias + output) : no_floats();
        for (int r = 0; r < R; r++) {
            auto y = (__m256i)_mm512_cvtneps_pbh(sums[r][s] + bias);
            _mm256_storeu_si256((__m256i *)(p.out + (row + r) * p.apart + output), y);
        }
    }
}

// Multiplies fewer than ROWS rows.
template <int R, int S>
static void multiply_rest(const Product &p, const Decoded<S> &w, int64_t row, int64_t rows, Floats *kept) {
    if (rows == R) return multiply<R, S>(p, w, row, kept);
    if constexpr (R > 1) multiply_rest<R - 1, S>(p, w, row, rows, kept);
}

static thread_local Ints decoded[MAX_INPUTS / 2 * VECTORS];
static thread_local Floats kept[MAX_ROWS * VECTORS];

template <int S, class Block>
static void multiply_tile(const Product &p, int64_t output, int64_t first, int64_t end) {
    int64_t count = p.inputs / BLOCK, parts = (p.inputs + MAX_INPUTS - 1) / MAX_INPUTS;
    const Block *blocks = static_cast<const Block *>(p.blocks) + output / LANES * count;
    for (int64_t part = 0; part < parts; part++) {
        int64_t from = count * part / parts, to = count * (part + 1) / parts;
        decode<S>(blocks + from, count, to - from, decoded);
        Decoded<S> w{output, from * BLOCK, to * BLOCK, decoded};
        int64_t row = first;
        for (; row + ROWS <= end; row += ROWS) multiply<ROWS, S>(p, w, row, kept + (row - first) * S);
        if (row < end) multiply_rest<ROWS - 1, S>(p, w, row, end - row, kept + (row - first) * S);
    }
}

template <int S, class Block>
static void multiply_last_tile(const Product &p, int64_t output, int64_t first, int64_t end) {
    if (p.outputs - output >= S * LANES) return multiply_tile<S, Block>(p, output, first, end);
    if constexpr (S > 1) multiply_last_tile<S - 1, Block>(p, output, first, end);
}

// Tiles, each for one of `panels` ranges of rows.
struct Tasks {
    const Product &product;
    int64_t tiles, panels;
    int64_t taken;  // a thread whose core has other work takes fewer
};

template <class Block>
static void share_tasks(void *data) {
    auto &tasks = *static_cast<Tasks *>(data);
    const Product &p = tasks.product;
    for (;;) {
        int64_t task = __atomic_fetch_add(&tasks.taken, 1, __ATOMIC_RELAXED);
        if (task >= tasks.tiles * tasks.panels) return;
        int64_t panel = task / tasks.tiles, output = task % tasks.tiles * TILE;
        int64_t first = p.rows * panel / tasks.panels, end = p.rows * (panel + 1) / tasks.panels;
        multiply_last_tile<VECTORS, Block>(p, output, first, end);
    }
}

template <class Block>
static void multiply_all(const Product &p, int threads) {
    int64_t tiles = (p.outputs + TILE - 1) / TILE;
    int64_t wanted = (threads + tiles - 1) / tiles, worth = p.rows / LEAST_ROWS, least = (p.rows + MAX_ROWS - 1) / MAX_ROWS;
    int64_t panels = wanted < worth ? wanted : worth;
    Tasks tasks{p, tiles, panels > least ? panels : least, 0};
    GOMP_parallel(share_tasks<Block>, &tasks, threads, 0);
}

extern "C" {
void product_4(const Product *p, int threads) { multiply_all<Block4>(*p, threads); }
void product_8(const Product *p, int threads) { multiply_all<Block8<1>>(*p, threads); }
void product_8_halves(const Product *p, int threads) { multiply_all<Block8<2>>(*p, threads); }
void product_8_minimum(const Product *p, int threads) { multiply_all<Block8WithMinimum>(*p, threads); }
}

#endif
