#ifdef __linux__
#include "forwarder.h"

#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

namespace qccl::lab {

namespace {

constexpr std::size_t kBytes = 2048, kBatch = 64;  // of a packet's memory; packets that one system call moves
constexpr int kSocketBuffer = 64 << 20;
constexpr double kLate = 1e-3;
constexpr std::uint8_t kVendor[4] = {0x02, 0x71, 0x63, 0x63};  // locally administered

#ifndef PACKET_IGNORE_OUTGOING
#define PACKET_IGNORE_OUTGOING 23
#endif

void check(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
}

double seconds(const timespec& time) {
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double read_clock(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return seconds(time);
}

double now() { return read_clock(CLOCK_MONOTONIC); }

timespec interval(double length) {
  const double whole = std::floor(length);
  return {static_cast<time_t>(whole), static_cast<long>((length - whole) * 1e9)};
}

// The memory of all packets that are in the forwarder, by number.
class Memory {
 public:
  struct Packet {
    std::array<std::uint8_t, kBytes> bytes;
    std::uint32_t nbytes;
  };

  std::uint64_t take() {
    if (free_.empty()) {
      for (std::size_t i = 0; i < kBatch; ++i) free_.push_back(count_ + i);
      blocks_.push_back(std::make_unique<std::array<Packet, kBatch>>());
      count_ += kBatch;
    }
    const std::uint64_t number = free_.back();
    free_.pop_back();
    return number;
  }
  void give_back(std::uint64_t number) { free_.push_back(number); }
  Packet& operator[](std::uint64_t number) { return (*blocks_[number / kBatch])[number % kBatch]; }

 private:
  std::vector<std::unique_ptr<std::array<Packet, kBatch>>> blocks_;
  std::vector<std::uint64_t> free_;
  std::uint64_t count_ = 0;
};

// A packet socket on an interface.
class Port {
 public:
  explicit Port(const std::string& interface) : fd_(::socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    check(fd_, "socket(AF_PACKET)");
    const int one = 1, size = kSocketBuffer;
    check(set(SOL_PACKET, PACKET_IGNORE_OUTGOING, one), "PACKET_IGNORE_OUTGOING");
    check(set(SOL_SOCKET, SO_RCVBUFFORCE, size), "SO_RCVBUFFORCE");
    check(set(SOL_SOCKET, SO_SNDBUFFORCE, size), "SO_SNDBUFFORCE");
    check(set(SOL_SOCKET, SO_TIMESTAMPNS, one), "SO_TIMESTAMPNS");
    set(SOL_PACKET, PACKET_QDISC_BYPASS, one);
    sockaddr_ll address{};
    address.sll_family = AF_PACKET;
    address.sll_protocol = htons(ETH_P_ALL);
    address.sll_ifindex = static_cast<int>(if_nametoindex(interface.c_str()));
    check(address.sll_ifindex ? 0 : -1, interface.c_str());
    check(::bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address), "bind(AF_PACKET)");
  }
  Port(Port&& other) noexcept : outgoing(std::move(other.outgoing)), fd_(std::exchange(other.fd_, -1)) {}
  ~Port() {
    if (fd_ >= 0) ::close(fd_);
  }

  int fd() const { return fd_; }

  // Packets that the kernel had no room for since the last call.
  std::uint64_t overrun() const {
    tpacket_stats found{};
    socklen_t length = sizeof found;
    return getsockopt(fd_, SOL_PACKET, PACKET_STATISTICS, &found, &length) == 0 ? found.tp_drops : 0;
  }

  std::vector<std::uint64_t> outgoing;

 private:
  int set(int level, int name, const int& value) { return setsockopt(fd_, level, name, &value, sizeof value); }

  int fd_;
};

}  // namespace

class Forwarder::Ports {
 public:
  Ports(const std::vector<std::string>& interfaces, Network& network, Lapses& lapses, double grain)
      : network_(network), lapses_(lapses), grain_(grain) {
    for (const std::string& interface : interfaces) ports_.emplace_back(interface);
    for (const Port& port : ports_) polled_.push_back({port.fd(), POLLIN, 0});
  }

  void run(int stop) {
    polled_.push_back({stop, POLLIN, 0});
    while (wait()) {
      for (std::uint32_t from = 0; from < ports_.size(); ++from) {
        if (polled_[from].revents) receive(from);
      }
      deliver();
      for (Port& port : ports_) send(port);
    }
    note_overruns();
  }

 private:
  // Sleeps until packets have come or are due, but at least for a grain; false if the forwarder is to end.
  bool wait() {
    for (pollfd& each : polled_) each.revents = 0;
    const double pause = std::min(network_.next() - grain_ / 2 - now(), 1.0);
    const timespec longest = interval(std::max(pause, 0.0));
    if (ppoll(polled_.data(), polled_.size(), &longest, nullptr) < 0 && errno != EINTR) check(-1, "ppoll");
    const double left = last_ + grain_ - now();
    if (left > 0) {
      const timespec rest = interval(left);
      clock_nanosleep(CLOCK_MONOTONIC, 0, &rest, nullptr);
      const timespec none{};
      if (ppoll(polled_.data(), polled_.size(), &none, nullptr) < 0 && errno != EINTR) check(-1, "ppoll");
    }
    last_ = now();
    if (last_ > noted_ + 0.1) note_overruns();
    return polled_.back().revents == 0;
  }

  void note_overruns() {
    for (const Port& port : ports_) lapses_.overrun += port.overrun();
    noted_ = last_;
  }

