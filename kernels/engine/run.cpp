#include "run.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace qccl {

namespace {

// The first two short runs of a program and every 16th are timed, because looking at the clock slows a short run.
constexpr std::uint64_t kFirstTimed = 2, kTimedEvery = 16;

}  // namespace

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double coarse_seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

Run::Run(std::shared_ptr<const Steps> steps, MemoryPointer memory)
    : steps_(std::move(steps)),
      memory_(std::move(memory)),
      filled_(steps_->eager().size()),
      data_(static_cast<std::size_t>(steps_->size)) {
  for (const EagerData& each : steps_->eager()) eager_.emplace_back(kHeaderNbytes + each.nbytes);
}

void Run::prepare(std::uint64_t sequence, Token run_slot, int first_tag, double deadline, const double* looked) {
  sequence_ = sequence;
  run_slot_ = run_slot;
  first_tag_ = first_tag;
  deadline_ = deadline;
  extended_ = false;
  counts_ = steps_->counts();
  ready_.clear();
  left_ = steps_->total();
  for (Message& header : headers_) std::memcpy(header.data() + kSequenceOffset, &sequence, sizeof sequence);
  std::fill(filled_.begin(), filled_.end(), false);
  for (Message& each : data_) each.clear();
  looked_ = looked;
  starts_.resize(steps_->count());
  trace_.clear();
}

void Run::set_call(std::uint64_t call, float lr) {
  memory_->call = call;
  memory_->lr = lr;
}

void Run::set_headers(const std::vector<std::string>& headers) {
  if (headers.size() != 1 && headers.size() != static_cast<std::size_t>(steps_->size))
    throw std::invalid_argument("there must be one header, or one for each rank");
  headers_.resize(headers.size());
  for (std::size_t k = 0; k < headers.size(); ++k) {
    if (headers[k].size() != kAgreedNbytes) throw std::invalid_argument("a header has another length");
    headers_[k].assign(kHeaderNbytes, 0);
    std::memcpy(headers_[k].data(), headers[k].data(), kAgreedNbytes);
  }
  description_ = std::make_shared<const std::string>(headers[0]);
}

void Run::begin(Wire& wire) {
  for (int peer = 0; peer < steps_->size; ++peer) {
    if (peer == steps_->rank || (shares_header() && steps_->gets_data(peer))) continue;
    ++left_;
    wire.send(peer, kControlTag, header(peer).data(), kHeaderNbytes, token(steps_->header(steps_->rank)));
  }
  for (Number i = 0; i < steps_->count(); ++i)
    if (!steps_->counts()[i]) launch(wire, i);
}

bool Run::extend(double deadline) {
  if (extended_) return false;
  deadline_ = deadline;
  return extended_ = true;
}

bool Run::header_matches(int peer, const unsigned char* given) const {
  return !std::memcmp(header(peer).data(), given, kAgreedNbytes);
}

std::size_t Run::data_nbytes(int peer) const {
  const Number i = steps_->first_receive(peer);
  return i == kNone ? 0 : (*steps_)[i].nbytes;
}

void Run::header_received(Wire& wire, int peer, const unsigned char* data, std::size_t nbytes) {
  arriving_ = nbytes ? peer : -1;
  arrived_ = data;
  completed(wire, steps_->header(peer));
  if (arriving_ >= 0) data_[static_cast<std::size_t>(peer)].assign(data, data + nbytes);
  arriving_ = -1;
}

void Run::completed(Wire& wire, Number step) {
  // This rank's own header is sent to several others, and all else happens once.
  if (step >= counts_.size() || (counts_[step] == kCompleted && step != steps_->header(steps_->rank)))
    throw std::logic_error("a step of a run completed twice");
  stopped(step);
  counts_[step] = kCompleted;
  for (const Number* i = steps_->successors_begin(step); i != steps_->successors_end(step); ++i)
    if (!--counts_[*i]) launch(wire, *i);
  --left_;
}

void Run::count_in(std::shared_ptr<Tally> tally, const Tally::Traffic& traffic) {
  tally_ = std::move(tally);
  traffic_ = traffic;
}

void Run::set_begin(double now, double attended) {
  begun_ = now;
  attended_before_ = attended;
  timed_ = tally_ && (steps_->is_long() || begun_runs_ < kFirstTimed || begun_runs_ % kTimedEvery == 0);
  ++begun_runs_;
  if (timed_) computing_ = computing_attended_ = 0;
}

double Run::ended(double recorded) {
  if (timed_) lag_ = std::max(seconds() - recorded, 0.0);
  return recorded + lag_;
}

