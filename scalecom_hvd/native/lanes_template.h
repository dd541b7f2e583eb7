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
    if (width == 0) memset(rows, 0, at.n * sizeof *rows);
    else if (width == 1)
        for (int l = 0; l < at.n; l++) rows[l] = (INTEGER)load_offset(offsets, 1, at.lane + l);
    else if (width == 2)
        for (int l = 0; l < at.n; l++) rows[l] = (INTEGER)load_offset(offsets, 2, at.lane + l);
    else
        for (int l = 0; l < at.n; l++) rows[l] = (INTEGER)load_offset(offsets, 4, at.lane + l);
}

/* What a place sends: m + g, and `extra` times m besides, unless m and g point apart. */
static inline REAL NAME(sendable)(REAL m, REAL g, REAL extra) {
    REAL more = m * g >= 0 ? extra * m : 0;
    return m + g + more;
}

/* The row of each lane of a tile that is sent, and m and g there, as they pass by. Besides, the sum
 * of each lane's g * g. */
typedef struct { INTEGER row[LANES]; REAL m[LANES], g[LANES], squares[LANES]; } NAME(picks);

/* Of a lane: the row of the largest so far, the first of equals. */
static inline void NAME(keep_larger)(INTEGER size, INTEGER row, INTEGER *best, INTEGER *winner) {
    *winner = size > *best ? row : *winner;
    *best = size > *best ? size : *best;
}

/* The winners' rows on their way. Most offsets are bytes, and get a loop of their own. */
INLINE void NAME(store_rows)(const tensor *t, tile at, void *chosen, const INTEGER *winner) {
    if (t->offset_width == 1)
        for (int l = 0; l < at.n; l++) store_offset(chosen, 1, at.lane + l, winner[l]);
    else
        for (int l = 0; l < at.n; l++)
            store_offset(chosen, t->offset_width, at.lane + l, winner[l]);
}

/* One row of a tile: `n` lanes side by side. What is sent is noted, and takes no part in the choice:
 * see `take_picks`. */
INLINE void NAME(row)(const GRAD_TYPE *restrict grad, REAL *restrict residue, int n, REAL beta,
                      REAL scale, NAME(picks) *restrict picks, int chooses, INTEGER row,
                      INTEGER *restrict best, INTEGER *restrict winner, INTEGER *restrict bad) {
    for (int l = 0; l < n; l++) {
        REAL m = residue[l];
        REAL g = NAME(usable)(grad[l], scale, &bad[l]);
        INTEGER here = -(picks->row[l] == row);
        picks->m[l] = here ? m : picks->m[l];
        picks->g[l] = here ? g : picks->g[l];
        picks->squares[l] += g * g;
        REAL updated = m + beta * g;
        residue[l] = updated;
        if (chooses)
            NAME(keep_larger)((BITS(updated + g) & MAGNITUDE) | here, row, &best[l], &winner[l]);
    }
}

/* What a tile's elements in these rows send, m and g being apart yet. First they are fetched, and
 * then computed side by side: one by one, every second sign would be a branch guessed wrongly. */
INLINE void NAME(values_at)(REAL *restrict value, const tensor *t, tile at,
                            const INTEGER *restrict row, REAL scale, REAL extra) {
    const GRAD_TYPE *grad = (const GRAD_TYPE *)t->grad + at.start;
    const REAL *residue = (const REAL *)t->residue + at.start;
    REAL m[LANES];
    GRAD_TYPE g[LANES];
    if (is_short(t, at))
        for (INTEGER i = 0; i < t->rows; i++, residue += at.stride, grad += at.stride)
            for (int l = 0; l < LANES; l++) {
                m[l] = row[l] == i ? residue[l] : m[l];
                g[l] = row[l] == i ? grad[l] : g[l];
            }
    else
        for (int l = 0; l < at.n; l++) {
            m[l] = residue[l + row[l] * at.stride];
            g[l] = grad[l + row[l] * at.stride];
        }
    for (int l = 0; l < at.n; l++) {
        INTEGER ignored = 0;
        value[l] = NAME(sendable)(m[l], NAME(usable)(g[l], scale, &ignored), extra);
    }
}

