/* The lane kernel (lanes.c) as TensorFlow operations for the CPU: a step's moves stay inside the
 * graph.
 *
 * Operations have no state: a residue comes in and the updated residue goes out, and the graph
 * assigns it when the step is known to count. So a step that fails anywhere has changed nothing.
 * Each serves all compressed tensors of a bucket in one call. tensorflow/kernels.py calls them and
 * says what their arguments are.
 */
#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "tensorflow_c_api.h"

/* Elements that stay in a core's cache between being copied and being accumulated. */
enum { SLICE = 1 << 14 };

/* Attribute `lanes`: these nine numbers per tensor. */
enum { FIELDS = 9 };
typedef struct { int64_t count, offsets_bytes, n_values; tensor tensors[]; } bucket;

static void *create(TF_OpKernelConstruction *construction) {
    TF_Status *status = TF_NewStatus();
    int32_t n = 0, total = 0;
    TF_OpKernelConstruction_GetAttrSize(construction, "lanes", &n, &total, status);
    int64_t *lanes = malloc(sizeof(int64_t) * (n > 0 ? n : 1));
    bucket *made = calloc(1, sizeof(bucket) + sizeof(tensor) * (n > 0 ? n / FIELDS : 0));
    if (TF_GetCode(status) == TF_OK)
        TF_OpKernelConstruction_GetAttrInt64List(construction, "lanes", lanes, n, status);
    if (TF_GetCode(status) != TF_OK) TF_OpKernelConstruction_Failure(construction, status);
    else
        for (made->count = 0; made->count < n / FIELDS; made->count++) {
            const int64_t *row = lanes + made->count * FIELDS;
            tensor t = {.numel = row[0], .k = row[1], .width = row[2], .rows = row[3],
                        .offset_width = (int32_t)row[4], .offsets_at = row[5],
                        .values_at = row[6], .levels = (int32_t)row[7], .scales_at = row[8]};
            made->tensors[made->count] = t;
            made->offsets_bytes += t.k * t.offset_width;
            if (t.levels) made->offsets_bytes += (t.k + BLOCK - 1) / BLOCK * sizeof(float);
            made->n_values += t.k;
        }
    free(lanes);
    TF_DeleteStatus(status);
    return made;
}
static void destroy(void *made) { free(made); }

/* One call of an operation: what it took is given back at its end, and the first error wins. */
typedef struct {
    TF_OpKernelContext *context;
    TF_Status *status;
    TF_Tensor **held;
    int n_held;
    double beta, scale, extra;
} call;

static call begin(TF_OpKernelContext *context, int64_t most) {
    TF_Tensor **held = calloc(most, sizeof(TF_Tensor *));
    call now = {.context = context, .status = TF_NewStatus(), .held = held};
    return now;
}
static void end(call *now) {
    if (TF_GetCode(now->status) != TF_OK) TF_OpKernelContext_Failure(now->context, now->status);
    for (int i = 0; i < now->n_held; i++) TF_DeleteTensor(now->held[i]);
    free(now->held);
    TF_DeleteStatus(now->status);
}
static int failed(const call *now) { return TF_GetCode(now->status) != TF_OK; }
static void refuse(call *now, const char *why) {
    if (!failed(now)) TF_SetStatus(now->status, TF_INVALID_ARGUMENT, why);
}

/* The input's memory, or NULL after an error. It must have so many elements, unless that is
 * negative. */
