// Orthonormal transforms of tiles up to 64 x 64 (DCT) and of blocks of powers of two (Hadamard), called through ctypes.
//
// Every element is computed by the same operations in the same order on every processor, so all ranks get the same
// bits. They differ from the matrix products of the reference by rounding.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

constexpr int SIZE = 64;   // maximum side of a tile
constexpr int LANES = 16;  // columns that are transformed together

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

// Returns product * factor + sum with a single rounding, independent of the compiler's choice.
inline Lanes fused(Lanes product, float factor, Lanes sum) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_fmadd_ps((__m512)product, _mm512_set1_ps(factor), (__m512)sum);
#else
    Lanes result;
    for (int lane = 0; lane < LANES; lane++) result[lane] = std::fma(product[lane], factor, sum[lane]);
    return result;
#endif
}

// Exchanges the upper right and the lower left quadrant of every square of 2 * STEP rows and columns.
template <int STEP>
inline void exchange_quarters(Lanes* rows) {
#if defined(__clang__)
    float* x = reinterpret_cast<float*>(rows);
    for (int row = 0; row < LANES; row++)
        for (int lane = 0; lane < LANES; lane++)
            if (!(row & STEP) && (lane & STEP)) std::swap(x[row * LANES + lane], x[(row + STEP) * LANES + lane - STEP]);
#else
    typedef int32_t Index __attribute__((vector_size(LANES * sizeof(int32_t))));
    Index upper, lower;
    for (int lane = 0; lane < LANES; lane++) {
        upper[lane] = lane & STEP ? LANES + lane - STEP : lane;
        lower[lane] = lane & STEP ? LANES + lane : lane + STEP;
    }
    for (int row = 0; row < LANES; row++) {
        if (row & STEP) continue;
        const Lanes above = rows[row], below = rows[row + STEP];
        rows[row] = __builtin_shuffle(above, below, upper);
        rows[row + STEP] = __builtin_shuffle(above, below, lower);
    }
#endif
}

