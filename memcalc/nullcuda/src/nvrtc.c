/* NVRTC: compiles PyTorch's just-in-time kernels to nothing, which the driver then loads and launches.
 * Prototypes: https://docs.nvidia.com/cuda/nvrtc. */
#include "null.h"

#include <stdlib.h>

API int nvrtcVersion(int *major, int *minor) {
    *major = CUDA_VERSION / 1000;
    *minor = CUDA_VERSION % 1000 / 10;
    return SUCCESS;
}
API const char *nvrtcGetErrorString(int result) {
    return result == SUCCESS ? "NVRTC_SUCCESS" : "error on the null device";
}
API int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, void *texts,
                           void *names) {
    (void)source; (void)name; (void)headers; (void)texts; (void)names;
    *program = malloc(1);
    return SUCCESS;
}
API int nvrtcDestroyProgram(void **program) {
    free(*program);
    *program = NULL;
    return SUCCESS;
}
API int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    (void)program; (void)count; (void)options;
    return SUCCESS;
}
API int nvrtcAddNameExpression(void *program, const char *expression) {
    (void)program; (void)expression;
    return SUCCESS;
}
API int nvrtcGetLoweredName(void *program, const char *expression, const char **lowered) {
    (void)program;
    *lowered = expression;
    return SUCCESS;
}

/* One byte for each result: an empty string. */
static int size(size_t *out) {
    *out = 1;
    return SUCCESS;
}
static int text(char *out) {
    *out = '\0';
    return SUCCESS;
}
API int nvrtcGetPTXSize(void *program, size_t *out) { (void)program; return size(out); }
API int nvrtcGetPTX(void *program, char *out) { (void)program; return text(out); }
API int nvrtcGetCUBINSize(void *program, size_t *out) { (void)program; return size(out); }
API int nvrtcGetCUBIN(void *program, char *out) { (void)program; return text(out); }
API int nvrtcGetProgramLogSize(void *program, size_t *out) { (void)program; return size(out); }
API int nvrtcGetProgramLog(void *program, char *out) { (void)program; return text(out); }
