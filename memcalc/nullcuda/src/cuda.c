/* The CUDA driver: what PyTorch (through NVRTC, expandable segments, symmetric memory) and Triton call.
 * Prototypes: https://docs.nvidia.com/cuda/cuda-driver-api. */
#define _GNU_SOURCE
#include "null.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef int CUdevice;
typedef void *CUstream;
typedef uint64_t CUdeviceptr;

/* ---- versions, errors, functions by name */

API CUresult cuInit(unsigned flags) { (void)flags; return SUCCESS; }
API CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
API CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == SUCCESS ? "no error" : error == OUT_OF_MEMORY ? "out of memory" : "error on the null device";
    return SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error == SUCCESS         ? "CUDA_SUCCESS"
            : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
                                     : "CUDA_ERROR_UNKNOWN";
    return SUCCESS;
}
API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)version;
    (void)flags;
    *function = dlsym(null_sibling("libcuda.so.1"), name);
    if (status != NULL) *status = *function == NULL; /* 1: CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    return *function == NULL ? NOT_FOUND : SUCCESS;
}
API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
/* Tables of private functions, requested by programs with a statically linked runtime, which cannot run here. */
API CUresult cuGetExportTable(const void **table, const void *id) {
    (void)id;
    *table = NULL;
    return NOT_FOUND;
}

/* ---- devices and contexts: a context is its device */

API CUresult cuDeviceGetCount(int *count) { *count = null_device_count(); return SUCCESS; }
API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < null_device_count() ? SUCCESS : INVALID_DEVICE;
}
API CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    (void)device;
    snprintf(name, length, "%s", null_card()->name);
    return SUCCESS;
}
API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    *value = attribute == 33 ? device + 1 : null_attribute(attribute); /* 33: the PCI bus, one for each GPU */
    return SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = null_card()->memory;
    return SUCCESS;
}
API CUresult cuDeviceGetUuid(char *uuid, CUdevice device) {
    memset(uuid, 0, 16);
    uuid[0] = (char)(device + 1);
    return SUCCESS;
}
API CUresult cuDeviceGetUuid_v2(char *uuid, CUdevice device) { return cuDeviceGetUuid(uuid, device); }

