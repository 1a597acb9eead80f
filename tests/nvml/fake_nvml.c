/*
 * fake_nvml.c - a scriptable stand-in for libnvidia-ml.so.1, for tests on machines with no GPU.
 *
 * Build:  cc -std=c11 -O1 -Wall -Wextra -fPIC -shared -Wl,-soname,libnvidia-ml.so.1 \
 *            -o libnvidia-ml.so.1 fake_nvml.c -lpthread -lm
 *
 * FAKE_NVML_SCRIPT names a text file that is read again at every call, so a test changes the
 * "hardware" by replacing the file (write a new file, then rename it over the old one).
 * FAKE_NVML_LOG, if set, names a file to which every call adds: monotonic_ns thread_id function device
 *
 * Script lines are "key value"; '#' starts a comment line. A value may be a comma separated list:
 * each call takes the next item and the last one stays. An item "A+R" grows by R a second from A on, "A~B~P"
 * swings between A and B in P seconds, so that a show has something to see. A key that is absent answers
 * NVML_ERROR_NOT_SUPPORTED, so a short script is a sparse device. Device keys start with "gpu.N.",
 * with "*." as the default for every GPU; MIG devices are "mig.N.M." and have no default.
 *
 *   driver 580.65.06          gpu.0.uuid GPU-aaaa       gpu.0.mem_total 85899345920
 *   nvml 13.580.65.06         gpu.0.name Fake H100      gpu.0.util 97,40      gpu.0.power_mw 310000
 *   count 2                   gpu.0.clock.mem 2619      gpu.0.gpm_supported 1 gpu.0.gpm.10 61.5,62.0
 *   error.nvmlInitWithFlags DRIVER_NOT_LOADED           error.gpu.0.nvmlDeviceGetPowerUsage OK,GPU_IS_LOST
 *   error.gpu.0.gpm.10 NOT_SUPPORTED                    delay_ms.nvmlDeviceGetPcieThroughput 20
 *   error.gpu.0.* GPU_IS_LOST                           gpu.0.energy_mj 1000000+250000
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 8
#define MAX_MIG 7
#define LINE 1024

enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, ALREADY_INITIALIZED, NOT_FOUND,
       INSUFFICIENT_SIZE, INSUFFICIENT_POWER, DRIVER_NOT_LOADED, TIMEOUT, IRQ_ISSUE, LIBRARY_NOT_FOUND,
       FUNCTION_NOT_FOUND, CORRUPTED_INFOROM, GPU_IS_LOST, RESET_REQUIRED, OPERATING_SYSTEM,
       LIB_RM_VERSION_MISMATCH, IN_USE, MEMORY, NO_DATA, VGPU_ECC_NOT_SUPPORTED, INSUFFICIENT_RESOURCES,
       FREQ_NOT_SUPPORTED, ARGUMENT_VERSION_MISMATCH, DEPRECATED, NOT_READY, GPU_NOT_FOUND, INVALID_STATE };
static const char *const error_names[] = {
    "OK", "UNINITIALIZED", "INVALID_ARGUMENT", "NOT_SUPPORTED", "NO_PERMISSION", "ALREADY_INITIALIZED", "NOT_FOUND",
    "INSUFFICIENT_SIZE", "INSUFFICIENT_POWER", "DRIVER_NOT_LOADED", "TIMEOUT", "IRQ_ISSUE", "LIBRARY_NOT_FOUND",
    "FUNCTION_NOT_FOUND", "CORRUPTED_INFOROM", "GPU_IS_LOST", "RESET_REQUIRED", "OPERATING_SYSTEM",
    "LIB_RM_VERSION_MISMATCH", "IN_USE", "MEMORY", "NO_DATA", "VGPU_ECC_NOT_SUPPORTED", "INSUFFICIENT_RESOURCES",
    "FREQ_NOT_SUPPORTED", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED", "NOT_READY", "GPU_NOT_FOUND", "INVALID_STATE" };
enum { N_ERRORS = sizeof error_names / sizeof *error_names, UNKNOWN_ERROR = 999 };

typedef struct { char id[16]; int gpu, mig; } device;                 /* id: "gpu.0" or "mig.0.1" */
typedef struct { uint64_t total, free, used; } memory_v1;
typedef struct { uint32_t version; uint64_t total, reserved, free, used; } memory_v2;
typedef struct { uint32_t gpu, memory; } utilization;
typedef struct {
    char bus_id_legacy[16];
    uint32_t domain, bus, dev, device_id, subsystem_id;
    char bus_id[32];
} pci_info;
typedef struct { uint32_t pid; uint64_t used_memory; uint32_t gpu_instance, compute_instance; } process_info;
typedef struct { uint32_t version, sensor; int32_t celsius; } temperature_v1;
typedef union { double d; uint64_t u; } value;
typedef struct { uint64_t time_us; value v; } sample;
typedef struct { uint32_t field, scope; int64_t time_us, latency_us; uint32_t type, ret; value v; } field_value;
typedef struct { device *dev; unsigned step; uint64_t taken_ns; } gpm_sample;
typedef struct { uint32_t id, ret; double v; const char *short_name, *long_name, *unit; } gpm_metric;
typedef struct { uint32_t version, n; gpm_sample *first, *second; gpm_metric metrics[]; } gpm_request;
typedef struct { uint32_t version, supported; } gpm_support;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;              /* guards everything below */
static int init_count;
static pid_t init_pid;
static device gpus[MAX_GPUS], migs[MAX_GPUS][MAX_MIG];
static struct { char key[128]; unsigned calls; } counters[256];

