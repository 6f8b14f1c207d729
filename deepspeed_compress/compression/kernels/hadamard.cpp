// Hadamard transforms of blocks of powers of two, called through ctypes.
//
// Butterflies are computed in the order of their strides, so all processors get the same bits. Several strides at a time
// stay in registers.

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace {

constexpr int RADIX = 8;              // vectors in registers
constexpr int PIECE = RADIX * WIDTH;  // elements in registers

// Butterflies of COUNT vectors, of strides 1, 2, ... COUNT / 2.
template <int COUNT>
inline void across(Vector* x) {
    for (int stride = 1; stride < COUNT; stride *= 2)
        for (int i = 0; i < COUNT; i++) {
            if (i & stride) continue;
            const Vector sum = x[i] + x[i + stride], difference = x[i] - x[i + stride];
            x[i] = sum, x[i + stride] = difference;
        }
}

// Butterflies of the lanes of a vector, of strides STEP, 2 * STEP, ... WIDTH / 2. The upper lanes change their signs, and
// are added to the lower ones.
template <int STEP = 1>
inline Vector within(Vector x) {
    Words signs;
    for (int lane = 0; lane < WIDTH; lane++) signs[lane] = lane & STEP ? 0x80000000u : 0;
    const Vector result = exchange_neighbors<STEP>(x) + (Vector)((Words)x ^ signs);
    if constexpr (2 * STEP < WIDTH)
        return within<2 * STEP>(result);
    else
        return result;
}

// Multiplies by `factor`. Then all strides below PIECE.
void first_strides(const float* in, int64_t size, float factor, float* out) {
    for (int64_t i = 0; i < size; i += PIECE) {
        Vector x[RADIX];
        for (int v = 0; v < RADIX; v++) x[v] = within(load(in + i + v * WIDTH) * factor);
        across<RADIX>(x);
        for (int v = 0; v < RADIX; v++) store(out + i + v * WIDTH, x[v]);
    }
}

// Strides stride, 2 * stride, ... COUNT / 2 * stride.
template <int COUNT>
void next_strides(float* x, int64_t size, int64_t stride) {
    for (int64_t i = 0; i < size; i += COUNT * stride)
        for (int64_t j = i; j < i + stride; j += WIDTH) {
            Vector together[COUNT];
            for (int v = 0; v < COUNT; v++) together[v] = load(x + j + v * stride);
            across<COUNT>(together);
            for (int v = 0; v < COUNT; v++) store(x + j + v * stride, together[v]);
        }
}

void small_block(const float* in, int64_t size, float factor, float* out) {
    for (int64_t i = 0; i < size; i++) out[i] = in[i] * factor;
    for (int64_t stride = 1; stride < size; stride *= 2)
        for (int64_t i = 0; i < size; i += 2 * stride)
            for (int64_t j = i; j < i + stride; j++) {
                const float sum = out[j] + out[j + stride], difference = out[j] - out[j + stride];
                out[j] = sum, out[j + stride] = difference;
            }
}

void transform(const float* in, int64_t size, float factor, float* out) {
    if (size < PIECE) return small_block(in, size, factor, out);
    first_strides(in, size, factor, out);
    int64_t stride = PIECE;
    for (; 8 * stride <= size; stride *= 8) next_strides<8>(out, size, stride);
    if (4 * stride <= size) next_strides<4>(out, size, stride);
    if (2 * stride == size) next_strides<2>(out, size, stride);
}

}  // namespace

extern "C" {

// Multiplies `count` blocks of `size` elements, a power of two, by Sylvester's matrix times size**-0.5. `out` may be
// `blocks`.
void compress_hadamard(const float* blocks, int64_t count, int64_t size, float* out, int threads) {
    const float factor = float(1 / std::sqrt(double(size)));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t block = 0; block < count; block++) transform(blocks + block * size, size, factor, out + block * size);
}

// The same for the blocks that begin at `places` of x and out.
void compress_hadamard_at(const float* x, const int64_t* places, int64_t count, int64_t size, float* out, int threads) {
    const float factor = float(1 / std::sqrt(double(size)));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < count; i++) transform(x + places[i], size, factor, out + places[i]);
}
}
