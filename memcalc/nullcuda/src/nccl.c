/* NCCL: collectives return at once, as if every rank had sent what this one did.
 *
 * What a collective leaves is the rank's own data in every place, so that sizes and pickled objects which ranks
 * exchange come back whole. A communicator's buffers are counted as device memory by a rule (see cards.py).
 * Prototypes: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html. */
#include "null.h"

#include <stdlib.h>
#include <string.h>

struct communicator {
    int ranks, rank;
};

/* ncclUniqueId of the reference: passed by value. */
struct unique_id {
    char bytes[128];
};

API int ncclGetVersion(int *version) { *version = NCCL_VERSION; return SUCCESS; } /* of torch's wheel */
API const char *ncclGetErrorString(int error) { return error == SUCCESS ? "no error" : "error on the null device"; }
API const char *ncclGetLastError(void *communicator) { (void)communicator; return ""; }
API int ncclGetUniqueId(struct unique_id *id) { memset(id, 1, sizeof *id); return SUCCESS; }

static int begin(struct communicator **out, int ranks, int rank) {
    *out = malloc(sizeof **out);
    if (*out == NULL) return 2; /* ncclSystemError */
    **out = (struct communicator){ranks, rank};
    null_communicator(ranks);
    return SUCCESS;
}
API int ncclCommInitRank(struct communicator **out, int ranks, struct unique_id id, int rank) {
    (void)id;
    return begin(out, ranks, rank);
}
API int ncclCommInitRankConfig(struct communicator **out, int ranks, struct unique_id id, int rank, void *config) {
    (void)id; (void)config;
    return begin(out, ranks, rank);
}
API int ncclCommInitRankScalable(struct communicator **out, int ranks, int rank, int ids, void *id, void *config) {
    (void)ids; (void)id; (void)config;
    return begin(out, ranks, rank);
}
API int ncclCommInitAll(struct communicator **out, int devices, const int *ids) {
    (void)ids;
    for (int i = 0; i < devices; i++)
        if (begin(out + i, devices, i) != SUCCESS) return 2;
    return SUCCESS;
}
/* How many ranks share a color is not known here: the parent's count stands for it. */
API int ncclCommSplit(struct communicator *parent, int color, int key, struct communicator **out, void *config) {
    (void)key; (void)config;
    *out = NULL;
    return color == -1 ? SUCCESS : begin(out, parent->ranks, parent->rank); /* -1: NCCL_SPLIT_NOCOLOR */
}
API int ncclCommDestroy(struct communicator *communicator) { free(communicator); return SUCCESS; }
API int ncclCommAbort(struct communicator *communicator) { free(communicator); return SUCCESS; }
API int ncclCommFinalize(struct communicator *communicator) { (void)communicator; return SUCCESS; }
API int ncclCommGetAsyncError(struct communicator *communicator, int *error) {
    (void)communicator;
    *error = SUCCESS;
    return SUCCESS;
}
API int ncclCommCount(const struct communicator *communicator, int *ranks) {
    *ranks = communicator->ranks;
    return SUCCESS;
}
API int ncclCommUserRank(const struct communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return SUCCESS;
}
API int ncclCommCuDevice(const struct communicator *communicator, int *device) {
    (void)communicator;
    *device = null_current();
    return SUCCESS;
}
API int ncclMemAlloc(void **out, size_t size) {
    return null_malloc(null_current(), size, out) == SUCCESS ? SUCCESS : 1;
}
API int ncclMemFree(void *address) { null_free(address); return SUCCESS; }
API int ncclCommRegister(void *communicator, void *buffer, size_t size, void **handle) {
    (void)communicator; (void)size;
    *handle = buffer;
    return SUCCESS;
}

/* ncclDataType_t: bytes of int8, uint8, int32, uint32, int64, uint64, fp16, fp32, fp64, bf16, fp8 e4m3, fp8 e5m2. */
static size_t bytes(size_t count, int type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)(sizeof widths / sizeof *widths) ? count * widths[type] : 0;
}
static int copy(void *to, const void *from, size_t size) {
    null_launch();
    if (to != from) null_copy(to, from, size);
    return SUCCESS;
}

API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *communicator,
                      void *stream) {
    (void)operation; (void)communicator; (void)stream;
    return copy(to, from, bytes(count, type));
}
API int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                   struct communicator *communicator, void *stream) {
    (void)operation; (void)stream;
    return communicator->rank == root ? copy(to, from, bytes(count, type)) : SUCCESS;
}
API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *communicator, void *stream) {
    (void)root; (void)communicator; (void)stream;
    return copy(to, from, bytes(count, type));
}
API int ncclBcast(void *buffer, size_t count, int type, int root, void *communicator, void *stream) {
    (void)root; (void)communicator; (void)stream;
    return copy(buffer, buffer, bytes(count, type));
}
API int ncclAllGather(const void *from, void *to, size_t count, int type, struct communicator *communicator,
                      void *stream) {
    size_t size = bytes(count, type);
    (void)stream;
    if (size > MIB) return copy(to, from, 0); /* nobody reads that much back to decide by it */
    for (int i = 0; i < communicator->ranks; i++) copy((char *)to + i * size, from, size);
    return SUCCESS;
}
API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                          struct communicator *communicator, void *stream) {
    size_t size = bytes(count, type);
    (void)operation; (void)stream;
    return copy(to, (const char *)from + communicator->rank * size, size);
}
API int ncclAlltoAll(const void *from, void *to, size_t count, int type, struct communicator *communicator,
                     void *stream) {
    (void)stream;
    return copy(to, from, communicator->ranks * bytes(count, type));
}
API int ncclSend(const void *from, size_t count, int type, int peer, void *communicator, void *stream) {
    (void)from; (void)count; (void)type; (void)peer; (void)communicator; (void)stream;
    null_launch();
    return SUCCESS;
}
API int ncclRecv(void *to, size_t count, int type, int peer, void *communicator, void *stream) {
    (void)peer; (void)communicator; (void)stream;
    null_launch();
    null_clear(to, bytes(count, type));
    return SUCCESS;
}
API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, void *communicator) {
    (void)scalar; (void)type; (void)residence; (void)communicator;
    *operation = 0; /* ncclSum */
    return SUCCESS;
}
