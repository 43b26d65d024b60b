/* A libnvidia-ml.so.1 without a GPU: every answer comes from a scenario file.
 *
 * NVML_SCENARIO names the file; it is read again whenever it is replaced. A line is `key value`, a
 * later line wins, # begins a comment. A number may move: `1000+50` is 1000 and 50 more a second
 * since the library was loaded, `1000+50@T` since the second T of CLOCK_MONOTONIC. What the
 * scenario does not hold is NVML_ERROR_NOT_SUPPORTED.
 *
 *   init CODE                      what nvmlInit returns
 *   count N                        GPUs
 *   layout 24|32                   bytes of an entry of the process list, as drivers differ
 *   gpu.I.uuid, .name, .minor, .total, .used, .power, .temperature, ...
 *   gpu.I.processes PID:BYTES ...  the process list
 *   gpu.I.utilization PID:PERCENT ...
 *   gpu.I.field.ID                 a field of nvmlDeviceGetFieldValues
 *   gpu.I.gpm.ID                   a GPM metric; gpu.I.gpm_error.ID its own return code
 *   gpu.I.xid.SEQUENCE NUMBER      an event, reported once; .xid.SEQUENCE.instance its slice
 *   gpu.I.mig.M.uuid, .instance, .total, .used, .processes, .gpm.ID
 *   gpu.I.fail.FUNCTION CODE       what the function returns for the GPU; FUNCTION * for all
 *   gpu.I.hang.FUNCTION 1          the function does not return while the line is there
 *
 * NVML_CALLS names a file that gets a line for each call: milliseconds, function, GPU.
 * Structs and codes: the ABI of nvml.h.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
  SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, TIMEOUT = 10,
  MAX_GPUS = 16, MAX_SLICES = 8, MAX_LINES = 4096, PLACES = 16384,
};
typedef int ret;
typedef unsigned long long u64;
struct device { int gpu, slice; };
struct line { char key[96], value[160]; };
struct sample { int gpu, instance; double at; };
struct set { char registered[MAX_GPUS]; };

static struct device wholes[MAX_GPUS], slices[MAX_GPUS][MAX_SLICES];
static struct line *lines;
static int places[PLACES];  /* line by hash of its key, plus one */
static double checked_at;
static struct timespec stamp;
static ino_t inode;
static double loaded_at;
static long last_xid[MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

static int *place_of(const char *key) {
  unsigned hash = 2166136261u;
  for (const char *c = key; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
  for (unsigned i = hash % PLACES;; i = (i + 1) % PLACES)
    if (!places[i] || !strcmp(lines[places[i] - 1].key, key)) return &places[i];
}

static void reload(void) {
  struct stat s;
  if (now() - checked_at < 0.01) return;
  checked_at = now();
  const char *path = getenv("NVML_SCENARIO");
  if (!path || stat(path, &s)) return;
  if (lines && s.st_ino == inode && s.st_mtim.tv_sec == stamp.tv_sec &&
      s.st_mtim.tv_nsec == stamp.tv_nsec)
    return;
  FILE *f = fopen(path, "r");
  if (!f) return;
  if (!lines) lines = calloc(MAX_LINES, sizeof *lines);
  char text[512];
  memset(places, 0, sizeof places);
  for (int count = 0; count < MAX_LINES && fgets(text, sizeof text, f);) {
    struct line *l = &lines[count];
    text[strcspn(text, "#\n")] = 0;
    l->value[0] = 0;
    if (sscanf(text, "%95s %159[^\n]", l->key, l->value) < 1) continue;
    *place_of(l->key) = ++count;
  }
  fclose(f);
  inode = s.st_ino;
  stamp = s.st_mtim;
}

/* Copies the value of a key, the last one given; returns whether there is one. */
static int look(const char *key, char *value) {
  pthread_mutex_lock(&lock);
  reload();
  int line = lines ? *place_of(key) : 0;
  if (line) strcpy(value, lines[line - 1].value);
  pthread_mutex_unlock(&lock);
  return line;
}

static int number(const char *key, double *value) {
  char text[160], *rest;
  if (!look(key, text)) return 0;
  *value = strtod(text, &rest);
  if (*rest == '+') {
    double rate = strtod(rest + 1, &rest);
    *value += rate * (now() - (*rest == '@' ? strtod(rest + 1, 0) : loaded_at));
  }
  return 1;
}

static void key_of(char *key, struct device *d, const char *name) {
  if (d->slice < 0) snprintf(key, 96, "gpu.%d.%s", d->gpu, name);
  else snprintf(key, 96, "gpu.%d.mig.%d.%s", d->gpu, d->slice, name);
}

static int of(struct device *d, const char *name, double *value) {
  char key[96];
  key_of(key, d, name);
  return number(key, value);
}

/* Every function passes here: it may be recorded, hang or fail. */
static ret enter(int gpu, const char *function) {
  char key[96];
  double code;
  const char *calls = getenv("NVML_CALLS");
  if (calls) {
    FILE *f = fopen(calls, "a");
    if (f) {
      fprintf(f, "%.0f %s %d\n", now() * 1000, function, gpu);
      fclose(f);
    }
  }
  if (gpu < 0) return SUCCESS;
  snprintf(key, sizeof key, "gpu.%d.hang.%s", gpu, function);
  while (number(key, &code)) usleep(20000);
  snprintf(key, sizeof key, "gpu.%d.fail.%s", gpu, function);
  if (number(key, &code)) return (ret)code;
  snprintf(key, sizeof key, "gpu.%d.fail.*", gpu);
  if (number(key, &code)) return (ret)code;
  return SUCCESS;
}
#define ENTER(gpu) { ret r_ = enter(gpu, __func__ + 4); if (r_) return r_; }

static ret whole_number(struct device *d, const char *name, unsigned *out) {
  double value;
  if (!of(d, name, &value)) return NOT_SUPPORTED;
  *out = (unsigned)value;
  return SUCCESS;
}

static ret text_of(struct device *d, const char *name, char *out, unsigned size) {
  char key[96], value[160];
  key_of(key, d, name);
  if (!look(key, value)) return NOT_SUPPORTED;
  if (strlen(value) >= size) return SMALL;
  strcpy(out, value);
  return SUCCESS;
}

ret nvmlInitWithFlags(unsigned flags) {
  double code = 0;
  (void)flags;
  if (!loaded_at) loaded_at = now();
  for (int i = 0; i < MAX_GPUS; i++) {
    wholes[i] = (struct device){i, -1};
    for (int j = 0; j < MAX_SLICES; j++) slices[i][j] = (struct device){i, j};
  }
  while (number("hang", &code)) usleep(20000);
  return number("init", &code) ? (ret)code : SUCCESS;
}
ret nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(ret code) { return code ? "an error of the scenario" : "Success"; }

ret nvmlSystemGetDriverVersion(char *out, unsigned size) {
  snprintf(out, size, "stub");
  return SUCCESS;
}
ret nvmlDeviceGetCount_v2(unsigned *out) {
  double value = 0;
  number("count", &value);
  *out = (unsigned)value;
  return SUCCESS;
}
ret nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out) {
  double value = 0;
  number("count", &value);
  if (index >= value) return INVALID;
  ENTER((int)index)
  *out = &wholes[index];
  return SUCCESS;
}
ret nvmlDeviceGetUUID(struct device *d, char *out, unsigned size) {
  ENTER(d->gpu)
  return text_of(d, "uuid", out, size);
}
ret nvmlDeviceGetName(struct device *d, char *out, unsigned size) {
  ENTER(d->gpu)
  return text_of(d, "name", out, size);
}

#define SIMPLE(function, name)                                \
  ret nvml##function(struct device *d, unsigned *out) {       \
    ENTER(d->gpu)                                             \
    return whole_number(d, name, out);                        \
  }
