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

/* A tile over all its rows; in the same pass, each lane's winner where asked. */
static inline __attribute__((always_inline)) int64_t NAME(filter_tile)(const tensor *t, tile at, REAL beta, REAL scale, int choose, void *chosen) {
    const GRAD_TYPE *grad = t->grad;
    REAL *residue = t->residue;
    INTEGER best[LANES], winner[LANES], bad[LANES];
    for (int l = 0; l < LANES; l++) { best[l] = -1; winner[l] = 0; bad[l] = 0; }
    INTEGER row = 0;
    int64_t i = at.start;
    if (at.n == LANES)
        for (; i + LANES <= at.end; i += at.stride, row++)
            NAME(row)(grad + i, residue + i, LANES, beta, scale, choose, row, best, winner, bad);
    for (; i < at.end; i += at.stride, row++)
        NAME(row)(grad + i, residue + i, i + at.n <= at.end ? at.n : (int)(at.end - i), beta, scale, choose, row, best, winner, bad);
    int64_t total = 0;
    for (int l = 0; l < at.n; l++) {
        total += bad[l];
        if (choose != CHOOSE_NOTHING) store_offset(chosen, t->offset_width, at.lane + l, winner[l]);
    }
    return total;
}

static inline __attribute__((always_inline)) int64_t NAME(filter_tiles)(const tensor *t, REAL beta, REAL scale, int choose, void *chosen) {
    int64_t bad = 0;
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        bad += NAME(filter_tile)(t, at, beta, scale, choose, chosen);
        lane += at.n;
    }
    return bad;
}

CLONES static int64_t NAME(filter)(const tensor *t, REAL beta, REAL scale, int choose, void *chosen) {
    if (t->frozen) beta = 0;
    if (choose != CHOOSE_NOTHING) chosen = (char *)chosen + t->offsets_at;
    if (choose == CHOOSE_ACCUMULATOR) return NAME(filter_tiles)(t, beta, scale, CHOOSE_ACCUMULATOR, chosen);
    if (choose == CHOOSE_RESIDUE) return NAME(filter_tiles)(t, beta, scale, CHOOSE_RESIDUE, chosen);
    const GRAD_TYPE *grad = t->grad;
    REAL *residue = t->residue;
    INTEGER bad[LANES] = {0};
    int64_t i = 0, total = 0;
    for (; i + LANES <= t->numel; i += LANES)
        NAME(row)(grad + i, residue + i, LANES, beta, scale, CHOOSE_NOTHING, 0, 0, 0, bad);
    NAME(row)(grad + i, residue + i, (int)(t->numel - i), beta, scale, CHOOSE_NOTHING, 0, 0, 0, bad);
    for (int l = 0; l < LANES; l++) total += bad[l];
    return total;
}

/* Asks for the elements that the next tile's gather will touch: scattered reads one at a time would each wait for memory. */
static inline void NAME(prefetch)(const tensor *t, int64_t lane, const void *offsets, int with_grad) {
    if (lane >= t->k) return;
    tile at = tile_at(t, lane);
    for (int l = 0; l < at.n; l++) {
        int64_t i = index_of(t, at, offsets, l);
        __builtin_prefetch((const REAL *)t->residue + i, 1);
        if (with_grad) __builtin_prefetch((const GRAD_TYPE *)t->grad + i, 0);
    }
}

static inline int64_t NAME(gather_tile)(const tensor *t, tile at, REAL beta, REAL scale, REAL share, wire to) {
    const GRAD_TYPE *grad = t->grad;
    REAL *residue = t->residue;
    int64_t total = 0;
    for (int l = 0; l < at.n; l++) {
        int64_t i = index_of(t, at, to.offsets, l), lane = at.lane + l;
        INTEGER ignored = 0;
        REAL value = residue[i];
        if (share != 0) value += share * NAME(usable)(grad[i], scale, &ignored);
        if ((BITS(value) & EXPONENT) == EXPONENT) { value = 0; total++; }
        if (to.wire_float16) {
            value = value > to.limit ? to.limit : value < -to.limit ? -to.limit : value;
            uint16_t half = store_float16((float)value);
            ((uint16_t *)to.values)[lane] = ((uint16_t *)to.sent)[lane] = half;
            value = load_float16(half);
        } else {
            ((REAL *)to.values)[lane] = ((REAL *)to.sent)[lane] = value;
        }
        residue[i] -= beta * value;
    }
    return total;
}

/* `to` with its pointers at this tensor's part of the buffers; a frozen tensor's values are zeroed. */
static inline wire NAME(part)(const tensor *t, wire to) {
    int64_t size = to.wire_float16 ? 2 : sizeof(REAL);
    to.offsets = (const char *)to.offsets + t->offsets_at;
    to.values = (char *)to.values + t->values_at * size;
    to.sent = (char *)to.sent + t->values_at * size;
    if (t->frozen) {
        memset(to.values, 0, t->k * size);
        memset(to.sent, 0, t->k * size);
    }
    return to;
}

