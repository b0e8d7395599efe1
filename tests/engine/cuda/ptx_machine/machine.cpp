// Executes kernels that tests/engine/cuda/ptx_program.py has read from PTX: block after block, the lanes of a warp together
// where they are at the same instruction. A warp runs until its lanes wait for others; the warps' order is random.
//
// It reports what memory.h checks, bits that were never set in an address, a mask or what is stored in an array with content,
// a guard that was never set, and threads that wait for ever, at different barriers, or for lanes that take no part.
//
// A guard may have been computed from undefined bits: kernels test values behind the end of a unit for NaN, too, and both ways
// give the same results. Then the bits, which are random, decide.
#include "memory.h"
#include "operations.h"

namespace ptx {
namespace {

// The first entries of the table of names; what follows is operations.h's.
enum Control : u32 { kBranch, kExit, kTrap, kBarrier, kWarpBarrier, kShuffle, kReduce, kLoad, kStore, kAtomic, kControls };
constexpr std::string_view kControlNames[kControls] = {"bra",  "exit",  "trap", "bar.sync", "bar.warp.sync", "shfl",
                                                       "redux", "ld",     "st",       "atom"};

enum class Shuffle : u32 { up, down, butterfly, index };
enum class Reduction : u32 { add, min, max, bit_and, bit_or, bit_xor, exchange, compare_and_swap };

// Layout and values known to ptx_program.py. Registers are numbers; those behind the last are the constants.
struct Instruction {
  u32 operation, line;
  s32 guard;    // the predicate without which a lane skips the instruction; -1: none
  u32 negated;  // the guard
  s32 to[4], from[4];
  s32 address;
  Space space;
  s64 offset;  // bytes; of a branch, the number of the instruction
  u32 nbytes, count;
  u32 mode;  // Shuffle or Reduction; of a load, the bytes of its registers
  u32 flags;
};
constexpr u32 kSigned = 1, kConstant = 2;
constexpr unsigned kMask = 3;  // the source that has the mask of lanes

// The first registers, which are set when a block begins.
enum Special { kThread, kBlock, kThreads, kBlocks, kLane, kSpecials };

struct Kernel {
  const Instruction* code;
  const u64* constants;
  u32 registers, constant_count, shared_nbytes, parameter_nbytes;
};

// Lanes at the same instruction.
struct Group {
  u32 at, lanes;
};

struct Warp {
  unsigned number;
  Clock clock;
  std::vector<u64> values, undefined;
  std::vector<u32> dirty, fresh;   // of each register: lanes with undefined bits, and lanes that never set it
  std::vector<Group> ready, blocked;
  Group waiting;  // at a barrier of the block
  u32 all, exited;

  void begin(unsigned lanes, u32 registers) {
    clock = {};
    all = exited = 0;
    all = lanes == kLanes ? ~0u : (1u << lanes) - 1;
    values.resize(registers * kLanes), undefined.resize(registers * kLanes);
    dirty.assign(registers, ~0u), fresh.assign(registers, ~0u);
    ready.assign(1, {0, all});
    blocked.clear();
    waiting = {0, 0};
  }

  u64 undefined_bits(s32 reg, unsigned lane) const {
    if (reg < 0 || (u32)reg >= dirty.size() || !(dirty[(u32)reg] >> lane & 1)) return 0;
    return fresh[(u32)reg] >> lane & 1 ? ~0ull : undefined[(u32)reg * kLanes + lane];
  }
  u32 undefined_lanes(s32 reg) const { return reg < 0 || (u32)reg >= dirty.size() ? 0 : dirty[(u32)reg]; }

  void set_defined(s32 reg, u32 lanes) { dirty[(u32)reg] &= ~lanes, fresh[(u32)reg] &= ~lanes; }
  void set_undefined(s32 reg, unsigned lane, u64 bits) {
    if (!bits) return;
    dirty[(u32)reg] |= 1u << lane;
    undefined[(u32)reg * kLanes + lane] = bits;
  }

