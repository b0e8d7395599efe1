#include "wan_relay.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace qccl::wan {

namespace {

constexpr char kMagic[] = "qccl/rl1";
constexpr std::size_t kMagicNbytes = sizeof kMagic - 1, kGreetingNbytes = kMagicNbytes + 16, kJobNbytes = 8;
// Roles of which each side has one connection at a time.
constexpr char kCaller = 'C', kListener = 'L';
constexpr char kJoined = 'J', kNoKey = 'K', kFull = 'F';

std::string reason(char answer) {
  if (answer == kNoKey) return "the relay does not know this job";
  if (answer == kFull) return "the relay has no room for further connections of this job";
  return "the relay said something else";
}

}  // namespace

RelayCall::RelayCall(const TlsFunctions& openssl, const RelaySettings& settings, const std::string& what, bool calls)
    : openssl_(openssl),
      settings_(settings),
      name_(hmac_sha256(openssl, settings.naming, what)),
      role_(calls ? kCaller : kListener) {}

bool RelayCall::advance(int descriptor) {
  if (!has_said_) {
    if (!receive(descriptor, kGreetingNbytes)) return false;
    if (received_.compare(0, kMagicNbytes, kMagic)) throw StreamError("what answers there is not a relay");
    const std::string nonce = std::exchange(received_, "").substr(kMagicNbytes);
    const std::string job = hmac_sha256(openssl_, settings_.key, "qccl relay job").substr(0, kJobNbytes);
    const std::string proof = hmac_sha256(openssl_, settings_.key, nonce + role_ + name_);
    const std::string hello = kMagic + (role_ + job) + name_ + proof;
    // The first bytes of a connection find room.
    if (::send(descriptor, hello.data(), hello.size(), MSG_DONTWAIT | MSG_NOSIGNAL) != static_cast<ssize_t>(hello.size()))
      throw StreamError("the relay takes nothing");
    has_said_ = true;
  }
  if (!receive(descriptor, 1)) return false;
  if (received_[0] != kJoined) throw StreamError(reason(received_[0]));
  return true;
}

// Whether so many bytes are in `received_`. Not one more is taken from the system.
bool RelayCall::receive(int descriptor, std::size_t nbytes) {
  char bytes[kGreetingNbytes];
  while (received_.size() < nbytes) {
    const ssize_t got = ::recv(descriptor, bytes, nbytes - received_.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (got <= 0) throw StreamError("the relay has closed the connection");
    received_.append(bytes, static_cast<std::size_t>(got));
  }
  return true;
}

}  // namespace qccl::wan
