/* Shared by the files of libmemcalcnull.so, and not with the stubs. */
#ifndef MEMCALC_STATE_H
#define MEMCALC_STATE_H

/* Counters since the start. The hook in the instrumented process reads them as 64-bit integers, in this order. */
struct null_counts {
    long long launches;           /* kernels */
    long long reads;              /* copies from the device to the host */
    long long small_reads;        /* of these, of at most SMALL bytes that are not known: branches may depend on them */
    long long read_bytes;
    long long communicators;
    long long communicator_bytes;
};

/* A value that a branch depends on is a number, a flag or a short list; whole tensors are checkpoints and
 * offloading. */
#define SMALL 4096

extern struct null_counts null_counts;

#endif
