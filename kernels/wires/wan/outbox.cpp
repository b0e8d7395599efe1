#include "outbox.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace qccl::wan {

namespace {

bool is_under_way(const FramePointer& frame) { return frame && frame->copies && !frame->has_come; }

}  // namespace

void Outbox::send(int tag, const void* data, std::size_t nbytes, Token token) {
  pending_.push_back(
      {tag, indices_[tag]++, static_cast<const unsigned char*>(data), nbytes, 0, token, false, false});
}

void Outbox::fill(std::vector<Token>& copied) {
  for (auto message = pending_.begin(); message != pending_.end();) {
    const bool is_short = message->nbytes <= kShortNbytes;
    do {
      if (!is_short && (held_ >= kWindowNbytes || long_.size() * kPartNbytes >= kReadyNbytes || !may_send(*message))) break;
      cut(*message);
    } while (message->offset < message->nbytes);
    if (message->offset < message->nbytes) {
      ++message;
      continue;
    }
    copied.push_back(message->token);
    message = pending_.erase(message);
  }
}

// Long messages may fill the other rank's memory before their receives. From some size on each is announced, and sent when
// its receive is there.
bool Outbox::may_send(Message& message) {
  if (message.is_posted || early_ + held_ + kPartNbytes <= kCreditNbytes) return true;
  if (!std::exchange(message.is_announced, true)) {
    Head head;
    head.kind = Kind::announce;
    head.tag = message.tag;
    head.index = message.index;
    put(head);
  }
  return false;
}

void Outbox::cut(Message& message) {
  const std::size_t nbytes = std::min(kPartNbytes, message.nbytes - message.offset);
  Head head;
  head.nbytes = static_cast<std::uint32_t>(nbytes);
  head.tag = message.tag;
  head.index = message.index;
  head.total = message.nbytes;
  head.offset = message.offset;
  auto frame = std::make_shared<Frame>(head, message.data + message.offset);
  frame->is_short = message.nbytes <= kShortNbytes;
  message.offset += nbytes;
  held_ += frame->nbytes();
  (frame->is_short ? short_ : long_).push_back(std::move(frame));
}

void Outbox::put(const Head& head) {
  auto frame = std::make_shared<Frame>(head, nullptr);
  frame->is_short = true;
  held_ += frame->nbytes();
  short_.push_back(std::move(frame));
}

FramePointer Outbox::next(int slot, bool takes_short, bool takes_long, double now) {
  Frames* const frames = takes_short && !short_.empty() ? &short_ : takes_long && !long_.empty() ? &long_ : nullptr;
  if (!frames) return nullptr;
  FramePointer found = std::move(frames->front());
  frames->pop_front();
  found->copies = 1;
  found->slot = slot;
  found->sent_at = now;
  while (!sent_.empty() && !is_under_way(sent_.front().lock())) sent_.pop_front();
  sent_.push_back(found);
  return found;
}

FramePointer Outbox::copy(int slot, double sent_before) {
  for (const std::weak_ptr<Frame>& sent : sent_) {
    FramePointer frame = sent.lock();
    if (!is_under_way(frame)) continue;
    if (frame->sent_at > sent_before) break;
    if (frame->copies != 1 || frame->slot == slot) continue;
    frame->copies = 2;
    return frame;
  }
  return nullptr;
}

void Outbox::again(Frames frames) {
  for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame)
    if (!(*frame)->has_come && !--(*frame)->copies) ((*frame)->is_short ? short_ : long_).push_front(std::move(*frame));
}

void Outbox::set_early(std::size_t nbytes, std::uint64_t number) {
  if (number <= early_number_) return;
  early_number_ = number;
  early_ = nbytes;
}

void Outbox::posted(int tag, std::uint64_t index) {
  for (Message& message : pending_)
    if (message.tag == tag && message.index == index) message.is_posted = true;
}

void Outbox::clear() {
  pending_.clear();
  short_.clear();
  long_.clear();
  sent_.clear();
  held_ = 0;
}

}  // namespace qccl::wan
