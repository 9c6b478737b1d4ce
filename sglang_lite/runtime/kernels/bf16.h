// Number type for bfloat16.

#pragma once

#include <cstdint>
#include <cstring>

struct bf16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
    bf16() = default;
    bf16(float x) {  // rounds to nearest, ties to even
        uint32_t wide;
        std::memcpy(&wide, &x, 4);
        bits = x != x ? 0x7fc0 : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
};
