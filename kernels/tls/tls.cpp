#include "tls.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "tls_api.h"

namespace qccl {

namespace {

using tls::Bio;
using tls::Functions;
using tls::Ssl;

constexpr std::size_t kSecretNbytes = 32;
// The name of the secret; a job has one.
constexpr unsigned char kIdentity[] = {'q', 'c', 'c', 'l'};
constexpr char kCiphers[] = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kCipherNumber[] = {0x13, 0x01};
constexpr std::size_t kRecordNbytes = 16 << 10;
// Bytes sent or received at a time: several records, or the calls of the system would cost more than the encryption.
constexpr std::size_t kBatchNbytes = 64 << 10;
constexpr std::size_t kReceiveNbytes = 64 << 10;
constexpr char kCut[] = "the connection was cut: it ended without the peer's notice";
constexpr char kShut[] = "this side has closed the connection";

Functions functions_at(const TlsFunctions& addresses) {
  constexpr std::size_t count = sizeof(Functions) / sizeof(std::uintptr_t);
  static_assert(count == std::size(tls::kNames), "a name for each function");
  if (addresses.size() != count || std::count(addresses.begin(), addresses.end(), 0))
    throw std::invalid_argument("not OpenSSL's functions");
  Functions found;
  std::memcpy(&found, addresses.data(), sizeof found);
  return found;
}

std::string text_of(int error) { return std::generic_category().message(error); }

bool is_wait(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// The calls of the system, which neither block nor raise SIGPIPE; -1 with errno.
std::ptrdiff_t receive(int descriptor, void* to, std::size_t nbytes) {
  std::ptrdiff_t got;
  do got = ::recv(descriptor, to, nbytes, MSG_DONTWAIT);
  while (got < 0 && errno == EINTR);
  return got;
}

std::ptrdiff_t send(int descriptor, const void* from, std::size_t nbytes) {
  std::ptrdiff_t sent;
  do sent = ::send(descriptor, from, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  return sent;
}

// Owns a descriptor.
class Socket {
 public:
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int descriptor() const { return descriptor_; }
  void shut() { ::shutdown(descriptor_, SHUT_WR); }

 private:
  const int descriptor_;
};

class PlainStream final : public Stream {
 public:
  explicit PlainStream(int descriptor) : socket_(descriptor) {}

  bool handshake() override { return true; }

  std::ptrdiff_t read(void* to, std::size_t nbytes) override {
    if (!nbytes) return kWait;
    const std::ptrdiff_t got = receive(descriptor(), to, nbytes);
    if (got < 0 && !is_wait(errno)) throw StreamError("the connection failed: " + text_of(errno));
    return got < 0 ? kWait : got;
  }

  std::ptrdiff_t write(const void* from, std::size_t nbytes) override {
    if (is_shut_) throw StreamError(kShut);
    const std::ptrdiff_t sent = nbytes ? send(descriptor(), from, nbytes) : 0;
    wants_write_ = sent < 0 && is_wait(errno);
    if (sent < 0 && !wants_write_) throw StreamError("the connection failed: " + text_of(errno));
    return sent < 0 ? kWait : sent;
  }

  void shut() override {
    if (!std::exchange(is_shut_, true)) socket_.shut();
  }

  bool wants_write() const override { return wants_write_; }
  bool has_pending() const override { return false; }  // received bytes wait in the system, not here
  int descriptor() const override { return socket_.descriptor(); }

 private:
  Socket socket_;
  bool wants_write_ = false, is_shut_ = false;
};

class TlsStream;
// The stream for which this thread calls OpenSSL now: OpenSSL then calls functions here for the same stream.
thread_local TlsStream* serving = nullptr;

int receive_for_openssl(Bio*, char* to, int nbytes) noexcept;
int send_for_openssl(Bio*, const char* from, int nbytes) noexcept;
long control_for_openssl(Bio*, int command, long, void*) noexcept;
int use_session(Ssl*, const void* digest, const unsigned char** identity, std::size_t* nbytes, tls::Session**) noexcept;
int find_session(Ssl*, const unsigned char* identity, std::size_t nbytes, tls::Session**) noexcept;

}  // namespace

class TlsContext {
 public:
  TlsContext(const TlsFunctions& functions, const std::string& secret, std::uint64_t records_per_key)
      : openssl(functions_at(functions)), records_per_key(records_per_key) {
    if (secret.size() != kSecretNbytes) throw std::invalid_argument("the secret must have 32 bytes");
    std::memcpy(secret_, secret.data(), kSecretNbytes);
    try {
      start();
    } catch (...) {
      clear();
      throw;
    }
  }

  ~TlsContext() { clear(); }
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  Ssl* make_ssl() const {
    openssl.err_clear();
    Ssl* ssl = openssl.ssl_new(context_);
    Bio* bio = ssl ? openssl.bio_new(method_) : nullptr;
    if (bio) {
      openssl.set_bio(ssl, bio, bio);  // takes the only reference, because both sides are the same
    } else {
      openssl.ssl_free(ssl);
      throw StreamError("OpenSSL: " + reason());
    }
    return ssl;
  }

  // The secret as a session that could be resumed, one for each handshake; null if OpenSSL has no memory.
  tls::Session* make_session(Ssl* ssl) const {
    tls::Session* session = openssl.session_new();
    const tls::Cipher* cipher = openssl.cipher_find(ssl, kCipherNumber);
    if (session && cipher && openssl.session_set_key(session, secret_, kSecretNbytes) &&
        openssl.session_set_cipher(session, cipher) && openssl.session_set_version(session, tls::kTls13))
      return session;
    openssl.session_free(session);
    return nullptr;
  }

  // The first error of this thread's queue; empties it.
  std::string reason() const {
    const unsigned long error = openssl.err_get();
    const char* text = error ? openssl.err_reason(error) : nullptr;
    openssl.err_clear();
    return text ? text : error ? "error " + std::to_string(error) : "";
  }

  const Functions openssl;
  const std::uint64_t records_per_key;

 private:
  void start() {
    openssl.err_clear();
    context_ = openssl.ctx_new(openssl.method());
    method_ = openssl.bio_meth_new(tls::kBioType, "qccl");
    if (!context_ || !method_) throw StreamError("OpenSSL: " + reason());
    const long mode = tls::kPartialWrite | tls::kMovingWriteBuffer | tls::kAutoRetry;
    openssl.ctx_ctrl(context_, tls::kMode, mode, nullptr);
    openssl.ctx_ctrl(context_, tls::kSessionCache, tls::kNoSessionCache, nullptr);
    openssl.ctx_set_options(context_, tls::kNoRenegotiation);
    openssl.ctx_clear_options(context_, tls::kAllowNoDiffieHellman);
    openssl.ctx_set_use_session(context_, &use_session);
    openssl.ctx_set_find_session(context_, &find_session);
    if (!openssl.ctx_ctrl(context_, tls::kMaxVersion, tls::kTls13, nullptr) ||
        !openssl.ctx_ctrl(context_, tls::kMinVersion, tls::kTls13, nullptr) ||
        !openssl.ctx_set_ciphersuites(context_, kCiphers) || !openssl.ctx_set_num_tickets(context_, 0) ||
        !openssl.bio_meth_set_read(method_, &receive_for_openssl) ||
        !openssl.bio_meth_set_write(method_, &send_for_openssl) ||
        !openssl.bio_meth_set_ctrl(method_, &control_for_openssl))
      throw StreamError("OpenSSL refuses TLS 1.3 with " + std::string(kCiphers) + ": " + reason());
  }

  void clear() {
    openssl.cleanse(secret_, kSecretNbytes);
    if (context_) openssl.ctx_free(context_);
    if (method_) openssl.bio_meth_free(method_);
  }

  unsigned char secret_[kSecretNbytes];
  tls::Context* context_ = nullptr;
  tls::BioMethod* method_ = nullptr;
};

namespace {

class TlsStream final : public Stream {
 public:
  TlsStream(std::shared_ptr<TlsContext> context, int descriptor, bool is_server)
      : socket_(descriptor), context_(std::move(context)), openssl_(context_->openssl), ssl_(context_->make_ssl()) {
    if (is_server) {
      openssl_.set_accept_state(ssl_);
    } else {
      openssl_.set_connect_state(ssl_);
      openssl_.set_verify(ssl_, tls::kVerifyPeer, nullptr);  // no certificate is trusted; a server here has none
    }
  }

  ~TlsStream() override {
    const Call call(*this);
    openssl_.ssl_free(ssl_);
  }

  bool handshake() override {
    raise(failure_);
    if (is_done_) return true;
    const Call call(*this);
    const int result = is_proved_ ? 1 : openssl_.do_handshake(ssl_);
    if (result != 1 && !waits(result)) failure_ = description(result);
    const bool is_sent = flush();  // a message, or the reason why it fails
    raise(failure_);
    // OpenSSL takes the secret for a session that is resumed; a handshake with a certificate resumes none
    is_proved_ = result == 1 && openssl_.session_reused(ssl_) && openssl_.version(ssl_) == tls::kTls13;
    if (result == 1 && !is_proved_)
      raise(failure_ = "TLS handshake failed: the peer did not prove that it has this job's secret");
    if (!is_sent && errno_) raise(failure_ = failed());
    return is_done_ = is_proved_ && is_sent;
  }

  std::ptrdiff_t read(void* to, std::size_t nbytes) override {
    is_full_ = false;
    if (!handshake() || !nbytes) return kWait;
    const Call call(*this);
    std::size_t done = 0;
    while (done < nbytes && !has_ended_) {
      std::size_t got = 0;
      const int result = openssl_.read(ssl_, static_cast<char*>(to) + done, nbytes - done, &got);
      if (result == 1) {
        done += got;
        continue;
      }
      has_ended_ = openssl_.get_error(ssl_, result) == tls::kZeroReturn;
      if (has_ended_ || waits(result)) break;
      failure_ = description(result);
      flush();  // tell the peer
      if (!done) raise(failure_);
      break;  // the bytes before the error are valid
    }
    is_full_ = done == nbytes;
    if (done) return static_cast<std::ptrdiff_t>(done);
    return has_ended_ ? 0 : kWait;
  }

  std::ptrdiff_t write(const void* from, std::size_t nbytes) override {
    if (!handshake()) return kWait;
    raise(write_failure_);
    if (nbytes < ahead_) throw std::invalid_argument("fewer bytes than were left of the last write");
    const Call call(*this);
    std::size_t done = 0;
    while (flush()) {
      done += std::exchange(ahead_, 0);
      if (done == nbytes) break;
      encrypt(static_cast<const char*>(from) + done, std::min(nbytes - done, kBatchNbytes));
    }
    if (errno_) raise(write_failure_ = failed());  // bytes that the peer has sent can still be read
    return done || !nbytes ? static_cast<std::ptrdiff_t>(done) : kWait;
  }

  void shut() override {
    const bool is_first = write_failure_.empty();
    if (!is_first && write_failure_ != kShut) return;
    write_failure_ = kShut;
    const Call call(*this);
    if (is_first && is_done_ && failure_.empty()) openssl_.shutdown(ssl_);
    if (flush()) socket_.shut();
  }

  bool wants_write() const override { return !encrypted_.empty(); }
  bool has_pending() const override { return is_full_ && (begin_ < end_ || openssl_.pending(ssl_) > 0); }
  int descriptor() const override { return socket_.descriptor(); }

  const TlsContext& context() const { return *context_; }

  // The results that OpenSSL expects: the number of bytes, 0 at the end, -1 for an error or to try again.
  int receive_some(Bio* bio, char* to, int nbytes) {
    openssl_.bio_clear_flags(bio, tls::kBioRead | tls::kBioWrite | tls::kBioRetry);
    if (begin_ == end_) {
      if (received_.empty()) received_.resize(kReceiveNbytes);
      const std::ptrdiff_t got = receive(descriptor(), received_.data(), received_.size());
      if (got < 0) {
        if (is_wait(errno)) openssl_.bio_set_flags(bio, tls::kBioRead | tls::kBioRetry);
        errno_ = is_wait(errno) ? 0 : errno;
        return -1;
      }
      is_cut_ = got == 0;
      begin_ = 0;
      end_ = static_cast<std::size_t>(got);
    }
    const std::size_t some = std::min(end_ - begin_, static_cast<std::size_t>(nbytes));
    std::memcpy(to, received_.data() + begin_, some);
    begin_ += some;
    return static_cast<int>(some);
  }

  int send_some(Bio* bio, const char* from, int nbytes) {
    openssl_.bio_clear_flags(bio, tls::kBioRead | tls::kBioWrite | tls::kBioRetry);
    encrypted_.insert(encrypted_.end(), from, from + nbytes);
    return nbytes;
  }

  bool is_cut() const { return is_cut_; }

 private:
  // While OpenSSL is called, with an empty queue of errors.
  class Call {
   public:
    explicit Call(TlsStream& stream) : earlier_(std::exchange(serving, &stream)) {
      stream.errno_ = 0;
      stream.openssl_.err_clear();
    }
    ~Call() { serving = earlier_; }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    TlsStream* const earlier_;
  };

  static void raise(const std::string& failure) {
    if (!failure.empty()) throw StreamError(failure);
  }

  bool waits(int result) const { return openssl_.get_error(ssl_, result) == tls::kWantRead; }

  // Whether all has been sent; otherwise the system takes no more now, or errno_ says why it failed.
  bool flush() {
    while (flushed_ < encrypted_.size()) {
      const std::ptrdiff_t sent = send(descriptor(), encrypted_.data() + flushed_, encrypted_.size() - flushed_);
      if (sent < 0) return errno_ = is_wait(errno) ? 0 : errno, false;
      flushed_ += static_cast<std::size_t>(sent);
    }
    encrypted_.clear();
    flushed_ = 0;
    return true;
  }

  void encrypt(const char* from, std::size_t nbytes) {
    while (ahead_ < nbytes) {
      if (records_ >= context_->records_per_key) change_key();
      std::size_t sent = 0;
      const int result = openssl_.write(ssl_, from + ahead_, std::min(nbytes - ahead_, kRecordNbytes), &sent);
      if (result != 1) raise(failure_ = description(result));
      ahead_ += sent;
      ++records_;
    }
  }

  void change_key() {
    if (!openssl_.key_update(ssl_, tls::kKeyUpdateNotRequested) || openssl_.do_handshake(ssl_) != 1)
      raise(failure_ = "TLS: the key could not be changed (" + context_->reason() + ")");
    records_ = 0;
  }

  std::string failed() const {
    const std::string when = is_done_ ? "" : " during the TLS handshake";
    return "the connection failed" + when + ": " + text_of(errno_);
  }

  std::string description(int result) const {
    const int error = openssl_.get_error(ssl_, result);
    const std::string reason = context_->reason();
    if (is_cut_) return is_done_ ? kCut : std::string(kCut) + ", during the TLS handshake";
    if (error == tls::kErrorSyscall && errno_) return failed();
    if (is_done_) return "TLS failed: bytes were changed on the way (" + reason + ")";
    return "TLS handshake failed: the peer does not have this job's secret or does not speak TLS 1.3, or bytes were "
           "changed on the way (" + reason + ")";
  }

  Socket socket_;
  const std::shared_ptr<TlsContext> context_;
  const Functions& openssl_;
  Ssl* const ssl_;
  std::vector<char> received_;  // not taken by OpenSSL: from begin_ to end_
  std::size_t begin_ = 0, end_ = 0;
  std::vector<char> encrypted_;  // records that have to be sent, from flushed_ on
  std::size_t flushed_ = 0;
  std::size_t ahead_ = 0;      // the caller's bytes in them, which count as written when all has been sent
  std::uint64_t records_ = 0;  // records sent with the present key
  bool is_proved_ = false, is_done_ = false;  // the handshake: that the peer has the secret; and all has been sent
  bool is_full_ = false;                      // the last read() got all that it had room for
  bool has_ended_ = false;                    // the peer has closed in order
  bool is_cut_ = false;
  int errno_ = 0;  // the system's error in the present call
  std::string failure_, write_failure_;
};

int receive_for_openssl(Bio* bio, char* to, int nbytes) noexcept { return serving->receive_some(bio, to, nbytes); }

int send_for_openssl(Bio* bio, const char* from, int nbytes) noexcept { return serving->send_some(bio, from, nbytes); }

long control_for_openssl(Bio*, int command, long, void*) noexcept {
  return command == tls::kBioFlush || (command == tls::kBioEof && serving && serving->is_cut());
}

// 1: go on with this session; 0: end the handshake.
int use_session(Ssl* ssl, const void*, const unsigned char** identity, std::size_t* nbytes,
                tls::Session** session) noexcept {
  *identity = kIdentity;
  *nbytes = sizeof kIdentity;
  *session = serving->context().make_session(ssl);
  return *session != nullptr;
}

int find_session(Ssl* ssl, const unsigned char* identity, std::size_t nbytes, tls::Session** session) noexcept {
  const bool is_ours = nbytes == sizeof kIdentity && !std::memcmp(identity, kIdentity, nbytes);
  *session = is_ours ? serving->context().make_session(ssl) : nullptr;
  return *session != nullptr;
}

}  // namespace

const std::vector<const char*>& tls_function_names() {
  static const std::vector<const char*> names(std::begin(tls::kNames), std::end(tls::kNames));
  return names;
}

std::shared_ptr<TlsContext> make_tls_context(const TlsFunctions& functions, const std::string& secret,
                                             std::uint64_t records_per_key) {
  return std::make_shared<TlsContext>(functions, secret, records_per_key);
}

std::unique_ptr<Stream> make_plain_stream(int descriptor) { return std::make_unique<PlainStream>(descriptor); }

std::unique_ptr<Stream> make_tls_stream(std::shared_ptr<TlsContext> context, int descriptor, bool is_server) {
  return std::make_unique<TlsStream>(std::move(context), descriptor, is_server);
}

}  // namespace qccl