static uint64_t now_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- the script ---- */

static int script_line(const char *key, char *out) {                  /* the whole value of one key */
    const char *path = getenv("FAKE_NVML_SCRIPT");
    FILE *f = path ? fopen(path, "r") : NULL;
    char line[LINE];
    int found = 0;
    size_t n = strlen(key);
    while (f && !found && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, n) != 0 || (line[n] != ' ' && line[n] != '\t')) continue;
        char *v = line + n + strspn(line + n, " \t");
        v[strcspn(v, "\r\n")] = '\0';
        strcpy(out, v);
        found = 1;
    }
    if (f) fclose(f);
    return found;
}

static int device_line(const device *d, const char *name, char *out) {
    char key[128];
    snprintf(key, sizeof key, "%s.%s", d->id, name);
    if (script_line(key, out)) return 1;
    snprintf(key, sizeof key, "*.%s", name);
    return d->mig < 0 && script_line(key, out);
}

static void take_item(char *list, unsigned index) {                   /* the index-th item, or the last */
    char *item = list, *comma;
    while (index-- && (comma = strchr(item, ','))) item = comma + 1;
    if ((comma = strchr(item, ','))) *comma = '\0';
    memmove(list, item, strlen(item) + 1);
}

static unsigned next_call(const char *key) {                          /* 0, 1, 2 ... for each key */
    size_t i = 0;
    while (i + 1 < sizeof counters / sizeof *counters && counters[i].key[0] && strcmp(counters[i].key, key)) i++;
    snprintf(counters[i].key, sizeof counters[i].key, "%s", key);
    return counters[i].calls++;
}

static double item_value(const char *text) {                          /* 71.5   1000+250   20~80~5 */
    char *end;
    double a = strtod(text, &end), t = (double)now_ns(CLOCK_MONOTONIC) / 1e9;
    static double started;
    if (!started) started = t;
    if (*end == '+') return a + strtod(end + 1, NULL) * (t - started);
    if (*end != '~') return a;
    double b = strtod(end + 1, &end), period = *end == '~' ? strtod(end + 1, NULL) : 1;
    return (a + b) / 2 - (b - a) / 2 * cos(2 * 3.141592653589793 * t / period);
}

static int read_text(const device *d, const char *name, char *out) {
    char key[128];
    if (!device_line(d, name, out)) return NOT_SUPPORTED;
    snprintf(key, sizeof key, "%s.%s", d->id, name);
    take_item(out, next_call(key));
    return OK;
}

static int read_u64(const device *d, const char *name, uint64_t *out) {
    char text[LINE];
    int e = read_text(d, name, text);
    if (e == OK) *out = strpbrk(text, "+~") ? (uint64_t)item_value(text) : strtoull(text, NULL, 0);
    return e;
}

static int read_u32(const device *d, const char *name, uint32_t *out) {
    uint64_t v;
    int e = read_u64(d, name, &v);
    if (e == OK) *out = (uint32_t)v;
    return e;
}

static int error_code(const char *text) {
    for (int i = 0; i < N_ERRORS; i++) if (!strcmp(text, error_names[i])) return i;
    return strcmp(text, "UNKNOWN") ? atoi(text) : UNKNOWN_ERROR;
}

