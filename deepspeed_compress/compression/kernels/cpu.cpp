// Kernels for CPUs, called through ctypes (cpu.py); reference.py defines what they must return.
//
// Plain loops over one block at a time, which stay in the first cache and which the compiler turns into vector
// instructions. Compiled without contraction to fused multiply-add and without reordering of sums: the bits are those
// of the reference, on every processor. Only sums in fp64 are taken in another order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

enum Kind { ABSMAX, NORM, MEAN, LLOYD, EIGHT, TERNARY };
enum Type { NONE, FP32, BF16, FP16 };
constexpr int LANES = 16;
constexpr int TRITS = 5;  // in a byte

struct Form {
    int32_t kind, levels, bits;
    int64_t block_size;
};

// Of the packed codes of `n` elements that begin with a block.
inline int64_t code_bytes(const Form& form, int64_t n) {
    if (form.kind != TERNARY) return (n * form.bits + 7) / 8;
    const int64_t whole = n / form.block_size, rest = n % form.block_size;
    return whole * ((form.block_size + TRITS - 1) / TRITS) + (rest + TRITS - 1) / TRITS;
}

// Whether no byte has codes of two blocks.
inline bool fills_bytes(const Form& form) { return form.kind == TERNARY || form.block_size * form.bits % 8 == 0; }

// forms.LEVELS: magnitudes of levels in units of the scale, and where the fit of the scale begins.
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

// Where each level but the first becomes the nearer one.
template <typename L>
struct Borders {
    float of[L::COUNT];

    explicit Borders(float scale) {
        for (int k = 1; k < L::COUNT; k++) of[k] = scale * (float(L::MAGNITUDES[k - 1] + L::MAGNITUDES[k]) / 2);
    }

    // The magnitude that is nearest to `a`, and its place among them.
    float nearest(float a) const {
        float magnitude = float(L::MAGNITUDES[0]);
        for (int k = 1; k < L::COUNT; k++)
            magnitude += float(a >= of[k]) * float(L::MAGNITUDES[k] - L::MAGNITUDES[k - 1]);
        return magnitude;
    }

    // Of that magnitude.
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

// Rounded to nearest even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    const uint16_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return magnitude(x) > 0x7F800000u ? 0x7FC0 : rounded;
}

// As `to_bf16`, but what is finite stays finite.
inline uint16_t to_bf16_saturating(float x) {
    const uint16_t rounded = to_bf16(x);
    return ((rounded & 0x7FFF) == 0x7F80 && magnitude(x) < 0x7F800000u) ? rounded - 1 : rounded;
}

inline float from_bf16(uint16_t x) { return float_of(uint32_t(x) << 16); }

inline uint16_t to_fp16_saturating(float x) {
    const float largest = 65504.0f;
    const float value = std::fabs(x) > largest && magnitude(x) < 0x7F800000u ? std::copysign(largest, x) : x;
    const _Float16 half = _Float16(value);
    uint16_t raw;
    std::memcpy(&raw, &half, 2);
    return raw;
}

