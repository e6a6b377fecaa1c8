/* The CUDA runtime: what PyTorch and its extensions call directly.
 * Prototypes: https://docs.nvidia.com/cuda/cuda-runtime-api. A stub returns success for every other function. */
#define _GNU_SOURCE
#include "null.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int cudaError_t;
typedef void *cudaStream_t;
typedef void *cudaEvent_t;
typedef struct { unsigned x, y, z; } dim3;

static __thread cudaError_t last;

static cudaError_t remember(cudaError_t result) {
    if (result != SUCCESS) last = result;
    return result;
}

/* ---- errors */

API cudaError_t cudaGetLastError(void) {
    cudaError_t result = last;
    last = SUCCESS;
    return result;
}
API cudaError_t cudaPeekAtLastError(void) { return last; }

API const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case SUCCESS: return "no error";
        case INVALID_VALUE: return "invalid argument";
        case OUT_OF_MEMORY: return "out of memory";
        case INVALID_DEVICE: return "invalid device ordinal";
        case NOT_READY: return "device not ready";
        case NOT_SUPPORTED: return "operation not supported";
        default: return "error on the null device";
    }
}

API const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case SUCCESS: return "cudaSuccess";
        case INVALID_VALUE: return "cudaErrorInvalidValue";
        case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
        case INVALID_DEVICE: return "cudaErrorInvalidDevice";
        case NOT_READY: return "cudaErrorNotReady";
        case NOT_SUPPORTED: return "cudaErrorNotSupported";
        default: return "cudaErrorUnknown";
    }
}

/* ---- devices */

API cudaError_t cudaGetDeviceCount(int *count) {
    *count = null_device_count();
    return remember(*count > 0 ? SUCCESS : 100); /* cudaErrorNoDevice */
}
API cudaError_t cudaGetDevice(int *device) { *device = null_current(); return SUCCESS; }
API cudaError_t cudaSetDevice(int device) { return remember(null_set_current(device)); }
API cudaError_t cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
API cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
API cudaError_t cudaDeviceSynchronize(void) { null_device_wait(); return SUCCESS; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return SUCCESS; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0; /* the range of every GPU since Volta */
    *greatest = -5;
    return SUCCESS;
}
API cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (device < 0 || device >= null_device_count()) return remember(INVALID_DEVICE);
    *value = attribute == 33 ? device + 1 : null_attribute(attribute); /* 33: the PCI bus, one for each GPU */
    return SUCCESS;
}
API cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "00000000:%02X:00.0", device + 1);
    return SUCCESS;
}

/* struct cudaDeviceProp: offsets of the members that programs read, computed from the declaration in the runtime API
 * reference of CUDA 12.8 (the layout of cudaGetDeviceProperties_v2, 1032 bytes, the same for all of CUDA 12) and of
 * CUDA 13.0 (1008 bytes: without clock rates and compute modes). */
#if CUDA_VERSION >= 13000
#define PROPERTIES_SIZE 1008
#define AT(cuda12, cuda13) (cuda13)
#else
#define PROPERTIES_SIZE 1032
#define AT(cuda12, cuda13) (cuda12)
#endif

