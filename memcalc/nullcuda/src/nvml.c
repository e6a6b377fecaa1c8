/* NVML: number of GPUs, their names and memory in use. Prototypes: https://docs.nvidia.com/deploy/nvml-api. */
#include "null.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7 };

/* A GPU's handle is its number, counted from 1. */
static int number(void *handle) { return (int)(uintptr_t)handle - 1; }
static int handle_of(int device, void **handle) {
    if (device < 0 || device >= null_card()->gpus) return NVML_NOT_FOUND;
    *handle = (void *)(uintptr_t)(device + 1);
    return SUCCESS;
}

API int nvmlInit_v2(void) { return SUCCESS; }
API int nvmlInit(void) { return SUCCESS; }
API int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
API int nvmlShutdown(void) { return SUCCESS; }
API const char *nvmlErrorString(int error) {
    return error == SUCCESS ? "Success" : error == NVML_NOT_SUPPORTED ? "Not Supported" : "error on the null device";
}
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA_VERSION; return SUCCESS; }
API int nvmlSystemGetCudaDriverVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
API int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "null device");
    return SUCCESS;
}

/* Cards are counted before CUDA_VISIBLE_DEVICES: PyTorch applies it to NVML's count itself. */
API int nvmlDeviceGetCount_v2(unsigned *count) { *count = null_card()->gpus; return SUCCESS; }
API int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return handle_of((int)index, handle); }
API int nvmlDeviceGetHandleByIndex(unsigned index, void **handle) { return handle_of((int)index, handle); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    unsigned domain, number;
    return sscanf(bus, "%x:%x", &domain, &number) == 2 ? handle_of((int)number - 1, handle) : NVML_NOT_FOUND;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    unsigned number;
    return sscanf(uuid, "GPU-%2x", &number) == 1 ? handle_of((int)number - 1, handle) : NVML_NOT_FOUND;
}
API int nvmlDeviceGetIndex(void *handle, unsigned *index) { *index = number(handle); return SUCCESS; }
API int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    (void)handle;
    snprintf(name, length, "%s", null_card()->name);
    return SUCCESS;
}
API int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%02x000000-0000-0000-0000-000000000000", number(handle) + 1);
    return SUCCESS;
}
API int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    (void)handle;
    *major = null_card()->major;
    *minor = null_card()->minor;
    return SUCCESS;
}

API int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long memory[3]) { /* nvmlMemory_t: total, free, used */
    memory[0] = null_card()->memory;
    memory[2] = null_in_use(number(handle));
    memory[1] = memory[0] > memory[2] ? memory[0] - memory[2] : 0;
    return SUCCESS;
}
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
API int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
    unsigned long long plain[3];
    nvmlDeviceGetMemoryInfo(handle, plain);
    memory->total = plain[0];
    memory->reserved = 0;
    memory->free = plain[1];
    memory->used = plain[2];
    return SUCCESS;
}

/* nvmlProcessInfo_t of _v2 and _v3. */
struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};
API int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *processes) {
    unsigned room = *count;
    *count = 1; /* this process: it cannot see the others */
    if (room < 1) return NVML_INSUFFICIENT_SIZE;
    processes[0] = (struct process){(unsigned)getpid(), null_in_use(number(handle)), ~0u, ~0u};
    return SUCCESS;
}
API int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, struct process *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, processes);
}
API int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, struct process *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, processes);
}

static int zero(unsigned *a, unsigned *b) {
    *a = 0;
    if (b != NULL) *b = 0;
    return SUCCESS;
}
API int nvmlDeviceGetUtilizationRates(void *handle, unsigned rates[2]) { (void)handle; return zero(rates, rates + 1); }
API int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { (void)handle; return zero(milliwatts, NULL); }
API int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) {
    (void)handle; (void)sensor;
    return zero(degrees, NULL);
}
API int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *megahertz) {
    (void)handle; (void)type;
    return zero(megahertz, NULL);
}
API int nvmlDeviceGetMaxClockInfo(void *handle, int type, unsigned *megahertz) {
    (void)handle; (void)type;
    return zero(megahertz, NULL);
}
/* OK */
API int nvmlDeviceGetP2PStatus(void *a, void *b, int index, int *status) {
    (void)a; (void)b; (void)index;
    *status = 0;
    return SUCCESS;
}

/* nvmlGpuFabricInfo_v2_t of the reference. PyTorch asks before it makes expandable segments. */
struct fabric {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state; /* 0: NVML_GPU_FABRIC_STATE_NOT_SUPPORTED */
    unsigned health;
};
API int nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric *fabric) {
    (void)handle;
    fabric->status = SUCCESS;
    fabric->state = 0;
    return SUCCESS;
}

#define UNSUPPORTED(name) API int name(void) { return NVML_NOT_SUPPORTED; }
UNSUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
UNSUPPORTED(nvmlDeviceGetNvLinkState)