/* The next n values, of one block, count in its scale. */
typedef REAL NAME(four) __attribute__((vector_size(4 * sizeof(REAL))));
INLINE void NAME(measure_values)(scaler *to, const tensor *t, REAL *restrict value, int64_t lane,
                                 int n) {
    for (int l = 0; l < n; l++) {
        INTEGER bits = BITS(value[l]) & MAGNITUDE;
        value[l] = NAME(real)(bits & -((bits & EXPONENT) != EXPONENT));
    }
    for (int l = n; l % 16; l++) value[l] = 0;
    for (int l = 0; l < n; l += 16)
        for (int j = 0; j < 4; j++) {
            NAME(four) part;
            memcpy(&part, value + l + 4 * j, sizeof part);
            to->parts[j] += __builtin_convertvector(part, four_doubles);
        }
    int64_t end = lane + n, begin = lane / BLOCK * BLOCK;
    if (end % BLOCK && end < t->k) return;
    four_doubles sums = (to->parts[0] + to->parts[1]) + (to->parts[2] + to->parts[3]);
    double total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    to->scales[begin / BLOCK] = scale_of(total, end - begin, t->levels);
    memset(to->parts, 0, sizeof to->parts);
}
/* What a tile's winners would send counts. The tile is in a cache yet. */
INLINE void NAME(measure)(scaler *to, const tensor *t, tile at, const INTEGER *winner, REAL scale,
                          REAL extra) {
    REAL value[LANES];
    NAME(values_at)(value, t, at, winner, scale, extra);
    NAME(measure_values)(to, t, value, at.lane, at.n);
}

/* What a run sends, and g there. Gives how many elements of g are bad. */
INLINE int64_t NAME(values_of_run)(REAL *restrict value, REAL *restrict g, const tensor *t,
                                   int64_t lane, int n, REAL scale, REAL extra) {
    const GRAD_TYPE *grad = (const GRAD_TYPE *)t->grad + lane;
    const REAL *residue = (const REAL *)t->residue + lane;
    INTEGER bad = 0;
    for (int l = 0; l < n; l += LINE) {
        __builtin_prefetch(residue + l + AHEAD);
        __builtin_prefetch(grad + l + AHEAD);
    }
    for (int l = 0; l < n; l++) {
        g[l] = NAME(usable)(grad[l], scale, &bad);
        value[l] = NAME(sendable)(residue[l], g[l], extra);
    }
    return bad;
}

/* One row of a tile: which lanes' |m + g| are the largest so far. */
INLINE void NAME(compare_row)(const GRAD_TYPE *restrict grad, const REAL *restrict residue, int n,
                              REAL scale, INTEGER row, INTEGER *restrict best,
                              INTEGER *restrict winner) {
    for (int l = 0; l < n; l++) {
        INTEGER ignored = 0;
        REAL g = NAME(usable)(grad[l], scale, &ignored);
        NAME(keep_larger)(BITS(residue[l] + g) & MAGNITUDE, row, &best[l], &winner[l]);
    }
}

/* Each lane's largest |m + g|, and the scales of what it would send; nothing changes. */
CLONES static int64_t NAME(choose)(const tensor *t, REAL scale, REAL extra, void *chosen) {
    scaler measures = scaler_at(t, chosen);
    chosen = (char *)chosen + t->offsets_at;
    for (int64_t lane = 0; !t->offset_width && t->levels && lane < t->k; lane += RUN) {
        REAL value[RUN], g[RUN];
        NAME(values_of_run)(value, g, t, lane, run_at(t, lane), scale, extra);
        NAME(measure_values)(&measures, t, value, lane, run_at(t, lane));
    }
    for (int64_t lane = 0; t->offset_width && lane < t->k;) {
        tile at = tile_at(t, lane);
        INTEGER best[LANES], winner[LANES], row = 0;
        for (int l = 0; l < LANES; l++) { best[l] = -1; winner[l] = 0; }
        for (int64_t i = at.start; i < at.end; i += at.stride, row++) {
            const GRAD_TYPE *grad = (const GRAD_TYPE *)t->grad + i;
            const REAL *residue = (const REAL *)t->residue + i;
            if (at.n == LANES && i + LANES <= at.end)
                NAME(compare_row)(grad, residue, LANES, scale, row, best, winner);
            else
                NAME(compare_row)(grad, residue, i + at.n <= at.end ? at.n : (int)(at.end - i),
                                  scale, row, best, winner);
        }
        NAME(store_rows)(t, at, chosen, winner);
        if (t->levels) NAME(measure)(&measures, t, at, winner, scale, extra);
        lane += at.n;
    }
    return 0;
}

