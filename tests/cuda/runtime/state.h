// What the files of the null CUDA runtime share: counters, faults, and what lies in device memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

namespace null_cuda {

using Lock = std::lock_guard<std::recursive_mutex>;
extern std::recursive_mutex& mutex;

// Count an event under its name. nullcuda_counters reports all of them.
void count(const std::string& name);
// Count a call that makes the host wait for the device, and call the observer, if there is one.
void count_sync(const char* name);
void count_launch(const std::string& kernel);
void count_launch_in_range();
// Count a wrong argument. A CUDA device would refuse it, or read or write memory of another tensor.
void count_fault(const std::string& what);

// Remember the error for cudaGetLastError, as every function of the runtime does.
cudaError_t fail(cudaError_t error);

size_t number_from_environment(const char* name, size_t otherwise);
int num_devices();
int current_device_number();
size_t device_bytes();
int device_attribute(int attribute);

bool is_on_device(const void* pointer);
// Count a fault if [pointer, pointer + bytes) leaves the allocation in which it begins.
void check_range(const char* call, const void* pointer, size_t bytes);

}  // namespace null_cuda
