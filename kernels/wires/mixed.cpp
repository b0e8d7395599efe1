#include "mixed.h"

#include <poll.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "../engine/run.h"

namespace qccl {

namespace {

constexpr double kSleepSeconds = 1e-3;
// Polls of a run that find nothing, after which a thread sleeps: the awaited message may come from far away. To sleep at
// once costs calls in two levels a fifth of their time.
constexpr int kPatience = 2000;

class Mixed final : public GroupWire {
 public:
  Mixed(std::shared_ptr<GroupWire> memory, std::shared_ptr<GroupWire> sites)
      : memory_(std::move(memory)), sites_(std::move(sites)) {}

  std::string address() override { return sites_->address(); }

  void connect(int rank, const std::vector<std::string>& addresses, FindEnded find_ended) override {
    std::vector<std::string> near, far;
    for (const std::string& address : addresses) {
      const std::size_t end = address.find('\0');
      far.push_back(address.substr(0, end < address.size() ? end + 1 : end));
      near.push_back(end < address.size() ? address.substr(end + 1) : "");
      is_near_.push_back(!near.back().empty());
    }
    shares_ = std::find(is_near_.begin(), is_near_.end(), true) != is_near_.end();
    if (shares_) {
      memory_->connect(rank, near, find_ended);
    } else {
      memory_->close(0);
    }
    sites_->connect(rank, far, std::move(find_ended));
  }

  void begin_run() override { patience_ = kPatience; }

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
    if (idle) wait();
  }

  void progress(std::uint64_t idle) override {
    if (!shares_) return sites_->progress(idle);
    memory_->progress(0);
    sites_->progress(0);
    if (idle) wait();
  }

  std::uint64_t set_up_completed() override { return memory_->set_up_completed() + sites_->set_up_completed(); }

  // The wire in memory gets half of the time at most: a stopped rank of this machine takes no messages.
  void close(double limit) override {
    const double end = seconds() + limit;
    memory_->close(limit / 2);
    sites_->close(limit > 0 ? std::max(0.0, end - seconds()) : 0);
  }

 private:
  GroupWire& to(int peer) { return is_near_.at(static_cast<std::size_t>(peer)) ? *memory_ : *sites_; }

  // Sleeps until something comes by either wire, for a millisecond at most. Between distant sites packets may wait for a
  // moment, but a message in memory need not.
  void wait() {
    if (patience_ > 0) {
      --patience_;
      sched_yield();
      return;
    }
    const std::optional<Rest> near = memory_->rest();
    const std::optional<Rest> far = near ? sites_->rest() : std::nullopt;
    if (!far) return;
    pollfd waited[] = {{near->descriptor, POLLIN, 0}, {far->descriptor, POLLIN, 0}};
    const timespec time = {0, static_cast<long>((far->pause > 0 ? far->pause : kSleepSeconds) * 1e9)};
    ppoll(waited, far->pause > 0 ? 1 : 2, &time, nullptr);
  }

  const std::shared_ptr<GroupWire> memory_, sites_;
  std::vector<bool> is_near_;  // by rank
  bool shares_ = false;        // whether any rank shares memory with this one
  std::atomic<unsigned> turns_{0};
  std::atomic<int> patience_{0};
};

}  // namespace

std::shared_ptr<GroupWire> make_mixed_wire(std::shared_ptr<GroupWire> memory, std::shared_ptr<GroupWire> sites) {
  return std::make_shared<Mixed>(std::move(memory), std::move(sites));
}

}  // namespace qccl
