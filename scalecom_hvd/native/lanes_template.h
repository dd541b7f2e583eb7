/* The kernel's body, included by lanes.c once per gradient dtype. Not for other use.
 *
 * GRAD, GRAD_TYPE, GRAD_BITS, STORE: the gradient's dtype.  REAL, INTEGER, MAGNITUDE, EXPONENT,
 * LARGEST: the residue's. Lengths are in elements. `scale` turns gradients into the residue's units
 * (1 / loss scale). A bad gradient element, NaN or beyond LARGEST, counts as zero everywhere.
 */

static inline INTEGER NAME(bits)(REAL x) { INTEGER bits; memcpy(&bits, &x, sizeof x); return bits; }
static inline REAL NAME(real)(INTEGER bits) { REAL x; memcpy(&x, &bits, sizeof x); return x; }
#define BITS NAME(bits)
#define LOAD(x) CONCAT(load, GRAD)(x)
#define INLINE static inline __attribute__((always_inline))

/* scale * g, or zero where that is bad; *bad is raised then. */
static inline REAL NAME(usable)(GRAD_TYPE g, REAL scale, INTEGER *bad) {
    INTEGER bits = BITS(scale * LOAD(g));
    INTEGER good = (bits & MAGNITUDE) <= LARGEST;
    *bad += 1 - good;
    return NAME(real)(bits & -good);
}

/* The offsets of a tile; one loop per width, so that each is a vector's load. */
INLINE void NAME(rows_of)(INTEGER *restrict rows, tile at, const void *offsets, int width) {
    if (width == 1)
        for (int l = 0; l < at.n; l++) rows[l] = (INTEGER)load_offset(offsets, 1, at.lane + l);
    else if (width == 2)
        for (int l = 0; l < at.n; l++) rows[l] = (INTEGER)load_offset(offsets, 2, at.lane + l);
    else
        for (int l = 0; l < at.n; l++) rows[l] = (INTEGER)load_offset(offsets, 4, at.lane + l);
}

/* What a place sends: m + share * g, and `extra` times what waited there before g came, unless the
 * two point apart. within: how many times g is in m already. */
static inline REAL NAME(sendable)(REAL m, REAL g, REAL within, REAL share, REAL extra) {
    REAL waited = m - within * g;
    REAL more = waited * g >= 0 ? extra * waited : 0;
    return m + share * g + more;
}

/* The row of each lane of a tile that is sent, and its value before it is rounded for the wire. */
typedef struct { INTEGER row[LANES]; REAL value[LANES]; } NAME(picks);

/* One row of a tile: `n` lanes side by side. With picks, the values to be sent are taken out
 * first. */
INLINE void NAME(row)(const GRAD_TYPE *restrict grad, REAL *restrict residue, int n, REAL beta,
                      REAL scale, REAL extra, NAME(picks) *restrict picks, int choose,
                      INTEGER row, INTEGER *restrict best, INTEGER *restrict winner,
                      INTEGER *restrict bad) {
    for (int l = 0; l < n; l++) {
        REAL m = residue[l];
        REAL g = NAME(usable)(grad[l], scale, &bad[l]);
        if (picks) {
            REAL value = NAME(sendable)(m, g, 0, 1, extra);
            INTEGER here = -(picks->row[l] == row);
            INTEGER finite = -((BITS(value) & EXPONENT) != EXPONENT);
            picks->value[l] = here ? value : picks->value[l];
            m -= beta * NAME(real)(BITS(value) & here & finite);
        }
        REAL updated = m + beta * g;
        residue[l] = updated;
        if (choose != CHOOSE_NOTHING) {
            REAL key = choose == CHOOSE_ACCUMULATOR ? m + g
                       : choose == CHOOSE_AHEAD     ? updated + g
                                                    : updated;
            INTEGER size = BITS(key) & MAGNITUDE;
            winner[l] = size > best[l] ? row : winner[l];
            best[l] = size > best[l] ? size : best[l];
        }
    }
}

/* A tile over all its rows; in the same pass, each lane's winner where asked. */
INLINE int64_t NAME(accumulate_tile)(const tensor *t, tile at, REAL beta, REAL scale,
                                     REAL extra, NAME(picks) *picks, int choose, void *chosen) {
    const GRAD_TYPE *grad = t->grad;
    REAL *residue = t->residue;
    INTEGER best[LANES], winner[LANES], bad[LANES];
    for (int l = 0; l < LANES; l++) { best[l] = -1; winner[l] = 0; bad[l] = 0; }
    INTEGER row = 0;
    int64_t i = at.start;
    if (at.n == LANES)
        for (; i + LANES <= at.end; i += at.stride, row++)
            NAME(row)(grad + i, residue + i, LANES, beta, scale, extra, picks, choose, row, best,
                      winner, bad);
    for (; i < at.end; i += at.stride, row++)
        NAME(row)(grad + i, residue + i, i + at.n <= at.end ? at.n : (int)(at.end - i), beta, scale,
                  extra, picks, choose, row, best, winner, bad);
    int64_t total = 0;
    for (int l = 0; l < at.n; l++) {
        total += bad[l];
        if (choose != CHOOSE_NOTHING) store_offset(chosen, t->offset_width, at.lane + l, winner[l]);
    }
    return total;
}

