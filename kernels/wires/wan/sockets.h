// The sockets of the wire between sites: addresses, connecting, and TCP's options.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace qccl::wan {

constexpr std::size_t kNonceNbytes = 32;

struct Place {
  std::string host, port;
};

// The address of a rank; wire.h says how it is written.
struct Address {
  std::string nonce;
  int connections = 0;
  std::vector<Place> places;
};
// Throws std::invalid_argument.
Address parse(const std::string& text);

// A socket that is about to be connected; -1 with errno.
int dial(const Place& place);
// The error with which a connect has ended. A socket may be connected to itself; that counts as refused.
int connect_error(int descriptor);
// Sets the options of one of `connections` for long messages, or of the one for short messages.
void configure(int descriptor, const std::string& congestion_control, int connections);
// Whether TCP gives a connection up that is not answered.
void set_timeout(int descriptor, bool has_timeout);

// Bytes that TCP has not sent even once.
int unsent(int descriptor);

}  // namespace qccl::wan
