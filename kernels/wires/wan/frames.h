// The frames that ranks between sites exchange: each has a head and some bytes of one message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace qccl::wan {

// Bytes of a message in one frame; with the head they fill one record of TLS. Frames are small, because each is given to a
// connection as late as possible, so that the fastest connection takes most of them.
constexpr std::size_t kPartNbytes = (16 << 10) - 40;
// A message up to this size does not wait behind longer ones: a header with its data, and messages about the group.
constexpr std::size_t kShortNbytes = 9 << 10;

enum class Kind : std::uint32_t {
  hello = 1,  // the first frame of a connection: `tag` is its number, `index` and `offset` the ranks from and to
  data,       // the bytes from `offset` on of message `index` with `tag`, which has `total` bytes
  ack,        // `index` frames have come on this connection; `total` bytes wait for receives, says acknowledgement `offset`
              // of this rank, counted over its connections to the other one
  announce,   // message `index` with `tag` waits, because too many bytes wait for receives
  posted,     // the receive of that message is there
  bye,        // the rank has closed the group; what it sent before on this connection has come
  probe,      // no content: its acknowledgement shows TCP that earlier packets were lost. A probe is not counted
};

// Little-endian on every machine that qccl runs on.
struct Head {
  std::uint32_t nbytes = 0;
  Kind kind = Kind::data;
  std::int32_t tag = 0;
  std::uint32_t zero = 0;
  std::uint64_t index = 0, total = 0, offset = 0;
};
static_assert(sizeof(Head) + kPartNbytes == 16 << 10, "no padding");

// Something that no rank sends. Nothing of it was used.
struct FrameError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A head and its bytes, as they are written.
struct Frame {
  std::vector<unsigned char> bytes;
  bool is_short = false;
  // The number of connections that carry it, and the slot of the first. It has come if one of them acknowledges it.
  int copies = 0, slot = -1;
  double sent_at = 0;
  bool has_come = false;

  Frame(const Head& head, const void* data) : bytes(sizeof head + head.nbytes) {
    std::memcpy(bytes.data(), &head, sizeof head);
    if (head.nbytes) std::memcpy(bytes.data() + sizeof head, data, head.nbytes);
  }
  std::size_t nbytes() const { return bytes.size(); }
};
using FramePointer = std::shared_ptr<Frame>;
using Frames = std::deque<FramePointer>;

}  // namespace qccl::wan
