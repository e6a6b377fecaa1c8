/* Streams and events. Work is complete at once, or with events=delayed only when the host waits for it.
 *
 * Memory that a stream still uses cannot be allocated again, so when events complete decides how early PyTorch's
 * allocator may reuse a block that another stream was recorded on. The two settings bound it from both sides.
 */
#include "null.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

/* Programs also poll events without waiting, as the watchdog of PyTorch's NCCL does for each collective. So a delayed
 * event is complete after this many seconds at the latest: a step here takes milliseconds. */
#define LATEST 5

struct stream {
    int priority;
    long long submitted; /* number of the last event recorded */
    long long finished;  /* number of the last event that the host waited for */
    unsigned long long capture; /* the CUDA graph capture that it belongs to; 0: none */
    struct stream *next;
};

struct event {
    struct stream *stream;
    long long number; /* of its stream's events; 0: never recorded, hence done */
    unsigned long long capture; /* of the stream when it was recorded */
    struct timespec recorded;
};

static struct stream legacy; /* the default stream, under all its names */
static struct stream *streams;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* NULL, cudaStreamLegacy (1) and cudaStreamPerThread (2) are names, not addresses. */
static struct stream *find(void *stream) { return (uintptr_t)stream <= 2 ? &legacy : stream; }

void *null_stream_new(int priority) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) return NULL;
    stream->priority = priority;
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    return stream;
}

void null_stream_delete(void *stream) { null_stream_wait(stream); } /* never freed: events may still point to it */

int null_stream_priority(void *stream) { return find(stream)->priority; }

void null_stream_wait(void *stream) {
    pthread_mutex_lock(&lock);
    find(stream)->finished = find(stream)->submitted;
    pthread_mutex_unlock(&lock);
}

void null_device_wait(void) {
    pthread_mutex_lock(&lock);
    legacy.finished = legacy.submitted;
    for (struct stream *stream = streams; stream != NULL; stream = stream->next) stream->finished = stream->submitted;
    pthread_mutex_unlock(&lock);
}

bool null_stream_done(void *stream) {
    return !null_card()->delayed || find(stream)->finished == find(stream)->submitted;
}

void *null_event_new(void) { return calloc(1, sizeof(struct event)); }

void null_event_delete(void *event) { free(event); }

void null_event_record(void *event, void *stream) {
    struct event *e = event;
    pthread_mutex_lock(&lock);
    e->stream = find(stream);
    e->number = ++e->stream->submitted;
    e->capture = e->stream->capture;
    clock_gettime(CLOCK_MONOTONIC, &e->recorded);
    pthread_mutex_unlock(&lock);
}

bool null_event_done(void *event) {
    struct event *e = event;
    if (!null_card()->delayed || e->stream == NULL || e->number <= e->stream->finished) return true;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec - e->recorded.tv_sec > LATEST;
}

void null_event_wait(void *event) {
    struct event *e = event;
    pthread_mutex_lock(&lock);
    if (e->stream != NULL && e->stream->finished < e->number) e->stream->finished = e->number;
    pthread_mutex_unlock(&lock);
}

/* ---- capture into CUDA graphs: which streams take part, so that PyTorch allocates from the graph's own pool */

static unsigned long long captures;

void null_capture_begin(void *stream) {
    pthread_mutex_lock(&lock);
    find(stream)->capture = ++captures;
    pthread_mutex_unlock(&lock);
}

void null_capture_end(void *stream) {
    pthread_mutex_lock(&lock);
    unsigned long long id = find(stream)->capture;
    if (legacy.capture == id) legacy.capture = 0;
    for (struct stream *s = streams; s != NULL; s = s->next)
        if (s->capture == id) s->capture = 0;
    pthread_mutex_unlock(&lock);
}

unsigned long long null_capture(void *stream) { return find(stream)->capture; }

/* A stream that waits for an event of a captured one joins the capture. */
void null_stream_wait_event(void *stream, void *event) {
    struct event *e = event;
    if (e->capture != 0 && find(stream)->capture == 0 && e->stream->capture == e->capture)
        find(stream)->capture = e->capture;
}
