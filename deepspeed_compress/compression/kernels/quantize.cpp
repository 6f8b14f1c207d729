// Quantization and dequantization of blocks on CPUs, called through ctypes (cpu.py). reference.py defines the results.
//
// Plain loops process one block at a time, which stays in the L1 cache, and are vectorized by the compiler. They are
// compiled without contraction to fused multiply-add and without reordering of sums, so the bits are those of the
// reference on every processor. Only sums in fp64 use another order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "forms.h"
#include "numbers.h"
#include "packing.h"

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

template <bool STOCHASTIC>
void round_codes(const float* x, int64_t n, float scale, float levels, uint32_t first, uint64_t key, int8_t* codes) {
    const float divisor = scale > 0 ? scale : 1.0f;
    for (int64_t i = 0; i < n; i++) {
        float q = x[i] / divisor;
        q = STOCHASTIC ? std::floor(q + uniform_number(first + uint32_t(i), key)) : std::nearbyint(q);
        q = q < -levels ? -levels : q;
        q = q > levels ? levels : q;
        codes[i] = int8_t(int32_t(q == q ? q : 0.0f));
    }
}

template <typename L>
void lloyd_codes(const float* x, int64_t n, float scale, int8_t* codes) {
    const Borders<L> borders{scale};
    for (int64_t i = 0; i < n; i++) {
        const int32_t place = borders.place(std::fabs(x[i]));
        const int32_t positive = x[i] >= 0;
        codes[i] = int8_t(L::MAGNITUDES[0] ? L::COUNT * positive + place : 1 + place * (2 * positive - 1));
    }
}

void sign_codes(const float* x, int64_t n, int8_t* codes) {
    for (int64_t i = 0; i < n; i++) codes[i] = x[i] >= 0;
}

// Returns the value of a code as a multiple of the scale.
inline int8_t signed_code(int kind, int bits, uint8_t code) {
    if (kind == MEAN) return int8_t(2 * code - 1);
    if (kind == LLOYD) return int8_t(int8_t((code & 1) * 3 + 1) * int8_t((code & 2) - 1));
    if (kind == EIGHT) return int8_t(int8_t(((code & 3) + 1) * ((code & 3) + 2) / 2) * int8_t((code >> 1 & 2) - 1));
    if (kind == TERNARY) return int8_t(code - 1);
    const int unused = 8 - bits;
    return int8_t(int8_t(code << unused) >> unused);
}

struct Job {
    const float* x;
    int64_t n;
    Form form;
    double limit;
    void* numbers;
    int number_type;
    uint8_t* codes;  // packed or, if `unpacked`, one byte per element
    bool unpacked;
    bool stochastic;
    uint64_t key;
    const void* before;
    float decay;
    void* after;
};

float store_scale(const Job& job, const float* x, int64_t n, int64_t block) {
    auto store = [&](auto scale) { return store_number(job.numbers, job.number_type, block, scale, job.limit); };
    switch (job.form.kind) {
        case ABSMAX: return store(block_absmax(x, n) / float(job.form.levels));
        case NORM: return store(block_norm(x, n) / double(job.form.levels));
        case MEAN: return store(block_total(x, n) / double(n));
        case EIGHT: return store(block_lloyd<Eight>(x, n));
        case TERNARY: return store(block_lloyd<Ternary>(x, n));
        default: return store(block_lloyd<Four>(x, n));
    }
}

void make_codes(const Job& job, const float* x, int64_t n, float scale, int64_t first, int8_t* codes) {
    if (job.form.kind == MEAN) return sign_codes(x, n, codes);
    if (job.form.kind == LLOYD) return lloyd_codes<Four>(x, n, scale, codes);
    if (job.form.kind == EIGHT) return lloyd_codes<Eight>(x, n, scale, codes);
    if (job.form.kind == TERNARY) return lloyd_codes<Ternary>(x, n, scale, codes);
    const auto round = job.stochastic ? round_codes<true> : round_codes<false>;
    round(x, n, scale, float(job.form.levels), uint32_t(first), job.key, codes);
}

void make_signed(const Form& form, uint8_t* codes, int64_t n) {
    const int kind = form.kind, bits = form.bits;
    if (kind == MEAN) {
        for (int64_t i = 0; i < n; i++) codes[i] = uint8_t(2 * codes[i] - 1);
    } else if (kind == EIGHT) {
        for (int64_t i = 0; i < n; i++) codes[i] = uint8_t(signed_code(EIGHT, bits, codes[i]));
    } else if (kind == TERNARY) {
        for (int64_t i = 0; i < n; i++) codes[i] = uint8_t(signed_code(TERNARY, bits, codes[i]));
    } else if (kind == LLOYD || bits != 8) {
        for (int64_t i = 0; i < n; i++) codes[i] = uint8_t(signed_code(kind, bits, codes[i]));
    }
}

template <typename M>
void store_residual(const float* x, int64_t n, const int8_t* codes, float scale, typename M::Stored* after) {
    const float factor = -scale;
    for (int64_t i = 0; i < n; i++) {
        const float product = float(codes[i]) * factor;
        after[i] = M::store(x[i] + product);
    }
}

