/* NCCL: collectives return at once, as if every rank had sent what this one did.
 *
 * A large collective leaves the rank's own data in every slot. Small ones, on which branches depend, send the bytes
 * that the host wrote to the other processes (exchange.c): broadcasts, gathers, sends, and sums of one number, which
 * are also barriers. Where no other process runs, a small all-to-all by sends and receives returns what the rank sends
 * itself in every slot: counts of tokens, with which sizes are computed. A communicator's buffers are counted as device memory by a rule (see cards.py).
 * Prototypes: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html. */
#include "null.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ncclUniqueId of the reference: passed by value. */
struct unique_id {
    char bytes[128];
};

enum operation { BROADCAST, GATHER, REDUCE, SPLIT, OPERATIONS };

/* All ranks of a communicator call its operations in the same order, so name and number identify a message. */
struct communicator {
    int ranks, rank;
    char name[33];                /* the same in all its processes; "": nothing is exchanged */
    unsigned numbers[OPERATIONS]; /* of the next one of each kind */
    unsigned *sent, *received;    /* by peer */
};

/* Each message is a file. Only the first ones are sent, because branches depend on those. */
#define MOST_MESSAGES 20000

API int ncclGetVersion(int *version) { *version = NCCL_VERSION; return SUCCESS; } /* of torch's wheel */
API const char *ncclGetErrorString(int error) { return error == SUCCESS ? "no error" : "error on the null device"; }
API const char *ncclGetLastError(void *communicator) { (void)communicator; return ""; }
API int ncclGetUniqueId(struct unique_id *id) {
    memset(id, 0, sizeof *id);
    null_random(id->bytes, 16);
    return SUCCESS;
}

static int begin(struct communicator **out, int ranks, int rank, const char *name) {
    struct communicator *made = calloc(1, sizeof *made);
    unsigned *counts = calloc(2 * ranks, sizeof *counts);
    *out = made;
    if (made == NULL || counts == NULL) return 2; /* ncclSystemError */
    made->ranks = ranks;
    made->rank = rank;
    made->sent = counts;
    made->received = counts + ranks;
    snprintf(made->name, sizeof made->name, "%s", name);
    null_communicator(ranks);
    return SUCCESS;
}
static int begin_by_id(struct communicator **out, int ranks, int rank, const struct unique_id *id) {
    char name[33];
    for (int i = 0; i < 16; i++) sprintf(name + 2 * i, "%02x", (unsigned char)id->bytes[i]);
    return begin(out, ranks, rank, null_exchanging() ? name : "");
}
API int ncclCommInitRank(struct communicator **out, int ranks, struct unique_id id, int rank) {
    return begin_by_id(out, ranks, rank, &id);
}
API int ncclCommInitRankConfig(struct communicator **out, int ranks, struct unique_id id, int rank, void *config) {
    (void)config;
    return begin_by_id(out, ranks, rank, &id);
}
API int ncclCommInitRankScalable(struct communicator **out, int ranks, int rank, int ids, struct unique_id *id,
                                 void *config) {
    (void)ids; (void)config;
    return begin_by_id(out, ranks, rank, id);
}
API int ncclCommInitAll(struct communicator **out, int devices, const int *ids) {
    (void)ids;
    for (int i = 0; i < devices; i++)
        if (begin(out + i, devices, i, "") != SUCCESS) return 2;
    return SUCCESS;
}

/* Members of the new communicator and their order: by color, then by key, then by the parent's rank. Without an
 * exchange the parent's size is used. */
API int ncclCommSplit(struct communicator *parent, int color, int key, struct communicator **out, void *config) {
    int mine[2] = {color, key}, ranks = 0, rank = 0;
    unsigned number = parent->numbers[SPLIT]++;
    char name[LONGEST_NAME] = "";
    (void)config;
    *out = NULL;
    if (parent->name[0] != '\0') {
        snprintf(name, sizeof name, "%s.s%u.%d", parent->name, number, parent->rank);
        null_publish(name, mine, sizeof mine);
    }
    if (color == -1) return SUCCESS; /* NCCL_SPLIT_NOCOLOR */
    if (name[0] == '\0') return begin(out, parent->ranks, parent->rank, "");
    for (int peer = 0; peer < parent->ranks; peer++) {
        int theirs[2] = {color, key};
        snprintf(name, sizeof name, "%s.s%u.%d", parent->name, number, peer);
        if (peer != parent->rank) null_fetch(name, theirs, sizeof theirs);
        if (theirs[0] != color) continue;
        ranks++;
        rank += theirs[1] < key || (theirs[1] == key && peer < parent->rank);
    }
    unsigned long long hash = 14695981039346656037ull; /* FNV-1a of the parent's name, the number and the color */
    snprintf(name, sizeof name, "%s.%u.%d", parent->name, number, color);
    for (const char *letter = name; *letter != '\0'; letter++) hash = (hash ^ (unsigned char)*letter) * 1099511628211ull;
    snprintf(name, sizeof name, "%016llx%.16s", hash, parent->name);
    return begin(out, ranks, rank, name);
}
API int ncclCommDestroy(struct communicator *communicator) {
    if (communicator != NULL) free(communicator->sent);
    free(communicator);
    return SUCCESS;
}
API int ncclCommAbort(struct communicator *communicator) { return ncclCommDestroy(communicator); }
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

