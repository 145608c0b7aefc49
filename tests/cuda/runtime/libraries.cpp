// cuBLAS, cuDNN, and driver functions that PyTorch looks up by name but can do without. The headers
// of these libraries are not needed: C symbols have no types.

#include <cudnn_version.h>  // PyTorch refuses another version than it was built with

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

// As state.h declares them, whose headers are not included here.
namespace null_cuda {
void count_launch(const std::string& kernel);
size_t number_from_environment(const char* name, size_t otherwise);
}  // namespace null_cuda

namespace {

// A handle is zeros.
int make_handle(void** out) {
  *out = calloc(1, 64);
  return 0;
}

int free_handle(void* handle) {
  free(handle);
  return 0;
}

int launch(const char* name) {
  null_cuda::count_launch(name);
  return 0;
}

}  // namespace

// cuBLAS

API int cublasCreate_v2(void** out) { return make_handle(out); }
API int cublasDestroy_v2(void* handle) { return free_handle(handle); }
API int cublasGetMathMode(void*, int* out) { return *out = 0; }
API int cublasGetPointerMode_v2(void*, int* out) { return *out = 0; }
API int cublasSetMathMode(void*, int) { return 0; }
API int cublasSetPointerMode_v2(void*, int) { return 0; }
API int cublasSetStream_v2(void*, void*) { return 0; }
API int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
API int cublasGemmEx(void*) { return launch("cublasGemmEx"); }
API int cublasGemmStridedBatchedEx(void*) { return launch("cublasGemmStridedBatchedEx"); }
API int cublasSgemm_v2(void*) { return launch("cublasSgemm"); }
API int cublasSgemmStridedBatched(void*) { return launch("cublasSgemmStridedBatched"); }

API size_t cublasLtGetVersion() { return 130100; }
API int cublasLtMatmulDescCreate(void** out, int, int) { return make_handle(out); }
API int cublasLtMatmulDescDestroy(void* handle) { return free_handle(handle); }
API int cublasLtMatmulPreferenceCreate(void** out) { return make_handle(out); }
API int cublasLtMatmulPreferenceDestroy(void* handle) { return free_handle(handle); }
API int cublasLtMatrixLayoutCreate(void** out, int, uint64_t, uint64_t, int64_t) {
  return make_handle(out);
}
API int cublasLtMatrixLayoutDestroy(void* handle) { return free_handle(handle); }

API int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                       void*, void*, void*, size_t, void*) {
  return launch("cublasLtMatmul");
}

API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                       void* result, int* num_results) {
  memset(result, 0, 96);  // one cublasLtMatmulHeuristicResult_t, without a workspace
  *num_results = 1;
  return 0;
}

// cuDNN, with as much of its graph API as attention of cudnn-frontend needs

namespace {

// cudnnBackendAttributeName_t and cudnnBackendAttributeType_t
enum { kHeuristicResults = 302, kWorkspaceSize = 402, kNumericalNotes = 1303, kBehaviorNotes = 1305 };
enum { kInt64 = 3, kInt32 = 23 };

}  // namespace

API int cudnnCreate(void** out) { return make_handle(out); }
API int cudnnSetStream(void*, void*) { return 0; }
API size_t cudnnGetVersion() { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char* cudnnGetErrorString(int) { return "error of the null cuDNN"; }

API int cudnnGetProperty(int part, int* out) {
  const int version[] = {CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL};
  *out = part >= 0 && part < 3 ? version[part] : 0;
  return 0;
}

API int cudnnBackendCreateDescriptor(int type, void** out) {
  make_handle(out);
  *static_cast<int64_t*>(*out) = type;
  return 0;
}

// cudnn-frontend keeps some descriptors beyond this call.
API int cudnnBackendDestroyDescriptor(void*) { return 0; }
API int cudnnBackendSetAttribute(void*, int, int, int64_t, const void*) { return 0; }
API int cudnnBackendFinalize(void*) { return 0; }

API int cudnnBackendGetAttribute(void*, int name, int type, int64_t wanted, int64_t* given,
                                 void* out) {
  const bool is_empty = name == kHeuristicResults || name == kNumericalNotes || name == kBehaviorNotes;
  if (given != nullptr) *given = is_empty ? 0 : 1;
  if (out == nullptr || wanted == 0) return 0;
  // The backward pass at 17,776 tokens asks for about 222,000,000 bytes.
  const size_t workspace = null_cuda::number_from_environment("NULLCUDA_CUDNN_WORKSPACE", 0);
  if (type == kInt64) *static_cast<int64_t*>(out) = name == kWorkspaceSize ? workspace : 0;
  if (type == kInt32) *static_cast<int32_t*>(out) = 0;
  return 0;
}

API int cudnnBackendExecute(void*) { return launch("cudnnBackendExecute"); }

// NVML, which PyTorch asks for before it maps an expandable segment

API int nvmlInit_v2() { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** out) { return make_handle(out); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned, void** out) { return make_handle(out); }

API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* num_processes, void*) {
  return *num_processes = 0;
}

// The caller has set the state to NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, which is right.
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }

// Features that the null device does not have

#define NOT_SUPPORTED_BY_NVML(name) \
  API int name() { return 3; }  // NVML_ERROR_NOT_SUPPORTED

NOT_SUPPORTED_BY_NVML(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED_BY_NVML(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED_BY_NVML(nvmlSystemGetCudaDriverVersion_v2)

#define NOT_SUPPORTED(name) \
  API int name() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED

NOT_SUPPORTED(cuCtxFromGreenCtx)
NOT_SUPPORTED(cuCtxPopCurrent)
NOT_SUPPORTED(cuCtxPopCurrent_v2)
NOT_SUPPORTED(cuCtxPushCurrent)
NOT_SUPPORTED(cuDevResourceGenerateDesc)
NOT_SUPPORTED(cuDevSmResourceSplitByCount)
NOT_SUPPORTED(cuDeviceGetDevResource)
NOT_SUPPORTED(cuGreenCtxCreate)
NOT_SUPPORTED(cuGreenCtxDestroy)
NOT_SUPPORTED(cuGreenCtxStreamCreate)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuMemExportToShareableHandle)
NOT_SUPPORTED(cuMemGetAllocationPropertiesFromHandle)
NOT_SUPPORTED(cuMemImportFromShareableHandle)
NOT_SUPPORTED(cuMemRetainAllocationHandle)
NOT_SUPPORTED(cuMemsetD32Async)
NOT_SUPPORTED(cuMulticastAddDevice)
NOT_SUPPORTED(cuMulticastBindMem)
NOT_SUPPORTED(cuMulticastCreate)
NOT_SUPPORTED(cuMulticastGetGranularity)
NOT_SUPPORTED(cuMulticastUnbind)
NOT_SUPPORTED(cuStreamGetCtx)
NOT_SUPPORTED(cuStreamWriteValue32)