static int forced_error(const char *who, const char *what) {
    char key[128], text[LINE];
    snprintf(key, sizeof key, who ? "error.%s.%s" : "error.%s%s", who ? who : "", what);
    if (!script_line(key, text)) return OK;
    take_item(text, next_call(key));
    return error_code(text);
}

/* Runs at the start of every call, with the lock held afterwards whatever it answers. */
static int enter(const char *function, const device *d, int needs_device) {
    char key[128], text[LINE];
    const char *log = getenv("FAKE_NVML_LOG");
    snprintf(key, sizeof key, "delay_ms.%s", function);
    if (script_line(key, text)) usleep((useconds_t)(atof(text) * 1000));
    pthread_mutex_lock(&lock);
    FILE *f = log ? fopen(log, "a") : NULL;
    if (f) {
        fprintf(f, "%llu %ld %s %s\n", (unsigned long long)now_ns(CLOCK_MONOTONIC), syscall(SYS_gettid), function,
                d ? d->id : "-");
        fclose(f);
    }
    if (init_count == 0 || init_pid != getpid()) return UNINITIALIZED; /* a forked child must call init itself */
    if (needs_device && !d) return INVALID_ARGUMENT;
    int e = forced_error(NULL, function);
    if (e == OK && d) e = forced_error(d->id, function);
    return e == OK && d ? forced_error(d->id, "*") : e;
}

static int leave(int e) {
    pthread_mutex_unlock(&lock);
    return e;
}
#define ENTER(d, needs) do { int e_ = enter(__func__, d, needs); if (e_ != OK) return leave(e_); } while (0)

/* ---- library and devices ---- */

EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    int first = init_count == 0 || init_pid != getpid();
    if (first) {
        init_count = 0;
        memset(counters, 0, sizeof counters);
        for (int g = 0; g < MAX_GPUS; g++) {
            gpus[g] = (device){.gpu = g, .mig = -1};
            snprintf(gpus[g].id, sizeof gpus[g].id, "gpu.%d", g);
            for (int m = 0; m < MAX_MIG; m++) {
                migs[g][m] = (device){.gpu = g, .mig = m};
                snprintf(migs[g][m].id, sizeof migs[g][m].id, "mig.%d.%d", g, m);
            }
        }
    }
    init_count++;
    init_pid = getpid();
    pthread_mutex_unlock(&lock);
    int e = enter(__func__, NULL, 0);
    if (e != OK) init_count--;
    return leave(e);
}
EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT int nvmlInit(void) { return nvmlInitWithFlags(0); }

EXPORT int nvmlShutdown(void) {
    ENTER(NULL, 0);
    init_count--;
    return leave(OK);
}

EXPORT const char *nvmlErrorString(int e) { return e >= 0 && e < N_ERRORS ? error_names[e] : "UNKNOWN"; }

static int system_text(const char *key, char *out, unsigned size, const char *fallback) {
    char text[LINE];
    if (!script_line(key, text)) strcpy(text, fallback);
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}
EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned n) {
    ENTER(NULL, 0);
    return leave(system_text("driver", out, n, "580.00.00"));
}
EXPORT int nvmlSystemGetNVMLVersion(char *out, unsigned n) {
    ENTER(NULL, 0);
    return leave(system_text("nvml", out, n, "13.580.00.00"));
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    ENTER(NULL, 0);
    char text[LINE];
    *out = script_line("cuda", text) ? atoi(text) : 13000;
    return leave(OK);
}

static unsigned gpu_count(void) {
    char text[LINE];
    unsigned n = script_line("count", text) ? (unsigned)atoi(text) : 0;
    return n < MAX_GPUS ? n : MAX_GPUS;
}
EXPORT int nvmlDeviceGetCount_v2(unsigned *out) { ENTER(NULL, 0); *out = gpu_count(); return leave(OK); }

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned i, device **out) {
    ENTER(NULL, 0);
    if (i >= gpu_count()) return leave(INVALID_ARGUMENT);
    *out = &gpus[i];
    return leave(forced_error(gpus[i].id, __func__));
}

