// TlsStream for Python: for sockets of small messages, which Python's select drives, and for tests.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <strings.h>
#include <unistd.h>

#include <utility>

#include "../engine/bind.h"
#include "tls.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qccl {

namespace {

class PythonStream {
 public:
  PythonStream(const TlsFunctions& functions, const nb::bytes& secret, int descriptor, bool is_server,
               std::uint64_t records_per_key)
      : stream_(make(functions, secret, descriptor, is_server, records_per_key)) {}

  bool handshake() {
    Stream& stream = open();
    const nb::gil_scoped_release released;
    return stream.handshake();
  }

  std::optional<nb::bytes> read(std::size_t nbytes) {
    Stream& stream = open();
    std::string found(nbytes, '\0');
    std::ptrdiff_t got = 0;
    {
      const nb::gil_scoped_release released;
      got = stream.read(found.data(), nbytes);
    }
    if (got == Stream::kWait) return std::nullopt;
    return nb::bytes(found.data(), static_cast<std::size_t>(got));
  }

  std::optional<std::size_t> write(const nb::bytes& from) {
    Stream& stream = open();
    const nb::gil_scoped_release released;
    const std::ptrdiff_t sent = stream.write(from.c_str(), from.size());
    return sent == Stream::kWait ? std::nullopt : std::optional(static_cast<std::size_t>(sent));
  }

  void shut() { open().shut(); }
  void close() { stream_.reset(); }
  bool wants_write() { return open().wants_write(); }
  bool has_pending() { return open().has_pending(); }
  int fileno() const { return stream_ ? stream_->descriptor() : -1; }

 private:
  static std::unique_ptr<Stream> make(const TlsFunctions& functions, const nb::bytes& secret, int descriptor,
                                      bool is_server, std::uint64_t records_per_key) {
    std::string copy(secret.c_str(), secret.size());
    std::shared_ptr<TlsContext> context;
    try {
      context = make_tls_context(functions, copy, records_per_key);
    } catch (...) {
      explicit_bzero(copy.data(), copy.size());
      ::close(descriptor);
      throw;
    }
    explicit_bzero(copy.data(), copy.size());
    return make_tls_stream(std::move(context), descriptor, is_server);
  }

  Stream& open() {
    if (!stream_) throw std::invalid_argument("this stream is closed");
    return *stream_;
  }

  std::unique_ptr<Stream> stream_;
};

}  // namespace

void bind_tls(nb::module_& m) {
  nb::exception<StreamError>(m, "StreamError", PyExc_ConnectionError);
  nb::class_<PythonStream>(m, "TlsStream", "Bytes over one connection by TLS 1.3 with a secret that both sides have.")
      .def(nb::init<const TlsFunctions&, const nb::bytes&, int, bool, std::uint64_t>(), "functions"_a, "secret"_a,
           "descriptor"_a, "is_server"_a, "records_per_key"_a = std::uint64_t{1} << 22)
      .def_static("function_names", &tls_function_names)
      .def("handshake", &PythonStream::handshake,
           "Whether both sides have proved that they have the secret; read() and write() wait for that, too.")
      .def("read", &PythonStream::read, "nbytes"_a,
           "The bytes that have come, at most nbytes; b\"\": the peer has closed in order; None: wait.")
      .def("write", &PythonStream::write, "data"_a,
           "How many bytes were taken; None: wait. The next call must begin with the bytes that were not taken, "
           "and have no fewer: they may be encrypted already.")
      .def("shut", &PythonStream::shut,
           "Tell the peer that nothing more comes; receiving goes on. If wants_write afterwards, the system has "
           "not taken the notice yet: call again when the socket is writable.")
      .def("close", &PythonStream::close,
           "Close the socket. Without shut() before, the peer takes the connection to be cut.")
      .def("fileno", &PythonStream::fileno, "The socket's descriptor; -1 once it is closed.")
      .def_prop_ro("wants_write", &PythonStream::wants_write,
           "Bytes of the handshake, of the last write(), or of shut() wait for the socket to be writable.")
      .def_prop_ro("has_pending", &PythonStream::has_pending,
           "More has been received than the last read() had room for, which select() may not tell.");
}

}  // namespace qccl
