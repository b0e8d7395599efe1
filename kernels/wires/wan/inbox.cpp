#include "inbox.h"

#include <algorithm>
#include <utility>

#include "outbox.h"

namespace qccl::wan {

namespace {

// Most bytes that wait for receives: a rank stops long messages before that, and the engine's short ones are few.
constexpr std::size_t kMostEarly = 3 * kCreditNbytes;
// Bytes that a message costs beside its data.
constexpr std::size_t kMessageNbytes = 256;
// Most bytes of one message, because the inbox notes for each part whether it came.
constexpr std::uint64_t kMostTotal = std::uint64_t{1} << 40;
// Most messages of one tag after the first unfinished one.
constexpr std::uint64_t kMostBehind = 1 << 20;

std::size_t parts_of(std::uint64_t total) {
  return std::max<std::size_t>(1, static_cast<std::size_t>((total + kPartNbytes - 1) / kPartNbytes));
}

// Whether a rank would cut a message so.
bool is_part(const Head& head) {
  if (head.offset % kPartNbytes || head.offset > head.total) return false;
  if (head.offset == head.total && head.total) return false;
  return head.nbytes == std::min<std::uint64_t>(kPartNbytes, head.total - head.offset);
}

}  // namespace

void Inbox::receive(int tag, void* data, std::size_t nbytes, Token token, std::size_t* arrived) {
  Line& line = lines_[tag];
  const std::uint64_t index = line.receives++;
  Message& message = line.messages[index];
  early_ -= std::exchange(message.counted, 0);
  message.is_posted = true;
  message.data = static_cast<unsigned char*>(data);
  message.expected = nbytes;
  message.arrived = arrived;
  message.token = token;
  ++under_way_;
  for (const auto& [offset, bytes] : message.kept)
    if (!bytes.empty() && offset + bytes.size() <= nbytes) std::memcpy(message.data + offset, bytes.data(), bytes.size());
  message.kept = {};
  if (message.is_announced) say_posted(tag, index, message);
  end_if_whole(line, index);
}

void Inbox::take(const Head& head, const unsigned char* data) {
  if (!is_part(head)) throw FrameError("a part that no rank sends");
  Line& line = lines_[head.tag];
  if (has_ended(line, head.index)) return;
  Message& message = at(line, head.index);
  if (message.came.empty()) {
    if (head.total > kMostTotal) throw FrameError("a message of too many bytes");
    count_early(message, parts_of(head.total) / 8);
    message.total = head.total;
    message.came.resize(parts_of(head.total));
  }
  if (message.total != head.total) throw FrameError("two sizes of one message");
  auto came = message.came[static_cast<std::size_t>(head.offset / kPartNbytes)];
  if (came) return;
  came = true;
  ++message.parts;
  put(message, static_cast<std::size_t>(head.offset), data, head.nbytes);
  end_if_whole(line, head.index);
}

void Inbox::announced(int tag, std::uint64_t index) {
  Line& line = lines_[tag];
  if (has_ended(line, index)) return;
  Message& message = at(line, index);
  message.is_announced = true;
  if (message.is_posted) say_posted(tag, index, message);
}

Inbox::Message& Inbox::at(Line& line, std::uint64_t index) {
  if (index - line.ended_below > kMostBehind) throw FrameError("a message far ahead of the others");
  const auto [found, is_new] = line.messages.try_emplace(index);
  if (is_new) count_early(found->second, kMessageNbytes);
  return found->second;
}

bool Inbox::has_ended(const Line& line, std::uint64_t index) {
  return index < line.ended_below || line.ended.count(index);
}

void Inbox::put(Message& message, std::size_t offset, const unsigned char* data, std::size_t nbytes) {
  if (message.is_posted) {
    if (nbytes && offset + nbytes <= message.expected) std::memcpy(message.data + offset, data, nbytes);
  } else {
    count_early(message, nbytes);
    message.kept.emplace_back(offset, std::vector<unsigned char>(data, data + nbytes));
  }
}

void Inbox::end_if_whole(Line& line, std::uint64_t index) {
  const auto found = line.messages.find(index);
  const Message& message = found->second;
  if (!message.is_posted || message.came.empty()) return;
  const bool fits = message.arrived ? message.total <= message.expected : message.total == message.expected;
  if (fits && message.parts < message.came.size()) return;
  if (fits && message.arrived) *message.arrived = static_cast<std::size_t>(message.total);
  if (fits) {
    completed_.push_back(message.token);
  } else {
    mismatches_.push_back({static_cast<std::size_t>(message.total), message.expected});
  }
  --under_way_;
  line.messages.erase(found);
  line.ended.insert(index);
  while (!line.ended.empty() && *line.ended.begin() == line.ended_below) {
    line.ended.erase(line.ended.begin());
    ++line.ended_below;
  }
}

void Inbox::say_posted(int tag, std::uint64_t index, Message& message) {
  if (std::exchange(message.is_answered, true)) return;
  Head head;
  head.kind = Kind::posted;
  head.tag = tag;
  head.index = index;
  posted_.push_back(head);
}

void Inbox::count_early(Message& message, std::size_t nbytes) {
  if (message.is_posted) return;
  if (early_ + nbytes > kMostEarly) throw FrameError("too many bytes before their receives");
  early_ += nbytes;
  message.counted += nbytes;
}

void Inbox::clear() {
  lines_.clear();
  early_ = under_way_ = 0;
  posted_.clear();
}

}  // namespace qccl::wan