/* A tile over all its rows; in the same pass, each lane's winner and how large it is. */
INLINE int64_t NAME(accumulate_tile)(const tensor *t, tile at, REAL beta, REAL scale,
                                     NAME(picks) *picks, int chooses, INTEGER *best,
                                     INTEGER *winner) {
    const GRAD_TYPE *grad = t->grad;
    REAL *residue = t->residue;
    INTEGER bad[LANES], row = 0;
    for (int l = 0; l < LANES; l++) picks->m[l] = picks->g[l] = picks->squares[l] = 0;
    for (int l = 0; l < LANES; l++) { best[l] = -1; winner[l] = 0; bad[l] = 0; }
    int64_t i = at.start, total = 0;
    if (at.n == LANES)
        for (; i + LANES <= at.end; i += at.stride, row++)
            NAME(row)(grad + i, residue + i, LANES, beta, scale, picks, chooses, row, best, winner,
                      bad);
    for (; i < at.end; i += at.stride, row++)
        NAME(row)(grad + i, residue + i, i + at.n <= at.end ? at.n : (int)(at.end - i), beta, scale,
                  picks, chooses, row, best, winner, bad);
    for (int l = 0; l < at.n; l++) total += bad[l];
    return total;
}

/* A tile's values as they travel: finite or zero, and, with levels, integers times the scale of
 * their block. Gives what is sent in the values' place, and how many were not finite. */
INLINE int64_t NAME(send)(REAL *restrict value, const tensor *t, tile at, wire to) {
    INTEGER finites = 0;
    for (int l = 0; l < at.n; l++) {
        INTEGER finite = (BITS(value[l]) & EXPONENT) != EXPONENT;
        finites += finite;
        value[l] = NAME(real)(BITS(value[l]) & -finite);
    }
    if (!t->levels) {
        memcpy((REAL *)to.values + at.lane, value, at.n * sizeof(REAL));
        return at.n - finites;
    }
    REAL scale = to.scales[at.lane / BLOCK], most = 2 * t->levels;
    REAL per_scale = scale ? 2 / scale : 0;
    int32_t q[RUN];
    for (int l = 0; l < at.n; l++) {
        REAL halves = value[l] * per_scale;
        halves = halves < most ? halves : most;
        q[l] = (int32_t)(halves > -most ? halves : -most);
        /* The nearest: half of what was rounded up to halves. */
        q[l] = (q[l] + 1 + (q[l] >> 31)) >> 1;
        value[l] = (REAL)q[l] * scale;
    }
    for (int l = 0; l < at.n; l++) ((int8_t *)to.values)[at.lane + l] = (int8_t)q[l];
    return at.n - finites;
}

/* A tile's rows have passed: m <- m - beta * v + beta * g where v is sent, which may be the winner
 * yet. Gives how many values are not finite. */
INLINE int64_t NAME(take_picks)(const NAME(picks) *picks, const tensor *t, tile at, REAL beta,
                                REAL extra, wire to, int chooses, INTEGER *best, INTEGER *winner) {
    REAL *residue = (REAL *)t->residue + at.start, value[LANES];
    for (int l = 0; l < at.n; l++)
        value[l] = NAME(sendable)(picks->m[l], picks->g[l], extra);
    if (t->frozen) memset(value, 0, sizeof value);
    int64_t bad = NAME(send)(value, t, at, to);
    for (int l = 0; l < at.n; l++) value[l] = picks->m[l] - beta * value[l] + beta * picks->g[l];
    if (is_short(t, at))
        for (INTEGER i = 0; i < t->rows; i++, residue += at.stride)
            for (int l = 0; l < LANES; l++) residue[l] = picks->row[l] == i ? value[l] : residue[l];
    else
        for (int l = 0; l < at.n; l++) residue[l + picks->row[l] * at.stride] = value[l];
    for (int l = 0; chooses && l < at.n; l++) {
        INTEGER size = BITS(value[l] + picks->g[l]) & MAGNITUDE;
        /* Of equals the first. */
        int wins = size > best[l] || (size == best[l] && picks->row[l] < winner[l]);
        winner[l] = wins ? picks->row[l] : winner[l];
    }
    return bad;
}

