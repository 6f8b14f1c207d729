// Scales of blocks for each kind of form. Sums are in fp64, in lanes, and are the only results that another order than
// the reference's may round differently.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "forms.h"
#include "numbers.h"

namespace {

// Returns the sum of f(x[i]) in fp64, in separate lanes so that it can be vectorized.
template <typename F>
double lane_sum(const float* x, int64_t n, F f) {
    double lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += f(x[i + lane]);
    for (; i < n; i++) lanes[0] += f(x[i]);
    double sum = 0;
    for (double lane : lanes) sum += lane;
    return sum;
}

float block_absmax(const float* x, int64_t n) {
    uint32_t largest = 0;  // compared as integers, so that NaN is above infinity
    for (int64_t i = 0; i < n; i++) largest = std::max(largest, magnitude(x[i]));
    return float_of(largest);
}

double block_norm(const float* x, int64_t n) {
    return std::sqrt(lane_sum(x, n, [](float v) { return double(v) * double(v); }));
}

double block_total(const float* x, int64_t n) {
    return lane_sum(x, n, [](float v) { return double(std::fabs(v)); });
}

template <typename L>
double block_lloyd(const float* x, int64_t n) {
    double scale = block_total(x, n) / double(n) * L::START;
    for (int iteration = 0; iteration < L::ITERATIONS; iteration++) {
        // A scale beyond fp32 would exceed every element's magnitude.
        const Borders<L> borders{float(std::min(scale, double(std::numeric_limits<float>::max())))};
        const double sum = lane_sum(x, n, [=](float v) { return double(std::fabs(v)) * double(borders.nearest(std::fabs(v))); });
        int32_t square = 0;  // at most 100 for each of 65536 elements
        for (int64_t i = 0; i < n; i++) square += borders.square(std::fabs(x[i]));
        scale = sum / double(square);
    }
    return scale;
}

}  // namespace
