#include "ucx.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "reports.h"
#include "ucx_api.h"
#include "ucx_fork.h"

namespace qccl {

namespace {

using ucx::RequestParams;
using ucx::Status;

// Polls in a row without a completion in which a thread that does not keep the processor yields it; then the thread sleeps,
// for at most a millisecond.
constexpr std::uint64_t kYields = 400;
// Empty polls of a run in which the processor is kept, about a millisecond in all: a short run ends soonest so, and a long
// one waits for the network, which needs no processor.
constexpr std::uint64_t kSpinsOfRun = 6000;
constexpr int kSleepMilliseconds = 1;
// Time without a completion after which ended processes are looked for, and between two looks.
constexpr std::chrono::seconds kQuiet(2), kBetweenLooks(1);
// Polls without a completion between two questions whether it was quiet for so long.
constexpr std::uint64_t kPollsBetweenLooks = 1024;
// Marks a send, in place of the bytes that a receive expects.
constexpr std::int64_t kSend = -1;
// Calls of UCX in a row that move something, after which a poll returns: a rank that sends without end cannot keep this
// one from looking at what has come.
constexpr int kMostProgress = 1000;
// The sender's rank is in the upper half of a tag.
constexpr int kRankShift = 32;
constexpr std::uint64_t kAllBits = ~std::uint64_t{0};

struct Functions {
  Status (*config_read)(const char* prefix, const char* file, void** config);
  Status (*config_modify)(void* config, const char* name, const char* value);
  void (*config_release)(void* config);
  Status (*init_version)(unsigned major, unsigned minor, const ucx::Params*, void* config, void** context);
  void (*cleanup)(void* context);
  Status (*worker_create)(void* context, const ucx::WorkerParams*, void** worker);
  void (*worker_destroy)(void* worker);
  Status (*worker_get_address)(void* worker, void** address, std::size_t* nbytes);
  void (*worker_release_address)(void* worker, void* address);
  Status (*worker_get_efd)(void* worker, int* fd);
  Status (*worker_arm)(void* worker);
  unsigned (*worker_progress)(void* worker);
  Status (*ep_create)(void* worker, const ucx::EndpointParams*, void** endpoint);
  void* (*ep_close_nbx)(void* endpoint, const RequestParams*);
  void* (*tag_send_nbx)(void* endpoint, const void*, std::size_t, std::uint64_t tag, const RequestParams*);
  void* (*tag_recv_nbx)(void* worker, void*, std::size_t, std::uint64_t tag, std::uint64_t mask, const RequestParams*);
  void (*request_cancel)(void* worker, void* request);
  Status (*request_check_status)(void* request);
  void (*request_free)(void* request);
};

const std::vector<const char*> kNames = {
    "ucp_config_read",        "ucp_config_modify",          "ucp_config_release",  "ucp_init_version",
    "ucp_cleanup",            "ucp_worker_create",          "ucp_worker_destroy",  "ucp_worker_get_address",
    "ucp_worker_release_address", "ucp_worker_get_efd",     "ucp_worker_arm",      "ucp_worker_progress",
    "ucp_ep_create",          "ucp_ep_close_nbx",           "ucp_tag_send_nbx",    "ucp_tag_recv_nbx",
    "ucp_request_cancel",     "ucp_request_check_status",   "ucp_request_free"};

Functions functions_at(const UcxFunctions& addresses) {
  static_assert(sizeof(Functions) % sizeof(std::uintptr_t) == 0, "pointers only");
  constexpr std::size_t count = sizeof(Functions) / sizeof(std::uintptr_t);
  if (addresses.size() != count || kNames.size() != count) throw std::invalid_argument("not UCX's functions");
  Functions found;
  __builtin_memcpy(&found, addresses.data(), sizeof found);
  return found;
}

void check_started(int status, const char* function) {
  if (status) throw WireError(std::string(function) + " failed with UCX status " + std::to_string(status));
}

class Worker final : public ReportingWire {
 public:
  Worker(const UcxFunctions& functions, const std::vector<std::pair<std::string, std::string>>& config,
         OnFault fault)
      : ReportingWire(std::move(fault)), ucp_(functions_at(functions)), process_(getpid()) {
    try {
      start(config);
    } catch (...) {
      destroy();
      throw;
    }
  }

  ~Worker() override { close(0); }

