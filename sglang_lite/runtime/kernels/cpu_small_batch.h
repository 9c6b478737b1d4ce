// Small operators for few tokens between the products of a decoder, each one pass over data in the CPU's cache.
//
// Sums are float32. A is the type of activations, C that of keys and values: float or bf16.

#pragma once

#include <cmath>

#include "bf16.h"

static const int PREFETCHED_ITERATIONS = 8;  // iterations to prefetch ahead
static const int NEAR = 32;  // tokens whose keys or values stay in the cache while several heads read them

// Floats in a vector register.
#if defined(__AVX512F__)
static const int LANES = 16;
#else
static const int LANES = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));

static inline Floats load(const float *x) {
    Floats y;
    std::memcpy(&y, x, sizeof y);
    return y;
}

// e^x, with a relative error of about 1e-7 (Cephes' expf). Compilers vectorise loops over this function.
static inline float exponential(float x) {
    x = x < -87 ? -87 : x > 88 ? 88 : x;
    float k = std::floor(x * 1.44269504f + 0.5f);
    float r = std::fma(k, 2.12194440e-4f, std::fma(k, -0.693359375f, x));
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1;
    uint32_t power = uint32_t(int32_t(k) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return y * scale;
}

template <class A>
static void rms(const A *x, const A *weight, A *out, int size, float eps) {
    float sum = 0;
    for (int i = 0; i < size; i++) sum += float(x[i]) * float(x[i]);
    float factor = 1 / std::sqrt(sum / size + eps);
    for (int i = 0; i < size; i++) out[i] = A(float(x[i]) * factor * float(weight[i]));
}

template <class A>
static void add_norm(A *x, const A *added, const A *weight, A *out, int tokens, int size, float eps) {
    if (added)
        for (int64_t i = 0; i < int64_t(tokens) * size; i++) x[i] = A(float(x[i]) + float(added[i]));
    for (int64_t at = 0; at < int64_t(tokens) * size; at += size) rms(x + at, weight, out + at, size, eps);
}

// Keys and values of a layer in the cache, [kv_heads, slots, size] each.
template <class C>
struct Stored {
    C *keys, *values;
    int64_t slots;
};

// Heads of a layer's attention: number of query heads and of KV heads, and elements of a head.
struct Heads {
    int queries, kv, size;
};

// Rotates a token's heads [from, to), queries first, then keys; stores keys and their values in a token slot.
template <class A, class C>
static void rotate_heads(A *qkv, const A *q_norm, const A *k_norm, float eps, const A *cos, const A *sin, int rope_dim,
                       Stored<C> stored, int64_t slot, Heads heads, int from, int to) {
    for (int head = from; head < to; head++) {
        A *x = qkv + int64_t(head) * heads.size;
        const A *norm = head < heads.queries ? q_norm : k_norm;
        if (norm) rms(x, norm, x, heads.size, eps);
        for (int i = 0, half = rope_dim / 2; i < half; i++) {
            float a = x[i], b = x[i + half];
            x[i] = A(a * float(cos[i]) + b * float(sin[i]));
            x[i + half] = A(b * float(cos[i + half]) + a * float(sin[i + half]));
        }
        if (head < heads.queries) continue;
        int64_t at = ((head - heads.queries) * stored.slots + slot) * heads.size;
        for (int i = 0; i < heads.size; i++) stored.keys[at + i] = C(float(x[i]));
        const A *v = x + int64_t(heads.kv) * heads.size;
        for (int i = 0; i < heads.size; i++) stored.values[at + i] = C(float(v[i]));
    }
}

// Token slots that a token reads.
struct Reads {
    const int32_t *slots;  // null if the slots are contiguous, from `first` on
    int64_t first;
    int length;
    int64_t operator[](int i) const { return slots ? slots[i] : first + i; }
    Reads last(int window) const {
        int skipped = window && length > window ? length - window : 0;
        return {slots ? slots + skipped : nullptr, first + skipped, length - skipped};
    }
};

// Prefetches numbers that are read some iterations later, as the slots of a sequence may be anywhere in memory.
template <class C>
static inline void prefetch(const C *numbers, int size) {
    const char *bytes = reinterpret_cast<const char *>(numbers);
    for (size_t at = 0; at < size * sizeof(C); at += 64) __builtin_prefetch(bytes + at);
}

// Numbers as float32: in place, or converted into `buffer`.
static inline const float *as_floats(const float *x, int, float *) { return x; }
static inline const float *as_floats(const bf16 *x, int size, float *buffer) {
    for (int i = 0; i < size; i++) buffer[i] = float(x[i]);
    return buffer;
}

static __attribute__((noinline)) float rest_of_dot(const float *q, const float *key, int from, int size) {
    float sum = 0;
    for (int i = from; i < size; i++) sum += q[i] * key[i];
    return sum;
}

// Scaled dot products of a query and R keys.
template <int R>
static inline void dots(const float *q, const float *const *keys, int size, float scale, float *scores) {
    Floats sums[R]{};
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        Floats of_q = load(q + i);
        for (int r = 0; r < R; r++) sums[r] += of_q * load(keys[r] + i);
    }
    for (int r = 0; r < R; r++) {
        float sum = i < size ? rest_of_dot(q, keys[r], i, size) : 0;
        for (int lane = 0; lane < LANES; lane++) sum += sums[r][lane];
        scores[r] = sum * scale;
    }
}

