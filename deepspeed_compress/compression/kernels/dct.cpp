// Orthonormal DCT of tiles up to 64 x 64, called through ctypes.
//
// Every element is computed by the same operations in the same order on every processor, so all ranks get the same
// bits. They differ from the matrix products of the reference by rounding.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int SIZE = 64;  // maximum side of a tile

// Entries of the orthonormal DCT-II matrix that act on differences, for each halving of 64: level h has h x h of them.
struct Tables {
    float odd[SIZE / 2 * SIZE / 2 * 2];  // 32 x 32, 16 x 16, ... 1 x 1, row-major: [output][input]
    float first;

    Tables() {
        float* next = odd;
        for (int half = SIZE / 2; half; half /= 2)
            for (int k = 0; k < half; k++)
                for (int n = 0; n < half; n++)
                    *next++ = float(std::sqrt(2.0 / SIZE) * std::cos(M_PI / (4 * half) * (2 * n + 1) * (2 * k + 1)));
        first = float(std::sqrt(1.0 / SIZE));
    }
};

const Tables TABLES;

// Sets out[k] = sum of in[n] * matrix[k][n], or matrix[n][k] if TRANSPOSED, with up to eight outputs in registers.
template <int HALF, bool TRANSPOSED>
inline void product(const Vector* in, const float* matrix, Vector* out) {
    constexpr int TOGETHER = HALF < 8 ? HALF : 8;
    for (int k = 0; k < HALF; k += TOGETHER) {
        Vector sums[TOGETHER] = {};
        for (int n = 0; n < HALF; n++)
            for (int o = 0; o < TOGETHER; o++) {
                const float entry = TRANSPOSED ? matrix[n * HALF + k + o] : matrix[(k + o) * HALF + n];
                sums[o] = fused(in[n], entry, sums[o]);
            }
        for (int o = 0; o < TOGETHER; o++) out[k + o] = sums[o];
    }
}

// Odd outputs are computed from the differences of opposite inputs, even outputs by a DCT of their sums.
template <int COUNT>
inline void forward(Vector* x, const float* matrix, Vector* out, int stride) {
    constexpr int HALF = COUNT / 2;
    Vector sums[HALF], differences[HALF], odd[HALF];
    for (int n = 0; n < HALF; n++) sums[n] = x[n] + x[COUNT - 1 - n], differences[n] = x[n] - x[COUNT - 1 - n];
    product<HALF, false>(differences, matrix, odd);
    for (int k = 0; k < HALF; k++) out[(2 * k + 1) * stride] = odd[k];
    forward<HALF>(sums, matrix + HALF * HALF, out, 2 * stride);
}

template <>
inline void forward<1>(Vector* x, const float*, Vector* out, int) {
    out[0] = x[0] * TABLES.first;
}

template <int COUNT>
inline void inverse(const Vector* in, int stride, const float* matrix, Vector* x) {
    constexpr int HALF = COUNT / 2;
    Vector sums[HALF], differences[HALF], odd[HALF];
    for (int k = 0; k < HALF; k++) odd[k] = in[(2 * k + 1) * stride];
    product<HALF, true>(odd, matrix, differences);
    inverse<HALF>(in, 2 * stride, matrix + HALF * HALF, sums);
    for (int n = 0; n < HALF; n++) x[n] = sums[n] + differences[n], x[COUNT - 1 - n] = sums[n] - differences[n];
}

template <>
inline void inverse<1>(const Vector* in, int, const float*, Vector* x) {
    x[0] = in[0] * TABLES.first;
}

constexpr int PADDING = 16;  // a multiple of the width of all processors' vectors
inline int padded(int size) { return (size + PADDING - 1) / PADDING * PADDING; }

// The orthonormal DCT-II matrices of all sizes up to that of a tile. For each input, the factors of all outputs are
// contiguous and zero-padded.
struct Matrices {
    std::vector<float> forward[SIZE + 1], inverse[SIZE + 1];

    Matrices() {
        for (int size = 1; size <= SIZE; size++) {
            const int width = padded(size);
            forward[size].resize(size * width), inverse[size].resize(size * width);
            for (int k = 0; k < size; k++)
                for (int n = 0; n < size; n++)
                    inverse[size][k * width + n] = forward[size][n * width + k] =
                        float(std::sqrt((k ? 2.0 : 1.0) / size) * std::cos(M_PI / (2 * size) * (2 * n + 1) * k));
        }
    }

    const float* of(int size, bool is_inverse) const { return (is_inverse ? inverse : forward)[size].data(); }
};

const Matrices MATRICES;

// Transforms `size` vectors by a matrix of any size. The output is zero-padded.
inline void any_size(const Vector* in, int size, const float* matrix, Vector* out) {
    constexpr int TOGETHER = 8;
    const int outputs = padded(size);
    for (int k = 0; k < outputs; k += TOGETHER) {
        Vector sums[TOGETHER] = {};
        for (int n = 0; n < size; n++)
            for (int o = 0; o < TOGETHER; o++) sums[o] = fused(in[n], matrix[n * outputs + k + o], sums[o]);
        for (int o = 0; o < TOGETHER; o++) out[k + o] = sums[o];
    }
}