/* The name of a message, if this operation's bytes are exchanged between processes. */
static bool message(char *name, const struct communicator *communicator, char kind, unsigned number, int from, int to,
                    size_t size) {
    if (communicator->name[0] == '\0' || number >= MOST_MESSAGES || size == 0 || size > LARGEST_MESSAGE) return false;
    snprintf(name, LONGEST_NAME, "%s.%c%u.%d.%d", communicator->name, kind, number, from, to);
    return true;
}
static void publish(const char *name, const void *address, size_t size) {
    char bytes[LARGEST_MESSAGE];
    null_peek(bytes, address, size);
    null_publish(name, bytes, size);
}

/* ncclRedOp_t: sum, product, maximum, minimum, average. */
#define REDUCED(type)                                                                                      \
    static type reduced_##type(const type *values, int count, int operation) {                             \
        type result = values[0];                                                                           \
        for (int i = 1; i < count; i++) {                                                                  \
            if (operation == 1) result *= values[i];                                                       \
            else if (operation == 2) result = values[i] > result ? values[i] : result;                     \
            else if (operation == 3) result = values[i] < result ? values[i] : result;                     \
            else result += values[i];                                                                      \
        }                                                                                                  \
        return operation == 4 ? result / count : result;                                                   \
    }
REDUCED(int32_t)
REDUCED(int64_t)
REDUCED(float)
REDUCED(double)

