// Stream capture and graphs. A graph keeps what was launched on the captured streams; copies and fills
// among it are carried out when it is launched, kernels are counted.
//
// A capture ends with an error where CUDA's would: after a call that waits for the device or for a
// captured stream, allocates or frees (unless the thread has exchanged its mode), queries an event,
// copies to or from pageable memory, or leaves work of another stream unjoined. Work on other streams
// during a capture, and kernels that run for the first time in one, which the driver may have to load,
// are allowed and counted.

#include "state.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace null_cuda {
namespace {

// Position of the last work on each stream that is known to be over.
using Clock = std::map<cudaStream_t, long>;

struct Node {
  std::string name;
  std::function<void()> run;
};

struct Graph {
  std::vector<Node> nodes;
};

struct Capture {
  unsigned long long id;
  cudaStream_t origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  bool is_invalid = false;
  std::map<cudaStream_t, Clock> streams;
  Graph graph;
};

struct CapturedEvent {
  unsigned long long capture;
  Clock clock;
};

// Never destroyed, because other libraries call the runtime when the process ends.
auto& captures = *new std::vector<std::unique_ptr<Capture>>;
auto& captured_events = *new std::map<cudaEvent_t, CapturedEvent>;
auto& done_before = *new std::set<std::string>;
unsigned long long last_id = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

Capture* capture_of(cudaStream_t stream) {
  for (const auto& capture : captures)
    if (capture->streams.count(stream)) return capture.get();
  return nullptr;
}

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, position] : other) into[stream] = std::max(into[stream], position);
}

cudaError_t invalidate(Capture& capture, const char* call, cudaError_t error) {
  capture.is_invalid = true;
  count(std::string("capture ended by ") + call);
  return fail(error);
}

// Whether the mode of `capture` and that of this thread prohibit unsafe calls here.
bool prohibits(const Capture& capture) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == std::this_thread::get_id())
    return capture.mode != cudaStreamCaptureModeRelaxed;
  return thread_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
}

Graph* of(cudaGraph_t graph) { return reinterpret_cast<Graph*>(graph); }
Graph* of(cudaGraphExec_t graph) { return reinterpret_cast<Graph*>(graph); }

}  // namespace

Work begin_work(cudaStream_t stream, const std::string& name, std::function<void()> run) {
  Lock lock(mutex);
  Capture* capture = capture_of(stream);
  if (capture == nullptr) {
    if (!captures.empty()) count("beside a capture: " + name);
    done_before.insert(name);
    return Work::now;
  }
  if (capture->is_invalid) {
    fail(cudaErrorStreamCaptureInvalidated);
    return Work::refused;
  }
  if (!run && done_before.insert(name).second) count("first in a capture: " + name);
  capture->streams[stream][stream]++;
  capture->graph.nodes.push_back({name, std::move(run)});
  return Work::captured;
}

void note_load() {
  Lock lock(mutex);
  if (!captures.empty()) count("first in a capture: a module");
}

cudaError_t check_unsafe(const char* call) {
  Lock lock(mutex);
  for (const auto& capture : captures)
    if (prohibits(*capture)) return invalidate(*capture, call, cudaErrorStreamCaptureUnsupported);
  return cudaSuccess;
}

cudaError_t check_device_wait(const char* call) {
  Lock lock(mutex);
  if (captures.empty()) return cudaSuccess;
  return invalidate(*captures.front(), call, cudaErrorStreamCaptureUnsupported);
}

cudaError_t check_stream_wait(cudaStream_t stream, const char* call) {
  Lock lock(mutex);
  Capture* capture = capture_of(stream);
  if (capture == nullptr) return cudaSuccess;
  return invalidate(*capture, call, cudaErrorStreamCaptureUnsupported);
}

cudaError_t check_event_wait(cudaEvent_t event, const char* call) {
  Lock lock(mutex);
  const auto found = captured_events.find(event);
  if (found == captured_events.end()) return cudaSuccess;
  for (const auto& capture : captures)
    if (capture->id == found->second.capture)
      return invalidate(*capture, call, cudaErrorCapturedEvent);
  return fail(cudaErrorCapturedEvent);
}

bool record_captured(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(mutex);
  Capture* capture = capture_of(stream);
  captured_events.erase(event);
  if (capture == nullptr) return false;
  captured_events[event] = {capture->id, capture->streams[stream]};
  return true;
}

