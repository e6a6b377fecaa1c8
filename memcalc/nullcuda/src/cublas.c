/* cuBLAS: handles and settings. A matmul is a kernel launch; PyTorch allocates its workspace itself, from its
 * allocator. Prototypes: https://docs.nvidia.com/cuda/cublas. */
#include "null.h"

#include <stdlib.h>

struct handle {
    void *stream;
    int math_mode, pointer_mode;
};

API int cublasCreate_v2(struct handle **out) { *out = calloc(1, sizeof **out); return SUCCESS; }
API int cublasDestroy_v2(struct handle *handle) { free(handle); return SUCCESS; }
API int cublasSetStream_v2(struct handle *handle, void *stream) { handle->stream = stream; return SUCCESS; }
API int cublasGetStream_v2(struct handle *handle, void **stream) { *stream = handle->stream; return SUCCESS; }
API int cublasSetMathMode(struct handle *handle, int mode) { handle->math_mode = mode; return SUCCESS; }
API int cublasGetMathMode(struct handle *handle, int *mode) { *mode = handle->math_mode; return SUCCESS; }
API int cublasSetPointerMode_v2(struct handle *handle, int mode) { handle->pointer_mode = mode; return SUCCESS; }
API int cublasGetPointerMode_v2(struct handle *handle, int *mode) { *mode = handle->pointer_mode; return SUCCESS; }
API int cublasSetWorkspace_v2(struct handle *handle, void *workspace, size_t size) {
    (void)handle; (void)workspace; (void)size;
    return SUCCESS;
}
/* all */
API int cublasGetSmCountTarget(struct handle *handle, int *count) {
    (void)handle;
    *count = 0;
    return SUCCESS;
}
/* Its versions are numbered like CUDA's: 12.8 is 120800, the patch left at 0. */
API int cublasGetVersion_v2(struct handle *handle, int *version) {
    (void)handle;
    *version = CUDA_VERSION * 10;
    return SUCCESS;
}
API const char *cublasGetStatusString(int status) {
    return status == 0 ? "CUBLAS_STATUS_SUCCESS" : "error on the null device";
}
API const char *cublasGetStatusName(int status) { return cublasGetStatusString(status); }

static int product(void) { null_launch(); return SUCCESS; }
#define PRODUCT(name) API int name(void) { return product(); } /* the operands are never read */
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasGemmBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)

/* Results that the pointer mode places in host memory: zero, like every value read from the device. */
API int cublasDotEx(struct handle *handle, int n, const void *x, int x_type, int x_step, const void *y, int y_type,
                    int y_step, void *result, int result_type, int compute_type) {
    (void)handle; (void)n; (void)x; (void)x_type; (void)x_step; (void)y; (void)y_type; (void)y_step;
    (void)result_type; (void)compute_type;
    null_launch();
    if (null_device_of(result) >= 0) null_clear(result, 8);
    return SUCCESS;
}