  std::string address() override {
    const Lock lock(mutex_);
    void* found = nullptr;
    std::size_t nbytes = 0;
    check_started(ucp_.worker_get_address(worker_, &found, &nbytes), "ucp_worker_get_address");
    const std::string bytes(static_cast<const char*>(found), nbytes);
    ucp_.worker_release_address(worker_, found);
    return bytes;
  }

  void connect(int rank, const std::vector<std::string>& addresses, FindEnded find_ended) override {
    const Lock lock(mutex_);
    if (!worker_ || !peers_.empty()) throw std::logic_error("this wire was connected before, or is closed");
    rank_ = rank;
    find_ended_ = std::move(find_ended);
    peers_.resize(addresses.size());
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      Peer& peer = peers_[i];
      peer.rank = static_cast<int>(i);
      if (peer.rank == rank || addresses[i].empty()) continue;
      if (const int status = connect(peer, addresses[i]))
        throw WireError("rank " + std::to_string(i) + " (UCX status " + std::to_string(status) + ")");
    }
    thread_.start();
  }

  void send(int peer, int tag, const void* data, std::size_t nbytes, Token token) override {
    const Lock lock(mutex_);
    if (!worker_) return fail({});
    if (at(peer).status) return fail({at(peer).status, "", peer, true});
    if (!at(peer).endpoint) throw std::invalid_argument("rank " + std::to_string(peer) + " is not connected to itself");
    Posted* posted = take({token, kSend, peer, nullptr});
    RequestParams params = params_of(posted);
    params.callback.on_sent = &Worker::on_sent;
    void* request = ucp_.tag_send_nbx(at(peer).endpoint, data, nbytes, tag_of(rank_, tag), &params);
    if (ucx::is_error(request)) {
      release(posted);
      fail({ucx::error_of(request), "", peer, true});
    } else if (request) {
      posted->request = request;
    } else {
      complete(posted);
    }
  }

  void receive(int peer, int tag, void* data, std::size_t nbytes, Token token, std::size_t* arrived) override {
    const Lock lock(mutex_);
    if (!worker_) return fail({});
    Posted* posted = take({token, static_cast<std::int64_t>(nbytes), peer, arrived});
    RequestParams params = params_of(posted);
    params.mask |= RequestParams::kNotAtOnce;  // or the message's size would not be known
    params.callback.on_received = &Worker::on_received;
    void* request = ucp_.tag_recv_nbx(worker_, data, nbytes, tag_of(peer, tag), kAllBits, &params);
    if (ucx::is_error(request)) {
      release(posted);
      fail({ucx::error_of(request), "", peer, false});
    } else {
      posted->request = request;
    }
  }

  void begin_run() override {
    Lock lock(mutex_);
    spins_left_ = kSpinsOfRun;
  }

  void set_spins(std::uint64_t spins) override { spins_ = spins; }

  std::optional<Rest> rest() override {
    Lock lock(mutex_);
    if (worker_) look_for_ended(lock);
    if (!worker_ || reports_.has_completed() || has_fault()) return std::nullopt;
    const std::optional<int> descriptor = arm();
    if (!descriptor) return std::nullopt;
    return Rest{*descriptor};
  }

  void close(double seconds) override {
    thread_.stop();
    if (getpid() != process_) return forget_parent();
    const Lock lock(mutex_);
    if (worker_ && seconds > 0) flush(seconds);
    destroy();
    worker_ = context_ = nullptr;
  }

 private:
  struct Peer {
    int rank = 0;
    void* endpoint = nullptr;
    Status status = ucx::kOk;   // why its connection failed
    std::size_t under_way = 0;  // transfers to and from it
  };

  struct Posted {
    Token token;
    std::int64_t expected;
    int peer;
    std::size_t* arrived;
    Worker* worker = nullptr;
    void* request = nullptr;
  };

  static std::uint64_t tag_of(int rank, int tag) {
    return static_cast<std::uint64_t>(rank) << kRankShift | static_cast<std::uint32_t>(tag);
  }

  static RequestParams params_of(Posted* posted) {
    RequestParams params;
    params.mask = RequestParams::kCallback | RequestParams::kUserData;
    params.user_data = posted;
    return params;
  }

  // A peer that closes its connection in order raises this, too. So it counts as lost only where a transfer waits for it.
  static void on_lost(void* argument, void*, Status status) { static_cast<Peer*>(argument)->status = status; }

  static void on_sent(void* request, Status status, void* user_data) {
    static_cast<Posted*>(user_data)->worker->finish(static_cast<Posted*>(user_data), request, status, 0);
  }

