// The CUDA features that the kernels use, for g++. The threads of a block are fibers of one host thread, which yield at
// barriers and at warp-wide operations. They resume in random order, and shared memory begins with random bytes, so that a
// missing barrier gives wrong results. If threads wait for others that never arrive, the launch fails.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("shared_memory")))

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx;

namespace emulator {

constexpr unsigned kThreads = 256, kStack = 1 << 16;

enum class State { ready, in_warp, in_block, done };

struct Fiber {
  jmp_buf context;  // where it goes on; _setjmp and _longjmp switch without a system call, unlike swapcontext()
  bool started;
  State state;
  unsigned exchanges;  // warp-wide exchanges that this lane has taken part in
  alignas(16) char stack[kStack];
};

static Fiber fibers[kThreads];
static jmp_buf scheduler;
static std::uint32_t shown[2][kThreads];  // two buffers, because a lane may be one exchange ahead of another
static std::uint64_t random_state;
static void (*body)();

// Knuth's MMIX generator: <random> takes most of the compiler's time for a few kernels.
static unsigned random_number() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (unsigned)(random_state >> 33);
}

static void wait(State state) {
  Fiber& fiber = fibers[threadIdx.x];
  fiber.state = state;
  if (!_setjmp(fiber.context)) _longjmp(scheduler, 1);
}

static std::uint32_t exchange(std::uint32_t value, unsigned lane) {
  const unsigned turn = fibers[threadIdx.x].exchanges++ % 2;
  shown[turn][threadIdx.x] = value;
  wait(State::in_warp);
  return shown[turn][threadIdx.x / 32 * 32 + lane];
}

// A fiber runs its thread of one block after the other.
static void run_fiber() {
  for (;;) {
    body();
    wait(State::done);
  }
}

// Returns at the fiber's next wait().
static void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.context, 1);
  fiber.started = true;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = fiber.stack;
  start.uc_stack.ss_size = kStack;
  makecontext(&start, run_fiber, 0);
  setcontext(&start);
}

// Resumes fibers whose barrier or exchange is complete; false if there are none.
static bool release(unsigned begin, unsigned end, State waiting) {
  for (unsigned i = begin; i < end; ++i) {
    if (fibers[i].state != waiting) return false;
  }
  for (unsigned i = begin; i < end; ++i) fibers[i].state = State::ready;
  return true;
}

static bool run_block() {
  for (Fiber& fiber : fibers) {
    fiber.state = State::ready;
    fiber.exchanges = 0;
  }
  for (;;) {
    const unsigned start = random_number() % kThreads, step = random_number() % kThreads | 1;
    for (unsigned i = 0; i < kThreads; ++i) {
      const unsigned thread = (start + i * step) % kThreads;
      if (fibers[thread].state != State::ready) continue;
      threadIdx = {thread, 0, 0};
      resume(fibers[thread]);
    }
    bool progress = release(0, kThreads, State::in_block), over = true;
    for (unsigned warp = 0; warp < kThreads / 32; ++warp) {
      progress |= release(32 * warp, 32 * warp + 32, State::in_warp);
    }
    for (const Fiber& fiber : fibers) over &= fiber.state == State::done;
    if (over) return true;
    if (!progress) {
      for (Fiber& fiber : fibers) fiber.started = false;  // they are left where they wait
      return false;
    }
  }
}

extern "C" char __start_shared_memory, __stop_shared_memory;

// Runs `kernel` for all blocks; false on a deadlock.
template <class Kernel>
bool run_grid(unsigned blocks, unsigned seed, Kernel kernel) {
  static Kernel* current;
  current = &kernel;
  body = [] { (*current)(); };
  random_state = seed;
  for (unsigned block = 0; block < blocks; ++block) {
    for (char* at = &__start_shared_memory; at < &__stop_shared_memory; ++at) *at = (char)random_number();
    blockIdx = {block, 0, 0};
    if (!run_block()) return false;
  }
  return true;
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait(emulator::State::in_block); }
inline void __threadfence_system() {}
inline void __syncwarp(unsigned = 0) { emulator::wait(emulator::State::in_warp); }

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return __builtin_bit_cast(T, emulator::exchange(__builtin_bit_cast(std::uint32_t, value), (unsigned)lane % 32));
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return __shfl_sync(0, value, (int)(threadIdx.x % 32) ^ mask);
}

inline unsigned atomicMax(unsigned* address, unsigned value) {
  const unsigned before = *address;
  if (value > before) *address = value;
  return before;
}

inline unsigned long long atomicMin(unsigned long long* address, unsigned long long value) {
  const unsigned long long before = *address;
  if (value < before) *address = value;
  return before;
}

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address += value;
  return before;
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = low | (std::uint64_t)high << 32;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)((low | (std::uint64_t)high << 32) >> shift % 32);
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((low | (std::uint64_t)high << 32) << shift % 32) >> 32);
}
