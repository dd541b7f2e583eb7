/* The fused lane kernel: what one step does to a tensor's residue, in C for CPUs.
 *
 * Loaded through ctypes by native/__init__.py, which releases the GIL around every call. Needs
 * neither Python's headers nor a framework. lanes.py says how a tensor is cut into lanes;
 * reference.py is the same arithmetic in NumPy. It knows lanes only: exact selection is done by the
 * frameworks' own operations.
 *
 * Results are bit-identical to NumPy's and to the plain-torch kernel's: so no -ffast-math and no
 * fused multiply-adds (setup.py). Magnitudes are compared as integers, sign bit dropped. For finite
 * numbers this is the order of |x|, it needs no floating-point compare, and NaN and infinity are
 * larger than all numbers whatever the compiler assumes.
 */
#include <float.h>
#include <stdint.h>
#include <string.h>

#include "lanes.h"
#include "target_clones.h"

/* How many elements ahead of their use memory is fetched, and how many a line of a cache has. */
#define AHEAD 512
#define LINE (int)(64 / sizeof(REAL))

#ifdef HAS_CLONES
#include <immintrin.h>
/* Half as wide, such stores take half as long again. */
#define STREAMS __attribute__((target("avx2")))
#endif

static inline float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* float16 -> float32, exact. A subnormal's mantissa is put below 0.5, which is then taken off. So
 * no step meets a float32 denormal, and the result does not depend on the processor's
 * flush-to-zero mode (torch.set_flush_denormal). */
static inline float load_float16(uint16_t h) {
    uint32_t magnitude = h & 0x7fff, sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t special = magnitude >= 0x7c00 ? 0x7f800000u | magnitude << 13 : normal;
    uint32_t subnormal = bits_of(float_of(0x3f000000u | magnitude) - 0.5f);
    return float_of((magnitude < 0x0400 ? subnormal : special) | sign);
}
static inline float load_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }

/* float32 -> float16, round to nearest even; infinity beyond float16's range, as a cast gives. */
static inline uint16_t store_float16(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    /* Below 2^-14, adding 0.5 aligns the float's mantissa with float16's subnormals. */
    if (magnitude < 0x38800000u)
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    magnitude += 0xfffu + (magnitude >> 13 & 1) - (112u << 23);
    return (uint16_t)(sign | magnitude >> 13);
}
/* float32 -> bfloat16, round to nearest even. */
static inline uint16_t store_bfloat16(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline float load_float32(float x) { return x; }
static inline double load_float64(double x) { return x; }

/* The offset of one lane, of 1, 2 or 4 bytes. With 0 bytes it is 0. */
static inline int64_t load_offset(const void *offsets, int width, int64_t lane) {
    if (width == 0) return 0;
    if (width == 1) return ((const uint8_t *)offsets)[lane];
    if (width == 2) return ((const int16_t *)offsets)[lane];
    return ((const int32_t *)offsets)[lane];
}
static inline void store_offset(void *offsets, int width, int64_t lane, int64_t row) {
    if (width == 1) ((uint8_t *)offsets)[lane] = (uint8_t)row;
    else if (width == 2) ((int16_t *)offsets)[lane] = (int16_t)row;
    else if (width == 4) ((int32_t *)offsets)[lane] = (int32_t)row;
}

/* Whether n offsets are at least 0 and below `rows`. */
#define BELOW(type)                                                                      \
    static int below_##type(const type *offsets, int64_t n, int64_t rows) {              \
        type least = 0, most = 0;                                                        \
        for (int64_t i = 0; i < n; i++) {                                                \
            least = offsets[i] < least ? offsets[i] : least;                             \
            most = offsets[i] > most ? offsets[i] : most;                                \
        }                                                                                \
        return n == 0 || (least >= 0 && most < rows);                                    \
    }
BELOW(uint8_t)
BELOW(int16_t)
BELOW(int32_t)
static int are_below(const void *offsets, int width, int64_t n, int64_t rows) {
    if (width == 1) return below_uint8_t(offsets, n, rows);
    if (width == 2) return below_int16_t(offsets, n, rows);
    return below_int32_t(offsets, n, rows);
}

/* Lanes in full groups. */
static inline int64_t full_lanes(const tensor *t) {
    return t->k ? (t->k - 1) / t->width * t->width : 0;
}

/* Whether all offsets stay in their lanes. They come from other ranks and from files, so nobody
 * follows them unseen. */