static TF_Tensor *input(call *now, int index, int64_t elements, const char *otherwise) {
    TF_Tensor *found = NULL;
    if (failed(now)) return NULL;
    TF_GetInput(now->context, index, &found, now->status);
    if (failed(now)) return NULL;
    now->held[now->n_held++] = found;
    if (elements >= 0 && TF_TensorElementCount(found) != elements) refuse(now, otherwise);
    return failed(now) ? NULL : found;
}
static void *data(TF_Tensor *of) { return of ? TF_TensorData(of) : NULL; }
static size_t size_of(TF_DataType dtype) {
    switch (dtype) {
    case TF_DOUBLE: case TF_INT64: return 8;
    case TF_FLOAT: return 4;
    case TF_HALF: case TF_BFLOAT16: return 2;
    default: return 1;
    }
}
static void *output(call *now, int index, int64_t elements) {
    if (failed(now)) return NULL;
    TF_DataType dtype = TF_ExpectedOutputDataType(now->context, index);
    size_t bytes = elements * size_of(dtype);
    TF_Tensor *made =
        TF_AllocateOutput(now->context, index, dtype, &elements, 1, bytes, now->status);
    if (made) now->held[now->n_held++] = made;
    return failed(now) ? NULL : data(made);
}
/* An output in an input's memory, if nobody else reads that; *took says whether. */
static void *output_in(call *now, int index, int candidate, int64_t elements, int *took) {
    if (failed(now)) return NULL;
    int forwarded = -1;
    TF_Tensor *made = TF_ForwardInputOrAllocateOutput(now->context, &candidate, 1, index, &elements,
                                                      1, &forwarded, now->status);
    if (made) now->held[now->n_held++] = made;
    *took = forwarded == candidate;
    return failed(now) ? NULL : data(made);
}
static void scalar(call *now, int index, int64_t value) {
    if (failed(now)) return;
    TF_Tensor *made =
        TF_AllocateOutput(now->context, index, TF_INT64, NULL, 0, sizeof value, now->status);
    if (!made) return;
    now->held[now->n_held++] = made;
    if (!failed(now)) *(int64_t *)data(made) = value;
}
static void settings(call *now, int index) {
    double *found = data(input(now, index, 3, "settings are beta, 1 / loss scale and extra"));
    if (!found) return;
    now->beta = found[0], now->scale = found[1], now->extra = found[2];
}
static int kind_of(TF_Tensor *grad) {
    switch (TF_TensorType(grad)) {
    case TF_FLOAT: return FLOAT32;
    case TF_DOUBLE: return FLOAT64;
    case TF_HALF: return FLOAT16;
    default: return BFLOAT16;
    }
}
static int64_t grad_size(const tensor *t) {
    return t->dtype == FLOAT64 ? 8 : t->dtype == FLOAT32 ? 4 : 2;
}
static int64_t residue_size(const tensor *t) { return t->dtype == FLOAT64 ? 8 : 4; }
static const char *GRAD_SIZE = "a gradient does not have the size of its variable",
                  *RESIDUE_SIZE = "a residue does not have the size of its variable";
/* native.WRONG_OFFSETS and native.OFFSETS_OUTSIDE. */
static const char *OFFSETS_SIZE =
    "ScaleCom did not receive exactly one leader's offsets: ranks disagree about the step, and so "
    "about who chooses. Restore a checkpoint of the same step on every rank, and give every rank "
    "the same number of steps";
static const char *OFFSETS_ELSEWHERE =
    "ScaleCom was given offsets that lie outside of their lanes, by the leader or in the loaded "
    "state: the offsets are damaged, or belong to another model. Restore a checkpoint of this "
    "model on every rank, or go on without loading ScaleCom's state (residues start at zero)";
/* What a move gave; a refusal becomes the call's error. */
static int64_t checked(call *now, int64_t result) {
    if (result == OFFSETS_OUTSIDE) refuse(now, OFFSETS_ELSEWHERE);
    return result;
}

/* The next piece of a tensor that stays in the cache: whole groups of lanes, which are lanes of a
 * smaller tensor. Where values share scales, whole blocks of them. */
static tensor piece_at(const tensor *t, int64_t lane) {
    tensor piece = *t;
    int64_t group = LANES * t->rows, groups = SLICE / group > 0 ? SLICE / group : 1;
    int64_t start = lane * t->rows, together = BLOCK / LANES;
    if (t->width != LANES) return piece; /* one group */
    if (t->levels) {
        groups = (groups + together - 1) / together * together;
        piece.scales_at += lane / BLOCK * sizeof(float);
    }
    piece.grad = (char *)t->grad + start * grad_size(t);
    piece.residue = (char *)t->residue + start * residue_size(t);
    piece.numel = t->numel - start;
    piece.k = t->k - lane;
    piece.offsets_at += lane * t->offset_width;
    piece.values_at += lane;
    if (piece.k > groups * LANES) piece.k = groups * LANES, piece.numel = groups * group;
    return piece;
}

/* The tensors of this call: gradients come first among its inputs, then residues. */
static tensor *pick_up(call *now, const bucket *of) {
    int n = of->count;
    tensor *tensors = malloc(sizeof(tensor) * (n + 1));
    for (int i = 0; i < n; i++) {
        tensors[i] = of->tensors[i];
        TF_Tensor *grad = input(now, i, tensors[i].numel, GRAD_SIZE);
        if (grad) tensors[i].grad = data(grad), tensors[i].dtype = kind_of(grad);
        tensors[i].residue = data(input(now, n + i, tensors[i].numel, RESIDUE_SIZE));
    }
    return tensors;
}

/* grads, residues, settings, chooses -> offsets, and scales of integers (none unless it chooses) */
static void choose(void *kernel, TF_OpKernelContext *context) {
    const bucket *of = kernel;
    int n = of->count;
    call now = begin(context, 2 * n + 8);
    tensor *tensors = pick_up(&now, of);
    settings(&now, 2 * n);
    uint8_t *chooses = data(input(&now, 2 * n + 1, 1, "chooses must be one bool"));
    void *chosen = output(&now, 0, chooses && *chooses ? of->offsets_bytes : 0);
    if (!failed(&now) && *chooses) scalecom_choose(tensors, n, now.scale, now.extra, chosen);
    free(tensors);
    end(&now);
}