SIMPLE(DeviceGetMinorNumber, "minor")
SIMPLE(DeviceGetGpuInstanceId, "instance")
SIMPLE(DeviceGetComputeInstanceId, "compute")
SIMPLE(DeviceGetPowerUsage, "power")
SIMPLE(DeviceGetCurrPcieLinkGeneration, "link.generation")
SIMPLE(DeviceGetCurrPcieLinkWidth, "link.width")
SIMPLE(DeviceGetMaxPcieLinkGeneration, "link.generation_max")
SIMPLE(DeviceGetMaxPcieLinkWidth, "link.width_max")

ret nvmlDeviceGetMigMode(struct device *d, unsigned *current, unsigned *pending) {
  ENTER(d->gpu)
  *pending = 0;
  return whole_number(d, "mig", current);
}
ret nvmlDeviceGetMaxMigDeviceCount(struct device *d, unsigned *out) {
  ENTER(d->gpu)
  *out = MAX_SLICES - 1;
  return SUCCESS;
}
ret nvmlDeviceGetMigDeviceHandleByIndex(struct device *d, unsigned index, struct device **out) {
  char key[96], value[160];
  ENTER(d->gpu)
  if (index >= MAX_SLICES) return INVALID;
  key_of(key, &slices[d->gpu][index], "uuid");
  if (!look(key, value)) return NOT_FOUND;
  *out = &slices[d->gpu][index];
  return SUCCESS;
}

