// Draws tokens by the exponential race of `sampling.py`. `race.py` documents the function.
//
// Few tokens can win, so that almost none needs a logarithm: the random bits alone bound its score.

#include <cmath>
#include <cstdint>
#include <cstring>

static const int BLOCK = 4096, QUARTER = BLOCK / 4;  // tokens of a block, of which four share a call of Philox
static const int GROUP = 64;                         // calls of Philox that are computed together
static const float LN_2 = 0.6931472f;
static const float MOST_SURPRISE = 34;  // no token gets more from `bound_surprise`

// Philox4x32-10 (Salmon et al., SC 2011) with the counters (first + n, position, 0, 0).
static void philox(uint64_t seed, uint32_t first, uint32_t position, uint32_t bits[4][GROUP]) {
    for (int n = 0; n < GROUP; n++) {
        uint32_t a = first + n, b = position, c = 0, d = 0;
        uint32_t low = uint32_t(seed), high = uint32_t(seed >> 32);
        for (int round = 0; round < 10; round++) {
            uint64_t left = uint64_t(0xD2511F53) * a, right = uint64_t(0xCD9E8D57) * c;
            a = uint32_t(right >> 32) ^ b ^ low;
            b = uint32_t(right);
            c = uint32_t(left >> 32) ^ d ^ high;
            d = uint32_t(left);
            low += 0x9E3779B9;
            high += 0xBB67AE85;
        }
        bits[0][n] = a;
        bits[1][n] = b;
        bits[2][n] = c;
        bits[3][n] = d;
    }
}

// Exponential variable of random bits, from the same uniform number as in `sampling.py`.
static double exponential(uint32_t bits) {
    float u = (float(bits) + 0.5f) * 2.3283064365386963e-10f;
    return -std::log1p(-double(u < 0.99999994f ? u : 0.99999994f));
}

// Upper bound of -log2 of the exponential variable, which is at least (bits + 0.5) / 2^32. The pattern of a float,
// read as an integer, is a lower bound of its logarithm.
static inline float bound_surprise(uint32_t bits) {
    float half = float(int32_t(bits >> 1)) + 0.25f;
    int32_t pattern;
    std::memcpy(&pattern, &half, 4);
    return 31 + 127 - float(pattern) * 1.1920929e-7f;
}

struct Winner {
    double score;
    int64_t token;
};

static void run_race(const float *x, int64_t size, double temperature, uint64_t seed, uint32_t position, Winner *best) {
    float scale = float(1 / temperature);
    uint32_t bits[4][GROUP];
    for (int64_t counter = 0; counter / QUARTER * BLOCK < size; counter += GROUP) {
        // Lower than the best score by more than the bounds in float32 can be wrong.
        float least = float(best->score) - 1e-3f - 1e-5f * std::fabs(float(best->score));
        bool drawn = false;
        for (int i = 0; i < 4; i++) {
            int64_t at = counter / QUARTER * BLOCK + i * QUARTER + counter % QUARTER;
            int64_t count = at + GROUP <= size ? GROUP : size - at;
            int possible = 0;
            for (int64_t k = 0; k < count; k++) possible |= x[at + k] * scale + LN_2 * MOST_SURPRISE > least;
            if (!possible) continue;
            if (!drawn) philox(seed, uint32_t(counter), position, bits);
            drawn = true;
            possible = 0;
            for (int64_t k = 0; k < count; k++) possible |= x[at + k] * scale + LN_2 * bound_surprise(bits[i][k]) > least;
            if (!possible) continue;
            for (int64_t k = 0; k < count; k++) {
                if (!(x[at + k] * scale + LN_2 * bound_surprise(bits[i][k]) > least)) continue;
                double score = x[at + k] / temperature - std::log(exponential(bits[i][k]));
                if (score > best->score || (score == best->score && at + k < best->token)) *best = {score, at + k};
            }
        }
    }
}

extern "C" void draw_tokens(const float *logits, int64_t stride, const int64_t *rows, int64_t count, int64_t size,
                            const float *temperatures, const uint64_t *seeds, const int32_t *positions, int64_t *tokens) {
    for (int64_t i = 0; i < count; i++) {
        Winner best = {-INFINITY, 0};
        run_race(logits + rows[i] * stride, size, temperatures[i], seeds[i], uint32_t(positions[i]), &best);
        tokens[i] = best.token;
    }
}