/* As take_and_accumulate_tiles, run by run. */
INLINE int64_t NAME(take_runs)(tensor *t, REAL beta, REAL scale, REAL extra, wire to, int chooses,
                               scaler *measures) {
    int64_t bad = 0;
    double squares[RUN] = {0};
    for (int64_t lane = 0; lane < t->k; lane += RUN) {
        int n = run_at(t, lane);
        REAL *residue = (REAL *)t->residue + lane, value[RUN], g[RUN];
        bad += NAME(values_of_run)(value, g, t, lane, n, scale, extra);
        if (t->frozen) memset(value, 0, sizeof value);
        bad += NAME(send)(value, t, (tile){.lane = lane, .n = n}, to);
        for (int l = 0; l < n; l++) residue[l] = residue[l] - beta * value[l] + beta * g[l];
        for (int l = 0; l < n; l++) squares[l] += (double)g[l] * g[l];
        if (!chooses || !t->levels) continue;
        for (int l = 0; l < n; l++) value[l] = NAME(sendable)(residue[l], g[l], extra);
        NAME(measure_values)(measures, t, value, lane, n);
    }
    for (int l = 0; l < RUN; l++) t->squares += squares[l];
    return bad;
}

INLINE int64_t NAME(take_and_accumulate_tiles)(tensor *t, REAL beta, REAL scale, REAL extra,
                                               wire to, int chooses, void *chosen) {
    scaler measures = {0};
    if (chooses) {
        measures = scaler_at(t, chosen);
        chosen = (char *)chosen + t->offsets_at;
    }
    if (!t->offset_width)
        return NAME(take_runs)(t, beta, scale, extra, to, chooses, &measures);
    int64_t bad = 0;
    double squares[LANES] = {0};
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        INTEGER best[LANES], winner[LANES];
        NAME(picks) picks;
        NAME(rows_of)(picks.row, at, to.offsets, t->offset_width);
        bad += NAME(accumulate_tile)(t, at, beta, scale, &picks, chooses, best, winner);
        bad += NAME(take_picks)(&picks, t, at, beta, extra, to, chooses, best, winner);
        if (chooses) NAME(store_rows)(t, at, chosen, winner);
        if (chooses && t->levels) NAME(measure)(&measures, t, at, winner, scale, extra);
        for (int l = 0; l < LANES; l++) squares[l] += picks.squares[l];
        lane += at.n;
    }
    for (int l = 0; l < LANES; l++) t->squares += squares[l];
    return bad;
}

CLONES static int64_t NAME(take_and_accumulate)(tensor *t, REAL beta, REAL scale, REAL extra,
                                                const void *offsets, void *values, void *chosen) {
    wire to = {
        .offsets = (const char *)offsets + t->offsets_at,
        .scales = (const float *)((const char *)offsets + t->scales_at),
        .values = (char *)values + t->values_at * (t->levels ? 1 : sizeof(REAL)),
    };
    if (t->frozen) beta = 0;
    t->squares = 0;
    if (!chosen) return NAME(take_and_accumulate_tiles)(t, beta, scale, extra, to, 0, 0);
    return NAME(take_and_accumulate_tiles)(t, beta, scale, extra, to, 1, chosen);
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
                                    const void *averages) {
    GRAD_TYPE *grad = t->grad;
    const REAL *average = (const REAL *)averages + t->values_at;
    offsets = (const char *)offsets + t->offsets_at;
    int streamed = t->width == LANES && t->rows <= 1 << 15 &&
                   may_stream(grad, t->numel * sizeof(GRAD_TYPE));
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        INTEGER picked[LANES];
        GRAD_TYPE value[LANES];
        NAME(rows_of)(picked, at, offsets, t->offset_width);
        for (int l = 0; l < at.n; l += LINE) __builtin_prefetch(average + lane + l + AHEAD);
        for (int l = 0; l < at.n; l++)
            value[l] = STORE(scale * average[lane + l]);
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

CLONES static int64_t NAME(roll_back)(const tensor *t, REAL beta, REAL scale, const void *offsets,
                                      const void *values, int keeps_gradients) {
    const GRAD_TYPE *grad = t->grad;
    REAL *residue = t->residue;
    if (t->frozen) return 0;
    const float *scales = (const float *)((const char *)offsets + t->scales_at);
    offsets = (const char *)offsets + t->offsets_at;
    for (int64_t lane = 0; lane < t->k;) {
        tile at = tile_at(t, lane);
        for (int l = 0; l < at.n; l++)
            residue[index_of(t, at, offsets, l)] +=
                beta * (t->levels ? ((const int8_t *)values)[t->values_at + lane + l] *
                                        (REAL)scales[lane / BLOCK]
                                  : ((const REAL *)values)[t->values_at + lane + l]);
        lane += at.n;
    }
    for (int64_t i = 0; !keeps_gradients && i < t->numel; i++) {
        INTEGER ignored = 0;
        residue[i] -= beta * NAME(usable)(grad[i], scale, &ignored);
    }
    return 0;
}

#undef BITS
#undef LOAD
#undef INLINE
