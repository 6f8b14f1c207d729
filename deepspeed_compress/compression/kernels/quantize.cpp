// Quantization of blocks, called through ctypes (cpu.py). reference.py defines the results.
//
// Plain loops process a few blocks at a time, which stay in the L1 cache, and are vectorized by the compiler. They are
// compiled without contraction to fused multiply-add and without reordering of sums, so the bits are those of the
// reference on every processor.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "forms.h"
#include "numbers.h"
#include "packing.h"
#include "rules.h"
#include "scales.h"
#include "tables.h"

namespace {

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

float store_scale(const Job& job, const float* x, int64_t n, int64_t block, float largest) {
    auto store = [&](auto scale) { return store_number(job.numbers, job.number_type, block, scale, job.limit); };
    switch (job.form.kind) {
        case ABSMAX: return store(largest / float(job.form.levels));
        case NORM: return store(block_norm(x, n) / double(job.form.levels));
        case MEAN: return store(block_total(x, n) / double(n));
        case EIGHT: return store(block_lloyd<Eight>(x, n));
        case TERNARY: return store(block_lloyd<Ternary>(x, n));
        default: return store(block_lloyd<Four>(x, n));
    }
}

// Returns true if the elements of a block, and their differences to what codes stand for, are finite, and no code needs
// clipping. No code stands for more than 2**16 times the largest magnitude.
bool fits(const Form& form, float largest, float scale) {
    const bool clips = form.kind <= NORM && !(largest / divisor(scale) < float(form.levels) + 0.5f);
    return largest < 0x1p100f && !clips;
}

// Calls `use` with the rule that encodes the elements of the block that starts at `first`.
template <bool FITS, typename F>
void with_rule(const Job& job, int64_t first, float scale, F use) {
    const float levels = float(job.form.levels);
    if (job.form.kind == MEAN) return use(Sign{});
    if (job.form.kind == LLOYD) return use(Nearest<Four>{Borders<Four>(scale)});
    if (job.form.kind == EIGHT) return use(Nearest<Eight>{Borders<Eight>(scale)});
    if (job.form.kind == TERNARY) return use(Nearest<Ternary>{Borders<Ternary>(scale)});
    if (job.stochastic) return use(Rounding<true, FITS>{divisor(scale), levels, uint32_t(first), job.key});
    use(Rounding<false, FITS>{divisor(scale), levels, uint32_t(first), job.key});
}

template <typename Rule>
void encode(Rule rule, const float* __restrict x, int64_t n, uint8_t* __restrict codes) {
    uint32_t number = 0;  // as wide as an element, for the sake of vectors
    for (int64_t i = 0; i < n; i++) codes[i] = rule(x[i], number++).code;
}

// Also stores the differences between the elements and what their codes stand for.
template <typename M, typename Rule>
void encode_and_store(Rule rule, const float* __restrict x, int64_t n, float scale, uint8_t* __restrict codes,
                      typename M::Stored* __restrict after) {
    const float factor = -scale;
    uint32_t number = 0;
    for (int64_t i = 0; i < n; i++) {
        const Encoded encoded = rule(x[i], number++);
        const float product = encoded.multiple * factor;
        codes[i] = encoded.code;
        after[i] = M::store(x[i] + product);
    }
}

// Sets sum = x + decay * before. Returns the largest magnitude among the sums.
template <typename M>
float add_residual(const float* __restrict x, const typename M::Stored* __restrict before, int64_t n, float decay,
                   float* __restrict sum) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const float product = M::load(before[i]) * decay;
        sum[i] = x[i] + product;
        largest = std::max(largest, magnitude(sum[i]));
    }
    return float_of(largest);
}

template <typename T>
inline void prefetch_range(const T* x, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(x + i);
}

// Blocks without a residual.
struct Plain {
    const Job& job;

    void prefetch(int64_t begin, int64_t end) const { prefetch_range(job.x, begin, end); }

    const float* elements(int64_t first, const float*) const { return job.x + first; }

    // Returns the largest magnitude, or 0 if the kind of form does not need it.
    float measure(int64_t first, int64_t n, float*) const {
        return job.form.kind <= NORM ? block_absmax(job.x + first, n) : 0;
    }

    template <bool FITS>
    void make_codes(const float* x, int64_t first, int64_t n, float scale, uint8_t* codes) const {
        with_rule<FITS>(job, first, scale, [&](auto rule) { encode(rule, x, n, codes); });
    }
};

// Sums of blocks and their residuals, which are stored as M. `Finite` is M for numbers that stay finite.
template <typename M, typename Finite>
struct WithResidual {
    using Stored = typename M::Stored;
    const Job& job;

    const Stored* before() const { return static_cast<const Stored*>(job.before); }

