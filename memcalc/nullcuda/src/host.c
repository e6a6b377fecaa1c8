/* Host memory that CUDA knows: page-locked, registered, managed. It is real memory, newly mapped, and occupies no page
 * until the program writes to it. */
#define _GNU_SOURCE
#include "null.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

struct area {
    char *base;
    size_t size;
    enum host_kind kind;
};

static struct area *areas;
static size_t count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool add(void *base, size_t size, enum host_kind kind) {
    pthread_mutex_lock(&lock);
    if (count == room) {
        size_t more = room * 2 + 64;
        struct area *larger = realloc(areas, more * sizeof *areas);
        if (larger == NULL) {
            pthread_mutex_unlock(&lock);
            return false;
        }
        areas = larger;
        room = more;
    }
    areas[count++] = (struct area){base, size, kind};
    pthread_mutex_unlock(&lock);
    return true;
}

void *null_host_alloc(size_t size, enum host_kind kind) {
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED || !add(base, size, kind) ? NULL : base;
}

void null_host_register(void *address, size_t size) { add(address, size, REGISTERED); }

bool null_host_free(void *address) {
    bool found = false;
    pthread_mutex_lock(&lock);
    for (size_t i = count; !found && i-- > 0;)
        if (areas[i].base == address) {
            if (areas[i].kind != REGISTERED) munmap(areas[i].base, areas[i].size);
            areas[i] = areas[--count];
            found = true;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

enum host_kind null_host_kind(const void *address) {
    enum host_kind kind = UNKNOWN_TO_CUDA;
    pthread_mutex_lock(&lock);
    for (size_t i = count; kind == UNKNOWN_TO_CUDA && i-- > 0;)
        if ((const char *)address >= areas[i].base && (const char *)address < areas[i].base + areas[i].size)
            kind = areas[i].kind;
    pthread_mutex_unlock(&lock);
    return kind;
}