static int64_t NAME(gather)(const tensor *t, REAL beta, REAL scale, REAL share, wire to) {
    to = NAME(part)(t, to);
    if (t->frozen) return 0;
    int64_t total = 0;
    NAME(prefetch)(t, 0, to.offsets, share != 0);
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        lane += at.n;
        NAME(prefetch)(t, lane, to.offsets, share != 0);
        total += NAME(gather_tile)(t, at, beta, scale, share, to);
    }
    return total;
}

static inline __attribute__((always_inline)) int64_t NAME(gather_and_filter_tiles)(const tensor *t, REAL beta, REAL scale, wire to, int choose,
                                                                                  void *chosen) {
    int64_t total = 0;
    NAME(prefetch)(t, 0, to.offsets, 1);
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        lane += at.n;
        NAME(prefetch)(t, lane, to.offsets, 1);
        total += NAME(gather_tile)(t, at, beta, scale, 1, to);
        total += NAME(filter_tile)(t, at, beta, scale, choose, chosen);
    }
    return total;
}

CLONES static int64_t NAME(gather_and_filter)(const tensor *t, REAL beta, REAL scale, wire to, int choose, void *chosen) {
    if (t->frozen || !t->width) { /* exact selection's positions do not go tile by tile */
        int64_t total = NAME(gather)(t, beta, scale, 1, to);
        return total + NAME(filter)(t, beta, scale, choose, chosen);
    }
    to = NAME(part)(t, to);
    if (choose == CHOOSE_NOTHING) return NAME(gather_and_filter_tiles)(t, beta, scale, to, CHOOSE_NOTHING, 0);
    chosen = (char *)chosen + t->offsets_at;
    return NAME(gather_and_filter_tiles)(t, beta, scale, to, CHOOSE_RESIDUE, chosen);
}

static inline REAL NAME(value_of)(const void *values, int wire_float16, int64_t at) {
    return wire_float16 ? (REAL)load_float16(((const uint16_t *)values)[at]) : ((const REAL *)values)[at];
}

/* Zeros and values in one streaming write: zeroing first would read every line a second time. */
CLONES static int64_t NAME(scatter)(const tensor *t, REAL scale, const void *offsets, const void *values, int wire_float16) {
    GRAD_TYPE *grad = t->grad;
    offsets = (const char *)offsets + t->offsets_at;
    int past_caches = t->numel * sizeof(GRAD_TYPE) >= STREAMED_BYTES;
    if (!t->width) memset(grad, 0, t->numel * sizeof(GRAD_TYPE));
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        INTEGER picked[LANES];
        GRAD_TYPE value[LANES];
        for (int l = 0; l < at.n; l++) {
            picked[l] = (INTEGER)load_offset(offsets, t->offset_width, lane + l);
            value[l] = STORE(scale * NAME(value_of)(values, wire_float16, t->values_at + lane + l));
        }
        INTEGER row = 0;
        int64_t i = at.start;
        if (at.n == LANES && t->width)
            for (; i + LANES <= at.end; i += at.stride, row++) {
                GRAD_TYPE line[LANES];
                for (int l = 0; l < LANES; l++) line[l] = picked[l] == row ? value[l] : 0;
                store_row(grad + i, line, sizeof line, past_caches);
            }
        if (t->width)
            for (; i < at.end; i += at.stride, row++)
                for (int l = 0; l < at.n && i + l < at.end; l++) grad[i + l] = picked[l] == row ? value[l] : 0;
        else
            for (int l = 0; l < at.n; l++) grad[picked[l]] = value[l];
        lane += at.n;
    }
    return 0;
}

CLONES static int64_t NAME(undo)(const tensor *t, REAL beta, REAL scale, int filtered, const void *offsets, const void *sent, int wire_float16) {
    const GRAD_TYPE *grad = t->grad;
    REAL *residue = t->residue;
    if (t->frozen) return 0;
    if (offsets) offsets = (const char *)offsets + t->offsets_at;
    for (int64_t lane = 0; offsets && lane < t->k;) {
        tile at = tile_at(t, lane);
        for (int l = 0; l < at.n; l++)
            residue[index_of(t, at, offsets, l)] += beta * NAME(value_of)(sent, wire_float16, t->values_at + lane + l);
        lane += at.n;
    }
    for (int64_t i = 0; filtered && i < t->numel; i++) {
        INTEGER ignored = 0;
        residue[i] -= beta * NAME(usable)(grad[i], scale, &ignored);
    }
    return 0;
}

#undef BITS
#undef LOAD