  static void on_received(void* request, Status status, const ucx::TagInfo* info, void* user_data) {
    auto* posted = static_cast<Posted*>(user_data);
    posted->worker->finish(posted, request, status, static_cast<std::int64_t>(info->length));
  }

  Status connect(Peer& peer, const std::string& address) {
    ucx::EndpointParams params;
    params.field_mask =
        ucx::EndpointParams::kAddress | ucx::EndpointParams::kErrorMode | ucx::EndpointParams::kErrorHandler;
    params.address = address.data();
    params.error_mode = ucx::EndpointParams::kPeerErrors;
    params.on_error = &Worker::on_lost;
    params.argument = &peer;
    return ucp_.ep_create(worker_, &params, &peer.endpoint);
  }

  Peer& at(int peer) { return peers_.at(static_cast<std::size_t>(peer)); }

  void start(const std::vector<std::pair<std::string, std::string>>& config) {
    void* settings = nullptr;
    check_started(ucp_.config_read(nullptr, nullptr, &settings), "ucp_config_read");
    int status = 0;
    for (const auto& [name, value] : config)
      if (!status) status = ucp_.config_modify(settings, name.c_str(), value.c_str());
    ucx::Params params;
    params.field_mask = ucx::Params::kFeatures;
    params.features = ucx::Params::kTag | ucx::Params::kWakeup;
    if (!status) status = ucp_.init_version(1, 10, &params, settings, &context_);
    ucp_.config_release(settings);
    check_started(status, "ucp_init");
    ucx::WorkerParams worker;
    worker.field_mask = ucx::WorkerParams::kThreadMode;
    worker.thread_mode = ucx::WorkerParams::kSerialized;
    check_started(ucp_.worker_create(context_, &worker, &worker_), "ucp_worker_create");
    check_started(ucp_.worker_get_efd(worker_, &descriptor_), "ucp_worker_get_efd");
  }

  // Progresses the worker, and where nothing has completed leaves the processor to others, or sleeps.
  void advance(std::uint64_t idle, Lock& lock) override {
    if (!worker_) return;
    const bool has_moved = exhaust();
    if (!idle || reports_.has_completed() || has_fault()) return;
    look_now_and_then(idle, lock);
    if (!worker_ || has_moved || keeps_processor(idle)) return;
    const std::optional<int> descriptor = arm();
    if (!descriptor) return;
    pollfd waited = {*descriptor, POLLIN, 0};
    lock.unlock();
    ::poll(&waited, 1, kSleepMilliseconds);
    lock.lock();
    if (worker_) exhaust();
    if (worker_ && !reports_.has_completed()) look_for_ended(lock);
  }

  // Called in the wire's thread.
  void advance_alone(int wakeup) override {
    Lock lock(mutex_);
    exhaust();
    const std::optional<int> descriptor = arm();
    if (!descriptor) return;
    lock.unlock();
    pollfd waited[] = {{*descriptor, POLLIN, 0}, {wakeup, POLLIN, 0}};
    ::poll(waited, 2, *descriptor < 0 ? kSleepMilliseconds : WireThread::kSleepMilliseconds);
  }

  // Whether to poll again at once. Where other threads may need the processor, they get it first.
  bool keeps_processor(std::uint64_t idle) {
    if (spins_ && idle < spins_ && spins_left_) {
      --spins_left_;
      return true;
    }
    if (spins_ || idle >= kYields) return false;
    sched_yield();
    return true;
  }

  // A descriptor that becomes readable by the next event; none: something has come meanwhile. -1, which poll() ignores: UCX
  // has failed, and the descriptor tells nothing.
  std::optional<int> arm() {
    const Status status = ucp_.worker_arm(worker_);
    if (status == ucx::kBusy) return std::nullopt;
    return status == ucx::kOk ? descriptor_ : -1;
  }

  // While UCX repeats a message that it cannot send to an ended process, no wait ever sleeps. So it is not enough to look
  // before each sleep.
  void look_now_and_then(std::uint64_t idle, Lock& lock) {
    if (idle % kPollsBetweenLooks == 0) look_for_ended(lock);
  }