// Transforms WIDTH columns of `height` elements.
template <bool INVERSE>
inline void lanes(Vector* in, int height, Vector* out) {
    if (height != SIZE)
        any_size(in, height, MATRICES.of(height, INVERSE), out);
    else if (INVERSE)
        inverse<SIZE>(in, 1, TABLES.odd, out);
    else
        forward<SIZE>(in, TABLES.odd, out, 1);
}

// Transforms all columns of a tile in a work space of SIZE x SIZE, and writes the transposed result to another.
template <bool INVERSE>
void columns(const float* tile, int height, int width, float* transposed) {
    for (int column = 0; column < width; column += WIDTH) {
        Vector in[SIZE], out[SIZE];
        for (int row = 0; row < height; row++) in[row] = load(tile + row * SIZE + column);
        lanes<INVERSE>(in, height, out);
        for (int row = 0; row < height; row += WIDTH) {
            transpose(out + row);
            for (int lane = 0; lane < WIDTH; lane++) store(transposed + (column + lane) * SIZE + row, out[row + lane]);
        }
    }
}

// Location of a tile: its first element, the stride between rows, and its size.
struct Place {
    const float* tile;
    int64_t stride;
    int height, width;
};

// Works on a copy, because rows at a power-of-two stride would compete for the same cache sets.
template <bool INVERSE>
void dense_tile(const Place& place, float* out, int64_t out_stride) {
    alignas(64) float whole[SIZE * SIZE], half[SIZE * SIZE];
    for (int row = 0; row < place.height; row++) {
        std::memcpy(whole + row * SIZE, place.tile + row * place.stride, place.width * sizeof(float));
        std::memset(whole + row * SIZE + place.width, 0, (padded(place.width) - place.width) * sizeof(float));
    }
    columns<INVERSE>(whole, place.height, place.width, half);
    columns<INVERSE>(half, place.width, place.height, whole);
    for (int row = 0; row < place.height; row++)
        std::memcpy(out + row * out_stride, whole + row * SIZE, place.width * sizeof(float));
}

constexpr int FEW = 256;  // coefficients; at this number, one basis row per coefficient costs half of a dense transform

// Finds the positions (row * SIZE + column) of nonzero elements, which include NaN. Returns their number, or -1 if it
// exceeds FEW.
int find_few(const Place& place, uint16_t* found) {
    constexpr int TOGETHER = 16;
    int count = 0;
    for (int row = 0; row < place.height; row++)
        for (int column = 0; column < place.width; column += TOGETHER) {
            const float* x = place.tile + row * place.stride + column;
            const int width = std::min(TOGETHER, place.width - column);
            if (width == TOGETHER && all_zero<TOGETHER>(x)) continue;
            for (int lane = 0; lane < width; lane++) {
                if (x[lane] == 0.0f) continue;
                if (count == FEW) return -1;
                found[count++] = uint16_t(row * SIZE + column + lane);
            }
        }
    return count;
}

// Inverts a tile of few coefficients: adds one basis row per coefficient, then transforms all columns.
void sparse_tile(const Place& place, const uint16_t* found, int count, float* out, int64_t out_stride) {
    alignas(64) Vector half[SIZE][SIZE / WIDTH];
    const int parts = (place.width + WIDTH - 1) / WIDTH;
    std::memset(half, 0, sizeof half[0] * place.height);
    const float* basis = MATRICES.of(place.width, true);
    for (int c = 0; c < count; c++) {
        const int row = found[c] / SIZE, column = found[c] % SIZE;
        const float coefficient = place.tile[row * place.stride + column];
        for (int part = 0; part < parts; part++)
            half[row][part] = fused(load(basis + column * padded(place.width) + part * WIDTH), coefficient, half[row][part]);
    }
    for (int part = 0; part < parts; part++) {
        Vector in[SIZE], result[SIZE];
        for (int row = 0; row < place.height; row++) in[row] = half[row][part];
        lanes<true>(in, place.height, result);
        const int width = std::min(WIDTH, place.width - part * WIDTH);
        for (int row = 0; row < place.height; row++)
            std::memcpy(out + row * out_stride + part * WIDTH, &result[row], width * sizeof(float));
    }
}

void inverse_tile(const Place& place, float* out, int64_t out_stride) {
    uint16_t found[FEW];
    const int count = find_few(place, found);
    if (count < 0)
        dense_tile<true>(place, out, out_stride);
    else
        sparse_tile(place, found, count, out, out_stride);
}

}  // namespace

extern "C" {

// Transforms `rows` x `columns_` tiles of height x width, each at most 64. Strides, in elements: between rows of tiles,
// between tiles of a row, and between rows of elements. `out` must not overlap `tiles`.
void compress_dct(const float* tiles, const int64_t* strides, float* out, const int64_t* out_strides, int64_t rows,
                  int64_t columns_, int height, int width, int is_inverse, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static) collapse(2)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < columns_; column++) {
            const Place place{tiles + row * strides[0] + column * strides[1], strides[2], height, width};
            float* to = out + row * out_strides[0] + column * out_strides[1];
            if (is_inverse)
                inverse_tile(place, to, out_strides[2]);
            else
                dense_tile<false>(place, to, out_strides[2]);
        }
}
}
