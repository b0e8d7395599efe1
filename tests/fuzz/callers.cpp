// Whoever calls a rank between sites, from the first byte on: ranks and strangers say who they are, or something else, and
// send frames. The wire is the library's, of rank 0 of three. Nothing may come from a rank that has not said who it is.
//
// An input is a list of actions of the callers and of this rank. The clock is the input's.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "../../kernels/wires/wan/wire.h"
#include "../../kernels/wires/wan/frames.h"
#include "../../kernels/wires/wan/sockets.h"
#include "target.h"

namespace {

double now = 1;
bool may_start_threads = true;

}  // namespace

// Stands for that of kernels/engine/run.cpp.
namespace qccl {
double seconds() { return now; }
}  // namespace qccl

// Without the wire's own thread an input does the same each time. The start of a thread is the last that connect() does.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return may_start_threads ? create(thread, attributes, run, argument) : EAGAIN;
}

namespace fuzz {

namespace {

using namespace qccl;
using wan::Head;
using wan::Kind;

constexpr int kRanks = 3, kConnections = 2;
constexpr std::size_t kMostCallers = 4;
const std::string kGroup(wan::kNonceNbytes, 'a');

// Bytes of a message. Few are of several parts: those take long.
std::size_t size(Input& input) {
  const unsigned kind = input.byte();
  return kind < 240 ? kind : wan::kPartNbytes * (kind % 5) + input.byte();
}

std::vector<unsigned char> frame_bytes(const wan::Head& head, const std::vector<unsigned char>& data) {
  std::vector<unsigned char> found(sizeof head + data.size());
  std::memcpy(found.data(), &head, sizeof head);
  if (!data.empty()) std::memcpy(found.data() + sizeof head, data.data(), data.size());
  return found;
}

// A frame (kernels/wires/wan/frames.h) that the input describes in a few bytes, so that most are nearly right.
std::vector<unsigned char> frame(Input& input, wan::Kind kind) {
  Head head;
  head.kind = kind;
  head.tag = static_cast<int>(input.byte() % 4);
  const unsigned form = input.byte();
  head.index = form & 1 ? input.take<std::uint64_t>() : input.byte() % 8;
  head.total = form & 2 ? input.take<std::uint64_t>() : size(input);
  head.offset = form & 4 ? input.take<std::uint64_t>() : wan::kPartNbytes * (input.byte() % 4);
  const std::uint64_t rest = head.total >= head.offset ? head.total - head.offset : 0;
  head.nbytes = form & 8 ? input.take<std::uint32_t>() : static_cast<std::uint32_t>(std::min<std::uint64_t>(wan::kPartNbytes, rest));
  if (kind != Kind::data && !(form & 8)) head.nbytes = 0;
  const std::size_t nbytes = std::min<std::size_t>(head.nbytes, wan::kPartNbytes + 1);
  return frame_bytes(head, std::vector<unsigned char>(nbytes, static_cast<unsigned char>(form)));
}

// Bytes as they are in the input.
std::vector<unsigned char> plain_bytes(Input& input) {
  std::vector<unsigned char> found(std::min<std::size_t>(input.take<std::uint16_t>(), input.left()));
  input.take(found.data(), found.size());
  return found;
}

// What the wire reports.
struct Fault {};

struct Caller {
  int descriptor;
  std::string sent;
};

struct Receive {
  Bytes data;
  std::size_t arrived;
  int peer;
  bool is_done = false;
};

// A socket that listens, and the address at which it does.
int listen_at(sockaddr_un& address, socklen_t& nbytes) {
  const int found = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  address = {};
  address.sun_family = AF_UNIX;
  nbytes = sizeof address;
  require(found >= 0 && !::bind(found, reinterpret_cast<const sockaddr*>(&address), sizeof address.sun_family) &&
              !::listen(found, 64) && !::getsockname(found, reinterpret_cast<sockaddr*>(&address), &nbytes),
          "this machine gives no socket");
  return found;
}

class Rank {
 public:
  Rank() {
    WanSettings settings;
    settings.listener = listen_at(address_, address_nbytes_);
    settings.connections = kConnections;
    settings.away_seconds = 10;
    settings.address = kGroup + " 2";  // nobody can be called there
    wire_ = make_wan_wire(settings, [](const WireFault&) { throw Fault(); });
    may_start_threads = false;
    try {
      wire_->connect(0, std::vector<std::string>(kRanks, settings.address),
                     [](const std::vector<int>&) { return std::vector<int>(); });
    } catch (const std::system_error&) {
    }
    may_start_threads = true;
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() {
    wire_.reset();
    for (const Caller& caller : callers_) ::close(caller.descriptor);
  }

  void act(Input& input) {
    const unsigned action = input.byte();
    switch (action % 12) {
      case 0: return receive(peer(input), input.byte() % 3, size(input), input.byte() & 1);
      case 1: return send(peer(input), input.byte() % 3, size(input));
      case 2: return put(input, frame(input, Kind::announce));
      case 3: return call();
      case 4: now += action < 128 ? 0.01 : input.byte() * 0.1; return;
      case 5: return end(input);
      case 6: return put(input, hello(input));
      case 7: return put(input, frame(input, Kind::data));
      case 8: return put(input, frame(input, static_cast<Kind>(1 + input.byte() % 8)));
      case 9: return put(input, plain_bytes(input));
      default: return read(input);
    }
  }

  void poll() {
    std::vector<Token> completed;
    wire_->poll(0, completed);
    for (const Token token : completed) complete(token);
  }

 private:
  static int peer(Input& input) { return 1 + static_cast<int>(input.byte() % (kRanks - 1)); }

  Caller* caller(Input& input) { return callers_.empty() ? nullptr : &callers_[input.byte() % callers_.size()]; }

  void receive(int peer, int tag, std::size_t nbytes, bool takes_less) {
    const Token token = receives_.size();
    auto& made = receives_.emplace_back(new Receive{Bytes(nbytes), nbytes, peer});
    wire_->receive(peer, tag, made->data.data(), nbytes, token, takes_less ? &made->arrived : nullptr);
  }

  void send(int peer, int tag, std::size_t nbytes) {
    sends_.emplace_back(nbytes);
    wire_->send(peer, tag, sends_.back().data(), nbytes, kSend);
  }

  void complete(Token token) {
    if (token == kSend) return;
    require(token < receives_.size(), "a receive that was not made has completed");
    Receive& made = *receives_[token];
    require(!std::exchange(made.is_done, true), "a receive has completed twice");
    require(made.arrived <= made.data.size(), "more has come than the receive has room for");
    require(std::any_of(callers_.begin(), callers_.end(), [&](const Caller& each) { return is_of(each, made.peer); }),
            "something has come from a rank that has not said who it is");
  }

  // Whether a caller has said that it is this rank, before anything else but acknowledgements and probes, which say nothing.
  static bool is_of(const Caller& caller, int peer) {
    Head head;
    std::size_t begin = 0, end = 0;
    do {
      begin = end;
      if (caller.sent.size() < begin + sizeof head) return false;
      std::memcpy(&head, caller.sent.data() + begin, sizeof head);
      end = begin + sizeof head + head.nbytes;
      if (caller.sent.size() < end) return false;
    } while (head.kind == Kind::ack || head.kind == Kind::probe);
    return head.kind == Kind::hello && head.nbytes == wan::kNonceNbytes && head.index == static_cast<std::uint64_t>(peer) &&
           head.offset == 0 && head.total == 1 && head.tag >= 0 && head.tag <= kConnections &&
           !caller.sent.compare(begin + sizeof head, wan::kNonceNbytes, kGroup);
  }

  void call() {
    if (callers_.size() == kMostCallers) return;
    const int made = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    require(made >= 0 && !::connect(made, reinterpret_cast<const sockaddr*>(&address_), address_nbytes_), "it cannot call");
    callers_.push_back({made, ""});
  }

  void end(Input& input) {
    if (Caller* const it = caller(input)) ::shutdown(it->descriptor, input.byte() & 1 ? SHUT_WR : SHUT_RDWR);
  }

  void read(Input& input) {
    char bytes[4096];
    if (Caller* const it = caller(input)) static_cast<void>(::recv(it->descriptor, bytes, sizeof bytes, 0));
  }

  void put(Input& input, const std::vector<unsigned char>& bytes) {
    Caller* const it = caller(input);
    if (!it || bytes.empty()) return;
    const ssize_t sent = ::send(it->descriptor, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) it->sent.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(sent));
  }

