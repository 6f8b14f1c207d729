// Casts of vectors, norms, random numbers, and packing of integers of any width, with the results of reference.py.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "tables.h"

namespace {

template <typename M>
void cast_all(const float* x, int64_t n, typename M::Stored* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < n; i++) out[i] = M::store(x[i]);
}

template <typename M>
void add_all(const typename M::Stored* values, int64_t n, float* out, float scale, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const float product = M::load(values[i]) * scale;
        out[i] += product;
    }
}

// Within a block, independent fp32 sums that form one vector. Blocks are summed in fp64.
template <typename M>
double sum_squares(const typename M::Stored* values, int64_t n) {
    constexpr int64_t LANES = 16, BLOCK = 1024;
    double total = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        float lanes[LANES] = {};
        const int64_t end = std::min(n, start + BLOCK), whole = start + (end - start) / LANES * LANES;
        for (int64_t i = start; i < whole; i += LANES)
            for (int64_t lane = 0; lane < LANES; lane++) {
                const float x = M::load(values[i + lane]);
                lanes[lane] += x * x;
            }
        for (int64_t i = whole; i < end; i++) lanes[0] += M::load(values[i]) * M::load(values[i]);
        for (const float lane : lanes) total += lane;
    }
    return total;
}

}  // namespace

extern "C" {

// Returns the vector instructions that the library is compiled for.
const char* compress_instruction_set() {
#if defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "AVX2";
#elif defined(__AVX__)
    return "AVX";
#elif defined(__SSE2__)
    return "SSE";
#elif defined(__ARM_FEATURE_SVE)
    return "SVE";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "no vector";
#endif
}

void compress_uniform(int64_t count, uint64_t key, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < count; i++) out[i] = uniform_number(uint32_t(i), key);
}

void compress_cast(const float* x, int64_t n, void* out, int type, int threads) {
    if (!n) return;  // x and out may be null, which memcpy does not allow
    if (type == FP32) std::memcpy(out, x, n * sizeof(float));
    if (type == BF16) cast_all<Bf16>(x, n, static_cast<uint16_t*>(out), threads);
    if (type == FP16) cast_all<Fp16>(x, n, static_cast<uint16_t*>(out), threads);
}

void compress_add_cast(const void* values, int type, int64_t n, float* out, float scale, int threads) {
    if (type == FP32) add_all<Fp32>(static_cast<const float*>(values), n, out, scale, threads);
    if (type == BF16) add_all<Bf16>(static_cast<const uint16_t*>(values), n, out, scale, threads);
    if (type == FP16) add_all<Fp16>(static_cast<const uint16_t*>(values), n, out, scale, threads);
}

void compress_square_norm(const void* values, int type, int64_t n, double* out) {
    if (type == FP32) *out = sum_squares<Fp32>(static_cast<const float*>(values), n);
    if (type == BF16) *out = sum_squares<Bf16>(static_cast<const uint16_t*>(values), n);
    if (type == FP16) *out = sum_squares<Fp16>(static_cast<const uint16_t*>(values), n);
}

void compress_pack_bits(const int64_t* values, int64_t count, int width, uint8_t* out, int64_t bytes) {
    uint64_t pending = 0;
    int held = 0;
    uint8_t* end = out + bytes;
    for (int64_t i = 0; i < count; i++) {
        pending |= uint64_t(values[i]) << held;
        for (held += width; held >= 8; held -= 8, pending >>= 8) *out++ = uint8_t(pending);
    }
    if (held) *out++ = uint8_t(pending);
    if (end > out) std::memset(out, 0, end - out);
}

void compress_unpack_bits(const uint8_t* packed, int width, int64_t count, int64_t* values) {
    uint64_t pending = 0;
    int held = 0;
    for (int64_t i = 0; i < count; i++) {
        for (; held < width; held += 8) pending |= uint64_t(*packed++) << held;
        values[i] = int64_t(pending & ((uint64_t(1) << width) - 1));
        pending >>= width, held -= width;
    }
}

void compress_cast_messages(const float* x, int at, const Row* rows, int64_t count, int type, uint8_t* out, int threads) {
    for_rows(rows, count, threads, [&](const Row& row, int inside) {
        const int64_t used = row.numel * bytes_of(type);
        compress_cast(x + row.at(at), row.numel, out + row.begin, type, inside);
        std::memset(out + row.begin + used, 0, row.end - row.begin - used);
    });
}

// Adds `messages` tables of messages, which are `stride` bytes apart.
void compress_add_cast_messages(const uint8_t* packed, int64_t messages, int64_t stride, const Row* rows, int64_t count,
                                int type, float* out, int at, float scale, int add, int threads) {
    for_rows(rows, count, threads, [&](const Row& row, int inside) {
        float* target = out + row.at(at);
        if (!add) std::fill(target, target + row.numel, 0.0f);
        for (int64_t m = 0; m < messages; m++)
            compress_add_cast(packed + m * stride + row.begin, type, row.numel, target, scale, inside);
    });
}

// Copies the elements of each row, of `size` bytes, from `source` to `first`, or back.
void compress_copy_runs(const char* x, char* out, const Row* rows, int64_t count, int64_t size, int back, int threads) {
    for_rows(rows, count, threads, [&](const Row& row, int) {
        const int64_t begin = back ? row.first : row.source, end = back ? row.source : row.first;
        std::memcpy(out + end * size, x + begin * size, row.numel * size);
    });
}
}
