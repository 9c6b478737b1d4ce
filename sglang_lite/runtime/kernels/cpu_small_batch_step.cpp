// All layers of a decoder for few tokens in one call: the operators of `cpu_small_batch.h`, and products with quantised
// matrices in between. Threads start once, and synchronise six times a layer. `cpu_small_batch_step.py` documents the
// fields. Also attention alone, on all threads.

#include <vector>

#include "block_product.h"
#include "cpu_small_batch.h"

static const int PARTS = 3;  // matrices of a product: queries, keys and values may have different kinds of blocks

struct Linear {
    Matrix parts[PARTS];  // along the outputs; unused parts have no outputs
};

template <class A>
struct Layer {
    Linear qkv, output, gate_up, down;
    const A *input_norm, *mlp_norm, *q_norm, *k_norm;  // q_norm, k_norm: null if the model has none
    int32_t window, table;
    float scale;
};

template <class A, class C>
struct Step {
    const Layer<A> *layers;
    C *const *keys, *const *values;    // by layer
    const A *const *cos, *const *sin;  // by rotary table
    const int32_t *rope_dims;
    // Of layers without a window, and of those with one.
    const int64_t *store_at[2];
    const int32_t *const *reads[2];
    const int64_t *firsts[2];
    int64_t slots[2];
    const int32_t *lengths;
    const A *x, *last_norm;
    A *out;
    int32_t count, tokens, hidden, queries, kv, size, gates, longest;
    float eps;
};

// Numbers [tokens, size], and their rounded form for products.
template <class A>
struct Rows {
    int64_t tokens, size;
    std::vector<A> numbers;
    std::vector<int16_t> integers;
    std::vector<float> scales;  // followed by sums
    Rows(int64_t tokens, int64_t size)
        : tokens(tokens), size(size), numbers(tokens * size), integers(tokens * size),
          scales(2 * tokens * size / BLOCK) {}
    A *of(int64_t token) { return numbers.data() + token * size; }
    Integers rounded() { return {integers.data(), scales.data(), scales.data() + tokens * size / BLOCK}; }
    // Rounds the numbers from … to of a token, which must be whole blocks.
    void round(const Linear &linear, int64_t token, int64_t from, int64_t to) {
        linear.parts[0].round(numbers.data(), (token * size + from) / BLOCK, (token * size + to) / BLOCK, rounded());
    }
};

// Computes the outputs from … to of all rows.
template <class A>
static void multiply(const Linear &linear, Rows<A> &x, Rows<A> &out, int64_t from, int64_t to) {
    int64_t start = 0;
    for (const Matrix &part : linear.parts) {
        int64_t first = from > start ? from - start : 0, last = to - start < part.outputs ? to - start : part.outputs;
        if (first < last) part.multiply(part, x.rounded(), x.tokens, out.of(0) + start, out.size, first, last);
        start += part.outputs;
    }
}

// Calls `take(token, from, to)` for this thread's part of tokens * each items, token by token.
template <class Take>
static void share(int64_t tokens, int64_t each, Take take) {
    for (Share all(tokens * each); all.from < all.to;) {
        int64_t token = all.from / each, end = (token + 1) * each < all.to ? (token + 1) * each : all.to;
        take(token, all.from - token * each, end - token * each);
        all.from = end;
    }
}

template <class A, class C>
struct Work {
    const Step<A, C> &step;
    Rows<A> qkv, attended, gate_up, gated, added;
    explicit Work(const Step<A, C> &step)
        : step(step), qkv(step.tokens, int64_t(step.queries + 2 * step.kv) * step.size),
          attended(step.tokens, int64_t(step.queries) * step.size), gate_up(step.tokens, 2 * int64_t(step.gates)),
          gated(step.tokens, step.gates), added(step.tokens, step.hidden) {}
};

