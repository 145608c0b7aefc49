// NCCL: communicators of one process, collectives that move nothing.

#include <nccl.h>

#include <cstring>

#include "state.h"

using namespace null_cuda;

namespace {

struct Communicator {
  int size, rank;
};

Communicator* of(ncclComm_t comm) { return reinterpret_cast<Communicator*>(comm); }

ncclResult_t make(ncclComm_t* out, int size, int rank) {
  *out = reinterpret_cast<ncclComm_t>(new Communicator{size, rank});
  return ncclSuccess;
}

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 1;  // 8-bit floats
  }
}

// Check and count a collective that sends and receives this many elements.
ncclResult_t run(const char* name, const void* sent, size_t num_sent, void* received,
                 size_t num_received, ncclDataType_t type, cudaStream_t stream) {
  count_launch(name);
  check_range(name, sent, num_sent * bytes_of(type));
  check_range(name, received, num_received * bytes_of(type));
  return ncclSuccess;
}

}  // namespace

API ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  memset(out, 7, sizeof *out);
  return ncclSuccess;
}

API ncclResult_t ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId, int rank) {
  return make(out, size, rank);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId, int rank,
                                        ncclConfig_t*) {
  return make(out, size, rank);
}

API ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int size, int rank, int, ncclUniqueId*,
                                          ncclConfig_t*) {
  return make(out, size, rank);
}

API ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t* out, ncclConfig_t*) {
  return make(out, 1, 0);
}

API ncclResult_t ncclCommCount(ncclComm_t comm, int* out) {
  *out = of(comm)->size;
  return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(ncclComm_t comm, int* out) {
  *out = of(comm)->rank;
  return ncclSuccess;
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* out) {
  *out = ncclSuccess;
  return ncclSuccess;
}

API ncclResult_t ncclGetVersion(int* out) {
  *out = NCCL_VERSION_CODE;
  return ncclSuccess;
}

API const char* ncclGetErrorString(ncclResult_t) { return "error of the null NCCL"; }
API const char* ncclGetLastError(ncclComm_t) { return "error of the null NCCL"; }

API ncclResult_t ncclAllReduce(const void* sent, void* received, size_t n, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t, cudaStream_t stream) {
  return run("ncclAllReduce", sent, n, received, n, type, stream);
}

API ncclResult_t ncclAllGather(const void* sent, void* received, size_t n, ncclDataType_t type,
                               ncclComm_t comm, cudaStream_t stream) {
  return run("ncclAllGather", sent, n, received, n * of(comm)->size, type, stream);
}

API ncclResult_t ncclReduceScatter(const void* sent, void* received, size_t n, ncclDataType_t type,
                                   ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  return run("ncclReduceScatter", sent, n * of(comm)->size, received, n, type, stream);
}

API ncclResult_t ncclBroadcast(const void* sent, void* received, size_t n, ncclDataType_t type, int,
                               ncclComm_t, cudaStream_t stream) {
  return run("ncclBroadcast", sent, n, received, n, type, stream);
}

API ncclResult_t ncclBcast(void* received, size_t n, ncclDataType_t type, int, ncclComm_t,
                           cudaStream_t stream) {
  return run("ncclBroadcast", received, n, received, n, type, stream);
}

API ncclResult_t ncclReduce(const void* sent, void* received, size_t n, ncclDataType_t type,
                            ncclRedOp_t, int, ncclComm_t, cudaStream_t stream) {
  return run("ncclReduce", sent, n, received, n, type, stream);
}

API ncclResult_t ncclSend(const void* sent, size_t n, ncclDataType_t type, int, ncclComm_t,
                          cudaStream_t stream) {
  return run("ncclSend", sent, n, nullptr, 0, type, stream);
}

API ncclResult_t ncclRecv(void* received, size_t n, ncclDataType_t type, int, ncclComm_t,
                          cudaStream_t stream) {
  return run("ncclRecv", nullptr, 0, received, n, type, stream);
}