static int offsets_fit(const tensor *t, const void *offsets) {
    if (!t->offset_width) return 1;
    offsets = (const char *)offsets + t->offsets_at;
    int64_t full = full_lanes(t);
    int64_t left = t->numel - full * t->rows; /* elements of the last group */
    if (!are_below(offsets, t->offset_width, full, t->rows)) return 0;
    for (int64_t lane = full; lane < t->k; lane++) {
        int64_t row = load_offset(offsets, t->offset_width, lane);
        if (row < 0 || lane - full + row * (t->k - full) >= left) return 0;
    }
    return 1;
}
static int all_fit(const tensor *tensors, int64_t count, const void *offsets) {
    for (const tensor *t = tensors; t < tensors + count; t++)
        if (!offsets_fit(t, offsets)) return 0;
    return 1;
}

/* Where one tensor's values are taken, and where they go. */
typedef struct { const void *offsets; const float *scales; void *values; } wire;

/* At most 64 lanes side by side: lane l's element in row r is at start + l + r * stride, below
 * end. */
typedef struct { int64_t start, end, stride, lane; int n; } tile;

static inline tile tile_at(const tensor *t, int64_t lane) {
    int64_t full = full_lanes(t);
    int64_t first = lane < full ? lane / t->width * t->width : full; /* the group's first lane */
    int64_t lanes = lane < full ? t->width : t->k - full;
    int64_t start = first * t->rows, left = first + lanes - lane;
    int64_t end = lane < full ? start + lanes * t->rows : t->numel;
    return (tile){start + (lane - first), end, lanes, lane, left < LANES ? (int)left : LANES};
}
static inline int64_t index_of(const tensor *t, tile at, const void *offsets, int l) {
    return at.start + l + load_offset(offsets, t->offset_width, at.lane + l) * at.stride;
}

/* Whether a tile has so few rows, all of them full, that vectors which pass over all elements are
 * faster than going to one element of each lane. */
static inline int is_short(const tensor *t, tile at) {
    return t->rows <= 8 && at.n == LANES && at.start + (t->rows - 1) * at.stride + LANES <= at.end;
}

/* Whether an output is written past the caches: smaller ones are likely still in a cache when the
 * optimizer reads them. */
static inline int may_stream(const void *to, int64_t bytes) {
#ifdef STREAMS
    return bytes >= 1 << 20 && !((uintptr_t)to & 31) && __builtin_cpu_supports("avx2");
#else
    return (void)to, (void)bytes, 0;
#endif
}

/* integers.scale_divisor. */
static inline double scale_divisor(int levels) {
    double few = (levels + 3) / 4.0, many = (levels + 1) / 8.0;
    if (few > 2) few = 2;
    return few > many ? few : many;
}

/* The scale of a block, of the sum of its magnitudes: a float32 of 8 significant bits, so that no
 * product with an integer is rounded, and that the order of summands does not show. */
static inline float scale_of(double total, int64_t count, int levels) {
    double mean = total / ((double)count * scale_divisor(levels));
    float scale = float_of(bits_of(mean < FLT_MAX ? (float)mean : FLT_MAX) & 0xffff0000u);
    return scale >= 0x1p-100f ? scale : 0;
}

/* Writes the scales of chosen values, block by block, as they come by in order. Magnitudes are
 * added in vectors of four, four of them side by side. */
typedef double four_doubles __attribute__((vector_size(32)));
typedef struct { float *scales; four_doubles parts[4]; } scaler;
static inline scaler scaler_at(const tensor *t, void *chosen) {
    return (scaler){.scales = (float *)((char *)chosen + t->scales_at)};
}
/* Lanes of one element each, which have no offsets, are taken in runs. Each loop over a run does
 * one thing, so all are vectors' loops. A block is whole runs. */
enum { RUN = 128 };
static inline int run_at(const tensor *t, int64_t lane) {
    return t->k - lane < RUN ? (int)(t->k - lane) : RUN;
}

#define CONCAT_(a, b) a##_##b
#define CONCAT(a, b) CONCAT_(a, b)
#define NAME(stem) CONCAT(stem, GRAD)

#define REAL float
#define INTEGER int32_t
#define MAGNITUDE 0x7fffffff
#define EXPONENT 0x7f800000
#define LARGEST 0x71800000 /* the bits of 2^100: config.largest_gradient("float32") */

#define GRAD float32
#define GRAD_TYPE float
#define GRAD_BITS int32_t
#define STORE(x) (x)
#include "lanes_template.h"
#undef GRAD
#undef GRAD_TYPE
#undef GRAD_BITS
#undef STORE

#define GRAD float16
#define GRAD_TYPE uint16_t
#define GRAD_BITS int16_t
#define STORE(x) store_float16(x)
#include "lanes_template.h"
#undef GRAD
#undef GRAD_TYPE
#undef GRAD_BITS
#undef STORE

