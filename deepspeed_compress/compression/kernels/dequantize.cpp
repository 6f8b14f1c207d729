// Decoding of blocks, and adding them to a sum, called through ctypes (cpu.py). reference.py defines the results.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "forms.h"
#include "numbers.h"
#include "packing.h"
#include "tables.h"

namespace {

// Returns the value of a code as a multiple of the scale.
inline int8_t signed_code(int kind, int bits, uint8_t code) {
    if (kind == MEAN) return int8_t(2 * code - 1);
    if (kind == LLOYD) return int8_t(int8_t((code & 1) * 3 + 1) * int8_t((code & 2) - 1));
    if (kind == EIGHT) return int8_t(int8_t(((code & 3) + 1) * ((code & 3) + 2) / 2) * int8_t((code >> 1 & 2) - 1));
    if (kind == TERNARY) return int8_t(code - 1);
    const int sign = 1 << (bits - 1);
    return int8_t((code ^ sign) - sign);  // copies the sign to the unused bits
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

// Adds the codes of COUNT messages, of which each has `stride` bytes, times their scales, one after another.
template <int COUNT>
void add_signed(const uint8_t* __restrict codes, int64_t stride, const float* __restrict scales, float* __restrict out,
                int64_t n) {
    const auto* signed_codes = reinterpret_cast<const int8_t*>(codes);
    for (int64_t i = 0; i < n; i++) {
        float sum = out[i];
        for (int m = 0; m < COUNT; m++) {
            const float product = float(signed_codes[m * stride + i]) * scales[m];
            sum += product;
        }
        out[i] = sum;
    }
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
        add_signed<1>(codes.data() + first, 0, &number, out + first, count);
    }
}

struct Messages {
    const void* const* numbers;
    int number_type;
    const uint8_t* const* codes;
};

// Adds COUNT messages, starting with number `m`, to a block of `out`. `work` has space for the codes of all.
template <int COUNT>
void add_messages(const Form& form, const Messages& messages, int m, int64_t block, float scale, float* out, int64_t n,
                  uint8_t* work) {
    float scales[COUNT];
    for (int i = 0; i < COUNT; i++) {
        uint8_t* codes = work + i * form.block_size;
        unpack(messages.codes[m + i] + code_bytes(form, block * form.block_size), n, form, codes);
        make_signed(form, codes, n);
        scales[i] = load_number(messages.numbers[m + i], messages.number_type, block) * scale;
    }
    add_signed<COUNT>(work, form.block_size, scales, out, n);
}

}  // namespace

extern "C" {

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
    constexpr int TOGETHER = 4;  // messages that are added in registers
    const Messages all{numbers, number_type, codes};
    const int64_t blocks = (n + block_size - 1) / block_size;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<uint8_t> work(TOGETHER * block_size);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block * block_size, count = std::min(block_size, n - first);
            if (!add) std::fill(out + first, out + first + count, 0.0f);
            int m = 0;
            for (; m + TOGETHER <= messages; m += TOGETHER)
                add_messages<TOGETHER>(form, all, m, block, scale, out + first, count, work.data());
            for (; m < messages; m++) add_messages<1>(form, all, m, block, scale, out + first, count, work.data());
        }
    }
}

// Adds `messages` tables of messages, which are `stride` bytes apart.
void compress_dequantize_messages(const uint8_t* packed, int64_t messages, int64_t stride, const Row* rows, int64_t count,
                                  int number_type, int kind, int bits, int64_t block_size, float* out, int at, float scale,
                                  int add, int threads) {
    for_rows(rows, count, threads, [&](const Row& row, int inside) {
        const int64_t size = aligned((row.numel + block_size - 1) / block_size * bytes_of(number_type));
        std::vector<const void*> numbers(messages);
        std::vector<const uint8_t*> codes(messages);
        for (int64_t m = 0; m < messages; m++) {
            numbers[m] = packed + m * stride + row.begin;
            codes[m] = packed + m * stride + row.begin + size;
        }
        compress_dequantize_add(numbers.data(), number_type, codes.data(), int(messages), row.numel, kind, bits, block_size,
                                out + row.at(at), scale, add, inside);
    });
}
}