static device *find_device(const char *name, const char *wanted) {
    char text[LINE];
    for (unsigned g = 0; g < gpu_count(); g++) {
        if (device_line(&gpus[g], name, text) && !strcmp(text, wanted)) return &gpus[g];
        for (int m = 0; m < MAX_MIG; m++)
            if (device_line(&migs[g][m], name, text) && !strcmp(text, wanted)) return &migs[g][m];
    }
    return NULL;
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, device **out) {
    ENTER(NULL, 0);
    device *d = uuid ? find_device("uuid", uuid) : NULL;
    if (d) *out = d;
    return leave(d ? OK : NOT_FOUND);
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, device **out) {
    ENTER(NULL, 0);
    device *d = bus_id ? find_device("pci", bus_id) : NULL;
    if (d) *out = d;
    return leave(d ? OK : NOT_FOUND);
}

static int device_text(const device *d, const char *name, char *out, unsigned size) {
    char text[LINE];
    int e = read_text(d, name, text);
    if (e == OK && strlen(text) >= size) e = INSUFFICIENT_SIZE;
    if (e == OK) strcpy(out, text);
    return e;
}
EXPORT int nvmlDeviceGetName(device *d, char *out, unsigned n) {
    ENTER(d, 1);
    return leave(device_text(d, "name", out, n));
}
EXPORT int nvmlDeviceGetUUID(device *d, char *out, unsigned n) {
    ENTER(d, 1);
    return leave(device_text(d, "uuid", out, n));
}

EXPORT int nvmlDeviceGetPciInfo_v3(device *d, pci_info *out) {
    ENTER(d, 1);
    memset(out, 0, sizeof *out);
    int e = device_text(d, "pci", out->bus_id, sizeof out->bus_id);
    if (e == OK && sscanf(out->bus_id, "%x:%x:%x", &out->domain, &out->bus, &out->dev) == 3)
        snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04x:%02x:%02x.0", out->domain & 0xffff,
                 out->bus & 0xff, out->dev & 0xff);
    return leave(e);
}

EXPORT int nvmlDeviceGetIndex(device *d, unsigned *out) { ENTER(d, 1); *out = (unsigned)d->gpu; return leave(OK); }

EXPORT int nvmlDeviceGetCudaComputeCapability(device *d, int *major, int *minor) {
    ENTER(d, 1);
    char text[LINE];
    int e = read_text(d, "compute_capability", text);                  /* "9.0" */
    if (e == OK && sscanf(text, "%d.%d", major, minor) != 2) e = UNKNOWN_ERROR;
    return leave(e);
}

/* ---- readings that are one number ---- */

#define NUMBER(function, type, reader, name) \
    EXPORT int function(device *d, type *out) { ENTER(d, 1); return leave(reader(d, name, out)); }
NUMBER(nvmlDeviceGetArchitecture, uint32_t, read_u32, "arch")          /* 7 Ampere, 8 Ada, 9 Hopper, 10 Blackwell */
NUMBER(nvmlDeviceGetMemoryBusWidth, uint32_t, read_u32, "bus_width")
NUMBER(nvmlDeviceGetPowerUsage, uint32_t, read_u32, "power_mw")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, uint32_t, read_u32, "power_limit_mw")
NUMBER(nvmlDeviceGetTotalEnergyConsumption, uint64_t, read_u64, "energy_mj")
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, uint64_t, read_u64, "clock_reasons")
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, uint64_t, read_u64, "clock_reasons")
NUMBER(nvmlDeviceGetPerformanceState, uint32_t, read_u32, "pstate")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, uint32_t, read_u32, "pcie_gen")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, uint32_t, read_u32, "pcie_width")
NUMBER(nvmlDeviceGetVirtualizationMode, uint32_t, read_u32, "virtualization") /* 0 none, 1 passthrough, 2 vGPU guest */
NUMBER(nvmlDeviceGetGpuInstanceId, uint32_t, read_u32, "gpu_instance")

static const char *const clock_names[] = {"graphics", "sm", "mem", "video"};
static int read_clock(device *d, const char *group, unsigned type, unsigned *out) {
    char name[32];
    if (type > 3) return INVALID_ARGUMENT;
    snprintf(name, sizeof name, "%s.%s", group, clock_names[type]);
    return read_u32(d, name, out);
}
EXPORT int nvmlDeviceGetClockInfo(device *d, unsigned type, unsigned *out) {
    ENTER(d, 1);
    return leave(read_clock(d, "clock", type, out));
}
EXPORT int nvmlDeviceGetMaxClockInfo(device *d, unsigned type, unsigned *out) {
    ENTER(d, 1);
    return leave(read_clock(d, "max_clock", type, out));
}

