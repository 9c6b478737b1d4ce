// Operators of `cpu_small_batch.h`, exported for each data type. `cpu_small_batch.py` documents the functions and the
// order of their arguments.

#include <vector>

#include "cpu_small_batch.h"

template <class A, class C>
static void rope_store(A *qkv, const A *q_norm, const A *k_norm, float eps, const A *cos, const A *sin, int rope_dim,
                       C *keys, C *values, int64_t slots, const int64_t *store_at, int tokens, int heads, int kv_heads,
                       int size) {
    for (int token = 0; token < tokens; token++)
        rotate_heads(qkv + int64_t(token) * (heads + 2 * kv_heads) * size, q_norm, k_norm, eps, cos + token * rope_dim,
                   sin + token * rope_dim, rope_dim, Stored<C>{keys, values, slots}, store_at[token],
                   Heads{heads, kv_heads, size}, 0, heads + kv_heads);
}

template <class A, class C>
static void attend(const A *q, int64_t apart, C *keys, C *values, int64_t slots, const int32_t *const *reads,
                   const int64_t *firsts, const int32_t *lengths, int longest, int window, int tokens, int heads,
                   int kv_heads, int size, float scale, A *out) {
    std::vector<float> buffer(attention_buffer_size(heads / kv_heads, longest, size));
    for (int token = 0; token < tokens; token++)
        attend_heads(q + token * apart, Stored<C>{keys, values, slots},
                     Reads{reads[token], firsts[token], lengths[token]}.last(window), Heads{heads, kv_heads, size}, 0,
                     heads, scale, buffer.data(), out + int64_t(token) * heads * size);
}

template <class A>
static void silu_mul(const A *gate_up, A *out, int tokens, int size) {
    for (int token = 0; token < tokens; token++, gate_up += 2 * size, out += size)
        silu_mul(gate_up, gate_up + size, out, size);
}

#define OF_ACTIVATIONS(A, name)                                                                                     \
    void add_norm_##name(A *x, const A *added, const A *weight, A *out, int tokens, int size, float eps) {          \
        add_norm(x, added, weight, out, tokens, size, eps);                                                         \
    }                                                                                                               \
    void silu_mul_##name(const A *gate_up, A *out, int tokens, int size) { silu_mul(gate_up, out, tokens, size); }

#define OF_BOTH(A, C, name)                                                                                         \
    void rope_store_##name(A *qkv, const A *q_norm, const A *k_norm, float eps, const A *cos, const A *sin,         \
                           int rope_dim, C *keys, C *values, int64_t slots, const int64_t *store_at, int tokens,      \
                           int heads, int kv_heads, int size) {                                                     \
        rope_store(qkv, q_norm, k_norm, eps, cos, sin, rope_dim, keys, values, slots, store_at, tokens, heads,        \
                   kv_heads, size);                                                                                 \
    }                                                                                                               \
    void attend_##name(const A *q, int64_t apart, C *keys, C *values, int64_t slots, const int32_t *const *reads,   \
                       const int64_t *firsts, const int32_t *lengths, int longest, int window, int tokens,          \
                       int heads, int kv_heads, int size, float scale, A *out) {                                    \
        attend(q, apart, keys, values, slots, reads, firsts, lengths, longest, window, tokens, heads, kv_heads,     \
               size, scale, out);                                                                                   \
    }

extern "C" {
OF_ACTIVATIONS(float, float32)
OF_ACTIVATIONS(bf16, bfloat16)
OF_BOTH(float, float, float32_float32)
OF_BOTH(float, bf16, float32_bfloat16)
OF_BOTH(bf16, bf16, bfloat16_bfloat16)
}
