// NVTX's ranges, while the profiler captures: NVTX finds this library by NVTX_INJECTION64_PATH, as it finds nsys.

#include "state.h"

#include <vector>

#include <nvtx3/nvToolsExt.h>

namespace null_cuda {

static bool is_capturing = false;
static thread_local std::vector<std::string> open_ranges;

static int push(const char* name) {
  open_ranges.push_back(name);
  if (is_capturing) count("range " + open_ranges.back());
  return static_cast<int>(open_ranges.size()) - 1;
}

static int pop() {
  if (open_ranges.empty()) {
    count_fault("a range is closed that was not opened");
    return 0;
  }
  open_ranges.pop_back();
  return static_cast<int>(open_ranges.size());
}

void count_launch_in_range() {
  if (!is_capturing) return;
  if (open_ranges.empty()) count("launches in no range");
  for (const std::string& name : open_ranges) count("launches in " + name);
}

}  // namespace null_cuda

using namespace null_cuda;

API cudaError_t cudaProfilerStart() {
  count("capture starts");
  is_capturing = true;
  return cudaSuccess;
}

API cudaError_t cudaProfilerStop() {
  count("capture ends");
  is_capturing = false;
  return cudaSuccess;
}

API int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t find_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(find_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &size)) return 0;
  *functions[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
