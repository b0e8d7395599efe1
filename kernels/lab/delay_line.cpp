// The lab's delay and loss where the kernel has no netem: delay_line SECONDS LOSS INTERFACE...
//
// A switch in user space: a packet waits for SECONDS, or is lost with the probability LOSS. Then it leaves by the
// interface whose number, from 0 on, is in the last two bytes of its destination's address; a broadcast, by all others.
// It ends when standard input does, and reports on standard error if the machine was too busy for it.
#include <arpa/inet.h>
#include <err.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t kBytes = 2048, kBatch = 64;  // bytes of a packet's memory; packets that one system call receives
constexpr int kSocketBuffer = 64 << 20;
constexpr double kLate = 1e-3, kMayBeLate = 0.02;  // seconds; share of the packets that may be late

struct Packet {
  double due;
  std::size_t from;
  std::vector<std::uint8_t> bytes;
};

double seconds(const timespec& time) {
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

timespec interval(double length) {
  const double whole = std::floor(length);
  return {static_cast<time_t>(whole), static_cast<long>((length - whole) * 1e9)};
}

double read_clock(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return seconds(time);
}

double now() { return read_clock(CLOCK_MONOTONIC); }

void check(int result, const char* what) {
  if (result < 0) err(1, "%s", what);
}

// A socket that receives and sends the packets of an interface.
int open_port(const char* interface) {
  const int fd = ::socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  check(fd, "socket(AF_PACKET)");
  const auto set = [&](int level, int name, int value) { return setsockopt(fd, level, name, &value, sizeof value); };
  check(set(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1), "PACKET_IGNORE_OUTGOING");
  check(set(SOL_SOCKET, SO_RCVBUFFORCE, kSocketBuffer), "SO_RCVBUFFORCE");
  check(set(SOL_SOCKET, SO_SNDBUFFORCE, kSocketBuffer), "SO_SNDBUFFORCE");
  check(set(SOL_SOCKET, SO_TIMESTAMPNS, 1), "SO_TIMESTAMPNS");
  sockaddr_ll address{};
  address.sll_family = AF_PACKET;
  address.sll_protocol = htons(ETH_P_ALL);
  address.sll_ifindex = static_cast<int>(if_nametoindex(interface));
  check(address.sll_ifindex ? 0 : -1, interface);
  check(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), "bind(AF_PACKET)");
  return fd;
}

class DelayLine {
 public:
  DelayLine(double delay, double loss, std::vector<pollfd> ports_and_stop)
      : delay_(delay), loss_(loss), polled_(std::move(ports_and_stop)), ports_(polled_.size() - 1) {}

  void run() {
    while (wait()) {
      for (std::size_t from = 0; from < ports_; ++from) {
        if (polled_[from].revents) receive(from);
      }
      for (; !packets_.empty() && packets_.front().due <= last_ + grain_ / 2; packets_.pop_front()) {
        deliver(packets_.front());
      }
    }
    report();
  }

 private:
  // Sleeps until a packet comes or is due, but at least for a grain: waking costs more than a packet. False at the end.
  bool wait() {
    for (pollfd& each : polled_) each.revents = 0;
    const double pause = packets_.empty() ? 1.0 : packets_.front().due - now() - grain_ / 2;
    const timespec longest = interval(std::max(pause, 0.0)), none{};
    ppoll(polled_.data(), polled_.size(), &longest, nullptr);
    const timespec rest = interval(std::max(last_ + grain_ - now(), 0.0));
    nanosleep(&rest, nullptr);
    ppoll(polled_.data(), polled_.size(), &none, nullptr);
    last_ = now();
    return polled_.back().revents == 0;
  }

