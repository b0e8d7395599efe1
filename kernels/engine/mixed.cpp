#include "mixed.h"

#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>

#include "run.h"

namespace qccl {

namespace {

constexpr int kSleepMilliseconds = 1;
// Polls of a run that find nothing, after which a thread sleeps at once: what it waits for may be far away.
constexpr std::int64_t kPatience = 2000;
// So many idle polls in a row that no wire keeps or yields the processor.
constexpr std::uint64_t kLongIdle = std::uint64_t{1} << 32;

// Its members are set before several threads use it, except the counters.
class Mixed final : public MixedWire {
 public:
  Mixed(std::shared_ptr<PartWire> memory, std::shared_ptr<WanWire> sites, int descriptor)
      : memory_(std::move(memory)), sites_(std::move(sites)), descriptor_(descriptor) {}

  ~Mixed() override { close_file(); }

  std::string address() override { return sites_->address(); }

  void connect(int rank, const std::vector<std::string>& addresses, FindEnded find_ended) override {
    sites_->connect(rank, addresses, find_ended);
    rank_ = rank;
    is_near_.assign(addresses.size(), false);
    find_ended_ = std::move(find_ended);
  }

  void reach(const std::vector<std::string>& addresses) override {
    if (addresses.size() != is_near_.size()) throw std::invalid_argument("not an address for each rank of this group");
    memory_->connect(rank_, addresses, find_ended_);
  }

  void share(const std::vector<int>& ranks) override {
    if (shares_) throw std::logic_error("this wire shares memory already");
    close_file();
    for (const int rank : ranks) is_near_.at(static_cast<std::size_t>(rank)) = true;
    has_far_ = ranks.size() + 1 < is_near_.size();
    shares_ = !ranks.empty();
    if (shares_) {
      sites_->leave(ranks);
    } else {
      memory_->close(0);
    }
  }

  void begin_run() override {
    patience_ = kPatience;
    memory_->begin_run();
  }

  void send(int peer, int tag, const void* data, std::size_t nbytes, Token token) override {
    to(peer).send(peer, tag, data, nbytes, token);
  }

  void receive(int peer, int tag, void* data, std::size_t nbytes, Token token, std::size_t* arrived) override {
    to(peer).receive(peer, tag, data, nbytes, token, arrived);
  }

  // The wires take turns to be polled first. If that one has something, the poll ends: the other one might throw, and the
  // tokens would be lost.
  void poll(std::uint64_t idle, std::vector<Token>& completed) override {
    if (!shares_) return sites_->poll(idle, completed);
    GroupWire* order[] = {memory_.get(), sites_.get()};
    if (turns_++ % 2) std::swap(order[0], order[1]);
    for (GroupWire* wire : order) {
      wire->poll(0, completed);
      if (!completed.empty()) return;
    }
    if (idle) wait(idle);
  }

  void progress(std::uint64_t idle) override {
    if (!shares_) return sites_->progress(idle);
    memory_->progress(0);
    sites_->progress(0);
    if (idle) wait(idle);
  }

  std::uint64_t set_up_completed() override { return memory_->set_up_completed() + sites_->set_up_completed(); }


  void set_spins(std::uint64_t spins) override { memory_->set_spins(spins); }

  // The first one has half of the time at most: a rank of this machine that is stopped takes nothing.
  void close(double limit) override {
    close_file();
    const double end = seconds() + limit;
    memory_->close(limit / 2);
    sites_->close(limit > 0 ? std::max(0.0, end - seconds()) : 0);
  }

 private:
  void close_file() {
    if (const int descriptor = descriptor_.exchange(-1); descriptor >= 0) ::close(descriptor);
  }

  GroupWire& to(int peer) {
    if (is_near_.at(static_cast<std::size_t>(peer))) return *memory_;
    return *sites_;
  }

  // Until something comes by either wire, for a millisecond at most. Between sites far from each other the packets may wait
  // for a moment, but a message in memory need not.
  void wait(std::uint64_t idle) {
    if (has_far_ && patience_ <= 0) idle = kLongIdle;
    --patience_;
    const Rest near = memory_->rest(idle);
    if (near.is_none()) return;
    const Rest far = sites_->rest(idle);
    if (far.is_none()) return;
    pollfd waited[] = {{near.descriptor, POLLIN, 0}, {far.descriptor, POLLIN, 0}};
    if (far.pause > 0) {
      const timespec time = {0, static_cast<long>(far.pause * 1e9)};
      ppoll(waited, 1, &time, nullptr);
    } else {
      ::poll(waited, 2, kSleepMilliseconds);
    }
    memory_->slept();
    sites_->slept();
  }

  const std::shared_ptr<PartWire> memory_;
  const std::shared_ptr<WanWire> sites_;
  std::atomic<int> descriptor_;
  int rank_ = -1;
  FindEnded find_ended_;
  std::vector<bool> is_near_;  // by rank
  bool shares_ = false;        // with some rank
  bool has_far_ = false;       // some rank is on another machine
  std::atomic<std::int64_t> patience_{0};
  std::atomic<unsigned> turns_{0};
};

}  // namespace

std::shared_ptr<MixedWire> make_mixed_wire(std::shared_ptr<PartWire> memory, std::shared_ptr<WanWire> sites,
                                           int descriptor) {
  return std::make_shared<Mixed>(std::move(memory), std::move(sites), descriptor);
}

}  // namespace qccl
