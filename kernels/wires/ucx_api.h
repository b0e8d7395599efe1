// The part of UCX's interface that the wire uses (ucp/api/ucp.h of UCX 1.10 and later), so that qccl is built without
// its headers. Each struct has a mask of the fields that are set, so later versions can add fields at its end.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qccl::ucx {

using Status = signed char;  // ucs_status_t is packed to one byte

constexpr int kOk = 0, kInProgress = 1, kTruncated = -9, kBusy = -15, kCanceled = -16, kConnectionReset = -25, kLastError = -100;

// A function that starts something returns null (done), a request, or an error as a pointer.
inline bool is_error(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) >= static_cast<std::uintptr_t>(kLastError);
}
inline int error_of(const void* pointer) { return static_cast<int>(reinterpret_cast<std::intptr_t>(pointer)); }

struct Params {
  static constexpr std::uint64_t kFeatures = 1;
  static constexpr std::uint64_t kTag = 1, kWakeup = 1 << 4;
  std::uint64_t field_mask = 0, features = 0;
  std::uint64_t unused[30] = {};
};

struct WorkerParams {
  static constexpr std::uint64_t kThreadMode = 1;
  static constexpr int kSerialized = 1;
  std::uint64_t field_mask = 0;
  int thread_mode = 0;
  std::uint64_t unused[40] = {};
};

struct EndpointParams {
  static constexpr std::uint64_t kAddress = 1, kErrorMode = 2, kErrorHandler = 4;
  static constexpr int kPeerErrors = 1;
  std::uint64_t field_mask = 0;
  const void* address = nullptr;
  int error_mode = 0;
  void (*on_error)(void* argument, void* endpoint, Status status) = nullptr;
  void* argument = nullptr;
  std::uint64_t unused[30] = {};
};

struct TagInfo {
  std::uint64_t sender_tag;
  std::size_t length;
};

struct RequestParams {
  static constexpr std::uint32_t kCallback = 1 << 1, kUserData = 1 << 2, kFlags = 1 << 4, kNotAtOnce = 1 << 16;
  static constexpr std::uint32_t kForce = 1;  // the flag that closes without waiting
  std::uint32_t mask = 0, flags = 0;
  void* request = nullptr;
  union {
    void (*on_sent)(void* request, Status status, void* user_data);
    void (*on_received)(void* request, Status status, const TagInfo* info, void* user_data);
  } callback = {nullptr};
  std::uint64_t datatype = 0;
  void* user_data = nullptr;
  std::uint64_t unused[30] = {};
};

}  // namespace qccl::ucx
