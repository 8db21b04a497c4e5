/* A libnvidia-ml.so.1 that shows what a text file says, read anew at each call, so that tests can change it:

     init 0                    result of nvmlInit
     gpu UUID BUS NAME TOTAL FREE RESULT PID:BYTES,...    PID:BYTES/ for a process that draws
     mig UUID BUS NAME TOTAL FREE RESULT PID:BYTES,...    a part of the GPU before it

   Files `UUID,PID` with a number of bytes in the folder FAKE_NVML_USAGE add what living processes use, and dead
   ones for FAKE_NVML_LAG milliseconds more, as a driver may. Each call is noted in the file FAKE_NVML_CALLS.
*/
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, MISSING = 6, TOO_SMALL = 7, MOST = 16, PIDS = 64 };

typedef struct {
  char uuid[80], bus[32], name[64];
  unsigned long long total, free;
  int result, pids, parent;
  unsigned pid[PIDS];
  char draws[PIDS];
  unsigned long long used[PIDS];
} Gpu;

static Gpu gpus[MOST];
static int count, init_result;

static void note(const char *call) {
  const char *path = getenv("FAKE_NVML_CALLS");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s\n", call);
  fclose(file);
}

static int later(struct stat *one, struct stat *other) {
  return one->st_mtim.tv_sec != other->st_mtim.tv_sec ? one->st_mtim.tv_sec > other->st_mtim.tv_sec
                                                      : one->st_mtim.tv_nsec > other->st_mtim.tv_nsec;
}

/* Whether the process that wrote `usage` lives. Who was once seen dead (a file `dead,PID`) is, whoever has its
   number by now. */
static int lives(const char *usage, const char *dead, unsigned pid) {
  struct stat written, seen;
  return !kill(pid, 0) && (stat(dead, &seen) || stat(usage, &written) || later(&written, &seen));
}

/* Whether bytes of a dead process still count: it was first seen so a short while ago. */
static int lingers(const char *usage, const char *dead) {
  const char *lag = getenv("FAKE_NVML_LAG");
  struct stat written, seen;
  struct timespec now;
  if (stat(dead, &seen) || (!stat(usage, &written) && later(&written, &seen))) {
    FILE *file = fopen(dead, "w");
    if (file) fclose(file);
    return lag != NULL;
  }
  clock_gettime(CLOCK_REALTIME, &now);
  return lag && (now.tv_sec - seen.st_mtim.tv_sec) * 1000 + (now.tv_nsec - seen.st_mtim.tv_nsec) / 1000000 < atoi(lag);
}

static void add_usage(void) {
  const char *folder = getenv("FAKE_NVML_USAGE");
  DIR *dir = folder ? opendir(folder) : NULL;
  if (!dir) return;
  for (struct dirent *entry; (entry = readdir(dir));) {
    char uuid[80], path[512], dead[512];
    unsigned pid;
    unsigned long long bytes;
    if (sscanf(entry->d_name, "%79[^,],%u", uuid, &pid) != 2 || !strcmp(uuid, "dead")) continue;
    snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    snprintf(dead, sizeof dead, "%s/dead,%u", folder, pid);
    int alive = lives(path, dead, pid);
    if (!alive && !lingers(path, dead)) continue;
    FILE *file = fopen(path, "r");
    if (!file) continue;
    if (fscanf(file, "%llu", &bytes) == 1)
      for (Gpu *g = gpus; g < gpus + count; g++)
        if (!strcmp(g->uuid, uuid) && g->pids < PIDS) {
          if (alive) g->draws[g->pids] = 0, g->pid[g->pids] = pid, g->used[g->pids++] = bytes;
          g->free = g->free > bytes ? g->free - bytes : 0;
        }
    fclose(file);
  }
  closedir(dir);
}

