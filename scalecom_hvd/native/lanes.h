/* What lanes.c offers, to ctypes (native/__init__.py) and to tensorflow_ops.c. */
#ifndef SCALECOM_LANES_H
#define SCALECOM_LANES_H
#include <stdint.h>

#define LANES 64 /* lanes.LANES: columns of one tile */
#define BLOCK 512 /* integers.BLOCK: values that share a scale; whole tiles */

/* Gradients' dtypes. Kept in step with native/__init__.py. */
enum { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 3 };

/* What a move gives that was handed offsets outside of their lanes, and so did nothing.
 * Kept in step with native.REFUSED. */
enum { OFFSETS_OUTSIDE = -1 };

/* One compressed tensor, kept in step with native.TENSOR: its lanes (lanes.py), and where its
 * numbers lie. */
typedef struct {
    void *grad, *residue;
    int64_t numel, k;
    int64_t width, rows; /* lanes in a full group, at least 1; it owns width * rows elements */
    int64_t offsets_at;  /* in bytes, in the buffer of offsets that its bucket shares */
    int64_t values_at;   /* in elements, in the buffers of values */
    int64_t scales_at;   /* in bytes, in the buffer of offsets: its scales, float32 */
    int32_t dtype; /* the gradient's; float64 gradients have float64 residues, all others float32 */
    int32_t offset_width; /* bytes of an offset; 0 if all are 0, and so lie nowhere (1 row) */
    int32_t frozen;       /* no longer trained: the residue stays, and zeros are sent */
    int32_t levels;       /* values travel as integers from -levels to levels; 0: as numbers */
    double squares;       /* the sum of g * g, which take_and_accumulate writes */
} tensor;

/* `chosen` <- the row of each lane's largest |m + g|, and the scales of the values there (levels),
 * as take_and_accumulate would send them. Residues stay. */
int64_t scalecom_choose(const tensor *tensors, int64_t count, double scale, double extra,
                        void *chosen);
/* values <- m[I] + g[I], and `extra` times m[I] where m and g do not point apart;
 * m[I] <- m[I] - beta * values; then m <- m + beta * g. All in one pass over memory.
 * With levels, values (int8) <- the integers nearest to the values over their scale, which are in
 * the buffer of offsets. If `chosen` is given: then as scalecom_choose.
 * Each tensor's `squares` <- the sum of g * g, infinite if single precision cannot hold it.
 * Returns how many elements of g are bad (NaN, or larger than config.largest_gradient), and how
 * many values are not finite. Both count as zero. Or OFFSETS_OUTSIDE, as all that follow may. */
int64_t scalecom_take_and_accumulate(tensor *tensors, int64_t count, double beta,
                                     double scale, double extra, const void *offsets, void *values,
                                     void *chosen);
/* grad <- scale * averages at I, zero elsewhere. */
int64_t scalecom_scatter(const tensor *tensors, int64_t count, double scale, const void *offsets,
                         const void *averages);
/* Roll a step back: m[I] <- m[I] + beta * values, then m <- m - beta * g, unless it keeps gradients.
 * Gives what was there before, to rounding. */
int64_t scalecom_roll_back(const tensor *tensors, int64_t count, double beta, double scale,
                           const void *offsets, const void *values, int keeps_gradients);
/* packed (words) <- integers of few bits, -levels to levels, several to a word. */
int64_t scalecom_pack(const int8_t *values, int64_t words, int64_t fields, int64_t bits,
                      int64_t levels, uint32_t *packed);
/* averages <- (sum - zeros) * scale * share, for `count` values of one tensor from `first` on, of
 * summed words. They are float32, or float64 if is_double. */
int64_t scalecom_unpack(const uint32_t *packed, int64_t words, int64_t bits, int64_t zeros,
                        int64_t first, int64_t count, const float *scales, double share,
                        int is_double, void *averages);

#endif