/* One number: every rank waits for the others, because programs use it as a barrier, and gets the result. */
static int reduce_number(const void *from, void *to, int type, int operation, struct communicator *communicator,
                         unsigned number, size_t size) {
    char name[LONGEST_NAME], *all = calloc(communicator->ranks, size);
    int64_t result = 0; /* wide enough for any type */
    null_launch();
    if (all == NULL) return 2;
    for (int peer = 0; peer < communicator->ranks; peer++) {
        message(name, communicator, 'r', number, peer, 0, size);
        if (peer == communicator->rank) null_peek(all + peer * size, from, size), publish(name, from, size);
    }
    for (int peer = 0; peer < communicator->ranks; peer++) {
        message(name, communicator, 'r', number, peer, 0, size);
        if (peer != communicator->rank && !null_fetch(name, all + peer * size, size))
            memcpy(all + peer * size, all + communicator->rank * size, size);
    }
    if (type == 2) *(int32_t *)&result = reduced_int32_t((int32_t *)all, communicator->ranks, operation);
    else if (type == 4) result = reduced_int64_t((int64_t *)all, communicator->ranks, operation);
    else if (type == 7) *(float *)&result = reduced_float((float *)all, communicator->ranks, operation);
    else if (type == 8) *(double *)&result = reduced_double((double *)all, communicator->ranks, operation);
    else memcpy(&result, all + communicator->rank * size, size);
    null_copy(to, &result, size);
    free(all);
    return SUCCESS;
}
API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation,
                      struct communicator *communicator, void *stream) {
    size_t size = bytes(count, type);
    unsigned number = communicator->numbers[REDUCE]++;
    char name[LONGEST_NAME];
    (void)stream;
    if (count == 1 && message(name, communicator, 'r', number, 0, 0, size))
        return reduce_number(from, to, type, operation, communicator, number, size);
    return copy(to, from, size);
}
API int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                   struct communicator *communicator, void *stream) {
    (void)operation; (void)stream;
    return communicator->rank == root ? copy(to, from, bytes(count, type)) : SUCCESS;
}
API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *communicator,
                      void *stream) {
    size_t size = bytes(count, type);
    unsigned number = communicator->numbers[BROADCAST]++;
    char name[LONGEST_NAME];
    (void)stream;
    if (!message(name, communicator, 'b', number, root, 0, size)) return copy(to, from, size);
    if (communicator->rank == root) {
        publish(name, from, size);
        return copy(to, from, size);
    }
    null_launch();
    null_expect(to, size, name);
    return SUCCESS;
}
API int ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *communicator, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}
/* No reply: this rank's bytes in every slot, written in one copy. */
static int gather_own(const void *from, void *to, size_t size, const struct communicator *communicator) {
    size_t total = communicator->ranks * size;
    char *all = total > MIB ? NULL : malloc(total);
    if (all == NULL) return null_clear(to, total), SUCCESS;
    for (int i = 0; i < communicator->ranks; i++) null_peek(all + i * size, from, size);
    null_copy(to, all, total);
    free(all);
    return SUCCESS;
}
API int ncclAllGather(const void *from, void *to, size_t count, int type, struct communicator *communicator,
                      void *stream) {
    size_t size = bytes(count, type);
    unsigned number = communicator->numbers[GATHER]++;
    char name[LONGEST_NAME];
    (void)stream;
    if (size > MIB) return copy(to, from, 0); /* no branch depends on a read of that size */
    null_launch();
    if (!message(name, communicator, 'g', number, communicator->rank, 0, size))
        return gather_own(from, to, size, communicator);
    publish(name, from, size);
    for (int i = 0; i < communicator->ranks; i++) {
        if (i == communicator->rank) null_copy((char *)to + i * size, from, size);
        else message(name, communicator, 'g', number, i, 0, size), null_expect((char *)to + i * size, size, name);
    }
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
/* The sends and receives of a group, which is an all-to-all if the rank sends a part to itself. */
#define MOST_RECEIVES 1024
static _Thread_local struct {
    int depth, receives;
    const void *own; /* what the rank sends itself; NULL: nothing */
    size_t own_size;
    struct {
        char *to;
        size_t size;
    } received[MOST_RECEIVES];
} group;

/* Write the rank's own part to all slots of its size; slots in a row at once. */
static void receive_own(void) {
    char *all = group.own_size * group.receives > MIB ? NULL : malloc(group.own_size * (group.receives + 1));
    if (all != NULL && null_recall(all, group.own, group.own_size)) {
        for (int i = 1; i < group.receives; i++) memcpy(all + i * group.own_size, all, group.own_size);
        for (int i = 0, end; i < group.receives; i = end) {
            for (end = i; end < group.receives && group.received[end].size == group.own_size &&
                          group.received[end].to == group.received[i].to + (end - i) * group.own_size;)
                end++;
            if (end > i) null_copy(group.received[i].to, all, (end - i) * group.own_size);
            else end++;
        }
    }
    free(all);
}
API int ncclGroupStart(void) {
    if (group.depth++ == 0) group.receives = 0, group.own = NULL, group.own_size = 0;
    return SUCCESS;
}
API int ncclGroupEnd(void) {
    if (group.depth > 0 && --group.depth == 0 && group.own != NULL && group.own_size > 0) receive_own();
    return SUCCESS;
}
API int ncclSend(const void *from, size_t count, int type, int peer, struct communicator *communicator, void *stream) {
    size_t size = bytes(count, type);
    unsigned number = communicator->sent[peer]++;
    char name[LONGEST_NAME];
    (void)stream;
    null_launch();
    if (message(name, communicator, 'p', number, communicator->rank, peer, size)) publish(name, from, size);
    else if (group.depth > 0 && peer == communicator->rank) group.own = from, group.own_size = size;
    return SUCCESS;
}
API int ncclRecv(void *to, size_t count, int type, int peer, struct communicator *communicator, void *stream) {
    size_t size = bytes(count, type);
    unsigned number = communicator->received[peer]++;
    char name[LONGEST_NAME];
    (void)stream;
    null_launch();
    null_clear(to, size);
    if (message(name, communicator, 'p', number, peer, communicator->rank, size)) null_expect(to, size, name);
    else if (group.depth > 0 && group.receives < MOST_RECEIVES) {
        group.received[group.receives].to = to;
        group.received[group.receives++].size = size;
    }
    return SUCCESS;
}
API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, void *communicator) {
    (void)scalar; (void)type; (void)residence; (void)communicator;
    *operation = 0; /* ncclSum */
    return SUCCESS;
}