struct memory { u64 total, free, used; };
struct memory2 { unsigned version; u64 total, reserved, free, used; };
ret nvmlDeviceGetMemoryInfo(struct device *d, struct memory *out) {
  double total, used;
  ENTER(d->gpu)
  if (!of(d, "total", &total) || !of(d, "used", &used)) return NOT_SUPPORTED;
  *out = (struct memory){(u64)total, (u64)(total - used), (u64)used};
  return SUCCESS;
}
ret nvmlDeviceGetMemoryInfo_v2(struct device *d, struct memory2 *out) {
  struct memory m;
  ENTER(d->gpu)
  ret code = nvmlDeviceGetMemoryInfo(d, &m);
  if (!code) *out = (struct memory2){out->version, m.total, 0, m.free, m.used};
  return code;
}

ret nvmlDeviceGetTemperature(struct device *d, int sensor, unsigned *out) {
  ENTER(d->gpu)
  return sensor ? INVALID : whole_number(d, "temperature", out);
}
ret nvmlDeviceGetClockInfo(struct device *d, int clock, unsigned *out) {
  ENTER(d->gpu)
  return whole_number(d, clock == 1 ? "clock.sm" : "clock.memory", out);
}
ret nvmlDeviceGetCurrentClocksEventReasons(struct device *d, u64 *out) {
  unsigned value;
  ENTER(d->gpu)
  ret code = whole_number(d, "events", &value);
  *out = value;
  return code;
}
struct rates { unsigned gpu, memory; };
ret nvmlDeviceGetUtilizationRates(struct device *d, struct rates *out) {
  ENTER(d->gpu)
  ret code = whole_number(d, "busy", &out->gpu);
  return code ? code : whole_number(d, "busy.memory", &out->memory);
}
ret nvmlDeviceGetTotalEnergyConsumption(struct device *d, u64 *out) {
  double value;
  ENTER(d->gpu)
  if (!of(d, "energy", &value)) return NOT_SUPPORTED;
  *out = (u64)value;
  return SUCCESS;
}
ret nvmlDeviceGetPcieThroughput(struct device *d, int way, unsigned *out) {
  ENTER(d->gpu)
  usleep(20000);
  return whole_number(d, way ? "pcie.rx" : "pcie.tx", out);
}

struct field { unsigned id, scope; long long at, latency; int type; ret code; union { u64 u; } value; };
ret nvmlDeviceGetFieldValues(struct device *d, int count, struct field *fields) {
  char name[32];
  double value;
  ENTER(d->gpu)
  for (int i = 0; i < count; i++) {
    snprintf(name, sizeof name, "field.%u", fields[i].id);
    fields[i].code = of(d, name, &value) ? SUCCESS : NOT_SUPPORTED;
    fields[i].type = 3;
    fields[i].value.u = fields[i].code ? 0 : (u64)value;
  }
  return SUCCESS;
}

struct process { unsigned pid; u64 memory; unsigned instance, compute; };
struct process32 { unsigned pid; u64 memory; unsigned instance, compute; u64 protected; };
ret nvmlDeviceGetComputeRunningProcesses_v3(struct device *d, unsigned *count, void *out) {
  char key[96], text[160], *word, *rest;
  double layout = 24;
  unsigned found = 0, room = *count;
  ENTER(d->gpu)
  number("layout", &layout);
  key_of(key, d, "processes");
  if (!look(key, text)) text[0] = 0;
  for (word = strtok_r(text, " ", &rest); word; word = strtok_r(0, " ", &rest), found++) {
    unsigned pid;
    u64 memory = 0;
    sscanf(word, "%u:%llu", &pid, &memory);
    if (found >= room || !out) continue;
    if (layout == 32)
      ((struct process32 *)out)[found] = (struct process32){pid, memory, ~0u, ~0u, 0};
    else
      ((struct process *)out)[found] =
          (struct process){pid, memory, d->slice < 0 ? ~0u : (unsigned)d->slice, ~0u};
  }
  *count = found;
  return found > room || (found && !out) ? SMALL : SUCCESS;
}