#define GRAD bfloat16
#define GRAD_TYPE uint16_t
#define GRAD_BITS int16_t
#define STORE(x) store_bfloat16(x)
#include "lanes_template.h"
#undef GRAD
#undef GRAD_TYPE
#undef GRAD_BITS
#undef STORE

#undef REAL
#undef INTEGER
#undef MAGNITUDE
#undef EXPONENT
#undef LARGEST

#define REAL double
#define INTEGER int64_t
#define MAGNITUDE 0x7fffffffffffffff
#define EXPONENT 0x7ff0000000000000
#define LARGEST 0x7bf0000000000000 /* the bits of 2^960: config.largest_gradient("float64") */
#define GRAD float64
#define GRAD_TYPE double
#define GRAD_BITS int64_t
#define STORE(x) (x)
#include "lanes_template.h"

/* The exported functions make one move for all compressed tensors of a bucket. They pick the
 * instance by the gradient's dtype. */
#define EACH(call, ...)                                                           \
    int64_t total = 0;                                                            \
    for (__typeof__(tensors) t = tensors; t < tensors + count; t++) {                 \
        switch (t->dtype) {                                                       \
        case FLOAT32: total += call##_float32(t, __VA_ARGS__); break;             \
        case FLOAT64: total += call##_float64(t, __VA_ARGS__); break;             \
        case FLOAT16: total += call##_float16(t, __VA_ARGS__); break;             \
        case BFLOAT16: total += call##_bfloat16(t, __VA_ARGS__); break;           \
        }                                                                         \
    }

int64_t scalecom_choose(const tensor *tensors, int64_t count, double scale, double extra,
                        void *chosen) {
    EACH(choose, scale, extra, chosen)
    return total;
}
int64_t scalecom_take_and_accumulate(tensor *tensors, int64_t count, double beta,
                                     double scale, double extra, const void *offsets, void *values,
                                     void *chosen) {
    if (!all_fit(tensors, count, offsets)) return OFFSETS_OUTSIDE;
    EACH(take_and_accumulate, beta, scale, extra, offsets, values, chosen)
    return total;
}
int64_t scalecom_scatter(const tensor *tensors, int64_t count, double scale, const void *offsets,
                         const void *averages) {
    if (!all_fit(tensors, count, offsets)) return OFFSETS_OUTSIDE;
    EACH(scatter, scale, offsets, averages)
#ifdef STREAMS
    _mm_sfence(); /* before other threads read the gradients */
#endif
    return total;
}
int64_t scalecom_roll_back(const tensor *tensors, int64_t count, double beta, double scale,
                           const void *offsets, const void *values, int keeps_gradients) {
    if (!all_fit(tensors, count, offsets)) return OFFSETS_OUTSIDE;
    EACH(roll_back, beta, scale, offsets, values, keeps_gradients)
    return total;
}

/* Words of fields, as integers.py lays them out. A chunk of words stays in the first cache. */
#define WORDS 2048

CLONES int64_t scalecom_pack(const int8_t *values, int64_t words, int64_t fields, int64_t bits,
                             int64_t levels, uint32_t *packed) {
    for (int64_t begin = 0; begin < words; begin += WORDS) {
        int64_t end = begin + WORDS < words ? begin + WORDS : words;
        for (int64_t field = 0; field < fields; field++) {
            const int8_t *own = values + field * words;
            int shift = (int)(field * bits), add = (int)levels;
            if (!field) memset(packed + begin, 0, (size_t)(end - begin) * 4);
            for (int64_t w = begin; w < end; w++) packed[w] |= (uint32_t)(own[w] + add) << shift;
        }
    }
    return 0;
}

#define UNPACK(REAL)                                                                     \
    for (int64_t l = 0; l < count;) {                                                    \
        int64_t field = (first + l) / words, end = (l / BLOCK + 1) * BLOCK;              \
        if (end > (field + 1) * words - first) end = (field + 1) * words - first;        \
        if (end > count) end = count;                                                    \
        const uint32_t *own = packed + first - field * words;                            \
        int shift = (int)(field * bits);                                                 \
        REAL scale = scales[l / BLOCK], of_sum = (REAL)share, *out = averages;           \
        for (; l < end; l++)                                                             \
            out[l] = (REAL)((int32_t)(own[l] >> shift & mask) - zero) * scale * of_sum;  \
    }

CLONES int64_t scalecom_unpack(const uint32_t *packed, int64_t words, int64_t bits, int64_t zeros,
                               int64_t first, int64_t count, const float *scales, double share,
                               int is_double, void *averages) {
    uint32_t mask = (1u << bits) - 1;
    int32_t zero = (int32_t)zeros;
    if (is_double) { UNPACK(double) } else { UNPACK(float) }
    return 0;
}
