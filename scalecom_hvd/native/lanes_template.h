/* The kernel's body, included by lanes.c once per gradient dtype. Not for other use.
 *
 * GRAD, GRAD_TYPE, STORE: the gradient's dtype.  REAL, INTEGER, MAGNITUDE, EXPONENT: the residue's. Lengths are in elements.
 * `scale` turns gradients into the residue's units (1 / loss scale). A non-finite gradient element counts as zero everywhere.
 */

static inline INTEGER NAME(bits)(REAL x) { INTEGER bits; memcpy(&bits, &x, sizeof x); return bits; }
static inline REAL NAME(real)(INTEGER bits) { REAL x; memcpy(&x, &bits, sizeof x); return x; }
#define BITS NAME(bits)
#define LOAD(x) CONCAT(load, GRAD)(x)

/* scale * g, or zero where that is not finite; *bad is raised then. */
static inline REAL NAME(usable)(GRAD_TYPE g, REAL scale, INTEGER *bad) {
    INTEGER bits = BITS(scale * LOAD(g));
    INTEGER finite = (bits & EXPONENT) != EXPONENT;
    *bad += 1 - finite;
    return NAME(real)(bits & -finite);
}

/* One row of a tile: `n` lanes side by side. */
static inline __attribute__((always_inline)) void NAME(row)(const GRAD_TYPE *restrict grad, REAL *restrict residue, int n, REAL beta, REAL scale,
                                                           int choose, INTEGER row, INTEGER *restrict best, INTEGER *restrict winner,
                                                           INTEGER *restrict bad) {
    for (int l = 0; l < n; l++) {
        REAL m = residue[l];
        REAL g = NAME(usable)(grad[l], scale, &bad[l]);
        REAL updated = m + beta * g;
        residue[l] = updated;
        if (choose != CHOOSE_NOTHING) {
            INTEGER size = BITS(choose == CHOOSE_RESIDUE ? updated : m + g) & MAGNITUDE;
            winner[l] = size > best[l] ? row : winner[l];
            best[l] = size > best[l] ? size : best[l];
        }
    }
}

/* A tile of `n` <= 64 lanes over all its rows; `stride` elements from row to row, `end`: one past the group's last element. */
static inline __attribute__((always_inline)) int64_t NAME(tile)(const GRAD_TYPE *grad, REAL *residue, int64_t start, int64_t end, int64_t stride, int n,
                                                               REAL beta, REAL scale, int choose, void *offsets, int offset_width, int64_t lane) {
    INTEGER best[LANES], winner[LANES], bad[LANES];
    for (int l = 0; l < LANES; l++) { best[l] = -1; winner[l] = 0; bad[l] = 0; }
    INTEGER row = 0;
    int64_t at = start;
    if (n == LANES)
        for (; at + LANES <= end; at += stride, row++)
            NAME(row)(grad + at, residue + at, LANES, beta, scale, choose, row, best, winner, bad);
    for (; at < end; at += stride, row++)
        NAME(row)(grad + at, residue + at, at + n <= end ? n : (int)(end - at), beta, scale, choose, row, best, winner, bad);
    int64_t total = 0;
    for (int l = 0; l < n; l++) {
        total += bad[l];
        if (choose != CHOOSE_NOTHING) store_offset(offsets, offset_width, lane + l, winner[l]);
    }
    return total;
}

static inline __attribute__((always_inline)) int64_t NAME(tiles)(const GRAD_TYPE *grad, REAL *residue, geometry g, REAL beta, REAL scale, int choose,
                                                                void *offsets, int offset_width) {
    int64_t bad = 0, full = full_lanes(g);
    for (int64_t lane = 0; lane < g.k;) {
        int64_t first = lane < full ? lane / g.width * g.width : full; /* the group's first lane */
        int64_t lanes = lane < full ? g.width : g.k - full;
        int64_t start = first * g.rows;
        int64_t end = lane < full ? start + lanes * g.rows : g.numel;
        int64_t left = first + lanes - lane;
        int n = left < LANES ? (int)left : LANES;
        bad += NAME(tile)(grad, residue, start + (lane - first), end, lanes, n, beta, scale, choose, offsets, offset_width, lane);
        lane += n;
    }
    return bad;
}