struct usage { unsigned pid; u64 at; unsigned sm, memory, encoder, decoder; };
ret nvmlDeviceGetProcessUtilization(struct device *d, struct usage *out, unsigned *count, u64 since) {
  char key[96], text[160], *word, *rest;
  unsigned found = 0;
  (void)since;
  ENTER(d->gpu)
  key_of(key, d, "utilization");
  if (!look(key, text)) return NOT_FOUND;
  for (word = strtok_r(text, " ", &rest); word; word = strtok_r(0, " ", &rest), found++)
    if (out && found < *count) {
      struct usage u = {.at = (u64)(now() * 1e6)};
      sscanf(word, "%u:%u", &u.pid, &u.sm);
      out[found] = u;
    }
  *count = found;
  return out ? SUCCESS : SMALL;
}

struct support { unsigned version, supported; };
ret nvmlGpmQueryDeviceSupport(struct device *d, struct support *out) {
  double value = 0;
  ENTER(d->gpu)
  of(d, "gpm", &value);
  out->supported = value != 0;
  return SUCCESS;
}
ret nvmlGpmSampleAlloc(struct sample **out) {
  *out = calloc(1, sizeof **out);
  return SUCCESS;
}
ret nvmlGpmSampleFree(struct sample *s) {
  free(s);
  return SUCCESS;
}
ret nvmlGpmSampleGet(struct device *d, struct sample *s) {
  ENTER(d->gpu)
  *s = (struct sample){d->gpu, -1, now()};
  return SUCCESS;
}
ret nvmlGpmMigSampleGet(struct device *d, unsigned instance, struct sample *s) {
  ENTER(d->gpu)
  *s = (struct sample){d->gpu, (int)instance, now()};
  return SUCCESS;
}
struct metric { unsigned id; ret code; double value; const char *names[3]; };
struct query { unsigned version, count; struct sample *first, *second; struct metric metrics[]; };
ret nvmlGpmMetricsGet(struct query *q) {
  char name[32];
  double code;
  struct sample *a = q->first, *b = q->second;
  if (q->version != 1 || a->gpu != b->gpu || a->instance != b->instance) return INVALID;
  if (b->at - a->at < 0.1) return INVALID;
  ENTER(a->gpu)
  struct device *d = &wholes[a->gpu];
  for (int i = 0; a->instance >= 0 && i < MAX_SLICES; i++) {
    double instance;
    if (of(&slices[a->gpu][i], "instance", &instance) && instance == a->instance)
      d = &slices[a->gpu][i];
  }
  for (unsigned i = 0; i < q->count; i++) {
    struct metric *m = &q->metrics[i];
    snprintf(name, sizeof name, "gpm.%u", m->id);
    m->code = of(d, name, &m->value) ? SUCCESS : NOT_SUPPORTED;
    snprintf(name, sizeof name, "gpm_error.%u", m->id);
    if (of(d, name, &code)) m->code = (ret)code;
  }
  return SUCCESS;
}

ret nvmlDeviceGetSupportedEventTypes(struct device *d, u64 *out) {
  ENTER(d->gpu)
  *out = 8;
  return SUCCESS;
}
ret nvmlEventSetCreate(struct set **out) {
  *out = calloc(1, sizeof **out);
  return SUCCESS;
}
ret nvmlEventSetFree(struct set *s) {
  free(s);
  return SUCCESS;
}
ret nvmlDeviceRegisterEvents(struct device *d, u64 types, struct set *s) {
  ENTER(d->gpu)
  if (types != 8) return INVALID;
  s->registered[d->gpu] = 1;
  return SUCCESS;
}
struct event { struct device *device; u64 type, data; unsigned instance, compute; };
ret nvmlEventSetWait_v2(struct set *s, struct event *out, unsigned milliseconds) {
  double end = now() + milliseconds / 1000.0, value;
  char name[64];
  do {
    for (int i = 0; i < MAX_GPUS; i++) {
      snprintf(name, sizeof name, "xid.%ld", last_xid[i]);
      if (!s->registered[i] || !of(&wholes[i], name, &value)) continue;
      last_xid[i]++;
      double instance;
      snprintf(name, sizeof name, "xid.%ld.instance", last_xid[i] - 1);
      unsigned of_slice = of(&wholes[i], name, &instance) ? (unsigned)instance : ~0u;
      *out = (struct event){&wholes[i], 8, (u64)value, of_slice, ~0u};
      return SUCCESS;
    }
    usleep(20000);
  } while (now() < end);
  return TIMEOUT;
}