static void fill_properties(char *to, int device) {
    const struct null_card *card = null_card();
#define INT(cuda12, cuda13, value) *(int *)(to + AT(cuda12, cuda13)) = (int)(value)
#define SIZE(cuda12, cuda13, value) *(size_t *)(to + AT(cuda12, cuda13)) = (value)
    memset(to, 0, PROPERTIES_SIZE);
    memcpy(to, card->name, sizeof card->name);  /* name, 256 bytes */
    to[256] = (char)(device + 1);               /* uuid, 16 bytes */
    SIZE(288, 288, card->memory);               /* totalGlobalMem */
    SIZE(296, 296, 48 * KIB);                   /* sharedMemPerBlock */
    INT(304, 304, 65536);                       /* regsPerBlock */
    INT(308, 308, 32);                          /* warpSize */
    SIZE(312, 312, 2147483647);                 /* memPitch */
    INT(320, 320, 1024);                        /* maxThreadsPerBlock */
    INT(324, 324, 1024); INT(328, 328, 1024); INT(332, 332, 64);            /* maxThreadsDim */
    INT(336, 336, 2147483647); INT(340, 340, 65535); INT(344, 344, 65535);  /* maxGridSize */
#if CUDA_VERSION < 13000
    INT(348, 0, null_attribute(13));            /* clockRate */
    INT(608, 0, null_attribute(36));            /* memoryClockRate */
#endif
    SIZE(352, 352, 64 * KIB);                   /* totalConstMem */
    INT(360, 360, card->major);
    INT(364, 364, card->minor);
    SIZE(368, 368, 512);                        /* textureAlignment */
    INT(388, 384, card->multiprocessors);
    INT(400, 392, 1);                           /* canMapHostMemory */
    INT(576, 560, 1);                           /* concurrentKernels */
    INT(584, 568, device + 1);                  /* pciBusID */
    INT(600, 584, 3);                           /* asyncEngineCount */
    INT(604, 588, 1);                           /* unifiedAddressing */
    INT(612, 592, null_attribute(37));          /* memoryBusWidth */
    INT(616, 596, card->l2);                    /* l2CacheSize */
    INT(624, 604, card->threads);               /* maxThreadsPerMultiProcessor */
    INT(628, 608, 1);                           /* streamPrioritiesSupported */
    SIZE(640, 624, card->shared_sm);            /* sharedMemPerMultiprocessor */
    INT(648, 632, 65536);                       /* regsPerMultiprocessor */
    INT(652, 636, 1);                           /* managedMemory */
    INT(676, 656, 1);                           /* concurrentManagedAccess */
    INT(688, 668, 1);                           /* cooperativeLaunch */
    SIZE(696, 672, card->shared_block);         /* sharedMemPerBlockOptin */
    INT(712, 688, card->blocks);                /* maxBlocksPerMultiProcessor */
    SIZE(720, 696, 1 * KIB);                    /* reservedSharedMemPerBlock */
    INT(744, 720, 1);                           /* memoryPoolsSupported */
    INT(772, 748, card->major >= 9);            /* clusterLaunch: from Hopper on */
#undef INT
#undef SIZE
}

static cudaError_t properties(void *to, int device) {
    if (device < 0 || device >= null_device_count()) return remember(INVALID_DEVICE);
    fill_properties(to, device);
    return SUCCESS;
}

/* Programs built with CUDA 12 call _v2; the plain name there has the layout of CUDA 11, which no program requests. */
API cudaError_t cudaGetDeviceProperties_v2(void *to, int device) { return properties(to, device); }
#if CUDA_VERSION >= 13000
API cudaError_t cudaGetDeviceProperties(void *to, int device) { return properties(to, device); }
#endif

/* ---- memory */

API cudaError_t cudaMalloc(void **out, size_t size) { return remember(null_malloc(null_current(), size, out)); }
API cudaError_t cudaFree(void *address) {
    return null_host_free(address) ? SUCCESS : remember(null_free(address)); /* managed memory is freed here too */
}
API cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream) {
    (void)stream;
    return cudaMalloc(out, size);
}
API cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { (void)stream; return cudaFree(address); }
API cudaError_t cudaMallocFromPoolAsync(void **out, size_t size, void *pool, cudaStream_t stream) {
    (void)pool;
    return cudaMallocAsync(out, size, stream);
}
API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    size_t in_use = null_in_use(null_current());
    *total = null_card()->memory;
    *free_bytes = in_use < *total ? *total - in_use : 0;
    return SUCCESS;
}

/* struct cudaMemLocation of the reference, since CUDA 13 an argument; before, it was a device number. */
struct memory_location {
    int type, id;
};

