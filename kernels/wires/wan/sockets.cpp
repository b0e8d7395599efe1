#include "sockets.h"

#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace qccl::wan {

namespace {

// Unacknowledged data, or silence, breaks a connection after this time; a new one is often there sooner than TCP's own
// next try.
constexpr int kUserTimeoutMilliseconds = 4000, kIdleSeconds = 5;
// Approximate unsent bytes in the kernel's buffers of all connections to a rank: a slow one must not hold much.
constexpr int kNotSentNbytes = 128 << 10, kLeastNotSentNbytes = 16 << 10;

void set(int socket, int level, int name, int value) { setsockopt(socket, level, name, &value, sizeof value); }

}  // namespace

Address parse(const std::string& text) {
  std::istringstream words(text);
  Address found;
  words >> found.nonce >> found.connections;
  const bool fits = found.nonce.size() == kNonceNbytes && found.connections > 0 && words;
  for (Place place; words >> place.host >> place.port;) found.places.push_back(place);
  if (!fits || !words.eof()) throw std::invalid_argument("not the address of a rank");
  return found;
}

int dial(const Place& place) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (getaddrinfo(place.host.c_str(), place.port.c_str(), &hints, &found)) return errno = EADDRNOTAVAIL, -1;
  const int descriptor = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const bool fails = descriptor >= 0 && ::connect(descriptor, found->ai_addr, found->ai_addrlen) && errno != EINPROGRESS;
  freeaddrinfo(found);
  if (!fails) return descriptor;
  const int error = errno;
  ::close(descriptor);
  return errno = error, -1;
}

int connect_error(int descriptor) {
  int error = 0;
  socklen_t nbytes = sizeof error;
  getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &nbytes);
  sockaddr_storage own = {}, other = {};
  socklen_t own_nbytes = sizeof own, other_nbytes = sizeof other;
  if (error || getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &own_nbytes) ||
      getpeername(descriptor, reinterpret_cast<sockaddr*>(&other), &other_nbytes))
    return error ? error : ENOTCONN;
  return own_nbytes == other_nbytes && !std::memcmp(&own, &other, own_nbytes) ? ECONNREFUSED : 0;
}

void configure(int descriptor, const std::string& congestion_control, int connections) {
  set(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
  set(descriptor, IPPROTO_TCP, TCP_NOTSENT_LOWAT, std::max(kNotSentNbytes / connections, kLeastNotSentNbytes));
  set_timeout(descriptor, true);
  set(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  set(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(descriptor, IPPROTO_TCP, TCP_KEEPCNT, 4);
  const auto nbytes = static_cast<socklen_t>(congestion_control.size());
  if (nbytes) setsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, congestion_control.data(), nbytes);
}

void set_timeout(int descriptor, bool has_timeout) {
  set(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, has_timeout ? kUserTimeoutMilliseconds : 0);
}

int unsent(int descriptor) {
  int nbytes = 0;
  ioctl(descriptor, SIOCOUTQNSD, &nbytes);
  return nbytes;
}

}  // namespace qccl::wan