EXPORT int nvmlDeviceGetTemperature(device *d, unsigned sensor, unsigned *out) {
    ENTER(d, 1);
    return leave(sensor ? INVALID_ARGUMENT : read_u32(d, "temp_c", out));
}
EXPORT int nvmlDeviceGetTemperatureV(device *d, temperature_v1 *out) {
    ENTER(d, 1);
    if (out->version != (1u << 24 | sizeof *out)) return leave(ARGUMENT_VERSION_MISMATCH);
    uint32_t c;
    int e = out->sensor ? INVALID_ARGUMENT : read_u32(d, "temp_c", &c);
    if (e == OK) out->celsius = (int32_t)c;
    return leave(e);
}

EXPORT int nvmlDeviceGetPcieThroughput(device *d, unsigned counter, unsigned *out) { /* KB/s */
    ENTER(d, 1);
    return leave(counter > 1 ? INVALID_ARGUMENT : read_u32(d, counter ? "pcie_rx_kbs" : "pcie_tx_kbs", out));
}

/* ---- readings with several parts ---- */

EXPORT int nvmlDeviceGetUtilizationRates(device *d, utilization *out) {
    ENTER(d, 1);
    int e = read_u32(d, "util", &out->gpu);
    return leave(e == OK ? read_u32(d, "mem_util", &out->memory) : e);
}

static int read_memory(device *d, memory_v2 *out) {
    uint64_t reserved = 0;
    int e = read_u64(d, "mem_total", &out->total);
    if (e == OK) e = read_u64(d, "mem_used", &out->used);
    if (e != OK) return e;
    read_u64(d, "mem_reserved", &reserved);                            /* optional */
    out->reserved = reserved;
    out->free = out->total - out->used - reserved;
    return OK;
}
EXPORT int nvmlDeviceGetMemoryInfo(device *d, memory_v1 *out) {        /* v1 counts reserved memory as used */
    ENTER(d, 1);
    memory_v2 m;
    int e = read_memory(d, &m);
    if (e == OK) *out = (memory_v1){m.total, m.free, m.used + m.reserved};
    return leave(e);
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *out) {
    ENTER(d, 1);
    if (out->version != (2u << 24 | sizeof *out)) return leave(FUNCTION_NOT_FOUND); /* what real drivers answer */
    return leave(read_memory(d, out));
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, process_info *out) {
    ENTER(d, 1);                                                       /* processes 4711:1048576 4712:- */
    char text[LINE], *p = text;
    unsigned n = 0, room = *count;
    if (!device_line(d, "processes", text)) return leave(NOT_SUPPORTED);
    while (*p) {
        unsigned pid = (unsigned)strtoul(p, &p, 10);
        uint64_t used = *p == ':' && p[1] != '-' ? strtoull(p + 1, NULL, 0) : UINT64_MAX; /* "-": not available */
        if (out && n < room) out[n] = (process_info){pid, used, UINT32_MAX, UINT32_MAX};
        n++;
        p += strcspn(p, " ");
        p += strspn(p, " ");
    }
    *count = n;
    return leave(n > room ? INSUFFICIENT_SIZE : OK);
}

EXPORT int nvmlDeviceGetFieldValues(device *d, int n, field_value *fields) {
    ENTER(d, 1);
    for (int i = 0; i < n; i++) {
        char name[48], text[LINE];
        field_value *f = &fields[i];
        snprintf(name, sizeof name, f->scope ? "field.%u.%u" : "field.%u", f->field, f->scope);
        f->time_us = (int64_t)(now_ns(CLOCK_REALTIME) / 1000);
        f->latency_us = 1;
        f->type = 3;                                                   /* unsigned long long */
        f->ret = (uint32_t)read_text(d, name, text);
        if (f->ret == OK) f->v.u = (uint64_t)item_value(text);
    }
    return leave(OK);
}

EXPORT int nvmlDeviceGetSamples(device *d, unsigned kind, unsigned long long after_us, unsigned *value_type,
                                unsigned *count, sample *out) {
    ENTER(d, 1);                                                       /* samples.2 1000000:35 1166667:40 */
    char name[32], text[LINE], *p = text;
    unsigned n = 0, room = *count;
    snprintf(name, sizeof name, "samples.%u", kind);
    if (!device_line(d, name, text)) return leave(NOT_SUPPORTED);
    *value_type = 1;                                                   /* unsigned int */
    while (*p) {
        uint64_t t = strtoull(p, &p, 10), v = *p == ':' ? strtoull(p + 1, &p, 10) : 0;
        if (t > after_us && (!out || n < room)) {
            if (out) out[n] = (sample){t, {.u = v}};
            n++;
        }
        p += strspn(p, " ");
    }
    *count = n;
    return leave(n ? OK : NOT_FOUND);
}

