// Selection of the largest magnitudes of rows, and of their sums with residuals, with the results of reference.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "numbers.h"

namespace {

// Returns the k-th largest of `values`, which are reordered.
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

// Calls `found` with the index of every magnitude of at least `bound`. Optimized for few of them.
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
        // A compromise between few maxima to search and few elements above the bound; 2k to 4k groups measured best.
        while (depth * 4 * k <= n && depth < 1024) depth *= 2;
    }

    // A group consists of `depth` elements at a stride of LANES; elements beyond the end are treated as 0. The k
    // largest maxima of groups are k elements, so the k-th largest element is no smaller than the smallest of them.
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

// Rows, their residuals, and the selected elements of their sum.
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

void compress_top_k(const float* rows, int64_t count, int64_t n, int64_t k, int64_t* columns, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Selector selector(n, k);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; row++) selector.select(rows + row * n, columns + row * k);
    }
}

void compress_top_k_of_sum(const float* rows, int64_t count, int64_t n, int64_t k, int residual_type, const void* before,
                           float decay, void* after, int64_t* columns, float* values, int threads) {
    const SumJob job{rows, count, n, k, before, decay, after, columns, values};
    if (residual_type == FP32) top_k_of_sum<Fp32>(job, threads);
    if (residual_type == BF16) top_k_of_sum<Bf16>(job, threads);
}
}
