#include "mpi.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace qccl {

namespace {

// Number of empty polls in a row after which the thread naps, which slow links do not notice (Linux makes the nap 50 us
// longer). Before that it keeps the processor for `spins` polls, or else yields it.
constexpr std::uint64_t kYields = 400;
constexpr long kNap = 20'000;
// Naps after which the thread takes longer ones.
constexpr std::uint64_t kNaps = 800;
constexpr long kLongNap = 150'000;

// Marks a send, in place of the bytes that a receive expects.
constexpr std::int64_t kSend = -1;

void relax(std::uint64_t idle, std::uint64_t spins) {
  const std::uint64_t patience = spins ? spins : kYields;
  if (idle >= patience) {
    const timespec nap = {0, idle < patience + kNaps ? kNap : kLongNap};
    nanosleep(&nap, nullptr);
  } else if (idle && !spins) {
    sched_yield();
  }
}

template <class Function>
Function* function(std::uintptr_t address) {
  return reinterpret_cast<Function*>(address);
}

template <class Handle>
Handle handle(const std::string& bytes) {
  Handle found;
  std::memcpy(&found, bytes.data(), sizeof found);
  return found;
}

template <class Handle>
class Requests final : public MpiWire {
 public:
  Requests(const MpiLibrary& library, std::function<void(const MpiFault&)> fault)
      : library_(library),
        fault_(std::move(fault)),
        isend_(function<int(const void*, int, Handle, int, int, Handle, Handle*)>(library.functions.isend)),
        irecv_(function<int(void*, int, Handle, int, int, Handle, Handle*)>(library.functions.irecv)),
        testsome_(function<int(int, Handle*, int*, int*, unsigned char*)>(library.functions.testsome)),
        get_count_(function<int(const unsigned char*, Handle, int*)>(library.functions.get_count)),
        cancel_(function<int(Handle*)>(library.functions.cancel)),
        finalized_(function<int(int*)>(library.functions.finalized)),
        communicator_(handle<Handle>(library.communicator)),
        byte_(handle<Handle>(library.byte)),
        null_(handle<Handle>(library.null_request)) {}

  void send(int peer, int tag, const void* data, std::size_t nbytes, Token token) override {
    check_running();
    Handle request;
    check(isend_(data, count(nbytes), byte_, peer, tag, communicator_, &request));
    add(request, {token, kSend, peer, nullptr});
  }

  void receive(int peer, int tag, void* data, std::size_t nbytes, Token token, std::size_t* arrived) override {
    check_running();
    Handle request;
    check(irecv_(data, count(nbytes), byte_, peer, tag, communicator_, &request));
    add(request, {token, static_cast<std::int64_t>(nbytes), peer, arrived});
  }

  void poll(std::uint64_t idle, std::vector<Token>& completed) override {
    relax(idle, spins);
    if (!late_.empty()) {
      completed.insert(completed.end(), late_.begin(), late_.end());
      late_.clear();
    } else if (!requests_.empty()) {
      check_running();
      test(completed);
    }
  }

  void cancel() override {
    for (std::size_t i = 0; i < requests_.size(); ++i)
      if (posted_[i].expected != kSend && requests_[i] != null_) cancel_(&requests_[i]);
    int done = 0;
    testsome_(size(), requests_.data(), &done, indices_.data(), statuses_.data());
  }

  std::size_t under_way() const override { return requests_.size(); }

 private:
  struct Posted {
    Token token;
    std::int64_t expected;
    int peer;
    std::size_t* arrived;
  };

  int size() const { return static_cast<int>(requests_.size()); }
  const unsigned char* status(int i) const { return statuses_.data() + i * library_.status_nbytes; }

  // After MPI_Finalize every call but this one ends the process. It costs a few nanoseconds.
  void check_running() const {
    int ended = 0;
    finalized_(&ended);
    if (ended) fault_({});
  }

  // The library counts bytes in int.
  int count(std::size_t nbytes) const {
    if (nbytes > static_cast<std::size_t>(std::numeric_limits<int>::max()))
      throw std::length_error("MPI sends at most 2 GiB in a message; give a smaller chunk");
    return static_cast<int>(nbytes);
  }

