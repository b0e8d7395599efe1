#include "loop.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace qccl {

namespace {

// A token has who waits for it, a run in flight or one of these, above the number of a step or a rank.
constexpr int kOwnerShift = 32;
constexpr Token kListening = kRunsInFlight, kTelling = kRunsInFlight + 1;
// Between two looks at what others want.
constexpr double kLookSeconds = 5e-3;
// What a run gets beyond its deadline, to take what came while this process was paused or somewhere else.
constexpr double kGraceSeconds = 0.1;
// Polls without news that a thread that gives way is taken to have made already, so that it naps for long at once: the
// others may need the processor.
constexpr std::uint64_t kGiveWay = 10000;

// Makes a flag true while it exists; once at a time.
class Inside {
 public:
  explicit Inside(bool& flag) : flag_(flag) {
    if (flag) throw std::logic_error("a codec of Python functions, or a signal handler, made or awaited a call during one");
    flag = true;
  }
  ~Inside() { flag_ = false; }

 private:
  bool& flag_;
};

std::uint64_t sequence_of(const unsigned char* message) {
  std::uint64_t found;
  std::memcpy(&found, message + 8, sizeof found);
  return found;
}

std::size_t data_nbytes(const unsigned char* message) {
  std::uint32_t found;
  std::memcpy(&found, message + kAgreedNbytes, sizeof found);
  return found;
}

std::string_view text(const unsigned char* message) { return {reinterpret_cast<const char*>(message), kHeaderNbytes}; }

}  // namespace

Loop::Loop(std::shared_ptr<Wire> given, int rank, int size, std::size_t most_eager, std::string call)
    : wire(std::move(given)),
      rank(rank),
      size(size),
      call_(std::move(call)),
      slot_nbytes_(kHeaderNbytes + most_eager),
      inbox_(slot_nbytes_ * static_cast<std::size_t>(size)) {
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) listen(peer);
}

void Loop::begin(std::shared_ptr<Run> run, const std::vector<std::string>& headers, std::uint64_t sequence,
                 double deadline, bool traced, const Unusual& unusual) {
  const Inside inside(advancing_);
  const Token owner = sequence % kRunsInFlight;
  if (by_owner_[owner]) throw std::logic_error("too many runs in flight");
  run->prepare(sequence, headers, owner << kOwnerShift, static_cast<int>(owner) * kTagsPerRun, deadline, traced);
  by_owner_[owner] = run;
  active_.push_back(run);
  deadline_ = std::min(deadline_, deadline);
  idle_ = 0;
  run->begin(*wire);
  while (run->sends_data_with_headers() && run->can_compute()) run->compute(*wire);  // so that they get on their way
  for (std::size_t i = 0; i < early_.size();) {
    if (early_[i].sequence != sequence) {
      ++i;
      continue;
    }
    const Early found = std::move(early_[i]);
    early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(i));
    agree(*run, found.peer, found.message.data(), unusual);
  }
  look_for_ended();
}

Outcome Loop::advance(const Turn& turn, const Unusual& unusual) {
  if (advancing_ && turn.once) return Outcome::pause;  // it was only asked whether a call is done
  const Inside inside(advancing_);
  double looked = turn.look_up ? seconds() : 0;
  while (!halted_) {
    const bool computed = compute();
    poll(computed ? 0 : idle_, turn.gives_way ? kGiveWay : 0, unusual);
    // A library may look at its slower networks only where shared memory has no news: all of it comes first.
    while (!completed_.empty() && ended_.empty() && !halted_) poll(0, 0, unusual);
    if (!ended_.empty()) return Outcome::ended;
    const double now = seconds();
    if (idle_ && now > deadline_ && is_overdue(now)) return Outcome::overdue;
    if (turn.once || now >= turn.limit || (turn.gives_way && wanted)) return Outcome::pause;
    if (turn.look_up && now > looked + kLookSeconds) {
      turn.look_up();
      looked = now;
    }
  }
  return Outcome::pause;
}

void Loop::tell(const std::string& message) {
  outbox_.assign(message.begin(), message.end());
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    ++telling_;
    wire->send(peer, kControlTag, outbox_.data(), outbox_.size(), kTelling << kOwnerShift);
  }
}

