// A libcuda that has STUB_GPUS GPUs, of which the first STUB_OFFERED offer multicast, and writes down its calls. Built with -DOLD it does not know the
// attribute; with -DBROKEN it refuses the question.
#include <stdio.h>
#include <stdlib.h>

static void say(const char* text, int a, int b) {
  FILE* log = fopen(getenv("STUB_LOG"), "a");
  fprintf(log, "%s %d %d\n", text, a, b);
  fclose(log);
}
static int number(const char* name) { return atoi(getenv(name)); }

int cuInit(unsigned flags) {
  say("cuInit", (int)flags, 0);
  return number("STUB_GPUS") == 0 ? 100 : 0;  // CUDA_ERROR_NO_DEVICE
}
int cuDeviceGetCount(int* count) {
  *count = number("STUB_GPUS");
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = 40 + ordinal;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  say("cuDeviceGetAttribute", attribute, device);
#if defined(OLD)
  return 1;  // CUDA_ERROR_INVALID_VALUE
#elif defined(BROKEN)
  return 201;
#else
  *value = device - 40 < number("STUB_OFFERED");
  return 0;
#endif
}
int cuMulticastCreate(void* handle, const void* properties) {
  say("cuMulticastCreate", 0, 0);
  return 0;
}
