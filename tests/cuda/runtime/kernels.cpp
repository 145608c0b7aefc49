// Kernels are registered, checked and counted, but do not run.

#include "state.h"

#include <unordered_map>
#include <vector>

using namespace null_cuda;

namespace {

// More dynamic shared memory than this must be asked for with an attribute of the function.
const size_t kSharedByDefault = 49152, kMostShared = 232448;
const unsigned kMostThreads = 1024, kMostBlockDepth = 64, kMostGrid = 65535, kMostGridX = 2147483647;

// Kernels of compiled libraries. Libraries register them before this file's own constructors run.
std::unordered_map<const void*, std::string>& names() {
  static auto& map = *new std::unordered_map<const void*, std::string>;
  return map;
}

// The shared memory that a function has asked for
auto& shared_allowed = *new std::unordered_map<const void*, size_t>;

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};

thread_local std::vector<Configuration> pushed;

struct DriverFunction {
  std::string name;
};

std::string text_of(dim3 size) {
  return std::to_string(size.x) + "x" + std::to_string(size.y) + "x" + std::to_string(size.z);
}

// Count a launch. One that a device would refuse is a fault.
cudaError_t launch(const std::string& name, const void* function, dim3 grid, dim3 block, size_t shared,
            cudaStream_t stream) {
  Lock lock(mutex);
  count_launch(name);
  const auto asked = shared_allowed.find(function);
  const size_t allowed = asked == shared_allowed.end() ? kSharedByDefault : asked->second;
  const size_t threads = static_cast<size_t>(block.x) * block.y * block.z;
  const bool is_grid_well = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= kMostGridX &&
                            grid.y <= kMostGrid && grid.z <= kMostGrid;
  const bool is_block_well = threads > 0 && threads <= kMostThreads && block.z <= kMostBlockDepth;
  if (is_grid_well && is_block_well && shared <= std::min(allowed, kMostShared))
    return cudaSuccess;
  count_fault("launch of " + name + ": grid " + text_of(grid) + ", block " + text_of(block) + ", " +
              std::to_string(shared) + " bytes of shared memory");
  return cudaErrorInvalidConfiguration;
}

cudaError_t launch_runtime(const void* function, dim3 grid, dim3 block, size_t shared,
                           cudaStream_t stream) {
  std::string name = "unknown kernel";
  {
    Lock lock(mutex);
    const auto found = names().find(function);
    if (found != names().end()) name = found->second;
  }
  const cudaError_t error = launch(name, function, grid, block, shared, stream);
  return error == cudaSuccess ? error : fail(error);
}

CUresult launch_driver(CUfunction function, dim3 grid, dim3 block, size_t shared, CUstream stream) {
  const std::string& name = reinterpret_cast<DriverFunction*>(function)->name;
  const cudaError_t error = launch("triton " + name, function, grid, block, shared, stream);
  if (error == cudaErrorInvalidConfiguration) return CUDA_ERROR_INVALID_VALUE;
  return static_cast<CUresult>(error);  // the driver has the same numbers
}

CUmodule new_module() { return reinterpret_cast<CUmodule>(0x2000); }

}  // namespace

// What nvcc's code calls to register and launch kernels.

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                                uint3*, dim3*, dim3*, int*) {
  Lock lock(mutex);
  names()[function] = name;
}

API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) {
  *out = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**,
                                   size_t shared, cudaStream_t stream) {
  return launch_runtime(kernel, grid, block, shared, stream);
}

API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**,
                                 size_t shared, cudaStream_t stream) {
  return launch_runtime(function, grid, block, shared, stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                    void**) {
  return launch_runtime(function, config->gridDim, config->blockDim, config->dynamicSmemBytes,
                        config->stream);
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = pushed.back();
  pushed.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  *out = {};
  out->maxThreadsPerBlock = kMostThreads;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 90;
  out->maxDynamicSharedSizeBytes = kMostShared;
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > kMostShared) return fail(cudaErrorInvalidValue);
  Lock lock(mutex);
  shared_allowed[function] = value;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int,
                                                                       size_t, unsigned) {
  *out = 2;
  return cudaSuccess;
}

// The driver: modules that Triton compiles.

API CUresult cuModuleLoadData(CUmodule* out, const void*) {
  *out = new_module();
  return CUDA_SUCCESS;
}

API CUresult cuModuleLoad(CUmodule* out, const char*) {
  *out = new_module();
  return CUDA_SUCCESS;
}

API CUresult cuModuleLoadDataEx(CUmodule* out, const void*, unsigned, CUjit_option*, void**) {
  *out = new_module();
  return CUDA_SUCCESS;
}

API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

API CUresult cuModuleGetFunction(CUfunction* out, CUmodule, const char* name) {
  *out = reinterpret_cast<CUfunction>(new DriverFunction{name});
  return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int* out, CUfunction_attribute attribute, CUfunction) {
  *out = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? kMostThreads
         : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                              : 0;
  return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  // Triton tries attributes of newer drivers first.
  if (attribute >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value < 0 || static_cast<size_t>(value) > kMostShared) return CUDA_ERROR_INVALID_VALUE;
    Lock lock(mutex);
    shared_allowed[function] = value;
  }
  return CUDA_SUCCESS;
}

API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

API CUresult cuOccupancyMaxActiveClusters(int* out, CUfunction, const CUlaunchConfig*) {
  *out = 132;
  return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, CUfunction, int, size_t) {
  *out = 2;
  return CUDA_SUCCESS;
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  const dim3 grid(config->gridDimX, config->gridDimY, config->gridDimZ);
  const dim3 block(config->blockDimX, config->blockDimY, config->blockDimZ);
  return launch_driver(function, grid, block, config->sharedMemBytes, config->hStream);
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                            CUstream stream, void**, void**) {
  const dim3 grid(grid_x, grid_y, grid_z), block(block_x, block_y, block_z);
  return launch_driver(function, grid, block, shared, stream);
}

API CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                       unsigned grid_z, unsigned block_x, unsigned block_y,
                                       unsigned block_z, unsigned shared, CUstream stream, void**) {
  const dim3 grid(grid_x, grid_y, grid_z), block(block_x, block_y, block_z);
  return launch_driver(function, grid, block, shared, stream);
}

API CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                    const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
