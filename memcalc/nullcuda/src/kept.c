/* Copies between host and device: bytes that the host wrote can be read back for a while; all others read as zeros.
 * Small tensors of integers and booleans stay known for longer (src/values.cpp). Small reads of unknown values are
 * reported to a registered callback.
 *
 * Programs put a number on the device and read it back through a collective: the sizes that DDP compares, pickled
 * objects, token counts. With the real bytes they take the real branches. But kernels compute nothing here, and the
 * memory of such a number is soon used for results, so bytes are discarded after FORGET kernels, and later reads return
 * zero. They are discarded at once if PyTorch's allocator assigns their memory to another tensor.
 */
#define _GNU_SOURCE
#include "null.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

/* all_gather_object launches about ten kernels between writing and reading; a layer of a model about a hundred. */
#define FORGET 64
#define MOST_KEPT 256             /* entries; the oldest is forgotten first */
#define LARGEST_KEPT (1 * MIB)    /* bytes of one entry: pickled objects, not batches of images */

/* Largest read that writes zeros to host memory. A larger copy leaves the host's memory unchanged: newly mapped memory
 * is zero anyway and occupies no page, so checkpoints and offloaded states may be larger than the host. */
#define LARGEST_FILLED (1 * MIB)

static struct {
    char *address; /* on the device; NULL: free */
    char *bytes;
    size_t size;
    long long launches; /* the count when it was written */
    char *message;      /* name of the message with its bytes, not received yet; NULL: received */
} kept[MOST_KEPT];
static int next;
static int alive; /* an upper bound of the entries in use: most launches find none */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void drop(int i) {
    free(kept[i].bytes);
    free(kept[i].message);
    kept[i].bytes = kept[i].address = kept[i].message = NULL;
    alive--;
}

static bool overlaps(int i, const char *address, size_t size) {
    return kept[i].address != NULL && address < kept[i].address + kept[i].size && kept[i].address < address + size;
}

static void forget(const char *address, size_t size) {
    for (int i = 0; alive > 0 && i < MOST_KEPT; i++)
        if (overlaps(i, address, size)) drop(i);
}

static bool stale(int i) {
    return __atomic_load_n(&null_counts.launches, __ATOMIC_RELAXED) - kept[i].launches > FORGET;
}

static void keep(char *address, const char *bytes, size_t size, const char *message) {
    for (int i = 0; alive > 0 && i < MOST_KEPT; i++) /* entries that are fully covered are overwritten */
        if (kept[i].address != NULL && kept[i].address >= address &&
            kept[i].address + kept[i].size <= address + size)
            drop(i);
    if (size == 0 || size > LARGEST_KEPT) return;
    char *copy = malloc(size);
    if (copy == NULL) return;
    if (message == NULL) memcpy(copy, bytes, size);
    if (kept[next].address != NULL) drop(next);
    kept[next].message = message == NULL ? NULL : strdup(message);
    kept[next].address = address;
    kept[next].bytes = copy;
    kept[next].size = size;
    kept[next].launches = __atomic_load_n(&null_counts.launches, __ATOMIC_RELAXED);
    next = (next + 1) % MOST_KEPT;
    alive++;
}

/* Return whether the whole range was kept. */
static bool look_up(char *to, const char *from, size_t size) {
    size_t found = 0;
    memset(to, 0, size);
    for (int step = 0; alive > 0 && step < MOST_KEPT; step++) { /* from the oldest to the newest */
        int i = (next + step) % MOST_KEPT;
        if (!overlaps(i, from, size)) continue;
        if (stale(i)) {
            drop(i);
            continue;
        }
        const char *first = from > kept[i].address ? from : kept[i].address;
        const char *from_end = from + size, *kept_end = kept[i].address + kept[i].size;
        const char *last = from_end < kept_end ? from_end : kept_end;
        memcpy(to + (first - from), kept[i].bytes + (first - kept[i].address), last - first);
        found += last - first;
    }
    return found >= size;
}

/* Receive the message that the bytes at an address wait for. The lock is not held, so other threads continue. */
static void complete(const char *address, size_t size) {
    for (int i = 0; alive > 0 && i < MOST_KEPT; i++) {
        if (kept[i].message == NULL || !overlaps(i, address, size) || stale(i)) continue;
        char name[LONGEST_NAME], bytes[LARGEST_MESSAGE];
        const char *where = kept[i].address;
        size_t length = kept[i].size;
        snprintf(name, sizeof name, "%s", kept[i].message);
        pthread_mutex_unlock(&lock);
        bool came = null_fetch(name, bytes, length);
        pthread_mutex_lock(&lock);
        if (kept[i].address != where || kept[i].message == NULL || strcmp(kept[i].message, name) != 0) continue;
        if (!came) {
            drop(i);
            continue;
        }
        memcpy(kept[i].bytes, bytes, length);
        free(kept[i].message);
        kept[i].message = NULL;
    }
}

