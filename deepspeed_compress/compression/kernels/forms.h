// Formats of the codes of blocks, as in forms.py: the number of bits per element, and the multiples of the scale.

#pragma once

#include <cstdint>

namespace {

enum Kind { ABSMAX, NORM, MEAN, LLOYD, EIGHT, TERNARY };
constexpr int TRITS = 5;  // per byte

struct Form {
    int32_t kind, levels, bits;
    int64_t block_size;
};

// Returns the size of the packed codes of `n` elements, starting at the beginning of a block.
inline int64_t code_bytes(const Form& form, int64_t n) {
    if (form.kind != TERNARY) return (n * form.bits + 7) / 8;
    const int64_t whole = n / form.block_size, rest = n % form.block_size;
    return whole * ((form.block_size + TRITS - 1) / TRITS) + (rest + TRITS - 1) / TRITS;
}

// Returns true if no byte contains codes of two blocks.
inline bool fills_bytes(const Form& form) { return form.kind == TERNARY || form.block_size * form.bits % 8 == 0; }

// As in forms.LEVELS: magnitudes of levels in units of the scale, and the initial scale of the fit.
struct Four {
    static constexpr int ITERATIONS = 2, COUNT = 2, MAGNITUDES[] = {1, 4};
    static constexpr double START = 0.5;
};

struct Eight {
    static constexpr int ITERATIONS = 1, COUNT = 4, MAGNITUDES[] = {1, 3, 6, 10};
    static constexpr double START = 1.0 / 3;
};

struct Ternary {
    static constexpr int ITERATIONS = 1, COUNT = 2, MAGNITUDES[] = {0, 1};
    static constexpr double START = 1.5;
};

// Thresholds above which each level, except for the first, is nearer than the previous one.
template <typename L>
struct Borders {
    float of[L::COUNT];

    explicit Borders(float scale) {
        for (int k = 1; k < L::COUNT; k++) of[k] = scale * (float(L::MAGNITUDES[k - 1] + L::MAGNITUDES[k]) / 2);
    }

    // Returns the magnitude nearest to `a`.
    float nearest(float a) const {
        float magnitude = float(L::MAGNITUDES[0]);
        for (int k = 1; k < L::COUNT; k++)
            magnitude += float(a >= of[k]) * float(L::MAGNITUDES[k] - L::MAGNITUDES[k - 1]);
        return magnitude;
    }

    // Returns the square of the magnitude nearest to `a`.
    int32_t square(float a) const {
        int32_t square = L::MAGNITUDES[0] * L::MAGNITUDES[0];
        for (int k = 1; k < L::COUNT; k++)
            square += (L::MAGNITUDES[k] * L::MAGNITUDES[k] - L::MAGNITUDES[k - 1] * L::MAGNITUDES[k - 1]) * (a >= of[k]);
        return square;
    }

    int32_t place(float a) const {
        int32_t place = 0;
        for (int k = 1; k < L::COUNT; k++) place += a >= of[k];
        return place;
    }
};

}  // namespace