static cudaError_t host_memory(void **out, size_t size, enum host_kind kind) {
    *out = size == 0 ? NULL : null_host_alloc(size, kind);
    return remember(*out == NULL && size > 0 ? OUT_OF_MEMORY : SUCCESS);
}
API cudaError_t cudaMallocHost(void **out, size_t size) { return host_memory(out, size, PAGE_LOCKED); }
API cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) {
    (void)flags;
    return host_memory(out, size, PAGE_LOCKED);
}
API cudaError_t cudaMallocManaged(void **out, size_t size, unsigned flags) {
    (void)flags;
    return host_memory(out, size, MANAGED);
}
/* Managed memory stays in host memory here, even if a program prefetches it to the device (bitsandbytes' paged
 * optimizers). */
API cudaError_t cudaMemPrefetchAsync(const void *address, size_t size, struct memory_location where, unsigned flags,
                                     cudaStream_t stream) {
    (void)address; (void)size; (void)where; (void)flags; (void)stream;
    return SUCCESS;
}
API cudaError_t cudaFreeHost(void *address) { null_host_free(address); return SUCCESS; }
API cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    (void)flags;
    null_host_register(address, size);
    return SUCCESS;
}
API cudaError_t cudaHostUnregister(void *address) { null_host_free(address); return SUCCESS; }
API cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    (void)flags;
    *device = host;
    return SUCCESS;
}

/* struct cudaPointerAttributes of the reference; CUDA 13 has 8 reserved words after it. */
struct pointer_attributes {
    int type; /* cudaMemoryType */
    int device;
    void *device_pointer, *host_pointer;
#if CUDA_VERSION >= 13000
    long reserved[8];
#endif
};

API cudaError_t cudaPointerGetAttributes(struct pointer_attributes *out, const void *address) {
    enum { UNREGISTERED, HOST, DEVICE, MANAGED_TYPE };
    int device = null_device_of(address);
    enum host_kind kind = device >= 0 ? UNKNOWN_TO_CUDA : null_host_kind(address);
    memset(out, 0, sizeof *out);
    out->device = device >= 0 ? device : null_current();
    out->type = device >= 0 ? DEVICE : kind == MANAGED ? MANAGED_TYPE : kind == UNKNOWN_TO_CUDA ? UNREGISTERED : HOST;
    if (out->type != UNREGISTERED) out->device_pointer = (void *)address;
    if (out->type != DEVICE) out->host_pointer = (void *)address;
    return SUCCESS;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, cudaStream_t stream) {
    (void)kind;
    (void)stream;
    null_copy(to, from, size);
    return SUCCESS;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    cudaMemcpyAsync(to, from, size, kind, NULL);
    null_device_wait();
    return SUCCESS;
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                  size_t height, int kind, cudaStream_t stream) {
    if (null_device_of(to) >= 0 && null_device_of(from) >= 0) { /* only kernels could read it */
        null_clear(to, to_pitch * height);
        return SUCCESS;
    }
    for (size_t row = 0; row < height; row++)
        cudaMemcpyAsync((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind, stream);
    return SUCCESS;
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                    cudaStream_t stream) {
    (void)to_device;
    (void)from_device;
    return cudaMemcpyAsync(to, from, size, 0, stream);
}
API cudaError_t cudaMemset(void *address, int value, size_t size) {
    if (null_device_of(address) < 0) memset(address, value, size);
    else null_clear(address, size);
    return SUCCESS;
}
API cudaError_t cudaMemsetAsync(void *address, int value, size_t size, cudaStream_t stream) {
    (void)stream;
    return cudaMemset(address, value, size);
}
API cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static void *constants; /* the address of every __constant__ and __device__ variable; never read */
    (void)symbol;
    if (constants == NULL && (constants = null_reserve(64 * KIB)) != NULL) null_map(constants, null_current());
    *address = constants;
    return SUCCESS;
}