void Run::count(double now, double attended, double counted) {
  if (!tally_) return;
  const double total = now - begun_, waited = attended - std::max(attended_before_, counted);
  tally_->add(traffic_);
  tally_->add({total, std::min(computing_, total), std::max(waited - computing_attended_, 0.0),
               std::max(total - (attended - attended_before_), 0.0)});
}

void Run::compute(Wire& wire, bool attended) {
  std::pop_heap(ready_.begin(), ready_.end(), std::greater<>());
  const Number i = ready_.back();
  ready_.pop_back();
  started(i);
  const double begin = timed_ ? seconds() : 0;
  (*steps_)[i].operation->run();
  if (timed_) {
    const double taken = seconds() - begin;
    computing_ += taken;
    if (attended) computing_attended_ += taken;
  }
  completed(wire, i);
}

void Run::launch(Wire& wire, Number i) {
  if (i == steps_->gate()) return completed(wire, i);
  const Step& step = (*steps_)[i];
  if (step.operation) {
    ready_.push_back(i);
    std::push_heap(ready_.begin(), ready_.end(), std::greater<>());
  } else {
    started(i);
    step.is_send ? send(wire, i) : receive(wire, i);
  }
}

void Run::send(Wire& wire, Number i) {
  const Step& step = (*steps_)[i];
  if (step.message == kNone || !shares_header())
    return wire.send(step.peer, first_tag_ + step.tag, step.data, step.nbytes, token(i));
  const Message& message = eager_message(step.message);
  wire.send(step.peer, kControlTag, message.data(), message.size(), token(i));
}

// Filled once for all peers.
const Run::Message& Run::eager_message(Number number) {
  Message& message = eager_[number];
  if (!filled_[number]) {
    filled_[number] = true;
    const EagerData& source = steps_->eager()[number];
    const auto nbytes = static_cast<std::uint32_t>(source.nbytes);
    std::memcpy(message.data(), headers_[0].data(), kAgreedNbytes);
    std::memcpy(message.data() + kAgreedNbytes, &nbytes, sizeof nbytes);
    std::memcpy(message.data() + kHeaderNbytes, source.data, source.nbytes);
  }
  return message;
}

void Run::receive(Wire& wire, Number i) {
  const Step& step = (*steps_)[i];
  Message& kept = data_[static_cast<std::size_t>(step.peer)];
  const bool may_be_there = i == steps_->first_receive(step.peer);
  if (may_be_there && step.peer == arriving_) {
    std::memcpy(step.data, arrived_, step.nbytes);
    arriving_ = -1;
    completed(wire, i);
  } else if (may_be_there && !kept.empty()) {
    std::memcpy(step.data, kept.data(), step.nbytes);
    kept.clear();
    completed(wire, i);
  } else {
    wire.receive(step.peer, first_tag_ + step.tag, step.data, step.nbytes, token(i), nullptr);
  }
}

std::vector<int> Run::missing_ranks() const {
  std::vector<int> found;
  for (int peer = 0; peer < steps_->size; ++peer)
    if (peer != steps_->rank && counts_[steps_->header(peer)] != kCompleted) found.push_back(peer);
  return found;
}

std::pair<std::size_t, std::size_t> Run::transferred() const {
  std::size_t sent = 0, received = 0;
  for (Number i = 0; i < steps_->count(); ++i) {
    const Step& step = (*steps_)[i];
    if (!step.operation && counts_[i] == kCompleted) (step.is_send ? sent : received) += step.nbytes;
  }
  return {sent, received};
}

std::vector<TransferRecord> Run::under_way() const {
  std::vector<TransferRecord> found;
  for (Number i = 0; i < steps_->count(); ++i) {
    const Step& step = (*steps_)[i];
    if (!step.operation && !counts_[i]) found.push_back({step.is_send, step.peer, step.nbytes, starts_[i]});
  }
  return found;
}

std::vector<int> Run::waits_for(bool is_send) const {
  std::vector<int> found;
  for (Number i = 0; i < steps_->count(); ++i) {
    const Step& step = (*steps_)[i];
    if (!step.operation && step.is_send == is_send && counts_[i] == 0) found.push_back(step.peer);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

void Run::started(Number i) {
  if (!looked_) {
    starts_[i] = seconds();
  } else if (!(*steps_)[i].operation) {
    starts_[i] = *looked_;
  }
}

void Run::stopped(Number i) {
  if (!looked_ && i < steps_->count()) trace_.push_back({i, starts_[i], seconds()});
}

}  // namespace qccl
