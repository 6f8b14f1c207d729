// Vectors of the processor's width, in the extension of C++ that GCC and Clang share. Each lane has the bits of scalar
// code, so results do not depend on the width.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(WIDTH * sizeof(int32_t))));
typedef uint32_t Words __attribute__((vector_size(WIDTH * sizeof(uint32_t))));

inline Vector load(const float* x) {
    Vector vector;
    std::memcpy(&vector, x, sizeof vector);
    return vector;
}

inline void store(float* x, Vector vector) { std::memcpy(x, &vector, sizeof vector); }

// Returns true if `any` has no bit.
inline bool is_zero(Words any) {
    uint64_t parts[WIDTH / 2], all = 0;
    std::memcpy(parts, &any, sizeof any);
    for (uint64_t part : parts) all |= part;
    return !all;
}

// Returns true if COUNT elements are 0 or -0.
template <int COUNT>
inline bool all_zero(const float* x) {
    Words any = {};
    for (int i = 0; i < COUNT; i += WIDTH) any |= (Words)load(x + i) << 1;
    return is_zero(any);
}

// Returns product * factor + sum with a single rounding. Compilers vectorize no std::fma of the lanes of a vector.
inline Vector fused(Vector product, float factor, Vector sum) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)product, _mm512_set1_ps(factor), (__m512)sum);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)product, _mm256_set1_ps(factor), (__m256)sum);
#elif defined(__aarch64__)
    return (Vector)vfmaq_n_f32((float32x4_t)sum, (float32x4_t)product, factor);
#else
    Vector result;
    for (int lane = 0; lane < WIDTH; lane++) result[lane] = std::fma(product[lane], factor, sum[lane]);
    return result;
#endif
}

// Returns lanes of `a` followed by `b`, selected by `from(lane)`, a constant expression of type F.
template <typename F, int... LANE>
inline Vector select_lanes(Vector a, Vector b, F from, std::integer_sequence<int, LANE...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, from(LANE)...);
#else
    return __builtin_shuffle(a, b, Words{uint32_t(from(LANE))...});
#endif
}

using AllLanes = std::make_integer_sequence<int, WIDTH>;

// Returns the vector with every two neighboring groups of STEP lanes exchanged.
template <int STEP>
inline Vector exchange_neighbors(Vector x) {
    return select_lanes(x, x, [](int lane) constexpr { return lane ^ STEP; }, AllLanes());
}

// Exchanges the upper right and the lower left quadrant of every square of 2 * STEP rows and columns.
template <int STEP>
inline void exchange_quarters(Vector* rows) {
    for (int row = 0; row < WIDTH; row++) {
        if (row & STEP) continue;
        const Vector above = rows[row], below = rows[row + STEP];
        rows[row] = select_lanes(
            above, below, [](int lane) constexpr { return lane & STEP ? WIDTH + lane - STEP : lane; }, AllLanes());
        rows[row + STEP] = select_lanes(
            above, below, [](int lane) constexpr { return lane & STEP ? WIDTH + lane : lane + STEP; }, AllLanes());
    }
}

// Transposes a square of WIDTH x WIDTH.
template <int STEP = WIDTH / 2>
inline void transpose(Vector* rows) {
    exchange_quarters<STEP>(rows);
    if constexpr (STEP > 1) transpose<STEP / 2>(rows);
}

}  // namespace