/* ---- MIG ---- */

EXPORT int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    ENTER(d, 1);
    int e = d->mig < 0 ? read_u32(d, "mig_mode", current) : INVALID_ARGUMENT;
    if (e == OK) *pending = *current;
    return leave(e);
}
EXPORT int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *out) { ENTER(d, 1); *out = MAX_MIG; return leave(OK); }
EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned i, device **out) {
    ENTER(d, 1);
    char text[LINE];
    if (d->mig >= 0 || i >= MAX_MIG) return leave(INVALID_ARGUMENT);
    if (!device_line(&migs[d->gpu][i], "uuid", text)) return leave(NOT_FOUND);
    *out = &migs[d->gpu][i];
    return leave(OK);
}
EXPORT int nvmlDeviceIsMigDeviceHandle(device *d, unsigned *out) { ENTER(d, 1); *out = d->mig >= 0; return leave(OK); }
EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device *d, device **out) {
    ENTER(d, 1);
    if (d->mig < 0) return leave(INVALID_ARGUMENT);
    *out = &gpus[d->gpu];
    return leave(OK);
}

/* ---- GPM: two samples, then the average of each metric between them ---- */

static int gpm_on(const device *d) { char text[LINE]; return device_line(d, "gpm_supported", text) && atoi(text); }

EXPORT int nvmlGpmQueryDeviceSupport(device *d, gpm_support *out) {
    ENTER(d, 1);
    if (out->version != 1) return leave(ARGUMENT_VERSION_MISMATCH);
    out->supported = (uint32_t)gpm_on(d);
    return leave(OK);
}
EXPORT int nvmlGpmSampleAlloc(gpm_sample **out) {
    ENTER(NULL, 0);
    *out = calloc(1, sizeof **out);
    return leave(*out ? OK : MEMORY);
}
EXPORT int nvmlGpmSampleFree(gpm_sample *s) {
    ENTER(NULL, 0);
    free(s);
    return leave(s ? OK : INVALID_ARGUMENT);
}
static int take_sample(device *d, gpm_sample *s) {
    char key[48];
    if (!d || !s) return INVALID_ARGUMENT;
    if (!gpm_on(d)) return NOT_SUPPORTED;
    snprintf(key, sizeof key, "%s.gpm", d->id);
    *s = (gpm_sample){d, next_call(key), now_ns(CLOCK_MONOTONIC)};
    return OK;
}
EXPORT int nvmlGpmSampleGet(device *d, gpm_sample *s) { ENTER(d, 1); return leave(take_sample(d, s)); }
EXPORT int nvmlGpmMigSampleGet(device *d, unsigned instance, gpm_sample *s) {
    ENTER(d, 1);
    char text[LINE];
    for (int m = 0; m < MAX_MIG; m++)
        if (device_line(&migs[d->gpu][m], "gpu_instance", text) && strtoul(text, NULL, 0) == instance)
            return leave(take_sample(&migs[d->gpu][m], s));
    return leave(INVALID_ARGUMENT);
}
EXPORT int nvmlGpmMetricsGet(gpm_request *r) {
    gpm_sample *a = r ? r->first : NULL, *b = r ? r->second : NULL;
    ENTER(b ? b->dev : NULL, 1);
    if (r->version != 1) return leave(ARGUMENT_VERSION_MISMATCH);
    if (!a || a == b || a->dev != b->dev || b->step <= a->step) return leave(INVALID_ARGUMENT);
    for (uint32_t i = 0; i < r->n; i++) {
        char name[32], text[LINE];
        gpm_metric *m = &r->metrics[i];
        snprintf(name, sizeof name, "gpm.%u", m->id);
        m->short_name = m->long_name = m->unit = NULL;
        m->ret = (uint32_t)forced_error(b->dev->id, name);
        if (m->ret == OK && !device_line(b->dev, name, text)) m->ret = NOT_SUPPORTED;
        if (m->ret != OK) continue;
        take_item(text, b->step - 1);                                  /* the first pair takes the first item */
        m->v = b->taken_ns - a->taken_ns < 100000000u ? NAN : item_value(text); /* NVML asks for over 100 ms */
    }
    return leave(OK);
}