  void receive(std::size_t from) {
    const double offset = now() - read_clock(CLOCK_REALTIME);
    int got;
    do {
      std::array<mmsghdr, kBatch> messages{};
      std::array<iovec, kBatch> parts;
      alignas(cmsghdr) std::array<std::array<char, CMSG_SPACE(sizeof(timespec))>, kBatch> notes;
      for (std::size_t i = 0; i < kBatch; ++i) {
        parts[i] = {memory_[i].data(), kBytes};
        messages[i].msg_hdr.msg_iov = &parts[i];
        messages[i].msg_hdr.msg_iovlen = 1;
        messages[i].msg_hdr.msg_control = notes[i].data();
        messages[i].msg_hdr.msg_controllen = notes[i].size();
      }
      got = recvmmsg(polled_[from].fd, messages.data(), kBatch, MSG_DONTWAIT, nullptr);
      for (std::size_t i = 0; static_cast<int>(i) < got; ++i) {
        if (uniform_(random_) < loss_) continue;
        const std::uint8_t* begin = memory_[i].data();
        const double arrived = std::min(last_, stamp(messages[i].msg_hdr) + offset);
        packets_.push_back({arrived + delay_, from, {begin, begin + messages[i].msg_len}});
      }
    } while (got == static_cast<int>(kBatch));
  }

  // When a packet arrived according to the kernel; later than now if the kernel does not say.
  static double stamp(msghdr& header) {
    const cmsghdr* note = CMSG_FIRSTHDR(&header);
    if (note == nullptr) return HUGE_VAL;
    timespec time{};
    std::memcpy(&time, CMSG_DATA(note), sizeof time);
    return seconds(time);
  }

  void deliver(const Packet& packet) {
    const std::uint8_t* to = packet.bytes.data();
    const std::size_t port = static_cast<std::size_t>(to[4]) << 8 | to[5];
    const bool is_broadcast = to[0] & 1;
    for (std::size_t each = 0; each < ports_; ++each) {
      if (each == packet.from || (each != port && !is_broadcast)) continue;
      refused_ += ::send(polled_[each].fd, to, packet.bytes.size(), MSG_DONTWAIT) < 0;
    }
    const double late = now() - packet.due;
    ++delivered_, late_ += late > kLate, worst_ = std::max(worst_, late);
  }

  void report() {
    for (std::size_t each = 0; each < ports_; ++each) {
      tpacket_stats found{};
      socklen_t length = sizeof found;
      getsockopt(polled_[each].fd, SOL_PACKET, PACKET_STATISTICS, &found, &length);
      refused_ += found.tp_drops;
    }
    if (!refused_ && static_cast<double>(late_) <= kMayBeLate * static_cast<double>(delivered_)) return;
    std::fprintf(stderr,
                 "qccl-bench: the lab's network lost %zu packets that it should not have, and %zu of %zu were more than 1 "
                 "ms late (at most %.1f ms): the machine is too busy, or too slow for these links\n",
                 refused_, late_, delivered_, worst_ * 1e3);
  }

  const double delay_, loss_, grain_ = std::clamp(0.02 * delay_, 100e-6, 500e-6);
  std::vector<pollfd> polled_;
  const std::size_t ports_;
  std::array<std::array<std::uint8_t, kBytes>, kBatch> memory_;
  std::deque<Packet> packets_;  // in the order in which they are due, to a grain
  std::mt19937_64 random_{std::random_device{}()};
  std::uniform_real_distribution<double> uniform_{0, 1};
  std::size_t delivered_ = 0, late_ = 0, refused_ = 0;
  double worst_ = 0, last_ = 0;  // seconds by which a packet was late at most; when this round began
};

// Run before all else: ranks that poll keep every processor busy, and this process sleeps most of the time.
void hurry() {
  const sched_param first{1};
  setpriority(PRIO_PROCESS, 0, -20);
  sched_setscheduler(0, SCHED_RR, &first);
  prctl(PR_SET_TIMERSLACK, 1);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) errx(2, "usage: delay_line SECONDS LOSS INTERFACE...");
  std::vector<pollfd> ports;
  for (int i = 3; i < count; ++i) ports.push_back({open_port(arguments[i]), POLLIN, 0});
  ports.push_back({STDIN_FILENO, POLLIN, 0});
  hurry();
  std::puts("ready");
  std::fflush(stdout);
  DelayLine(std::atof(arguments[1]), std::atof(arguments[2]), std::move(ports)).run();
}