  // The ready lanes at the first of their instructions.
  Group take_first() {
    Group first = ready[0];
    for (const Group& group : ready) first = group.at < first.at ? group : first;
    first.lanes = 0;
    std::erase_if(ready, [&](const Group& group) {
      if (group.at == first.at) first.lanes |= group.lanes;
      return group.at == first.at;
    });
    return first;
  }
};

template <class Body>
void each_lane(u32 lanes, const Body& body) {
  for (; lanes; lanes &= lanes - 1) body((unsigned)std::countr_zero(lanes));
}

template <class T>
T combined(Reduction how, T a, T b) {
  switch (how) {
    case Reduction::add: return (T)(a + b);
    case Reduction::min: return a < b ? a : b;
    case Reduction::max: return a > b ? a : b;
    case Reduction::bit_and: return a & b;
    case Reduction::bit_or: return a | b;
    case Reduction::bit_xor: return a ^ b;
    default: return b;
  }
}

u64 combined(Reduction how, u64 a, u64 b, u32 nbytes, bool is_signed) {
  if (nbytes == 4) {
    return is_signed ? (u32)combined(how, (s32)(u32)a, (s32)(u32)b) : combined(how, (u32)a, (u32)b);
  }
  return is_signed ? (u64)combined(how, (s64)a, (s64)b) : combined(how, a, b);
}

class Machine {
 public:
  Machine(const Kernel& kernel, Memory& memory, u32 blocks, u32 threads, u64 seed, u64 most)
      : kernel_(kernel), memory_(memory), operations_(operations()), threads_(threads), blocks_(blocks), seed_(seed), left_(most) {
    for (u32 i = 0; i < kernel.constant_count; ++i) constants_.insert(constants_.end(), kLanes, kernel.constants[i]);
  }

  void run() {
    if (threads_ > kMostThreads) throw fault("%u threads in a block; at most %u are supported", threads_, kMostThreads);
    for (block_ = 0; block_ < blocks_; ++block_) run_block();
  }

  // Where it is, for a message.
  std::string place() const {
    return fault("line %u, thread %u of block %u", at_ ? at_->line : 0, thread_, block_).what;
  }
  u32 line() const { return at_ ? at_->line : 0; }

 private:
  unsigned random() {
    seed_ = seed_ * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(seed_ >> 33);
  }

  void run_block() {
    barriers_ = 0;
    memory_.begin_block(random());
    warps_.resize((threads_ + kLanes - 1) / kLanes);
    for (unsigned i = 0; i < warps_.size(); ++i) begin_warp(warps_[i], i);
    for (;;) {
      const unsigned first = random();
      for (unsigned i = 0; i < warps_.size(); ++i) run_warp(warps_[(first + i) % warps_.size()]);
      if (std::all_of(warps_.begin(), warps_.end(), [](const Warp& warp) { return warp.exited == warp.all; })) return;
      release_barrier();
    }
  }

  void begin_warp(Warp& warp, unsigned number) {
    warp.number = number;
    warp.begin(std::min(kLanes, threads_ - number * kLanes), kernel_.registers);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      const u64 values[kSpecials] = {number * kLanes + lane, block_, threads_, blocks_, lane};
      for (unsigned i = 0; i < kSpecials; ++i) warp.values[i * kLanes + lane] = values[i];
    }
    for (unsigned i = 0; i < kSpecials; ++i) warp.set_defined((s32)i, ~0u);
  }

  void release_barrier() {
    const Warp* arrived = nullptr;
    for (const Warp& warp : warps_) {
      if ((warp.waiting.lanes | warp.exited) != warp.all) {
        if (!warp.blocked.empty()) at_ = &kernel_.code[warp.blocked[0].at];
        thread_ = warp.number * kLanes;
        throw fault("waits for ever: lanes %#x of warp %u wait for others of the warp", warp.all & ~warp.waiting.lanes & ~warp.exited,
                    warp.number);
      }
      if (!warp.waiting.lanes) continue;
      if (arrived && arrived->waiting.at != warp.waiting.at) {
        throw fault("threads wait at different barriers: warp %u at line %u, warp %u at line %u", arrived->number,
                    kernel_.code[arrived->waiting.at].line, warp.number, kernel_.code[warp.waiting.at].line);
      }
      arrived = &warp;
    }
    ++barriers_;
    for (Warp& warp : warps_) {
      if (warp.waiting.lanes) warp.ready.push_back({warp.waiting.at + 1, warp.waiting.lanes});
      warp.waiting.lanes = 0;
    }
  }

  void run_warp(Warp& warp) {
    Group now = {0, 0};
    for (;;) {
      if (!warp.ready.empty()) {
        if (now.lanes) warp.ready.push_back(now);
        now = warp.take_first();
      }
      if (!now.lanes) return;
      if (left_-- == 0) throw fault("does not end: the limit of instructions is reached");
      at_ = &kernel_.code[now.at];
      thread_ = warp.number * kLanes + (unsigned)std::countr_zero(now.lanes);
      const u32 active = guarded(warp, *at_, now.lanes);
      if (at_->operation >= kLoad) {
        if (active) execute(warp, *at_, active);
        ++now.at;
      } else if (active) {
        control(warp, *at_, active, now);
      } else {
        ++now.at;
      }
    }
  }

