/* Parameters moved a step ahead on a CPU: see exchange/moves_ahead.py, whose numbers these are, to
 * rounding. Nothing that ranks share is made of them, so nothing here is held to the bit.
 */
#include <math.h>
#include <stdint.h>

#include "moves_ahead.h"
#include "target_clones.h"

/* Elements whose squares are added up in float32; sums of these are added up in float64. */
enum { SQUARES = 4096, COLUMNS = 16 };

/* The norm of x - y. y: NULL stands for zeros. */
static inline __attribute__((always_inline)) double
norm_of_difference(const float *x, const float *y, int64_t numel) {
    double total = 0;
    for (int64_t begin = 0; begin < numel; begin += SQUARES) {
        int64_t end = begin + SQUARES < numel ? begin + SQUARES : numel, at = begin;
        float sums[COLUMNS] = {0};
        for (; at + COLUMNS <= end; at += COLUMNS)
            for (int i = 0; i < COLUMNS; i++) {
                float d = y ? x[at + i] - y[at + i] : x[at + i];
                sums[i] += d * d;
            }
        for (; at < end; at++) {
            float d = y ? x[at] - y[at] : x[at];
            sums[0] += d * d;
        }
        for (int i = 0; i < COLUMNS; i++) total += sums[i];
    }
    return sqrt(total);
}

CLONES static double norm_of(const float *x, int64_t numel) {
    return norm_of_difference(x, 0, numel);
}

CLONES static double norm_of_step(const move *m) {
    return norm_of_difference(m->spare, m->own, m->numel);
}

static float finite_or_zero(double x) { return isfinite(x) ? (float)x : 0; }

/* What u has besides the residue. */
enum { NOTHING, MOMENTUM, STEP };

/* The last three are constants where this is called, so each caller is a loop of its own. */
static inline __attribute__((always_inline)) void
move_elements(const move *m, float weight, float share, float factor, int follows, int divides,
              int root) {
    float *own = m->own, *spare = m->spare;
    const float *residue = m->residue, *momentum = m->momentum, *second = m->second;
    float rate = m->rate, eps = m->eps, per_correction = m->per_correction, most = m->largest;
    float enters = m->enters;
#pragma GCC ivdep
    for (int64_t i = 0; i < m->numel; i++) {
        float before = own[i], ahead = residue[i] * weight;
        if (follows == MOMENTUM) ahead += momentum[i] * share;
        if (follows == STEP) ahead += (spare[i] - before) * share;
        ahead *= factor;
        if (divides) {
            float scale = second[i] * per_correction + enters * ahead * ahead;
            ahead = ahead / ((root ? sqrtf(scale) : scale) + eps);
            ahead = ahead == ahead ? ahead : 0; /* NaN is no direction */
            ahead = ahead > most ? most : ahead < -most ? -most : ahead;
        }
        spare[i] = before;
        own[i] = before - rate * ahead;
    }
}

CLONES int64_t scalecom_move_ahead(move *moves, int64_t count, double weight, double beta) {
    float w = (float)weight, per_beta = (float)(1 / beta);
    for (int64_t i = 0; i < count; i++) {
        move *m = moves + i;
        int follows = m->momentum && weight != 1;
        double waits = follows || m->follows_step ? norm_of(m->residue, m->numel) : 0;
        double other = follows ? norm_of(m->momentum, m->numel) : 0;
        if (m->follows_step) other = norm_of_step(m);
        /* The momentum becomes as long as the residue, where it has a length. */
        float share = finite_or_zero(m->sign * (1 - weight) * (waits / other));
        float factor = m->follows_step ? finite_or_zero(other / waits) : per_beta;
        if (m->follows_step) move_elements(m, w, share, factor, STEP, 0, 0);
        else if (!m->second && share == 0) move_elements(m, w, share, factor, NOTHING, 0, 0);
        else if (!m->second) move_elements(m, w, share, factor, MOMENTUM, 0, 0);
        else if (share == 0 && m->root) move_elements(m, w, share, factor, NOTHING, 1, 1);
        else if (share == 0) move_elements(m, w, share, factor, NOTHING, 1, 0);
        else if (m->root) move_elements(m, w, share, factor, MOMENTUM, 1, 1);
        else move_elements(m, w, share, factor, MOMENTUM, 1, 0);
        m->moved = 1;
    }
    return 0;
}
