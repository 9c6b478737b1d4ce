// Operands of the products in `block_product.cpp`.

#pragma once

#include <cstdint>

static const int BLOCK = 32;  // inputs that share a scale

// Activations [rows, inputs] as 16-bit integers, with the scale and the sum of each BLOCK of a row.
struct Integers {
    int16_t *numbers;
    float *scale, *sum;
};

// Matrix [outputs, inputs] in quantised blocks, or some outputs of one, for one data type of activations.
struct Matrix {
    void (*round)(const void *x, int64_t from, int64_t to, Integers out);  // rounds blocks from … to of x
    // Computes outputs from … to (multiples of 16) of all rows; rows of `out` are `apart` elements apart.
    void (*multiply)(const Matrix &matrix, Integers x, int64_t rows, void *out, int64_t apart, int64_t from, int64_t to);
    const void *blocks, *bias;  // [outputs / LANES, inputs / BLOCK]; [outputs] or null
    int64_t outputs, inputs;
};

extern "C" {
int omp_get_thread_num();
int omp_get_num_threads();
void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags);
void GOMP_barrier();
}

// Range of `count` items, in multiples of `unit`, that this thread computes.
struct Share {
    int64_t from, to;
    explicit Share(int64_t count, int64_t unit = 1) {
        int64_t units = (count + unit - 1) / unit, thread = omp_get_thread_num(), threads = omp_get_num_threads();
        from = units * thread / threads * unit;
        to = units * (thread + 1) / threads * unit;
        if (to > count) to = count;
        if (from > count) from = count;
    }
};
