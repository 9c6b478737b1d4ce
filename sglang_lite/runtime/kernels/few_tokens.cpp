// Small operators of few tokens between a decoder's products, each one pass over numbers that lie in the cache.
//
// Sums are float32. A is the format of activations, C that of keys and values: float or bfloat16. `few_tokens.py` has
// what each function does, and in which order its arguments come.

#include <cmath>
#include <cstdint>
#include <cstring>

static const int AHEAD = 8;  // turns

struct bf16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
    bf16() = default;
    bf16(float x) {  // to the nearest, to even where two are as near
        uint32_t wide;
        std::memcpy(&wide, &x, 4);
        bits = x != x ? 0x7fc0 : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
};

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

template <class A, class C>
static void turn_store(A *qkv, const A *q_norm, const A *k_norm, float eps, const A *cos, const A *sin, int turned,
                       C *keys, C *values, int64_t slots, const int64_t *store_at, int tokens, int heads, int kv_heads,
                       int size) {
    for (int token = 0; token < tokens; token++, cos += turned, sin += turned) {
        A *q = qkv + int64_t(token) * (heads + 2 * kv_heads) * size;
        for (int head = 0; head < heads + kv_heads; head++) {
            A *x = q + int64_t(head) * size;
            const A *norm = head < heads ? q_norm : k_norm;
            if (norm) rms(x, norm, x, size, eps);
            for (int i = 0, half = turned / 2; i < half; i++) {
                float a = x[i], b = x[i + half];
                x[i] = A(a * float(cos[i]) + b * float(sin[i]));
                x[i + half] = A(b * float(cos[i + half]) + a * float(sin[i + half]));
            }
        }
        const A *k = q + int64_t(heads) * size, *v = k + int64_t(kv_heads) * size;
        for (int head = 0; head < kv_heads; head++)
            for (int i = 0; i < size; i++) {
                keys[(head * slots + store_at[token]) * size + i] = C(float(k[head * size + i]));
                values[(head * slots + store_at[token]) * size + i] = C(float(v[head * size + i]));
            }
    }
}

// Asks for numbers that are read some turns later: slots of a sequence may lie anywhere.
template <class C>
static inline void prefetch(const C *numbers, int size) {
    for (size_t at = 0; at < size * sizeof(C); at += 64) __builtin_prefetch(reinterpret_cast<const char *>(numbers) + at);
}

template <class A, class C>
static void attend_one(const A *q, const C *keys, const C *values, int64_t slots, const int32_t *read, int64_t first,
                       int length, int heads, int kv_heads, int size, float scale, float *scores, float *sums, A *out) {
    int group = heads / kv_heads;
    for (int kv = 0; kv < kv_heads; kv++) {
        const A *queries = q + int64_t(kv) * group * size;
        for (int j = 0; j < length; j++) {
            const C *key = keys + (kv * slots + (read ? read[j] : first + j)) * size;
            if (read && j + AHEAD < length) prefetch(keys + (kv * slots + read[j + AHEAD]) * size, size);
            for (int head = 0; head < group; head++) {
                float score = 0;
                for (int i = 0; i < size; i++) score += float(queries[head * size + i]) * float(key[i]);
                scores[int64_t(head) * length + j] = score * scale;
            }
        }
        for (int head = 0; head < group; head++) {
            float *row = scores + int64_t(head) * length;
            float highest = row[0], total = 0;
            for (int j = 1; j < length; j++) highest = row[j] > highest ? row[j] : highest;
            for (int j = 0; j < length; j++) total += row[j] = exponential(row[j] - highest);
            for (int j = 0; j < length; j++) row[j] /= total;
        }
        for (int i = 0; i < group * size; i++) sums[i] = 0;
        for (int j = 0; j < length; j++) {
            const C *value = values + (kv * slots + (read ? read[j] : first + j)) * size;
            if (read && j + AHEAD < length) prefetch(values + (kv * slots + read[j + AHEAD]) * size, size);
            for (int head = 0; head < group; head++) {
                float weight = scores[int64_t(head) * length + j];
                for (int i = 0; i < size; i++) sums[head * size + i] += weight * float(value[i]);
            }
        }
        for (int i = 0; i < group * size; i++) out[int64_t(kv) * group * size + i] = A(sums[i]);
    }
}

template <class A, class C>
static void attend(const A *q, int64_t apart, const C *keys, const C *values, int64_t slots, const int32_t *const *reads,
                   const int64_t *firsts, const int32_t *lengths, int window, int tokens, int heads, int kv_heads,
                   int size, float scale, float *scores, float *sums, A *out) {
    for (int token = 0; token < tokens; token++) {
        int skipped = window && lengths[token] > window ? lengths[token] - window : 0;
        attend_one(q + token * apart, keys, values, slots, reads[token] ? reads[token] + skipped : nullptr,
                   firsts[token] + skipped, lengths[token] - skipped, heads, kv_heads, size, scale, scores, sums,
                   out + int64_t(token) * heads * size);
    }
}

template <class A>
static void silu_mul(const A *gate_up, A *out, int tokens, int size) {
    for (int token = 0; token < tokens; token++, gate_up += 2 * size, out += size)
        for (int i = 0; i < size; i++) {
            float gate = gate_up[i];
            out[i] = A(gate / (1 + exponential(-gate)) * float(gate_up[size + i]));
        }
}

#define OF_ACTIVATIONS(A, name)                                                                                     \
    void add_norm_##name(A *x, const A *added, const A *weight, A *out, int tokens, int size, float eps) {          \
        add_norm(x, added, weight, out, tokens, size, eps);                                                         \
    }                                                                                                               \
    void silu_mul_##name(const A *gate_up, A *out, int tokens, int size) { silu_mul(gate_up, out, tokens, size); }

#define OF_BOTH(A, C, name)                                                                                         \
    void turn_store_##name(A *qkv, const A *q_norm, const A *k_norm, float eps, const A *cos, const A *sin,         \
                           int turned, C *keys, C *values, int64_t slots, const int64_t *store_at, int tokens,      \
                           int heads, int kv_heads, int size) {                                                     \
        turn_store(qkv, q_norm, k_norm, eps, cos, sin, turned, keys, values, slots, store_at, tokens, heads,        \
                   kv_heads, size);                                                                                 \
    }                                                                                                               \
    void attend_##name(const A *q, int64_t apart, const C *keys, const C *values, int64_t slots,                    \
                       const int32_t *const *reads, const int64_t *firsts, const int32_t *lengths, int window,      \
                       int tokens, int heads, int kv_heads, int size, float scale, float *scores, float *sums,      \
                       A *out) {                                                                                    \
        attend(q, apart, keys, values, slots, reads, firsts, lengths, window, tokens, heads, kv_heads, size, scale, \
               scores, sums, out);                                                                                  \
    }

extern "C" {
OF_ACTIVATIONS(float, float32)
OF_ACTIVATIONS(bf16, bfloat16)
OF_BOTH(float, float, float32_float32)
OF_BOTH(float, bf16, float32_bfloat16)
OF_BOTH(bf16, bf16, bfloat16_bfloat16)
}
