/* The null device, as the stub libraries see it: one ledger of memory, one GPU, one clock for events.
 *
 * Every stub library links against libmemcalcnull.so (device.c), so that the runtime, the driver, NCCL and NVML of one
 * process agree on what is allocated. Nothing here includes or needs an NVIDIA header: each stub declares the
 * prototypes that it implements, from the public API references:
 *   https://docs.nvidia.com/cuda/cuda-runtime-api, /cuda-driver-api, /cublas, /nvrtc, /deploy/nvml-api,
 *   https://docs.nvidia.com/deeplearning/cudnn, /nccl
 * CUDA_VERSION comes from the builder: 1000 * major + 10 * minor of the CUDA that torch was built with.
 */
#ifndef MEMCALC_NULL_H
#define MEMCALC_NULL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* Result codes that CUDA's runtime and its driver share (cudaError_t and CUresult). */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
};

/* The GPU, from the environment variable MEMCALC_NULL_PROPERTIES. */
struct null_card {
    char name[256];
    int major, minor;
    int multiprocessors, threads, blocks; /* threads and blocks: the most that one multiprocessor holds */
    int gpus;                             /* how many such GPUs */
    size_t memory;                        /* what a framework sees as the GPU's total */
    size_t reserve;                       /* of it: context and loaded kernels, in use from the start */
    size_t shared_block, shared_sm;       /* shared memory: the most for one block by opting in, and of one SM */
    size_t l2;
    size_t nccl_first, nccl_further;      /* device memory of a process's first communicator, and of each further one */
    bool delayed;                         /* events complete only when the host waits */
};

API const struct null_card *null_card(void);
API int null_kernel_version(void);         /* 10 * major + minor of the kernels that the GPU would load */
API int null_device_count(void);           /* GPUs that CUDA_VISIBLE_DEVICES leaves */
API int null_current(void);                /* the calling thread's device */
API int null_set_current(int device);
API int null_attribute(int attribute);     /* CUdevice_attribute and cudaDeviceAttr share their numbers */

/* Memory of the device: address space without memory behind it, and counts. */
API int null_malloc(int device, size_t size, void **out);
API int null_free(void *address);
API int null_commit(int device, size_t size);   /* physical memory without an address; OUT_OF_MEMORY if there is none */
API void null_release(int device, size_t size);
API void *null_reserve(size_t size);            /* an address range without memory */
API void null_unreserve(void *address, size_t size);
API void null_map(void *address, int device);    /* map device memory into a reserved range */
API int null_device_of(const void *address);    /* -1: not an address of a device */
API size_t null_extent(const void *address, void **base); /* the allocation around an address; 0: none */
API size_t null_in_use(int device);             /* the reserve included */

/* Host memory that CUDA knows: page-locked, registered, or managed. */
enum host_kind { UNKNOWN_TO_CUDA, PAGE_LOCKED, REGISTERED, MANAGED };
API void *null_host_alloc(size_t size, enum host_kind kind);
API bool null_host_free(void *address); /* false: not allocated here */
API void null_host_register(void *address, size_t size);
API enum host_kind null_host_kind(const void *address);

/* Copies and kernel launches. */
API void null_copy(void *to, const void *from, size_t size);
API void null_clear(void *address, size_t size); /* forget the bytes kept there */
API void null_launch(void);
API bool null_recall(void *to, const void *address, size_t size); /* copy known bytes; false: some are unknown */
API void null_reads_are_known(bool known); /* of the calling thread: src/values.cpp knows the bytes that it reads */
API void null_on_unknown_read(void (*call)(size_t size)); /* called for each small read of unknown bytes */
API void null_peek(void *to, const void *address, size_t size);  /* read without counting it as a read */

/* Small messages between the processes of a run. Names are at most LONGEST_NAME letters. */
#define LARGEST_MESSAGE (64 * KIB)
#define LONGEST_NAME 128
API bool null_exchanging(void);
API void null_random(void *bytes, size_t size);
API void null_publish(const char *name, const void *bytes, size_t size);
API bool null_fetch(const char *name, void *bytes, size_t size); /* waits; false: timeout */
API void null_expect(void *address, size_t size, const char *name); /* received when the host reads the address */

/* Streams and events. */
API void *null_stream_new(int priority);
API void null_stream_delete(void *stream);
API int null_stream_priority(void *stream);
API void null_stream_wait(void *stream);  /* the host waits for all work of a stream */
API void null_device_wait(void);          /* the host waits for all streams */
API bool null_stream_done(void *stream);
API void *null_event_new(void);
API void null_event_delete(void *event);
API void null_event_record(void *event, void *stream);
API bool null_event_done(void *event);
API void null_event_wait(void *event);
API void null_stream_wait_event(void *stream, void *event);
API void null_capture_begin(void *stream);
API void null_capture_end(void *stream);
API unsigned long long null_capture(void *stream); /* 0: the stream is not captured into a CUDA graph */

/* Load a library from the directory of the calling one, once. */
API void *null_sibling(const char *soname);

/* Report a function that only returns success, once. */
API void null_unmodelled(const char *library, const char *function, int *seen);

API void null_communicator(int ranks); /* count the buffers of a new communicator */

#endif
