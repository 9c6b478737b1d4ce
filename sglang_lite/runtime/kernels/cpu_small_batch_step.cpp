// All layers of a decoder for few tokens in one call: the operators of `cpu_small_batch.h`, and products with quantised
// matrices in between, to which those of LoRA adapters are added. Threads start once, and synchronise six times a layer,
// ten times with adapters. `cpu_small_batch_step.py` documents the fields. Also attention alone, on all threads.

#include <initializer_list>
#include <vector>

#include "block_product.h"
#include "cpu_small_batch.h"

static const int NEAR_OUTPUTS = 256;  // of an adapter's B, which stay in the cache for its tokens
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

// An adapter's part in a product; null if it has none.
template <class A>
struct Delta {
    const A *a, *b;  // [parts of the product, rank, inputs], [rank, outputs]
    int64_t rank;
};

enum Product { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS };

template <class A>
struct Adapters {
    const Delta<A> *deltas;           // [layers, PRODUCTS, count]
    const int32_t *tokens, *starts;  // tokens of each adapter; count + 1 places among them
    int32_t count, rank;             // rank: the largest
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
    const Adapters<A> *adapters;  // null if no token has one
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

// Outputs of a product, in parts that each have an A.
struct Outputs {
    int parts;
    int64_t ends[PARTS];
};

// Buffer of a thread for numbers that are not float32 already.
template <class A>
struct Floats32 {
    std::vector<float> numbers;
    void hold(int64_t count) {
        if (sizeof(A) < sizeof(float) && int64_t(numbers.size()) < count) numbers.resize(count);
    }
    float *at(int64_t i) { return numbers.empty() ? nullptr : numbers.data() + i; }
};

// Writes this thread's share of low = A x [tokens, PARTS * the largest rank], for the tokens of each adapter.
template <class A>
static void shrink(const Adapters<A> &adapters, const Delta<A> *deltas, const Outputs &outputs, Rows<A> &x, float *low,
                   Floats32<A> &wide) {
    wide.hold((x.tokens + 1) * x.size);
    std::vector<const float *> of(x.tokens);
    for (int i = 0; i < adapters.count; i++) {
        const int32_t *tokens = adapters.tokens + adapters.starts[i];
        const int many = adapters.starts[i + 1] - adapters.starts[i];
        for (int j = 0; j < many && deltas[i].rank; j++)
            of[j] = as_floats(x.of(tokens[j]), int(x.size), wide.at((j + 1) * x.size));
        for (Share rows(many ? outputs.parts * deltas[i].rank : 0); rows.from < rows.to; rows.from++) {
            const float *a = as_floats(deltas[i].a + rows.from * x.size, int(x.size), wide.at(0));
            float sums[4];
            for (int j = 0, now; j < many; j += now) {
                now = many - j < 4 ? 1 : 4;
                (now == 4 ? dots<4> : dots<1>)(a, of.data() + j, int(x.size), 1, sums);
                for (int k = 0; k < now; k++) low[tokens[j + k] * PARTS * adapters.rank + rows.from] = sums[k];
            }
        }
    }
}

static inline void add_to(float *x, const float *, int) {}  // which are the same
static inline void add_to(bf16 *x, const float *sums, int size) {
    for (int i = 0; i < size; i++) x[i] = bf16(sums[i]);
}
static inline float *sums_of(float *x, float *, int) { return x; }
static inline float *sums_of(bf16 *x, float *buffer, int size) {
    for (int i = 0; i < size; i++) buffer[i] = float(x[i]);
    return buffer;
}

// Adds low B to the outputs from … to of the tokens of each adapter.
template <class A>
static void expand(const Adapters<A> &adapters, const Delta<A> *deltas, const Outputs &outputs, const float *low,
                   Rows<A> &out, int64_t from, int64_t to, Floats32<A> &wide) {
    wide.hold((adapters.rank + 1) * NEAR_OUTPUTS);
    std::vector<const float *> rows(adapters.rank);
    for (int64_t first = from, end; first < to; first = end) {
        int part = 0;
        while (first >= outputs.ends[part]) part++;
        end = first + NEAR_OUTPUTS < to ? first + NEAR_OUTPUTS : to;
        if (end > outputs.ends[part]) end = outputs.ends[part];
        const int size = int(end - first);
        for (int i = 0; i < adapters.count; i++) {
            const int rank = int(deltas[i].rank), *tokens = adapters.tokens + adapters.starts[i],
                      many = adapters.starts[i + 1] - adapters.starts[i];
            for (int r = 0; r < rank && many; r++)
                rows[r] = as_floats(deltas[i].b + r * out.size + first, size, wide.at((r + 1) * NEAR_OUTPUTS));
            for (int j = 0; j < many && rank; j++) {
                const float *weights = low + int64_t(tokens[j]) * PARTS * adapters.rank + part * rank;
                float *sums = sums_of(out.of(tokens[j]) + first, wide.at(0), size);
                int n = weigh<8>(rows.data(), weights, rank, 0, size, sums);
                n = weigh<1>(rows.data(), weights, rank, n, size, sums);
                for (; n < size; n++)
                    for (int r = 0; r < rank; r++) sums[n] += weights[r] * rows[r][n];
                add_to(out.of(tokens[j]) + first, sums, size);
            }
        }
    }
}

template <class A, class C>
struct Work {
    const Step<A, C> &step;
    Rows<A> qkv, attended, gate_up, gated, added;
    std::vector<float> low;
    explicit Work(const Step<A, C> &step)
        : step(step), qkv(step.tokens, int64_t(step.queries + 2 * step.kv) * step.size),
          attended(step.tokens, int64_t(step.queries) * step.size), gate_up(step.tokens, 2 * int64_t(step.gates)),
          gated(step.tokens, step.gates), added(step.tokens, step.hidden),
          low(step.adapters ? int64_t(step.tokens) * PARTS * step.adapters->rank : 0) {}
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
    const int64_t queries = int64_t(step.queries) * step.size, kv = int64_t(step.kv) * step.size;
    const Outputs outputs_of[PRODUCTS] = {{3, {queries, queries + kv, queries + 2 * kv}}, {1, {step.hidden}},
                                          {2, {step.gates, 2 * int64_t(step.gates)}}, {1, {step.hidden}}};
    Floats32<A> wide;
    int i = 0;
    auto deltas = [&](Product product) {
        return step.adapters->deltas + (int64_t(i) * PRODUCTS + product) * step.adapters->count;
    };
    // Before a product and after it, adds what the adapters have in it.
    auto shrunk = [&](Product product, Rows<A> &in) {
        if (step.adapters) shrink(*step.adapters, deltas(product), outputs_of[product], in, work.low.data(), wide);
    };
    auto expanded = [&](Product product, Rows<A> &out, std::initializer_list<Share> shares) {
        if (!step.adapters) return;
        GOMP_barrier();
        for (const Share &each : shares)
            expand(*step.adapters, deltas(product), outputs_of[product], work.low.data(), out, each.from, each.to,
                   wide);
    };
    for (; i < step.count; i++) {
        const Layer<A> &layer = step.layers[i];
        const int kind = layer.window > 0;
        Stored<C> stored{step.keys[i], step.values[i], step.slots[kind]};

        norm(layer.input_norm, layer.qkv);
        Share qkv_outputs(work.qkv.size, BLOCK);
        shrunk(QKV, normed);
        multiply(layer.qkv, normed, work.qkv, qkv_outputs.from, qkv_outputs.to);
        expanded(QKV, work.qkv, {qkv_outputs});
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
        shrunk(OUTPUT, work.attended);
        multiply(layer.output, work.attended, work.added, outputs.from, outputs.to);
        expanded(OUTPUT, work.added, {outputs});
        GOMP_barrier();

        norm(layer.mlp_norm, layer.gate_up);
        Share gates(step.gates, BLOCK), ups = gates;
        ups.from += step.gates, ups.to += step.gates;
        shrunk(GATE_UP, normed);
        for (const Share &each : {gates, ups}) multiply(layer.gate_up, normed, work.gate_up, each.from, each.to);
        expanded(GATE_UP, work.gate_up, {gates, ups});
        for (int token = 0; token < step.tokens; token++) {
            const A *gate = work.gate_up.of(token);
            silu_mul(gate + gates.from, gate + step.gates + gates.from, work.gated.of(token) + gates.from,
                     int(gates.to - gates.from));
            work.gated.round(layer.down, token, gates.from, gates.to);
        }
        GOMP_barrier();

        shrunk(DOWN, work.gated);
        multiply(layer.down, work.gated, work.added, outputs.from, outputs.to);
        expanded(DOWN, work.added, {outputs});
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