static void *context_of(int device) { return (void *)(uintptr_t)(device + 1); }
API CUresult cuCtxGetCurrent(void **context) { *context = context_of(null_current()); return SUCCESS; }
API CUresult cuCtxSetCurrent(void *context) {
    return context == NULL ? SUCCESS : null_set_current((int)(uintptr_t)context - 1);
}
API CUresult cuCtxGetDevice(CUdevice *device) { *device = null_current(); return SUCCESS; }
API CUresult cuCtxSynchronize(void) { null_device_wait(); return SUCCESS; }
API CUresult cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
API CUresult cuCtxPushCurrent(void *context) { return cuCtxSetCurrent(context); }
API CUresult cuCtxPopCurrent_v2(void **context) { return context == NULL ? SUCCESS : cuCtxGetCurrent(context); }
API CUresult cuCtxPopCurrent(void **context) { return cuCtxPopCurrent_v2(context); }
API CUresult cuCtxGetLimit(size_t *value, int limit) { (void)limit; *value = 0; return SUCCESS; }
API CUresult cuCtxSetLimit(int limit, size_t value) { (void)limit; (void)value; return SUCCESS; }
API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device) {
    *context = context_of(device);
    return SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { (void)device; return SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 1;
    return SUCCESS;
}

/* ---- memory: address ranges and physical memory apart, as expandable segments use them */

struct physical {
    size_t size;
    int device, references;
};

/* CUmemAllocationProp of the reference, the fields that are read: type, handle types, then the location. */
struct allocation_properties {
    int type, handle_types;
    struct { int type, id; } location;
};

API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish,
                                 uint64_t flags) {
    (void)alignment; (void)wish; (void)flags;
    void *base = null_reserve(size);
    *address = (CUdeviceptr)(uintptr_t)base;
    return base == NULL ? OUT_OF_MEMORY : SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    null_unreserve((void *)(uintptr_t)address, size);
    return SUCCESS;
}
API CUresult cuMemCreate(uint64_t *handle, size_t size, const struct allocation_properties *properties,
                         uint64_t flags) {
    (void)flags;
    struct physical *made = malloc(sizeof *made);
    int result = made == NULL ? OUT_OF_MEMORY : null_commit(properties->location.id, size);
    if (result != SUCCESS) {
        free(made);
        return result;
    }
    *made = (struct physical){size, properties->location.id, 1};
    *handle = (uint64_t)(uintptr_t)made;
    return SUCCESS;
}
API CUresult cuMemRelease(uint64_t handle) {
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    if (physical == NULL || --physical->references > 0) return SUCCESS;
    if (physical->device >= 0) null_release(physical->device, physical->size);
    free(physical);
    return SUCCESS;
}
/* PyTorch releases a handle only after unmapping it, so a mapping needs no reference to the memory. */
API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    (void)size; (void)offset; (void)flags;
    null_map((void *)(uintptr_t)address, physical->device < 0 ? null_current() : physical->device);
    return SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    null_clear((void *)(uintptr_t)address, size);
    return SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const void *access, size_t count) {
    (void)address; (void)size; (void)access; (void)count;
    return SUCCESS;
}
API CUresult cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option) {
    (void)properties; (void)option;
    *granularity = 2 * MIB; /* on every GPU since Pascal */
    return SUCCESS;
}
/* Memory of another process: that process counts it. */
API CUresult cuMemExportToShareableHandle(void *shared, uint64_t handle, int type, uint64_t flags) {
    (void)handle; (void)flags;
    if (type == 1) *(int *)shared = -1; /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
    return SUCCESS;
}
API CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *shared, int type) {
    (void)shared; (void)type;
    struct physical *made = malloc(sizeof *made);
    if (made == NULL) return OUT_OF_MEMORY;
    *made = (struct physical){0, -1, 1};
    *handle = (uint64_t)(uintptr_t)made;
    return SUCCESS;
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    void *start;
    size_t extent = null_extent((void *)(uintptr_t)address, &start);
    if (base != NULL) *base = (CUdeviceptr)(uintptr_t)start;
    if (size != NULL) *size = extent;
    return extent == 0 ? INVALID_VALUE : SUCCESS;
}
API CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    return cuMemGetAddressRange_v2(base, size, address);
}
API CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *address) {
    (void)handle; (void)address;
    return NOT_SUPPORTED;
}
API CUresult cuMemGetAllocationPropertiesFromHandle(void *properties, uint64_t handle) {
    (void)properties; (void)handle;
    return NOT_SUPPORTED;
}
API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size) {
    void *address;
    int result = null_malloc(null_current(), size, &address);
    *out = (CUdeviceptr)(uintptr_t)address;
    return result;
}
API CUresult cuMemFree_v2(CUdeviceptr address) { return null_free((void *)(uintptr_t)address); }
API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    size_t in_use = null_in_use(null_current());
    *total = null_card()->memory;
    *free_bytes = in_use < *total ? *total - in_use : 0;
    return SUCCESS;
}
static CUresult copy(uint64_t to, uint64_t from, size_t size) {
    null_copy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, size);
    return SUCCESS;
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) { return copy(to, (uintptr_t)from, size); }
API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) { return copy((uintptr_t)to, from, size); }
API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    (void)stream;
    return copy(to, from, size);
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    (void)stream;
    return copy(to, (uintptr_t)from, size);
}
API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    (void)stream;
    return copy((uintptr_t)to, from, size);
}
API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    (void)value; (void)stream;
    null_clear((void *)(uintptr_t)to, 4 * count);
    return SUCCESS;
}
API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    (void)value; (void)stream;
    null_clear((void *)(uintptr_t)to, count);
    return SUCCESS;
}
API CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr address) {
    int device = null_device_of((void *)(uintptr_t)address);
    enum host_kind kind = device >= 0 ? UNKNOWN_TO_CUDA : null_host_kind((void *)(uintptr_t)address);
    if (device < 0 && kind == UNKNOWN_TO_CUDA) return INVALID_VALUE; /* as for unregistered host memory */
    switch (attribute) {
        case 1: *(void **)out = context_of(device < 0 ? null_current() : device); break; /* CONTEXT */
        case 2: *(int *)out = device >= 0 ? 2 : 1; break; /* MEMORY_TYPE: device, host */
        case 3: case 4: *(CUdeviceptr *)out = address; break; /* DEVICE_POINTER, HOST_POINTER */
        case 7: *(uint64_t *)out = address; break; /* BUFFER_ID */
        case 8: *(int *)out = kind == MANAGED; break; /* IS_MANAGED */
        case 9: *(int *)out = device < 0 ? null_current() : device; break; /* DEVICE_ORDINAL */
        default: return NOT_SUPPORTED;
    }
    return SUCCESS;
}

