// The memory that kernels see: allocations in global memory, the shared memory of a block, and the kernel's parameters.
// Each access is checked for its alignment and its bounds, and against accesses of other threads with no barrier between.
//
// For each byte there is a record of its last write and of the reads since. An access conflicts with an earlier one of
// another thread if one of them writes, not both are atomic, and none of these orders them:
//   bar.sync       orders all threads of a block: Block::barriers counts them;
//   bar.warp.sync  orders the lanes that take part: Warp::known is a vector clock;
//   the end of a kernel orders everything.
// Shuffles order no memory. Two writes of the same value do not conflict: the kernels set flags so. Nor does a write to global
// memory with an earlier read by a lane of the same warp: lanes without a unit read the last unit, and store nothing.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "arithmetic.h"

namespace ptx {

constexpr unsigned kMostThreads = 256, kMostWarps = kMostThreads / kLanes;

// Generic addresses of shared memory and of parameters; the host's own have 47 bits. Shared memory does not begin at 0, so
// that a null pointer is outside.
constexpr u64 kSharedWindow = 0x7f00ull << 48, kParameterWindow = 0x7e00ull << 48;
constexpr u64 kSharedBegin = 256;

// What a kernel does wrong.
struct Fault {
  std::string what;
};

template <class... Values>
Fault fault(const char* format, Values... values) {
  char text[300];
  std::snprintf(text, sizeof text, format, values...);
  return {text};
}

enum class Space : u32 { generic, global, shared, parameters };
enum class Kind { read, constant_read, write, atomic };

// The order of a warp's accesses: lane l's next access comes after those of lane m until generation known[l][m].
struct Clock {
  u32 generation = 1;
  u32 known[kLanes][kLanes] = {};

  void synchronise(u32 lanes) {
    u32 all[kLanes] = {};
    for (unsigned l = 0; l < kLanes; ++l) {
      if (!(lanes >> l & 1)) continue;
      for (unsigned m = 0; m < kLanes; ++m) all[m] = std::max(all[m], known[l][m]);
      all[l] = generation;
    }
    for (unsigned l = 0; l < kLanes; ++l) {
      if (lanes >> l & 1) std::memcpy(known[l], all, sizeof all);
    }
    ++generation;
  }
};

// Who accesses memory. `barriers` counts the block's barriers so far.
struct Thread {
  u32 block, number, barriers;
  const Clock* clock;
  unsigned warp() const { return number / kLanes; }
  unsigned lane() const { return number % kLanes; }
};

// The record of a byte.
struct Byte {
  u32 age = 0;       // the kernel, or for shared memory the block, of the accesses below
  u8 undefined = 0;  // bits that were never set
  bool written, atomic, read, many_blocks;
  u8 reading_warps;  // since the barrier number `read_barriers`
  u16 writer;
  u32 write_block, write_generation, write_barriers;
  u32 read_block, read_barriers;
  u32 lanes[kMostWarps], read_generations[kMostWarps];

  void renew(u32 now) {
    if (age == now) return;
    age = now;
    written = atomic = read = many_blocks = false;
    reading_warps = 0;
    read_barriers = 0;
  }
};

class Record {
 public:
  static void access(Byte& byte, const Thread& me, Kind kind, bool same_value, bool shared) {
    if (byte.written && !(byte.atomic && kind == Kind::atomic)) {
      if (kind == Kind::constant_read) throw fault("a read of constant memory (ld.global.nc) of what the kernel writes");
      if (!(kind == Kind::write && same_value && !byte.atomic) && !after_write(byte, me)) {
        throw fault("race: %s what thread %u of block %u wrote, with no barrier between",
                    kind == Kind::write ? "overwrites" : "reads", byte.writer, byte.write_block);
      }
    }
    if (kind == Kind::read || kind == Kind::constant_read) {
      note_read(byte, me);
      return;
    }
    if (byte.read && !(kind == Kind::write && same_value)) check_reads(byte, me, shared);
    byte.written = true;
    byte.atomic = kind == Kind::atomic;
    byte.writer = (u16)me.number;
    byte.write_block = me.block;
    byte.write_generation = me.clock->generation;
    byte.write_barriers = me.barriers;
  }

 private:
  static bool after_write(const Byte& byte, const Thread& me) {
    if (byte.write_block != me.block) return false;
    if (byte.writer == me.number || byte.write_barriers < me.barriers) return true;
    return byte.writer / kLanes == me.warp() && byte.write_generation <= me.clock->known[me.lane()][byte.writer % kLanes];
  }

  static void note_read(Byte& byte, const Thread& me) {
    if (byte.read && byte.read_block != me.block) byte.many_blocks = true;
    if (!byte.read || byte.read_block != me.block || byte.read_barriers != me.barriers) byte.reading_warps = 0;
    byte.read = true;
    byte.read_block = me.block;
    byte.read_barriers = me.barriers;
    const unsigned warp = me.warp();
    if (!(byte.reading_warps >> warp & 1) || byte.read_generations[warp] != me.clock->generation) byte.lanes[warp] = 0;
    byte.reading_warps |= (u8)(1u << warp);
    byte.read_generations[warp] = me.clock->generation;
    byte.lanes[warp] |= 1u << me.lane();
  }