  u32 guarded(const Warp& warp, const Instruction& in, u32 lanes) {
    if (in.guard < 0) return lanes;
    if (warp.fresh[(u32)in.guard] & lanes) throw fault("uninitialised: the guard was never set");
    u32 active = 0;
    each_lane(lanes, [&](unsigned lane) { active |= (u32)((value(warp, in.guard, lane) != 0) != (in.negated != 0)) << lane; });
    return active;
  }

  void control(Warp& warp, const Instruction& in, u32 active, Group& now) {
    const u32 rest = now.lanes & ~active, next = now.at + 1;
    switch (in.operation) {
      case kBranch:
        if (rest) warp.ready.push_back({next, rest});
        now = {(u32)in.offset, active};
        return;
      case kExit:
        warp.exited |= active;
        for (const Group& group : warp.blocked) warp.ready.push_back(group);  // they may have waited for these lanes only
        warp.blocked.clear();
        now = {next, rest};
        return;
      case kTrap:
        throw fault("trap");
      case kBarrier:
        if (warp.waiting.lanes && warp.waiting.at != now.at) throw fault("threads wait at different barriers within a warp");
        warp.waiting = {now.at, warp.waiting.lanes | active};
        now = {next, rest};
        return;
      default: {
        if (rest) warp.ready.push_back({next, rest});
        const u32 together = arrive(warp, in, now.at, active);
        if (together) exchange(warp, in, together);
        now = {next, together};
      }
    }
  }

  // The lanes that do a warp-wide instruction now: all of its mask; 0 if some have not come yet.
  u32 arrive(Warp& warp, const Instruction& in, u32 at, u32 lanes) {
    std::erase_if(warp.blocked, [&](const Group& group) {
      if (group.at == at) lanes |= group.lanes;
      return group.at == at;
    });
    if (warp.undefined_lanes(in.from[kMask]) & lanes) throw fault("uninitialised: the mask has bits that were never set");
    const u32 mask = (u32)value(warp, in.from[kMask], (unsigned)std::countr_zero(lanes)) & warp.all;
    each_lane(lanes, [&](unsigned lane) {
      if (((u32)value(warp, in.from[kMask], lane) & warp.all) != mask) throw fault("mask: lanes together have different masks");
    });
    if (lanes & ~mask) throw fault("mask: lanes %#x take part, and are not in the mask %#x", lanes & ~mask, mask);
    const bool is_barrier = in.operation == kWarpBarrier;
    if (!is_barrier && mask & warp.exited) throw fault("mask: lanes %#x have ended", mask & warp.exited);
    if (lanes == (is_barrier ? mask & ~warp.exited : mask)) return lanes;
    warp.blocked.push_back({at, lanes});
    return 0;
  }

  void exchange(Warp& warp, const Instruction& in, u32 lanes) {
    switch (in.operation) {
      case kWarpBarrier:
        warp.clock.synchronise(lanes);
        return;
      case kShuffle:
        return shuffle(warp, in, lanes);
      default:
        return reduce(warp, in, lanes);
    }
  }

  // The lane whose value shfl.sync gives to `lane`, or -1 if it is outside its segment (section 9.7.9.6 of the PTX ISA).
  static s32 source_lane(Shuffle mode, unsigned lane, u32 b, u32 c) {
    b &= 31;
    const u32 segment = c >> 8 & 31, most = (lane & segment) | (c & 31 & ~segment), least = lane & segment;
    s32 source = (s32)(least | (b & ~segment));
    if (mode == Shuffle::up) return (source = (s32)lane - (s32)b) >= (s32)most ? source : -1;
    if (mode == Shuffle::down) source = (s32)(lane + b);
    if (mode == Shuffle::butterfly) source = (s32)(lane ^ b);
    return source <= (s32)most ? source : -1;
  }