/* Bytes that a kernel would have written: kept only until another kernel may have used the address. */
API void null_tell(void *address, const void *bytes, size_t size) {
    pthread_mutex_lock(&lock);
    int entry = next;
    keep(address, bytes, size, NULL);
    if (kept[entry].address == (char *)address) kept[entry].launches -= FORGET;
    pthread_mutex_unlock(&lock);
}

void null_expect(void *address, size_t size, const char *name) {
    pthread_mutex_lock(&lock);
    keep(address, NULL, size, name);
    pthread_mutex_unlock(&lock);
}

void null_peek(void *to, const void *address, size_t size) {
    pthread_mutex_lock(&lock);
    complete(address, size);
    look_up(to, address, size);
    pthread_mutex_unlock(&lock);
}

bool null_recall(void *to, const void *address, size_t size) {
    if (alive == 0) return false;
    pthread_mutex_lock(&lock);
    complete(address, size);
    bool whole = look_up(to, address, size);
    pthread_mutex_unlock(&lock);
    return whole;
}

static __thread bool reads_are_known;
static void (*on_unknown_read)(size_t size);

void null_reads_are_known(bool known) { reads_are_known = known; }

API void null_on_unknown_read(void (*call)(size_t size)) { on_unknown_read = call; }

void null_copy(void *to, const void *from, size_t size) {
    bool onto_device = null_device_of(to) >= 0, off_device = null_device_of(from) >= 0, unknown = false;
    if (!onto_device && !off_device) {
        memmove(to, from, size);
        return;
    }
    pthread_mutex_lock(&lock);
    if (onto_device && off_device) {
        if (size <= LARGEST_KEPT && alive > 0) {
            char *bytes = malloc(size);
            if (bytes != NULL) {
                complete(from, size);
                look_up(bytes, from, size);
                keep(to, bytes, size, NULL);
                free(bytes);
            }
        } else
            forget(to, size);
    } else if (onto_device) {
        if (size <= LARGEST_KEPT) keep(to, from, size, NULL);
        else forget(to, size);
    } else {
        bool known = false;
        if (size <= LARGEST_FILLED) {
            complete(from, size);
            known = look_up(to, from, size);
        }
        unknown = size <= SMALL && !known && !reads_are_known;
        null_counts.reads++;
        null_counts.small_reads += unknown;
        null_counts.read_bytes += (long long)size;
    }
    pthread_mutex_unlock(&lock);
    /* Not under the lock: the call waits for Python's lock, and its holder may be waiting for this one. */
    if (unknown && on_unknown_read != NULL) on_unknown_read(size);
}

void null_clear(void *address, size_t size) {
    if (alive == 0) return;
    pthread_mutex_lock(&lock);
    forget(address, size);
    pthread_mutex_unlock(&lock);
}

void null_launch(void) { __atomic_add_fetch(&null_counts.launches, 1, __ATOMIC_RELAXED); }

/* PyTorch's allocator reports each block that it allocates or frees to the profiler, through this function of libc10.so:
 * c10::reportMemoryUsageToProfiler(void *, int64_t, size_t, size_t, c10::Device) (c10/core/Allocator.h, torch 2.6 to
 * 2.15; a device is two bytes). The loader takes ours, because libmemcalcnull.so is loaded before torch. */
typedef void report(void *address, int64_t size, size_t allocated, size_t reserved, int16_t device);
API report null_report __asm__("_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE");

void null_report(void *address, int64_t size, size_t allocated, size_t reserved, int16_t device) {
    static report *original;
    report *next_one = __atomic_load_n(&original, __ATOMIC_RELAXED);
    if (size > 0) null_clear(address, (size_t)size); /* old bytes do not belong to the new tensor */
    if (next_one == NULL) {
        void *library = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
        next_one = library == NULL ? NULL : (report *)dlsym(library, "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE");
        if (next_one == NULL) return;
        __atomic_store_n(&original, next_one, __ATOMIC_RELAXED);
    }
    next_one(address, size, allocated, reserved, device);
}
