#include "connection.h"

#include <algorithm>
#include <utility>

namespace qccl::wan {

namespace {

// Most bytes of one read.
constexpr std::size_t kInputNbytes = 256 << 10;
static_assert(kInputNbytes > kPartNbytes + sizeof(Head), "room for a frame");
// Most reads of one call, because other connections want their turn.
constexpr int kMostReads = 8;

Head head_at(const unsigned char* bytes) {
  Head head;
  std::memcpy(&head, bytes, sizeof head);
  return head;
}

}  // namespace

Connection::Connection(std::unique_ptr<Stream> stream) : stream_(std::move(stream)), input_(new unsigned char[kInputNbytes]) {}

void Connection::greet(const Head& head, const std::string& data) {
  greetings_.push_back(std::move(Frame(head, data.data()).bytes));
}

void Connection::acknowledge(std::size_t early, std::uint64_t number) {
  Head head;
  head.kind = Kind::ack;
  head.index = said_ = received_;
  head.total = early;
  head.offset = number;
  ack_ = head;
}

bool Connection::write(const std::function<FramePointer()>& next) {
  for (;;) {
    if (!writing_ && greetings_.empty() && ack_) greet(*std::exchange(ack_, std::nullopt), "");
    if (!writing_ && !greetings_.empty()) {
      if (!write_bytes(greetings_.front())) return false;
      greetings_.pop_front();
      continue;
    }
    if (!writing_) {
      FramePointer frame = next();
      if (!frame) return true;
      frames_.push_back(std::move(frame));
      writing_ = true;
    }
    if (!write_bytes(frames_.back()->bytes)) return false;
    writing_ = false;
  }
}

bool Connection::write_bytes(const std::vector<unsigned char>& bytes) {
  while (written_ < bytes.size()) {
    const std::ptrdiff_t taken = stream_->write(bytes.data() + written_, bytes.size() - written_);
    is_blocked_ = taken == Stream::kWait;
    if (is_blocked_) return false;
    written_ += static_cast<std::size_t>(taken);
  }
  written_ = 0;
  return true;
}

void Connection::read(const std::function<void(const Head&, const unsigned char*)>& take) {
  for (int reads = 0; reads < kMostReads; ++reads) {
    const std::ptrdiff_t came = stream_->read(input_.get() + end_, kInputNbytes - end_);
    if (came == Stream::kWait) return;
    if (came == 0) throw StreamError("the other side has closed the connection");
    end_ += static_cast<std::size_t>(came);
    while (end_ - begin_ >= sizeof(Head)) {
      const Head head = head_at(input_.get() + begin_);
      if (head.nbytes > kPartNbytes) throw FrameError("a frame of too many bytes");
      const std::size_t nbytes = sizeof head + head.nbytes;
      if (end_ - begin_ < nbytes) break;
      begin_ += nbytes;
      has_heard_ = true;
      if (head.kind == Kind::ack) {
        acknowledged(head.index);
        peer_early_ = static_cast<std::size_t>(head.total);
        peer_number_ = head.offset;
        continue;
      }
      if (head.kind == Kind::probe) continue;
      if (head.kind != Kind::hello) ++received_;
      take(head, input_.get() + begin_ - head.nbytes);
    }
    std::memmove(input_.get(), input_.get() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
  }
}

void Connection::acknowledged(std::uint64_t count) {
  const std::size_t written = frames_.size() - (writing_ ? 1 : 0);
  if (count < heard_ || count - heard_ > written) throw FrameError("an acknowledgement of what was not sent");
  for (; heard_ < count; ++heard_) {
    if (!std::exchange(frames_.front()->has_come, true)) freed_ += frames_.front()->nbytes();
    frames_.pop_front();
  }
}

Frames Connection::take_frames() { return std::move(frames_); }

}  // namespace qccl::wan