/* ---- modules and kernels: never read when loaded, no-ops when launched */

#define HANDLE(out) (*(void **)(out) = (void *)(uintptr_t)16, SUCCESS) /* never dereferenced */

API CUresult cuModuleLoadData(void **module, const void *image) { (void)image; return HANDLE(module); }
API CUresult cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *options, void *values) {
    (void)image; (void)n; (void)options; (void)values;
    return HANDLE(module);
}
API CUresult cuModuleLoad(void **module, const char *path) { (void)path; return HANDLE(module); }
API CUresult cuModuleUnload(void *module) { (void)module; return SUCCESS; }
API CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module; (void)name;
    return HANDLE(function);
}
API CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *size, void *module, const char *name) {
    (void)module; (void)name;
    if (size != NULL) *size = 0;
    if (address != NULL) *address = 0;
    return NOT_FOUND;
}
API CUresult cuModuleGetLoadingMode(int *mode) { *mode = 2; return SUCCESS; } /* CU_MODULE_LAZY_LOADING: the default */
API CUresult cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e,
                               unsigned f) {
    (void)code; (void)a; (void)b; (void)c; (void)d; (void)e; (void)f;
    return HANDLE(library);
}
API CUresult cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    (void)library; (void)name;
    return HANDLE(kernel);
}
API CUresult cuLibraryUnload(void *library) { (void)library; return SUCCESS; }
API CUresult cuKernelGetFunction(void **function, void *kernel) { (void)kernel; return HANDLE(function); }
API CUresult cuFuncGetModule(void **module, void *function) { (void)function; return HANDLE(module); }
API CUresult cuLinkCreate_v2(unsigned n, void *options, void *values, void **state) {
    (void)n; (void)options; (void)values;
    return HANDLE(state);
}
API CUresult cuLinkAddData_v2(void *state, int type, void *data, size_t size, const char *name, unsigned n,
                              void *options, void *values) {
    (void)state; (void)type; (void)data; (void)size; (void)name; (void)n; (void)options; (void)values;
    return SUCCESS;
}
API CUresult cuLinkComplete(void *state, void **cubin, size_t *size) {
    static char nothing[1];
    (void)state;
    *cubin = nothing;
    *size = sizeof nothing;
    return SUCCESS;
}
API CUresult cuLinkDestroy(void *state) { (void)state; return SUCCESS; }

