// Bytes over one connection, plain or by TLS 1.3 with a secret that both sides have (RFC 8446's external pre-shared key,
// with an ephemeral Diffie-Hellman exchange). TLS is OpenSSL's, which the Python side has found (qccl/meeting/tls.py):
// its functions are called by address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace qccl {

// Addresses of OpenSSL's functions, in the order of tls_function_names().
using TlsFunctions = std::vector<std::uintptr_t>;
const std::vector<const char*>& tls_function_names();

// A broken connection, a failed handshake, or bytes that were changed on the way; the text says which.
struct StreamError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Settings and secret of a job, shared by its connections. Several threads may make and use streams of one context, but
// each stream belongs to one thread at a time.
class TlsContext;

// `secret` has 32 random bytes; the context keeps a copy and wipes it at its end. After `records_per_key` records of up to
// 16 KiB a stream changes the key that it sends with: AES-GCM's limit is 2^24.5 (RFC 8446, 5.5). Throws
// std::invalid_argument for a secret of another size, StreamError where OpenSSL refuses a setting.
std::shared_ptr<TlsContext> make_tls_context(const TlsFunctions& functions, const std::string& secret,
                                             std::uint64_t records_per_key = std::uint64_t{1} << 22);

// Nothing here blocks or raises SIGPIPE. The first three throw StreamError, and do so again when called again.
struct Stream {
  // Nothing to read or write now: wait until the descriptor can be read, or also written if wants_write().
  static constexpr std::ptrdiff_t kWait = -1;

  virtual ~Stream() = default;  // closes the descriptor; call shut() before for an orderly end
  // True when both sides have proved that they have the secret. Until then read() and write() do the handshake first. It
  // does not tell which rank the peer is: that must be said over the stream, and be checked, because somebody between the
  // ranks can lead a connection to another rank, or back to the same one.
  virtual bool handshake() = 0;
  // Reads the received bytes, at most `nbytes`; 0: the peer has closed (by TLS: in order); or kWait.
  virtual std::ptrdiff_t read(void* to, std::size_t nbytes) = 0;
  // Returns how many bytes were taken, perhaps fewer than `nbytes`, or kWait. The next call must begin with all bytes that
  // were not taken, because up to 64 KiB of them are encrypted already. They may be elsewhere in memory.
  virtual std::ptrdiff_t write(const void* from, std::size_t nbytes) = 0;
  // Tells the peer that nothing more comes, so that it reads 0. Receiving goes on. Bytes that write() has not taken may be
  // lost. If wants_write() is true afterwards, the system has not taken the notice yet: call again when it can be written.
  virtual void shut() = 0;

  // Bytes of the handshake, of the last write(), or of shut() wait for the descriptor to be writable.
  virtual bool wants_write() const = 0;
  // More bytes have been received than the last read() had room for: poll() on the descriptor may not tell.
  virtual bool has_pending() const = 0;
  virtual int descriptor() const = 0;
};

// `descriptor` is a connected socket, which the stream owns from the call on, even if it throws.
std::unique_ptr<Stream> make_plain_stream(int descriptor);
std::unique_ptr<Stream> make_tls_stream(std::shared_ptr<TlsContext> context, int descriptor, bool is_server);

}  // namespace qccl