    void prefetch(int64_t begin, int64_t end) const {
        prefetch_range(job.x, begin, end);
        prefetch_range(before(), begin, end);
    }

    const float* elements(int64_t, const float* sum) const { return sum; }

    float measure(int64_t first, int64_t n, float* sum) const {
        return add_residual<M>(job.x + first, before() + first, n, job.decay, sum);
    }

    template <bool FITS>
    void make_codes(const float* x, int64_t first, int64_t n, float scale, uint8_t* codes) const {
        using Store = std::conditional_t<FITS, Finite, M>;
        auto* after = static_cast<Stored*>(job.after) + first;
        with_rule<FITS>(job, first, scale, [&](auto rule) { encode_and_store<Store>(rule, x, n, scale, codes, after); });
    }
};

// A few neighboring blocks. The scales of all are computed before the codes of all, so that the processor need not wait
// for one scale after another.
template <typename Blocks>
class Group {
  public:
    explicit Group(const Blocks& blocks)
        : blocks(blocks), size(blocks.job.form.block_size), together(std::max<int64_t>(1, ELEMENTS / size)),
          sums(together * size), largest(together), scales(together), codes(size) {}

    int64_t count() const { return (blocks.job.n + together * size - 1) / (together * size); }

    void quantize(int64_t group) {
        const int64_t begin = group * together, n = blocks.job.n;
        const int64_t here = std::min(together, (n + size - 1) / size - begin);
        for (int64_t b = 0; b < here; b++) measure(b, begin + b);
        for (int64_t b = 0; b < here; b++) {
            const int64_t next = (begin + b + together) * size;
            blocks.prefetch(next, std::min(n, next + size));
            encode(b, begin + b);
        }
    }

  private:
    static constexpr int64_t ELEMENTS = 1024;  // with sums and codes well within the L1 cache

    void measure(int64_t place, int64_t block) {
        const int64_t first = block * size, n = std::min(size, blocks.job.n - first);
        float* sum = &sums[place * size];
        largest[place] = blocks.measure(first, n, sum);
        scales[place] = store_scale(blocks.job, blocks.elements(first, sum), n, block, largest[place]);
    }

    void encode(int64_t place, int64_t block) {
        const Job& job = blocks.job;
        const int64_t first = block * size, n = std::min(size, job.n - first);
        const float* x = blocks.elements(first, &sums[place * size]);
        if (fits(job.form, largest[place], scales[place]))
            blocks.template make_codes<true>(x, first, n, scales[place], codes.data());
        else
            blocks.template make_codes<false>(x, first, n, scales[place], codes.data());
        if (job.unpacked)
            std::memcpy(job.codes + first, codes.data(), n);
        else
            pack(codes.data(), n, job.form, job.codes + code_bytes(job.form, first));
    }

    const Blocks blocks;
    const int64_t size, together;  // elements of a block, and blocks of a group
    std::vector<float> sums, largest, scales;
    std::vector<uint8_t> codes;
};

template <typename Blocks>
void quantize_all(const Blocks& blocks, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Group<Blocks> group(blocks);
        const int64_t count = group.count();
#pragma omp for schedule(static)
        for (int64_t g = 0; g < count; g++) group.quantize(g);
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
    if (residual_type == NONE) quantize_all(Plain{job}, threads);
    if (residual_type == FP32) quantize_all(WithResidual<Fp32, Fp32>{job}, threads);
    if (residual_type == BF16) quantize_all(WithResidual<Bf16, FiniteBf16>{job}, threads);
    if (!whole_bytes) pack(spare.data(), n, form, codes);
    const int64_t used = ::code_bytes(form, n);
    if (code_bytes > used) std::memset(codes + used, 0, code_bytes - used);
}

// Quantizes each message: its elements begin at column `at` of its row, and its residuals at `first`.
void compress_quantize_messages(const float* x, int at, const Row* rows, int64_t count, int kind, int levels, int bits,
                                int64_t block_size, double limit, int number_type, uint8_t* out, int stochastic,
                                uint64_t state, uint64_t sender, int residual_type, const void* before, float decay,
                                void* after, int threads) {
    for_rows(rows, count, threads, [&](const Row& row, int inside) {
        uint8_t* message = out + row.begin;
        const int64_t size = (row.numel + block_size - 1) / block_size * bytes_of(number_type), begin = aligned(size);
        std::memset(message + size, 0, begin - size);
        const int64_t offset = residual_type == NONE ? 0 : row.first * bytes_of(residual_type);
        compress_quantize(x + row.at(at), row.numel, kind, levels, bits, block_size, limit, message, number_type,
                          message + begin, row.end - row.begin - begin, stochastic,
                          message_key(state, sender, row.owner, row.channel), residual_type,
                          static_cast<const char*>(before) + offset, decay, static_cast<char*>(after) + offset, inside);
    });
}
}
