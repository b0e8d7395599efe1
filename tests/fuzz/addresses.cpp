// Texts and bytes of other processes that kernels/engine reads before there is a connection between two ranks: the addresses
// of ranks, and what a relay answers.
#include "target.h"

#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "../../kernels/engine/wan_relay.h"

// Stands for OpenSSL's HMAC, which is not the target: the relay's bytes go into it, and nothing depends on the result.
namespace qccl {
std::string hmac_sha256(const TlsFunctions&, const std::string&, const std::string& text) {
  return std::string(32, static_cast<char>(text.size()));
}
}  // namespace qccl

namespace fuzz {

namespace {

void parse_address(Input input) {
  std::string text(input.left(), '\0');
  input.take(text.data(), text.size());
  try {
    const qccl::wan::Address found = qccl::wan::parse(text);
    require(found.nonce.size() == qccl::wan::kNonceNbytes && found.connections > 0, "an address that is none");
    for (const qccl::wan::Place& place : found.places)
      require(!place.host.empty() && !place.port.empty(), "a place without a host or a port");
  } catch (const std::invalid_argument&) {
  }
}

// The relay's bytes come in pieces, the connection ends, and the call looks after each piece.
void answer(Input input) {
  static int pair[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) return;
  static const qccl::TlsFunctions none;
  static const qccl::wan::RelaySettings settings = {{"127.0.0.1", "1"}, std::string(32, 'k'), std::string(32, 'n')};
  qccl::wan::RelayCall call(none, settings, "0 1", input.byte() & 1);
  bool is_joined = false;
  try {
    while (!is_joined && !input.is_empty()) {
      char piece[256];
      const std::size_t nbytes = std::min<std::size_t>(input.byte(), input.left());
      input.take(piece, nbytes);
      require(nbytes == 0 || ::send(pair[1], piece, nbytes, MSG_NOSIGNAL) == static_cast<ssize_t>(nbytes), "no room");
      is_joined = call.advance(pair[0]);
    }
    ::shutdown(pair[1], SHUT_WR);
    if (!is_joined) is_joined = call.advance(pair[0]);
    require(is_joined, "it waits, though the relay has closed the connection");
  } catch (const qccl::StreamError&) {
  }
  ::close(pair[0]);
  ::close(pair[1]);
}

}  // namespace

void fuzz(Input input) { input.byte() & 1 ? parse_address(input) : answer(input); }

}  // namespace fuzz
