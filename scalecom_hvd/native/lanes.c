/* The fused lane kernel: what one step does to a tensor's residue, in C for CPUs.
 *
 * Loaded through ctypes by native/__init__.py, which releases the GIL around every call. Needs neither Python's headers
 * nor a framework. lanes.py says how a tensor is cut into lanes; reference.py is the same arithmetic in NumPy.
 *
 * Results are bit-identical to NumPy's and to the plain-torch kernel's: so no -ffast-math and no fused multiply-adds
 * (setup.py). Magnitudes are compared as integers, sign bit dropped: for finite numbers this is the order of |x|,
 * it needs no floating-point compare, and an exponent of all ones tells NaN and infinity whatever the compiler assumes.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

#define LANES 64 /* lanes.LANES: columns of one tile */

/* What a pass chooses on. Kept in step with native/__init__.py. */
enum { CHOOSE_NOTHING = 0, CHOOSE_ACCUMULATOR = 1, CHOOSE_RESIDUE = 2 };
enum { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 3 };

static inline float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* float16 -> float32, exact. A subnormal's mantissa is put below 0.5, which is then taken off: no step meets a float32 denormal, so
 * the result does not depend on the processor's flush-to-zero mode (torch.set_flush_denormal). */
static inline float load_float16(uint16_t h) {
    uint32_t magnitude = h & 0x7fff, sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t special = magnitude >= 0x7c00 ? 0x7f800000u | magnitude << 13 : normal;
    uint32_t subnormal = bits_of(float_of(0x3f000000u | magnitude) - 0.5f);
    return float_of((magnitude < 0x0400 ? subnormal : special) | sign);
}
static inline float load_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }

/* float32 -> float16, round to nearest even; |x| is at most 65504 here (gather clamps), and finite. */
static inline uint16_t store_float16(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude < 0x38800000u) /* below 2^-14: adding 0.5 aligns the float's mantissa with float16's subnormals */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    magnitude += 0xfffu + (magnitude >> 13 & 1) - (112u << 23);
    return (uint16_t)(sign | magnitude >> 13);
}
/* float32 -> bfloat16, round to nearest even, finite. */
static inline uint16_t store_bfloat16(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline float load_float32(float x) { return x; }
static inline double load_float64(double x) { return x; }

/* The offset of one lane, of 1, 2 or 4 bytes. */
static inline int64_t load_offset(const void *offsets, int width, int64_t lane) {
    if (width == 1) return ((const uint8_t *)offsets)[lane];
    if (width == 2) return ((const int16_t *)offsets)[lane];
    return ((const int32_t *)offsets)[lane];
}
static inline void store_offset(void *offsets, int width, int64_t lane, int64_t row) {
    if (width == 1) ((uint8_t *)offsets)[lane] = (uint8_t)row;
    else if (width == 2) ((int16_t *)offsets)[lane] = (int16_t)row;
    else ((int32_t *)offsets)[lane] = (int32_t)row;
}

/* One tensor's lanes (lanes.py): groups of `width` lanes; a full group owns width * rows elements.
 * A width of 0 stands for exact selection: offsets are flat positions. */
typedef struct { int64_t numel, k, width, rows; } geometry;

static inline int64_t full_lanes(geometry g) { return g.k && g.width ? (g.k - 1) / g.width * g.width : 0; }
/* The flat index of lane `lane`'s winner. */
static inline int64_t index_of(geometry g, int64_t lane, int64_t row) {
    if (!g.width) return row;
    int64_t full = full_lanes(g);
    if (lane < full) return lane / g.width * g.width * g.rows + lane % g.width + row * g.width;
    return full * g.rows + (lane - full) + row * (g.k - full);
}

#define CONCAT_(a, b) a##_##b
#define CONCAT(a, b) CONCAT_(a, b)
#define NAME(stem) CONCAT(stem, GRAD)

#define REAL float
#define INTEGER int32_t
#define MAGNITUDE 0x7fffffff
#define EXPONENT 0x7f800000

#define GRAD float32
#define GRAD_TYPE float
#define STORE(x) (x)
#include "lanes_template.h"
#undef GRAD
#undef GRAD_TYPE
#undef STORE

#define GRAD float16
#define GRAD_TYPE uint16_t
#define STORE(x) store_float16_any(x)
/* An averaged value may be beyond float16's range: infinity then, as a cast gives. */
static inline uint16_t store_float16_any(float x) {
    uint32_t magnitude = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    return store_float16(x);
}
#include "lanes_template.h"
#undef GRAD
#undef GRAD_TYPE
#undef STORE

#define GRAD bfloat16
#define GRAD_TYPE uint16_t
#define STORE(x) store_bfloat16(x)
#include "lanes_template.h"
#undef GRAD
#undef GRAD_TYPE
#undef STORE

#undef REAL
#undef INTEGER
#undef MAGNITUDE
#undef EXPONENT

#define REAL double
#define INTEGER int64_t
#define MAGNITUDE 0x7fffffffffffffff
#define EXPONENT 0x7ff0000000000000
#define GRAD float64
#define GRAD_TYPE double
#define STORE(x) (x)
#include "lanes_template.h"

/* The exported functions pick the instance by the gradient's dtype; float64 gradients have float64 residues, all others float32. */
#define DISPATCH(call, ...)                                    \
    switch (dtype) {                                           \
    case FLOAT32: return call##_float32(__VA_ARGS__);          \
    case FLOAT64: return call##_float64(__VA_ARGS__);          \
    case FLOAT16: return call##_float16(__VA_ARGS__);          \
    case BFLOAT16: return call##_bfloat16(__VA_ARGS__);        \
    }                                                          \
    return -1;

int64_t scalecom_pass(int dtype, const void *grad, void *residue, int64_t numel, int64_t k, int64_t width, int64_t rows,
                      double beta, double scale, int choose, void *offsets, int offset_width) {
    geometry g = {numel, k, width, rows};
    DISPATCH(pass, grad, residue, g, beta, scale, choose, offsets, offset_width)
}
int64_t scalecom_gather(int dtype, const void *grad, void *residue, int64_t numel, int64_t k, int64_t width, int64_t rows,
                        double beta, double scale, double share, const void *offsets, int offset_width, int wire_float16, double limit,
                        void *values) {
    geometry g = {numel, k, width, rows};
    DISPATCH(gather, grad, residue, g, beta, scale, share, offsets, offset_width, wire_float16, limit, values)
}
int64_t scalecom_scatter(int dtype, void *grad, int64_t numel, int64_t k, int64_t width, int64_t rows, double scale, const void *offsets,
                         int offset_width, int wire_float16, const void *values) {
    geometry g = {numel, k, width, rows};
    DISPATCH(scatter, grad, g, scale, offsets, offset_width, wire_float16, values)
}
int64_t scalecom_undo(int dtype, const void *grad, void *residue, int64_t numel, int64_t k, int64_t width, int64_t rows, double beta,
                      double scale, const void *offsets, int offset_width, int wire_float16, const void *values) {
    geometry g = {numel, k, width, rows};
    DISPATCH(undo, grad, residue, g, beta, scale, offsets, offset_width, wire_float16, values)
}