  static void check_reads(const Byte& byte, const Thread& me, bool shared) {
    const char* message = "race: writes what thread %u of block %u reads, with no barrier between";
    if (byte.many_blocks || byte.read_block != me.block) throw fault(message, 0u, byte.read_block);
    if (byte.read_barriers < me.barriers) return;
    for (unsigned warp = 0; warp < kMostWarps; ++warp) {
      if (!(byte.reading_warps >> warp & 1)) continue;
      for (unsigned lane = 0; lane < kLanes; ++lane) {
        if (!(byte.lanes[warp] >> lane & 1) || (warp == me.warp() && lane == me.lane())) continue;
        if (warp == me.warp() && !shared) continue;
        if (warp == me.warp() && byte.read_generations[warp] <= me.clock->known[me.lane()][lane]) continue;
        throw fault(message, warp * kLanes + lane, byte.read_block);
      }
    }
  }
};

// Memory from `begin` on. Layout known to tests/engine/cuda/ptx_emulator.py.
struct Extent {
  u64 begin, nbytes;
  u32 writable, defined;  // whether kernels may write it, and whether it has content
};

struct Area {
  u64 begin, end;
  bool writable, defined;
  std::vector<Byte> bytes;
};

class Memory {
 public:
  Memory(const Extent* extents, unsigned count) {
    for (unsigned i = 0; i < count; ++i) {
      const Extent& extent = extents[i];
      areas_.push_back({extent.begin, extent.begin + extent.nbytes, extent.writable != 0, extent.defined != 0,
                        std::vector<Byte>(extent.nbytes)});
      if (!extent.defined) {
        for (Byte& byte : areas_.back().bytes) byte.undefined = 0xff;
      }
    }
    std::sort(areas_.begin(), areas_.end(), [](const Area& a, const Area& b) { return a.begin < b.begin; });
  }

  void begin_kernel(unsigned shared_nbytes, const u8* parameters, u64 parameter_nbytes) {
    ++kernels_;
    shared_.assign(shared_nbytes, 0);
    shared_bytes_.assign(shared_nbytes, {});
    parameters_ = parameters;
    parameter_nbytes_ = parameter_nbytes;
  }

  // Gives the block's shared memory random content, none of it defined.
  void begin_block(u64 seed) {
    ++blocks_;
    for (std::size_t i = 0; i < shared_.size(); ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      shared_[i] = (u8)(seed >> 56);
      shared_bytes_[i].undefined = 0xff;
    }
  }

  // Where a value of `nbytes`, at most 16, lies. `value` is what a write will store.
  struct Found {
    u8* at;
    Byte* bytes;  // null for parameters
    bool defined;  // whether undefined bits may not be stored there: an array with content, not scratch or shared memory
  };
  Found find(Space space, u64 address, u32 nbytes, Kind kind, const Thread& me, const u8* value) {
    if (address % nbytes) throw fault("misaligned: %u bytes at address %#llx", nbytes, (unsigned long long)address);
    if (space == Space::generic) {
      const u64 window = address >> 48 << 48;
      space = window == kSharedWindow ? Space::shared : window == kParameterWindow ? Space::parameters : Space::global;
      if (space == Space::shared) address -= kSharedWindow;
    }
    if (space == Space::parameters) return {parameter(address, nbytes, kind), nullptr, false};
    const Found found = space == Space::shared ? in_shared(address, nbytes) : in_areas(address, nbytes, kind);
    const u32 now = space == Space::shared ? blocks_ : kernels_;
    for (u32 i = 0; i < nbytes; ++i) {
      found.bytes[i].renew(now);
      Record::access(found.bytes[i], me, kind, value && value[i] == found.at[i], space == Space::shared);
    }
    return found;
  }

 private:
  u8* parameter(u64 address, u32 nbytes, Kind kind) {
    const u64 offset = address - kParameterWindow;
    if (kind != Kind::read) throw fault("writes to the kernel's parameters");
    if (offset > parameter_nbytes_ || parameter_nbytes_ - offset < nbytes) {
      throw fault("outside: %u bytes at byte %llu of the parameters, which have %llu", nbytes, (unsigned long long)offset,
                  (unsigned long long)parameter_nbytes_);
    }
    return const_cast<u8*>(parameters_) + offset;
  }

  Found in_shared(u64 address, u32 nbytes) {
    if (address < kSharedBegin || address - kSharedBegin + nbytes > shared_.size()) {
      throw fault("outside: %u bytes at byte %lld of shared memory, which has %zu", nbytes,
                  (long long)(address - kSharedBegin), shared_.size());
    }
    const u64 offset = address - kSharedBegin;
    return {&shared_[offset], &shared_bytes_[offset], false};
  }

  Found in_areas(u64 address, u32 nbytes, Kind kind) {
    if (!last_ || address < last_->begin || address >= last_->end) {
      const auto after = std::upper_bound(areas_.begin(), areas_.end(), address,
                                          [](u64 at, const Area& area) { return at < area.begin; });
      last_ = after == areas_.begin() ? nullptr : &*(after - 1);
    }
    if (!last_ || address >= last_->end || last_->end - address < nbytes) {
      throw fault("outside: %u bytes at address %#llx, %lld bytes behind the beginning of an array of %lld", nbytes,
                  (unsigned long long)address, last_ ? (long long)(address - last_->begin) : 0,
                  last_ ? (long long)(last_->end - last_->begin) : 0);
    }
    if (!last_->writable && (kind == Kind::write || kind == Kind::atomic)) {
      throw fault("writes to an array that kernels only read");
    }
    return {reinterpret_cast<u8*>(address), &last_->bytes[address - last_->begin], last_->defined};
  }

  std::vector<Area> areas_;
  Area* last_ = nullptr;
  std::vector<u8> shared_;
  std::vector<Byte> shared_bytes_;
  const u8* parameters_ = nullptr;
  u64 parameter_nbytes_ = 0;
  u32 kernels_ = 0, blocks_ = 0;
};

}  // namespace ptx