void Loop::drain(std::uint64_t idle, const Unusual& unusual) {
  std::vector<Token> completed;
  wire->poll(idle, completed);
  for (const Token token : completed) {
    const int peer = static_cast<int>(static_cast<Number>(token));
    if (token >> kOwnerShift == kTelling) --telling_;
    if (token >> kOwnerShift != kListening) continue;
    if (is_call(inbox(peer))) {
      listen(peer);
    } else {
      unusual(peer, text(inbox(peer)));
    }
  }
}

// Runs the first operation that is ready; false where there is none.
bool Loop::compute() {
  for (const std::shared_ptr<Run>& run : active_) {
    if (!run->can_compute()) continue;
    run->compute(*wire);
    idle_ = 0;
    look_for_ended();
    return true;
  }
  return false;
}

// Acts on what has completed.
void Loop::poll(std::uint64_t idle, std::uint64_t more, const Unusual& unusual) {
  completed_.clear();
  wire->poll(idle ? idle + more : 0, completed_);
  if (halted_) return;
  idle_ = completed_.empty() ? idle + 1 : 0;
  std::exception_ptr bad_news;  // beside which a run may have ended well
  for (const Token token : completed_) {
    try {
      dispatch(token, unusual);
    } catch (...) {
      if (!bad_news) bad_news = std::current_exception();
    }
  }
  if (!completed_.empty()) look_for_ended();
  if (bad_news) std::rethrow_exception(bad_news);
}

void Loop::dispatch(Token token, const Unusual& unusual) {
  const Token owner = token >> kOwnerShift;
  const auto number = static_cast<Number>(token);
  if (owner < kRunsInFlight) {
    by_owner_[owner]->completed(*wire, number);
  } else if (owner == kListening) {
    heard(static_cast<int>(number), unusual);
  } else if (owner == kTelling) {
    --telling_;
  }
}

bool Loop::is_call(const unsigned char* message) const { return !std::memcmp(message, call_.data(), call_.size()); }

void Loop::listen(int peer) {
  wire->receive(peer, kControlTag, inbox(peer), slot_nbytes_, kListening << kOwnerShift | static_cast<Token>(peer), true);
}

// A control message has come: usually the header of a call that this rank has made, too, or will make.
void Loop::heard(int peer, const Unusual& unusual) {
  const unsigned char* message = inbox(peer);
  if (!is_call(message)) return unusual(peer, text(message));
  const std::uint64_t sequence = sequence_of(message);
  const std::shared_ptr<Run>& run = by_owner_[sequence % kRunsInFlight];
  if (run && run->sequence() == sequence) {
    agree(*run, peer, message, unusual);
  } else {
    const std::size_t nbytes = kHeaderNbytes + std::min(data_nbytes(message), slot_nbytes_ - kHeaderNbytes);
    early_.push_back({sequence, peer, {message, message + nbytes}});
  }
  listen(peer);
}

// Compares a header with that of this rank.
void Loop::agree(Run& run, int peer, const unsigned char* message, const Unusual& unusual) {
  const std::size_t nbytes = data_nbytes(message);
  if (!run.agrees(peer, message) || (nbytes && nbytes != run.data_nbytes(peer))) return unusual(peer, text(message));
  run.heard(*wire, peer, message + kHeaderNbytes, nbytes);
}

void Loop::look_for_ended() {
  for (std::size_t i = 0; i < active_.size();) {
    if (!active_[i]->is_done()) {
      ++i;
      continue;
    }
    ended_.push_back(active_[i]->sequence());
    by_owner_[active_[i]->sequence() % kRunsInFlight] = nullptr;
    active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
    find_deadline();
  }
}

void Loop::find_deadline() {
  deadline_ = std::numeric_limits<double>::infinity();
  for (const std::shared_ptr<Run>& run : active_) deadline_ = std::min(deadline_, run->deadline());
}

// Whether a run has failed by its deadline: nothing has come, nothing can be computed, and its grace is over, too.
bool Loop::is_overdue(double now) {
  for (const std::shared_ptr<Run>& run : active_)
    if (run->can_compute()) return false;
  for (const std::shared_ptr<Run>& run : active_) {
    if (now <= run->deadline() || run->extend(now + kGraceSeconds)) continue;
    overdue_ = run->sequence();
    return true;
  }
  find_deadline();
  return false;
}

}  // namespace qccl