  void check(int code) const {
    if (code) fault_({code});
  }

  void add(Handle request, const Posted& posted) {
    requests_.push_back(request);
    posted_.push_back(posted);
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size() * library_.status_nbytes);
  }

  void test(std::vector<Token>& completed) {
    int done = 0;
    const int code = testsome_(size(), requests_.data(), &done, indices_.data(), statuses_.data());
    if (code) {
      const MpiFault found = fault_of(code, done);
      forget_cleared();
      fault_(found);
    }
    if (done > 0 && done != library_.undefined) retire(done, completed);
  }

  // Removes completed requests. A message of the wrong size is a fault; the next poll then returns the other tokens.
  void retire(int done, std::vector<Token>& completed) {
    const std::size_t before = completed.size();
    MpiFault fault;
    for (int k = 0; k < done; ++k) {
      const Posted& posted = posted_[indices_[k]];
      int got = 0;
      if (posted.expected != kSend) get_count_(status(k), byte_, &got);
      if (posted.arrived) *posted.arrived = static_cast<std::size_t>(got);
      if (posted.expected != kSend && !posted.arrived && got != posted.expected) {
        fault = {0, posted.peer, got, posted.expected};
      } else {
        completed.push_back(posted.token);
      }
    }
    std::sort(indices_.begin(), indices_.begin() + done, std::greater<int>());
    for (int k = 0; k < done; ++k) remove(indices_[k]);
    if (fault.peer < 0) return;
    late_.assign(completed.begin() + before, completed.end());
    completed.resize(before);
    fault_(fault);
  }

  void remove(int i) {
    requests_[i] = requests_.back();
    posted_[i] = posted_.back();
    requests_.pop_back();
    posted_.pop_back();
  }

  // The error of a failed test: the first one in the statuses, with its rank, if there is any.
  MpiFault fault_of(int code, int done) const {
    if (code != library_.in_status) return {code};
    for (int k = 0; k < done && done != library_.undefined; ++k) {
      int error;
      std::memcpy(&error, status(k) + library_.status_error, sizeof error);
      if (error && error != library_.pending) return {error, posted_[indices_[k]].peer};
    }
    return {code};
  }

  // The next poll returns the tokens of requests that a failed test has completed. The library only clears their
  // handles, so the request that failed counts as completed, too; after an error its data is not used.
  void forget_cleared() {
    for (int i = size() - 1; i >= 0; --i) {
      if (requests_[i] != null_) continue;
      late_.push_back(posted_[i].token);
      remove(i);
    }
  }

  const MpiLibrary library_;
  const std::function<void(const MpiFault&)> fault_;
  int (*const isend_)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*const irecv_)(void*, int, Handle, int, int, Handle, Handle*);
  int (*const testsome_)(int, Handle*, int*, int*, unsigned char*);
  int (*const get_count_)(const unsigned char*, Handle, int*);
  int (*const cancel_)(Handle*);
  int (*const finalized_)(int*);
  const Handle communicator_, byte_, null_;
  std::vector<Handle> requests_;
  std::vector<Posted> posted_;
  std::vector<int> indices_;
  std::vector<unsigned char> statuses_;
  std::vector<Token> late_;  // completed in a poll that threw
};

}  // namespace

std::unique_ptr<MpiWire> make_mpi_wire(const MpiLibrary& library, std::function<void(const MpiFault&)> fault) {
  for (const std::string* bytes : {&library.communicator, &library.byte, &library.null_request})
    if (bytes->size() != library.byte.size()) throw std::invalid_argument("MPI's handles are of unequal sizes");
  if (library.byte.size() == sizeof(int)) return std::make_unique<Requests<int>>(library, std::move(fault));
  if (library.byte.size() == sizeof(void*)) return std::make_unique<Requests<void*>>(library, std::move(fault));
  throw std::invalid_argument("MPI's handles have " + std::to_string(library.byte.size()) + " bytes; known are 4 and 8");
}

}  // namespace qccl
