// Device and pinned memory, copies. Device memory is host memory that is mapped when it is touched.

#include "state.h"

#include <sys/mman.h>

#include <cstring>
#include <map>

using namespace null_cuda;

namespace {

// An H100 has 85,017,493,504 bytes; 600 MiB of them go to the context and the kernels' code.
const size_t kContextBytes = 600ull << 20;
const size_t kPage = 2ull << 20;
const size_t kHostPage = 4ull << 10;

// Start -> bytes. They are never destroyed, because other libraries free memory when the process ends.
auto& device_ranges = *new std::map<uintptr_t, size_t>;
auto& pinned_ranges = *new std::map<uintptr_t, size_t>;
size_t used = 0;

// NULLCUDA_GUARD=1: the host may not touch memory of cudaMalloc, as on a machine with a GPU.
bool is_guarded() {
  static const bool is_set = number_from_environment("NULLCUDA_GUARD", 0) == 1;
  return is_set;
}

void* map_lazily(size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  return place == MAP_FAILED ? nullptr : place;
}

// Return the bytes from `pointer` to the end of its range, 0 if it is in none. Ranges that touch, as
// those of an allocator that maps segments one after another, count as one.
size_t bytes_to_end(const std::map<uintptr_t, size_t>& ranges, const void* pointer, size_t wanted) {
  Lock lock(mutex);
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  auto range = ranges.upper_bound(address);
  if (range == ranges.begin()) return 0;
  --range;
  uintptr_t end = range->first + range->second;
  if (address >= end) return 0;
  for (++range; end - address < wanted && range != ranges.end() && range->first == end; ++range)
    end += range->second;
  return end - address;
}

bool is_pinned(const void* pointer) { return bytes_to_end(pinned_ranges, pointer, 1) > 0; }

// Let the host touch device memory while this lives.
class Access {
 public:
  Access(const void* pointer, size_t bytes) {
    if (!is_guarded() || !is_on_device(pointer)) return;
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer), page = address / kHostPage;
    place_ = reinterpret_cast<void*>(page * kHostPage);
    bytes_ = address + bytes - page * kHostPage;
    mprotect(place_, bytes_, PROT_READ | PROT_WRITE);
  }
  ~Access() {
    if (place_ != nullptr) mprotect(place_, bytes_, PROT_NONE);
  }

 private:
  Lock lock_{mutex};
  void* place_ = nullptr;
  size_t bytes_ = 0;
};

// Copies above this size are not carried out: nothing reads them, and they cost time and memory.
size_t most_copied() {
  static const size_t bytes = number_from_environment("NULLCUDA_COPY_MAX", 256ull << 10);
  return bytes;
}

const char* kind_of(const void* pointer) {
  return is_on_device(pointer) ? "device" : is_pinned(pointer) ? "pinned" : "pageable";
}

// The driver copies pageable memory of more than this in pieces, and the host waits for them.
const size_t kStaged = 64 << 10;

void copy(const char* call, void* to, const void* from, size_t bytes) {
  const std::string source = kind_of(from), target = kind_of(to);
  count("copy " + source + " to " + target);
  if (source == "device" && target == "pageable") count_sync("copy to pageable memory");
  if (source == "pageable" && target == "device" && bytes > kStaged)
    count_sync("copy from pageable memory");
  check_range(call, to, bytes);
  check_range(call, from, bytes);
  if (bytes > most_copied()) return;
  const Access source_access(from, bytes), target_access(to, bytes);
  memmove(to, from, bytes);
}

void fill(const char* call, void* to, int value, size_t bytes) {
  check_range(call, to, bytes);
  if (bytes > most_copied()) return;
  const Access access(to, bytes);
  memset(to, value, bytes);
}

}  // namespace

namespace null_cuda {

size_t device_bytes() { return number_from_environment("NULLCUDA_BYTES", 85017493504ull); }

bool is_on_device(const void* pointer) { return bytes_to_end(device_ranges, pointer, 1) > 0; }

void check_range(const char* call, const void* pointer, size_t bytes) {
  if (bytes == 0 || !is_on_device(pointer)) return;
  const size_t room = bytes_to_end(device_ranges, pointer, bytes);
  if (room < bytes)
    count_fault(std::string(call) + " of " + std::to_string(bytes) + " bytes where " +
                std::to_string(room) + " are left");
}

}  // namespace null_cuda

API cudaError_t cudaMalloc(void** out, size_t bytes) {
  Lock lock(mutex);
  count("cudaMalloc");
  const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  if (used + rounded + kContextBytes > device_bytes()) return fail(cudaErrorMemoryAllocation);
  *out = map_lazily(rounded + kPage);  // a gap, so that two allocations never touch
  if (*out == nullptr) return fail(cudaErrorMemoryAllocation);
  if (is_guarded()) mprotect(*out, rounded + kPage, PROT_NONE);
  device_ranges[reinterpret_cast<uintptr_t>(*out)] = rounded;
  used += rounded;
  return cudaSuccess;
}

API cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  // Not count_sync: the caller may hold a lock of PyTorch's allocator.
  count("sync cudaFree");
  Lock lock(mutex);
  auto range = device_ranges.find(reinterpret_cast<uintptr_t>(pointer));
  if (range == device_ranges.end()) return fail(cudaErrorInvalidValue);
  munmap(pointer, range->second + kPage);
  used -= range->second;
  device_ranges.erase(range);
  return cudaSuccess;
}

API cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) {
  return cudaMalloc(out, bytes);
}

API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(mutex);
  *total = device_bytes();
  *free = device_bytes() - used - kContextBytes;
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  Lock lock(mutex);
  count("cudaHostAlloc");
  *out = map_lazily(bytes + kPage);
  if (*out == nullptr) return fail(cudaErrorMemoryAllocation);
  pinned_ranges[reinterpret_cast<uintptr_t>(*out)] = bytes;
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* pointer) {
  Lock lock(mutex);
  auto range = pinned_ranges.find(reinterpret_cast<uintptr_t>(pointer));
  if (range == pinned_ranges.end()) return fail(cudaErrorInvalidValue);
  munmap(pointer, range->second + kPage);
  pinned_ranges.erase(range);
  return cudaSuccess;
}

// CUDA registers whole pages, and none twice. NULLCUDA_REGISTER_MAX: larger memory cannot be registered.
API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Lock lock(mutex);
  count("cudaHostRegister");
  if (bytes > number_from_environment("NULLCUDA_REGISTER_MAX", SIZE_MAX))
    return fail(cudaErrorMemoryAllocation);
  const uintptr_t first = reinterpret_cast<uintptr_t>(pointer) / kHostPage * kHostPage;
  const uintptr_t end = reinterpret_cast<uintptr_t>(pointer) + bytes;
  for (const auto& [start, length] : pinned_ranges)
    if (start < (end + kHostPage - 1) / kHostPage * kHostPage && start + length > first)
      return fail(cudaErrorHostMemoryAlreadyRegistered);
  pinned_ranges[reinterpret_cast<uintptr_t>(pointer)] = bytes;
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* pointer) {
  Lock lock(mutex);
  if (pinned_ranges.erase(reinterpret_cast<uintptr_t>(pointer)) == 0)
    return fail(cudaErrorHostMemoryNotRegistered);
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  memset(out, 0, sizeof *out);
  cudaGetDevice(&out->device);
  void* place = const_cast<void*>(pointer);
  if (is_on_device(pointer)) {
    out->type = cudaMemoryTypeDevice;
    out->devicePointer = place;
  } else {
    const bool pinned = is_pinned(pointer);
    out->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    out->hostPointer = place;
    out->devicePointer = pinned ? place : nullptr;
  }
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                cudaStream_t) {
  copy("cudaMemcpyAsync", to, from, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  count_sync("cudaMemcpy");
  copy("cudaMemcpy", to, from, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                    cudaStream_t) {
  copy("cudaMemcpyPeerAsync", to, from, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  count_sync("cudaMemset");
  fill("cudaMemset", to, value, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  count("memset");
  fill("cudaMemsetAsync", to, value, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

API cudaError_t cudaGetSymbolAddress(void** out, const void*) {
  static char symbols[1 << 20];
  *out = symbols;
  return cudaSuccess;
}

// The driver's virtual memory, which PyTorch's expandable segments use.

API CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr,
                                 unsigned long long) {
  void* place = map_lazily(bytes);
  *out = reinterpret_cast<CUdeviceptr>(place);
  return place == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr place, size_t bytes) {
  munmap(reinterpret_cast<void*>(place), bytes);
  return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes,
                         const CUmemAllocationProp*, unsigned long long) {
  Lock lock(mutex);
  count("cuMemCreate");
  if (used + bytes + kContextBytes > device_bytes()) return CUDA_ERROR_OUT_OF_MEMORY;
  used += bytes;
  *out = bytes;  // a handle is known by its size alone
  return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle bytes) {
  Lock lock(mutex);
  used -= bytes;
  return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr place, size_t bytes, size_t, CUmemGenericAllocationHandle,
                      unsigned long long) {
  Lock lock(mutex);
  device_ranges[place] = bytes;
  return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr place, size_t bytes) {
  Lock lock(mutex);
  // One call may unmap what several have mapped.
  auto first = device_ranges.lower_bound(place);
  device_ranges.erase(first, device_ranges.lower_bound(place + bytes));
  madvise(reinterpret_cast<void*>(place), bytes, MADV_DONTNEED);
  return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}

API CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*,
                                           CUmemAllocationGranularity_flags) {
  *out = kPage;
  return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* bytes, CUdeviceptr pointer) {
  Lock lock(mutex);
  auto range = device_ranges.upper_bound(pointer);
  if (range == device_ranges.begin()) return CUDA_ERROR_INVALID_VALUE;
  --range;
  if (pointer >= range->first + range->second) return CUDA_ERROR_INVALID_VALUE;
  if (start != nullptr) *start = range->first;
  if (bytes != nullptr) *bytes = range->second;
  return CUDA_SUCCESS;
}

// cuda.h gives the name a suffix; PyTorch looks it up without.
#undef cuMemGetAddressRange
API CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* bytes, CUdeviceptr pointer) {
  return cuMemGetAddressRange_v2(start, bytes, pointer);
}

API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  const void* place = reinterpret_cast<const void*>(pointer);
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *static_cast<unsigned*>(out) = CU_MEMORYTYPE_DEVICE;
    return CUDA_SUCCESS;
  }
  if (!is_on_device(place) && !is_pinned(place)) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<CUdeviceptr*>(out) = pointer;
  return CUDA_SUCCESS;
}
