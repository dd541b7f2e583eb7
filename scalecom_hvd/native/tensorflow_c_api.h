/* The part of TensorFlow's stable C API (tensorflow/c/kernels.h, ops.h, tf_tensor.h, tf_status.h)
 * that tensorflow_ops.c calls.
 *
 * Declared here, so that this package is built without TensorFlow's headers and serves whichever
 * version is installed later. The symbols are those of libtensorflow_framework, found when the
 * library is loaded (tensorflow/kernels.py).
 */
#include <stddef.h>
#include <stdint.h>

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;

typedef enum {
    TF_FLOAT = 1,
    TF_DOUBLE = 2,
    TF_UINT8 = 4,
    TF_INT64 = 9,
    TF_BOOL = 10,
    TF_BFLOAT16 = 14,
    TF_HALF = 19
} TF_DataType;
typedef enum { TF_OK = 0, TF_INVALID_ARGUMENT = 3 } TF_Code;

TF_Status *TF_NewStatus(void);
void TF_DeleteStatus(TF_Status *);
void TF_SetStatus(TF_Status *, TF_Code, const char *message);
TF_Code TF_GetCode(const TF_Status *);

void *TF_TensorData(const TF_Tensor *);
size_t TF_TensorByteSize(const TF_Tensor *);
int64_t TF_TensorElementCount(const TF_Tensor *);
TF_DataType TF_TensorType(const TF_Tensor *);
void TF_DeleteTensor(TF_Tensor *);

TF_OpDefinitionBuilder *TF_NewOpDefinitionBuilder(const char *op);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder *, const char *spec);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder *, const char *spec);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder *, const char *spec);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(
    TF_OpDefinitionBuilder *, void (*)(TF_ShapeInferenceContext *, TF_Status *));
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder *, TF_Status *);
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext *, TF_Status *);

TF_KernelBuilder *TF_NewKernelBuilder(const char *op, const char *device,
                                      void *(*create)(TF_OpKernelConstruction *),
                                      void (*compute)(void *, TF_OpKernelContext *),
                                      void (*destroy)(void *));
void TF_RegisterKernelBuilder(const char *kernel, TF_KernelBuilder *, TF_Status *);
void TF_OpKernelConstruction_GetAttrSize(TF_OpKernelConstruction *, const char *name, int32_t *list,
                                         int32_t *total, TF_Status *);
void TF_OpKernelConstruction_GetAttrInt64List(TF_OpKernelConstruction *, const char *name,
                                              int64_t *values, int most, TF_Status *);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction *, TF_Status *);
void TF_OpKernelContext_Failure(TF_OpKernelContext *, TF_Status *);
void TF_GetInput(TF_OpKernelContext *, int index, TF_Tensor **, TF_Status *);
TF_DataType TF_ExpectedOutputDataType(TF_OpKernelContext *, int index);
TF_Tensor *TF_AllocateOutput(TF_OpKernelContext *, int index, TF_DataType, const int64_t *dims,
                             int n_dims, size_t bytes, TF_Status *);
TF_Tensor *TF_ForwardInputOrAllocateOutput(TF_OpKernelContext *, const int *candidates,
                                           int n_candidates, int output, const int64_t *dims,
                                           int n_dims, int *forwarded, TF_Status *);
