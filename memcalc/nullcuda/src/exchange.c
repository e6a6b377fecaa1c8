/* Small messages between the processes of one run: contents of collectives that a program may branch on.
 *
 * Sizes, pickled objects, flags and barriers are a few bytes. They are exchanged through files in a directory that all
 * processes of a run share (MEMCALC_NULL_EXCHANGE). Each file is written once and atomically, under a name that sender
 * and receiver both know. Without such a directory nothing is exchanged, and every rank keeps its own data.
 */
#define _GNU_SOURCE
#include "null.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

/* Timeout of a receiver. Ranks start seconds apart, and one may prepare data for all; the launcher ends a rank that
 * has failed. After the timeout the receiver continues with its own data. */
#define PATIENCE 120
#define PAUSE_NS 200000

#define LISTEN_EVERY 250 /* pauses between checks for a signal: 50 ms */

/* Python handles signals between its own instructions, of which there are none while its main thread waits here. With
 * NCCL it would wait in none of its functions. */
static bool interrupted(void) {
    int (*ensure)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void (*release)(int) = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    int (*check)(void) = dlsym(RTLD_DEFAULT, "PyErr_CheckSignals");
    void (*clear)(void) = dlsym(RTLD_DEFAULT, "PyErr_Clear");
    if (getpid() != gettid() || ensure == NULL || release == NULL || check == NULL || clear == NULL) return false;
    int state = ensure();
    bool raised = check() != 0;
    if (raised) clear();
    release(state);
    if (raised) raise(SIGINT); /* raise it again, so that Python can turn it into a KeyboardInterrupt */
    return raised;
}

static const char *folder(void) {
    const char *path = getenv("MEMCALC_NULL_EXCHANGE");
    return path != NULL && *path != '\0' ? path : NULL;
}

bool null_exchanging(void) { return folder() != NULL; }

void null_random(void *bytes, size_t size) {
    if (getrandom(bytes, size, 0) != (ssize_t)size) memset(bytes, getpid(), size);
}

static void path_of(char *path, size_t room, const char *name) { snprintf(path, room, "%s/%s", folder(), name); }

void null_publish(const char *name, const void *bytes, size_t size) {
    char path[4096], part[4104];
    if (folder() == NULL) return;
    path_of(path, sizeof path, name);
    snprintf(part, sizeof part, "%s.part", path);
    int file = open(part, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file < 0) return;
    bool whole = write(file, bytes, size) == (ssize_t)size;
    close(file);
    if (!whole || rename(part, path) != 0) unlink(part);
}

bool null_fetch(const char *name, void *bytes, size_t size) {
    static bool told;
    unsigned round = 0;
    char path[4096];
    struct timespec start, now, pause = {0, PAUSE_NS};
    if (folder() == NULL) return false;
    path_of(path, sizeof path, name);
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        int file = open(path, O_RDONLY);
        if (file >= 0) {
            bool whole = read(file, bytes, size) == (ssize_t)size;
            close(file);
            return whole;
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - start.tv_sec >= PATIENCE) break;
        nanosleep(&pause, NULL);
        if (++round % LISTEN_EVERY == 0 && interrupted()) return false;
    }
    if (!told) fprintf(stderr, "memcalc: another rank did not come to a collective within %d s; going on.\n", PATIENCE);
    told = true;
    return false;
}
