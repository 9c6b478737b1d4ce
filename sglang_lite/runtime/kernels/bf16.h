// bfloat16 as a number of C++.

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
    bf16(float x) {  // to the nearest, to even where two are as near
        uint32_t wide;
        std::memcpy(&wide, &x, 4);
        bits = x != x ? 0x7fc0 : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
};