// Quantizes one block. `sum` and `codes` are work space of block_size elements.
template <typename M, bool HAS_RESIDUAL>
void quantize_block(const Job& job, int64_t block, float* sum, int8_t* codes) {
    const int64_t first = block * job.form.block_size, n = std::min(job.form.block_size, job.n - first);
    const float* x = job.x + first;
    if (HAS_RESIDUAL) {
        const auto* before = static_cast<const typename M::Stored*>(job.before) + first;
        for (int64_t i = 0; i < n; i++) {
            const float product = M::load(before[i]) * job.decay;
            sum[i] = x[i] + product;
        }
        x = sum;
    }
    const float scale = store_scale(job, x, n, block);
    make_codes(job, x, n, scale, first, codes);
    auto* bytes = reinterpret_cast<uint8_t*>(codes);
    if (job.unpacked)
        std::memcpy(job.codes + first, bytes, n);
    else
        pack(bytes, n, job.form, job.codes + code_bytes(job.form, first));
    if (HAS_RESIDUAL) {
        if (job.form.kind >= MEAN) make_signed(job.form, bytes, n);
        store_residual<M>(x, n, codes, scale, static_cast<typename M::Stored*>(job.after) + first);
    }
}

template <typename M, bool HAS_RESIDUAL>
void quantize_all(const Job& job, int threads) {
    const int64_t blocks = (job.n + job.form.block_size - 1) / job.form.block_size;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> sum(HAS_RESIDUAL ? job.form.block_size : 0);
        std::vector<int8_t> codes(job.form.block_size);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) quantize_block<M, HAS_RESIDUAL>(job, block, sum.data(), codes.data());
    }
}

void add_signed(const uint8_t* codes, float scale, float* out, int64_t n) {
    const auto* signed_codes = reinterpret_cast<const int8_t*>(codes);
    for (int64_t i = 0; i < n; i++) {
        const float product = float(signed_codes[i]) * scale;
        out[i] += product;
    }
}

void add_block(const Form& form, const uint8_t* packed, float scale, float* out, int64_t n, uint8_t* codes) {
    unpack(packed, n, form, codes);
    make_signed(form, codes, n);
    add_signed(codes, scale, out, n);
}

// Adds a message in which bytes contain codes of two blocks.
void add_straddling(const Form& form, const void* numbers, int number_type, const uint8_t* packed, int64_t n,
                    float* out, float scale, int threads) {
    std::vector<uint8_t> codes(n);
    unpack(packed, n, form, codes.data());
    const int64_t blocks = (n + form.block_size - 1) / form.block_size;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        const float number = load_number(numbers, number_type, block) * scale;
        const int64_t first = block * form.block_size, count = std::min(form.block_size, n - first);
        make_signed(form, codes.data() + first, count);
        add_signed(codes.data() + first, number, out + first, count);
    }
}

}  // namespace

extern "C" {

// Types are those of `enum Type`; without error feedback, residual_type is NONE. Codes of blocks that do not fill whole
// bytes are first written to `spare`, with one byte per element.
void compress_quantize(const float* x, int64_t n, int kind, int levels, int bits, int64_t block_size, double limit,
                       void* numbers, int number_type, uint8_t* codes, int64_t code_bytes, int stochastic, uint64_t key,
                       int residual_type, const void* before, float decay, void* after, int threads) {
    const Form form{kind, levels, bits, block_size};
    const bool whole_bytes = fills_bytes(form);
    std::vector<uint8_t> spare(whole_bytes ? 0 : n);
    const Job job{x, n, form, limit, numbers, number_type,
                  whole_bytes ? codes : spare.data(), !whole_bytes, stochastic != 0, key, before, decay, after};
    if (residual_type == NONE) quantize_all<Fp32, false>(job, threads);
    if (residual_type == FP32) quantize_all<Fp32, true>(job, threads);
    if (residual_type == BF16) quantize_all<Bf16, true>(job, threads);
    if (!whole_bytes) pack(spare.data(), n, form, codes);
    const int64_t used = ::code_bytes(form, n);
    if (code_bytes > used) std::memset(codes + used, 0, code_bytes - used);
}

// For each block, adds one message after another while the block of `out` is in the L1 cache. Starts at 0 unless `add`.
void compress_dequantize_add(const void* const* numbers, int number_type, const uint8_t* const* codes, int messages,
                             int64_t n, int kind, int bits, int64_t block_size, float* out, float scale, int add,
                             int threads) {
    const Form form{kind, 0, bits, block_size};
    if (!fills_bytes(form)) {
        if (!add) std::fill(out, out + n, 0.0f);
        for (int m = 0; m < messages; m++) add_straddling(form, numbers[m], number_type, codes[m], n, out, scale, threads);
        return;
    }
    const int64_t blocks = (n + block_size - 1) / block_size;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<uint8_t> work(block_size);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block * block_size, count = std::min(block_size, n - first);
            if (!add) std::fill(out + first, out + first + count, 0.0f);
            for (int m = 0; m < messages; m++) {
                const float number = load_number(numbers[m], number_type, block) * scale;
                add_block(form, codes[m] + code_bytes(form, first), number, out + first, count, work.data());
            }
        }
    }
}
}
