#include "steps.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace qccl {

Steps::Steps(int rank, int size, std::size_t most_eager, const std::vector<int>& sends_ahead)
    : rank(rank), size(size), most_eager_(most_eager), sends_ahead_(static_cast<std::size_t>(size)) {
  for (const int peer : sends_ahead) sends_ahead_.at(static_cast<std::size_t>(peer)) = true;
}

void Steps::add_operation(const Operation& operation, const std::vector<Number>& needs, bool writes_output) {
  Step step;
  step.operation = operation.copy();
  if (dynamic_cast<const Commit*>(&operation)) commit_ = count();
  add(std::move(step), needs, writes_output);
}

void Steps::add_transfer(bool is_send, int peer, int tag, std::uintptr_t address, std::size_t nbytes,
                         const std::vector<Number>& needs) {
  if (peer < 0 || peer >= size || peer == rank) throw std::invalid_argument("a transfer needs another rank");
  Step step;
  step.is_send = is_send;
  step.peer = peer;
  step.tag = tag;
  step.data = reinterpret_cast<unsigned char*>(address);
  step.nbytes = nbytes;
  (is_send ? sent_ : received_) += nbytes;
  add(std::move(step), needs, false);
}

void Steps::set_source(Number i, std::uintptr_t address) {
  if (i >= count() || !steps_[i].is_send || steps_[i].nbytes <= most_eager_)
    throw std::invalid_argument("only a send whose data is not sent with a header can have another source");
  steps_[i].data = reinterpret_cast<unsigned char*>(address);
}

void Steps::add(Step step, const std::vector<Number>& needs, bool writes_output) {
  bool follows = false;
  for (const Number j : needs) {
    if (j >= count()) throw std::invalid_argument("a step can only need earlier ones");
    follows = follows || (is_transfer(j) && !(steps_[j].is_send && sends_ahead_[static_cast<std::size_t>(steps_[j].peer)]));
  }
  gated_.push_back(size > 1 && (follows || writes_output));
  needs_.insert(needs_.end(), needs.begin(), needs.end());
  needs_ends_.push_back(static_cast<Number>(needs_.size()));
  steps_.push_back(std::move(step));
}

void Steps::link() {
  if (commit_ != kNone && commit_ + 1 != count()) throw std::invalid_argument("a Commit must be the last operation");
  const std::vector<std::pair<Number, Number>> from_to = edges();
  counts_.assign(all(), 0);
  offsets_.assign(all() + 1, 0);
  for (const auto& [from, to] : from_to) {
    ++counts_[to];
    ++offsets_[from + 1];
  }
  for (Number i = 0; i < all(); ++i) offsets_[i + 1] += offsets_[i];
  successors_.resize(from_to.size());
  std::vector<Number> next(offsets_.begin(), offsets_.end() - 1);
  for (const auto& [from, to] : from_to) successors_[next[from]++] = to;
  find_eager();
  std::vector<Number>().swap(needs_);
  std::vector<Number>().swap(needs_ends_);
  std::vector<bool>().swap(gated_);
  steps_.shrink_to_fit();
}

std::size_t Steps::nbytes() const {
  std::size_t total = held(steps_) + held(counts_) + held(offsets_) + held(successors_);
  for (const Step& step : steps_)
    if (step.operation) total += step.operation->nbytes();
  return total;
}

// Pairs (a, b), ordered by b, where step b waits for a.
std::vector<std::pair<Number, Number>> Steps::edges() const {
  std::vector<std::pair<Number, Number>> found;
  found.reserve(needs_.size() + steps_.size());
  for (Number i = 0, k = 0; i < count(); ++i) {
    for (; k < needs_ends_[i]; ++k) found.emplace_back(needs_[k], i);
    if (gated_[i]) {
      found.emplace_back(gate(), i);
    } else if (is_transfer(i) && !steps_[i].is_send) {
      found.emplace_back(header(steps_[i].peer), i);
    }
  }
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) found.emplace_back(header(peer), gate());
  return found;
}

// The first send to each peer goes with the header if it is small and depends on no other rank.
void Steps::find_eager() {
  std::vector<bool> waits(gated_), met(size, false);
  gets_data_.assign(size, false);
  first_receives_.assign(size, kNone);
  for (Number i = 0, k = 0; i < count(); ++i) {
    for (; k < needs_ends_[i]; ++k) waits[i] = waits[i] || waits[needs_[k]];
    Step& step = steps_[i];
    if (!is_transfer(i)) continue;
    if (!step.is_send) {
      waits[i] = true;
      if (first_receives_[step.peer] == kNone) first_receives_[step.peer] = i;
    } else if (!met[step.peer]) {
      met[step.peer] = true;
      if (waits[i] || !step.nbytes || step.nbytes > most_eager_) continue;
      gets_data_[step.peer] = true;
      step.message = message_of(step);
    }
  }
}

// Sends of the same data to several peers share a message.
Number Steps::message_of(const Step& step) {
  const auto same = [&](const EagerData& each) { return each.data == step.data && each.nbytes == step.nbytes; };
  const auto found = std::find_if(eager_.begin(), eager_.end(), same);
  const auto number = static_cast<Number>(found - eager_.begin());
  if (found == eager_.end()) eager_.push_back({step.data, step.nbytes});
  return number;
}

}  // namespace qccl
