// The part of OpenSSL's interface that the streams use, the same in 1.1.1 and 3.x, so that qccl is built without its
// headers. Its own types are opaque here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qccl::tls {

struct Method;
struct Context;
struct Ssl;
struct Session;
struct Cipher;
struct Bio;
struct BioMethod;

using UseSession = int (*)(Ssl*, const void* digest, const unsigned char** identity, std::size_t* nbytes, Session**);
using FindSession = int (*)(Ssl*, const unsigned char* identity, std::size_t nbytes, Session**);

// Commands of SSL_CTX_ctrl(), which are macros in OpenSSL's headers.
constexpr int kMode = 33, kSessionCache = 44, kMinVersion = 123, kMaxVersion = 124;
constexpr long kPartialWrite = 0x1, kMovingWriteBuffer = 0x2, kAutoRetry = 0x4;
constexpr long kNoSessionCache = 0;
constexpr int kTls13 = 0x0304;
// Options: a key exchange without Diffie-Hellman would let a secret that leaks later open what was recorded before.
constexpr unsigned long kNoRenegotiation = 1ul << 30, kAllowNoDiffieHellman = 1ul << 10;
constexpr int kVerifyPeer = 1;
constexpr int kKeyUpdateNotRequested = 0;

// SSL_get_error()
constexpr int kErrorSsl = 1, kWantRead = 2, kWantWrite = 3, kErrorSyscall = 5, kZeroReturn = 6;

// A source and sink of bytes of our own. The number only tells kinds apart; OpenSSL counts its own from 1 and gives out
// those from 128 on.
constexpr int kBioType = 0x0400 | 120;
constexpr int kBioRead = 0x1, kBioWrite = 0x2, kBioRetry = 0x8;
constexpr int kBioEof = 2, kBioFlush = 11;  // commands

// In the order of kNames.
struct Functions {
  const Method* (*method)();
  Context* (*ctx_new)(const Method*);
  void (*ctx_free)(Context*);
  long (*ctx_ctrl)(Context*, int command, long, void*);
  unsigned long (*ctx_set_options)(Context*, unsigned long);
  unsigned long (*ctx_clear_options)(Context*, unsigned long);
  int (*ctx_set_ciphersuites)(Context*, const char*);
  int (*ctx_set_num_tickets)(Context*, std::size_t);
  void (*ctx_set_use_session)(Context*, UseSession);
  void (*ctx_set_find_session)(Context*, FindSession);
  Ssl* (*ssl_new)(Context*);
  void (*ssl_free)(Ssl*);
  void (*set_bio)(Ssl*, Bio* read, Bio* write);
  void (*set_accept_state)(Ssl*);
  void (*set_connect_state)(Ssl*);
  void (*set_verify)(Ssl*, int mode, void* callback);
  int (*do_handshake)(Ssl*);
  int (*read)(Ssl*, void*, std::size_t, std::size_t* got);
  int (*write)(Ssl*, const void*, std::size_t, std::size_t* sent);
  int (*shutdown)(Ssl*);
  int (*get_error)(const Ssl*, int result);
  int (*pending)(const Ssl*);
  int (*session_reused)(const Ssl*);
  int (*version)(const Ssl*);
  int (*key_update)(Ssl*, int type);
  Session* (*session_new)();
  void (*session_free)(Session*);
  int (*session_set_key)(Session*, const unsigned char*, std::size_t);
  int (*session_set_cipher)(Session*, const Cipher*);
  int (*session_set_version)(Session*, int);
  const Cipher* (*cipher_find)(Ssl*, const unsigned char* two_bytes);
  BioMethod* (*bio_meth_new)(int type, const char* name);
  void (*bio_meth_free)(BioMethod*);
  int (*bio_meth_set_read)(BioMethod*, int (*)(Bio*, char*, int));
  int (*bio_meth_set_write)(BioMethod*, int (*)(Bio*, const char*, int));
  int (*bio_meth_set_ctrl)(BioMethod*, long (*)(Bio*, int command, long, void*));
  Bio* (*bio_new)(const BioMethod*);
  void (*bio_set_flags)(Bio*, int);
  void (*bio_clear_flags)(Bio*, int);
  void (*err_clear)();
  unsigned long (*err_get)();
  const char* (*err_reason)(unsigned long);
  void (*cleanse)(void*, std::size_t);
};

constexpr const char* kNames[] = {"TLS_method",
                                  "SSL_CTX_new",
                                  "SSL_CTX_free",
                                  "SSL_CTX_ctrl",
                                  "SSL_CTX_set_options",
                                  "SSL_CTX_clear_options",
                                  "SSL_CTX_set_ciphersuites",
                                  "SSL_CTX_set_num_tickets",
                                  "SSL_CTX_set_psk_use_session_callback",
                                  "SSL_CTX_set_psk_find_session_callback",
                                  "SSL_new",
                                  "SSL_free",
                                  "SSL_set_bio",
                                  "SSL_set_accept_state",
                                  "SSL_set_connect_state",
                                  "SSL_set_verify",
                                  "SSL_do_handshake",
                                  "SSL_read_ex",
                                  "SSL_write_ex",
                                  "SSL_shutdown",
                                  "SSL_get_error",
                                  "SSL_pending",
                                  "SSL_session_reused",
                                  "SSL_version",
                                  "SSL_key_update",
                                  "SSL_SESSION_new",
                                  "SSL_SESSION_free",
                                  "SSL_SESSION_set1_master_key",
                                  "SSL_SESSION_set_cipher",
                                  "SSL_SESSION_set_protocol_version",
                                  "SSL_CIPHER_find",
                                  "BIO_meth_new",
                                  "BIO_meth_free",
                                  "BIO_meth_set_read",
                                  "BIO_meth_set_write",
                                  "BIO_meth_set_ctrl",
                                  "BIO_new",
                                  "BIO_set_flags",
                                  "BIO_clear_flags",
                                  "ERR_clear_error",
                                  "ERR_get_error",
                                  "ERR_reason_error_string",
                                  "OPENSSL_cleanse"};

}  // namespace qccl::tls