// Adds weighted values to sums [at, size), R registers at a time. Returns the first element not yet added to.
template <int R>
static inline int weigh(const float *const *values, const float *weights, int count, int at, int size, float *sums) {
    for (; at + R * LANES <= size; at += R * LANES) {
        Floats sum[R];
        for (int r = 0; r < R; r++) sum[r] = load(sums + at + r * LANES);
        for (int j = 0; j < count; j++)
            for (int r = 0; r < R; r++) sum[r] += weights[j] * load(values[j] + at + r * LANES);
        std::memcpy(sums + at, sum, sizeof sum);
    }
    return at;
}

// Number of floats that `attend_heads` needs in `buffer` for `queries` queries that read the same keys.
static inline int64_t attention_buffer_size(int64_t queries, int64_t longest, int64_t size) {
    return queries * (longest + 2 * size) + NEAR * size;
}

// Attention of `count` queries of a KV head over its keys and values.
template <class A, class C>
static void attend_one(const A *q, const C *keys, const C *values, Reads reads, int count, int size, float scale,
                       float *buffer, A *out) {
    int length = reads.length;
    float *scores = buffer, *sums = scores + int64_t(count) * length, *near_buffer = sums + 2 * count * size;
    const float *queries = as_floats(q, count * size, sums + count * size), *near[NEAR];
    auto bring = [&](const C *numbers, int from, int many) {
        for (int j = from; j < from + many; j++) {
            int ahead = j + PREFETCHED_ITERATIONS;
            if (reads.slots && ahead < length) prefetch(numbers + reads[ahead] * size, size);
            near[j - from] = as_floats(numbers + reads[j] * size, size, near_buffer + (j - from) * size);
        }
    };
    for (int from = 0, many; from < length; from += many) {
        many = length - from < NEAR ? length - from : NEAR;
        bring(keys, from, many);
        for (int head = 0; head < count; head++) {
            float *row = scores + int64_t(head) * length + from;
            int j = 0;
            for (; j + 4 <= many; j += 4) dots<4>(queries + head * size, near + j, size, scale, row + j);
            for (; j < many; j++) dots<1>(queries + head * size, near + j, size, scale, row + j);
        }
    }
    for (int head = 0; head < count; head++) {
        float *row = scores + int64_t(head) * length;
        float highest = row[0], total = 0;
        for (int j = 1; j < length; j++) highest = row[j] > highest ? row[j] : highest;
        for (int j = 0; j < length; j++) total += row[j] = exponential(row[j] - highest);
        for (int j = 0; j < length; j++) row[j] /= total;
    }
    for (int i = 0; i < count * size; i++) sums[i] = 0;
    for (int from = 0, many; from < length; from += many) {
        many = length - from < NEAR ? length - from : NEAR;
        bring(values, from, many);
        for (int head = 0; head < count; head++) {
            const float *weights = scores + int64_t(head) * length + from;
            float *sum = sums + head * size;
            int at = weigh<8>(near, weights, many, 0, size, sum);
            at = weigh<1>(near, weights, many, at, size, sum);
            for (; at < size; at++)
                for (int j = 0; j < many; j++) sum[at] += weights[j] * near[j][at];
        }
    }
    for (int i = 0; i < count * size; i++) out[i] = A(sums[i]);
}

// Attention of a token's query heads [from, to).
template <class A, class C>
static void attend_heads(const A *q, Stored<C> stored, Reads reads, Heads heads, int from, int to, float scale,
                         float *buffer, A *out) {
    int group = heads.queries / heads.kv;
    for (int head = from, end; head < to; head = end) {
        int kv = head / group;
        end = (kv + 1) * group < to ? (kv + 1) * group : to;
        int64_t at = kv * stored.slots * heads.size;
        attend_one(q + int64_t(head) * heads.size, stored.keys + at, stored.values + at, reads, end - head, heads.size,
                   scale, buffer, out + int64_t(head) * heads.size);
    }
}

// out = silu(gate) * up.
template <class A>
static void silu_mul(const A *gate, const A *up, A *out, int size) {
    for (int i = 0; i < size; i++) {
        float x = gate[i];
        out[i] = A(x / (1 + exponential(-x)) * float(up[i]));
    }
}