  // After kQuiet without a completion, marks the connections to processes that have ended. Messages that they sent before
  // count first: a rank may have left in order.
  void look_for_ended(Lock& lock) {
    if (!quiet_.is_over() || has_fault()) return;
    std::vector<int> waited;
    for (const Peer& peer : peers_)
      if (peer.endpoint && peer.under_way) waited.push_back(peer.rank);
    if (waited.empty()) return;
    lock.unlock();  // it takes a moment, and Python's lock
    const std::vector<int> ended = find_ended_(waited);
    lock.lock();
    for (const int rank : ended)
      if (!at(rank).status) at(rank).status = ucx::kConnectionReset;
    if (worker_) exhaust();
  }

  bool exhaust() {
    int calls = 0;
    while (calls < kMostProgress && ucp_.worker_progress(worker_)) ++calls;
    return calls > 0;
  }

  Posted* take(const Posted& given) {
    if (free_.empty()) free_.push_back(&posted_.emplace_back());
    Posted* posted = free_.back();
    free_.pop_back();
    *posted = given;
    posted->worker = this;
    ++at(posted->peer).under_way;
    return posted;
  }

  void release(Posted* posted) {
    posted->request = nullptr;
    free_.push_back(posted);
    --at(posted->peer).under_way;
  }

  void complete(Posted* posted) {
    quiet_.interrupt();
    reports_.complete(posted->token);
    release(posted);
  }

  void finish(Posted* posted, void* request, int status, std::int64_t got) {
    ucp_.request_free(request);
    if (status == ucx::kOk && posted->arrived) *posted->arrived = static_cast<std::size_t>(got);
    if (status == ucx::kOk && (posted->expected == kSend || posted->arrived || got == posted->expected))
      return complete(posted);
    if (status == ucx::kOk || status == ucx::kTruncated) {
      reports_.mismatch(posted->peer, got, posted->expected);
    } else if (status != ucx::kCanceled) {
      fail({status, "", posted->peer, true});
    }
    release(posted);
  }

  bool has_fault() override {
    for (const Peer& peer : peers_)
      if (peer.status && peer.under_way) fail({peer.status, "", peer.rank, true});
    return reports_.has_fault();
  }

  void flush(double seconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (void* request : close_endpoints(0)) {
      while (ucp_.request_check_status(request) == ucx::kInProgress && std::chrono::steady_clock::now() < end)
        if (!ucp_.worker_progress(worker_)) sched_yield();
      ucp_.request_free(request);
    }
  }

  void destroy() {
    if (worker_) {
      for (Posted& posted : posted_)
        if (posted.request && posted.expected != kSend) ucp_.request_cancel(worker_, posted.request);
      for (void* request : close_endpoints(RequestParams::kForce)) {
        ucp_.worker_progress(worker_);
        ucp_.request_free(request);
      }
      ucp_.worker_destroy(worker_);
    }
    if (context_) ucp_.cleanup(context_);
  }

  // In a child of fork(): while it has its parent's sockets, their ends do not tell the other ranks of the parent's end.
  // Where a thread of the parent had the lock for too long (HeldAtFork), what it guards cannot be used.
  void forget_parent() {
    const Lock lock(mutex_, std::try_to_lock);
    if (lock && worker_) ucx::let_go_of_sockets(descriptor_);
    if (lock) worker_ = context_ = nullptr;
  }

  std::vector<void*> close_endpoints(std::uint32_t flags) {
    RequestParams params;
    params.mask = RequestParams::kFlags;
    params.flags = flags;
    std::vector<void*> requests;
    for (Peer& peer : peers_) {
      if (!peer.endpoint) continue;
      void* request = ucp_.ep_close_nbx(peer.endpoint, &params);
      if (request && !ucx::is_error(request)) requests.push_back(request);
      peer.endpoint = nullptr;
    }
    return requests;
  }

  const Functions ucp_;
  const pid_t process_;
  std::vector<Peer> peers_;
  void* context_ = nullptr;
  void* worker_ = nullptr;
  int descriptor_ = -1;
  std::uint64_t spins_ = 0, spins_left_ = 0;
  FindEnded find_ended_;
  QuietTime quiet_{kQuiet, kBetweenLooks};
  std::deque<Posted> posted_;
  std::vector<Posted*> free_;
};

}  // namespace

const std::vector<const char*>& ucx_function_names() { return kNames; }

std::shared_ptr<GroupWire> make_ucx_wire(const UcxFunctions& functions,
                                         const std::vector<std::pair<std::string, std::string>>& config, OnFault fault) {
  return std::make_shared<Worker>(functions, config, std::move(fault));
}

}  // namespace qccl
