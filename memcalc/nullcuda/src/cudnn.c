/* cuDNN: convolutions and batch norms run without a workspace; its graph API is rejected.
 *
 * PyTorch's convolutions take the older path (TORCH_CUDNN_V8_API_DISABLED=1), which requests an algorithm for each
 * convolution. Attention has no older path, so the hook disables cuDNN attention, and PyTorch uses flash
 * attention. Prototypes: https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api. */
#include "null.h"

#include <stdlib.h>
#include <string.h>

#define CUDNN_NOT_SUPPORTED 3000

API size_t cudnnGetVersion(void) { return CUDNN_VERSION; } /* 10000 * major + 100 * minor + patch, of torch's wheel */
API size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }
API int cudnnGetProperty(int property, int *value) {
    *value = property == 0 ? CUDNN_VERSION / 10000 : property == 1 ? CUDNN_VERSION / 100 % 100 : CUDNN_VERSION % 100;
    return SUCCESS;
}
API const char *cudnnGetErrorString(int status) {
    return status == SUCCESS ? "CUDNN_STATUS_SUCCESS"
                             : "CUDNN_STATUS_NOT_SUPPORTED: not modelled by memcalc's null device";
}
API void cudnnGetLastErrorString(char *text, size_t size) {
    if (size > 0) text[0] = '\0';
}

struct handle {
    void *stream;
};
API int cudnnCreate(struct handle **out) { *out = calloc(1, sizeof **out); return SUCCESS; }
API int cudnnDestroy(struct handle *handle) { free(handle); return SUCCESS; }
API int cudnnSetStream(struct handle *handle, void *stream) { handle->stream = stream; return SUCCESS; }
API int cudnnGetStream(struct handle *handle, void **stream) { *stream = handle->stream; return SUCCESS; }

#define DESCRIPTOR(kind) \
    API int cudnnCreate##kind##Descriptor(void **out) { *out = malloc(1); return SUCCESS; } \
    API int cudnnDestroy##kind##Descriptor(void *descriptor) { free(descriptor); return SUCCESS; }
DESCRIPTOR(Tensor)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Activation)
DESCRIPTOR(Dropout)
DESCRIPTOR(Pooling)
DESCRIPTOR(SpatialTransformer)

/* cudnnConvolutionFwdAlgoPerf_t, and those of the two backward passes, which have the same layout. */
struct performance {
    int algorithm, status;
    float time;
    size_t memory;
    int determinism, math_type, reserved[3];
};

static int algorithm(int asked, int *found, struct performance *results) {
    *found = asked > 0;
    if (asked > 0) {
        memset(results, 0, sizeof *results);
        results->algorithm = 1; /* implicit GEMM with precomputed indices (forward) or its equivalent, in all three */
        results->time = 1;
    }
    return SUCCESS;
}

#define ALGORITHMS(pass) \
    API int cudnnGetConvolution##pass##Algorithm_v7(void *handle, void *a, void *b, void *c, void *d, int asked, \
                                                    int *found, struct performance *results) { \
        (void)handle; (void)a; (void)b; (void)c; (void)d; \
        return algorithm(asked, found, results); \
    } \
    API int cudnnFindConvolution##pass##AlgorithmEx(void *handle, void *a, void *ap, void *b, void *bp, void *c, \
                                                    void *d, void *dp, int asked, int *found, \
                                                    struct performance *results, void *workspace, size_t size) { \
        (void)handle; (void)a; (void)ap; (void)b; (void)bp; (void)c; (void)d; (void)dp; (void)workspace; (void)size; \
        return algorithm(asked, found, results); \
    } \
    API int cudnnGetConvolution##pass##WorkspaceSize(void *handle, void *a, void *b, void *c, void *d, int which, \
                                                     size_t *size) { \
        (void)handle; (void)a; (void)b; (void)c; (void)d; (void)which; \
        *size = 0; \
        return SUCCESS; \
    }
ALGORITHMS(Forward)
ALGORITHMS(BackwardData)
ALGORITHMS(BackwardFilter)

API int cudnnConvolutionForward(void) { null_launch(); return SUCCESS; }
API int cudnnConvolutionBackwardData(void) { null_launch(); return SUCCESS; }
API int cudnnConvolutionBackwardFilter(void) { null_launch(); return SUCCESS; }
API int cudnnConvolutionBiasActivationForward(void) { null_launch(); return SUCCESS; }

/* Batch norm: neither a workspace nor a reserve. The size is the last argument of each. */
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations, void *x, void *z,
                                                                 void *y, void *s, void *activation, size_t *size) {
    (void)handle; (void)mode; (void)operations; (void)x; (void)z; (void)y; (void)s; (void)activation;
    *size = 0;
    return SUCCESS;
}
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, void *x, void *y,
                                                          void *dy, void *dz, void *dx, void *s, void *activation,
                                                          size_t *size) {
    (void)handle; (void)mode; (void)operations; (void)x; (void)y; (void)dy; (void)dz; (void)dx; (void)s; (void)activation;
    *size = 0;
    return SUCCESS;
}
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations, void *activation,
                                                             void *x, size_t *size) {
    (void)handle; (void)mode; (void)operations; (void)activation; (void)x;
    *size = 0;
    return SUCCESS;
}
API int cudnnBatchNormalizationForwardTrainingEx(void) { null_launch(); return SUCCESS; }
API int cudnnBatchNormalizationForwardInference(void) { null_launch(); return SUCCESS; }
API int cudnnBatchNormalizationBackwardEx(void) { null_launch(); return SUCCESS; }

#define REFUSED(name) \
    API int name(void) { \
        static int seen; \
        null_unmodelled("libcudnn", #name, &seen); \
        return CUDNN_NOT_SUPPORTED; \
    }
REFUSED(cudnnBackendCreateDescriptor)
REFUSED(cudnnBackendFinalize)
REFUSED(cudnnBackendExecute)
REFUSED(cudnnCreateRNNDescriptor)
REFUSED(cudnnCreateRNNDataDescriptor)
REFUSED(cudnnGetRNNTempSpaceSizes)
REFUSED(cudnnGetRNNWeightSpaceSize)
REFUSED(cudnnDropoutGetStatesSize)
REFUSED(cudnnGetCTCLossWorkspaceSize)
REFUSED(cudnnGetCTCLossWorkspaceSize_v8)
