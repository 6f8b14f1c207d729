// Selection of the largest magnitudes of rows, and of their sums with residuals, with the results of reference.py.
//
// Magnitudes are compared as integers, so NaN is above infinity.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "vectors.h"

namespace {

constexpr int MAGNITUDE_BITS = 31;

inline Integers magnitudes(const float* x) { return (Integers)((Words)load(x) & 0x7FFFFFFFu); }

// Returns the k-th largest of `count` magnitudes, with all but its upper `bits` bits cleared. Counting the smaller ones
// once for each bit takes several passes, but no branch depends on the values.
int32_t kth_largest(const int32_t* values, int64_t count, int64_t k, int bits) {
    int32_t found = 0;
    for (int bit = MAGNITUDE_BITS - 1; bit >= MAGNITUDE_BITS - bits; bit--) {
        const int32_t next = found | 1 << bit;
        int64_t smaller = 0;
        for (int64_t begin = 0; begin < count; begin += 1 << 20) {
            int32_t here = 0;
            for (int64_t i = begin; i < std::min<int64_t>(count, begin + (1 << 20)); i++) here += values[i] < next;
            smaller += here;
        }
        if (count - smaller >= k) found = next;
    }
    return found;
}

// Returns true if none of COUNT magnitudes is at least `bound`.
template <int COUNT>
inline bool all_below(const float* x, int32_t bound) {
    Integers any = {};
    for (int i = 0; i < COUNT; i += WIDTH) any |= magnitudes(x + i) >= bound;
    return is_zero((Words)any);
}

class Selector {
  public:
    Selector(int64_t n, int64_t k) : n(n), k(k), depth(1) {
        // A compromise between few maxima to search and few elements above the bound; 2k to 4k groups measured best.
        while (depth * 4 * k <= n && depth < 1024) depth *= 2;
    }

    // Writes the columns of the k largest magnitudes of n to `out`, ascending. Among equal ones, the first ones win.
    void select(const float* x, int64_t* out) {
        find_candidates(x, lower_bound(x));
        const int32_t threshold = kth_largest(values.data(), candidates, k, MAGNITUDE_BITS);
        int64_t equal = k;
        for (int64_t c = 0; c < candidates; c++) equal -= values[c] > threshold;
        for (int64_t c = 0; c < candidates; c++) {
            if (values[c] < threshold || (values[c] == threshold && equal-- <= 0)) continue;
            *out++ = columns[c];
        }
    }

  private:
    static constexpr int TOGETHER = 16;  // elements, of which few contain a candidate
    static constexpr int BOUND_BITS = 16;

    // A group consists of `depth` elements at a stride of WIDTH; elements beyond the end are treated as 0. The k largest
    // maxima of groups are k elements, so the k-th largest element is no smaller than the smallest of them.
    int32_t lower_bound(const float* x) {
        maxima.clear();
        for (int64_t begin = 0; begin < n; begin += depth * WIDTH) {
            const int64_t end = std::min(begin + depth * WIDTH, n);
            Integers largest = {};
            int64_t i = begin;
            for (; i + WIDTH <= end; i += WIDTH) {
                const Integers all = magnitudes(x + i);
                largest = all > largest ? all : largest;
            }
            for (int lane = 0; i < end; i++, lane++) largest[lane] = std::max<int32_t>(largest[lane], magnitude(x[i]));
            for (int lane = 0; lane < WIDTH; lane++) maxima.push_back(largest[lane]);
        }
        const int64_t groups = maxima.size();
        return groups >= k ? kth_largest(maxima.data(), groups, k, BOUND_BITS) : 0;
    }

    void find_candidates(const float* x, int32_t bound) {
        candidates = 0;
        for (int64_t begin = 0; begin < n; begin += TOGETHER) {
            const int64_t end = std::min(begin + TOGETHER, n);
            __builtin_prefetch(x + begin + n);  // of the next row
            if (end - begin == TOGETHER && all_below<TOGETHER>(x + begin, bound)) continue;
            if (int64_t(values.size()) < candidates + TOGETHER)
                values.resize(2 * candidates + TOGETHER), columns.resize(values.size());
            for (int64_t i = begin; i < end; i++) {
                values[candidates] = magnitude(x[i]), columns[candidates] = i;
                candidates += values[candidates] >= bound;
            }
        }
    }

    const int64_t n, k;
    int64_t depth, candidates = 0;
    std::vector<int32_t> maxima, values;
    std::vector<int64_t> columns;
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