void forget_event(cudaEvent_t event) {
  Lock lock(mutex);
  captured_events.erase(event);
}

cudaError_t wait_captured(cudaStream_t stream, cudaEvent_t event) {
  Lock lock(mutex);
  Capture* capture = capture_of(stream);
  const auto found = captured_events.find(event);
  if (found == captured_events.end()) {
    if (capture == nullptr) return cudaSuccess;
    return invalidate(*capture, "cudaStreamWaitEvent", cudaErrorStreamCaptureIsolation);
  }
  const auto of_event =
      std::find_if(captures.begin(), captures.end(), [&](const auto& open) {
        return open->id == found->second.capture;
      });
  if (of_event == captures.end()) return fail(cudaErrorCapturedEvent);
  if (capture != nullptr && capture != of_event->get())
    return invalidate(*capture, "cudaStreamWaitEvent", cudaErrorStreamCaptureMerge);
  // The default stream cannot be captured.
  if (stream == nullptr)
    return invalidate(**of_event, "cudaStreamWaitEvent", cudaErrorStreamCaptureImplicit);
  Clock& clock = (*of_event)->streams[stream];
  merge(clock, found->second.clock);
  return cudaSuccess;
}

}  // namespace null_cuda

using namespace null_cuda;

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock(mutex);
  if (stream == nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  if (capture_of(stream) != nullptr) return fail(cudaErrorIllegalState);
  auto capture = std::make_unique<Capture>();
  capture->id = ++last_id;
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->streams[stream] = {};
  captures.push_back(std::move(capture));
  count("captures");
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t, cudaGraph_t, const cudaGraphNode_t*,
                                              const cudaGraphEdgeData*, size_t,
                                              cudaStreamCaptureMode) {
  return fail(cudaErrorNotSupported);
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  Lock lock(mutex);
  *out = nullptr;
  Capture* found = capture_of(stream);
  if (found == nullptr) return fail(cudaErrorIllegalState);
  if (found->origin != stream)
    return invalidate(*found, "cudaStreamEndCapture", cudaErrorStreamCaptureUnmatched);
  if (found->mode != cudaStreamCaptureModeRelaxed && found->thread != std::this_thread::get_id())
    return invalidate(*found, "cudaStreamEndCapture", cudaErrorStreamCaptureWrongThread);
  const auto place = std::find_if(captures.begin(), captures.end(),
                                  [&](const auto& open) { return open.get() == found; });
  const auto capture = std::move(*place);
  captures.erase(place);
  if (capture->is_invalid) return fail(cudaErrorStreamCaptureInvalidated);
  Clock& known = capture->streams[stream];
  for (auto& [other, clock] : capture->streams)
    if (known[other] < clock[other]) return fail(cudaErrorStreamCaptureUnjoined);
  *out = reinterpret_cast<cudaGraph_t>(new Graph(std::move(capture->graph)));
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
  return cudaStreamGetCaptureInfo(stream, out, nullptr, nullptr, nullptr, nullptr, nullptr);
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* out,
                                         unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                         size_t* num_dependencies) {
  Lock lock(mutex);
  Capture* capture = capture_of(stream);
  *out = capture == nullptr      ? cudaStreamCaptureStatusNone
         : capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  if (id != nullptr) *id = capture == nullptr ? 0 : capture->id;
  if (graph != nullptr && capture != nullptr)
    *graph = reinterpret_cast<cudaGraph_t>(&capture->graph);
  if (num_dependencies != nullptr) *num_dependencies = 0;
  return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph,
                                              unsigned long long) {
  *out = reinterpret_cast<cudaGraphExec_t>(new Graph(*of(graph)));
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  *number = of(graph)->nodes.size();
  return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  const Work work = begin_work(stream, "cudaGraphLaunch", nullptr);
  if (work != Work::now) return fail(cudaErrorStreamCaptureUnsupported);
  count_launch("cudaGraphLaunch");
  for (const Node& node : of(graph)->nodes) {
    count("graph nodes");
    count("node " + node.name);
    if (node.run) node.run();
  }
  return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete of(graph);
  return cudaSuccess;
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete of(graph);
  return cudaSuccess;
}