  void receive(std::uint32_t from) {
    const double offset = now() - read_clock(CLOCK_REALTIME);
    int got;
    do {
      std::array<mmsghdr, kBatch> messages{};
      std::array<iovec, kBatch> parts;
      std::array<std::uint64_t, kBatch> numbers;
      alignas(cmsghdr) std::array<std::array<char, CMSG_SPACE(sizeof(timespec))>, kBatch> notes;
      for (std::size_t i = 0; i < kBatch; ++i) {
        numbers[i] = memory_.take();
        parts[i] = {memory_[numbers[i]].bytes.data(), kBytes};
        messages[i].msg_hdr.msg_iov = &parts[i];
        messages[i].msg_hdr.msg_iovlen = 1;
        messages[i].msg_hdr.msg_control = notes[i].data();
        messages[i].msg_hdr.msg_controllen = notes[i].size();
      }
      got = std::max(0, recvmmsg(ports_[from].fd(), messages.data(), kBatch, MSG_DONTWAIT, nullptr));
      for (int i = 0; i < got; ++i) {
        if (messages[i].msg_hdr.msg_flags & MSG_TRUNC) {
          ++lapses_.refused;
          memory_.give_back(numbers[i]);
        } else {
          memory_[numbers[i]].nbytes = messages[i].msg_len;
          pass(from, numbers[i], std::min(last_, stamp(messages[i].msg_hdr) + offset));
        }
      }
      for (std::size_t i = static_cast<std::size_t>(got); i < kBatch; ++i) memory_.give_back(numbers[i]);
    } while (got == static_cast<int>(kBatch));
  }

  // When a packet arrived, by the kernel; later than now if it does not say.
  static double stamp(msghdr& header) {
    for (cmsghdr* note = CMSG_FIRSTHDR(&header); note != nullptr; note = CMSG_NXTHDR(&header, note)) {
      if (note->cmsg_level == SOL_SOCKET && note->cmsg_type == SCM_TIMESTAMPNS) {
        timespec time{};
        std::memcpy(&time, CMSG_DATA(note), sizeof time);
        return seconds(time);
      }
    }
    return kNever;
  }

  void pass(std::uint32_t from, std::uint64_t number, double arrived) {
    const Memory::Packet& packet = memory_[number];
    const std::uint8_t* to = packet.bytes.data();
    const bool is_arp = to[12] == (ETHERTYPE_ARP >> 8) && to[13] == (ETHERTYPE_ARP & 255);
    const std::uint32_t port = static_cast<std::uint32_t>(to[4]) << 8 | to[5];
    const std::size_t sites = network_.sites();
    if (to[0] & 1) {
      flood(from, number);
    } else if (std::memcmp(to, kVendor, sizeof kVendor) != 0 || port >= ports_.size() || port == from) {
      memory_.give_back(number);
    } else if (is_arp || from >= sites || port >= sites) {
      ports_[port].outgoing.push_back(number);
    } else if (network_.send(from, port, packet.nbytes, arrived, number) == Fate::gone) {
      memory_.give_back(number);
    }
  }

  void flood(std::uint32_t from, std::uint64_t number) {
    for (std::uint32_t port = 0; port < ports_.size(); ++port) {
      if (port == from) continue;
      const std::uint64_t copy = memory_.take();
      memory_[copy] = memory_[number];
      ports_[port].outgoing.push_back(copy);
    }
    memory_.give_back(number);
  }

  void deliver() {
    const double time = now();
    for (Outcome out; network_.take(time + grain_ / 2, out);) {  // half a grain too early or too late
      if (!out.arrived) {
        memory_.give_back(out.tag);
        continue;
      }
      const double late = std::max(time - out.time, 0.0);
      lapses_.late += late > kLate;
      lapses_.worst_ns = std::max(lapses_.worst_ns, static_cast<std::uint64_t>(late * 1e9));
      ports_[out.to].outgoing.push_back(out.tag);
    }
  }

  void send(Port& port) {
    std::vector<std::uint64_t>& numbers = port.outgoing;
    for (std::size_t begin = 0; begin < numbers.size();) {
      std::array<mmsghdr, kBatch> messages{};
      std::array<iovec, kBatch> parts;
      const std::size_t count = std::min(kBatch, numbers.size() - begin);
      for (std::size_t i = 0; i < count; ++i) {
        Memory::Packet& packet = memory_[numbers[begin + i]];
        parts[i] = {packet.bytes.data(), packet.nbytes};
        messages[i].msg_hdr.msg_iov = &parts[i];
        messages[i].msg_hdr.msg_iovlen = 1;
      }
      const int sent = sendmmsg(port.fd(), messages.data(), static_cast<unsigned>(count), MSG_DONTWAIT);
      if (sent < 0 && errno != EINTR) ++lapses_.refused;
      begin += sent > 0 ? static_cast<std::size_t>(sent) : sent < 0 && errno == EINTR ? 0 : 1;
    }
    for (const std::uint64_t number : numbers) memory_.give_back(number);
    numbers.clear();
  }

  Network& network_;
  Lapses& lapses_;
  const double grain_;
  Memory memory_;
  std::vector<Port> ports_;
  std::vector<pollfd> polled_;
  double last_ = 0, noted_ = 0;
};

Forwarder::Forwarder(const std::vector<std::string>& interfaces, Network& network, Lapses& lapses, double grain)
    : ports_(std::make_unique<Ports>(interfaces, network, lapses, grain)) {}

Forwarder::~Forwarder() = default;

void Forwarder::run(int stop) {
  prctl(PR_SET_TIMERSLACK, 1);
  ports_->run(stop);
}

std::vector<std::uint8_t> port_address(std::uint32_t port) {
  std::vector<std::uint8_t> address(std::begin(kVendor), std::end(kVendor));
  address.push_back(static_cast<std::uint8_t>(port >> 8));
  address.push_back(static_cast<std::uint8_t>(port));
  return address;
}

}  // namespace qccl::lab
#endif
