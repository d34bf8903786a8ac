"""The sums of squares behind the global norm, as C++: one pass over the gradients at the speed of memory."""

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from functional_lowbit._core.cpp import library
from functional_lowbit._private import is_watched, is_wrapped

DTYPES = {torch.float32: 0, torch.bfloat16: 1}

SOURCE = """\
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>

enum { EXPONENTS = 278, INFINITE = EXPONENTS, NOT_A_NUMBER, BINS };  // as in _norm.py
enum { LANES = 16, SUMS = 4 };  // four sums of sixteen lanes each, which do not wait for each other
typedef float Lanes __attribute__((vector_size(4 * LANES)));

static inline Lanes values(const float* x) {
    Lanes y;
    memcpy(&y, x, sizeof y);
    return y;
}
static inline Lanes values(const uint16_t* x) {  // bfloat16
    Lanes y;
    uint32_t u[LANES];
    for (int l = 0; l < LANES; l++) u[l] = (uint32_t)x[l] << 16;
    memcpy(&y, u, sizeof y);
    return y;
}

static inline void put(double* bins, float s) {
    uint32_t u;
    memcpy(&u, &s, 4);
    const int exponent = u >> 23 & 255;  // s is not negative, but a NaN may have the sign bit
    if (exponent == 255) {
        bins[s != s ? NOT_A_NUMBER : INFINITE] += 1;
    } else if (exponent) {
        bins[exponent + 22] += (u & 0x7fffff) | 0x800000;
    } else if (u) {
        int e;
        const float mantissa = frexpf(s, &e);
        bins[e + 148] += mantissa * 16777216.0;
    }
}

// Sums side by side, then added in pairs: an order that only the block decides.
template <class T> static inline float block_sum(const T* x, int64_t n) {
    Lanes sums[SUMS] = {};
    int64_t i = 0;
    for (; i + SUMS * LANES <= n; i += SUMS * LANES) {
        #pragma GCC unroll 4
        for (int k = 0; k < SUMS; k++) {
            const Lanes v = values(x + i + k * LANES);
            sums[k] += v * v;
        }
    }
    #pragma GCC unroll 4
    for (int k = 0; i < n && k < SUMS; i += LANES, k++) {
        T rest[LANES] = {};
        memcpy(rest, x + i, (n - i < LANES ? n - i : LANES) * sizeof(T));
        const Lanes v = values(rest);
        sums[k] += v * v;
    }
    const Lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum[LANES];
    memcpy(sum, &all, sizeof sum);
    #pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) sum[l] += sum[l + half];
    return sum[0];
}

template <class T>
static void leaf_bins(double* bins, const T* x, int64_t rows, int64_t length, int64_t block, int64_t t, int64_t of) {
    const int64_t per_row = (length + block - 1) / block, blocks = rows * per_row;
    int64_t b = blocks * t / of, start = per_row ? b % per_row * block : 0;
    const T* at = x + (per_row ? b / per_row : 0) * length;
    for (const int64_t end = blocks * (t + 1) / of; b < end; b++) {
        const int64_t left = length - start;
        put(bins, block_sum(at + start, left < block ? left : block));
        start += block;
        if (start >= length) {
            start = 0;
            at += length;
        }
    }
}

extern "C" void square_bins(const int64_t* table, int64_t n_leaves, double* all_bins, int64_t threads) {
    #pragma omp parallel num_threads(threads)
    {
        double bins[BINS] = {0};
        for (int64_t i = 0; i < n_leaves; i++) {
            const int64_t* leaf = table + 5 * i;
            const int64_t t = omp_get_thread_num(), of = omp_get_num_threads();
            if (leaf[0])
                leaf_bins(bins, (const uint16_t*)leaf[4], leaf[1], leaf[2], leaf[3], t, of);
            else
                leaf_bins(bins, (const float*)leaf[4], leaf[1], leaf[2], leaf[3], t, of);
        }
        #pragma omp critical
        for (int i = 0; i < BINS; i++) all_bins[i] += bins[i];  // whole numbers below 2**53: the order does not matter
    }
}
"""


@lru_cache(maxsize=1)
def _library() -> Any:
    """The compiled function, or None where there is no compiler."""
    try:
        function = library.load(SOURCE).square_bins
    except library.NoCompiler:
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    return function


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is memory of the CPU that nothing but its numbers is asked of: no graph, no vmap, no tangent."""
    if x.device.type != "cpu" or type(x) is not Tensor or x.requires_grad or is_wrapped(x):
        return False
    return x.numel() == 0 or x.data_ptr() != 0


def square_bins(tensors: Sequence[Tensor], block: int, n_bins: int) -> Tensor | None:
    """The squares of CPU tensors, added up by exponent: float64[n_bins]; None if this cannot be done here.

    Args:
        tensors: Of one dimension, where each element is a block of its own, or more.
        block: Elements of a row (the dimensions after the first) that are summed in float32.
        n_bins: Length of the result, see `_core.leafwise.norm`.
    """
    if is_watched() or not all(map(_is_plain, tensors)):
        return None
    function = _library()
    if function is None:
        return None
    tensors = [x.resolve_neg() for x in tensors]
    tensors = [x if x.dtype in DTYPES and x.is_contiguous() else x.float().contiguous() for x in tensors if x.numel()]
    table = array("q")
    for x in tensors:
        rows, size = (1, 1) if x.ndim < 2 else (x.shape[0], block)
        table.extend((DTYPES[x.dtype], rows, x.numel() // rows, size, x.data_ptr()))
    bins = torch.zeros(n_bins, dtype=torch.float64, device="cpu")
    threads = torch.get_num_threads() if sum(x.numel() for x in tensors) >= library.SMALL else 1
    if tensors:
        function(table.buffer_info()[0], len(tensors), bins.data_ptr(), threads)
    return bins