/* grads, residues, settings, offsets -> updated residues, values, how many elements are bad */
static void take_and_accumulate(void *kernel, TF_OpKernelContext *context) {
    const bucket *of = kernel;
    int n = of->count;
    call now = begin(context, 4 * n + 8);
    const void **old = malloc(sizeof(void *) * (n + 1));
    tensor *tensors = pick_up(&now, of);
    for (int i = 0; i < n; i++) {
        old[i] = tensors[i].residue;
        tensors[i].residue = output(&now, i, tensors[i].numel);
    }
    settings(&now, 2 * n);
    void *offsets = data(input(&now, 2 * n + 1, of->offsets_bytes, OFFSETS_SIZE));
    void *values = output(&now, n, of->n_values);
    int64_t bad = 0;
    for (int i = 0; i < n && !failed(&now); i++)
        for (int64_t lane = 0; lane < tensors[i].k && !failed(&now);) {
            tensor piece = piece_at(&tensors[i], lane);
            int64_t start = (char *)piece.residue - (char *)tensors[i].residue;
            memcpy(piece.residue, (const char *)old[i] + start, piece.numel * residue_size(&piece));
            bad += checked(&now, scalecom_take_and_accumulate(&piece, 1, now.beta, now.scale,
                                                              now.extra, offsets, values, NULL));
            lane += piece.k;
        }
    scalar(&now, n + 1, bad);
    free(tensors);
    free(old);
    end(&now);
}

/* grads (for their memory), settings, offsets, averaged values -> averaged gradients */
static void scatter(void *kernel, TF_OpKernelContext *context) {
    const bucket *of = kernel;
    int n = of->count;
    call now = begin(context, 2 * n + 8);
    tensor *tensors = malloc(sizeof(tensor) * (n + 1));
    for (int i = 0; i < n; i++) {
        int took = 0;
        tensors[i] = of->tensors[i];
        tensors[i].grad = output_in(&now, i, i, tensors[i].numel, &took);
        if (!failed(&now)) tensors[i].dtype = kind_of(now.held[now.n_held - 1]);
    }
    settings(&now, n);
    void *offsets = data(input(&now, n + 1, of->offsets_bytes, OFFSETS_SIZE));
    TF_Tensor *values = input(&now, n + 2, of->n_values, "there must be one value for each lane");
    if (!failed(&now))
        checked(&now, scalecom_scatter(tensors, n, 1 / now.scale, offsets, data(values)));
    free(tensors);
    end(&now);
}

static void no_shapes(TF_ShapeInferenceContext *context, TF_Status *status) {
    TF_ShapeInferenceContextSetUnknownShape(context, status);
}

static const char *ATTRIBUTES[] = {"N: int >= 1", "T: {float, double, half, bfloat16}",
                                   "R: {float, double}", "lanes: list(int)", NULL};
typedef struct {
    const char *name, *inputs[8], *outputs[8];
    void (*compute)(void *, TF_OpKernelContext *);
    const char *wire; /* what values travel as */
} operation;
static const operation OPERATIONS[] = {
    {"ScalecomChoose",
     {"grads: N * T", "residues: N * R", "settings: double", "chooses: bool"},
     {"chosen: uint8"}, choose, NULL},
    {"ScalecomTakeAndAccumulate",
     {"grads: N * T", "residues: N * R", "settings: double", "offsets: uint8"},
     {"updated: N * R", "values: W", "bad: int64"}, take_and_accumulate,
     "W: {float, double, int8}"},
    {"ScalecomScatter",
     {"grads: N * T", "settings: double", "offsets: uint8", "values: W"},
     {"averages: N * T"}, scatter, "W: {float, double}"},
};

/* TensorFlow asks a library that it loads for nothing: what it offers is announced when it is
 * loaded. */
__attribute__((constructor)) static void announce(void) {
    for (size_t i = 0; i < sizeof OPERATIONS / sizeof *OPERATIONS; i++) {
        const operation *o = &OPERATIONS[i];
        TF_Status *status = TF_NewStatus();
        TF_OpDefinitionBuilder *definition = TF_NewOpDefinitionBuilder(o->name);
        for (const char **a = ATTRIBUTES; *a; a++)
            if (o->compute != scatter || strncmp(*a, "R:", 2))
                TF_OpDefinitionBuilderAddAttr(definition, *a);
        if (o->wire) TF_OpDefinitionBuilderAddAttr(definition, o->wire);
        for (const char *const *spec = o->inputs; *spec; spec++)
            TF_OpDefinitionBuilderAddInput(definition, *spec);
        for (const char *const *spec = o->outputs; *spec; spec++)
            TF_OpDefinitionBuilderAddOutput(definition, *spec);
        TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, no_shapes);
        TF_RegisterOpDefinition(definition, status);
        TF_KernelBuilder *kernel =
            TF_NewKernelBuilder(o->name, "CPU", create, o->compute, destroy);
        TF_RegisterKernelBuilder(o->name, kernel, status);
        TF_DeleteStatus(status);
    }
}
