/* A stand-in for libcuda.so.1: device memory is host memory, and a handle begins with the address of its allocation.
   Every function checks its arguments as the driver does, so that a wrong call from ctypes fails. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char reserved[64]; } handle_t;
typedef struct { char magic[8]; uint64_t address; uint64_t size; } content_t;

static int initialized, opened, context_storage;
static void *current;

static int ready(void) { return initialized && current == &context_storage; }

int cuInit(unsigned flags) { initialized = 1; return flags == 0 ? 0 : 1; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return ordinal == 0 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &context_storage; return device == 40 ? 0 : 101; }
int cuCtxSetCurrent(void *context) { current = context; return context == &context_storage ? 0 : 201; }

int cuIpcOpenMemHandle_v2(uint64_t *address, handle_t handle, unsigned flags) {
    content_t content;
    memcpy(&content, handle.reserved, sizeof content);
    if (!ready() || flags != 1 || memcmp(content.magic, "fakecuda", 8)) return 400;
    *address = content.address;
    opened++;
    return 0;
}

static uint64_t size_of_allocation(uint64_t address) { return ((uint64_t *)address)[-1]; }

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    *base = address;
    *size = size_of_allocation(address);
    return ready() ? 0 : 201;
}
int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size) { memcpy(target, (void *)source, size); return ready() ? 0 : 201; }
int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size) { memcpy((void *)target, source, size); return ready() ? 0 : 201; }
int cuIpcCloseMemHandle(uint64_t address) { opened--; return ready() && address ? 0 : 201; }
int cuGetErrorName(int status, const char **name) { *name = status == 400 ? "CUDA_ERROR_INVALID_HANDLE" : "CUDA_ERROR_UNKNOWN"; return 0; }

/* For the test: an allocation with its size before it, and the number of open handles. */
uint64_t allocate(uint64_t size) {
    uint64_t *memory = calloc(1, size + 8);
    memory[0] = size;
    return (uint64_t)(memory + 1);
}
int num_open(void) { return opened; }
