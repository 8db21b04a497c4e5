/* A libnvidia-ml.so.1 that shows what a text file says, read anew at each call, so that tests can change it:

     init 0                    result of nvmlInit
     gpu UUID BUS NAME TOTAL FREE RESULT PID:BYTES,...
*/
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, TOO_SMALL = 7, MOST = 8, PIDS = 16 };

typedef struct {
  char uuid[80], bus[32], name[64];
  unsigned long long total, free;
  int result, pids;
  unsigned pid[PIDS];
  unsigned long long used[PIDS];
} Gpu;

static Gpu gpus[MOST];
static int count, init_result;

static void look(void) {
  char line[1024], list[512];
  FILE *file = fopen(getenv("FAKE_NVML"), "r");
  count = 0, init_result = 9;
  if (!file) return;
  while (fgets(line, sizeof line, file)) {
    Gpu *g = &gpus[count];
    if (sscanf(line, "init %d", &init_result) == 1) continue;
    if (count == MOST || sscanf(line, "gpu %79s %31s %63s %llu %llu %d %511s", g->uuid, g->bus, g->name,
                                &g->total, &g->free, &g->result, list) != 7) continue;
    g->pids = 0;
    for (char *part = strtok(list, ","); part && g->pids < PIDS; part = strtok(NULL, ","))
      if (sscanf(part, "%u:%llu", &g->pid[g->pids], &g->used[g->pids]) == 2) g->pids++;
    count++;
  }
  fclose(file);
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; look(); return init_result; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *found) { look(); *found = count; return init_result; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  look();
  if (index >= (unsigned)count) return INVALID;
  *handle = &gpus[index];
  return OK;
}

int nvmlDeviceGetUUID(Gpu *g, char *text, unsigned length) { snprintf(text, length, "%s", g->uuid); return OK; }
int nvmlDeviceGetName(Gpu *g, char *text, unsigned length) { snprintf(text, length, "%s", g->name); return OK; }

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(Gpu *g, Pci *pci) {
  memset(pci, 0, sizeof *pci);
  snprintf(pci->text, sizeof pci->text, "%s", g->bus);
  return OK;
}

typedef struct { unsigned long long total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Gpu *g, Memory *memory) {
  memory->total = g->total, memory->free = g->free, memory->used = g->total - g->free;
  return g->result;
}

typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *g, unsigned *room, Process *found) {
  unsigned had = *room;
  *room = g->pids;
  if (had < (unsigned)g->pids) return TOO_SMALL;
  for (int i = 0; i < g->pids; i++) found[i] = (Process){g->pid[i], g->used[i], 0xFFFFFFFFu, 0xFFFFFFFFu};
  return OK;
}
