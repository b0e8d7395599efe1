#include "network.h"

#include <algorithm>
#include <utility>

namespace qccl::lab {

double Random::uniform() {
  std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

double Link::send(double now, std::size_t nbytes) {
  if (free_ - now > queue_) return kNever;
  return free_ = std::max(now, free_) + static_cast<double>(nbytes) / rate_;
}

double Path::arrival(double departure) {
  return last_ = std::max(last_, departure + delay_ + (jitter_ > 0 ? deviation(departure) : 0));
}

double Path::deviation(double time) {
  const double step = 4 * jitter_;
  const auto draw = [&] { return jitter_ * (2 * jitters_.uniform() - 1); };
  if (time > end_ + step) {  // first packet, or after a pause
    begin_ = time, end_ = time + step;
    from_ = draw(), to_ = draw();
  } else if (time > end_) {
    begin_ = end_, end_ += step;
    from_ = to_, to_ = draw();
  }
  return from_ + (to_ - from_) * (time - begin_) / step;
}

Network::Network(std::vector<Ends> sites, std::uint64_t seed, Counters* counters)
    : sites_(std::move(sites)), counters_(counters), seed_(seed) {
  for (std::size_t i = 0; i < sites_.size() * sites_.size(); ++i) paths_.emplace_back(0, 0, 0, 0);
}

void Network::set_path(std::uint32_t from, std::uint32_t to, double delay, double jitter, double loss) {
  // far apart, because neighbouring seeds of splitmix64 draw the same numbers, shifted
  Random far(seed_ ^ (at(from, to) + 1) * 0xd1342543de82ef95);
  paths_[at(from, to)] = Path(delay, jitter, loss, static_cast<std::uint64_t>(far.uniform() * 0x1p63));
}

Fate Network::send(std::uint32_t from, std::uint32_t to, std::size_t nbytes, double now, std::uint64_t tag) {
  Counters& counters = counters_[at(from, to)];
  Path& path = paths_[at(from, to)];
  const double departure = sites_[from].up.send(now, nbytes);
  if (departure == kNever) {
    ++counters.dropped_up;
    return Fate::gone;
  }
  ++counters.packets;
  counters.nbytes += nbytes;
  if (counters.is_cut) {
    ++counters.cut;
  } else if (path.loses()) {
    ++counters.lost;
  } else {
    events_.push({path.arrival(departure), order_++, tag, from, to, nbytes, false});
    return Fate::queued;
  }
  return Fate::gone;
}

bool Network::take(double now, Outcome& out) {
  while (!events_.empty() && events_.top().time <= now) {
    Event event = events_.top();
    events_.pop();
    Counters& counters = counters_[at(event.from, event.to)];
    if (event.at_receiver) {
      ++counters.delivered_packets;
      counters.delivered_nbytes += event.nbytes;
      out = {event.tag, event.from, event.to, event.time, true};
      return true;
    }
    const double time = sites_[event.to].down.send(event.time, event.nbytes);
    if (time == kNever) {
      ++counters.dropped_down;
      out = {event.tag, event.from, event.to, event.time, false};
      return true;
    }
    event.time = time, event.order = order_++, event.at_receiver = true;
    events_.push(event);
  }
  return false;
}

}  // namespace qccl::lab
