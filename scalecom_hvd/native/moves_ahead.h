/* What moves_ahead.c offers to native/__init__.py. */
#ifndef SCALECOM_MOVES_AHEAD_H
#define SCALECOM_MOVES_AHEAD_H
#include <stdint.h>

/* One parameter's way ahead, kept in step with native.MOVE; exchange/moves_ahead.py says what the
 * fields are. All tensors are contiguous float32 and do not overlap. */
typedef struct {
    float *own, *spare;
    const float *residue, *momentum, *second; /* momentum, second: NULL where there is none */
    int64_t numel;
    float rate, sign, per_correction, eps, largest, enters;
    int32_t root;         /* whether the root of the second moment divides, or itself */
    int32_t follows_step; /* whether spare - own is the momentum, and D(u) as long */
    int32_t moved;        /* takes 1 when it has been moved */
} move;

/* spare <- own; own <- own - rate * D(factor * (weight * residue + share * momentum)).
 * Returns 0. */
int64_t scalecom_move_ahead(move *moves, int64_t count, double weight, double beta);

#endif
