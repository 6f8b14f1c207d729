// Prints a digest of the results of every C++ kernel, so that builds for several instruction sets can be compared.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

extern "C" {
void compress_uniform(int64_t, uint64_t, float*, int);
void compress_cast(const float*, int64_t, void*, int, int);
void compress_add_cast(const void*, int, int64_t, float*, float, int);
void compress_square_norm(const void*, int, int64_t, double*);
void compress_pack_bits(const int64_t*, int64_t, int, uint8_t*, int64_t);
void compress_unpack_bits(const uint8_t*, int, int64_t, int64_t*);
void compress_quantize(const float*, int64_t, int, int, int, int64_t, double, void*, int, uint8_t*, int64_t, int, uint64_t,
                       int, const void*, float, void*, int);
void compress_dequantize_add(const void* const*, int, const uint8_t* const*, int, int64_t, int, int, int64_t, float*, float,
                             int, int);
void compress_top_k(const float*, int64_t, int64_t, int64_t, int64_t*, int);
void compress_top_k_of_sum(const float*, int64_t, int64_t, int64_t, int, const void*, float, void*, int64_t*, float*, int);
void compress_dct(const float*, const int64_t*, float*, const int64_t*, int64_t, int64_t, int, int, int, int);
void compress_hadamard(const float*, int64_t, int64_t, float*, int);
}

namespace {

constexpr int FP32 = 1, BF16 = 2, FP16 = 3, MAX_N = 20000;

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// FNV-1a. NaN is canonical, because processors choose its sign and payload.
struct Digest {
    uint64_t state = 0xCBF29CE484222325u;

    void add(uint64_t value) {
        for (int byte = 0; byte < 8; byte++) state = (state ^ (value >> 8 * byte & 0xFF)) * 0x100000001B3u;
    }
    void add(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        add(uint64_t(x == x ? bits : 0x7FC00000u));
    }
    void add16(const std::vector<uint16_t>& raw, int type) {
        const uint16_t infinity = type == BF16 ? 0x7F80 : 0x7C00;
        for (uint16_t x : raw) add(uint64_t((x & 0x7FFF) > infinity ? infinity + 1 : x));
    }
    template <typename T>
    void add(const std::vector<T>& values) {
        for (const T& value : values) add(value);
    }
};

template <>
void Digest::add(const std::vector<uint8_t>& values) {
    for (uint8_t value : values) add(uint64_t(value));
}

template <>
void Digest::add(const std::vector<int64_t>& values) {
    for (int64_t value : values) add(uint64_t(value));
}

// Sums of uniform numbers, which are exact: nearly normal, with the last bits filled.
std::vector<float> ordinary(int64_t n) {
    std::vector<float> x(n);
    uint64_t state = 12345;
    for (float& value : x) {
        int64_t sum = 0;
        for (int i = 0; i < 4; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            sum += int64_t(state >> 42) - (1 << 21);
        }
        value = float(sum) * 0x1p-21f;
    }
    return x;
}

// Denormal, huge, equal and non-finite numbers, whole blocks of some of them, and ties.
std::vector<float> awkward(int64_t n) {
    std::vector<float> x = ordinary(n);
    for (int64_t i = 0; i < n; i++) {
        const int64_t part = i * 10 / n;
        if (part == 0) x[i] *= 1e-42f;
        if (part == 1) x[i] *= 1e38f;
        if (part == 2) x[i] = -3.5f;
        if (part == 3) x[i] = float(i % 29 - 14) / 2;
        if (part == 4) x[i] = float_of(i % 2 ? 0u : 0x80000000u);
        if (part == 5 && i % 257 == 0) x[i] = float_of(0x7F800000u);
        if (part == 6 && i % 257 == 0) x[i] = -float_of(0x7F800000u);
        if (part == 7 && i % 257 == 0) x[i] = float_of(0x7FC00000u);
    }
    return x;
}

void print(const std::string& name, const Digest& digest) {
    std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(digest.state));
}

struct Form {
    const char* name;
    int kind, levels, bits;
    int64_t block_size;
};

const Form FORMS[] = {
    {"int8", 0, 127, 8, 256},    {"int4", 0, 7, 4, 256},        {"int4-33", 0, 7, 4, 33},   {"3-bits", 0, 3, 3, 24},
    {"ternary", 0, 1, 2, 32},    {"qsgd", 1, 7, 4, 64},         {"qsgd-5", 1, 15, 5, 50},   {"sign", 2, 1, 1, 64},
    {"sign-7", 2, 1, 1, 7},      {"four-levels", 3, 4, 2, 64},  {"eight-levels", 4, 10, 3, 64},
    {"three-levels", 5, 1, 2, 64}, {"three-levels-7", 5, 1, 2, 7}, {"int4-2000", 0, 7, 4, 2000},
};