  void shuffle(Warp& warp, const Instruction& in, u32 lanes) {
    u64 values[kLanes], undefined[kLanes];
    u32 valid = 0;
    each_lane(lanes, [&](unsigned lane) {
      if (warp.undefined_bits(in.from[2], lane)) throw fault("uninitialised: the segments depend on bits that were never set");
      const u32 b = (u32)value(warp, in.from[1], lane), c = (u32)value(warp, in.from[2], lane);
      const u32 unset = (u32)warp.undefined_bits(in.from[1], lane) & 31;
      const s32 source = source_lane((Shuffle)in.mode, lane, b, c);
      values[lane] = (u32)value(warp, in.from[0], source < 0 ? lane : (unsigned)source);
      undefined[lane] = 0;
      for (u32 bits = unset;; bits = (bits - 1) & unset) {  // each lane that the undefined bits may name
        const s32 other = source_lane((Shuffle)in.mode, lane, (b & ~unset) | bits, c);
        const unsigned from = other < 0 ? lane : (unsigned)other;
        undefined[lane] |= lanes >> from & 1 ? (u32)warp.undefined_bits(in.from[0], from) : 0xffffffffu;
        undefined[lane] |= values[lane] ^ (u32)value(warp, in.from[0], from);
        if (bits == 0) break;
      }
      valid |= (u32)(source >= 0) << lane;
    });
    put(warp, in.to[0], lanes, values, undefined);
    if (in.to[1] < 0) return;
    each_lane(lanes, [&](unsigned lane) { values[lane] = valid >> lane & 1, undefined[lane] = 0; });
    put(warp, in.to[1], lanes, values, undefined);
  }

  void reduce(Warp& warp, const Instruction& in, u32 lanes) {
    u64 total = value(warp, in.from[0], (unsigned)std::countr_zero(lanes)), undefined = 0;
    each_lane(lanes & (lanes - 1), [&](unsigned lane) {
      total = combined((Reduction)in.mode, total, value(warp, in.from[0], lane), 4, (in.flags & kSigned) != 0);
    });
    if (warp.undefined_lanes(in.from[0]) & lanes) undefined = 0xffffffffu;
    put_all(warp, in.to[0], lanes, total, undefined);
  }

  void put(Warp& warp, s32 reg, u32 lanes, const u64* values, const u64* undefined) {
    warp.set_defined(reg, lanes);
    each_lane(lanes, [&](unsigned lane) {
      warp.values[(u32)reg * kLanes + lane] = values[lane];
      warp.set_undefined(reg, lane, undefined[lane]);
    });
  }

  void put_all(Warp& warp, s32 reg, u32 lanes, u64 result, u64 undefined) {
    u64 values[kLanes], bits[kLanes];
    std::fill_n(values, kLanes, result), std::fill_n(bits, kLanes, undefined);
    put(warp, reg, lanes, values, bits);
  }

  void execute(Warp& warp, const Instruction& in, u32 active) {
    if (in.operation == kLoad) return each_lane(active, [&](unsigned lane) { load(warp, in, lane); });
    if (in.operation == kStore) return each_lane(active, [&](unsigned lane) { store(warp, in, lane); });
    if (in.operation == kAtomic) return each_lane(active, [&](unsigned lane) { atomic(warp, in, lane); });
    compute(warp, in, active);
  }

  void compute(Warp& warp, const Instruction& in, u32 active) {
    const Operation& operation = operations_[in.operation - kControls];
    const u64* from[kSources] = {};
    u32 dirty = 0;
    for (unsigned i = 0; i < operation.sources; ++i) {
      from[i] = lanes_of(warp, in.from[i]);
      dirty |= warp.undefined_lanes(in.from[i]) & active;
    }
    u64 undefined[kLanes];
    each_lane(dirty, [&](unsigned lane) {
      Sources values = {}, bits = {};
      for (unsigned i = 0; i < operation.sources; ++i) {
        values[i] = from[i][lane];
        bits[i] = warp.undefined_bits(in.from[i], lane);
      }
      undefined[lane] = undefined_result(operation, values, bits);
    });
    operation.lanes(&warp.values[(u32)in.to[0] * kLanes], from, active);
    warp.set_defined(in.to[0], active);
    each_lane(dirty, [&](unsigned lane) { warp.set_undefined(in.to[0], lane, undefined[lane]); });
  }

  Memory::Found find(const Warp& warp, const Instruction& in, unsigned lane, Kind kind, const u8* stored) {
    thread_ = warp.number * kLanes + lane;
    if (warp.undefined_bits(in.address, lane)) throw fault("uninitialised: the address depends on bits that were never set");
    const Thread me = {block_, thread_, barriers_, &warp.clock};
    return memory_.find(in.space, value(warp, in.address, lane) + (u64)in.offset, in.nbytes * in.count, kind, me, stored);
  }

  void load(Warp& warp, const Instruction& in, unsigned lane) {
    const Memory::Found found = find(warp, in, lane, in.flags & kConstant ? Kind::constant_read : Kind::read, nullptr);
    for (u32 i = 0; i < in.count; ++i) {
      u64 bits = 0, undefined = 0;
      std::memcpy(&bits, found.at + i * in.nbytes, in.nbytes);
      for (u32 j = 0; found.bytes && j < in.nbytes; ++j) undefined |= (u64)found.bytes[i * in.nbytes + j].undefined << 8 * j;
      if (in.flags & kSigned) {
        const u32 above = 64 - 8 * in.nbytes, unused = 64 - 8 * in.mode;
        bits = (u64)((s64)(bits << above) >> above) << unused >> unused;
        undefined = (u64)((s64)(undefined << above) >> above) << unused >> unused;
      }
      if (in.to[i] < 0) continue;
      warp.set_defined(in.to[i], 1u << lane);
      warp.values[(u32)in.to[i] * kLanes + lane] = bits;
      warp.set_undefined(in.to[i], lane, undefined);
    }
  }