// Transposes a square of LANES x LANES.
inline void transpose(Lanes* rows) {
    exchange_quarters<8>(rows);
    exchange_quarters<4>(rows);
    exchange_quarters<2>(rows);
    exchange_quarters<1>(rows);
}

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
inline void product(const Lanes* in, const float* matrix, Lanes* out) {
    constexpr int TOGETHER = HALF < 8 ? HALF : 8;
    for (int k = 0; k < HALF; k += TOGETHER) {
        Lanes sums[TOGETHER] = {};
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
inline void forward(Lanes* x, const float* matrix, Lanes* out, int stride) {
    constexpr int HALF = COUNT / 2;
    Lanes sums[HALF], differences[HALF], odd[HALF];
    for (int n = 0; n < HALF; n++) sums[n] = x[n] + x[COUNT - 1 - n], differences[n] = x[n] - x[COUNT - 1 - n];
    product<HALF, false>(differences, matrix, odd);
    for (int k = 0; k < HALF; k++) out[(2 * k + 1) * stride] = odd[k];
    forward<HALF>(sums, matrix + HALF * HALF, out, 2 * stride);
}

template <>
inline void forward<1>(Lanes* x, const float*, Lanes* out, int) {
    out[0] = x[0] * TABLES.first;
}

template <int COUNT>
inline void inverse(const Lanes* in, int stride, const float* matrix, Lanes* x) {
    constexpr int HALF = COUNT / 2;
    Lanes sums[HALF], differences[HALF], odd[HALF];
    for (int k = 0; k < HALF; k++) odd[k] = in[(2 * k + 1) * stride];
    product<HALF, true>(odd, matrix, differences);
    inverse<HALF>(in, 2 * stride, matrix + HALF * HALF, sums);
    for (int n = 0; n < HALF; n++) x[n] = sums[n] + differences[n], x[COUNT - 1 - n] = sums[n] - differences[n];
}

template <>
inline void inverse<1>(const Lanes* in, int, const float*, Lanes* x) {
    x[0] = in[0] * TABLES.first;
}

// Returns `size` rounded up to whole vectors.
inline int padded(int size) { return (size + LANES - 1) / LANES * LANES; }

// The orthonormal DCT-II matrices of all sizes up to that of a tile. For each input, the factors of all outputs are
// contiguous and zero-padded to whole vectors.
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

// Transforms `size` vectors by a matrix of any size. The output is zero-padded to whole vectors.
inline void any_size(const Lanes* in, int size, const float* matrix, Lanes* out) {
    constexpr int TOGETHER = 8;
    const int outputs = padded(size);
    for (int k = 0; k < outputs; k += TOGETHER) {
        Lanes sums[TOGETHER] = {};
        for (int n = 0; n < size; n++)
            for (int o = 0; o < TOGETHER; o++) sums[o] = fused(in[n], matrix[n * outputs + k + o], sums[o]);
        for (int o = 0; o < TOGETHER; o++) out[k + o] = sums[o];
    }
}

// Transforms LANES columns of `height` elements.
template <bool INVERSE>
inline void lanes(Lanes* in, int height, Lanes* out) {
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
    for (int column = 0; column < width; column += LANES) {
        Lanes in[SIZE], out[SIZE];
        for (int row = 0; row < height; row++) std::memcpy(&in[row], tile + row * SIZE + column, sizeof(Lanes));
        lanes<INVERSE>(in, height, out);
        for (int row = 0; row < height; row += LANES) {
            transpose(out + row);
            for (int lane = 0; lane < LANES; lane++)
                std::memcpy(transposed + (column + lane) * SIZE + row, &out[row + lane], sizeof(Lanes));
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

// Returns a bit mask of the nonzero ones among the first `count` of LANES elements. NaN is nonzero.
inline uint32_t not_zero(const float* x, int count) {
#if defined(__AVX512F__)
    const __m512 all = _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), x);
    return _mm512_cmp_ps_mask(all, _mm512_setzero_ps(), _CMP_NEQ_UQ);
#else
    uint32_t found = 0;
    for (int lane = 0; lane < count; lane++) found |= uint32_t(x[lane] != 0.0f) << lane;
    return found;
#endif
}

// Finds the positions (row * SIZE + column) of nonzero elements. Returns their number, or -1 if it exceeds FEW.
int find_few(const Place& place, uint16_t* found) {
    int count = 0;
    for (int row = 0; row < place.height; row++)
        for (int column = 0; column < place.width; column += LANES) {
            const int width = std::min(LANES, place.width - column);
            uint32_t left = not_zero(place.tile + row * place.stride + column, width);
            if (count + __builtin_popcount(left) > FEW) return -1;
            for (; left; left &= left - 1) found[count++] = uint16_t(row * SIZE + column + __builtin_ctz(left));
        }
    return count;
}

// Inverts a tile of few coefficients: adds one basis row per coefficient, then transforms all columns.
void sparse_tile(const Place& place, const uint16_t* found, int count, float* out, int64_t out_stride) {
    alignas(64) Lanes half[SIZE][SIZE / LANES];
    const int parts = padded(place.width) / LANES;
    std::memset(half, 0, sizeof half[0] * place.height);
    const float* basis = MATRICES.of(place.width, true);
    for (int c = 0; c < count; c++) {
        const int row = found[c] / SIZE, column = found[c] % SIZE;
        const float coefficient = place.tile[row * place.stride + column];
        for (int part = 0; part < parts; part++) {
            Lanes factors;
            std::memcpy(&factors, basis + column * parts * LANES + part * LANES, sizeof factors);
            half[row][part] = fused(factors, coefficient, half[row][part]);
        }
    }
    for (int part = 0; part < parts; part++) {
        Lanes in[SIZE], result[SIZE];
        for (int row = 0; row < place.height; row++) in[row] = half[row][part];
        lanes<true>(in, place.height, result);
        const int width = std::min(LANES, place.width - part * LANES);
        for (int row = 0; row < place.height; row++)
            std::memcpy(out + row * out_stride + part * LANES, &result[row], width * sizeof(float));
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

// Multiplies `count` blocks of `size` elements, a power of two, by Sylvester's matrix times size**-0.5. `out` may be
// `blocks`.
void compress_hadamard(const float* blocks, int64_t count, int64_t size, float* out, int threads) {
    const float factor = float(1 / std::sqrt(double(size)));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t block = 0; block < count; block++) {
        float* x = out + block * size;
        for (int64_t i = 0; i < size; i++) x[i] = blocks[block * size + i] * factor;
        for (int64_t stride = 1; stride < size; stride *= 2)
            for (int64_t i = 0; i < size; i += 2 * stride)
                for (int64_t j = i; j < i + stride; j++) {
                    const float sum = x[j] + x[j + stride], difference = x[j] - x[j + stride];
                    x[j] = sum, x[j + stride] = difference;
                }
    }
}
}