void quantize(const std::string& inputs, const Form& form, const std::vector<float>& x, int type, int residual, int stochastic) {
    const int64_t n = x.size(), blocks = (n + form.block_size - 1) / form.block_size;
    std::vector<float> scales(blocks), out = ordinary(n), kept = ordinary(n);
    std::vector<uint16_t> short_scales(blocks), short_kept(n);
    for (int64_t i = 0; i < n; i++) std::memcpy(&short_kept[i], reinterpret_cast<char*>(&kept[i]) + 2, 2);
    std::vector<uint8_t> codes(n + blocks);
    void* numbers = type == FP32 ? static_cast<void*>(scales.data()) : short_scales.data();
    void* buffer = residual == FP32 ? static_cast<void*>(kept.data()) : residual ? short_kept.data() : nullptr;
    compress_quantize(x.data(), n, form.kind, form.levels, form.bits, form.block_size, type == FP16 ? 65504.0 : 2e36, numbers,
                      type, codes.data(), codes.size(), stochastic, 0x123456789ABCDEF0u, residual, buffer, 0.9f, buffer, 1);
    Digest encoded, decoded;
    encoded.add(scales), encoded.add16(short_scales, type), encoded.add(codes), encoded.add(kept), encoded.add16(short_kept, BF16);
    const std::string name = inputs + "-" + form.name + "-" + std::to_string(type) + std::to_string(residual) + std::to_string(stochastic);
    print("quantize-" + name, encoded);
    const void* all_numbers[] = {numbers, numbers, numbers};
    const uint8_t* all_codes[] = {codes.data(), codes.data(), codes.data()};
    for (int add = 0; add < 2; add++)
        compress_dequantize_add(all_numbers, type, all_codes, add ? 3 : 1, n, form.kind, form.bits, form.block_size, out.data(),
                                1.0f / 3, add, 1);
    decoded.add(out);
    print("decode-" + name, decoded);
}

void vectors(const std::string& inputs, const std::vector<float>& x) {
    const int64_t n = x.size();
    for (int type : {FP32, BF16, FP16}) {
        std::vector<float> same(n), sum = ordinary(n);
        std::vector<uint16_t> shorter(n);
        void* out = type == FP32 ? static_cast<void*>(same.data()) : shorter.data();
        Digest digest;
        double norm = 0;
        compress_cast(x.data(), n, out, type, 1);
        compress_add_cast(out, type, n, sum.data(), 1.0f / 3, 1);
        compress_square_norm(out, type, n, &norm);
        digest.add(same), digest.add16(shorter, type), digest.add(sum);
        print("cast-" + inputs + std::to_string(type), digest);
        Digest of_norm;
        of_norm.add(float(norm));
        print("norm-" + inputs + std::to_string(type), of_norm);
    }
}

void select(const std::string& inputs, const std::vector<float>& x) {
    const int64_t shapes[][2] = {{41, 4096}, {1, 7}, {64, 64}, {1000, 4096}, {30, 5000}, {200, 20000}};
    for (const auto& [k, width] : shapes) {
        const int64_t rows = int64_t(x.size()) / width;
        std::vector<int64_t> columns(rows * k), of_sum(rows * k);
        std::vector<float> values(rows * k);
        std::vector<uint16_t> kept(x.size(), 0x3F80);
        compress_top_k(x.data(), rows, width, k, columns.data(), 1);
        compress_top_k_of_sum(x.data(), rows, width, k, BF16, kept.data(), 0.5f, kept.data(), of_sum.data(), values.data(), 1);
        Digest digest;
        digest.add(columns), digest.add(of_sum), digest.add(values), digest.add16(kept, BF16);
        print("top-k-" + inputs + std::to_string(k) + "-of-" + std::to_string(width), digest);
    }
}

void transform(const std::string& inputs, const std::vector<float>& x) {
    const int sides[][2] = {{64, 64}, {32, 32}, {3, 64}, {7, 5}, {1, 64}, {64, 20}};
    for (const auto& [height, width] : sides)
        for (int inverse = 0; inverse < 2; inverse++) {
            const int64_t size = height * width, tiles = 3, strides[] = {size, size, width};
            std::vector<float> out(tiles * size), few(x.begin(), x.begin() + tiles * size), sparse(tiles * size);
            for (size_t i = 0; i < few.size(); i++) few[i] = i % 37 ? 0.0f : few[i];
            compress_dct(x.data(), strides, out.data(), strides, tiles, 1, height, width, inverse, 1);
            compress_dct(few.data(), strides, sparse.data(), strides, tiles, 1, height, width, inverse, 1);
            Digest digest;
            digest.add(out), digest.add(sparse);
            print("dct-" + inputs + std::to_string(height) + "x" + std::to_string(width) + (inverse ? "-inverse" : ""), digest);
        }
    for (int64_t size = 1; size <= 16384; size *= 2) {
        std::vector<float> out(x.size() / size * size);
        compress_hadamard(x.data(), out.size() / size, size, out.data(), 1);
        Digest digest;
        digest.add(out);
        print("hadamard-" + inputs + std::to_string(size), digest);
    }
}

void integers() {
    for (int width : {1, 3, 12, 20, 33}) {
        std::vector<int64_t> values(1001), back(1001);
        for (size_t i = 0; i < values.size(); i++) values[i] = int64_t(i * 0x9E3779B97F4A7C15u >> (64 - width));
        std::vector<uint8_t> packed((1001 * width + 7) / 8 + 3, 0xFF);
        compress_pack_bits(values.data(), values.size(), width, packed.data(), packed.size());
        compress_unpack_bits(packed.data(), width, back.size(), back.data());
        Digest digest;
        digest.add(packed), digest.add(back);
        print("pack-" + std::to_string(width), digest);
    }
    std::vector<float> noise(1001);
    compress_uniform(noise.size(), 0xFEDCBA9876543210u, noise.data(), 1);
    Digest digest;
    digest.add(noise);
    print("uniform", digest);
}

}  // namespace

int main() {
    integers();
    for (const bool is_awkward : {false, true}) {
        const std::string name = is_awkward ? "awkward" : "ordinary";
        const std::vector<float> x = is_awkward ? awkward(MAX_N + 3) : ordinary(MAX_N + 3);
        for (const Form& form : FORMS)
            for (int residual : {0, FP32, BF16})
                for (int stochastic : {0, 1})
                    quantize(name, form, x, residual == FP32 ? BF16 : residual == BF16 ? FP16 : FP32, residual, stochastic);
        vectors(name, x);
        select(name, x);
        // Sums of infinities are NaN, and which of several NaN is kept is not defined.
        transform(name, x);
    }
}
