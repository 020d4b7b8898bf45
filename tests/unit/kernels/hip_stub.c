/* Stands in for libamdhip64: it writes down what it is asked, and fails where STUB_FAILS names the call. With HIP's own header the compiler
   compares the declarations. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef WITH_HIP_HEADER
#include <hip/hip_runtime_api.h>
#else
typedef int hipError_t;
typedef void *hipModule_t, *hipFunction_t, *hipStream_t;
typedef struct { char reserved[64]; } hipIpcMemHandle_t;
typedef int hipMemcpyKind;
#endif

static hipError_t answer(const char* call) {
  const char* fails = getenv("STUB_FAILS");
  return (hipError_t)(fails != NULL && strcmp(fails, call) == 0 ? 98 : 0);
}
static FILE* log_file(void) {
  FILE* file = fopen(getenv("STUB_LOG"), "a");
  return file != NULL ? file : stderr;
}
#define LOG(...)                    \
  do {                              \
    FILE* file = log_file();        \
    fprintf(file, __VA_ARGS__);     \
    if (file != stderr) fclose(file); \
  } while (0)

hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  LOG("load %.4s\n", (const char*)image + 1);
  *module = (hipModule_t)0x1000;
  return answer("hipModuleLoadData");
}
hipError_t hipModuleUnload(hipModule_t module) {
  LOG("unload %p\n", (void*)module);
  return answer("hipModuleUnload");
}
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  LOG("function %s of %p\n", name, (void*)module);
  *function = (hipFunction_t)0x2000;
  return answer("hipModuleGetFunction");
}
#ifndef STUB_IS_OLD
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
                                 unsigned int block_y, unsigned int block_z, unsigned int shared, hipStream_t stream, void** params, void** extra) {
  LOG("launch %p %u %u %u %u %u %u %u stream %p params %.5s extra %p\n", (void*)function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared,
      (void*)stream, (const char*)params[0], (void*)extra);
  return answer("hipModuleLaunchKernel");
}
#endif
hipError_t hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* count, hipFunction_t function, int threads, size_t shared) {
  LOG("occupancy %p %d %zu\n", (void*)function, threads, shared);
  *count = 3;
  return answer("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor");
}
hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned int flags) {
  LOG("host malloc %zu flags %#x\n", bytes, flags);
  *pointer = malloc(bytes);
  memset(*pointer, 0xff, bytes);
  return answer("hipHostMalloc");
}
hipError_t hipHostGetDevicePointer(void** device, void* host, unsigned int flags) {
  const char* elsewhere = getenv("STUB_ELSEWHERE");
  *device = (char*)host + (elsewhere != NULL ? 64 : 0);
  return answer("hipHostGetDevicePointer");
}
hipError_t hipHostFree(void* pointer) {
  LOG("host free\n");
  free(pointer);
  return answer("hipHostFree");
}
hipError_t hipExtMallocWithFlags(void** pointer, size_t bytes, unsigned int flags) {
  LOG("malloc %zu flags %#x\n", bytes, flags);
  *pointer = malloc(bytes);
  return answer("hipExtMallocWithFlags");
}
hipError_t hipFree(void* pointer) {
  LOG("free\n");
  free(pointer);
  return answer("hipFree");
}
hipError_t hipMemset(void* pointer, int value, size_t bytes) {
  memset(pointer, value, bytes);
  return answer("hipMemset");
}
hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind kind) {
  LOG("copy %zu kind %d\n", bytes, (int)kind);
  memcpy(to, from, bytes);
  return answer("hipMemcpy");
}
/* A handle is the address itself: it is mapped where it is. */
hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* pointer) {
  memset(handle, 0, sizeof(*handle));
  memcpy(handle, &pointer, sizeof(pointer));
  return answer("hipIpcGetMemHandle");
}
hipError_t hipIpcOpenMemHandle(void** pointer, hipIpcMemHandle_t handle, unsigned int flags) {
  LOG("map flags %#x\n", flags);
  memcpy(pointer, &handle, sizeof(*pointer));
  return answer("hipIpcOpenMemHandle");
}
hipError_t hipIpcCloseMemHandle(void* pointer) {
  LOG("unmap\n");
  return answer("hipIpcCloseMemHandle");
}
const char* hipGetErrorName(hipError_t error) { return error == (hipError_t)98 ? "hipErrorInvalidDeviceFunction" : "hipErrorUnknown"; }
const char* hipGetErrorString(hipError_t error) { return error == (hipError_t)98 ? "invalid device function" : "unknown error"; }
