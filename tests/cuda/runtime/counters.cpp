// Counters that tests read, and errors.

#include "state.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace null_cuda {

// Neither is destroyed, because other libraries call the runtime when the process ends.
std::recursive_mutex& mutex = *new std::recursive_mutex;
static auto& counters = *new std::map<std::string, long>;
static void (*observer)(const char*) = nullptr;
static thread_local cudaError_t last_error = cudaSuccess;

void count(const std::string& name) {
  Lock lock(mutex);
  counters[name]++;
}

void count_sync(const char* name) {
  count(std::string("sync ") + name);
  // Without the lock: the observer takes Python's.
  if (observer != nullptr) observer(name);
}

void count_launch(const std::string& kernel) {
  Lock lock(mutex);
  counters["launches"]++;
  counters["launch " + kernel]++;
  count_launch_in_range();
  if (const int device = current_device_number()) {
    counters["launches on device " + std::to_string(device)]++;
  }
}

void count_fault(const std::string& what) { count("fault " + what); }

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

size_t number_from_environment(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text == nullptr ? otherwise : strtoull(text, nullptr, 10);
}

}  // namespace null_cuda

using namespace null_cuda;

// Write "name<tab>count" lines, cut to `size` bytes, and return the bytes of all of them.
API size_t nullcuda_counters(char* out, size_t size) {
  Lock lock(mutex);
  std::string text;
  for (const auto& [name, number] : counters) text += name + "\t" + std::to_string(number) + "\n";
  if (size > 0) {
    size_t length = std::min(size - 1, text.size());
    memcpy(out, text.data(), length);
    out[length] = 0;
  }
  return text.size() + 1;
}

API void nullcuda_reset() {
  Lock lock(mutex);
  counters.clear();
}

// Call `called` with the name of each call that makes the host wait.
API void nullcuda_observe_syncs(void (*called)(const char*)) { observer = called; }

// The generated stubs call this: functions that torch imports and nothing here defines.
API void nullcuda_stub(const char* name) { count(std::string("stub ") + name); }

API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidValue: return "invalid argument";
    default: return "error of the null CUDA runtime";
  }
}

API const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorNull";
}

API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "error of the null CUDA driver";
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR_NULL";
  return CUDA_SUCCESS;
}
