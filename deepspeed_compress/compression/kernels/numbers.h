// Number formats for storage and messages, and the random numbers of stochastic rounding.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

enum Type { NONE, FP32, BF16, FP16 };
constexpr int LANES = 16;  // elements that are computed together

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t magnitude(float x) { return bits_of(x) & 0x7FFFFFFFu; }

// Rounds a number other than NaN to nearest even.
inline uint16_t round_to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// Rounds to nearest even. NaN stays NaN.
inline uint16_t to_bf16(float x) { return magnitude(x) > 0x7F800000u ? 0x7FC0 : round_to_bf16(x); }

// Like `to_bf16`, but finite values stay finite.
inline uint16_t to_bf16_saturating(float x) {
    const uint16_t rounded = to_bf16(x);
    return ((rounded & 0x7FFF) == 0x7F80 && magnitude(x) < 0x7F800000u) ? rounded - 1 : rounded;
}

inline float from_bf16(uint16_t x) { return float_of(uint32_t(x) << 16); }

// Rounds to nearest even. In integers, because compilers for several processors have no 16-bit floating-point type.
inline uint16_t to_fp16(float x) {
    constexpr uint32_t BIAS = 112u << 23;  // between the exponents of the types
    const uint32_t bits = magnitude(x), sign = (bits_of(x) ^ bits) >> 16;
    const uint32_t normal = (bits - BIAS + 0xFFFu + (bits >> 13 & 1u)) >> 13;
    const uint32_t denormal = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);  // the sum is rounded to units of 2**-24
    const uint32_t special = bits > 0x7F800000u ? 0x7E00u | (bits >> 13 & 0x3FFu) : 0x7C00u;
    const uint32_t rounded = bits < 0x38800000u ? denormal : normal;
    return uint16_t(sign | (bits >= 0x47800000u ? special : rounded));
}

// Like `to_fp16`, but finite values stay finite.
inline uint16_t to_fp16_saturating(float x) {
    const float largest = 65504.0f;
    const bool is_large = std::fabs(x) > largest && magnitude(x) < 0x7F800000u;
    return to_fp16(is_large ? std::copysign(largest, x) : x);
}

inline float from_fp16(uint16_t raw) {
    constexpr uint32_t BIAS = 112u << 23;
    const uint32_t bits = uint32_t(raw & 0x7FFF) << 13, sign = uint32_t(raw & 0x8000) << 16;
    const uint32_t normal = bits + (bits >= 0x0F800000u ? 2 * BIAS : BIAS);  // infinity and NaN have the largest exponent
    const uint32_t denormal = bits_of(float_of(bits + BIAS + (1u << 23)) - float_of(BIAS + (1u << 23)));
    return float_of(sign | (bits < 0x00800000u ? denormal : normal));
}

struct Fp32 {
    using Stored = float;
    static float load(float x) { return x; }
    static float store(float x) { return x; }
};

struct Bf16 {
    using Stored = uint16_t;
    static float load(uint16_t x) { return from_bf16(x); }
    static uint16_t store(float x) { return to_bf16_saturating(x); }
};

// Bf16 for numbers that are finite after rounding.
struct FiniteBf16 : Bf16 {
    static uint16_t store(float x) { return round_to_bf16(x); }
};

struct Fp16 {
    using Stored = uint16_t;
    static float load(uint16_t x) { return from_fp16(x); }
    static uint16_t store(float x) { return to_fp16_saturating(x); }
};

float load_number(const void* numbers, int type, int64_t i) {
    if (type == FP32) return static_cast<const float*>(numbers)[i];
    const uint16_t raw = static_cast<const uint16_t*>(numbers)[i];
    return type == BF16 ? from_bf16(raw) : from_fp16(raw);
}

// Stores a scale rounded to `type`, with finite scales capped at `limit` (forms.fitted). Returns the rounded scale.
template <typename Real>
float store_number(void* numbers, int type, int64_t i, Real scale, double limit) {
    const Real value = std::isfinite(scale) && scale > Real(limit) ? Real(limit) : scale;
    if (type == FP32) return static_cast<float*>(numbers)[i] = float(value);
    const uint16_t raw = type == BF16 ? to_bf16(float(value)) : to_fp16(float(value));
    static_cast<uint16_t*>(numbers)[i] = raw;
    return load_number(numbers, type, i);
}

// Returns a number of `uniform`: the counter, passed through the 32-bit mixer "lowbias32".
inline float uniform_number(uint32_t counter, uint64_t key) {
    uint32_t x = (counter + uint32_t(key)) ^ uint32_t(key >> 32);
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return float(int32_t(x >> 8)) * 0x1p-24f;
}

// Returns the key of the parts that gave `state`, and `part` (tables.next_key).
inline uint64_t next_key(uint64_t state, uint64_t part) {
    state += part + 0x9E3779B97F4A7C15ull;
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9ull;
    state = (state ^ state >> 27) * 0x94D049BB133111EBull;
    return state ^ state >> 31;
}

// Returns the key of a message (tables.Keys.of).
inline uint64_t message_key(uint64_t state, uint64_t sender, int64_t owner, int64_t channel) {
    const uint64_t shared = next_key(next_key(state, uint64_t(owner)), uint64_t(channel));
    return shared >> 32 << 32 | next_key(shared, sender) >> 32;
}

}  // namespace
