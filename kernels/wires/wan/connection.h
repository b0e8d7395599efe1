// One connection between two ranks: frames over a stream, until each has been acknowledged.
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "../../tls/tls.h"
#include "frames.h"

namespace qccl::wan {

// Writes frames in the given order. Throws StreamError when the connection is broken.
class Connection {
 public:
  explicit Connection(std::unique_ptr<Stream> stream);

  bool handshake() { return stream_->handshake(); }
  // A frame that is not acknowledged. Written before all that follow.
  void greet(const Head& head, const std::string& data);
  // Writes until the stream takes no more or `next` has nothing; true for the latter.
  bool write(const std::function<FramePointer()>& next);
  // Gives `take` the frames that have come, except acknowledgements. Throws FrameError.
  void read(const std::function<void(const Head&, const unsigned char*)>& take);
  // Queues this rank's acknowledgement `number`, which says how many bytes wait for receives. It replaces an acknowledgement
  // that is not written yet.
  void acknowledge(std::size_t early, std::uint64_t number);
  // Frames that have come since then.
  std::uint64_t unacknowledged() const { return received_ - said_; }
  // Bytes of this side's frames that were acknowledged since the last call.
  std::size_t take_freed() { return std::exchange(freed_, 0); }
  // The last acknowledgement's bytes and number; 0: there was none.
  std::size_t peer_early() const { return peer_early_; }
  std::uint64_t peer_number() const { return peer_number_; }
  // Whether a frame has come.
  bool has_heard() const { return has_heard_; }
  // Frames that may not have come; the connection is of no use afterwards.
  Frames take_frames();

  // Frames under way.
  std::size_t under_way() const { return frames_.size(); }
  // Whether greetings, an acknowledgement or the rest of a frame must be written.
  bool has_rest() const { return writing_ || !greetings_.empty() || ack_; }
  // The descriptor may be writable again.
  void retry() { is_blocked_ = false; }
  bool waits_to_write() const { return is_blocked_ || stream_->wants_write(); }
  bool has_pending() const { return stream_->has_pending(); }
  void shut() { stream_->shut(); }
  int descriptor() const { return stream_->descriptor(); }

 private:
  bool write_bytes(const std::vector<unsigned char>& bytes);
  void acknowledged(std::uint64_t count);

  std::unique_ptr<Stream> stream_;
  const std::unique_ptr<unsigned char[]> input_;
  std::size_t begin_ = 0, end_ = 0;  // the bytes that were read and not used
  std::deque<std::vector<unsigned char>> greetings_;
  std::optional<Head> ack_;  // the next acknowledgement
  Frames frames_;            // the last one is written in part if `writing_`
  bool writing_ = false, is_blocked_ = false, has_heard_ = false;
  std::size_t written_ = 0;  // bytes of the present greeting or frame
  std::uint64_t received_ = 0, said_ = 0, heard_ = 0;
  std::size_t freed_ = 0, peer_early_ = 0;
  std::uint64_t peer_number_ = 0;
};

}  // namespace qccl::wan
