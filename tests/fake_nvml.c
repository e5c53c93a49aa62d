// NVIDIA's management library with one GPU whose state a test sets: what nvidia-ml-py loads as libnvidia-ml.so.1.
// Signatures and structures are those of nvml.h, as nvidia-ml-py calls them.
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, FUNCTION_NOT_FOUND = 13 };

typedef struct gpu *device;
typedef struct { unsigned int gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned int version, sensor; int temperature; } temperature_v1;
typedef struct {
    device gpu;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} event;

char fake_uuid[64] = "GPU-00000000-1111-2222-3333-444444444444";
unsigned int fake_init = SUCCESS, fake_busy = 97, fake_milliwatts = 612500, fake_sm_clock = 1755, fake_celsius = 71;
unsigned long long fake_used = 66571993088ULL, fake_reasons = 4, fake_errors = 0;
unsigned int fake_remapped = 2, fake_remap_pending = 0, fake_remap_failure = 0;
unsigned int fake_is_old = 0;      // a driver and a GPU from before Ampere
unsigned int fake_is_partition = 0; // of a GPU, which tells its memory alone
unsigned long long fake_xids[8];
unsigned int fake_xid_count = 0;

int nvmlInitWithFlags(unsigned int flags) { return flags ? NOT_SUPPORTED : (int)fake_init; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int result) { return result == 9 ? "Driver Not Loaded" : "some error"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, device *gpu) {
    *gpu = (device)fake_uuid;
    return strcmp(uuid, fake_uuid) ? NOT_FOUND : SUCCESS;
}
#define WHOLE_GPU(gpu) if ((char *)(gpu) != fake_uuid) return NOT_FOUND; if (fake_is_partition) return NOT_SUPPORTED

int nvmlDeviceGetUtilizationRates(device gpu, utilization *now) {
    WHOLE_GPU(gpu);
    now->gpu = fake_busy;
    now->memory = 1;
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(device gpu, unsigned int *milliwatts) {
    WHOLE_GPU(gpu);
    *milliwatts = fake_milliwatts;
    return SUCCESS;
}
int nvmlDeviceGetClockInfo(device gpu, unsigned int clock, unsigned int *mhz) {
    WHOLE_GPU(gpu);
    *mhz = clock == 1 ? fake_sm_clock : 1;
    return SUCCESS;
}
int nvmlDeviceGetTemperatureV(device gpu, temperature_v1 *asked) {
    WHOLE_GPU(gpu);
    if (fake_is_old || asked->version != 0x100000C || asked->sensor != 0) return FUNCTION_NOT_FOUND;
    asked->temperature = (int)fake_celsius;
    return SUCCESS;
}
int nvmlDeviceGetTemperature(device gpu, unsigned int sensor, unsigned int *celsius) {
    WHOLE_GPU(gpu);
    *celsius = sensor == 0 ? fake_celsius : 1;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(device gpu, memory *now) {
    if ((char *)gpu != fake_uuid) return NOT_FOUND;
    now->used = fake_used;
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksEventReasons(device gpu, unsigned long long *bits) {
    WHOLE_GPU(gpu);
    *bits = fake_reasons;
    return fake_is_old ? FUNCTION_NOT_FOUND : SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device gpu, unsigned long long *bits) {
    WHOLE_GPU(gpu);
    *bits = fake_reasons;
    return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(device gpu, unsigned int kind, unsigned int counter, unsigned long long *count) {
    WHOLE_GPU(gpu);
    *count = kind == 1 && counter == 0 ? fake_errors : 12345; // uncorrected, since the driver was loaded
    return SUCCESS;
}
int nvmlDeviceGetRemappedRows(device gpu, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending,
                              unsigned int *failure) {
    WHOLE_GPU(gpu);
    *corrected = 9;
    *uncorrected = fake_remapped;
    *pending = fake_remap_pending;
    *failure = fake_remap_failure;
    return fake_is_old ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetRetiredPages(device gpu, unsigned int cause, unsigned int *count, unsigned long long *pages) {
    WHOLE_GPU(gpu);
    if (!fake_is_old || cause != 1) return NOT_SUPPORTED;
    if (!pages) {
        *count = 3;
        return 7; // insufficient size
    }
    *count = 3;
    for (int page = 0; page < 3; page++) pages[page] = 0x1000 * page;
    return SUCCESS;
}
int nvmlDeviceGetRetiredPagesPendingStatus(device gpu, unsigned int *pending) {
    WHOLE_GPU(gpu);
    *pending = fake_remap_pending;
    return fake_is_old ? SUCCESS : NOT_SUPPORTED;
}
int nvmlEventSetCreate(void **set) {
    *set = fake_xids;
    return SUCCESS;
}
int nvmlDeviceRegisterEvents(device gpu, unsigned long long types, void *set) {
    WHOLE_GPU(gpu);
    return types == 8 && set == fake_xids ? SUCCESS : NOT_SUPPORTED; // critical Xid errors alone
}
int nvmlEventSetWait_v2(void *set, event *next, unsigned int milliseconds) {
    if (set != fake_xids || milliseconds || !fake_xid_count) return TIMEOUT;
    next->type = 8;
    next->data = fake_xids[--fake_xid_count];
    return SUCCESS;
}
