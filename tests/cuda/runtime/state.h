// What the files of the null CUDA runtime share: counters, faults, and what lies in device memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
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
// Count a wrong argument. A CUDA device would refuse it, or read or write memory of another tensor.
void count_fault(const std::string& what);

// Remember the error for cudaGetLastError, as every function of the runtime does.
cudaError_t fail(cudaError_t error);

size_t number_from_environment(const char* name, size_t otherwise);
int num_devices();
size_t device_bytes();
int device_attribute(int attribute);

// Capture (capture.cpp). What a stream is given is done now, kept in a graph, or refused because its
// capture is invalid. run: done when the graph is launched; empty for a kernel.
enum class Work { now, captured, refused };
Work begin_work(cudaStream_t stream, const std::string& name, std::function<void()> run = nullptr);
// Count code that is loaded during a capture.
void note_load();
// Each returns an error, and ends a capture, if a capture forbids the call here.
cudaError_t check_unsafe(const char* call);
cudaError_t check_device_wait(const char* call);
cudaError_t check_stream_wait(cudaStream_t stream, const char* call);
cudaError_t check_event_wait(cudaEvent_t event, const char* call);
cudaError_t wait_captured(cudaStream_t stream, cudaEvent_t event);
bool record_captured(cudaEvent_t event, cudaStream_t stream);
void forget_event(cudaEvent_t event);

// Return from a function of the runtime if a check has failed.
#define RETURN_IF_FAILED(check) \
  if (const cudaError_t error = (check); error != cudaSuccess) return error

bool is_on_device(const void* pointer);
// Count a fault if [pointer, pointer + bytes) leaves the allocation in which it begins.
void check_range(const char* call, const void* pointer, size_t bytes);

}  // namespace null_cuda