static void look(void) {
  char line[1024], list[512], kind[8];
  FILE *file = fopen(getenv("FAKE_NVML"), "r");
  int parent = -1;
  count = 0, init_result = 9;
  if (!file) return;
  while (fgets(line, sizeof line, file)) {
    Gpu *g = &gpus[count];
    if (sscanf(line, "init %d", &init_result) == 1) continue;
    if (count == MOST || sscanf(line, "%7s %79s %31s %63s %llu %llu %d %511s", kind, g->uuid, g->bus, g->name,
                                &g->total, &g->free, &g->result, list) != 8) continue;
    g->pids = 0;
    for (char *part = strtok(list, ","); part && g->pids < PIDS; part = strtok(NULL, ",")) {
      g->draws[g->pids] = strchr(part, '/') != NULL;
      if (sscanf(part, "%u:%llu", &g->pid[g->pids], &g->used[g->pids]) == 2) g->pids++;
    }
    if (strcmp(kind, "mig")) parent = count, g->parent = -1;
    else g->parent = parent;
    count++;
  }
  fclose(file);
  add_usage();
}

/* The index-th GPU, or the index-th part of one; NULL if there is none such. */
static Gpu *nth(int parent, unsigned index) {
  for (Gpu *g = gpus; g < gpus + count; g++)
    if (g->parent == parent && index-- == 0) return g;
  return NULL;
}

static unsigned how_many(int parent) {
  unsigned found = 0;
  while (nth(parent, found)) found++;
  return found;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; note("nvmlInit"); look(); return init_result; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { note("nvmlShutdown"); return OK; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *found) { note("nvmlDeviceGetCount"); look(); *found = how_many(-1); return init_result; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  note("nvmlDeviceGetHandleByIndex");
  look();
  *handle = nth(-1, index);
  return *handle ? OK : INVALID;
}

int nvmlDeviceGetMigMode(Gpu *g, unsigned *now, unsigned *pending) {
  note("nvmlDeviceGetMigMode");
  *now = *pending = how_many(g - gpus) > 0;
  return g->parent < 0 ? OK : INVALID;
}
int nvmlDeviceGetMaxMigDeviceCount(Gpu *g, unsigned *most) { (void)g; note("nvmlDeviceGetMaxMigDeviceCount"); *most = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *g, unsigned index, void **handle) {
  note("nvmlDeviceGetMigDeviceHandleByIndex");
  *handle = nth(g - gpus, index);
  return *handle ? OK : MISSING;
}

int nvmlDeviceGetUUID(Gpu *g, char *text, unsigned length) { note("nvmlDeviceGetUUID"); snprintf(text, length, "%s", g->uuid); return OK; }
int nvmlDeviceGetName(Gpu *g, char *text, unsigned length) { note("nvmlDeviceGetName"); snprintf(text, length, "%s", g->name); return OK; }

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(Gpu *g, Pci *pci) {
  note("nvmlDeviceGetPciInfo");
  memset(pci, 0, sizeof *pci);
  snprintf(pci->text, sizeof pci->text, "%s", g->bus);
  return OK;
}

typedef struct { unsigned long long total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Gpu *g, Memory *memory) {
  note("nvmlDeviceGetMemoryInfo");
  memory->total = g->total, memory->free = g->free, memory->used = g->total - g->free;
  return g->result;
}

typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } Process;
static int processes(Gpu *g, int draws, unsigned *room, Process *found) {
  unsigned had = *room;
  *room = 0;
  for (int i = 0; i < g->pids; i++) *room += g->draws[i] == draws;
  if (had < *room) return TOO_SMALL;
  for (int i = 0; i < g->pids; i++)
    if (g->draws[i] == draws) *found++ = (Process){g->pid[i], g->used[i], 0xFFFFFFFFu, 0xFFFFFFFFu};
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *g, unsigned *room, Process *found) {
  note("nvmlDeviceGetComputeRunningProcesses");
  return processes(g, 0, room, found);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *g, unsigned *room, Process *found) {
  note("nvmlDeviceGetGraphicsRunningProcesses");
  return processes(g, 1, room, found);
}