inline float from_fp16(uint16_t raw) {
    _Float16 half;
    std::memcpy(&half, &raw, 2);
    return float(half);
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

struct Fp16 {
    using Stored = uint16_t;
    static float load(uint16_t x) { return from_fp16(x); }
    static uint16_t store(float x) { return to_fp16_saturating(x); }
};

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

// Sums of a block in fp32 that are independent of each other, so that they are one vector; blocks in fp64.
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

float load_number(const void* numbers, int type, int64_t i) {
    if (type == FP32) return static_cast<const float*>(numbers)[i];
    const uint16_t raw = static_cast<const uint16_t*>(numbers)[i];
    return type == BF16 ? from_bf16(raw) : from_fp16(raw);
}

// Stores a scale rounded to `type`, a finite one at most `limit` (forms.fitted), and returns it as the receiver sees it.
template <typename Real>
float store_number(void* numbers, int type, int64_t i, Real scale, double limit) {
    const Real value = std::isfinite(scale) && scale > Real(limit) ? Real(limit) : scale;
    if (type == FP32) return static_cast<float*>(numbers)[i] = float(value);
    uint16_t raw;
    if (type == BF16) {
        raw = to_bf16(float(value));
    } else {
        const _Float16 half = _Float16(value);
        std::memcpy(&raw, &half, 2);
    }
    static_cast<uint16_t*>(numbers)[i] = raw;
    return load_number(numbers, type, i);
}

// The i-th number of `uniform`: a counter through the 32-bit mixer "lowbias32".
inline float uniform_number(uint32_t counter, uint64_t key) {
    uint32_t x = (counter + uint32_t(key)) ^ uint32_t(key >> 32);
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return float(int32_t(x >> 8)) * 0x1p-24f;
}

// Sum of f(x[i]) in fp64, in lanes so that vectors can take it.
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
    uint32_t largest = 0;  // compared as integers, NaN is above infinity
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
        // Beyond fp32 no element would reach a border.
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

// The code of an element, as a multiple of the scale.
inline int8_t signed_code(int kind, int bits, uint8_t code) {
    if (kind == MEAN) return int8_t(2 * code - 1);
    if (kind == LLOYD) return int8_t(int8_t((code & 1) * 3 + 1) * int8_t((code & 2) - 1));
    if (kind == EIGHT) return int8_t(int8_t(((code & 3) + 1) * ((code & 3) + 2) / 2) * int8_t((code >> 1 & 2) - 1));
    if (kind == TERNARY) return int8_t(code - 1);
    const int unused = 8 - bits;
    return int8_t(int8_t(code << unused) >> unused);
}

template <int BITS>
void pack_whole(const uint8_t* codes, int64_t bytes, uint8_t* out) {
    constexpr int PER = 8 / BITS, MASK = (1 << BITS) - 1;
    for (int64_t i = 0; i < bytes; i++) {
        uint64_t group = 0;
        std::memcpy(&group, codes + i * PER, PER);
        uint32_t byte = 0;
        for (int place = 0; place < PER; place++) byte |= uint32_t(group >> (8 * place) & MASK) << (BITS * place);
        out[i] = uint8_t(byte);
    }
}

template <>
void pack_whole<8>(const uint8_t* codes, int64_t bytes, uint8_t* out) {
    std::memcpy(out, codes, bytes);
}

template <>
void pack_whole<4>(const uint8_t* codes, int64_t bytes, uint8_t* out) {
    for (int64_t i = 0; i < bytes; i++) {
        uint16_t pair;
        std::memcpy(&pair, codes + 2 * i, 2);
        out[i] = uint8_t((pair & 0x0F) | (pair >> 4 & 0xF0));
    }
}

template <>
void pack_whole<1>(const uint8_t* codes, int64_t bytes, uint8_t* out) {
    for (int64_t i = 0; i < bytes; i++) {
        uint64_t group;  // bytes of 0 or 1: the product brings bit 0 of each to the upper byte
        std::memcpy(&group, codes + 8 * i, 8);
        out[i] = uint8_t((group & 0x0101010101010101u) * 0x0102040810204080u >> 56);
    }
}

template <int BITS>
void unpack_whole(const uint8_t* packed, int64_t bytes, uint8_t* codes) {
    constexpr int PER = 8 / BITS, MASK = (1 << BITS) - 1;
    for (int64_t i = 0; i < bytes; i++) {
        uint64_t group = 0;
        for (int place = 0; place < PER; place++) group |= uint64_t(packed[i] >> (BITS * place) & MASK) << (8 * place);
        std::memcpy(codes + i * PER, &group, PER);
    }
}

template <>
void unpack_whole<8>(const uint8_t* packed, int64_t bytes, uint8_t* codes) {
    std::memcpy(codes, packed, bytes);
}

template <>
void unpack_whole<4>(const uint8_t* packed, int64_t bytes, uint8_t* codes) {
    for (int64_t i = 0; i < bytes; i++) {
        const uint16_t pair = uint16_t((packed[i] & 0x0F) | (packed[i] & 0xF0) << 4);
        std::memcpy(codes + 2 * i, &pair, 2);
    }
}

template <>
void unpack_whole<1>(const uint8_t* packed, int64_t bytes, uint8_t* codes) {
    for (int64_t i = 0; i < bytes; i++) {
        const uint64_t spread = packed[i] * 0x0101010101010101u & 0x8040201008040201u;
        const uint64_t group = (spread + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u;
        std::memcpy(codes + 8 * i, &group, 8);
    }
}

// Eight codes in three bytes.
template <>
void pack_whole<3>(const uint8_t* codes, int64_t bytes, uint8_t* out) {
    for (int64_t i = 0; i < bytes / 3; i++) {
        uint64_t group;
        std::memcpy(&group, codes + 8 * i, 8);
        group &= 0x0707070707070707u;
        group = (group | group >> 5) & 0x003F003F003F003Fu;
        group = (group | group >> 10) & 0x00000FFF00000FFFu;
        group |= group >> 20;
        out[3 * i] = uint8_t(group), out[3 * i + 1] = uint8_t(group >> 8), out[3 * i + 2] = uint8_t(group >> 16);
    }
}

template <>
void unpack_whole<3>(const uint8_t* packed, int64_t bytes, uint8_t* codes) {
    for (int64_t i = 0; i < bytes / 3; i++) {
        uint64_t group = packed[3 * i] | uint64_t(packed[3 * i + 1]) << 8 | uint64_t(packed[3 * i + 2]) << 16;
        group = (group | group << 20) & 0x00000FFF00000FFFu;
        group = (group | group << 10) & 0x003F003F003F003Fu;
        group = (group | group << 5) & 0x0707070707070707u;
        std::memcpy(codes + 8 * i, &group, 8);
    }
}

// Five codes in a byte; bytes of a word times powers of 3 add up in its fifth byte, and none is carried into it;
// bytes behind the fifth do not reach it.
void pack_trits(const uint8_t* codes, int64_t n, uint8_t* out) {
    constexpr uint64_t POWERS = 1ull << 32 | 3ull << 24 | 9ull << 16 | 27ull << 8 | 81ull;
    uint64_t group = 0;
    for (; n >= 8; n -= TRITS, codes += TRITS) {
        std::memcpy(&group, codes, 8);
        *out++ = uint8_t(group * POWERS >> 32);
    }
    for (; n > 0; n -= TRITS, codes += TRITS) {
        group = 0;
        std::memcpy(&group, codes, std::min<int64_t>(n, TRITS));
        *out++ = uint8_t(group * POWERS >> 32);
    }
}

struct Digits {
    uint64_t of[256];  // the five digits of each byte, a byte each

    Digits() {
        for (int value = 0; value < 256; value++) {
            of[value] = 0;
            for (int place = 0, rest = value; place < TRITS; place++, rest /= 3) of[value] |= uint64_t(rest % 3) << 8 * place;
        }
    }
};

const Digits DIGITS;

void unpack_trits(const uint8_t* packed, int64_t n, uint8_t* codes) {
    for (; n >= 8; n -= TRITS, codes += TRITS) std::memcpy(codes, &DIGITS.of[*packed++], 8);
    for (; n > 0; n -= TRITS, codes += TRITS) std::memcpy(codes, &DIGITS.of[*packed++], std::min<int64_t>(n, TRITS));
}

// Codes of any width, one after the other.
void pack_any(const uint8_t* codes, int64_t n, int bits, uint8_t* out) {
    uint64_t pending = 0;
    int held = 0;
    for (int64_t i = 0; i < n; i++) {
        pending |= uint64_t(codes[i] & ((1u << bits) - 1)) << held;
        for (held += bits; held >= 8; held -= 8, pending >>= 8) *out++ = uint8_t(pending);
    }
    if (held) *out = uint8_t(pending);
}

void unpack_any(const uint8_t* packed, int64_t n, int bits, uint8_t* codes) {
    uint64_t pending = 0;
    int held = 0;
    for (int64_t i = 0; i < n; i++) {
        for (; held < bits; held += 8) pending |= uint64_t(*packed++) << held;
        codes[i] = uint8_t(pending & ((1u << bits) - 1));
        pending >>= bits, held -= bits;
    }
}

// Bytes that whole groups of the first `n` codes fill.
template <int BITS>
inline int64_t whole_bytes(int64_t n) {
    return 8 % BITS ? n / 8 * BITS : n * BITS / 8;
}

template <int BITS>
void pack_width(const uint8_t* codes, int64_t n, uint8_t* out) {
    const int64_t whole = whole_bytes<BITS>(n), done = whole * 8 / BITS;
    pack_whole<BITS>(codes, whole, out);
    pack_any(codes + done, n - done, BITS, out + whole);
}

template <int BITS>
void unpack_width(const uint8_t* packed, int64_t n, uint8_t* codes) {
    const int64_t whole = whole_bytes<BITS>(n), done = whole * 8 / BITS;
    unpack_whole<BITS>(packed, whole, codes);
    unpack_any(packed + whole, n - done, BITS, codes + done);
}

void pack(const uint8_t* codes, int64_t n, const Form& form, uint8_t* out) {
    if (form.kind == TERNARY) return pack_trits(codes, n, out);
    switch (form.bits) {
        case 1: return pack_width<1>(codes, n, out);
        case 2: return pack_width<2>(codes, n, out);
        case 3: return pack_width<3>(codes, n, out);
        case 4: return pack_width<4>(codes, n, out);
        case 8: return pack_width<8>(codes, n, out);
        default: return pack_any(codes, n, form.bits, out);
    }
}

void unpack(const uint8_t* packed, int64_t n, const Form& form, uint8_t* codes) {
    if (form.kind == TERNARY) return unpack_trits(packed, n, codes);
    switch (form.bits) {
        case 1: return unpack_width<1>(packed, n, codes);
        case 2: return unpack_width<2>(packed, n, codes);
        case 3: return unpack_width<3>(packed, n, codes);
        case 4: return unpack_width<4>(packed, n, codes);
        case 8: return unpack_width<8>(packed, n, codes);
        default: return unpack_any(packed, n, form.bits, codes);
    }
}

struct Job {
    const float* x;
    int64_t n;
    Form form;
    double limit;
    void* numbers;
    int number_type;
    uint8_t* codes;  // packed, or with `unpacked` one byte an element
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
void remember(const float* x, int64_t n, const int8_t* codes, float scale, typename M::Stored* after) {
    const float factor = -scale;
    for (int64_t i = 0; i < n; i++) {
        const float product = float(codes[i]) * factor;
        after[i] = M::store(x[i] + product);
    }
}

// One block; `sum` and `codes` are work space of block_size elements.
template <typename M, bool REMEMBERS>
void quantize_block(const Job& job, int64_t block, float* sum, int8_t* codes) {
    const int64_t first = block * job.form.block_size, n = std::min(job.form.block_size, job.n - first);
    const float* x = job.x + first;
    if (REMEMBERS) {
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
    if (REMEMBERS) {
        if (job.form.kind >= MEAN) make_signed(job.form, bytes, n);
        remember<M>(x, n, codes, scale, static_cast<typename M::Stored*>(job.after) + first);
    }
}

template <typename M, bool REMEMBERS>
void quantize_all(const Job& job, int threads) {
    const int64_t blocks = (job.n + job.form.block_size - 1) / job.form.block_size;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> sum(REMEMBERS ? job.form.block_size : 0);
        std::vector<int8_t> codes(job.form.block_size);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) quantize_block<M, REMEMBERS>(job, block, sum.data(), codes.data());
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

// A message of blocks that do not fill whole bytes.
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

// The k-th largest of `values`, which are reordered.
uint32_t kth_largest(std::vector<uint32_t>& values, int64_t k) {
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<uint32_t>());
    return values[k - 1];
}

typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));

inline Words magnitudes(const float* x) {
    Words bits;
    std::memcpy(&bits, x, sizeof bits);
    return bits & 0x7FFFFFFFu;
}

// Calls `found` with the place of every magnitude of at least `bound`, which few reach.
template <typename F>
inline void each_at_least(const float* x, int64_t n, uint32_t bound, F found) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Words all = magnitudes(x + i);
#if defined(__AVX512F__)
        for (uint32_t left = _mm512_cmpge_epu32_mask((__m512i)all, _mm512_set1_epi32(int32_t(bound))); left; left &= left - 1)
            found(i + __builtin_ctz(left));
#else
        bool any = false;
        for (int lane = 0; lane < LANES; lane++) any |= all[lane] >= bound;
        for (int lane = 0; any && lane < LANES; lane++)
            if (all[lane] >= bound) found(i + lane);
#endif
    }
    for (; i < n; i++)
        if (magnitude(x[i]) >= bound) found(i);
}

