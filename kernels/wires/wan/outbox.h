// The messages to another rank: chooses the frame that comes next, and the frames that must be sent again.
#pragma once

#include <unordered_map>

#include "frames.h"
#include "../wire.h"

namespace qccl::wan {

// Most copied bytes for one rank: until it has acknowledged them they may have to be sent again.
constexpr std::size_t kWindowNbytes = 16 << 20;
// Approximate bytes that are cut into frames and wait for a connection.
constexpr std::size_t kReadyNbytes = 1 << 20;
// Approximate bytes of messages that may come before their receives.
constexpr std::size_t kCreditNbytes = 32 << 20;

// No sockets and no clock. Messages are cut into parts, which any connection may carry. Short ones come first.
class Outbox {
 public:
  // `data` is read until `token` is in the vector of fill(), or clear().
  void send(int tag, const void* data, std::size_t nbytes, Token token);
  // Copies what there is room for, and appends the tokens of messages that are copied whole.
  void fill(std::vector<Token>& copied);
  // The next frame for a connection, or nothing.
  FramePointer next(int slot, bool takes_short, bool takes_long, double now);
  // A frame that another connection has carried since before `sent_before`, and that has perhaps not come; each frame once.
  FramePointer copy(int slot, double sent_before);
  // Adds a frame without data: an announcement, or the notice that a receive is there.
  void put(const Head& head);
  // The frames of a broken connection, which may have come or not.
  void again(Frames frames);
  // Frames that have come: their room is free again.
  void acknowledged(std::size_t nbytes) { held_ -= nbytes; }
  // What the other rank's acknowledgement `number` says about messages that came before their receives. Connections bring
  // acknowledgements in any order.
  void set_early(std::size_t nbytes, std::uint64_t number);
  void posted(int tag, std::uint64_t index);
  // Everything that was sent has been acknowledged.
  bool is_empty() const { return !held_ && pending_.empty(); }
  bool has_short() const { return !short_.empty(); }
  bool has_long() const { return !long_.empty(); }
  // Messages that are not copied whole.
  std::size_t under_way() const { return pending_.size(); }
  void clear();

 private:
  struct Message {
    int tag;
    std::uint64_t index;
    const unsigned char* data;
    std::size_t nbytes, offset;
    Token token;
    bool is_posted, is_announced;
  };

  bool may_send(Message& message);
  void cut(Message& message);

  std::unordered_map<int, std::uint64_t> indices_;  // by tag, of the next message
  std::deque<Message> pending_;                     // long ones that are not copied whole
  Frames short_, long_;  // frames to be sent
  // In the order in which they were sent; some have come. A slow connection's frame may stay for long: those behind it
  // must not keep their bytes.
  std::deque<std::weak_ptr<Frame>> sent_;
  std::size_t held_ = 0;   // bytes of frames that are not acknowledged
  std::size_t early_ = 0;
  std::uint64_t early_number_ = 0;  // number of the acknowledgement that said so
};

}  // namespace qccl::wan
