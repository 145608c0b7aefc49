// Devices, streams and events. Work is complete when it is launched, so that nothing ever waits.

#include "state.h"

#include <dlfcn.h>
#include <time.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace null_cuda;

namespace {

thread_local int current_device = 0;
std::atomic<uintptr_t> last_handle{0x1000};

struct Event {
  double milliseconds;
};

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

void* new_handle() { return reinterpret_cast<void*>(last_handle += 16); }

const int kSharedPerBlock = 49152, kSharedPerBlockOptIn = 232448, kSharedPerProcessor = 233472;

}  // namespace

namespace null_cuda {

int num_devices() {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible != nullptr && *visible == 0) return 0;
  return static_cast<int>(number_from_environment("NULLCUDA_DEVICES", 1));
}

int current_device_number() { return current_device; }

// Those of an H100. The names of the runtime and of the driver have the same numbers.
int device_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: return 1024;
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: return 65535;
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return kSharedPerBlock;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return kSharedPerProcessor;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return kSharedPerBlockOptIn;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    default: return 1;  // a feature that the device has
  }
}

}  // namespace null_cuda

API cudaError_t cudaGetDeviceCount(int* out) {
  *out = num_devices();
  return *out > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int* out) {
  *out = current_device;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* out) {
  *out = 13000;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* out) {
  *out = 13000;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  memset(out, 0, sizeof *out);
  const char* name = getenv("NULLCUDA_NAME");
  snprintf(out->name, sizeof out->name, "%s", name ? name : "NVIDIA H100 80GB HBM3 (null runtime)");
  const auto of = device_attribute;
  out->totalGlobalMem = device_bytes();
  out->sharedMemPerBlock = kSharedPerBlock;
  out->sharedMemPerBlockOptin = kSharedPerBlockOptIn;
  out->sharedMemPerMultiprocessor = kSharedPerProcessor;
  out->reservedSharedMemPerBlock = of(cudaDevAttrReservedSharedMemoryPerBlock);
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->warpSize = 32;
  out->memPitch = 2147483647;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxBlocksPerMultiProcessor = 32;
  for (int i = 0; i < 3; i++) {
    out->maxThreadsDim[i] = of(cudaDevAttrMaxBlockDimX + i);
    out->maxGridSize[i] = of(cudaDevAttrMaxGridDimX + i);
  }
  out->totalConstMem = 65536;
  out->major = 9;
  out->minor = 0;
  out->textureAlignment = 512;
  out->multiProcessorCount = 132;
  out->canMapHostMemory = out->concurrentKernels = out->unifiedAddressing = 1;
  out->managedMemory = out->cooperativeLaunch = out->memoryPoolsSupported = 1;
  out->streamPrioritiesSupported = 1;
  out->asyncEngineCount = 3;
  out->memoryBusWidth = 5120;
  out->l2CacheSize = 50 << 20;
  out->pciBusID = 1 + device;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int) {
  *out = device_attribute(attribute);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
  snprintf(out, size, "0000:%02x:00.0", 1 + device);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) {
  *out = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

API cudaError_t cudaDeviceSynchronize() {
  count_sync("cudaDeviceSynchronize");
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
  *out = static_cast<cudaStream_t>(new_handle());
  return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t* out) {
  return cudaStreamCreateWithPriority(out, 0, 0);
}

API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

API cudaError_t cudaStreamGetPriority(cudaStream_t, int* out) {
  *out = 0;
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }

API cudaError_t cudaStreamSynchronize(cudaStream_t) {
  count_sync("cudaStreamSynchronize");
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

// PyTorch asks before it waits or allocates. Nothing here captures.

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
  *out = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* out,
                                         unsigned long long* id, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                         size_t*) {
  *out = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                      void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = reinterpret_cast<cudaEvent_t>(new Event{0});
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  reinterpret_cast<Event*>(event)->milliseconds = now();
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

API cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }

API cudaError_t cudaEventSynchronize(cudaEvent_t) {
  count_sync("cudaEventSynchronize");
  return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t start, cudaEvent_t end) {
  const auto at = [](cudaEvent_t event) { return reinterpret_cast<Event*>(event)->milliseconds; };
  *out = std::max(1e-3, at(end) - at(start));
  return cudaSuccess;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (*out == nullptr) count(std::string("stub missing ") + name);
  if (result != nullptr)
    *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// The driver, for Triton.

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

API CUresult cuDriverGetVersion(int* out) {
  *out = 13000;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* out, int index) {
  *out = index;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int* out) {
  *out = num_devices();
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute attribute, CUdevice) {
  *out = device_attribute(attribute);
  return CUDA_SUCCESS;
}

static CUcontext the_context() { return reinterpret_cast<CUcontext>(0x1000); }

API CUresult cuCtxGetCurrent(CUcontext* out) {
  *out = the_context();
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

API CUresult cuCtxGetDevice(CUdevice* out) {
  *out = current_device;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetLimit(size_t* out, CUlimit) {
  *out = 1 << 20;
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

API CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) {
  *out = the_context();
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  if (flags != nullptr) *flags = 0;
  if (is_active != nullptr) *is_active = 1;
  return CUDA_SUCCESS;
}