struct Selector {
    int64_t n, k, depth;
    std::vector<uint32_t> maxima, values;
    std::vector<int64_t> columns;

    Selector(int64_t n, int64_t k) : n(n), k(k), depth(1) {
        // Few maxima to search, and few elements that are large enough: measured best at 2k to 4k groups.
        while (depth * 4 * k <= n && depth < 1024) depth *= 2;
    }

    // A group is `depth` elements, LANES from one to the next: what is beyond the end counts as 0. The k largest of the
    // groups' maxima are k elements, so the k-th largest element is no smaller than their least.
    uint32_t lower_bound(const float* x) {
        maxima.clear();
        for (int64_t begin = 0; begin < n; begin += depth * LANES) {
            const int64_t end = std::min(begin + depth * LANES, n);
            Words largest = {};
            int64_t i = begin;
            for (; i + LANES <= end; i += LANES) {
                const Words all = magnitudes(x + i);
                largest = all > largest ? all : largest;
            }
            for (int lane = 0; i < end; i++, lane++) largest[lane] = std::max<uint32_t>(largest[lane], magnitude(x[i]));
            for (int lane = 0; lane < LANES; lane++) maxima.push_back(largest[lane]);
        }
        return int64_t(maxima.size()) >= k ? kth_largest(maxima, k) : 0;
    }

