// A model of a network between sites: packets go in with times, and come out with times. No sockets, no clock.
//
//   sender's uplink (rate, drop-tail queue) -> path (delay, jitter, random loss) -> receiver's downlink (rate, queue)
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

namespace qccl::lab {

constexpr double kNever = std::numeric_limits<double>::infinity();

// A splitmix64 generator: the same seed draws the same numbers everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  double uniform();  // in [0, 1)

 private:
  std::uint64_t state_;
};

// One direction of a site's connection. `rate` is in bytes per second; a packet that would wait for longer than `queue`
// seconds is dropped.
class Link {
 public:
  Link(double rate, double queue) : rate_(rate), queue_(queue) {}
  // Sends a packet that arrives at `now`; returns when its last byte has left, or kNever if the queue is full.
  double send(double now, std::size_t nbytes);

 private:
  double rate_, queue_, free_ = 0;  // free_: when the last packet has left
};

// The delay, jitter and loss from one site to another, in seconds and as a probability.
//
// The delay moves in straight lines between values that are drawn from delay - jitter to delay + jitter, one every 4
// jitters. It changes by at most half a second a second, so that packets never overtake each other.
class Path {
 public:
  Path(double delay, double jitter, double loss, std::uint64_t seed)
      : delay_(delay), jitter_(jitter), loss_(loss), losses_(seed), jitters_(~seed) {}
  bool loses() { return losses_.uniform() < loss_; }
  double arrival(double departure);

 private:
  double deviation(double time);

  double delay_, jitter_, loss_;
  Random losses_, jitters_;
  double begin_ = -kNever, end_ = -kNever, from_ = 0, to_ = 0;  // the current line, in time and value
  double last_ = 0;                                            // the last arrival
};

// Counts of one path. Other processes read them, so that their order and size are an interface: qccl/bench/counters.py.
struct Counters {
  std::uint64_t packets, nbytes;                      // that the sender's uplink has carried
  std::uint64_t dropped_up, dropped_down;             // by the full queue of the uplink, of the downlink
  std::uint64_t lost;                                 // at random
  std::uint64_t cut;                                  // while the path was cut
  std::uint64_t delivered_packets, delivered_nbytes;  // that have reached the receiver's site
  volatile std::uint64_t is_cut;                      // not a count: the lab's process sets it to cut the path
};

enum class Fate { queued, gone };

// A packet that has come out: `arrived` says whether it has reached its receiver, or was dropped on the way.
struct Outcome {
  std::uint64_t tag;
  std::uint32_t from, to;
  double time;
  bool arrived;
};

class Network {
 public:
  struct Ends {
    Link up, down;
  };

  // `counters` has the counters of the path from i to j at [i * sites + j], and outlives the network.
  Network(std::vector<Ends> sites, std::uint64_t seed, Counters* counters);

  void set_path(std::uint32_t from, std::uint32_t to, double delay, double jitter, double loss);
  std::size_t sites() const { return sites_.size(); }

  // Takes a packet that site `from` sends at `now`. Fate::gone: it was dropped, and will not come out.
  Fate send(std::uint32_t from, std::uint32_t to, std::size_t nbytes, double now, std::uint64_t tag);
  // The next packet that comes out at or before `now`; false if there is none.
  bool take(double now, Outcome& out);
  // When take() has something to do; kNever if nothing is under way.
  double next() const { return events_.empty() ? kNever : events_.top().time; }

 private:
  struct Event {
    double time;
    std::uint64_t order, tag;
    std::uint32_t from, to;
    std::size_t nbytes;
    bool at_receiver;  // it has passed the downlink
    bool operator<(const Event& o) const { return time > o.time || (time == o.time && order > o.order); }
  };

  std::size_t at(std::uint32_t from, std::uint32_t to) const { return from * sites_.size() + to; }

  std::vector<Ends> sites_;
  std::vector<Path> paths_;
  Counters* counters_;
  std::uint64_t seed_, order_ = 0;
  std::priority_queue<Event> events_;
};

}  // namespace qccl::lab
