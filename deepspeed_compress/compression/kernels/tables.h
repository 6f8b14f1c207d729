// Tables of messages (tables.py), and a loop over them.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace {

// A row. Elements begin at `source` of the tensor that they come from, or at `first` of a flat tensor.
struct Row {
    int64_t source, first, numel, begin, end, owner, channel;

    int64_t at(int column) const { return column ? first : source; }
};

inline int64_t aligned(int64_t size) { return (size + 3) / 4 * 4; }

inline int64_t bytes_of(int type) { return type == FP32 ? 4 : 2; }

// Calls use(row, threads) for each of the rows: many of them are shared out among threads, a few are processed one after
// another by all threads.
template <typename F>
void for_rows(const Row* rows, int64_t count, int threads, F use) {
    const bool shared = threads > 1 && count >= 2 * threads;
#pragma omp parallel for num_threads(threads) if (shared) schedule(static)
    for (int64_t i = 0; i < count; i++) use(rows[i], shared ? 1 : threads);
}

}  // namespace