    void select(const float* x, int64_t* out) {
        const uint32_t bound = lower_bound(x);
        values.clear(), columns.clear();
        each_at_least(x, n, bound, [&](int64_t i) { values.push_back(magnitude(x[i])), columns.push_back(i); });
        std::vector<uint32_t>& order = maxima;
        order = values;
        const uint32_t threshold = kth_largest(order, k);
        int64_t equal = k;
        for (uint32_t value : values) equal -= value > threshold;
        for (size_t c = 0; c < values.size(); c++) {
            if (values[c] < threshold || (values[c] == threshold && equal-- <= 0)) continue;
            *out++ = columns[c];
        }
    }
};

// Rows, one memory beside them, and what is found in their sum.
struct SumJob {
    const float* rows;
    int64_t count, n, k;
    const void* before;
    float decay;
    void* after;
    int64_t* columns;
    float* values;
};

template <typename M>
void top_k_of_sum(const SumJob& job, int threads) {
    const auto* before = static_cast<const typename M::Stored*>(job.before);
    auto* after = static_cast<typename M::Stored*>(job.after);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Selector selector(job.n, job.k);
        std::vector<float> sum(job.n);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < job.count; row++) {
            const int64_t first = row * job.n;
            for (int64_t i = 0; i < job.n; i++) {
                const float product = M::load(before[first + i]) * job.decay;
                sum[i] = job.rows[first + i] + product;
                after[first + i] = M::store(sum[i]);
            }
            int64_t* columns = job.columns + row * job.k;
            selector.select(sum.data(), columns);
            for (int64_t c = 0; c < job.k; c++) job.values[row * job.k + c] = sum[columns[c]];
        }
    }
}

}  // namespace