  std::vector<unsigned char> hello(Input& input) {
    const unsigned form = input.byte();
    Head head;
    head.kind = Kind::hello;
    head.tag = form & 1 ? input.take<std::int32_t>() : static_cast<std::int32_t>(input.byte() % (kConnections + 1));
    head.index = form & 2 ? input.take<std::uint64_t>() : static_cast<std::uint64_t>(peer(input));
    head.offset = form & 4 ? input.take<std::uint64_t>() : 0;
    head.total = form & 8 ? input.take<std::uint64_t>() : 1;
    std::vector<unsigned char> name(kGroup.begin(), kGroup.end());
    if (form & 16) name[input.byte() % name.size()] = static_cast<unsigned char>(input.byte());
    if (form & 32) name.resize(input.byte());
    head.nbytes = form & 64 ? input.take<std::uint32_t>() : static_cast<std::uint32_t>(name.size());
    return frame_bytes(head, name);
  }

  static constexpr Token kSend = 1 << 20;

  sockaddr_un address_;
  socklen_t address_nbytes_;
  std::vector<Caller> callers_;
  std::vector<std::unique_ptr<Receive>> receives_;
  std::vector<Bytes> sends_;
  std::shared_ptr<GroupWire> wire_;  // ends before what it reads and writes
};

// The number that the next descriptor gets.
int next_descriptor() {
  const int found = ::fcntl(0, F_DUPFD_CLOEXEC, 0);
  ::close(found);
  return found;
}

}  // namespace

void fuzz(Input input) {
  const int before = next_descriptor();
  {
    Rank rank;
    int faults = 0;
    for (int actions = 0; actions < 40 && !input.is_empty() && faults < 3; ++actions) {
      try {
        rank.act(input);
        rank.poll();
      } catch (const Fault&) {
        ++faults;
      }
    }
  }
  require(next_descriptor() == before, "the wire has left a descriptor open");
}

}  // namespace fuzz
