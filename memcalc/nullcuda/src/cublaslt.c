/* cuBLASLt: descriptors, and one algorithm for every matmul, which requests no workspace. PyTorch allocates its
 * workspace for cuBLASLt before it requests an algorithm, by its own rules, so its size is the real one.
 * Prototypes: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api. */
#include "null.h"

#include <stdlib.h>
#include <string.h>

static int handle(void **out) {
    *out = malloc(1);
    return SUCCESS;
}

API int cublasLtCreate(void **out) { return handle(out); }
API int cublasLtDestroy(void *out) { free(out); return SUCCESS; }
API size_t cublasLtGetVersion(void) { return CUDA_VERSION * 10; }
API size_t cublasLtGetCudartVersion(void) { return CUDA_VERSION; }
API int cublasLtMatmulDescCreate(void **out) { return handle(out); }
API int cublasLtMatmulDescDestroy(void *out) { free(out); return SUCCESS; }
API int cublasLtMatrixLayoutCreate(void **out) { return handle(out); }
API int cublasLtMatrixLayoutDestroy(void *out) { free(out); return SUCCESS; }
API int cublasLtMatmulPreferenceCreate(void **out) { return handle(out); }
API int cublasLtMatmulPreferenceDestroy(void *out) { free(out); return SUCCESS; }
API int cublasLtMatrixTransformDescCreate(void **out) { return handle(out); }
API int cublasLtMatrixTransformDescDestroy(void *out) { free(out); return SUCCESS; }

/* cublasLtMatmulHeuristicResult_t of the reference. */
struct result {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                       void *preference, int asked, struct result *results, int *found) {
    (void)handle; (void)operation; (void)a; (void)b; (void)c; (void)d; (void)preference;
    if (asked > 0) {
        memset(results, 0, sizeof *results);
        results->waves = 1;
    }
    *found = asked > 0;
    return SUCCESS;
}
API int cublasLtMatmul(void) { null_launch(); return SUCCESS; }
API int cublasLtMatrixTransform(void) { null_launch(); return SUCCESS; }
