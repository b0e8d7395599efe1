// Frames between sites (kernels/engine/wan_frames.h) that an input describes in a few bytes, so that most are nearly right.
#pragma once

#include <vector>

#include "../../kernels/engine/wan_frames.h"
#include "target.h"

namespace fuzz {

// Bytes of a message. Few are of several parts: those take long.
inline std::size_t size(Input& input) {
  const unsigned kind = input.byte();
  return kind < 240 ? kind : qccl::wan::kPartNbytes * (kind % 5) + input.byte();
}

inline std::vector<unsigned char> frame_bytes(const qccl::wan::Head& head, const std::vector<unsigned char>& data) {
  std::vector<unsigned char> found(sizeof head + data.size());
  std::memcpy(found.data(), &head, sizeof head);
  if (!data.empty()) std::memcpy(found.data() + sizeof head, data.data(), data.size());
  return found;
}

// Of messages and about them.
inline std::vector<unsigned char> frame(Input& input, qccl::wan::Kind kind) {
  using namespace qccl::wan;
  Head head;
  head.kind = kind;
  head.tag = static_cast<int>(input.byte() % 4);
  const unsigned form = input.byte();
  head.index = form & 1 ? input.take<std::uint64_t>() : input.byte() % 8;
  head.total = form & 2 ? input.take<std::uint64_t>() : size(input);
  head.offset = form & 4 ? input.take<std::uint64_t>() : kPartNbytes * (input.byte() % 4);
  const std::uint64_t rest = head.total >= head.offset ? head.total - head.offset : 0;
  head.nbytes = form & 8 ? input.take<std::uint32_t>() : static_cast<std::uint32_t>(std::min<std::uint64_t>(kPartNbytes, rest));
  if (kind != Kind::data && !(form & 8)) head.nbytes = 0;
  const std::size_t nbytes = std::min<std::size_t>(head.nbytes, kPartNbytes + 1);
  return frame_bytes(head, std::vector<unsigned char>(nbytes, static_cast<unsigned char>(form)));
}

// As they are in the input.
inline std::vector<unsigned char> plain_bytes(Input& input) {
  std::vector<unsigned char> found(std::min<std::size_t>(input.take<std::uint16_t>(), input.left()));
  input.take(found.data(), found.size());
  return found;
}

}  // namespace fuzz