  void store(Warp& warp, const Instruction& in, unsigned lane) {
    u8 bytes[16] = {}, undefined[16] = {};
    for (u32 i = 0; i < in.count; ++i) {
      const u64 bits = value(warp, in.from[i], lane), unset = warp.undefined_bits(in.from[i], lane);
      std::memcpy(bytes + i * in.nbytes, &bits, in.nbytes);
      std::memcpy(undefined + i * in.nbytes, &unset, in.nbytes);
    }
    const Memory::Found found = find(warp, in, lane, Kind::write, bytes);
    for (u32 i = 0; i < in.count * in.nbytes; ++i) {
      if (found.defined && undefined[i]) throw fault("uninitialised: stores bits that were never set in an array");
      found.at[i] = bytes[i];
      found.bytes[i].undefined = undefined[i];
    }
  }

  void atomic(Warp& warp, const Instruction& in, unsigned lane) {
    const Memory::Found found = find(warp, in, lane, Kind::atomic, nullptr);
    u64 before = 0, unset = warp.undefined_bits(in.from[0], lane) | warp.undefined_bits(in.from[1], lane);
    std::memcpy(&before, found.at, in.nbytes);
    for (u32 i = 0; i < in.nbytes; ++i) unset |= found.bytes[i].undefined;
    if (unset) throw fault("uninitialised: an atomic operation with bits that were never set");
    const u64 operand = value(warp, in.from[0], lane);
    u64 after;
    if ((Reduction)in.mode == Reduction::compare_and_swap) {
      after = before == operand ? value(warp, in.from[1], lane) : before;
    } else {
      after = combined((Reduction)in.mode, before, operand, in.nbytes, (in.flags & kSigned) != 0);
    }
    std::memcpy(found.at, &after, in.nbytes);
    if (in.to[0] < 0) return;
    warp.set_defined(in.to[0], 1u << lane);
    warp.values[(u32)in.to[0] * kLanes + lane] = before;
  }

  const u64* lanes_of(const Warp& warp, s32 reg) const {
    const u32 number = (u32)reg;
    return number < kernel_.registers ? &warp.values[number * kLanes] : &constants_[(number - kernel_.registers) * kLanes];
  }
  u64 value(const Warp& warp, s32 reg, unsigned lane) const { return lanes_of(warp, reg)[lane]; }

  const Kernel& kernel_;
  Memory& memory_;
  const std::vector<Operation> operations_;
  std::vector<u64> constants_;
  std::vector<Warp> warps_;
  u32 threads_, blocks_, block_ = 0, barriers_ = 0, thread_ = 0;
  u64 seed_, left_;
  const Instruction* at_ = nullptr;
};

}  // namespace
}  // namespace ptx

// The names of all operations in order, with a space behind each.
extern "C" const char* ptx_names() {
  static const std::string names = [] {
    std::string all;
    for (std::string_view name : ptx::kControlNames) all.append(name).append(" ");
    for (const ptx::Operation& operation : ptx::operations()) all.append(operation.name).append(" ");
    return all;
  }();
  return names.c_str();
}

// The memory of a launch, whose kernels run one after the other.
extern "C" ptx::Memory* ptx_memory(const ptx::Extent* extents, unsigned count) { return new ptx::Memory(extents, count); }
extern "C" void ptx_forget(ptx::Memory* memory) { delete memory; }

// Null, or what the kernel does wrong: the line of the PTX, and a text. `most` limits the instructions of all warps.
extern "C" const char* ptx_run(ptx::Memory* memory, const ptx::Kernel* kernel, const unsigned char* parameters,
                               unsigned blocks, unsigned threads, unsigned long long seed, unsigned long long most,
                               unsigned* line) {
  thread_local std::string message;
  memory->begin_kernel(kernel->shared_nbytes, parameters, kernel->parameter_nbytes);
  ptx::Machine machine(*kernel, *memory, blocks, threads, seed, most);
  try {
    machine.run();
    return nullptr;
  } catch (const ptx::Fault& found) {
    message = found.what + " (" + machine.place() + ")";
    *line = machine.line();
    return message.c_str();
  }
}
