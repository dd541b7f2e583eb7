/* The part of TensorFlow's C API that tensorflow_ops.c calls, over plain memory: so its operations run under sanitizers, without
 * TensorFlow. Outputs have exactly the bytes asked for. `run` makes one call of an operation; kernels_c.py calls it through ctypes.
 */
#include <stdlib.h>
#include <string.h>

#include "tensorflow_c_api.h"

enum { MOST = 16, MESSAGE = 1024 };

typedef struct { int32_t dtype, forwarded; int64_t elements; void *data; } array;
typedef struct {
    const char *name;
    void *(*create)(TF_OpKernelConstruction *);
    void (*compute)(void *, TF_OpKernelContext *);
    void (*destroy)(void *);
} kernel;

struct TF_Status { TF_Code code; char message[MESSAGE]; };
struct TF_Tensor { array *of; };
struct TF_OpDefinitionBuilder { int unused; };
struct TF_KernelBuilder { kernel made; };
struct TF_OpKernelConstruction { const int64_t *lanes; int n_lanes; };
struct TF_OpKernelContext { array *inputs, *outputs; int n_inputs, n_outputs, forwards; char *error; };

static kernel kernels[MOST];
static int n_kernels;

static size_t size_of(int32_t dtype) {
    return dtype == TF_DOUBLE || dtype == TF_INT64 ? 8 : dtype == TF_FLOAT ? 4 : dtype == TF_HALF || dtype == TF_BFLOAT16 ? 2 : 1;
}
static TF_Tensor *handle(array *of) {
    TF_Tensor *made = malloc(sizeof *made);
    made->of = of;
    return made;
}

TF_Status *TF_NewStatus(void) { return calloc(1, sizeof(TF_Status)); }
void TF_DeleteStatus(TF_Status *status) { free(status); }
TF_Code TF_GetCode(const TF_Status *status) { return status->code; }
void TF_SetStatus(TF_Status *status, TF_Code code, const char *message) {
    status->code = code;
    strncpy(status->message, message, MESSAGE - 1);
}

void *TF_TensorData(const TF_Tensor *tensor) { return tensor->of->data; }
size_t TF_TensorByteSize(const TF_Tensor *tensor) { return tensor->of->elements * size_of(tensor->of->dtype); }
int64_t TF_TensorElementCount(const TF_Tensor *tensor) { return tensor->of->elements; }
TF_DataType TF_TensorType(const TF_Tensor *tensor) { return tensor->of->dtype; }
void TF_DeleteTensor(TF_Tensor *tensor) { free(tensor); }

TF_OpDefinitionBuilder *TF_NewOpDefinitionBuilder(const char *op) { return (void)op, calloc(1, sizeof(TF_OpDefinitionBuilder)); }
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder *b, const char *spec) { (void)b, (void)spec; }
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder *b, const char *spec) { (void)b, (void)spec; }
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder *b, const char *spec) { (void)b, (void)spec; }
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder *b, void (*f)(TF_ShapeInferenceContext *, TF_Status *)) {
    (void)b, (void)f;
}
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder *b, TF_Status *status) { (void)status, free(b); }
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext *c, TF_Status *status) { (void)c, (void)status; }

TF_KernelBuilder *TF_NewKernelBuilder(const char *op, const char *device, void *(*create)(TF_OpKernelConstruction *),
                                      void (*compute)(void *, TF_OpKernelContext *), void (*destroy)(void *)) {
    TF_KernelBuilder *builder = malloc(sizeof *builder);
    builder->made = (kernel){op, create, compute, destroy};
    return (void)device, builder;
}
void TF_RegisterKernelBuilder(const char *name, TF_KernelBuilder *builder, TF_Status *status) {
    (void)name, (void)status;
    kernels[n_kernels++] = builder->made;
    free(builder);
}
void TF_OpKernelConstruction_GetAttrSize(TF_OpKernelConstruction *c, const char *name, int32_t *list, int32_t *total, TF_Status *status) {
    (void)name, (void)total, (void)status;
    *list = c->n_lanes;
}
void TF_OpKernelConstruction_GetAttrInt64List(TF_OpKernelConstruction *c, const char *name, int64_t *values, int most, TF_Status *status) {
    (void)name, (void)status;
    memcpy(values, c->lanes, sizeof(int64_t) * most);
}
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction *c, TF_Status *status) { (void)c, (void)status, abort(); }
void TF_OpKernelContext_Failure(TF_OpKernelContext *c, TF_Status *status) { strcpy(c->error, status->message); }
void TF_GetInput(TF_OpKernelContext *c, int index, TF_Tensor **found, TF_Status *status) {
    if (index >= c->n_inputs) TF_SetStatus(status, TF_INVALID_ARGUMENT, "no such input");
    else *found = handle(&c->inputs[index]);
}
TF_DataType TF_ExpectedOutputDataType(TF_OpKernelContext *c, int index) { 
    if (index >= c->n_outputs) abort();
    return c->outputs[index].dtype;
}
TF_Tensor *TF_AllocateOutput(TF_OpKernelContext *c, int index, TF_DataType dtype, const int64_t *dims, int n_dims, size_t bytes,
                             TF_Status *status) {
    array *output = &c->outputs[index];
    if (index >= c->n_outputs || (int32_t)dtype != output->dtype) abort();
    (void)status;
    output->elements = n_dims ? dims[0] : 1;
    output->data = malloc(bytes);
    return handle(output);
}
TF_Tensor *TF_ForwardInputOrAllocateOutput(TF_OpKernelContext *c, const int *candidates, int n_candidates, int index, const int64_t *dims,
                                           int n_dims, int *forwarded, TF_Status *status) {
    array *output = &c->outputs[index], *input = &c->inputs[candidates[0]];
    if (n_candidates != 1) abort();
    if (!c->forwards || input->elements != dims[0])
        return TF_AllocateOutput(c, index, output->dtype, dims, n_dims, dims[0] * size_of(output->dtype), status);
    *output = *input;
    output->forwarded = 1;
    *forwarded = candidates[0];
    return handle(output);
}

/* forwards: outputs may take over their inputs' memory. Writes what failed into `error`, or leaves it. Returns whether there is such a
 * kernel. */
int run(const char *op, const int64_t *lanes, int n_lanes, array *inputs, int n_inputs, array *outputs, int n_outputs, int forwards,
        char *error) {
    for (int i = 0; i < n_kernels; i++)
        if (!strcmp(kernels[i].name, op)) {
            TF_OpKernelConstruction construction = {lanes, n_lanes};
            TF_OpKernelContext context = {inputs, outputs, n_inputs, n_outputs, forwards, error};
            void *made = kernels[i].create(&construction);
            kernels[i].compute(made, &context);
            kernels[i].destroy(made);
            return 1;
        }
    return 0;
}
void release(array *outputs, int n) {
    for (int i = 0; i < n; i++)
        if (!outputs[i].forwarded) free(outputs[i].data);
}