template <class A, class C>
static void run_layers(void *data) {
    auto &work = *static_cast<Work<A, C> *>(data);
    const Step<A, C> &step = work.step;
    Heads heads{step.queries, step.kv, step.size};
    std::vector<A> x(step.x, step.x + int64_t(step.tokens) * step.hidden);
    std::vector<float> buffer(attention_buffer_size(step.queries / step.kv, step.longest, step.size));
    Rows<A> normed(step.tokens, step.hidden);
    A *added = nullptr;
    // Every thread computes this separately, which is faster than waiting for one.
    auto norm = [&](const A *weight, const Linear &next) {
        add_norm(x.data(), added, weight, normed.of(0), step.tokens, step.hidden, step.eps);
        added = work.added.of(0);
        for (int token = 0; token < step.tokens; token++) normed.round(next, token, 0, step.hidden);
    };
    for (int i = 0; i < step.count; i++) {
        const Layer<A> &layer = step.layers[i];
        const int kind = layer.window > 0;
        Stored<C> stored{step.keys[i], step.values[i], step.slots[kind]};

        norm(layer.input_norm, layer.qkv);
        Share qkv_outputs(work.qkv.size, BLOCK);
        multiply(layer.qkv, normed, work.qkv, qkv_outputs.from, qkv_outputs.to);
        GOMP_barrier();

        share(step.tokens, step.queries + step.kv, [&](int64_t token, int from, int to) {
            int64_t at = token * step.rope_dims[layer.table];
            rotate_heads(work.qkv.of(token), layer.q_norm, layer.k_norm, step.eps, step.cos[layer.table] + at,
                       step.sin[layer.table] + at, step.rope_dims[layer.table], stored, step.store_at[kind][token],
                         heads,
                         from, to);
        });
        GOMP_barrier();

        share(step.tokens, step.queries, [&](int64_t token, int from, int to) {
            Reads reads = Reads{step.reads[kind][token], step.firsts[kind][token], step.lengths[token]}.last(layer.window);
            attend_heads(work.qkv.of(token), stored, reads, heads, from, to, layer.scale, buffer.data(),
                         work.attended.of(token));
            work.attended.round(layer.output, token, int64_t(from) * step.size, int64_t(to) * step.size);
        });
        GOMP_barrier();

        Share outputs(step.hidden, BLOCK);
        multiply(layer.output, work.attended, work.added, outputs.from, outputs.to);
        GOMP_barrier();

        norm(layer.mlp_norm, layer.gate_up);
        Share gates(step.gates, BLOCK);
        multiply(layer.gate_up, normed, work.gate_up, gates.from, gates.to);
        multiply(layer.gate_up, normed, work.gate_up, step.gates + gates.from, step.gates + gates.to);
        for (int token = 0; token < step.tokens; token++) {
            const A *gate = work.gate_up.of(token);
            silu_mul(gate + gates.from, gate + step.gates + gates.from, work.gated.of(token) + gates.from,
                     int(gates.to - gates.from));
            work.gated.round(layer.down, token, gates.from, gates.to);
        }
        GOMP_barrier();

        multiply(layer.down, work.gated, work.added, outputs.from, outputs.to);
        GOMP_barrier();
    }
    share(step.tokens, 1, [&](int64_t token, int, int) {
        int64_t at = token * step.hidden;
        add_norm(x.data() + at, added + at, step.last_norm, step.out + at, 1, step.hidden, step.eps);
    });
}

template <class A, class C>
static void run(const Step<A, C> &step, int threads) {
    Work<A, C> work(step);
    GOMP_parallel(run_layers<A, C>, &work, threads, 0);
}

// Attention of a layer alone, for models whose products are not with quantised blocks.
template <class A, class C>
struct Attention {
    const A *q;  // heads of a token are contiguous, tokens `apart` elements apart
    int64_t apart;
    Stored<C> stored;
    const int32_t *const *reads;
    const int64_t *firsts;
    const int32_t *lengths;
    Heads heads;
    int tokens, longest, window;
    float scale;
    A *out;
};

template <class A, class C>
static void attend(void *data) {
    const auto &a = *static_cast<const Attention<A, C> *>(data);
    std::vector<float> buffer(attention_buffer_size(a.heads.queries / a.heads.kv, a.longest, a.heads.size));
    share(a.tokens, a.heads.queries, [&](int64_t token, int from, int to) {
        Reads reads = Reads{a.reads[token], a.firsts[token], a.lengths[token]}.last(a.window);
        attend_heads(a.q + token * a.apart, a.stored, reads, a.heads, from, to, a.scale, buffer.data(),
                     a.out + token * a.heads.queries * a.heads.size);
    });
}

#define OF_BOTH(A, C, name)                                                                                            \
    void step_##name(const Step<A, C> &step, int threads) { run(step, threads); }                                      \
    void attend_##name(const A *q, int64_t apart, C *keys, C *values, int64_t slots, const int32_t *const *reads,      \
                       const int64_t *firsts, const int32_t *lengths, int longest, int window, int tokens, int heads,  \
                       int kv_heads, int size, float scale, A *out, int threads) {                                     \
        Attention<A, C> all{q, apart, {keys, values, slots}, reads, firsts, lengths, {heads, kv_heads, size}, tokens,  \
                            longest, window, scale, out};                                                              \
        GOMP_parallel(attend<A, C>, &all, threads, 0);                                                                 \
    }

extern "C" {
OF_BOTH(float, float, float32_float32)
OF_BOTH(float, bf16, float32_bfloat16)
OF_BOTH(bf16, bf16, bfloat16_bfloat16)
}
