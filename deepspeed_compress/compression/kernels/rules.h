// Rules that encode element number i of a block whose scale is known. Each returns the code, and the multiple of the scale
// that the code stands for. They have no branches, so that loops over them are vectorized.

#pragma once

#include <cmath>
#include <cstdint>

#include "forms.h"
#include "numbers.h"

namespace {

// A scale may underflow to zero.
inline float divisor(float scale) { return scale > 0 ? scale : 1.0f; }

struct Encoded {
    uint8_t code;
    float multiple;
};

// Rounds x / scale to an integer, to nearest even or stochastically, and clips it to -levels..levels. NaN becomes 0.
// FITS says that x is finite and rounds to -levels..levels without clipping, which saves a quarter of the time.
template <bool STOCHASTIC, bool FITS>
struct Rounding {
    float divisor, levels;
    uint32_t first;
    uint64_t key;

    Encoded operator()(float x, uint32_t i) const {
        // Adding it rounds numbers below 2**22 to integers, which appear in the low bits. Clipping first changes nothing.
        constexpr float SHIFT = 0x1.8p23f;
        float q = x / divisor;
        if (STOCHASTIC) q += uniform_number(first + i, key);
        if (STOCHASTIC || !FITS) q = q < -levels ? -levels : q;
        if (STOCHASTIC || !FITS) q = q > levels ? levels : q;
        if (!FITS) q = q == q ? q : 0.0f;
        const float shifted = q + SHIFT;
        const float nearest = shifted - SHIFT;
        if (!STOCHASTIC) return {uint8_t(bits_of(shifted)), nearest};
        const float below = nearest > q ? 1.0f : 0.0f;
        return {uint8_t(bits_of(shifted - below)), nearest - below};
    }
};

struct Sign {
    Encoded operator()(float x, uint32_t) const {
        const bool positive = x >= 0;
        return {uint8_t(positive), positive ? 1.0f : -1.0f};
    }
};

// Selects the nearest of fitted levels.
template <typename L>
struct Nearest {
    Borders<L> borders;

    Encoded operator()(float x, uint32_t) const {
        const int32_t positive = x >= 0, place = borders.place(std::fabs(x));
        const float magnitude = borders.nearest(std::fabs(x));
        const int32_t code = L::MAGNITUDES[0] ? L::COUNT * positive + place : 1 + place * (2 * positive - 1);
        return {uint8_t(code), positive ? magnitude : -magnitude};
    }
};

}  // namespace
