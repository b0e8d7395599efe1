// The messages from another rank, put together from parts, which come in any order, perhaps twice.
#pragma once

#include <functional>
#include <utility>
#include <set>
#include <unordered_map>

#include "frames.h"
#include "../wire.h"

namespace qccl::wan {

// No sockets and no clock.
class Inbox {
 public:
  // A message of another size than its receive.
  struct Mismatch {
    std::size_t got, expected;
  };

  // `data` is written only within calls of this class, until one of them appends `token` to its vector.
  void receive(int tag, void* data, std::size_t nbytes, Token token, std::size_t* arrived);
  // A frame of Kind::data. Throws FrameError.
  void take(const Head& head, const unsigned char* data);
  // Frames of Kind::announce. Throws FrameError.
  void announced(int tag, std::uint64_t index);

  // Bytes of messages that came before their receives.
  std::size_t early() const { return early_; }
  std::vector<Token> take_completed() { return std::exchange(completed_, {}); }
  std::vector<Mismatch> take_mismatches() { return std::exchange(mismatches_, {}); }
  // Announced messages whose receives are there, as heads of Kind::posted.
  std::vector<Head> take_posted() { return std::exchange(posted_, {}); }
  // Receives under way.
  std::size_t under_way() const { return under_way_; }
  void clear();

 private:
  struct Message {
    bool is_posted = false, is_announced = false, is_answered = false;
    unsigned char* data = nullptr;
    std::size_t expected = 0;
    std::size_t* arrived = nullptr;
    Token token = 0;
    std::uint64_t total = 0;
    std::size_t parts = 0;    // number of parts that have come
    std::vector<bool> came;  // by part; empty until the first comes
    std::vector<std::pair<std::size_t, std::vector<unsigned char>>> kept;  // parts that came before the receive
    std::size_t counted = 0;  // its bytes that early() counts
  };
  // The messages of one tag.
  struct Line {
    std::uint64_t receives = 0;       // posted so far
    std::uint64_t ended_below = 0;    // messages that have ended
    std::set<std::uint64_t> ended;    // ended messages behind the first that has not
    std::unordered_map<std::uint64_t, Message> messages;
  };

  Message& at(Line& line, std::uint64_t index);
  static bool has_ended(const Line& line, std::uint64_t index);
  void put(Message& message, std::size_t offset, const unsigned char* data, std::size_t nbytes);
  void end_if_whole(Line& line, std::uint64_t index);
  void say_posted(int tag, std::uint64_t index, Message& message);
  void count_early(Message& message, std::size_t nbytes);

  std::unordered_map<int, Line> lines_;
  std::size_t early_ = 0, under_way_ = 0;
  std::vector<Token> completed_;
  std::vector<Mismatch> mismatches_;
  std::vector<Head> posted_;
};

}  // namespace qccl::wan