INLINE int64_t NAME(accumulate_tiles)(const tensor *t, REAL beta, REAL scale, int choose,
                                      void *chosen) {
    int64_t bad = 0;
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        bad += NAME(accumulate_tile)(t, at, beta, scale, 0, 0, choose, chosen);
        lane += at.n;
    }
    return bad;
}

CLONES static int64_t NAME(accumulate)(const tensor *t, REAL beta, REAL scale, int choose,
                                       void *chosen) {
    if (t->frozen) beta = 0;
    if (choose != CHOOSE_NOTHING) chosen = (char *)chosen + t->offsets_at;
    if (choose == CHOOSE_ACCUMULATOR)
        return NAME(accumulate_tiles)(t, beta, scale, CHOOSE_ACCUMULATOR, chosen);
    if (choose == CHOOSE_RESIDUE)
        return NAME(accumulate_tiles)(t, beta, scale, CHOOSE_RESIDUE, chosen);
    if (choose == CHOOSE_AHEAD)
        return NAME(accumulate_tiles)(t, beta, scale, CHOOSE_AHEAD, chosen);
    const GRAD_TYPE *grad = t->grad;
    REAL *residue = t->residue;
    INTEGER bad[LANES] = {0};
    int64_t i = 0, total = 0;
    for (; i + LANES <= t->numel; i += LANES)
        NAME(row)(grad + i, residue + i, LANES, beta, scale, 0, 0, CHOOSE_NOTHING, 0, 0, 0, bad);
    NAME(row)(grad + i, residue + i, (int)(t->numel - i), beta, scale, 0, 0, CHOOSE_NOTHING, 0, 0,
              0, bad);
    for (int l = 0; l < LANES; l++) total += bad[l];
    return total;
}

/* A value as it travels: finite, or zero and *bad is raised; clamped and rounded to the wire dtype.
 * Gives what was sent. */
static inline REAL NAME(send)(REAL value, wire to, int64_t lane, int64_t *bad) {
    if ((BITS(value) & EXPONENT) == EXPONENT) { value = 0; ++*bad; }
    if (to.wire_float16) {
        value = value > to.limit ? to.limit : value < -to.limit ? -to.limit : value;
        uint16_t half = store_float16((float)value);
        ((uint16_t *)to.values)[lane] = ((uint16_t *)to.sent)[lane] = half;
        return load_float16(half);
    }
    return ((REAL *)to.values)[lane] = ((REAL *)to.sent)[lane] = value;
}

/* `to` with its pointers at this tensor's part of the buffers; a frozen tensor's values are
 * zeroed. */
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

/* share: of g, what is not in m yet: all of it, or 1 - beta. */
static int64_t NAME(take)(const tensor *t, REAL beta, REAL scale, REAL share, REAL extra, wire to) {
    const GRAD_TYPE *grad = t->grad;
    REAL *residue = t->residue;
    to = NAME(part)(t, to);
    if (t->frozen) return 0;
    REAL within = share == 1 ? 0 : beta;
    int64_t bad = 0;
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        int64_t index[LANES];
        /* Each is a cache line of its own: fetched together they take two thirds of the time. */
        for (int l = 0; l < at.n; l++) {
            index[l] = index_of(t, at, to.offsets, l);
            __builtin_prefetch(residue + index[l], 1);
            __builtin_prefetch(grad + index[l], 0);
        }
        for (int l = 0; l < at.n; l++) {
            int64_t i = index[l];
            INTEGER ignored = 0;
            REAL value = residue[i];
            if (share != 0) {
                REAL g = NAME(usable)(grad[i], scale, &ignored);
                value = NAME(sendable)(value, g, within, share, extra);
            }
            residue[i] -= beta * NAME(send)(value, to, lane + l, &bad);
        }
        lane += at.n;
    }
    return bad;
}

INLINE int64_t NAME(take_and_accumulate_tiles)(const tensor *t, REAL beta, REAL scale, REAL extra,
                                               wire to, int choose, void *chosen) {
    int64_t bad = 0;
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        NAME(picks) picks = {{0}, {0}};
        NAME(rows_of)(picks.row, at, to.offsets, t->offset_width);
        bad += NAME(accumulate_tile)(t, at, beta, scale, extra, &picks, choose, chosen);
        for (int l = 0; l < at.n; l++) NAME(send)(picks.value[l], to, lane + l, &bad);
        lane += at.n;
    }
    return bad;
}

