// What a call costs in the host engine's loop without statistics, with them, and with its record made twice: see
// recording.py, which compiles this. The calls are those of one rank, with one operation that does nothing. Between two
// calls other memory is read, as a program does, so that records and totals must come from a cache further away.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../kernels/engine/loop.h"
#include "../kernels/host/choose_isa.h"

namespace qccl {

// kernels/host/operations.cpp needs it for codecs, of which there are none here.
const Isa& choose_isa() { std::abort(); }

namespace {

// Calls of a block, which takes about a millisecond; the blocks of the kinds take turns.
constexpr int kCalls = 200;
// Bytes that are read between two calls, and the bytes of a cache line: more than the processor's nearest cache has.
constexpr std::size_t kOther = 128 << 10, kLine = 64;

struct NoWire final : Wire {
  void send(int, int, const void*, std::size_t, Token) override {}
  void receive(int, int, void*, std::size_t, Token, std::size_t*) override {}
  void poll(std::uint64_t, std::vector<Token>&) override {}
};

struct Nothing final : Operation {
  void run() override {}
  std::unique_ptr<Operation> copy() const override { return std::make_unique<Nothing>(); }
  std::size_t nbytes() const override { return sizeof *this; }
};

std::shared_ptr<Run> make_run(const std::shared_ptr<Tally>& tally) {
  const auto steps = std::make_shared<Steps>(0, 1, 0, std::vector<int>{});
  steps->add_operation(Nothing{}, {}, true);
  steps->link();
  auto run = std::make_shared<Run>(steps, std::make_shared<Memory>(0));
  run->set_headers({std::string(kAgreedNbytes, ' ')});
  if (tally) run->count_in(tally, {64, 256, 64});
  return run;
}

class Calls {
 public:
  // The seconds of a block of calls.
  double block(const std::shared_ptr<Run>& run, bool records_again) {
    const double begin = seconds();
    for (int i = 0; i < kCalls; ++i) {
      read_other();
      if (records_again) again_.begin(*run, begin);
      loop_.begin(run, sequence_++, 60, false, true, refuse_);
      Turn turn;
      turn.attended = true;
      if (!loop_.has_ended()) loop_.advance(turn, refuse_);
      if (records_again) again_.end(run->sequence(), begin);
      loop_.take_ended();
    }
    return seconds() - begin;
  }

 private:
  // Not inlined: two copies of the loop may differ in speed by more than what is measured.
  __attribute__((noinline)) void read_other() {
    unsigned sum = 0;
    for (std::size_t at = 0; at < kOther; at += kLine) sum += other_[at];
    read_ = sum;
  }

  const OnControl refuse_ = [](int, std::string_view) { std::abort(); };
  Loop loop_{std::make_shared<NoWire>(), 0, 1, 0, "call"};
  Recorder again_;
  std::uint64_t sequence_ = 0;
  std::vector<unsigned char> other_ = std::vector<unsigned char>(kOther);
  volatile unsigned read_ = 0;
};

// Prints the median of the blocks in nanoseconds a call.
void print(const char* what, std::vector<double> blocks) {
  std::sort(blocks.begin(), blocks.end());
  std::printf("%s %.3f\n", what, blocks[blocks.size() / 2] / kCalls * 1e9);
}

}  // namespace

}  // namespace qccl

int main(int count, char** given) {
  using namespace qccl;
  const int blocks = count == 2 ? std::atoi(given[1]) : 0;
  if (blocks < 10) {
    std::fprintf(stderr, "usage: recording BLOCKS, at least 10\n");
    return 2;
  }
  Calls calls;
  const auto plain = make_run(nullptr), counted = make_run(std::make_shared<Tally>());
  std::vector<double> all, records, statistics;
  for (int i = -10; i < blocks; ++i) {  // the first ones are for the caches
    const double without = calls.block(plain, false), twice = calls.block(plain, true);
    const double totals = calls.block(counted, false);
    if (i < 0) continue;
    all.push_back(without);
    records.push_back(twice - without);
    statistics.push_back(totals - without);
  }
  print("call", std::move(all));
  print("records", std::move(records));
  print("statistics", std::move(statistics));
}