/* m <- m + beta * g; where asked, the row of each lane's largest |m_old + g| (accumulator) or |m_new| (residue), the first of equals.
 * Returns the number of non-finite gradient elements. */
CLONES static int64_t NAME(pass)(const GRAD_TYPE *grad, REAL *residue, geometry g, REAL beta, REAL scale, int choose, void *offsets, int offset_width) {
    if (choose == CHOOSE_ACCUMULATOR) return NAME(tiles)(grad, residue, g, beta, scale, CHOOSE_ACCUMULATOR, offsets, offset_width);
    if (choose == CHOOSE_RESIDUE) return NAME(tiles)(grad, residue, g, beta, scale, CHOOSE_RESIDUE, offsets, offset_width);
    INTEGER bad[LANES] = {0};
    int64_t at = 0, total = 0;
    for (; at + LANES <= g.numel; at += LANES)
        NAME(row)(grad + at, residue + at, LANES, beta, scale, CHOOSE_NOTHING, 0, 0, 0, bad);
    NAME(row)(grad + at, residue + at, (int)(g.numel - at), beta, scale, CHOOSE_NOTHING, 0, 0, 0, bad);
    for (int l = 0; l < LANES; l++) total += bad[l];
    return total;
}

/* values <- m[I] + share * g[I], clamped to +-limit and rounded to the wire dtype; m[I] <- m[I] - beta * values.
 * Returns how many values were not finite: those are sent as zero. */
static int64_t NAME(gather)(const GRAD_TYPE *grad, REAL *residue, geometry g, REAL beta, REAL scale, REAL share, const void *offsets,
                            int offset_width, int wire_float16, REAL limit, void *values) {
    int64_t total = 0;
    for (int64_t lane = 0; lane < g.k; lane++) {
        int64_t i = index_of(g, lane, load_offset(offsets, offset_width, lane));
        INTEGER ignored = 0;
        REAL value = residue[i] + share * NAME(usable)(grad[i], scale, &ignored);
        if ((BITS(value) & EXPONENT) == EXPONENT) { value = 0; total++; }
        if (wire_float16) {
            value = value > limit ? limit : value < -limit ? -limit : value;
            uint16_t half = store_float16((float)value);
            ((uint16_t *)values)[lane] = half;
            value = load_float16(half);
        } else {
            ((REAL *)values)[lane] = value;
        }
        residue[i] -= beta * value;
    }
    return total;
}

/* grad <- scale * values at I; the caller has zeroed the rest. */
static int64_t NAME(scatter)(GRAD_TYPE *grad, geometry g, REAL scale, const void *offsets, int offset_width, int wire_float16, const void *values) {
    for (int64_t lane = 0; lane < g.k; lane++) {
        int64_t i = index_of(g, lane, load_offset(offsets, offset_width, lane));
        REAL value = wire_float16 ? (REAL)load_float16(((const uint16_t *)values)[lane]) : ((const REAL *)values)[lane];
        grad[i] = STORE(scale * value);
    }
    return 0;
}

/* Take a step back: m[I] <- m[I] + beta * values, then m <- m - beta * g. Equal to what was there before, to rounding.
 * Without offsets or without grad, that part is left out: it was not done. */
CLONES static int64_t NAME(undo)(const GRAD_TYPE *grad, REAL *residue, geometry g, REAL beta, REAL scale, const void *offsets, int offset_width,
                                 int wire_float16, const void *values) {
    for (int64_t lane = 0; offsets && lane < g.k; lane++) {
        int64_t i = index_of(g, lane, load_offset(offsets, offset_width, lane));
        residue[i] += beta * (wire_float16 ? (REAL)load_float16(((const uint16_t *)values)[lane]) : ((const REAL *)values)[lane]);
    }
    for (int64_t i = 0; grad && i < g.numel; i++) {
        INTEGER ignored = 0;
        residue[i] -= beta * NAME(usable)(grad[i], scale, &ignored);
    }
    return 0;
}

#undef BITS
#undef LOAD
