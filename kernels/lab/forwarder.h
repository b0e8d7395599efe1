// A switch in user space whose ports are network interfaces, between which a Network delays, drops and limits packets.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "network.h"

namespace qccl::lab {

// What the forwarder did wrong, for the lab's check of itself. Other processes read it: see qccl/bench/counters.py.
struct Lapses {
  std::uint64_t overrun;   // packets that arrived faster than it read them
  std::uint64_t refused;   // packets that an interface did not take, or longer than the MTU
  std::uint64_t late;      // packets that were sent on more than 1 ms too late
  std::uint64_t worst_ns;  // the longest time by which one was late
};

// The Ethernet address that the interface behind port `port` must have: the forwarder learns nothing.
std::vector<std::uint8_t> port_address(std::uint32_t port);

// Interfaces 0 to sites - 1 lead to the sites of the network, and those after them to machines that are outside of it:
// their packets are passed on at once, and so are broadcasts (ARP).
class Forwarder {
 public:
  // From now on packets wait for run(). `grain`: seconds between two rounds; fewer are more accurate, and take more
  // processor time. Throws std::system_error.
  Forwarder(const std::vector<std::string>& interfaces, Network& network, Lapses& lapses, double grain);
  ~Forwarder();
  // Forwards until `stop` can be read or its other end is closed.
  void run(int stop);

 private:
  class Ports;
  std::unique_ptr<Ports> ports_;
};

}  // namespace qccl::lab