/* Pools of cudaMallocAsync: PyTorch's cudaMallocAsync backend reads its counters from them; all are 0 here. */
API cudaError_t cudaDeviceGetDefaultMemPool(void **pool, int device) {
    *pool = (void *)(uintptr_t)(device + 1);
    return SUCCESS;
}
API cudaError_t cudaDeviceGetMemPool(void **pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
API cudaError_t cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
    (void)pool;
    /* 1 to 3 are flags (int), 4 to 8 are sizes (uint64) */
    if (attribute <= 3) *(int *)value = 0;
    else *(uint64_t *)value = 0;
    return SUCCESS;
}

/* A handle to memory of another process maps address space only: the allocating process counts the bytes. */
struct ipc_handle {
    char bytes[64];
};
API cudaError_t cudaIpcGetMemHandle(struct ipc_handle *handle, void *address) {
    void *base;
    size_t size = null_extent(address, &base);
    memset(handle, 0, sizeof *handle);
    memcpy(handle->bytes, &size, sizeof size);
    memcpy(handle->bytes + sizeof size, &base, sizeof base); /* makes each handle unique */
    return SUCCESS;
}
API cudaError_t cudaIpcOpenMemHandle(void **address, struct ipc_handle handle, unsigned flags) {
    size_t size;
    (void)flags;
    memcpy(&size, handle.bytes, sizeof size);
    *address = null_reserve(size);
    if (*address != NULL) null_map(*address, null_current());
    return remember(*address == NULL ? OUT_OF_MEMORY : SUCCESS);
}
API cudaError_t cudaIpcCloseMemHandle(void *address) { null_unreserve(address, 0); return SUCCESS; }
API cudaError_t cudaIpcGetEventHandle(struct ipc_handle *handle, cudaEvent_t event) {
    (void)event;
    memset(handle, 0, sizeof *handle);
    return SUCCESS;
}
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, struct ipc_handle handle) {
    (void)handle;
    *event = null_event_new();
    return SUCCESS;
}

/* ---- streams and events */

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags;
    *stream = null_stream_new(priority);
    return remember(*stream == NULL ? OUT_OF_MEMORY : SUCCESS);
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) { null_stream_delete(stream); return SUCCESS; }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = null_stream_priority(stream);
    return SUCCESS;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) { return null_stream_done(stream) ? SUCCESS : NOT_READY; }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { null_stream_wait(stream); return SUCCESS; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    null_stream_wait_event(stream, event);
    return SUCCESS;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, void (*call)(cudaStream_t, cudaError_t, void *), void *data,
                                      unsigned flags) {
    (void)flags;
    call(stream, SUCCESS, data);
    return SUCCESS;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*call)(void *), void *data) {
    if (null_capture(stream) == 0) call(data);
    return SUCCESS;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    *event = null_event_new();
    return remember(*event == NULL ? OUT_OF_MEMORY : SUCCESS);
}
API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { null_event_delete(event); return SUCCESS; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    null_event_record(event, stream);
    return SUCCESS;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)flags;
    return cudaEventRecord(event, stream);
}
/* cudaErrorNotReady is a result, not an error: the last error stays unchanged. */
API cudaError_t cudaEventQuery(cudaEvent_t event) { return null_event_done(event) ? SUCCESS : NOT_READY; }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { null_event_wait(event); return SUCCESS; }
API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    (void)start;
    (void)end;
    *milliseconds = 1; /* not 0: programs divide by it */
    return SUCCESS;
}

