"""The parts of a generated kernel's C++ that are the same for all kernels."""

PRELUDE = """\
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <omp.h>

typedef uint16_t bf16;  // its bits

template <class To, class From> static inline To bitcast(From x) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To y;
    memcpy(&y, &x, sizeof x);
    return y;
}
// A constant that the compiler does not see: it would select among narrow codes, with masks of four vectors to one.
template <class T> static inline T opaque(T x) {
    volatile T y = x;
    return y;
}
static inline float wide(bf16 x) { return bitcast<float>((uint32_t)x << 16); }
static inline bf16 narrow(float x) {
    const uint32_t u = bitcast<uint32_t>(x);
    const uint32_t nearest = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0 : nearest;
}
static inline float as_bf16(float x) { return wide(narrow(x)); }
static inline float as_f16(float x) { return (float)(_Float16)x; }
"""

DRIVER = """
extern "C" void run(const int64_t* const table, const int64_t n_leaves, const float* const scalars,
                    const int64_t threads) {{
    int64_t blocks = 0, widest = 0;
    for (int64_t i = 0; i < n_leaves; i++) {{
        const int64_t* const leaf = table + i * {columns};
        blocks += leaf[0];
        widest = leaf[2] > widest ? leaf[2] : widest;
    }}
    const int64_t step = (widest * 8 + 127) / 64 * 64;
    #pragma omp parallel num_threads(threads)
    {{
        const int64_t t = omp_get_thread_num(), of = omp_get_num_threads();
        int64_t first = blocks * t / of, todo = blocks * (t + 1) / of - first;
        char* const scratch = (char*)aligned_alloc(64, step * {arrays});
        for (const int64_t* leaf = table; todo > 0; leaf += {columns}) {{
            if (first >= leaf[0]) {{
                first -= leaf[0];
                continue;
            }}
            const int64_t length = leaf[1], width = leaf[2], half = (width + 1) / 2, per_row = leaf[3];
            int64_t row = first / per_row, k = first % per_row;
            for (int64_t b = first; b < leaf[0] && todo > 0; b++, todo--) {{
                const int64_t left = length - k * width;
                (width % 64 == 0 && left >= width ? even_block : any_block)(
                      left < width ? left : width, width, half, scratch, step, scalars,
                      {pointers});
                if (++k == per_row) {{
                    k = 0;
                    row++;
                }}
            }}
            first = 0;
        }}
        free(scratch);
    }}
}}
"""