extern "C" {

void compress_uniform(int64_t count, uint64_t key, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t i = 0; i < count; i++) out[i] = uniform_number(uint32_t(i), key);
}

// Types are those of `enum Type`; a memory of type NONE is none. Blocks that do not fill whole bytes are coded one byte
// an element first, into `spare`.
void compress_quantize(const float* x, int64_t n, int kind, int levels, int bits, int64_t block_size, double limit,
                       void* numbers, int number_type, uint8_t* codes, int64_t code_bytes, int stochastic, uint64_t key,
                       int memory_type, const void* before, float decay, void* after, int threads) {
    const Form form{kind, levels, bits, block_size};
    const bool whole_bytes = fills_bytes(form);
    std::vector<uint8_t> spare(whole_bytes ? 0 : n);
    const Job job{x, n, form, limit, numbers, number_type,
                  whole_bytes ? codes : spare.data(), !whole_bytes, stochastic != 0, key, before, decay, after};
    if (memory_type == NONE) quantize_all<Fp32, false>(job, threads);
    if (memory_type == FP32) quantize_all<Fp32, true>(job, threads);
    if (memory_type == BF16) quantize_all<Bf16, true>(job, threads);
    if (!whole_bytes) pack(spare.data(), n, form, codes);
    const int64_t used = ::code_bytes(form, n);
    std::memset(codes + used, 0, code_bytes - used);
}

// Message after message of each block, while the block of `out` is in the first cache. Unless `add`, to zeros.
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

void compress_cast(const float* x, int64_t n, void* out, int type, int threads) {
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

void compress_top_k(const float* rows, int64_t count, int64_t n, int64_t k, int64_t* columns, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Selector selector(n, k);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; row++) selector.select(rows + row * n, columns + row * k);
    }
}

void compress_top_k_of_sum(const float* rows, int64_t count, int64_t n, int64_t k, int memory_type, const void* before,
                           float decay, void* after, int64_t* columns, float* values, int threads) {
    const SumJob job{rows, count, n, k, before, decay, after, columns, values};
    if (memory_type == FP32) top_k_of_sum<Fp32>(job, threads);
    if (memory_type == BF16) top_k_of_sum<Bf16>(job, threads);
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
    std::memset(out, 0, end - out);
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
}