/* ---- CUDA graphs: captured and launched without nodes */

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) {
    (void)mode;
    null_capture_begin(stream);
    return SUCCESS;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, void **graph) {
    null_capture_end(stream);
    *graph = malloc(1); /* a handle */
    return SUCCESS;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status) {
    *status = null_capture(stream) != 0; /* 1: cudaStreamCaptureStatusActive */
    return SUCCESS;
}
static cudaError_t capture_info(cudaStream_t stream, int *status, unsigned long long *id, size_t *dependencies) {
    *status = null_capture(stream) != 0;
    if (id != NULL) *id = null_capture(stream);
    if (dependencies != NULL) *dependencies = 0;
    return SUCCESS;
}
#if CUDA_VERSION >= 13000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id, void **graph,
                                         const void **nodes, const void **edges, size_t *count) {
    (void)graph; (void)nodes; (void)edges;
    return capture_info(stream, status, id, count);
}
#else
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id) {
    return capture_info(stream, status, id, NULL);
}
API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, int *status, unsigned long long *id, void **graph,
                                            const void **nodes, size_t *count) {
    (void)graph; (void)nodes;
    return capture_info(stream, status, id, count);
}
API cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, int *status, unsigned long long *id, void **graph,
                                            const void **nodes, const void **edges, size_t *count) {
    (void)graph; (void)nodes; (void)edges;
    return capture_info(stream, status, id, count);
}
#endif
API cudaError_t cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
    (void)graph;
    if (nodes != NULL && *count > 0) nodes[0] = graph;
    *count = 1; /* not 0: PyTorch warns about empty graphs */
    return SUCCESS;
}
API cudaError_t cudaGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    (void)graph; (void)flags;
    *executable = malloc(1);
    return SUCCESS;
}
API cudaError_t cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
API cudaError_t cudaGraphDestroy(void *graph) { free(graph); return SUCCESS; }
API cudaError_t cudaGraphExecDestroy(void *executable) { free(executable); return SUCCESS; }

/* ---- kernels */

API cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                 cudaStream_t stream) {
    (void)kernel; (void)grid; (void)block; (void)arguments; (void)shared; (void)stream;
    null_launch();
    return SUCCESS;
}
/* Called by the host code that nvcc of CUDA 13 generates. */
API cudaError_t __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                   cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
API cudaError_t cudaLaunchKernelExC(const void *config, const void *kernel, void **arguments) {
    (void)config; (void)kernel; (void)arguments;
    null_launch();
    return SUCCESS;
}
API cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                            cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

/* What nvcc's generated host code calls at load time and around <<<...>>>. Internal to CUDA, but stable for years:
 * crt/host_runtime.h of every toolkit shows the calls. */
API void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
API void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
API char __cudaInitModule(void **handle) { (void)handle; return 1; }
API cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return SUCCESS; }

static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configuration;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return SUCCESS;
}

/* struct cudaFuncAttributes of the reference: 144 bytes, the same in CUDA 12 and 13. */
struct function_attributes {
    size_t shared_bytes, constant_bytes, local_bytes;
    int most_threads, registers;
    int ptx_version, binary_version; /* 10 * major + minor */
    int cache_mode, most_dynamic_shared;
    int rest[24]; /* carve-out, clusters, reserved words */
};
_Static_assert(sizeof(struct function_attributes) == 144, "cudaFuncAttributes");

API cudaError_t cudaFuncGetAttributes(struct function_attributes *out, const void *kernel) {
    (void)kernel;
    memset(out, 0, sizeof *out);
    out->most_threads = 1024;
    out->registers = 32; /* with 2048 threads on 65536 registers: full occupancy */
    out->ptx_version = out->binary_version = null_kernel_version();
    out->most_dynamic_shared = 48 * KIB;
    return SUCCESS;
}

/* Occupancy as bounded by threads and blocks; registers and shared memory of a kernel are not known here. */
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int block_size,
                                                                       size_t shared, unsigned flags) {
    (void)kernel; (void)shared; (void)flags;
    const struct null_card *card = null_card();
    int by_threads = block_size > 0 ? card->threads / block_size : card->blocks;
    *blocks = by_threads < card->blocks ? by_threads : card->blocks;
    return SUCCESS;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int block_size,
                                                              size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, block_size, shared, 0);
}

/* ---- the driver's functions, by name */

API cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    void *driver = null_sibling("libcuda.so.1");
    (void)flags;
    *function = driver == NULL ? NULL : dlsym(driver, name);
    if (status != NULL) *status = *function == NULL; /* 1: cudaDriverEntryPointSymbolNotFound */
    return SUCCESS;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                 unsigned long long flags, int *status) {
    (void)version;
    return cudaGetDriverEntryPoint(name, function, flags, status);
}
