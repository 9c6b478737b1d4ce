// Small operators of few tokens between a decoder's products, each one pass over numbers that lie in the cache.
//
// Sums are float32. A is the format of activations, C that of keys and values: float or bf16.

#pragma once

#include <cmath>

#include "bf16.h"

static const int AHEAD = 8;  // turns

// e^x, to some 1e-7 of it (Cephes' expf): a loop over this is vector instructions.
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

// Where tokens' keys and values lie: of each KV head [slots, size], of all [kv_heads, slots, size].
template <class C>
struct Stored {
    C *keys, *values;
    int64_t slots;
};

// Of a layer's attention.
struct Heads {
    int queries, kv, size;
};

// Turns a token's heads [from, to) of queries, then keys; writes keys and their values to a slot.
template <class A, class C>
static void turn_heads(A *qkv, const A *q_norm, const A *k_norm, float eps, const A *cos, const A *sin, int turned,
                       Stored<C> stored, int64_t slot, Heads heads, int from, int to) {
    for (int head = from; head < to; head++) {
        A *x = qkv + int64_t(head) * heads.size;
        const A *norm = head < heads.queries ? q_norm : k_norm;
        if (norm) rms(x, norm, x, heads.size, eps);
        for (int i = 0, half = turned / 2; i < half; i++) {
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

// The slots that a token reads.
struct Reads {
    const int32_t *slots;  // null: those from `first` on
    int64_t first;
    int length;
    int64_t operator[](int i) const { return slots ? slots[i] : first + i; }
    Reads last(int window) const {
        int skipped = window && length > window ? length - window : 0;
        return {slots ? slots + skipped : nullptr, first + skipped, length - skipped};
    }
};

// Asks for numbers that are read some turns later: slots of a sequence may lie anywhere.
template <class C>
static inline void prefetch(const C *numbers, int size) {
    const char *bytes = reinterpret_cast<const char *>(numbers);
    for (size_t at = 0; at < size * sizeof(C); at += 64) __builtin_prefetch(bytes + at);
}

// `count` queries of a KV head, whose keys and values are given.
template <class A, class C>
static void attend_one(const A *q, const C *keys, const C *values, Reads reads, int count, int size, float scale,
                       float *scores, float *sums, A *out) {
    int length = reads.length;
    auto ask = [&](const C *numbers, int j) {
        if (reads.slots && j + AHEAD < length) prefetch(numbers + reads[j + AHEAD] * size, size);
    };
    for (int j = 0; j < length; j++) {
        const C *key = keys + reads[j] * size;
        ask(keys, j);
        for (int head = 0; head < count; head++) {
            float score = 0;
            for (int i = 0; i < size; i++) score += float(q[head * size + i]) * float(key[i]);
            scores[int64_t(head) * length + j] = score * scale;
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
    for (int j = 0; j < length; j++) {
        const C *value = values + reads[j] * size;
        ask(values, j);
        for (int head = 0; head < count; head++) {
            float weight = scores[int64_t(head) * length + j];
            for (int i = 0; i < size; i++) sums[head * size + i] += weight * float(value[i]);
        }
    }
    for (int i = 0; i < count * size; i++) out[i] = A(sums[i]);
}

// A token's queries of heads [from, to). `room` is for length + size numbers of each head that reads the same keys.
template <class A, class C>
static void attend_heads(const A *q, Stored<C> stored, Reads reads, Heads heads, int from, int to, float scale,
                         float *room, A *out) {
    int group = heads.queries / heads.kv;
    for (int head = from, end; head < to; head = end) {
        int kv = head / group;
        end = (kv + 1) * group < to ? (kv + 1) * group : to;
        int64_t at = kv * stored.slots * heads.size;
        attend_one(q + int64_t(head) * heads.size, stored.keys + at, stored.values + at, reads, end - head, heads.size,
                   scale, room, room + int64_t(end - head) * reads.length, out + int64_t(head) * heads.size);
    }
}

// Gates, and ups beside them.
template <class A>
static void silu_mul(const A *gate, const A *up, A *out, int size) {
    for (int i = 0; i < size; i++) {
        float x = gate[i];
        out[i] = A(x / (1 + exponential(-x)) * float(up[i]));
    }
}
