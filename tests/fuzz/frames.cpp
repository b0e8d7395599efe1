// What a rank between sites reads from a connection: frames, of which messages are put together, acknowledgements, and
// requests for messages. The stream's bytes are the input's; the receives and sends of this rank come in between.
//
// An input is a list of actions. Frames are given by a few bytes each, so that most of them are nearly right; one action
// sends bytes as they are.
#include <vector>

#include "../../kernels/engine/wan_connection.h"
#include "../../kernels/engine/wan_inbox.h"
#include "../../kernels/engine/wan_outbox.h"
#include "frame_inputs.h"

namespace fuzz {

namespace {

using namespace qccl;
using namespace qccl::wan;

// A stream of bytes that were put there.
struct FedStream final : Stream {
  bool handshake() override { return true; }
  std::ptrdiff_t read(void* to, std::size_t nbytes) override {
    const std::size_t some = std::min({nbytes, bytes.size() - at, most});
    if (!some) return kWait;
    std::memcpy(to, bytes.data() + at, some);
    at += some;
    return static_cast<std::ptrdiff_t>(some);
  }
  std::ptrdiff_t write(const void*, std::size_t nbytes) override {
    if (!room) return kWait;
    const std::size_t some = std::min(nbytes, room);
    room -= some;
    return static_cast<std::ptrdiff_t>(some);
  }
  void shut() override {}
  bool wants_write() const override { return false; }
  bool has_pending() const override { return at < bytes.size(); }
  int descriptor() const override { return -1; }

  std::vector<unsigned char> bytes;
  std::size_t at = 0, most = 1 << 20, room = 0;
};

struct Receive {
  Bytes data;
  std::size_t arrived;
  bool takes_less, is_done = false;
};

class Rank {
 public:
  Rank() : stream_(new FedStream), connection_(std::unique_ptr<Stream>(stream_)) {}

  void act(Input& input) {
    switch (input.byte() % 9) {
      case 0: return receive(input.byte() % 3, size(input), input.byte() & 1);
      case 1: return send(input.byte() % 3, size(input));
      case 2: return put(frame(input, Kind::data));
      case 3: return put(frame(input, Kind::ack));
      case 4: return put(frame(input, Kind::announce));
      case 5: return put(frame(input, Kind::posted));
      case 6: return put(frame(input, static_cast<Kind>(input.byte())));
      case 7: return put(plain_bytes(input));
      default: stream_->room += size(input);
    }
  }

  // As Sites::read() and Sites::take() in wan.cpp.
  void advance(std::size_t most) {
    stream_->most = most;
    connection_.read([this](const Head& head, const unsigned char* data) { take(head, data); });
    out_.acknowledged(connection_.take_freed());
    out_.set_early(connection_.peer_early(), connection_.peer_number());
    if (connection_.unacknowledged()) connection_.acknowledge(in_.early(), ++said_);
    for (const Head& head : in_.take_posted()) out_.put(head);
    in_.take_mismatches();
    for (const Token token : in_.take_completed()) complete(token);
    std::vector<Token> copied;
    out_.fill(copied);
    connection_.write([this] { return out_.next(0, true, true, 0); });
  }

 private:
  void receive(int tag, std::size_t nbytes, bool takes_less) {
    const Token token = receives_.size();
    auto& made = receives_.emplace_back(new Receive{Bytes(nbytes), nbytes, takes_less});
    in_.receive(tag, made->data.data(), nbytes, token, takes_less ? &made->arrived : nullptr);
  }

  void send(int tag, std::size_t nbytes) {
    sends_.emplace_back(nbytes);
    out_.send(tag, sends_.back().data(), nbytes, 0);
  }

  void complete(Token token) {
    require(token < receives_.size(), "a receive that was not made has completed");
    Receive& made = *receives_[token];
    require(!std::exchange(made.is_done, true), "a receive has completed twice");
    require(made.arrived <= made.data.size(), "more has come than the receive has room for");
  }

  void take(const Head& head, const unsigned char* data) {
    switch (head.kind) {
      case Kind::data: return in_.take(head, data);
      case Kind::announce: return in_.announced(head.tag, head.index);
      case Kind::posted: return out_.posted(head.tag, head.index);
      default: throw FrameError("a frame of a kind that no rank sends");
    }
  }

  void put(const std::vector<unsigned char>& bytes) { stream_->bytes.insert(stream_->bytes.end(), bytes.begin(), bytes.end()); }

  FedStream* stream_;
  Inbox in_;
  Outbox out_;
  std::vector<std::unique_ptr<Receive>> receives_;
  std::vector<Bytes> sends_;
  std::uint64_t said_ = 0;
  Connection connection_;
};

}  // namespace

void fuzz(Input input) {
  Rank rank;
  const std::size_t most = input.byte() % 4 ? std::size_t{1} << 20 : input.byte() + 1;
  try {
    for (int actions = 0; actions < 64 && !input.is_empty(); ++actions) {
      rank.act(input);
      rank.advance(most);
    }
    for (int i = 0; i < 16; ++i) rank.advance(most);
  } catch (const FrameError&) {
  }
}

}  // namespace fuzz
