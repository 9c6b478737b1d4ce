// Matrices in a GGUF file's blocks as the products of `block_product.cpp` read them.
//
// `gguf_packing.py` documents the functions. The formats are ggml's; `models/weights/gguf_blocks.py` describes them.

#include "packed_blocks.h"

static inline float from_half(const uint8_t *x) {
    uint16_t bits;
    std::memcpy(&bits, x, 2);
    return _cvtsh_ss(bits);
}
static inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// One block of a file: SIZE numbers in BYTES bytes. `read` writes its integers, and its scales and minima in float16.

struct Q4_0 {
    typedef Block4 Block;
    static const int SIZE = 32, BYTES = 18;
    static void read(const uint8_t *in, uint8_t *q, uint16_t *scale, uint16_t *minimum) {
        std::memcpy(scale, in, 2);
        *minimum = to_half(-8 * from_half(in));
        for (int i = 0; i < 16; i++) q[i] = in[2 + i] & 15, q[16 + i] = in[2 + i] >> 4;
    }
};

struct Q4_1 {
    typedef Block4 Block;
    static const int SIZE = 32, BYTES = 20;
    static void read(const uint8_t *in, uint8_t *q, uint16_t *scale, uint16_t *minimum) {
        std::memcpy(scale, in, 2);
        std::memcpy(minimum, in + 2, 2);
        for (int i = 0; i < 16; i++) q[i] = in[4 + i] & 15, q[16 + i] = in[4 + i] >> 4;
    }
};

// Writes 32 numbers of five bits: `high` has the fifth ones.
static inline void read_five(const uint8_t *high, const uint8_t *low, int zero, uint8_t *q) {
    uint32_t bits;
    std::memcpy(&bits, high, 4);
    for (int i = 0; i < 16; i++) {
        q[i] = uint8_t(((low[i] & 15) | (bits >> i & 1) << 4) - zero);
        q[16 + i] = uint8_t((low[i] >> 4 | (bits >> (16 + i) & 1) << 4) - zero);
    }
}

struct Q5_0 {
    typedef Block8<1> Block;
    static const int SIZE = 32, BYTES = 22;
    static void read(const uint8_t *in, uint8_t *q, uint16_t *scale, uint16_t *) {
        std::memcpy(scale, in, 2);
        read_five(in + 2, in + 6, 16, q);
    }
};

struct Q5_1 {
    typedef Block8WithMinimum Block;
    static const int SIZE = 32, BYTES = 24;
    static void read(const uint8_t *in, uint8_t *q, uint16_t *scale, uint16_t *minimum) {
        std::memcpy(scale, in, 2);
        std::memcpy(minimum, in + 2, 2);
        read_five(in + 4, in + 8, 0, q);
    }
};

struct Q8_0 {
    typedef Block8<1> Block;
    static const int SIZE = 32, BYTES = 34;
    static void read(const uint8_t *in, uint8_t *q, uint16_t *scale, uint16_t *) {
        std::memcpy(scale, in, 2);
        std::memcpy(q, in + 2, 32);
    }
};

// Writes the eight scales and minima of K formats from their first 16 bytes.
static inline void read_k_scales(const uint8_t *in, uint16_t *scale, uint16_t *minimum) {
    const uint8_t *low = in + 4, *middle = in + 8, *mixed = in + 12;
    float d = from_half(in), m = -from_half(in + 2);
    for (int i = 0; i < 4; i++) {
        scale[i] = to_half(d * (low[i] & 63));
        scale[4 + i] = to_half(d * ((mixed[i] & 15) | (low[i] >> 2 & 48)));
        minimum[i] = to_half(m * (middle[i] & 63));
        minimum[4 + i] = to_half(m * (mixed[i] >> 4 | (middle[i] >> 2 & 48)));
    }
}

struct Q4_K {
    typedef Block4 Block;
    static const int SIZE = 256, BYTES = 144;
    static void read(const uint8_t *in, uint8_t *q, uint16_t *scale, uint16_t *minimum) {
        read_k_scales(in, scale, minimum);
        for (int two = 0; two < 4; two++)
            for (int i = 0; i < 32; i++) {
                uint8_t byte = in[16 + 32 * two + i];
                q[64 * two + i] = byte & 15;
                q[64 * two + 32 + i] = byte >> 4;
            }
    }
};

struct Q5_K {
    typedef Block8WithMinimum Block;
    static const int SIZE = 256, BYTES = 176;
    static void read(const uint8_t *in, uint8_t *q, uint16_t *scale, uint16_t *minimum) {
        read_k_scales(in, scale, minimum);
        for (int two = 0; two < 4; two++)
            for (int i = 0; i < 32; i++) {
                uint8_t byte = in[48 + 32 * two + i], high = in[16 + i];
                q[64 * two + i] = (byte & 15) | (high >> 2 * two & 1) << 4;
                q[64 * two + 32 + i] = byte >> 4 | (high >> (2 * two + 1) & 1) << 4;
            }
    }
};

struct Q6_K {
    typedef Block8<2> Block;
    static const int SIZE = 256, BYTES = 210;
    static void read(const uint8_t *in, uint8_t *q, uint16_t *scale, uint16_t *) {
        float d = from_half(in + 208);
        for (int i = 0; i < 16; i++) scale[i] = to_half(d * int8_t(in[192 + i]));
        for (int half = 0; half < 2; half++)
            for (int part = 0; part < 4; part++)
                for (int i = 0; i < 32; i++) {
                    uint8_t low = in[64 * half + 32 * (part & 1) + i] >> 4 * (part >> 1) & 15;
                    uint8_t high = in[128 + 32 * half + i] >> 2 * part & 3;
                    q[128 * half + 32 * part + i] = uint8_t((low | high << 4) - 32);
                }
    }
};

struct Packing {
    const uint8_t *data;
    int64_t outputs, inputs;
    void *out;
};

template <class Source>
static void share_packing(void *argument) {
    typedef typename Source::Block Block;
    const int blocks = Source::SIZE / BLOCK;  // of those that products read, in one of the file
    const auto &p = *static_cast<const Packing *>(argument);
    int64_t count = p.inputs / Source::SIZE;
    Share outputs(p.outputs, LANES);
    for (int64_t n = outputs.from; n < outputs.to; n++)
        for (int64_t at = 0; at < count; at++) {
            uint8_t q[Source::SIZE];
            uint16_t scale[blocks * Block::GROUPS], minimum[blocks];
            Source::read(p.data + (n * count + at) * Source::BYTES, q, scale, minimum);
            for (int b = 0; b < blocks; b++) {
                Block &to = static_cast<Block *>(p.out)[(n / LANES * count + at) * blocks + b];
                int lane = n % LANES;
                for (int g = 0; g < Block::GROUPS; g++) to.scale[g][lane] = scale[b * Block::GROUPS + g];
                to.put_minimum(lane, minimum[b]);
#pragma GCC unroll 1
                for (int i = 0; i < BLOCK / 8; i++)
                    for (int j = 0; j < 2; j++) to.put(lane, i, j, q + b * BLOCK + 8 * i + j);
            }
        }
}

#define PACK(Source)                                                                                              \
    void pack_##Source(const uint8_t *data, int64_t outputs, int64_t inputs, void *out, int threads) {            \
        Packing p{data, outputs, inputs, out};                                                                    \
        GOMP_parallel(share_packing<struct Source>, &p, threads, 0);                                              \
    }

extern "C" {
PACK(Q4_0)
PACK(Q4_1)
PACK(Q5_0)
PACK(Q5_1)
PACK(Q8_0)
PACK(Q4_K)
PACK(Q5_K)
PACK(Q6_K)
}
