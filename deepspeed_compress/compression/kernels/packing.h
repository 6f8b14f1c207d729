// Packing of codes from one byte per element into the required bits, and unpacking.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "forms.h"

namespace {

// The widths of which the codes of whole groups are packed and unpacked together, by the loops below.
template <int BITS>
void pack_whole(const uint8_t* codes, int64_t bytes, uint8_t* out);

template <int BITS>
void unpack_whole(const uint8_t* packed, int64_t bytes, uint8_t* codes);

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
void pack_whole<2>(const uint8_t* codes, int64_t bytes, uint8_t* out) {
    for (int64_t i = 0; i < bytes; i++) {
        uint32_t group;
        std::memcpy(&group, codes + 4 * i, 4);
        group &= 0x03030303u;
        group |= group >> 6;
        out[i] = uint8_t(group | group >> 12);
    }
}

template <>
void pack_whole<1>(const uint8_t* codes, int64_t bytes, uint8_t* out) {
    for (int64_t i = 0; i < bytes; i++) {
        uint64_t group;  // the multiplication moves bit 0 of each byte to the top byte
        std::memcpy(&group, codes + 8 * i, 8);
        out[i] = uint8_t((group & 0x0101010101010101u) * 0x0102040810204080u >> 56);
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
void unpack_whole<2>(const uint8_t* packed, int64_t bytes, uint8_t* codes) {
    for (int64_t i = 0; i < bytes; i++) {
        uint32_t group = packed[i];
        group = (group | group << 12) & 0x000F000Fu;
        group = (group | group << 6) & 0x03030303u;
        std::memcpy(codes + 4 * i, &group, 4);
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

// Packs eight codes into three bytes.
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

// Packs five codes into a byte. The multiplication sums the first five bytes, times powers of 3, in the fifth byte.
// There are no carries into it, and later bytes do not affect it.
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
    uint64_t of[256];  // the five digits of each byte value, one per byte

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

// Packs codes of any width one at a time.
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

// Returns the number of bytes that complete groups among the first `n` codes fill.
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

}  // namespace