CLONES static int64_t NAME(take_and_accumulate)(const tensor *t, REAL beta, REAL scale, REAL extra,
                                                wire to, int choose, void *chosen) {
    /* A value rounded for the wire is not yet known when its row passes. */
    if (t->frozen || to.wire_float16) {
        int64_t bad = NAME(take)(t, beta, scale, 1, extra, to);
        return bad + NAME(accumulate)(t, beta, scale, choose, chosen);
    }
    to = NAME(part)(t, to);
    if (choose == CHOOSE_NOTHING)
        return NAME(take_and_accumulate_tiles)(t, beta, scale, extra, to, CHOOSE_NOTHING, 0);
    chosen = (char *)chosen + t->offsets_at;
    return NAME(take_and_accumulate_tiles)(t, beta, scale, extra, to, CHOOSE_AHEAD, chosen);
}

static inline REAL NAME(value_of)(const void *values, int wire_float16, int64_t at) {
    if (wire_float16) return (REAL)load_float16(((const uint16_t *)values)[at]);
    return ((const REAL *)values)[at];
}

/* Writes a tile's full rows past the caches: nobody reads them soon, and lines need not be read
 * before they are written. Returns how many rows. The caller asks for it only where row numbers fit
 * into GRAD_BITS. */
#ifdef STREAMS
typedef GRAD_BITS NAME(wide) __attribute__((vector_size(32)));
STREAMS static int64_t NAME(stream_rows)(GRAD_TYPE *grad, tile at, const INTEGER *picked,
                                         const GRAD_TYPE *value) {
    enum { WIDE = 32 / sizeof(GRAD_BITS), PARTS = LANES / WIDE };
    GRAD_BITS rows[LANES];
    NAME(wide) row_of[PARTS], value_of[PARTS], row = {0};
    for (int l = 0; l < LANES; l++) rows[l] = (GRAD_BITS)picked[l];
    memcpy(row_of, rows, sizeof rows);
    memcpy(value_of, value, sizeof rows);
    int64_t count = 0;
    for (int64_t i = at.start; i + LANES <= at.end; i += LANES, count++, row += 1)
        for (int part = 0; part < PARTS; part++) {
            NAME(wide) sent = (row_of[part] == row) & value_of[part];
            _mm256_stream_si256((__m256i *)(grad + i) + part, (__m256i)sent);
        }
    return count;
}
#endif

/* Zeros and values in one write: zeroing first would go through memory twice. */
CLONES static int64_t NAME(scatter)(const tensor *t, REAL scale, const void *offsets,
                                    const void *values, int wire_float16) {
    GRAD_TYPE *grad = t->grad;
    offsets = (const char *)offsets + t->offsets_at;
    int streamed = t->width == LANES && t->rows <= 1 << 15 &&
                   may_stream(grad, t->numel * sizeof(GRAD_TYPE));
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        INTEGER picked[LANES];
        GRAD_TYPE value[LANES];
        NAME(rows_of)(picked, at, offsets, t->offset_width);
        for (int l = 0; l < at.n; l++)
            value[l] = STORE(scale * NAME(value_of)(values, wire_float16, t->values_at + lane + l));
        lane += at.n;
        INTEGER row = 0;
#ifdef STREAMS
        if (streamed && at.stride == LANES) row = NAME(stream_rows)(grad, at, picked, value);
#endif
        for (int64_t i = at.start + row * at.stride; i < at.end; i += at.stride, row++)
            if (at.n == LANES && i + LANES <= at.end)
                for (int l = 0; l < LANES; l++) grad[i + l] = picked[l] == row ? value[l] : 0;
            else
                for (int l = 0; l < at.n && i + l < at.end; l++)
                    grad[i + l] = picked[l] == row ? value[l] : 0;
    }
    return 0;
}

CLONES static int64_t NAME(roll_back)(const tensor *t, REAL beta, REAL scale, int accumulated,
                                      const void *offsets, const void *sent, int wire_float16) {
    const GRAD_TYPE *grad = t->grad;
    REAL *residue = t->residue;
    if (t->frozen) return 0;
    if (offsets) offsets = (const char *)offsets + t->offsets_at;
    for (int64_t lane = 0; offsets && lane < t->k;) {
        tile at = tile_at(t, lane);
        for (int l = 0; l < at.n; l++)
            residue[index_of(t, at, offsets, l)] +=
                beta * NAME(value_of)(sent, wire_float16, t->values_at + lane + l);
        lane += at.n;
    }
    for (int64_t i = 0; accumulated && i < t->numel; i++) {
        INTEGER ignored = 0;
        residue[i] -= beta * NAME(usable)(grad[i], scale, &ignored);
    }
    return 0;
}

#undef BITS
#undef LOAD
#undef INLINE