API CUresult cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    switch (attribute) { /* CUfunction_attribute */
        case 0: *value = 1024; break; /* MAX_THREADS_PER_BLOCK */
        case 4: *value = 32; break;   /* NUM_REGS: full occupancy */
        case 5: case 6: *value = 10 * null_card()->major + null_card()->minor; break; /* PTX_, BINARY_VERSION */
        default: *value = 0;          /* static shared memory, spills and so on: none */
    }
    return SUCCESS;
}
API CUresult cuFuncSetAttribute(void *function, int attribute, int value) {
    (void)function; (void)attribute; (void)value;
    return SUCCESS;
}
API CUresult cuFuncSetCacheConfig(void *function, int config) { (void)function; (void)config; return SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int size, size_t shared) {
    (void)function; (void)shared;
    int by_threads = size > 0 ? null_card()->threads / size : null_card()->blocks;
    *blocks = by_threads < null_card()->blocks ? by_threads : null_card()->blocks;
    return SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
    (void)function; (void)config;
    *clusters = null_card()->multiprocessors; /* clusters of one block, one on each multiprocessor */
    return SUCCESS;
}

/* The arguments are ignored, so all launch functions share one prototype without arguments. */
API CUresult cuLaunchKernel(void) { null_launch(); return SUCCESS; }
API CUresult cuLaunchKernelEx(void) { null_launch(); return SUCCESS; }
API CUresult cuLaunchCooperativeKernel(void) { null_launch(); return SUCCESS; }
API CUresult cuTensorMapEncodeTiled(void) { return SUCCESS; }
API CUresult cuTensorMapEncodeIm2col(void) { return SUCCESS; }

/* ---- streams and events */

API CUresult cuStreamIsCapturing(CUstream stream, int *status) { *status = null_capture(stream) != 0; return SUCCESS; }
API CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    (void)flags;
    *stream = null_stream_new(0);
    return SUCCESS;
}
API CUresult cuStreamDestroy_v2(CUstream stream) { null_stream_delete(stream); return SUCCESS; }
API CUresult cuStreamSynchronize(CUstream stream) { null_stream_wait(stream); return SUCCESS; }
API CUresult cuStreamQuery(CUstream stream) { return null_stream_done(stream) ? SUCCESS : NOT_READY; }
API CUresult cuStreamWaitEvent(CUstream stream, void *event, unsigned flags) {
    (void)flags;
    null_stream_wait_event(stream, event);
    return SUCCESS;
}
API CUresult cuEventCreate(void **event, unsigned flags) { (void)flags; *event = null_event_new(); return SUCCESS; }
API CUresult cuEventDestroy_v2(void *event) { null_event_delete(event); return SUCCESS; }
API CUresult cuEventRecord(void *event, CUstream stream) { null_event_record(event, stream); return SUCCESS; }
API CUresult cuEventQuery(void *event) { return null_event_done(event) ? SUCCESS : NOT_READY; }
API CUresult cuEventSynchronize(void *event) { null_event_wait(event); return SUCCESS; }
API CUresult cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    (void)start; (void)end;
    *milliseconds = 1; /* not 0: programs divide by it */
    return SUCCESS;
}

/* Signals between GPUs: PyTorch looks the functions up; here no GPU waits for a signal. */
API CUresult cuStreamWriteValue32(void) { return SUCCESS; }
API CUresult cuStreamWriteValue32_v2(void) { return SUCCESS; }
API CUresult cuStreamWaitValue32_v2(void) { return SUCCESS; }

/* Multicast and green contexts: PyTorch requires the symbols; the GPU reports no multicast support. */
#define REFUSED(name) API CUresult name(void) { return NOT_SUPPORTED; }
REFUSED(cuMulticastCreate)
REFUSED(cuMulticastAddDevice)
REFUSED(cuMulticastBindMem)
REFUSED(cuMulticastUnbind)
REFUSED(cuMulticastGetGranularity)
REFUSED(cuGreenCtxCreate)
REFUSED(cuGreenCtxDestroy)
REFUSED(cuGreenCtxStreamCreate)
REFUSED(cuCtxFromGreenCtx)
REFUSED(cuDevResourceGenerateDesc)
REFUSED(cuDevSmResourceSplitByCount)
REFUSED(cuDeviceGetDevResource)
REFUSED(cuCheckpointProcessGetState)
